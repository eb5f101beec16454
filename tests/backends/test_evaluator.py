"""Evaluator: whole episodes, the weights of the moment of asking, errors where they are asked for."""

import functools
import multiprocessing
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from reap.collectors import Evaluator
from reap.envs import AsyncEnvPool, GymEnv, SerialEnv
from reap.errors import UsageError, WorkerRaised, WorkerSilent, WrongArgument, WrongState
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
        with pytest.raises(WrongState, match="an evaluation is running"):
            evaluator.state_dict()
        go.set()
        found = evaluator.wait(30)
        assert (found["test/reward"], found["test/twice"], found["test/step"]) == (4, 2, 1)
        (told,) = results
        assert {name: value.item() for name, value in told.items()} == pytest.approx(found)
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
        assert "interrupted" in heard[0]
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
        with pytest.raises(WrongState, match="evaluation was interrupted"):
            evaluator.wait(1)


def test_bad_input(policy):
    for options, message in [
        ({"backend": "ray"}, "backend='ray'; its backends are"),
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


# ---- as scripts use it ----------------------------------------------------------------------------------------------


class Counted(CountingEnv):
    """Counts what was played of it."""

    def __init__(self, lengths=(3,), lane=0):
        super().__init__(lengths, lane)
        self.resets = self.steps = 0

    def reset(self, **options):
        self.resets += 1
        return super().reset(**options)

    def step(self, action):
        self.steps += 1
        return super().step(action)


def test_results_are_told_as_a_tensordict_and_numbered(policy):
    told = []
    with Evaluator(payer(), policy, num_trajectories=1, on_result=told.append) as evaluator:
        numbers = [evaluator.evaluate(step=step)["eval/step"] for step in (None, None, 10, None)]
        assert evaluator.trigger_eval()
        numbers.append(evaluator.wait(30)["eval/step"])
    assert numbers == [0, 1, 10, 2, 3]
    assert [one["eval/step"].item() for one in told] == numbers
    assert all(isinstance(one, TensorDict) for one in told)
    assert (told[0]["eval/reward"].dtype, told[0]["eval/num_episodes"].dtype) == (torch.float32, torch.int64)


def test_a_callback_that_raises_is_logged_and_ends_nothing(policy, caplog):
    def bad(result):
        raise ValueError("no disk left")

    with Evaluator(payer(), policy, num_trajectories=1, on_result=bad) as evaluator:
        assert evaluator.evaluate()["eval/num_episodes"] == 1
        assert evaluator.trigger_eval()
        assert evaluator.wait(30)["eval/num_episodes"] == 1
    assert caplog.text.count("no disk left") >= 2


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_policy_may_be_made_of_the_env(backend):
    made = []

    def of_the_env(env):
        made.append(env.action_spec.shape)
        return Constant()

    with Evaluator(payer(), policy_factory=of_the_env, num_trajectories=1, backend=backend) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 0
    assert made == [(1,)]


@pytest.mark.parametrize("wanted", [1, 4, 5])
def test_so_many_episodes_are_played_and_no_more(policy, wanted):
    env, seen = Counted(), []
    with Evaluator(
        GymEnv(env), policy, num_trajectories=wanted, metrics_fn=lambda batch: seen.append(tuple(batch.shape)) or {}
    ) as evaluator:
        before = env.resets
        for evaluation in (1, 2):
            assert evaluator.evaluate()["eval/num_episodes"] == wanted
            assert env.steps == evaluation * 3 * wanted
            assert env.resets == before + evaluation * wanted
    assert seen == [(wanted, 3)] * 2, "metrics_fn saw something else than the episodes"


def counted_by(steps, lengths):
    """An env that counts its steps where all processes see them."""

    class Told(CountingEnv):
        def step(self, action):
            with steps.get_lock():
                steps.value += 1
            return super().step(action)

    return lambda: GymEnv(Told(lengths))


@pytest.mark.parametrize("max_steps", [None, 2])
@pytest.mark.parametrize("where", ["thread", "process", "pool", "pool in a process"])
def test_no_more_are_played_wherever_they_are(policy, where, max_steps):
    """Two lanes of episodes of three and four steps, two episodes of one and one of the other."""
    steps, seen = multiprocessing.Value("i", 0), []
    makers = [counted_by(steps, (3,)), counted_by(steps, (4,))]
    pool = functools.partial(AsyncEnvPool, makers, min_ready=2, max_frames_per_traj=max_steps)
    with Evaluator(
        pool if "pool" in where else lambda: SerialEnv(2, makers),
        policy,
        num_trajectories=3,
        max_steps=None if "pool" in where else max_steps,
        backend="process" if "process" in where else "thread",
        metrics_fn=lambda batch: seen.append(batch) or {},
    ) as evaluator:
        for evaluation in (1, 2):
            found = evaluator.evaluate()
            assert found["eval/num_episodes"] == 3
            assert found["eval/episode_length"] == (2 if max_steps else (3 + 4 + 3) / 3)
            assert steps.value == evaluation * 2 * (2 * max_steps if max_steps else 6), "the lanes go side by side"
    for batch in seen:
        lengths = batch["collector", "mask"].sum(-1)
        assert sorted(lengths.tolist()) == ([2] * 3 if max_steps else [3, 3, 4])
        assert batch["next", "done"].sum() == 3
        assert len(batch["collector", "traj_ids"][:, 0].unique()) == 3


def test_long_episodes_are_as_frequent_as_they_are_in_a_pool(policy):
    """One lane ends after every step, the other after eight: a first-come count would see hardly any of the latter."""
    with torch.no_grad():
        policy.weight.fill_(1.0)
    with Evaluator(
        functools.partial(AsyncEnvPool, [payer((1,)), payer((8,))]), policy, num_trajectories=4
    ) as evaluator:
        found = evaluator.evaluate()
    assert (found["eval/reward"], found["eval/episode_length"]) == (4.5, 4.5)


def test_episodes_longer_than_what_is_collected_at_a_time(policy):
    seen = []
    with Evaluator(
        payer((5, 9)), policy, num_trajectories=2, frames_per_batch=3, metrics_fn=lambda batch: seen.append(batch) or {}
    ) as evaluator:
        assert evaluator.evaluate()["eval/episode_length"] == 7
    assert sorted(seen[0]["collector", "mask"].sum(-1).tolist()) == [5, 9]


def test_an_evaluation_broken_off_does_not_shorten_the_next_one(policy):
    stop = [2]

    class Interrupted(Counted):
        def step(self, action):
            if self.steps == stop[0]:
                stop[0] = None
                raise KeyboardInterrupt
            return super().step(action)

    env = Interrupted()
    with Evaluator(GymEnv(env), policy, num_trajectories=2) as evaluator:
        with pytest.raises(KeyboardInterrupt):
            evaluator.evaluate()
        before = env.steps
        assert evaluator.evaluate()["eval/num_episodes"] == 2
        assert env.steps == before + 6


def test_a_policy_is_measured_in_evaluation_mode():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, observation):
            return observation[..., :1] * 0 + (1.0 if self.training else 2.0)

    module = Dropped()
    for backend in ("thread", "process"):
        for given in ({"policy": module}, {"policy_factory": lambda: module}):
            with Evaluator(payer(), **given, num_trajectories=1, backend=backend) as evaluator:
                assert evaluator.evaluate()["eval/reward"] == 8
                assert module.training, "the learner's own module goes on training"


def test_options_of_the_collector_that_are_ours(policy):
    for options, message in [
        ({"trajs_per_batch": 3}, "trajs_per_batch is 3, but num_trajectories is 2"),
        ({"split_trajs": True}, "split_trajs"),
        ({"track_traj_ids": False}, "track_traj_ids"),
        ({"traj_format": "round"}, "traj_format"),
    ]:
        with pytest.raises(UsageError, match=message):
            Evaluator(payer(), policy, num_trajectories=2, collector_kwargs=options)

    def twice(episodes):
        return episodes.set(("next", "reward"), episodes["next", "reward"] * 2)

    with torch.no_grad():
        policy.weight.fill_(1.0)
    with Evaluator(payer(), policy, num_trajectories=2, collector_kwargs={"postproc": twice}) as evaluator:
        assert evaluator.evaluate()["eval/reward"] == 8


def test_lanes_share_the_episodes(policy):
    envs = [Counted((2,)), Counted((2,)), Counted((2,))]
    with Evaluator(
        SerialEnv(3, [lambda env=env: GymEnv(env) for env in envs]), policy, num_trajectories=4
    ) as evaluator:
        assert evaluator.evaluate()["eval/num_episodes"] == 4
    assert [env.steps for env in envs] == [4, 4, 4]  # the first has two episodes to play, the others go on beside it


def test_weights_by_path(policy):
    other = Constant()
    with torch.no_grad():
        other.weight.fill_(3.0)
    with Evaluator(payer(), policy, num_trajectories=1) as evaluator:
        assert evaluator.evaluate(weights_dict={"policy": Evaluator.extract_weights(other)})["eval/reward"] == 12
        assert evaluator.trigger_eval(weights_dict={"policy": other})
        assert evaluator.wait(30)["eval/reward"] == 12
        with pytest.raises(TypeError, match="weights_dict must be a mapping of paths to weights, got list"):
            evaluator.evaluate(weights_dict=[other])


@pytest.mark.parametrize("form", ["cat", "padded"])
def test_whole_episodes_for_the_metrics(policy, form):
    seen = []
    with Evaluator(
        payer((2, 4)),
        policy,
        num_trajectories=2,
        collector_kwargs={"traj_format": form},
        metrics_fn=lambda batch: seen.append(tuple(batch.batch_size)) or {},
    ) as evaluator:
        found = evaluator.evaluate()
    assert (found["eval/num_episodes"], found["eval/episode_length"]) == (2, 3)
    assert seen == [(6,) if form == "cat" else (2, 4)]


def test_an_env_may_count_its_steps_itself(policy):
    class Own(CountingEnv):
        def __init__(self):
            super().__init__((9,))
            self.observation_space = gym.spaces.Dict(
                {"observation": self.observation_space, "step_count": gym.spaces.Box(0, 9, (1,), np.int64)}
            )

        def _say(self, observation, count):
            return {"observation": observation, "step_count": np.array([count])}

        def reset(self, **options):
            observation, info = super().reset(**options)
            self.count = 0
            return self._say(observation, 0), info

        def step(self, action):
            observation, *rest = super().step(action)
            self.count += 1
            return self._say(observation, self.count), *rest

    act = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    for limit, length in ((None, 9), (4, 4)):
        with Evaluator(lambda: GymEnv(Own()), act, num_trajectories=2, max_steps=limit) as evaluator:
            assert evaluator.evaluate()["eval/episode_length"] == length


def test_a_misspelt_option_is_told_with_the_nearest():
    with pytest.raises(WrongArgument, match="no option 'num_trajectory'; did you mean 'num_trajectories'"):
        Evaluator("CartPole-v1", lambda observation: observation, num_trajectory=3)
