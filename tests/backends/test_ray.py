"""The behaviour suite for workers that are Ray actors, on a real local cluster."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from tests.faults.worlds import BOUND, all_gone, faulty, healthy, pids, within

from reap.collectors.distributed import RayCollector
from reap.errors import WorkerDied
from reap.testing import EchoPolicy
from reap.testing.backend import backend_checks, closed_says_so

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


CHECKS = [
    name for name in backend_checks if name != "shuts_down"
]  # Ray closes its own sockets when it likes; see below
QUICK = ("exact_lanes", "weights_are_explicit", "errors_name_their_place")  # an actor takes seconds to start


@pytest.mark.parametrize(
    "check", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHECKS]
)
@pytest.mark.parametrize("kind", MAKERS)
def test_ray(kind, check):
    backend_checks[check](MAKERS[kind])


@pytest.mark.parametrize("kind", MAKERS)
def test_shutdown_ends_the_actors(kind):
    collector = MAKERS[kind](healthy(), EchoPolicy(), frames_per_batch=6, total_frames=-1)
    workers = pids(collector)
    threads = threading.active_count()
    with within(BOUND), collector:
        next(iter(collector))
    collector.shutdown()
    closed_says_so(collector)
    assert all_gone(workers, within=BOUND)
    assert threading.active_count() <= threads


def test_a_dead_actor_is_named():
    c = RayCollector([healthy(), faulty("exit", 21)], EchoPolicy(), frames_per_batch=8, remote_configs=SMALL)
    workers = pids(c)
    with pytest.raises(WorkerDied, match=rf"worker 1 \(pid {workers[1]}\): its actor died"):
        while True:
            c.next()
    assert c.closed
    assert all_gone(workers, within=5)


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_dead_actor_is_replaced(sync, tmp_path):
    """Once; the new one has the latest weights, and trajectories of its own."""
    mark = str(tmp_path / "died")

    def dies_once():
        died = os.path.exists(mark)
        open(mark, "w").close()
        return healthy()() if died else faulty("kill", 9)()

    policy = EchoPolicy()
    c = RayCollector(
        [healthy(), dies_once],
        policy,
        sync=sync,
        frames_per_batch=8,
        restart=True,
        remote_configs=SMALL,
        track_policy_version=True,
    )
    with torch.no_grad():
        policy.weight.fill_(2.0)
    c.update_policy_weights_()
    last = -1
    while c.stats()["restarts"] == 0:
        batch = c.next()
        last = max(last, int(batch["collector", "traj_ids"].max())) if c.stats()["restarts"] == 0 else last
    for _ in range(8):
        batch = c.next()
        echo = (batch["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1, keepdim=True)
        assert (batch["policy_version"] == 1).all()
        assert torch.equal(batch["action"], 2 * echo)
        if batch["collector", "traj_ids"].max() > 2**32:
            break
    assert batch["collector", "traj_ids"].max() > 2**32 > last
    assert c.stats()["restarts"] == 1
    c.shutdown()
