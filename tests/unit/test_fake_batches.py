"""fake_tensordict: a batch before there is one."""

from __future__ import annotations

import pytest
import torch

from reap.collectors import Collector
from reap.envs import SerialEnv, TorchCartPole, TorchEnv
from reap.testing import CountingEnv, EchoPolicy


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"track_policy_version": True, "max_frames_per_traj": 3},
        {"compact_obs": True},
        {"set_truncated": True},
        {"postproc": lambda batch: batch.select("action")},
    ],
)
@pytest.mark.parametrize("env", [CountingEnv, lambda: SerialEnv(2, CountingEnv), lambda: TorchEnv(TorchCartPole(2))])
def test_a_fake_batch_looks_like_a_true_one(env, options):
    policy = None if isinstance(made := env(), TorchEnv) else EchoPolicy()
    collector = Collector(made, policy, frames_per_batch=8, **options)
    fake, true = collector.fake_tensordict(), collector.next()
    assert fake.batch_size == true.batch_size
    assert fake.names == true.names
    tensors = {key: (v.shape, v.dtype) for key, v in true.items(True, True) if isinstance(v, torch.Tensor)}
    assert {key: (v.shape, v.dtype) for key, v in fake.items(True, True)} == tensors
    ends = ("next", "truncated")
    for key, value in fake.items(True, True):
        assert not value.any() or (options.get("set_truncated") and key in (ends, ("next", "done")))
    if options.get("set_truncated"):
        assert fake[ends].reshape(-1, fake.shape[-1])[:, -1].all()
    collector.shutdown()
