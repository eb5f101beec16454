"""Policies: whatever the user has, as one thing that reads a row and writes a row.

    as_policy(x) ──►  RandomActions     None, or RandomPolicy: drawn for a whole rollout at once
                      FlatPolicy        TensorDictModules as a flat program on plain tensors (policies/flat_policy.py)
                      CallPolicy        a module or function of observation tensors (policies/call_policy.py)
                      TensorDictPolicy  anything that takes and returns a TensorDict: correct for all, fast for none

`as_policy` (policies/as_policy.py) chooses among them. `Worker` then tries `captured` (policies/captured_policy.py): a
CapturedPolicy takes the place of one that calls a module, and replays the torch calls that the module makes. Around the
one that was chosen there may be another, a `PolicyWrapper`:

    Bucketed        of lanes that come as they are ready, so few sizes that each can be recorded (policies/buckets.py)
    PerLanePolicy   a TensorDictPolicy of such lanes, each with a memory of its own (policies/per_lane_policy.py)
    LaneByLane      a policy per lane, with random numbers of its own (policies/lane_by_lane.py)
    RootPolicy      a TensorDictPolicy on the TensorDict that a TorchRL env carries (envs/torchrl/root_policy.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from reap.core.columns.assemble_ragged import frame
from reap.core.columns.object_columns import ObjectColumn
from reap.core.policies.action_masks import legal_choice
from reap.core.policies.outputs import as_tensordict, is_named
from reap.core.resume import CannotResume
from reap.core.slot import FLAGS, Row, Slot
from reap.errors import SpecMismatch, WrongState
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


def rand_step_as_policy(policy: Any) -> Any:
    """Return `policy`; for the `rand_step` of an env a RandomPolicy: the same actions, but only the collector steps."""
    owner = getattr(policy, "__self__", None)
    if getattr(policy, "__name__", None) == "rand_step" and hasattr(owner, "rand_action"):
        return RandomPolicy()
    return policy


class Policy:
    """Reads `row.inputs`, writes `row.outputs`. `inputs` and `outputs` say which columns those are."""

    inputs: Sequence[Key] = ()
    outputs: Mapping[Key, Leaf]
    remembers = False  # whether `forget` has anything to do
    inner: Mapping[Key, tuple[int, ...]] = {}  # further batch dimensions of nested outputs, by key
    why: str | None = None  # why it could not be captured; None: it was not tried, or it is
    looked_at: Collection[Key] | None = None  # the outputs that somebody looks at before a rollout ends; None: all

    @property
    def written(self) -> Sequence[Key]:
        """The columns `act` writes; the others are written by `end`."""
        return list(self.outputs)

    def explain(self) -> str:
        """Say how it is run, in a sentence."""
        return "it is called at each step" + (f", not captured: {self.why}" if self.why else "")

    def begin(self, slot: Slot) -> None:
        """A rollout starts: look again at whatever may have changed since the last one."""

    def act(self, row: Row) -> None:
        """Decide about one step."""
        raise NotImplementedError

    def end(self, slot: Slot, steps: int) -> None:
        """A rollout of so many steps is over: write what follows from its columns."""

    def forget(self, lanes: Sequence[int]) -> None:
        """Episodes of these lanes are over: nothing of them may be remembered."""

    def open_state(self) -> list[tuple[Key, Tensor]]:
        """What it remembers of open episodes, beside its parameters and what is in the columns."""
        return []

    def load_open_state(self, state: Sequence[tuple[Key, Tensor]]) -> None:
        """Remember what `open_state` returned."""


class PolicyWrapper(Policy):
    """A policy that shows another one rows in its own way, and is run as that one is."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.inputs, self.outputs, self.inner = policy.inputs, policy.outputs, policy.inner

    @property
    def written(self) -> Sequence[Key]:
        return self.policy.written

    def explain(self) -> str:
        return self.policy.explain()

    def begin(self, slot: Slot) -> None:
        self.policy.begin(slot)

    def end(self, slot: Slot, steps: int) -> None:
        self.policy.end(slot, steps)

    def forget(self, lanes: Sequence[int]) -> None:
        self.policy.forget(lanes)

    def open_state(self) -> list[tuple[Key, Tensor]]:
        return self.policy.open_state()

    def load_open_state(self, state: Sequence[tuple[Key, Tensor]]) -> None:
        self.policy.load_open_state(state)


class RandomActions(Policy):
    """Draws the actions of a whole rollout at once, when it begins; every other column it owns is zero.

    `draw` is for envs whose actions cannot be drawn ahead: it writes those of one step. An action with a mask, as
    `masks` has it by key, is drawn step by step among those that are legal then.
    """

    def __init__(
        self,
        action: Mapping[Key, Leaf],
        outputs: Mapping[Key, Leaf] | None = None,
        carry: Mapping[Key, Tensor] | None = None,
        draw: Callable[[Row], None] | None = None,
        masks: Mapping[Key, Key] | None = None,
    ) -> None:
        self._action, self._draw = action, draw
        self._masks = {} if masks is None or draw is not None else masks
        self._slot: Slot | None = None  # in which masked actions are drawn, and at which step
        self._step = 0
        self.outputs = dict(action if outputs is None else outputs)
        self._first = {("next", *key): first for key, first in (carry or {}).items()}

    def explain(self) -> str:
        if self._masks:
            return "random actions, drawn at each step among those that action_mask allows"
        return f"random actions, drawn {'for a whole rollout' if self._draw is None else 'by the env'}"

    def begin(self, slot: Slot) -> None:
        size = (slot.layout.steps, slot.layout.lanes)
        for key, leaf in self.outputs.items():
            if key not in self._action:
                slot.arrays[key][...] = self._first.get(key, 0)  # nobody acts, so a memory stays as it began
            elif self._draw is None and key not in self._masks:
                slot.put(key, _as_written(self._action[key], leaf).rand(size))
        self._slot, self._step = (slot if self._masks else None), 0

    def act(self, row: Row) -> None:
        if self._draw is not None:
            self._draw(row)
        elif self._slot is not None:
            arrays = self._slot.arrays
            for key, mask in self._masks.items():
                index = legal_choice(torch.as_tensor(arrays[mask][self._step]))
                leaf = _as_written(self._action[key], self.outputs[key])
                chosen = torch.nn.functional.one_hot(index, self._action[key].n) if leaf.one_hot else index
                column = arrays[key][self._step]
                chosen = chosen.reshape(column.shape)
                column[...] = chosen if isinstance(column, Tensor) else chosen.numpy()
            self._step += 1


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

    def probe(self, inputs: tuple[Tensor, ...], size: tuple[int, ...]) -> None:
        """Learn `outputs` from one call; `size` are the dimensions of the lanes."""
        raise NotImplementedError

    def once(self, inputs: tuple[Any, ...]) -> Sequence[Any]:
        """The values of `written` for these inputs, as at first; nothing is remembered."""
        return self.forward(inputs)

    def private(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs foreign code may keep or change: rows are recycled, and what was seen is data."""
        if self.device is not None:
            return tuple([x.to(self.device, non_blocking=True) for x in inputs])  # whoever reads the answer waits
        return tuple([x.clone() for x in inputs])

    def act(self, row: Row) -> None:
        self.write(self.forward(row.inputs), row)

    def write(self, values: Sequence[Any], row: Row) -> None:
        """Write what was decided into the columns."""
        for value, read, column in zip(values, self._readers, row.outputs):
            array = read(value)
            if array.shape != column.shape or array.dtype != column.dtype:
                raise self._changed(array, column, row)
            column[...] = array

    def learn_outputs(self, keys: Sequence[Key], values: Sequence[Any], size: tuple[int, ...]) -> None:
        """Fix the columns from one call's values, which all have the dimensions `size` of the lanes first."""
        readers = []
        for key, value in zip(keys, values):
            if not isinstance(value, (Tensor, np.ndarray, np.generic, int, float, bool)):
                raise SpecMismatch(f"policy writes {show(key)} as {type(value).__name__}; tensors are expected")
            shape = tuple(value.shape) if hasattr(value, "shape") else ()
            if shape[: len(size)] != size:
                lanes = ", ".join(map(str, size))
                raise SpecMismatch(f"policy writes {show(key)} of shape {list(shape)}; {lanes} lanes need [{lanes}, …]")
            dtype = value.dtype if isinstance(value, Tensor) else torch_dtype(np.asarray(value).dtype)
            self.outputs[key] = Leaf(shape[len(size) :], dtype)
            readers.append(_reader(value))
        self._readers = tuple(readers)

    def keep_on_device(self) -> None:
        """Rows are tensors where the outputs are: they are written as they come."""
        self._readers = (Tensor.detach,) * len(self._readers)  # type: ignore[assignment]

    def _changed(self, array: np.ndarray[Any, Any], column: np.ndarray[Any, Any], row: Row) -> SpecMismatch:
        key = next(k for k, c in zip(self.written, row.outputs) if c is column)
        return SpecMismatch(
            f"the policy's output {show(key)} changed: {column.dtype}{list(column.shape)} before, "
            f"{array.dtype}{list(array.shape)} now"
        )


class SubstitutePolicy(TensorPolicy):
    """A policy that computes in the place of another, `plain`, which remembers for both."""

    _plain: TensorPolicy

    def __init__(self, plain: TensorPolicy, inputs: Sequence[Key], device: torch.device | None) -> None:
        super().__init__(inputs, device)
        self._plain = plain

    def forget(self, lanes: Sequence[int]) -> None:
        self._plain.forget(lanes)

    def open_state(self) -> list[tuple[Key, Tensor]]:
        return self._plain.open_state()

    def load_open_state(self, state: Sequence[tuple[Key, Tensor]]) -> None:
        self._plain.load_open_state(state)


class TensorDictPolicy(TensorPolicy):
    """Anything that takes a TensorDict and writes into it, or returns another. Correct for all, fast for none.

    What it wrote at one step it finds again at the next, as noise processes and counters expect. A lane whose episode
    ended finds zeros; where all have ended, or begin anew, it finds nothing, as at first.
    """

    remembers = True

    def __init__(
        self,
        call: Callable[..., Any],
        inputs: Sequence[Key],
        size: tuple[int, ...],
        device: torch.device | None,
        loose: Mapping[Key, Leaf],
        inner: Mapping[Key, tuple[int, ...]] | None = None,
        shown: torch.device | None = None,
    ) -> None:
        super().__init__(inputs, device)
        self.shown = device if shown is None else shown  # as its TensorDict's device
        self.call, self._size, self._loose = call, size, loose
        # branches with batch dimensions of their own, those inside others last
        inner = {key: own for key, own in (inner or {}).items() if any(k[: len(key)] == key for k in inputs)}
        self._inner = sorted(inner.items(), key=lambda item: len(item[0]))
        self._keys: list[Key] = []
        self._kept: dict[Key, Any] = {}

    def _tensordict(self, inputs: tuple[Any, ...], size: tuple[int, ...]) -> TensorDictBase:
        if self._loose:
            lanes = size[0] if size else None
            return frame(dict(zip(self.inputs, inputs)), self._loose, lanes, self.shown)
        td = TensorDict({}, batch_size=size, device=self.shown)
        for key, value in zip(self.inputs, inputs):
            td.set(key, value)
        for key, own in self._inner:
            td.get(key).batch_size = [*size, *own]
        return td

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        values, self._kept = self.answer(inputs, self._kept, self._size)
        return values

    def once(self, inputs: tuple[Any, ...]) -> Sequence[Any]:
        return self.answer(inputs, {}, self._size)[0]

    def keep_nothing(self) -> None:
        """Act at every step as at the first: for a policy that never reads what it wrote."""
        self.remembers = False
        self.forward = self.once  # type: ignore[method-assign]

    def answer(
        self, inputs: tuple[Tensor, ...], kept: Mapping[Key, Any], size: tuple[int, ...]
    ) -> tuple[Sequence[Any], dict[Key, Any]]:
        """The values of `outputs` for rows of this size, whose lanes have `kept` so much; and what they keep now."""
        td = self._tensordict(self.private(inputs), size)
        for key, value in kept.items():
            td.set(key, value)
        out = self.call(td)
        out = td if out is None else out
        given = {*self.inputs, *(("next", *key) for key in self.inputs)}
        return self.taken(out), {key: value for key, value in self._entries(out) if key not in given}

    def taken(self, out: TensorDictBase) -> Sequence[Any]:
        """The values of `outputs` from what the policy made."""
        values = [out.get(key, None) for key in self._keys]
        for key, value in zip(self._keys, values):
            if value is None:
                raise SpecMismatch(f"the policy did not write {show(key)} this time; before it did")
        return values

    def _entries(self, td: TensorDictBase) -> Iterator[tuple[Key, Any]]:
        if not self._loose:
            return ((as_key(key), value) for key, value in td.items(True, True))
        keys = (as_key(key) for key in td.keys(True, True))
        return ((key, td.get(key)) for key in keys if key not in self._loose)

    def forget(self, lanes: Sequence[int]) -> None:
        if len(lanes) >= math.prod(self._size):
            self._kept = {}
        for key, value in self._kept.items():
            if isinstance(value, Tensor):
                self._kept[key] = value = value.clone(memory_format=torch.contiguous_format)
                value.reshape(-1, *value.shape[len(self._size) :])[list(lanes)] = 0

    def open_state(self) -> list[tuple[Key, Tensor]]:
        strange = [key for key, value in self._kept.items() if not isinstance(value, Tensor)]
        if strange:
            raise CannotResume(f"the policy keeps {show_keys(strange)} from step to step, which is no tensor")
        return [(key, value.detach().cpu().clone()) for key, value in self._kept.items()]

    def load_open_state(self, state: Sequence[tuple[Key, Tensor]]) -> None:
        self._kept = {tuple(key): value if self.device is None else value.to(self.device) for key, value in state}

    def adopt(self, inputs: Sequence[Key], outputs: Mapping[Key, Leaf]) -> None:
        """Stand in for a flat policy whose modules changed."""
        self.inputs, self._keys = tuple(inputs), list(outputs)

    def probe(self, inputs: tuple[Tensor, ...], size: tuple[int, ...]) -> None:
        td = self._tensordict(self.private(inputs), self._size)
        before = dict(self._entries(td))
        copies = {k: v.clone() for k, v in before.items()}
        declared = {as_key(k) for k in getattr(self.call, "out_keys", ())}
        out = self.call(td)
        out = td if out is None else out
        if is_named(out) and not isinstance(out, TensorDictBase):
            self.call = _returning_tensordict(self.call)
            out = as_tensordict(out, td.batch_size)
        if not isinstance(out, TensorDictBase):
            raise SpecMismatch(f"policy takes a TensorDict but returned {type(out).__name__}")
        after = dict(self._entries(out))
        # In a copy, flags and all, every object is another: there only other values tell what was written.
        copied = out is not td or any(after.get((f,)) is not before.get((f,)) for f in FLAGS)
        written = {
            k: v
            for k, v in after.items()
            if k in declared or k not in before or (v is not before[k] and not (copied and _same(v, copies[k])))
        }
        self._keys = [k for k in written if not private(k)]
        for at in {k[:n] for k in self._keys for n in range(1, len(k))}:
            own = tuple(out.get(at).batch_size)
            if len(own) > len(size) and own[: len(size)] == size:
                self.inner = {**self.inner, at: own[len(size) :]}
        self.learn_outputs(self._keys, [after[k] for k in self._keys], size)


def visible_columns(spec: EnvSpec, current: Sequence[np.ndarray[Any, Any]]) -> dict[Key, Any]:
    """One value of every column a policy may read, as it will see them: observations, and the flags of a root."""
    columns: dict[Key, Any] = {}
    for (key, leaf), array in zip(spec.observation.items(), current):
        if leaf.loose:
            columns[key] = ObjectColumn(leaf, array, spec.batched)
        else:
            columns[key] = torch.from_numpy(array).reshape((*spec.size, *leaf.shape))
    shown = [(flag,) for flag in FLAGS if (flag,) not in spec.look.hidden]
    return columns | {flag: torch.zeros((*spec.size, 1), dtype=torch.bool) for flag in shown}


def _returning_tensordict(call: Callable[..., Any]) -> Callable[[TensorDictBase], TensorDict]:
    """`call`, which takes a TensorDict and returns its outputs by name in another form."""
    return lambda td: as_tensordict(call(td), td.batch_size)


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
