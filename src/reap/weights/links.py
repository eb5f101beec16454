"""Links: weights from one process to others, for scripts that start their workers themselves.

    sender    init_on_sender ──► connect ──► send ───── a pipe for each worker ───► thread ──► model
    receiver  init_on_receiver ──► connect ──────────────────────────────────────► (first weights)
                                      answered when they are applied ◄─────────────┘

Collectors do not need them: their workers read one block, or are sent messages.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from reap.errors import NotReady, WorkerDied, WorkerRaised
from reap.weights.local import detached
from reap.weights.strategy import Extracted, extract, own_strategy

_APPLIED = "applied"


def _packed(weights: Any) -> bytes:
    """Weights as bytes that carry no descriptors: whoever reads them later needs nothing of us."""
    named = weights.weights if isinstance(weights, Extracted) else detached(weights)
    stream = io.BytesIO()
    torch.save(named, stream)
    return stream.getvalue()


class Sender:
    """The end where weights are made. It travels to workers with the process's arguments, as the receivers' ends."""

    def __init__(self, workers: Sequence[int], ctx: Any = None) -> None:
        self._pairs: dict[int, tuple[Connection, Connection]] = {
            worker: (ctx or multiprocessing).Pipe() for worker in workers
        }
        self._owner = os.getpid()

    def __contains__(self, worker: int) -> bool:
        return worker in self._pairs

    def workers(self) -> list[int]:
        """Return the numbers of the workers that are linked."""
        return list(self._pairs)

    def theirs(self, worker: int) -> Connection:
        """Return the end of the link that is for this worker."""
        return self._pairs[worker][1]

    def send(self, weights: Mapping[int, Any], *, wait: bool, timeout: float | None = None) -> None:
        """New weights for some; with `wait`, returns when they act with them."""
        packed: dict[int, bytes] = {}
        for worker, one in weights.items():
            known = packed.get(id(one))
            packed[id(one)] = data = _packed(one) if known is None else known
            self._pairs[worker][0].send_bytes(data)
        for worker in weights if wait else ():
            self._answer(worker, timeout)

    def _answer(self, worker: int, timeout: float | None) -> None:
        ours = self._pairs[worker][0]
        try:
            if not ours.poll(timeout):
                raise NotReady(f"worker {worker} has not applied its weights within {timeout} s")
            answer = ours.recv()
        except (EOFError, OSError) as cause:
            raise WorkerDied(f"worker {worker} has ended, and its end of the link with it") from cause
        if answer != _APPLIED:
            raise WorkerRaised(f"worker {worker} could not apply its weights: {answer}")

    def keep(self, worker: int | None) -> None:
        """Close the ends that belong to others: a link of which nobody else holds an end tells of a death.

        In a worker, all but its own; in the process where weights are made (None), those of the workers, who have them.
        """
        if (self._owner == os.getpid()) != (worker is None):
            return  # both sides in one process
        for other, (ours, theirs) in self._pairs.items():
            if worker is not None:
                ours.close()
            if other != worker:
                theirs.close()

    def close(self) -> None:
        """Close all connections."""
        for pair in self._pairs.values():
            for end in pair:
                end.close()


class Receiver:
    """The end where weights act: a thread applies them as they come."""

    def __init__(self, connection: Connection, apply: Callable[[Any], None]) -> None:
        self._connection, self._apply = connection, apply
        self._came = threading.Condition()
        self._new: Any = None  # the last weights that nobody has asked for yet
        self._next()  # the first, before anything is done with the model
        self._thread = threading.Thread(target=self._run, name="reap-weights", daemon=True)
        self._thread.start()

    def _next(self) -> None:
        weights = torch.load(io.BytesIO(self._connection.recv_bytes()), weights_only=False)
        try:
            self._apply(weights)
        except Exception as error:
            self._connection.send(repr(error))
            return
        with self._came:
            self._new = weights
            self._came.notify_all()
        self._connection.send(_APPLIED)

    def _run(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # nobody sends any more
            while True:
                self._next()

    def receive(self, timeout: float | None) -> Any:
        """Weights that came since the last call, applied already; waits `timeout` seconds for them. None: none came."""
        with self._came:
            self._came.wait_for(lambda: self._new is not None, timeout)
            weights, self._new = self._new, None
        return weights


def weights_of(worker: int, given: Any, strategy: Any) -> Any:
    """Return what a worker is to have: its own of a mapping by worker, or what is given for all."""
    if isinstance(given, dict) and worker in given:
        given = given[worker]
    own = own_strategy(strategy)
    return strategy.extract_weights(given) if own is None else Extracted(extract(own, given))
