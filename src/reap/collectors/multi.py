"""MultiCollector: collects with workers in processes of their own.

MultiSyncCollector   a batch holds the rollouts of all workers, made by one version of the weights
MultiAsyncCollector  a batch is one worker's rollout, first come first served; workers collect on while you learn
AsyncCollector       MultiAsyncCollector with one worker
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from typing_extensions import Self, Unpack

from reap._system.messages.pickling import Packed, pack_bytes
from reap.arguments import MOST_LANES, function, whole
from reap.backends.background_runner import BackgroundRunner
from reap.backends.base import Delivery
from reap.backends.delivery import AsReady, InStep, IntoBuffer
from reap.backends.local.shared_memory import SharedMemoryTransport
from reap.backends.worker_backend import WorkerBackend
from reap.collectors.base import BaseCollector
from reap.collectors.buffer_writers import Sink
from reap.collectors.keywords import MultiCollectorOptions
from reap.collectors.options import HOOKS, Options, accept_legacy, is_list, read_options, shows_options
from reap.collectors.parts.arrangements import Arrangement, FirstCome, JoinedWorkers, LagLimit
from reap.collectors.parts.background import Runner
from reap.collectors.parts.weight_updates import Workers, load_model, root_of_path
from reap.collectors.placement import InlinePlacement, Placement
from reap.collectors.plans import EnvMaker, PolicyMaker, StepsPerRollout, plan_for
from reap.core.attribute_path import arguments_per_worker, get_attribute
from reap.core.policies.as_policy import PolicyWarning
from reap.core.policy import rand_step_as_policy
from reap.envs.gym_registry import for_workers
from reap.errors import SpecMismatch, UsageError, WorkerError, WrongArgument, WrongState, warn
from reap.weights.local import by_worker, detached
from reap.weights.strategy import extracted

IN_PROCESS_ONLY = frozenset({"interruptor", "return_same_td"})  # options that need a worker in this process
PER_WORKER = ("create_env_kwargs", "policy_factory", "device", "policy_device", "env_device", "storing_device")


@shows_options(without=IN_PROCESS_ONLY)
class MultiCollector(BaseCollector):
    """Collects with several worker processes.

    >>> collector = MultiCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000, sync=True)
    >>> for batch in collector:              # [2, 100] by default; see cat_results
    ...     collector.update_policy_weights_()

    Envs are built in the workers only. `create_env_fn` may be a lambda; scripts need no main guard.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        num_workers: how many workers, where `create_env_fn` is one factory for all.
        sync: True: a batch holds a rollout of every worker. False: a batch is one worker's rollout, first come first
            served.
        **options: see `reap.collectors.options.Options`.
    """

    _backend: WorkerBackend
    _sync: bool | None = None
    _by_sync: ClassVar[tuple[type, type]]  # in a class that only chooses: its Sync and its Async subclass
    _placement: Placement = Placement()  # where the workers live

    def __new__(
        cls,
        create_env_fn: Any = None,
        policy: Any = None,
        *,
        sync: bool | None = None,
        num_workers: int | None = None,
        **options: Any,
    ) -> Self:
        if cls is MultiCollector and not isinstance(sync, bool):
            raise WrongArgument(f"MultiCollector needs sync=True or sync=False, got {sync!r}")
        chosen: type[Self] = cls._by_sync[sync is not True] if "_by_sync" in vars(cls) else cls
        return object.__new__(chosen)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        sync: bool | None = None,
        num_workers: int | None = None,
        **keywords: Unpack[MultiCollectorOptions],
    ) -> None:
        name = type(self).__name__
        options: dict[str, Any] = {**keywords}
        if sync is not None and sync is not self._sync:
            if self._sync is None:
                raise UsageError(f"{name} cannot choose with sync={sync}; derive it from a Sync or an Async collector")
            raise UsageError(f"{name} always has sync={self._sync}; use MultiCollector to choose")
        policy = rand_step_as_policy(policy)
        count, makers = _count_and_makers(name, create_env_fn, num_workers)
        each = _pop_per_worker(options, count)
        asked = options.get("frames_per_batch")
        if asked is None:
            raise WrongArgument(f"{name} needs frames_per_batch: how many frames a batch holds")
        frames = _frames(asked, count, sync=bool(self._sync))
        if is_list(asked):
            asked = sum(frames) if self._sync else max(frames)
        settings = read_options(name, {**options, "frames_per_batch": asked})
        if settings.workers == "inline":
            self._placement = InlinePlacement(self._placement)
        self._check_settings(settings, count)
        own = self._placement.options_by_worker or [{}] * count
        workers = [
            dataclasses.replace(settings, **{**{key: each[key][w] for key in each}, **own[w]}) for w in range(count)
        ]
        self._lag_limit = None if settings.max_lag is None else LagLimit(settings.max_lag)
        self._workers_write = self._placement.workers_write(workers[0].replay_buffer)
        self._prepare(workers[0], update_interval=self._placement.update_interval)
        storing = [worker.devices[1] for worker in workers]
        if len({*storing}) > 1:  # what lies on several devices is joined on the CPU, as in TorchRL
            everywhere = [torch.device("cpu")] * count if self._sync else storing
            self._pipeline.storing_by_worker = dict(enumerate(everywhere))
        self._policy, self._strategy = policy, settings.strategy()
        if self._workers_write or settings.hooks_in_workers:
            self._hooks, self._worker_hooks = dict.fromkeys(HOOKS), self._hooks
        self.num_workers = count
        self.create_env_fn = makers
        self.update_at_each_batch, self.cat_results = settings.update_at_each_batch, settings.cat_results
        plans = self._plans(workers, makers, policy, frames)
        self._backend = self._make_backend(plans, settings)
        try:
            self._backend.start()
            for text in sorted({text for worker in self._backend.workers for text in worker.info.warnings}):
                warn(text, PolicyWarning)
            self._send_first_weights()
            self._learn_sizes()
        except BaseException as error:
            self._close(f"it could not be built: {error!r}", failed=isinstance(error, WorkerError))
            raise
        self._weights.watch_policy(
            policy,
            "the workers still act",
            "Call update_policy_weights_() after training, or give update_at_each_batch=True",
            count,
        )

    def _check_settings(self, settings: Options, count: int) -> None:
        """Raise for options that do not fit workers in other processes, or this number of them."""
        name = type(self).__name__
        if settings.interruptor is not None or settings.return_same_td:
            one = "interruptor" if settings.interruptor is not None else "return_same_td"
            raise WrongArgument(f"{one} works only in a Collector in this process; {name} has worker processes")
        if self._sync and settings.preemptive_threshold is not None and not self._placement.preempts:
            raise UsageError("preemptive_threshold cannot stop remote workers during a rollout; leave it out")
        if settings.max_lag is not None and self._placement.workers_write(settings.replay_buffer):
            raise UsageError("max_lag cannot drop rollouts that workers write to the buffer themselves; leave it out")
        if not self._sync and settings.cat_results not in (None, "stack"):
            raise UsageError(
                f"cat_results joins the rollouts of all workers, but {name} delivers them one by one; leave it out"
            )
        own = self._placement.options_by_worker
        if own is not None and len(own) != count:
            raise SpecMismatch(f"collector_kwargs holds {len(own)} mappings for {count} workers")

    def _make_backend(self, plans: Sequence[Any], settings: Options) -> WorkerBackend:
        """Return the backend that reaches the workers where the placement puts them."""
        place = self._placement
        return WorkerBackend(
            plans,
            transport=place.transport(plans, settings),
            delivery=self._make_delivery(settings),
            writer=place.writer(settings),
            nested=place.nested_workers(settings, len(plans)),
            **self._backend_options(settings),
        )

    def _make_delivery(self, settings: Options) -> Delivery:
        """Return the delivery, which decides which rollouts make a batch."""
        threshold = settings.preemptive_threshold if self._sync else None
        if self._workers_write:
            return IntoBuffer(in_step=bool(self._sync), threshold=threshold, random_frames=settings.random_frames)
        return InStep(threshold) if self._sync else AsReady(settings.random_frames)

    def _backend_options(self, settings: Options) -> dict[str, Any]:
        """Return the arguments of `WorkerBackend` that are the same wherever the workers live."""
        hooks = {name: getattr(settings, name) for name in HOOKS}
        return {
            "source": self._weights_source,
            "scheme": settings.weight_transport,
            "timeout": settings.timeout,
            "on_failure": settings.failures,
            "saves": settings.deterministic and settings.on_failure == "restart",
            "strategy": self._strategy,
            "threads": settings.num_sub_threads,
            "init": settings.init_fn,
            "hooks": hooks if settings.hooks_in_workers else {},
        }

    @property
    def _weights_source(self) -> Any:
        """The source of the weights when `update_policy_weights_` is given none."""
        first = self.options.first_weights
        if first is None and (self._strategy is not None or isinstance(self._policy, torch.nn.Module)):
            return self._policy
        return first

    def _send_first_weights(self) -> None:
        """Send workers their first weights, unless they were built with these already."""
        source, options = self._weights_source, self.options
        built_with_them = self._policy is None or options.first_weights is None
        if options.weight_transport == "none" or source is None or (built_with_them and self._strategy is None):
            return
        given = source if self._strategy is None else extracted(self._strategy, source)
        apart = by_worker(given)
        every = range(self.num_workers)
        self._backend.set_first_weights({w: given[w] if apart else given for w in every if not apart or w in given})

    def _make_sink(self) -> Sink | None:
        """Return the sink of this process, or None if workers write to the buffer."""
        if self._overrides and self.replay_buffer is not None:
            raise UsageError(
                f"{type(self).__name__} overrides rollout(), which a collector with workers does not call if "
                f"there is a replay buffer; give a postproc, or write to the buffer yourself"
            )
        sink = super()._make_sink()  # called in both cases: it checks the options
        return None if self._workers_write else sink

    def _plans(
        self, workers: Sequence[Options], makers: Sequence[Any], policy: Any, frames: Sequence[int]
    ) -> list[Any]:
        """Return the plan of each worker, with its contents pickled for the worker's process."""
        pack = self._placement.pack
        envs = _packed_once(pack, [for_workers(make) for make in makers], "create_env_fn")
        kwargs = _packed_once(pack, [options.create_env_kwargs for options in workers], "create_env_kwargs")
        pack(workers[0].init_fn, "init_fn")  # only to fail early, with its name: the job carries it
        policies = self._packed_policies(workers, policy)
        factories = _packed_once(pack, [options.policy_factory for options in workers], "policy_factory")
        plans = []
        for w, (options, size) in enumerate(zip(workers, frames)):
            device, _ = options.devices
            env = EnvMaker(envs[w], kwargs[w], options.max_frames_per_traj, options.failure_dir, w)
            acting = PolicyMaker(policies[w], factories[w], device)
            plans.append(plan_for(options, env, acting, StepsPerRollout(size), device))
        return plans

    def _packed_policies(self, workers: Sequence[Options], policy: Any) -> Sequence[Packed | None]:
        """Return for each worker, packed: the policy, the first weights of one its factory makes, or None."""
        count = len(workers)
        if policy is not None and all(o.policy_factory is None for o in workers):
            return [self._placement.pack(policy, "policy")] * count
        if self._strategy is not None:
            return [None] * count  # `_send_first_weights` sends weights once the workers have started
        if isinstance(policy, torch.nn.Module):  # with a factory, it only supplies weights and does not act
            return [_packed_weights(policy)] * count
        if policy is not None:
            raise WrongArgument(
                "give policy or policy_factory; if both are given, policy must be a module whose weights are sent"
            )
        first = workers[0].first_weights  # for policies that are made in the workers
        if by_worker(first):
            return [_packed_weights(first[w]) if w in first else None for w in range(count)]
        return [None if first is None else _packed_weights(first)] * count

    def _learn_sizes(self) -> None:
        """Set the number of frames a batch really holds, warn if it was rounded, and choose the arrangement."""
        layouts = [worker.info.layout for worker in self._backend.workers]
        sizes = [layout.frames for layout in layouts]
        asked = self.options.frames_per_batch
        self.requested_frames_per_batch = sum(sizes) if self._sync else max(sizes)
        what = f"{len(layouts)} workers with {layouts[0].lanes} lanes" if self._sync else f"{layouts[0].lanes} lanes"
        self._warn_rounding(asked, self.requested_frames_per_batch, what)
        if self._sync:
            arrangement: Arrangement = JoinedWorkers(self.cat_results, layouts, compact=self.options.compact_obs)
        else:
            arrangement = FirstCome(self._backend, self._lag_limit)
        self._pipeline.arrangement = arrangement

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """Return how many frames a worker (by default the first) makes for a batch."""
        return self._backend.known_workers[worker_idx or 0].size

    def fake_tensordict(self) -> TensorDictBase:
        """Raise `NotImplementedError`: batches come from other processes, so their shape is not known in advance."""
        raise NotImplementedError(
            f"{type(self).__name__} does not know the shape of its batches before the first one; call next()"
        )

    # ---- data -----------------------------------------------------------------------------------------------------

    def _next_batch(self) -> TensorDictBase | None:
        if not self._workers_write:
            return super()._next_batch()
        with self._backend.uninterrupted():
            self._send_weights()
            if self._runner is None:  # in the background `_count` does this
                self._weights.count_rollouts(1, background=False)
            made = self._pipeline.frames
            random = made < self.options.random_frames
            rollout = self._backend.take(random=random, most=self.options.total - made)
            self._count(rollout.frames, 1)
        return None

    def _count(self, frames: int, batches: int) -> None:
        self._pipeline.frames += frames
        self._pipeline.batches += batches
        if self._runner is not None:
            self._weights.count_rollouts(batches, background=True)

    def _make_runner(self) -> Runner:
        if not self._workers_write or not self._placement.workers_run_free:
            return super()._make_runner()
        if self.options.update_at_each_batch:
            raise WrongState(
                "update_at_each_batch: workers that collect in the background deliver no batches; "
                "call update_policy_weights_() instead"
            )
        made = self._pipeline.frames
        left, random = self.options.total - made, self.options.random_frames - made
        transport = self._backend.transport
        assert isinstance(transport, SharedMemoryTransport)  # workers that run by themselves count in its counters
        return BackgroundRunner(self._backend, transport.counters, left=left, random=random, count=self._count)

    def rollout(self) -> TensorDictBase:
        self._check_open()
        if self._workers_write:
            raise WrongState(
                "workers write their rollouts into the replay buffer, so rollout() has none to return; "
                "sample from the buffer"
            )
        with self._backend.uninterrupted():
            return super().rollout()

    def _set_hook(self, name: str, hook: Any) -> None:
        """Let the workers call a hook, as they do if they write to the buffer, and with `hooks_in_workers`."""
        function(name, hook)
        self._ask(lambda: self._backend.set_hooks({name: hook}))
        self._worker_hooks[name] = hook
        self._hooks[name] = None  # last: a hook that is refused leaves the one before it where it was

    def _fetch(self) -> None:
        with self._backend.uninterrupted():
            self._send_weights()
            super()._fetch()

    def _send_weights(self) -> None:
        """Update the workers' weights before a batch, if the options ask for automatic updates and one is due."""
        if self._weights.due(self._pipeline.batches):
            self.update_policy_weights_()

    @property
    def policy(self) -> Any:
        """The policy the collector was given; workers act with copies of it."""
        return self._policy

    def _publish(self, weights: Any, worker_ids: Workers) -> int:
        ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        ids = None if ids is None else [int(w) for w in ids]
        if self._strategy is not None:
            given = self._weights_source if weights is None else weights
            if weights is None and ids is not None and by_worker(given):
                given, ids = {w: given[w] for w in ids if w in given}, None
            weights = None if given is None else extracted(self._strategy, given)
        return self._backend.publish(weights, ids)

    def _load_model(self, path: str, weights: Any) -> None:
        here, strategy = root_of_path(path) == "postproc", self.options.strategy(path)

        def in_workers(state: Any) -> None:
            if strategy is None:
                self.map_fn(f"{path}.load_state_dict", [(state,)] * self.num_workers)
            else:
                self._between(lambda: self._backend.apply(path, strategy, state))

        # Workers that write to a buffer have a postproc of their own.
        there = in_workers if self._workers_write or not here else None
        find = partial(get_attribute, self) if here else None
        load_model(path, weights, strategy, find=find, ask=self._ask, in_workers=there)

    def get_cached_weights(self, model_id: str = "policy", *, worker: int = 0) -> Any:
        """Return the weights a worker acts with, by name."""
        return self._ask(lambda: self._backend.weights_of(worker))

    def explain(self) -> str:
        told: dict[str, list[int]] = {}
        for worker, found in self._find_in_workers(
            "explain", arguments_per_worker(self.num_workers, None, None)
        ).items():
            texts = found if isinstance(found, list) else [found]  # a list: one text per nested worker
            told.setdefault("\n".join(dict.fromkeys(texts)), []).append(worker)
        if len(told) == 1:
            return next(iter(told))
        return "\n".join(f"workers {', '.join(map(str, workers))}:\n{text}" for text, workers in told.items())

    def get_distant_attr(self, attr: str) -> list[Any]:
        return list(self._find_in_workers(attr).values())

    def _find_in_workers(
        self, path: str, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]] | None = None
    ) -> dict[int, Any]:
        """Return the attribute at `path` in each worker, by worker number; with `calls`, the results of calling it."""
        self._check_open()
        return self._between(lambda: self._backend.find(path, calls))

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        self._check_open()
        if method_name.startswith("policy."):
            self._weights.watch = None  # users who reach into the workers' policies know that these are copies
        calls = arguments_per_worker(self.num_workers, list_of_args, list_of_kwargs)
        if method_name == "update_policy_weights_":  # this process counts versions
            self.update_policy_weights_({w: _weights_in(*call) for w, call in enumerate(calls)})
            return [None] * len(calls)
        if method_name == "reset":  # rollouts collected before the reset must not be delivered
            self.reset()
            return [None] * len(calls)
        return list(self._find_in_workers(method_name, calls).values())

    def _from_first_worker(self, path: str) -> Any:
        return self.get_distant_attr(path)[0]

    def _settle(self, timeout: float | None) -> None:
        """Wait, while background collection is paused, until no worker is collecting any more."""
        if self._workers_write:
            self._count(*self._backend.settle(timeout))  # rollouts that are in the buffer and not counted yet
        else:
            self._backend.drain(timeout)

    def _close(self, why: str, *, close_env: bool = True, failed: bool = False) -> None:
        if not close_env:
            raise WrongState(f"{type(self).__name__} cannot leave envs open, because they end with their workers")
        if isinstance(self._runner, BackgroundRunner):
            self._runner.stop_watching()
        super()._close(why, failed=failed)
        if isinstance(self._runner, BackgroundRunner):
            self._runner.catch_up()  # the last count: the workers have ended

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Begin new episodes in all workers, or in those marked True."""
        self._check_open()
        chosen = None if reset_idx is None else _marked_workers(reset_idx, len(self._backend.workers))

        def work() -> None:
            self._backend.reset(workers=chosen)
            if chosen is None:
                self._pipeline.drop_taken()

        self._ask(work)

    def __repr__(self) -> str:
        if not hasattr(self, "requested_frames_per_batch"):
            return f"{type(self).__name__}(not built)"
        state = "" if not self.closed else f", closed: {self._life.why_closed}"
        return (
            f"{type(self).__name__}({self.num_workers} workers, {self.requested_frames_per_batch:,} frames per batch"
            f"{state})"
        )


@shows_options(without=IN_PROCESS_ONLY)
class MultiSyncCollector(MultiCollector):
    """Collects with several worker processes in step: a batch holds a rollout of each, all made by the same weights.

    >>> collector = MultiSyncCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:              # [2, 100] by default; see cat_results
    ...     collector.update_policy_weights_()

    Envs are built in the workers only. `create_env_fn` may be a lambda; scripts need no main guard.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        num_workers: how many workers, where `create_env_fn` is one factory for all.
        sync: True, or left out.
        **options: see `reap.collectors.options.Options`.
    """

    _sync = True


@shows_options(without=IN_PROCESS_ONLY)
class MultiAsyncCollector(MultiCollector):
    """Collects with several worker processes that continue while you learn: a batch is one worker's rollout.

    >>> collector = MultiAsyncCollector([make_env] * 2, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:              # [200], of the worker that is first
    ...     collector.update_policy_weights_()

    `batch.origin` holds the worker that made the batch, the version of its weights, and the lag: how many updates there
    were since. Envs are built in the workers only. `create_env_fn` may be a lambda; scripts need no main guard.

    Args:
        create_env_fn: a list with one env factory (or Gymnasium id) per worker; or one, with `num_workers`.
        policy: as for `Collector`. Workers get copies; `update_policy_weights_` sends new weights.
        num_workers: how many workers, where `create_env_fn` is one factory for all.
        sync: False, or left out.
        **options: see `reap.collectors.options.Options`.
    """

    _sync = False


MultiCollector._by_sync = MultiSyncCollector, MultiAsyncCollector


@shows_options(without=IN_PROCESS_ONLY)
class AsyncCollector(MultiAsyncCollector):
    """Collects with one worker process, which collects the next batch while you use this one.

    >>> collector = AsyncCollector(make_env, policy, frames_per_batch=200, total_frames=1000)
    >>> for batch in collector:
    ...     collector.update_policy_weights_()

    Args:
        create_env_fn: an env factory or a Gymnasium id.
        policy: as for `Collector`. The worker gets a copy; `update_policy_weights_` sends new weights.
        num_workers: 1, or left out.
        **options: see `reap.collectors.options.Options`.
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        num_workers: int | None = None,
        **options: Unpack[MultiCollectorOptions],
    ) -> None:
        if is_list(create_env_fn):
            if len(create_env_fn) != 1:
                raise WrongArgument(f"AsyncCollector has one worker, got {len(create_env_fn)} envs")
            (create_env_fn,) = create_env_fn
        if whole("num_workers", num_workers, none=True) not in (None, 1):
            raise UsageError("AsyncCollector has one worker; MultiAsyncCollector takes num_workers")
        super().__init__([create_env_fn], policy, **options)


def _count_and_makers(owner: str, create_env_fn: Any, num_workers: Any) -> tuple[int, list[Any]]:
    if num_workers is not None and (
        isinstance(num_workers, bool) or not isinstance(num_workers, int) or not 1 <= num_workers <= MOST_LANES
    ):
        raise WrongArgument(f"num_workers must be a whole number ≥ 1 and at most {MOST_LANES:,}, got {num_workers!r}")
    if is_list(create_env_fn):
        if not create_env_fn:
            raise UsageError(f"{owner} needs at least one env factory")
        if num_workers not in (None, len(create_env_fn)):
            raise WrongArgument(f"create_env_fn holds {len(create_env_fn)} envs, but num_workers is {num_workers}")
        return len(create_env_fn), list(create_env_fn)
    if num_workers is None:
        raise WrongArgument(f"{owner} needs a list of env factories, or one and num_workers")
    return num_workers, [create_env_fn] * num_workers


def _pop_per_worker(options: dict[str, Any], count: int) -> dict[str, list[Any]]:
    """Remove the options that may differ between workers from `options`; return their values, one for each worker."""
    each = {key: _each(key, options.pop(key, None), count) for key in PER_WORKER}
    for old, new in (("devices", "device"), ("passing_devices", "storing_device")):
        if old in options:
            accept_legacy(old, new, both=any(one is not None for one in each[new]))
            each[new] = _each(old, options.pop(old), count)
    return each


def _each(name: str, value: Any, count: int) -> list[Any]:
    """Return the value of an option for each of `count` workers."""
    if not is_list(value):
        return [value] * count
    if len(value) != count:
        raise SpecMismatch(f"{name} holds {len(value)} values for {count} workers")
    return list(value)


def _frames(value: Any, count: int, *, sync: bool) -> list[int]:
    """Return how many frames each worker collects for a batch."""
    if is_list(value):
        if len(value) != count:
            raise SpecMismatch(f"frames_per_batch holds {len(value)} values for {count} workers")
        return [_frames(one, 1, sync=sync)[0] for one in value]
    frames: Any = whole("frames_per_batch", value)
    return [-(-frames // count) if sync else frames] * count


def _packed_once(pack: Callable[..., Any], values: Sequence[Any], name: str) -> list[Any]:
    """Return these values packed, an object that occurs several times only once; None stays None."""
    different = {id(value): value for value in values if value is not None}
    packed = {key: pack(value, name) for key, value in different.items()}
    return [packed.get(id(value)) for value in values]


def _packed_weights(weights: Any) -> Packed:
    """Return weights, pickled for workers."""
    return pack_bytes(detached(weights), "policy")


def _weights_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the weights among the arguments that `map_fn` was given for one worker's `update_policy_weights_`."""
    given = [*args, *kwargs.values()]
    if len(given) != 1:
        raise UsageError(
            f"update_policy_weights_ in workers takes one argument, the weights; got {len(given)} arguments"
        )
    return given[0]


def _marked_workers(index: Any, count: int) -> list[int]:
    chosen = torch.as_tensor(index).reshape(-1)
    if chosen.dtype is not torch.bool or len(chosen) != count:
        raise UsageError(f"reset takes one True or False for each of {count} workers, got {index!r}")
    found: list[int] = chosen.nonzero().reshape(-1).tolist()
    return found
