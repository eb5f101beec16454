"""WeightPublisher: sends new weights to workers, the same to all or to each its own, by version number.

    publish ─┬─ the same for all ──► the transport's channel ──► workers refresh between two rollouts
             └─ otherwise ─────────► a call to each ──► answered when it has loaded them

It keeps the weights that a worker started later needs and does not find in the channel: those sent to that worker
alone, and those of a loaded state.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reap._system.messages.pickling import dumps
from reap.backends.base import WeightChannel
from reap.backends.supervisor import Supervisor
from reap.backends.worker_handle import WorkerHandle
from reap.errors import SpecMismatch, UsageError, WrongState
from reap.weight_update import WeightTransport
from reap.weights.local import as_named, by_worker, checked_weights, detached
from reap.weights.shared import Packing
from reap.weights.strategy import Extracted


class _Update(NamedTuple):
    """Weights that were sent to one worker alone."""

    data: bytes
    version: int
    names: frozenset[str]  # of the tensors in `data`


class WeightPublisher:
    """Publishes the weights of `source`, or given ones. `in_step`: never while a batch is being collected."""

    def __init__(self, supervisor: Supervisor, *, scheme: WeightTransport | None, source: Any, in_step: bool) -> None:
        known = supervisor.transport.weight_schemes
        if scheme not in (None, *known):
            raise UsageError(
                f"weight_sync_schemes: {scheme!r} cannot send weights to these workers; possible are {tuple(known)}"
            )
        self._supervisor, self._scheme, self._source, self._in_step = supervisor, scheme, source, in_step
        self.version = 0
        self.packing: Packing | None = None  # of the weights for all, once it is chosen
        self._channel: WeightChannel | None = None  # None: each worker is sent its own weights
        self._lock = threading.Lock()  # taken after `listen_lock`, if both are held
        # By worker: the updates sent to it alone since weights last went to all. An older update is kept while it has a
        # tensor that no newer one has.
        self._own: dict[int, tuple[_Update, ...]] = {}
        self._loaded: tuple[_Update, ...] = ()  # of a state loaded since then, for workers not in `_own`

    def choose_packing(self) -> Packing | None:
        """Choose and return the packing of weights for all; None if policies differ, or each worker is sent its own."""
        infos = [worker.info for worker in self._supervisor.workers]
        packings = {info.packing for info in infos}
        packing = packings.pop() if len(packings) == 1 else None
        if packing is None and self._scheme == "shared" and any(info.has_weights for info in infos):
            raise UsageError(
                "SharedMemWeightSyncScheme needs one policy whose weights are tensors; leave the scheme out"
            )
        self.packing = None if self._scheme in ("per_worker", "none") else packing
        return self.packing

    def open(self) -> None:
        """Open the channel for the chosen packing, once all workers have begun."""
        if self.packing is not None:
            needed = self._supervisor.workers[0].info.needed
            self._channel = self._supervisor.transport.weight_channel(self.packing, needed)

    def publish(self, weights: Any = None, worker_ids: Sequence[int] | None = None) -> int:
        """Send new weights to all workers, or to some; return their version.

        With `NoWeightSyncScheme`, or if every worker was dropped, nothing is sent and the version stays.
        """
        if self._scheme == "none":
            return self.version
        supervisor = self._supervisor
        if supervisor.on_failure.action != "raise":
            supervisor.poll_failures()  # drops or replaces workers that have failed meanwhile
        given = self._source if weights is None else weights
        per_worker = by_worker(given)
        if per_worker and weights is not None and worker_ids is not None:
            raise UsageError("weights are given worker by worker already; leave worker_ids out")
        every = list(given) if per_worker else range(len(supervisor.workers))
        named = supervisor.check_numbers(every if worker_ids is None else worker_ids)
        chosen = [w for w in named if not supervisor.workers[w].dropped]
        if not chosen:
            return self.version
        own = isinstance(next(iter(given.values())) if per_worker else given, Extracted)
        self._check_workers(chosen, given, own=own)
        channel = None if per_worker or worker_ids is not None or own else self._channel
        # Nothing is published while a synchronous batch is being collected, because it has one version; nor while a
        # worker may be joining that still loads weights of its own, because those would be older than these.
        at_once = channel is not None and not (self._in_step or self._own or self._loaded)
        first = contextlib.nullcontext() if at_once else supervisor.listening()
        with first, self._lock, supervisor.interrupts.held():
            if self._in_step:
                supervisor.drain()  # a batch that Ctrl-C interrupted is finished with the weights it began with
            version = self.version + 1
            if channel is not None:
                fits = checked_weights(given, channel.packing.shapes, supervisor.workers[0].info.needed)
                if not at_once:
                    every_worker = range(len(supervisor.workers))
                    supervisor.wait_until_loaded(every_worker if self._loaded else list(self._own))
                channel.publish(fits, version)
                self.version = version
                self._own, self._loaded = {}, ()
            else:
                self._send({w: given[w] if per_worker else given for w in chosen}, version)
        return version

    def _check_workers(self, chosen: Sequence[int], given: Any, *, own: bool) -> None:
        """Raise if these workers cannot be sent weights; `own`: a user's own strategy has extracted them."""
        supervisor = self._supervisor
        for worker in [supervisor.workers[w] for w in chosen]:
            if not own and not worker.info.has_weights:
                raise WrongState("this policy has no weights to update")
        if given is None:
            raise WrongState(
                "the policy was built in the workers, so this process has no weights to send; pass weights"
            )
        for worker in supervisor.workers if supervisor.on_failure.action == "raise" else ():
            if worker.child.gone():  # an update for a dead worker would be lost silently
                supervisor.poll_failures()  # raises the worker's own error message, if it is still unread
                raise supervisor.at(worker, worker.child.death())

    def set_first_weights(self, weights: Mapping[int, Any]) -> None:
        """Send workers (by number) their weights before any of them acts. These have the first version."""
        self._send(weights, self.version)

    def _send(self, weights: Mapping[int, Any], version: int) -> None:
        packed: dict[int, _Update] = {}
        for w, given in weights.items():
            info = self._supervisor.workers[w].info
            sent: Any = given
            if not isinstance(given, Extracted):
                if info.packing is not None:
                    checked_weights(given, info.packing.shapes, info.needed)
                sent = as_named(given)  # a module may hold what cannot be pickled
            packed[w] = _packed(sent, version)
        supervisor, transport, workers = self._supervisor, self._supervisor.transport, self._supervisor.workers
        with supervisor.listening(), self._remembering(packed):
            supervisor.wait_until_loaded(list(packed))  # they may still read the memory that these are written to
            calls = {w: (transport.pass_weights(workers[w], one.data), version) for w, one in packed.items()}
            self.version = version  # even if Ctrl-C breaks the call off: some workers may have these weights then
            supervisor.call("load_weights", calls)

    @contextlib.contextmanager
    def _remembering(self, packed: Mapping[int, _Update]) -> Iterator[None]:
        """Keep these weights for replacements while workers are sent them inside; forget them if a worker refuses."""
        before = self._own
        if self._has_later_workers:
            added = {w: (*_still_needed(before.get(w, self._loaded), one.names), one) for w, one in packed.items()}
            self._own = {**before, **added}
        try:
            yield
        except UsageError:
            self._own = before
            raise

    @contextlib.contextmanager
    def loading(self, states: Mapping[int, Mapping[str, Any]], version: int) -> Iterator[None]:
        """Keep the weights in these states for replacements, while workers load the states inside."""
        held = {w: state["policy_state_dict"] for w, state in states.items() if state.get("policy_state_dict")}
        kept = {w: _packed(weights, version) for w, weights in held.items()} if self._has_later_workers else {}
        with self._remembering(kept):
            yield
            self._loaded = self._own.get(0, ())

    def current(self, worker: int) -> dict[str, Any] | None:
        """Return the weights this worker would be sent now; None if this process does not have them."""
        given = self._source.get(worker) if by_worker(self._source) else self._source
        return None if given is None or isinstance(given, Extracted) else detached(given)

    def check_packing(self, worker: WorkerHandle) -> None:
        """Raise if a worker that was started later has a policy with other weights than the others."""
        if self._channel is not None and worker.info.packing != self._channel.packing:
            raise SpecMismatch(f"worker {worker.index}: its policy has different weights from the others'")

    @property
    def _has_later_workers(self) -> bool:
        return self._supervisor.transport.can_add_workers or self._supervisor.on_failure.action == "restart"

    def weights_for_newcomer(self, worker: WorkerHandle) -> Iterator[tuple[Any, int]]:
        """Yield a later worker's `load_weights` arguments: for weights sent to it alone, or those of a loaded state."""
        for one in self._own.get(worker.index, self._loaded):
            yield self._supervisor.transport.pass_weights(worker, one.data), one.version


def _packed(weights: Any, version: int) -> _Update:
    names = frozenset[str]() if isinstance(weights, Extracted) else frozenset(map(str, weights))
    return _Update(dumps(weights, "weights"), version, names)


def _still_needed(given: Sequence[_Update], names: frozenset[str]) -> Iterator[_Update]:
    """Return those updates that have tensors besides `names`. (`Extracted` has no names: the next one replaces it.)"""
    return (one for one in given if one.names - names)
