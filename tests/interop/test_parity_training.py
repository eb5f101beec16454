"""Batches from reap in TorchRL's hands: advantages, losses, replay buffers, samplers, with nothing in between."""

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from torchrl.envs.utils import check_env_specs
from torchrl.modules import OneHotCategorical, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss
from torchrl.objectives.value import GAE

from tests.worlds.pairs import collectors, env_makers, reap

pytestmark = pytest.mark.filterwarnings("ignore")


def discrete_actor():
    net = TensorDictModule(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), ["observation"], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)


def continuous_actor():
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2), NormalParamExtractor())
    read = TensorDictModule(net, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(read, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize(
    ("kind", "make", "width"), [("CartPole-v1", discrete_actor, 4), ("Pendulum-v1", continuous_actor, 3)]
)
def test_ppo_step(kind, make, width, lanes):
    torch.manual_seed(0)
    actor = make()
    critic = ValueOperator(nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1)), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    collector = reap.collectors.Collector(env_makers(kind, lanes)["reap"], actor, frames_per_batch=60, total_frames=120)
    before = [p.clone() for p in loss.parameters()]
    for batch in collector:
        advantage(batch)
        assert batch["advantage"].shape == batch["next", "reward"].shape
        flat = batch.reshape(-1)
        for part in flat.split(30):
            values = loss(part)
            total = sum(value for name, value in values.items() if name.startswith("loss"))
            assert torch.isfinite(total)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        collector.update_policy_weights_()
    assert all(not torch.equal(old, new) for old, new in zip(before, loss.parameters()))


@pytest.mark.parametrize("lanes", [None, 3])
def test_advantages_are_those_of_a_torchrl_batch(lanes):
    torch.manual_seed(0)
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    made = collectors(env_makers("CartPole-v1", lanes), discrete_actor, frames_per_batch=60)
    values = {}
    for name, collector in made.items():
        torch.manual_seed(1)
        batch = next(iter(collector))
        values[name] = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)["advantage"]
    assert torch.equal(values["reap"], values["torchrl"])
    assert bool(values["reap"].any())


@pytest.mark.parametrize("lanes", [None, 3])
def test_dqn_step_from_a_replay_buffer(lanes):
    torch.manual_seed(0)
    actor = QValueActor(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), action_space="one-hot")
    loss = DQNLoss(actor, action_space="one-hot")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=16)
    collector = reap.collectors.Collector(
        env_makers("CartPole-v1", lanes)["reap"], actor, frames_per_batch=60, total_frames=180, init_random_frames=60
    )
    for batch in collector:
        buffer.extend(batch.reshape(-1))
    assert len(buffer) == 180
    value = loss(buffer.sample())["loss"]
    value.backward()
    assert torch.isfinite(value)


@pytest.mark.parametrize("lanes", [None, 3])
def test_slices_stay_inside_trajectories(lanes):
    torch.manual_seed(0)
    sampler = SliceSampler(slice_len=3, traj_key=("collector", "traj_ids"))
    storage = LazyTensorStorage(400, ndim=1 if lanes is None else 2)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=30)
    env = env_makers("CartPole-v1", lanes)["reap"]
    for batch in reap.collectors.Collector(env, frames_per_batch=60, total_frames=240):
        buffer.extend(batch)
    slices = buffer.sample().reshape(10, 3)
    ids = slices["collector", "traj_ids"]
    assert torch.equal(ids, ids[:, :1].expand(10, 3))
    assert torch.equal(slices["next", "observation"][:, :-1], slices["observation"][:, 1:])
    assert len(ids.unique()) > 1


def test_the_torchrl_envs_of_this_suite_are_sound():
    """TorchRL's own checker, so that a difference is never the fault of an env made here."""
    for kind in ("counting", "nested dict", "multi-discrete", "multi-binary", "pixels"):
        check_env_specs(env_makers(kind)["torchrl"]())
