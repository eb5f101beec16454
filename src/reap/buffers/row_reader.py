"""RowReader: samples from a ring that is being written to.   draw → read → still not overwritten? ──► sample"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reap.buffers import arguments
from reap.buffers.multistep import MultiStep
from reap.buffers.samplers import Sampler, empty_buffer
from reap.buffers.storage.batch_writer import PLAIN
from reap.buffers.storage.buffer_files import BufferFiles
from reap.buffers.storage.episode_index import Cuts
from reap.buffers.storage.ring import BASE, HEAD, HOLE
from reap.buffers.storage.rows import Array, Rows, as_tensordict
from reap.errors import Starved, WrongIndex, WrongState
from reap.spec import Key, Leaf, as_key

_PATIENCE = 4  # reads that writers may overtake before the lock keeps them out for one read


class RowReader:
    """Reads rows that a sampler draws, or rows by number, and makes samples of them.

    `with_info`: samples contain the info about their rows. `cuts`: by which leaves episodes were split when written.
    """

    def __init__(
        self, memory: BufferFiles, sampler: Sampler, cuts: Cuts, *, with_info: bool, device: torch.device, pin: bool
    ) -> None:
        self._memory, self._sampler, self._cuts, self._with_info = memory, sampler, cuts, with_info
        self._device, self._pin = device, pin
        self._multistep: MultiStep | None = None
        self._names_checked = False  # whether column names were checked against the names a sample adds

    def set_multistep(self, multistep: MultiStep | None) -> None:
        """Read n-step rows from now on, by this `MultiStep`; None: single rows."""
        self._multistep, self._names_checked = multistep, False

    def check_names(self, columns: Mapping[Key, Leaf]) -> None:
        """Raise if one of these columns has a name that a sample uses for something else."""
        if self._with_info:
            self._sampler.check_columns(columns)
        if self._multistep is not None:
            self._multistep.check_names(columns)

    def draw(self, count: int, generator: torch.Generator | None) -> tuple[Array, dict[Any, Any], dict[Key, Tensor]]:
        """Return the row numbers that the sampler draws, the info about them, and their columns."""
        memory, sampler = self._memory, self._sampler
        ring = memory.ring
        for _ in range(0 if sampler.alone else _PATIENCE):
            low = ring.low
            try:
                positions, info = sampler.draw(memory, count, generator)
            except Starved:
                break  # perhaps wrongly: writers may have gone round the ring between two reads; decide under the lock
            rows, columns = self._read(positions)
            # Rows from `ring.low` on have not been overwritten. The cheap check first: nothing drawn is below `low`.
            if low >= ring.low or int(positions.min()) >= ring.low:
                info["index"] = torch.from_numpy(rows)
                return rows, info, columns
        with ring.lock.locked():  # no writer can reserve the rows we read
            positions, info = sampler.draw(memory, count, generator)
            rows, columns = self._read(positions)
        info["index"] = torch.from_numpy(rows)
        return rows, info, columns

    def at(self, index: Any) -> tuple[Any, Any]:
        """Return the rows with these numbers as a sample, and the numbers in the shape of `index`.

        A slice skips rows that are being written. Writers wait meanwhile.
        """
        ring = self._memory.ring
        with ring.lock.locked():  # no writer can reserve the rows we read
            low, high = ring.window()
            try:
                chosen = np.arange(min(high - int(ring.words[BASE]), ring.capacity))[index]
            except Exception as error:  # NumPy, or the index object itself, may raise anything
                raise WrongIndex(f"index {arguments.shown(index)} names no rows of this buffer: {error}") from None
            if high < ring.words[HEAD] or ring.holes(low):
                whole = np.zeros(ring.capacity, bool)
                whole[np.arange(low, high)[ring.marks_of(low, high) != HOLE] % ring.capacity] = True
                if isinstance(index, slice):
                    chosen = chosen[whole[chosen]]
                elif not whole[chosen].all():
                    raise WrongState(
                        f"some of rows {index} are still being written, or were lost when their writer died"
                    )
            rows, columns = self._read(low + (np.array(chosen).reshape(-1) - low) % ring.capacity)
        return self.deliver(columns, len(rows), {"index": torch.from_numpy(rows)}), chosen

    def _read(self, positions: Array) -> tuple[Array, dict[Key, Tensor]]:
        rows = positions % self._memory.capacity
        if not self._names_checked:  # once: a writer in another process may not know our sampler
            self.check_names(self._rows().layout.columns)
            self._names_checked = True
        if self._multistep is not None:
            return rows, self._multistep.read(self._memory, positions, self._cuts)
        return rows, self._rows().read(rows)

    def _rows(self) -> Rows:
        rows = self._memory.rows
        if rows is None:
            raise empty_buffer()
        return rows

    def deliver(self, columns: dict[Key, Tensor], count: int, info: Mapping[Any, Tensor]) -> Any:
        """Return these columns as a sample on the device: a TensorDict, or a bare tensor if tensors were written."""
        if PLAIN in columns:
            return self._to_device(columns[PLAIN])
        if self._with_info:
            columns.update(_info_columns(columns, info))
        return self._to_device(as_tensordict(columns, count))

    def _to_device(self, sample: Any) -> Any:
        if self._device.type != "cpu":
            return sample.to(self._device)
        return sample.pin_memory() if self._pin and torch.cuda.is_available() else sample


def _info_columns(columns: Mapping[Key, Tensor], info: Mapping[Any, Tensor]) -> dict[Key, Tensor]:
    """Return `info` as columns of the sample, with "done" set at the end of each slice."""
    added = {as_key(key): value for key, value in info.items()}
    for key, ends in list(added.items()):
        done = (*key[:-1], "done")
        if key[-1] == "truncated" and done in columns:
            shape = (-1, *[1] * (columns[done].ndim - 1))
            added[done] = columns[done] | ends.reshape(shape)
            if key in columns:
                added[key] = columns[key] | ends.reshape(shape)  # keeps a flag that n-step rows have set
    return added
