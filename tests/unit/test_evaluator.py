"""Evaluator: whole episodes, the weights of the moment of asking, errors where they are asked for."""

import threading

import pytest
import torch
from torch import nn

from reap.collectors import Evaluator
from reap.envs import GymEnv, SerialEnv
from reap.errors import UsageError, WorkerRaised, WorkerSilent, WrongState
from reap.testing import CountingEnv, no_leaks


class Constant(nn.Module):
    """The action is the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return self.weight.expand(*observation.shape[:-1], 1)


class Payer(CountingEnv):
    """Pays what it is given."""

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(action[0]), terminated, truncated, info


def payer(lengths=(4,)):
    return lambda: GymEnv(Payer(lengths))


@pytest.fixture
def policy():
    return Constant()


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_evaluate(policy, backend):
    with no_leaks(), Evaluator(payer(), policy, num_trajectories=3, frames_per_batch=5, backend=backend) as evaluator:
        for value in (1.0, 2.0):
            with torch.no_grad():
                policy.weight.fill_(value)
            found = evaluator.evaluate(step=7)
            assert found["eval/reward"] == 4 * value
            assert found["eval/num_episodes"] == 3
            assert found["eval/episode_length"] == 4
            assert (found["eval/reward_std"], found["eval/step"]) == (0, 7)
            assert found["eval/fps"] > 0


def test_given_weights_go_before_the_policys(policy):
    with Evaluator(payer(), policy, num_trajectories=1, frames_per_batch=5) as evaluator:
        other = Constant()
        with torch.no_grad():
            other.weight.fill_(3.0)
        for weights in (other, Evaluator.extract_weights(other), other.state_dict()):
            assert evaluator.evaluate(weights)["eval/reward"] == 12
        assert policy.weight.item() == 0


def test_functions_can_be_measured():
    with Evaluator(payer(), lambda observation: observation[..., :1] * 0 + 2, num_trajectories=2) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 8
        evaluator.trigger_eval()
        assert evaluator.wait(30)["eval/reward"] == 8


def test_every_lane_weighs_the_same(policy):
    """One lane ends after every step, the other after eight: a first-come count would see hardly any of the latter."""
    env = SerialEnv(2, [payer((1,)), payer((8,))])
    with torch.no_grad():
        policy.weight.fill_(1.0)
    with Evaluator(env, policy, num_trajectories=4, frames_per_batch=8) as evaluator:
        found = evaluator.evaluate()
    assert (found["eval/reward"], found["eval/episode_length"]) == (4.5, 4.5)


def test_in_the_background_with_the_weights_of_that_moment(policy):
    begun, go = threading.Event(), threading.Event()

    def slow(batch):
        begun.set()
        assert go.wait(30)
        return {"twice": 2 * batch["next", "reward"].mean().item()}

    results = []
    options = {"num_trajectories": 1, "frames_per_batch": 4, "metrics_fn": slow, "on_result": results.append}
    with no_leaks(), Evaluator(payer(), policy, log_prefix="test", **options) as evaluator:
        assert evaluator.poll() is None
        assert evaluator.wait() is None
        with torch.no_grad():
            policy.weight.fill_(1.0)
        assert evaluator.trigger_eval(step=1)
        with torch.no_grad():
            policy.weight.fill_(5.0)  # too late
        assert begun.wait(30)
        assert evaluator.pending
        assert evaluator.poll() is None
        assert not evaluator.trigger_eval(step=2)  # skipped
        with pytest.raises(WrongState, match="going on"):
            evaluator.state_dict()
        go.set()
        found = evaluator.wait(30)
        assert (found["test/reward"], found["test/twice"], found["test/step"]) == (4, 2, 1)
        assert results == [found]
        assert not evaluator.pending


def test_queued(policy):
    options = {"num_trajectories": 1, "frames_per_batch": 4, "busy_policy": "queue"}
    with Evaluator(payer(), policy, **options) as evaluator:
        for step in range(3):
            with torch.no_grad():
                policy.weight.fill_(float(step))
            assert evaluator.trigger_eval(step=step)
        found = [evaluator.wait(30) for _ in range(3)]
    assert [(one["eval/step"], one["eval/reward"]) for one in found] == [(0, 0), (1, 4), (2, 8)]


def test_errors_are_raised_where_results_are_asked_for(policy):
    class Broken(Payer):
        def step(self, action):
            raise OSError("the simulator is gone")

    with Evaluator(lambda: GymEnv(Broken((4,))), policy, frames_per_batch=4) as evaluator:
        evaluator.trigger_eval()
        with pytest.raises(WorkerRaised, match="the simulator is gone"):
            evaluator.wait(30)
        assert not evaluator.pending


def test_one_that_leaves_is_an_error_too(policy):
    class Leaver(Payer):
        def step(self, action):
            raise SystemExit(3)

    with Evaluator(lambda: GymEnv(Leaver((4,))), policy, frames_per_batch=4) as evaluator:
        evaluator.trigger_eval()
        with pytest.raises(WorkerRaised, match="SystemExit"):
            evaluator.wait(10)
        assert not evaluator.pending


@pytest.mark.timeout(30)
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_shutdown_breaks_off_what_goes_on(policy, backend):
    """An evaluation of a million steps does not keep anybody waiting."""
    heard = []

    def ask():
        try:
            evaluator.wait()
        except WrongState as error:
            heard.append(str(error))

    with no_leaks():
        evaluator = Evaluator(payer((10**6,)), policy, num_trajectories=1, frames_per_batch=50, backend=backend)
        evaluator.trigger_eval()
        asking = threading.Thread(target=ask)
        asking.start()
        while evaluator._queue:  # what has not begun is dropped
            pass
        evaluator.shutdown()
        asking.join(10)
        assert not asking.is_alive()
        assert "broken off" in heard[0]
        assert not evaluator.pending


@pytest.mark.timeout(30)
def test_shutdown_is_bounded(policy):
    """An env that hangs is named, with the line it hangs at; once it goes on, closing it works."""
    inside, free = threading.Event(), threading.Event()

    class Hangs(Payer):
        def step(self, action):
            inside.set()
            free.wait()
            return super().step(action)

    with no_leaks():
        evaluator = Evaluator(lambda: GymEnv(Hangs((4,))), policy, num_trajectories=1, frames_per_batch=4)
        evaluator.trigger_eval()
        assert inside.wait(10)
        with pytest.raises(
            WorkerSilent, match=r"evaluating thread, whose env stays open, did not end within 0.2 s(.|\n)*free.wait"
        ):
            evaluator.shutdown(timeout=0.2)
        free.set()
        evaluator.shutdown()
        with pytest.raises(WrongState, match="broken off"):
            evaluator.wait(1)


def test_bad_input(policy):
    for options, message in [
        ({"backend": "ray"}, "backend=ray"),
        ({"backend": "moon"}, "backend must be"),
        ({"busy_policy": "wait"}, "busy_policy must be"),
        ({"num_trajectories": 0}, "num_trajectories"),
    ]:
        with pytest.raises(UsageError, match=message):
            Evaluator(payer(), policy, **options)
    with pytest.raises(TypeError, match="policy or policy_factory"):
        Evaluator(payer())
    with pytest.raises(TypeError, match="no option 'colour'"):
        Evaluator(payer(), policy, colour="red")
    evaluator = Evaluator(payer(), policy)
    evaluator.shutdown()
    evaluator.shutdown()
    with pytest.raises(WrongState, match="closed"):
        evaluator.evaluate()
