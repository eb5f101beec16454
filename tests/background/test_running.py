"""start(), pause(), resume(), is_running(), async_shutdown(): for one process and for many."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import torch

from reap.collectors import Collector, MultiAsyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv, ParallelEnv
from reap.envs.transforms import NormalizeObservation, TransformedEnv
from reap.errors import Starved, UsageError, WorkerDied, WorkerError, WorkerRaised, WorkerSilent, WrongState
from reap.testing import CountingEnv, EchoPolicy, FaultyEnv, inject, no_leaks
from tests.worlds.background import IN_STEP, KINDS, LENGTHS, MIX, buffer, check_rows, check_streams, make
from tests.worlds.faults import BOUND, alive, pids, within
from tests.worlds.waiting import until


class Boom(CountingEnv):
    """Lane 1 raises in its episode 5."""

    def step(self, action):
        if self.lane == 1 and self.episode == 5:
            raise OverflowError("boom")
        return super().step(action)


@pytest.mark.parametrize("kind", KINDS)
def test_until_all_frames_are_made(kind):
    memory = buffer()
    collector = make(kind, memory, total_frames=1000)
    assert not collector.is_running()
    collector.start()
    collector.start()  # twice is once
    check_rows(memory.sample(), 1.0)  # waits for the first rows
    until(lambda: not collector.is_running())
    assert memory.write_count == 1000
    assert sum(check_streams(memory[:]).values()) == 1000
    stats = collector.stats()
    assert (stats["frames"], stats["completed"]) == (1000, True)
    assert stats["episodes"] == int(memory[:]["next", "done"].sum())
    assert stats["mean_return"] is not None
    collector.async_shutdown()
    collector.async_shutdown()
    assert not collector.is_running()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pause_is_a_pause(kind):
    memory = buffer(200)
    collector = make(kind, memory)
    collector.start()
    memory.sample()
    with collector.pause():
        count, frames = memory.write_count, collector.stats()["frames"]
        time.sleep(0.05)
        assert memory.write_count == count == frames
        with collector.pause():  # they add up
            pass
        time.sleep(0.02)
        assert memory.write_count == count
        assert collector.is_running()
    until(lambda: memory.write_count > count)
    collector.pause()
    count = memory.write_count
    time.sleep(0.02)
    assert memory.write_count == count
    collector.resume()
    until(lambda: memory.write_count > count)
    collector.shutdown()
    collector.resume()  # no harm


@pytest.mark.parametrize("kind", KINDS)
def test_weights_while_it_runs(kind):
    memory, mine = buffer(500), EchoPolicy()  # what the trainer trains; another one acts
    collector = make(kind, memory, track_policy_version=True)
    collector.start()
    for version in range(1, 6):
        with torch.no_grad():
            mine.weight.fill_(version + 1.0)
        collector.update_policy_weights_(mine)
        assert collector.policy_version == version
        count = memory.write_count
        until(lambda: memory.write_count > count + 80)
        rows = memory.sample()
        assert torch.equal(
            rows["action"], (rows["observation"] * MIX).sum(-1, keepdim=True) * (rows["policy_version"][:, None] + 1.0)
        )
    with collector.pause():
        assert memory[:]["policy_version"].max() == 5
    collector.async_shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_control_calls_while_it_runs(kind):
    memory = buffer(500)
    collector = make(kind, memory)
    collector.start()
    memory.sample()
    for _ in range(3):
        state = collector.state_dict()
        assert state["frames"] >= 0
        collector.set_seed(1)
        collector.reset()
        collector.getattr_rb("write_count")
        assert collector.getattr_policy("weight") == 1.0
    check_rows(memory.sample(), 1.0)
    for use in (collector.next, lambda: list(collector), collector.rollout):
        with pytest.raises(WrongState, match="background|rollouts"):
            use()
    collector.shutdown()


@pytest.mark.parametrize("kind", IN_STEP)
def test_batches_first_then_the_background(kind):
    memory = buffer()
    collector = make(kind, memory, total_frames=600, init_random_frames=100)
    for _ in range(3):
        collector.next()
    collector.start()
    until(lambda: not collector.is_running())
    rows = memory[:]
    assert len(rows) == collector.stats()["frames"] == 600
    check_rows(rows)
    echoed = (rows["observation"] * MIX).sum(-1, keepdim=True)
    assert (rows["action"] != echoed).sum() == 100
    collector.shutdown()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ask", ["stats", "is_running", "update_policy_weights_", "pause", "async_shutdown", "state_dict"]
)
def test_an_error_surfaces_at_the_next_call(kind, ask):
    memory = buffer()
    collector = make(kind, memory, env=Boom)
    collector.start()
    until(lambda: collector._runner.failure() is not None)
    with pytest.raises(WorkerRaised, match="lane 1.*boom") as caught:
        getattr(collector, ask)()
    assert isinstance(caught.value.__cause__, OverflowError)
    assert collector.closed
    assert not collector.is_running()
    with pytest.raises(WrongState, match="closed"):
        collector.update_policy_weights_()
    collector.async_shutdown()  # it has been told
    check_rows(memory[:], 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_surfaces_in_a_sample_that_would_starve(kind):
    class Never(CountingEnv):
        def step(self, action):
            raise OverflowError("boom")

    memory = buffer()
    collector = make(kind, memory, env=Never)
    collector.start()
    for _ in range(2):  # as long as there are no rows
        with pytest.raises(WorkerRaised, match="boom"):
            memory.sample()
    collector.shutdown()


def test_an_env_that_exits_in_the_thread():
    class Leaves(CountingEnv):
        def step(self, action):
            raise SystemExit(3)

    memory = buffer()
    collector = make("single", memory, env=Leaves)
    collector.start()
    with pytest.raises(WorkerRaised, match=r"SystemExit\(3\)"):
        memory.sample()
    assert collector.closed


def test_a_collector_that_is_dropped_ends_at_once():
    for kind in KINDS:
        memory, before = buffer(), set(threading.enumerate())
        collector = make(kind, memory)
        collector.start()
        memory.sample()
        numbers = pids(collector) if kind in ("sync", "async") else []
        gc.disable()
        try:
            del collector
            until(lambda: not any(alive(pid) for pid in numbers))
            left = lambda: set(threading.enumerate()) - before  # noqa: E731
            until(lambda: not any(t.name.startswith(("reap-collector", "reap-lanes")) for t in left()))
        finally:
            gc.enable()


def test_a_sample_with_rows_goes_on_after_an_error():
    memory = buffer()
    collector = make("sync", memory, env=Boom)
    collector.start()
    until(lambda: collector._runner.failure() is not None)
    check_rows(memory.sample(), 1.0)
    collector.shutdown(raise_on_error=False)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_an_empty_buffer_whose_collector_is_done_or_not_begun(prefetch):
    memory = buffer(prefetch=prefetch)
    collector = make("single", memory, total_frames=0)
    with pytest.raises(Starved, match="empty"):
        memory.sample()
    collector.start()
    with pytest.raises(Starved, match="empty"):
        memory.sample()
    collector.shutdown()
    memory.shutdown()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_worker_killed_in_the_background(kind):
    memory = buffer(300)
    collector = make(kind, memory)
    collector.start()
    memory.sample()
    os.kill(pids(collector)[1], signal.SIGKILL)
    with within(BOUND), pytest.raises(WorkerDied, match="SIGKILL"):
        while True:
            collector.update_policy_weights_()
    check_rows(memory.sample(), 1.0)
    count = memory.write_count
    memory.extend(memory[:10].exclude("index"))  # the ring goes on
    assert memory.write_count == count + 10


def kill_in_the_middle_of_a_row(number=signal.SIGKILL):
    """In a worker: of lanes 2 and 3, the fifth write stops half-way, for ever."""
    from reap.buffers.storage.rows import Rows

    honest, calls = Rows.write, [0]

    def write(self, first, values):
        if values[("observation",)][0, 0] >= 2:
            calls[0] += 1
            if calls[0] == 5:
                honest(self, first, {key: value[: len(value) // 2] for key, value in values.items()})
                os.kill(os.getpid(), number)
        honest(self, first, values)

    Rows.write = write


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("background", [False, True])
def test_killed_while_it_writes(kind, background):
    """The rows it was writing are lost, and nothing else: not a reader, not its peer, not the ring."""
    memory = buffer(400)
    collector = make(kind, memory, init_fn=kill_in_the_middle_of_a_row)
    with within(BOUND + 3), pytest.raises(WorkerDied, match="SIGKILL"):
        if background:
            collector.start()
            while collector.is_running():
                check_rows(memory.sample(), 1.0)
        else:
            for _ in collector:
                if len(memory):  # the other worker may be in the middle of the very first rows
                    check_rows(memory.sample(), 1.0)
    rows = memory[:]
    check_rows(rows, 1.0)
    size = 10 if kind == "sync" else 20  # of a worker's rollout
    if memory.write_count + 2 * size <= 400:  # no lap yet: its hole, and perhaps its peer's, take room too
        assert (rows["observation"][:, 0] >= 2).sum() == 4 * size  # the fifth is lost
    for _ in range(10):
        memory.extend(rows.exclude("index")[:60])
    assert len(memory) == 400
    check_rows(memory.sample(), 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_in_the_middle_of_a_long_rollout(kind, tmp_path):
    """Not at its end: after the step it is in."""

    begun = tmp_path / "begun"

    class Slow(CountingEnv):
        def step(self, action):
            begun.touch()
            time.sleep(0.02)
            return super().step(action)

    collector = make(kind, buffer(), env=Slow, frames_per_batch=10_000)
    collector.start()
    until(begun.exists)
    with within(BOUND):
        collector.async_shutdown()


class StopsWhenTold(gym.Env):
    """Observes zeros; when there is a file that says so, a step does not return."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (1,)), gym.spaces.Discrete(2)

    def __init__(self, note):
        self.note = note

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        while self.note.exists():
            time.sleep(0.01)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_shutdown_while_statistics_are_asked_of_a_worker_that_hangs(tmp_path):
    """The watching thread waits for an answer then, and nobody else may wait for that thread."""
    note, memory = tmp_path / "note", buffer()
    env = TransformedEnv(GymEnv(StopsWhenTold(note)), NormalizeObservation())
    collector = MultiAsyncCollector([env], frames_per_batch=8, total_frames=-1, replay_buffer=memory)
    collector.start()
    memory.sample()
    note.touch()
    (worker,) = collector._backend.workers
    until(lambda: worker.pending_call is not None)
    with within(BOUND):
        collector.shutdown()


def test_a_question_while_another_thread_closes_is_answered():
    with make("async", buffer()) as collector:
        collector.start()
        collector._backend.supervisor.halt()  # as the other thread does
        collector.is_running()


def test_a_thread_that_hangs_is_reported_with_its_stack():
    there, gate = threading.Event(), threading.Event()

    class Hangs(CountingEnv):
        def step(self, action):
            there.set()
            gate.wait()
            return super().step(action)

    collector = Collector(Hangs((3,)), EchoPolicy(), frames_per_batch=5, replay_buffer=buffer())
    collector.start()
    there.wait()
    try:
        with within(BOUND), pytest.raises(WorkerSilent, match="in step"):
            collector.async_shutdown(timeout=0.2)
        with pytest.raises(WrongState, match="closed"):
            collector.next()
    finally:
        gate.set()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(kind):
    def life(how):
        memory = buffer()
        if how == "with":
            with make(kind, memory) as collector:
                collector.start()
                memory.sample()
        elif how == "dropped":
            collector = make(kind, memory)
            collector.start()
            memory.sample()
        else:
            collector = make(kind, memory, env=Boom)
            collector.start()
            with pytest.raises(WorkerError):
                while True:
                    collector.stats()
        del collector
        until(lambda: gc.collect() >= 0 and not any(t.name == "reap-collector" for t in threading.enumerate()))

    life("with")
    for how in ("with", "dropped", "failed"):
        with no_leaks():
            life(how)


def test_an_error_is_raised_at_the_end_of_the_block_unless_there_is_another():
    for inner in (False, True):
        with pytest.raises(KeyError if inner else WorkerRaised), make("single", buffer(), env=Boom) as collector:
            collector.start()
            until(lambda: collector._runner.failure() is not None)
            if inner:
                raise KeyError


def test_a_program_may_end_while_it_runs(programs):
    code = """
from reap.collectors import Collector, MultiSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
import sys
buffers = [ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8) for _ in range(2)]
one = Collector("CartPole-v1", frames_per_batch=50, replay_buffer=buffers[0])
two = MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=50, replay_buffer=buffers[1])
for collector, buffer in zip((one, two), buffers):
    collector.start()
    buffer.sample()
print("over")
"""
    done = programs.run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_start_and_pause_need_their_turn():
    collector = make("single", None)
    with pytest.raises(WrongState, match="replay_buffer"):
        collector.start()
    with pytest.raises(WrongState, match="start"):
        collector.pause()
    collector.resume()
    collector.shutdown()
    with pytest.raises(UsageError, match="closed"):
        collector.start()


def test_a_hook_may_talk_to_its_collector():
    memory, versions = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8), []

    def hook(batch):
        collector.update_policy_weights_()
        versions.append(collector.policy_version)

    collector = make("single", memory, post_collect_hook=hook, total_frames=100)
    collector.start()
    until(lambda: not collector.is_running())
    assert versions == [1, 2, 3, 4, 5]
    collector.shutdown()


def test_a_worker_that_hangs_is_reported():
    def hangs(lengths, lane):
        env = CountingEnv(lengths, lane)
        return FaultyEnv(env, at=60, fault="hang") if lane == 3 else env

    memory = buffer()
    collector = make("async", memory, env=hangs, timeout=1.0)
    collector.start()
    with within(BOUND + 3), pytest.raises(WorkerSilent, match=r"(?s)worker 1.*timeout=1.0.*faults.py"):
        until(lambda: not collector.is_running())
    assert collector.closed


def stuck_in_postproc(fault):
    """A postproc of which the fifth call in the worker of lanes 2 and 3 does not return."""
    calls = [0]

    def postproc(batch):
        if batch["observation"].flatten()[0] >= 2:
            calls[0] += 1
            if calls[0] == 5:
                inject(fault)
        return batch

    return {"postproc": postproc}


def stopped_in_the_middle_of_a_row():
    kill_in_the_middle_of_a_row(signal.SIGSTOP)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (stuck_in_postproc("hang"), "in postproc"),
        (stuck_in_postproc("deaf"), "does not answer signals"),
        ({"init_fn": stopped_in_the_middle_of_a_row}, "does not answer signals"),
    ],
    ids=["postproc", "deaf", "writing"],
)
def test_a_worker_that_is_stuck_between_two_steps_is_reported(kind, options, words):
    """Also when nobody asks."""
    memory = buffer()
    collector = make(kind, memory, timeout=1.0, **options)
    collector.start()
    until(lambda: collector._runner._failure is not None)
    with pytest.raises(WorkerSilent, match=rf"(?s)worker 1 .*timeout=1.0.*{words}"):
        collector.is_running()
    assert collector.closed
    check_rows(memory[:], 1.0)


def test_a_paused_worker_is_not_silent():
    memory = buffer()
    collector = make("async", memory, timeout=0.5)
    collector.start()
    memory.sample()
    with collector.pause():
        time.sleep(1.0)
    count = memory.write_count
    until(lambda: memory.write_count > count)
    collector.async_shutdown()


def test_lanes_in_processes_in_the_background():
    def life():
        memory = buffer()
        env = ParallelEnv(2, [lambda i=i: CountingEnv(LENGTHS[i], i) for i in (0, 1)])
        with Collector(env, EchoPolicy(), frames_per_batch=20, replay_buffer=memory) as collector:
            collector.start()
            until(lambda: memory.write_count > 200)
        check_streams(memory[:])

    life()
    with no_leaks():
        life()


def test_what_cannot_be_done_in_the_background():
    collector = make("sync", buffer(), update_at_each_batch=True)
    with pytest.raises(WrongState, match="update_policy_weights_"):
        collector.start()
    collector.shutdown()
    collector = make("single", buffer())
    state = collector.state_dict()
    collector.start()
    with pytest.raises(WrongState, match="before start"):
        collector.load_state_dict(state)
    collector.shutdown()


def test_faults_of_the_env_in_a_worker():
    def faulty(lengths, lane):
        env = CountingEnv(lengths, lane)
        return FaultyEnv(env, at=60, fault="exit") if lane == 3 else env

    memory = buffer()
    collector = make("async", memory, env=faulty)
    collector.start()
    with within(BOUND + 3), pytest.raises(WorkerDied, match="code 3"):
        until(lambda: not collector.is_running())
    check_rows(memory[:], 1.0)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_end_tells_of_errors_nobody_has_asked_for(kind):
    class Bad(CountingEnv):
        def step(self, action):
            if self.episode == 9:
                raise OverflowError("boom")
            return super().step(action)

    collector = make(kind, buffer(), env=Bad, frames_per_batch=24)
    collector.start()
    until(lambda: any(remote.child.gone() for remote in collector._backend.workers))
    with pytest.raises(WorkerRaised, match="boom"):
        collector.async_shutdown()
    assert collector.closed
