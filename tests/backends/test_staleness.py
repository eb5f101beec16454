"""A policy that is trained here while its copies act with old weights: said once, and never without reason."""

from __future__ import annotations

import copy
import functools
import itertools
import timeit
import warnings

import pytest
import torch
from torch import nn

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.parts.staleness import StalenessWatch
from reap.collectors.placement import Placement
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.errors import SpecMismatch
from reap.testing.backend import counting_lanes
from reap.weight_update import NoWeightSyncScheme
from tests.worlds.waiting import until

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
    assert (
        min(timeit.repeat(one.batch_taken, number=1000, repeat=5)) / 1000 < 500e-6
    )  # about 30 µs for two hundred parameters


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


# ---- policies that are more than one module, and workers that are not asked by anybody ---------------------------


def go_on(one, train):
    for _ in range(4):
        one.batch_taken()
        train()


def replaced(policy):
    def train():
        policy.head = nn.Linear(3, 1)

    return train


def replaced_deep_inside(policy):
    policy.head = nn.Sequential(nn.Sequential(nn.Linear(3, 1)))

    def train():
        policy.head[0][0].weight = nn.Parameter(torch.randn(1, 3))

    return train


@pytest.mark.parametrize("how", [replaced, replaced_deep_inside])
def test_layers_that_are_replaced_are_a_change(how):
    policy = Net()
    train = how(policy)
    one = watch(policy)
    with pytest.warns(UserWarning, match=SAID):
        go_on(one, train)


def test_a_single_layer_of_many():
    policy = nn.Sequential(*[nn.Linear(8, 8) for _ in range(100)])
    one = watch(policy)

    def train():
        with torch.no_grad():
            policy[57].bias.add_(1.0)

    with pytest.warns(UserWarning, match=SAID):
        go_on(one, train)


def learning_nothing(policy):
    """Counters move, values do not."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.0)

    def train():
        optimizer.zero_grad()
        policy(torch.randn(4, 3)).sum().backward()
        optimizer.step()

    return train


def there_and_back(policy):
    def train():
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(1.0).sub_(1.0).copy_(p.clone())

    for p in policy.parameters():
        nn.init.ones_(p)
    return train


def loaded_again(policy):
    state = {name: value.clone() for name, value in policy.state_dict().items()}
    return lambda: policy.load_state_dict(state)


def replaced_by_the_same(policy):
    def train():
        policy.head = copy.deepcopy(policy.head)

    return train


@pytest.mark.parametrize("how", [learning_nothing, there_and_back, loaded_again, replaced_by_the_same])
def test_values_that_stay_the_same_are_no_change(how):
    policy = Net()
    work = how(policy)
    one = watch(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            work()
            one.batch_taken()


NET = Net()


def by_its_name(observation):
    return NET(observation)


class Agent:
    """An object with a method that acts, and a net that does not."""

    def __init__(self, net):
        self.net, self.critic = net, nn.Linear(3, 1)

    def inner(self, observation):
        return self.net(observation)

    def act(self, observation):
        return self.inner(observation)

    def __call__(self, observation):
        return self.inner(observation)


AROUND = {
    "closure": lambda net: lambda observation: net(observation),
    "default": lambda net: lambda observation, net=net: net(observation),
    "function in a function": lambda net: (lambda inner: lambda observation: inner(observation))(lambda o: net(o)),
    "method of an object": lambda net: Agent(net).act,
    "object": Agent,
    "method of a module": lambda net: net.forward,
    "partial": lambda net: functools.partial(lambda net, observation: net(observation), net),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_function_around_a_module(around):
    net = Net()
    one, train = watch(around(net)), adam(net)
    with pytest.warns(UserWarning, match=SAID):
        go_on(one, train)


def test_a_function_that_names_a_module():
    one, train = watch(by_its_name), adam(NET)
    with pytest.warns(UserWarning, match=SAID):
        go_on(one, train)


def test_what_an_object_holds_but_does_not_act_with():
    agent = Agent(Net())
    one, optimizer = watch(agent.act), torch.optim.SGD(agent.critic.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            one.batch_taken()
            agent.critic(torch.ones(1, 3)).sum().backward()
            optimizer.step()


def test_workers_whose_policy_is_a_function():
    net = Net()
    step = adam(net)
    with pytest.warns(UserWarning, match="the workers still act.*A module inside of a function gets no new weights"):
        run(
            MultiSyncCollector([counting_lanes()], lambda observation: net(observation), frames_per_batch=12),
            lambda c: step(),
        )


@pytest.mark.parametrize("form", [lambda p: {"worker_ids": [0]}, lambda p: {"weights": {0: p}}], ids=["ids", "dict"])
def test_workers_that_an_update_leaves_out(form):
    policy = Net()
    step = adam(policy)

    def train(collector):
        step()
        collector.update_policy_weights_(**form(policy))

    with pytest.warns(UserWarning, match="worker 1 still acts"):
        run(MultiSyncCollector([counting_lanes()] * 2, policy, frames_per_batch=24), train)


def test_weights_that_were_refused_are_not_sent():
    policy = Net()
    step = adam(policy)

    def train(collector):
        step()
        with pytest.raises(SpecMismatch):
            collector.update_policy_weights_({"head.weight": torch.zeros(2, 2)})

    with pytest.warns(UserWarning, match="the workers still act"):
        run(MultiSyncCollector([counting_lanes()], policy, frames_per_batch=12), train)


def test_workers_that_are_sent_weights_in_turn():
    policy = Net()
    step, turns = adam(policy), itertools.cycle(range(4))

    def train(collector):
        step()
        collector.update_policy_weights_(worker_ids=next(turns))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(MultiSyncCollector([counting_lanes()] * 4, policy, frames_per_batch=48), train, batches=8)


def wait_for_more(collector, frames):
    goal = collector.stats()["frames"] + frames
    until(lambda: collector.is_running() and collector.stats()["frames"] >= goal)


def in_background(policy):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    return MultiSyncCollector([counting_lanes()], policy, frames_per_batch=12, replay_buffer=buffer)


def test_workers_in_the_background_after_a_hundred_rollouts():
    policy = Net()
    with in_background(policy) as collector:
        collector.start()
        adam(policy)()
        with pytest.warns(UserWarning, match="rollouts in the background.*update_policy_weights_"):
            wait_for_more(collector, 12 * 200)


def test_workers_in_the_background_that_were_never_sent_any():
    policy = Net()
    collector = in_background(policy)
    collector.start()
    adam(policy)()
    wait_for_more(collector, 12 * 5)
    with pytest.warns(UserWarning, match=SAID):
        collector.shutdown()


def test_workers_in_the_background_that_are_sent_weights_at_last():
    policy = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with in_background(policy) as collector:
            collector.start()
            adam(policy)()
            wait_for_more(collector, 12 * 5)
            collector.update_policy_weights_()
            adam(policy)()
            wait_for_more(collector, 12 * 5)


def test_rollouts_that_a_thread_asks_workers_for_are_counted_once(monkeypatch):
    """As where the buffer is a Ray actor: two are too few to warn of."""
    monkeypatch.setattr(Placement, "workers_run_free", False)
    policy = Net()
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    options = {"frames_per_batch": 12, "total_frames": 24, "replay_buffer": buffer}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with MultiSyncCollector([counting_lanes()], policy, **options) as collector:
            adam(policy)()
            collector.start()
            until(lambda: collector.stats()["frames"] == 24)


def test_a_thread_in_the_background():
    torchrl = pytest.importorskip("torchrl.data")
    policy = Net()
    buffer = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(1000), batch_size=4)
    collector = MultiSyncCollector([counting_lanes()], policy, frames_per_batch=12, replay_buffer=buffer)
    collector.start()
    adam(policy)()
    wait_for_more(collector, 12 * 5)
    with pytest.warns(UserWarning, match=SAID):
        collector.shutdown()
