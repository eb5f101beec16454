"""The replay buffers tutorial's way: the collector fills buffers itself; slices, steps ahead, a checkpoint."""

import tempfile

import torch
from torchrl.collectors import Collector
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.transforms import MultiStepTransform
from torchrl.modules import RandomPolicy

log = []
torch.manual_seed(0)
env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), StepCounter())
env.set_seed(0)
policy = RandomPolicy(env.action_spec)

# the collector writes, the loop samples slices of trajectories
sliced = ReplayBuffer(
    storage=LazyTensorStorage(300, ndim=2),
    sampler=SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=True),
    batch_size=16,
)
collector = Collector(env, policy, frames_per_batch=60, total_frames=180, replay_buffer=sliced)
torch.manual_seed(1)  # TorchRL tries the policy when a collector is made, and draws; reap does not
for data in collector:
    assert data is None
    log.append(sliced.sample())
log.append(sliced[:])
collector.shutdown()

# the loop writes: steps ahead, by chance, then everything once
steps_ahead = ReplayBuffer(
    storage=LazyMemmapStorage(300), transform=MultiStepTransform(n_steps=3, gamma=0.9), batch_size=8
)
plain = TensorDictReplayBuffer(storage=LazyTensorStorage(300), batch_size=16)
once = ReplayBuffer(storage=LazyTensorStorage(300), sampler=SamplerWithoutReplacement(), batch_size=30)
env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
env.set_seed(3)
collector = Collector(env, policy=RandomPolicy(env.action_spec), frames_per_batch=50, total_frames=150)
torch.manual_seed(2)
for data in collector:
    log.append(data.clone())
    steps_ahead.extend(data)
    once.extend(data)
    plain.extend(data)
    log.append(plain.sample())
    log.append(steps_ahead.sample())
log.extend(once)
with tempfile.TemporaryDirectory() as folder:
    once.dumps(folder)
    again = ReplayBuffer(storage=LazyTensorStorage(300), sampler=SamplerWithoutReplacement(), batch_size=30)
    again.loads(folder)
    log.append(again[:])
collector.shutdown()
