"""Slots: one owner at a time, lent without a copy, back when the last tensor dies."""

from __future__ import annotations

import functools
import gc
import operator
import signal
import threading
from collections import deque

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.core.slot import FLAGS, Layout, Pool, Slot
from reap.envs import SerialEnv
from reap.spec import Leaf
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from tests import example_count

FLAG = {(*root, f): Leaf((1,), torch.bool) for root in ((), ("next",)) for f in FLAGS}


def layout(steps=3, lanes=2, batched=True, **leaves):
    return Layout({**FLAG, **{(k,): v for k, v in leaves.items()}}, steps, lanes, batched=batched)


def test_arrays_and_tensors_are_the_same_memory():
    slot = Slot(layout(x=Leaf((2,), torch.float32), y=Leaf((), torch.int8), z=Leaf((3,), torch.float64)))
    views = slot.layout.tensors(slot.arrays)
    for key in ("x", "y", "z"):
        array = slot.arrays[(key,)]
        array[...] = np.arange(array.size).reshape(array.shape)
        assert np.array_equal(views[(key,)].numpy(), np.swapaxes(array, 0, 1))
    assert slot.block.ctypes.data % 64 == 0
    assert slot.arrays[("x",)].base is not None


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3),
            st.sampled_from([torch.bool, torch.int8, torch.float16, torch.int64]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
    st.integers(1, 3),
)
@settings(max_examples=example_count(50), deadline=None)
def test_columns_never_overlap(leaves, steps, lanes):
    slot = Slot(layout(steps, lanes, **{f"k{i}": Leaf(tuple(s), d) for i, (s, d) in enumerate(leaves)}))
    for i, array in enumerate(slot.arrays.values()):
        array.view(np.uint8)[...] = i + 1 if array.dtype != np.bool_ else 1
    for i, array in enumerate(slot.arrays.values()):
        assert (array.view(np.uint8) == (i + 1 if array.dtype != np.bool_ else 1)).all()
    slot.clear_flags()
    assert not any(slot.arrays[k].any() for k in FLAG)


def test_life_of_a_slot():
    pool = Pool(layout(), limit=1)
    slot = pool.acquire()
    assert pool.acquire() is not slot  # it is being written to
    lent = slot.layout.tensors(pool.lend(slot))
    assert pool.acquire() is not slot
    part = lent["done",][:1].view(-1)
    del lent
    assert not slot.returned  # a view of one column still looks
    assert pool.acquire() is not slot
    array = part.numpy()
    del part
    assert not slot.returned  # so does NumPy
    assert pool.acquire() is not slot
    del array
    assert slot.returned
    assert pool.acquire() is slot


def test_a_slot_that_is_released_is_free_again():
    pool = Pool(layout(), limit=1)
    slot = pool.acquire()
    pool.release(slot)
    assert pool.acquire() is slot
    assert pool.acquire() is not slot  # it was free once only


def test_the_reserve_is_copied_out():
    pool = Pool(layout(), limit=1)
    first = pool.lend(pool.acquire())
    reserve = pool.acquire()
    copy = pool.lend(reserve)
    assert not np.shares_memory(copy["done",], reserve.block)
    assert pool.acquire() is reserve
    assert not np.shares_memory(first["done",], reserve.block)


def test_a_slot_given_back_in_another_thread():
    pool = Pool(layout(), limit=1)
    slot = pool.acquire()
    box = [pool.lend(slot)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert pool.acquire() is slot


def test_an_interrupt_while_a_batch_is_dropped_is_not_swallowed():
    """Nor is the slot lost: a finalizer written in Python would be broken off before its first line."""

    def interrupt(*_):
        raise KeyboardInterrupt

    pool = Pool(layout(), limit=1)
    slot = pool.acquire()
    box = [pool.lend(slot)]
    soon = functools.partial(signal.setitimer, signal.ITIMER_REAL, 1e-4)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):  # it comes in the second of these, where no line of Python ends
            deque(map(operator.methodcaller("__call__"), [soon, functools.partial(sum, range(10**7)), box.clear]), 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert slot.returned
    assert pool.acquire() is slot


def test_a_batch_is_lent_not_copied():
    c = Collector(SerialEnv(2, CountingEnv), EchoPolicy(), frames_per_batch=8)
    slots = set()
    for i, batch in enumerate(c):
        slots.add(batch["observation"].data_ptr())
        if i == 20:
            break
    pool = c._backend.worker.pool
    blocks = {slot.arrays[("observation",)].ctypes.data for slot in pool._slots}
    assert slots == blocks  # two slots take turns, and there never was a third
    assert len(blocks) == 2
    assert pool._reserve is None


def test_a_batch_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        test_a_batch_is_lent_not_copied()
    finally:
        gc.enable()


@given(st.lists(st.booleans(), min_size=1, max_size=25))
@settings(max_examples=example_count(30), deadline=None)
def test_whatever_is_kept_stays_true(keep):
    c, world = Collector(SerialEnv(2, CountingEnv), EchoPolicy(), frames_per_batch=8), CountingWorld([(3, 1, 5)] * 2)
    kept = []
    for flag in keep:
        batch, want = c.next(), None
        want = world.batch(4)
        for lane in range(2):  # both lanes call themselves 0
            for key in (("observation",), ("next", "observation")):
                want[key][lane, :, 0] = 0
        want[("action",)][1] = want[("action",)][0]
        want[("next", "reward")][1] = want[("next", "reward")][0]
        if flag:
            kept.append((batch, want))
    for batch, want in kept:
        assert_same(batch, want)


def test_a_batch_can_be_saved_and_weighs_what_it_holds():
    import io
    import pickle

    c = Collector(SerialEnv(2, CountingEnv), EchoPolicy(), frames_per_batch=400)
    batch = c.next()
    size = sum(v.numel() * v.element_size() for v in batch.values(True, True))
    buffer = io.BytesIO()
    torch.save(batch.to_dict(), buffer)
    assert len(buffer.getvalue()) < 2 * size + 10_000
    assert len(pickle.dumps(batch)) < 2 * size + 10_000
    assert (pickle.loads(pickle.dumps(batch)) == batch).all()


def test_a_collector_may_die_before_its_batches():
    c = Collector(SerialEnv(2, CountingEnv), EchoPolicy(), frames_per_batch=8)
    batch = c.next()
    before = batch.clone()
    del c
    gc.collect()
    assert (batch == before).all()


def test_memory_is_two_batches():
    class Image(CountingEnv):
        import gymnasium as gym

        observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)

        def _observation(self):
            return np.zeros((64, 64, 3), np.uint8)

    c = Collector(Image(), frames_per_batch=100)
    for i, batch in enumerate(c):
        if i == 5:
            break
    size = sum(v.numel() * v.element_size() for v in batch.values(True, True))
    pool = c._backend.worker.pool
    assert sum(s.block.nbytes for s in pool._slots) <= 2.01 * size
    assert pool._reserve is None


@pytest.mark.parametrize("batched", [True, False])
def test_batch_size(batched):
    assert layout(5, 1, batched).batch_size == ((1, 5) if batched else (5,))


def test_keeping_one_column_keeps_no_other():
    class Image(CountingEnv):
        observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)

        def _observation(self):
            return np.zeros((64, 64, 3), np.uint8)

    c = Collector(Image(), frames_per_batch=50)
    kept = [c.next()["next", "reward"] for _ in range(6)]
    assert all(r.untyped_storage().nbytes() == 200 for r in kept)
    weights = [r.numpy().base for r in kept[2:]]  # copied out of the reserve: nothing of the images hangs on them
    assert all(w is None or getattr(w, "nbytes", 0) <= 200 for w in weights)
