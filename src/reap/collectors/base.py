"""BaseCollector: everything collectors have in common. Subclasses add where the workers live.

options ─► plan ─► backend.take ─► assemble ─► arrange ─► split ─► postproc ─► hook ─┬─► consumer
                                                                                     └─► sink ─► replay buffer
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.utils.data import IterableDataset
from typing_extensions import Self

from reap._foreign import torch_internals
from reap._system.forks import guard, refuse_use
from reap._system.processes import DEADLINE
from reap._system.threads import wait_for_shutdowns
from reap.arguments import function, one_of
from reap.backends.base import Backend, Halted, Rollout
from reap.backends.local.pauses import Paused
from reap.buffers.replay import ReplayBuffer
from reap.collectors.buffer_writers import Sink, WriteOptions, sink_for
from reap.collectors.options import HOOKS, Options
from reap.collectors.parts.background import Runner, ThreadRunner
from reap.collectors.parts.batch_pipeline import BatchPipeline
from reap.collectors.parts.lifecycle import NEVER_BUILT, Lifecycle
from reap.collectors.parts.profiling import ProfileConfig, Profiler
from reap.collectors.parts.updaters import as_updater
from reap.collectors.parts.weight_updates import WeightUpdates, Workers, weights_by_model
from reap.core.attribute_path import get_attribute
from reap.core.measuring.stats import public_counts
from reap.core.measuring.times import WorkClock
from reap.core.policies.exploration import exploration_type
from reap.core.resume import without_episodes
from reap.errors import ReapError, UsageError, WorkerError, WorkerSilent, WrongArgument, WrongState, warn
from reap.progress import progress
from reap.watching.watch import Watch

_OPTION_ATTRIBUTES = (
    "compact_obs",
    "extend_buffer",
    "max_frames_per_traj",
    "reset_at_each_iter",
    "reset_when_done",
    "return_same_td",
    "set_truncated",
    "track_traj_ids",
    "traj_format",
    "trajs_per_batch",
    "trajs_per_write",
    "trust_policy",
    "worker_idx",
    "interruptor",
)
T = TypeVar("T")


class BaseCollector(IterableDataset[TensorDict]):
    """Iterates over batches of experience. See `Collector`."""

    options: Options
    requested_frames_per_batch: int
    _backend: Backend
    _life: Lifecycle = NEVER_BUILT

    def _prepare(self, options: Options, *, update_interval: int = -1) -> None:
        self.options = options
        self._life = Lifecycle(type(self).__name__)
        guard(self)
        self.replay_buffer = options.replay_buffer
        self._in_own_rollout = False  # whether `_own_rollout` is calling a subclass's `rollout` for the next batch
        self._last: Rollout | None = None
        self._overrides = not type(self).rollout.__module__.startswith("reap.collectors.")
        self._pipeline = BatchPipeline(options, self._make_sink())
        if isinstance(self.replay_buffer, ReplayBuffer):
            self.replay_buffer.feed.attach(self)
            self.replay_buffer.watch(options.timeout)
        self._listeners = self._pipeline.listeners
        self._runner: Runner | None = None  # collects in the background, once `start()` was called
        self._watch: Watch | None = None  # serves the live view, once `watch()` was called
        self._clock = WorkClock()  # measures the time this process spends in `next()`, and between two calls
        self._profiler = Profiler()
        # By option name: the hooks that this process calls, and those that workers call.
        self._hooks: dict[str, Callable[..., Any] | None] = {name: getattr(options, name) for name in HOOKS}
        self._worker_hooks: dict[str, Callable[..., Any] | None] = {}
        self.postproc = options.postproc
        self.weight_updater = as_updater(options.weight_updater)
        if self.weight_updater is not None and hasattr(self.weight_updater, "register_collector"):
            self.weight_updater.register_collector(self)
        self._weights = WeightUpdates(options, self.weight_updater, update_interval)
        # Attributes that scripts read.
        self.total_frames, self.init_random_frames = options.total, options.random_frames
        self.split_trajs = bool(options.split_trajs)
        self.exploration_type = exploration_type(options.exploration_type)
        self.policy_device, self.storing_device = options.devices
        self.device, self.env_device = options.device_and_env_device
        self.compiled_policy, self.cudagraphed_policy = options.compiling is not None, bool(options.cudagraph_policy)
        for name in _OPTION_ATTRIBUTES:
            setattr(self, name, getattr(options, name))
        if self.storing_device is not None and hasattr(self.postproc, "to"):
            self.postproc.to(self.storing_device)  # type: ignore[union-attr]

    def _make_sink(self) -> Sink | None:
        buffer = self.replay_buffer
        return None if buffer is None else sink_for(WriteOptions.of(self.options), buffer)

    def _warn_rounding(self, asked: int, size: int, what: str) -> None:
        options = self.options
        if size != asked:
            warn(f"frames_per_batch={asked} is not a multiple of {what}; batches hold {size} frames")
        if options.total != float("inf") and options.total % size:
            warn(f"total_frames={options.total_frames} is not a multiple of a batch of {size}; the last batch is whole")
        if options.random_frames % size:
            warn(
                f"init_random_frames={options.random_frames} is not a multiple of a batch of {size}; "
                f"whole batches are random"
            )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} cannot be copied: it holds envs, and threads or processes; make another one, and "
            f"give it this one's state_dict()"
        )

    # ---- iterating ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDict]:
        return self.iterator()

    def iterator(self) -> Iterator[TensorDict]:
        """Return an iterator over batches until `total_frames`; a new iterator continues where the last one stopped.

        With a replay buffer it yields None for each batch that was written. The return type leaves that out.
        """
        self._check_not_background()  # here too: `_iterate` would raise only when its first batch is asked for
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        while not self.closed and self._pipeline.more():
            self._check_not_background()
            batch = self._collect()
            if batch is None and self.replay_buffer is None:
                return
            yield batch

    def next(self) -> TensorDict | Any:  # `| Any`, not `| None`: type checkers would demand a check at every call
        """Return the next batch; None when `total_frames` is reached, or when it was written to the replay buffer."""
        self._check_not_background()
        return self._collect() if self._pipeline.more() else None

    def progress(
        self,
        total: int | None = None,
        *,
        display: Literal["tqdm", "rich", "plain", "none"] | None = None,
        logger: Any = None,
        file: Any = None,
    ) -> Iterator[TensorDict]:
        """Iterate over batches and show the progress: frames, frames per second, return, lag.

        >>> for batch in collector.progress(100_000):
        ...     train(batch)

        Args:
            total: stop when the collector has made this many frames in all, including those before this call; None:
                `total_frames`.
            display: "tqdm", "rich", "plain" (a line every ten seconds) or "none"; None: what suits this terminal.
            logger: one of `reap.loggers`; it receives the same numbers after each batch.
            file: the stream that shows the progress; None: stderr.
        """
        return progress(self, total, display=display, logger=logger, file=file)

    def rollout(self) -> TensorDictBase:
        """Return one rollout unprocessed: not counted, split, post-processed or written to a buffer.

        If a subclass overrides this method, batches are made from what the override returns.
        """
        pipeline = self._pipeline
        if self._in_own_rollout:
            batch, self._last = pipeline.next_assembled(self._backend)
            return pipeline.arrangement.arrange(batch, self._last)
        self._check_not_background()
        with self._closing_on_failure():
            try:
                return pipeline.arrangement.arrange(*pipeline.next_assembled(self._backend))
            except BaseException:
                self._backend.rollout_lost()
                raise

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """The function called before each batch is collected; workers call one that is assigned here."""
        return (self._hooks | self._worker_hooks)["pre_collect_hook"]

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self._set_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> Callable[[Any], Any] | None:
        """The function called with each batch; workers call one that is assigned here, with their own rollouts."""
        return (self._hooks | self._worker_hooks)["post_collect_hook"]

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        self._set_hook("post_collect_hook", hook)

    def _set_hook(self, name: str, hook: Any) -> None:
        function(name, hook)
        self._hooks[name] = hook

    def _own_rollout(self) -> tuple[TensorDictBase, Rollout | None]:
        """Return what the subclass's `rollout` returns, and the rollout it took by `super().rollout()`, if it did."""
        self._last, self._in_own_rollout = None, True
        try:
            batch = self.rollout()
        finally:
            self._in_own_rollout = False
        if not isinstance(batch, TensorDictBase):
            raise UsageError(f"rollout() of {type(self).__name__} returned {type(batch).__name__}, not a TensorDict")
        return batch, self._last

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        """Call this function with each batch before it is delivered, from now on; None removes the hook."""
        self.post_collect_hook = hook

    def __len__(self) -> int:
        if self.options.total == float("inf"):
            raise WrongArgument("an endless collector has no length (total_frames is -1)")
        return math.ceil(self.options.total / self.requested_frames_per_batch)

    def __bool__(self) -> bool:
        return True  # else Python calls `__len__`, which raises for an endless collector

    def _collect(self) -> TensorDictBase | None:
        life, pipeline = self._life, self._pipeline
        if life.busy is not None:
            raise WrongState(f"this {type(self).__name__} is collecting already, in another thread or a hook")
        began, graded = self._clock.begin(), torch.is_grad_enabled()
        with life.collecting:
            try:
                life.busy = threading.get_ident()
                if pipeline.ready is None:  # else Ctrl-C interrupted the last call just before it returned this batch
                    pipeline.ready = self._next_batch()
            except (Exception, Halted) as error:
                if isinstance(error, Halted) or self.closed:  # another thread or a signal handler closed the collector
                    raise life.closed_meanwhile() from error
                with contextlib.suppress(Exception):  # an error in `_close` must not hide the original one
                    self._close(f"it failed: {error!r}", failed=True)
                raise
            finally:
                life.busy = None  # first: Ctrl-C can come when the next line returns
                # Ctrl-C while `torch.no_grad()` is being entered would leave gradients off.
                torch_internals.set_grad_enabled(graded)
        if self._profiler.timeline is not None:
            self._profiler.timeline.waiting(began, time.perf_counter())
        self._clock.end()
        out, pipeline.ready = pipeline.ready, None  # last: no call follows in which Ctrl-C could lose the batch
        return out

    def _next_batch(self) -> TensorDictBase | None:
        """Return the next batch, ready for the consumer; None if it was written to the replay buffer."""
        while not self._pipeline.taken:
            if (hook := self._hooks["pre_collect_hook"]) is not None:
                hook()
            self._fetch()
            if not (self._pipeline.taken or self._pipeline.more()):
                break  # else `on_restart` has reset the collector, and with it what was taken
        return self._pipeline.deliver(self.postproc, self._hooks["post_collect_hook"])

    def _fetch(self) -> None:
        self._weights.count_rollouts(1, background=self._runner is not None)
        try:
            self._pipeline.fetch(self._backend, self._own_rollout if self._overrides else None)
        except BaseException:
            self._backend.rollout_lost()
            raise

    # ---- seeds, state ---------------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed lanes, policy noise, torch and NumPy of each worker, and begin new episodes; return the next seed."""

        def work() -> int:
            following = self._backend.set_seed(seed, static=static_seed)
            self._pipeline.forget()
            return following

        return self._ask(work)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume collecting: policy, env state and counters.

        After a failure of the collector or of a worker, the state holds what this process knows: everything except the
        open episodes.
        """
        pipeline, life = self._pipeline, self._life

        def work() -> dict[str, Any]:
            state = self._backend.last_state(str(life.why_closed)) if life.failed else self._backend.state_dict()
            state |= {"frames": pipeline.frames, "iter": pipeline.batches - 1}
            if pipeline.whole is not None:
                why = "whole episodes are delivered; frames of open ones that are held back are not kept"
                state = without_episodes(state, why)
            if isinstance(self.policy, nn.Module):
                state["policy_state_dict"] = self.policy.state_dict()
            return state

        self._raise_background_error()  # before anything else
        return work() if life.failed else self._ask(work)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Resume where `state_dict` was taken, within open episodes if the state holds them.

        Otherwise episodes start over, with trajectory ids that were never used before.
        """
        self._check_open()
        if not isinstance(state_dict, Mapping):
            kind = type(state_dict).__name__
            raise WrongArgument(f"state_dict must be what state_dict() returned, a mapping, got {kind}")
        needed = {"frames", "iter", "traj_pool"}
        if self._runner is not None:
            raise WrongState(
                "call load_state_dict() before start(); a running background collector cannot load a state"
            )
        if strict and not needed <= state_dict.keys():
            raise UsageError(f"state_dict lacks {sorted(needed - state_dict.keys())}")

        def work() -> None:
            if "policy_state_dict" in state_dict and isinstance(self.policy, nn.Module):
                self.policy.load_state_dict(state_dict["policy_state_dict"], strict=strict)
            self._backend.load_state_dict(dict(state_dict))
            self._weights.resume(int(state_dict.get("policy_version", self._weights.version)))
            pipeline = self._pipeline
            pipeline.forget()
            pipeline.frames, pipeline.batches = int(state_dict.get("frames", 0)), int(state_dict.get("iter", -1)) + 1

        self._ask(work)

    @property
    def policy(self) -> Any:
        """The policy that acts."""
        raise NotImplementedError

    def get_model(self, model_id: str) -> Any:
        """Return the model at this path; the same paths name models in `update_policy_weights_`, such as "policy"."""
        return get_attribute(self, model_id)

    # ---- weights --------------------------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Send new weights to the policy that acts.

        Without an argument, the weights come from the policy the collector was made with. If that very module acts,
        nothing is copied and only the version increases. Otherwise give a module, a TensorDict of parameters, a state
        dict, a nested dict, or one of these for each worker, `{0: …}`.
        """
        self._check_open()
        models = weights_by_model(policy_or_weights, weights, policy, model_id, weights_dict, policy_weights)
        for name, one in models.items():
            if name != "policy":
                self._load_model(name, one)
            elif self._weights.updater is not None:
                self._weights.updater.push_weights(one, worker_ids)
            else:
                self._take_weights(one, worker_ids)

    def _take_weights(self, weights: Any, worker_ids: Workers) -> None:
        version = self._ask(lambda: self._publish(weights, worker_ids))
        self._weights.sent(weights, worker_ids)
        self._weights.published(version, self._pipeline.batches)

    def _publish(self, weights: Any, worker_ids: Workers) -> int:
        """Send weights to these workers, or to all; return the new version."""
        raise NotImplementedError

    def _load_model(self, path: str, weights: Any) -> None:
        """Load weights into a module outside the policy, found by its path."""
        raise NotImplementedError

    @property
    def policy_version(self) -> int:
        """The number of weight updates so far; 0 is the policy as constructed."""
        return self._weights.version

    def get_policy_version(self) -> int:
        """Return `policy_version`."""
        return self._weights.version

    def increment_version(self) -> None:
        """Send the policy's current weights to the workers, as a new version."""
        self.update_policy_weights_()

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Call `init` of the weight updater with these arguments; do nothing if there is no updater."""
        if self._weights.updater is not None:
            self._weights.updater.init(*args, **kwargs)

    # ---- what was seen --------------------------------------------------------------------------------------------

    def episodes(self) -> list[dict[str, Any]]:
        """Return a record of every episode that ended since the last call, in the order in which they ended.

        >>> pandas.DataFrame(collector.episodes())        # return, length, lane, worker, policy_version, ended, seconds

        With `gamma`, a record also has `discounted_return`. The call sends no request to workers: they report with each
        rollout, so some of these episodes may belong to rollouts that are not delivered yet. Between two calls the last
        100,000 episodes are kept.
        """
        self.is_running()  # counts what was collected in the background, and raises what failed there
        return self._backend.episodes.records()

    def stats(self, workers: Literal["aggregate", "per_worker", "both"] = "aggregate") -> dict[str, Any]:
        """Return counts, statistics of the last hundred episodes, and where the time went; see docs/statistics.md.

        Args:
            workers: "aggregate" (over all workers), "per_worker" (`worker_0/frames` and so on, over the last hundred
                episodes of each), or "both".
        """
        one_of("workers", workers, ("aggregate", "per_worker", "both"))
        self.is_running()  # counts what was collected in the background, and raises what failed there
        reports, pipeline, episodes = self._backend.reports(self._clock), self._pipeline, self._backend.episodes
        alive = 0 if self.closed else sum(one.alive for one in reports)
        found: dict[str, Any] = {"workers": len(reports), "workers_alive": alive, "restarts": self._backend.restarts}
        if workers != "per_worker":
            found |= {
                "frames": pipeline.frames,
                "batches": pipeline.batches,
                "total_frames": self.options.total,
                "completed": pipeline.frames >= self.options.total,
                "requested_frames_per_batch": self.requested_frames_per_batch,
                "policy_version": self._weights.version,
                "dropped_frames": pipeline.arrangement.dropped_frames,
                "worker_frames": sum(one.frames for one in reports),
                **public_counts([one.stats for one in reports], episodes),
            }
        if workers != "aggregate":
            for one in reports:
                counts = {"frames": one.frames, "batches": one.rollouts, "requested_frames_per_batch": one.size}
                counts |= public_counts([one.stats], episodes, one.index)
                found.update({f"worker_{one.index}/{key}": value for key, value in counts.items()})
        return found

    # ---- profiling ------------------------------------------------------------------------------------------------

    def enable_profile(
        self,
        *,
        workers: Sequence[int] | None = None,
        num_rollouts: int | None = None,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        on_trace_ready: Callable[[Path], Any] | None = None,
        **torchs: Any,
    ) -> None:
        """Record when each worker collects, when you learn, and what torch does meanwhile; see `ProfileConfig`.

        Call it before the first batch. By default the timeline covers the whole run, and torch's traces cover the
        second and third rollout of each worker; `num_rollouts` sets how many rollouts both cover.
        `torchs` holds the options of torch's profiler: `activities`, `record_shapes` and so on.
        """
        if self._pipeline.batches:
            raise WrongState("call enable_profile() before the first batch")
        self._profiler.enable(
            self._backend,
            getattr(self, "num_workers", 1),
            workers=workers,
            num_rollouts=num_rollouts,
            warmup_rollouts=warmup_rollouts,
            save_path=save_path,
            on_trace_ready=on_trace_ready,
            **torchs,
        )

    def disable_profile(self) -> None:
        """Stop recording, and write what was recorded."""
        self._profiler.disable(self._backend, getattr(self, "num_workers", 1))

    @property
    def profile_config(self) -> ProfileConfig | None:
        """The configuration given to `enable_profile`; None while nothing is recorded."""
        return None if self._profiler.timeline is None else self._profiler.timeline.config

    # ---- reaching in ----------------------------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call the function or method at this path, with these arguments: `cascade_execute("policy.eval")`."""
        self._life.check_owner()
        return get_attribute(self, attr_path)(*args, **kwargs)

    def explain(self) -> str:
        """Explain how env and policy run: what is captured, what is called at each step, and why.

        >>> collector = Collector(env, policy, frames_per_batch=100)
        >>> batch = collector.next()             # the env's first step is recorded
        >>> print(collector.explain())
        env: reap steps what is inside, and replays the torch calls of its transforms
        policy ProbabilisticActor: it is captured: its torch calls are replayed
        """
        raise NotImplementedError

    def get_distant_attr(self, attr: str) -> Any:
        """Return the attribute at this path in the workers, whose "policy" and "env" collect: `"policy.in_keys"`."""
        raise NotImplementedError

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call the method at this path in every worker, each with its own arguments; return the results in order."""
        raise NotImplementedError

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy that acts; of the first worker's, if there are several."""
        return self._from_first_worker(f"policy.{attr}")

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the env; of the first worker's, if there are several."""
        return self._from_first_worker(f"env.{attr}")

    def _from_first_worker(self, path: str) -> Any:
        return self.get_distant_attr(path)

    def stacks(self) -> dict[str, str]:
        """Return the current stack of each worker, and of each process or thread that steps lanes, by name.

        >>> for name, stack in collector.stacks().items():
        ...     print(name, stack, sep=": ")

        This needs no answer from a worker, so it also works for one that is stuck, and from any thread. It interrupts
        nothing.
        """
        self._life.check_open()
        return self._backend.stacks()

    def watch(self, port: int = 0) -> Watch:
        """Serve a live view of this run on the loopback address, for a browser and for `reap watch PID`.

        >>> print(collector.watch().url)

        It shows frames per second and the activity of each worker, where the time goes and what limits the run, lag,
        returns and memory. The address contains a secret, so only those you give it to can see the view. It ends with
        the collector. See docs/watch.md.

        Args:
            port: the port to listen on; 0: any free one.
        """
        self._life.check_open()
        if self._watch is None:
            self._watch = Watch(self, port)
        return self._watch

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer."""
        return get_attribute(self, f"replay_buffer.{attr}")

    # ---- in the background ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in the background, until `total_frames` or `async_shutdown`.

        >>> collector = Collector("CartPole-v1", frames_per_batch=100, replay_buffer=buffer)
        >>> collector.start()
        >>> sample = buffer.sample()             # waits for the first rows
        >>> collector.async_shutdown()
        """
        self._check_open()
        if self.replay_buffer is None:
            raise WrongState("start() collects into a replay buffer; give replay_buffer")
        if self._runner is None:
            runner = self._make_runner()
            with self._closing_on_failure(), self._backend.uninterrupted():
                runner.start()
                self._runner = runner  # only once it runs

    def _make_runner(self) -> Runner:
        buffer = self.replay_buffer
        return ThreadRunner(
            self._collect_once, wanted=lambda: getattr(buffer, "may_write", True), break_off=self._backend.canceller()
        )

    def _collect_once(self) -> bool:
        """Collect one batch in the background thread; return whether there are more to come.

        An error here does not close the collector. The caller that receives it does: see `_raise_background_error`.
        """
        if self._pipeline.more():
            self._next_batch()
        return self._pipeline.more()

    def is_running(self) -> bool:
        """Whether the collector collects in the background; False before `start()` and after `total_frames`."""
        self._raise_background_error()
        return not self.closed and self._runner is not None and self._runner.running

    def pause(self) -> Paused:
        """Pause background collection between two batches, for a `with` block or until `resume`; wait until it rests.

        >>> with collector.pause():
        ...     buffer.dumps("somewhere")
        """
        return self._pause()

    def _pause(
        self, settle: Callable[[], None] | None = None, *, kept: bool = False, timeout: float | None = None
    ) -> Paused:
        """Pause within `timeout` seconds, then call `settle`; a `kept` pause lasts beyond its block, until `resume`."""
        self._check_open()
        runner = self._runner
        if runner is None:
            raise WrongState("there is nothing to pause: start() was not called")
        paused = Paused(self.resume, kept=kept)
        try:
            with self._closing_on_failure():
                runner.pause(paused, timeout)
                self._raise_background_error()
                if settle is not None:
                    settle()
            paused.pause.given = True  # last: no call follows in which Ctrl-C could come
            return paused
        except BaseException:  # the caller never gets this pause, so could never end it
            runner.resume(paused)
            raise

    def resume(self, paused: Paused | None = None) -> None:
        """Continue after `pause()`; do nothing if the collector is closed or not paused."""
        if self._runner is not None and not self.closed:
            self._runner.resume(paused)
            self._raise_background_error()

    def bringing(self) -> bool:
        """Whether more rows will come into the buffer. The buffer calls this when it has too few."""
        self._raise_background_error(again=True)
        return not self.over() and self._runner is not None

    def over(self) -> bool:
        """Whether no more rows will ever come into the buffer: all frames are collected, or the collector is closed."""
        return self.closed or not (self._pipeline.more() if self._runner is None else self._runner.running)

    def paused_without(self, thread: int) -> bool:
        """Whether rows will come once a thread other than this one ends a pause. The buffer calls this, as above."""
        return self._runner is not None and self._runner.paused_without(thread)

    def _raise_background_error(self, *, again: bool = False) -> None:
        """Raise the error of the background run, if it failed, and close: on the first call only, unless `again`."""
        self._life.check_owner()
        runner = self._runner
        if runner is not None and self._weights.watch is not None:
            self._weights.watch.warn_in_background()
        error = None if runner is None else runner.failure()
        if runner is None or error is None:
            return
        with contextlib.suppress(Exception):
            self._close(f"it failed: {error!r}", failed=True)
        if again or not runner.error_raised:
            runner.error_raised = True
            raise error

    def _check_not_background(self) -> None:
        """Raise if the collector runs in the background, where the consumer cannot take batches."""
        self._check_open()
        if self._runner is not None:
            raise WrongState("this collector fills its replay buffer in the background; sample from the buffer")

    def _ask(self, work: Callable[[], T]) -> T:
        """Run `work`, which talks to the workers, between two batches; a worker that fails closes the collector."""
        with self._closing_on_failure():
            return self._between(work)

    def _between(self, work: Callable[[], T]) -> T:
        return work() if self._runner is None else self._runner.run_between_rollouts(work)

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers and close the envs, then raise the error of a failed background run. May be called twice.

        A rollout that another thread of this process is collecting is broken off after its current step. `timeout`:
        seconds to wait for that (5 by default). Worker processes end within about 5 seconds in any case.
        """
        if self._life.why_foreign is not None:  # only the process that made the collector may end it
            return
        patience = DEADLINE if timeout is None else timeout
        try:
            if self._runner is not None and not self.closed:
                try:
                    self._runner.stop(patience)
                except WorkerSilent:
                    self._close("its thread does not end", close_env=close_env)
                    raise
            self._close("shutdown() was called", close_env=close_env)
            self._wait_for_env(patience)
            wait_for_shutdowns()
            self._raise_background_error()
            if self._weights.watch is not None and self._runner is not None:
                self._weights.watch.warn_in_background(ended=True)
        except Exception:
            if raise_on_error:
                raise

    def async_shutdown(self, *args: Any, **options: Any) -> Ended:
        """Call `shutdown`, under the name that TorchRL uses for collectors in the background.

        The collector has ended when this returns. The result may be awaited, as scripts do with TorchRL's
        `RayCollector`.
        """
        self.shutdown(*args, **options)
        return Ended()

    def in_fork(self, why: str) -> None:
        """Refuse every further use. Called in a forked process, whose copy owns no workers, threads or memory."""
        self._life.why_foreign = why
        refuse_use(self, why)

    def _close(self, why: str, *, close_env: bool = True, failed: bool = False) -> None:
        def end(first: bool) -> None:
            try:
                if first:
                    self._profiler.write(self._backend)
            finally:  # workers end even if the profile cannot be written
                if self._watch is not None:
                    self._watch.close()
                self._life.break_off_other_thread(self._backend, close_env)
                if close_env:
                    self._backend.close(failed=failed)

        self._life.close(why, end, failed=failed)

    def _wait_for_env(self, timeout: float) -> None:
        """Wait until the env of this process is closed, if another thread was stepping it."""

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down or has failed."""
        return self._life.why_closed is not None

    def _check_open(self) -> None:
        self._raise_background_error()
        self._life.check_open()

    @contextlib.contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """Close the collector if a worker fails inside the block."""
        self._check_open()
        try:
            yield
        except Halted as error:
            raise self._life.closed_meanwhile() from error
        except ReapError as error:
            if isinstance(error, WorkerError) or self._backend.failed:
                with contextlib.suppress(Exception):
                    self._close(f"it failed: {error!r}", failed=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or not self.closed:  # else the collector has failed, and its error is being raised
            self.shutdown(raise_on_error=kind is None)

    def __del__(self) -> None:
        if not self._life.ended:  # checked first: at interpreter exit the modules used below may be gone already
            with contextlib.suppress(Exception):
                self.shutdown()


class Ended:
    """An awaitable that is done already."""

    def __await__(self) -> Iterator[None]:
        return iter(())
