"""WeightPublisher: new weights for workers, all at once or each its own, by version number.

    publish ─┬─ the same for all ──► the transport's channel ──► workers refresh between two rollouts
             └─ for some ──────────► a call of each ──► answered when it acts with them

What a worker that is started later has to know is kept: the weights it was given by itself, and those of a state that
was loaded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from reap._system.pickling import dumps
from reap.backends.base import WeightChannel
from reap.backends.supervisor import Supervisor
from reap.backends.worker_handle import WorkerHandle
from reap.errors import SpecMismatch, UsageError, WrongState
from reap.weight_update import WeightTransport
from reap.weights.local import as_named, by_worker, detached, fitting
from reap.weights.shared import Packing
from reap.weights.strategy import Extracted


class WeightPublisher:
    """Publishes the weights of `source`, or those it is given. `in_step`: never while a batch is filled."""

    def __init__(self, supervisor: Supervisor, *, scheme: WeightTransport | None, source: Any, in_step: bool) -> None:
        known = supervisor.transport.weight_schemes
        if scheme not in (None, *known):
            raise UsageError(
                f"weight_sync_schemes: {scheme!r} is no transport to these workers; there are {tuple(known)}"
            )
        self._supervisor, self._scheme, self._source, self._in_step = supervisor, scheme, source, in_step
        self.version = 0
        self._channel: WeightChannel | None = None  # None: each worker is sent its own
        self._lock = threading.Lock()  # inside `talking`, if both are held
        self._own: dict[int, tuple[bytes, int]] = {}  # weights a worker was given by itself since, and their version
        self._loaded: tuple[bytes, int] | None = None  # those of a state that was loaded since, for who comes later

    @property
    def packing(self) -> Packing | None:
        """What the channel holds, if there is one."""
        return None if self._channel is None else self._channel.packing

    def choose_packing(self) -> Packing | None:
        """What weights for all would hold; None where workers' policies differ, or each is to be sent its own."""
        abouts = [worker.about for worker in self._supervisor.workers]
        packings = {about.packing for about in abouts}
        packing = packings.pop() if len(packings) == 1 else None
        if packing is None and self._scheme == "shared" and any(about.weighs for about in abouts):
            raise UsageError(
                "SharedMemWeightSyncScheme needs one policy whose weights are tensors; leave the scheme out"
            )
        return None if self._scheme in ("per_worker", "none") else packing

    def open(self, packing: Packing | None) -> None:
        """All workers have begun, and expect weights of this packing."""
        if packing is not None:
            needed = self._supervisor.workers[0].about.needed
            self._channel = self._supervisor.transport.weight_channel(packing, needed)

    def publish(self, weights: Any = None, worker_ids: Sequence[int] | None = None) -> int:
        """New weights for all workers, or for some; returns their version."""
        if self._scheme == "none":
            return self.version
        supervisor = self._supervisor
        if supervisor.on_failure.action != "raise":
            supervisor.look()  # who has failed meanwhile is left out, or there will be another in its place
        workers = supervisor.workers
        given = self._source if weights is None else weights
        per_worker = by_worker(given)
        if per_worker and weights is not None and worker_ids is not None:
            raise UsageError("weights are given worker by worker already; leave worker_ids out")
        every = list(given) if per_worker else [worker.index for worker in supervisor.living]
        chosen = every if worker_ids is None else list(worker_ids)
        if not chosen:
            return self.version
        supervisor.check_numbers(chosen)
        own = isinstance(next(iter(given.values())) if per_worker else given, Extracted)
        for w in chosen:
            if not own and not workers[w].about.weighs:
                raise WrongState("this policy has no weights to update")
        if given is None:
            raise WrongState("the policy was made in the workers, so there is nothing to take weights from; give them")
        for worker in workers if supervisor.on_failure.action == "raise" else ():
            if worker.child.gone():  # nobody may look for a while; an update for the dead would be lost in silence
                raise supervisor.death(worker)
        channel = None if per_worker or worker_ids is not None or own else self._channel
        # A synchronous batch has one version: nobody publishes while it is filled.
        turn = contextlib.nullcontext() if channel is not None and not self._in_step else supervisor.talking
        with turn, self._lock, supervisor.interrupts.held():
            version = self.version + 1
            if channel is not None:
                channel.publish(fitting(given, channel.packing.shapes, workers[0].about.needed), version)
                self._own, self._loaded = {}, None
            else:
                self._send({w: given[w] if per_worker else given for w in chosen}, version)
            self.version = version
        return version

    def begin_with(self, weights: Mapping[int, Any]) -> None:
        """Give workers (by number) weights before anybody acts; they are of the first version."""
        self._send(weights, self.version)

    def _send(self, weights: Mapping[int, Any], version: int) -> None:
        packed: dict[int, tuple[bytes, int]] = {}
        for w, given in weights.items():
            about = self._supervisor.workers[w].about
            sent: Any = given
            if not isinstance(given, Extracted):
                if about.packing is not None:
                    fitting(given, about.packing.shapes, about.needed)
                sent = as_named(given)  # a module may hold what cannot travel
            packed[w] = dumps(sent, "weights"), version
        self._load(packed)
        self._keep(packed)

    def _load(self, packed: Mapping[int, tuple[bytes, int]]) -> None:
        transport, workers = self._supervisor.transport, self._supervisor.workers
        calls = {w: (transport.pass_weights(workers[w], data), version) for w, (data, version) in packed.items()}
        self._supervisor.call("load_weights", calls)

    def _keep(self, packed: Mapping[int, tuple[bytes, int]]) -> None:
        if self._workers_come_later:
            self._own.update(packed)

    def states_loaded(self, states: Mapping[int, Mapping[str, Any]], version: int) -> None:
        """Workers have loaded these states, weights among them."""
        held = {w: state["policy_state_dict"] for w, state in states.items() if state.get("policy_state_dict")}
        if self._workers_come_later:
            self._keep({w: (dumps(weights, "weights"), version) for w, weights in held.items()})
            self._loaded = self._own.get(0)

    def known(self, worker: int) -> dict[str, Any] | None:
        """The weights this worker would be given now; None: nobody here knows them."""
        given = self._source.get(worker) if by_worker(self._source) else self._source
        return None if given is None or isinstance(given, Extracted) else detached(given)

    def check(self, worker: WorkerHandle) -> None:
        """Refuse a worker that was started later, and whose policy has other weights than those of the others."""
        if self._channel is not None and worker.about.packing != self._channel.packing:
            raise SpecMismatch(f"worker {worker.index}: its policy's weights are not those of the others")

    @property
    def _workers_come_later(self) -> bool:
        return self._supervisor.transport.grows or self._supervisor.on_failure.action == "restart"

    def own_of(self, worker: WorkerHandle) -> tuple[Any, int] | None:
        """What a worker that comes later is told of weights that were given to it alone, or loaded for all."""
        own = self._own.get(worker.index, self._loaded)
        return None if own is None else (self._supervisor.transport.pass_weights(worker, own[0]), own[1])
