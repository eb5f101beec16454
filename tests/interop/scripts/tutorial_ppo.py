"""The PPO tutorial's way: observations normalised by a rollout, lazy networks, a cosine schedule."""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    ExplorationType,
    GymEnv,
    ObservationNorm,
    StepCounter,
    TransformedEnv,
    check_env_specs,
    set_exploration_type,
)
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

log = []
torch.manual_seed(0)
base = GymEnv("Pendulum-v1", device="cpu")
env = TransformedEnv(base, Compose(ObservationNorm(in_keys=["observation"]), DoubleToFloat(), StepCounter(30)))
env.set_seed(0)
env.transform[0].init_stats(num_iter=50, reduce_dim=0, cat_dim=0)
check_env_specs(env)
net = nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(2), NormalParamExtractor())
actor = ProbabilisticActor(
    module=TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
    spec=env.action_spec,
    in_keys=["loc", "scale"],
    distribution_class=TanhNormal,
    distribution_kwargs={"low": env.action_spec.space.low, "high": env.action_spec.space.high},
    return_log_prob=True,
)
critic = ValueOperator(nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(1)), in_keys=["observation"])
actor(env.reset())
critic(env.reset())
collector = Collector(env, actor, frames_per_batch=60, total_frames=240, split_trajs=False, device="cpu")
buffer = ReplayBuffer(storage=LazyTensorStorage(max_size=60), sampler=SamplerWithoutReplacement())
advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
loss_module = ClipPPOLoss(actor, critic, entropy_bonus=True, entropy_coeff=1e-4, loss_critic_type="smooth_l1")
optimizer = torch.optim.Adam(loss_module.parameters(), 3e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4, 0.0)
for data in collector:
    log.append(data.clone())
    for _ in range(2):
        advantage(data)
        buffer.extend(data.reshape(-1).cpu())
        for _ in range(3):
            loss = loss_module(buffer.sample(20))
            total = loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]
            total.backward()
            torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log.append(total.detach())
    schedule.step()
with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
    log.append(env.rollout(30, actor)["next", "reward"].mean())
collector.shutdown()
