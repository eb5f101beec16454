"""Trajectories: one batch of steps, cut where episodes end.

    [lanes, T]   0 0 0 1 1 2          padded [3, 3]   0 0 0      mask   1 1 1
                 3 3 3 3 4 4    ──►   …               1 1 ·             1 1 0
                                                      2 · ·             1 0 0
All of it is whole-array arithmetic: one running sum finds the pieces, one scatter per leaf moves them.

    split_trajectories   a batch in pieces, complete or not
    WholeTrajectories    complete episodes only, over many batches
    with_next            a compact batch in its full form
    cu_seqlens           where the pieces of a packed batch begin, for variable-length attention
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    lazy_stack,
)

from reap.errors import SpecMismatch, UsageError
from reap.spec import AnyKey, Key, as_key, own_entry, show

FINAL: Key = ("collector", "final")  # where a compact batch keeps the successors that are no row's observation


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: AnyKey | None = None,
    trajectory_key: AnyKey | None = None,
    done_key: AnyKey | None = None,
    as_nested: bool = False,
) -> TensorDictBase:
    """Cut a batch `[…, T]` into trajectories: `[N, L]`, zero-padded, with a mask beside the ids.

    >>> split = split_trajectories(batch)
    >>> split["collector", "mask"]      # True where there is a frame

    Args:
        rollout_tensordict: data whose last batch dimension is time.
        prefix: the entry that holds ids and mask; "collector" if the batch has it, else the root.
        trajectory_key: the key of the ids, in place of `prefix`.
        done_key: the flag under "next" that ends trajectories when there are no ids; "done" by default.
        as_nested: return nested tensors, each trajectory in its own length, in place of padding and mask.
    """
    td = rollout_tensordict
    if td.ndim < 1:
        raise UsageError("split_trajectories needs a time dimension; the batch size is []")
    ids_key, mask_key = _keys(td, prefix, trajectory_key)
    ids = td.get(ids_key, None)
    if ids is None:
        ids = _ids_from_done(td, as_key(done_key or "done"))
        td = td.copy().set(ids_key, ids)
    for key in (ids_key, mask_key):
        if td.get(key, None) is not None and own_entry(td, key) is None:
            raise SpecMismatch(
                f"{show(key)} is an observation of this batch; ids and mask need another place: prefix='collector'"
            )
    valid = td.get(mask_key, None)
    steps = td.batch_size[-1]
    lanes = ids.reshape(-1, steps)
    whole = valid is None and bool((lanes == lanes[:, :1]).all()) and len(lanes[:, 0].unique()) == len(lanes)
    if whole and not as_nested:
        out = td.copy() if td.ndim > 1 else td.copy().unsqueeze(0)
        return out.set(mask_key, torch.ones(out.batch_size, dtype=torch.bool, device=ids.device))

    flat = td.reshape(-1)
    begins = _changes(lanes).reshape(-1)
    if valid is not None:  # rows without a frame belong to no trajectory
        keep = valid.reshape(-1)
        flat, begins = flat[keep], begins[keep]
    lengths = _borders(begins).diff()
    if as_nested:
        return _nested(flat, lengths, mask_key)
    return _padded(flat, lengths, mask_key)


def _changes(ids: torch.Tensor) -> torch.Tensor:
    """Return which entries along the last dimension begin a run of equal ones."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return begins


def _borders(begins: torch.Tensor) -> torch.Tensor:
    """Return where runs begin, given marks on their first entries, and where the last run ends."""
    starts = begins.nonzero().squeeze(-1)
    return torch.cat([starts, starts.new_tensor([len(begins)])])


def _padded(flat: TensorDictBase, lengths: torch.Tensor, mask_key: Key) -> TensorDictBase:
    """Return rows that lie one trajectory after another as `[N, L]`, padded with zeros, and with a mask.

    Texts and objects are padded with None, ragged tensors with empty ones.
    """
    count, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)
    if isinstance(flat, LazyStackedTensorDict) and count:
        return _padded_frames(flat, lengths.tolist(), longest).set(mask_key, mask)
    index = mask.reshape(-1).nonzero().squeeze(-1)
    out = TensorDict({}, batch_size=[count, longest], device=flat.device)
    for key in _objects(flat):
        pieces = _pieces(flat.get(key).tolist(), lengths.tolist())
        rows = [[NonTensorData(v, batch_size=[]) for v in piece + [None] * (longest - len(piece))] for piece in pieces]
        if rows:
            out.set(key, NonTensorStack(*[NonTensorStack(*row) for row in rows]))
    try:
        entries = list(flat.items(True, True))
    except RuntimeError as cause:  # lanes or agents differ in shape
        raise UsageError("padding needs one shape per key; these trajectories differ in theirs") from cause
    for key, value in entries:
        padded = value.new_zeros((count * longest, *value.shape[1:]))
        padded.index_copy_(0, index, value)
        out.set(key, padded.reshape(count, longest, *value.shape[1:]))
    for key in out.keys(True):  # branches keep batch dimensions of their own
        branch = flat.get(key, None)
        if isinstance(branch, TensorDictBase) and branch.ndim > 1:
            out.get(key).batch_size = [count, longest, *branch.batch_size[1:]]
    return out.set(mask_key, mask)


def _pieces(rows: list[Any], lengths: list[int]) -> list[list[Any]]:
    left = iter(rows)
    return [list(itertools.islice(left, length)) for length in lengths]


def _objects(td: TensorDictBase) -> list[Key]:
    """Return the keys of entries that hold one Python object per row."""
    tensors = {as_key(key) for key in td.keys(True, True)}
    return [k for k in map(as_key, td.keys(True, True, is_leaf=is_leaf_nontensor)) if k not in {*tensors, FINAL}]


def _padded_frames(flat: LazyStackedTensorDict, lengths: list[int], longest: int) -> TensorDictBase:
    """Pad rows whose tensors differ in shape: the rows stay in lazy stacks, padded with blank rows."""
    rows = list(flat.unbind(0))
    blank = TensorDict({}, batch_size=[], device=flat.device)
    objects = _objects(flat)
    for key in objects:
        blank.set(key, NonTensorData(None, batch_size=[]))
    for key in map(as_key, rows[0].keys(True, True)):
        if key not in objects:
            first = rows[0].get(key)
            shapes = {tuple(row.get(key).shape) for row in rows}
            ranks = {len(shape) for shape in shapes}
            shape = [sizes[0] if len(set(sizes)) == 1 else 0 for sizes in zip(*shapes)] if len(ranks) == 1 else [0]
            blank.set(key, first.new_zeros(shape))
    padded = [piece + [blank.clone() for _ in range(longest - len(piece))] for piece in _pieces(rows, lengths)]
    return lazy_stack([lazy_stack(piece, 0) for piece in padded], 0)


def _keys(td: TensorDictBase, prefix: AnyKey | None, trajectory_key: AnyKey | None) -> tuple[Key, Key]:
    if trajectory_key is not None:
        ids = as_key(trajectory_key)
        return ids, (*ids[:-1], "mask")
    if prefix is None:
        root: Key = ("collector",) if td.get("collector", None) is not None else ()
    else:
        root = as_key(prefix)
    return (*root, "traj_ids"), (*root, "mask")


def _ids_from_done(td: TensorDictBase, done_key: Key) -> torch.Tensor:
    done = td.get(("next", *done_key), None)
    if done is None:
        raise UsageError(f"no trajectory ids and no {show(('next', *done_key))}: nothing says where episodes end")
    done = done.reshape(*td.batch_size, -1).any(-1)
    begins = torch.ones_like(done)
    begins[..., 1:] = done[..., :-1]
    return begins.reshape(-1).cumsum(0).reshape(td.batch_size) - 1


def _nested(flat: TensorDictBase, lengths: torch.Tensor, mask_key: Key) -> TensorDictBase:
    loose = _objects(flat)
    if loose or isinstance(flat, LazyStackedTensorDict):
        what = f"{show(loose[0])} holds objects" if loose else "this batch holds tensors of different shapes"
        raise UsageError(f"as_nested needs tensors of one shape per frame; {what}: leave as_nested out")
    sizes = lengths.tolist()
    leaves: dict[Any, Any] = {
        key: torch.nested.nested_tensor(list(value.split(sizes)))
        for key, value in flat.items(True, True)
        if as_key(key) != mask_key
    }
    ragged = len(set(sizes)) > 1
    out = TensorDict({}, batch_size=[len(sizes), -1 if ragged else sizes[0]], device=flat.device)
    for key, value in leaves.items():
        out.set(key, value)
    return out


def with_next(batch: TensorDictBase) -> TensorDictBase:
    """Return a `compact_obs` batch with `("next", observation)` rebuilt exactly, also where episodes or the batch end.

    >>> full = with_next(batch)              # equals the batch a collector without compact_obs delivers
    """
    if batch.get(FINAL, None) is None:
        raise UsageError("with_next needs a batch as a compact_obs collector delivers it")
    finals: Any = batch.get_non_tensor(FINAL)
    if tuple(batch.batch_size) != getattr(finals, "size", None):
        shape = list(batch.batch_size)
        raise UsageError(
            f"with_next needs the batch as it was delivered, neither cut nor reshaped; this one is {shape}"
        )
    full = batch.exclude(FINAL)
    lane, step = torch.from_numpy(finals.lane), torch.from_numpy(finals.step)
    for key, values in finals.values.items():
        root = batch.get(key)
        flat = root.reshape(-1, *root.shape[batch.ndim :])  # lane after lane, each in time order
        following = torch.empty_like(flat)
        following[:-1] = flat[1:]
        following[lane * finals.steps + step] = torch.from_numpy(values).to(root.device)
        full.set(("next", *key), following.reshape(root.shape))
    return full


def cu_seqlens(batch: TensorDictBase) -> torch.Tensor:
    """Return where the trajectories of a packed batch `[steps]` begin, and its end: offsets as int32 `[N + 1]`.

    >>> offsets = cu_seqlens(batch)          # for kernels that attend within sequences of different length
    """
    ids = batch.get(("collector", "traj_ids"), None)
    if ids is None or batch.ndim != 1:
        raise UsageError("cu_seqlens needs a packed batch [steps] with trajectory ids (traj_format='cat')")
    return _borders(_changes(ids)).to(torch.int32)


class WholeTrajectories:
    """Takes batches, and returns complete episodes in the order in which they ended.

    Unfinished episodes are held back until they end, however many batches that takes. So no episode is cut or lost, and
    long ones are not underrepresented. Episodes broken off by a reset never end: the reset gives new ids, and they are
    dropped when these appear.
    """

    def __init__(self) -> None:
        self._held: dict[int, TensorDictBase] = {}
        self._last: dict[int, list[int]] = {}  # source → the last trajectory seen in each lane
        self._ready: TensorDictBase | None = None
        self._lengths = torch.zeros(0, dtype=torch.int64)
        self._plain = False  # whether the last batch had no lane dimension

    def __len__(self) -> int:
        return len(self._lengths)

    def feed(self, batch: TensorDictBase, source: int = 0) -> None:
        """Take the next batch `[…, T]`. Lanes continue where the last batch of the same source left them."""
        self._plain = batch.ndim == 1
        lanes = batch.unsqueeze(0) if self._plain else batch.flatten(0, -2) if batch.ndim > 2 else batch
        flat = lanes.reshape(-1)
        count, steps = lanes.batch_size
        ids = lanes.get(("collector", "traj_ids"), None)
        if ids is None:
            raise UsageError("whole trajectories need track_traj_ids=True")
        # The order in which rows were made: by time, then by lane. Only the order matters, and only within one batch.
        clock = (torch.arange(steps) * count + torch.arange(count).unsqueeze(1)).reshape(-1)
        ids = ids.reshape(-1).cpu()
        valid = ids >= 0
        rows = ids.reshape(count, steps)
        if not bool(valid.all()):
            flat, ids, clock = flat[valid.to(_device(flat))], ids[valid], clock[valid]
        if not len(flat):
            return  # a rollout without a frame: every lane spent it on resets
        held = self._held.get(source)
        if held is not None and len(held):
            old = held.get(("collector", "traj_ids")).cpu()
            flat = torch.cat([held, flat])
            ids, clock = torch.cat([old, ids]), torch.cat([torch.full_like(old, -1), clock])
        lane = own_entry(flat, ("env_index",))  # lanes that answer as they are ready are mixed in one row
        if lane is None:
            # A lane may make no frame in a rollout, and continue in the next.
            before = self._last.get(source, [-1] * count)
            last = [int(row[row >= 0][-1]) if bool((row >= 0).any()) else old for row, old in zip(rows, before)]
        else:
            last = list(dict(zip(lane.tolist(), ids.tolist())).values())
        self._last[source] = last
        order = torch.argsort(ids, stable=True)  # rows of one trajectory together, in time order
        ids = ids[order]
        borders = _borders(_changes(ids))
        starts, ends = borders[:-1], borders[1:] - 1
        done = ended(flat)[order[ends]]
        finished = done.nonzero().squeeze(-1)
        finished = finished[torch.argsort(clock[order[ends[finished]]])]
        alive = (~done & torch.isin(ids[starts], torch.tensor(last, dtype=ids.dtype))).nonzero().squeeze(-1)
        self._held[source] = _at(flat, _rows(order, starts, ends, alive))
        new = _at(flat, _rows(order, starts, ends, finished))
        self._ready = new if self._ready is None or not len(self._ready) else torch.cat([self._ready, new])
        self._lengths = torch.cat([self._lengths, (ends - starts + 1)[finished]])

    def take(self, count: int, layout: str) -> TensorDictBase:
        """Return the first `count` complete episodes: "padded" `[count, longest]` with a mask, or "cat" `[steps]`."""
        assert self._ready is not None
        lengths, self._lengths = self._lengths[:count], self._lengths[count:]
        steps = int(lengths.sum())
        rows, self._ready = self._ready[:steps], self._ready[steps:]
        if layout == "cat":
            out: TensorDictBase = rows.clone()
            out.names = ["time"] if self._plain else [None]
            return out
        mask_key: Key = ("collector", "mask")
        if rows.get(mask_key, None) is not None:
            rows = rows.exclude(mask_key)
        padded = _padded(rows, lengths.to(_device(rows)), mask_key)
        if self._plain and len(set(lengths.tolist())) == 1:
            padded.names = [None, "time"]  # nothing was padded
        return padded


def ended(flat: TensorDictBase) -> torch.Tensor:
    """Return which frames end an episode: by the root's done flag, or, without one, if any agent's done flag is set."""
    reached = flat.get("next")
    keys = [key for key in reached.keys(True, True) if as_key(key)[-1] == "done"]
    keys = ["done"] if "done" in keys else keys
    flags = [reached.get(key).reshape(len(flat), -1).any(-1) for key in keys]
    return torch.stack(flags).any(0).cpu()


def _device(td: TensorDictBase) -> torch.device:
    device: torch.device = td.get(("collector", "traj_ids")).device
    return device


def _at(flat: TensorDictBase, rows: torch.Tensor) -> TensorDictBase:
    return flat[rows.to(_device(flat))] if len(rows) else flat[:0]  # lazy stacks take no empty index


def _rows(order: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the row numbers of the chosen segments of `order`, one segment after another."""
    sizes = (ends - starts + 1)[chosen]
    offset = torch.repeat_interleave(starts[chosen] - (sizes.cumsum(0) - sizes), sizes)
    return order[torch.arange(int(sizes.sum())) + offset]
