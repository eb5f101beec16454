"""Rows: checks an env of any kind by the rows that a collector gets from it.

two copies ─► collect one by one ─► the same rows?      then two more in turns ─► still the same rows?
                    └─► every successor is where the next row begins, flags agree, no NaN
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from reap.collectors import Collector
from reap.core.policies.action_masks import action_masks, legal_choice
from reap.core.policy import Policy
from reap.core.slot import Row
from reap.envs import as_env
from reap.errors import ReapError, UsageError
from reap.seeding import chain
from reap.spec import LANE_AT, EnvSpec, Leaf, as_key, show
from reap.testing import generators
from reap.testing.calls import CallWatch

_SEED = 7
_BATCHES = 8  # of few steps each, so that batches end between many rows that follow one another
_IDS = ("collector", "traj_ids")
_MASK = ("collector", "mask")
Columns = dict[tuple[str, ...], Tensor]
SHARED_STATE = (
    "Copies share state: with the same seed and actions, a copy that takes turns with another gives other "
    "data than a copy alone. Look for class attributes and globals that step or reset change."
)


def check_rows(
    env: Any, other: Any, make_env: Callable[[], Any], steps: int, wrong: list[str], remarks: list[str]
) -> None:
    """Collect from two copies with random actions; append what is wrong with the rows to `wrong`."""
    one = _Stream.of(lambda: env, steps, wrong, remarks)
    if one is None:
        return
    first = one.collect_rest(wrong)
    one.watch.tell(wrong, remarks)
    if first is None:
        return
    _check_successors(first, wrong)
    _check_flags(first, wrong)
    _check_nan(first, wrong)
    _check_finals(first, remarks)
    if _IDS in first and not _episode_ends(first).any():
        remarks.append(f"No episode ended in {steps} steps; if that is meant, consider max_frames_per_traj.")
    two = _Stream.of(lambda: other, steps, wrong, [])
    again = None if two is None else two.collect_rest(wrong)
    if again is None or two is None:
        return
    if not _same(first, again):
        if two.seeded:
            wrong.append(f"Two copies with the same seed ({_SEED}) and actions differ: seed every random draw.")
        return
    _check_independence(make_env, first, steps, wrong)


class _Stream:
    """A collector with random actions, seeded, and with generators of its own: draws of others do not affect it."""

    def __init__(self, make: Callable[[], Any], steps: int, seed: int) -> None:
        env = as_env(make())
        self.watch = CallWatch(env)
        per_batch = max(1, steps // _BATCHES)
        self._left = -(-steps // per_batch)
        if env.spec.ready_of is not None and not env.draws:
            by_lane = _ActionsByLane(env.spec, seed)
            env.make_policy = lambda *_: by_lane  # type: ignore[method-assign]
        self._collector = Collector(env, frames_per_batch=env.spec.all_lanes * per_batch)
        self.refused: str | None = None
        generators.scatter(seed)
        try:
            self._collector.set_seed(seed)
        except UsageError as cause:
            self.refused = str(cause)
        self.seeded = self.refused is None
        self._generators = generators.state()
        self._batches: list[Columns] = []

    @staticmethod
    def of(make: Callable[[], Any], steps: int, wrong: list[str], remarks: list[str], seed: int = _SEED) -> Any:
        """Return a stream; None if it cannot be made, after appending the reason to `wrong`."""
        try:
            stream = _Stream(make, steps, seed)
        except ReapError as cause:
            wrong.append(f"reap cannot collect from it: {cause}.")
            return None
        if stream.refused is not None:
            remarks.append(f"It takes no seed: {stream.refused}.")
        return stream

    def collect_one(self) -> bool:
        """Collect one batch; return False if there was none left to collect."""
        if not self._left:
            return False
        self._left -= 1
        outside = generators.state()
        generators.put(self._generators)
        batch = self._collector.next()
        self._generators = generators.state()
        generators.put(outside)
        self._batches.append(_columns(batch))
        return True

    def collect_rest(self, wrong: list[str]) -> Columns | None:
        """Collect the rest; return all batches joined as columns `[lanes, time, …]`, or None if that fails."""
        try:
            while self.collect_one():
                pass
        except ReapError as cause:
            wrong.append(f"Collecting from it failed: {cause}.")
            return None
        finally:
            self.close(wrong)
        kinds = [{k: (v.shape[2:], v.dtype) for k, v in columns.items()} for columns in self._batches]
        if any(kind != kinds[0] for kind in kinds):
            wrong.append("Columns change their shape or dtype, come or go between batches.")
            return None
        return {key: torch.cat([columns[key] for columns in self._batches], 1) for key in self._batches[0]}

    def close(self, wrong: list[str]) -> None:
        """Shut the collector down."""
        try:
            self._collector.shutdown()
        except Exception as cause:
            wrong.append(f"close raised {cause!r}.")


class _ActionsByLane(Policy):
    """Random actions that belong to lanes: a lane's n-th is the same, whichever lanes were ready before it."""

    def __init__(self, spec: EnvSpec, seed: int) -> None:
        self._masks = action_masks(spec)
        self.inputs, self.outputs = (LANE_AT, *self._masks.values()), dict(spec.action)
        seeds, _ = chain(seed, spec.all_lanes)
        self._generators = [torch.Generator().manual_seed(own).get_state() for own in seeds]

    def act(self, row: Row) -> None:
        lanes, *masks = row.inputs
        legal = dict(zip(self._masks, masks))
        before = torch.get_rng_state()
        for at, lane in enumerate(lanes.tolist()):
            if lane < 0:  # no lane at this position, but all written actions are validated together
                for column in row.outputs:
                    column[at] = column[0]
                continue
            torch.set_rng_state(self._generators[lane])
            for (key, leaf), column in zip(self.outputs.items(), row.outputs):
                column[at] = leaf.rand() if key not in legal else _allowed(leaf, legal[key][at])
            self._generators[lane] = torch.get_rng_state()
        torch.set_rng_state(before)


def _allowed(leaf: Leaf, mask: Tensor) -> Tensor:
    """Return a random action that a mask allows, encoded as this leaf is."""
    index = legal_choice(mask)
    return (torch.nn.functional.one_hot(index, leaf.n) if leaf.one_hot else index).reshape(leaf.shape)


def _columns(batch: TensorDictBase) -> Columns:
    """Return the tensor columns as `[lanes, time, …]`, without texts, objects and ragged columns."""
    found: Columns = {}
    for key in batch.keys(True, True):
        try:
            value = batch.get(key)
        except RuntimeError:  # a ragged column
            continue
        if isinstance(value, Tensor):
            leading = batch.batch_size
            found[as_key(key)] = value.reshape(leading[:-1].numel(), leading[-1], *value.shape[len(leading) :]).cpu()
    return found


def _check_independence(make_env: Callable[[], Any], alone: Columns, steps: int, wrong: list[str]) -> None:
    """Collect from two more copies in turns, with different seeds: the first must not be affected."""
    one, two = (_Stream.of(make_env, steps, wrong, [], seed) for seed in (_SEED, _SEED + 1))
    if one is None or two is None:
        return
    try:
        while one.collect_one() and two.collect_one():
            pass
    except ReapError as cause:
        wrong.append(f"Two copies that take turns fail where one alone does not: {cause}.")
    beside = one.collect_rest(wrong)
    two.close(wrong)
    if beside is not None and not _same(alone, beside):
        wrong.append(SHARED_STATE)


def _check_successors(columns: Columns, wrong: list[str]) -> None:
    """Check within episodes that each row's successor is where the next row begins."""
    if _IDS not in columns:
        return
    over = _episode_ends(columns)
    for lane, ids in enumerate(columns[_IDS]):
        rows = torch.arange(len(ids))
        if _MASK in columns:
            rows = rows[columns[_MASK][lane]]
        before, after = rows[:-1], rows[1:]
        goes_on = (ids[before] == ids[after]) & ~over[lane, before]
        before, after = before[goes_on], after[goes_on]
        for key in columns:
            successor = ("next", *key)
            if successor in columns:
                ends, begins = columns[successor][lane, before], columns[key][lane, after]
                apart = ~_alike(ends, begins)
                if apart.any():
                    t = int(before[apart][0])
                    wrong.append(
                        f"Lane {lane}: the row of step {t} ends with another {show(key)} than the next row of "
                        f"the same episode begins with; the env does not return the true next observation."
                    )
                    return


def _check_finals(columns: Columns, remarks: list[str]) -> None:
    """Remark on last observations that all equal the first ones of the episodes that follow."""
    if _IDS not in columns or _MASK in columns:
        return
    seen = [key for key in columns if ("next", *key) in columns and columns[key].is_floating_point()]
    over = _episode_ends(columns)[:, :-1]
    if over.sum() < 2 or not seen or over.all():
        return
    for key in seen:
        ends, begins = columns[("next", *key)][:, :-1], columns[key][:, 1:]
        varies = not bool((ends[~over] == begins[over][0]).all())
        if not varies or not bool((ends[over] == begins[over]).all()):
            return
    remarks.append(
        "Every episode's last observation is the first one of the next episode. If the env resets itself inside step, "
        "the true last one is lost: return that one; reap resets."
    )


def _episode_ends(columns: Columns) -> Tensor:
    """Return where an episode, or an agent's part of one, ended: `[lanes, time]`."""
    ends = torch.zeros_like(columns[_IDS], dtype=torch.bool)
    for key, done in columns.items():
        if key[0] == "next" and key[-1] == "done":
            flags = _ended(columns, key) if len(key) > 2 else done
            ends |= flags.flatten(2).any(2) if flags.ndim > 2 else flags
    return ends


def _ended(columns: Columns, done: tuple[str, ...]) -> Tensor:
    """Return terminated | truncated beside this done flag; the flag itself where neither exists."""
    parts = [columns[part] for name in ("terminated", "truncated") if (part := (*done[:-1], name)) in columns]
    return parts[0] | parts[-1] if parts else columns[done]


def _check_flags(columns: Columns, wrong: list[str]) -> None:
    for key, done in columns.items():
        if key[0] == "next" and key[-1] == "done":
            ended = _ended(columns, key)
            if (ended & ~done).any() or (len(key) == 2 and (done & ~ended).any()):  # an absent agent is only done
                wrong.append(f"{show(key)} is not what terminated and truncated say together.")


def _check_nan(columns: Columns, wrong: list[str]) -> None:
    mask = columns.get(_MASK)
    for key, value in columns.items():
        if value.is_floating_point() and (value if mask is None else value[mask]).isnan().any():
            wrong.append(f"{show(key)} has NaN in it.")


def _same(one: Columns, other: Columns) -> bool:
    return one.keys() == other.keys() and all(bool(_alike(one[k], other[k]).all()) for k in one)


def _alike(one: Tensor, other: Tensor) -> Tensor:
    """Return which rows are equal; NaN equals NaN."""
    if one.shape != other.shape:
        return torch.zeros(1, dtype=torch.bool)
    equal = (one == other) | ((one != one) & (other != other))
    return equal.flatten(1).all(1) if equal.ndim > 1 else equal
