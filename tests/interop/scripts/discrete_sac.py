"""Discrete SAC on CartPole: a categorical actor, one Q value per action."""

import torch
from tensordict.nn import InteractionType, TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, DTypeCastTransform, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor
from torchrl.objectives import DiscreteSACLoss, SoftUpdate

log = []
torch.manual_seed(0)
casting = DTypeCastTransform(torch.float32, torch.float32, in_keys=["observation"])
env = TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), StepCounter(50), RewardSum(), casting))
env.set_seed(0)
actor = ProbabilisticActor(
    TensorDictModule(MLP(in_features=4, out_features=2, num_cells=[32]), ["observation"], ["logits"]),
    in_keys=["logits"],
    out_keys=["action"],
    spec=env.action_spec,
    distribution_class=OneHotCategorical,
    default_interaction_type=InteractionType.RANDOM,
)
qvalue = TensorDictModule(MLP(in_features=4, out_features=2, num_cells=[32]), ["observation"], ["action_value"])
loss_module = DiscreteSACLoss(actor, qvalue, action_space=env.action_spec, num_actions=2, num_qvalue_nets=2)
collector = Collector(
    env, actor, init_random_frames=30, frames_per_batch=30, total_frames=180, reset_at_each_iter=False
)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
loss_module.make_value_estimator(gamma=0.99)
target = SoftUpdate(loss_module, eps=0.99)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
torch.manual_seed(1)  # TorchRL tries the policy when a collector is made, and draws; reap does not
for data in collector:
    log.append(data.clone())
    collector.update_policy_weights_()
    buffer.extend(data.reshape(-1))
    for _ in range(3):
        sample = buffer.sample()
        loss = loss_module(sample)
        (loss["loss_actor"] + loss["loss_qvalue"] + loss["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
        log.append(loss.detach().select("loss_actor", "loss_qvalue", "loss_alpha"))
collector.shutdown()
