"""Reducers: how connections, sockets, shared tensors, shared memory and semaphores are pickled for processes here."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from multiprocessing import reduction, resource_tracker, shared_memory, synchronize
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_storage

from reap._system.shared_objects.descriptors import Descriptor
from reap._system.shared_objects.semaphores import reduce_semaphore


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
    """Use the sender's resource tracker in this process, as processes that `multiprocessing` starts do.

    A tracker of our own would treat the memory as ours, and unlink it when this process ends while the sender uses it.
    """
    ours = cast(Any, resource_tracker)._resource_tracker
    if ours._fd is None:
        ours._fd = tracker.detach()


REDUCERS: dict[type, Callable[[Any], Any]] = {
    Connection: _reduce_connection,
    socket.socket: _reduce_socket,
    Tensor: _reduce_tensor,
    nn.Parameter: _reduce_tensor,
    shared_memory.SharedMemory: _reduce_shared_memory,
    shared_memory.ShareableList: _reduce_shareable_list,
    synchronize.Lock: reduce_semaphore,
    synchronize.RLock: reduce_semaphore,
    synchronize.Semaphore: reduce_semaphore,
    synchronize.BoundedSemaphore: reduce_semaphore,
}
OF_DESCRIPTORS = (_reduce_connection, _reduce_socket, reduce_semaphore)
