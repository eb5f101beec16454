"""A buffer's state in a larger buffer: rows, priorities, write position and limiter go on there."""

from __future__ import annotations

import pytest
import torch

from reap import checkpoint
from reap.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    SliceSampler,
    TensorDictReplayBuffer,
)
from reap.errors import CorruptState, UsageError
from tests.worlds.buffers import line


def numbered(buffer):
    return buffer[:].exclude("index")


def by_priority(rows, **options):
    sampler = PrioritizedSampler(rows, alpha=1.0, beta=1.0)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=8, **options)


def plain(rows, sampler=None, storage=LazyTensorStorage, **options):
    return TensorDictReplayBuffer(storage=storage(rows), sampler=sampler, batch_size=8, **options)


@pytest.mark.parametrize("before", [0, 7])
@pytest.mark.parametrize("written", [0, 5, 40, 57, 133])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_rows_and_where_the_next_goes(written, before, storage):
    """Whether the smaller one had wrapped around or not, and whatever was in the larger one."""
    small, large = plain(40), plain(100, storage=storage)
    lines = line(written + 80)
    if written:
        small.extend(lines[:written])
    for _ in range(before):
        large.extend(line(30))
    large.load_state_dict(small.state_dict())
    kept = lines[max(written - 40, 0) : written]
    assert (len(large), large.write_count) == (len(kept), written)
    if written:
        assert (numbered(large) == kept).all()
    large.extend(lines[written:])
    expected = lines[max(written - 40, 0) :][-100:]
    assert len(large) == len(expected)
    found = numbered(large)
    turn = (len(kept) + 80) % 100 if len(kept) + 80 > 100 else 0
    assert (torch.cat([found[turn:], found[:turn]]) == expected).all()


@pytest.mark.parametrize("written", [30, 57, 133])
def test_priorities(written, tmp_path):
    small, large = by_priority(40), by_priority(100)
    small.extend(line(written))
    count = min(written, 40)
    small.update_priority(torch.arange(count), torch.arange(count) + 1.0)
    checkpoint.save(tmp_path, buffer=small)
    checkpoint.load(tmp_path, buffer=large)
    position = torch.arange(written - count, written)  # from the oldest on
    expected = (position % 40 + 1.0).double()
    tree = torch.from_numpy(large.sampler._tree[torch.arange(100).numpy()])
    assert torch.allclose(tree[:count], expected, atol=1e-6)
    assert tree[count:].sum() == 0
    drawn = torch.cat([large.sample()["index"] for _ in range(400)])
    share = torch.bincount(drawn, minlength=100)[:count] / len(drawn)
    assert torch.allclose(share.double(), expected / expected.sum(), atol=0.02)
    large.extend(line(10))
    large.sample()
    assert large.sampler._tree[count] == pytest.approx(float(count)), "the largest so far"


def test_the_limiter_goes_on():
    limiter = {"limiter": SamplesPerInsert(2, tolerance=50, min_size=10)}
    small, large = plain(40, **limiter), plain(100, **limiter)
    small.extend(line(57))
    small.sample()
    large.load_state_dict(small.state_dict())
    assert large.limiter.behind(large._memory.ring) == small.limiter.behind(small._memory.ring) == 47 * 2 - 8


def test_rounds_and_slices_go_on():
    small, large = plain(40, SamplerWithoutReplacement()), plain(100, SamplerWithoutReplacement())
    small.extend(line(57))
    seen = [small.sample() for _ in range(2)]
    large.load_state_dict(small.state_dict())
    seen += [large.sample() for _ in range(3)]
    rows = torch.cat([sample.exclude("index") for sample in seen])
    assert len({tuple(row.flatten().tolist()) for row in rows["observation"]}) == 40, "each row once"

    small, large = (plain(rows, SliceSampler(slice_len=4)) for rows in (40, 100))
    small.extend(line(57))
    large.load_state_dict(small.state_dict())
    assert large.sample().shape == (8,)


def test_a_smaller_one_is_refused_and_so_is_what_does_not_fit():
    small, large = by_priority(40), by_priority(100)
    large.extend(line(90))
    with pytest.raises(UsageError, match="has 100 rows, but the storage holds 40"):
        small.load_state_dict(large.state_dict())
    small.extend(line(20))
    state = small.state_dict()
    kept = numbered(large)
    for change in ({"tree": state["sampler"]["tree"][:-1]}, {"low": 30}, {"high": None}, {"tree": None}):
        with pytest.raises(CorruptState):
            large.load_state_dict({**state, "sampler": {**state["sampler"], **change}})
    with pytest.raises(UsageError, match="belongs to another sampler"):
        large.load_state_dict({**state, "sampler": {}})
    assert (numbered(large) == kept).all()
