"""Gymnasium's spaces as JSON, stored with a dataset's columns so that later exports have the env's own spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

_MANY = 4096  # a space with more different bounds is not stored; images have uniform bounds


def space_state(space: gym.Space[Any] | None) -> dict[str, Any] | None:
    """Return a space as JSON; None for kinds without values of one shape and dtype, and for too many bounds."""
    if isinstance(space, gym.spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, gym.spaces.MultiBinary):
        return {"kind": "MultiBinary", "shape": list(space.shape)}
    if isinstance(space, gym.spaces.Box):
        low, high = _bounds(space.low), _bounds(space.high)
        if max(len(low), len(high)) <= _MANY:
            return {"kind": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    return None


def space_from(state: Mapping[str, Any] | None) -> gym.Space[Any] | None:
    """Return the space that `space_state` encoded."""
    if state is None:
        return None
    if state["kind"] == "Discrete":
        return gym.spaces.Discrete(state["n"], start=state["start"])
    if state["kind"] == "MultiDiscrete":
        return gym.spaces.MultiDiscrete(np.array(state["nvec"]), start=np.array(state["start"]))
    if state["kind"] == "MultiBinary":
        return gym.spaces.MultiBinary(state["shape"])
    shape, dtype = tuple(state["shape"]), np.dtype(state["dtype"])
    low, high = (_array(state[name], shape, dtype) for name in ("low", "high"))
    return gym.spaces.Box(low, high, shape, dtype.type)


def _bounds(values: np.ndarray[Any, Any]) -> list[str]:
    """Return numbers as text, since JSON has no infinity; a single one if all are the same."""
    found = [str(value) for value in values.reshape(-1).tolist()]
    return found[:1] if len(set(found)) == 1 else found


def _array(texts: list[str], shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    values = np.array(texts).astype(dtype) if dtype.kind != "b" else np.array([text == "True" for text in texts])
    return np.full(shape, values[0], dtype) if len(texts) == 1 else values.reshape(shape)
