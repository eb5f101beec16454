"""The DDPG tutorial's way: several workers in step, whole trajectories in the buffer, a loss on time-major samples."""

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.envs import Compose, GymEnv, RandomCropTensorDict, RewardScaling, StepCounter, TransformedEnv
from torchrl.modules import MLP, TanhModule, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate


def make_env():
    """A Pendulum with small rewards and short episodes."""
    transforms = Compose(RewardScaling(loc=0.0, scale=0.2), StepCounter(20))
    env = TransformedEnv(GymEnv("Pendulum-v1"), transforms)
    env.set_seed(0)
    return env


log = []
torch.manual_seed(0)
spec = make_env().action_spec
net = TensorDictModule(MLP(in_features=3, out_features=1, num_cells=[32]), ["observation"], ["param"])
actor = TensorDictSequential(net, TanhModule(in_keys=["param"], out_keys=["action"], spec=spec))
qvalue = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[32]), in_keys=["observation", "action"])

if __name__ == "__main__":
    collector = MultiSyncCollector(
        [make_env, make_env],
        policy=actor,
        frames_per_batch=80,
        total_frames=320,
        split_trajs=True,
        reset_at_each_iter=False,
        postproc=MultiStep(gamma=0.99, n_steps=3),
        cat_results="stack",
        update_at_each_batch=True,
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), sampler=RandomSampler(), batch_size=4, transform=RandomCropTensorDict(10, -1)
    )
    loss_module = DDPGLoss(actor, qvalue)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, eps=0.99)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    torch.manual_seed(1)  # TorchRL tries the policy when a collector is made, and draws; reap does not
    for data in collector:
        log.append(data.exclude(("collector", "traj_ids")).clone())  # reap numbers trajectories apart
        assert data.shape[-1] == 20
        buffer.extend(data.cpu())
        for _ in range(3):
            loss = loss_module(buffer.sample())
            (loss["loss_actor"] + loss["loss_value"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            target.step()
            log.append(loss.detach().select("loss_actor", "loss_value"))
        collector.update_policy_weights_()
    collector.shutdown()
