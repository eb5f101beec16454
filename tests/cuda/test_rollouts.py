"""Envs that live on the GPU, and CUDA graphs: the same data as on the host."""

from __future__ import annotations

import itertools
import threading

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from reap.collectors import AsyncBatchedCollector, Collector
from reap.core.device.worker import DeviceWorker
from reap.envs import GymEnv, SerialEnv, TorchEnv
from reap.envs.adapters.torch_envs import TorchCartPole
from reap.errors import ReapError, SpecMismatch, UsageError
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.testing.backend import LENGTHS, counting_lanes
from tests.worlds.device import CountingDevice, Forgetful, OfTensorDicts, Recurrent

pytestmark = pytest.mark.cuda

WORLD = [(3, 1), (2,), (1, 4, 2)]


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("rebinds", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_the_predictable_world(graph, rebinds, limit):
    env = TorchEnv(CountingDevice(WORLD, "cuda", rebinds=rebinds))
    options = {"cudagraph_policy": graph, "max_frames_per_traj": limit}
    c = Collector(env, EchoPolicy().cuda(), frames_per_batch=12, **options)
    assert isinstance(c._backend.worker, DeviceWorker)
    world, kept = CountingWorld(WORLD, limit=limit), []
    for _ in range(8):
        kept.append(c.next())
        assert kept[-1]["observation"].is_cuda
    for batch in kept:
        assert_same(batch.cpu(), world.batch(4))
    assert c.stats()["episodes"] == sum(int(batch["next", "done"].sum()) for batch in kept)
    assert c.stats()["collect_seconds"] > 0


def test_one_device_for_all_and_its_weights():
    policy = EchoPolicy()
    c = Collector(
        TorchEnv(CountingDevice(WORLD, "cuda")),
        policy,
        frames_per_batch=12,
        device="cuda",
        cudagraph_policy=True,
        track_policy_version=True,
    )
    for _ in range(3):
        c.next()
    with torch.no_grad():
        policy.weight.fill_(2.0)
    before = c.next()
    c.update_policy_weights_()
    after = c.next()
    assert (before["policy_version"] == 0).all()
    assert (after["policy_version"] == 1).all()
    ratio = after["action"] / EchoPolicy().cuda()(after["observation"])
    assert torch.equal(ratio[ratio.isfinite()].unique(), torch.tensor([2.0], device="cuda"))


def test_weights_that_move_are_recorded_anew():
    policy = EchoPolicy().cuda()
    c = Collector(TorchEnv(CountingDevice(WORLD, "cuda")), policy, frames_per_batch=12, cudagraph_policy=True)
    for _ in range(3):
        c.next()
    policy.weight = nn.Parameter(torch.tensor(3.0, device="cuda"))
    batch = c.next()
    ratio = batch["action"] / EchoPolicy().cuda()(batch["observation"])
    assert torch.equal(ratio[ratio.isfinite()].unique(), torch.tensor([3.0], device="cuda"))
    assert (c.next()["collector", "traj_ids"].diff(dim=1) >= 0).all()


def test_state_a_graph_cannot_see_is_told():
    c = Collector(TorchEnv(Forgetful(WORLD, "cuda")), EchoPolicy().cuda(), frames_per_batch=12, cudagraph_policy=True)
    c.next()
    with pytest.raises(SpecMismatch, match="keep state that a graph does not see"):
        c.next()


def test_what_cannot_be_recorded_is_told():
    class Asks(EchoPolicy):
        def forward(self, observation):
            return super().forward(observation) if observation.sum().item() > -1 else observation[..., :1]

    c = Collector(TorchEnv(CountingDevice(WORLD, "cuda")), Asks().cuda(), frames_per_batch=12, cudagraph_policy=True)
    c.next()
    with pytest.raises(ReapError, match="cudagraph_policy: it cannot be recorded"):
        c.next()
    assert torch.rand(3, device="cuda").unique().numel() == 3  # the generator is as it was


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("make", [Recurrent, OfTensorDicts])
def test_memory_and_tensordicts_stay_on_the_device(make, graph, limit):
    """The same batches as with lanes on the host, which ask nothing of a GPU."""
    options = {"frames_per_batch": 12, "max_frames_per_traj": limit}
    there = Collector(
        TorchEnv(CountingDevice(WORLD, "cuda")), make().cuda(), cudagraph_policy=graph, track_traj_ids=True, **options
    )
    assert isinstance(there._backend.worker, DeviceWorker)
    here = Collector(TorchEnv(CountingDevice(WORLD)), make(), **options)
    for _ in range(8):
        a, b = there.next().cpu(), here.next()
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        for key in a.keys(True, True):
            assert torch.equal(a[key], b[key]), key


def recurrent(kind):
    """One of TorchRL's recurrent modules and a head that takes the best action."""
    modules = pytest.importorskip("torchrl.modules")
    torch.manual_seed(0)
    memory = ["hidden", "cell"] if kind == "LSTMModule" else ["hidden"]
    keys = {"in_keys": ["observation", *memory], "out_keys": ["seen", *(("next", key) for key in memory)]}
    return TensorDictSequential(
        getattr(modules, kind)(input_size=4, hidden_size=8, device="cuda", **keys),
        TensorDictModule(nn.Linear(8, 2, device="cuda"), ["seen"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )


def seeded(policy, graph):
    env = TorchCartPole(64, device="cuda")
    env.seed(0)
    return Collector(TorchEnv(env), policy, frames_per_batch=64 * 16, cudagraph_policy=graph)


def test_torchrls_lstm_inside_a_graph():
    policy, batches = recurrent("LSTMModule"), []
    for graph in (False, True):
        c = seeded(policy, graph)
        assert isinstance(c._backend.worker, DeviceWorker)
        batches.append([c.next().clone() for _ in range(5)])
    for a, b in zip(*batches):
        for key in a.keys(True, True):
            assert torch.equal(a[key], b[key]), key
        done = a["next", "done"][:, :-1, 0]
        assert torch.equal(a["is_init"][:, 1:, 0], done)
        assert (a["hidden"][:, 1:][done] == 0).all()
        assert torch.equal(a["hidden"][:, 1:][~done], a["next", "hidden"][:, :-1][~done])


def test_torchrls_gru_asks_the_device_and_that_is_told():
    c = seeded(recurrent("GRUModule"), True)
    c.next()
    with pytest.raises(UsageError, match="cannot be recorded, step 0: the policy raised"):
        c.next()
    c.shutdown()


class Sampling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
        nn.init.zeros_(self.net.weight)
        with torch.no_grad():
            self.net.bias.copy_(torch.tensor([0.0, 1.0]))

    def forward(self, observation):
        return Categorical(logits=self.net(observation)).sample()


def test_a_replayed_rollout_draws_new_numbers_from_the_same_distribution():
    lanes = 4096
    c = Collector(
        TorchEnv(TorchCartPole(lanes, device="cuda")),
        Sampling().cuda(),
        frames_per_batch=lanes * 8,
        cudagraph_policy=True,
    )
    batches = [c.next() for _ in range(6)]
    share = torch.sigmoid(torch.tensor(1.0)).item()
    for batch in batches:
        assert batch["action"].float().mean().item() == pytest.approx(share, abs=0.01)
        done = batch["next", "done"][:, :-1, 0]
        stays = torch.equal(batch["observation"][:, 1:][~done], batch["next", "observation"][:, :-1][~done])
        assert stays
        assert (batch["observation"][:, 1:][done].abs() <= 0.05).all()
    for a, b in itertools.pairwise(batches):
        assert not torch.equal(a["action"], b["action"])
        done = a["next", "done"][:, -1, 0]
        assert torch.equal(b["observation"][:, 0][~done], a["next", "observation"][:, -1][~done])


def test_batches_lie_on_the_callers_stream():
    lanes = 65536
    c = Collector(
        TorchEnv(TorchCartPole(lanes, device="cuda")),
        Sampling().cuda(),
        frames_per_batch=lanes * 8,
        cudagraph_policy=True,
    )
    for _ in range(3):
        c.next()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        batch = c.next()
        ones = batch["next", "reward"].sum()
    side.synchronize()
    assert ones.item() == lanes * 8


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]], ids=["lanes", "single"])
def test_a_graphed_policy_and_lanes_on_the_host(lengths):
    policy = EchoPolicy()
    c = Collector(
        counting_lanes(lengths)(),
        policy,
        frames_per_batch=4 * len(lengths),
        policy_device="cuda",
        cudagraph_policy=True,
    )
    world = CountingWorld(lengths)
    for _ in range(6):
        assert_same(c.next(), world.batch(4))
    with torch.no_grad():
        policy.weight.fill_(2.0)
    c.update_policy_weights_()
    batch = c.next()
    assert torch.equal(batch["action"], EchoPolicy()(batch["observation"]) * 2)


def test_a_graphed_policy_samples():
    env = SerialEnv(16, lambda: gym.make("CartPole-v1"))
    c = Collector(env, Sampling(), frames_per_batch=16 * 200, policy_device="cuda", cudagraph_policy=True)
    c.next()
    a, b = c.next()["action"], c.next()["action"]
    share = torch.sigmoid(torch.tensor(1.0)).item()
    assert a.float().mean().item() == pytest.approx(share, abs=0.03)
    assert not torch.equal(a, b)
    with pytest.raises(UsageError, match="cudagraph_policy needs the policy on a CUDA device"):
        Collector(env, Sampling(), frames_per_batch=160, cudagraph_policy=True)


# ---- lanes that come as they are ready ------------------------------------------------------------------------------


def ready(lengths, policy, **options):
    make = [lambda one=one, lane=lane: GymEnv(CountingEnv(one, lane)) for lane, one in enumerate(lengths)]
    return AsyncBatchedCollector(make, policy, policy_device="cuda", track_policy_version=False, **options)


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
@pytest.mark.parametrize("graph", [False, True])
def test_ready_lanes_and_a_policy_on_the_gpu(graph, backend):
    lengths = [(3, 1), (2,), (1, 4, 2), (5,), (2, 2), (7,), (1,), (3,)]
    with ready(lengths, EchoPolicy(), frames_per_batch=64, cudagraph_policy=graph, env_backend=backend) as c:
        flat = torch.cat([c.next() for _ in range(8)])
        if graph:
            widths = {shape[0] for shape in c._backend.worker.policy.policy._widths}
            assert widths <= {1, 2, 4}
    for n, one in enumerate(lengths):
        frames = flat[flat["env_index"] == n].exclude("env_index", ("collector", "traj_ids"))
        world = CountingWorld([one], first_lane=n).batch(len(frames))
        assert_same(frames, {key: value for key, value in world.items() if key != ("collector", "traj_ids")})


def test_every_width_is_replayed_and_follows_the_weights():
    """One env, then three, then all: each width is recorded once, replayed, and hears of new weights."""
    free, changed = [8], threading.Condition()

    class Gated(CountingEnv):
        def step(self, action):
            with changed:
                assert changed.wait_for(lambda: self.lane < free[0], 60)
            return super().step(action)

    def let(count):
        with changed:
            free[0] = count
            changed.notify_all()

    policy = EchoPolicy()
    make = [lambda n=n: GymEnv(Gated((5,), n)) for n in range(8)]
    with AsyncBatchedCollector(make, policy, frames_per_batch=40, policy_device="cuda", cudagraph_policy=True) as c:
        for weight, count in ((1.0, 1), (2.0, 3), (3.0, 8), (4.0, 1)):
            let(count)
            with torch.no_grad():
                policy.weight.fill_(weight)
            c.update_policy_weights_()
            batches = [c.next() for _ in range(4)]
            last = batches[-1]
            assert torch.equal(last["action"], EchoPolicy()(last["observation"]) * weight)
        widths = c._backend.worker.policy.policy._widths
        assert 1 in {shape[0] for shape in widths}
        assert all(width.recording._graph is not None for shape, width in widths.items() if shape[0] == 1)
        let(8)


def test_graphed_ready_lanes_sample_what_eager_ones_do():
    make = [lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)] * 16
    with AsyncBatchedCollector(
        make, Sampling(), frames_per_batch=8000, policy_device="cuda", cudagraph_policy=True
    ) as c:
        c.next()
        a, b = c.next()["action"], c.next()["action"]
    share = torch.sigmoid(torch.tensor(1.0)).item()
    assert a.float().mean().item() == pytest.approx(share, abs=0.03)
    assert b.float().mean().item() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("graph", [False, True])
def test_used_by_hand_between_rollouts(graph):
    """A replay asks nobody: whoever moved the lanes since is looked for before it."""
    env = TorchEnv(CountingDevice([(100,), (100,)], "cuda"))
    c = Collector(env, EchoPolicy().cuda(), frames_per_batch=8, cudagraph_policy=graph)
    for _ in range(4):
        c.next()
    env.reset()
    for n in range(3):
        assert c.next()["observation"][0, :, 2].tolist() == [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3]
    c.shutdown()
    assert env.is_closed


@pytest.mark.parametrize("graph", [False, True])
def test_batches_are_lent_and_never_written_over(graph):
    """Two slots take turns; whoever holds on to a batch, or to a view of one column, keeps it as it was."""
    env = TorchEnv(CountingDevice(WORLD, "cuda"))
    c = Collector(env, EchoPolicy().cuda(), frames_per_batch=12, cudagraph_policy=graph)
    for _ in range(6):
        batch = c.next()
    place = batch["observation"].data_ptr()
    del batch
    places = set()
    for _ in range(4):
        batch = c.next()
        places.add(batch["observation"].data_ptr())
        del batch
    assert place in places, "a slot nobody holds is used again"
    kept = [c.next() for _ in range(5)]
    copies = [batch.clone() for batch in kept]
    views = [batch["observation"][0, 1:3] for batch in kept]
    seen = [view.clone() for view in views]
    c.next()
    for batch, copy in zip(kept, copies):
        assert all(torch.equal(batch[key], copy[key]) for key in copy.keys(True, True))
    del batch, kept
    for _ in range(4):
        c.next()
    assert all(torch.equal(view, was) for view, was in zip(views, seen))
