"""CapturedPolicy: run a user's module by replaying the torch calls it makes (see core/capture).

The plain policy behind it, which calls the module at each step, acts if the module cannot be captured, and in rollouts
before which the module changed in a way that could not be captured. In two rollouts one step is made by both module and
replay and compared; if they differ, the module is called from then on.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict.nn import InteractionType
from torch import Tensor, nn

from reap.core.capture.generator_state import position, restore_generator, varied
from reap.core.capture.provable import why_not
from reap.core.capture.recorder import NotCaptured, record, refuse_hooks, tensors_in, undisturbed
from reap.core.capture.replay import Captured, Halves
from reap.core.policies.call_policy import CallPolicy
from reap.core.policies.exploration import exploring
from reap.core.policies.flat_policy import FlatPolicy
from reap.core.policies.untouched import untouched
from reap.core.policy import SubstitutePolicy, TensorDictPolicy
from reap.core.slot import Row, Slot
from reap.errors import SpecMismatch, as_raised
from reap.spec import Key

_log = logging.getLogger("reap.policy")
_COMPARED = (2, 16)  # rollouts in which one step is made by both module and replay, and compared
_RECOMPUTED = (3, 17)  # rollouts after which deferred outputs are also computed row by row, and compared
_MIN_STEPS = 32  # rollouts of fewer steps gain nothing from deferring outputs to their end
_MAX_RECORDINGS = 4  # recordings kept: of train() and of eval(), of one head and of another


class CapturedPolicy(SubstitutePolicy):
    """Replays the torch calls that `model` makes in `plain`; if it is not captured, `why` says the reason."""

    _plain: CallPolicy | TensorDictPolicy

    def __init__(
        self,
        plain: CallPolicy | TensorDictPolicy,
        model: nn.Module,
        first: Sequence[Tensor],
        exploration: InteractionType | None,
    ) -> None:
        super().__init__(plain, plain.inputs, plain.device)
        self._model, self._first, self._exploration = model, list(first), exploration
        self.outputs, self.inner, self._readers = plain.outputs, plain.inner, plain._readers
        self._captures: list[tuple[Captured, list[Key]]] = []
        self._active: Captured | None = None
        self._reread: list[Key] = []  # the outputs of the last step that the module reads again
        self._checks: list[tuple[tuple[Tensor, ...], Sequence[Any]]] = []  # inputs and checked values of each step
        self._pick: Callable[[Any], Any] = tuple
        self._rollouts, self._compare = 0, False
        self._halves: Halves | None = None  # the step in two, if some outputs are deferred to the end of the rollout
        self._deferred: list[tuple[Any, ...]] = []  # of each step: the values that deferred outputs are computed from
        self._no_defer = False  # whether no output may be deferred, because computing it later gave different bits
        self._capture()

    def explain(self) -> str:
        return "it is captured: its torch calls are replayed" if self._captures else super().explain()

    @property
    def captured(self) -> bool:
        """Whether there is a recording of the module's torch calls."""
        return bool(self._captures)

    @property
    def written(self) -> Sequence[Key]:
        keys = list(self.outputs)
        return keys if self._halves is None else [keys[i] for i in self._halves.now]

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return bool(self._reread) or self._plain.remembers

    def _capture(self) -> bool:
        """Record the module in its current state; return False if that fails and it must be called."""
        try:
            with untouched(self._model), torch.no_grad(), exploring(self._exploration):
                self._captures.append(self._recorded())
        except NotCaptured as reason:
            self.why = str(reason)
        except Exception as cause:  # a module may raise anything when it is recorded: then it is called
            self.why = f"recording it raised {cause!r}"
        else:
            self.why = None
        return self.why is None

    def _recorded(self) -> tuple[Captured, list[Key]]:
        plain, probes = self._plain, [self._first, *(varied(self._first, by, _permuted) for by in (0.1, 1, 3))]
        if isinstance(plain, CallPolicy):
            return Captured([self._model], lambda *inputs: plain.forward(inputs), probes), []
        size, columns = plain._size, len(self._first)
        _, kept = plain.answer(tuple(self._first), {}, size)
        given = {k: v for k, v in kept.items() if isinstance(v, Tensor) and tuple(v.shape[: len(size)]) == size}

        def recorded(finds: Sequence[Key], leaves: Sequence[Key]) -> Captured:
            def step(*inputs: Tensor) -> Sequence[Any]:
                values, now = plain.answer(inputs[:columns], dict(zip(finds, inputs[columns:])), size)
                return [*values, *(now[key] for key in leaves)]

            held = [given[key] for key in finds]
            with_held = [[*probe, *(h.clone() for h in held)] for probe in probes]
            return Captured([self._model], step, with_held, inference=not leaves)  # a module may change these

        # Of everything it wrote at the last step, the module reads little, and mostly nothing.
        found, keys = recorded(list(given), []), []  # type: ignore[var-annotated]
        while (read := [list(given)[at - columns] for at in found.used if at >= columns]) != keys:
            found, keys = recorded(list(given), read), read
        return (recorded(keys, keys), keys) if keys else (found, keys)

    def begin(self, slot: Slot) -> None:
        self._plain.begin(slot)
        self._checks, self._deferred = [], []
        self._rollouts += 1
        self._compare = self._rollouts in _COMPARED
        before = self._active
        self._active = next((c for c, _ in self._captures if c.bind()), None)
        if self._active is None and self.why is None and len(self._captures) < _MAX_RECORDINGS and self._capture():
            self._active = self._captures[-1][0]
            self._active.bind()
        if self._active is not None and self._active is not before:
            self._reread = next(keys for c, keys in self._captures if c is self._active)
            used = self._active.used
            self._pick = operator.itemgetter(*used) if len(used) > 1 else lambda inputs: [inputs[i] for i in used]
        self._halves = self._split(slot)

    def _split(self, slot: Slot) -> Halves | None:
        """Return the step in two halves, if it pays to defer outputs nobody reads before the rollout ends; or None."""
        short = slot.layout.steps < _MIN_STEPS
        if self._active is None or self.read_early is None or self._reread or self._compare or self._no_defer or short:
            return None
        return self._active.halves([i for i, key in enumerate(self.outputs) if key in self.read_early])

    def act(self, row: Row) -> None:
        halves = self._halves
        if halves is not None:
            values = halves.run(*self._pick(row.inputs))
            for value, column in zip(values, row.outputs):
                column[...] = value
            self._deferred.append(values)
            return None
        active = self._active
        if active is None:
            return self._plain.act(row)
        inputs = row.inputs
        if self._reread:
            kept: dict[Key, Any] = self._plain._kept  # type: ignore[union-attr]
            if not kept:  # the first step: there is nothing yet to give to the replay
                self._checks.append((row.inputs, ()))  # the module itself checks this step
                return self._plain.act(row)
            inputs = (*inputs, *(kept[key] for key in self._reread))
        if self._compare:
            self._compare = False
            if not self._still_agrees(active, inputs):
                return self._plain.act(row)
        values = active.run(*self._pick(inputs))
        ours = len(self._readers)
        for value, read, column in zip(values, self._readers, row.outputs):
            column[...] = read(value)
        if self._reread:
            self._plain._kept = dict(zip(self._reread, values[ours : active.outputs]))  # type: ignore[union-attr]
        if active.checks:
            self._checks.append((row.inputs, values[active.outputs :]))
        return None

    def _still_agrees(self, active: Captured, inputs: Sequence[Tensor]) -> bool:
        """Return whether module and replay agree on this step; if they do not, drop all recordings."""
        before = position()
        agree = active.agrees(inputs)
        restore_generator(before)
        if not agree:
            self.why = "replay and module gave different results in a later rollout"
            _log.warning("%s is called at each step from now on: %s", type(self._model).__name__, self.why)
            self._captures, self._active = [], None
        return agree

    def end(self, slot: Slot, steps: int) -> None:
        self._plain.end(slot, steps)
        if self._halves is not None:
            self._write_deferred(self._halves, slot, steps)
        elif self._active is not None and self._active.checks:
            for t, (inputs, values) in enumerate(self._checks[:steps]):
                if any(check.read(value) != check.value for check, value in zip(self._active.checks, values)):
                    self._raise_for(inputs, t)
        self._checks, self._deferred = [], []

    def _write_deferred(self, halves: Halves, slot: Slot, steps: int) -> None:
        """Compute and write the outputs that were deferred to the end of the rollout."""
        columns, same = halves.finish(self._deferred[:steps], check=self._rollouts in _RECOMPUTED)
        if not same:
            self._no_defer = True  # torch gives these columns other bits than their rows: defer nothing any more
        keys = list(self.outputs)
        for column, at, moves in zip(columns, halves.rest, halves.moves):
            into = slot.arrays[keys[at]][:steps]
            into[...] = self._readers[at](column).reshape(into.shape if moves else into.shape[1:])
        for check, column in zip(halves.checks, columns[len(halves.rest) :]):
            wrong = column != check.value
            if bool(wrong.any()):
                t = int(wrong.nonzero()[0])
                self._raise_for(tuple(slot.layout.tensor(k, slot.arrays[k][t]) for k in self.inputs), t)

    def _raise_for(self, inputs: tuple[Tensor, ...], t: int) -> None:
        """Raise the error for the inputs of step `t`: call the module, whose distribution rejects its arguments."""
        try:
            with torch.no_grad():
                self._plain.forward(tuple(x.reshape(first.shape) for x, first in zip(inputs, self._first)))
        except Exception as cause:
            error = as_raised("the policy raised", cause).at(step=t)
            raise error from error.__cause__
        raise SpecMismatch("the policy passed invalid arguments to its distribution").at(step=t)

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        return self._plain.forward(inputs)


def leaves_inputs_alone(model: Any, inputs: Sequence[Tensor]) -> bool:
    """Return whether a module neither changes nor keeps its inputs, by reading its code and recording one call."""
    if not isinstance(model, nn.Module) or why_not(model) is not None:
        return False
    try:
        refuse_hooks([model])
        with untouched(model):
            undisturbed(lambda: record(lambda *given: list(tensors_in(model(*given))), inputs))
    except Exception:  # a module may raise anything when it is recorded
        return False
    return True


def _permuted(value: Tensor, by: float, chance: torch.Generator) -> Tensor:
    """Return the same numbers at other places: an index stays in range, and one lane's one-hot choice stays one-hot."""
    return value.reshape(-1)[torch.randperm(value.numel(), generator=chance)].reshape(value.shape)


def captured(policy: Any, model: Any, columns: Mapping[Key, Any], exploration: InteractionType | None) -> Any:
    """Return a policy that replays the torch calls of `model`, or `policy` itself if they cannot be captured."""
    if not isinstance(model, nn.Module):
        return policy
    plain = policy
    if isinstance(policy, FlatPolicy) and policy.opaque:  # flat, except that it calls modules of the user's own
        plain = policy.as_module()
    if not isinstance(plain, (CallPolicy, TensorDictPolicy)):
        return policy
    if plain.device is not None and plain.device.type != "cpu":
        return policy
    first = [columns[key] for key in plain.inputs]
    if not all(isinstance(value, Tensor) for value in first):
        return policy
    why = why_not(model)
    if why is None:
        made = CapturedPolicy(plain, model, [value.clone() for value in first], exploration)
        if made.captured:
            return made
        why = made.why
    _log.info("%s is called at each step: %s", type(model).__name__, why)
    policy.why = why
    return policy
