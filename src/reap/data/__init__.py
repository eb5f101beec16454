"""Replay buffers, by the names users know.

>>> from reap.data import LazyTensorStorage, ReplayBuffer
>>> buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
>>> buffer.extend(batch)
>>> buffer.sample()
"""

from reap.buffers.limiter import SamplesPerInsert
from reap.buffers.multistep import MultiStep
from reap.buffers.replay import ReplayBuffer
from reap.buffers.samplers import (
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from reap.buffers.storage.storages import LazyMemmapStorage, LazyTensorStorage, Storage
from reap.buffers.tensordict_replay import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from reap.data.ray import RayReplayBuffer

__all__ = [
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "MultiStep",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "RandomSampler",
    "RayReplayBuffer",
    "ReplayBuffer",
    "Sampler",
    "SamplerWithoutReplacement",
    "SamplesPerInsert",
    "SliceSampler",
    "Storage",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]
