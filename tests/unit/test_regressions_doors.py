"""What fresh eyes found at the doors: ids, the switch-over, errors that must name the way out. Each failed once."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import gymnasium as gym
import pytest
import torch

from reap.children import Child, dumps, end, until_ready
from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, WeightUpdaterBase
from reap.envs import GymEnv, ParallelEnv, SerialEnv, TorchCartPole, TorchEnv
from reap.errors import UsageError, WorkerRaised, WorkerSilent, WrongArgument
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, FaultyEnv, assert_same, no_leaks
from reap.weight_update import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.faults.worlds import freeze


def run(code: str, *more: str, **options) -> str:
    """A program of its own."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def an_id():
    """An id that only this process knows."""
    name = "reap-test/Counts-v3"
    gym.register(name, entry_point=CountingEnv, kwargs={"lengths": (3, 1)}, disable_env_checker=True)
    yield name
    del gym.registry[name]


def test_ids_of_the_caller_work_in_workers(an_id):
    world = CountingWorld([(3, 1)])
    with MultiSyncCollector([an_id], EchoPolicy(), frames_per_batch=6, cat_results=0) as collector:
        assert_same(collector.next(), world.batch(6))
    for lanes in (ParallelEnv, SerialEnv):
        with Collector(lanes(2, an_id), EchoPolicy(), frames_per_batch=12) as collector:
            want = CountingWorld([(3, 1)]).batch(6)["observation",][0].tolist()
            assert collector.next()["observation"].tolist() == [want, want]


def test_ids_are_found_as_gymnasium_finds_them(an_id):
    for name in (an_id, "reap-test/Counts", f"reap.testing:{an_id}"):
        assert GymEnv(name, lengths=(4,)).rollout(9).shape == (4,)
    assert len(GymEnv(gym.spec(an_id), num_envs=2).reset()) == 2


def test_ids_nobody_knows_are_refused_before_any_worker_starts():
    with no_leaks():
        for make in (
            lambda: Collector("Nowhere-v7", frames_per_batch=4),
            lambda: MultiSyncCollector(["CartPole-v1", "Nowhere-v7"], frames_per_batch=4),
            lambda: ParallelEnv(2, "Nowhere-v7"),
        ):
            with pytest.raises(UsageError, match="Gymnasium knows no env 'Nowhere-v7' in this process"):
                make()


def test_atari_ids_need_no_import():
    pytest.importorskip("ale_py")
    code = """
        import sys
        from reap.collectors import MultiSyncCollector, Collector
        if __name__ == "__main__":
            batch = MultiSyncCollector(["ALE/Pong-v5"], frames_per_batch=2, cat_results=0).next()
            assert batch["next", "pixels" if "pixels" in batch else "observation"].shape == (2, 210, 160, 3)
            assert Collector("ALE/Pong-v5", frames_per_batch=2).next().shape == (2,)
    """
    run(code)


def test_an_entry_point_in_the_main_module(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        import gymnasium as gym
        from reap.collectors import MultiSyncCollector
        from reap.testing import CountingEnv
        class Mine(CountingEnv): ...
        if __name__ == "__main__":
            gym.register("Mine-v0", entry_point="__main__:Mine", disable_env_checker=True)
            print(MultiSyncCollector(["Mine-v0"], frames_per_batch=3, cat_results=0).next()["observation"].shape)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert "[3, 3]" in done.stdout, done.stderr


# ---- one process: names that scripts use ----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, NoWeightSyncScheme])
def test_schemes_in_one_process(scheme):
    policy = EchoPolicy()
    collector = Collector(
        CountingEnv(), policy, frames_per_batch=4, policy_device="cpu", weight_sync_schemes={"policy": scheme()}
    )
    collector.update_policy_weights_({"weight": torch.tensor(2.0), "mix": policy.mix})
    moved = scheme is not NoWeightSyncScheme
    assert collector.policy_version == moved
    assert collector.policy.weight == (2.0 if moved else 1.0)
    collector.shutdown()


@pytest.mark.parametrize("given", ["shared", {"policy": "shared"}, {"critic": NoWeightSyncScheme()}])
def test_schemes_are_checked(given):
    with pytest.raises((WrongArgument, UsageError), match="weight_sync_schemes"):
        Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4, weight_sync_schemes=given)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"track_policy_version": True, "max_frames_per_traj": 3},
        {"compact_obs": True},
        {"set_truncated": True},
        {"postproc": lambda batch: batch.select("action")},
    ],
)
@pytest.mark.parametrize("env", [CountingEnv, lambda: SerialEnv(2, CountingEnv), lambda: TorchEnv(TorchCartPole(2))])
def test_a_fake_batch_looks_like_a_true_one(env, options):
    policy = None if isinstance(made := env(), TorchEnv) else EchoPolicy()
    collector = Collector(made, policy, frames_per_batch=8, **options)
    fake, true = collector.fake_tensordict(), collector.next()
    assert fake.batch_size == true.batch_size
    assert fake.names == true.names
    tensors = {key: (v.shape, v.dtype) for key, v in true.items(True, True) if isinstance(v, torch.Tensor)}
    assert {key: (v.shape, v.dtype) for key, v in fake.items(True, True)} == tensors
    ends = ("next", "truncated")
    for key, value in fake.items(True, True):
        assert not value.any() or (options.get("set_truncated") and key in (ends, ("next", "done")))
    if options.get("set_truncated"):
        assert fake[ends].reshape(-1, fake.shape[-1])[:, -1].all()
    collector.shutdown()


def test_weights_that_are_received():
    collector = Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4)
    other = EchoPolicy()
    with torch.no_grad():
        other.weight.fill_(3.0)
    collector.receive_weights(other)
    assert collector.policy.weight == 3.0
    with pytest.raises(UsageError, match="give the weights once"):
        collector.receive_weights(other, policy=other)
    collector.shutdown()


def test_an_updater_is_told_what_it_needs():
    class Told(WeightUpdaterBase):
        def init(self, *args, **kwargs):
            self.heard = args, kwargs

    updater = Told()
    with Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4, weight_updater=updater) as collector:
        collector.init_updater(1, two=3)
    assert updater.heard == ((1,), {"two": 3})
    with Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4) as collector:
        collector.init_updater(1)


def test_help_names_the_number_of_workers():
    import inspect

    for kind in (MultiSyncCollector, MultiAsyncCollector):
        assert inspect.signature(kind).parameters["num_workers"].default is None


# ---- lanes in processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "value"),
    [(gym.spaces.Text(5), "a"), (gym.spaces.Sequence(gym.spaces.Box(0, 1, (2,))), ())],
    ids=["text", "ragged"],
)
def test_lanes_in_processes_name_the_column_they_cannot_share(space, value):
    class Says(gym.Env):
        observation_space = gym.spaces.Dict(word=space)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return {"word": value}, {}

        def step(self, action):
            return {"word": value}, 1.0, False, False, {}

    with (
        no_leaks(),
        pytest.raises(UsageError, match="'word' has no fixed shape .* SerialEnv, or .*MultiSyncCollector"),
    ):
        ParallelEnv(2, Says)
    assert Collector(SerialEnv(2, Says), frames_per_batch=4).next().batch_size == (2, 2)


@pytest.mark.parametrize("ready", [None, 1])
def test_a_hang_is_told_when_the_time_is_up(ready):
    def make():
        return FaultyEnv(CountingEnv((99,)), at=3, fault="hang")

    with no_leaks():
        collector = Collector(ParallelEnv(2, make, timeout=0.5, ready=ready), EchoPolicy(), frames_per_batch=40)
        began = time.monotonic()
        with pytest.raises(WorkerSilent, match="sent nothing for 0.5 s"):
            collector.next()
        del collector
        assert time.monotonic() - began < 2.0  # the goodbye a stuck process does not hear would take two seconds more


def test_a_model_that_refuses_its_weights_is_not_called_absent():
    class Normed(CountingEnv):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.Linear(1, 1)

    with MultiSyncCollector([Normed], EchoPolicy(), frames_per_batch=4) as collector:
        give, wrong = collector.update_policy_weights_, torch.nn.Linear(2, 1)
        with pytest.raises(WorkerRaised, match="size mismatch for weight"):
            give(weights=wrong, model_id="env.envs[0].unwrapped.norm")
        for path in ("env.envs[0].unwrapped.other", "env.envs[7].norm"):
            with pytest.raises(KeyError, match=r"model 'env.envs\[.*is not here"):
                give(weights=wrong, model_id=path)
        collector.next()


def test_a_stack_that_was_told_before_is_no_answer():
    """A child that was silent once and answered, then is frozen: it says nothing, and nothing is what is told of it."""

    def waits(connection, fds):
        connection.send_bytes(b"here")
        connection.recv_bytes()

    child = Child(dumps(waits, "waits"))
    try:
        assert until_ready([child.line.fileno()], within=60)
        for _ in range(2):
            assert child.ask_stack().count("in waits") == 1
        freeze(child.pid)
        assert child.ask_stack(0.2) == ""
    finally:
        child.signal(signal.SIGKILL)
        end([child], patience=5, deadline=5)
