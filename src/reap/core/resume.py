"""Resuming: a worker's state as plain tensors and numbers, from which another worker continues bit for bit.

    worker ──► env state, next observations, ids, statistics, random generators ──► a dictionary ──► file
    worker in another process ◄── the same dictionary

If an env cannot save its state, the dictionary says so (`"why"`): its episodes restart with new ids, and everything
else continues. Objects (a pickled env) are stored as bytes in a tensor, so a file of such states can be read without
executing anything. They are unpickled only when a worker resumes.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from reap.errors import CorruptState
from reap.spec import Leaf

FORMAT = 1


class CannotResume(Exception):
    """Raised where an open episode cannot be saved; the message says why."""


Packed = Mapping[str, Tensor]  # an object as pickled bytes, under the key `_PICKLE`
_PICKLE = "pickle"


def packed(value: Any, dumps: Callable[[Any], bytes] = cloudpickle.dumps) -> Packed:
    """Return any object as pickled bytes in a tensor."""
    return {_PICKLE: torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)}


def unpacked(data: Packed, loads: Callable[[bytes], Any] = pickle.loads) -> Any:
    """Return the object that was given to `packed`."""
    return loads(bytes(data[_PICKLE].numpy()))


def has_own_state(env: Any) -> bool:
    """Return whether an env has `get_state` and `set_state`, which save and restore its state."""
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


def without_pickles(state: Any) -> Any:
    """Return a collector's state without pickled envs; the episodes of these envs restart."""
    why = "the env is kept as a pickle, and the checkpoint was loaded without trusted=True"
    return without_episodes(state, why, _has_pickles)


def without_episodes(state: Any, why: str, which: Callable[[Any], bool] = lambda _: True) -> Any:
    """Return a collector's state in which open episodes restart for the reason `why`.

    `which(resume)` chooses the workers, all by default.
    """
    if not isinstance(state, Mapping):
        return state
    found = {name: without_episodes(part, why, which) for name, part in state.items()}
    resume = state.get("resume")
    if isinstance(resume, Mapping) and resume.get("why") is None and which(resume):
        found["resume"] = {**resume, "why": why, "env": None, "current": [], "policy": []}
    # A mapping without episodes is returned itself, not copied: a module's state dict has attributes of its own.
    return found if any(found[name] is not part for name, part in state.items()) else state


def anew(lanes: int, why: str, *, next_id: int, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a worker that cannot be reached any more: its episodes restart, with ids from `next_id`."""
    state = {"format": FORMAT, "lanes": lanes, "why": why, "env": None, "current": [], "policy": [], "random": None}
    return {**state, "next_id": next_id, "statistics": statistics}


def _has_pickles(part: Any) -> bool:
    if isinstance(part, Mapping):
        return _PICKLE in part or any(map(_has_pickles, part.values()))
    return isinstance(part, (list, tuple)) and any(map(_has_pickles, part))


def generators() -> dict[str, Any]:
    """Return the states of this process's random generators: torch's, NumPy's, Python's and the GPUs'."""
    name, words, position, has_gauss, gauss = np.random.get_state()
    version, numbers, following = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), torch.from_numpy(np.asarray(words).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, torch.tensor(numbers, dtype=torch.int64), following],
        "cuda": cuda,
    }


def set_generators(state: Mapping[str, Any]) -> None:
    """Restore the random generators to the states that `generators` returned."""
    torch.set_rng_state(state["torch"])
    name, words, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers.tolist()), following))
    if state["cuda"] and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


def check(state: Any, lanes: int, leaves: Sequence[Leaf]) -> None:
    """Raise CorruptState if a worker with `lanes` lanes that observe `leaves` cannot resume from `state`."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise CorruptState(f"'resume' must be a worker's state, got {type(state).__name__}; nothing was loaded")
    if state["format"] != FORMAT:
        raise CorruptState(f"'resume' has format {state['format']!r:.40}, this reap reads {FORMAT}; nothing was loaded")
    if state["lanes"] != lanes:
        raise CorruptState(
            f"this state was saved with {state['lanes']} lanes, this worker has {lanes}; nothing was loaded"
        )
    if state["why"] is not None:
        return
    seen = [_looks(value) for value in state["current"]]
    wanted = ["objects" if leaf.loose else f"{leaf.dtype}{[lanes, *leaf.shape]}" for leaf in leaves]
    if seen != wanted:
        raise CorruptState(
            f"this state was saved from another env: observations {seen}, here {wanted}; nothing was loaded"
        )


def _looks(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else "objects"
