"""Contiguous batches in memory that takes turns: what a consumer holds of one never changes, and little is kept."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.core.assemble import assemble
from reap.core.columns import lane_major
from reap.core.columns.lane_major import LaneMajorCopies
from reap.core.slot import FLAGS, Layout, Slot
from reap.envs import SerialEnv
from reap.spec import BatchShape, Leaf
from reap.testing import CountingEnv, EchoPolicy
from tests import example_count

FLAG = {(*root, f): Leaf((1,), torch.bool) for root in ((), ("next",)) for f in FLAGS}
LEAVES = {
    ("pixels",): Leaf((2, 3), torch.float32),
    ("next", "pixels"): Leaf((2, 3), torch.float32),
    ("half",): Leaf((4,), torch.bfloat16),
    ("number",): Leaf((), torch.int64),
}


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    """Columns of some bytes are lent as large ones are."""
    monkeypatch.setattr(lane_major, "LARGE", 1)


def layout_of(steps=3, lanes=2, **look):
    return Layout({**FLAG, **LEAVES}, steps, lanes, batched=True, look=BatchShape(contiguous=True, **look))


class Rollouts:
    """Slots full of numbers that are all different, and the batches made of them."""

    def __init__(self, layout):
        self.slot, self.copies, self.layout, self.made = Slot(layout), LaneMajorCopies(), layout, 0

    def batch(self):
        for n, array in enumerate(self.slot.arrays.values()):
            array[...] = np.arange(array.size).reshape(array.shape) % 50 + (self.made * 7 + n) % 50
        self.made += 1
        return assemble(self.copies.of(self.slot.arrays, self.layout), self.layout)


def test_the_batch_is_the_one_that_is_copied():
    for look in ({}, {"dims": (2, 1)}, {"hidden": frozenset({("number",)})}):
        layout = layout_of(**look)
        rollouts = Rollouts(layout)
        for _ in range(5):
            batch = rollouts.batch()
            plain = assemble(rollouts.slot.arrays, layout)
            assert {*batch.keys(True, True)} == {*plain.keys(True, True)}
            for key, value in plain.items(True, True):
                mine = batch[key]
                assert mine.is_contiguous()
                assert mine.data_ptr() % 64 == 0  # as of torch: elsewhere convolutions give other last bits
                assert (mine.shape, mine.stride(), mine.dtype) == (value.shape, value.stride(), value.dtype)
                assert torch.equal(mine, value)
            assert batch.view(-1)["pixels"].data_ptr() == batch["pixels"].data_ptr()


KEPT = {
    "all of it": lambda batch: batch,
    "a column": lambda batch: batch["pixels"],
    "a part": lambda batch: batch["next", "pixels"][1:, ::2, 1],
    "a lane": lambda batch: batch[0],
    "a flat view": lambda batch: batch.view(-1)["pixels"],
    "an array": lambda batch: batch["pixels"].numpy(),
    "a part of an array": lambda batch: batch["half"].view(torch.int16).numpy()[0, 1:],
    "another type": lambda batch: batch["pixels"].view(torch.int32),
    "a storage": lambda batch: torch.empty(0).set_(batch["pixels"].untyped_storage()),
    "by dlpack": lambda batch: torch.from_dlpack(batch["number"]),
    "split": lambda batch: batch.split(1, -1)[1],
    "without a parent": lambda batch: batch["next"].exclude("done"),
    "for gradients": lambda batch: batch["pixels"].requires_grad_().square().grad_fn,
    "shared": lambda batch: batch.share_memory_(),
    "one shared": lambda batch: batch["pixels"].share_memory_(),
    "pickled": lambda batch: pickle.loads(pickle.dumps(batch["pixels"])),
}


def bits(kept):
    """What is seen of something kept, as it is now."""
    if hasattr(kept, "_saved_self"):
        kept = kept._saved_self
    if isinstance(kept, np.ndarray):
        return kept.tobytes()
    if isinstance(kept, torch.Tensor):
        return kept.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {key: bits(value) for key, value in kept.items(True, True)}


@given(st.lists(st.tuples(st.sampled_from([*KEPT, "nothing"]), st.integers(0, 5)), max_size=12))
@settings(max_examples=example_count(100), deadline=None)
def test_what_is_kept_of_a_batch_never_changes(turns):
    rollouts = Rollouts(layout_of())
    kept = []
    for what, drop in turns:
        batch = rollouts.batch()
        if what != "nothing":
            one = KEPT[what](batch)
            kept.append((one, bits(one)))
            del one
        del batch
        for one, before in kept:
            assert bits(one) == before
        if drop < len(kept):
            del kept[drop]


@pytest.mark.parametrize("what", KEPT)
def test_each_kind_of_part_keeps_its_batch(what):
    rollouts = Rollouts(layout_of())
    kept = [KEPT[what](rollouts.batch()) for _ in range(3)]
    before = [bits(one) for one in kept]
    for _ in range(4):
        rollouts.batch()
    assert [bits(one) for one in kept] == before


def test_memory_takes_turns():
    rollouts = Rollouts(layout_of())
    places = []
    batch = None
    for _ in range(8):
        batch = rollouts.batch()  # the last is in hand while the next is made
        places.append(batch["pixels"].data_ptr())
    assert len({*places}) == 2
    assert places[:-2] == places[2:]


def test_one_who_keeps_all_gets_memory_of_his_own_and_none_is_kept_beside():
    rollouts = Rollouts(layout_of())
    kept = [rollouts.batch() for _ in range(6)]
    assert len({batch["pixels"].data_ptr() for batch in kept}) == 6
    assert sum(not owns(batch["pixels"]) for batch in kept) == 2  # lent; the others are torch's own
    del kept
    assert not owns(rollouts.batch()["pixels"])


def owns(tensor):
    """Whether a tensor's memory is torch's, which can grow."""
    return tensor.untyped_storage().resizable()


def test_memory_ends_with_who_holds_it():
    rollouts = Rollouts(layout_of())
    batch, other = rollouts.batch(), rollouts.batch()
    memory = [weakref.ref(slot.arrays["pixels",].base) for slot in rollouts.copies._pool._slots]
    before = bits(batch)
    del rollouts, other
    gc.collect()
    assert [one() is not None for one in memory] == [True, False]
    assert bits(batch) == before
    del batch
    gc.collect()
    assert memory[0]() is None


def test_a_rollout_of_another_shape_has_memory_of_its_own():
    rollouts = Rollouts(layout_of())
    first = rollouts.batch()
    rollouts.slot, rollouts.layout = Slot(layout_of(steps=5)), layout_of(steps=5)
    assert rollouts.batch().shape == (2, 5)
    pool = rollouts.copies._pool
    rollouts.layout = layout_of(steps=5)  # of another worker, and the same
    rollouts.batch()
    assert rollouts.copies._pool is pool
    assert first.shape == (2, 3)


@pytest.mark.parametrize(("steps", "lanes"), [(1, 3), (3, 1)])
def test_what_lies_in_order_is_not_copied(steps, lanes):
    rollouts = Rollouts(layout_of(steps, lanes))
    assert rollouts.copies.of(rollouts.slot.arrays, rollouts.layout) is rollouts.slot.arrays


def test_ctrl_c_while_it_copies_costs_no_memory(monkeypatch):
    rollouts = Rollouts(layout_of())
    tensor = Layout.tensor

    def interrupted(self, key, array):
        if key == ("next", "pixels"):
            raise KeyboardInterrupt
        return tensor(self, key, array)

    for _ in range(3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Layout, "tensor", interrupted)
            rollouts.batch()
    held = [rollouts.batch(), rollouts.batch()]
    assert not any(owns(batch["pixels"]) for batch in held)


@pytest.mark.parametrize("same", [False, True])
def test_a_collector_whose_consumer_keeps_some(same):
    """As without: every batch is what it was when it came, but for one that is asked to be the same."""

    def collector(contiguous):
        env = SerialEnv(3, lambda: CountingEnv((5, 2)))
        return Collector(env, EchoPolicy(), frames_per_batch=12, contiguous=contiguous, return_same_td=same)

    with collector(True) as ours, collector(False) as plain:
        kept = []
        for n in range(9):
            batch, want = ours.next(), plain.next().clone()
            assert all(bool((batch[key] == value).all()) for key, value in want.items(True, True))
            assert all(value.is_contiguous() for value in batch.values(True, True))
            if n % 3 != 1 and not same:
                kept.append((batch["observation"][1], want["observation"][1]))
            del batch
        assert all(torch.equal(mine, value) for mine, value in kept)
