"""`stats()`: one shape in every collector, from its construction to after its end; one window of episodes."""

import pytest

from reap.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector, DistributedSyncCollector
from reap.core.stats import EpisodeWindow, Stats
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.testing import CountingEnv, EchoPolicy
from tests.faults.worlds import healthy

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
    "episodes",
    "mean_return",
    "mean_length",
    "nan_rewards",
    "collect_seconds",
    "frames_per_second",
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
    changed = {"workers_alive", "collect_seconds", "frames_per_second", "episodes", "mean_return", "mean_length"}
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


def test_a_window_keeps_the_last_hundred_by_their_ends():
    import numpy as np

    window = EpisodeWindow()
    assert window.means() == {"mean_return": None, "mean_length": None}
    even, odd = (np.array([[t, t, 2 * t] for t in range(begin, 300, 2)], np.float64) for begin in (0, 1))
    window.add(even[-100:])
    window.add(odd[-100:])
    assert window.means() == {"mean_return": np.arange(200, 300).mean(), "mean_length": 2 * np.arange(200, 300).mean()}
    assert window.ended_since()[:, 0].tolist() == list(range(200, 300))
    assert len(window.ended_since()) == 0
    window.add(even[:1], shift=1000.0)  # of another clock
    assert window.ended_since()[:, 0].tolist() == [1000.0]


def test_what_nobody_was_told_of_is_told_once():
    import numpy as np

    stats = Stats(1)
    for _ in range(2):
        stats.begin()
        stats.rollout(np.ones((6, 1)), np.array([1, 3]), np.array([0, 0]), frames=6)
        stats.end()
    told = stats.ended_since()
    assert told[:, 1:].tolist() == [[2, 2], [2, 2], [4, 4], [2, 2]]
    assert (np.diff(told[:, 0]) > 0).all()
    assert len(stats.ended_since()) == 0
