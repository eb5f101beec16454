"""Weight schemes: how new weights reach the workers. If none is given, the collector chooses one.

    SharedMemWeightSyncScheme      one flat block that all workers read; the default if every weight is a tensor
    MultiProcessWeightSyncScheme   a message for each worker, answered when it has arrived
    NoWeightSyncScheme             none: workers keep the weights they were built with
    DistributedWeightSyncScheme    one flat block per version, broadcast by gloo to workers over torch.distributed
    RPCWeightSyncScheme            one flat block per version, packed once, sent over TensorPipe
    RayWeightSyncScheme            one flat object per version, put once, pulled by each actor

>>> MultiSyncCollector([make_env] * 2, policy, frames_per_batch=200,
...                    weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})

TorchRL's own schemes of these names are accepted, too.
The first two also send weights between processes that a script has started itself:

>>> scheme.init_on_sender(model_id="policy", weights=TensorDict.from_module(policy), num_workers=2)   # here, then start
>>> scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=0); scheme.connect()          # in worker 0
>>> scheme.connect(); scheme.send(policy)                                                             # here
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from reap._foreign import torchrl_internals
from reap.core.attribute_path import get_attribute
from reap.errors import UsageError, WrongArgument, WrongState, nearest
from reap.weights.links import Receiver, Sender, weights_of
from reap.weights.local import by_worker
from reap.weights.strategy import WeightStrategy, as_strategy

__all__ = [
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayTransport",
    "RayWeightSyncScheme",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "WeightStrategy",
    "WeightSyncScheme",
]

WeightTransport = Literal["shared", "per_worker", "none", "distributed", "rpc", "ray"]
WeightSyncBackend = Literal[
    "none", "direct", "shared", "thread", "process", "multiprocessing", "distributed", "rpc", "ray"
]
_NAMES = {
    "none": "NoWeightSyncScheme",
    "direct": "NoWeightSyncScheme",
    "shared": "SharedMemWeightSyncScheme",
    "thread": "SharedMemWeightSyncScheme",
    "process": "MultiProcessWeightSyncScheme",
    "multiprocessing": "MultiProcessWeightSyncScheme",
    "distributed": "DistributedWeightSyncScheme",
    "rpc": "RPCWeightSyncScheme",
    "ray": "RayWeightSyncScheme",
}
_LINKED = ("shared", "per_worker")  # transports that a script can use without a collector


class WeightSyncScheme:
    """How weights reach the workers. Each scheme accepts weights in every form.

    Args:
        strategy: "tensordict", "state_dict" (the same for collectors), or a `WeightStrategy` of your own, which may
            also be assigned later: `scheme.strategy = …`. With one of your own, each worker is sent what it extracts,
            and calls its `apply_weights`.
        sync: whether `send` waits until weights are applied, if you send them yourself. Collectors ignore it; it is
            accepted as in TorchRL.
    """

    transport: WeightTransport
    per_worker_weights = False

    def __init__(self, strategy: str | WeightStrategy = "tensordict", sync: bool = True) -> None:
        self.strategy: Any = as_strategy(strategy)
        self.sync = sync
        self.model_id: str | None = None
        self.worker_idx: int | None = None
        self.first: Any = None  # the initial weights given to `init_on_sender`: for all, or a dict by worker
        self.context: Any = None
        self.model: Any = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._on_receiver = self._connected = False

    @staticmethod
    def from_backend(backend: str, **options: Any) -> WeightSyncScheme:
        """Return the scheme for a backend, such as "shared" or "ray"."""
        if backend not in _NAMES:
            raise UsageError(
                f"no weight scheme for backend {backend!r}{nearest(str(backend), _NAMES)}; known: {sorted(_NAMES)}"
            )
        scheme: WeightSyncScheme = globals()[_NAMES[backend]](**options)
        return scheme

    # ---- by hand: the sending side ----------------------------------------------------------------------------------

    def init_on_sender(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        weights: Any = None,
        model: nn.Module | None = None,
        params_map: Mapping[int, Any] | None = None,
        devices: Sequence[Any] | None = None,
        num_workers: int | None = None,
        ctx: Any = None,
        **_: Any,
    ) -> None:
        """Set the initial weights of the workers, before they are started.

        If a collector is given the scheme afterwards, its workers begin with these weights, and
        `update_policy_weights_()` sends them again.

        Args:
            model_id: the name of the model.
            context: an object that has the model under that name, and `num_workers`.
            weights: a TensorDict or a state dict.
            model: a module, in place of `weights`.
            params_map: the weights of each worker by its number, in place of `weights`.
            devices: one device per worker. Only their number matters: weights go to the device of a worker's model.
            num_workers: the number of workers.
            ctx: the multiprocessing context with which processes are started.
        """
        each = None if params_map is None else dict(params_map)
        given = [one for one in (weights, model, each) if one is not None]
        if len(given) > 1:
            raise UsageError("give the weights once: as weights, model or params_map")
        if not given and context is None:
            raise UsageError("init_on_sender needs weights, a model, params_map, or a context that has the model")
        self.model_id, self.context = model_id, context
        self.first = given[0] if given else _model_in(context, model_id)
        count = num_workers or len(devices or ()) or int(getattr(context, "num_workers", 1))
        workers = list(range(count)) if each is None else list(each)
        self._sender = Sender(workers, ctx) if self.transport in _LINKED else None

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send new weights to connected workers: a module, a TensorDict, a state dict, or a dict of these by worker.

        None: send the weights of `init_on_sender` with their current values. With `sync`, wait until workers have
        applied them.
        """
        if self.transport == "none":
            return
        sender = self._sender
        if sender is None or not self._connected:
            raise WrongState("send() comes after init_on_sender() and connect()")
        ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        unknown = [w for w in ids or () if w not in sender]
        if unknown:
            raise UsageError(f"there is no worker {unknown[0]}; the workers are {sender.workers()}")
        given = self.first if weights is None else weights
        if ids is None:
            per_worker = by_worker(given)
            ids = [w for w in sender.workers() if not per_worker or w in given]
        sender.send({w: weights_of(w, given, self.strategy) for w in ids}, wait=self.sync)

    # ---- by hand: the receiving side --------------------------------------------------------------------------------

    def init_on_receiver(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
        **_: Any,
    ) -> None:
        """Set the model that receives the weights, in a worker.

        Args:
            model_id: the name of the model.
            context: an object that has the model under that name.
            model: the model itself, in place of `context`.
            worker_idx: the worker's number; it may also be given to `connect`.
        """
        if model is None and context is None:
            raise UsageError("init_on_receiver needs the model, or a context that has it")
        self.model_id, self.context, self.worker_idx = model_id, context, worker_idx
        self.model = _model_in(context, model_id) if model is None else model
        self._on_receiver, self._connected = True, False

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Connect both sides, and apply the first weights: each side returns once that is done.

        On the receiving side, later weights are applied as they come.
        """
        if self._connected:
            raise WrongState("connect() was called already")
        if self._on_receiver:
            worker = worker_idx if worker_idx is not None else self.worker_idx or 0
            if self._sender is None or worker not in self._sender:
                raise WrongState(
                    f"no link for worker {worker}: the scheme must come from where init_on_sender() was called"
                )
            self.worker_idx = worker
            self._sender.close_other_ends(worker)
            self._receiver = Receiver(self._sender.worker_end(worker), self.apply_weights)
        elif self.transport == "none":
            pass
        elif self._sender is None:
            raise WrongState(
                "connect() comes after init_on_sender() or init_on_receiver()"
                if self.transport in _LINKED
                else f"{type(self).__name__} works only inside a collector, which connects its workers itself"
            )
        else:
            first = self.first if weights is None else weights
            every = {w: weights_of(w, first, self.strategy) for w in self._sender.workers()}
            self._sender.send(every, wait=True)
            self._sender.close_other_ends(None)
        self._connected = True

    def receive(self, timeout: float | None = 0.0) -> Any:
        """Return the last weights applied since the previous call; None if none arrive within `timeout` seconds."""
        if self._receiver is None:
            raise WrongState("receive() comes after init_on_receiver() and connect()")
        return self._receiver.receive(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the model of `init_on_receiver`."""
        if self.model is None:
            raise WrongState("apply_weights() comes after init_on_receiver()")
        self.strategy.apply_weights(self.model, weights, inplace=inplace)

    def shutdown(self) -> None:
        """Close the links to workers. May be called twice."""
        if self._sender is not None:
            self._sender.close()
        self._sender, self._connected = None, False

    @property
    def initialized_on_sender(self) -> bool:
        """Whether `init_on_sender` was called."""
        return self.first is not None

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether `init_on_receiver` was called."""
        return self._on_receiver

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that is pickled for a worker: the links, but not the weights."""
        return {**vars(self), "first": None, "context": None, "model": None, "_receiver": None, "_connected": False}


def as_scheme(given: Any) -> Any:
    """Return reap's scheme in place of one of TorchRL's own, and anything else unchanged.

    A subclass of TorchRL's is left unchanged too, because reap's scheme would not call what it overrides.
    """
    kind = type(given)
    if not kind.__module__.startswith("torchrl.weight_update") or kind.__name__ not in _NAMES.values():
        return given
    options = {"per_worker_weights": True} if getattr(given, "per_worker_weights", False) else {}
    ours: WeightSyncScheme = globals()[kind.__name__](given.strategy, getattr(given, "sync", True), **options)
    ours.first = _initial_weights_of(given)
    return ours


def _initial_weights_of(theirs: Any) -> Any:
    """Return the weights given to `init_on_sender` of TorchRL's scheme: for all, or a dict by worker; None if none."""
    if not theirs.initialized_on_sender:
        return None
    told, each = torchrl_internals.weights_of_sender(theirs)
    if each:
        alike = len({id(one) for one in each.values()}) == 1
        return next(iter(each.values())) if alike else dict(each)
    given = [one for one in (told.get("weights"), told.get("model")) if one is not None]
    if given:
        return given[0]
    try:
        return theirs.weights
    except (AttributeError, RuntimeError):  # it has only a model's name, and its context is gone
        return None


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """One flat block in shared memory, written once per update for any number of workers; reads are never torn.

    With `per_worker_weights` each worker has weights of its own, which are sent one by one.
    """

    transport: WeightTransport = "shared"

    def __init__(
        self, strategy: str | WeightStrategy = "tensordict", sync: bool = True, per_worker_weights: bool = False
    ) -> None:
        super().__init__(strategy, sync)
        self.per_worker_weights = per_worker_weights
        if per_worker_weights:
            self.transport = "per_worker"


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """A message with weights for each worker, for policies that hold more than tensors or differ between workers."""

    transport = "per_worker"


class NoWeightSyncScheme(WeightSyncScheme):
    """Workers keep the weights they were built with; an update changes nothing and counts as no version."""

    transport = "none"


class DistributedWeightSyncScheme(WeightSyncScheme):
    """A broadcast to all workers over torch.distributed; the default of `DistributedCollector`."""

    transport = "distributed"


class RPCWeightSyncScheme(WeightSyncScheme):
    """One message for all workers over TensorPipe; the default of `RPCCollector`."""

    transport = "rpc"


class RayWeightSyncScheme(WeightSyncScheme):
    """One object in Ray's store, pulled by every actor; the default of `RayCollector`."""

    transport = "ray"


@runtime_checkable
class TransportBackend(Protocol):
    """The protocol of an object that sends and receives weights."""

    def send_weights(self, weights: Any) -> None:
        """Send these weights to the receiving side."""

    def receive_weights(self, timeout: float | None = None) -> Any:
        """Wait for the next weights and return them."""


class MPTransport:
    """Sends weights through a multiprocessing queue.

    >>> transport = MPTransport(queue, ack_queue)

    Args:
        weight_queue: the queue for weights.
        ack_queue: the queue in which a receiver acknowledges that it applied them; None: the sender does not wait.
        timeout: seconds to wait for an acknowledgement.
    """

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0) -> None:
        self.weight_queue, self.ack_queue, self.timeout = weight_queue, ack_queue, timeout

    def send_weights_async(self, weights: Any, model_id: str = "policy") -> None:
        """Put weights into the queue without waiting."""
        self.weight_queue.put((model_id, WeightStrategy("state_dict").extract_weights(weights)))

    def send_weights(self, weights: Any, model_id: str = "policy") -> None:
        """Put weights into the queue, and wait for the acknowledgement."""
        self.send_weights_async(weights, model_id)
        self.wait_ack()

    def wait_ack(self) -> None:
        """Wait until the receiver acknowledges that it applied the weights; queue.Empty after `timeout` seconds."""
        if self.ack_queue is not None:
            self.ack_queue.get(timeout=self.timeout)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Wait for weights, apply them to `model` if one is given, and return them.

        Raises queue.Empty after `timeout` seconds.
        """
        _, came = self.weight_queue.get(timeout=timeout)
        if model is not None:
            (strategy or WeightStrategy()).apply_weights(model, came)
        return came

    def send_ack(self, message: str = "updated") -> None:
        """Acknowledge that weights are applied."""
        if self.ack_queue is not None:
            self.ack_queue.put(message)

    def check_connection(self) -> bool:
        """Return True: a queue is always connected."""
        return True


class _NameOnlyTransport:
    """A transport that exists by name only: the collector given the scheme sends the weights itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            f"{type(self).__name__} cannot be created: give a weight sync scheme to the collector, or use the "
            f"scheme's init_on_sender, connect and send between processes of your own"
        )


class SharedMemTransport(_NameOnlyTransport):
    """Shared memory. The name exists for scripts that import it; see `SharedMemWeightSyncScheme`."""


class RayTransport(_NameOnlyTransport):
    """Ray. The name exists for scripts that import it; see `RayWeightSyncScheme`."""


class RPCTransport(_NameOnlyTransport):
    """TensorPipe. The name exists for scripts that import it; see `RPCWeightSyncScheme`."""


class DistributedTransport(_NameOnlyTransport):
    """Gloo. The name exists for scripts that import it; see `DistributedWeightSyncScheme`."""


def _model_in(context: Any, model_id: str) -> Any:
    found = context.get_model(model_id) if hasattr(context, "get_model") else get_attribute(context, model_id)
    if found is None:
        raise WrongArgument(f"{type(context).__name__} has no model {model_id!r}")
    return found
