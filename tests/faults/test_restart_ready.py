"""Lanes that come as they are ready go on when what steps them fails: every frame of a predictable world is checked.

What fails is replaced while the others are stepped; the first row of its lanes after that is marked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time

import gymnasium as gym
import pytest
import torch
from benchmarks.soak import soak

from reap.collectors import AsyncBatchedCollector, Collector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import AsyncEnvPool, ParallelEnv
from reap.errors import UsageError, WorkerDied, WorkerError, WorkerRaised, WorkerSilent
from reap.testing import CountingEnv, EchoPolicy
from reap.testing.faults import inject
from tests.worlds.faults import healthy
from tests.worlds.restarts import BuildsOnlyWithout, Once, check_lane, check_lane_exactly, failing
from tests.worlds.waiting import until

WHERE = {
    "processes": {"env_backend": "multiprocessing"},
    "two in a process": {"env_backend": "multiprocessing", "envs_per_worker": 2},
    "threads of processes": {"env_backend": "multiprocessing", "envs_per_worker": 2, "worker_threads": True},
    "threads": {"env_backend": "threading"},
}
TIMEOUT = {"hang": 1.5, "stop": 1.5}  # seconds; others are found without
BY_GROUP = {"processes": 1, "two in a process": 2, "threads of processes": 2, "threads": 1}  # lanes that fail together


def batched(makers, policy=None, where="processes", **options):
    options = {"frames_per_batch": 40, "total_frames": -1, **WHERE[where], **options}
    return AsyncBatchedCollector(makers, policy or EchoPolicy(), **options)


def check(batches, lanes=4):
    """All rows that were delivered; returns how many trajectories of each lane were cut, and how many rows it has."""
    rows = torch.cat(batches)
    own = [rows[rows["env_index"] == lane] for lane in range(lanes)]
    ids = [{*one["collector", "traj_ids"].tolist()} for one in own]
    assert len(set().union(*ids)) == sum(map(len, ids)), "two lanes have one id"
    return [check_lane_exactly(one, lane) if len(one) else 0 for lane, one in enumerate(own)], [len(one) for one in own]


def cuts_of(batches, lane):
    """How many trajectories of a lane were cut so far."""
    return sum(int(batch["collector", "cut"][batch["env_index"] == lane].sum()) for batch in batches)


def until_cut(collector, batches, lanes):
    """Take batches until the first row of each of these lanes after the failure has come."""
    while not all(cuts_of(batches, lane) for lane in lanes):
        batches.append(collector.next().clone())


def until_told(collector, told, more=6, count=1):
    batches = []
    until = time.monotonic() + 40
    while len(told) < count:
        batches.append(collector.next().clone())
        assert time.monotonic() < until, "nobody was told"
    return batches + [collector.next().clone() for _ in range(more)]


class Exits(Once):
    """Calls `sys.exit` in its `at`-th step, where a thread cannot be killed without everybody else."""

    def step(self, action):
        self.left -= 1
        if self.left == 0 and self.note.exists():
            self.note.unlink()
            sys.exit(3)
        return CountingEnv.step(self, action)


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        *[("processes", fault) for fault in ("kill", "raise", "hang", "stop", "sys.exit")],
        *[("two in a process", fault) for fault in ("segfault", "raise")],
        *[("threads of processes", fault) for fault in ("kill", "raise", "hang", "sys.exit")],
        *[("threads", fault) for fault in ("raise", "sys.exit")],
    ],
)
def test_an_env_that_fails_is_replaced(where, fault, tmp_path, caplog):
    told, note = [], tmp_path / "note"
    unlucky = failing(note, fault)
    if fault == "sys.exit":
        note.touch()

        def unlucky():
            return Exits(note, fault, at=20, lane=1)

    makers = [healthy(), unlucky, healthy(2), healthy(3)]
    options = {"on_failure": "restart", "on_restart": told.append, "timeout": TIMEOUT.get(fault)}
    with caplog.at_level(logging.WARNING, "reap"), batched(makers, where=where, **options) as c:
        batches = until_told(c, told)
        stats = c.stats()
        assert stats["restarts"] == 1
        assert stats["frames"] == sum(batch.numel() for batch in batches)
        assert stats["episodes"] == sum(int(batch["next", "done"].sum()) for batch in batches)
        until_cut(c, batches, [1] if fault == "raise" else range(2 - BY_GROUP[where], 2))
    (failure,) = told
    assert failure.action == "restart"
    assert failure.restarts == 1
    assert failure.worker == 1 // BY_GROUP[where]
    kind = {"raise": WorkerRaised, "hang": WorkerSilent, "stop": WorkerSilent}.get(fault, WorkerDied)
    assert isinstance(failure.cause, (WorkerRaised, WorkerDied) if fault == "sys.exit" else kind)
    assert any("restarted after" in record.message for record in caplog.records)
    cuts, _ = check(batches)
    assert cuts[1] == 1
    assert cuts[2:] == [0, 0]
    assert cuts[0] == (0 if fault == "raise" else BY_GROUP[where] - 1)  # one that raised is made anew in its place


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ("processes", "kill"),
        ("processes", "hang"),
        ("threads of processes", "kill"),
        ("threads", "raise"),
    ],
)
def test_an_env_that_fails_is_left_out(where, fault, tmp_path):
    told = []
    makers = [healthy(), failing(tmp_path / "note", fault), healthy(2), healthy(3)]
    options = {"on_failure": "drop", "on_restart": told.append, "timeout": TIMEOUT.get(fault)}
    with batched(makers, where=where, **options) as c:
        batches = until_told(c, told)
        assert c.stats()["restarts"] == 0
        c.reset()
        after = c.next()
        assert not (after["env_index"] == 1).any()
        assert after["observation"][after["env_index"] == 2][0, 2] == 0
    assert [failure.action for failure in told] == ["drop"]
    cuts, counts = check(batches)
    assert sum(cuts) == 0
    assert counts[1] == 19
    assert all(count > 19 for count in counts[2:])


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_when_the_last_one_is_left_out_its_error_is_raised(fault, tmp_path):
    told, batches = [], []
    makers = [failing(tmp_path / f"{lane}", fault, at=20 + 9 * lane, lane=lane) for lane in range(3)]
    c = batched(makers, on_failure="drop", on_restart=told.append, frames_per_batch=7)
    with pytest.raises((WorkerDied, WorkerRaised), match=r"worker of lane [012]"):
        while len(batches) < 60:
            batches.append(c.next().clone())
    assert sorted(failure.worker for failure in told) == [0, 1, 2]
    assert c.closed
    check(batches, 3)


@pytest.mark.parametrize("fault", ["kill", "raise", "hang"])
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
def test_lanes_of_a_parallel_env_that_come_as_they_are_ready(on_failure, fault, tmp_path):
    """Batches hold as much of every lane: the newcomer is waited for, those that were dropped are masked."""
    told, batches = [], []
    makers = [healthy(), failing(tmp_path / "note", fault), healthy(2), healthy(3)]
    env = ParallelEnv(4, makers, ready=2, on_failure=on_failure, on_restart=told.append, timeout=TIMEOUT.get(fault))
    with Collector(env, EchoPolicy(), frames_per_batch=32, total_frames=-1) as c:
        while len(batches) < 8:
            batches.append(c.next().clone())
        rows = torch.cat(batches, 1)
        assert c.stats()["restarts"] == (on_failure == "restart")
        assert c.stats()["episodes"] == int(rows["next", "done"].sum())
        assert c.stats()["frames"] == int(rows["collector", "mask"].sum())
    assert [failure.worker for failure in told] == [1]
    for lane in range(4):
        mask = rows["collector", "mask"][lane]
        assert bool(mask.all()) == (on_failure == "restart" or lane != 1)
        assert not rows["observation"][lane][~mask].any()
        assert (rows["collector", "traj_ids"][lane][~mask] == -1).all()
        cuts = check_lane_exactly(rows[lane][mask], lane)
        assert cuts == (lane == 1 and on_failure == "restart")


def test_one_that_is_silent_is_told_of_while_another_is_started(caplog):
    """The one that is started again has more time, and is not in its way."""
    with AsyncEnvPool([healthy(0), healthy(1)], backend="threading") as pool:
        workers = pool._lane_workers
        now = time.monotonic()
        workers._pending, workers._restarting = {0: now + 60, 1: now - 100}, {0: None}
        workers._log_silence()
        workers._pending, workers._restarting = {}, {}
    assert "the worker of lane 1 sent nothing for 100 s" in caplog.text


class DiesInFirstReset(CountingEnv):
    """Is killed in its first reset, if there is a file that says so; takes the file away."""

    def __init__(self, note, lane):
        super().__init__((3, 1, 5), lane)
        self.note = note

    def reset(self, **options):
        if self.note.exists():
            self.note.unlink()
            inject("kill")
        return super().reset(**options)


@pytest.mark.parametrize("where", ["processes", "threads of processes"])
def test_one_that_dies_while_all_are_reset_is_stepped_afterwards(where, tmp_path):
    """Also one whose lanes are not in hand after the reset."""
    note = tmp_path / "note"
    note.touch()
    makers = [*map(healthy, range(6)), lambda: DiesInFirstReset(note, 6), healthy(7)]
    with batched(makers, where=where, on_failure="restart") as c:
        assert c.stats()["restarts"] == 1
        batches = [c.next().clone()]
        while (
            len(batches) < 2000 and len({*torch.cat(batches[-40:])["env_index"].tolist()}) < 8
        ):  # each in its own time
            batches.append(c.next().clone())
    check(batches, 8)
    assert {*torch.cat(batches[-40:])["env_index"].tolist()} == {*range(8)}


@pytest.mark.parametrize("where", ["processes", "threads of processes", "threads"])
def test_one_that_dies_while_it_is_built_counts(where, tmp_path):
    fault = "raise" if where == "threads" else "exit"
    for n in range(2):
        (tmp_path / str(n)).touch()
    makers = [healthy(), healthy(2), lambda: BuildsOnlyWithout(tmp_path, fault), healthy(3)]
    with batched(makers, where=where, on_failure="restart") as c:
        assert c.stats()["restarts"] == 2
        assert (c.next()["observation"][:, 2] >= 0).all()
    for n in range(4):
        (tmp_path / str(n)).touch()
    with pytest.raises((WorkerDied, WorkerRaised), match=r"max_restarts=2, restart_window=600"):
        batched(makers, where=where, on_failure="restart", max_restarts=2)


class FailsAndCannotBeBuilt(Once):
    """The second one of it cannot be built."""

    def __init__(self, note, fault, folder):
        if not note.exists():
            (folder / f"tried-{time.monotonic_ns()}").touch()
            inject("raise")
        super().__init__(note, fault)


@pytest.mark.parametrize("where", ["processes", "threads"])
def test_too_many_restarts_are_told_with_the_cause(where, tmp_path):
    """Of an env that fails again and again, and of one that cannot even be built: then that is the cause."""

    class Always(CountingEnv):
        def step(self, action):
            raise RuntimeError("broken for good")

    c = batched([healthy(), Always], where=where, on_failure="restart", max_restarts=2)
    with pytest.raises(
        WorkerRaised, match=r"broken for good.*the restart limit is reached: 2 within.*max_restarts=2"
    ) as caught:
        for _ in range(500):
            c.next()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert c.closed
    note = tmp_path / "note"
    note.touch()
    makers = [healthy(), lambda: FailsAndCannotBeBuilt(note, "raise", tmp_path)]
    c = batched(makers, where=where, on_failure="restart", max_restarts=3)
    with pytest.raises(WorkerError, match=r"an injected fault.*max_restarts=3"):
        for _ in range(500):
            c.next()
    assert len(list(tmp_path.glob("tried-*"))) == 4  # in its place first, then three that were started again


def slow_to_come_back(gate, note, fault="kill"):
    """Fails once; the next one is built when there is a gate."""
    note.touch()

    def make():
        until(lambda: note.exists() or gate.exists())
        return Once(note, fault)

    return make


@pytest.mark.parametrize("where", ["processes", "threads of processes"])
def test_nobody_waits_for_one_that_is_being_replaced(where, tmp_path):
    """Others are stepped, a state is saved, and a reset of all waits for the newcomer."""
    told, gate, note = [], tmp_path / "gate", tmp_path / "note"
    makers = [healthy(), slow_to_come_back(gate, note), healthy(2), healthy(3)]
    with batched(makers, where=where, on_failure="restart", on_restart=told.append, timeout=5.0) as c:
        batches = []
        while note.exists():
            batches.append(c.next().clone())
        batches += [c.next().clone() for _ in range(10)]
        assert not told
        state = c.state_dict()
        assert state["traj_pool"]["traj_id"] > 0
        batches.append(c.next().clone())
        gate.touch()
        batches += until_told(c, told)
        until_cut(c, batches, range(2 - BY_GROUP[where], 2))
        cuts, _ = check(batches)
        assert cuts[1] == 1
        before = max(int(batch["collector", "traj_ids"].max()) for batch in batches)
        c.load_state_dict(state)
        c.set_seed(5)
        check([c.next().clone() for _ in range(4)])
        assert before > 0


def test_a_reset_of_all_waits_for_the_newcomer(tmp_path):
    told, gate, note = [], tmp_path / "gate", tmp_path / "note"
    makers = [healthy(), slow_to_come_back(gate, note), healthy(2)]
    with batched(makers, on_failure="restart", on_restart=told.append) as c:
        while note.exists():
            c.next()
        gate.touch()
        c.reset()
        assert len(told) == 1
        batches = [c.next().clone() for _ in range(6)]
    cuts, counts = check_after_reset(batches)
    assert cuts == 0
    assert min(counts) > 0


def check_after_reset(batches):
    """No lane is cut, as all have begun anew; each is true from then on."""
    rows = torch.cat(batches)
    own = [rows[rows["env_index"] == lane] for lane in range(3)]
    return sum(check_lane(one, lane) for lane, one in enumerate(own)), [len(one) for one in own]


@pytest.mark.parametrize("where", ["processes", "threads"])
def test_in_the_background_with_a_buffer(where, tmp_path):
    """Nobody looks: it is replaced all the same; paused while one is on its way, nothing is written."""
    told, gate, note = [], tmp_path / "gate", tmp_path / "note"
    fault = "raise" if where == "threads" else "kill"
    makers = [healthy(), slow_to_come_back(gate, note, fault), healthy(2), healthy(3)]
    buffer = ReplayBuffer(storage=LazyTensorStorage(200_000), batch_size=8)
    options = {"replay_buffer": buffer, "on_failure": "restart", "on_restart": told.append}
    with batched(makers, where=where, **options) as c:
        c.start()
        until(lambda: not note.exists())
        with c.pause():
            before = len(buffer)
            assert not told
            c.state_dict()
            assert len(buffer) == before
        until(lambda: len(buffer) >= before + 200)
        gate.touch()
        until(lambda: told)
        with c.pause():
            after = len(buffer)
        until(lambda: len(buffer) >= after + 400)
        with c.pause():
            rows = buffer[:]
            assert len(rows) == c.stats()["frames"]
        assert c.stats()["restarts"] == 1
    cuts, _ = check([rows])
    assert cuts == [0, 1, 0, 0]


def test_random_actions_and_memories_of_lanes_that_were_cut(tmp_path):
    """What a policy remembers of a lane begins anew with it, whether it is a carry or what it wrote last."""

    class Sums(torch.nn.Module):
        """Its carry is the sum of the steps it saw in this episode."""

        def __init__(self):
            super().__init__()
            self.carry = {"seen": torch.zeros(1)}

        def forward(self, observation, seen):
            seen = seen + observation[..., 2:3]
            return seen, seen

    def remembers(td):
        """The same, in a TensorDict that it finds again."""
        seen = td.get("seen", torch.zeros(*td.shape, 1)) + td["observation"][..., 2:3]
        return td.set("seen", seen).set("action", seen)

    for policy, options in ((Sums(), {}), (remembers, {}), (EchoPolicy(), {"init_random_frames": 400})):
        told = []
        makers = [healthy(), failing(tmp_path / "note", "kill"), healthy(2)]
        with batched(makers, policy, on_failure="restart", on_restart=told.append, **options) as c:
            rows = torch.cat(until_told(c, told, more=20))
        step = rows["observation"][..., 2]
        if "init_random_frames" not in options:
            assert torch.equal(rows["action"][..., 0], step * (step + 1) / 2)
        for lane in range(3):
            own = rows[rows["env_index"] == lane]
            goes_on = own["collector", "traj_ids"].diff() == 0
            assert torch.equal(own["observation"][1:, 2][goes_on], own["next", "observation"][:-1, 2][goes_on])
            assert (own["observation"][1:, 2][~goes_on] == 0).all()


def test_a_thread_that_hangs_cannot_be_replaced_and_says_why(tmp_path):
    class HangsUntil(CountingEnv):
        def step(self, action):
            until(lambda: self.lane != 1 or gate.exists())
            return super().step(action)

    gate = tmp_path / "gate"
    makers = [lambda: HangsUntil((3, 1, 5), 0), lambda: HangsUntil((3, 1, 5), 1)]
    with contextlib.ExitStack() as after:
        after.callback(gate.touch)
        c = batched(makers, where="threads", on_failure="restart", timeout=0.3)
        with pytest.raises(WorkerSilent, match=r"a thread cannot be killed.*multiprocessing"):
            for _ in range(10_000):
                c.next()


def test_a_thread_that_hangs_can_be_left_out(tmp_path):
    """What it answers after all is not heard."""
    gate, told = tmp_path / "gate", []

    class HangsUntil(CountingEnv):
        def step(self, action):
            until(lambda: self.lane != 1 or gate.exists())
            return super().step(action)

    makers = [lambda n=n: HangsUntil((3, 1, 5), n) for n in range(3)]
    with batched(makers, where="threads", on_failure="drop", on_restart=told.append, timeout=0.3) as c:
        batches = until_told(c, told)
        gate.touch()
        batches += [c.next().clone() for _ in range(5)]
    cuts, counts = check(batches, 3)
    assert counts[1] == sum(cuts) == 0


def test_the_same_run_again_has_the_same_seeds(tmp_path):
    """A newcomer is seeded from its lane's seed: what it draws is the same in every such run."""

    class Draws(Once):
        observation_space = gym.spaces.Box(-100, 100, (4,))

        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed, options=options)
            self.drawn = self.np_random.random()
            return [*observation, self.drawn], info

        def step(self, action):
            observation, *rest = super().step(action)
            return ([*observation, self.drawn], *rest)

    found = []
    note = tmp_path / "note"
    for _ in range(2):
        told = []
        note.touch()
        makers = [lambda n=n: Draws(note if n == 1 else tmp_path / "none", "kill", lane=n) for n in range(2)]
        with batched(
            makers, lambda observation: observation[..., :1], on_failure="restart", on_restart=told.append
        ) as c:
            c.set_seed(3)
            rows = torch.cat(until_told(c, told, more=12))
        own = rows[rows["env_index"] == 1]
        cut = int(own["collector", "cut"].nonzero())
        found.append((own["observation"][:19, 3], own["observation"][cut : cut + 4, 3]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0][:4], found[0][1])


def test_wrong_settings():
    for wrong, words in (
        ({"on_failure": "retry"}, "on_failure must be .*got 'retry'"),
        ({"on_failure": "restart", "max_restarts": -1}, "max_restarts"),
        ({"on_restart": print}, "on_restart is never called"),
    ):
        with pytest.raises(UsageError, match=words):
            batched([healthy()], **wrong)
        with pytest.raises(UsageError, match=words):
            AsyncEnvPool([healthy()], **wrong)
    with (
        AsyncEnvPool([healthy()], on_failure="restart") as pool,
        pytest.raises(UsageError, match=r"on_failure='restart'.*Only a collector"),
    ):
        pool.reset()


SCRIPT = """
import os, random, signal, threading, time, torch
from reap.collectors import AsyncBatchedCollector
from reap.testing import CountingEnv, EchoPolicy

random.seed(0)
lengths = ((3, 1, 5), (2, 2, 7), (4,), (1,))
make = [lambda one=one, lane=lane: CountingEnv(one, lane) for lane, one in enumerate(lengths)]
told = []
c = AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=60, total_frames=-1, on_failure="restart",
                          max_restarts=None, on_restart=told.append, timeout=20.0, {options})
processes = c._backend.worker.env.lane_workers
hits, seen = 0, {}

def interrupt(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGINT)

for turn in range(4):
    victim = processes._processes[turn % len(processes._processes)].child.pid
    thread = threading.Thread(target=interrupt, args=(random.random() * 0.3,))
    try:
        os.kill(victim, signal.SIGKILL)
        thread.start()
        while thread.is_alive():  # Python swallows one that comes in a finalizer
            c.next()
        time.sleep(0.02)
    except KeyboardInterrupt:
        hits += 1
    thread.join()
    while len(told) <= turn:
        c.next()
    for _ in range(2):
        batch = c.next()
        ids = batch["collector", "traj_ids"]
        for one in ids.unique():
            frames = batch[ids == one]
            lane, episode, first = frames["observation"][0].tolist()
            want = [[lane, episode, first + t] for t in range(len(frames) + 1)]
            assert frames["observation"].tolist() == want[:-1]
            assert frames["next", "observation"].tolist() == want[1:]
            assert seen.setdefault(int(one), lane) == lane
assert c.stats()["restarts"] == len(told) == 4
c.shutdown()
print("hits", hits)
"""


@pytest.mark.parametrize(
    "options",
    [
        'env_backend="multiprocessing"',
        pytest.param('env_backend="multiprocessing", worker_threads=True, envs_per_worker=2', marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_one_is_replaced(options, programs):
    done = programs.run(SCRIPT.replace("{options}", options), timeout=110)
    assert done.returncode == 0, done.stderr
    said, hits = done.stdout.split()
    assert said == "hits"
    assert int(hits) >= 2


@pytest.mark.parametrize("kind", ["batched", "ready"])
def test_a_short_soak(kind):
    """Faults of every kind at random moments; every row is looked at (`make soak` for the long one)."""
    found = soak(kind, faults=3, every=1500)
    assert found["faults"] >= 3
    assert sum(found["causes"].values()) == found["faults"]
    for name in ("descriptors", "children"):
        before, after = found["held"][name]
        assert after <= before + found["workers"], name


def test_an_answer_is_not_taken_from_a_process_that_is_found_silent_with_it(tmp_path):
    """Threads of one process: some answer in the moment in which another has been silent for too long."""
    told = []
    makers = [*[lambda n=n: CountingEnv((1,), n) for n in range(7)], failing(tmp_path / "note", "hang", at=5, lane=7)]
    options = {"on_failure": "restart", "on_restart": told.append, "timeout": 1.0, "envs_per_worker": 8}
    with batched(makers, where="threads of processes", **options) as c:
        rows = torch.cat(until_told(c, told))
    own = rows[rows["env_index"] < 7]
    assert own["next", "done"].all(), "episodes have one step"
    assert not own["observation"][:, 2].any()
    assert int(own["collector", "cut"].sum()) == 7


def test_processes_that_are_killed_between_batches():
    with batched([healthy(n) for n in range(3)], on_failure="restart", max_restarts=None) as c:
        workers, batches = c._backend.worker.env.lane_workers, []
        for turn in range(6):
            batches.append(c.next().clone())
            while cuts_of(batches, turn % 3) < turn // 3:  # one that is killed before its first frame cuts nothing more
                batches.append(c.next().clone())
            os.kill(workers._processes[turn % 3].child.pid, signal.SIGKILL)
        while c.stats()["restarts"] < 6 or workers._restarting:
            batches.append(c.next().clone())
        batches += [c.next().clone() for _ in range(4)]
    cuts, _ = check(batches, 3)
    assert cuts == [2, 2, 2]
