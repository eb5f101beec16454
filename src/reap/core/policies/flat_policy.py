"""FlatPolicy: run TensorDictModules as a flat program (flat.py) on plain tensors, without a TensorDict per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reap.core.policies.flat import Program
from reap.core.policy import Reader, SubstitutePolicy, TensorDictPolicy
from reap.core.slot import Row, Slot
from reap.errors import SpecMismatch
from reap.spec import LANE_AT, Key, show


class NotFlat(Exception):
    """The program cannot replace the modules, which must be called instead."""


class FlatPolicy(SubstitutePolicy):
    """Runs TensorDictModules as a `Program`, or calls them if they can no longer run flat, as after adding a hook."""

    _plain: TensorDictPolicy

    def __init__(self, program: Program, fallback: TensorDictPolicy, device: torch.device | None) -> None:
        super().__init__(fallback, program.inputs, device)
        self._program = program
        self._run: Callable[..., Sequence[Any]] = program.run
        self._flat, self._compiled = True, False
        self._reader_of: dict[Key, Reader] = {}

    def begin(self, slot: Slot) -> None:
        before = self._flat
        self._flat = self._program.bind() and self._program.outputs == list(self.outputs)
        if self._flat and self._program.inputs != list(self.inputs):
            now, then = (", ".join(map(show, keys)) for keys in (self._program.inputs, self.inputs))
            raise SpecMismatch(f"the policy reads {now} now; it read {then} when the collector was made: make another")
        if before and not self._flat:
            self._plain.adopt(self.inputs, self.outputs)
        keys = list(self.outputs)
        self._readers = tuple(self._reader_of[key] for key in (self._program.written if self._flat else keys))

    def act(self, row: Row) -> None:
        program = self._program
        if not self._flat or self._compiled or self.device is not None:
            return super().act(row)
        # The rest is `TensorPolicy.act` written out, which saves three calls per step.
        regs = [*(self.private(row.inputs) if program.opaque else row.inputs), *program.blank]
        for op in program.ops:
            op(regs)
        for i, read, column in zip(program.taken, self._readers, row.outputs):
            array = read(regs[i])
            if array.shape != column.shape or array.dtype != column.dtype:
                raise self._changed(array, column, row)
            column[...] = array
        return None

    @property
    def written(self) -> Sequence[Key]:
        return self._program.written if self._flat else list(self.outputs)

    def end(self, slot: Slot, steps: int) -> None:
        if not self._flat:
            return
        for key, (valid, what) in self._program.checked.items():
            if key in slot.arrays:
                good = valid(slot.layout.tensor(key, slot.arrays[key][:steps]))
                if not bool(good.all()):
                    t, lane = (~good).nonzero()[0][:2].tolist()
                    if LANE_AT in slot.arrays:  # asynchronous lanes: rows have positions
                        lane = int(slot.arrays[LANE_AT][t, lane])
                    raise SpecMismatch(f"the policy wrote {what} as {show(key)}").at(lane=lane, step=t)
        for key, deferred in self._program.deferred.items():
            if key in self.outputs:
                columns = [slot.layout.tensor(k, slot.arrays[k][:steps]) for k in deferred.reads]
                slot.put(key, deferred.compute(*columns))

    def explain(self) -> str:
        called = "; your own modules in it are called at each step" if self._program.opaque else ""
        why = f" ({self.why})" if called and self.why else ""
        return f"it runs flat, without TensorDicts{called}{why}" if self._flat else super().explain()

    @property
    def opaque(self) -> bool:
        """Whether it calls modules of the user's own, and samples no distribution that flat.py has code for."""
        return self._program.opaque and not self._program.checked

    def as_module(self) -> TensorDictPolicy:
        """Return the same policy, called as a module at each step."""
        module = self._plain
        module.adopt(self.inputs, self.outputs)
        module.outputs = self.outputs
        module._readers = tuple(self._reader_of[key] for key in self.outputs)
        return module

    def keep_on_device(self) -> None:
        super().keep_on_device()
        self._reader_of = dict.fromkeys(self._reader_of, Tensor.detach)  # type: ignore[arg-type]

    def compile(self, options: Mapping[str, Any]) -> None:
        """Run the program through torch.compile."""
        self._run = torch.compile(self._program.run, **options)
        self._compiled = True

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        if not self._flat:
            return self._plain.forward(inputs)
        if self.device is not None or self._program.opaque:
            inputs = self.private(inputs)
        return self._run(*inputs)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return not self._flat

    def probe(self, inputs: tuple[Tensor, ...], size: tuple[int, ...]) -> None:
        program = self._program
        values = dict(zip(program.written, self.forward(inputs)))
        known = {**dict(zip(program.inputs, inputs)), **values}
        for key, deferred in program.deferred.items():
            if not all(isinstance(known.get(k), Tensor) for k in deferred.reads):
                raise NotFlat
            values[key] = deferred.compute(*[known[k] for k in deferred.reads])
        if not all(isinstance(value, Tensor) for value in values.values()):
            raise NotFlat
        if any(values[key].dtype is torch.bfloat16 for key in program.deferred):
            raise NotFlat  # deferred columns are computed from NumPy memory, which has no bfloat16
        self.learn_outputs(program.outputs, [values[key] for key in program.outputs], size)
        self._reader_of = dict(zip(program.outputs, self._readers))
        self._readers = tuple(self._reader_of[key] for key in program.written)
