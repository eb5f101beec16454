"""A2C on one Pendulum with normalised observations: one pass over each batch in small pieces."""

import torch
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import (
    ClipTransform,
    Compose,
    ExplorationType,
    GymEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
    set_exploration_type,
)
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

log = []
torch.manual_seed(0)


def make_env():
    """A Pendulum whose episodes are short enough to end."""
    transforms = Compose(
        VecNorm(in_keys=["observation"]),
        ClipTransform(in_keys=["observation"], low=-10, high=10),
        RewardSum(),
        StepCounter(30),
    )
    return TransformedEnv(GymEnv("Pendulum-v1"), transforms)


env = make_env()
env.set_seed(3)
head = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1), AddStateIndependentNormalScale(1))
actor = ProbabilisticActor(
    TensorDictModule(head, ["observation"], ["loc", "scale"]),
    in_keys=["loc", "scale"],
    spec=env.full_action_spec,
    distribution_class=TanhNormal,
    distribution_kwargs={"low": -2.0, "high": 2.0},
    return_log_prob=True,
    default_interaction_type=ExplorationType.RANDOM,
)
critic = ValueOperator(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"])
collector = Collector(env, actor, frames_per_batch=64, total_frames=256, device="cpu", storing_device="cpu")
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=16)
advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
loss_module = A2CLoss(actor, critic, entropy_coeff=0.0, critic_coeff=0.25)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
torch.manual_seed(1)  # TorchRL tries the policy when a collector is made, and draws; reap does not
for data in collector:
    log.append(data.clone())
    with torch.no_grad():
        data = advantage(data)
    buffer.extend(data.reshape(-1))
    for batch in buffer:
        loss = loss_module(batch)
        (loss["loss_objective"] + loss["loss_critic"]).backward()
        for optimizer in (actor_optimizer, critic_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        log.append(loss.detach())
    collector.update_policy_weights_()
collector.shutdown()
with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
    log.append(env.rollout(40, actor, break_when_any_done=False)["next", "reward"].sum())
