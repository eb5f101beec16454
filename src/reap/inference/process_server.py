"""ProcessInferenceServer: an InferenceServer in its own process, so that its policy has an interpreter to itself.

    here                                         its process
    ProcessInferenceServer ── calls, weights ──► InferenceServer
    clients, here and elsewhere ──── socket ───► ClientListener ──► RequestQueue ──► batch ──► policy

A factory makes the policy in that process. The process that makes the server owns it: when it ends, so does the
server's process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import Self

from reap._system.conversation import Answer, ChildGone, ChildSilent, Conversation, answered, live
from reap._system.forks import guard, refuse_use
from reap._system.messages.framed import send
from reap._system.messages.pickling import pack
from reap._system.processes import BOOT, DEADLINE, Child, StartMethod, end
from reap.arguments import count
from reap.errors import ServerGone, UsageError, WorkerSilent, WrongArgument, WrongState, nearest
from reap.inference.clients import PolicyClient, ProcessRequests
from reap.inference.requests import check_timeout
from reap.inference.server import InferenceServer
from reap.spec import Key
from reap.weights import local

_STARTED, _READY = 0, 1  # numbers of the messages sent without a request; requests have higher numbers
_OPTIONS = inspect.signature(InferenceServer).parameters.keys() - {"policy", "policy_factory"}


class ProcessInferenceServer:
    """Runs one policy for many clients, in another process.

    >>> with ProcessInferenceServer(make_policy, max_batch_size=64, timeout=0.01) as server:
    ...     client = server.client()                 # a policy, for this process or any other on this machine
    ...     td = client(td)
    ...     server.update_policy_weights_(trained)

    Args:
        policy_factory: makes the policy in the server's process.
        num_threads: torch threads of that process.
        startup_timeout: seconds the factory may take; None: without limit.
        start_method: how the process starts, "forkserver" or "spawn".
        **options: further arguments of `InferenceServer`.
    """

    def __init__(
        self,
        policy_factory: Callable[[], Any],
        *,
        num_threads: int = 1,
        startup_timeout: float | None = None,
        start_method: StartMethod = "forkserver",
        **options: Any,
    ) -> None:
        if not callable(policy_factory):
            raise WrongArgument(f"policy_factory must be a callable, got {type(policy_factory).__name__}")
        for name in options:
            if name not in _OPTIONS:
                raise WrongArgument(f"{type(self).__name__} has no option {name!r}{nearest(name, _OPTIONS)}")
        count("num_threads", num_threads)
        if startup_timeout is not None and (
            isinstance(startup_timeout, bool) or not isinstance(startup_timeout, (int, float)) or startup_timeout <= 0
        ):
            raise UsageError(f"startup_timeout must be a number of seconds > 0 or None, got {startup_timeout!r}")
        self._why_closed: str | None = None
        self._lock = threading.Lock()
        target = pack(
            functools.partial(_serve, make=policy_factory, options=options, threads=num_threads),
            "policy_factory",
            {"policy_factory": policy_factory, **options},
        )
        guard(self)
        self._child = Child(target, start=start_method, name="reap-inference")
        self._talk = Conversation(self._child, first=_READY)
        try:
            self._answer(
                _STARTED, None if startup_timeout is None else BOOT, f"its process did not start within {BOOT:.0f} s"
            )
            late = f"the policy_factory did not return within {startup_timeout} s (startup_timeout)"
            self._address, self._key, self.in_keys = self._answer(_READY, startup_timeout, late)
        except BaseException:
            self._close("it could not be started")
            raise

    def in_fork(self, why: str) -> None:
        """Called in a fork: refuse all use. Only the parent process owns the server's process."""
        self._why_closed, self._lock = why, threading.Lock()
        refuse_use(self, why)

    def client(
        self, kind: str = "process", *, policy_version_key: Any = "policy_version", timeout: float | None = None
    ) -> PolicyClient:
        """Return a client for any process on this machine. See `InferenceServer.client`."""
        if kind not in ("thread", "process"):
            raise WrongArgument(f"kind must be 'thread' or 'process', got {kind!r}")
        check_timeout(timeout)
        self._check_open()
        in_keys: Sequence[Key] | None = self.in_keys
        return PolicyClient(ProcessRequests(self._address, self._key, in_keys, timeout), policy_version_key)

    def update_policy_weights_(self, weights: Any) -> int:
        """Use these weights from the next batch on, as `InferenceServer` does, and return the new version."""
        if weights is None:
            raise WrongArgument("weights must be given: the policy was made in another process, and has no copy here")
        return int(self._call("update_policy_weights_", local.detached(weights)))

    def stats(self) -> dict[str, Any]:
        """Return counts and times. See `InferenceServer.stats`."""
        return dict(self._call("stats"))

    @property
    def policy_version(self) -> int:
        """The number of weight updates; 0 is the policy as the factory made it."""
        return int(self.stats()["policy_version"])

    @property
    def is_alive(self) -> bool:
        """Whether its process is running."""
        return self._why_closed is None and not self._child.gone()

    def _check_open(self) -> None:
        if self._why_closed is not None:
            raise WrongState(f"this {type(self).__name__} is closed: {self._why_closed}; make a new one")
        if self._child.gone():
            raise self._death()

    def _death(self) -> ServerGone:
        death = self._child.death()
        error = ServerGone(f"the inference server's process {death}")
        error.__cause__ = death.__cause__
        return error

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            self._check_open()
            return self._answer(self._talk.call(name, *arguments))

    def _answer(self, number: int, within: float | None = None, late: str = "") -> Any:
        """Return the answer to this call. Raise if the process has died, or does not answer `within` seconds."""
        try:
            return self._talk.answer(number, within)
        except ChildGone:
            error = self._death()
            raise error from error.__cause__
        except ChildSilent:
            raise WorkerSilent(late) from None

    def shutdown(self) -> None:
        """End the process; waiting clients get an error. May be called twice."""
        self._close("it was shut down")

    def _close(self, why: str) -> None:
        if self._why_closed is None:
            self._why_closed = why
            self._child.socket.close()
            end([self._child], patience=0.4 * DEADLINE, deadline=DEADLINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.shutdown()


def _serve(connection: Connection, fds: Sequence[int], make: Any, options: Any, threads: int) -> None:
    """Body of the process: make the server, and answer calls until the connection closes."""
    torch.set_num_threads(threads)
    send(connection, Answer(_STARTED, None))  # the factory's timeout begins

    def serve(server: InferenceServer) -> None:
        send(connection, Answer(_READY, (*server.address, server.in_keys)))
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                number, name, arguments = pickle.loads(connection.recv_bytes())
                work = functools.partial(getattr(server, name), *arguments)
                send(connection, answered(number, work, Exception, f"InferenceServer.{name}"))

    live(
        lambda: InferenceServer(policy_factory=lambda: local.unshared(make()), **options),
        serve,
        tell=functools.partial(send, connection),
        doing=lambda server: "policy_factory" if server is None else "InferenceServer",
        close=lambda server: server.shutdown(),
    )
