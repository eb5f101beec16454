"""Several workers: shapes, order, weights, seeds, lag; every frame computed beforehand."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from reap.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from reap.envs import GymEnv, SerialEnv
from reap.errors import SpecMismatch, UsageError, WrongArgument, WrongState
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.trajectories import with_next
from reap.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme
from tests.worlds.faults import ran_ahead

LENGTHS = [[(3, 1, 5), (2,)], [(4,), (1, 1, 6)], [(7, 2), (5,)]]


def lanes(lengths, delay=0.0, first=0):
    class Slow(CountingEnv):
        def step(self, action):
            if delay and np.random.random() < 0.2:
                time.sleep(np.random.random() * delay)
            return super().step(action)

    def make():
        return SerialEnv(len(lengths), [lambda n=n, i=i: GymEnv(Slow(n, first + i)) for i, n in enumerate(lengths)])

    return make


def makers(delay=0.0):
    return [lanes(one, delay, 2 * w) for w, one in enumerate(LENGTHS)]


def world(w):
    return CountingWorld(LENGTHS[w], first_lane=2 * w, worker=w, workers=3)


@pytest.mark.parametrize("cat", [None, "stack", 0, -1])
def test_sync_is_every_workers_own_world(cat):
    c = MultiSyncCollector(makers(), EchoPolicy(), frames_per_batch=24, total_frames=24 * 10, cat_results=cat)
    worlds = [world(w) for w in range(3)]
    for batch in c:
        expected = [one.batch(4) for one in worlds]
        assert batch.names[-1] == "time"
        if cat == 0:
            assert batch.shape == (6, 4)
            parts = batch.split(2, 0)
        elif cat == -1:
            assert batch.shape == (2, 12)
            parts = batch.split(4, 1)
        else:
            assert batch.shape == (3, 2, 4)
            parts = batch.unbind(0)
        for got, want in zip(parts, expected):
            assert_same(got, want)
    c.shutdown()


def test_init_fn_comes_first_in_each_worker():
    def begin():
        os.environ["BEGUN_BY_INIT_FN"] = "yes"

    def make():
        assert os.environ["BEGUN_BY_INIT_FN"] == "yes"
        return CountingEnv()

    with MultiSyncCollector([make] * 2, EchoPolicy(), frames_per_batch=8, init_fn=begin) as c:
        c.next()
    assert "BEGUN_BY_INIT_FN" not in os.environ


@pytest.mark.parametrize(("cat", "shape"), [("stack", (2, 5)), (0, (10,)), (-1, (10,))])
def test_plain_envs(cat, shape):
    make = [lambda: CountingEnv((3,), 0), lambda: CountingEnv((3,), 1)]
    with MultiSyncCollector(make, EchoPolicy(), frames_per_batch=10, cat_results=cat) as c:
        batch = c.next()
        assert batch.shape == shape
        assert batch["observation"].reshape(2, 5, 3)[:, :, 0].tolist() == [[0] * 5, [1] * 5]


def test_rollouts_of_different_length():
    make = [lambda: CountingEnv((3,), 0), lambda: CountingEnv((3,), 1)]
    with pytest.raises(UsageError, match="cannot be stacked"):
        MultiSyncCollector(make, EchoPolicy(), frames_per_batch=[4, 6])
    with MultiSyncCollector(make, EchoPolicy(), frames_per_batch=[4, 6], cat_results=-1, total_frames=30) as c:
        worlds = [CountingWorld([(3,)], first_lane=w, worker=w, workers=2) for w in (0, 1)]
        for batch in c:
            assert batch.shape == (10,)
            assert_same(batch[:4], worlds[0].batch(4))
            assert_same(batch[4:], worlds[1].batch(6))


def test_async_loses_and_reorders_nothing():
    """A thousand batches of three workers with random delays, the consumer slow at times: each lane is whole."""
    c = MultiAsyncCollector(makers(delay=0.0005), EchoPolicy(), frames_per_batch=6, total_frames=6 * 1000)
    worlds, seen = [world(w) for w in range(3)], [0, 0, 0]
    for n, batch in enumerate(c):
        w = batch.origin.worker
        assert_same(batch, worlds[w].batch(3))
        seen[w] += 1
        if n % 97 == 0:
            time.sleep(0.02)
    assert sum(seen) == 1000
    assert min(seen) > 0
    c.shutdown()


def test_sync_with_delays_is_exact():
    c = MultiSyncCollector(makers(delay=0.002), EchoPolicy(), frames_per_batch=18, total_frames=18 * 100, cat_results=0)
    worlds = [world(w) for w in range(3)]
    for batch in c:
        for got, one in zip(batch.split(2), worlds):
            assert_same(got, one.batch(3))
    c.shutdown()


def test_async_goes_on_while_the_consumer_works():
    c = AsyncCollector(lambda: CountingEnv((9,), 0), EchoPolicy(), frames_per_batch=4)
    c.next()
    ran_ahead(c)  # nobody has asked for anything meanwhile
    batches = [c.next() for _ in range(2)]
    assert len({b["observation"].untyped_storage().data_ptr() for b in batches}) == 2
    c.shutdown()


def test_ids_never_collide():
    c = MultiAsyncCollector(makers(), EchoPolicy(), frames_per_batch=12, total_frames=12 * 60)
    owner = {}
    for batch in c:
        for i in batch["collector", "traj_ids"].unique().tolist():
            assert owner.setdefault(i, batch.origin.worker) == batch.origin.worker
    c.shutdown()


def test_preempted_workers_deliver_what_they_have():
    def slow():
        class Slow(CountingEnv):
            def step(self, action):
                time.sleep(0.05)
                return super().step(action)

        return Slow((7,), 1)

    c = MultiSyncCollector(
        [lambda: CountingEnv((3,), 0), slow],
        EchoPolicy(),
        frames_per_batch=80,
        preemptive_threshold=0.5,
        total_frames=-1,
    )
    fast = CountingWorld([(3,)], worker=0, workers=2)
    other = CountingWorld([(7,)], first_lane=1, worker=1, workers=2)
    for _ in range(3):
        batch = c.next()
        mask = batch["collector", "mask"]
        assert mask[0].all()
        count = int(mask[1].sum())
        assert 1 <= count < 40
        assert mask[1, :count].all()
        got = batch.exclude(("collector", "mask"))
        assert_same(got[0], fast.batch(40))
        assert_same(got[1, :count], other.batch(count))
        assert not batch["observation"][1, count:].any()
        assert (batch["collector", "traj_ids"][1, count:] == -1).all()
    assert c.stats()["frames"] < 3 * 80
    c.shutdown()


def test_random_frames_are_counted_over_all_workers():
    space = gym.spaces.Box(5.0, 6.0, (1,))

    class Picky(CountingEnv):
        action_space = space

    make = [lambda w=w: Picky((9,), w) for w in (0, 1)]
    for kind in (MultiSyncCollector, MultiAsyncCollector):
        c = kind(
            make, EchoPolicy(), frames_per_batch=8, init_random_frames=16, total_frames=4000
        )  # both have their turn
        drawn = sum(int(((b["action"] >= 5) & (b["action"] <= 6) & (b["action"] % 1 != 0)).sum()) for b in c)
        assert drawn == 16
        c.shutdown()


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_start_methods(start):
    with MultiSyncCollector([lambda: CountingEnv((3,), 0)], EchoPolicy(), frames_per_batch=10, start_method=start) as c:
        assert c.next().shape == (1, 10)


class Mean(nn.Module):
    """Its weights say what it answers; a buffer travels too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, observation):
        return (self.weight + self.offset).expand(*observation.shape[:-1], 1)


FORMS = {
    "nothing": lambda p: None,
    "module": lambda p: p,
    "state dict": lambda p: p.state_dict(),
    "TensorDict": lambda p: TensorDict.from_module(p),
    "TensorDict of values": lambda p: TensorDict({k: v.detach() for k, v in p.named_parameters()}),
    "per worker": lambda p: {0: p.state_dict(), 1: p},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_every_form_of_weights(kind, form):
    policy = Mean()
    c = kind([lambda: CountingEnv((9,), 0)] * 2, policy, frames_per_batch=8, track_policy_version=True)
    assert (c.next()["action"] == 0).all()
    with torch.no_grad():
        policy.weight.fill_(3.0)
        policy.offset.fill_(0.5)
    c.next()
    given = FORMS[form](policy)
    c.update_policy_weights_(given)
    want = 3.0 if form == "TensorDict of values" else 3.5
    for _ in range(30):
        batch = c.next()
        old = batch["policy_version"] == 0
        assert torch.equal(batch["action"].squeeze(-1), torch.where(old, 0.0, want))
        if not old.any():
            break
    assert not old.any()
    assert c.policy_version == 1
    assert not policy.weight.is_shared(), "the trainer's own parameters are left where they are"
    c.shutdown()


def test_weights_for_one_worker():
    policy = Mean()
    c = MultiSyncCollector([lambda: CountingEnv((9,), 0)] * 2, policy, frames_per_batch=8, track_policy_version=True)
    c.update_policy_weights_({"weight": torch.tensor([2.0])}, worker_ids=1)
    batch = c.next()
    assert batch["action"][..., 0].tolist() == [[0.0] * 4, [2.0] * 4]
    assert batch["policy_version"].tolist() == [[0] * 4, [1] * 4]
    c.update_policy_weights_({"weight": torch.tensor([5.0])})
    batch = c.next()
    assert (batch["action"] == 5).all()
    assert (batch["policy_version"] == 2).all()
    with pytest.raises(UsageError, match="no worker 2"):
        c.update_policy_weights_(policy, worker_ids=2)
    with pytest.raises(SpecMismatch, match="has shape"):
        c.update_policy_weights_({"weight": torch.zeros(2)})
    assert (c.next()["action"] == 5).all()
    c.shutdown()


def test_policies_made_in_the_workers():
    def make(value):
        def factory():
            policy = Mean()
            policy.weight.data.fill_(value)
            return policy

        return factory

    c = MultiSyncCollector(
        [lambda: CountingEnv((9,), 0)] * 2, policy_factory=[make(1.0), make(2.0)], frames_per_batch=4
    )
    assert c.next()["action"][..., 0].tolist() == [[1.0] * 2, [2.0] * 2]
    with pytest.raises(WrongState, match="no weights to send"):
        c.update_policy_weights_()
    c.update_policy_weights_({"weight": torch.tensor([4.0])})
    assert (c.next()["action"] == 4).all()
    c.shutdown()


def test_update_at_each_batch():
    policy = Mean()
    c = MultiSyncCollector([lambda: CountingEnv((9,), 0)] * 2, policy, frames_per_batch=4, update_at_each_batch=True)
    for n in range(3):
        with torch.no_grad():
            policy.weight.fill_(float(n))
        assert (c.next()["action"] == n).all()
    c.shutdown()


def test_lag_is_bounded_and_what_is_dropped_is_counted():
    policy = Mean()
    c = AsyncCollector(
        lambda: CountingEnv((50,), 0), policy, frames_per_batch=4, max_lag=0, track_policy_version=True, total_frames=-1
    )
    last, ids = -1, None
    for n in range(20):
        batch = c.next()
        assert batch.origin.lag == 0
        assert (batch["policy_version"] == n).all()
        first = int(batch["observation"][0, 2])
        now = batch["collector", "traj_ids"]
        if ids is not None and int(now[0]) == ids:
            assert first == last + 1, "a trajectory has a hole"
        inside = (now[1:] == now[:-1]).nonzero().squeeze(-1)
        assert (batch["observation"][inside + 1, 2] == batch["observation"][inside, 2] + 1).all()
        last, ids = int(batch["observation"][-1, 2]), int(now[-1])
        if n == 0:
            ran_ahead(c)  # what it has made meanwhile is too old after the update
        c.update_policy_weights_()
    assert c.stats()["dropped_frames"] > 0
    c.shutdown()


def test_seeds_reproduce_and_differ():
    def run(kind, seed):
        c = kind([lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))] * 2, None, frames_per_batch=40)
        if kind is MultiAsyncCollector:
            c.next()  # what was collected before the seed is not delivered after it
            ran_ahead(c)
        following = c.set_seed(seed)
        found = {0: [], 1: []}
        while min(map(len, found.values())) < 3:  # one of two workers may be much slower
            batch = c.next()
            w = getattr(batch, "origin", None)
            if w is None:
                for i in (0, 1):
                    found[i].append(batch[i].clone())
            else:
                found[w.worker].append(batch.clone())
        c.shutdown()
        return following, {w: torch.cat(b, -1) for w, b in found.items()}

    for kind in (MultiSyncCollector, MultiAsyncCollector):
        (next_a, a), (next_b, b) = run(kind, 5), run(kind, 5)
        assert next_a == next_b
        for w in (0, 1):
            n = min(a[w].shape[-1], b[w].shape[-1])
            same = a[w][..., :n].exclude("collector") == b[w][..., :n].exclude("collector")
            assert same.all()
        assert not torch.equal(a[0]["observation"][:, 0], a[1]["observation"][:, 0])
    alone = Collector(SerialEnv(4, lambda: GymEnv("CartPole-v1")), None, frames_per_batch=40)
    assert alone.set_seed(5) == next_a
    assert torch.equal(alone.next()["observation"][:2, 0], a[0]["observation"][:, 0])


def test_compact_observations():
    c = MultiSyncCollector(makers(), EchoPolicy(), frames_per_batch=24, compact_obs=True)
    worlds = [world(w) for w in range(3)]
    for _ in range(5):
        batch = with_next(c.next())
        for w, one in enumerate(worlds):
            assert_same(batch[w], one.batch(4))
    c.shutdown()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_whole_episodes(kind):
    c = kind(makers(), EchoPolicy(), frames_per_batch=12, trajs_per_batch=5, traj_format="cat", total_frames=-1)
    for _ in range(10):
        batch = c.next()
        ids, t = batch["collector", "traj_ids"], batch["observation"][:, 2]
        assert len(ids.unique()) == 5
        new = torch.cat([torch.tensor([True]), ids[1:] != ids[:-1]])
        assert (t[new] == 0).all(), "an episode does not begin at its beginning"
        assert (t[1:][~new[1:]] == t[:-1][~new[1:]] + 1).all(), "an episode has a hole"
    c.shutdown()


def test_splitting_and_hooks():
    seen = []
    c = MultiSyncCollector(
        makers(),
        EchoPolicy(),
        frames_per_batch=24,
        split_trajs=True,
        postproc=lambda td: td.set("extra", torch.ones(td.shape)),
        post_collect_hook=seen.append,
    )
    batch = c.next()
    assert batch["collector", "mask"].sum() == 24
    assert seen[0] is batch
    assert "extra" in batch.keys()
    c.shutdown()


def test_the_front_door():
    make = lambda: CountingEnv((3,), 0)  # noqa: E731
    cases = {
        MultiAsyncCollector: {"num_collectors": 2},
        MultiSyncCollector: {"num_collectors": 2, "sync": True},
    }
    for kind, options in cases.items():
        with Collector(make, EchoPolicy(), frames_per_batch=4, **options) as c:
            assert type(c) is kind
            assert len(c._backend.workers) == 2
    with Collector(make, EchoPolicy(), frames_per_batch=4, backend="process", backend_options={"timeout": 9}) as c:
        assert c.options.timeout == 9
    with MultiCollector(make, EchoPolicy(), frames_per_batch=4, sync=True, num_workers=2) as c:
        assert type(c) is MultiSyncCollector
    for kind, words, options in [
        (UsageError, "sync is for workers", {"sync": True}),
        (UsageError, "backend must be", {"backend": "procces"}),
        (UsageError, "slurm_kwargs", {"backend": "submitit", "backend_options": {"slurm_kwargs": 3}}),
        (WrongArgument, "whole number", {"num_collectors": 1.5}),
        (UsageError, "at least 1", {"num_collectors": 0}),
        (UsageError, "argument of its own", {"num_collectors": 1, "backend_options": {"sync": True}}),
        (WrongArgument, "has no option 'cat_results'", {"cat_results": 0}),
    ]:
        with pytest.raises(kind, match=words):
            Collector(make, EchoPolicy(), frames_per_batch=4, **options)
    with pytest.raises(WrongArgument, match="needs sync"):
        MultiCollector([make], EchoPolicy(), frames_per_batch=4)
    with pytest.raises(UsageError, match="cat_results must be"):
        MultiSyncCollector([make], EchoPolicy(), frames_per_batch=4, cat_results="cat")
    with pytest.raises(UsageError, match="holds 3 values for 2 workers"):
        MultiSyncCollector([make] * 2, EchoPolicy(), frames_per_batch=[1, 2, 3])
    with pytest.raises(UsageError, match="policy cannot be sent to another process"):
        MultiSyncCollector([make], lambda x, lock=__import__("threading").Lock(): x, frames_per_batch=4)


def test_warnings_name_the_line_that_makes_the_collector():
    with pytest.warns(Warning) as told:
        AsyncCollector(CountingEnv, EchoPolicy(), frames_per_batch=10, total_frames=25, devices="cpu").shutdown()
    assert {str(one.message).split()[0] for one in told} == {"devices", "total_frames=25"}
    assert {one.filename for one in told} == {__file__}


def test_repr_while_the_workers_start(monkeypatch):
    texts = []
    monkeypatch.setattr(MultiSyncCollector, "_send_first_weights", lambda self: texts.append(repr(self)))
    with MultiSyncCollector(makers(), EchoPolicy(), frames_per_batch=12) as collector:
        assert texts == ["MultiSyncCollector(not built)"]
        assert repr(collector) == "MultiSyncCollector(3 workers, 12 frames per batch)"


def test_legacy_names():
    import reap.collectors as names

    for old in ("MultiSyncDataCollector", "MultiaSyncDataCollector", "aSyncDataCollector", "_MultiDataCollector"):
        with pytest.warns(DeprecationWarning, match=f"{old} is called"):
            getattr(names, old)


class Diary(gym.Env):
    observation_space = gym.spaces.Dict(
        day=gym.spaces.Box(0, 99, (1,), np.float32),
        text=gym.spaces.Text(20),
        pages=gym.spaces.Sequence(gym.spaces.Box(0, 9, (2,), np.float32)),
    )
    action_space = gym.spaces.Discrete(2)

    def _read(self):
        pages = tuple(np.full(2, i, np.float32) for i in range(self.day))
        return {"day": np.array([self.day], np.float32), "text": f"day {self.day}", "pages": pages}

    def reset(self, *, seed=None, options=None):
        self.day = 0
        return self._read(), {}

    def step(self, action):
        self.day += 1
        return self._read(), 1.0, self.day == 5, False, {}


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_text_and_ragged_columns_travel_too(kind):
    options = {"cat_results": 0} if kind is MultiSyncCollector else {}
    c = kind([lambda: SerialEnv(2, Diary)] * 2, frames_per_batch=32, total_frames=96, **options)
    for batch in c:
        lanes, steps = batch.batch_size
        for lane in range(lanes):
            for t in range(steps):
                frame = batch[lane, t]
                day = int(frame["day"])
                assert frame["text"] == f"day {day}"
                assert frame["next", "text"] == f"day {day + 1}"
                assert frame["next", "pages"].shape == (day + 1, 2)
    c.shutdown()


@pytest.mark.parametrize("name", ["shared", "process", "none"])
def test_roads_of_weights(name):
    policy = Mean()
    scheme = WeightSyncScheme.from_backend(name)
    c = MultiSyncCollector(
        [lambda: CountingEnv((9,), 0)] * 2, policy, frames_per_batch=4, weight_sync_schemes={"policy": scheme}
    )
    with torch.no_grad():
        policy.weight.fill_(2.0)
    c.update_policy_weights_()
    assert (c.next()["action"] == (0 if name == "none" else 2)).all()
    assert c.policy_version == (0 if name == "none" else 1)
    c.shutdown()


def test_weights_that_are_not_only_tensors():
    class Counter(Mean):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

        def forward(self, observation):
            return super().forward(observation) + self.calls

    policy = Counter()
    c = MultiSyncCollector([lambda: CountingEnv((9,), 0)] * 2, policy, frames_per_batch=4)
    policy.calls = 7
    c.update_policy_weights_()
    assert (c.next()["action"] == 7).all()
    c.shutdown()
    with pytest.raises(UsageError, match="whose weights are tensors"):
        MultiSyncCollector(
            [lambda: CountingEnv((9,), 0)],
            policy,
            frames_per_batch=4,
            weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
        )
    with pytest.raises(WrongArgument, match="must map names of models to schemes"):
        MultiSyncCollector([CountingEnv], policy, frames_per_batch=4, weight_sync_schemes="shared")


def test_slots_of_workers_are_lent_and_come_back():
    with AsyncCollector(lambda: CountingEnv((9,), 0), EchoPolicy(), frames_per_batch=64) as c:
        places = {c.next()["observation"].data_ptr() for _ in range(40)}
        assert len(places) <= 4, "batches that are dropped are not copied"
        kept = [c.next() for _ in range(6)]
        assert len(c._backend.workers[0].lent) == 2, "while many are kept, the worker still has slots to fill"
        del kept
        last = c.next()
        assert len(c._backend.workers[0].lent) == 1, "all came back but the one just taken"
        del last
