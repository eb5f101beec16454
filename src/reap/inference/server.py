"""InferenceServer: runs one policy in one thread for many clients, in batches.

    thread clients  ───────────────────────────► RequestQueue ──► batch ──► pad to a bucket ──► policy ──► rows back
    process clients ──► socket, ClientListener ───►  ▲               │
                                                     └── weights are replaced here, between two batches

Guarantees: each request is answered exactly once, by one version of the weights, and the answer contains this version.
If the policy raises, only the requests of that batch fail. `shutdown` answers all waiting requests with an error.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from torch import Tensor, nn
from typing_extensions import Self

from reap._system.forks import guard, refuse_use
from reap._system.processes import DEADLINE
from reap.arguments import count, function, seconds
from reap.core.device.devices import named_device
from reap.core.policies.buckets import powers_of_two
from reap.core.policies.exploration import exploration_type as as_exploration
from reap.core.policies.exploration import exploring
from reap.core.policies.outputs import as_tensordict, by_name, is_named
from reap.core.policies.signature import bind_exploration, takes_tensordict
from reap.errors import ReapError, ServerGone, SpecMismatch, UsageError, WorkerRaised, WrongArgument, WrongState
from reap.inference.client_listener import ClientListener
from reap.inference.clients import PolicyClient, ProcessRequests, ThreadRequests
from reap.inference.requests import Columns, Request, RequestQueue, check_timeout
from reap.spec import AnyKey, Key, as_key, private, show_keys
from reap.weights import local

_WINDOW = 1024


class InferenceServer:
    """Answers the requests of many clients by few batched calls of one policy.

    >>> with InferenceServer(policy, max_batch_size=64, timeout=0.01) as server:
    ...     client = server.client()                 # one per thread; client("process") for other processes
    ...     td = client(td)                          # observations in, what the policy wrote out

    Args:
        policy: a TensorDictModule, or a module or function of the tensors of `in_keys`.
        policy_factory: makes the policy, in place of `policy`.
        max_batch_size: the most rows computed at once; a request with more rows is computed alone.
        min_batch_size: compute as soon as this many rows wait; None: `max_batch_size`.
        timeout: seconds the oldest request waits for others.
        buckets: sizes to pad batches to, so that a compiled or recorded policy sees few shapes; True: powers of 2.
        device: where the policy runs; it is copied there if it is on another device.
        exploration_type: how probabilistic policies choose actions; RANDOM by default.
        in_keys: the entries sent to the policy; None: the policy's own `in_keys`, else "observation", or all entries
            for policies that take a TensorDict.
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        max_batch_size: int = 64,
        min_batch_size: int | None = None,
        timeout: float = 0.01,
        buckets: Sequence[int] | bool | None = None,
        device: Any = None,
        exploration_type: InteractionType | str | None = InteractionType.RANDOM,
        in_keys: Sequence[AnyKey] | None = None,
    ) -> None:
        if (policy is None) == (policy_factory is None):
            raise WrongArgument("InferenceServer needs either policy or policy_factory")
        least = 1 if min_batch_size is None else min_batch_size
        for name, value in (("max_batch_size", max_batch_size), ("min_batch_size", least)):
            count(name, value)
        if least > max_batch_size:
            raise UsageError(f"min_batch_size is {min_batch_size}, above max_batch_size, which is {max_batch_size}")
        seconds("timeout", timeout, none=False, zero=True, most=threading.TIMEOUT_MAX)
        function("policy_factory", policy_factory)
        self._buckets = _buckets(buckets, max_batch_size)
        self._device = named_device("device", device)
        made = policy if policy_factory is None else policy_factory()
        if not callable(made):
            raise WrongArgument(f"policy must be a module or a callable, got {type(made).__name__}")
        self._source = made
        self.policy = local.moved_to(made, self._device)
        self._exploration = as_exploration(exploration_type)
        self._call = bind_exploration(self.policy, self._exploration)
        self._whole = isinstance(made, TensorDictModuleBase) or takes_tensordict(made)
        if in_keys is not None and not (
            isinstance(in_keys, (list, tuple)) and all(isinstance(key, (str, tuple)) for key in in_keys)
        ):
            raise WrongArgument(f"in_keys must be a list of keys, got {in_keys!r}")
        declared = in_keys if in_keys is not None else getattr(made, "in_keys", None)
        if declared is None and not self._whole:
            declared = ["observation"]
        self.in_keys: list[Key] | None = None if declared is None else [as_key(key) for key in declared]
        self._queue = RequestQueue(max_batch_size, min_batch_size or max_batch_size, timeout)
        self._weights = threading.Lock()
        self._opening = threading.Lock()  # many threads may request clients at once
        self._version = 0
        self._sizes: Counter[int] = Counter()
        self._waits: deque[float] = deque(maxlen=_WINDOW)
        self._forwards: deque[float] = deque(maxlen=_WINDOW)
        self._requests = self._batches = 0
        self._busy, self._began = 0.0, time.monotonic()
        self._current: list[Request] = []  # the batch that is being computed
        self._listener: ClientListener | None = None
        self._thread: threading.Thread | None = None
        self._why_closed: str | None = None
        self._why_unusable: str | None = None  # in a fork: why the server cannot be used
        guard(self)

    def in_fork(self, why: str) -> None:
        """Called in a fork, where the thread does not run: refuse all use, and leave the socket to the parent."""
        self._why_unusable = self._why_closed = why
        self._thread = self._listener = None
        refuse_use(self, why)

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the thread. `client` and `with` call it automatically."""
        if self._why_closed is not None:
            raise WrongState(f"this InferenceServer is closed: {self._why_closed}; make a new one")
        with self._opening:
            if self._thread is None:
                self._began = time.monotonic()
                serve = functools.partial(_serve, weakref.ref(self), self._queue)
                self._thread = threading.Thread(target=serve, name="reap-inference", daemon=True)
                self._thread.start()
        return self

    def client(
        self,
        kind: Literal["thread", "process"] = "thread",
        *,
        policy_version_key: Any = "policy_version",
        timeout: float | None = None,
    ) -> Any:
        """Return a client: a policy for one thread of this process, or one to send to another process.

        `policy_version_key`: the entry for the version that computed an answer; None: no entry. `timeout`: seconds
        after which a waiting client raises `NotReady` (a `TimeoutError`); None: no limit.
        """
        check_timeout(timeout)
        self.start()
        if kind == "thread":
            return PolicyClient(ThreadRequests(self._queue, self.in_keys, self, timeout), policy_version_key)
        if kind != "process":
            raise UsageError(f"kind must be 'thread' or 'process', got {kind!r}")
        return PolicyClient(ProcessRequests(*self.address, self.in_keys, timeout), policy_version_key)

    @property
    def address(self) -> tuple[str | bytes, bytes]:
        """The address at which clients of other processes connect, and the key that they need."""
        self.start()
        with self._opening:
            if self._listener is None:
                self._listener = ClientListener(self._queue)
            return self._listener.address, self._listener.key

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running and answers requests."""
        return self._thread is not None and self._thread.is_alive()

    def shutdown(self) -> None:
        """Stop; waiting clients get an error. A policy that has not returned after 5 s is abandoned in its thread."""
        self._why_closed = self._why_closed or "it was shut down"
        self._queue.close(f"the inference server no longer answers: {self._why_closed}")
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(DEADLINE)
            if thread.is_alive():
                for request in self._current:
                    request.answer(ServerGone("the inference server was shut down while its policy was computing"))
                warnings.warn(
                    f"the policy of an InferenceServer did not return within {DEADLINE:.0f} s; its thread is abandoned",
                    RuntimeWarning,
                    stacklevel=2,
                )
        listener, self._listener = self._listener, None  # last: answers that were being computed are still sent
        if listener is not None:
            listener.close(DEADLINE)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if contextlib is not None:  # None while the interpreter shuts down
            with contextlib.suppress(Exception):
                self.shutdown()

    # ---- weights and numbers --------------------------------------------------------------------------------------

    def update_policy_weights_(self, weights: Any = None) -> int:
        """Use these weights from the next batch on, and return the new version.

        `weights`: a module, a TensorDict or a state dict; None: those of the policy passed to the constructor. Waits
        for the batch that is being computed.
        """
        if self._why_unusable is not None:
            raise WrongState(f"this InferenceServer cannot be used here: {self._why_unusable}")
        if not isinstance(self.policy, nn.Module):
            raise WrongState(f"policy {type(self.policy).__name__} has no weights to update")
        given = self._source if weights is None else weights
        with self._weights:
            if given is not self.policy:
                local.load(self.policy, given)
            self._version += 1
            return self._version

    @property
    def policy_version(self) -> int:
        """The number of weight updates; 0 is the policy as constructed."""
        return self._version

    def stats(self) -> dict[str, Any]:
        """Return counts so far, batch sizes, and waiting and compute times of the last 1024 requests and batches."""
        waits, forwards = np.array(self._waits or [0.0]) * 1000, np.array(self._forwards or [0.0]) * 1000
        sizes = dict(self._sizes)  # one atomic copy: the thread goes on counting
        alive = max(time.monotonic() - self._began, 1e-9)
        return {
            "requests": self._requests,
            "batches": self._batches,
            "mean_batch_size": sum(n * c for n, c in sizes.items()) / max(sum(sizes.values()), 1),
            "batch_sizes": dict(sorted(sizes.items())),
            "queue_ms_p50": float(np.median(waits)),
            "queue_ms_p95": float(np.percentile(waits, 95)),
            "forward_ms_p50": float(np.median(forwards)),
            "forward_ms_p95": float(np.percentile(forwards, 95)),
            "utilisation": min(1.0, self._busy / alive),
            "policy_version": self._version,
            "clients": self._queue.clients,
        }

    # ---- the loop -------------------------------------------------------------------------------------------------

    def answer(self, batch: list[Request]) -> None:
        """Answer the requests of a batch, with one version of the weights."""
        began = time.monotonic()
        self._current = batch
        try:
            with self._weights, torch.no_grad(), exploring(self._exploration):
                outputs = self._forward(_joined(batch))
                version = self._version
            answers = _split(outputs, batch)
        except BaseException as cause:
            for request in batch:  # one error object per request: they are raised in different threads
                request.answer(_raised(cause))
            if not isinstance(cause, Exception):  # sys.exit() and the like end the thread, after all are answered
                raise
            return
        finally:
            self._current = []
            ended = time.monotonic()
            self._busy += ended - began
            self._forwards.append(ended - began)
            self._waits.extend(began - request.since for request in batch)
            self._sizes[sum(request.rows for request in batch)] += 1
            self._requests, self._batches = self._requests + len(batch), self._batches + 1
        for request, columns in zip(batch, answers):
            request.answer((columns, version))

    def _forward(self, inputs: Columns) -> dict[Key, Tensor]:
        rows = len(next(iter(inputs.values())))
        size = next((bucket for bucket in self._buckets if bucket >= rows > 0), rows)
        if size > rows:
            inputs = {k: torch.cat([v, v[-1:].expand(size - rows, *v.shape[1:])]) for k, v in inputs.items()}
        if self._device is not None:
            inputs = {key: value.to(self._device) for key, value in inputs.items()}
        found: Mapping[Key, Any]
        if self._whole:
            td = TensorDict({}, batch_size=[size], device=self._device)
            for key, value in inputs.items():
                td.set(key, value)
            out = self.policy(td)
            out = td if out is None else out
            if not isinstance(out, TensorDictBase):
                if not is_named(out):
                    raise SpecMismatch(f"policy takes a TensorDict but returned {type(out).__name__}")
                out = as_tensordict(out, td.batch_size)
            written = [as_key(k) for k in getattr(self.policy, "out_keys", ())] or [
                k for k in map(as_key, out.keys(True, True)) if k not in inputs
            ]
            found = {key: out.get(key) for key in written if not private(key)}
        else:
            found = by_name(self._call(*inputs.values()))
        for key, value in found.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (size,):
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise SpecMismatch(f"policy writes {show_keys([key])} as {got}; {size} rows need [{size}, …]")
        return {key: value[:rows].cpu() for key, value in found.items()}


def _serve(server: weakref.ref[InferenceServer], queue: RequestQueue) -> None:
    """Body of the thread. It holds the server only by weak reference, so that an unused server and its thread end."""
    try:
        while batch := queue.take():
            owner = server()
            if owner is None:
                break
            owner.answer(batch)
            del owner
    finally:  # also after an unexpected end: no client is left waiting
        queue.close("the inference server no longer answers: its thread has ended")


def _buckets(given: Sequence[int] | bool | None, most: int) -> list[int]:
    if given is None or given is False:
        return []
    if given is True:
        return powers_of_two(most)
    sizes: list[Any] = list(given) if isinstance(given, (list, tuple, range)) else [None]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise UsageError(f"buckets must be True or hold whole numbers ≥ 1, got {given!r}")
    if max(sizes, default=0) < most:
        raise UsageError(f"the largest of buckets must hold max_batch_size={most}, got {given!r}")
    return sorted(sizes)


def _joined(batch: list[Request]) -> Columns:
    return {
        key: torch.cat([r.inputs[key] if r.size is not None else r.inputs[key].unsqueeze(0) for r in batch])
        for key in batch[0].inputs
    }


def _split(outputs: Columns, batch: list[Request]) -> list[Columns]:
    at = 0
    found: list[Columns] = []
    for request in batch:
        own: Any = at if request.size is None else slice(at, at + request.rows)
        found.append({key: value[own] for key, value in outputs.items()})
        at += request.rows
    return found


def _raised(cause: BaseException) -> ReapError:
    error = WorkerRaised(f"the policy of the inference server raised {cause!r}")
    error.__cause__ = cause
    return error
