"""AsyncBatchedCollector: the suite every backend passes, in threads and in processes; and what only it promises."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from reap.collectors import AsyncBatchedCollector, Collector, RandomPolicy
from reap.core.policies.exploration import ExplorationType
from reap.envs import GymEnv
from reap.errors import UsageError, WorkerDied, WorkerRaised, WorkerSilent, WrongArgument
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, FaultyEnv, assert_same, backend_checks, no_leaks

BACKENDS = ("threading", "multiprocessing")
LENGTHS = ((3, 1, 5), (2, 2, 7), (4,), (1,), (6, 2))


class InLanes(AsyncBatchedCollector):
    """Batches in the form the suite compares: of envs that share a worker every batch holds as many frames."""

    def __init__(self, env, policy, *, env_backend, track_policy_version=False, **options):
        options["track_policy_version"] = track_policy_version
        policy = RandomPolicy() if policy is None else policy  # which must be asked for here
        super().__init__([env], policy, env_backend=env_backend, **options)
        self._pipeline.arrangement.arrange = lanes_of


def lanes_of(flat, rollout):
    lanes = int(flat["env_index"].max()) + 1
    flat = flat.exclude("env_index")
    if lanes == 1:
        return flat
    return flat.reshape(-1, lanes).transpose(0, 1).refine_names(..., "time")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", backend_checks)
def test_the_suite(name, backend):
    backend_checks[name](lambda env, policy, **options: InLanes(env, policy, env_backend=backend, **options))


@pytest.mark.parametrize("name", ["exact_lanes", "seeds_reproduce", "errors_name_their_place", "shuts_down"])
def test_the_suite_in_threads_of_a_process(name):
    where = {"env_backend": "multiprocessing", "worker_threads": True}
    backend_checks[name](lambda env, policy, **options: InLanes(env, policy, **where, **options))


def makers(lengths=LENGTHS):
    return [lambda one=one, lane=lane: GymEnv(CountingEnv(one, lane)) for lane, one in enumerate(lengths)]


def by_env(batches, count):
    """The frames of each env, in the order in which they came."""
    flat = torch.cat([batch.exclude(("collector", "traj_ids")) for batch in batches])
    return [flat[flat["env_index"] == n].exclude("env_index") for n in range(count)]


def first_of_each(batch):
    """Where the first frame of each env is."""
    lanes = batch["env_index"].tolist()
    return torch.tensor([lane not in lanes[:n] for n, lane in enumerate(lanes)])


@pytest.mark.parametrize(
    ("backend", "per_worker", "sizes"),
    [
        ("threads in processes", 3, (1, 64)),
        ("threading", 1, (1, 1)),
        ("threading", 1, (3, 64)),
        ("multiprocessing", 1, (2, 2)),
        ("multiprocessing", 2, (1, 64)),
    ],
)
def test_every_env_is_whole_whoever_comes_first(backend, per_worker, sizes):
    lengths = (*LENGTHS, (2, 3))
    least, most = sizes
    with no_leaks():
        with AsyncBatchedCollector(
            makers(lengths),
            EchoPolicy(),
            frames_per_batch=37,
            total_frames=37 * 30 + 5,
            env_backend="threading" if backend == "threading" else "multiprocessing",
            envs_per_worker=per_worker,
            worker_threads="in" in backend.split(),
            min_batch_size=least,
            max_batch_size=most,
            track_policy_version=False,
        ) as c:
            batches = list(c)
            stats = c.stats()
        assert [len(b) for b in batches] == [37] * 30 + [5]
        assert stats["frames"] == 37 * 30 + 5
        for n, frames in enumerate(by_env(batches, len(lengths))):
            world = CountingWorld([lengths[n]], first_lane=n).batch(len(frames))
            assert_same(frames, {key: value for key, value in world.items() if key != ("collector", "traj_ids")})
        flat = torch.cat(batches)
        ids, episode = flat["collector", "traj_ids"], flat["observation"][:, 1].long()
        named = {*zip(ids.tolist(), flat["env_index"].tolist(), episode.tolist())}
        assert len(named) == len(set(ids.tolist())), "an id for two episodes"
        assert len(named) == len({(env, n) for _, env, n in named}), "an episode with two ids"
        del c, batches, flat, ids, episode, frames


# ---- what only it promises ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_the_documents(backend):
    policy = TensorDictModule(
        nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)), in_keys=["observation"], out_keys=["action"]
    )
    collector = AsyncBatchedCollector(
        create_env_fn=[lambda: GymEnv("CartPole-v1")] * 4,
        policy=policy,
        frames_per_batch=200,
        total_frames=1000,
        max_batch_size=8,
        env_backend=backend,
    )
    seen, envs = 0, set()
    for data in collector:
        assert data.batch_size == torch.Size([200])
        assert data.is_contiguous()
        assert data["env_index"].dtype == data["policy_version"].dtype == torch.int64
        envs |= set(data["env_index"].tolist())
        torch.testing.assert_close(data["action"], policy.module(data["observation"]).detach())
        seen += len(data)
    assert (seen, envs) == (1000, {0, 1, 2, 3})
    collector.shutdown()


def test_a_straggler_holds_nobody_up():
    """Env 0 does not answer at all until it is let go; the others fill batch after batch."""
    gate = threading.Event()

    class Gated(CountingEnv):
        def step(self, action):
            if self.lane == 0:
                gate.wait(30)
            return super().step(action)

    make = [lambda n=n: GymEnv(Gated((3,), n)) for n in range(4)]
    with AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=30) as c:
        for _ in range(5):
            assert set(c.next()["env_index"].tolist()) <= {1, 2, 3}
        gate.set()
        batches = []
        while sum((batch["env_index"] == 0).sum() for batch in batches) < 3:
            batches.append(c.next())
        zero = by_env(batches, 4)[0]
        assert zero["observation"][:3].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]


def test_resets_overlap():
    """An env that is being reset holds up only itself."""
    gate, resetting = threading.Event(), threading.Event()

    class Gated(CountingEnv):
        def reset(self, **options):
            if self.lane == 0 and self.episode == 0:
                resetting.set()
                gate.wait(30)
            return super().reset(**options)

    with AsyncBatchedCollector(
        [lambda n=n: GymEnv(Gated((2,), n)) for n in range(3)], EchoPolicy(), frames_per_batch=12
    ) as c:
        while not resetting.is_set():
            c.next()
        for _ in range(3):
            c.next()
        gate.set()
        while not len(zero := by_env([c.next()], 3)[0]):
            pass
        assert zero["observation"][0].tolist() in ([0, 0, 1], [0, 1, 0])  # where it was before, or after


class Slow(CountingEnv):
    """Waits before each step."""

    def __init__(self, wait, lane):
        super().__init__((50,), lane)
        self._wait = wait

    def step(self, action):
        time.sleep(self._wait)
        return super().step(action)


def test_waiting_for_slow_envs_takes_no_processor_time():
    with AsyncBatchedCollector(
        [lambda n=n: GymEnv(Slow(0.02, n)) for n in range(4)],
        EchoPolicy(),
        frames_per_batch=40,
        env_backend="multiprocessing",
        envs_per_worker=4,
        worker_threads=True,
    ) as c:
        c.next()
        began, used = time.perf_counter(), time.process_time()
        c.next()
        assert time.process_time() - used < (time.perf_counter() - began) / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_completed_trajectories_come_one_at_a_time(backend):
    with AsyncBatchedCollector(
        makers(),
        EchoPolicy(),
        frames_per_batch=11,
        total_frames=400,
        yield_completed_trajectories=True,
        env_backend=backend,
    ) as c:
        episodes = dict.fromkeys(range(len(LENGTHS)), 0)
        for whole in c:
            (lane,) = set(whole["env_index"].tolist())
            length = LENGTHS[lane][episodes[lane] % len(LENGTHS[lane])]
            assert whole.batch_size == torch.Size([length])
            assert whole["observation"].tolist() == [[lane, episodes[lane], t] for t in range(length)]
            assert whole["next", "done"].flatten().tolist() == [False] * (length - 1) + [True]
            assert len(set(whole["collector", "traj_ids"].tolist())) == 1
            episodes[lane] += 1
        assert sum(episodes.values()) > 50


def test_frames_are_split_by_trajectory():
    with AsyncBatchedCollector(makers(), EchoPolicy(), frames_per_batch=40, split_trajs=True) as c:
        batch = c.next()
    mask, seen = batch["collector", "mask"], batch["observation"]
    assert mask.sum() == 40
    for row, valid in zip(seen, mask):
        lane, episode, _ = row[0].tolist()
        assert row[valid].tolist() == [[lane, episode, row[0, 2] + t] for t in range(int(valid.sum()))]


def test_memory_stays_with_its_env():
    class Remembering(nn.Module):
        carry = {"sum": torch.zeros(3)}

        def forward(self, observation, sum):
            total = sum + observation
            return total.sum(-1, keepdim=True), total

    with AsyncBatchedCollector(makers(), Remembering(), frames_per_batch=50) as c:
        batches = [c.next() for _ in range(6)]
    for n, frames in enumerate(by_env(batches, len(LENGTHS))):
        with Collector(makers()[n], Remembering(), frames_per_batch=len(frames), track_policy_version=True) as alone:
            assert (frames == alone.next().exclude(("collector", "traj_ids"))).all()


def test_options_do_what_they_do_elsewhere():
    policy = EchoPolicy()
    with AsyncBatchedCollector(
        makers(((9,), (9,))),
        policy_factory=lambda: policy,
        frames_per_batch=20,
        init_random_frames=20,
        max_frames_per_traj=4,
        postproc=lambda td: td.set("twice", td["action"] * 2),
        exploration_type=ExplorationType.DETERMINISTIC,
        env_backend="threading",
        server_timeout=0.5,
    ) as c:
        random, batch = c.next(), c.next()
        batch = batch[~first_of_each(batch)]  # those were decided about before
        assert not torch.equal(random["action"], policy(random["observation"]))
        assert torch.equal(batch["twice"], policy(batch["observation"]) * 2)
        assert batch["next", "step_count"].max() == 4
        assert torch.equal(batch["next", "truncated"], batch["next", "step_count"] == 4)
        c.reset()
        batch = c.next()
        assert (batch["observation"][first_of_each(batch), 2] == 0).all()
        with torch.no_grad():
            policy.weight.fill_(3.0)
        c.update_policy_weights_()
        frames = c.next()
        weight = torch.where(frames["policy_version"] == 0, 1.0, 3.0).unsqueeze(-1)
        assert torch.equal(frames["action"] * 3, policy(frames["observation"]) * weight)
        assert (frames["policy_version"][~first_of_each(frames)] == 1).all()


@pytest.mark.parametrize(
    ("backend", "fault", "threads"),
    [
        ("threading", "raise", False),  # one that hangs: see test_async_pool
        *(("multiprocessing", fault, threads) for fault in ("raise", "hang", "kill") for threads in (False, True)),
    ],
)
def test_faults_are_named_and_nothing_is_left(backend, fault, threads):
    bad = [lambda: GymEnv(FaultyEnv(CountingEnv((9,), 2), at=5, fault=fault))]
    with no_leaks():
        c = AsyncBatchedCollector(
            [*makers()[:2], *bad],
            EchoPolicy(),
            frames_per_batch=60,
            env_backend=backend,
            worker_threads=threads,
            timeout=2.0,
        )
        kind = {"raise": WorkerRaised, "hang": WorkerSilent, "kill": WorkerDied}[fault]
        with pytest.raises(kind, match="of lane 2"):
            while True:
                c.next()
        assert c.closed
        del c


def test_bad_arguments_are_named():
    make = makers()
    with pytest.raises(WrongArgument, match="create_env_fn must be a list"):
        AsyncBatchedCollector(make[0], EchoPolicy(), frames_per_batch=10)
    with pytest.raises(WrongArgument, match="policy or policy_factory, not both"):
        AsyncBatchedCollector(make, EchoPolicy(), policy_factory=EchoPolicy, frames_per_batch=10)
    with pytest.raises(UsageError, match="min_batch_size is 5, above max_batch_size, which is 4"):
        AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=10, min_batch_size=5, max_batch_size=4)
    with pytest.raises(UsageError, match="max_batch_size must be a whole number ≥ 1, got 0"):
        AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=10, max_batch_size=0)
    with pytest.raises(WrongArgument, match="no option 'compact_obs': it needs lanes that run in step"):
        AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=10, compact_obs=True)
    with pytest.raises(WrongArgument, match="no option 'frames_per_batc'.*did you mean"):
        AsyncBatchedCollector(make, EchoPolicy(), frames_per_batc=10)
    with pytest.raises(UsageError, match="backend must be 'threading' or 'multiprocessing', got 'ray'"):
        AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=10, env_backend="ray")
