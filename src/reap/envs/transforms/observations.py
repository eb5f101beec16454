"""Transforms that change the shape and the dtype of observations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from reap.arguments import whole
from reap.core.env import Env, Rows
from reap.core.slot import Row
from reap.envs.transforms.base import Transform, TransformLanes, chosen_keys
from reap.errors import SpecMismatch, WrongArgument
from reap.spec import AnyKey, Leaf, show

Array = np.ndarray[Any, Any]
_Conversion = tuple[int | None, bool, tuple[int, int]]  # axis of the colours, gray or not, new size
_GRAY = (0.299, 0.587, 0.114)  # weights of red, green and blue, as in OpenCV and Gymnasium


class FlattenObservation(Transform):
    """Flatten observations to one dimension. It costs nothing: the env writes into the same memory."""

    def __init__(self, keys: Collection[AnyKey] | AnyKey | None = None) -> None:
        self.keys = keys

    def around(self, env: Env) -> Env:
        return _FlattenLanes(env, self.keys)


class _FlattenLanes(TransformLanes):
    _needs_memory = False  # the inner env writes into the row itself, seen in the env's shape

    def __init__(self, env: Env, keys: Any) -> None:
        own, name = env.spec.observation, "FlattenObservation"
        keys = chosen_keys(name, keys, env.spec)
        sizes = {key: int(np.prod(own[key].shape, dtype=np.int64)) for key in keys}
        super().__init__(env, name, changed={key: Leaf((sizes[key],), own[key].dtype) for key in keys})
        leaves = list(own.values())
        self._shapes = {at: (env.spec.lanes, *leaves[at].shape) for at in self._converted}

    def _inner_arrays(self, arrays: Rows) -> list[Array]:
        inner, shapes = arrays[: self._inner_leaves], self._shapes
        return [array.reshape(shapes[at]) if at in shapes else array for at, array in enumerate(inner)]


class CastObservation(Transform):
    """Cast observations to another dtype: MuJoCo's are float64, but a network's parameters are float32.

    Args:
        dtype: the new dtype.
        keys: which observations to cast; None: all floating-point ones.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, *, keys: Collection[AnyKey] | AnyKey | None = None) -> None:
        if not isinstance(dtype, torch.dtype) or dtype is torch.bfloat16:
            raise WrongArgument(f"dtype must be a torch dtype that NumPy has too, such as torch.float32, got {dtype!r}")
        self.dtype, self.keys = dtype, keys

    def around(self, env: Env) -> Env:
        own, name = env.spec.observation, "CastObservation"
        keys = [key for key in chosen_keys(name, self.keys, env.spec) if own[key].dtype is not self.dtype]
        if self.keys is None:
            keys = [key for key in keys if own[key].dtype.is_floating_point]  # type: ignore[union-attr]
        return _CastLanes(env, name, changed={key: Leaf(own[key].shape, self.dtype) for key in keys}) if keys else env


class _CastLanes(TransformLanes):
    def _on_reset(self, lanes: list[int], raw: Rows, into: Rows) -> None:
        for at in self._raw:
            into[at][lanes] = raw[at][lanes]

    def _on_step(self, lanes: Sequence[int], raw: Rows, row: Row, ended: list[int]) -> list[int]:
        chosen: Any = slice(None) if len(lanes) == self.spec.lanes else list(lanes)
        for at in self._raw:
            row.next[at][chosen] = raw[at][chosen]
        return ended


class GrayscaleResize(Transform):
    """Turn uint8 images `[H, W, 3]`, `[3, H, W]` or `[H, W]` into gray ones `[1, height, width]`, averaged over areas.

    Args:
        height, width: the new size; None: unchanged.
        gray: False keeps colours, `[3, height, width]`.
        keys: which observations to convert; None: all such images.
    """

    def __init__(
        self,
        height: int | None = 84,
        width: int | None = 84,
        *,
        gray: bool = True,
        keys: Collection[AnyKey] | AnyKey | None = None,
    ) -> None:
        self.height, self.width = (
            whole(name, n, least=1, none=True) for name, n in (("height", height), ("width", width))
        )
        self.gray, self.keys = gray, keys

    def around(self, env: Env) -> Env:
        return _ImageLanes(env, self)


class _ImageLanes(TransformLanes):
    def __init__(self, env: Env, transform: GrayscaleResize) -> None:
        own, name = env.spec.observation, "GrayscaleResize"
        keys = chosen_keys(name, transform.keys, env.spec)
        keys = [key for key in keys if transform.keys is not None or _colour_axis(own[key]) is not None]
        bad = [key for key in keys if _colour_axis(own[key]) is None]
        if bad or not keys:
            seen = bad[:1] or list(own)
            told = ", ".join(f"{show(key)} is {own[key]}" for key in seen)
            raise SpecMismatch(f"{name} is for uint8 images, [H, W, 3], [3, H, W] or [H, W]; {told}")
        parts: dict[Any, _Conversion] = {}
        for key in keys:
            colours, (height, width) = _colour_axis(own[key]), _image_size(own[key])
            gray = transform.gray or colours == 0
            parts[key] = colours, gray, (transform.height or height, transform.width or width)
        changed = {key: Leaf((1 if gray else 3, *size), torch.uint8) for key, (_, gray, size) in parts.items()}
        super().__init__(env, name, changed=changed)
        self._parts = [(at, *parts[key]) for at, key in enumerate(own) if key in parts]

    def _on_reset(self, lanes: list[int], raw: Rows, into: Rows) -> None:
        for at, colours, gray, size in self._parts:
            into[at][lanes] = _convert(raw[at][lanes], colours, gray, size)

    def _on_step(self, lanes: Sequence[int], raw: Rows, row: Row, ended: list[int]) -> list[int]:
        chosen: Any = slice(None) if len(lanes) == self.spec.lanes else list(lanes)
        for at, colours, gray, size in self._parts:
            row.next[at][chosen] = _convert(raw[at][chosen], colours, gray, size)
        return ended


def _colour_axis(leaf: Leaf) -> int | None:
    """Return where an image has its colours: -1 last, 1 first, 0 if it has none; None if the leaf is no image."""
    if leaf.dtype is not torch.uint8 or len(leaf.shape) not in (2, 3):
        return None
    if len(leaf.shape) == 2:
        return 0
    return -1 if leaf.shape[-1] == 3 else 1 if leaf.shape[0] == 3 else None


def _image_size(leaf: Leaf) -> tuple[int, int]:
    sides = [n for n in leaf.shape if n != 3] if len(leaf.shape) == 3 else list(leaf.shape)
    if len(sides) != 2:
        sides = list(leaf.shape[:2]) if leaf.shape[-1] == 3 else list(leaf.shape[1:])
    return sides[0], sides[1]


def _convert(images: Array, colours: int | None, gray: bool, size: tuple[int, int]) -> Array:
    """Convert images `[n, …]` to uint8 `[n, C, *size]`."""
    values = torch.from_numpy(np.ascontiguousarray(images)).float()
    values = values.permute(0, 3, 1, 2) if colours == -1 else values[:, None] if colours == 0 else values
    if gray and values.shape[1] == 3:
        weights = torch.tensor(_GRAY).reshape(1, 3, 1, 1)
        values = (values * weights).sum(1, keepdim=True).round_()
    if tuple(values.shape[-2:]) != size:
        values = interpolate(values, size, mode="area").round_()
    return values.clamp_(0, 255).to(torch.uint8).numpy()
