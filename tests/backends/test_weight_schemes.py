"""Weight schemes by hand: pre-initialised for a collector, between processes of one's own, and their strategies."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedSyncCollector
from reap.errors import UsageError, WorkerDied, WorkerRaised, WrongState
from reap.testing import EchoPolicy, no_leaks
from reap.weight_update import (
    MPTransport,
    MultiProcessWeightSyncScheme,
    RayWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    TransportBackend,
    WeightStrategy,
)
from tests.worlds.faults import healthy

MIX = EchoPolicy().mix
SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


def weighing(value):
    policy = EchoPolicy()
    nn.init.constant_(policy.weight, value)
    return policy


def acted_with(batch):
    """The weight that acted, of each worker."""
    echo = (batch["observation"] * MIX).sum(-1, keepdim=True)
    found = []
    for action, expected in zip(batch["action"].flatten(1), echo.flatten(1)):
        (factor,) = (action / expected)[expected != 0].unique().tolist()
        assert torch.equal(action, factor * expected)
        found.append(factor)
    return found


# ---- of a collector -----------------------------------------------------------------------------------------------


def test_weights_of_each_worker():
    scheme = SharedMemWeightSyncScheme(per_worker_weights=True)
    with MultiSyncCollector(
        [healthy()] * 2, EchoPolicy(), frames_per_batch=8, weight_sync_schemes={"policy": scheme}
    ) as collector:
        collector.update_policy_weights_({0: weighing(2.0), 1: weighing(3.0)})
        assert acted_with(collector.next()) == [2.0, 3.0]
        collector.update_policy_weights_(weighing(5.0), worker_ids=[1])
        assert acted_with(collector.next()) == [2.0, 5.0]


def test_workers_whose_policies_differ_have_weights_of_their_own():
    class Other(EchoPolicy):
        def __init__(self):
            super().__init__()
            self.more = nn.Parameter(torch.zeros(1))

    options = {"frames_per_batch": 8, "policy_factory": [EchoPolicy, Other]}
    with pytest.raises(UsageError, match="needs one policy whose weights are tensors"):
        MultiSyncCollector([healthy()] * 2, weight_sync_schemes={"policy": SharedMemWeightSyncScheme()}, **options)
    scheme = SharedMemWeightSyncScheme(per_worker_weights=True)
    with MultiSyncCollector([healthy()] * 2, weight_sync_schemes={"policy": scheme}, **options) as collector:
        other = Other()
        nn.init.constant_(other.weight, 4.0)
        collector.update_policy_weights_({0: weighing(2.0), 1: other})
        assert acted_with(collector.next()) == [2.0, 4.0]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", [MultiSyncCollector, DistributedSyncCollector])
def test_a_scheme_that_was_given_weights_before_its_collector(kind, scheme):
    """Policies are made in the workers; they begin with the weights that the scheme was given, and get them again."""
    policy, made = weighing(2.0), scheme()
    if kind is DistributedSyncCollector and scheme is SharedMemWeightSyncScheme:
        made = MultiProcessWeightSyncScheme()
    made.init_on_sender(model_id="policy", weights=TensorDict.from_module(policy), num_workers=2)
    with kind(
        [healthy()] * 2, policy_factory=EchoPolicy, frames_per_batch=8, weight_sync_schemes={"policy": made}
    ) as collector:
        assert acted_with(collector.next()) == [2.0, 2.0]
        nn.init.constant_(policy.weight, 3.0)
        collector.update_policy_weights_()
        assert acted_with(collector.next()) == [3.0, 3.0]
    made.shutdown()


def test_weights_of_each_worker_before_the_collector():
    scheme = SharedMemWeightSyncScheme(per_worker_weights=True)
    scheme.init_on_sender(params_map={w: TensorDict.from_module(weighing(w + 2.0)) for w in (0, 1)})
    with MultiSyncCollector(
        [healthy()] * 2, policy_factory=EchoPolicy, frames_per_batch=8, weight_sync_schemes={"policy": scheme}
    ) as collector:
        assert acted_with(collector.next()) == [2.0, 3.0]
    scheme.shutdown()


@pytest.mark.parametrize("kind", [Collector, AsyncBatchedCollector])
def test_in_one_process_too(kind):
    scheme, policy = SharedMemWeightSyncScheme(), weighing(2.0)
    scheme.init_on_sender(model=policy)
    options = {"policy_factory": EchoPolicy, "weight_sync_schemes": {"policy": scheme}}
    with kind([healthy()], frames_per_batch=4, **options) as collector:
        assert acted_with(collector.next()[None]) == [2.0]
        nn.init.constant_(policy.weight, 3.0)
        collector.update_policy_weights_()
        assert acted_with(collector.next()[None]) == [3.0]
    scheme.shutdown()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_policy_that_cannot_travel_but_has_a_factory(kind, scheme):
    policy = weighing(2.0)
    policy.lock = threading.Lock()
    with kind(
        [healthy()] * 2,
        policy,
        policy_factory=EchoPolicy,
        frames_per_batch=8,
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme()},
    ) as collector:
        assert set(acted_with(collector.next().reshape(-1, 4))) == {2.0}
        nn.init.constant_(policy.weight, 3.0)
        collector.update_policy_weights_()
        collector.update_policy_weights_(policy, worker_ids=[0, 1])
        batch = next(b for b in iter(collector.next, None) if int(b["policy_version"].min()) == 2)
        assert set(acted_with(batch.reshape(-1, 4))) == {3.0}


# ---- between processes of one's own -----------------------------------------------------------------------------


def worker(scheme, index, answers):
    policy = EchoPolicy()
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=index)
    scheme.connect()
    while True:
        answers.send(policy.weight.item())
        if answers.recv() is None:
            return


def test_updates_that_are_not_waited_for_never_stop():
    """A worker answers every update. If nobody read the answers, they would fill the pipe and hold both sides up."""
    ctx = multiprocessing.get_context("fork")
    with no_leaks():
        scheme, policy = SharedMemWeightSyncScheme(sync=False), weighing(1.0)
        scheme.init_on_sender(model=policy, num_workers=1, ctx=ctx)
        ours, theirs = ctx.Pipe()
        process = ctx.Process(target=worker, args=(scheme, 0, theirs))
        process.start()
        scheme.connect()
        for _ in range(3000):
            scheme.send()
        scheme.send({"wrong": torch.zeros(1)})
        with pytest.raises(WorkerRaised, match="worker 0 could not apply its weights.*'wrong'"):
            for _ in range(3000):
                scheme.send()
        ours.recv()
        ours.send(None)
        process.join(30)
        scheme.shutdown()
        ours.close()
        theirs.close()
        process.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_between_processes_of_ones_own(scheme):
    ctx = multiprocessing.get_context("fork")
    with no_leaks():
        made, policy = scheme(), weighing(2.0)
        made.init_on_sender(model_id="policy", weights=TensorDict.from_module(policy), num_workers=2, ctx=ctx)
        pipes = [ctx.Pipe() for _ in range(2)]
        processes = [ctx.Process(target=worker, args=(made, w, theirs)) for w, (_, theirs) in enumerate(pipes)]
        for process in processes:
            process.start()
        made.connect()
        answers = [ours for ours, _ in pipes]

        def weights():
            found = [ours.recv() for ours in answers]
            for ours in answers:
                ours.send("go on")
            return found

        assert weights() == [2.0, 2.0]
        nn.init.constant_(policy.weight, 3.0)
        made.send()  # returns when both act with them
        weights()
        assert weights() == [3.0, 3.0]
        made.send({0: weighing(4.0)})
        made.send(weighing(5.0), worker_ids=1)
        weights()
        assert weights() == [4.0, 5.0]
        with pytest.raises(WorkerRaised, match="worker 0 could not apply its weights.*'wrong'"):
            made.send({"wrong": torch.zeros(1)})
        os.kill(processes[1].pid, signal.SIGKILL)
        processes[1].join()
        with pytest.raises((WorkerDied, WorkerRaised, OSError)):
            made.send({1: weighing(6.0)})
        answers[0].recv()
        answers[0].send(None)
        processes[0].join()
        made.shutdown()
        for pair in pipes:
            for end in pair:
                end.close()
        for process in processes:
            process.close()


class Doubling:
    """A strategy whose weights are one number, twice as large where they arrive."""

    def extract_weights(self, source):
        return source.weight.item()

    def apply_weights(self, destination, weights, inplace=True):
        nn.init.constant_(destination.weight, 2 * weights)


def test_a_strategy_of_ones_own_between_processes_of_ones_own():
    ctx = multiprocessing.get_context("fork")
    made, policy = SharedMemWeightSyncScheme(Doubling()), weighing(2.0)
    made.init_on_sender(model_id="policy", model=policy, num_workers=1, ctx=ctx)
    ours, theirs = ctx.Pipe()
    process = ctx.Process(target=worker, args=(made, 0, theirs))
    process.start()
    made.connect()
    assert ours.recv() == 4.0
    nn.init.constant_(policy.weight, 3.0)
    made.send()
    ours.send("go on")
    assert ours.recv() == 6.0
    ours.send(None)
    process.join()
    made.shutdown()


def test_calls_in_the_wrong_order():
    scheme = SharedMemWeightSyncScheme()
    for call in (scheme.send, scheme.connect, scheme.receive):
        with pytest.raises(WrongState):
            call()
    with pytest.raises(UsageError, match="needs weights, a model"):
        scheme.init_on_sender(model_id="policy")
    with pytest.raises(UsageError, match="needs the model"):
        scheme.init_on_receiver(model_id="policy")
    ray = RayWeightSyncScheme()
    ray.init_on_sender(model=EchoPolicy())
    with pytest.raises(WrongState, match="RayWeightSyncScheme works only inside a collector"):
        ray.connect()


# ---- strategies and transports ----------------------------------------------------------------------------------


class Counting(nn.Module):
    """A module whose state is more than tensors."""

    def __init__(self, count=0):
        super().__init__()
        self.inner, self.count = nn.Linear(1, 1), count

    def get_extra_state(self):
        return {"count": torch.tensor(self.count)}

    def set_extra_state(self, state):
        self.count = int(state["count"])


@pytest.mark.parametrize("form", ["tensordict", "state_dict"])
def test_extra_states_are_extracted_and_applied(form):
    strategy = WeightStrategy(form)
    source = nn.Sequential(Counting(3), Counting(4))
    weights = strategy.extract_weights(source)
    for inplace in (True, False):
        other = nn.Sequential(Counting(), Counting())
        strategy.apply_weights(other, weights, inplace=inplace)
        assert (other[0].count, other[1].count) == (3, 4)
        assert torch.equal(other[1].inner.weight, source[1].inner.weight)
    root = Counting(5)
    assert ("__extra_state__" in strategy.extract_weights(root).keys()) is (form == "tensordict")
    strategy.apply_weights(root, strategy.extract_weights(Counting(6)))
    assert root.count == 6


def test_a_collector_takes_what_a_strategy_extracts():
    class Policy(EchoPolicy):
        seen = 0

        def get_extra_state(self):
            return {"seen": torch.tensor(self.seen)}

        def set_extra_state(self, state):
            self.seen = int(state["seen"])

    source = Policy()
    source.seen = 7
    weights = WeightStrategy().extract_weights(source)
    with MultiSyncCollector([healthy()] * 2, Policy(), frames_per_batch=8) as collector:
        collector.update_policy_weights_(weights)
        assert collector.get_distant_attr("policy.seen") == [7, 7]


def test_strategies_of_tensordicts_and_dicts():
    strategy = WeightStrategy()
    weights = strategy.extract_weights({"0.weight": torch.ones(1)})
    assert weights["0", "weight"].item() == 1
    td, plain = TensorDict({"0": {"weight": torch.zeros(1)}}), {"0.weight": torch.zeros(1)}
    strategy.apply_weights(td, weights)
    strategy.apply_weights(plain, weights)
    assert td["0", "weight"].item() == plain["0.weight"].item() == 1
    with pytest.raises(KeyError, match="'wrong', which the policy does not have"):
        strategy.apply_weights(nn.Linear(1, 1), {"wrong": torch.ones(1)})
    with pytest.raises(UsageError, match="strategy must be"):
        WeightStrategy("pickle")


def test_a_transport_over_queues():
    weights, answers = multiprocessing.Queue(), multiprocessing.Queue()
    transport = MPTransport(weights, answers)
    assert isinstance(transport, TransportBackend)
    policy = EchoPolicy()
    transport.send_weights_async(weighing(3.0))
    transport.receive_weights(timeout=10, model=policy, strategy=WeightStrategy())
    transport.send_ack()
    transport.wait_ack()
    assert policy.weight == 3
    for queue in (weights, answers):
        queue.close()
        queue.join_thread()
    with pytest.raises(UsageError, match="give a weight sync scheme to the collector"):
        SharedMemTransport()
