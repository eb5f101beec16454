"""Links: send weights from one process to others, for scripts that start their workers themselves.

    sender    init_on_sender ──► connect ──► send ───── a pipe for each worker ───► thread ──► model
    receiver  init_on_receiver ──► connect ──────────────────────────────────────► (first weights)
                                      answered when they are applied ◄─────────────┘

Collectors do not use links: their workers read a shared block or receive messages.
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

from reap.errors import WorkerDied, WorkerRaised
from reap.weights.local import detached
from reap.weights.strategy import Extracted, extract, own_strategy

_APPLIED = "applied"


def _packed(weights: Any) -> bytes:
    """Return weights as bytes without file descriptors, so that reading them needs nothing of this process."""
    named = weights.weights if isinstance(weights, Extracted) else detached(weights)
    stream = io.BytesIO()
    torch.save(named, stream)
    return stream.getvalue()


class Sender:
    """The sending side: a pipe for each worker. Workers get it with their process arguments, and use their end."""

    def __init__(self, workers: Sequence[int], ctx: Any = None) -> None:
        self._pairs: dict[int, tuple[Connection, Connection]] = {
            worker: (ctx or multiprocessing).Pipe() for worker in workers
        }
        self._unanswered = dict.fromkeys(self._pairs, 0)  # how many weights each worker has not answered yet
        self._owner = os.getpid()

    def __contains__(self, worker: int) -> bool:
        return worker in self._pairs

    def workers(self) -> list[int]:
        """Return the numbers of the workers that are linked."""
        return list(self._pairs)

    def worker_end(self, worker: int) -> Connection:
        """Return this worker's end of its pipe."""
        return self._pairs[worker][1]

    def send(self, weights: Mapping[int, Any], *, wait: bool) -> None:
        """Send new weights to some workers; with `wait`, return once all of them have applied theirs.

        An error in applying earlier weights that were not waited for is raised here.
        """
        packed: dict[int, bytes] = {}  # by id: weights for several workers are packed once
        for worker, one in weights.items():
            if id(one) not in packed:
                packed[id(one)] = _packed(one)
            self._read_answers(worker, wait=False)  # if nobody read them they would fill the pipe and stop the worker
            self._pairs[worker][0].send_bytes(packed[id(one)])
            self._unanswered[worker] += 1
        for worker in weights if wait else ():
            self._read_answers(worker, wait=True)

    def _read_answers(self, worker: int, *, wait: bool) -> None:
        """Read a worker's answers that have arrived, or with `wait` all; raise if it could not apply its weights."""
        end = self._pairs[worker][0]
        while self._unanswered[worker] and (wait or end.poll()):
            try:
                answer = end.recv()
            except (EOFError, OSError) as cause:
                raise WorkerDied(f"worker {worker} has ended") from cause
            self._unanswered[worker] -= 1
            if answer != _APPLIED:
                raise WorkerRaised(f"worker {worker} could not apply its weights: {answer}")

    def close_other_ends(self, worker: int | None) -> None:
        """Close the pipe ends that belong to other processes, so that a pipe breaks when the process at its end dies.

        In a worker, close all ends but its own; in the sending process (`worker` None), close the workers' ends.
        """
        if (self._owner == os.getpid()) != (worker is None):
            return  # both sides are in one process
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
    """The receiving side: a thread applies weights as they arrive."""

    def __init__(self, connection: Connection, apply: Callable[[Any], None]) -> None:
        self._connection, self._apply = connection, apply
        self._arrived = threading.Condition()
        self._latest: Any = None  # the last weights, until `receive` returns them
        self._apply_next()  # the first weights, before the model is used
        self._thread = threading.Thread(target=self._run, name="reap-weights", daemon=True)
        self._thread.start()

    def _apply_next(self) -> None:
        weights = torch.load(io.BytesIO(self._connection.recv_bytes()), weights_only=False)
        try:
            self._apply(weights)
        except Exception as error:
            self._connection.send(repr(error))
            return
        with self._arrived:
            self._latest = weights
            self._arrived.notify_all()
        self._connection.send(_APPLIED)

    def _run(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # the sender closed the pipe, or ended
            while True:
                self._apply_next()

    def receive(self, timeout: float | None) -> Any:
        """Return the last weights applied since the previous call; None if none arrive within `timeout` seconds."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._latest is not None, timeout)
            weights, self._latest = self._latest, None
        return weights


def weights_of(worker: int, given: Any, strategy: Any) -> Any:
    """Return the weights to send to a worker: its own if `given` is a dict by worker, else those given for all."""
    if isinstance(given, dict) and worker in given:
        given = given[worker]
    own = own_strategy(strategy)
    return strategy.extract_weights(given) if own is None else Extracted(extract(own, given))
