"""Clients: policies that are computed by an InferenceServer, in this process or another.

A client is a policy: it takes a TensorDict and returns one with what the server's policy wrote. It may be given to a
collector, whose frames then hold the policy version that computed their action. In the collector's worker processes it
becomes a client for processes, which connects when it is first used.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from reap._system.forks import renew
from reap._system.listener import PATIENCE, Refused, dial
from reap._system.messages.remote_errors import Raised
from reap.errors import NotReady, ServerGone, WrongArgument
from reap.inference.requests import Columns, Request, RequestQueue, timeout_error
from reap.spec import Key, as_key, show_keys

SERVICE = "inference"  # the service that a client requests at the server's socket


class RequestSender(Protocol):
    """Sends requests to a server and returns its answers."""

    in_keys: Sequence[Key] | None

    def __call__(self, inputs: Columns, size: int | None) -> tuple[Columns, int]:
        """Return the outputs for rows of input, and the version that computed them."""

    def close(self) -> None:
        """Deregister from the server. May be called twice."""


class PolicyClient:
    """A policy that sends its inputs to an InferenceServer.

    >>> client = server.client()
    >>> td = client(TensorDict({"observation": torch.zeros(4)}))     # one row, or any number of them
    >>> td["action"], td["policy_version"]

    Make one call at a time: give each thread and each process a client of its own.
    """

    def __init__(self, ask: RequestSender, policy_version_key: Any = "policy_version") -> None:
        self._send, self._version_key = ask, policy_version_key

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a copy of `tensordict` with what the policy wrote."""
        if not isinstance(tensordict, TensorDictBase):
            raise WrongArgument(f"a client takes a TensorDict, got {type(tensordict).__name__}")
        keys = self._send.in_keys
        keys = [as_key(key) for key in tensordict.keys(True, True)] if keys is None else keys
        absent = [key for key in keys if tensordict.get(key, None) is None]
        if absent:
            raise WrongArgument(
                f"the policy reads {show_keys(absent)}; the TensorDict has {list(tensordict.keys(True, True))}"
            )
        if tensordict.ndim > 1:
            return self(tensordict.reshape(-1)).reshape(tensordict.shape)
        size = len(tensordict) if tensordict.ndim else None
        device = tensordict.device
        outputs, version = self._send({key: tensordict.get(key).detach().cpu() for key in keys}, size)
        out = tensordict.copy()
        for key, value in outputs.items():
            out.set(key, value if device is None else value.to(device))
        if self._version_key is not None:
            out.set(self._version_key, torch.full(tensordict.batch_size, version, dtype=torch.int64, device=device))
        return out

    def close(self) -> None:
        """Deregister: the server stops waiting for requests of this client. May be called twice."""
        self._send.close()

    def __del__(self) -> None:
        if contextlib is not None:  # None while the interpreter shuts down
            with contextlib.suppress(Exception):
                self.close()


class ThreadRequests:
    """Sends requests to a server in this process."""

    def __init__(
        self, queue: RequestQueue, in_keys: Sequence[Key] | None, server: Any, timeout: float | None = None
    ) -> None:
        self.in_keys, self._timeout = in_keys, timeout
        self._server = server  # keeps the server alive while it has clients
        self._queue: RequestQueue | None = queue
        self._number: int | None = queue.enter()
        self._used = False

    def __call__(self, inputs: Columns, size: int | None) -> tuple[Columns, int]:
        if self._queue is None:
            raise ServerGone("this client is closed; get a new one from server.client()")
        if self._number is None:
            self._number = self._queue.enter()
        self._used = True
        request = Request(self._number, inputs, size)
        self._queue.put(request)
        try:
            return request.result(self._timeout)
        except NotReady:
            self._queue.withdraw(request)
            raise

    def close(self) -> None:
        queue, self._queue, self._server = self._queue, None, None
        if queue is not None and self._number is not None:
            queue.leave(self._number)

    def __reduce__(self) -> Any:
        """Pickle as a client for processes: a collector sends its policy to its workers.

        If the client was never used here, it is deregistered, so that no batch waits for its requests.
        """
        if self._queue is None:
            raise ServerGone("this client is closed; get a new one from server.client()")
        if self._number is not None and not self._used:
            self._queue.leave(self._number)
            self._number = None
        return ProcessRequests, (*self._server.address, self.in_keys, self._timeout)


class ProcessRequests:
    """Sends requests to a server in another process. Connects when it is first used in each process."""

    def __init__(
        self, address: str | bytes, key: bytes, in_keys: Sequence[Key] | None, timeout: float | None = None
    ) -> None:
        self.in_keys, self._timeout = in_keys, timeout
        self._address, self._key = address, key
        self._open: Connection | None = None
        self._lock = threading.Lock()
        renew(self, _open=lambda: None, _lock=threading.Lock)  # a fork opens its own connection

    def __reduce__(self) -> Any:
        return ProcessRequests, (self._address, self._key, self.in_keys, self._timeout)

    def _connection(self) -> Connection:
        if self._open is not None:
            return self._open
        patience = PATIENCE if self._timeout is None else min(PATIENCE, self._timeout)
        one = dial(self._address, self._key, SERVICE, patience).socket
        if self._timeout is not None:  # for each read and write: a stopped server does not block the client
            seconds = int(self._timeout)
            limit = struct.pack("ll", seconds, int((self._timeout - seconds) * 1e6) or int(not seconds))
            for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                one.setsockopt(socket.SOL_SOCKET, which, limit)
        self._open = connection = Connection(one.detach())
        return connection

    def __call__(self, inputs: Columns, size: int | None) -> tuple[Columns, int]:
        with self._lock:
            try:
                connection = self._connection()
                connection.send_bytes(pickle.dumps((packed(inputs), size)))
                columns, version, error = pickle.loads(connection.recv_bytes())
            except (Refused, TimeoutError) as cause:
                if self._timeout is not None and self._timeout < PATIENCE:
                    raise timeout_error(self._timeout) from cause
                raise ServerGone(
                    f"the inference server did not receive this client within {PATIENCE:.0f} s: it is running, but too "
                    f"many others connect to its socket, or its process has no descriptors left"
                ) from cause
            except BlockingIOError as cause:  # timed out; a late answer would be taken for that to the next request
                self._hang_up()
                raise timeout_error(self._timeout) from cause
            except (EOFError, OSError) as cause:
                self._hang_up()
                raise ServerGone("the inference server is gone: it was shut down, or its process has ended") from cause
            except BaseException:  # interrupted (Ctrl-C): a late answer would be taken for that to the next request
                self._hang_up()
                raise
        if error is not None:
            raise error.unpack()
        return unpacked(columns), version

    def _hang_up(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def close(self) -> None:
        self._hang_up()


Packed = list[tuple[Key, torch.dtype, tuple[int, ...], bytes]]


def packed(columns: Columns) -> Packed:
    """Return tensors as bytes. Pickling them as tensors would share their memory instead of sending it."""
    flat = {key: value.contiguous().reshape(-1) for key, value in columns.items()}
    return [
        (key, value.dtype, tuple(columns[key].shape), value.view(torch.uint8).numpy().tobytes())
        for key, value in flat.items()
    ]


def unpacked(columns: Packed) -> dict[Key, Tensor]:
    """Return the tensors from which `packed` made these bytes."""
    found = {}
    for key, dtype, shape, data in columns:
        empty = torch.empty(shape, dtype=dtype)
        found[key] = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else empty
    return found


def reply(columns: Columns, version: int) -> bytes:
    """Return an answer as bytes."""
    return pickle.dumps((packed(columns), version, None))


def refusal(error: Exception) -> bytes:
    """Return an error as bytes, in place of an answer."""
    return pickle.dumps(([], 0, Raised.of(error, "the inference server")))


def request_from(data: bytes) -> tuple[Mapping[Key, Tensor], int | None]:
    """Return the inputs and size of a client's request from its bytes."""
    columns, size = pickle.loads(data)
    return unpacked(columns), size
