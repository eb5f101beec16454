"""`episodes()`: every episode that has ended, once, in every collector; and its columns in a batch."""

from functools import partial

import numpy as np
import pytest
import torch

from reap.collectors import AsyncBatchedCollector, AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector, DistributedSyncCollector, RPCCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import ParallelEnv, SerialEnv, TorchEnv
from reap.envs.adapters.torch_native import DeviceTorchLanes, TorchLanes
from reap.errors import UsageError
from reap.testing import CountingEnv, EchoPolicy
from tests.backends.episodes import GAMMA, LENGTHS, RECORD, check, lanes_of
from tests.worlds.device import CountingDevice


def serial(**options):
    return Collector(SerialEnv(2, lanes_of(0, 1)), EchoPolicy(), **options), {(0, 0): 0, (0, 1): 1}


def one_lane(**options):
    return Collector(CountingEnv(LENGTHS, 4), EchoPolicy(), **options), {(0, 0): 4}


def processes_of_lanes(**options):
    return Collector(ParallelEnv(2, lanes_of(0, 1)), EchoPolicy(), **options), {(0, 0): 0, (0, 1): 1}


def batched(**options):
    return AsyncBatchedCollector(lanes_of(0, 1, 2), EchoPolicy(), **options), {(0, i): i for i in range(3)}


def of_workers(kind, **more):
    def make(**options):
        return kind(lanes_of(0, 1), EchoPolicy(), **options, **more), {(0, 0): 0, (1, 0): 1}

    return make


def nested(**options):
    kind = partial(DistributedSyncCollector, collector_class="sync", num_workers_per_collector=2)
    # Each remote worker has two processes, with the same env: lanes 0 and 1.
    return kind(lanes_of(5), EchoPolicy(), **options), {(0, 0): 5, (0, 1): 5}


KINDS = {
    "one lane": one_lane,
    "lanes": serial,
    "lanes in processes": processes_of_lanes,
    "batched": batched,
    "one worker": lambda **o: (AsyncCollector(lanes_of(0), EchoPolicy(), **o), {(0, 0): 0}),
    "in step": of_workers(MultiSyncCollector),
    "first come": of_workers(MultiAsyncCollector),
    "gloo": of_workers(DistributedCollector),
    "gloo in step": of_workers(DistributedSyncCollector),
    "rpc": of_workers(RPCCollector),
    "nested": nested,
}


EXACT = ("one lane", "lanes", "lanes in processes", "in step", "gloo in step", "nested")  # nobody goes ahead
SLOW = ("rpc", "nested")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS])
def test_every_episode_is_told_once_from_the_beginning_to_after_the_end(kind):
    collector, names = KINDS[kind](frames_per_batch=36, gamma=GAMMA)
    with collector:
        assert collector.episodes() == []
        found = []
        for _ in range(4):
            collector.next()
            found += collector.episodes()
        found += collector.episodes()
        told = collector.stats()["episodes"]
    found += collector.episodes()
    assert len(found) >= told > 0
    check(found, names, 144 // len(names) if kind in EXACT else None)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_that_write_to_a_buffer(kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    options = {"frames_per_batch": 40, "total_frames": 400, "gamma": GAMMA, "replay_buffer": buffer}
    with kind(lanes_of(0, 1), EchoPolicy(), **options) as collector:
        found = []
        for _ in collector:
            found += collector.episodes()
        assert len(found) == collector.stats()["episodes"]
        check(found, {(0, 0): 0, (1, 0): 1})


@pytest.mark.parametrize("kind", ["lanes", "first come"])
def test_in_the_background(kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(5000), batch_size=4)
    collector, names = KINDS[kind](frames_per_batch=20, total_frames=2000, gamma=GAMMA, replay_buffer=buffer)
    collector.start()
    found = []
    while collector.is_running():
        buffer.sample()
        found += collector.episodes()
    collector.shutdown()
    found += collector.episodes()
    assert len(found) == collector.stats()["episodes"]
    check(found, names)


def test_a_free_worker_keeps_what_there_is_no_room_for():
    from reap.backends.local import shared_counters
    from reap.core.measuring.episode_log import COLUMNS, TIME, UnreportedEpisodes
    from reap.core.shared_slots import SharedFile

    file = SharedFile()
    words = shared_counters.SharedCounters(file, 2)
    file.close()
    unreported = UnreportedEpisodes()
    rows = np.zeros((shared_counters._RING + 10, len(COLUMNS)))
    rows[:, TIME] = np.arange(len(rows))
    unreported.add(rows)
    words.report_ended(1, unreported)
    assert bool(unreported)
    first = words.take_ended(1)
    words.report_ended(1, unreported)
    assert not unreported
    both = np.concatenate([first, words.take_ended(1)])
    assert np.array_equal(both, rows)
    assert len(words.take_ended(0)) == len(words.take_ended(1)) == 0


@pytest.mark.parametrize("kind", ["one lane", "lanes", "batched", "in step"])
def test_columns_of_a_batch(kind):
    collector, _ = KINDS[kind](frames_per_batch=36, track_episodes=True)
    with collector:
        for _ in range(2):
            batch = collector.next()
            steps = batch["next", "observation"][..., 2]
            lane, episode = (batch["observation"][..., i] for i in (0, 1))
            assert torch.equal(batch["collector", "episode_length"], steps.long())
            t = steps.double()
            so_far = t * (t + 1) / 2 + t * (3 * lane + 5 * episode) / 8 + 7 * t * (t - 1) / 16
            assert torch.equal(batch["collector", "episode_return"], so_far)


def test_columns_and_episodes_of_lanes_that_rest():
    c = Collector(
        SerialEnv(2, lanes_of(0, 1)),
        EchoPolicy(),
        frames_per_batch=8,
        reset_when_done=False,
        track_episodes=True,
        gamma=GAMMA,
    )
    batch = c.next()
    mask = batch["collector", "mask"]
    assert torch.equal(batch["collector", "episode_length"], torch.tensor([[1, 2, 3, 0]] * 2))
    assert not batch["collector", "episode_return"][~mask].any()
    check(c.episodes(), {(0, 0): 0, (0, 1): 1})


def test_the_version_is_that_of_the_weights_that_acted_last():
    policy = EchoPolicy()
    c = Collector(CountingEnv((3,), 0), policy, frames_per_batch=4)
    c.next()
    c.update_policy_weights_()
    c.next()
    assert [one["policy_version"] for one in c.episodes()] == [0, 1]


def test_a_reset_in_between_is_no_end_and_seconds_begin_anew():
    c = Collector(CountingEnv((3,), 0), EchoPolicy(), frames_per_batch=2)
    c.next()
    c.reset()
    c.next()
    assert c.episodes() == []
    c.next()
    assert [one["length"] for one in c.episodes()] == [3]


def test_episodes_go_on_where_a_state_was_saved():
    options = {"frames_per_batch": 4, "gamma": GAMMA}
    first = Collector(CountingEnv(LENGTHS, 2), EchoPolicy(), **options)
    first.next()
    told = first.episodes()
    state = first.state_dict()
    second = Collector(CountingEnv(LENGTHS, 2), EchoPolicy(), **options)
    second.next()
    second.load_state_dict(state)
    assert second.episodes() == []  # those before were told of
    for _ in range(3):
        second.next()
    check([*told, *second.episodes()], {(0, 0): 2})


def test_nan_rewards_spoil_no_return():
    class Odd(CountingEnv):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, float("nan") if self.t == 2 else 1.0, *rest

    c = Collector(Odd((3,), 0), EchoPolicy(), frames_per_batch=6, track_episodes=True)
    batch = c.next()
    assert [one["return"] for one in c.episodes()] == [2.0, 2.0]
    assert batch["collector", "episode_return"].tolist() == [1, 1, 2] * 2
    assert c.stats()["nan_rewards"] == 2


def test_lanes_on_a_device_are_looked_at_when_asked(monkeypatch):
    monkeypatch.setattr(TorchLanes, "on_device", lambda self: DeviceTorchLanes(self))
    c = Collector(TorchEnv(CountingDevice([LENGTHS, LENGTHS])), EchoPolicy(), frames_per_batch=24)
    c.next()
    with pytest.raises(UsageError, match="track_episodes=True"):
        c.episodes()
    assert c.stats()["mean_return"] is not None
    host = Collector(
        TorchEnv(CountingDevice([LENGTHS, LENGTHS])),
        EchoPolicy(),
        frames_per_batch=24,
        track_episodes=True,
        gamma=GAMMA,
    )
    batch = host.next()
    found = host.episodes()
    ended = batch["next", "done"][..., 0]
    assert len(found) == int(ended.sum()) > 0
    check(found, {(0, 0): 0, (0, 1): 1})
    assert sorted(one["return"] for one in found) == sorted(batch["collector", "episode_return"][ended].tolist())
    assert host.stats()["mean_return"] == pytest.approx(np.mean([one["return"] for one in found]))


@pytest.mark.parametrize(("gamma", "told"), [(1.5, "between 0 and 1"), (True, "between 0 and 1"), ("x", "between")])
def test_a_discount_is_one(gamma, told):
    with pytest.raises(UsageError, match=f"gamma must lie {told}"):
        Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4, gamma=gamma)


def test_pandas_takes_them():
    pandas = pytest.importorskip("pandas")
    c = Collector(CountingEnv(LENGTHS, 0), EchoPolicy(), frames_per_batch=90)
    c.next()
    frame = pandas.DataFrame(c.episodes())
    assert list(frame.columns) == [name for name in RECORD if name != "discounted_return"]
    assert frame["length"].sum() == 90
    assert frame.groupby("ended")["length"].count().sum() == 30


class Clock:
    """A clock that moves when it is told to."""

    now = 0.0

    def __call__(self):
        return Clock.now


class Slow(CountingEnv):
    """Each step takes five seconds of that clock, each reset three."""

    def step(self, action):
        Clock.now += 5
        return super().step(action)

    def reset(self, **options):
        Clock.now += 3
        return super().reset(**options)


def slow_policy(observation):
    Clock.now += 2
    return observation[..., :1]


def test_the_time_is_split_between_env_and_policy(monkeypatch):
    from reap.core.measuring import times

    monkeypatch.setattr(times, "_now", Clock())
    monkeypatch.setattr(Clock, "now", 0.0)
    c = Collector(Slow((4,)), slow_policy, frames_per_batch=20, capture=False)
    for _ in range(2):
        c.next()
    stats = c.stats()
    env, policy = 20 * 5 + 5 * 3, 20 * 2  # of the second rollout: the first is left out as soon as there is another
    assert stats["env_seconds"] / stats["policy_seconds"] == pytest.approx(env / policy)


@pytest.mark.parametrize("workers", [False, True])
def test_the_parts_of_the_time_add_up(workers):
    make = partial(MultiSyncCollector, lanes_of(0, 1)) if workers else partial(Collector, CountingEnv())
    with make(EchoPolicy(), frames_per_batch=100) as collector:
        for _ in range(4):
            collector.next()
        stats = collector.stats("both")
    parts = {name: stats[f"{name}_seconds"] for name in ("env", "policy", "loop", "transport", "wait")}
    assert min(parts.values()) >= 0
    assert min(parts["env"], parts["policy"], parts["wait"]) > 0
    every = [stats[f"worker_{w}/collect_seconds"] for w in range(stats["workers"])]
    assert parts["env"] + parts["policy"] + parts["loop"] == pytest.approx(sum(every))


def test_episodes_nobody_asks_for_hold_the_memory_of_those_that_are_kept():
    from reap.core.measuring.episode_log import COLUMNS, KEPT, UnreportedEpisodes

    unreported = UnreportedEpisodes()
    for n in range(1000):
        unreported.add(np.full((800, len(COLUMNS)), n, float))
    arrays = [array if array.base is None else array.base for array in (*unreported._large, *unreported._small)]
    assert sum(array.nbytes for array in arrays) < 1.2 * KEPT * 8 * len(COLUMNS)
    assert len(unreported.take()) == KEPT
    assert unreported.forgotten == 800_000 - KEPT
