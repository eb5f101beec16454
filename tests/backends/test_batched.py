"""AsyncBatchedCollector: the suite every backend passes, in threads and in processes; and what only it promises."""

from __future__ import annotations

import pytest
import torch

from reap.collectors import AsyncBatchedCollector
from reap.envs import GymEnv
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same, backend_checks, no_leaks

BACKENDS = ("threading", "multiprocessing")
LENGTHS = ((3, 1, 5), (2, 2, 7), (4,), (1,), (6, 2))


class InLanes(AsyncBatchedCollector):
    """Batches in the form the suite compares: of envs that share a worker every batch holds as many frames."""

    def __init__(self, env, policy, *, env_backend, track_policy_version=False, **options):
        options["track_policy_version"] = track_policy_version
        super().__init__([env], policy, env_backend=env_backend, **options)

    def _arrange(self, batch, rollout):
        lanes = int(batch["env_index"].max()) + 1
        flat = super()._arrange(batch, rollout).exclude("env_index")
        if lanes == 1:
            return flat
        return flat.reshape(-1, lanes).transpose(0, 1).refine_names(..., "time")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", backend_checks)
def test_the_suite(name, backend):
    backend_checks[name](lambda env, policy, **options: InLanes(env, policy, env_backend=backend, **options))


def makers(lengths=LENGTHS):
    return [lambda one=one, lane=lane: GymEnv(CountingEnv(one, lane)) for lane, one in enumerate(lengths)]


def by_env(batches, count):
    """The frames of each env, in the order in which they came."""
    flat = torch.cat([batch.exclude(("collector", "traj_ids")) for batch in batches])
    return [flat[flat["env_index"] == n].exclude("env_index") for n in range(count)]


@pytest.mark.parametrize(
    ("backend", "per_worker", "sizes"),
    [
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
            env_backend=backend,
            envs_per_worker=per_worker,
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
