"""The sum tree against plain sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reap.buffers import tree as module
from reap.buffers.tree import SumTree
from tests import example_count


@settings(max_examples=example_count(80), deadline=None)
@given(st.integers(1, 300), st.sampled_from([8, 16, 4096]), st.integers(0, 2**31), st.integers(0, 6))
def test_sums_and_draws(size, top, seed, rounds):
    old, module._TOP = module._TOP, top
    try:
        rng = np.random.default_rng(seed)
        tree, plain = SumTree(size), np.zeros(size)
        for _ in range(rounds):
            index = rng.integers(0, size, 5)
            value = rng.choice([0.0, 1e-9, 0.5, 3.0], 1) if rng.random() < 0.3 else rng.random(1)
            tree[index] = np.full(5, value)
            plain[index] = value
            first, end = sorted(rng.integers(0, size + 1, 2))
            tree.fill(first, end, float(value[0]) / 2)
            plain[first:end] = value / 2
            np.testing.assert_array_equal(tree[np.arange(size)], plain)
            assert tree.total == pytest.approx(plain.sum())
            if plain.any():
                assert tree.least == plain[plain > 0].min()
                uniform = np.concatenate([rng.random(200), [0.0, np.nextafter(1.0, 0)]])
                drawn = tree.draw(uniform)
                assert (plain[drawn] > 0).all()
                running = plain.cumsum()
                expected = np.minimum(running.searchsorted(uniform * running[-1], "right"), size - 1)
                assert (drawn == expected).mean() > 0.95  # rounding may differ at an edge
    finally:
        module._TOP = old
