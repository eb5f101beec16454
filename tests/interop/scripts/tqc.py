"""TQC on Pendulum: quantile critics of which the highest are dropped; the collector is told of devices."""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SoftUpdate, TQCLoss

log = []
torch.manual_seed(0)
env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(InitTracker(), StepCounter(25), RewardSum()))
env.set_seed(0)
net = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[32]), NormalParamExtractor())
actor = ProbabilisticActor(
    TensorDictModule(net, ["observation"], ["loc", "scale"]),
    in_keys=["loc", "scale"],
    spec=env.action_spec,
    distribution_class=TanhNormal,
    distribution_kwargs={"low": -2.0, "high": 2.0},
)
qvalue = ValueOperator(MLP(in_features=4, out_features=8, num_cells=[32]), in_keys=["action", "observation"])
loss_module = TQCLoss(actor, qvalue, num_qvalue_nets=3, action_spec=env.action_spec)
collector = Collector(
    env,
    actor,
    init_random_frames=40,
    frames_per_batch=20,
    total_frames=140,
    policy_device="cpu",
    env_device="cpu",
    storing_device="cpu",
)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
loss_module.make_value_estimator(gamma=0.99)
target = SoftUpdate(loss_module, eps=0.99)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
for data in collector:
    log.append(data.clone())
    buffer.extend(data.reshape(-1))
    if len(buffer) < 40:
        continue
    for _ in range(3):
        loss = loss_module(buffer.sample())
        terms = loss.select(*[key for key in loss.keys() if key.startswith("loss_")])
        sum(terms.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        log.append(terms.detach())
    collector.update_policy_weights_()
collector.shutdown()
