"""PPO by TorchRL's own trainer, which is given a collector, checks what it is, and calls it."""

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers.algorithms import PPOTrainer

torch.manual_seed(0)
env = TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))
env.set_seed(0)
body = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
actor = ProbabilisticActor(body, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
loss_module = ClipPPOLoss(actor, critic)
collector = Collector(env, actor, frames_per_batch=64, total_frames=256)
trainer = PPOTrainer(
    collector=collector,
    total_frames=256,
    frame_skip=1,
    optim_steps_per_batch=None,
    loss_module=loss_module,
    optimizer=torch.optim.Adam(loss_module.parameters(), 1e-3),
    replay_buffer=ReplayBuffer(storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=32),
    num_epochs=2,
    progress_bar=False,
    enable_logging=False,
)
trainer.train()
log = [parameter.detach() for parameter in loss_module.parameters()]
