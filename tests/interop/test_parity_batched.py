"""AsyncBatchedCollector beside TorchRL's: the same keys, shapes and dtypes, and each env's frames the same.

Which env comes when is nobody's promise, so frames are compared env by env, bit for bit. TorchRL's batches have no
trajectory ids, name a frame's version at its root only, and are lazy stacks; reap's have both and are dense.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.pairs import LIBRARIES

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(90)]

LENGTHS = ((3, 1, 5), (2, 7), (4,))
IDS, VERSION = ("collector", "traj_ids"), ("next", "policy_version")
OURS = {IDS: torch.int64, VERSION: torch.int64}  # beyond what TorchRL delivers


def made(library, **options):
    module = LIBRARIES[library]
    wrap = module.envs.GymWrapper if library == "torchrl" else module.envs.GymEnv
    return module.collectors.AsyncBatchedCollector(
        create_env_fn=[lambda n=n: wrap(CountingEnv(LENGTHS[n], n)) for n in range(3)],
        policy=TensorDictModule(EchoPolicy(), in_keys=["observation"], out_keys=["action"]),
        max_batch_size=3,
        env_backend="threading",
        **options,
    )


def collected(library, **options):
    """Batches, as plain TensorDicts."""
    collector = made(library, **options)
    try:
        return [TensorDict(dict(batch.items()), batch.batch_size) for batch in map(dense, collector)]
    finally:
        collector.shutdown()


def dense(batch):
    return batch.contiguous().clone()


def looks(td):
    return {key: (tuple(value.shape), value.dtype) for key, value in td.items(True, True)}


def beside(mine, other):
    """`mine` looks like `other`, and has what is ours."""
    size = tuple(mine.batch_size)
    assert looks(mine) == looks(other) | {key: (size, dtype) for key, dtype in OURS.items()}
    assert torch.equal(mine[VERSION], mine["policy_version"])


def test_batches_look_the_same():
    theirs, ours = (collected(library, frames_per_batch=24, total_frames=72) for library in ("torchrl", "reap"))
    assert [batch.batch_size for batch in ours] == [batch.batch_size for batch in theirs] == [torch.Size([24])] * 3
    for mine, other in zip(ours, theirs):
        beside(mine, other)


def test_the_last_batch_is_cut_alike():
    theirs, ours = (collected(library, frames_per_batch=7, total_frames=17) for library in ("torchrl", "reap"))
    assert [len(batch) for batch in ours] == [len(batch) for batch in theirs] == [7, 7, 3]


def test_each_env_has_the_same_frames_in_the_same_order():
    theirs, ours = (
        torch.cat(collected(library, frames_per_batch=40, total_frames=240)) for library in ("torchrl", "reap")
    )
    compared = 0
    for n in range(3):  # how often each is stepped is a matter of who is ready
        other, mine = (td[td["env_index"] == n] for td in (theirs, ours))
        common = min(len(other), len(mine))
        compared += common
        for key in looks(other):
            assert torch.equal(mine[key][:common], other[key][:common]), (n, key)
    assert compared >= 60


def test_whole_episodes_come_alike():
    found = {}
    for library in ("torchrl", "reap"):
        episodes = collected(library, frames_per_batch=10, total_frames=200, yield_completed_trajectories=True)
        per_env = {n: [] for n in range(3)}
        for whole in episodes:
            (n,) = set(whole["env_index"].tolist())
            per_env[n].append(whole)
        found[library] = per_env
    for n in range(3):
        pairs = list(zip(found["torchrl"][n], found["reap"][n]))
        assert len(pairs) >= 3
        for other, mine in pairs:
            beside(mine, other)
            assert mine["next", "done"].flatten().tolist() == [False] * (len(mine) - 1) + [True]
            for key in looks(other):
                assert torch.equal(mine[key], other[key]), (n, key)
