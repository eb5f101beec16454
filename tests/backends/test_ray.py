"""The behaviour suite for workers that are Ray actors, on a real local cluster."""

from __future__ import annotations

import pytest

from reap.collectors.distributed import RayCollector
from reap.testing.backend import backend_checks

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(120)
SMALL = {"num_cpus": 0.5}
MAKERS = {
    "sync": lambda env, policy, **options: RayCollector(
        [env], policy, sync=True, cat_results=0, remote_configs=SMALL, **options
    ),
    "async": lambda env, policy, **options: RayCollector([env], policy, remote_configs=SMALL, **options),
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


QUICK = ("exact_lanes", "weights_are_explicit", "errors_name_their_place")  # an actor takes seconds to start


@pytest.mark.parametrize(
    "check", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in backend_checks]
)
@pytest.mark.parametrize("kind", MAKERS)
def test_ray(kind, check):
    backend_checks[check](MAKERS[kind])
