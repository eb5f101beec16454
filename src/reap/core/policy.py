"""Policies: turn whatever policy object the user has into one that reads a row and writes a row.

    as_policy(x) ──►  RandomActions     None, or RandomPolicy: mostly drawn for a whole rollout at once
                      FlatPolicy        TensorDictModules as a flat program on plain tensors (policies/flat_policy.py)
                      CallPolicy        a module or function of observation tensors (policies/call_policy.py)
                      TensorDictPolicy  anything that takes and returns a TensorDict: correct for all, fast for none

`as_policy` (policies/as_policy.py) chooses among them. `Worker` then tries `captured` (policies/captured_policy.py): a
CapturedPolicy replaces one that calls a module, and replays the torch calls that the module makes. The result may be
wrapped in a `PolicyWrapper`:

    Bucketed        for asynchronous lanes: few batch sizes, each to be recorded (policies/buckets.py)
    PerLanePolicy   a TensorDictPolicy for such lanes, which keeps state for each lane (policies/per_lane_policy.py)
    LaneByLane      one policy per lane, with a random generator of its own (policies/lane_by_lane.py)
    RootPolicy      a TensorDictPolicy on the TensorDict that a TorchRL env carries (envs/torchrl/root_policy.py)

How one is called, from the loop inwards; `TensorPolicy` has `act`, the others differ in what is below:

    act(row)          `forward` on the row's inputs, then `write`, which checks the values and puts them into the row
    forward(inputs)   → values; a TensorDictPolicy calls `answer`, and keeps what the next step finds
    answer(inputs, …) copies the inputs into a TensorDict and calls the user's policy; `taken` → values
    once(inputs)      → values as at a first step, keeping nothing
    probe(inputs, …)  a first call, made before any rollout, that fixes the columns of `outputs`
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
from reap.spec import EnvSpec, Key, Leaf, as_array, as_key, private, show, show_keys, torch_dtype

Reader = Callable[[Any], "np.ndarray[Any, Any]"]


class RandomPolicy:
    """A policy that draws random actions from the env's action space, the same as `policy=None`.

    >>> collector = Collector("CartPole-v1", RandomPolicy(), frames_per_batch=100)
    """

    def __init__(self, action_spec: Any = None, action_key: Any = "action") -> None:
        self.action_spec, self.action_key = action_spec, action_key

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write a random action into `tensordict`."""
        if self.action_spec is None:
            raise WrongState("RandomPolicy has no action_spec; pass one, or use it in a collector")
        return tensordict.set(self.action_key, self.action_spec.rand(tensordict.batch_size))


def rand_step_as_policy(policy: Any) -> Any:
    """Return a RandomPolicy in place of an env's `rand_step` method, which would also step the env; else `policy`."""
    owner = getattr(policy, "__self__", None)
    if getattr(policy, "__name__", None) == "rand_step" and hasattr(owner, "rand_action"):
        return RandomPolicy()
    return policy


class Policy:
    """A policy that reads `row.inputs` and writes `row.outputs`; `inputs` and `outputs` name the columns."""

    inputs: Sequence[Key] = ()
    outputs: Mapping[Key, Leaf]
    remembers = False  # whether `forget` has anything to do
    inner: Mapping[Key, tuple[int, ...]] = {}  # extra batch dimensions of nested outputs, by key
    why: str | None = None  # why it could not be captured; None: it was captured, or that was not tried
    read_early: Collection[Key] | None = None  # the outputs that are read before a rollout ends; None: all

    @property
    def written(self) -> Sequence[Key]:
        """The columns that `act` writes; `end` writes the others."""
        return list(self.outputs)

    def explain(self) -> str:
        """Return a sentence that says how the policy is run."""
        return "it is called at each step" + (f", not captured: {self.why}" if self.why else "")

    def begin(self, slot: Slot) -> None:
        """Prepare for a rollout into `slot`: check again whatever may have changed since the last one."""

    def act(self, row: Row) -> None:
        """Compute the actions of one step and write them into `row`."""
        raise NotImplementedError

    def end(self, slot: Slot, steps: int) -> None:
        """Finish a rollout of `steps` steps: write the outputs that are computed from whole columns."""

    def forget(self, lanes: Sequence[int]) -> None:
        """Drop any state kept for these lanes, whose episodes are over."""

    def open_state(self) -> list[tuple[Key, Tensor]]:
        """Return the state it keeps for open episodes, beside its parameters and the columns."""
        return []

    def load_open_state(self, state: Sequence[tuple[Key, Tensor]]) -> None:
        """Restore the state that `open_state` returned."""


class PolicyWrapper(Policy):
    """A policy around another one, which sees the rows in a different form. All other calls are forwarded to it."""

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
    """Draws the random actions of a whole rollout when it begins. Its other outputs are zero or an initial carry.

    `draw` writes the actions of one step, for envs whose actions cannot be drawn ahead. Actions with a key in `masks`,
    which names their mask column, are drawn at each step among the actions that are legal then.
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
        self._slot: Slot | None = None  # the slot into which masked actions are drawn
        self._step = 0  # the step of it that is drawn next
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
                slot.arrays[key][...] = self._first.get(key, 0)  # no model runs, so a recurrent state never changes
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
    """Return the action leaf in the encoding of a policy's column, such as an index where the env's is one-hot."""
    one_hot = space.one_hot if space.shape == column.shape else not space.one_hot
    return Leaf(column.shape, column.dtype, space.space, one_hot)


class TensorPolicy(Policy):
    """The base of every policy that computes tensors: calls the model, checks its outputs and writes them."""

    def __init__(self, inputs: Sequence[Key], device: torch.device | None) -> None:
        self.inputs = tuple(inputs)
        self.outputs: dict[Key, Leaf] = {}
        self.device = device
        self._readers: tuple[Reader, ...] = ()

    def forward(self, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
        """Return the values of `outputs`, in that order."""
        raise NotImplementedError

    def probe(self, inputs: tuple[Tensor, ...], size: tuple[int, ...]) -> None:
        """Learn `outputs` from one call; `size` holds the lane dimensions."""
        raise NotImplementedError

    def once(self, inputs: tuple[Any, ...]) -> Sequence[Any]:
        """Return the values of `written` for these inputs as at a first step, and keep no state."""
        return self.forward(inputs)

    def private(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return copies of the inputs, which foreign code may keep or change: rows are reused and are delivered."""
        if self.device is not None:
            return tuple([x.to(self.device, non_blocking=True) for x in inputs])  # reading the outputs will wait
        return tuple([x.clone() for x in inputs])

    def act(self, row: Row) -> None:
        self.write(self.forward(row.inputs), row)

    def write(self, values: Sequence[Any], row: Row) -> None:
        """Write the computed values into the row; raise SpecMismatch if a shape or dtype changed."""
        for value, read, column in zip(values, self._readers, row.outputs):
            array = read(value)
            if array.shape != column.shape or array.dtype != column.dtype:
                raise self._changed(array, column, row)
            column[...] = array

    def learn_outputs(self, keys: Sequence[Key], values: Sequence[Any], size: tuple[int, ...]) -> None:
        """Fix the output columns from the values of one call; their first dimensions must be `size`, the lanes."""
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
        """Write outputs without converting them to NumPy, for rows that are tensors on the policy's device."""
        self._readers = (Tensor.detach,) * len(self._readers)  # type: ignore[assignment]

    def _changed(self, array: np.ndarray[Any, Any], column: np.ndarray[Any, Any], row: Row) -> SpecMismatch:
        key = next(k for k, c in zip(self.written, row.outputs) if c is column)
        return SpecMismatch(
            f"the policy's output {show(key)} changed: {column.dtype}{list(column.shape)} before, "
            f"{array.dtype}{list(array.shape)} now"
        )


class SubstitutePolicy(TensorPolicy):
    """A policy that computes in place of another, `plain`, which keeps the state of both."""

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
    """Runs any callable that takes a TensorDict and writes into it, or returns another. Correct for all, fast for none.

    The callable finds what it wrote at the previous step in its TensorDict, as noise processes and counters expect.
    Lanes whose episode ended find zeros there; once all lanes have ended or were reset, the entries are absent, as at
    the first step.
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
        self.shown = device if shown is None else shown  # the device its TensorDict reports
        self.call, self._size, self._loose = call, size, loose
        # Branches with extra batch dimensions, parents before their children.
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
        """Carry nothing from step to step any more, for a policy that never reads what it wrote."""
        self.remembers = False
        self.forward = self.once  # type: ignore[method-assign]

    def answer(
        self, inputs: tuple[Tensor, ...], kept: Mapping[Key, Any], size: tuple[int, ...]
    ) -> tuple[Sequence[Any], dict[Key, Any]]:
        """Call the policy on rows whose lane dimensions are `size`, with `kept` from the previous step.

        Returns the values of `outputs`, and what to keep for the next step.
        """
        td = self._tensordict(self.private(inputs), size)
        for key, value in kept.items():
            td.set(key, value)
        out = self.call(td)
        out = td if out is None else out
        given = {*self.inputs, *(("next", *key) for key in self.inputs)}
        return self.taken(out), {key: value for key, value in self._entries(out) if key not in given}

    def taken(self, out: TensorDictBase) -> Sequence[Any]:
        """Return the values of `outputs` from the TensorDict that the policy returned."""
        values = [out.get(key, None) for key in self._keys]
        for key, value in zip(self._keys, values):
            if value is None:
                raise SpecMismatch(f"the policy did not write {show(key)} at this step, but did before")
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
            raise CannotResume(f"the policy keeps {show_keys(strange)} between steps; only tensors can be saved")
        return [(key, value.detach().cpu().clone()) for key, value in self._kept.items()]

    def load_open_state(self, state: Sequence[tuple[Key, Tensor]]) -> None:
        self._kept = {tuple(key): value if self.device is None else value.to(self.device) for key, value in state}

    def adopt(self, inputs: Sequence[Key], outputs: Mapping[Key, Leaf]) -> None:
        """Use the inputs and outputs of a flat policy, to replace it after its modules changed."""
        self.inputs, self._keys = tuple(inputs), list(outputs)

    def probe(self, inputs: tuple[Tensor, ...], size: tuple[int, ...]) -> None:
        td = self._tensordict(self.private(inputs), self._size)
        before = dict(self._entries(td))
        copies = {k: v.clone() for k, v in before.items()}
        declared = {as_key(k) for k in getattr(self.call, "out_keys", ())}
        out = self.call(td)
        out = td if out is None else out
        if is_named(out) and not isinstance(out, TensorDictBase):
            call = self.call
            self.call = lambda td: as_tensordict(call(td), td.batch_size)
            out = as_tensordict(out, td.batch_size)
        if not isinstance(out, TensorDictBase):
            raise SpecMismatch(f"policy takes a TensorDict but returned {type(out).__name__}")
        after = dict(self._entries(out))
        # If the policy returned a copy of its input, every entry is a new object, so only changed values show what it
        # wrote. The flags, which no policy writes, tell whether it is a copy.
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
    """Return an example of every column a policy may read, in the form it will see: observations and root flags."""
    columns: dict[Key, Any] = {}
    for (key, leaf), array in zip(spec.observation.items(), current):
        if leaf.loose:
            columns[key] = ObjectColumn(leaf, array, spec.batched)
        else:
            columns[key] = torch.from_numpy(array).reshape((*spec.size, *leaf.shape))
    shown = [(flag,) for flag in FLAGS if (flag,) not in spec.look.hidden]
    return columns | {flag: torch.zeros((*spec.size, 1), dtype=torch.bool) for flag in shown}


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def _reader(value: Any) -> Reader:
    """Return a function that converts values of this kind to NumPy arrays, so that it is chosen only once."""
    if not isinstance(value, Tensor):
        return np.asarray
    plain = value.dtype is not torch.bfloat16 and value.device.type == "cpu" and not value.requires_grad
    return Tensor.numpy if plain and not value.is_conj() and not value.is_neg() else as_array
