"""Replay buffers and datasets: the public names.

>>> from reap.data import LazyTensorStorage, ReplayBuffer
>>> buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
>>> buffer.extend(batch)
>>> buffer.sample()
>>> record(collector, "runs/cartpole", format="minari")        # episodes on disk; see docs/datasets.md
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
from reap.data.datasets import Dataset, export, load, record
from reap.data.ray import RayReplayBuffer

__all__ = [
    "Dataset",
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
    "export",
    "load",
    "record",
]
