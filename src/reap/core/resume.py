"""Resuming: what a worker is in the middle of, as plain tensors and numbers, so that another one goes on bit by bit.

    worker ──► env state, what each lane sees next, ids, statistics, random generators ──► a dictionary ──► file
    worker of another process ◄── the same

What an env cannot give is told in the state itself (`"why"`): then its episodes begin anew, with new ids, and all the
rest goes on. Objects (a pickled env) are kept as bytes in a tensor, so that a file of such states can be read without
executing anything; only whoever resumes from it unpickles them.
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
    """Why the middle of an episode cannot be saved."""


Packed = Mapping[str, Tensor]  # an object as bytes, under a name that says so
_PICKLE = "pickle"


def packed(value: Any, dumps: Callable[[Any], bytes] = cloudpickle.dumps) -> Packed:
    """Return any object as bytes in a tensor."""
    return {_PICKLE: torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)}


def unpacked(data: Packed, loads: Callable[[bytes], Any] = pickle.loads) -> Any:
    """The object that `packed` was given."""
    return loads(bytes(data[_PICKLE].numpy()))


def has_own_state(env: Any) -> bool:
    """Whether an env can say itself where it is, and be put there."""
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


def without_pickles(state: Any) -> Any:
    """A collector's state from which nothing will be unpickled: episodes whose envs are pickled begin anew."""
    why = "the env is kept as a pickle, and the checkpoint was loaded without trusted=True"
    return without_episodes(state, why, _has_pickles)


def without_episodes(state: Any, why: str, which: Callable[[Any], bool] = lambda _: True) -> Any:
    """A collector's state, in which the open episodes of all workers, or of some, begin anew."""
    if not isinstance(state, Mapping):
        return state
    found = {name: without_episodes(part, why, which) for name, part in state.items()}
    resume = state.get("resume")
    if isinstance(resume, Mapping) and resume.get("why") is None and which(resume):
        found["resume"] = {**resume, "why": why, "env": None, "current": [], "policy": []}
    # What has no episodes in it is given back itself: a module's state has more to it than its entries.
    return found if any(found[name] is not part for name, part in state.items()) else state


def anew(lanes: int, why: str, *, next_id: int, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a worker that nobody can ask any more: its episodes begin anew, with ids from `next_id` on."""
    state = {"format": FORMAT, "lanes": lanes, "why": why, "env": None, "current": [], "policy": [], "random": None}
    return {**state, "next_id": next_id, "statistics": statistics}


def _has_pickles(part: Any) -> bool:
    if isinstance(part, Mapping):
        return _PICKLE in part or any(map(_has_pickles, part.values()))
    return isinstance(part, (list, tuple)) and any(map(_has_pickles, part))


def generators() -> dict[str, Any]:
    """Where the random generators of this process are: torch's, NumPy's, Python's and the GPUs'."""
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
    """Put the random generators back to what `generators` returned."""
    torch.set_rng_state(state["torch"])
    name, words, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers.tolist()), following))
    if state["cuda"] and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


def check(state: Any, lanes: int, leaves: Sequence[Leaf]) -> None:
    """Raise if a worker of so many lanes, which see these leaves, cannot go on from there."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise CorruptState(f"'resume' is no state of a worker but {type(state).__name__}; nothing was loaded")
    if state["format"] != FORMAT:
        raise CorruptState(f"'resume' has format {state['format']!r:.40}, this reap reads {FORMAT}; nothing was loaded")
    if state["lanes"] != lanes:
        raise CorruptState(f"this state is of {state['lanes']} lanes, this worker has {lanes}; nothing was loaded")
    if state["why"] is not None:
        return
    seen = [_looks(value) for value in state["current"]]
    wanted = ["objects" if leaf.loose else f"{leaf.dtype}{[lanes, *leaf.shape]}" for leaf in leaves]
    if seen != wanted:
        raise CorruptState(f"this state is of another env: its lanes see {seen}, here {wanted}; nothing was loaded")


def _looks(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else "objects"
