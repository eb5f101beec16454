"""CallPolicy: a module or function of observation tensors, called on views of the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from reap.core.policies.outputs import Getter, by_name, getters, is_named
from reap.core.policy import TensorPolicy
from reap.errors import SpecMismatch, UsageError
from reap.spec import Key, as_key, show_keys


class CallPolicy(TensorPolicy):
    """A module or function of plain tensors.

    A returned tuple holds the action, then `output1`, `output2`, … (or the parts that `names` lists), then the new
    carry. Outputs that have names, such as a mapping's, are delivered under these.
    """

    def __init__(
        self,
        call: Any,
        inputs: Sequence[Key],
        outputs: Sequence[Key],
        carry: Sequence[Key],
        device: Any,
        names: Sequence[Key] | None = None,
    ) -> None:
        super().__init__(inputs, device)
        self._call, self._first, self._last = call, list(outputs), [("next", *key) for key in carry]
        self._given = None if names is None else _with_carry(names, carry)
        self._many = False
        self._alone = len(inputs) == 1 and device is None  # the common case, which needs no `private`
        self.trusted = False  # whether it is known neither to change nor to keep its inputs, and needs no copies
        self._getters: list[Getter] = []
        self._names: int | None = None  # the number of entries, if it returns a mapping

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        if self.trusted:
            out = self._call(*inputs)
        elif self._alone:
            out = self._call(inputs[0].clone())
        else:
            out = self._call(*self.private(inputs))
        if self._getters:
            try:
                if self._names is None or len(out) == self._names:
                    return [get(out) for get in self._getters]
            except (AttributeError, LookupError, TypeError):
                pass
            now = show_keys(by_name(out, list(self.outputs)[:1]))
            raise SpecMismatch(f"the policy returned {now}; on its first call it returned {show_keys(self.outputs)}")
        if not self._many:
            return (out,)
        if self.outputs and len(out) != len(self.outputs):
            wanted = show_keys(self.outputs)
            raise SpecMismatch(f"the policy returned {len(out)} tensors; on its first call it returned {wanted}")
        return out  # type: ignore[no-any-return]

    def probe(self, inputs: tuple[Tensor, ...], size: tuple[int, ...]) -> None:
        (out,) = self.forward(inputs)
        if out is None:
            raise UsageError("policy returned None; the action is expected")
        if is_named(out):
            if self._given is not None:
                raise UsageError(
                    f"out_keys names the parts of a returned tuple, but the policy returned values with names, "
                    f"{show_keys(getters(out))}. Remove out_keys"
                )
            found = getters(out)
            carried = {next_[1:]: next_ for next_ in self._last if next_ not in found}  # under its own name
            keys = [carried.get(key, key) for key in found]
            self._names = len(out) if isinstance(out, Mapping) else None
            self.learn_outputs(keys, [get(out) for get in found.values()], size)
            self._getters = list(found.values())
            return
        self._many = isinstance(out, tuple)
        values = tuple(out) if self._many else (out,)
        if self._given is not None:
            if len(values) != len(self._given):
                own = [key for key in self._given if key not in self._last]
                raise SpecMismatch(
                    f"policy returned {len(values)} tensors; out_keys names {show_keys(own)}{self._and_carry()}"
                )
            self.learn_outputs(self._given, values, size)
            return
        extra = len(values) - len(self._first) - len(self._last)
        if extra < 0:
            wanted = f"{show_keys(self._first)}{self._and_carry()}"
            raise SpecMismatch(f"policy returned {len(values)} tensors; {wanted} are expected")
        keys = [*self._first, *(as_key(f"output{i}") for i in range(1, extra + 1)), *self._last]
        self.learn_outputs(keys, values, size)

    def _and_carry(self) -> str:
        """Return the part of an error message that says what comes last in a tuple, if there is a carry."""
        return f", and then the new carry, {show_keys([key[1:] for key in self._last])}" if self._last else ""


def _with_carry(names: Sequence[Key], carry: Sequence[Key]) -> list[Key]:
    """Return the keys of a tuple's parts: a state's own name means its new value; states not named come last."""
    found = [("next", *name) if name in carry and ("next", *name) not in names else name for name in names]
    return [*found, *(("next", *key) for key in carry if ("next", *key) not in found)]
