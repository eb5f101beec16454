"""The behaviour suite for workers over torch.distributed."""

from __future__ import annotations

import pytest

from reap.collectors.distributed import DistributedCollector, DistributedSyncCollector
from reap.testing.backend import backend_checks

MAKERS = {
    "sync": lambda env, policy, **options: DistributedSyncCollector([env], policy, cat_results=0, **options),
    "async": lambda env, policy, **options: DistributedCollector([env], policy, **options),
}


@pytest.mark.parametrize("check", backend_checks.values(), ids=backend_checks.keys())
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_torchdist(make, check):
    check(make)
