"""DDPG on Pendulum: Ornstein-Uhlenbeck noise, which carries its state from step to step."""

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, DoubleToFloat, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, OrnsteinUhlenbeckProcessModule, TanhModule, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate

log = []
torch.manual_seed(0)
env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(InitTracker(), StepCounter(25), DoubleToFloat(), RewardSum()))
env.set_seed(0)
spec = env.action_spec
net = TensorDictModule(MLP(in_features=3, out_features=1, num_cells=[32]), ["observation"], ["param"])
actor = TensorDictSequential(net, TanhModule(in_keys=["param"], out_keys=["action"], spec=spec))
noise = OrnsteinUhlenbeckProcessModule(annealing_num_steps=200, n_steps_annealing=200, spec=spec.clone())
exploring = TensorDictSequential(actor, noise)
qvalue = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[32]), in_keys=["action", "observation"])
loss_module = DDPGLoss(actor, qvalue, loss_function="l2", delay_actor=True, delay_value=True)
collector = Collector(env, exploring, init_random_frames=20, frames_per_batch=20, total_frames=160)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
loss_module.make_value_estimator(gamma=0.99)
target = SoftUpdate(loss_module, eps=0.99)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
torch.manual_seed(1)  # TorchRL tries the policy when a collector is made, and draws; reap does not
for data in collector:
    log.append(data.clone())
    noise.step(data.numel())
    buffer.extend(data.reshape(-1))
    for _ in range(4):
        loss = loss_module(buffer.sample())
        (loss["loss_actor"] + loss["loss_value"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        log.append(loss.detach().select("loss_actor", "loss_value"))
    collector.update_policy_weights_()
collector.shutdown()
