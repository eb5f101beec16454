"""Pickling: how what a user gives us reaches another process, with the descriptors and shared memory it holds.

    pack ───► a Packed: bytes, and duplicates of descriptors ──► processes of this machine, when they are started: they
              have the same pipe, the same lock, the same memory
    dumps ──► bytes ──► any process: nothing that needs a descriptor

A descriptor is a number that means something else in every process. So nothing that holds one travels as a number: it
is duplicated (what `multiprocessing` gives to a process it starts: connections, sockets, queues, locks, values, shared
tensors), or refused in the caller's frame. Both hold for whatever pickles in between, such as a wrapper that calls
`cloudpickle.dumps` itself: reducers are entered in `copyreg`, and refusals in cloudpickle's pickler, while one of these
two runs, and act in its thread only.

What the main script defines travels by value: no other process can import it. That is cloudpickle's habit with
`__main__`, and ours with `__mp_main__`, its name in a process that `multiprocessing` has spawned.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import context, reduction
from types import ModuleType
from typing import Any, cast

import cloudpickle
from torch import Tensor

from reap._system.shared_objects.descriptors import Descriptor, OwnedFd, PackingPopen, here, receiving
from reap._system.shared_objects.reducers import OF_DESCRIPTORS, REDUCERS
from reap._system.shared_objects.refusals import holds_number, refusal
from reap.errors import UsageError


class Packed:
    """Something packed for processes of this machine, once however many they are; `unpack` it once in each."""

    def __init__(self, data: bytes, fds: Sequence[OwnedFd] = ()) -> None:
        self.data, self.fds = data, tuple(fds)

    def unpack(self) -> Any:
        """Return what is inside. Its descriptors are handed over, so where it has some it can be unpacked once."""
        fds, self.fds = self.fds, ()
        with receiving(fds):
            try:
                return pickle.loads(self.data)
            except SystemExit as request:  # of a module that it imports: no wish of this process to end
                raise ImportError(f"what it imports called sys.exit({request.code!r})") from request

    def __reduce__(self) -> Any:
        if self.fds and context.get_spawning_popen() is None:
            raise UsageError("it holds descriptors or shared memory, which reach processes of this machine only")
        return _packed, (self.data, [reduction.DupFd(one.number) for one in self.fds])


def _packed(data: bytes, fds: Sequence[Descriptor]) -> Packed:
    return Packed(data, [OwnedFd(one.detach()) for one in fds])


def pack(thing: Any, what: str, given: Mapping[str, Any] | None = None) -> Packed:
    """`thing` for processes of this machine; an error that names it as `what` if it cannot be sent.

    `given`: what users know of it, by name, where `thing` is more than that; errors name the part of it.
    """
    popen = PackingPopen()
    data = _pickled(thing, what, popen, given)
    return Packed(data, popen.fds)


def dumps(thing: Any, what: str, given: Mapping[str, Any] | None = None) -> bytes:
    """`thing` as bytes for any other process; an error that names it as `what` if that cannot be."""
    return _pickled(thing, what, None, given)


def pack_bytes(thing: Any, what: str) -> Packed:
    """`thing` for processes anywhere: without descriptors."""
    return Packed(dumps(thing, what))


def _pickled(thing: Any, what: str, popen: PackingPopen | None, given: Mapping[str, Any] | None = None) -> bytes:
    before = context.get_spawning_popen()
    context.set_spawning_popen(cast(Any, popen))
    try:
        with _reducers(popen):
            try:
                return bytes(cloudpickle.dumps(thing))
            except Exception as cause:
                found = refusal({what: thing} if given is None else given, _why_not)
                raise UsageError(found or f"{what} cannot be sent to another process: {cause}") from cause
    finally:
        context.set_spawning_popen(before)


def _why_not(thing: Any) -> Exception | None:
    """Return why something cannot be pickled, if it cannot."""
    try:
        cloudpickle.dumps(thing)
    except Exception as cause:
        return cause
    return None


def shared_in(thing: Any) -> dict[int, Any]:
    """What `thing` holds of descriptors and what processes share, by id: a memo for `copy.deepcopy`, which keeps it.

    A copy of a connection would have its number too, and close it.
    """
    found: dict[int, Any] = {}
    kinds = _table().keys()

    class Finder(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, one: Any) -> str | None:
            if isinstance(one, Tensor):
                return "a tensor"  # copied as it always is
            if type(one) in kinds or any(c.__module__.startswith("multiprocessing.") for c in type(one).__mro__):
                found[id(one)] = one
                return "shared"
            return None

    with contextlib.suppress(Exception):  # what else it cannot copy is the copy's to tell
        Finder(io.BytesIO()).dump(thing)
    return found


# ---- reducers, while something is packed ---------------------------------------------------------------------------

_SPAWNED_MAIN = "__mp_main__"  # elsewhere that is another name of `__main__`
_entered: dict[type, Callable[[Any], Any]] = {}
_by_value: ModuleType | None = None  # the script, while it is registered
_users = 0
_lock = threading.Lock()


@contextlib.contextmanager
def _reducers(popen: PackingPopen | None) -> Iterator[None]:
    """Inside, in this thread, what holds descriptors is reduced for `popen`, or refused where there is none."""
    global _users, _by_value
    with _lock:
        _users += 1
        script = sys.modules.get(_SPAWNED_MAIN)
        known = cloudpickle.list_registry_pickle_by_value()
        if script is not None and script.__name__ == _SPAWNED_MAIN and _SPAWNED_MAIN not in known:
            cloudpickle.register_pickle_by_value(script)
            _by_value = script
        for kind, reducer in _table().items():
            if kind not in copyreg.dispatch_table:
                copyreg.dispatch_table[kind] = _entered[kind] = _guarded(reducer)
        _copies_text[io.TextIOWrapper] = _refuse_text
        cloudpickle.Pickler.reducer_override = _refuse_numbers
    before = here.popen, here.refusing
    here.popen, here.refusing = popen, popen is None
    try:
        yield
    finally:
        here.popen, here.refusing = before
        with _lock:
            _users -= 1
            if not _users:
                for kind in _entered:
                    copyreg.dispatch_table.pop(kind, None)
                _entered.clear()
                _copies_text[io.TextIOWrapper] = _copy_text
                cloudpickle.Pickler.reducer_override = _override
                if _by_value is not None:
                    cloudpickle.unregister_pickle_by_value(_by_value)
                    _by_value = None


def _table() -> dict[type, Callable[[Any], Any]]:
    """How each kind is reduced: ours, and what others have entered for `multiprocessing` (ctypes of shared memory)."""
    registered = cast(dict[type, Any], reduction.ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    found = {
        kind: reducer
        for kind, reducer in list(registered.items())
        # Python's own of functions are cloudpickle's affair; torch's would share every tensor, ours those that are.
        if reducer.__module__ != reduction.__name__ and kind.__module__.partition(".")[0] != "torch"
    }
    for (module, name), prepare in _prepared.items():
        if (kind := getattr(sys.modules.get(module), name, None)) is not None:
            found[kind] = functools.partial(_reduce_prepared, prepare)
    return found | REDUCERS


_prepared: dict[tuple[str, str], Callable[[Any], None]] = {}


def before_packing(module: str, name: str, prepare: Callable[[Any], None]) -> None:
    """Call `prepare` with what is of this class when it is packed for processes of this machine."""
    _prepared[module, name] = prepare


def _reduce_prepared(prepare: Callable[[Any], None], thing: Any) -> Any:
    prepare(thing)
    return thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _guarded(reducer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    of_python = getattr(reducer, "__module__", "").partition(".")[0] == "multiprocessing"
    needs_descriptors = of_python or reducer in OF_DESCRIPTORS

    def reduce(thing: Any) -> Any:
        if here.popen is not None:
            return reducer(thing)
        if here.refusing and needs_descriptors:
            raise UsageError("it reaches processes of this machine only, when they are started")
        return thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return reduce


def _refuse_text(file: io.TextIOWrapper) -> Any:
    """cloudpickle would send the content of a file that is open for reading, and call the copy a file."""
    if here.popen is None and not here.refusing:
        return _copy_text(file)
    for name in ("stdout", "stderr"):  # those are the other process's own
        if file in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return getattr, (sys, name)
    raise pickle.PicklingError("its descriptor would be another one there")


def _refuse_numbers(pickler: Any, thing: Any) -> Any:
    """Refuse an object that wraps a descriptor: it would take it along as a number."""
    ours = here.popen is not None or here.refusing
    if ours and (number := holds_number(thing)) is not None and type(thing) not in pickler.dispatch_table:
        raise pickle.PicklingError(f"descriptor {number} would be another one there")
    return _override(pickler, thing)


_override = cloudpickle.Pickler.reducer_override
_copies_text: Any = cloudpickle.Pickler.dispatch_table
_copy_text = _copies_text[io.TextIOWrapper]
