"""SAC on Pendulum: random frames first, soft targets, three optimizers."""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, DoubleToFloat, GymEnv, InitTracker, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

log = []
torch.manual_seed(0)
transforms = Compose(InitTracker(), StepCounter(25), DoubleToFloat(), RewardSum())
env = TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), transforms)
env.set_seed(0)
net = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[32, 32]), NormalParamExtractor())
actor = ProbabilisticActor(
    TensorDictModule(net, ["observation"], ["loc", "scale"]),
    in_keys=["loc", "scale"],
    spec=env.action_spec,
    distribution_class=TanhNormal,
    distribution_kwargs={"low": -2.0, "high": 2.0, "tanh_loc": False},
)
qvalue = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[32, 32]), in_keys=["action", "observation"])
loss_module = SACLoss(actor, qvalue, num_qvalue_nets=2, action_spec=env.action_spec)
collector = Collector(env, actor, init_random_frames=40, frames_per_batch=20, total_frames=160, device="cpu")
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
loss_module.make_value_estimator(gamma=0.99)
target = SoftUpdate(loss_module, eps=0.99)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
frames = 0
for data in collector:
    log.append(data.clone())
    collector.update_policy_weights_()
    frames += data.numel()
    buffer.extend(data.reshape(-1))
    if frames < 40:
        continue
    for _ in range(4):
        sample = buffer.sample()
        loss = loss_module(sample)
        (loss["loss_actor"] + loss["loss_qvalue"] + loss["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        log.append(loss.detach().select("loss_actor", "loss_qvalue", "loss_alpha"))
collector.shutdown()
