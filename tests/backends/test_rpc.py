"""The behaviour suite for workers over torch.distributed.rpc."""

from __future__ import annotations

import pytest

from reap.collectors.distributed import RPCCollector
from reap.testing.backend import backend_checks

MAKERS = {
    "sync": lambda env, policy, **options: RPCCollector([env], policy, sync=True, cat_results=0, **options),
    "async": lambda env, policy, **options: RPCCollector([env], policy, **options),
}


@pytest.mark.parametrize("check", backend_checks.values(), ids=backend_checks.keys())
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_rpc(make, check):
    check(make)
