"""The second assembler: makes batches with text, objects and ragged tensors (each of its own shape).

    text, objects   a NonTensorStack in the batch; the other columns are as `assemble` makes them
    ragged          the batch is a lazy stack of frames, lanes first: `batch[lane, t]["items"]` has its own shape, and
                    `batch.get("items", as_list=True)`, `as_nested_tensor=True`, `as_padded_tensor=True` give them all

Rows without a frame hold the leaf's blank: an empty text, None, an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from reap.core.assemble import assemble
from reap.core.columns.assemble_frames import assemble_frames
from reap.core.columns.object_columns import filled, private_copy
from reap.core.slot import FRAME, MASK, Layout
from reap.spec import Key, Leaf

Arrays = Mapping[Key, "np.ndarray[Any, Any]"]


def assembler(layout: Layout) -> Callable[[Arrays, Layout], Any]:
    """Return the assembler for batches of this layout."""
    if FRAME in layout.loose:
        return assemble_frames
    return assemble_loose if layout.loose else assemble


def assemble_loose(arrays: Arrays, layout: Layout) -> TensorDictBase:
    """Return a batch of views of `arrays`, with the values that its loose columns refer to."""
    batch = assemble({key: array for key, array in arrays.items() if key not in layout.loose}, layout)
    mask = arrays.get(MASK)
    ragged: dict[Key, list[list[Any]]] = {}
    for key, leaf in layout.loose.items():
        column = arrays[key]
        if mask is not None:
            column[~mask] = None
        lanes = [[filled(leaf, value) for value in lane] for lane in column.T]
        if key[0] == "next":  # the next row's root, or the next rollout's first observation, is the same object
            lanes = [[private_copy(value) for value in lane] for lane in lanes]
        if leaf.ragged:
            ragged[key] = lanes
        else:
            batch.set(key, stacked([stacked(lane) for lane in lanes]) if layout.batched else stacked(lanes[0]))
    return _frames(batch, ragged) if ragged else batch


def _frames(batch: TensorDict, ragged: Mapping[Key, list[list[Any]]]) -> LazyStackedTensorDict:
    names = batch.names
    lanes = []
    for lane, rows in enumerate(batch.unbind(0) if batch.ndim == 2 else [batch]):
        frames = list(rows.unbind(0))
        for key, values in ragged.items():
            for frame_, value in zip(frames, values[lane]):
                frame_.set(key, value)
        lanes.append(lazy_stack(frames, 0))
    whole: LazyStackedTensorDict = lazy_stack(lanes, 0) if batch.ndim == 2 else lanes[0]
    whole.names = names
    return whole


def stacked(values: Sequence[Any]) -> NonTensorStack:
    """Stack objects, or stacks of them, into one column."""
    return NonTensorStack(*[v if isinstance(v, NonTensorStack) else NonTensorData(v, batch_size=[]) for v in values])


def frame(
    values: Mapping[Key, Any], loose: Mapping[Key, Leaf], lanes: int | None, device: torch.device | None
) -> TensorDictBase:
    """Return one step as a TensorDict, a lazy stack if it has ragged values and lanes.

    Loose values are given in the form that `ObjectColumn.clone` returns.
    """
    td = TensorDict({}, batch_size=[] if lanes is None else [lanes], device=device)
    ragged = []
    for key, value in values.items():
        leaf = loose.get(key)
        if leaf is None or (leaf.ragged and lanes is None):
            td.set(key, value)
        elif leaf.ragged:
            ragged.append(key)
        else:
            td.set(key, NonTensorData(value, batch_size=[]) if lanes is None else stacked(value))
    if not ragged:
        return td
    rows = list(td.unbind(0))
    for key in ragged:
        for row, value in zip(rows, values[key]):
            row.set(key, value)
    return lazy_stack(rows, 0)
