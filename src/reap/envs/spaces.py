"""Gymnasium spaces as leaves: how an observation is written to a row, and how an action is read from one.

| space                    | default (one-hot)      | categorical_action_encoding=True |
|--------------------------|------------------------|----------------------------------|
| Discrete(n, start)       | int64 [n]              | int64 [], counted from 0         |
| MultiDiscrete, equal n   | int64 [k, n]           | int64 [k]                        |
| MultiDiscrete, mixed     | int64 [sum n]          | int64 [k]                        |
| MultiBinary(n)           | int8 [n]               | the same                         |
| Box                      | its own; [] becomes [1]| the same                         |
| Dict, Tuple              | nested keys            | the same                         |
| Sequence of the above    | [-1, …], ragged        | the same                         |
| Text, Graph, any other   | Python objects         | the same                         |

A user's own space class becomes an array if it has a shape and a dtype, a ragged leaf if its shape is None or has a -1,
and Python objects if it has no dtype. A Sequence of texts, dicts, tuples or sequences is stored as one object, a tuple.
Actions are read in any of these forms, whatever the flag is: the leaf that the policy writes decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from reap.core.columns.object_columns import private_copy
from reap.errors import SpecMismatch, UsageError
from reap.spec import TENSOR_DTYPES, Key, Leaf, numpy_dtype, show, torch_dtype

Array = np.ndarray[Any, Any]
Put = Callable[[Array, int, Any], None]
Encode = Callable[[Any, int], Array]
Decode = Callable[[Array], Any]
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class Observations:
    """The leaves of an observation space, and the code that writes observations into row arrays.

    Ragged and non-tensor leaves are refused unless `loose` is set.
    """

    def __init__(self, space: gym.Space[Any], *, categorical: bool, loose: bool = False) -> None:
        self._allow_loose = loose
        self.leaves: dict[Key, Leaf] = {}
        self._puts: list[tuple[tuple[Any, ...], Put, Encode]] = []
        self._add(space, (), (), categorical)
        if not self.leaves:
            raise UsageError(f"observation space {space} is empty; an env needs at least one observation")
        self.paths = [path for path, _, _ in self._puts]
        #: shape and dtype if the space is a plain Box, which the hot loop writes by a bare row assignment; else Nones
        self.plain: tuple[Any, Any] = (None, None)
        if isinstance(space, spaces.Box) and space.shape:
            self.plain = tuple(space.shape), space.dtype

    def write(self, observation: Any, arrays: Sequence[Array], lane: int) -> None:
        """Check one lane's observation and write it into `arrays`, which are in the order of `leaves`."""
        path: tuple[Any, ...] = ()
        try:
            for array, (path, put, _) in zip(arrays, self._puts):
                value = observation
                for part in path:
                    value = value[part]
                put(array, lane, value)
        except Exception as cause:
            if path:
                raise _entry_error(cause, observation, path) from cause
            raise

    def write_batch(self, observation: Any, arrays: Sequence[Array], at: Any, count: int | None = None) -> None:
        """Check a batch of observations and write it into the lanes `at` of `arrays`.

        The batch holds all lanes, of which those at `at` are written; with `count`, it holds only these `count` lanes.
        """
        path: tuple[Any, ...] = ()
        try:
            for array, (path, _, encode) in zip(arrays, self._puts):
                value = observation
                for part in path:
                    value = value[part]
                array[at] = encode(value, len(array))[at] if count is None else encode(value, count)
        except Exception as cause:
            if path:
                raise _entry_error(cause, observation, path) from cause
            raise

    def _add(self, space: gym.Space[Any], key: Key, path: tuple[Any, ...], categorical: bool) -> None:
        if isinstance(space, spaces.Dict):
            for name, sub in space.spaces.items():
                self._add(
                    sub, (*key, "observation" if name == "state" and not key else str(name)), (*path, name), categorical
                )
            return
        if isinstance(space, spaces.Tuple):
            if _stackable(space, categorical):
                self._leaf(space, *_tuple_leaf(space, categorical), key=key or ("observation",), path=path)
                return
            for i, sub in enumerate(space.spaces):
                self._add(sub, (*(key or ("observation",)), str(i)), (*path, i), categorical)
            return
        leaf, put = _observation_leaf(space, categorical)
        self._leaf(space, leaf, put, key=key or (("pixels",) if _image(space) else ("observation",)), path=path)

    def _leaf(self, space: gym.Space[Any], leaf: Leaf, put: Put, *, key: Key, path: tuple[Any, ...]) -> None:
        if key in self.leaves:
            raise UsageError(f"two observation entries would both be called {show(key)}")
        if leaf.loose and not self._allow_loose:
            raise UsageError(f"observation space {space} has no tensor form; wrap the env to return arrays")
        self.leaves[key] = leaf
        self._puts.append((path, put, _loose_encoder(put) if leaf.loose else _encoder(space, leaf)))


def _entry_error(cause: Exception, observation: Any, path: tuple[Any, ...]) -> SpecMismatch:
    """Return an error that names the entry at `path` of an observation and says what is wrong with it."""
    value, at = observation, "observation"
    name = at + "".join(f"[{part!r}]" for part in path)
    for part in path:
        try:
            value = value[part]
        except Exception:
            held = f"holds {list(value)}" if isinstance(value, Mapping) else f"is {type(value).__name__}"
            return SpecMismatch(f"env returned no {name}, which its observation_space has; {at} {held}")
        at += f"[{part!r}]"
    if not isinstance(cause, SpecMismatch):
        return SpecMismatch(f"{name}: env returned {value!r:.80}, which cannot be read: {cause!r}")
    begins, rest = "env returned observation ", str(cause)
    return SpecMismatch(f"env returned {name} {rest[len(begins) :]}" if rest.startswith(begins) else f"{name}: {rest}")


def checked_space(env: Any, what: str) -> gym.Space[Any]:
    """Return the env's space of this name. Raise `UsageError`, which names the env, if it is missing or no space."""
    found = getattr(env, what, None)
    if not isinstance(found, gym.Space):
        kind = type(getattr(env, "unwrapped", env)).__name__
        given = "" if found is None else f", got {found!r:.80}"
        raise UsageError(f"{kind} has no {what}: a gymnasium.spaces.Space is expected, set in its __init__{given}")
    return found


def _image(space: gym.Space[Any]) -> bool:
    """Whether a space is an image: a Box `[H, W, 3]` with bounds 0 and 255, of any dtype."""
    return (
        isinstance(space, spaces.Box)
        and len(space.shape) == 3
        and space.shape[-1] == 3
        and bool((space.low == 0).all())
        and bool((space.high == 255).all())
    )


def _stackable(space: spaces.Tuple[Any], categorical: bool) -> bool:
    """Whether all parts of a Tuple have equal leaves, so that they become one leaf with a leading dimension."""
    if not space.spaces or any(_children(part) for part in space.spaces):
        return False
    kinds = {type(part) for part in space.spaces}
    leaves = [_observation_leaf(part, categorical)[0] for part in space.spaces]
    looks = {(leaf.shape, leaf.dtype) for leaf in leaves}
    return len(kinds) == len(looks) == 1 and not leaves[0].loose


def _tuple_leaf(space: spaces.Tuple[Any], categorical: bool) -> tuple[Leaf, Put]:
    parts = [_observation_leaf(part, categorical) for part in space.spaces]
    first, _ = parts[0]
    leaf = Leaf((len(parts), *first.shape), first.dtype, space, first.one_hot)

    def put(array: Array, lane: int, value: Any) -> None:
        if len(value) != len(parts):
            raise SpecMismatch(f"env returned a tuple of {len(value)}, its space holds {len(parts)}")
        for i, (one, (_, put_one)) in enumerate(zip(value, parts)):
            put_one(array[lane], i, one)

    return leaf, put


def _observation_leaf(space: gym.Space[Any], categorical: bool) -> tuple[Leaf, Put]:
    if isinstance(space, spaces.Box):
        shape = space.shape or (1,)
        return Leaf(shape, torch_dtype(space.dtype), space), _put_array(space.shape, space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return Leaf(space.shape, torch.int8, space), _put_array(space.shape, np.dtype(np.int8))
    if isinstance(space, spaces.Discrete):
        n, start = int(space.n), int(space.start)
        if categorical:
            return Leaf((), torch.int64, space), _put_index(n, start)
        return Leaf((n,), torch.int64, space, one_hot=True), _put_one_hot(n, start)
    if isinstance(space, spaces.MultiDiscrete):
        shape = one_hot_shape(space)
        if categorical:
            return Leaf(space.shape, torch.int64, space), _put_categories(space)
        return Leaf(shape, torch.int64, space, one_hot=True), _put_multi_one_hot(space)
    if isinstance(space, spaces.Text):
        return Leaf((), None, space), _put_text
    if isinstance(space, spaces.Sequence):
        part = space.feature_space
        if not isinstance(part, (spaces.Dict, spaces.Tuple, spaces.Sequence)):
            element, put = _observation_leaf(part, categorical)
            if not element.loose:
                return Leaf((-1, *element.shape), element.dtype, space, element.one_hot), _put_sequence(element, put)
        return Leaf((), None, space), _put_object
    return _custom_leaf(space)


def _custom_leaf(space: gym.Space[Any]) -> tuple[Leaf, Put]:
    """Return the leaf of a space class that is not Gymnasium's, chosen by its dtype and shape."""
    if space.dtype is None or space.dtype not in TENSOR_DTYPES:
        return Leaf((), None, space), _put_object
    dtype = torch_dtype(space.dtype)
    if space.shape is None:
        return Leaf((-1,), dtype, space), _put_ragged(None, space.dtype)
    if -1 in space.shape:
        return Leaf(tuple(space.shape), dtype, space), _put_ragged(tuple(space.shape), space.dtype)
    return Leaf(space.shape or (1,), dtype, space), _put_array(space.shape, space.dtype)


def _put_text(array: Array, lane: int, value: Any) -> None:
    if not isinstance(value, str):
        raise SpecMismatch(f"env returned {value!r} for a Text space")
    array[lane] = value


def _put_object(array: Array, lane: int, value: Any) -> None:
    array[lane] = private_copy(value)


def _put_sequence(element: Leaf, put_one: Put) -> Put:
    """Return a writer that stores a Sequence's elements, in a tuple or stacked, as one tensor `[length, …]`."""
    dtype, shape = numpy_dtype(element.dtype), element.shape
    stackable = isinstance(element.space, (spaces.Box, spaces.MultiBinary)) and element.space.shape == shape

    def put(array: Array, lane: int, value: Any) -> None:
        if stackable and value.__class__ is np.ndarray and value.dtype == dtype and value.shape[1:] == shape:
            values = value.copy()
        else:
            values = np.zeros((len(value), *shape), dtype)
            for i, one in enumerate(value):
                put_one(values, i, one)
        array[lane] = torch.from_numpy(values)

    return put


def _put_ragged(shape: tuple[int, ...] | None, dtype: Any) -> Put:
    """Return a writer for arrays of any shape (`shape` None), or of any size in the dimensions that are -1."""
    dtype = np.dtype(dtype)

    def put(array: Array, lane: int, value: Any) -> None:
        found = np.asarray(value)
        wanted = found.shape if shape is None else shape
        if len(wanted) == found.ndim:
            wanted = tuple(have if want == -1 else want for want, have in zip(wanted, found.shape))
        array[lane] = torch.from_numpy(fit(found, wanted, dtype).astype(dtype))  # astype copies

    return put


def _loose_encoder(put: Put) -> Encode:
    """Return an encoder that turns a batch of values, one per lane, into an array of references."""

    def encode(values: Any, count: int) -> Array:
        if len(values) != count:
            raise SpecMismatch(f"env returned {len(values)} values for {count} lanes")
        cells = np.full(count, None, object)
        for lane, value in enumerate(values):
            put(cells, lane, value)
        return cells

    return encode


def one_hot_shape(space: spaces.MultiDiscrete) -> tuple[int, ...]:
    """Return `[k, n]` if all choices have the same size, else `[sum n]`."""
    nvec = space.nvec
    return (*nvec.shape, int(nvec.flat[0])) if (nvec == nvec.flat[0]).all() else (int(nvec.sum()),)


def _put_array(shape: tuple[int, ...], dtype: Any) -> Put:
    dtype = np.dtype(dtype)

    def put(array: Array, lane: int, value: Any) -> None:
        if value.__class__ is not np.ndarray or value.shape != shape or value.dtype is not dtype:
            value = fit(value, shape, dtype)
        array[lane] = value

    return put


def fit(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], what: str = "observation") -> Array:
    """Return `value` as an array if it has this shape and `dtype` can hold its numbers; else raise SpecMismatch.

    The array keeps its own dtype, and a cast within a kind is allowed (float64 to float32). `what` is for the error.
    """
    array = np.asarray(value)
    fits = np.can_cast(array.dtype, dtype, "same_kind")
    if fits and dtype.kind in "iu" and array.dtype.kind in "iu" and not np.can_cast(array.dtype, dtype) and array.size:
        bounds = np.iinfo(dtype)
        fits = bounds.min <= int(array.min()) and int(array.max()) <= bounds.max
    if array.shape != tuple(shape) or not fits:
        raise SpecMismatch(f"env returned {what} {array.dtype}{list(array.shape)}, its space says {dtype}{list(shape)}")
    return array


def _category(value: Any, n: int, start: int) -> int:
    index = int(value) - start
    if not 0 <= index < n:
        raise SpecMismatch(f"env returned {value!r} for Discrete({n}, start={start})")
    return index


def _put_index(n: int, start: int) -> Put:
    def put(array: Array, lane: int, value: Any) -> None:
        array[lane] = _category(value, n, start)

    return put


def _put_one_hot(n: int, start: int) -> Put:
    def put(array: Array, lane: int, value: Any) -> None:
        array[lane] = 0
        array[lane, _category(value, n, start)] = 1

    return put


def _categories(value: Any, space: spaces.MultiDiscrete) -> Array:
    index = fit(value, space.shape, np.dtype(np.int64)) - space.start
    if ((index < 0) | (index >= space.nvec)).any():
        raise SpecMismatch(f"env returned {value!r} for {space}")
    return index


def _put_categories(space: spaces.MultiDiscrete) -> Put:
    def put(array: Array, lane: int, value: Any) -> None:
        array[lane] = _categories(value, space)

    return put


def _put_multi_one_hot(space: spaces.MultiDiscrete) -> Put:
    sizes = space.nvec.reshape(-1)
    offsets = np.cumsum(sizes) - sizes

    def put(array: Array, lane: int, value: Any) -> None:
        array[lane] = 0
        array[lane].reshape(-1)[offsets + _categories(value, space).reshape(-1)] = 1

    return put


def _encoder(space: gym.Space[Any], leaf: Leaf) -> Encode:
    """Return a function that encodes a batch of values `[N, …]` of one space as the array of its leaf."""
    if isinstance(space, spaces.Tuple):
        part = Leaf(leaf.shape[1:], leaf.dtype, None, leaf.one_hot)
        encoders = [_encoder(one, part) for one in space.spaces]
        return lambda values, count: np.stack([encode(v, count) for v, encode in zip(values, encoders)], axis=1)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        sizes = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        eyes = [np.eye(int(n), dtype=np.int64) for n in sizes.reshape(-1)]
        equal = (sizes == sizes.flat[0]).all()

        def categories(values: Any, count: int) -> Array:
            index = fit(values, (count, *sizes.shape), np.dtype(np.int64)) - space.start
            if ((index < 0) | (index >= sizes)).any():
                raise SpecMismatch(f"env returned a value outside {space}")
            if not leaf.one_hot:
                return index
            if equal:
                return np.asarray(eyes[0][index])
            flat = index.reshape(count, -1)
            return np.concatenate([eye[flat[:, i]] for i, eye in enumerate(eyes)], axis=-1)

        return categories
    target, dtype = tuple(space.shape or ()), np.dtype(numpy_dtype(leaf.dtype))

    def plain(values: Any, count: int) -> Array:
        if values.__class__ is not np.ndarray or values.shape != (count, *target) or values.dtype is not dtype:
            values = fit(values, (count, *target), dtype)
        array: Array = values if target == leaf.shape else values.reshape(count, *leaf.shape)
        return array

    return plain


class Actions:
    """The leaves of an action space, and the code that turns a row's actions into arguments for the env's `step`."""

    def __init__(self, space: gym.Space[Any], *, categorical: bool) -> None:
        self.space = space
        self.leaves: dict[Key, Leaf] = {}
        self._collect(space, ("action",), categorical)

    def _collect(self, space: gym.Space[Any], key: Key, categorical: bool) -> None:
        for name, sub in _children(space):
            self._collect(sub, (*key, str(name)), categorical)
        if not _children(space):
            self.leaves[key] = _action_leaf(space, categorical)

    def decoder(self, columns: Mapping[Key, Leaf], *, batch: bool = False) -> Callable[..., Any]:
        """Return a function from row arrays, in the order of `leaves`, to one action per lane, or one batched action.

        It returns the batched action if `batch` is set. Raise SpecMismatch if the columns cannot be read as actions.
        """
        decodes = [_decoder(key, leaf.space, columns[key], batch=batch) for key, leaf in self.leaves.items()]
        if len(decodes) == 1 and not _children(self.space):
            return decodes[0]

        def decode(*arrays: Array) -> Any:
            per_leaf = [read(array) for read, array in zip(decodes, arrays)]
            if batch:
                return self._nest(self.space, ("action",), dict(zip(self.leaves, per_leaf)))
            return [self._nest(self.space, ("action",), dict(zip(self.leaves, of_lane))) for of_lane in zip(*per_leaf)]

        return decode

    def _nest(self, space: gym.Space[Any], key: Key, leaves: Mapping[Key, Any]) -> Any:
        """Return the leaves' values nested in dicts and tuples, as the space nests them."""
        children = _children(space)
        if not children:
            return leaves[key]
        parts = {name: self._nest(sub, (*key, str(name)), leaves) for name, sub in children}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())


def _children(space: gym.Space[Any]) -> list[tuple[Any, gym.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else []


def _action_leaf(space: gym.Space[Any], categorical: bool) -> Leaf:
    if isinstance(space, spaces.Discrete):
        return Leaf(() if categorical else (int(space.n),), torch.int64, space, one_hot=not categorical)
    if isinstance(space, spaces.MultiDiscrete):
        shape = space.shape if categorical else one_hot_shape(space)
        return Leaf(shape, torch.int64, space, one_hot=not categorical)
    if isinstance(space, spaces.MultiBinary):
        return Leaf(space.shape, torch.int8, space)
    if isinstance(space, spaces.Box):
        return Leaf(space.shape or (1,), torch_dtype(space.dtype), space)
    raise UsageError(f"action space {space} has no tensor form")


def _decoder(key: Key, space: gym.Space[Any] | None, column: Leaf, *, batch: bool = False) -> Decode:
    if column.dtype is torch.bfloat16 and isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        widened = _decoder(key, space, Leaf(column.shape, torch.float32), batch=batch)
        return lambda a: widened(_from_bfloat16(a))
    whole = column.dtype is not None and not column.dtype.is_floating_point and not column.dtype.is_complex
    shape = column.shape
    if isinstance(space, spaces.Discrete):
        n, start = int(space.n), int(space.start)
        if n == 1 and shape in ((), (1,)):  # there is only one choice, whatever the policy writes
            return lambda a: np.full(len(a), start, space.dtype) if batch else [start] * len(a)
        if shape in ((), (1,)) and whole:
            return _batch_index_decoder(space) if batch else _index_decoder(n, start)
        if shape == (n,):
            if batch:
                return lambda a: (a.argmax(-1) + start).astype(space.dtype)
            return lambda a: (a.argmax(-1) + start).tolist()
    elif isinstance(space, spaces.MultiDiscrete):
        nvec, starts, dtype = space.nvec, space.start, space.dtype
        if shape == space.shape and whole:
            return _multi_index_decoder(space)
        if shape == (*space.shape, int(nvec.flat[0])) and shape == one_hot_shape(space):
            return lambda a: (a.argmax(-1) + starts).astype(dtype)
        if shape == (int(nvec.sum()),) and len(space.shape) == 1:
            cuts = np.cumsum(nvec)[:-1]
            return lambda a: (np.stack([p.argmax(-1) for p in np.split(a, cuts, -1)], -1) + starts).astype(dtype)
    elif isinstance(space, (spaces.Box, spaces.MultiBinary)) and shape == (space.shape or (1,)):
        own, target = space.dtype, space.shape
        if column.dtype is not torch.bfloat16 and np.can_cast(numpy_dtype(column.dtype), own, "same_kind"):
            # astype copies: foreign code may keep or change what it is given, and slots are recycled
            return lambda a: a.astype(own).reshape(len(a), *target)
    raise SpecMismatch(f"policy writes {show(key)} as {column}, the env's action space is {space}")


def _from_bfloat16(array: Array) -> Array:
    """Return bfloat16 values as float32: NumPy lacks the type, and integers of the same bytes sort differently."""
    wide: Array = (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def _index_decoder(n: int, start: int) -> Decode:
    choices = frozenset(range(n))

    def decode(array: Array) -> Sequence[Any]:
        index: list[int] = array.tolist() if array.ndim == 1 else array[:, 0].tolist()
        if not choices.issuperset(index):
            raise SpecMismatch(
                f"policy chose action {next(i for i in index if i not in choices)} of {n} (0 to {n - 1})"
            )
        return index if start == 0 else [i + start for i in index]

    return decode


def _multi_index_decoder(space: spaces.MultiDiscrete) -> Decode:
    def decode(array: Array) -> Array:
        if (array < 0).any() or (array >= space.nvec).any():
            raise SpecMismatch(f"policy chose an action outside {space}")
        chosen: Array = (array + space.start).astype(space.dtype)
        return chosen

    return decode


def _batch_index_decoder(space: spaces.Discrete) -> Decode:
    n, start = int(space.n), int(space.start)

    def decode(array: Array) -> Array:
        index = array if array.ndim == 1 else array.reshape(-1)
        beyond = index.view(_UNSIGNED[index.itemsize]) if index.dtype.kind == "i" else index  # negatives: far above n
        if beyond[beyond.argmax()] >= n:  # `max` takes three times as long to start
            wrong = index[(index < 0) | (index >= n)][0]
            raise SpecMismatch(f"policy chose action {wrong} of {n} (0 to {n - 1})")
        return (index + start if start else index).astype(space.dtype)  # a copy, either way

    return decode
