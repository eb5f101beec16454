"""The behaviour suite for workers in processes."""

from __future__ import annotations

import pytest

from reap.collectors import AsyncCollector, MultiSyncCollector
from reap.testing.backend import backend_checks

MAKERS = {
    "sync": lambda env, policy, **options: MultiSyncCollector([env], policy, cat_results=0, **options),
    "async": lambda env, policy, **options: AsyncCollector(env, policy, **options),
}


@pytest.mark.parametrize("check", backend_checks.values(), ids=backend_checks.keys())
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_process(make, check):
    check(make)
