"""Variants of `ReplayBuffer`: samples that contain their row numbers, prioritized sampling, and both."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from reap.buffers import arguments
from reap.buffers.replay import DEFAULT_SIZE, ReplayBuffer, made
from reap.buffers.samplers import PrioritizedSampler
from reap.buffers.storage.storages import LazyTensorStorage, Storage
from reap.core.slot import MASK
from reap.errors import UsageError, WrongArgument
from reap.spec import AnyKey, show


class TensorDictReplayBuffer(ReplayBuffer):
    """A buffer whose samples contain `index`, weights and slice ends, and whose priorities are read from TensorDicts.

    >>> sample["td_error"] = loss_per_row
    >>> buffer.update_tensordict_priority(sample)
    """

    _with_info = True

    def __init__(self, *, priority_key: AnyKey = "td_error", **options: Any) -> None:
        super().__init__(**options)
        self._priority_key = arguments.key(priority_key, "priority_key")

    def extend(self, data: Any) -> Tensor:
        index = super().extend(data)
        if is_tensor_collection(data) and isinstance(self._sampler, PrioritizedSampler):
            given, mask = data.get(self._priority_key, None), data.get(MASK, None)
            if given is not None:
                priority = self._reduced(given, data.ndim)
                self.update_priority(index, priority if mask is None else priority[mask.reshape(-1)])
        return index

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of the rows of a sample to its values under `priority_key`."""
        if not isinstance(data, TensorDictBase):
            raise WrongArgument(f"data must be a sample of this buffer, a TensorDict, got {type(data).__name__}")
        priority = data.get(self._priority_key, None)
        if priority is None:
            raise UsageError(f"the sample has no {show(self._priority_key)} to read priorities from")
        if data.get("index", None) is None:
            raise UsageError("the sample has no 'index' that says which rows it holds")
        self.update_priority(data.get("index"), self._reduced(priority, data.ndim))

    def update_priority(self, index: Any, priority: Any = None) -> None:
        if priority is None and is_tensor_collection(index):
            self.update_tensordict_priority(index)
        else:
            super().update_priority(index, priority)

    def _reduced(self, priority: Tensor, lead: int) -> Tensor:
        if priority.ndim == lead:
            return priority.reshape(-1)
        flat = priority.flatten(lead).reshape(-1, priority[(0,) * lead].numel())
        how = self._sampler.reduction if isinstance(self._sampler, PrioritizedSampler) else "max"
        if how == "median":
            return flat.quantile(0.5, dim=1)
        if how == "mean":
            return flat.mean(dim=1)
        return flat.amax(dim=1) if how == "max" else flat.amin(dim=1)


class PrioritizedReplayBuffer(ReplayBuffer):
    """A buffer that samples by priority.

    >>> buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100_000), batch_size=256)
    >>> buffer.update_priority(info["index"], priority)
    """

    def __init__(
        self, *, alpha: float, beta: float, eps: float = 1e-8, storage: Storage | None = None, **options: Any
    ) -> None:
        storage = made("storage", storage, Storage, lambda: LazyTensorStorage(DEFAULT_SIZE))
        super().__init__(storage=storage, sampler=PrioritizedSampler(storage.max_size, alpha, beta, eps), **options)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A prioritized buffer whose samples contain `index` and weights.

    >>> buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100_000))
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: AnyKey = "td_error",
        eps: float = 1e-8,
        storage: Storage | None = None,
        reduction: str = "max",
        **options: Any,
    ) -> None:
        storage = made("storage", storage, Storage, lambda: LazyTensorStorage(DEFAULT_SIZE))
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(storage=storage, sampler=sampler, priority_key=priority_key, **options)
