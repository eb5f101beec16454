"""Captured: run a recorded step as straight-line code (recorder.py says what is recorded, and under which conditions).

    once per rollout      what depends on parameters alone:    s = exp(log_std)
    at each step          what is needed at once:              h = tanh(linear(x, W, b)); a = h + s · noise
    after the rollout     what nobody needs before:            log-probabilities, for all steps in one call

The functions are those that were recorded, on the same tensors, or NumPy's if those give the same bits in less time
(see exact.py). After the rollout, the same functions are called on whole columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reap._foreign import torch_internals
from reap.core.capture.fingerprint import Fingerprint
from reap.core.capture.frame_stacks import moved_in_place
from reap.core.capture.generator_state import is_shared, position, probe_generator, restore_generator, same_position
from reap.core.capture.grey_pictures import with_grey_pictures
from reap.core.capture.recorder import (
    Call,
    Decision,
    NotCaptured,
    RecordedStep,
    Register,
    Shadows,
    from_outside,
    mapped,
    name_of,
    record,
    refuse_decisions,
    refuse_hooks,
    undisturbed,
)
from reap.core.capture.shortcuts import Shortened
from reap.core.capture.source import StepSource, Wanted

# Functions that give the same bits for a row alone and among others. Some of torch's do not (softplus, sigmoid, atanh):
# they compute whole vectors by one code and the remainder of a row by another.
# fmt: off
_ROW_BY_ROW = frozenset(
    {
        "add", "sub", "mul", "div", "pow", "square", "neg", "abs", "sqrt", "exp", "log", "log1p", "tanh",
        "sign", "floor", "round", "rsub", "clamp", "clamp_min", "clamp_max", "where",
        "masked_fill",
        "gt", "ge", "lt", "le", "eq", "ne", "isnan", "isinf", "isfinite", "logical_or", "logical_and", "logical_not",
        "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__",
        "__pow__", "__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__", "__or__", "__and__", "__invert__",
        "sum", "all", "any", "logsumexp", "softmax", "log_softmax", "gather", "reshape", "view", "squeeze", "unsqueeze",
        "expand", "flatten", "to", "float", "double", "long", "bool", "type_as", "detach", "clone",
        "broadcast_tensors", "__getitem__"
    }
)
# fmt: on
_MAX_KEPT = 1 << 15  # most bytes that a step may keep for the end of the rollout


class Captured:
    """A step as straight-line code: call `bind` before each rollout, then `run` at each step.

    `run` takes the inputs whose indices are in `used` and returns the outputs, then a value for each of `checks`.

    Args:
        modules: the modules whose attributes, hooks and parameters the step relies on.
        call: makes the step; takes and returns tensors.
        probes: at least two sets of inputs to compare step and replay on. The step is recorded on the first two.
        writes: whether the step may change tensors that are not its own, as a running mean does. It works on copies of
            them while it is recorded and compared.
        arrays: whether `run` takes and returns arrays in place of tensors, as functions in it that are not torch's do.
        inference: whether `run` may return inference tensors, which cannot be changed in place later.
    """

    run: Callable[..., tuple[Any, ...]]

    def __init__(
        self,
        modules: Sequence[nn.Module],
        call: Callable[..., Sequence[Any]],
        probes: Sequence[Sequence[Tensor]],
        *,
        writes: bool = False,
        arrays: bool = False,
        inference: bool = True,
    ) -> None:
        self._call, self._writes, self._arrays, self._inference = call, writes, arrays, inference
        refuse_hooks(modules)
        self._fingerprint, self._settings = Fingerprint(modules), _settings()
        first, second = (
            undisturbed(lambda probe=probe: record(call, probe, Shadows() if writes else None))  # type: ignore[misc]
            for probe in probes[:2]
        )
        refuse_decisions(first.recorder)
        self._outside = from_outside(first, second)
        self._draws = any(one.random and not one.foreign for one in first.recorder.calls)
        self._layouts = _layouts(self._outside.values())
        self._sort_calls(first)
        self._probes = probes
        self._halves: dict[tuple[int, ...], Halves | None] = {}
        if not self._agrees_on_probes() and (not self._numpy or not self._agrees_on_probes(numpy=False)):
            raise NotCaptured("its replay gives different results")
        if not self._fingerprint.holds():
            raise NotCaptured("it changes its own attributes")

    def _agrees_on_probes(self, *, numpy: bool = True) -> bool:
        """Return whether step and replay agree on all probes."""
        self._numpy = numpy
        self._prepare, self._step = self._compiled(self._outside)
        for probe in self._probes:
            if not self.bind():
                raise NotCaptured("it changes its own attributes")
            if not self.agrees(probe):
                return False
        return True

    def _sort_calls(self, recording: RecordedStep) -> None:
        """Sort the calls into those to make once per rollout, at each step, or not at all."""
        recorder, outputs = recording
        calls, decisions, inputs = recorder.calls, recorder.decisions, range(recorder.inputs)
        real = recorder.shadows.original if recorder.shadows is not None else {}
        places = {at: t.untyped_storage().data_ptr() for at, t in enumerate(recorder.tensors) if t.numel()}
        memory = {at: real.get(place, place) for at, place in places.items()}
        changed = {memory[at] for call in calls for at in call.changes if at in memory}
        kept = inputs if self._writes else (*inputs, *self._outside)
        if any(memory.get(at) in changed for at in kept):
            raise NotCaptured("it changes in place a tensor that it did not create")
        calls, names = _without_copies(calls, memory, changed, recording)
        outputs = tuple(names.get(at, at) for at in outputs)
        calls = [_standard_form(call, recorder.tensors) for call in calls]
        calls, again = _without_repeats(calls, {at for at, place in memory.items() if place in changed}, {*outputs})
        names = {at: again.get(name, name) for at, name in (again | names).items()}
        decisions = [d._replace(at=names.get(d.at, d.at)) for d in decisions]
        used = (*outputs, *(d.at for d in decisions))
        calls = moved_in_place(calls, recorder.tensors, memory, used)
        calls = with_grey_pictures(calls, recorder.tensors, used)
        moving = set(inputs)
        steady, each = [], []
        for call in calls:
            shared = any(memory.get(at) in changed for at in (*call.reads, *call.writes))
            if call.random or call.changes or shared or moving.intersection(call.reads):
                each.append(call)
                moving.update(call.writes)
            else:
                steady.append(call)
        moving.update(at for at in self._outside if memory.get(at) in changed)
        refuse_decisions(recorder, moving)
        self.checks = [d for d in decisions if d.at in moving]
        self._outputs, self.outputs = outputs, len(outputs)
        wanted = {*outputs, *(d.at for d in self.checks)}
        body = _needed(each, wanted)
        read = {at for call in body for at in call.reads} | {*outputs}
        fixed = sorted(at for at in read if at not in moving and at not in self._outside)
        self._guards, self._fixed = [d for d in decisions if d.at not in moving], fixed
        self.used = [at for at in inputs if at in read]
        given = {memory.get(at) for at in inputs}
        self.aliases = [memory.get(at) in given for at in outputs]  # whether each output lies in the memory of an input
        self._prologue = _needed(steady, {*fixed, *(d.at for d in self._guards)})
        self._body, self._moving, self._memory = body, moving, memory
        self._changing = {at for at, place in memory.items() if place in changed}
        self._tensors = [_shape_of(t) if t.device.type == "cpu" else t for t in recorder.tensors]
        self._numpy = True

    def read_of(self, func: Callable[..., Any]) -> list[list[bool]]:
        """Return, for each call of `func` (not torch's) in a step, which of its results are used."""
        read = {at for call in self._body for at in call.reads} | {*self._outputs}
        return [[at in read for at in call.writes] for call in self._body if call.func == func]

    def _source(self, tensors: Sequence[Tensor], outside: Mapping[int, Tensor]) -> StepSource:
        """Return a StepSource for functions of these tensors that are called at each step."""
        more: dict[str, Any] = {"arrays": self._arrays, "inference": self._inference, "memory": self._memory}
        return StepSource(tensors, outside, self._fixed, numpy=self._numpy, **more)

    def _compiled(self, outside: Mapping[int, Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return prologue and body as functions on these outside tensors."""
        first = [Wanted(at) for at in (*self._fixed, *(d.at for d in self._guards))]
        prologue = StepSource(self._tensors, outside, (), numpy=False).function(self._prologue, (), first)
        wanted = [Wanted(at, as_array=self._arrays) for at in self._outputs] + [Wanted(d.at) for d in self.checks]
        return prologue, self._source(self._tensors, outside).function(self._body, self.used, wanted)

    def bind(self, *, check: bool = True) -> bool:
        """Compute what depends on parameters alone; return False if something the recording relied on has changed.

        Without `check`, attributes, hooks and the like are not checked again: this rollout has done that before.
        """
        if check and (self._settings != _settings() or not self._fingerprint.holds()):
            return False
        if check and _layouts(self._outside.values()) != self._layouts:
            return False
        with torch.no_grad():
            values = self._prepare()()
            guarded = values[len(self._fixed) :]
            if guarded and any(d.read(v) != d.value for d, v in zip(self._guards, guarded)):
                return False
            self._fixed_values = values[: len(self._fixed)]
            self.run = self._step(*self._fixed_values)
        return True

    def bound_with(self, *, but: Tensor) -> list[Any]:
        """Return what `run` was bound with: the outside tensors' addresses, and all values read but those of `but`."""
        read = {at for call in self._prologue for at in call.reads}
        values = [_bytes(t).numpy().tobytes() for at, t in self._outside.items() if at in read and t is not but]
        return [*(t.data_ptr() for t in self._outside.values()), *values]

    def halves(self, now: Sequence[int]) -> Halves | None:
        """Return the step with only the outputs `now` made at once, ready for a rollout; None if that gains nothing."""
        key = tuple(now)
        if key not in self._halves:
            if self._draws and is_shared():
                return None  # beside the learner, halves of a step that draws cannot be compared with the whole step
            self._halves[key] = self._split(key)
        found = self._halves[key]
        if found is not None:
            found.bind(*self._fixed_values)
        return found

    def _split(self, now: tuple[int, ...]) -> Halves | None:
        wanted = {self._outputs[i] for i in now}
        while True:
            first = _needed(self._body, wanted)
            made = {id(call) for call in first}
            later = [call for call in self._body if id(call) not in made]
            # Calls keep their order; one that must be made at once needs all it reads at once, too.
            bound = [call for call in later if not self._works_on_columns(call)]
            if not bound:
                break
            wanted = wanted.union(*(call.writes for call in bound))
        rest = [i for i in range(len(self._outputs)) if i not in now]
        asked = [self._outputs[i] for i in rest] + [d.at for d in self.checks]
        after = _written(later)
        read = {at for call in later for at in call.reads} | {*asked}
        kept = sorted(at for at in read if at in self._moving and at not in after)
        said = all(type(d.value) is bool for d in self.checks)
        if not rest or not said or sum(self._tensors[at].nbytes for at in kept) > _MAX_KEPT:
            return None
        short = Shortened(first, self._tensors, {*kept, *wanted})
        checks = [*self.checks, *short.checks]
        asked += [d.at for d in short.checks]
        kept = sorted({*kept, *(at for call in short.checked for at in call.reads)} - _written(short.checked))
        at_once = [*(Wanted(self._outputs[i], as_array=True) for i in now), *map(Wanted, kept)]
        step = self._source(short.tensors, self._outside).function(short.calls, self.used, at_once)
        later += short.checked
        source = StepSource(short.tensors, self._outside, self._fixed, numpy=False, arrays=self._arrays)
        columns = source.function(later, kept, [*map(Wanted, asked)])
        moves = [at in self._moving or at >= len(self._tensors) for at in asked]
        halves = Halves(step, columns, now, rest, checks, moves)
        halves.bind(*self._fixed_values)
        return halves if halves.agrees(self.run, self._probes, self.used) else None

    def _works_on_columns(self, call: Call) -> bool:
        if call.random or call.changes or any(at in self._changing for at in (*call.reads, *call.writes)):
            return False
        name = name_of(call.func)
        numbers = [a for a in (*call.args[1:], *call.kwargs.values()) if a is not None]
        if name == "argmax":
            return bool(numbers)  # without `dim` it would be the argmax of a whole column
        if name in ("pow", "__pow__"):
            return numbers == [2]  # with other exponents, vectors and single numbers differ in the last bit
        if name in ("clamp", "clamp_min", "clamp_max"):  # with a bound of zero, 0.0 and -0.0 can be swapped
            return all(isinstance(a, (int, float)) and a != 0 for a in numbers)
        return name in _ROW_BY_ROW

    def agrees(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether step and replay give the same bits for `inputs`, from the same state of torch's generator.

        The generator is left as the step leaves it. Outside tensors that a step may change are not touched: step and
        replay each work on copies of them, which must be the same afterwards.
        """
        if self._draws and is_shared():
            return True  # each would draw other numbers: they cannot be compared
        with torch.no_grad():
            state = position()
            if self._writes:
                wanted, after, got = self._on_copies(inputs, state)
            else:
                version_of = torch_internals.version_of
                versions = list(map(version_of, self._outside.values()))
                wanted = [*self._call(*[x.clone() for x in inputs])]
                after = position()
                restore_generator(state)
                got = self._replayed(self.run, inputs)
                if versions != list(map(version_of, self._outside.values())):
                    return True  # another thread trains meanwhile: they cannot be compared
            same = same_position(after, position()) and all(map(_same_bits, wanted, got))
            restore_generator(after)
        return same

    def _replayed(self, run: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
        given = [inputs[i] for i in self.used]
        if not self._arrays:
            return [*run(*given)[: self.outputs]]
        return [torch.from_numpy(array) for array in run(*[x.numpy().copy() for x in given])[: self.outputs]]

    def _on_copies(
        self, inputs: Sequence[Tensor], state: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """Run step and replay on copies of the outside tensors.

        Returns the outputs and changed tensors of the step, the generator's position after it, and those of the replay.
        """
        step_copies, replay_copies = Shadows(), Shadows()
        stands = {at: replay_copies.of(tensor) for at, tensor in self._outside.items()}
        made = record(self._call, inputs, step_copies)
        wanted = [made.recorder.tensors[at] for at in made.outputs]
        wanted = [step_copies.of(t) if any(t is one for one in self._outside.values()) else t for t in wanted]
        after = position()
        restore_generator(state)
        prepare, step = self._compiled(stands)
        values = self._replayed(step(*prepare()()[: len(self._fixed)]), inputs)
        return [*wanted, *map(step_copies.of, self._outside.values())], after, [*values, *stands.values()]


class Halves:
    """A step in two halves: `run` makes the outputs needed `now`, `finish` the `rest` for a whole rollout.

    `run` returns the outputs `now` as arrays, then the values of this step that `finish` will need.
    """

    run: Callable[..., tuple[Any, ...]]

    def __init__(
        self,
        step: Callable[..., Callable[..., Any]],
        columns: Callable[..., Callable[..., Any]],
        now: tuple[int, ...],
        rest: Sequence[int],
        checks: Sequence[Decision],
        moves: Sequence[bool],
    ) -> None:
        self._step, self._columns, self.now, self.rest, self.checks = step, columns, now, rest, checks
        self.moves = moves  # of each deferred output and check: whether it changes from step to step

    def bind(self, *steady: Any) -> None:
        """Begin a rollout, given the values that depend on parameters alone."""
        self.run, self._later = self._step(*steady), self._columns(*steady)

    def finish(self, rows: Sequence[tuple[Any, ...]], *, check: bool = False) -> tuple[list[Tensor], bool]:
        """Return the rest of the outputs and the checks, of all steps; what is the same at every step only once.

        `rows` are what `run` returned. With `check`, each row is computed alone as well; the second value returned says
        whether that gave the same bits, and if not, the first value holds those computed alone.
        """
        with torch.no_grad():
            stacked = [torch.stack(column) for column in list(zip(*rows))[len(self.now) :]]
            if not stacked:
                return [*self._later()], True
            found = self._batched(stacked)
            if not check:
                return found, True
            alone = list(zip(*[self._later(*row[len(self.now) :]) for row in rows]))
            exact = [torch.stack(column) if moves else column[0] for column, moves in zip(alone, self.moves)]
            same = all(map(_same_bits, found, exact))
            return (found if same else exact), same

    def _batched(self, stacked: Sequence[Tensor]) -> list[Tensor]:
        moves = self.moves
        varied: Iterator[Any] = iter(())
        if any(moves):
            varied = iter(torch.func.vmap(lambda *r: tuple(v for v, m in zip(self._later(*r), moves) if m))(*stacked))
        same: Iterator[Any] = iter(())
        if not all(moves):
            one = self._later(*[column[0] for column in stacked])
            same = iter([v for v, m in zip(one, moves) if not m])
        return [next(varied) if m else next(same) for m in moves]

    def agrees(self, whole: Callable[..., Any], probes: Sequence[Sequence[Tensor]], used: Sequence[int]) -> bool:
        """Return whether both halves make what the `whole` step makes, over 67 rows: no vector width divides that."""
        kept = position()
        try:
            with torch.no_grad():
                return self._agrees(whole, probes, used)
        except Exception:  # such as for a value that is no array, or a function that vmap cannot map: defer nothing
            return False
        finally:
            restore_generator(kept)

    def _agrees(self, whole: Callable[..., Any], probes: Sequence[Sequence[Tensor]], used: Sequence[int]) -> bool:
        rows, wanted = [], []
        chance = probe_generator()
        for turn in range(67):
            probe = [_noisy(probes[turn % len(probes)][i], chance) for i in used]
            state = position()
            wanted.append(whole(*probe))
            after = position()
            restore_generator(state)
            rows.append(self.run(*probe))
            if not same_position(after, position()):
                return False
        for i, at in enumerate(self.now):
            if not all(_same_bits(w[at], torch.from_numpy(r[i])) for w, r in zip(wanted, rows)):
                return False
        columns, same = self.finish(rows, check=True)
        for column, at, moves in zip(columns, self.rest, self.moves):
            for t, row in enumerate(wanted):
                if not _same_bits(row[at], column[t] if moves else column):
                    return False
        said = zip(self.checks, columns[len(self.rest) :])
        return same and all(bool((column == check.value).all()) for check, column in said)


def _noisy(value: Tensor, chance: torch.Generator) -> Tensor:
    if not value.dtype.is_floating_point:
        return value.clone()
    return value + torch.randn(value.shape, dtype=value.dtype, generator=chance)


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and strides, without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _layouts(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]


def _settings() -> tuple[Any, ...]:
    """Return this thread's settings that affect how torch computes, beside the arguments of its functions."""
    return torch.get_default_dtype(), torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _without_copies(
    calls: Sequence[Call], memory: dict[int, int], changed: set[int], recording: RecordedStep
) -> tuple[list[Call], dict[int, int]]:
    """Return the calls without copies that always equal the original, and without views that are the tensor itself.

    The second value has the register that replaces each removed result. Registers in the memory of a removed copy lie
    in the original's from now on, which is written to `memory`.
    """
    recorder, end = recording.recorder, len(calls)
    last = {memory.get(at): i for i, call in enumerate(calls) for at in (*call.reads, *call.writes)}
    last.update({memory.get(at): end for at in (*recording.outputs, *(d.at for d in recorder.decisions))})
    names: dict[int, int] = {}
    kept = []
    for i, call in enumerate(calls):
        if names:
            call = _renamed(call, names)
        copies = call.func is Tensor.clone and len(call.args) == 1 and not call.kwargs
        if not copies and not _is_itself(call, memory, recorder.tensors):
            kept.append(call)
            continue
        given, made = memory.get(call.reads[0]), memory.get(call.writes[0])
        until = last[made]  # the last call that reads the copy
        later = {memory.get(at) for after in calls[i + 1 : until + 1] for at in after.changes}
        if made in changed or (given in changed and (until == end or given in later)):
            kept.append(call)
            continue
        names[call.writes[0]] = call.reads[0]
        last[given] = max(last[given], until)
        if made is not None and given is not None:
            memory.update({at: given for at, place in memory.items() if place == made})
    return kept, names


def _is_itself(call: Call, memory: Mapping[int, int], tensors: Sequence[Tensor]) -> bool:
    """Return whether a call returns the tensor it was given, as another object."""
    if not isinstance(call.results, Register) or len(call.reads) != 1 or call.random or call.foreign or call.changes:
        return False
    (one,), (other,) = call.reads, call.writes
    given, made = tensors[one], tensors[other]
    same = given.dtype is made.dtype and given.shape == made.shape and given.stride() == made.stride()
    placed = given.storage_offset() == made.storage_offset() and memory.get(one, one) == memory.get(other)
    return same and placed and given.is_conj() == made.is_conj() and given.is_neg() == made.is_neg()


def _without_repeats(calls: Sequence[Call], changing: set[int], outputs: set[int]) -> tuple[list[Call], dict[int, int]]:
    """Return the calls without repetitions on the same tensors, and the register that replaces each removed result.

    Calls on memory that changes are never repetitions, and results that the step returns keep memory of their own.
    """
    names: dict[int, int] = {}
    seen: dict[Any, int] = {}
    kept = []
    for call in calls:
        if names:
            call = _renamed(call, names)
        pure = not (call.random or call.foreign or call.changes) and isinstance(call.results, Register)
        if pure and changing.isdisjoint((*call.reads, *call.writes)) and outputs.isdisjoint(call.writes):
            try:
                first = seen.setdefault((call.func, _comparable((call.args, call.kwargs))), call.writes[0])
            except TypeError:  # an argument that cannot be hashed
                first = call.writes[0]
            if first != call.writes[0]:
                names[call.writes[0]] = first
                continue
        kept.append(call)
    return kept, names


def _comparable(value: Any) -> Any:
    """Return a key to compare arguments by: to torch 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    if type(value) in (tuple, list):
        return type(value), tuple(map(_comparable, value))
    if type(value) is dict:
        return dict, tuple((key, _comparable(one)) for key, one in value.items())
    if isinstance(value, slice):
        return slice, _comparable((value.start, value.stop, value.step))
    return type(value), repr(value) if type(value) is float else value


def _renamed(call: Call, names: Mapping[int, int]) -> Call:
    """Return a call that reads the registers that `names` has in place of others."""
    if not names.keys() & {*call.reads}:
        return call

    def new(value: Any) -> Any:
        return Register(names.get(value.at, value.at)) if isinstance(value, Register) else value

    reads = tuple(names.get(at, at) for at in call.reads)
    return call._replace(args=mapped(call.args, new), kwargs=mapped(call.kwargs, new), reads=reads)


def _standard_form(call: Call, tensors: Sequence[Tensor]) -> Call:
    """Return the same call in a standard form, without tensors of which only the shape matters, as it never changes."""
    named = ("condition", "input", "other")
    if call.func is F.softmax and len(call.args) == 1 and call.kwargs.get("dtype") is None:
        return call._replace(func=torch.softmax, kwargs={"dim": call.kwargs["dim"]})
    if call.func is F.relu and len(call.args) == 1 and not call.kwargs.get("inplace"):
        return call._replace(func=torch.relu, kwargs={})
    if name_of(call.func) == "where" and not call.args and tuple(call.kwargs) == named:
        return call._replace(args=tuple(call.kwargs[name] for name in named), kwargs={})
    if name_of(call.func) == "expand_as" and len(call.args) == 2 and not call.kwargs:
        one, other = call.args
        if isinstance(one, Register) and isinstance(other, Register):
            shape = tuple(tensors[other.at].shape)
            return call._replace(func=Tensor.expand, args=(one, shape), reads=(one.at,))
    return call


def _written(calls: Sequence[Call]) -> set[int]:
    return {at for call in calls for at in call.writes if at not in call.reads}


def _needed(calls: Sequence[Call], wanted: set[int]) -> list[Call]:
    """Return those of `calls` that affect the registers `wanted`, change a tensor in place, or move the generator."""
    kept = []
    for call in reversed(calls):
        if call.random or call.changes or wanted.intersection(call.writes):
            kept.append(call)
            wanted = wanted.union(call.reads)
    return kept[::-1]
