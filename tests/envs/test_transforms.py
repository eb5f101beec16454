"""Transforms, beside NumPy references written step by step on the predictable world."""

from __future__ import annotations

import pickle
import tracemalloc
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedSyncCollector
from reap.core.measuring.moments import LearnedStatistics, Moments, RunningStatistics, StatisticsPool, merged
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import AsyncEnvPool, GymEnv, ParallelEnv, SerialEnv, TorchEnv
from reap.envs.transforms import (
    CastObservation,
    ClipReward,
    FlattenObservation,
    FrameStack,
    GrayscaleResize,
    NormalizeObservation,
    NormalizeReward,
    RewardSum,
    ScaleReward,
    StepCounter,
    TimeLimit,
    TransformedEnv,
)
from reap.errors import SpecMismatch, UsageError, WorkerRaised, WrongArgument
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.device import CountingDevice
from tests.worlds.waiting import until

LENGTHS = [(3, 1, 5), (2,), (4, 2)]


def makers(lengths=LENGTHS):
    return [partial(CountingEnv, one, lane) for lane, one in enumerate(lengths)]


def serial(lengths=LENGTHS):
    return SerialEnv(len(lengths), makers(lengths))


def still(observation):
    return observation[..., :1] * 0


class Reference:
    """Mean and variance as Gymnasium's and SB3's `RunningMeanStd` have it, in float64, from one batch to the next."""

    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, values):
        mean, var, count = values.mean(0), values.var(0), len(values)
        delta, total = mean - self.mean, self.count + count
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.mean, self.var, self.count = self.mean + delta * count / total, squares / total, total


def played(lengths, steps, begun=1):
    """What lanes of CountingEnv say, step by step: first observations, then (successors, rewards, ended, fresh ones).

    `begun`: how often they were reset before the first step. Actions are 0.
    """
    lanes = len(lengths)
    episode, t = np.full(lanes, begun - 1), np.zeros(lanes, int)
    yield [np.stack([np.arange(lanes), np.full(lanes, e), t], 1).astype(np.float64) for e in range(begun)]
    for _ in range(steps):
        t = t + 1
        seen = np.stack([np.arange(lanes), episode, t], 1).astype(np.float64)
        rewards = t.astype(np.float64)
        ended = [i for i in range(lanes) if t[i] >= lengths[i][episode[i] % len(lengths[i])]]
        t[ended], episode[ended] = 0, episode[ended] + 1
        yield seen, rewards, ended, np.stack([np.arange(lanes), episode, t], 1).astype(np.float64)[ended]


def normalised(lengths, steps, clip=None):
    """Observations `[lanes, steps, 3]`, at the root and next, as they must be delivered; and the statistics."""
    rms, root, following = Reference(3), [], []

    def norm(values):
        found = (values - rms.mean) / np.sqrt(rms.var + 1e-8)
        return found if clip is None else np.clip(found, -clip, clip)

    story = played(lengths, steps)
    for first in next(story):
        rms.update(first)
        now = norm(first)
    for seen, _, ended, fresh in story:
        rms.update(seen)
        root.append(now)
        following.append(norm(seen))
        now = norm(seen)
        if ended:
            rms.update(fresh)
            now[ended] = norm(fresh)
    return np.stack(root, 1), np.stack(following, 1), rms


@pytest.mark.parametrize("make", [serial, lambda: ParallelEnv(3, makers()), lambda: TorchEnv(CountingDevice(LENGTHS))])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_observations_are_normalised_as_numpy_would(make, clip):
    how = NormalizeObservation(clip=clip)
    with Collector(TransformedEnv(make(), how), still, frames_per_batch=36) as c:
        batches = [c.next() for _ in range(3)]
    root, following, rms = normalised(LENGTHS, 36, clip)
    for name, want in (("observation", root), (("next", "observation"), following)):
        got = torch.cat([batch[name] for batch in batches], 1).numpy()
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
        assert got.dtype == np.float32
    found = how.statistics()
    np.testing.assert_allclose(found.mean, rms.mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.var, rms.var, rtol=1e-12, atol=1e-12)
    assert found.count == pytest.approx(rms.count)


def test_the_same_as_gymnasiums_wrapper_where_no_episode_ends():
    def vector():
        return gym.vector.SyncVectorEnv([lambda: gym.make("Pendulum-v1")] * 4)

    theirs = gym.wrappers.vector.NormalizeObservation(vector())
    seen = [theirs.reset(seed=[3, 4, 5, 6])[0]]
    seen += [theirs.step(np.zeros((4, 1), np.float32))[0] for _ in range(50)]
    env = GymEnv(vector())
    ours = TransformedEnv(env, NormalizeObservation())
    env.lanes_env.pending_seeds = [3, 4, 5, 6]
    batch = ours.rollout(50, lambda observation: observation[..., :1] * 0)
    np.testing.assert_allclose(batch["observation"].numpy(), np.stack(seen[:-1], 1), rtol=1e-4, atol=1e-4)
    theirs.close()
    ours.close()


def test_rewards_are_normalised_as_sb3_does():
    how = NormalizeReward(gamma=0.9, clip=1.5)
    c = Collector(TransformedEnv(serial(), how), still, frames_per_batch=60)
    got = torch.cat([c.next()["next", "reward"][..., 0] for _ in range(2)], 1).numpy()
    story, rms, want = played(LENGTHS, 40), Reference(()), []
    next(story)
    total = np.zeros(3)
    for _, rewards, ended, _ in story:
        total = total * 0.9 + rewards
        rms.update(total)
        want.append(np.clip(rewards / np.sqrt(rms.var + 1e-8), -1.5, 1.5))
        total[ended] = 0
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=2e-6)
    assert how.statistics("reward").var == pytest.approx(rms.var)
    raw = Collector(serial(), still, frames_per_batch=60)
    free = NormalizeReward(gamma=0.9)
    c = Collector(TransformedEnv(serial(), free), still, frames_per_batch=60)
    c.next()
    last = c.next()["next", "reward"][:, -1]
    raw.next()
    assert torch.allclose(free.inverse(last), raw.next()["next", "reward"][:, -1])


def test_what_is_scaled_clipped_counted_and_summed():
    env = TransformedEnv(serial(), [ScaleReward(0.5, 1.0), ClipReward(0.0, 2.5), RewardSum(), StepCounter()])
    c, plain = Collector(env, EchoPolicy(), frames_per_batch=60), Collector(serial(), EchoPolicy(), frames_per_batch=60)
    for _ in range(2):
        batch, raw = c.next(), plain.next()
        reward = (raw["next", "reward"] * 0.5 + 1).clamp(0, 2.5)
        assert torch.equal(batch["next", "reward"], reward)
        assert torch.equal(batch["next", "step_count"][..., 0], raw["next", "observation"][..., 2].long())
        assert torch.equal(batch["step_count"][..., 0], raw["observation"][..., 2].long())
        for lane in range(3):
            total = 0.0
            for t in range(20):
                total = 0.0 if raw["observation"][lane, t, 2] == 0 else total
                assert batch["episode_reward"][lane, t] == pytest.approx(total) or t == 0
                total = float(batch["episode_reward"][lane, t]) + float(reward[lane, t])
                assert batch["next", "episode_reward"][lane, t] == pytest.approx(total)
    assert torch.allclose(ScaleReward(0.5, 1.0).inverse(torch.tensor([2.0])), torch.tensor([2.0]))


def test_a_time_limit_truncates():
    c = Collector(TransformedEnv(serial([(9,), (2,)]), TimeLimit(3)), EchoPolicy(), frames_per_batch=12)
    batch = c.next()
    assert batch["next", "truncated"][0, :, 0].tolist() == [False, False, True] * 2
    assert batch["next", "terminated"][1, :, 0].tolist()[1]


def test_flattening_is_a_view_of_the_same_numbers():
    class Square(CountingEnv):
        observation_space = gym.spaces.Dict(
            {"a": gym.spaces.Box(-9, 9, (2, 3), np.float32), "b": gym.spaces.Box(-9, 9, (2,), np.float32)}
        )

        def _observation(self):
            return {"a": np.arange(6, dtype=np.float32).reshape(2, 3) + self.t, "b": np.full(2, self.t, np.float32)}

    env = TransformedEnv(SerialEnv(2, partial(Square, (3,))), FlattenObservation("a"))
    batch = Collector(env, lambda a, b: b[..., :1], frames_per_batch=8).next()
    assert batch["a"].shape == (2, 4, 6)
    assert torch.equal(batch["a"][0, 1], torch.arange(6.0) + 1)
    assert torch.equal(batch["next", "a"][1, 2], torch.arange(6.0) + 3)
    assert torch.equal(batch["b"][:, :, 0], torch.tensor([[0.0, 1, 2, 0]] * 2))


def test_flattening_needs_no_memory():
    class Wide(CountingEnv):
        observation_space = gym.spaces.Box(-9, 9, (1000, 1000), np.float32)

    lanes = SerialEnv(2, Wide).lanes_env
    tracemalloc.start()
    try:
        FlattenObservation().around(lanes)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "as much as a quarter of one observation"
    finally:
        tracemalloc.stop()


class Doubles(CountingEnv):
    """Observes thirds in float64, and a number of steps."""

    observation_space = gym.spaces.Dict(
        {"a": gym.spaces.Box(-9, 9, (2,), np.float64), "steps": gym.spaces.Box(0, 99, (1,), np.int64)}
    )

    def _observation(self):
        return {"a": np.array([self.t / 3, self.lane / 7]), "steps": np.array([self.t])}


def test_what_is_cast_is_cast_everywhere():
    def played(*casts):
        makers = [partial(Doubles, one, lane) for lane, one in enumerate(LENGTHS)]
        env = TransformedEnv(SerialEnv(3, makers), *casts)
        return Collector(env, lambda a, steps: a[..., :1].float(), frames_per_batch=36).next()

    raw, cast = played(), played(CastObservation())
    assert raw["a"].dtype == torch.float64
    for key in ("a", ("next", "a")):
        assert cast[key].dtype == torch.float32
        assert torch.equal(cast[key], raw[key].float())
    assert cast["steps"].dtype == torch.int64
    named = played(CastObservation(torch.float16, keys=["steps"]))
    assert torch.equal(named["next", "steps"], raw["next", "steps"].half())
    assert named["a"].dtype == torch.float64
    with pytest.raises(WrongArgument, match="dtype must be a torch dtype that NumPy has too"):
        CastObservation("float32")


def test_a_network_of_another_dtype_is_told_what_to_cast():
    def env():
        return SerialEnv(2, [partial(Doubles, (3,), lane) for lane in range(2)])

    class Actor(torch.nn.Linear):
        def forward(self, a, steps):
            return super().forward(a)

    words = r"'a' float64\[2, 2\].*are float32, the observation is float64.*cast the observation.*CastObservation"
    with pytest.raises(WorkerRaised, match=words):
        Collector(env(), Actor(2, 1), frames_per_batch=4)
    for one, policy in ((TransformedEnv(env(), CastObservation()), Actor(2, 1)), (env(), Actor(2, 1).double())):
        Collector(one, policy, frames_per_batch=4).next()
    with pytest.raises(WorkerRaised) as told:
        Collector(TransformedEnv(env(), CastObservation()), Actor(3, 1), frames_per_batch=4)
    assert "CastObservation" not in str(told.value)


class Pictures(CountingEnv):
    observation_space = gym.spaces.Box(0, 255, (20, 30, 3), np.uint8)

    def _observation(self):
        return np.random.default_rng(self.t + 10 * self.lane).integers(0, 256, (20, 30, 3), np.uint8)


def test_pictures_become_gray_and_small():
    makers = [partial(Pictures, (4,), lane) for lane in range(2)]
    env = TransformedEnv(SerialEnv(2, makers), GrayscaleResize(10, 15))
    batch = Collector(
        env, lambda observation: observation.float().mean((-3, -2, -1))[..., None], frames_per_batch=12
    ).next()
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ((2, 6, 1, 10, 15), torch.uint8)
    for lane in range(2):
        for t in range(4):
            whole = Pictures((4,), lane)
            whole.t = t
            gray = np.round(whole._observation().astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32))
            small = np.round(gray.reshape(10, 2, 15, 2).mean((1, 3)))
            got = batch["pixels"][lane, t, 0].numpy().astype(np.float32)
            assert np.abs(got - small).max() <= 1  # halves are rounded by either
    with pytest.raises(SpecMismatch, match=r"is for uint8 images"):
        TransformedEnv(serial(), GrayscaleResize())


# ---- workers --------------------------------------------------------------------------------------------------------


def shared_by_workers(kind, batches=3, **options):
    """Two workers of two lanes, which share one normalisation: it, and what was collected."""
    how = NormalizeObservation()

    def factory(first):
        return lambda: TransformedEnv(SerialEnv(2, makers(LENGTHS[first : first + 2])), how)

    with kind([factory(0), factory(1)], still, frames_per_batch=24, **options) as c:
        return how, [c.next() for _ in range(batches)]


@pytest.mark.parametrize("kind", [MultiSyncCollector, pytest.param(DistributedSyncCollector, marks=pytest.mark.slow)])
def test_workers_share_statistics_between_rollouts(kind):
    """What each knows at its second rollout is what both have seen in the first, and what it has seen since."""
    how, batches = shared_by_workers(kind, cat_results=0)
    stories = [played(LENGTHS[:2], 18), played(LENGTHS[1:], 18)]
    own = [[], []]  # all that each worker has observed, as batches
    now = [None, None]
    for w, story in enumerate(stories):
        for first in next(story):
            own[w].append(first)
    heard = [[], []]
    want = [[], []]

    def statistics(w):
        every = np.concatenate([*heard[w], *own[w]])
        rms = Reference(3)
        rms.update(every)
        return rms

    for rollout in range(3):
        if rollout:
            heard = [list(own[1]), list(own[0])]
        for w, story in enumerate(stories):
            if not rollout:
                rms = statistics(w)
                now[w] = (own[w][-1] - rms.mean) / np.sqrt(rms.var + 1e-8)
            for _ in range(6):
                seen, _, ended, fresh = next(story)
                own[w].append(seen)
                rms = statistics(w)
                want[w].append(now[w])
                now[w] = (seen - rms.mean) / np.sqrt(rms.var + 1e-8)
                if ended:
                    own[w].append(fresh)
                    rms = statistics(w)
                    now[w] = now[w].copy()
                    now[w][ended] = (fresh - rms.mean) / np.sqrt(rms.var + 1e-8)
    got = torch.cat([batch["observation"] for batch in batches], 1).numpy()
    expected = np.concatenate([np.stack(one, 1) for one in want])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    every = np.concatenate([*own[0], *own[1]])
    found = how.statistics()  # here, where it was made, all is known
    assert found.count == pytest.approx(len(every))
    np.testing.assert_allclose(found.mean, every.mean(0), rtol=1e-4)
    np.testing.assert_allclose(found.var, every.var(0), rtol=1e-3)


def test_workers_that_come_as_they_are_ready_share_too():
    how, _ = shared_by_workers(MultiAsyncCollector, batches=8)
    assert how.statistics().count > 8 * 24
    assert 0 < how.statistics().mean[0] < 3


def test_a_worker_that_is_ahead_of_all_others_is_told_nothing_of_the_right_shape():
    """It reports twice before any other has: what the others have seen is of no values yet, and they have a shape."""
    learned, pool = LearnedStatistics(), StatisticsPool()  # here, where no env has said a shape
    worker = pickle.loads(pickle.dumps(RunningStatistics((learned.id, ("observation",)))))
    worker.expect((3,))
    for _ in range(2):
        worker.update(np.arange(12.0).reshape(4, 3))
        pool.report(0, {worker.name: worker.own()})
        worker.set_elsewhere(pool.for_worker(0)[worker.name])
    assert worker.count == pytest.approx(8, abs=1e-3)
    assert learned.of(("observation",)).count == pytest.approx(8, abs=1e-3)
    np.testing.assert_allclose(learned.of(("observation",)).mean, [4.5, 5.5, 6.5], rtol=1e-4)


def test_statistics_of_several_shapes_go_on_from_a_state_with_their_own():
    seen = {("x", ("observation",)): Moments.of(np.ones((4, 3))), ("x", ("next", "reward")): Moments.of(np.ones(4))}
    pool = StatisticsPool()
    pool.load([None, None], {0: seen})
    assert [one.mean.shape for one in pool.for_worker(0).values()] == [(3,), ()]


def test_workers_in_the_background_share_about_once_a_second():
    how = NormalizeReward()
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=4)
    factories = [lambda: TransformedEnv(SerialEnv(2, makers()[:2]), how)] * 2
    with MultiAsyncCollector(factories, still, frames_per_batch=24, replay_buffer=buffer) as c:
        c.start()
        until(lambda: how._learned.found and how.statistics("reward").count >= 48)
    assert how.statistics("reward").var > 0


def test_merging_does_not_depend_on_how_data_are_shared_out():
    values = np.random.default_rng(0).normal(1e4, 3, (600, 5))
    want = Moments.of(values)
    for cuts in ([100, 250], [1, 2, 3, 599], range(7, 600, 7)):
        found = merged([Moments.of(part) for part in np.split(values, list(cuts))], (5,))
        assert found.count == want.count
        np.testing.assert_allclose(found.mean, want.mean, rtol=1e-14)
        np.testing.assert_allclose(found.squares, want.squares, rtol=1e-9)


# ---- evaluation, saving, going on ---------------------------------------------------------------------------------


def test_frozen_statistics_are_read_and_not_changed():
    how = NormalizeObservation()
    train = Collector(TransformedEnv(serial(), how), still, frames_per_batch=60)
    train.next()
    before = how.statistics().count, how.statistics().mean.copy()
    evaluation = TransformedEnv(serial(), how.frozen())
    batch = evaluation.rollout(2, still)
    scale = np.sqrt(how.statistics().var + 1e-8)
    want = (np.array([0, 0, 0.0]) - before[1]) / scale
    np.testing.assert_allclose(batch["observation"][0, 0].numpy(), want, rtol=1e-5)
    assert (how.statistics().count, *how.statistics().mean) == (before[0], *before[1])
    raw = how.inverse(batch["observation"])
    assert torch.allclose(raw[0, :, 2], torch.tensor([0.0, 1.0]), atol=1e-5)


@pytest.mark.parametrize("kind", ["one", "workers"])
def test_it_goes_on_bit_for_bit_where_a_state_was_saved(kind):
    def make():
        transforms = [NormalizeObservation(), NormalizeReward(), RewardSum(), StepCounter()]
        if kind == "one":
            return Collector(TransformedEnv(serial(), transforms), still, frames_per_batch=21)
        factories = [lambda i=i: TransformedEnv(SerialEnv(2, makers()[i : i + 2]), transforms) for i in range(2)]
        return MultiSyncCollector(factories, still, frames_per_batch=28)

    first, second = make(), make()
    with first, second:
        for _ in range(3):
            first.next()
        state = pickle.loads(pickle.dumps(first.state_dict()))
        want = [first.next() for _ in range(3)]
        second.next()
        second.load_state_dict(state)
        for batch in want:
            got = second.next()
            for key in ("observation", ("next", "observation"), ("next", "reward"), "episode_reward", "step_count"):
                assert torch.equal(got[key], batch[key]), key


def test_a_worker_that_was_started_again_learns_what_was_known():
    how = NormalizeObservation()
    how.learned_of(("observation",), (3,)).update(np.arange(300.0).reshape(100, 3))
    again = pickle.loads(pickle.dumps(how))
    assert again.statistics().count == pytest.approx(how.statistics().count)
    np.testing.assert_allclose(again.statistics().mean, how.statistics().mean)
    assert again.statistics().own().count == 0  # it was seen elsewhere


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: TransformedEnv(serial(), "x"), WrongArgument, "instances of classes in reap.envs.transforms, got 'x'"),
        (
            lambda: TransformedEnv(serial(), NormalizeObservation("no")),
            SpecMismatch,
            r"keys contains 'no', which is not an observation; the env has",
        ),
        (lambda: NormalizeObservation(clip=-1), WrongArgument, "clip must be a positive number, got -1"),
        (lambda: NormalizeReward(2.0), WrongArgument, "gamma must lie between 0 and 1, got 2.0"),
        (lambda: ScaleReward(0), WrongArgument, "scale must not be 0"),
        (lambda: ClipReward(1, -1), WrongArgument, "low must be less than high"),
        (lambda: TimeLimit(0), UsageError, "max_steps must be at least 1, got 0"),
        (
            lambda: TransformedEnv(serial(), StepCounter("observation")),
            UsageError,
            "^StepCounter adds 'observation', which the env has already; give it another key$",
        ),
        (
            lambda: TransformedEnv(serial(), StepCounter(), TimeLimit(3)),
            UsageError,
            "^TimeLimit adds 'step_count', which the env has already; give it another key$",
        ),
        (
            lambda: Collector(TransformedEnv(serial(), TimeLimit(3)), frames_per_batch=8, max_frames_per_traj=3),
            UsageError,
            "max_frames_per_traj adds 'step_count', which the env has already; leave one of them out$",
        ),
        (
            lambda: TransformedEnv(AsyncEnvPool(makers(), backend="threading"), TimeLimit(3, ("n", "steps"))),
            UsageError,
            r"^TimeLimit needs .* single lanes, .*: wrap each env of the pool, TransformedEnv\(env, TimeLimit\(…\)\)$",
        ),
        (
            lambda: SerialEnv(2, [lambda m=m: TransformedEnv(m(), ScaleReward(2.0)) for m in makers()[:2]]),
            UsageError,
            "put the transforms around the lanes",
        ),
        (
            lambda: TransformedEnv(AsyncEnvPool(makers(), backend="threading"), ScaleReward(2.0)),
            UsageError,
            "these are asynchronous: wrap each env of the pool",
        ),
        (
            lambda: AsyncEnvPool([lambda: TransformedEnv(CountingEnv(), FrameStack(2))] * 2, backend="threading"),
            UsageError,
            "'observation' once.*FrameStackObservation in each env",
        ),
        (
            lambda: ParallelEnv(2, lambda: TransformedEnv(CountingEnv(), FrameStack(2))).spec,
            UsageError,
            "around the lanes",
        ),
        (lambda: NormalizeObservation().statistics(), UsageError, "no statistics for 'observation' yet"),
    ],
)
def test_what_cannot_be_is_told(make, error, told):
    with pytest.raises(error, match=told):
        make()


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_inside_the_envs_of_a_pool_they_are_what_they_are_in_step(backend):
    """The way that the refusal names: each lane's stream is bit for bit the one of lanes in step."""

    def transforms():
        return ScaleReward(0.5), ClipReward(-20.0, 20.0), RewardSum(), TimeLimit(3)

    batches = []
    pool = [lambda make=make: TransformedEnv(GymEnv(make()), *transforms()) for make in makers()]
    for make in (
        lambda: TransformedEnv(serial(), *transforms()),
        lambda: AsyncEnvPool(pool, backend=backend),
    ):
        with Collector(make(), EchoPolicy(), frames_per_batch=60, total_frames=180) as c:
            batches.append([batch.clone() for batch in c])
    in_step, as_ready = batches
    assert len(in_step) == len(as_ready) == 3
    for one, other in zip(in_step, as_ready):
        assert {*one.keys(True, True)} <= {*other.keys(True, True)}
        for key in one.keys(True, True):
            if key != ("collector", "traj_ids"):  # in the order in which episodes began
                assert torch.equal(one[key], other[key]), key


# ---- stacks ---------------------------------------------------------------------------------------------------------


class Seen(torch.nn.Module):
    """Its action tells all it saw: the steps of the stacked frames as one number in base 10."""

    def forward(self, observation):
        return (observation[..., :, 2] * torch.tensor([100.0, 10.0, 1.0])).sum(-1, keepdim=True)


def stacks_of(lengths, steps, size=3):
    """Stacks `[lanes, steps, size, 3]` at the root and next, frame by frame."""
    story = played(lengths, steps)
    (first,) = next(story)
    now = np.repeat(first[:, None], size, 1)
    root, following = [], []
    for seen, _, ended, fresh in story:
        root.append(now.copy())
        now = np.concatenate([now[:, 1:], seen[:, None]], 1)
        following.append(now.copy())
        if ended:
            now[ended] = fresh[:, None]
    return np.stack(root, 1).astype(np.float32), np.stack(following, 1).astype(np.float32)


@pytest.mark.parametrize("make", [serial, lambda: ParallelEnv(3, makers())])
@pytest.mark.parametrize("steps", [7, 1, 2])
def test_a_policy_sees_stacks_and_a_batch_holds_each_frame_once(make, steps):
    stack = FrameStack(3)
    with Collector(TransformedEnv(make(), stack), Seen(), frames_per_batch=3 * steps) as c:
        batches = [c.next() for _ in range(6)]
    root, following = stacks_of(LENGTHS, 6 * steps)
    frames = torch.cat([batch["frame", "observation"] for batch in batches], 1)
    assert torch.equal(frames, torch.from_numpy(root[:, :, -1]))
    assert "observation" not in batches[0].keys()
    actions = torch.cat([batch["action"] for batch in batches], 1)[..., 0]
    assert torch.equal(actions, torch.from_numpy((root[..., 2] * [100.0, 10.0, 1.0]).sum(-1).astype(np.float32)))
    whole = [stack.restore(batch) for batch in batches]
    assert torch.equal(torch.cat([one["observation"] for one in whole], 1), torch.from_numpy(root))
    assert torch.equal(torch.cat([one["next", "observation"] for one in whole], 1), torch.from_numpy(following))
    assert "frame" not in whole[0].keys()
    assert "first" not in whole[0]["collector"].keys()


def test_a_slot_has_room_for_one_stack():
    plain = Collector(serial(), still, frames_per_batch=300)
    c = Collector(
        TransformedEnv(serial(), FrameStack(3)), lambda observation: observation[..., 0, :1], frames_per_batch=300
    )
    extra = c._backend.worker.layout.nbytes - plain._backend.worker.layout.nbytes
    assert 0 < extra <= 3 * 3 * (3 * 3 * 4) + 3 * 64  # now, next and first, of three lanes; not three hundred


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_stacks_of_workers_restored_on_their_way(kind):
    stack = FrameStack(3)
    factory = partial(lambda lengths: TransformedEnv(serial(lengths), stack), [(3, 1, 5), (2,)])
    options = {"cat_results": 0} if kind is MultiSyncCollector else {}
    with kind([factory, factory], Seen(), frames_per_batch=28, postproc=stack.restore, **options) as c:
        batches = [c.next() for _ in range(4)]
    if kind is MultiSyncCollector:
        root, following = stacks_of([(3, 1, 5), (2,)], 28)
        for name, want in (("observation", root), (("next", "observation"), following)):
            got = torch.cat([batch[name] for batch in batches], 1)
            assert torch.equal(got, torch.from_numpy(np.concatenate([want, want])))
    else:
        seen = batches[0]["observation"][..., 2] * torch.tensor([100.0, 10.0, 1.0])
        assert torch.equal(seen.sum(-1, keepdim=True), batches[0]["action"])


def test_frames_in_a_buffer_are_stored_once_and_stacked_when_sampled():
    stack = FrameStack(3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    c = Collector(TransformedEnv(CountingEnv((9,)), stack), Seen(), frames_per_batch=27, replay_buffer=buffer)
    c.next()
    rows = buffer[:]
    assert "first" not in rows["collector"].keys()
    assert rows["frame", "observation"].shape == (27, 3)
    whole = stack.restore(rows)
    want = [t + max(t - 1, 0) + max(t - 2, 0) for t in range(9)] * 3
    assert whole["observation"][:, :, 2].sum(-1).tolist() == want


def test_stacks_go_on_bit_for_bit():
    def make():
        env = TransformedEnv(serial(), NormalizeObservation(), FrameStack(3))
        return Collector(env, lambda observation: observation.sum((-2, -1))[..., None], frames_per_batch=15)

    first, second = make(), make()
    first.next()
    state = pickle.loads(pickle.dumps(first.state_dict()))
    want = [first.next() for _ in range(2)]
    second.load_state_dict(state)
    for batch in want:
        got = second.next()
        assert torch.equal(got["action"], batch["action"])
        assert torch.equal(got["collector", "first", "observation"], batch["collector", "first", "observation"])


def test_pictures_are_stacked_along_their_channels():
    env = TransformedEnv(SerialEnv(2, partial(Pictures, (4,))), GrayscaleResize(10, 15), FrameStack(4))
    assert env.observation_spec["pixels"].shape == (4, 10, 15)
    batch = Collector(env, lambda pixels: pixels.float().mean((-3, -2, -1))[..., None], frames_per_batch=12).next()
    assert batch["frame", "pixels"].shape == (2, 6, 1, 10, 15)
    assert FrameStack(4).restore(batch)["pixels"].shape == (2, 6, 4, 10, 15)
    with pytest.raises(SpecMismatch, match="put FrameStack last"):
        TransformedEnv(serial(), FrameStack(2), NormalizeObservation("observation"))
    with pytest.raises(UsageError, match="is stacked: leave it out"):
        Collector(TransformedEnv(serial(), FrameStack(3)), Seen(), frames_per_batch=12, compact_obs=True)
