"""Pickling: how what a user gives us reaches another process, with the descriptors and shared memory it holds.

    pack ───► a Packed: bytes, and duplicates of descriptors ──► processes of this machine, when they are started: they
              have the same pipe, the same lock, the same memory
    dumps ──► bytes ──► any process: nothing that needs a descriptor

A descriptor is a number that means something else in every process. So no object that holds one is pickled with that
number: either the descriptor is duplicated (what `multiprocessing` gives to a process it starts: connections, sockets,
queues, locks, values, shared tensors), or the object is refused in the caller's frame. Both also hold for code that
pickles in between, such as a wrapper that calls `cloudpickle.dumps` itself: while `pack` or `dumps` runs, reducers are
registered in `copyreg`, and refusals in cloudpickle's pickler. They act in the calling thread only.

What the main script defines is pickled by value, since no other process can import it. cloudpickle does so for
`__main__`, and we do for `__mp_main__`, the script's name in a process that `multiprocessing` has spawned.
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
    """An object packed once for any number of processes of this machine; each of them calls `unpack` once."""

    def __init__(self, data: bytes, fds: Sequence[OwnedFd] = ()) -> None:
        self.data, self.fds = data, tuple(fds)

    def unpack(self) -> Any:
        """Return the object. Its descriptors go with it, so a `Packed` that has some can be unpacked only once."""
        fds, self.fds = self.fds, ()
        with receiving(fds):
            try:
                return pickle.loads(self.data)
            except SystemExit as request:  # raised by a module that unpickling imports: no request to end this process
                raise ImportError(f"what it imports called sys.exit({request.code!r})") from request

    def __reduce__(self) -> Any:
        if self.fds and context.get_spawning_popen() is None:
            raise UsageError(
                "it holds descriptors or shared memory, which can only be sent to processes of this machine"
            )
        return _packed, (self.data, [reduction.DupFd(one.number) for one in self.fds])


def _packed(data: bytes, fds: Sequence[Descriptor]) -> Packed:
    return Packed(data, [OwnedFd(one.detach()) for one in fds])


def pack(thing: Any, what: str, given: Mapping[str, Any] | None = None) -> Packed:
    """Pack `thing` for processes of this machine; raise an error that names it `what` if it cannot be sent.

    `given` holds the parts of `thing` that the user knows, by name; errors then name one of those instead.
    """
    popen = PackingPopen()
    data = _pickled(thing, what, popen, given)
    return Packed(data, popen.fds)


def dumps(thing: Any, what: str, given: Mapping[str, Any] | None = None) -> bytes:
    """Return `thing` as bytes for any other process; raise an error that names it `what` if it cannot be pickled."""
    return _pickled(thing, what, None, given)


def pack_bytes(thing: Any, what: str, given: Mapping[str, Any] | None = None) -> Packed:
    """Pack `thing` without descriptors, for processes on any machine."""
    return Packed(dumps(thing, what, given))


def _pickled(thing: Any, what: str, popen: PackingPopen | None, given: Mapping[str, Any] | None = None) -> bytes:
    before = context.get_spawning_popen()
    context.set_spawning_popen(cast(Any, popen))
    try:
        with _reducers(popen):
            try:
                return bytes(cloudpickle.dumps(thing))
            except Exception as cause:
                found = refusal({what: thing} if given is None else given, _pickling_error)
                raise UsageError(found or f"{what} cannot be sent to another process: {cause}") from cause
    finally:
        context.set_spawning_popen(before)


def _pickling_error(thing: Any) -> Exception | None:
    """Return the reason why something cannot be pickled; None if it can."""
    try:
        cloudpickle.dumps(thing)
    except Exception as cause:
        return cause
    return None


def shared_in(thing: Any) -> dict[int, Any]:
    """Return the objects in `thing` that hold descriptors or are shared, by id: a memo that makes `deepcopy` keep them.

    A deep copy of a connection would hold the same descriptor number, and close it.
    """
    found: dict[int, Any] = {}
    kinds = _reducer_table().keys()

    class Finder(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, one: Any) -> str | None:
            if isinstance(one, Tensor):
                return "a tensor"  # copied as usual
            if type(one) in kinds or any(c.__module__.startswith("multiprocessing.") for c in type(one).__mro__):
                found[id(one)] = one
                return "shared"
            return None

    with contextlib.suppress(Exception):  # the copy itself reports whatever else it cannot copy
        Finder(io.BytesIO()).dump(thing)
    return found


# ---- reducers, while something is packed ---------------------------------------------------------------------------

_SPAWNED_MAIN = "__mp_main__"  # elsewhere this is another name of `__main__`
_registered: dict[type, Callable[[Any], Any]] = {}
_registered_script: ModuleType | None = None  # the main script, while it is registered
_users = 0
_lock = threading.Lock()


@contextlib.contextmanager
def _reducers(popen: PackingPopen | None) -> Iterator[None]:
    """Within the block and in this thread, reduce what holds descriptors for `popen`, or refuse it if that is None."""
    global _users, _registered_script
    with _lock:
        _users += 1
        script = sys.modules.get(_SPAWNED_MAIN)
        known = cloudpickle.list_registry_pickle_by_value()
        if script is not None and script.__name__ == _SPAWNED_MAIN and _SPAWNED_MAIN not in known:
            cloudpickle.register_pickle_by_value(script)
            _registered_script = script
        for kind, reducer in _reducer_table().items():
            if kind not in copyreg.dispatch_table:
                copyreg.dispatch_table[kind] = _registered[kind] = _guarded(reducer)
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
                for kind in _registered:
                    copyreg.dispatch_table.pop(kind, None)
                _registered.clear()
                _copies_text[io.TextIOWrapper] = _copy_text
                cloudpickle.Pickler.reducer_override = _override
                if _registered_script is not None:
                    cloudpickle.unregister_pickle_by_value(_registered_script)
                    _registered_script = None


def _reducer_table() -> dict[type, Callable[[Any], Any]]:
    """Return the reducer of each type: ours, and those registered with `multiprocessing` (ctypes in shared memory)."""
    registered = cast(dict[type, Any], reduction.ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    found = {
        kind: reducer
        for kind, reducer in list(registered.items())
        # cloudpickle handles functions, which Python's reduce. torch's would share all tensors, ours only shared ones.
        if reducer.__module__ != reduction.__name__ and kind.__module__.partition(".")[0] != "torch"
    }
    for (module, name), prepare in _prepared.items():
        if (kind := getattr(sys.modules.get(module), name, None)) is not None:
            found[kind] = functools.partial(_reduce_prepared, prepare)
    return found | REDUCERS


_prepared: dict[tuple[str, str], Callable[[Any], None]] = {}


def before_packing(module: str, name: str, prepare: Callable[[Any], None]) -> None:
    """Call `prepare` with each instance of this class that is packed for processes of this machine."""
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
            raise UsageError("it can only be sent to a process of this machine, while that process is started")
        return thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return reduce


def _refuse_text(file: io.TextIOWrapper) -> Any:
    """Refuse an open text file: of one open for reading, cloudpickle would send the content and call that a file."""
    if here.popen is None and not here.refusing:
        return _copy_text(file)
    for name in ("stdout", "stderr"):  # the other process has its own
        if file in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return getattr, (sys, name)
    raise pickle.PicklingError("its descriptor number means something else in another process")


def _refuse_numbers(pickler: Any, thing: Any) -> Any:
    """Refuse an object that wraps a descriptor, which it would take along as a number."""
    ours = here.popen is not None or here.refusing
    if ours and (number := holds_number(thing)) is not None and type(thing) not in pickler.dispatch_table:
        raise pickle.PicklingError(f"its descriptor number {number} means something else in another process")
    return _override(pickler, thing)


_override = cloudpickle.Pickler.reducer_override
_copies_text: Any = cloudpickle.Pickler.dispatch_table
_copy_text = _copies_text[io.TextIOWrapper]
