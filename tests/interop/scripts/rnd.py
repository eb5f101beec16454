"""PPO with random network distillation on CartPole: the reward is changed in place before advantages are computed."""

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

log = []
torch.manual_seed(0)
env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), Compose(StepCounter(40), RewardSum()))
env.set_seed(0)


def mlp(outputs):
    """Return a small network for what CartPole shows."""
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs))


actor = ProbabilisticActor(
    TensorDictModule(mlp(2), ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=OneHotCategorical,
    return_log_prob=True,
)
critic = ValueOperator(mlp(1), in_keys=["observation"])
fixed, predictor = mlp(8).requires_grad_(False), mlp(8)
advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
optimizer = torch.optim.Adam([*loss_module.parameters(), *predictor.parameters()], lr=1e-3)
collector = Collector(env, actor, frames_per_batch=64, total_frames=256)
for data in collector:
    log.append(data.clone())
    seen = data["next", "observation"]
    error = (predictor(seen) - fixed(seen)).pow(2).mean(-1, keepdim=True)
    data["next", "reward"] += error.detach()
    with torch.no_grad():
        advantage(data)
    flat = data.reshape(-1)
    for part in flat[torch.randperm(len(flat))].split(32):
        loss = loss_module(part)
        surprise = (predictor(part["next", "observation"]) - fixed(part["next", "observation"])).pow(2).mean()
        total = loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"] + surprise
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append(torch.stack([total.detach(), surprise.detach()]))
    collector.update_policy_weights_()
collector.shutdown()
