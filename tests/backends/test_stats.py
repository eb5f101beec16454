"""`stats()`: one shape in every collector, from its construction to after its end; one window of episodes."""

import time

import numpy as np
import pytest

from reap.collectors import AsyncBatchedCollector, AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector, DistributedSyncCollector
from reap.core.measuring.episode_log import COLUMNS, DISCOUNTED, LENGTH, RETURN, TIME, WORKER, EpisodeLog
from reap.core.measuring.stats import Stats
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.faults import healthy

SPLIT = {f"{what}_seconds" for what in ("env", "policy", "loop", "transport", "wait")}
KEYS = {
    "workers",
    "workers_alive",
    "restarts",
    "frames",
    "batches",
    "total_frames",
    "completed",
    "requested_frames_per_batch",
    "policy_version",
    "dropped_frames",
    "worker_frames",
    "episodes",
    "mean_return",
    "mean_length",
    *(f"{what}_p{share}" for what in ("return", "length") for share in (10, 50, 90)),
    "nan_rewards",
    "collect_seconds",
    "frames_per_second",
    *SPLIT,
}
KINDS = {
    "one process": lambda **o: Collector(healthy(), EchoPolicy(), **o),
    "one worker": lambda **o: AsyncCollector(healthy(), EchoPolicy(), **o),
    "in step": lambda **o: MultiSyncCollector([healthy()] * 2, EchoPolicy(), **o),
    "first come": lambda **o: MultiAsyncCollector([healthy()] * 2, EchoPolicy(), **o),
    "gloo": lambda **o: DistributedCollector([healthy()] * 2, EchoPolicy(), **o),
    "gloo with processes": lambda **o: DistributedSyncCollector(
        [healthy()], EchoPolicy(), collector_class="sync", num_workers_per_collector=2, **o
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_keys_from_the_beginning_to_after_the_end(kind):
    collector = KINDS[kind](frames_per_batch=80)
    workers = collector.stats()["workers"]
    before = collector.stats()
    assert before.keys() == KEYS
    assert (before["episodes"], before["mean_return"], before["mean_length"], before["frames"]) == (0, None, None, 0)
    collector.next()
    during = collector.stats()
    collector.shutdown()
    after = collector.stats()
    assert during.keys() == after.keys() == KEYS
    assert during["episodes"] > 0
    assert during["mean_return"] is not None
    changed = {"workers_alive", "collect_seconds", "frames_per_second", "episodes", "worker_frames", *SPLIT}
    changed |= {key for key in KEYS if "return" in key or "length" in key}
    assert {key: after[key] for key in KEYS - changed} == {key: during[key] for key in KEYS - changed}
    assert (after["workers"], after["workers_alive"]) == (workers, 0)
    assert after["episodes"] >= during["episodes"]


@pytest.mark.parametrize("kind", ["in step", "first come"])
def test_counts_of_each_worker_have_one_shape_too(kind):
    collector = KINDS[kind](frames_per_batch=80)
    before = collector.stats("both").keys()
    collector.next()
    assert collector.stats("both").keys() == before
    collector.shutdown()
    assert collector.stats("both").keys() == before
    assert {"worker_0/mean_return", "worker_1/mean_length", "worker_1/frames"} <= before
    assert collector.stats("per_worker").keys() == before - (KEYS - {"workers", "workers_alive", "restarts"})


def still(observation):
    return observation[..., :1] * 0


@pytest.mark.parametrize("options", [{}, {"collector_class": "sync", "num_workers_per_collector": 2}], ids=str)
def test_the_window_is_of_all_workers(options):
    """Of 400 episodes of length 2 and 40 of length 20, made side by side, the last hundred hold both, as they ended."""
    kind = DistributedSyncCollector if options else MultiSyncCollector
    envs = [lambda: CountingEnv((2,)), lambda: CountingEnv((20,))]
    envs = envs[:1] if options else envs
    with kind(envs, still, frames_per_batch=1600, **options) as collector:
        collector.next()
        stats = collector.stats("both")
        assert stats["episodes"] == (800 if options else 440)
        if options:
            assert stats["mean_length"] == 2
            return
        assert (stats["worker_0/mean_length"], stats["worker_1/mean_length"]) == (2, 20)  # each has a hundred, or 40
        lengths = stats["mean_length"] * 100
        assert lengths == pytest.approx(round(lengths))  # a hundred episodes, not 140


def test_the_window_of_workers_that_run_free():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4)
    collector = MultiAsyncCollector(
        [lambda: CountingEnv((2,))] * 2, still, frames_per_batch=40, total_frames=800, replay_buffer=buffer
    )
    collector.start()
    assert collector.stats().keys() == KEYS
    while collector.is_running():
        buffer.sample()
    collector.shutdown()
    stats = collector.stats("both")
    assert (stats["episodes"], stats["mean_length"], stats["frames"]) == (400, 2.0, 800)
    assert stats["worker_0/episodes"] + stats["worker_1/episodes"] == 400


def rows(times, values=None):
    """Episodes that ended at these times, as a worker tells of them."""
    found = np.zeros((len(times), len(COLUMNS)))
    found[:, TIME] = times
    found[:, RETURN] = times if values is None else values
    found[:, LENGTH] = 2 * found[:, RETURN]
    found[:, DISCOUNTED] = np.nan
    return found


def test_a_log_summarises_the_last_hundred_by_their_ends():
    log = EpisodeLog()
    assert set(log.summary().values()) == {None}
    log.add(rows(np.arange(0, 300, 2)), 0)
    log.add(rows(np.arange(1, 300, 2)), 1)
    last, own = np.arange(200, 300), np.arange(1, 300, 2)[-100:]
    found = log.summary()
    assert (found["mean_return"], found["mean_length"]) == (last.mean(), 2 * last.mean())
    assert [found[f"return_p{share}"] for share in (10, 50, 90)] == np.percentile(last, (10, 50, 90)).tolist()
    assert [found[f"length_p{share}"] for share in (10, 50, 90)] == (2 * np.percentile(last, (10, 50, 90))).tolist()
    assert log.summary(1)["mean_return"] == own.mean()
    taken = log.take()
    assert taken[:, TIME].tolist() == list(range(300))
    assert taken[:, WORKER].tolist() == [0, 1] * 150
    assert len(log.take()) == 0
    log.add(rows([0.0]), 1, shift=1000.0)  # of another clock
    assert log.take()[:, TIME].tolist() == [1000.0]
    again = EpisodeLog()
    again.load(log.state())
    assert again.summary() == pytest.approx(log.summary())
    assert len(again.take()) == 0  # nobody is told twice


def test_episodes_nobody_asks_for_are_kept_up_to_a_limit_and_counted(monkeypatch):
    from reap.core.measuring import episode_log

    monkeypatch.setattr(episode_log, "KEPT", 10)
    monkeypatch.setattr(episode_log, "_SMALL_ARRAYS", 4)
    log = EpisodeLog()
    for t in range(25):
        log.add(rows([float(t)]))
    with pytest.warns(UserWarning, match="15 episodes were dropped"):
        found = log.records()
    assert [one["return"] for one in found] == list(map(float, range(15, 25)))
    log.add(rows([100.0]))
    assert len(log.records()) == 1  # and it is not said again


def test_what_nobody_was_told_of_is_told_once():
    stats = Stats(1)
    for _ in range(2):
        stats.begin()
        stats.rollout(np.ones((6, 1)), np.array([1, 3]), np.array([0, 0]), frames=6)
        stats.end()
    told = stats.take_episodes()
    assert told[:, [RETURN, LENGTH]].tolist() == [[2, 2], [2, 2], [4, 4], [2, 2]]
    assert (np.diff(told[:, TIME]) > 0).all()
    assert len(stats.take_episodes()) == 0


@pytest.mark.parametrize("kind", [Collector, AsyncBatchedCollector])
def test_making_a_collector_is_no_waiting(kind):
    """`wait_seconds` begins with the first batch that is asked for: envs may take long to be made."""

    def slow():
        time.sleep(0.5)  # what an env has to load
        return CountingEnv([3])

    with kind([slow], EchoPolicy(), frames_per_batch=10) as collector:
        collector.next()
        collector.next()
        assert collector.stats()["wait_seconds"] < 0.4
        time.sleep(0.5)  # the learner
        collector.next()
        assert collector.stats()["wait_seconds"] >= 0.5
