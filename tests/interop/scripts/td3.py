"""TD3 on Pendulum: Gaussian noise that fades, a delayed actor, a policy that is a sequence of modules."""

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, AdditiveGaussianModule, TanhModule, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss

log = []
torch.manual_seed(0)
env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(InitTracker(), RewardSum(), StepCounter(25)))
env.set_seed(0)
net = TensorDictModule(MLP(in_features=3, out_features=1, num_cells=[32]), ["observation"], ["param"])
actor = TensorDictSequential(
    net, TanhModule(in_keys=["param"], out_keys=["action"], spec=env.full_action_spec_unbatched["action"])
)
noise = AdditiveGaussianModule(
    env.full_action_spec_unbatched["action"], sigma_init=1.0, sigma_end=0.1, annealing_num_steps=100, mean=0.0, std=0.1
)
exploring = TensorDictSequential(actor, noise)
qvalue = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[32]), in_keys=["action", "observation"])
loss_module = TD3Loss(actor, qvalue, action_spec=env.full_action_spec_unbatched["action"], loss_function="l2")
collector = Collector(
    env, exploring, init_random_frames=40, frames_per_batch=20, total_frames=160, reset_at_each_iter=False
)
buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000), batch_size=32, pin_memory=False)
loss_module.make_value_estimator(gamma=0.99)
target = SoftUpdate(loss_module, eps=0.995)
actor_optimizer = torch.optim.Adam(loss_module.actor_network_params.flatten_keys().values(), lr=1e-3)
critic_optimizer = torch.optim.Adam(loss_module.qvalue_network_params.flatten_keys().values(), lr=1e-3)
torch.manual_seed(1)  # TorchRL tries the policy when a collector is made, and draws; reap does not
updates = 0
for data in collector:
    log.append(data.clone())
    noise.step(data.numel())
    collector.update_policy_weights_()
    buffer.extend(data.reshape(-1).cpu())
    if len(buffer) < 40:
        continue
    for _ in range(4):
        sample = buffer.sample()
        q_loss, *_ = loss_module.value_loss(sample)
        q_loss.backward()
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        log.append(q_loss.detach())
        updates += 1
        if updates % 2 == 0:
            a_loss, *_ = loss_module.actor_loss(sample)
            a_loss.backward()
            actor_optimizer.step()
            actor_optimizer.zero_grad()
            target.step()
            log.append(a_loss.detach())
collector.shutdown()
