"""The episodes that lanes of `CountingEnv` play, and what `episodes()` must say of them."""

from collections import defaultdict
from functools import partial

import pytest

from reap.testing import CountingEnv

LENGTHS, GAMMA = (3, 1, 5), 0.5
RECORD = ["return", "length", "discounted_return", "lane", "worker", "policy_version", "ended", "seconds"]


def lanes_of(*names):
    return [partial(CountingEnv, LENGTHS, name) for name in names]


def expected(name, episode, gamma=GAMMA):
    """The episode of a lane that calls itself so, frame by frame."""
    length = LENGTHS[episode % len(LENGTHS)]
    rewards = [t + 1 + (3 * name + 5 * episode + 7 * t) / 8 for t in range(length)]
    ended = "truncated" if episode % 2 else "terminated"
    return sum(rewards), length, sum(r * gamma**t for t, r in enumerate(rewards)), ended


def check(records, names, frames=None):
    """Each lane's episodes are those it has played, in order, none left out; `names`: by worker and lane."""
    by_lane = defaultdict(list)
    for one in records:
        assert list(one) == RECORD
        assert one["seconds"] > 0
        by_lane[one["worker"], one["lane"]].append(one)
    assert by_lane.keys() <= names.keys()
    for where, name in names.items():
        for number, one in enumerate(by_lane.get(where, ())):
            wanted = expected(name, number)
            assert (one["return"], one["length"]) == wanted[:2]
            assert one["discounted_return"] == pytest.approx(wanted[2])
            assert one["ended"] == wanted[3]
    if frames is not None:
        sizes = [sum(one["length"] for one in found) for found in by_lane.values()]
        assert len(sizes) == len(names)
        assert all(frames - max(LENGTHS) < size <= frames for size in sizes)
