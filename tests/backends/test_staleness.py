"""A policy that is trained here while its copies act with old weights: said once, and never without reason."""

from __future__ import annotations

import timeit
import warnings

import pytest
import torch
from torch import nn

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.staleness import StalenessWatch
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.testing.backend import counting_lanes
from reap.weight_update import NoWeightSyncScheme

SAID = "the policy has changed, but"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, observation):
        return self.head(self.norm(observation))


def adam(policy):
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        policy(torch.randn(4, 3)).sum().backward()
        optimizer.step()

    return train


def behind_torchs_back(policy):
    def train():
        for parameter in policy.parameters():
            parameter.data.add_(0.5)

    return train


def other_memory(policy):
    def train():
        flat = nn.utils.parameters_to_vector(policy.parameters())
        nn.utils.vector_to_parameters(flat + 1, policy.parameters())

    return train


def watch(policy):
    return StalenessWatch(policy, who="its copies act", remedy="send")


@pytest.mark.parametrize("how", [adam, behind_torchs_back, other_memory])
def test_three_batches_in_a_row_are_told_once(how):
    policy = Net()
    one, train = watch(policy), how(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # the third begins with the second change
            one.batch_taken()
            train()
    with pytest.warns(UserWarning, match=SAID):
        one.batch_taken()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            train()
            one.batch_taken()


def buffers_change(policy):
    return lambda: policy(torch.randn(8, 3))


def frozen(policy):
    policy.requires_grad_(False)
    return lambda: None


def optimizer_without_steps(policy):
    optimizer = torch.optim.Adam(policy.parameters())
    return optimizer.zero_grad


def gradients_only(policy):
    def train():
        policy(torch.randn(8, 3)).sum().backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)

    return train


def moved_and_frozen(policy):
    def train():
        policy.share_memory()
        policy.requires_grad_(False).eval()

    return train


def functional(policy):
    values = {name: torch.randn_like(p) for name, p in policy.named_parameters()}
    return lambda: torch.func.functional_call(policy, values, torch.randn(8, 3))


QUIET = [buffers_change, frozen, optimizer_without_steps, gradients_only, moved_and_frozen, functional]


@pytest.mark.parametrize("how", QUIET)
def test_what_leaves_weights_alone_is_no_change(how):
    policy = Net()
    one, work = watch(policy), how(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            work()
            one.batch_taken()


def test_a_change_that_is_taken_back_is_none():
    policy = Net()
    one, before = watch(policy), {k: v.clone() for k, v in Net().state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            one.batch_taken()
            policy.load_state_dict(before)
            one.rebase()


def test_a_look_costs_next_to_nothing():
    policy = nn.Sequential(*[nn.Linear(8, 8) for _ in range(100)])
    one = watch(policy)
    assert min(timeit.repeat(one.batch_taken, number=1000, repeat=5)) / 1000 < 100e-6  # about 3 µs


def run(collector, train, batches=5):
    with collector:
        for _ in range(batches):
            collector.next()
            train(collector)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_that_are_left_behind(kind):
    policy = Net()
    step = adam(policy)
    with pytest.warns(UserWarning, match="the workers still act.*update_policy_weights_.*update_at_each_batch=True"):
        run(kind([counting_lanes()], policy, frames_per_batch=12), lambda c: step())


def test_workers_that_write_into_a_buffer_by_themselves():
    policy = Net()
    step = adam(policy)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    with pytest.warns(UserWarning, match=SAID):
        run(MultiSyncCollector([counting_lanes()], policy, frames_per_batch=12, replay_buffer=buffer), lambda c: step())


def sends(collector, policy):
    collector.update_policy_weights_()


def sends_a_state_dict(collector, policy):
    collector.update_policy_weights_(policy.state_dict())


def reaches_in(collector, policy):
    collector.map_fn("policy.load_state_dict", [(policy.state_dict(),)])


NONE = NoWeightSyncScheme


@pytest.mark.parametrize(
    ("options", "send"),
    [
        ({}, sends),
        ({}, sends_a_state_dict),
        ({}, reaches_in),
        ({"update_at_each_batch": True}, None),
        ({"weight_sync_schemes": {"policy": NONE()}}, None),
    ],
    ids=["sends", "a state dict", "reaches in", "at each batch", "no sync wanted"],
)
def test_whoever_sends_weights_is_told_nothing(options, send):
    policy = Net()
    step = adam(policy)

    def train(collector):
        step()
        if send is not None:
            send(collector, policy)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(MultiSyncCollector([counting_lanes()], policy, frames_per_batch=12, **options), train)


def test_a_policy_that_acts_itself_is_never_behind():
    policy = Net()
    step = adam(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Collector(counting_lanes()(), policy, frames_per_batch=12), lambda c: step(), 6)
