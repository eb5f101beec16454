"""PPO on lanes of CartPole: advantages over a whole batch, minibatches without replacement, a schedule."""

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

log = []
torch.manual_seed(0)
env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), Compose(RewardSum(), StepCounter(100)))
env.set_seed(0)
body = TensorDictModule(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)), ["observation"], ["logits"])
actor = ProbabilisticActor(
    body, in_keys=["logits"], spec=env.action_spec, distribution_class=OneHotCategorical, return_log_prob=True
)
critic = ValueOperator(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"])
collector = Collector(env, actor, frames_per_batch=128, total_frames=512, max_frames_per_traj=-1)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(128), sampler=SamplerWithoutReplacement(), batch_size=32)
advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
for data in collector:
    log.append(data.clone())
    over = data["next", "done"]
    log.append(data["next", "episode_reward"][over])
    for _ in range(2):
        with torch.no_grad():
            advantage(data)
        buffer.extend(data.reshape(-1))
        for batch in buffer:
            loss = loss_module(batch)
            total = loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"]
            total.backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            log.append(total.detach())
    schedule.step()
    collector.update_policy_weights_()
collector.shutdown()
