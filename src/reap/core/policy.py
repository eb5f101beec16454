"""Policies: whatever the user has, as one thing that reads a row and writes a row.

    as_policy(x) ──►  FlatPolicy      TensorDictModules run as a flat program on plain tensors
                      CallPolicy      a module or function of observation tensors
                      TensorDictPolicy  anything that takes and returns a TensorDict
                      RandomActions   None, or RandomPolicy

What can be decided once is decided here, by one probing call on a real observation that leaves no trace: random
generators, buffers and attributes are put back. The probe fixes the columns the policy writes; after it, a call whose
output looks different is an error that names the key.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from torch import Tensor, nn

from reap.core.exploration import exploring
from reap.core.flat import Program, flatten
from reap.core.slot import FLAGS, Row, Slot
from reap.errors import ReapError, SpecMismatch, UsageError, WorkerRaised, WrongArgument, WrongState
from reap.spec import EnvSpec, Key, Leaf, as_key, private, show, show_keys, torch_dtype

Reader = Callable[[Any], "np.ndarray[Any, Any]"]


class RandomPolicy:
    """Random actions from the env's action space, the same as `policy=None`.

    >>> collector = Collector("CartPole-v1", RandomPolicy(), frames_per_batch=100)
    """

    def __init__(self, action_spec: Any = None, action_key: Any = "action") -> None:
        self.action_spec, self.action_key = action_spec, action_key

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write a random action into `tensordict`."""
        if self.action_spec is None:
            raise WrongState("RandomPolicy was given no action_spec and has not met an env yet")
        return tensordict.set(self.action_key, self.action_spec.rand(tensordict.batch_size))


class Policy:
    """Reads `row.inputs`, writes `row.outputs`. `inputs` and `outputs` say which columns those are."""

    inputs: Sequence[Key] = ()
    outputs: Mapping[Key, Leaf]
    remembers = False  # whether `forget` has anything to do

    @property
    def written(self) -> Sequence[Key]:
        """The columns `act` writes; the others are written by `end`."""
        return list(self.outputs)

    def begin(self, slot: Slot) -> None:
        """A rollout starts: look again at whatever may have changed since the last one."""

    def act(self, row: Row) -> None:
        """Decide about one step."""
        raise NotImplementedError

    def end(self, slot: Slot, steps: int) -> None:
        """A rollout of so many steps is over: write what follows from its columns."""

    def forget(self, lanes: Sequence[int]) -> None:
        """Episodes of these lanes are over: nothing of them may be remembered."""


class RandomActions(Policy):
    """Draws the actions of a whole rollout at once, when it begins; every other column it owns is zero."""

    def __init__(
        self,
        action: Mapping[Key, Leaf],
        outputs: Mapping[Key, Leaf] | None = None,
        carry: Mapping[Key, Tensor] | None = None,
    ) -> None:
        self._action = action
        self.outputs = dict(outputs or action)
        self._first = {("next", *key): first.numpy() for key, first in (carry or {}).items()}

    def begin(self, slot: Slot) -> None:
        size = (slot.layout.steps, slot.layout.lanes)
        for key, leaf in self.outputs.items():
            if key not in self._action:
                slot.arrays[key][...] = self._first.get(key, 0)  # nobody acts, so a memory stays as it began
            else:
                slot.arrays[key][...] = _as_written(self._action[key], leaf).rand(size).numpy()

    def act(self, row: Row) -> None:
        pass


def _as_written(space: Leaf, column: Leaf) -> Leaf:
    """Random values for an action column that a policy writes its own way (an index where the env says one-hot)."""
    if space.shape == column.shape:
        return Leaf(column.shape, column.dtype, space.space, space.one_hot)
    return Leaf(column.shape, column.dtype, space.space, not space.one_hot)


class TensorPolicy(Policy):
    """The common half of every policy that computes: call, check, write."""

    def __init__(self, inputs: Sequence[Key], device: torch.device | None) -> None:
        self.inputs = tuple(inputs)
        self.outputs: dict[Key, Leaf] = {}
        self.device = device
        self._readers: tuple[Reader, ...] = ()

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        """The values of `outputs`, in that order."""
        raise NotImplementedError

    def private(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs foreign code may keep or change: rows are recycled, and what was seen is data."""
        if self.device is not None:
            return tuple([x.to(self.device) for x in inputs])
        return tuple([x.clone() for x in inputs])

    def act(self, row: Row) -> None:
        for value, read, column in zip(self.forward(row.inputs), self._readers, row.outputs):
            array = read(value)
            if array.shape != column.shape or array.dtype != column.dtype:
                raise self._changed(array, column, row)
            column[...] = array

    def learn_outputs(self, keys: Sequence[Key], values: Sequence[Any], lanes: int | None) -> None:
        """Fix the columns from one call's values. `lanes` None: values carry no lane dimension."""
        readers = []
        for key, value in zip(keys, values):
            if not isinstance(value, (Tensor, np.ndarray, np.generic, int, float, bool)):
                raise SpecMismatch(f"policy writes {show(key)} as {type(value).__name__}; tensors are expected")
            shape = tuple(value.shape) if hasattr(value, "shape") else ()
            if lanes is not None and shape[:1] != (lanes,):
                raise SpecMismatch(f"policy writes {show(key)} of shape {list(shape)}; {lanes} lanes need [{lanes}, …]")
            dtype = value.dtype if isinstance(value, Tensor) else torch_dtype(np.asarray(value).dtype)
            self.outputs[key] = Leaf(shape if lanes is None else shape[1:], dtype)
            readers.append(_reader(value))
        self._readers = tuple(readers)

    def _changed(self, array: np.ndarray[Any, Any], column: np.ndarray[Any, Any], row: Row) -> SpecMismatch:
        key = next(k for k, c in zip(self.written, row.outputs) if c is column)
        return SpecMismatch(
            f"the policy's output {show(key)} changed: {column.dtype}{list(column.shape)} before, "
            f"{array.dtype}{list(array.shape)} now"
        )


class CallPolicy(TensorPolicy):
    """A module or function of plain tensors. The first output is the action; the rest are `output1`, `output2`, …"""

    def __init__(
        self, call: Any, inputs: Sequence[Key], outputs: Sequence[Key], carry: Sequence[Key], device: Any
    ) -> None:
        super().__init__(inputs, device)
        self._call, self._first, self._last = call, list(outputs), [("next", *key) for key in carry]
        self._many = False
        self._alone = len(inputs) == 1 and device is None  # the common case, without a detour
        self._named: list[Any] = []

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        if self._alone:
            out = self._call(inputs[0].clone())
        else:
            out = self._call(*self.private(inputs))
        if self._named:
            return [out[key] for key in self._named]
        if not self._many:
            return (out,)
        if self.outputs and len(out) != len(self.outputs):
            wanted = show_keys(self.outputs)
            raise SpecMismatch(f"the policy returned {len(out)} tensors now; before there were {wanted}")
        return out  # type: ignore[no-any-return]

    def probe(self, inputs: tuple[Tensor, ...], lanes: int | None) -> None:
        (out,) = self.forward(inputs)
        if out is None:
            raise UsageError("policy returned None; the action is expected")
        if isinstance(out, (Mapping, TensorDictBase)):
            # As a TensorDictModule around it would: the action is taken, the rest was not asked for.
            self._named = [k for k in out.keys() if as_key(k) in self._first]  # noqa: SIM118
            self.learn_outputs([as_key(k) for k in self._named], [out[k] for k in self._named], lanes)
            return
        self._many = isinstance(out, tuple)
        values = tuple(out) if self._many else (out,)
        extra = len(values) - len(self._first) - len(self._last)
        if extra < 0:
            wanted = show_keys([*self._first, *self._last])
            raise SpecMismatch(f"policy returned {len(values)} tensors; {wanted} are expected")
        keys = [*self._first, *(as_key(f"output{i}") for i in range(1, extra + 1)), *self._last]
        self.learn_outputs(keys, values, lanes)


class FlatPolicy(TensorPolicy):
    """TensorDictModules as a `Program`; turns into a TensorDictPolicy if a hook appears later."""

    def __init__(self, program: Program, fallback: TensorDictPolicy, device: torch.device | None) -> None:
        super().__init__(program.inputs, device)
        self._program, self._fallback = program, fallback
        self._run: Callable[..., Sequence[Any]] = program.run
        self._flat, self._compiled = True, False
        self._reader_of: dict[Key, Reader] = {}

    def begin(self, slot: Slot) -> None:
        before = self._flat
        self._flat = self._program.bind() and self._program.outputs == list(self.outputs)
        if before and not self._flat:
            self._fallback.adopt(self.inputs, self.outputs)
        keys = list(self.outputs)
        self._readers = tuple(self._reader_of[key] for key in (self._program.written if self._flat else keys))

    def act(self, row: Row) -> None:
        program = self._program
        if not self._flat or program.opaque or self._compiled or self.device is not None:
            return super().act(row)
        regs = [*row.inputs, *program.blank]
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
                good = valid(torch.from_numpy(slot.arrays[key][:steps]))
                if not bool(good.all()):
                    t, lane = (~good).nonzero()[0][:2].tolist()
                    raise SpecMismatch(f"the policy wrote {what} as {show(key)}").at(lane=lane, step=t)
        for key, deferred in self._program.deferred.items():
            if key in self.outputs:
                columns = [torch.from_numpy(slot.arrays[k][:steps]) for k in deferred.reads]
                slot.arrays[key][:steps] = deferred.compute(*columns).numpy()

    def compile(self, options: Mapping[str, Any]) -> None:
        """Run the program through torch.compile."""
        self._run = torch.compile(self._program.run, **options)
        self._compiled = True

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        if not self._flat:
            return self._fallback.forward(inputs)
        if self.device is not None or self._program.opaque:
            inputs = self.private(inputs)
        return self._run(*inputs)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return not self._flat

    def forget(self, lanes: Sequence[int]) -> None:
        self._fallback.forget(lanes)

    def probe(self, inputs: tuple[Tensor, ...], lanes: int | None) -> None:
        program = self._program
        values = dict(zip(program.written, self.forward(inputs)))
        known = {**dict(zip(program.inputs, inputs)), **values}
        for key, deferred in program.deferred.items():
            if not all(isinstance(known.get(k), Tensor) for k in deferred.reads):
                raise _NotFlat
            values[key] = deferred.compute(*[known[k] for k in deferred.reads])
        if not all(isinstance(value, Tensor) for value in values.values()):
            raise _NotFlat
        if any(values[key].dtype is torch.bfloat16 for key in program.deferred):
            raise _NotFlat  # columns of bfloat16 cannot be computed with in NumPy memory
        self.learn_outputs(program.outputs, [values[key] for key in program.outputs], lanes)
        self._reader_of = dict(zip(program.outputs, self._readers))
        self._readers = tuple(self._reader_of[key] for key in program.written)


class _NotFlat(Exception):
    """The program cannot stand for the modules; use them as they are."""


class TensorDictPolicy(TensorPolicy):
    """Anything that takes a TensorDict and writes into it, or returns another. Correct for all, fast for none.

    What it wrote at one step it finds again at the next, as noise processes and counters expect; lanes whose episode
    ended find zeros.
    """

    remembers = True

    def __init__(
        self, call: Callable[..., Any], inputs: Sequence[Key], lanes: int | None, device: torch.device | None
    ) -> None:
        super().__init__(inputs, device)
        self._call, self._lanes = call, lanes
        self._keys: list[Key] = []
        self._kept: dict[Key, Any] = {}

    def _tensordict(self, inputs: tuple[Tensor, ...]) -> TensorDict:
        size = [] if self._lanes is None else [self._lanes]
        td = TensorDict({}, batch_size=size, device=self.device)
        for key, value in zip(self.inputs, inputs):
            td.set(key, value)
        return td

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        td = self._tensordict(self.private(inputs))
        for key, value in self._kept.items():
            td.set(key, value)
        out = self._call(td)
        out = td if out is None else out
        given = {*self.inputs, *(("next", *key) for key in self.inputs)}
        named = ((as_key(key), value) for key, value in out.items(True, True))
        self._kept = {key: value for key, value in named if key not in given}
        values = [out.get(key, None) for key in self._keys]
        for key, value in zip(self._keys, values):
            if value is None:
                raise SpecMismatch(f"the policy did not write {show(key)} this time; before it did")
        return values

    def forget(self, lanes: Sequence[int]) -> None:
        for key, value in self._kept.items():
            if isinstance(value, Tensor):
                self._kept[key] = value = value.clone()
                value[... if self._lanes is None else list(lanes)] = 0

    def adopt(self, inputs: Sequence[Key], outputs: Mapping[Key, Leaf]) -> None:
        """Stand in for a flat policy whose modules changed."""
        self.inputs, self._keys = tuple(inputs), list(outputs)

    def probe(self, inputs: tuple[Tensor, ...], lanes: int | None) -> None:
        td = self._tensordict(inputs)
        before = {as_key(k): v for k, v in td.items(True, True)}
        copies = {k: v.clone() for k, v in before.items()}
        out = self._call(td)
        out = td if out is None else out
        if not isinstance(out, TensorDictBase):
            raise SpecMismatch(f"policy takes a TensorDict but returned {type(out).__name__}")
        after = {as_key(k): v for k, v in out.items(True, True)}
        declared = {as_key(k) for k in getattr(self._call, "out_keys", ())}
        written = {
            k: v
            for k, v in after.items()
            if k in declared or k not in before or (v is not before[k] and not _same(v, copies[k]))
        }
        self._keys = [k for k in written if not private(k)]
        self.learn_outputs(self._keys, [after[k] for k in self._keys], lanes)


def visible_columns(spec: EnvSpec, current: Sequence[np.ndarray[Any, Any]]) -> dict[Key, Tensor]:
    """One value of every column a policy may read, as it will see them: observations, and the flags of a root."""
    tensors = zip(spec.observation, map(torch.from_numpy, current))
    columns = {key: tensor if spec.batched else tensor[0] for key, tensor in tensors}
    for flag in FLAGS:
        columns[(flag,)] = torch.zeros((spec.lanes, 1) if spec.batched else (1,), dtype=torch.bool)
    return columns


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def _reader(value: Any) -> Reader:
    """How to get a NumPy array from this kind of value, decided once."""
    if not isinstance(value, Tensor):
        return np.asarray
    if value.dtype is torch.bfloat16:
        return lambda x: x.detach().cpu().contiguous().view(torch.int16).numpy()
    if value.device.type != "cpu":
        return lambda x: x.detach().cpu().numpy()
    if value.requires_grad or value.is_conj() or value.is_neg():
        return lambda x: x.detach().resolve_conj().resolve_neg().numpy()
    return Tensor.numpy


@contextlib.contextmanager
def untouched(policy: Any) -> Iterator[None]:
    """Put random generators, buffers and attributes back as they were."""
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else [policy]
    objects = [m for m in modules if hasattr(m, "__dict__") and not inspect.isroutine(m) and not inspect.isclass(m)]
    attributes = [(m, type(m), dict(vars(m))) for m in objects]
    buffers = [(b, b.clone()) for b in policy.buffers()] if isinstance(policy, nn.Module) else []
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    own = [(g, g.get_state()) for _, _, before in attributes for g in before.values() if isinstance(g, torch.Generator)]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for owner, kind, before in attributes:
            if type(owner) is not kind:
                continue  # a lazy module has found its shape: that is not undone
            now = vars(owner)
            made = {n for group in ("_modules", "_parameters", "_buffers") for n in now.get(group, ())}
            before = {n: v for n, v in before.items() if n not in made}  # layers made on the first call stay
            for name in [n for n in now if n not in before]:
                del now[name]
            now.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for generator, state in own:
            generator.set_state(state)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


_DECLARE = "a recurrent policy declares its state as an attribute: carry = {'key': first value of one lane}"


def _missing(absent: Sequence[Key], columns: Mapping[Key, Tensor]) -> UsageError:
    return UsageError(f"policy reads {show_keys(absent)}; the env provides {show_keys(columns)} ({_DECLARE})")


def as_policy(
    policy: Any,
    *,
    columns: Mapping[Key, Tensor],
    observation: Sequence[Key],
    side: frozenset[Key] = frozenset(),
    carry: Sequence[Key] = (),
    action: Mapping[Key, Leaf],
    lanes: int | None,
    kind: InteractionType | None,
    device: torch.device | None = None,
    trust: bool = False,
    compile: Mapping[str, Any] | None = None,
) -> Policy:
    """`policy` as a Policy.

    `columns` holds one real value of every column a policy may read (`observation` and `carry` keys, flags), shaped as
    the policy will see them; `lanes` is their leading dimension, None when there is none.
    """
    if policy is None or isinstance(policy, RandomPolicy):
        if isinstance(policy, RandomPolicy) and len(action) == 1:
            ((key, own),) = action.items()
            if isinstance(policy.action_spec, Leaf):
                return RandomActions({key: policy.action_spec})
            policy.action_spec = policy.action_spec or own
        return RandomActions(action)
    if not callable(policy):
        raise WrongArgument(f"policy must be a module, a callable or None, got {type(policy).__name__}")

    def probed(candidate: Any) -> Any:
        absent = [k for k in candidate.inputs if k not in columns]
        if absent:
            raise _missing(absent, columns)
        first = [columns[k].clone() for k in candidate.inputs]
        try:
            with untouched(policy), torch.no_grad(), exploring(kind):
                candidate.probe(tuple(first), lanes)
        except (ReapError, _NotFlat):
            raise
        except Exception as cause:
            given = ", ".join(f"{show(k)} {list(v.shape)}" for k, v in zip(candidate.inputs, first))
            raise WorkerRaised(f"the policy raised {cause!r} when given a first observation: {given}") from cause
        lacking = [k for k in action if k not in candidate.outputs]
        if lacking:
            raise UsageError(
                f"policy writes {show_keys(candidate.outputs)} but not the env's action {show_keys(lacking)}; "
                f"add it to the policy's outputs"
            )
        lost = [k for k in carry if ("next", *k) not in candidate.outputs]
        if lost:
            raise UsageError(f"policy declares the carry {show_keys(lost)} but does not write it under 'next'")
        new = [k for k in candidate.outputs if k[0] == "next" and k[1:] not in carry]
        if new:
            raise UsageError(f"policy writes {show_keys(new)}, but nothing says how that begins; {_DECLARE}")
        for key, leaf in candidate.outputs.items():
            seen = columns.get(key[1:] if key[0] == "next" else key)
            if seen is not None and (tuple(seen.shape[0 if lanes is None else 1 :]), seen.dtype) != (
                leaf.shape,
                leaf.dtype,
            ):
                raise SpecMismatch(
                    f"policy writes {show(key)} as {leaf}; it reads it as {seen.dtype}{list(seen.shape)}"
                )
        return candidate

    whole = TensorDictPolicy(policy, tuple(columns), lanes, device)

    def as_it_is() -> Policy:
        if compile is not None:
            whole._call = torch.compile(policy, **compile)
        return probed(whole)  # type: ignore[no-any-return]

    if trust and not isinstance(policy, TensorDictModuleBase):
        return as_it_is()
    if isinstance(policy, TensorDictModuleBase):
        program = flatten(policy, kind)
        if program is not None:
            try:
                flat: FlatPolicy = probed(FlatPolicy(program, whole, device))
                if compile is not None:
                    flat.compile(compile)
                return flat
            except _NotFlat:
                pass
        written = [as_key(k) for k in policy.out_keys]
        absent = [
            k
            for k in map(as_key, policy.in_keys)
            if k not in columns and not any(w[: len(k)] == k for w in written)  # a branch an earlier module fills
        ]
        if absent:
            raise _missing(absent, columns)
        return as_it_is()
    names = _parameters(policy)
    if names is not None and takes_tensordict(policy):
        return as_it_is()
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        raise WrongState(
            f"{type(policy).__name__} has in_keys and out_keys but is no TensorDictModuleBase; "
            "subclass it, or pass trust_policy=True if it takes a TensorDict"
        )
    inputs = _match(names, observation, side, carry, policy)
    call = policy if compile is None else torch.compile(policy, **compile)
    return probed(CallPolicy(call, inputs, list(action), carry, device))  # type: ignore[no-any-return]


def _parameters(policy: Any) -> list[inspect.Parameter] | None:
    target = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def takes_tensordict(policy: Any) -> bool:
    """One parameter, named or annotated as a TensorDict."""
    names = [p for p in _parameters(policy) or () if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in names if p.default is p.empty] or names[:1]
    if len(required) != 1:
        return False
    (one,) = required
    note = one.annotation
    text = note if isinstance(note, str) else getattr(note, "__name__", "")
    return one.name in ("tensordict", "td") or text.split(".")[-1] in ("TensorDict", "TensorDictBase")


def _match(
    params: list[inspect.Parameter] | None,
    observation: Sequence[Key],
    side: frozenset[Key],
    carry: Sequence[Key],
    policy: Any,
) -> list[Key]:
    """Which keys a callable takes: by the names of its parameters; the only one left for the only one left."""
    keys = {k[0]: k for k in (*observation, *carry) if len(k) == 1}
    if params is None:
        positional, required, variadic = [], [], True
    else:
        positional = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = [p for p in positional if p.default is p.empty]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in params)
    named: dict[str, Key] = {p.name: keys[p.name] for p in positional if p.name in keys}
    strange = [p for p in required if p.name not in keys]
    others = [k for k in observation if k not in named.values() and k not in side]
    if len(strange) == 1 and len(others) == 1:
        named[strange[0].name] = others[0]
        strange = []
    if not strange and named:
        taken: list[Key] = []
        for p in positional:
            if p.name not in named:
                break  # arguments are passed by position: stop at the first that is not a key
            taken.append(named[p.name])
        return taken
    if not required and (variadic or len(positional) == 1) and len(others) == 1:
        return [others[0], *carry]
    said = "unknown" if params is None else [p.name for p in params]
    raise WrongArgument(
        f"cannot tell what policy {type(policy).__name__} reads: its parameters are {said}, the env's observations "
        f"{show_keys(observation)}. Name the parameters after the keys, or wrap it in a TensorDictModule"
    )
