"""MultiStep: computes n-step returns: discounted sums of n rewards, and the observation after those steps.

    row     t ─────► t+1 ─────► t+2 ─────► t+3              n_steps=3
            r₀       γ·r₁       γ²·r₂
            └─ reward: their sum ┘         └─ everything else under "next", including the done flags

A window ends early where its run of rows ends: at the end of an episode, of rows that one writer wrote without a gap,
or of the rows written so far. It is never longer than n steps, and `steps_to_next_obs` holds its length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from reap.buffers import arguments
from reap.buffers.samplers import check_names_free, empty_buffer
from reap.buffers.storage.buffer_files import BufferFiles
from reap.buffers.storage.episode_index import Cuts, Marker
from reap.errors import UsageError, WrongArgument
from reap.spec import Key, as_key, own_entry

Array = np.ndarray[Any, Any]
_MASKS: tuple[Key, ...] = (("collector", "mask"), ("mask",))


class MultiStep:
    """Replaces rewards by discounted sums over `n_steps` steps, and `next` by what follows those steps.

    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), transform=MultiStep(gamma=0.99, n_steps=3))
    >>> buffer.sample(256)["next", "reward"]    # of up to 3 steps

    In a buffer, the frames that follow a row are looked up when the row is sampled, with any sampler: windows may span
    several written batches. As `postproc` of a collector it sees one batch, and windows end with it.

    A sample also has `steps_to_next_obs`, `gamma` (to the power of those steps) and ("next", "original_reward").

    Args:
        gamma: discount per step, 0 to 1.
        n_steps: the largest number of steps, at least 1.
    """

    def __init__(self, gamma: float, n_steps: int) -> None:
        self.gamma = arguments.number(gamma, "gamma", 0, most=1)
        self.n_steps = arguments.whole(n_steps, "n_steps", 1, most=arguments.LARGEST)

    def read(self, memory: BufferFiles, positions: Array, cuts: Cuts) -> dict[Key, Tensor]:
        """Return the rows at these positions as n-step rows. `cuts` are those the rows were written with."""
        rows = memory.rows
        if rows is None:
            raise empty_buffer()
        columns = list(rows.layout.columns)
        cuts.check(columns)
        rewards = _rewards(columns)
        window, steps = self._window(positions, memory.runs.ends(positions))
        window %= memory.capacity
        last = window[:, -1]
        elsewhere = {key: window if key in rewards else last for key in columns if key[0] == "next"}
        found = rows.read(window[:, 0], elsewhere)
        self._discount(found, {key: found[key] for key in rewards}, steps)
        return found

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a collector's batch `[…, T]` as n-step rows. Windows end at the end of the batch."""
        if not isinstance(batch, TensorDictBase) or not batch.ndim:
            raise WrongArgument(f"MultiStep takes a TensorDict of shape […, T], got {type(batch).__name__}")
        shape = batch.batch_size
        if not shape.numel():
            return batch
        window, steps = self._window(np.arange(shape.numel()), _ends(batch))
        after = batch["next"].reshape(-1)
        self.check_names([as_key(key) for key in batch.keys(True, True)])
        keys = [("next", *as_key(key)) for key in after.keys(True, True)]
        rewards = {key: after[key[1:]][torch.from_numpy(window)] for key in _rewards(keys)}
        after = after[torch.from_numpy(np.ascontiguousarray(window[:, -1]))]
        columns: dict[Key, Tensor] = {}
        self._discount(columns, rewards, steps)
        out = batch.copy()
        out["next"] = after.reshape(shape)
        for key, value in columns.items():
            out[key] = value.reshape(*shape, *value.shape[1:])
        return out

    def check_names(self, columns: Iterable[Key]) -> None:
        """Raise if one of these columns has the name of an entry that MultiStep adds to a sample."""
        columns = list(columns)
        rewards = [(*key[:-1], "original_reward") for key in columns if key[0] == "next" and key[-1] == "reward"]
        check_names_free(columns, [("gamma",), ("steps_to_next_obs",), *rewards], "MultiStep adds to each sample")

    def _window(self, at: Array, ends: Array) -> tuple[Array, Array]:
        """Return the indices of each window, `[count, ≤ n_steps]`, the last one repeated as padding; and its length."""
        steps = np.clip(ends - at, 1, self.n_steps)  # 1 for a row overwritten meanwhile; it will be drawn again
        return at[:, None] + np.minimum(np.arange(steps.max()), steps[:, None] - 1), steps

    def _discount(self, columns: dict[Key, Tensor], rewards: dict[Key, Tensor], steps: Array) -> None:
        """Put summed and original rewards, from `[count, n_steps, …]`, gammas and window lengths into `columns`."""
        ahead = np.arange(steps.max())
        weights = torch.from_numpy(np.where(ahead < steps[:, None], self.gamma**ahead, 0.0))
        for key, each in rewards.items():
            dtype = each.dtype if each.is_floating_point() else torch.get_default_dtype()
            weight = weights.to(each.device, dtype).reshape(*weights.shape, *[1] * (each.ndim - 2))
            columns[(*key[:-1], "original_reward")] = each[:, 0].clone()
            columns[key] = (each * weight).sum(1)
        device = next(iter(rewards.values())).device
        columns["gamma",] = torch.from_numpy(self.gamma**steps).to(device, torch.get_default_dtype())
        columns["steps_to_next_obs",] = torch.from_numpy(steps).to(device)

    def __repr__(self) -> str:
        return f"MultiStep(gamma={self.gamma:g}, n_steps={self.n_steps})"


def _rewards(columns: list[Key]) -> list[Key]:
    found = [key for key in columns if key[0] == "next" and key[-1] == "reward"]
    if not found:
        raise UsageError('MultiStep: there is no reward under "next" to add up')
    return found


def _ends(batch: TensorDictBase) -> Array:
    """Return for each row of a batch, flattened, the index at which its run ends."""
    marks = Marker(Cuts()).marks(batch, None)[0].astype(bool)
    for key in _MASKS:
        if (mask := own_entry(batch, key)) is not None:  # padding is not part of a window
            frame = mask.detach().cpu().numpy().reshape(-1)
            marks[1:] |= frame[1:] != frame[:-1]
    starts = np.flatnonzero(marks)
    ends: Array = np.append(starts[1:], len(marks))[np.cumsum(marks) - 1]
    return ends
