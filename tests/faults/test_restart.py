"""A run goes on when workers fail: `on_failure="restart"` and "drop", on the predictable world."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from benchmarks.soak import Skipped, soak, write_docs

from reap.backends.remote import rpc
from reap.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector, RPCCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv, ParallelEnv
from reap.envs.transforms import NormalizeObservation, TransformedEnv
from reap.errors import SpecMismatch, UsageError, WorkerDied, WorkerRaised, WrongState
from reap.failures import FailurePolicy, RestartBudget
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.faults import KINDS, collect, healthy, pids
from tests.worlds.restarts import LENGTHS, BuildsOnlyWithout, by_lane, check_lane, failing
from tests.worlds.waiting import until

FAULTS = ["kill", "raise", "segfault", "exit", "hang", "stop", "oom"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_fails_is_replaced(kind, fault, tmp_path):
    told, batches = [], []
    options = {"on_failure": "restart", "on_restart": told.append, "timeout": 2.0}
    with collect(kind, [healthy(), failing(tmp_path / "note", fault)], **options) as c:
        while not told or len(batches) < 12:
            batches.append(c.next())
        batches += [c.next() for _ in range(12)]
        stats = c.stats()
        assert (stats["restarts"], stats["workers_alive"]) == (1, 2)
        assert stats["frames"] == sum(int(batch["collector", "mask"].sum()) for batch in batches)
    (failure,) = told
    assert (failure.worker, failure.action, failure.restarts) == (1, "restart", 1)
    assert "worker 1" in str(failure.cause)
    assert failure.seconds < 5.0
    lanes = by_lane(batches, kind)
    assert check_lane(lanes[0], 0) == 0
    assert check_lane(lanes[1], 1) <= 1  # of the asynchronous one's last rollouts some may have been on their way
    if kind is MultiSyncCollector:
        assert check_lane(lanes[1], 1) == 1
        assert len(lanes[0]) == len(lanes[1]) + (fault in ("raise", "oom"))  # that one was made anew in its place


@pytest.mark.parametrize("kind", [MultiAsyncCollector, DistributedCollector])
def test_nothing_more_is_asked_of_one_that_was_left_out(kind):
    """Its last rollouts are delivered, also copied, where the consumer holds others: their slots are not given out."""
    with collect(kind, [healthy(), healthy(1)], on_failure="drop") as c:
        held = [c.next()]
        supervisor = c._backend.supervisor
        supervisor.drain()
        os.kill(pids(c)[1], signal.SIGKILL)
        while not supervisor.workers[1].dropped:
            supervisor.listen()
        while any(worker.index == 1 for worker, _ in supervisor.arrived):
            held.append(c.next())
        assert sum(batch.origin.worker == 1 for batch in held) > 2
        assert not supervisor.workers[1].pending_slots


def no_descriptors(text):
    return OSError(errno.EMFILE, text)


@pytest.mark.parametrize(("error", "restarts"), [(KeyboardInterrupt, 1), (WorkerDied, 2), (no_descriptors, 2)])
def test_a_replacement_whose_launch_is_broken_off_or_fails_is_launched_again(error, restarts, monkeypatch):
    """Ctrl-C comes while an actor starts; it dies before it has said where it is; all descriptors are in use."""
    with collect(MultiSyncCollector, [healthy(), healthy(1)], on_failure="restart") as c:
        c.next()
        transport, errors = c._backend.supervisor.transport, [error("died at once")]
        launch = transport.launch

        def fails_once(workers):
            if errors:
                raise errors.pop()
            launch(workers)

        monkeypatch.setattr(transport, "launch", fails_once)
        os.kill(pids(c)[1], signal.SIGKILL)
        broken_off = 0
        while not c.stats()["restarts"] or errors:
            try:
                c.next()
            except KeyboardInterrupt:
                broken_off += 1
        assert broken_off == (error is KeyboardInterrupt)
        c.next()
        assert c.stats()["restarts"] == restarts
        assert c.stats()["workers_alive"] == 2


def test_one_that_is_replaced_while_all_start_is_logged_as_ready_once(tmp_path, caplog):
    (tmp_path / "note").touch()
    with caplog.at_level(logging.INFO, "reap.workers"):
        makers = [healthy(), lambda: BuildsOnlyWithout(tmp_path, "exit")]
        with collect(MultiSyncCollector, makers, on_failure="restart") as c:
            assert c.stats()["restarts"] == 1
    assert sum("is ready" in record.getMessage() for record in caplog.records) == 2


def test_a_mistake_in_a_replacement_is_raised_at_once(tmp_path):
    """Every further replacement would make it too."""
    note = tmp_path / "note"

    def mistaken_later():
        if note.exists():
            raise UsageError("a mistake")
        return CountingEnv(LENGTHS, 1)

    c = collect(MultiSyncCollector, [healthy(), mistaken_later], on_failure="restart")
    c.next()
    note.touch()
    os.kill(pids(c)[1], signal.SIGKILL)
    with pytest.raises(UsageError, match="a mistake$"):
        while True:
            c.next()
    assert c.stats()["restarts"] == 1


def test_a_replacement_whose_policy_has_other_weights_is_refused(tmp_path):
    """It could not read those that are published for all."""
    note = tmp_path / "note"

    def policy():
        made = EchoPolicy()
        if note.exists():
            made.weight = torch.nn.Parameter(torch.ones(1))
        return made

    c = MultiSyncCollector(
        [healthy(), healthy(1)], policy_factory=policy, frames_per_batch=8, total_frames=-1, on_failure="restart"
    )
    c.next()
    note.touch()
    os.kill(pids(c)[1], signal.SIGKILL)
    with pytest.raises(SpecMismatch, match="worker 1.*its policy has different weights from the others'"):
        for _ in range(20):
            c.next()
    assert c.closed


def test_weights_for_workers_that_were_dropped_are_no_version():
    with collect(MultiSyncCollector, [healthy(), healthy(1)], on_failure="drop", track_policy_version=True) as c:
        c.next()
        os.kill(pids(c)[1], signal.SIGKILL)
        while not c._backend.workers[1].dropped:
            c.next()
        c.update_policy_weights_({"weight": torch.tensor(2.0)}, worker_ids=[1])
        c.update_policy_weights_({1: {"weight": torch.tensor(2.0)}})
        assert c.policy_version == 0
        with pytest.raises(UsageError, match="there is no worker 2"):
            c.update_policy_weights_({"weight": torch.tensor(2.0)}, worker_ids=[1, 2])
        c.update_policy_weights_({w: {"weight": torch.tensor(2.0)} for w in (0, 1)})
        assert c.policy_version == c.next()["policy_version"].max() == 1


def test_what_ended_a_worker_is_the_cause_where_no_other_can_be_launched(monkeypatch):
    def launch(workers):
        raise ConnectionError("there is no room")

    c = collect(MultiSyncCollector, [healthy(), healthy(1)], on_failure="restart")
    c.next()
    monkeypatch.setattr(c._backend.supervisor.transport, "launch", launch)
    os.kill(pids(c)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL.*; there is no room") as caught:
        while True:
            c.next()
    assert isinstance(caught.value.__cause__, WorkerDied)
    assert "SIGKILL" in str(caught.value.__cause__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["kill", "raise", "hang"])
def test_a_worker_that_fails_is_left_out(kind, fault, tmp_path):
    told, batches = [], []
    options = {"on_failure": "drop", "on_restart": told.append, "timeout": 1.0}
    with collect(kind, [healthy(), failing(tmp_path / "note", fault)], **options) as c:
        while not told or len(batches) < 12:
            batches.append(c.next())
        for _ in range(6):
            batches.append(c.next())
            if kind is MultiSyncCollector:
                assert batches[-1].batch_size == torch.Size([2, 4])
                assert not batches[-1]["collector", "mask"][1].any()
                assert (batches[-1]["collector", "traj_ids"][1] == -1).all()
                assert not batches[-1]["observation"][1].any()
        assert (c.stats()["restarts"], c.stats()["workers_alive"]) == (0, 1)
        assert c.stats()["frames"] == sum(int(batch["collector", "mask"].sum()) for batch in batches)
        assert c.get_distant_attr("env.spec.lanes") == [1]
        c.update_policy_weights_()
        state = c.state_dict()
        assert "worker1" not in state
        os.kill(pids(c)[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="worker 0"):
            for _ in range(20):
                c.next()
    assert [failure.action for failure in told] == ["drop", "drop"]
    lanes = by_lane(batches, kind)
    for lane in lanes:
        check_lane(lanes[lane], lane)


def test_what_was_answered_by_one_that_is_dropped_is_not_taken_for_anothers(tmp_path):
    """It answers, and dies before the others have."""
    dropped = tmp_path / "dropped"

    def own(view):
        until(lambda: not view.worker_idx or dropped.exists())
        return view.worker_idx

    def kill_once_it_has_answered(worker):
        until(lambda: worker.inbox)
        os.kill(worker.child.pid, signal.SIGKILL)
        until(lambda: worker.dropped)
        dropped.touch()

    with collect(MultiSyncCollector, [healthy()] * 3, frames_per_batch=9, on_failure="drop") as c:
        c.next()
        killer = threading.Thread(target=kill_once_it_has_answered, args=[c._backend.workers[0]])
        killer.start()
        assert c.map_fn("apply", [(own,)] * 3) == [1, 2]
        killer.join()
        assert [name for name in c.state_dict() if name.startswith("worker")] == ["worker1", "worker2"]
        assert not c.explain().startswith("workers")
        with pytest.raises(WrongState, match="worker 0 has failed and was dropped"):
            c.get_cached_weights(worker=0)


OPERATIONS = {
    "next": lambda c: c.next(),
    "update": lambda c: c.update_policy_weights_({w: {"weight": torch.tensor(2.0)} for w in (0, 1)}),
    "set_seed": lambda c: c.set_seed(5),
    "state_dict": lambda c: c.state_dict(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
def test_on_restart_may_use_the_collector(kind, on_failure, operation):
    """Whatever operation has met the failure: it has ended by then, and what the function does is not mixed with it."""
    states = []

    def told(failure):
        c.update_policy_weights_({w: {"weight": torch.tensor(2.0)} for w in (0, 1)})
        states.append(c.state_dict())
        c.reset()

    with collect(kind, [healthy(), healthy(1)], on_failure=on_failure, on_restart=told) as c:
        c.next()
        os.kill(pids(c)[1], signal.SIGKILL)
        until(c._backend.workers[1].child.gone)
        found = []
        thread = threading.Thread(target=lambda: found.append(OPERATIONS[operation](c)), daemon=True)
        thread.start()
        until(lambda: found)
        while not states:
            c.next()
        batches = [c.next().clone() for _ in range(8)]
        assert len(states) == 1
        assert ("worker1" in states[0]) == (on_failure == "restart")
        for batch in batches:
            rows = batch[batch["collector", "mask"]]
            echo = (rows["observation"] * EchoPolicy().mix).sum(-1, keepdim=True)
            assert torch.equal(rows["action"], 2 * echo)


def test_on_restart_may_use_a_collector_in_the_background():
    """In its thread, too, no lock of ours is held meanwhile: another thread may wait for it."""
    buffer, states = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=8), []

    def told(failure):
        thread = threading.Thread(target=lambda: states.append(c.state_dict()), daemon=True)
        thread.start()
        until(lambda: states)

    options = {"replay_buffer": buffer, "on_failure": "restart", "on_restart": told}
    with collect(MultiAsyncCollector, [healthy(), healthy(1)], **options) as c:
        c.start()
        os.kill(pids(c)[1], signal.SIGKILL)
        until(lambda: states)
        assert {"worker0", "worker1"} <= states[0].keys()


def test_the_others_rows_stay_and_the_newcomer_has_the_latest_weights(tmp_path):
    """Also those that were given to it alone; and a seeded run is the same when it is repeated, failures included."""
    policy, found = EchoPolicy(), []
    for _ in range(2):
        with collect(
            MultiSyncCollector, [healthy(), failing(tmp_path / "note", "kill")], policy, on_failure="restart"
        ) as c:
            c.set_seed(5)
            c.update_policy_weights_({1: {"weight": torch.tensor(2.0)}})
            batches = [c.next().clone() for _ in range(8)]
            assert c.stats()["restarts"] == 1
            mix = torch.tensor([3.0, 5.0, 7.0])
            for batch in batches:
                echo = (batch["observation"] * mix).sum(-1, keepdim=True)
                assert torch.equal(batch["action"][0], echo[0])
                assert torch.equal(batch["action"][1], 2 * echo[1])
            c.update_policy_weights_({"weight": torch.tensor(3.0), "mix": mix})
            batch = c.next()
            assert torch.equal(batch["action"], 3 * (batch["observation"] * mix).sum(-1, keepdim=True))
            found.append(torch.stack(batches))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_worker_that_dies_while_it_is_built_counts(fault, tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    makers = [healthy(), lambda: BuildsOnlyWithout(tmp_path, fault)]
    with collect(MultiSyncCollector, makers, on_failure="restart") as c:
        assert c.stats()["restarts"] == 2
        check_lane(c.next()[1], 1)
    for n in range(4):
        (tmp_path / str(n)).touch()
    with pytest.raises((WorkerDied, WorkerRaised), match=r"worker 1.*max_restarts=2, restart_window=600"):
        collect(MultiSyncCollector, makers, on_failure="restart", max_restarts=2)


def test_too_many_restarts_are_told_with_the_cause():
    class Always(CountingEnv):
        def step(self, action):
            raise RuntimeError("broken for good")

    c = collect(MultiSyncCollector, [healthy(), Always], on_failure="restart", max_restarts=3)
    with pytest.raises(
        WorkerRaised, match=r"worker 1.*broken for good.*the restart limit is reached: 3 within"
    ) as caught:
        c.next()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert c.closed


def test_a_budget_is_for_a_window():
    budget = RestartBudget(FailurePolicy("restart", 2, window=0.05))
    assert [budget.spend(0) for _ in range(2)] == [None, None]
    assert "max_restarts=2, restart_window=0.05" in budget.spend(0)
    until(lambda: budget.spend(0) is None)
    assert budget.count == 3
    assert "10 replacements in a row" in budget.spend(10), "one that is never there is not tried for ever"


@pytest.mark.parametrize("parallel", [False, True])
def test_the_limit_that_was_reached_is_the_one_that_is_told(parallel, tmp_path):
    """Also where any number may be started again, one that is never there is given up."""

    class NeverAgain(CountingEnv):
        def __init__(self):
            if (tmp_path / "built").exists():
                raise OSError("the simulator is gone")
            super().__init__(LENGTHS, 0)

        def step(self, action):
            (tmp_path / "built").touch()
            raise OSError("the simulator has gone")

    options = {"on_failure": "restart", "max_restarts": None}
    if parallel:
        c = Collector(ParallelEnv(1, NeverAgain, **options), EchoPolicy(), frames_per_batch=8)
    else:
        c = collect(MultiSyncCollector, [NeverAgain], **options)
    with pytest.raises(
        WorkerRaised, match="the simulator is gone.*10 replacements in a row failed before they were ready"
    ) as caught:
        c.next()
    assert "max_restarts" not in str(caught.value)


def test_a_worker_that_came_back_at_last_may_fail_again(tmp_path):
    """How often it was tried before does not count any more."""
    makers = [lambda: BuildsOnlyWithout(tmp_path, "raise")]
    with collect(MultiSyncCollector, makers, on_failure="restart", max_restarts=None) as c:
        for n in range(9):
            (tmp_path / str(n)).touch()
        for restarts in (10, 11):
            os.kill(pids(c)[0], signal.SIGKILL)
            c.next()
            assert c.stats()["restarts"] == restarts


@pytest.mark.parametrize("call", ["state_dict", "set_seed", "reset", "update"])
def test_a_call_that_meets_a_death_is_answered_by_the_newcomer(call):
    with collect(MultiSyncCollector, [healthy(), healthy(1)], on_failure="restart") as c:
        c.next()
        os.kill(pids(c)[1], signal.SIGKILL)
        if call == "state_dict":
            assert set(c.state_dict()) >= {"worker0", "worker1"}
        elif call == "set_seed":
            c.set_seed(3)
        elif call == "reset":
            c.reset()
        else:
            c.update_policy_weights_({1: {"weight": torch.tensor(2.0)}})
        c.next()
        assert c.stats()["restarts"] == 1


def test_ids_stay_new_after_a_load():
    """A state that was saved after a restart, then another restart: no id is given a second time."""
    lanes = {0: [], 1: []}
    state = None
    for _ in range(2):
        with collect(MultiSyncCollector, [healthy(), healthy(1)], on_failure="restart") as c:
            if state is not None:
                c.load_state_dict(state)
            for _ in range(2):
                os.kill(pids(c)[1], signal.SIGKILL)
                for _ in range(3):
                    batch = c.next()
                    for lane in (0, 1):
                        lanes[lane] += batch["collector", "traj_ids"][lane].tolist()
            state = c.state_dict()
    for ids in lanes.values():
        runs = [one for n, one in enumerate(ids) if n == 0 or ids[n - 1] != one]
        assert len(runs) == len(set(runs)), "an id was given twice"


def test_into_a_buffer(tmp_path):
    """Workers that write rows themselves: what was written stays, and only that."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(4096), batch_size=8)
    options = {"replay_buffer": buffer, "on_failure": "restart"}
    with collect(MultiSyncCollector, [healthy(), failing(tmp_path / "note", "kill")], **options) as c:
        for _ in range(12):
            c.next()
        assert c.stats()["restarts"] == 1
        rows = buffer[:]
        assert len(rows) == c.stats()["frames"] == 96
    for lane in (0, 1):
        check_lane(rows[rows["observation"][:, 0] == lane], lane)


@pytest.mark.parametrize("fault", ["kill", "raise", "hang"])
def test_in_the_background(fault, tmp_path):
    """Nobody looks: it is replaced all the same, and goes on."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=8)
    told = []
    timeout = 2.0 if fault == "hang" else None  # a newcomer on a busy machine takes its time, too
    options = {"replay_buffer": buffer, "on_failure": "restart", "on_restart": told.append, "timeout": timeout}
    with collect(MultiAsyncCollector, [healthy(), failing(tmp_path / "note", fault)], **options) as c:
        c.start()
        until(lambda: told)
        with c.pause():
            before = len(buffer)
        until(lambda: len(buffer) >= before + 400)
        with c.pause():
            rows = buffer[:]
            assert len(rows) == c.stats()["frames"]
        assert c.stats()["workers_alive"] == 2
    for lane in (0, 1):
        check_lane(rows[rows["observation"][:, 0] == lane], lane)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
@pytest.mark.parametrize("kind", [DistributedCollector, RPCCollector])
def test_remote_workers_of_this_machine(kind, sync, on_failure, tmp_path):
    told, batches = [], []
    makers = [healthy(), failing(tmp_path / "note", "kill")]
    options = {"on_failure": on_failure, "on_restart": told.append, "sync": sync}
    with collect(kind, makers, **options) as c:
        while not told or len(batches) < 12:
            batches.append(c.next())
        for _ in range(8):
            c.update_policy_weights_()
            batches.append(c.next())
        assert c.stats()["workers_alive"] == (2 if on_failure == "restart" else 1)
        if sync and on_failure == "drop":
            assert not batches[-1]["collector", "mask"][1].any()
    for lane, rows in by_lane(batches, MultiSyncCollector if sync else MultiAsyncCollector).items():
        check_lane(rows, lane)


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_remote_worker_that_lives_on_is_replaced(fault, tmp_path):
    told, batches = [], []
    makers = [healthy(), failing(tmp_path / "note", fault)]
    with collect(RPCCollector, makers, sync=True, on_failure="restart", on_restart=told.append, timeout=2.0) as c:
        while not told or len(batches) < 12:
            batches.append(c.next())
    lanes = by_lane(batches, MultiSyncCollector)
    assert (check_lane(lanes[0], 0), check_lane(lanes[1], 1)) == (0, 1)


def test_rpc_says_when_there_are_no_descriptors_for_another(tmp_path, monkeypatch):
    """Torch keeps those of agents that died; before there are none left, the run ends with an error that says so."""
    c = collect(RPCCollector, [healthy(), healthy(1)], sync=True, on_failure="restart")
    c.next()
    monkeypatch.setattr(rpc, "_SPARE_DESCRIPTORS", 2**30)
    os.kill(pids(c)[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="worker 1.*SIGKILL.*torch keeps the descriptors of every agent that died"):
        for _ in range(20):
            c.next()
    assert c.closed


def test_wrong_settings():
    for wrong, words in (
        ({"on_failure": "retry"}, "on_failure must be .*got 'retry'"),
        ({"on_failure": "restart", "max_restarts": -1}, "max_restarts"),
        ({"on_failure": "restart", "restart_window": 0}, "restart_window"),
        ({"on_failure": "restart", "on_restart": 3}, "on_restart"),
        ({"on_restart": print}, "on_restart is never called"),
        ({"on_failure": "drop", "compact_obs": True}, "compact_obs needs complete rows"),
    ):
        with pytest.raises(UsageError, match=words):
            collect(AsyncCollector, [healthy()], **wrong)


def test_episodes_are_counted_over_all_lives(tmp_path):
    with collect(MultiSyncCollector, [healthy(), failing(tmp_path / "note", "kill")], on_failure="restart") as c:
        ends = 0
        for _ in range(12):
            ends += int(c.next()["next", "done"].sum())
        assert c.stats()["episodes"] == ends
        assert np.isfinite(c.stats()["mean_return"])


@pytest.mark.parametrize("fault", ["kill", "raise", "hang"])
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
@pytest.mark.parametrize("limit", [None, 4])
def test_processes_of_a_parallel_env(fault, on_failure, limit, tmp_path):
    """In the middle of a rollout and at its end: the step is lost to the lanes of that process, and to no other."""
    told = []
    late = failing(tmp_path / "b", fault, at=32, lane=3)
    makers = [healthy(), failing(tmp_path / "a", fault, at=18), healthy(2), late]
    env = ParallelEnv(4, makers, on_failure=on_failure, on_restart=told.append, timeout=1.0)
    with Collector(env, EchoPolicy(), frames_per_batch=64, total_frames=384, max_frames_per_traj=limit) as c:
        rows = torch.cat([batch.clone() for batch in c], 1)
        assert c.stats()["episodes"] == int(rows["next", "done"].sum())
        assert c.stats()["frames"] == int(rows["collector", "mask"].sum())
    assert [failure.worker for failure in told] == [1, 3]
    for lane in range(4):
        mask = rows["collector", "mask"][lane]
        assert not rows["observation"][lane][~mask].any()
        cuts = check_lane(rows[lane][mask], lane, limit)
        assert cuts == (1 if lane in (1, 3) and on_failure == "restart" else 0)
        if limit is not None:
            count = rows["step_count"][lane][mask][:, 0]
            assert torch.equal(count.float(), rows["observation"][lane][mask][:, 2])


def test_a_parallel_env_by_hand_is_refused():
    """Nobody would be told that a lane was cut."""
    env = ParallelEnv(2, healthy(), on_failure="restart")
    td = env.reset()
    with pytest.raises(UsageError, match="only a collector can skip"):
        env.step(env.rand_action(td))
    env.close()


def test_a_recurrent_policy_forgets_lanes_that_were_cut(tmp_path):
    class Sums(torch.nn.Module):
        """Its carry is the sum of the steps it saw in this episode."""

        def __init__(self):
            super().__init__()
            self.carry = {"seen": torch.zeros(1)}

        def forward(self, observation, seen):
            seen = seen + observation[..., 2:3]
            return seen, seen

    env = ParallelEnv(2, [healthy(), failing(tmp_path / "a", "kill", at=18)], on_failure="restart")
    with Collector(env, Sums(), frames_per_batch=32, total_frames=128) as c:
        rows = torch.cat([batch.clone() for batch in c], 1)
    step = rows["observation"][..., 2]
    assert rows["collector", "cut"].sum() == 1
    assert torch.equal(rows["action"][..., 0], step * (step + 1) / 2)


LONG = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("nodes", "ray")]


@pytest.mark.parametrize("kind", ["sync", "async", "background", "memmap", "parallel", "gloo", "rpc", *LONG])
def test_a_short_soak(kind):
    """Faults of every kind at random moments; every row is looked at (`make soak` for the long one)."""
    try:
        found = soak(kind, faults=3, every=1500)
    except Skipped as why:
        pytest.skip(str(why))
    assert found["faults"] >= 3
    assert sum(found["causes"].values()) == found["faults"]
    assert sum(found["injected"].values()) >= found["faults"]
    kept = 24 * found["faults"] if kind == "rpc" else 0  # torch's own, of agents that died
    for name in ("descriptors", "children"):
        before, after = found["held"][name]
        assert after <= before + found["workers"] + kept, name  # a process that is another has one more, however often


def test_what_soaks_have_found_is_told(tmp_path):
    """Several runs make one table and one chart."""
    found = soak("parallel", faults=1, every=200)
    record = {"date": "today", "commit": "x", "machine": {"cores": 2}, "found": [found], "skipped": {"ray": "not here"}}
    page = tmp_path / "failures.md"
    page.write_text("before\n<!-- soak -->\nold\n<!-- end -->\nafter\n")
    write_docs([record, record], page)
    told = page.read_text()
    assert "old" not in told
    assert "Skipped: ray (not here)." in told
    assert f"{2 * found['frames'] / 1e6:.3g} million | {2 * sum(found['injected'].values())} |" in told
    assert told.endswith("<!-- end -->\nafter\n")
    assert (tmp_path / "soak.svg").stat().st_size > 1000


class Constant(gym.Env):
    """Observes the same number for ever, and dies in its step if there is a file that says so."""

    def __init__(self, value, note):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.value, self.note = np.array([value], np.float32), note

    def reset(self, *, seed=None, options=None):
        return self.value, {}

    def step(self, action):
        if self.note is not None and self.note.exists():
            self.note.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.value, 0.0, False, False, {}


@pytest.mark.parametrize("resumes", [False, True])
def test_a_replacement_begins_with_the_running_statistics_of_all(tmp_path, resumes):
    """The two workers observe 5 and -5: an env that has the statistics of both normalises them to about 1 and -1."""
    note, how = tmp_path / "die", NormalizeObservation()
    makers = [
        lambda: TransformedEnv(GymEnv(Constant(5.0, note)), how),
        lambda: TransformedEnv(GymEnv(Constant(-5.0, None)), how),
    ]
    options = {"deterministic": True} if resumes else {}
    with MultiSyncCollector(makers, frames_per_batch=32, total_frames=-1, on_failure="restart", **options) as c:
        for _ in range(6):
            c.next()
        note.touch()
        while not c.stats()["restarts"]:
            c.next()
        rows = torch.cat([c.next()["observation"].reshape(-1) for _ in range(4)])
        state, frames = c.state_dict(), c.stats()["frames"]
    assert (rows.abs() > 0.5).all(), rows
    assert {*rows.sign().tolist()} == {1.0, -1.0}
    assert how.statistics().count >= frames
    with MultiSyncCollector(makers, frames_per_batch=32, total_frames=-1, **options) as c:
        c.load_state_dict(state)
        c.next()
    assert how.statistics().count >= frames


def test_what_a_dropped_worker_has_seen_is_kept(tmp_path):
    note, how = tmp_path / "die", NormalizeObservation()
    makers = [
        lambda: TransformedEnv(GymEnv(Constant(5.0, note)), how),
        lambda: TransformedEnv(GymEnv(Constant(-5.0, None)), how),
    ]
    with MultiSyncCollector(makers, frames_per_batch=32, total_frames=-1, on_failure="drop") as c:
        for _ in range(6):
            c.next()
        note.touch()
        while c.stats()["workers_alive"] == 2:
            c.next()
        state, frames = c.state_dict(), c.stats()["frames"]
    with MultiSyncCollector(makers, frames_per_batch=32, total_frames=-1) as c:
        c.load_state_dict(state)
        c.next()
    assert how.statistics().count >= frames
