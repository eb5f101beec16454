"""Pickling: how what a user gives us reaches another process, with the descriptors and shared memory it holds.

    pack ───► a Parcel: bytes, and duplicates of descriptors ──► processes of this machine, when they are started: they
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
import ctypes
import errno
import functools
import io
import mmap
import os
import pickle
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import context, reduction, resource_tracker, shared_memory, synchronize
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_storage

from reap._system.refusals import holds_number, refusal
from reap.errors import UsageError

_REMEDY = "make it with multiprocessing.get_context('spawn')"


class Parcel:
    """Something packed for processes of this machine, once however many they are; `open` it once in each."""

    def __init__(self, data: bytes, fds: Sequence[OwnedFd] = ()) -> None:
        self.data, self.fds = data, tuple(fds)

    def open(self) -> Any:
        """What is inside. Its descriptors are handed over, so where it has some it can be opened once."""
        fds, self.fds = self.fds, ()
        with receiving(fds):
            try:
                return pickle.loads(self.data)
            except SystemExit as request:  # of a module that it imports: no wish of this process to end
                raise ImportError(f"what it imports called sys.exit({request.code!r})") from request

    def __reduce__(self) -> Any:
        if self.fds and context.get_spawning_popen() is None:
            raise UsageError("it holds descriptors or shared memory, which reach processes of this machine only")
        return _parcel, (self.data, [reduction.DupFd(one.number) for one in self.fds])


def _parcel(data: bytes, fds: Sequence[Descriptor]) -> Parcel:
    return Parcel(data, [OwnedFd(one.detach()) for one in fds])


class OwnedFd:
    """A descriptor that is closed when nobody refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


def pack(thing: Any, what: str, given: Mapping[str, Any] | None = None) -> Parcel:
    """`thing` for processes of this machine; an error that names it as `what` if it cannot be sent.

    `given`: what users know of it, by name, where `thing` is more than that; errors name the part of it.
    """
    popen = _Popen()
    data = _pickled(thing, what, popen, given)
    return Parcel(data, popen.fds)


def dumps(thing: Any, what: str, given: Mapping[str, Any] | None = None) -> bytes:
    """`thing` as bytes for any other process; an error that names it as `what` if that cannot be."""
    return _pickled(thing, what, None, given)


def pack_bytes(thing: Any, what: str, given: Mapping[str, Any] | None = None) -> Parcel:
    """`thing` for processes anywhere: without descriptors."""
    return Parcel(dumps(thing, what, given))


def _pickled(thing: Any, what: str, popen: _Popen | None, given: Mapping[str, Any] | None = None) -> bytes:
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
    """Why something cannot be pickled, if it cannot."""
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


# ---- descriptors on their way -------------------------------------------------------------------------------------


class _Popen:
    """What `multiprocessing` asks while it pickles for a process it starts: here, the parcel that is being packed."""

    def __init__(self) -> None:
        self.fds: list[OwnedFd] = []
        self.others: set[str] | None = None  # semaphores that other processes have, once somebody has looked

    def duplicate_for_child(self, fd: int) -> int:
        """Keep it, whatever becomes of the original until the child is there; returns its place in the parcel."""
        self.fds.append(OwnedFd(os.dup(fd)))
        return len(self.fds) - 1

    @staticmethod
    def DupFd(place: int) -> Descriptor:
        """What travels in place of the number."""
        return Descriptor(place)


class Descriptor:
    """A descriptor by its place in the parcel it comes with."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """A descriptor of this process, for the caller to close."""
        return os.dup(_here.arrived[self._place].number)


class _Here(threading.local):
    """What this thread is at."""

    popen: _Popen | None = None  # packing for a process of this machine
    refusing = False  # packing for any process
    arrived: Sequence[OwnedFd] = ()  # the descriptors that came with the parcel that is being opened


_here = _Here()


@contextlib.contextmanager
def receiving(fds: Sequence[OwnedFd]) -> Iterator[None]:
    """Inside, what is unpickled finds its descriptors among these."""
    before, _here.arrived = _here.arrived, fds
    try:
        yield
    finally:
        _here.arrived = before


_COUNT = struct.Struct("!i")
_AT_ONCE = 200  # descriptors in one message; Linux takes 253
_PATIENCE = 60.0  # seconds until it is said that descriptors are not taken


def send_fds(one: socket.socket, fds: Sequence[OwnedFd]) -> None:
    """The first words to a child: how many descriptors its parcel comes with, and these."""
    numbers, word = [fd.number for fd in fds], _COUNT.pack(len(fds))
    deadline = time.monotonic() + _PATIENCE
    while word:
        try:
            socket.send_fds(one, [word], numbers[:_AT_ONCE])
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # one that is gone says so through its sentinel
                return
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)  # until children before it have taken theirs: there is nothing to wait on
            continue
        del numbers[:_AT_ONCE]
        word = b"!" if numbers else b""


def received_fds(connection: int) -> list[OwnedFd]:
    """The counterpart of `send_fds`, in the child."""
    one = socket.socket(fileno=connection)
    try:
        data, found, _, _ = socket.recv_fds(one, _COUNT.size, _AT_ONCE)
        if not data:
            raise EOFError
        (count,) = _COUNT.unpack(data)
        while len(found) < count:
            found += socket.recv_fds(one, 1, _AT_ONCE)[1]
    finally:
        one.detach()
    for fd in found:
        os.set_inheritable(fd, False)
    return [OwnedFd(fd) for fd in found]


# ---- reducers -----------------------------------------------------------------------------------------------------

_SPAWNED_MAIN = "__mp_main__"  # elsewhere that is another name of `__main__`
_entered: dict[type, Callable[[Any], Any]] = {}
_by_value: ModuleType | None = None  # the script, while it is registered
_users = 0
_lock = threading.Lock()


@contextlib.contextmanager
def _reducers(popen: _Popen | None) -> Iterator[None]:
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
    before = _here.popen, _here.refusing
    _here.popen, _here.refusing = popen, popen is None
    try:
        yield
    finally:
        _here.popen, _here.refusing = before
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
    return found | _OURS


_prepared: dict[tuple[str, str], Callable[[Any], None]] = {}


def before_packing(module: str, name: str, prepare: Callable[[Any], None]) -> None:
    """Call `prepare` with what is of this class when it is packed for processes of this machine."""
    _prepared[module, name] = prepare


def _reduce_prepared(prepare: Callable[[Any], None], thing: Any) -> Any:
    prepare(thing)
    return thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _guarded(reducer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    of_python = getattr(reducer, "__module__", "").partition(".")[0] == "multiprocessing"
    needs_descriptors = of_python or reducer in _OF_DESCRIPTORS

    def reduce(thing: Any) -> Any:
        if _here.popen is not None:
            return reducer(thing)
        if _here.refusing and needs_descriptors:
            raise UsageError("it reaches processes of this machine only, when they are started")
        return thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return reduce


def _refuse_text(file: io.TextIOWrapper) -> Any:
    """cloudpickle would send the content of a file that is open for reading, and call the copy a file."""
    if _here.popen is None and not _here.refusing:
        return _copy_text(file)
    for name in ("stdout", "stderr"):  # those are the other process's own
        if file in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return getattr, (sys, name)
    raise pickle.PicklingError("its descriptor would be another one there")


def _refuse_numbers(pickler: Any, thing: Any) -> Any:
    """An object that wraps a descriptor would take it along as a number."""
    ours = _here.popen is not None or _here.refusing
    if ours and (number := holds_number(thing)) is not None and type(thing) not in pickler.dispatch_table:
        raise pickle.PicklingError(f"descriptor {number} would be another one there")
    return _override(pickler, thing)


_override = cloudpickle.Pickler.reducer_override
_copies_text: Any = cloudpickle.Pickler.dispatch_table
_copy_text = _copies_text[io.TextIOWrapper]


def _reduce_connection(connection: Connection) -> Any:
    return _connection, (reduction.DupFd(connection.fileno()), connection.readable, connection.writable)


def _connection(fd: Descriptor, readable: bool, writable: bool) -> Connection:
    return Connection(fd.detach(), readable, writable)


def _reduce_socket(one: socket.socket) -> Any:
    if one.fileno() < 0:
        raise ValueError("a socket that is closed")
    return _socket, (reduction.DupFd(one.fileno()), one.family, one.type, one.proto, one.gettimeout())


def _socket(fd: Descriptor, family: int, kind: int, proto: int, timeout: float | None) -> socket.socket:
    one = socket.socket(family, kind, proto, fileno=fd.detach())
    one.settimeout(timeout)
    return one


def _reduce_tensor(tensor: Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not cast(Any, tensor).is_shared():
        return cast(Any, tensor).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not tensor.is_leaf:
        raise ValueError("a tensor with a history (requires_grad, and not a leaf); give its detach()")
    storage = cast(Any, reduce_storage)(tensor.untyped_storage())
    view = tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
    return _shared_tensor, (storage, view, tensor.requires_grad, type(tensor) is nn.Parameter)


def _shared_tensor(storage: Any, view: Any, requires_grad: bool, parameter: bool) -> Tensor:
    (rebuild, arguments), (dtype, offset, size, stride) = storage, view
    tensor = torch.empty(0, dtype=dtype).set_(rebuild(*arguments), offset, size, stride)
    return nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _reduce_shared_memory(memory: shared_memory.SharedMemory) -> Any:
    return _shared_memory, (memory.name, reduction.DupFd(cast(Any, resource_tracker).getfd()))


def _shared_memory(name: str, tracker: Descriptor) -> shared_memory.SharedMemory:
    _track_with(tracker)
    return shared_memory.SharedMemory(name)


def _reduce_shareable_list(these: shared_memory.ShareableList[Any]) -> Any:
    return _shareable_list, (these.shm.name, reduction.DupFd(cast(Any, resource_tracker).getfd()))


def _shareable_list(name: str, tracker: Descriptor) -> shared_memory.ShareableList[Any]:
    _track_with(tracker)
    return shared_memory.ShareableList(name=name)


def _track_with(tracker: Descriptor) -> None:
    """Let the giver's resource tracker be ours, as in every process that `multiprocessing` starts.

    One of our own would take the memory for ours, and unlink it under the giver's feet when this process ends.
    """
    ours = cast(Any, resource_tracker)._resource_tracker
    if ours._fd is None:
        ours._fd = tracker.detach()


# ---- semaphores: in locks, events, conditions, barriers, queues, values -------------------------------------------


def _reduce_semaphore(lock: synchronize.SemLock) -> Any:
    inner = cast(Any, lock)._semlock
    if inner.name is None or cast(Any, lock)._is_fork_ctx:
        fd = reduction.DupFd(_page_of(lock).number)
        return _semaphore_on_page, (type(lock), fd, inner.kind, inner.maxvalue)
    return _named_semaphore, (type(lock), inner.kind, inner.maxvalue, inner.name)


def _named_semaphore(kind: Any, *state: Any) -> Any:
    lock = kind.__new__(kind)
    lock.__setstate__((0, *state))
    return lock


def _semaphore_on_page(kind: Any, fd: Descriptor, sort: int, most: int) -> Any:
    number = fd.detach()
    page = mmap.mmap(number, mmap.PAGESIZE)
    lock = kind.__new__(kind)
    lock.__setstate__((ctypes.addressof(ctypes.c_char.from_buffer(page)), sort, most, None))
    _pages.append(page)  # for good: who has its `acquire` does not have the page
    _moved[lock] = OwnedFd(number)  # it may be sent on from here
    return lock


_pages: list[mmap.mmap] = []
_moved: weakref.WeakKeyDictionary[Any, OwnedFd] = weakref.WeakKeyDictionary()


def _page_of(lock: synchronize.SemLock) -> OwnedFd:
    """The memory of a semaphore without a name, as a file that others can map.

    A semaphore of the fork context (the default on Linux before Python 3.14) was unlinked when it was made: only forks
    can have it. Its page is replaced here, at its address, by one that lies in an anonymous file: everybody in this
    process goes on with it, and processes that are given the file can join.
    """
    if lock not in _moved:
        address = cast(Any, lock)._semlock.handle
        try:
            others = _others() if _here.popen is None or _here.popen.others is None else _here.popen.others
            if _here.popen is not None:
                _here.popen.others = others
            if _inode_at(address) in others:
                raise OSError("a process forked from this one, or the one that forked it, has it already")
            _moved[lock] = _moved_page(address)
        except OSError as cause:
            raise ValueError(
                f"a {type(lock).__name__} of multiprocessing's fork context cannot be shared with a worker ({cause}); "
                f"{_REMEDY}"
            ) from cause
    return _moved[lock]


def _inode_at(address: int) -> str:
    """The file that is mapped at this address, by its inode."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split(None, 1)[0].split("-"))
        if first <= address < last:
            return line.split()[4]
    raise OSError("its memory is not to be found in /proc/self/maps")


def _others() -> set[str]:
    """Inodes of the semaphores that other processes of this user have mapped."""
    found: set[str] = set()
    for one in Path("/proc").iterdir():
        if one.name.isdigit() and int(one.name) != os.getpid():
            with contextlib.suppress(OSError):
                if one.stat().st_uid != os.getuid():
                    continue
                text = (one / "maps").read_text(errors="replace")
                found |= (
                    {line.split()[4] for line in text.splitlines() if "/sem." in line} if "/sem." in text else set()
                )
    return found


def _moved_page(address: int) -> OwnedFd:
    """Put the page at `address` into an anonymous file, which is mapped there from now on."""
    if sys.platform != "linux" or address % mmap.PAGESIZE:
        raise OSError("its memory cannot be moved here")
    # PyDLL: with the interpreter's lock held, so that no other thread of Python's comes in between. One that waits for
    # this very semaphore has given the lock up: it is woken on the old page afterwards, and goes on to wait on the new.
    libc = ctypes.PyDLL(None, use_errno=True)
    for call in (libc.mmap, libc.mremap):
        call.restype = ctypes.c_void_p
    size, failed = ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_void_p(-1).value
    fd = OwnedFd(os.memfd_create("reap-semaphore"))
    os.ftruncate(fd.number, mmap.PAGESIZE)
    old = libc.mremap(ctypes.c_void_p(address), ctypes.c_size_t(0), size, 1)  # MREMAP_MAYMOVE of 0 bytes: once more
    if old == failed:
        raise OSError(ctypes.get_errno(), "its memory cannot be mapped twice")
    with mmap.mmap(fd.number, mmap.PAGESIZE) as new:
        new[:] = ctypes.string_at(address, mmap.PAGESIZE)
        placed = libc.mmap(
            ctypes.c_void_p(address),
            size,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | 0x10,  # MAP_FIXED
            fd.number,
            ctypes.c_long(0),
        )
    if placed != failed:
        for _ in range(threading.active_count()):
            libc.sem_post(ctypes.c_void_p(old))
    libc.munmap(ctypes.c_void_p(old), size)
    if placed == failed:
        raise OSError(ctypes.get_errno(), "its memory cannot be moved")
    return fd


_OURS: dict[type, Callable[[Any], Any]] = {
    Connection: _reduce_connection,
    socket.socket: _reduce_socket,
    Tensor: _reduce_tensor,
    nn.Parameter: _reduce_tensor,
    shared_memory.SharedMemory: _reduce_shared_memory,
    shared_memory.ShareableList: _reduce_shareable_list,
    synchronize.Lock: _reduce_semaphore,
    synchronize.RLock: _reduce_semaphore,
    synchronize.Semaphore: _reduce_semaphore,
    synchronize.BoundedSemaphore: _reduce_semaphore,
}
_OF_DESCRIPTORS = (_reduce_connection, _reduce_socket, _reduce_semaphore)
