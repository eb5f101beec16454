"""DQN on CartPole: a greedy actor and an epsilon that shrinks, hard target updates, one frame budget per batch."""

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

log = []
torch.manual_seed(0)
env = TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))
env.set_seed(0)
model = QValueActor(
    MLP(in_features=4, out_features=2, num_cells=[32, 32]), spec=env.action_spec, in_keys=["observation"]
)
greedy = EGreedyModule(eps_init=1.0, eps_end=0.05, annealing_num_steps=200, spec=env.action_spec)
loss_module = DQNLoss(model, loss_function="l2", delay_value=True)
collector = Collector(
    env,
    TensorDictSequential(model, greedy),
    frames_per_batch=25,
    total_frames=250,
    init_random_frames=50,
    exploration_type="RANDOM",
)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=32, prefetch=None)
loss_module.make_value_estimator(gamma=0.99)
target = HardUpdate(loss_module, value_network_update_interval=5)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
torch.manual_seed(1)  # TorchRL tries the policy when a collector is made, and draws; reap does not
for n, data in enumerate(collector):
    log.append(data.clone())
    log.append(data["next", "episode_reward"][data["next", "done"]])
    buffer.extend(data.reshape(-1))
    greedy.step(data.numel())
    if n < 2:
        continue
    for _ in range(4):
        loss = loss_module(buffer.sample())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        log.append(loss.detach())
    collector.update_policy_weights_()
collector.shutdown()
