"""WeightPublisher: new weights for workers, all at once or each its own, by version number.

    publish ─┬─ the same for all ──► the transport's channel ──► workers refresh between two rollouts
             └─ for some ──────────► a call of each ──► answered when it acts with them

What a worker that is started later has to know is kept: the weights it was given by itself, and those of a state that
was loaded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reap._system.pickling import dumps
from reap.backends.base import WeightChannel
from reap.backends.supervisor import Supervisor
from reap.backends.worker_handle import WorkerHandle
from reap.errors import SpecMismatch, UsageError, WrongState
from reap.weight_update import WeightTransport
from reap.weights.local import as_named, by_worker, detached, fitting
from reap.weights.shared import Packing
from reap.weights.strategy import Extracted


class _Given(NamedTuple):
    """Weights that a worker was given by itself."""

    data: bytes
    version: int
    names: frozenset[str]  # of what is in it


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
        self.packing: Packing | None = None  # what weights for all hold, once that is chosen
        self._channel: WeightChannel | None = None  # None: each worker is sent its own
        self._lock = threading.Lock()  # inside `talking`, if both are held
        # By worker: weights it alone was given since the last ones for all. Earlier ones stay while they hold a name
        # that later ones do not.
        self._own: dict[int, tuple[_Given, ...]] = {}
        self._loaded: tuple[_Given, ...] = ()  # those of a state that was loaded since, for who comes later

    def choose_packing(self) -> Packing | None:
        """What weights for all would hold; None where workers' policies differ, or each is to be sent its own."""
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
        """All workers have begun, and expect weights of the packing that was chosen."""
        if self.packing is not None:
            needed = self._supervisor.workers[0].info.needed
            self._channel = self._supervisor.transport.weight_channel(self.packing, needed)

    def publish(self, weights: Any = None, worker_ids: Sequence[int] | None = None) -> int:
        """New weights for all workers, or for some; returns their version."""
        if self._scheme == "none":
            return self.version
        supervisor = self._supervisor
        if supervisor.on_failure.action != "raise":
            supervisor.look()  # who has failed meanwhile is left out, or there will be another in its place
        given = self._source if weights is None else weights
        per_worker = by_worker(given)
        if per_worker and weights is not None and worker_ids is not None:
            raise UsageError("weights are given worker by worker already; leave worker_ids out")
        every = list(given) if per_worker else [worker.index for worker in supervisor.living]
        chosen = every if worker_ids is None else list(worker_ids)
        if not chosen:
            return self.version
        own = isinstance(next(iter(given.values())) if per_worker else given, Extracted)
        self._check_workers(chosen, given, own=own)
        channel = None if per_worker or worker_ids is not None or own else self._channel
        # A synchronous batch has one version: nobody publishes while it is filled. Nor while a worker that joins may be
        # on its way to weights of its own, which would be older than these.
        at_once = channel is not None and not (self._in_step or self._own or self._loaded)
        with contextlib.nullcontext() if at_once else supervisor.talking, self._lock, supervisor.interrupts.held():
            version = self.version + 1
            if channel is not None:
                fits = fitting(given, channel.packing.shapes, supervisor.workers[0].info.needed)
                if not at_once:
                    supervisor.wait_for_newcomers(list(self._own))
                channel.publish(fits, version)
                self._own, self._loaded = {}, ()
            else:
                self._send({w: given[w] if per_worker else given for w in chosen}, version)
            self.version = version
        return version

    def _check_workers(self, chosen: Sequence[int], given: Any, *, own: bool) -> None:
        """Raise if these workers cannot be given weights; `own`: what a user's own strategy has made of them."""
        supervisor = self._supervisor
        for worker in [supervisor.workers[w] for w in supervisor.check_numbers(chosen)]:
            if not own and not worker.info.has_weights:
                raise WrongState("this policy has no weights to update")
        if given is None:
            raise WrongState("the policy was made in the workers, so there is nothing to take weights from; give them")
        for worker in supervisor.workers if supervisor.on_failure.action == "raise" else ():
            if worker.child.gone():  # nobody may look for a while; an update for the dead would be lost in silence
                raise supervisor.death(worker)

    def begin_with(self, weights: Mapping[int, Any]) -> None:
        """Give workers (by number) weights before anybody acts; they are of the first version."""
        self._send(weights, self.version)

    def _send(self, weights: Mapping[int, Any], version: int) -> None:
        packed: dict[int, _Given] = {}
        for w, given in weights.items():
            info = self._supervisor.workers[w].info
            sent: Any = given
            if not isinstance(given, Extracted):
                if info.packing is not None:
                    fitting(given, info.packing.shapes, info.needed)
                sent = as_named(given)  # a module may hold what cannot travel
            packed[w] = _packed(sent, version)
        supervisor, transport, workers = self._supervisor, self._supervisor.transport, self._supervisor.workers
        with supervisor.talking, supervisor.interrupts.held(), self._kept(packed):
            supervisor.wait_for_newcomers(list(packed))  # they may be reading weights of their own, where these will be
            calls = {w: (transport.pass_weights(workers[w], one.data), version) for w, one in packed.items()}
            supervisor.call("load_weights", calls)

    @contextlib.contextmanager
    def _kept(self, packed: Mapping[int, _Given]) -> Iterator[None]:
        """Workers are given these inside; whoever takes their place meanwhile is given them too. Not if one refuses."""
        before = self._own
        if self._workers_come_later:
            added = {w: (*_rest(before.get(w, self._loaded), one.names), one) for w, one in packed.items()}
            self._own = {**before, **added}
        try:
            yield
        except UsageError:
            self._own = before
            raise

    @contextlib.contextmanager
    def loading(self, states: Mapping[int, Mapping[str, Any]], version: int) -> Iterator[None]:
        """Workers load these states inside, weights among them."""
        held = {w: state["policy_state_dict"] for w, state in states.items() if state.get("policy_state_dict")}
        kept = {w: _packed(weights, version) for w, weights in held.items()} if self._workers_come_later else {}
        with self._kept(kept):
            yield
            self._loaded = self._own.get(0, ())

    def known(self, worker: int) -> dict[str, Any] | None:
        """Return the weights this worker would be given now; None: nobody here knows them."""
        given = self._source.get(worker) if by_worker(self._source) else self._source
        return None if given is None or isinstance(given, Extracted) else detached(given)

    def check(self, worker: WorkerHandle) -> None:
        """Refuse a worker that was started later, and whose policy has other weights than those of the others."""
        if self._channel is not None and worker.info.packing != self._channel.packing:
            raise SpecMismatch(f"worker {worker.index}: its policy's weights are not those of the others")

    @property
    def _workers_come_later(self) -> bool:
        return self._supervisor.transport.can_add_workers or self._supervisor.on_failure.action == "restart"

    def weights_for_newcomer(self, worker: WorkerHandle) -> Iterator[tuple[Any, int]]:
        """Return what a worker that comes later is told of weights that were given to it alone, or loaded for all."""
        for one in self._own.get(worker.index, self._loaded):
            yield self._supervisor.transport.pass_weights(worker, one.data), one.version


def _packed(weights: Any, version: int) -> _Given:
    names = frozenset[str]() if isinstance(weights, Extracted) else frozenset(map(str, weights))
    return _Given(dumps(weights, "weights"), version, names)


def _rest(given: Sequence[_Given], names: frozenset[str]) -> Iterator[_Given]:
    """Of these, those that hold something else too. (What a user's strategy has made has no names, and is whole.)"""
    return (one for one in given if one.names - names)
