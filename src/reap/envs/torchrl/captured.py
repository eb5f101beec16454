"""TorchRL's transformed envs without TorchRL's step: the transforms' torch calls are recorded once and replayed.

    row.outputs, root ──► inverse transforms ──► innermost envs (reap's lanes) ──► transforms ──► row.next, rewards …
                          └────────────────────── one recorded function ─────────────────┘           │
                                                                               next root  ◄──────────┘

The first step is TorchRL's own. Then `step`, with the innermost env's step as a foreign call in it, is captured (see
core/capture/recorder.py): the same torch calls on the transforms' own tensors give the same numbers, and
`env.transform[0]` and its `state_dict` show statistics as before. TorchRL resets the lanes whose episode ended. After
`_RESETS` resets of some lanes of a single base, or with several bases of the same set of lanes, that reset is recorded
and replayed as well, unless a transform resets in Python (`_RESET_IN_PYTHON`).

Only some of TorchRL's own transforms are captured (`TRANSFORMS`). An env with a subclass of one, or with a transform of
the user's, is left to TorchRL's step. A transform that is changed between two rollouts is recorded again.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from reap._foreign import torchrl_internals
from reap._system.shared_objects.semaphores import release_held
from reap.core.capture.generator_state import position, restore_generator, varied
from reap.core.capture.recorder import NotCaptured, foreign, unrecorded
from reap.core.capture.replay import Captured
from reap.core.env import Env, Rows
from reap.core.policies.untouched import untouched
from reap.core.policy import Policy, TensorDictPolicy
from reap.core.slot import FLAGS, Row
from reap.envs.adapters.gymnasium import GymLanes
from reap.envs.torchrl.by_hand import replaced
from reap.envs.torchrl.rows import Columns, TorchRLRows
from reap.errors import reraise
from reap.spec import Key, Leaf, as_key

Array = np.ndarray[Any, Any]

_RESETS = 4  # resets that TorchRL makes before one is recorded: of some lanes, with several bases of the same lanes
_PATTERNS = 64  # how many sets of lanes are counted and recorded separately
# A row for the lanes to write, its arrays, and the function that steps them.
PreparedRow = tuple[Row, tuple[Array, ...], Callable[..., list[int]]]
_RUNS = 64  # for how many sets of lanes a reset stays bound: each holds masks of all lanes
_TRIES = 3  # how many recordings in a row may be outdated at the next rollout before reap gives up


# The code of these was checked: a step is a function of tensors, and so is a reset, except in `_RESET_IN_PYTHON`.
# fmt: off
TRANSFORMS = frozenset(
    {
        "ActionMask", "ActionScaling", "BinarizeReward", "CatFrames", "CatTensors", "CenterCrop", "ClipTransform",
        "Compose", "Crop", "DTypeCastTransform", "DoubleToFloat", "EndOfLifeTransform", "ExcludeTransform",
        "FlattenObservation", "FrameSkipTransform", "GrayScale", "InitTracker", "NoopResetEnv", "ObservationNorm",
        "PermuteTransform", "RandomTruncationTransform", "RenameTransform", "Resize", "RewardClipping",
        "RewardScaling", "RewardSum", "SelectTransform", "SignTransform", "SqueezeTransform", "Stack", "StepCounter",
        "TargetReturn", "TensorDictPrimer", "TimeMaxPool", "ToTensorImage", "TrajCounter", "UnsqueezeTransform",
        "VecNorm", "VecNormV2"
    }
)
# fmt: on
# Their resets step the env, count in Python, or draw a number for each lane that is reset: always made by TorchRL.
_RESET_IN_PYTHON = ("NoopResetEnv", "RandomTruncationTransform", "TrajCounter")
_ASKS = "EndOfLifeTransform"  # it asks the env how many lives are left


def captured_whole(part: Any) -> bool:
    """Return whether a part of a transform is of a class in `TRANSFORMS`, no subclass, or one of torch's containers."""
    kind = type(part)
    where = kind.__module__
    if kind.__name__ == "TensorDictPrimer" and _calls_a_function(getattr(part, "default_value", None)):
        return False
    return where.startswith("torch.nn") or (where.startswith("torchrl.envs.transforms") and kind.__name__ in TRANSFORMS)


def has_own_method(part: Any) -> bool:
    """Return whether the user has replaced one of the methods in this part of a transform."""
    held = vars(part).items()
    return any(isinstance(value, (FunctionType, MethodType)) and hasattr(type(part), name) for name, value in held)


def not_replayable(transforms: Iterable[Any]) -> str | None:
    """Return a sentence that names a part of these transforms that cannot be replayed; None if all can."""
    for part in (part for transform in transforms for part in transform.modules()):
        if not captured_whole(part) or has_own_method(part):
            return f"{type(part).__name__} is not a transform that reap can replay"
    return None


def _calls_a_function(value: Any) -> bool:
    """Return whether a primer with this default value calls a function of the user's."""
    return any(map(_calls_a_function, value.values())) if isinstance(value, Mapping) else callable(value)


class Base:
    """The innermost env, stepped by reap: the recorded step calls it in place of TorchRL's `_step`."""

    def __init__(self, env: Any, lanes: Env) -> None:
        self.env, self.lanes = env, lanes
        self._gym = lanes if isinstance(lanes, GymLanes) else None
        self.size, self._all = tuple(env.batch_size), range(lanes.spec.lanes)
        self.keys: list[Any] = []  # the keys of what its step returns
        self.stepped: list[Tensor] = []  # what TorchRL's own step returned last, in the order of `keys`
        self.given: Sequence[Tensor] = ()  # results used in place of a real step, while one is recorded or compared
        self.asked: Sequence[Tensor] = ()  # the actions of the last step that was recorded
        self._announced: Sequence[Tensor] | None = None  # the actions whose form `prepare` last told the lanes
        self._action: Mapping[Key, Leaf] = {}
        self.reset_keys: list[Any] = []  # the keys of what its reset returns, without flags, which are False
        self._flags: list[tuple[Any, Tensor]] = []
        self.due: tuple[int, ...] = ()  # the lanes that a recorded reset resets
        self.begin_due = lambda: self.begin(self.due)
        self.first: list[Tensor] = []  # what each lane's last reset returned, in the order of `reset_keys`
        self._begun: list[Array] = []  # the same memory as arrays
        self._into: list[Array] = []  # the same memory, in the order and shapes in which the lanes write it
        self._rows: list[PreparedRow] = []
        self._shapes: list[tuple[int, ...]] = []  # the shapes of actions for the lanes
        self._turn = -1
        self._flagged: set[Row] = set()  # rows whose flags may be set
        self.read: list[list[bool]] = []  # for each call of `step` in the recorded step: which results are read
        self.locks: Sequence[Any] = ()
        self.fresh = False  # whether each step's results need memory of their own

    def step_and_keep(self, td: TensorDictBase) -> TensorDictBase:
        """Make TorchRL's own step, and keep its results for the recording."""
        result: TensorDictBase = type(self.env)._step(self.env, td)
        self.keys = sorted(result.keys(True, True), key=str)
        self.stepped = [result.get(key).clone() for key in self.keys]
        return result

    def stand_in(self, td: TensorDictBase) -> TensorDictBase:
        """Return `given` in the form of TorchRL's step, and record this as a call of `step`."""
        self.asked = [td.get(key) for key in self.env.action_keys]
        made = foreign(self.step, self.asked, lambda: [value.clone() for value in self.given])
        result = TensorDict({}, batch_size=td.batch_size, device=self.env.device)
        for key, value in zip(self.keys, made):
            result.set(key, value)
        return result

    def reset_and_keep(self, td: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Make TorchRL's own reset, and keep its results: a lane is shown like this when others are reset later."""
        result: TensorDictBase = type(self.env)._reset(self.env, td, **kwargs)
        self._flags = [(key, result.get(key).clone()) for key in FLAGS if key in result.keys()]  # noqa: SIM118
        self.reset_keys = sorted((k for k in result.keys(True, True) if k not in FLAGS), key=str)
        self.first = torchrl_internals.first_values(self.env, self.reset_keys) or [
            result.get(key).clone(memory_format=torch.contiguous_format) for key in self.reset_keys
        ]
        self._begun = [value.numpy() for value in self.first]
        by_key = dict(zip(map(as_key, self.reset_keys), self._begun))
        spec = self.lanes.spec
        self._into = [by_key[key].reshape(spec.lanes, *leaf.shape) for key, leaf in spec.observation.items()]
        return result

    def stand_in_reset(self, td: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Reset the lanes through reap, return what TorchRL's reset would, and record this as a call of `begin`."""
        self.due = tuple(self._marked(td))
        made = foreign(self.begin_due, (), lambda: [torch.from_numpy(array) for array in self.begin(self.due)])
        result = TensorDict({}, batch_size=self.size, device=self.env.device)
        for key, value in (*zip(self.reset_keys, made), *self._flags):
            result.set(key, value if key in self.reset_keys else value.clone())
        return result

    def _marked(self, td: TensorDictBase | None) -> list[int]:
        lanes = range(self.lanes.spec.lanes)
        mark = None if td is None else td.get("_reset", None)
        if mark is None:
            return list(lanes)
        chosen = unrecorded(lambda: mark.reshape(len(lanes), -1).any(-1).tolist())
        return [lane for lane in lanes if chosen[lane]]

    def begin(self, lanes: Sequence[int]) -> Sequence[Array]:
        """Start new episodes in `lanes`; returns copies of all first observations, in the order of `reset_keys`."""
        if self.given:
            return [value.numpy().copy() for value in self.given]
        self.lanes.reset(lanes, self._into)
        return [array.copy() for array in self._begun]

    def prepare(self) -> None:
        """Make room for the results of two steps: one step's results are still read while the next are written.

        Where a step makes several calls, only the results of the last call are read after the step. The other calls
        have room of their own, shared for observations that nothing reads, like the frames an Atari game skips. A call
        of which no observation is read makes none.
        """
        if self._announced is not self.asked:  # a step was recorded since
            dims = len(self.size)
            keys = [as_key(key) for key in self.env.action_keys]
            self._action = {key: Leaf(tuple(a.shape[dims:]), a.dtype) for key, a in zip(keys, self.asked)}
            self._shapes = [(self.lanes.spec.lanes, *a.shape[dims:]) for a in self.asked]
            self._announced = self.asked
        self.lanes.expect(self._action)
        if self._gym is not None and self._gym.checked:
            self._gym.leave_out_checks()
        observation = self.lanes.spec.observation
        unread = {key: leaf.column(self.lanes.spec.lanes) for key, leaf in observation.items()}
        skipped = []
        for read in self.read[:-1]:
            used = {as_key(key) for key, is_read in zip(self.keys, read) if is_read}
            common = {key: array for key, array in unread.items() if key not in used}
            skipped.append(self._prepared_row(common, seen=len(common) < len(unread)))
        self._rows = [*skipped, self._prepared_row({}), *skipped, self._prepared_row({})]
        self._turn, self._flagged = -1, set()

    def _prepared_row(self, common: Mapping[Key, Array], *, seen: bool = True) -> PreparedRow:
        """Return a row for the lanes to write, with its arrays; those in `common` are shared with other rows."""
        spec, row = self.lanes.spec, Row()
        leaves = {**spec.observation, **spec.reward}
        arrays = {key: common[key] if key in common else leaf.column(spec.lanes) for key, leaf in leaves.items()}
        row.next = tuple(arrays[key] for key in spec.observation)
        row.rewards = tuple(arrays[key] for key in spec.reward)
        row.reward = row.rewards[0][:, 0]
        flags = {flag: np.zeros((spec.lanes, 1), bool) for flag in FLAGS}
        row.done, row.terminated, row.truncated = (flags[f][:, 0] for f in ("done", "terminated", "truncated"))
        arrays.update({(flag,): array for flag, array in flags.items()})
        tensors = [torch.from_numpy(arrays[as_key(key)]) for key in self.keys]
        results = [t.reshape(*self.size, *t.shape[1:]) for t in tensors]
        if [(t.shape, t.dtype) for t in results] != [(t.shape, t.dtype) for t in self.stepped]:
            raise NotCaptured(f"TorchRL's {type(self.env).__name__} returns other shapes or types than its env")
        step: Callable[..., list[int]] = self.lanes.step
        if not seen and self._gym is not None:
            step = functools.partial(step, unseen=True)
        return row, tuple(t.numpy() for t in results), step

    def step(self, *actions: Array) -> tuple[Array, ...]:
        """Step all lanes once. The next step but one overwrites what this one returns."""
        if self.given:
            return tuple(value.numpy().copy() for value in self.given)
        self._turn = (self._turn + 1) % len(self._rows)
        row, results, step = self._rows[self._turn]
        if row in self._flagged:
            row.done[:] = row.terminated[:] = row.truncated[:] = False
            self._flagged.remove(row)
        self._act(row, actions)
        for lock in self.locks:  # others may use shared statistics while this env computes
            lock.release()
        ended: Any = True
        try:
            ended = step(self._all, row)
        finally:
            if ended:
                self._flagged.add(row)
        for lock in self.locks:
            lock.acquire()
        return tuple([array.copy() for array in results]) if self.fresh else results

    def _act(self, row: Row, actions: Sequence[Array]) -> None:
        """Put the actions into the row, in the shapes that the lanes expect."""
        row.action = tuple(map(np.ndarray.reshape, actions, self._shapes))


@dataclass
class _Reset:
    """A recorded reset, and what it was last bound to."""

    captured: Captured
    mask: Tensor  # which lanes are reset; the recording reads it
    due: list[tuple[int, ...]]  # for each base
    bound: int = -1  # the number of the rollout in which it was last bound
    runs: dict[bytes, tuple[Callable[..., tuple[Any, ...]], tuple[int, ...]]] = field(default_factory=dict)  # by lanes
    relied_on: Sequence[Any] = ()  # what `runs` were bound with, apart from their masks
    checked: bool = False  # whether it was checked with another mask

    def begin(self) -> None:
        """Begin a rollout: forget the bound runs if something other than the mask has changed."""
        now = self.captured.bound_with(but=self.mask)
        if now != self.relied_on:
            self.runs, self.relied_on = {}, now

    def keep(self, lanes: bytes, due: tuple[int, ...]) -> None:
        """Keep the current binding as the way to reset these lanes; drops the oldest of too many."""
        if len(self.runs) >= _RUNS:
            del self.runs[next(iter(self.runs))]
        self.runs[lanes] = self.captured.run, due


class CapturedRows(TorchRLRows):
    """A transformed env over `bases`, whose step is captured after the first one."""

    def __init__(
        self, env: Any, root: TensorDictBase, columns: Columns, bases: Sequence[Base], transformed: Sequence[Any]
    ) -> None:
        self._leaves: Sequence[Array] | None = None  # the root's values by `_root_keys`, if newer than `_root`
        self._root_keys: list[Any] = []
        super().__init__(env, root, columns)
        self._bases, self._transformed = bases, transformed
        inner = [env for base in bases for env in (base.env, *torchrl_internals.serial_envs(base.env))]
        self._stepped = [env, *transformed, *inner]  # TorchRL's envs whose own methods a replay bypasses
        self._run: Callable[..., tuple[Any, ...]] | None = None
        self._captured: Captured | None = None
        self._tries, self._rollouts = 0, 0
        self._one_recording = True  # whether one recorded reset serves every set of lanes of a single base, by its mask
        self._resets: dict[bytes, int | _Reset] = {}  # by the lanes that ended: how often so far, or a recorded reset
        self.why: str | None = "it is captured after its first step"
        self._recorded_keys: list[Key] = []  # the policy's outputs when the step was recorded
        self._locks: list[Any] = []
        self._lives_of: dict[int, _Lives] = {}  # by the id of a transform: how it asks for the lives
        self._shown_at: list[int] = []  # the index of each observation among the root's values

    def explain(self) -> str:
        if not self.captures:
            return "TorchRL steps it"
        whole = "reap steps what is inside, and replays the torch calls of its transforms"
        return whole if self.why is None else f"TorchRL steps it: {self.why}"

    @property
    def root(self) -> TensorDictBase:
        """What the policy sees next, as TorchRL's TensorDict."""
        if self._leaves is not None:
            root = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
            for key, value in zip(self._root_keys, self._leaves):
                root.set(key, torch.from_numpy(value))
            self._root, self._leaves = root, None
        return self._root

    @root.setter
    def root(self, root: TensorDictBase) -> None:
        self._root, self._leaves = root, None

    def open_state(self) -> Any:
        root = [(as_key(key), value.clone()) for key, value in self.root.items(True, True)]
        bases = [(base.lanes.open_state(), [value.clone() for value in base.first]) for base in self._bases]
        return {"root": root, "bases": bases, "ended": list(self._ended)}

    def load_open_state(self, state: Any) -> None:
        root = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
        for key, value in state["root"]:
            root.set(tuple(key), value)
        self.root = root
        for base, (lanes, first) in zip(self._bases, state["bases"]):
            base.lanes.load_open_state(lanes)
            for mine, value in zip(base.first, first):
                mine.copy_(value)  # lanes write into this memory
        self.unseen, self._began, self._ended = False, False, list(state["ended"])

    def wrap_policy(self, policy: TensorDictPolicy) -> Policy:
        return policy if self.captures else super().wrap_policy(policy)

    def outputs_read(self, outputs: Collection[Key]) -> Collection[Key]:
        if self._captured is None:
            return super().outputs_read(outputs)
        root = len(self._root_keys)
        return [*self.spec.action, *(self._recorded_keys[i - root] for i in self._captured.used if i >= root)]

    def set_policy_keys(self, outputs: Sequence[Key]) -> None:
        super().set_policy_keys(outputs)
        self._rollouts += 1
        if self._lives_of:
            for ask in self._lives_of.values():
                ask.resolve()
        if self._captured is None:
            return
        if (
            {*outputs}.issuperset(self.outputs_read(outputs))
            and {*outputs} <= {*self._recorded_keys}
            and self._rebound()
        ):
            self._choose()
        else:
            self._captured = self._run = None  # a transform or the policy has changed: the step is recorded again
            self._resets.clear()

    def _overridden(self) -> bool:
        """Return whether the user has replaced a method that a replay would not call."""
        moves = torchrl_internals.MOVES
        touched = [env for env in self._stepped if not moves.isdisjoint(vars(env))]
        return any(replaced(env, moves) for env in touched)

    def _rebound(self) -> bool:
        assert self._captured is not None
        # `bind` notices methods replaced in a transform, at less cost than `has_own_method`.
        if self._overridden() or not all(captured_whole(part) for t in self._transforms() for part in t.modules()):
            return False
        if self._transforms() != self._relied_on or not self._captured.bind():
            return False
        for base in self._bases:
            base.prepare()  # the env may have been used by hand since
        self._run, self._tries = self._captured.run, 0
        return True

    def _transforms(self) -> list[Any]:
        return [env.transform for env in self._transformed]

    def _parts(self, *names: str) -> list[Any]:
        """Return the parts of transforms whose class has one of these names."""
        return [part for t in self._transforms() for part in t.modules() if type(part).__name__ in names]

    def _recording_asks(self) -> contextlib.AbstractContextManager[None]:
        """Record what transforms ask the env as calls, not as constants."""
        return torchrl_internals.answering_lives(self._parts(_ASKS), self._lives)

    def _lives(self, part: Any) -> Tensor:
        ask = self._lives_of.setdefault(id(part), _Lives(part))
        (lives,) = foreign(ask, (), lambda: [torch.from_numpy(array) for array in ask()])
        return lives

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        if self._run is None:
            return self._torchrl_step(lanes, row)
        leaves = self._leaves
        if leaves is None:
            found = [self._root.get(key, None) for key in self._root_keys]
            if any(value is None for value in found):
                return self._plain_step(lanes, row)  # a reset dropped a key, which TorchRL can handle
            leaves = [value.numpy() for value in found]
        outputs = [array.copy() for array in row.outputs] if self._copies else row.outputs
        try:
            for lock in self._locks:
                lock.acquire()
            values = self._run(*self._pick((*leaves, *outputs)))
            for lock in self._locks:
                lock.release()
        except BaseException as cause:  # also Ctrl-C, which may come between any two lines
            release_held(self._locks)
            if not isinstance(cause, Exception):
                raise
            reraise("env.step", cause)
        # An env around this one may have added leaves behind these.
        for array, value in zip((*row.next[: self._mine], *row.rewards), values):
            array[...] = value if self._flat else value.reshape(array.shape)
        done = values[self._done_at]
        self._leaves = values[self._after_at : self._after_to]
        ends = done.tobytes()
        if 1 not in ends:
            self._ended = []
            return self._ended
        driver = self.driver
        try:
            self._begin_lanes(done, ends)
        except Exception as cause:
            reraise("env.reset", cause)
        finally:
            self.driver = driver  # the lanes were moved here, not by hand
        over = done.reshape(self.spec.lanes)
        row.done[:] = over
        for flag, column in (("terminated", row.terminated), ("truncated", row.truncated)):
            if flag in self._flag_at:
                column[:] = values[self._flag_at[flag]].reshape(self.spec.lanes)
        self._ended = over.nonzero()[0].tolist()
        return self._ended

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        leaves = self._leaves
        if leaves is None or seeds is not None or lanes is not self._ended:
            return super().reset(lanes, into, seeds)
        which = lanes[0] if len(lanes) == 1 else lanes
        for at, array in zip(self._shown_at, into):  # `step` has reset these lanes already
            array[which] = leaves[at].reshape(array.shape)[which]
        self.unseen, self._ended = False, []
        return None

    def begin(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        keeping_resets(self._bases, lambda: super(CapturedRows, self).begin(lanes, seeds))

    def _begin_lanes(self, done: Array, ends: bytes) -> None:
        """Reset the lanes that are done, as TorchRL does after a step. `ends` is `done` as bytes."""
        assert self._leaves is not None
        # Resets of some lanes of a single base mostly differ in the mask alone; others are recorded per set of lanes.
        partly = self._one_recording and len(self._bases) == 1 and 0 in ends
        pattern = b"" if partly else ends
        known = self._resets.get(pattern, 0)
        if isinstance(known, _Reset) and (self._bind_masked(known, done, ends) if partly else self._bind(known)):
            try:
                for lock in self._locks:
                    lock.acquire()
                self._leaves = known.captured.run(*[self._leaves[i] for i in known.captured.used])
                for lock in self._locks:
                    lock.release()
            except BaseException:
                release_held(self._locks)
                raise
            return
        before = [torch.from_numpy(array) for array in self._leaves]
        with _in_place_of("_reset", {base: base.stand_in_reset for base in self._bases}):
            self.root = self.env.maybe_reset(self.root)
        known = self._resets.get(pattern, 0)
        count = 1 if isinstance(known, _Reset) else known + 1
        full = len(self._resets) >= _PATTERNS
        if 0 < count < _RESETS or full or self._parts(*_RESET_IN_PYTHON):
            if not full or pattern in self._resets:
                self._resets[pattern] = count
            return
        self._resets[pattern] = -1  # if recording fails, it is not tried again
        if count == _RESETS:
            with contextlib.suppress(Exception):  # a transform may raise while it is recorded: TorchRL resets
                mask, due = torch.from_numpy(done.copy()), [base.due for base in self._bases]
                captured = self._recorded(self._reset_of(mask), self._first_of(before))
                self._resets[pattern] = _Reset(captured, mask, due)

    def _bind(self, reset: _Reset) -> bool:
        """Prepare a recorded reset for the lanes it was recorded with; False: TorchRL must make this reset."""
        for base, due in zip(self._bases, reset.due):
            base.due = due
        if reset.bound != self._rollouts:
            reset.bound = self._rollouts if reset.captured.bind() else -1
        return reset.bound == self._rollouts

    def _bind_masked(self, reset: _Reset, done: Array, lanes: bytes) -> bool:
        """Prepare a recorded reset for these lanes of the single base; False: TorchRL must make this reset."""
        mask, (base,) = reset.mask.numpy(), self._bases
        if reset.checked and reset.bound == self._rollouts and lanes in reset.runs:
            mask[...] = done
            reset.captured.run, base.due = reset.runs[lanes]
            return True
        base.due = tuple(done.reshape(self.spec.lanes).nonzero()[0].tolist())
        other = mask.tobytes() != lanes
        mask[...] = done
        anew = reset.bound != self._rollouts
        if anew:
            reset.begin()
        if not reset.captured.bind(check=anew):
            self._one_recording = not other  # where the mask was changed, that is taken for the reason
            return False
        reset.bound = self._rollouts
        reset.keep(lanes, base.due)
        if other and not reset.checked:  # check once that the recording holds for another mask
            probe = self._first_of([torch.from_numpy(array) for array in self._leaves or ()])
            before = position()
            try:
                reset.checked = reset.captured.agrees(probe)
            finally:
                base.given = ()
                restore_generator(before)
            if not reset.checked:
                self._one_recording = False
                return False
        return True

    def _first_of(self, before: Sequence[Tensor]) -> list[Tensor]:
        """Return the values a reset is recorded with: the root's, and the first observations of each base."""
        return [*before, *(value.clone() for base in self._bases for value in base.first)]

    def _reset_of(self, over: Tensor) -> Callable[..., list[Tensor]]:
        """Return TorchRL's `maybe_reset` of the lanes in `over`, as a function of tensors."""
        env = self.env
        sizes = [len(base.first) for base in self._bases]

        def reset(*values: Tensor) -> list[Tensor]:
            td = TensorDict({}, batch_size=env.batch_size, device=env.device)
            for key, value in zip(self._root_keys, values):
                td.set(key, over.clone() if key == "done" else value)
            at = len(self._root_keys)
            for base, size in zip(self._bases, sizes):
                base.given, at = values[at : at + size], at + size
            with _in_place_of("_reset", {base: base.stand_in_reset for base in self._bases}), self._recording_asks():
                root = env.maybe_reset(td)
            return [root.get(key) for key in self._root_keys]

        return reset

    def _recorded(self, call: Callable[..., list[Tensor]], first: Sequence[Tensor]) -> Captured:
        transforms = self._transforms()
        with contextlib.ExitStack() as stack:
            for transform in transforms:
                stack.enter_context(untouched(transform))
            try:
                probes = [first, *(varied(first, by, _other_choice) for by in (1, 2, 3))]
                return Captured(transforms, call, probes, writes=True, arrays=True)
            finally:
                for base in self._bases:
                    base.given = ()

    def _plain_step(self, lanes: Sequence[int], row: Row) -> list[int]:
        """Make TorchRL's step, but reset lanes through reap, so that their first observations are known."""
        with _in_place_of("_reset", {base: base.stand_in_reset for base in self._bases}):
            return super().step(lanes, row)

    def _torchrl_step(self, lanes: Sequence[int], row: Row) -> list[int]:
        """Make TorchRL's step, then try to capture it for the next steps."""
        if not self.captures or self._overridden():
            return super().step(lanes, row)
        if self._tries >= _TRIES:
            return self._plain_step(lanes, row)
        before = self.root.copy()
        with _in_place_of("_step", {base: base.step_and_keep for base in self._bases}):
            ended = self._plain_step(lanes, row)
        self._tries += 1
        driver = self.driver
        try:
            self._capture(before, row)
            self.why = None
        except NotCaptured as reason:
            self.why, self._tries = str(reason), _TRIES
        except Exception as cause:  # a transform may raise while it is recorded: TorchRL steps on
            self.why, self._tries = f"recording it raised {cause!r}", _TRIES
        finally:
            self.driver = driver  # the lanes were moved here, not by hand
        return ended

    def _capture(self, before: TensorDictBase, row: Row) -> None:
        if (why := not_replayable(self._transforms())) is not None:  # a part was added since
            raise NotCaptured(why)
        env, outputs = self.env, list(self._outputs)
        own = {as_key(key) for key in outputs}
        own -= self.spec.observation.keys()  # a policy may overwrite what an env carries
        self._root_keys = [key for key in before.keys(True, True) if as_key(key) not in own]
        sizes = [len(base.stepped) for base in self._bases]
        observation, rewards = list(self.spec.observation), list(self.spec.reward)

        def step(*values: Tensor) -> list[Tensor]:
            td = TensorDict({}, batch_size=env.batch_size, device=env.device)
            for key, value in zip((*self._root_keys, *outputs), values):
                td.set(key, value)
            at = len(self._root_keys) + len(outputs)
            for base, size in zip(self._bases, sizes):
                base.given, at = values[at : at + size], at + size
            with _in_place_of("_step", {base: base.stand_in for base in self._bases}), self._recording_asks():
                stepped = env.step(td)
            next_ = stepped.get("next")
            root = torchrl_internals.next_root(env, stepped)
            if (hooks := torchrl_internals.hooks_after_step(env)) is not None:
                stepped, root = hooks(stepped, root)
            found = [next_.get(key) for key in (*observation, *rewards)]
            found += [next_.get(flag) for flag in self._flags]
            found += [root.get(key) for key in self._root_keys]
            return [*found, *(action for base in self._bases for action in base.asked)]

        self._recorded_keys = [as_key(key) for key in outputs]
        leaves = [before.get(key) for key in self._root_keys]
        acted = [torch.from_numpy(array.copy()) for array in row.outputs]
        first = [*leaves, *acted, *(value for base in self._bases for value in base.stepped)]
        transforms = self._transforms()
        captured = self._recorded(step, first)
        flags_at = len(observation) + len(rewards)
        self._flag_at = {flag: flags_at + i for i, flag in enumerate(self._flags)}
        self._done_at = self._flag_at["done"]
        self._after_at = flags_at + len(self._flags)
        self._after_to = self._after_at + len(self._root_keys)
        # A value for the next step that lies in memory this step was given must get memory of its own.
        self._copies = any(captured.aliases[self._after_at : self._after_to])
        locks = {id(lock): lock for t in transforms for part in t.modules() if (lock := getattr(part, "lock", None))}
        self._locks = list(locks.values())
        for base in self._bases:
            base.locks, base.fresh, base.read = self._locks, self._copies, captured.read_of(base.step)
            base.prepare()
        self._captured, self._run, self._relied_on = captured, captured.run, transforms
        self._mine, self._flat = len(observation), len(env.batch_size) <= 1
        self._shown_at = [[as_key(key) for key in self._root_keys].index(key) for key in observation]
        self._choose()

    def _choose(self) -> None:
        """Choose which of the root's values and of the policy's current outputs the recorded step takes."""
        assert self._captured is not None
        outputs = [as_key(key) for key in self._outputs]
        root = len(self._root_keys)
        places = [i if i < root else root + outputs.index(self._recorded_keys[i - root]) for i in self._captured.used]
        self._pick = operator.itemgetter(*places) if len(places) > 1 else lambda given: [given[i] for i in places]


class _Lives:
    """Returns how many lives are left, as an EndOfLifeTransform finds them.

    The path to the game is resolved before each rollout; TorchRL resolves it at each step, which takes 0.5 ms.
    """

    def __init__(self, part: Any) -> None:
        self._part = part
        self.resolve()

    def resolve(self) -> None:
        """Find the game, if the env is a single Gymnasium env."""
        (first, *self._names), base = self._part.eol_attribute, self._part.parent.base_env
        self._game = None
        if first == "unwrapped" and self._names and isinstance(torchrl_internals.gymnasium_env(base), gym.Env):
            self._game = torchrl_internals.gymnasium_env(base).unwrapped

    def __call__(self) -> tuple[Array]:
        if self._game is None:
            return (np.asarray(torchrl_internals.lives_of(self._part), np.int64),)
        found: Any = self._game
        for name in self._names:
            found = getattr(found, name)
        return (np.asarray(found() if callable(found) else found, np.int64),)


def keeping_resets(bases: Sequence[Base], call: Callable[[], Any]) -> Any:
    """Return what `call` returns, and have each base keep the results of resets that TorchRL makes in it."""
    with _in_place_of("_reset", {base: base.reset_and_keep for base in bases}):
        return call()


@contextlib.contextmanager
def _in_place_of(verb: str, stand_ins: Mapping[Base, Callable[..., Any]]) -> Iterator[None]:
    """Have TorchRL's code call these functions in place of each base's `_step` or `_reset`."""
    for base, stand_in in stand_ins.items():
        base.env.__dict__[verb] = stand_in
    try:
        yield
    finally:
        for base in stand_ins:
            del base.env.__dict__[verb]


def _other_choice(value: Tensor, by: float, chance: torch.Generator) -> Tensor:
    """Return other flags or whole numbers; a one-hot action stays as it is."""
    if value.dtype is torch.bool:
        return torch.rand(value.shape, generator=chance) < 0.5
    return value + int(by) if value.numel() and int(value.max()) > 1 else value.clone()
