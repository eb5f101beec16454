"""ParallelEnv: lanes in other processes are the lanes they would be here."""

from __future__ import annotations

import os
import signal
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.collectors import Collector, MultiSyncCollector
from reap.envs import GymEnv, ParallelEnv, SerialEnv
from reap.errors import UsageError, WorkerDied, WorkerRaised, WorkerSilent, WrongArgument
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, FaultyEnv, assert_same, backend_checks, no_leaks
from tests import example_count


def makers(lengths):
    return [lambda one=one, lane=lane: GymEnv(CountingEnv(one, lane)) for lane, one in enumerate(lengths)]


def parallel(create_env_fn, policy=None, **options):
    """A maker for the backend suite: the lanes of what a factory makes, in processes."""
    return Collector(lambda: ParallelEnv(1, create_env_fn), policy, **options)


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 6),
    limit=st.none() | st.integers(1, 4),
    compact=st.booleans(),
    data=st.data(),
)
@settings(max_examples=example_count(15), deadline=None)
def test_the_predictable_world(lengths, steps, limit, compact, data):
    from reap.trajectories import with_next

    workers = data.draw(st.integers(1, len(lengths)))
    env = ParallelEnv(len(lengths), makers(lengths), num_workers=workers)
    options = {"max_frames_per_traj": limit, "compact_obs": compact}
    with Collector(env, EchoPolicy(), frames_per_batch=steps * len(lengths), **options) as c:
        world = CountingWorld(lengths, limit=limit)
        for _ in range(4):
            batch = with_next(c.next()) if compact else c.next()
            assert_same(batch, world.batch(steps))


@pytest.mark.parametrize("name", [n for n in backend_checks if n not in ("exact_single", "seeds_reproduce")])
def test_the_backend_suite(name):
    backend_checks[name](parallel)


def test_batches_as_documented():
    with Collector(ParallelEnv(4, lambda: GymEnv("CartPole-v1")), frames_per_batch=400) as c:
        c.set_seed(3)
        batch = c.next()
        assert batch.shape == (4, 100)
    alone = Collector(SerialEnv(4, lambda: GymEnv("CartPole-v1")), frames_per_batch=400)
    alone.set_seed(3)
    assert (alone.next() == batch).all()


def test_results_are_written_into_the_slot():
    env = ParallelEnv(2, makers([(3,), (4,)]))
    c = Collector(env, EchoPolicy(), frames_per_batch=8)
    c.next()
    slot = c._backend.worker.pool._slots[0]
    assert all(row.place is not None for row in slot._rows[1])
    assert len(env.lanes_env.processes) == 2
    c.shutdown()


def test_lanes_may_rest():
    with Collector(
        ParallelEnv(2, makers([(2,), (6,)]), num_workers=2), EchoPolicy(), frames_per_batch=8, reset_when_done=False
    ) as c:
        assert c.next()["collector", "mask"].tolist() == [[True, True, False, False], [True] * 4]
        assert c.next()["observation"][:, 0].tolist() == [[0, 1, 0], [1, 0, 4]]


def test_by_hand():
    with ParallelEnv(num_workers=3, create_env_fn=lambda: GymEnv("CartPole-v1")) as env:
        env.set_seed(1)
        td = env.reset()
        here = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
        here.set_seed(1)
        twin = here.reset()
        assert torch.equal(td["observation"], twin["observation"])
        for _ in range(30):
            action = here.rand_action()["action"]
            a, b = env.step(td.set("action", action.clone())), here.step(twin.set("action", action.clone()))
            assert torch.equal(a["next", "observation"], b["next", "observation"])
            td, twin = env.step_mdp(a) if hasattr(env, "step_mdp") else a["next"], b["next"]
            if b["next", "done"].any():
                break
        assert env.rollout(20, break_when_any_done=False).shape == (3, 20)


def test_recurrent_policies():
    class Remembering(torch.nn.Module):
        carry = {"sum": torch.zeros(3)}

        def forward(self, observation, sum):
            total = sum + observation
            return total.sum(-1, keepdim=True), total

    lengths = [(3, 1), (2,), (5,)]
    with Collector(ParallelEnv(3, makers(lengths), num_workers=2), Remembering(), frames_per_batch=15) as there:
        here = Collector(SerialEnv(3, makers(lengths)), Remembering(), frames_per_batch=15)
        for _ in range(4):
            assert (there.next() == here.next()).all()


def test_inside_a_worker_process():
    make = lambda: ParallelEnv(2, makers([(3,), (4,)]))  # noqa: E731
    with MultiSyncCollector([make], EchoPolicy(), frames_per_batch=8, cat_results=0) as c:
        world = CountingWorld([(3,), (4,)])
        for _ in range(3):
            assert_same(c.next(), world.batch(4))


class Broken(CountingEnv):
    how = "raise"

    def step(self, action):
        if self.t == 2 and self.lane == 1:
            if self.how == "raise":
                raise OverflowError("boom")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return super().step(action)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise", WorkerRaised, r"worker of lane 1 \(pid \d+\), lane 1, step 2: .*boom"),
        ("kill", WorkerDied, r"worker of lane 1 \(pid \d+\), step 2: was killed by SIGKILL"),
        ("hang", WorkerSilent, r"(?s)sent nothing for 0.5 s.*time.sleep|sent nothing for 0.5 s.*in step"),
    ],
)
def test_faults_are_named(how, kind, words):
    class One(Broken):
        pass

    One.how = how
    with no_leaks():
        timeout = 0.5 if how == "hang" else None
        env = ParallelEnv(2, [lambda: GymEnv(CountingEnv((9,), 0)), lambda: GymEnv(One((9,), 1))], timeout=timeout)
        c = Collector(env, EchoPolicy(), frames_per_batch=8)
        began = time.monotonic()
        with pytest.raises(kind, match=words) as caught:
            c.next()
        assert time.monotonic() - began < 3
        if how == "raise":
            assert isinstance(caught.value.__cause__, OverflowError)
        assert c.closed
        del c, env, caught


def test_errors_of_construction():
    def bad():
        raise KeyError("no such game")

    with no_leaks(), pytest.raises(WorkerRaised, match="no such game"):
        ParallelEnv(2, [lambda: GymEnv("CartPole-v1"), bad])
    with pytest.raises(WrongArgument, match="needs create_env_fn"):
        ParallelEnv(2)
    with pytest.raises(UsageError, match="between 1 and the 2 lanes"):
        ParallelEnv(2, lambda: GymEnv("CartPole-v1"), num_workers=3)
    with pytest.raises(UsageError, match="different envs"):
        ParallelEnv(2, [lambda: GymEnv("CartPole-v1"), lambda: GymEnv("Pendulum-v1")])


def test_dropping_it_ends_its_processes():
    with no_leaks():
        env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
        env.reset()
        pids = [process.child.pid for process in env.lanes_env.processes]
        del env
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_pixels():
    class Pixels(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros((8, 8, 3), np.uint8), {}

        def step(self, action):
            self.t += 1
            return np.full((8, 8, 3), self.t, np.uint8), 0.0, self.t == 7, False, {}

    with Collector(ParallelEnv(2, lambda: Pixels()), frames_per_batch=40) as c:
        batch = c.next()
        key = "pixels" if "pixels" in batch.keys() else "observation"
        want = torch.arange(20) % 7
        assert torch.equal(batch[key][0, :, 0, 0, 0].long(), want)
        assert torch.equal(batch["next", key][1, :, 7, 7, 2].long(), want + 1)


def test_ready_lanes_keep_their_order_and_their_memory():
    class Slow(CountingEnv):
        def step(self, action):
            if self.lane == 0 and self.t % 3 == 0:
                time.sleep(0.002)
            return super().step(action)

    lengths = [(3, 1, 4), (2,), (6,), (5,)]
    make = [lambda one=one, lane=lane: GymEnv(Slow(one, lane)) for lane, one in enumerate(lengths)]

    class Remembering(torch.nn.Module):
        carry = {"sum": torch.zeros(3)}

        def forward(self, observation, sum):
            total = sum + observation
            return total.sum(-1, keepdim=True), total

    for workers, ready in ((4, 1), (4, 3), (2, 1)):
        env = ParallelEnv(4, make, num_workers=workers, ready=ready)
        with Collector(env, Remembering(), frames_per_batch=40) as there:
            here = Collector(SerialEnv(4, makers(lengths)), Remembering(), frames_per_batch=40)
            for _ in range(10):
                assert (there.next() == here.next()).all()
            there.reset()
            assert (there.next()["observation"][:, 0, 2] == 0).all()


def test_ready_lanes_report_faults():
    class Dies(CountingEnv):
        def step(self, action):
            if self.t == 2:
                os._exit(3)
            return super().step(action)

    with no_leaks():
        env = ParallelEnv(2, [lambda: GymEnv(CountingEnv((9,), 0)), lambda: GymEnv(Dies((9,), 1))], ready=1)
        c = Collector(env, EchoPolicy(), frames_per_batch=80)
        with pytest.raises(WorkerDied, match=r"of lane 1 .*exited with code 3"):
            c.next()
        del c, env
    with pytest.raises(UsageError, match="ready must lie between 1 and 1"):
        ParallelEnv(2, makers([(2,), (3,)]), ready=2)


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


def test_shared_slots_are_blocks_that_can_be_pinned():
    """What a GPU would be told of: whole pages of shared memory that hold every column."""
    env = ParallelEnv(2, [lambda n=n: GymEnv(CountingEnv((3,), n)) for n in range(2)])
    with Collector(env, EchoPolicy(), frames_per_batch=8) as c:
        slot = c._backend.worker.pool.acquire()
        assert slot.block.nbytes == slot.layout.nbytes
        assert slot.block.ctypes.data % 4096 == 0
        assert all(np.shares_memory(slot.block, array) for array in slot.arrays.values())
        c._backend.worker.pool.release(slot)
