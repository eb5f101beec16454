"""Training as TorchRL's examples do it, on reap's collectors: its envs, modules, buffers, losses; and it learns."""

import warnings

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

from reap.collectors import Collector, MultiSyncCollector

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
    from torchrl.data.replay_buffers import SamplerWithoutReplacement
    from torchrl.envs import (
        Compose,
        DoubleToFloat,
        GymEnv,
        InitTracker,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
    )
    from torchrl.modules import (
        EGreedyModule,
        GRUModule,
        OneHotCategorical,
        ProbabilisticActor,
        QValueActor,
        QValueModule,
        TanhNormal,
        ValueOperator,
        set_recurrent_mode,
    )
    from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
    from torchrl.objectives.value import GAE

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(100)]


def mlp(i, o, width=64):
    return nn.Sequential(nn.Linear(i, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, o))


def cart(lanes=8):
    def one():
        return GymEnv("CartPole-v1")

    return TransformedEnv(SerialEnv(lanes, one), Compose(RewardSum(), StepCounter(), InitTracker()))


def returns(batch):
    """Returns of the episodes that ended in a batch, as `RewardSum` has added them up."""
    return batch["next", "episode_reward"][batch["next", "done"]]


@pytest.mark.parametrize("where", ["here", pytest.param("workers", marks=pytest.mark.slow)])
def test_ppo(where):
    torch.manual_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(mlp(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(4, 1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1024), sampler=SamplerWithoutReplacement(), batch_size=256)
    options = {"frames_per_batch": 1024, "total_frames": 14 * 1024}
    if where == "here":
        collector = Collector(cart(), actor, **options)
    else:
        collector = MultiSyncCollector([lambda: cart(4)] * 2, actor, **options)
    collector.set_seed(0)
    seen = []
    for batch in collector:
        seen.append(returns(batch).mean().item())
        for _ in range(4):
            advantage(batch)
            buffer.empty()
            buffer.extend(batch.reshape(-1))
            for part in buffer:
                values = loss(part)
                optimizer.zero_grad()
                (values["loss_objective"] + values["loss_critic"] + values["loss_entropy"]).backward()
                optimizer.step()
        collector.update_policy_weights_()
    collector.shutdown()
    assert seen[0] < 35
    assert max(seen[-3:]) > 2.5 * seen[0]


def test_dqn():
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))
    value = QValueActor(mlp(4, 2), spec=env.action_spec)
    explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=2_500)
    loss = DQNLoss(value, action_space=env.action_spec, delay_value=True)
    loss.make_value_estimator(gamma=0.98)
    target_update = SoftUpdate(loss, eps=0.98)
    optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=128)
    collector = Collector(
        env,
        TensorDictSequential(value, explore),
        frames_per_batch=100,
        total_frames=5_000,
        init_random_frames=500,
    )
    collector.set_seed(1)
    seen = []
    for batch in collector:
        seen += returns(batch).tolist()
        buffer.extend(batch.reshape(-1).exclude("collector"))
        explore.step(batch.numel())
        if len(buffer) < 500:
            continue
        for _ in range(25):
            total = loss(buffer.sample())["loss"]
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            target_update.step()
    collector.shutdown()
    assert float(explore.eps) == pytest.approx(0.05, abs=0.01)
    first, last = torch.tensor(seen[:20]).mean(), torch.tensor(seen[-10:]).mean()
    assert last > 2 * first, (first, last)


@pytest.mark.slow
def test_sac():
    """Pendulum: the mean reward of a step rises from that of random actions."""
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(DoubleToFloat(), StepCounter(200), RewardSum()))
    actor = ProbabilisticActor(
        TensorDictModule(nn.Sequential(mlp(3, 2), NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=False,
        spec=env.action_spec,
    )

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4, 1)

        def forward(self, observation, action):
            return self.net(torch.cat([observation, action], -1))

    critic = ValueOperator(Critic(), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic, num_qvalue_nets=2, action_spec=env.action_spec)
    loss.make_value_estimator(gamma=0.97)
    target_update = SoftUpdate(loss, eps=0.98)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=128)
    collector = Collector(env, actor, frames_per_batch=200, total_frames=4_000, init_random_frames=600)
    collector.set_seed(0)
    seen = []
    for batch in collector:
        seen.append(batch["next", "reward"].mean().item())
        buffer.extend(batch.reshape(-1))
        if len(buffer) < 600:
            continue
        for _ in range(40):
            values = loss(buffer.sample())
            optimizer.zero_grad()
            (values["loss_actor"] + values["loss_qvalue"] + values["loss_alpha"]).backward()
            optimizer.step()
            target_update.step()
    collector.shutdown()
    first, last = sum(seen[:4]) / 4, sum(seen[-4:]) / 4
    assert last > 0.6 * first, (first, last)  # rewards are negative: nearer to zero


def test_recurrent_dqn_with_slices():
    """A GRU trained on slices of trajectories: its loss falls, and slices keep to their trajectory."""
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), StepCounter(50)))
    gru = GRUModule(4, 32, in_key="observation", out_key="features")
    env.append_transform(gru.make_tensordict_primer())
    head = TensorDictModule(nn.Linear(32, 2), ["features"], ["action_value"])
    policy = TensorDictSequential(gru, head, QValueModule(spec=env.action_spec))
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    target_update = SoftUpdate(loss, eps=0.95)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5_000),
        sampler=SliceSampler(slice_len=8, traj_key=("collector", "traj_ids"), strict_length=True),
        batch_size=64,
    )
    explore = EGreedyModule(env.action_spec, eps_init=0.5, eps_end=0.5)
    collector = Collector(
        env, TensorDictSequential(policy, explore), frames_per_batch=200, total_frames=2_000, set_truncated=True
    )
    collector.set_seed(0)
    losses = []
    for batch in collector:
        buffer.extend(batch)
        for _ in range(8):
            slices = buffer.sample().reshape(8, 8)
            ids = slices["collector", "traj_ids"]
            assert bool((ids == ids[:, :1]).all())
            with set_recurrent_mode(True):
                total = loss(slices)["loss"]
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            target_update.step()
            losses.append(total.item())
    collector.shutdown()
    assert sum(losses[-16:]) < sum(losses[:16])
