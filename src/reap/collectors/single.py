"""Collector: collects with one worker, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from typing_extensions import Self, Unpack

from reap._system.affinity import Cores
from reap.arguments import MOST_LANES, mapping, whole
from reap.backends.inline import InlineBackend
from reap.collectors.base import BaseCollector
from reap.collectors.buffer_writers import mark_truncated
from reap.collectors.keywords import CollectorOptions
from reap.collectors.multi import MultiCollector
from reap.collectors.options import WORKERS_ONLY, is_list, read_options, shows_options
from reap.collectors.parts.weight_updates import Workers, load_model, root_of_path
from reap.collectors.plans import EnvMaker, PolicyMaker, StepsPerRollout, plan_for
from reap.core.attribute_path import arguments_per_worker, get_attribute
from reap.core.columns.assemble_ragged import assembler
from reap.core.device.slots import DeviceLayout, DeviceSlot
from reap.core.policy import rand_step_as_policy
from reap.core.slot import FRAME, Slot
from reap.core.worker import Plan
from reap.errors import UsageError, WrongArgument, nearest
from reap.spec import show
from reap.weights.local import by_worker

_PLACEMENT_OPTIONS = ("backend", "num_collectors", "sync", "backend_options")  # they say where the collector runs


@shows_options(without=WORKERS_ONLY)
class Collector(BaseCollector):
    """Collects experience in this process.

    >>> collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=1000)
    >>> for batch in collector:
    ...     batch["next", "reward"].mean()

    A batch is a TensorDict `[T]`, or `[N, T]` for N lanes. You may keep it: no later batch overwrites it. With lanes it
    is a transposed view of time-major memory: flatten it with `reshape(-1)`, or give `contiguous=True` (the default for
    TorchRL's envs).

    Args:
        create_env_fn: an env, a Gymnasium env, a Gymnasium id, or a factory of one.
        policy: a TensorDictModule, a module or function of observations, or None for random actions.
        backend: where it collects: "direct" (here, the default), "process", "distributed", "ray", "rpc" or "submitit".
        num_collectors: how many workers, with another backend than "direct"; by itself it means "process".
        sync: with workers: True: a batch holds a rollout of every one. False (the default): a batch is one worker's
            rollout, first come first served.
        backend_options: further arguments of the collector over that backend, as a mapping.
        **options: see `reap.collectors.options.Options`.
    """

    _backend: InlineBackend

    def __new__(cls, create_env_fn: Any = None, policy: Any = None, **options: Any) -> Self:
        """Return a `Collector`; with `num_collectors` or a `backend` other than "direct", the one that runs there."""
        named = options.keys() & {*_PLACEMENT_OPTIONS}
        if cls is not Collector:
            if named:
                raise WrongArgument(f"{cls.__name__} has no option {min(named)!r}; it belongs to Collector itself")
            return super().__new__(cls)
        backend, count, sync, more = _placement_from(options)
        if backend == "direct":
            return super().__new__(cls)
        rest = {key: value for key, value in options.items() if key not in _PLACEMENT_OPTIONS}
        if is_list(create_env_fn):
            if count not in (None, len(create_env_fn)):
                raise UsageError(f"num_collectors is {count}, but there are {len(create_env_fn)} envs")
        else:
            create_env_fn = [create_env_fn] * (count or 1)
        kind = MultiCollector if backend == "process" else _remote_collector(backend)
        found: Any = kind(create_env_fn, policy, sync=sync, **rest, **more)
        return found  # type: ignore[no-any-return]

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        backend: Literal["direct", "process", "multiprocessing", "distributed", "ray", "rpc", "submitit"] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        backend_options: Mapping[str, Any] | None = None,
        **options: Unpack[CollectorOptions],
    ) -> None:
        settings = read_options(type(self).__name__, {**options}, without=WORKERS_ONLY)
        policy = rand_step_as_policy(policy)
        if policy is not None and settings.policy_factory is not None:
            raise WrongArgument("give policy or policy_factory, not both")
        if is_list(create_env_fn):
            if len(create_env_fn) != 1:
                raise UsageError(
                    f"Collector takes one env, got {len(create_env_fn)}; make them the lanes of one with SerialEnv"
                )
            (create_env_fn,) = create_env_fn
        if settings.on_failure == "drop":
            raise UsageError(
                "on_failure='drop' needs several workers; a collector in this process has one. "
                "'restart' rebuilds envs that raise"
            )
        self._prepare(settings)
        make_env = EnvMaker(
            create_env_fn, settings.create_env_kwargs, settings.max_frames_per_traj, settings.failure_dir
        )
        self._start_worker(policy, make_env, StepsPerRollout(settings.frames_per_batch))
        lanes = self._backend.worker.lanes
        steps = -(-settings.frames_per_batch // lanes)
        self.requested_frames_per_batch = steps * lanes
        self._warn_rounding(settings.frames_per_batch, steps * lanes, f"{lanes} lanes")
        self.frames_per_batch = self._backend.worker.layout.steps

    def _start_worker(self, policy: Any, make_env: EnvMaker, steps: Any, cores: Cores | None = None) -> None:
        """Build the worker and load its first weights. `cores`: the processor cores it collects on."""
        settings = self.options
        device, _ = settings.devices
        make_policy = PolicyMaker(policy, settings.policy_factory, device)
        first = settings.first_weights if policy is None else None
        self._backend = InlineBackend(
            self._adjust_plan(plan_for(settings, make_env, make_policy, steps, device)),
            source=policy if first is None else first,
            same_slot=settings.return_same_td,
            transport=settings.weight_transport,
            strategy=settings.strategy(),
            cores=cores,
            rebuild=settings.failures if settings.on_failure == "restart" else None,
        )
        self._backend.start()
        if first is not None:
            self._backend.load(first[0] if by_worker(first) else first)
        if self._backend.worker.model is not policy:
            self._weights.watch_policy(
                policy, "its copy on policy_device still acts", "Call update_policy_weights_() after training"
            )

    def _adjust_plan(self, plan: Plan) -> Plan:
        """Return the plan the worker is built from. Subclasses override this to change what no option covers."""
        return plan

    @property
    def policy(self) -> Any:
        """The policy that acts: the one you gave, or its copy on `policy_device`."""
        return self._backend.worker.model

    @property
    def env(self) -> Any:
        """The env you gave, if it is one of TorchRL's; otherwise the lanes that are stepped.

        If you step or reset it yourself between two batches (`collector.env.reset()`), the next batch begins new
        episodes.
        """
        return self._backend.worker.env.as_given

    def explain(self) -> str:
        return self._backend.worker.explain()

    def get_distant_attr(self, attr: str) -> Any:
        self._life.check_owner()
        return get_attribute(self, attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        self._life.check_owner()
        ((args, kwargs),) = arguments_per_worker(1, list_of_args, list_of_kwargs)
        return [get_attribute(self, method_name)(*args, **kwargs)]

    def _publish(self, weights: Any, worker_ids: Workers) -> int:
        """Load weights into the only worker; raise if weights by worker, or `worker_ids`, name another one."""
        ids = [worker_ids] if isinstance(worker_ids, int) else [0] if worker_ids is None else list(worker_ids)
        if not ids:
            return self._weights.version
        if ids != [0]:
            raise UsageError(f"worker_ids {ids}: this collector has worker 0 only")
        if by_worker(weights):
            if list(weights) != [0]:
                raise UsageError(f"weights are given for workers {list(weights)}: this collector has worker 0 only")
            weights = weights[0]
        return self._backend.publish(weights)

    def _load_model(self, path: str, weights: Any) -> None:
        root_of_path(path)
        load_model(path, weights, self.options.strategy(path), find=partial(get_attribute, self), ask=self._ask)

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Call `update_policy_weights_`, under the name TorchRL uses on the side that receives weights."""
        self.update_policy_weights_(policy_or_weights, weights=weights, policy=policy)

    def fake_tensordict(self) -> TensorDictBase:
        """Return a batch of zeros, split and post-processed like a real one, without stepping the env.

        Use it to lay out a storage or compile a learner before anything is collected.
        """
        self._check_open()
        worker = self._backend.worker
        layout = worker.layout
        if FRAME in layout.loose:
            raise UsageError("fake_tensordict: frames of this env have no fixed shape")
        slot = DeviceSlot(layout) if isinstance(layout, DeviceLayout) else Slot(layout)
        if self.options.set_truncated:
            mark_truncated(slot.arrays, layout)
        return self._pipeline.empty(assembler(layout)(slot.arrays, layout), self.postproc)

    def reset(self, index: Any = None) -> None:
        """Begin new episodes in all lanes, or in those that `index` names: a number, a list of them, or a mask."""
        self._check_open()
        lanes = None if index is None else _lanes(index, self._backend.worker.lanes)

        def work() -> None:
            self._backend.reset(lanes)
            if lanes is None:
                self._pipeline.drop_taken()

        self._ask(work)

    def _wait_for_env(self, timeout: float) -> None:
        self._backend.wait_closed(timeout)

    def episodes(self) -> list[dict[str, Any]]:
        if not self._backend.worker.tells_episodes:
            raise UsageError(
                "episodes() of lanes on a device needs their rewards and ends on the host after each rollout: ask for "
                "that with track_episodes=True when the collector is built"
            )
        return super().episodes()

    def _shape(self) -> str:
        """Return the part of `repr` that says how many lanes and steps make a batch."""
        worker = self._backend.worker
        return f"{worker.lanes} lane{'s' * (worker.lanes > 1)} × {worker.layout.steps} steps = "

    def __repr__(self) -> str:
        if not hasattr(self, "_backend") or not hasattr(self._backend, "worker"):
            return f"{type(self).__name__}(not built)"
        worker = self._backend.worker
        total = self.options.total
        amount = "without end" if total == float("inf") else f"{total:,} in all ({len(self)} batches)"
        how = "; ".join(worker.explain().splitlines())
        columns = ", ".join(
            f"{show(k)} {leaf}" for k, leaf in worker.layout.columns.items() if k[0] not in ("next", "collector")
        )
        state = "" if not self.closed else f", closed: {self._life.why_closed}"
        return (
            f"{type(self).__name__}({self._shape()}{self.requested_frames_per_batch:,} frames per batch, {amount}; "
            f"{how}; batch {list(worker.layout.batch_size)}: {columns}{state})"
        )


_BACKENDS = {"direct": "direct", "process": "process", "multiprocessing": "process"} | {
    name: name for name in ("distributed", "ray", "rpc", "submitit")
}
_KNOWN = "'direct', 'process', 'distributed', 'ray', 'rpc', 'submitit'"


def _remote_collector(backend: str) -> type[MultiCollector]:
    """Return the collector class for this backend; `collectors.distributed` is imported only when it is needed."""
    from reap.collectors import distributed

    names = {"ray": "RayCollector", "rpc": "RPCCollector"}
    found: type[MultiCollector] = getattr(distributed, names.get(backend, "DistributedCollector"))
    return found


def _placement_from(options: dict[str, Any]) -> tuple[str, int | None, bool, dict[str, Any]]:
    """Return where the collector runs: the backend, the number of workers, whether in step, and further options."""
    name, count, sync = options.get("backend"), options.get("num_collectors"), options.get("sync")
    more = options.get("backend_options")
    mapping("backend_options", more)
    more = more or {}
    if isinstance(count, float):
        raise WrongArgument(f"num_collectors must be a whole number, got {count!r}")
    count = whole("num_collectors", count, most=MOST_LANES, none=True)
    if name is not None and not (isinstance(name, str) and name in _BACKENDS):
        raise UsageError(f"backend must be one of {_KNOWN}, got {name!r}{nearest(str(name), _BACKENDS)}")
    backend = _BACKENDS[name] if name is not None else "direct" if count is None else "process"
    if sync is not None and not isinstance(sync, bool):
        raise WrongArgument(f"sync must be True or False, got {sync!r}")
    if backend == "direct":
        given = [key for key in ("backend_options", "num_collectors") if options.get(key)]
        given += ["sync"] * (sync is not None)
        if given and not (given == ["num_collectors"] and count == 1):
            raise UsageError(f"{given[0]} is for workers in processes; give backend='process' or num_collectors")
    twice = [key for key in more if key in options or key in {*_PLACEMENT_OPTIONS, "num_workers"}]
    if twice:
        raise UsageError(f"backend_options holds {twice[0]!r}, which is an argument of its own")
    usual = {"launcher": "submitit"} if backend == "submitit" else {}
    return backend, count, bool(sync), {**usual, **more}


def _lanes(index: Any, count: int) -> list[int]:
    chosen = torch.as_tensor(index).reshape(-1)
    if chosen.dtype is torch.bool:
        if len(chosen) != count:
            raise UsageError(f"reset got a mask of {len(chosen)} for {count} lanes")
        return chosen.nonzero().reshape(-1).tolist()
    lanes: list[int] = chosen.tolist()
    if chosen.is_floating_point() or any(not 0 <= lane < count for lane in lanes):
        raise UsageError(f"reset got lanes {lanes}; there are {count} (0 to {count - 1})")
    return lanes
