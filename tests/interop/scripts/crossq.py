"""CrossQ on Pendulum: batch renormalisation in actor and critics, so modules change between training and acting."""

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.modules import BatchRenorm1d, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import CrossQLoss

log = []
torch.manual_seed(0)
env = TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), Compose(StepCounter(25), RewardSum()))
env.set_seed(0)


def renormed(inputs, outputs):
    """Return a network that normalises what it is given with the statistics of the batches before."""
    return nn.Sequential(
        BatchRenorm1d(inputs, momentum=0.01, warmup_steps=10), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs)
    )


class Critic(nn.Module):
    """A value of an action and an observation."""

    def __init__(self):
        super().__init__()
        self.net = renormed(4, 1)

    def forward(self, action, observation):
        """Return the value."""
        return self.net(torch.cat([action, observation], -1))


actor = ProbabilisticActor(
    TensorDictModule(nn.Sequential(renormed(3, 2), NormalParamExtractor()), ["observation"], ["loc", "scale"]),
    in_keys=["loc", "scale"],
    spec=env.action_spec,
    distribution_class=TanhNormal,
    distribution_kwargs={"low": -2.0, "high": 2.0},
)
qvalue = ValueOperator(Critic(), in_keys=["action", "observation"])
actor.eval()
loss_module = CrossQLoss(actor, qvalue, num_qvalue_nets=2, action_spec=env.action_spec)
collector = Collector(env, actor, init_random_frames=40, frames_per_batch=20, total_frames=160)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
loss_module.make_value_estimator(gamma=0.99)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
for data in collector:
    log.append(data.clone())
    buffer.extend(data.reshape(-1))
    if len(buffer) < 40:
        continue
    actor.train()
    for _ in range(4):
        loss = loss_module(buffer.sample())
        (loss["loss_actor"] + loss["loss_qvalue"] + loss["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append(loss.detach().select("loss_actor", "loss_qvalue", "loss_alpha"))
    actor.eval()
    collector.update_policy_weights_()
collector.shutdown()
