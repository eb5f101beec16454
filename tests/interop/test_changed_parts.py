"""Parts of specs and TensorDicts that a captured env or policy relies on are replaced between two batches."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector as TheirCollector
from torchrl.data import Bounded, OneHot, Unbounded
from torchrl.envs import Compose, GymEnv, SerialEnv, StepCounter, TargetReturn, TensorDictPrimer, TransformedEnv
from torchrl.modules import AdditiveGaussianModule, EGreedyModule, QValueActor

from reap.collectors import Collector

LANES = 3


def env_of(name, *transforms):
    return TransformedEnv(SerialEnv(LANES, lambda: GymEnv(name)), Compose(StepCounter(max_steps=5), *transforms))


def primer(**options):
    return TensorDictPrimer({"hidden": Unbounded(shape=(2,))}, expand_specs=True, **options)


def noisy():
    net = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    return TensorDictSequential(net, AdditiveGaussianModule(spec=Bounded(-2, 2, (LANES, 1)), sigma_init=1.0))


def greedy():
    values = QValueActor(nn.Linear(4, 2), in_keys=["observation"], spec=OneHot(2))
    return TensorDictSequential(values, EGreedyModule(spec=OneHot(2), eps_init=0.9))


def give_primer_a_value(env, policy):
    env.transform[1].default_value["hidden"] = torch.tensor(7.0)


def give_primer_a_spec(env, policy):
    env.transform[1].primers["hidden"] = Bounded(5, 6, (LANES, 2))


def give_noise_a_spec(env, policy):
    policy[1].spec["action"] = Bounded(-0.1, 0.1, (LANES, 1))


def give_noise_bounds(env, policy):
    space = policy[1].spec["action"].space
    space.low, space.high = torch.full_like(space.low, -0.1), torch.full_like(space.high, 0.1)


def mask_an_action(env, policy):
    policy[1].spec["action"].update_mask(torch.tensor([True, False]))


def collected(kind, make, policy, change):
    torch.manual_seed(0)
    env, acts = make(), policy()
    env.set_seed(0)
    collector = kind(env, acts, frames_per_batch=60, total_frames=360)
    env.set_seed(0)
    torch.manual_seed(0)
    batches = []
    for n, batch in enumerate(collector):
        batches.append(batch.clone())
        if n == 2:
            change(env, acts)
    collector.shutdown()
    return batches


@pytest.mark.parametrize(
    ("make", "policy", "change"),
    [
        (lambda: env_of("CartPole-v1", primer(default_value={"hidden": 2.5})), greedy, give_primer_a_value),
        (lambda: env_of("CartPole-v1", primer(random=True)), greedy, give_primer_a_spec),
        (lambda: env_of("Pendulum-v1"), noisy, give_noise_a_spec),
        (lambda: env_of("Pendulum-v1"), noisy, give_noise_bounds),
        (lambda: env_of("CartPole-v1"), greedy, mask_an_action),
    ],
    ids=["value of a primer", "spec of a primer", "spec of noise", "bounds of noise", "mask of choices"],
)
def test_it_is_seen_at_the_next_rollout(make, policy, change):
    theirs, ours = (collected(kind, make, policy, change) for kind in (TheirCollector, Collector))
    for n, (a, b) in enumerate(zip(theirs, ours)):
        for key in a.keys(True, True):
            assert torch.equal(a[key], b[key]), (n, key)


def test_bfloat16_in_a_reset_of_some_lanes():
    def make():
        lanes = SerialEnv(LANES, lambda: GymEnv("CartPole-v1"))
        return TransformedEnv(lanes, Compose(TargetReturn(torch.tensor(10.0, dtype=torch.bfloat16))))

    theirs, ours = (collected(kind, make, greedy, lambda *_: None) for kind in (TheirCollector, Collector))
    for a, b in zip(theirs, ours):
        assert torch.equal(a["next", "target_return"], b["next", "target_return"])
