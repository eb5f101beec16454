"""The recurrent DQN tutorial's way: an LSTM primed by the env, trained on whole sequences."""

import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import (
    Compose,
    ExplorationType,
    GymEnv,
    InitTracker,
    RewardScaling,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import MLP, EGreedyModule, LSTMModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate

log = []
torch.manual_seed(0)
env = TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), StepCounter(), RewardScaling(loc=0.0, scale=0.1)))
env.set_seed(0)
embed = Mod(nn.Linear(4, 16), in_keys=["observation"], out_keys=["embed"])
lstm = LSTMModule(input_size=16, hidden_size=16, in_key="embed", out_key="embed")
env.append_transform(lstm.make_tensordict_primer())
head = Mod(MLP(in_features=16, out_features=2, num_cells=[16]), in_keys=["embed"], out_keys=["action_value"])
qvalue = QValueModule(spec=env.action_spec)
policy = Seq(embed, lstm, head, qvalue)
exploration = EGreedyModule(annealing_num_steps=200, spec=env.action_spec, eps_init=0.5)
exploring = Seq(policy, exploration)
policy(env.reset())
loss_module = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
target = SoftUpdate(loss_module, eps=0.95)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
collector = Collector(env, exploring, frames_per_batch=25, total_frames=200)
buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(100), batch_size=4, prefetch=None)
torch.manual_seed(1)  # TorchRL tries the policy when a collector is made, and draws; reap does not
for data in collector:
    log.append(data.clone())
    exploration.step(data.numel())
    buffer.extend(data.unsqueeze(0).to_tensordict().cpu())
    for _ in range(3):
        with set_recurrent_mode(True):
            loss = loss_module(buffer.sample())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append(loss.detach())
    target.step()
    collector.update_policy_weights_()
with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
    log.append(env.rollout(100, exploring)["step_count"].max())
collector.shutdown()
