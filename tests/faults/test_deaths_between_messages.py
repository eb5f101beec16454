"""Workers that die between two messages: everything that was said before is true, and nobody is asked in vain."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

import pytest
import torch

from reap._system.conversation import Answer
from reap.backends.local.shared_memory import ProcessConnection, SharedMemoryTransport
from reap.backends.supervisor import Supervisor
from reap.backends.worker_server import RolloutReady
from reap.collectors import MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.errors import UsageError, WrongState
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.faults import all_gone, collect, freeze, healthy, pids
from tests.worlds.waiting import until


def _has_rollout(said):
    return any(isinstance(one, RolloutReady) for one in said)


class DiesAfterAnswering:
    """Inside, worker 0 dies when its next answer was heard. The others answer when that was "noticed"; or when the one
    that takes its place is "back", or has made a "rollout".
    """

    def __init__(self, collector, monkeypatch, *, others=(1,), until="noticed"):
        self.pids, self.others, self.until, self.patch = pids(collector), others, until, monkeypatch

    def __enter__(self):
        original, retired = ProcessConnection.receive, SharedMemoryTransport.retire
        returned = Supervisor._finish_joining
        for other in self.others:
            freeze(self.pids[other])

        def hear(connection):
            said, gone = original(connection)
            first = connection.child.pid == self.pids[0]
            if first and any(isinstance(one, Answer) for one in said):
                os.kill(self.pids[0], signal.SIGKILL)
                assert all_gone(self.pids[:1], 10)
            elif self.until == "rollout" and connection.index == 0 and not first and _has_rollout(said):
                self.wake()
            return said, gone

        def retire(transport, worker):
            retired(transport, worker)
            if self.until == "noticed":
                self.wake()

        def back(supervisor, worker):
            returned(supervisor, worker)
            if self.until == "back":
                self.wake()

        self.patch.setattr(ProcessConnection, "receive", hear)
        self.patch.setattr(SharedMemoryTransport, "retire", retire)
        self.patch.setattr(Supervisor, "_finish_joining", back)

    def wake(self):
        for other in self.others:
            os.kill(self.pids[other], signal.SIGCONT)

    def __exit__(self, *_):
        self.patch.undo()


def test_a_worker_that_answers_and_is_dropped_gives_no_answer(monkeypatch):
    with collect(MultiSyncCollector, [healthy(0), healthy(1), healthy(2)], frames_per_batch=12, on_failure="drop") as c:
        c.next()
        with DiesAfterAnswering(c, monkeypatch, others=(1, 2)):
            assert c.get_distant_attr("worker_idx") == [1, 2]
        assert c.get_distant_attr("worker_idx") == [1, 2]


def test_a_state_is_of_the_worker_it_is_named_after(monkeypatch):
    with collect(MultiSyncCollector, [healthy(0), healthy(1)], on_failure="drop") as c:
        c.next()
        c.update_policy_weights_({1: {"weight": torch.tensor(2.0)}})
        with DiesAfterAnswering(c, monkeypatch):
            state = c.state_dict()
        assert "worker0" not in state
        assert float(state["worker1"]["policy_state_dict"]["weight"]) == 2.0


def test_a_worker_that_was_dropped_is_named():
    class Otherwise(EchoPolicy):
        pass

    options = {"frames_per_batch": 12, "on_failure": "drop", "policy_factory": [EchoPolicy, EchoPolicy, Otherwise]}
    with MultiSyncCollector([healthy(0), healthy(1), healthy(2)], **options) as c:
        c.next()
        os.kill(pids(c)[0], signal.SIGKILL)
        c.next()
        with pytest.raises(WrongState, match=r"worker 0 has failed and was dropped; the remaining workers are 1, 2"):
            c.get_cached_weights(worker=0)
        with pytest.raises(UsageError, match=r"there is no worker 3; the workers are 0 to 2"):
            c.get_cached_weights(worker=3)
        assert float(c.get_cached_weights(worker=2)["weight"]) == 1.0
        first, second = c.explain().split("workers ")[1:]
        assert first.startswith("1:")
        assert second.startswith("2:")
        assert "Otherwise" in second


def test_who_is_done_at_the_last_moment_is_done():
    with collect(MultiSyncCollector, [healthy(0)]) as c:
        supervisor = c._backend.supervisor
        (worker,) = supervisor.workers
        supervisor.fill(worker, 0)
        select.select([worker.child.socket], [], [])  # its rollout is there; nobody has heard of it
        supervisor.drain(0.0)
        assert supervisor.waiting(worker) == (8, 1)


class Slow(CountingEnv):
    """Somebody hears of its answers long before its next rollout is made."""

    def step(self, action):
        time.sleep(0.05)
        return super().step(action)


def test_rollouts_of_a_newcomer_are_not_of_the_time_before(monkeypatch):
    """Who is started again while others have not answered yet, begins anew with more than this call."""
    with collect(MultiAsyncCollector, [Slow, healthy(1)], on_failure="restart") as c:
        c.next()
        with DiesAfterAnswering(c, monkeypatch, until="rollout"):
            c.reset()
        assert 0 in {worker.index for worker, _ in c._backend.supervisor.arrived}


def test_who_takes_the_place_of_one_that_has_begun_begins_too(monkeypatch):
    """Though the others have not begun yet; and it learns of weights for all."""
    call, hear, returned, found = ProcessConnection.call, ProcessConnection.receive, Supervisor._finish_joining, {}

    def ask(connection, data):
        if connection.index not in found:  # "begin" is the first thing anybody is asked
            found[connection.index] = connection.child.pid
            if connection.index == 1:
                freeze(connection.child.pid)
        call(connection, data)

    def heard(connection):
        said, gone = hear(connection)
        if connection.child.pid == found.get(0) and said and not gone:
            os.kill(found[0], signal.SIGKILL)
            assert all_gone([found[0]], 10)
        return said, gone

    def back(supervisor, worker):
        returned(supervisor, worker)
        os.kill(found[1], signal.SIGCONT)

    monkeypatch.setattr(ProcessConnection, "call", ask)
    monkeypatch.setattr(ProcessConnection, "receive", heard)
    monkeypatch.setattr(Supervisor, "_finish_joining", back)
    with collect(MultiSyncCollector, [healthy(0), healthy(1)], on_failure="restart") as c:
        c.update_policy_weights_({"weight": torch.tensor(2.0)})
        batch = c.next()
        assert torch.equal(batch["action"], 2 * (batch["observation"] * EchoPolicy().mix).sum(-1, keepdim=True))
        assert "cut" not in batch["collector"].keys() or not batch["collector", "cut"].any()
        assert c.stats()["restarts"] == 1


class Drawn(EchoPolicy):
    """Its actions are random: only who goes on exactly where another was draws the same."""

    def forward(self, observation):
        return super().forward(observation) + torch.rand(())


@pytest.mark.parametrize("verb", ["set_seed", "reset", "load"])
@pytest.mark.parametrize("until", ["noticed", "back"])
def test_a_run_that_is_repeated_exactly_begins_anew_exactly(verb, until, monkeypatch):
    """A worker that has begun anew and dies, before the others have or before it has made anything since."""
    found = []
    for dies in ("never", "answered", "later"):
        options = {"on_failure": "restart", "deterministic": True, "frames_per_batch": 20}
        with collect(MultiSyncCollector, [healthy(0), healthy(1)], Drawn(), **options) as c:
            c.set_seed(1)
            c.next()
            state = c.state_dict()
            c.next()
            act = {"set_seed": lambda: c.set_seed(1), "reset": c.reset, "load": lambda: c.load_state_dict(state)}[verb]
            with DiesAfterAnswering(c, monkeypatch, until=until) if dies == "answered" else contextlib.nullcontext():
                act()
            if dies == "later":
                os.kill(pids(c)[0], signal.SIGKILL)
            found.append(torch.stack([c.next().clone() for _ in range(3)]))
            assert c.stats()["restarts"] == (dies != "never")
    for other in found[1:]:
        assert (found[0] == other).all()


# ---- weights --------------------------------------------------------------------------------------------------------


def update(weight, workers=(0, 1)):
    return {w: {"weight": torch.tensor(weight)} for w in workers}


def test_who_is_started_again_by_an_update_has_the_weights_of_that_update():
    """Those it was given by itself before are not taken for the new ones."""
    with collect(MultiSyncCollector, [healthy(0), healthy(1)], on_failure="restart") as c:
        c.update_policy_weights_(update(2.0))
        c.next()
        os.kill(pids(c)[0], signal.SIGKILL)
        assert all_gone(pids(c)[:1], 10)
        c.update_policy_weights_(update(3.0))
        assert [float(c.get_cached_weights(worker=w)["weight"]) for w in (0, 1)] == [3.0, 3.0]
        batch = c.next()
        assert torch.equal(batch["action"], 3 * (batch["observation"] * EchoPolicy().mix).sum(-1, keepdim=True))
        os.kill(pids(c)[0], signal.SIGKILL)
        assert all_gone(pids(c)[:1], 10)
        with pytest.raises(UsageError, match="nonsense"):
            c.update_policy_weights_({0: {"weight": torch.tensor(4.0), "nonsense": torch.ones(1)}})
        assert float(c.get_cached_weights(worker=0)["weight"]) == 3.0


def test_weights_for_one_that_joins_do_not_overwrite_those_it_reads(monkeypatch):
    with collect(MultiSyncCollector, [healthy(0), healthy(1)], on_failure="restart") as c:
        c.update_policy_weights_(update(2.0))
        os.kill(pids(c)[0], signal.SIGKILL)
        passed, frozen = SharedMemoryTransport.pass_weights, []

        def pass_weights(transport, worker, data):
            if worker.joining is not None and not frozen:
                frozen.append(worker.child.pid)
                freeze(frozen[0])
            return passed(transport, worker, data)

        monkeypatch.setattr(SharedMemoryTransport, "pass_weights", pass_weights)
        while not frozen:
            c._backend.supervisor.poll_failures()
        waking = threading.Timer(0.2, os.kill, (frozen[0], signal.SIGCONT))
        waking.start()
        more = {"weight": torch.tensor(3.0), "mix": torch.ones(3)}  # more bytes than before
        c.update_policy_weights_({0: more, 1: more})
        waking.join()
        batch = c.next()
        assert torch.equal(batch["action"], 3 * batch["observation"].sum(-1, keepdim=True))
        assert c.stats()["restarts"] == 1


def test_what_an_update_leaves_out_is_what_it_was():
    """Also for who is started again: buffers of an earlier update hold."""
    with collect(MultiSyncCollector, [healthy(0), healthy(1)], on_failure="restart") as c:
        c.update_policy_weights_({0: {"weight": torch.tensor(2.0), "mix": torch.ones(3)}})
        c.update_policy_weights_(update(3.0))
        os.kill(pids(c)[0], signal.SIGKILL)
        batch = c.next()
        assert torch.equal(batch["action"][0], 3 * batch["observation"][0].sum(-1, keepdim=True))
        c.update_policy_weights_(EchoPolicy())
        assert not c._backend._weights._own, "what was given to one is forgotten, once all are given the same"


def test_a_state_is_loaded_by_who_takes_the_place_of_one_that_has_loaded_it(monkeypatch):
    with collect(MultiSyncCollector, [healthy(0), healthy(1)], on_failure="restart") as c:
        c.update_policy_weights_(update(2.0))
        state = c.state_dict()
        c.update_policy_weights_({"weight": torch.tensor(5.0)})
        with DiesAfterAnswering(c, monkeypatch, until="back"):
            c.load_state_dict(state)
        assert [float(c.get_cached_weights(worker=w)["weight"]) for w in (0, 1)] == [2.0, 2.0]
        assert c.stats()["restarts"] == 1


# ---- counts ---------------------------------------------------------------------------------------------------------


class FailsOnce(CountingEnv):
    """Dies in its `at`-th step; who takes its place does not."""

    def __init__(self, note, lane=1, at=20):
        super().__init__((3, 1, 5), lane)
        self.note, self.left = note, at

    def step(self, action):
        self.left -= 1
        if self.left == 0 and not self.note.exists():
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def memory():
    return ReplayBuffer(storage=LazyTensorStorage(5_000), batch_size=8)


@pytest.mark.parametrize("on_failure", ["restart", "drop"])
@pytest.mark.parametrize("before", [0, 6])
def test_in_the_background_as_many_frames_are_made_as_are_wanted(on_failure, before, tmp_path):
    """What a worker had begun on when it failed is for others to make, also if batches were taken before."""
    rows, told = memory(), []
    options = {"replay_buffer": rows, "total_frames": 1000, "on_failure": on_failure, "on_restart": told.append}
    with collect(MultiAsyncCollector, [healthy(), lambda: FailsOnce(tmp_path / "note", at=60)], **options) as c:
        for _ in range(before):
            c.next()
        c.start()
        until(lambda: not c.is_running())
        assert on_failure == "restart" or len(told) == 1  # the others may have been faster than who takes its place
        assert len(rows) == c.stats()["frames"] == 1000
        assert c.stats()["episodes"] == int(rows[:]["next", "done"].sum())


@pytest.mark.parametrize("kind", [MultiAsyncCollector, DistributedCollector])
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
def test_random_frames_that_a_worker_did_not_make_are_made_by_others(kind, on_failure, tmp_path):
    options = {"init_random_frames": 64, "on_failure": on_failure, "frames_per_batch": 8}
    options |= {"sync": False} if kind is DistributedCollector else {}
    told = []
    with collect(kind, [healthy(), lambda: FailsOnce(tmp_path / "n", at=12)], on_restart=told.append, **options) as c:
        found, after = 0, [0, 0]  # batches of each worker since then
        while after[0] < 12 or after[1] < 6 * (on_failure == "restart"):
            batch = c.next()
            after[batch.origin.worker] += bool(told)
            echo = (batch["observation"] * EchoPolicy().mix).sum(-1, keepdim=True)
            found += 0 if torch.equal(batch["action"], echo) else 8
    assert found == 64


@pytest.mark.parametrize("deterministic", [True, False])
def test_episodes_are_counted_once(deterministic):
    """Also by a worker that goes on exactly where the one before it was; and after a state is loaded."""
    options = {"on_failure": "restart", "deterministic": deterministic}
    with collect(MultiSyncCollector, [healthy(0), healthy(1)], **options) as c:
        c.set_seed(1)

        def play(batches, kill):
            ends = sum(int(c.next()["next", "done"].sum()) for _ in range(batches))
            if kill:
                os.kill(pids(c)[1], signal.SIGKILL)
            return ends

        ends = play(10, True) + play(10, True) + play(10, False)
        assert c.stats()["episodes"] == ends
        state = c.state_dict()
        play(4, True)
        play(4, False)
        c.load_state_dict(state)
        assert c.stats()["episodes"] == ends
        ends += play(3, True) + play(3, False)
        assert c.stats()["episodes"] == ends
        c.load_state_dict(state)
        os.kill(pids(c)[1], signal.SIGKILL)
        assert c.stats()["episodes"] == state_episodes(state)
        assert play(3, False) + state_episodes(state) == c.stats()["episodes"]


def state_episodes(state):
    return sum(int(state[f"worker{w}"]["resume"]["statistics"]["episodes"]) for w in (0, 1))
