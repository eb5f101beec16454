"""Lanes whose rows are tensors on their device: here that device is the CPU, in tests/cuda it is a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import distributions, nn

from reap.collectors import Collector
from reap.core.device.worker import DeviceWorker
from reap.envs import TorchEnv
from reap.envs.adapters.torch_native import DeviceTorchLanes, TorchLanes
from reap.errors import UsageError, WorkerRaised
from reap.testing import CountingWorld, EchoPolicy, assert_same
from tests import example_count
from tests.worlds.device import CountingDevice, OfTensorDicts, Recurrent


@pytest.fixture(autouse=True)
def _rows_are_tensors():
    before = TorchLanes.on_device
    TorchLanes.on_device = lambda self: DeviceTorchLanes(self)
    yield
    TorchLanes.on_device = before


class Never:
    def collection_stopped(self):
        return False


def on_device(collector):
    return isinstance(collector._backend.worker, DeviceWorker)


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 6),
    limit=st.none() | st.integers(1, 4),
)
@settings(max_examples=example_count(30), deadline=None)
def test_the_predictable_world(lengths, steps, limit):
    env = TorchEnv(CountingDevice(lengths))
    c = Collector(env, EchoPolicy(), frames_per_batch=steps * len(lengths), max_frames_per_traj=limit)
    assert on_device(c)
    world = CountingWorld(lengths, limit=limit)
    for _ in range(4):
        assert_same(c.next(), world.batch(steps))


@pytest.mark.parametrize("rebinds", [False, True])
def test_kept_batches_never_change(rebinds):
    lengths = [(3, 1), (2,)]
    c = Collector(TorchEnv(CountingDevice(lengths, rebinds=rebinds)), EchoPolicy(), frames_per_batch=8)
    kept, world = [c.next() for _ in range(6)], CountingWorld(lengths)
    for batch in kept:
        assert_same(batch, world.batch(4))


def test_options_that_need_no_host():
    lengths = [(3, 1), (2,)]
    options = {"track_policy_version": True, "set_truncated": True, "return_same_td": True}
    c = Collector(TorchEnv(CountingDevice(lengths)), EchoPolicy(), frames_per_batch=8, **options)
    first = c.next()
    c.update_policy_weights_()
    assert c.next() is first
    assert (first["policy_version"] == 1).all()
    assert first["next", "truncated"][:, -1].all()
    c.reset()
    batch = c.next()
    assert (batch["observation"][:, 0, 2] == 0).all()
    assert batch["collector", "traj_ids"].unique().numel() == len(c.env.holders[0].lengths) + int(
        batch["next", "done"][:, :-1].sum()
    )


def test_random_frames_and_statistics():
    lengths = [(3, 1), (2,)]
    c = Collector(TorchEnv(CountingDevice(lengths)), EchoPolicy(), frames_per_batch=8, init_random_frames=8)
    host = Collector(TorchEnv(CountingDevice(lengths)), EchoPolicy(), frames_per_batch=8, compact_obs=True)
    assert on_device(c)
    assert not on_device(host)
    c.next()
    c.reset()
    before = c.stats()["episodes"]
    for _ in range(5):
        c.next()
    for _ in range(5):
        host.next()
    mine, theirs = c.stats(), host.stats()
    assert mine["episodes"] - before == theirs["episodes"]
    assert mine["frames"] == 48
    assert mine["collect_seconds"] > 0
    fresh = Collector(TorchEnv(CountingDevice([(3, 1), (2,)])), EchoPolicy(), frames_per_batch=8)
    for _ in range(5):
        fresh.next()
    assert fresh.stats()["mean_length"] == pytest.approx(theirs["mean_length"])
    assert fresh.stats()["mean_return"] == pytest.approx(theirs["mean_return"])


def probabilistic():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    split = TensorDictModule(
        lambda o: (net(o)[..., :1], net(o)[..., 1:].exp()), in_keys=["observation"], out_keys=["loc", "scale"]
    )
    head = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=distributions.Normal, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(split, head)


def test_log_probabilities_are_those_of_the_host():
    got = []
    for options in ({}, {"compact_obs": True}):
        c = Collector(TorchEnv(CountingDevice([(3, 1), (2,)])), probabilistic(), frames_per_batch=8, **options)
        assert on_device(c) is not bool(options)
        torch.manual_seed(1)
        got.append(c.next())
    for key in ("action", "action_log_prob", "loc", "scale"):
        assert torch.equal(got[0][key], got[1][key])


@pytest.mark.parametrize("what", [{"compact_obs": True}, {"interruptor": Never()}], ids=lambda o: next(iter(o)))
def test_what_needs_the_host_goes_there(what):
    c = Collector(TorchEnv(CountingDevice([(5,)])), EchoPolicy(), frames_per_batch=4, **what)
    assert not on_device(c)
    c.next()


def test_errors_have_names():
    class Breaks(CountingDevice):
        def step(self, action):
            raise RuntimeError("boom")

    with pytest.raises(WorkerRaised, match="boom"):
        Collector(TorchEnv(Breaks([(2,)])), EchoPolicy(), frames_per_batch=4).next()
    with pytest.raises(UsageError, match="cudagraph_policy is for lanes on a CUDA device"):
        Collector(TorchEnv(CountingDevice([(2,)])), EchoPolicy(), frames_per_batch=4, cudagraph_policy=True).next()


@pytest.mark.parametrize("limit", [None, 50])
def test_used_by_hand_and_closed(limit):
    env = TorchEnv(CountingDevice([(100,), (100,)]))
    c = Collector(env, EchoPolicy(), frames_per_batch=8, max_frames_per_traj=limit)
    first = c.next()
    env.rollout(3)
    batch = c.next()
    assert batch["observation"][:, :, 2].tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(batch["next", "observation"][:, :-1], batch["observation"][:, 1:])
    assert int(batch["collector", "traj_ids"].min()) > int(first["collector", "traj_ids"].max())
    c.shutdown()
    assert env.is_closed


class ReadsItself(OfTensorDicts):
    """What it wrote at one step decides about the next."""

    def forward(self, tensordict):
        before = tensordict.get("value", None)
        super().forward(tensordict)
        if before is not None:
            tensordict["action"] = tensordict["action"] + before[..., None]
        return tensordict


class Draws(CountingDevice):
    """Adds a random number to what it shows after a reset; counts how often it was seeded."""

    seeded = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.generator = torch.Generator()

    def seed(self, seed):
        self.seeded += 1
        self.generator.manual_seed(seed)

    def reset(self, mask):
        return super().reset(mask) + torch.rand(self.num_envs, 3, generator=self.generator)


def test_seeds_reproduce():
    c = Collector(TorchEnv(Draws([(2,), (3,)])), EchoPolicy(), frames_per_batch=8)
    c.set_seed(3)
    first = c.next()
    c.next()
    c.set_seed(3)
    again = c.next()
    assert torch.equal(first["observation"][..., 2].frac(), again["observation"][..., 2].frac())


@pytest.mark.parametrize("limit", [None, 50])
@pytest.mark.parametrize("policy", [EchoPolicy, ReadsItself])
def test_a_seed_set_by_hand_is_used_once(limit, policy):
    inside = Draws([(9,), (9,)])
    env, want = TorchEnv(inside), torch.rand(2, 3, generator=torch.Generator().manual_seed(5))
    env.set_seed(5)
    c = Collector(env, policy(), frames_per_batch=8, max_frames_per_traj=limit)
    assert on_device(c) == (policy is EchoPolicy)
    first = c.next()["observation"][:, 0]
    torch.testing.assert_close(first.frac(), want)
    seeded = inside.seeded
    env.reset()
    assert inside.seeded == seeded


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("make", [Recurrent, OfTensorDicts])
def test_policies_with_a_memory_and_of_tensordicts_act_as_on_the_host(make, limit, monkeypatch):
    lengths = [(3, 1), (2,), (1, 4, 2)]
    options = {"frames_per_batch": 12, "max_frames_per_traj": limit, "init_random_frames": 12}
    there = Collector(TorchEnv(CountingDevice(lengths)), make(), **options)
    assert on_device(there)
    monkeypatch.setattr(TorchLanes, "on_device", lambda self: None)
    here = Collector(TorchEnv(CountingDevice(lengths)), make(), **options)
    assert not on_device(here)
    for collector in (there, here):
        collector.next()  # at random
        collector.reset()
    for _ in range(5):
        a, b = there.next(), here.next()
        for part in (a, b):
            part["collector", "traj_ids"] -= part["collector", "traj_ids"].min()
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        assert all(torch.equal(a[key], b[key]) for key in a.keys(True, True))
    there.shutdown()
    here.shutdown()


def test_a_policy_that_reads_what_it_wrote_goes_to_the_host():
    c = Collector(TorchEnv(CountingDevice([(2,), (3,)])), ReadsItself(), frames_per_batch=8)
    assert not on_device(c)
    batch = c.next()
    own = batch["observation"].sum(-1, keepdim=True) * 0.5
    kept = torch.where(batch["next", "done"], 0.0, batch["value"][..., None])[:, :-1]
    assert torch.equal(batch["action"][:, 1:], own[:, 1:] + kept)


def test_ids_beyond_what_a_narrow_number_holds():
    c = Collector(TorchEnv(CountingDevice([(3, 1), (2,)])), EchoPolicy(), frames_per_batch=8)
    first = c.next()["collector", "traj_ids"]
    c._backend.worker.ledger.counter.skip_to(2**40)
    batch = c.next()
    new = batch["collector", "traj_ids"].unique()
    ended = int(batch["next", "done"][:, :-1].sum())
    assert new[new >= 2**40].tolist() == list(range(2**40, 2**40 + ended))
    assert (new[new < 2**40] <= first.max() + 2).all()
