"""Batches for which there is no memory are refused by the option that asks for them."""

from __future__ import annotations

import pytest

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import ParallelEnv
from reap.errors import UsageError
from reap.testing import CountingEnv, EchoPolicy, no_leaks

HUGE = {
    "single": lambda frames: Collector(CountingEnv, EchoPolicy(), frames_per_batch=frames),
    "lanes in processes": lambda frames: Collector(ParallelEnv(1, CountingEnv), EchoPolicy(), frames_per_batch=frames),
    "sync": lambda frames: MultiSyncCollector([CountingEnv], EchoPolicy(), frames_per_batch=frames),
    "async": lambda frames: MultiAsyncCollector([CountingEnv], EchoPolicy(), frames_per_batch=frames),
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_batch_for_which_there_is_no_memory(kind):
    for frames in (2**39, 2**41):
        with no_leaks(), pytest.raises(UsageError, match="frames_per_batch"):
            HUGE[kind](frames).next()
