"""Policies and batches on a GPU, CPU envs: the same data as without."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import distributions, nn

from reap.collectors import Collector
from reap.envs import GymEnv
from reap.errors import UsageError
from reap.testing import CountingWorld, EchoPolicy, assert_same
from reap.testing.backend import LENGTHS, counting_lanes

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]], ids=["lanes", "single"])
@pytest.mark.parametrize(
    "make",
    [EchoPolicy, lambda: TensorDictModule(EchoPolicy(), ["observation"], ["action"]), "td"],
    ids=["module", "flat", "tensordict"],
)
def test_policy_on_the_gpu(lengths, make):
    if make == "td":
        inner = EchoPolicy().cuda()
        policy = lambda td: td.set("action", inner(td["observation"]))  # noqa: E731
    else:
        policy = make()
    c, world = (
        Collector(counting_lanes(lengths)(), policy, frames_per_batch=4 * len(lengths), policy_device="cuda"),
        CountingWorld(lengths),
    )
    for _ in range(5):
        assert_same(c.next(), world.batch(4))


def test_storing_on_the_gpu():
    c, world = (
        Collector(counting_lanes()(), EchoPolicy(), frames_per_batch=12, storing_device="cuda"),
        CountingWorld(LENGTHS),
    )
    for _ in range(5):
        batch = c.next()
        assert batch.device.type == "cuda"
        assert all(v.is_cuda for v in batch.values(True, True))
        assert_same(batch.cpu(), world.batch(4))


def test_one_device_for_all():
    policy = EchoPolicy()
    c, world = Collector(counting_lanes()(), policy, frames_per_batch=12, device="cuda"), CountingWorld(LENGTHS)
    batch = c.next()
    assert batch["action"].is_cuda
    assert_same(batch.cpu(), world.batch(4))
    assert c.policy is not policy
    assert c.policy.weight.is_cuda
    assert not policy.weight.is_cuda
    with torch.no_grad():
        policy.weight.fill_(2.0)
    assert_same(c.next().cpu(), world.batch(4))  # only an explicit update is seen
    c.update_policy_weights_()
    world.weight = 2.0
    assert_same(c.next().cpu(), world.batch(4))


def test_return_same_td_on_the_gpu():
    c = Collector(counting_lanes()(), EchoPolicy(), frames_per_batch=12, storing_device="cuda", return_same_td=True)
    world = CountingWorld(LENGTHS)
    first = c.next()
    assert_same(first.cpu(), world.batch(4))
    assert c.next() is first
    assert_same(first.cpu(), world.batch(4))


def test_sampling_on_the_gpu():
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 2), ["observation"], ["p"]),
        TensorDictModule(lambda p: (p[..., :1], p[..., 1:].exp()), ["p"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=distributions.Normal, return_log_prob=True
        ),
    )
    c = Collector(counting_lanes()(), policy, frames_per_batch=120, device="cuda")
    batch = c.next()
    want = distributions.Normal(batch["loc"], batch["scale"]).log_prob(batch["action"])
    assert torch.allclose(batch["action_log_prob"], want, atol=1e-5)


def test_the_probe_leaves_the_gpu_generator_alone():
    torch.cuda.manual_seed(3)
    want = torch.rand(2, device="cuda")
    torch.cuda.manual_seed(3)
    Collector(
        counting_lanes()(),
        lambda observation: torch.rand_like(observation[..., :1], device="cuda"),
        frames_per_batch=12,
    )
    assert torch.equal(torch.rand(2, device="cuda"), want)


def test_a_gpu_that_is_not_there_is_named():
    wrong = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UsageError, match=f"policy_device is '{wrong}', but torch sees"):
        Collector(GymEnv("CartPole-v1"), None, frames_per_batch=4, policy_device=wrong)
