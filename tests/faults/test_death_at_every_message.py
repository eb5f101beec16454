"""A worker dies at every message there is: before it is sent, when it has been answered, when the answer was heard.

Whatever is asked of a collector meanwhile, afterwards frames, versions, ids, statistics and weights are what they are
without it.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch

from reap.backends.local.shared_memory import ProcessConnection
from reap.collectors import MultiAsyncCollector, MultiSyncCollector
from reap.testing import EchoPolicy
from tests.worlds.faults import all_gone, collect, healthy
from tests.worlds.restarts import check_lane

DYING = 0  # the worker that does


class Death:
    """Inside, worker 0 dies at message number `at`: of those to it and from it."""

    def __init__(self, monkeypatch, at):
        self.at, self.seen, self.where, self._patch = at, 0, "", monkeypatch

    def __enter__(self):
        call, fill, hear = (getattr(ProcessConnection, name) for name in ("call", "fill", "receive"))

        def ask(connection, data):
            self.moment(connection, "before it is asked")
            call(connection, data)

        def give(connection, slot, *, random):
            self.moment(connection, "before it is given a slot")
            fill(connection, slot, random=random)

        def listen(connection):
            self.moment(connection, "when it has spoken")
            said, gone = hear(connection)
            if not gone:
                self.moment(connection, "when it was heard")
            return said, gone

        for name, function in (("call", ask), ("fill", give), ("receive", listen)):
            self._patch.setattr(ProcessConnection, name, function)
        return self

    def moment(self, connection, what):
        if connection.index != DYING:
            return
        self.seen += 1
        if self.seen == self.at:
            self.where = what
            os.kill(connection.child.pid, signal.SIGKILL)
            assert all_gone([connection.child.pid], 20)

    def __exit__(self, *_):
        self._patch.undo()


class Run:
    """A collector on the predictable world, and all that it has delivered."""

    def __init__(self, kind, on_failure, *, deterministic=False):
        options = {"on_failure": on_failure, "track_policy_version": True, "deterministic": deterministic}
        self.kind, self.drops = kind, on_failure == "drop"
        self.collector = collect(kind, [healthy(0), healthy(1)], max_restarts=None, **options)
        self.weights, self.version, self.frames, self.ends = {0: 1.0}, 0, 0, 0
        self.lanes = {0: [[]], 1: [[]]}  # rows of each lane, since the beginning and since each time it began anew

    def update(self, apart):
        weight = torch.tensor(float(len(self.weights) + 1))
        self.collector.update_policy_weights_({w: {"weight": weight} for w in (0, 1)} if apart else {"weight": weight})
        self.version += 1
        self.weights[self.version] = float(weight)

    def reset_all_next(self, act):
        act()
        for rows in self.lanes.values():
            rows.append([])

    def take(self):
        batch = self.collector.next()
        for lane in (0, 1) if self.kind is MultiSyncCollector else (batch.origin.worker,):
            rows = batch[lane] if self.kind is MultiSyncCollector else batch
            if "mask" in rows["collector"].keys():
                rows = rows[rows["collector", "mask"]]
            if not len(rows):
                continue
            rows = rows.clone()
            self.frames, self.ends = self.frames + len(rows), self.ends + int(rows["next", "done"].sum())
            (version,) = rows["policy_version"].unique().tolist()
            if self.kind is MultiSyncCollector:
                assert version == self.version, "nobody acts with older weights"
            echo = (rows["observation"] * EchoPolicy().mix).sum(-1, keepdim=True)
            assert torch.equal(rows["action"], self.weights[version] * echo), f"weights are not those of {version}"
            rows["action"] = echo  # as of weight 1: what `check_lane` knows
            rows["next", "reward"] = rows["next", "observation"][:, 2:] + echo / 8
            self.lanes[lane][-1].append(rows)

    def knows(self):
        """Whether the collector knows of a death: a process may be gone before the collector has read of it."""
        if not self.drops:
            return self.collector.stats()["restarts"] > 0
        return any(worker.dropped for worker in self.collector._backend.workers)

    def check(self, deaths):
        stats = self.collector.stats()
        assert stats["frames"] == self.frames
        assert stats["restarts"] == (0 if self.drops else deaths)
        if self.kind is MultiSyncCollector:
            assert stats["episodes"] == self.ends
        state = self.collector.state_dict()
        living = [w for w in (0, 1) if f"worker{w}" in state]
        assert living == ([0, 1] if not self.drops or not deaths else [1])
        if self.kind is MultiSyncCollector:
            made = {w: sum(len(rows) for since in self.lanes[w] for rows in since) for w in living}
            assert {w: state[f"worker{w}"]["frames"] for w in living} == made
        for w in living:
            assert float(self.collector.get_cached_weights(worker=w)["weight"]) == self.weights[self.version]
        for lane, rows in self.lanes.items():
            seen = set()
            for since in (torch.cat(one) for one in rows if one):
                check_lane(since, lane)
                ids = set(since["collector", "traj_ids"].tolist())
                assert not ids & seen, "an id was given twice"
                seen |= ids


def scenario(run):
    """Everything that is said to workers, once."""
    run.update(apart=True)
    run.take()
    run.update(apart=False)
    run.take()
    run.collector.state_dict()
    run.reset_all_next(run.collector.reset)
    run.update(apart=True)
    run.take()
    run.reset_all_next(lambda: run.collector.set_seed(3))
    run.take()


def dies_at(monkeypatch, at, kind, on_failure, *, deterministic=False):
    """One run in which worker 0 dies at its `at`-th message; returns whether there were so many."""
    run = Run(kind, on_failure, deterministic=deterministic)
    with run.collector:
        with Death(monkeypatch, at) as death:
            scenario(run)
        try:
            for _ in range(4):
                run.take()
            while death.seen >= at and not run.knows():
                run.take()  # they come as they are ready: all so far may be the other worker's
            run.check(deaths=int(death.seen >= at))
        except BaseException as error:
            raise AssertionError(f"after a death at message {at}, {death.where}: {error}") from error
    return death.seen >= at


@pytest.mark.parametrize(
    ("kind", "on_failure", "at"),
    [(MultiSyncCollector, "restart", 2), (MultiSyncCollector, "drop", 9), (MultiAsyncCollector, "restart", 7)],
)
def test_at_some(kind, on_failure, at, monkeypatch):
    assert dies_at(monkeypatch, at, kind, on_failure)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("on_failure", ["restart", "drop"])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_every_one(kind, on_failure, deterministic, monkeypatch):
    at = 1
    while dies_at(monkeypatch, at, kind, on_failure, deterministic=deterministic):
        at += 1
    assert at > 20
