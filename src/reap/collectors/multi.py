"""MultiCollector: workers in processes of their own.

MultiSyncCollector   a batch holds the rollouts of all workers, made by one version of the weights
MultiAsyncCollector  a batch is one worker's rollout, first come first served; workers go on while you learn
AsyncCollector       the latter with one worker
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from typing_extensions import Self

from reap._system.pickling import Parcel, pack, pack_bytes
from reap.arguments import MOST_LANES, whole
from reap.backends.background_runner import BackgroundRunner
from reap.backends.base import Delivery, Rollout
from reap.backends.delivery import AsReady, InStep, IntoBuffer
from reap.backends.local.shared_memory import SharedMemoryTransport
from reap.backends.worker_backend import WorkerBackend
from reap.buffers.replay import ReplayBuffer
from reap.collectors.background import Runner
from reap.collectors.base import BaseCollector
from reap.collectors.buffer_writers import Sink, WriteOptions, WriterMaker
from reap.collectors.joining import LagLimit, join_for
from reap.collectors.options import Options, listed, read_options, signature
from reap.collectors.parts import Part
from reap.collectors.plans import EnvMaker, PolicyMaker, Steps, plan_for
from reap.core.attribute_path import each_call
from reap.core.policies.as_policy import PolicyWarning
from reap.core.policy import without_steps
from reap.core.slot import Layout
from reap.core.stats import together
from reap.envs.gym_registry import for_workers
from reap.errors import SpecMismatch, UsageError, WorkerError, WrongArgument, WrongState
from reap.trajectories import FINAL
from reap.weights.local import by_worker, detached
from reap.weights.strategy import extracted

_PER_WORKER = ("create_env_kwargs", "policy_factory", "device", "policy_device", "env_device", "storing_device")


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
        sync: True: a batch holds a rollout of every worker. False: of one, first come first served.
        **options: see `reap.collectors.options.Options`.
    """

    _backend: WorkerBackend
    _sync: bool | None = None
    _pack = staticmethod(pack)  # how what users give is packed for the workers
    _each: Sequence[Mapping[str, Any]] | None = None  # options of each worker, where these differ
    _lag_limit: LagLimit | None = None  # where rollouts may come too late
    _workers_go_on = True  # whether workers that write into the buffer collect on by themselves, in the background

    def __new__(
        cls,
        create_env_fn: Any = None,
        policy: Any = None,
        *,
        sync: bool | None = None,
        num_workers: int | None = None,
        **options: Any,
    ) -> Self:
        if cls is MultiCollector:
            if not isinstance(sync, bool):
                raise WrongArgument(f"MultiCollector needs sync=True or sync=False, got {sync!r}")
            kind = MultiSyncCollector if sync else MultiAsyncCollector
            return object.__new__(kind)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        sync: bool | None = None,
        num_workers: int | None = None,
        **options: Any,
    ) -> None:
        self._why_closed = "it was never built"
        name = type(self).__name__
        if sync is not None and sync is not self._sync:
            raise UsageError(f"{name} is made for sync={self._sync}; MultiCollector takes either")
        policy = without_steps(policy)
        count, makers = _workers(name, create_env_fn, num_workers)
        each = {key: _each(key, options.pop(key, None), count) for key in _PER_WORKER}
        for old, new in (("devices", "device"), ("passing_devices", "storing_device")):
            if old in options:
                warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
                each[new] = _each(old, options.pop(old), count)
        asked = options.get("frames_per_batch")
        if asked is None:
            raise WrongArgument(f"{name} needs frames_per_batch: how many frames a batch holds")
        frames = _frames(asked, count, sync=bool(self._sync))
        if listed(asked):
            asked = sum(frames) if self._sync else max(frames)
        settings = read_options(name, {**options, "frames_per_batch": asked})
        if settings.interruptor is not None or settings.return_same_td:
            one = "interruptor" if settings.interruptor is not None else "return_same_td"
            raise WrongArgument(f"{one} is for a worker in this process; {name} has others")
        if not self._sync and settings.cat_results not in (None, "stack"):
            raise UsageError(f"cat_results joins workers; {name} delivers them one by one")
        if self._each is not None and len(self._each) != count:
            raise SpecMismatch(f"collector_kwargs holds {len(self._each)} mappings for {count} workers")
        own = self._each or [{}] * count
        workers = [
            dataclasses.replace(settings, **{**{key: each[key][w] for key in each}, **own[w]}) for w in range(count)
        ]
        self._prepare(workers[0])
        self._policy, self._strategy = policy, settings.strategy()
        self._there: dict[str, Any] = {}  # hooks that are called in the workers
        if self._direct or settings.hooks_in_workers:
            self._there = {"pre_collect_hook": self._before, "post_collect_hook": self._after}
            self._before = self._after = None
        self._sizes = frames
        self.num_workers = count
        self.create_env_fn = makers
        self.update_at_each_batch, self.cat_results = settings.update_at_each_batch, settings.cat_results
        plans = self._plans(workers, makers, policy, frames)
        self._backend = self._make_backend(plans, settings)
        self._why_closed = None  # from here on there is something to close
        try:
            self._backend.start()
            for text in sorted({text for remote in self._backend.workers for text in remote.about.told}):
                warnings.warn(text, PolicyWarning, stacklevel=2)
            self._begin()
            self._count_frames()
        except BaseException as error:
            self._close(f"it could not be built: {error!r}", failed=isinstance(error, WorkerError))
            raise
        self._watch_policy(
            policy,
            "the workers still act",
            "Call update_policy_weights_() after training, or give update_at_each_batch=True",
        )

    for _made in (__new__, __init__):
        _made.__signature__ = signature(_made)  # type: ignore[union-attr]

    def _make_backend(self, plans: Sequence[Any], settings: Options) -> WorkerBackend:
        """Where the workers live."""
        writer, buffer = self._writing(settings)
        transport = SharedMemoryTransport(start_method=settings.start_method, buffer=buffer)
        delivery = self._make_delivery(settings)
        return WorkerBackend(plans, transport=transport, delivery=delivery, writer=writer, **self._running(settings))

    def _make_delivery(self, settings: Options) -> Delivery:
        """Which rollouts make a batch."""
        threshold = settings.preemptive_threshold if self._sync else None
        if self._direct:
            return IntoBuffer(in_step=bool(self._sync), threshold=threshold, random_frames=settings.random_frames)
        return InStep(threshold) if self._sync else AsReady(settings.random_frames)

    def _running(self, settings: Options) -> dict[str, Any]:
        """What workers are told wherever they live."""
        return {
            "source": self._source,
            "scheme": settings.transport,
            "timeout": settings.timeout,
            "strategy": self._strategy,
            "threads": settings.num_sub_threads,
            "init": settings.init_fn,
            "hooks": (settings.pre_collect_hook, settings.post_collect_hook) if settings.hooks_in_workers else None,
        }

    @property
    def _source(self) -> Any:
        """Where weights come from, unless somebody gives them."""
        first = self.options.first_weights
        if first is None and (self._strategy is not None or isinstance(self._policy, torch.nn.Module)):
            return self._policy
        return first

    def _begin(self) -> None:
        """Give workers what they begin with, where that is more than what they were built from."""
        built = self._policy is None or self.options.first_weights is None  # with them
        if self.options.transport == "none" or self._source is None or (built and self._strategy is None):
            return
        given = self._source if self._strategy is None else extracted(self._strategy, self._source)
        apart = by_worker(given)
        every = range(self.num_workers)
        self._backend.begin_with({w: given[w] if apart else given for w in every if not apart or w in given})

    def _make_sink(self) -> Sink | None:
        """None where workers write into the buffer themselves: reap's own does not mind who writes."""
        sink = super()._make_sink()  # checks the options
        self._direct = self._workers_write()
        return None if self._direct else sink

    def _workers_write(self) -> bool:
        return isinstance(self.replay_buffer, ReplayBuffer)

    def _writing(self, options: Options) -> tuple[WriterMaker | None, Sequence[int]]:
        """What makes the writers of workers that write into the buffer themselves, and the descriptors these need."""
        buffer = self.replay_buffer
        if not isinstance(buffer, ReplayBuffer):
            return None, ()
        if options.max_lag is not None:
            raise UsageError("max_lag drops rollouts after they are made; workers have written them to the buffer then")
        fds, about = buffer.handle()
        way = WriteOptions.of(options)
        maker = WriterMaker(way, about, buffer.transforms, options.timeout)
        pack(
            maker,
            "what writes to the replay buffer",
            {**way.given, "a transform of the replay buffer": buffer.transforms},
        )
        return maker, fds

    def _plans(
        self, workers: Sequence[Options], makers: Sequence[Any], policy: Any, frames: Sequence[int]
    ) -> list[Any]:
        packed = {id(make): self._pack(for_workers(make), "create_env_fn") for make in makers}
        given = {id(o.create_env_kwargs): o.create_env_kwargs for o in workers if o.create_env_kwargs is not None}
        kwargs = {key: self._pack(one, "create_env_kwargs") for key, one in given.items()}
        self._pack(workers[0].init_fn, "init_fn")
        ours: Sequence[Parcel | None] = [None] * len(workers)
        first = workers[0].first_weights  # of policies that are made in the workers
        if policy is not None and all(o.policy_factory is None for o in workers):
            ours = [self._pack(policy, "policy")] * len(workers)
        elif policy is not None and self._strategy is not None:
            pass  # it is where weights come from; they follow as soon as workers are there
        elif isinstance(policy, torch.nn.Module):  # it is where weights come from; it does not act
            ours = [_packed_weights(policy)] * len(workers)
        elif policy is not None:
            raise WrongArgument("give policy or policy_factory; with both, policy must have weights to take")
        elif self._strategy is not None:
            pass
        elif by_worker(first):
            ours = [_packed_weights(first[w]) if w in first else None for w in range(len(workers))]
        elif first is not None:
            ours = [_packed_weights(first)] * len(workers)
        factories = {id(o.policy_factory): o.policy_factory for o in workers if o.policy_factory is not None}
        made = {key: self._pack(factory, "policy_factory") for key, factory in factories.items()}
        plans = []
        for w, (options, make, size, weights) in enumerate(zip(workers, makers, frames, ours)):
            device, _ = options.devices
            keywords = kwargs.get(id(options.create_env_kwargs))
            env = EnvMaker(packed[id(make)], keywords, options.max_frames_per_traj, options.failure_dir, w)
            acting = PolicyMaker(weights, made.get(id(options.policy_factory)), device)
            plans.append(plan_for(options, env, acting, Steps(size), device))
        return plans

    def _count_frames(self) -> None:
        """How many frames a batch really holds; warns about every rounding."""
        layouts = [remote.about.layout for remote in self._backend.workers]
        sizes = [layout.steps * layout.lanes for layout in layouts]
        asked = self.options.frames_per_batch
        self.requested_frames_per_batch = sum(sizes) if self._sync else max(sizes)
        self._sizes = sizes
        what = f"{len(layouts)} workers with {layouts[0].lanes} lanes" if self._sync else f"{layouts[0].lanes} lanes"
        self._warn_rounding(asked, self.requested_frames_per_batch, what, depth=4)
        if self._sync:
            self._check_shapes(layouts)

    def _check_shapes(self, layouts: Sequence[Layout]) -> None:
        """Whether the workers' rollouts can be joined."""

    def frames_per_batch_worker(self, *, worker_idx: int | None = None) -> int:
        """How many frames a worker (the first, if none is named) makes for a batch."""
        return self._sizes[worker_idx or 0]

    def fake_tensordict(self) -> TensorDictBase:
        """Not here: batches come from other processes."""
        raise NotImplementedError(f"{type(self).__name__} sees batches when they come; look at one")

    # ---- data -----------------------------------------------------------------------------------------------------

    def _finish(self) -> TensorDictBase | None:
        if not self._direct:
            return super()._finish()
        with self._uninterrupted():
            self._before_batch()
            self._batch_watched()
            left = self.options.total - self._frames
            rollout = self._backend.take(random=self._frames < self.options.random_frames, most=left)
            self._count(rollout.frames, 1)
        return None

    def _count(self, frames: int, batches: int) -> None:
        self._frames += frames
        self._batches += batches
        if self._runner is not None:
            self._batch_watched(batches)

    def _make_runner(self) -> Runner:
        if not self._direct or not self._workers_go_on:
            return super()._make_runner()
        if self.options.update_at_each_batch:
            raise WrongState(
                "update_at_each_batch: workers in the background take no batches; update_policy_weights_()"
            )
        left, random = self.options.total - self._frames, self.options.random_frames - self._frames
        transport = self._backend.transport
        assert isinstance(transport, SharedMemoryTransport)  # workers that go on by themselves count there
        return BackgroundRunner(self._backend, transport.counters, left=left, random=random, count=self._count)

    def rollout(self) -> TensorDictBase:
        self._open()
        if self._direct:
            raise WrongState("workers write their rollouts into the replay buffer; there are none to see here")
        return super().rollout()

    def _check_rollout(self) -> None:
        if self.replay_buffer is not None:
            raise UsageError(
                f"{type(self).__name__} overrides rollout(), which is not called for rows that workers bring to a "
                f"replay buffer; give a postproc, or write to the buffer yourself"
            )

    # Hooks are called here, or in the workers: there where these write to a buffer, where `hooks_in_workers` says so,
    # and those that are assigned.

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """What is called before each rollout; one that is assigned is called in the workers."""
        return self._there.get("pre_collect_hook") or self._before

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self._before = None
        self._hook_workers(pre_collect_hook=hook)

    @property
    def post_collect_hook(self) -> Callable[[Any], Any] | None:
        """What is called with each batch; one that is assigned is called in the workers, with what each has made."""
        return self._there.get("post_collect_hook") or self._after

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        self._after = None
        self._hook_workers(post_collect_hook=hook)

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        self.post_collect_hook = hook

    def _hook_workers(self, **hooks: Any) -> None:
        for name, hook in hooks.items():
            if hook is not None and not callable(hook):
                raise WrongArgument(f"{name} must be callable, got {type(hook).__name__}")
        self._ask(lambda: self._backend.set_hooks(hooks))
        self._there |= hooks

    def _uninterrupted(self) -> AbstractContextManager[None]:
        return self._backend.uninterrupted()

    def _fetch(self) -> None:
        with self._uninterrupted():
            super()._fetch()

    def _next_batch(self) -> list[Part]:
        self._before_batch()
        return super()._next_batch()

    def _before_batch(self) -> None:
        if self.options.update_at_each_batch:
            self.update_policy_weights_()

    @property
    def policy(self) -> Any:
        """The policy given; workers act with copies of it."""
        return self._policy

    def _publish(self, weights: Any, worker_ids: int | Sequence[int] | None) -> int:
        ids = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        ids = None if ids is None else [int(w) for w in ids]
        if self._strategy is not None:
            given = self._source if weights is None else weights
            if weights is None and ids is not None and by_worker(given):
                given, ids = {w: given[w] for w in ids if w in given}, None
            weights = None if given is None else extracted(self._strategy, given)
        return self._backend.publish(weights, ids)

    def _load_in_workers(self, path: str, state: Any, strategy: Any) -> None:
        if strategy is None:
            super()._load_in_workers(path, state, strategy)
        else:
            self._between(lambda: self._backend.apply(path, strategy, state))

    def get_cached_weights(self, model_id: str = "policy", *, worker: int = 0) -> Any:
        """The weights a worker acts with, by name."""
        return self._ask(lambda: self._backend.weights_of(worker))

    def explain(self) -> str:
        told: dict[str, list[int]] = {}
        for worker, text in enumerate(self.map_fn("explain")):
            told.setdefault(text, []).append(worker)
        if len(told) == 1:
            return next(iter(told))
        return "\n".join(f"workers {', '.join(map(str, workers))}:\n{text}" for text, workers in told.items())

    def get_distant_attr(self, attr: str) -> list[Any]:
        self._open()
        return self._between(lambda: self._backend.find(attr))

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        self._open()
        if method_name.startswith("policy."):
            self._watch = None  # whoever reaches into the workers' policies knows that they are copies
        calls = each_call(self.num_workers, list_of_args, list_of_kwargs)
        if method_name == "update_policy_weights_":  # versions are counted here
            self.update_policy_weights_({w: _weights_in(*call) for w, call in enumerate(calls)})
            return [None] * len(calls)
        if method_name == "reset":  # what was made before it is not delivered any more
            self.reset()
            return [None] * len(calls)
        return self._between(lambda: self._backend.find(method_name, calls))

    def _of_first(self, path: str) -> Any:
        return self.get_distant_attr(path)[0]

    def _close(self, why: str, *, close_env: bool = True, failed: bool = False) -> None:
        if not close_env:
            raise WrongState(f"{type(self).__name__} cannot leave envs open: they end with their workers")
        if isinstance(self._runner, BackgroundRunner):
            self._runner.stop_watching()
        super()._close(why, failed=failed)
        if isinstance(self._runner, BackgroundRunner):
            self._runner.catch_up()  # workers have ended: nothing is made any more

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Begin new episodes in all workers, or in those marked True."""
        self._open()
        chosen = (
            range(len(self._backend.workers)) if reset_idx is None else _marked(reset_idx, len(self._backend.workers))
        )
        self._ask(lambda: self._backend.reset(workers=chosen))

    def stats(self, workers: str = "aggregate") -> dict[str, Any]:
        """Counts so far, and means over the last hundred episodes of all workers; `workers` "aggregate", "per_worker"
        (counts of each, means over its own last hundred) or "both". Asks nobody: workers report with each batch.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise UsageError(f"workers must be 'aggregate', 'per_worker' or 'both', got {workers!r}")
        self.is_running()  # counts what is made in the background, and raises what went wrong there
        remotes = self._backend.known_workers
        alive = sum(not remote.child.gone() for remote in self._backend.workers)
        found: dict[str, Any] = {"workers": len(remotes), "workers_alive": alive}
        if workers != "per_worker":
            found |= {
                "frames": self._frames,
                "batches": self._batches,
                "total_frames": self.options.total,
                "completed": self._frames >= self.options.total,
                "requested_frames_per_batch": self.requested_frames_per_batch,
                "policy_version": self._version,
                "dropped_frames": 0 if self._lag_limit is None else self._lag_limit.dropped_frames,
                **together([remote.stats for remote in remotes], self._backend.episodes),
            }
        if workers != "aggregate":
            for remote, size in zip(remotes, self._sizes):
                counts = {
                    "frames": remote.frames,
                    "batches": remote.rollouts,
                    "requested_frames_per_batch": size,
                    **remote.stats,
                }
                found.update({f"worker_{remote.index}/{key}": value for key, value in counts.items()})
        return found

    def __repr__(self) -> str:
        if not hasattr(self, "_backend"):
            return f"{type(self).__name__}(not built)"
        state = "" if self._why_closed is None else f", closed: {self._why_closed}"
        return (
            f"{type(self).__name__}({len(self._sizes)} workers, {self.requested_frames_per_batch:,} frames per batch"
            f"{state})"
        )


class MultiSyncCollector(MultiCollector):
    """Every batch holds a rollout of each worker, all made by the same weights. See `MultiCollector`."""

    _sync = True

    def _arrange(self, batch: TensorDictBase, rollout: Rollout) -> TensorDictBase:
        if rollout.parts:
            return batch
        out = self._join(batch)
        if out.names[-1] != "time":
            out.names = [*[None] * (out.ndim - 1), "time"]
        if rollout.finals is not None:
            out.set_non_tensor(FINAL, rollout.finals._replace(size=tuple(out.batch_size)))
        return out

    def _by_worker(self, batch: TensorDictBase, rollout: Rollout) -> list[Part]:
        layouts = [remote.about.layout for remote in self._backend.workers]
        if rollout.parts:
            each = batch.split([layout.steps for layout in layouts], -1)
            return [Part(piece, part.worker) for piece, part in zip(each, rollout.parts)]
        lanes = batch.split([layout.lanes for layout in layouts])
        return [Part(piece if layouts[w].batched else piece[0], w) for w, piece in enumerate(lanes)]

    def _split(self, batch: TensorDictBase) -> TensorDictBase:
        out = super()._split(batch)
        if self.cat_results != 0:
            out.names = [*[None] * (out.ndim - 1), "time"]  # where nothing was cut, workers and lanes are apart still
        return out

    def _check_shapes(self, layouts: Sequence[Layout]) -> None:
        self._join = join_for(self.cat_results, layouts, compact=self.options.compact_obs)


class MultiAsyncCollector(MultiCollector):
    """Every batch is one worker's rollout; workers go on while the consumer works. See `MultiCollector`.

    `batch.origin` says which worker made it, with which version of the weights, and how far behind that is.
    """

    _sync = False

    def _prepare(self, options: Options) -> None:
        super()._prepare(options)
        if options.max_lag is not None and options.trajs_per_batch is not None:
            raise UsageError("max_lag may drop the middle of an episode, trajs_per_batch needs whole ones; give one")
        self._lag_limit = None if options.max_lag is None else LagLimit(options.max_lag)

    def _take(self, *, random: bool) -> tuple[TensorDictBase, Rollout]:
        while True:
            batch, rollout = super()._take(random=random)
            if self._lag_limit is None or self._lag_limit.keeps(batch, rollout, self._backend.version):
                return batch, rollout

    def _arrange(self, batch: TensorDictBase, rollout: Rollout) -> TensorDictBase:
        lag = self._backend.version - rollout.version
        batch.origin = Origin(rollout.worker, rollout.version, lag)
        return batch


class AsyncCollector(MultiAsyncCollector):
    """One worker in the background: it collects the next batch while you use this one.

    >>> collector = AsyncCollector(make_env, policy, frames_per_batch=200, total_frames=1000)
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        self._why_closed = "it was never built"
        if listed(create_env_fn):
            if len(create_env_fn) != 1:
                raise WrongArgument(f"AsyncCollector has one worker, got {len(create_env_fn)} envs")
            (create_env_fn,) = create_env_fn
        if whole("num_workers", options.pop("num_workers", None), none=True) not in (None, 1):
            raise UsageError("AsyncCollector has one worker; MultiAsyncCollector takes num_workers")
        super().__init__([create_env_fn], policy, **options)

    __init__.__signature__ = signature(__init__)  # type: ignore[attr-defined]


class Origin(NamedTuple):
    """Where a batch comes from."""

    worker: int
    version: int
    lag: int  # updates since then


def _workers(owner: str, create_env_fn: Any, num_workers: Any) -> tuple[int, list[Any]]:
    if num_workers is not None and (
        isinstance(num_workers, bool) or not isinstance(num_workers, int) or not 1 <= num_workers <= MOST_LANES
    ):
        raise WrongArgument(f"num_workers must be a whole number ≥ 1 and at most {MOST_LANES:,}, got {num_workers!r}")
    if listed(create_env_fn):
        if not create_env_fn:
            raise UsageError(f"{owner} needs at least one env factory")
        return len(create_env_fn), list(create_env_fn)
    if num_workers is None:
        raise WrongArgument(f"{owner} needs a list of env factories, or one and num_workers")
    return num_workers, [create_env_fn] * num_workers


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value per worker."""
    if not listed(value):
        return [value] * count
    if len(value) != count:
        raise SpecMismatch(f"{name} holds {len(value)} values for {count} workers")
    return list(value)


def _frames(value: Any, count: int, *, sync: bool) -> list[int]:
    """Frames each worker makes per batch."""
    if listed(value):
        if len(value) != count:
            raise SpecMismatch(f"frames_per_batch holds {len(value)} values for {count} workers")
        return [_frames(one, 1, sync=sync)[0] for one in value]
    whole = Options(frames_per_batch=value).frames_per_batch  # says what is wrong with it
    return [-(-whole // count) if sync else whole] * count


def _packed_weights(weights: Any) -> Parcel:
    """Weights, packed for workers."""
    return pack_bytes(detached(weights), "policy")


def _weights_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The weights in the arguments of one worker's `update_policy_weights_`."""
    given = [*args, *kwargs.values()]
    if len(given) != 1:
        raise UsageError(f"update_policy_weights_ in workers takes weights for each, got {len(given)} arguments")
    return given[0]


def _marked(index: Any, count: int) -> list[int]:
    chosen = torch.as_tensor(index).reshape(-1)
    if chosen.dtype is not torch.bool or len(chosen) != count:
        raise UsageError(f"reset takes one True or False for each of {count} workers, got {index!r}")
    found: list[int] = chosen.nonzero().reshape(-1).tolist()
    return found
