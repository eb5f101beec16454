"""BaseCollector: what all collectors have in common, which is everything but where their workers live.

options ─► plan ─► backend.take ─► assemble ─► split ─► postproc ─► hook ─┬─► consumer
                                                                          └─► sink ─► replay buffer
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.utils.data import IterableDataset
from typing_extensions import Self

from reap._system.forks import guard, refuse_all
from reap._system.interrupts import Interrupts
from reap._system.processes import DEADLINE, LEAVE
from reap._system.threads import wait_for_ends
from reap.backends.base import Backend, Halted, Rollout
from reap.backends.local.pauses import Paused
from reap.buffers.replay import ReplayBuffer
from reap.collectors.background import Runner, ThreadRunner
from reap.collectors.buffer_writers import Sink, WriteOptions, mark_truncated, processed, sink_for
from reap.collectors.options import Options
from reap.collectors.parts import Ended, Listeners, Part
from reap.collectors.profiling import Profiled
from reap.collectors.updaters import as_updater
from reap.collectors.weight_updates import WeightUpdates
from reap.core.attribute_path import get_attribute
from reap.core.columns.assemble_ragged import assembler
from reap.core.policies.exploration import exploration_type
from reap.core.resume import without_episodes
from reap.errors import UsageError, WorkerError, WorkerSilent, WrongArgument, WrongState
from reap.progress import progress
from reap.trajectories import FINAL, WholeTrajectories, split_trajectories

_SHOWN = (
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
_PATIENCE = 100  # rollouts without a whole episode before saying that there will never be one


class BaseCollector(Profiled, WeightUpdates, IterableDataset):  # type: ignore[type-arg]
    """Iterates over batches of experience. See `Collector`."""

    options: Options
    requested_frames_per_batch: int
    _backend: Backend
    _elsewhere: str | None = None  # why it is not this process's own

    def _prepare(self, options: Options) -> None:
        self.options = options
        self._frames = 0
        self._batches = 0
        self._version = 0
        self._why_closed: str | None = None
        self._ended = self._closing = False  # whether all is closed, and whether somebody is at it
        self._busy: int | None = None  # the thread that collects
        self._collecting = threading.RLock()  # it has this. Not an Event: Ctrl-C could leave one without its lock
        guard(self)
        self.replay_buffer = options.replay_buffer
        self._sink = self._make_sink()
        self._rolling = False  # whether a subclass's own `rollout` is being asked for the next batch
        self._last: Rollout | None = None
        self._overrides = not type(self).rollout.__module__.startswith("reap.collectors.")
        if self._overrides:
            self._check_rollout()
        if isinstance(self.replay_buffer, ReplayBuffer):
            self.replay_buffer.feed.attach(self)
            self.replay_buffer.watch(options.timeout)
        self._listeners = Listeners()
        self._runner: Runner | None = None  # who collects in the background
        self._taken: list[Part] = []  # what is to be split, post-processed, shown to the hook
        self._ready: TensorDictBase | None = None  # one that is to be delivered
        self._same: tuple[TensorDictBase, TensorDictBase] | None = None  # on the slot, and as delivered
        self._before, self._after = options.pre_collect_hook, options.post_collect_hook  # hooks that are called here
        self.postproc = options.postproc
        self._updater = self.weight_updater = as_updater(options.weight_updater)
        if self._updater is not None and hasattr(self._updater, "register_collector"):
            self._updater.register_collector(self)
        # Names scripts look at.
        self.total_frames, self.init_random_frames = options.total, options.random_frames
        self.split_trajs = bool(options.split_trajs)
        self.exploration_type = exploration_type(options.exploration_type)
        self.policy_device, self.storing_device = options.devices
        self.device, self.env_device = options.env_devices
        self.compiled_policy, self.cudagraphed_policy = options.compiling is not None, bool(options.cudagraph_policy)
        for name in _SHOWN:
            setattr(self, name, getattr(options, name))
        whole = options.trajs_per_batch is not None and options.replay_buffer is None
        self._whole = WholeTrajectories() if whole else None
        self._storing = options.devices[1]
        if self._storing is not None and hasattr(self.postproc, "to"):
            self.postproc.to(self._storing)  # type: ignore[union-attr]

    def _make_sink(self) -> Sink | None:
        buffer = self.replay_buffer
        return None if buffer is None else sink_for(WriteOptions.of(self.options), buffer)

    def _check_sizes(self, lanes: int) -> None:
        """How many frames a batch really holds; warns about every rounding."""
        steps = -(-self.options.frames_per_batch // lanes)
        self.requested_frames_per_batch = steps * lanes
        self._warn_rounding(self.options.frames_per_batch, steps * lanes, f"{lanes} lanes", depth=4)

    def _warn_rounding(self, asked: int, size: int, what: str, *, depth: int) -> None:
        """`depth` is how far up the user's own line is."""
        options = self.options
        if size != asked:
            warnings.warn(
                f"frames_per_batch={asked} is not a multiple of {what}; batches hold {size}",
                stacklevel=depth,
            )
        if options.total != float("inf") and options.total % size:
            warnings.warn(
                f"total_frames={options.total_frames} is not a multiple of a batch of {size}; the last batch is whole",
                stacklevel=depth,
            )
        if options.random_frames % size:
            warnings.warn(
                f"init_random_frames={options.random_frames} is not a multiple of a batch of {size}; "
                f"whole batches are random",
                stacklevel=depth,
            )

    # ---- iterating ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        return self.iterator()

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Batches until `total_frames`; a new iterator goes on where the last one stopped.

        With a replay buffer: None for each batch that was written.
        """
        self._in_front()
        return self._iterate()

    def _iterate(self) -> Iterator[TensorDictBase | None]:
        while self._why_closed is None and self._more():
            self._in_front()
            batch = self._collect()
            if batch is None and self.replay_buffer is None:
                return
            yield batch

    def next(self) -> TensorDictBase | None:
        """The next batch, or None when `total_frames` is reached, or when it was written to the replay buffer."""
        self._in_front()
        return self._collect() if self._more() else None

    def progress(
        self, total: int | None = None, *, display: str | None = None, logger: Any = None, file: Any = None
    ) -> Iterator[TensorDictBase | None]:
        """Iterate over batches and show how far it is: frames, frames per second, return, lag.

        >>> for batch in collector.progress(100_000):
        ...     train(batch)

        Args:
            total: stop after so many frames; None: `total_frames`.
            display: "tqdm", "rich", "plain" (a line every ten seconds) or "none"; None: what suits this terminal.
            logger: one of `reap.loggers`, which is told the same numbers after each batch.
            file: where it is shown; None: stderr.
        """
        return progress(self, total, display=display, logger=logger, file=file)

    def rollout(self) -> TensorDictBase:
        """One rollout as it comes: not counted, split, post-processed or written.

        Batches are made of what a subclass returns here, if it has its own.
        """
        if self._rolling:
            batch, self._last = self._take(random=self._frames < self.options.random_frames)
            return self._arrange(batch, self._last)
        self._in_front()
        with self._watching():
            return self._arrange(*self._take(random=self._frames < self.options.random_frames))

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """What is called before each batch."""
        return self._before

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self._before = hook

    @property
    def post_collect_hook(self) -> Callable[[Any], Any] | None:
        """What is called with each batch before it is delivered."""
        return self._after

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        self._after = hook

    def _check_rollout(self) -> None:
        """Refuse a subclass with a `rollout` of its own where that could not be heard."""

    def _own_rollout(self) -> tuple[TensorDictBase, Rollout | None]:
        """What the `rollout` of a subclass returns, and the one it was made of, if it was."""
        self._last, self._rolling = None, True
        try:
            batch = self.rollout()
        finally:
            self._rolling = False
        if not isinstance(batch, TensorDictBase):
            raise UsageError(f"rollout() of {type(self).__name__} returned {type(batch).__name__}, not a TensorDict")
        self._frames += batch.numel() if self._last is None else self._last.frames
        return batch, self._last

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        """From now on, call this with each batch before it is delivered; None: nothing."""
        self._after = hook

    def __len__(self) -> int:
        if self.options.total == float("inf"):
            raise WrongArgument("an endless collector has no length (total_frames is -1)")
        return math.ceil(self.options.total / self.requested_frames_per_batch)

    def __bool__(self) -> bool:
        return True  # else Python asks for the length, which an endless one does not have

    def _collect(self) -> TensorDictBase | None:
        if self._busy is not None:
            raise WrongState(f"this {type(self).__name__} is collecting already, in another thread or a hook")
        began = time.perf_counter()
        with self._collecting:
            try:
                self._busy = threading.get_ident()
                if self._ready is None:  # else Ctrl-C came when it was about to be delivered
                    self._ready = self._finish()
            except (Exception, Halted) as error:
                if isinstance(error, Halted) or self._why_closed is not None:  # by another thread, or a signal handler
                    raise self._closed_meanwhile() from error
                with contextlib.suppress(Exception):  # what close may raise must not hide what happened
                    self._close(f"it failed: {error!r}", failed=True)
                raise
            finally:
                self._busy = None
        if self._timeline is not None:
            self._timeline.waiting(began, time.perf_counter())
        out, self._ready = self._ready, None  # last, and nothing is called after it that could be interrupted
        return out

    def _finish(self) -> TensorDictBase | None:
        """A batch as it is delivered. Each stage is put down before the next: Ctrl-C in a hook loses none."""
        if not self._taken:
            if self._before is not None:
                self._before()
            self._fetch()
        if not self._taken:
            return None
        split = self._split if self.options.split_trajs else None
        if self._sink is None:
            out = processed(self._taken[0].batch, split=split, postproc=self.postproc, hook=self._after)
            self._listeners.show(out, (self._batches, 1))
            self._batches += 1
            self._taken = []  # last: between here and `_ready` there is no loop or call in which Ctrl-C could come
            return out
        while self._taken:
            part = self._taken[0]
            done = processed(part.batch, split=split, postproc=self.postproc, hook=self._after)
            self._listeners.show(done, (self._batches, len(self._taken)))
            self._sink.take(done, part.worker)
            self._taken = self._taken[1:]
        self._batches += 1
        return None

    def _fetch(self) -> None:
        self._taken = self._next_batch()

    def _forget(self) -> None:
        """What is held belongs to the time before."""
        self._taken, self._ready = [], None
        if self._sink is not None:
            self._sink.forget()
        self._whole = None if self._whole is None else WholeTrajectories()

    def _more(self) -> bool:
        """Whether a further batch may come: one is in hand, frames are left to collect, or whole episodes."""
        left = self._whole is not None and len(self._whole) >= (self.options.trajs_per_batch or 0)
        return left or self._frames < self.options.total or bool(self._taken) or self._ready is not None

    def _next_batch(self) -> list[Part]:
        """One rollout; or as many as it takes to have `trajs_per_batch` complete episodes, none if they never come."""
        self._batch_watched()
        fruitless = 0
        while True:
            whole, wanted = self._whole, self.options.trajs_per_batch
            if whole is not None and wanted is not None and len(whole) >= wanted:
                return [Part(whole.take(wanted, self.options.traj_format or "padded"))]
            if self._frames >= self.options.total:
                return []
            if self._overrides:
                batch, made = self._own_rollout()
                if whole is None:
                    return [Part(batch)]
                whole.feed(batch, 0 if made is None else made.worker)
                continue
            batch, rollout = self._take(random=self._frames < self.options.random_frames)
            self._frames += rollout.frames
            if self._sink is not None:
                return self._by_worker(batch, rollout)
            if whole is None:
                return [Part(self._arrange(batch, rollout))]
            before, begin = len(whole), 0
            for part in rollout.parts or (rollout,):
                whole.feed(batch[..., begin : begin + part.layout.steps], part.worker)
                begin += part.layout.steps
            fruitless = 0 if len(whole) > before else fruitless + 1
            if fruitless >= _PATIENCE and self.options.reset_at_each_iter:
                steps = rollout.layout.steps
                raise UsageError(
                    f"no episode ended within {steps} steps in {fruitless} rollouts, and reset_at_each_iter begins "
                    f"anew with each: none can ever be whole; raise frames_per_batch or leave reset_at_each_iter out"
                )

    def _take(self, *, random: bool) -> tuple[TensorDictBase, Rollout]:
        rollout = self._backend.take(random=random)
        if rollout.parts:
            return torch.cat([self._assembled(part) for part in rollout.parts], -1), rollout
        return self._assembled(rollout), rollout

    def _assembled(self, rollout: Rollout) -> TensorDictBase:
        """A rollout as the batch it is, where batches are to be stored."""
        if self.options.set_truncated:
            mark_truncated(rollout.arrays, rollout.layout)
        copied = rollout.layout.look.contiguous
        if self._same is None or copied:
            batch = assembler(rollout.layout)(rollout.arrays, rollout.layout)
            if rollout.finals is not None:
                batch.set_non_tensor(FINAL, rollout.finals)
        else:
            batch = self._same[0]
        storing = self._storing
        if self._same is None:
            delivered = batch if storing is None else batch.to(storing)
            if self.options.return_same_td:
                self._same = batch, delivered
            return delivered
        delivered = self._same[1]
        if copied or (storing is not None and storing.type != "cpu"):
            delivered.update_(batch)
        return delivered

    def _arrange(self, batch: TensorDictBase, rollout: Rollout) -> TensorDictBase:
        """The batch `[lanes, T]` in the shape this collector delivers."""
        return batch

    def _by_worker(self, batch: TensorDictBase, rollout: Rollout) -> list[Part]:
        """The batch `[lanes, T]` as the workers made it, for a buffer."""
        return [Part(self._arrange(batch, rollout), rollout.worker)]

    def _split(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch as `[trajectories, time]`."""
        return split_trajectories(batch, prefix="collector")

    # ---- seeds, state ---------------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed lanes, policy noise, torch and NumPy of the worker, and begin new episodes; returns the next seed."""

        def work() -> int:
            following = self._backend.set_seed(seed, static=static_seed)
            self._forget()
            return following

        return self._ask(work)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on: policy, env, counters."""

        def work() -> dict[str, Any]:
            state = {**self._backend.state_dict(), "frames": self._frames, "iter": self._batches - 1}
            if self._whole is not None:
                why = "whole episodes are delivered; frames of open ones that are held back are not kept"
                state = without_episodes(state, why)
            if isinstance(self.policy, nn.Module):
                state["policy_state_dict"] = self.policy.state_dict()
            return state

        return self._ask(work)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """The counterpart of `state_dict`. Episodes begin anew, with fresh trajectory ids."""
        self._open()
        needed = {"frames", "iter", "traj_pool"}
        if self._runner is not None:
            raise WrongState("load_state_dict() comes before start(): a run in the background goes on where it is")
        if strict and not needed <= state_dict.keys():
            raise UsageError(f"state_dict lacks {sorted(needed - state_dict.keys())}")

        def work() -> None:
            if "policy_state_dict" in state_dict and isinstance(self.policy, nn.Module):
                self.policy.load_state_dict(state_dict["policy_state_dict"], strict=strict)
            self._backend.load_state_dict(dict(state_dict))
            if self._watch is not None:
                self._watch.rebase()
            self._forget()
            self._frames, self._batches = int(state_dict.get("frames", 0)), int(state_dict.get("iter", -1)) + 1
            self._version = int(state_dict.get("policy_version", self._version))

        self._ask(work)

    @property
    def policy(self) -> Any:
        """The policy that acts."""
        raise NotImplementedError

    def get_model(self, model_id: str) -> Any:
        """The model at this path, as weights are named by: "policy"."""
        return get_attribute(self, model_id)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Hand these to the `init` of the weight updater; without one, nothing happens."""
        if self._updater is not None:
            self._updater.init(*args, **kwargs)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what is at this path: `cascade_execute("policy.eval")`."""
        self._check_owner()
        return get_attribute(self, attr_path)(*args, **kwargs)

    def explain(self) -> str:
        """How env and policy are run: what is captured, and what is called at each step, and why.

        >>> print(Collector(env, policy, frames_per_batch=100).explain())
        env: reap steps what is inside, and replays the torch calls of its transforms
        policy ProbabilisticActor: it is captured: its torch calls are replayed
        """
        raise NotImplementedError

    def get_distant_attr(self, attr: str) -> Any:
        """What is at this path of a worker, whose "policy" and "env" are the ones that act: `"policy.in_keys"`."""
        raise NotImplementedError

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call what is at this path in every worker, with arguments of its own; what they return, in order."""
        raise NotImplementedError

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy that acts; of several, the first."""
        return self._of_first(f"policy.{attr}")

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the env; of several workers, the first one's."""
        return self._of_first(f"env.{attr}")

    def _of_first(self, path: str) -> Any:
        return self.get_distant_attr(path)

    def stats(self) -> dict[str, Any]:
        """Counts and rates so far."""
        raise NotImplementedError

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return get_attribute(self, f"replay_buffer.{attr}")

    # ---- in the background ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer from now on, in the background, until `total_frames`; see `async_shutdown`.

        >>> collector = Collector("CartPole-v1", frames_per_batch=100, replay_buffer=buffer)
        >>> collector.start()
        >>> sample = buffer.sample()             # waits for the first rows
        >>> collector.async_shutdown()
        """
        self._open()
        if self.replay_buffer is None:
            raise WrongState("start() collects into a replay buffer; give replay_buffer")
        if self._runner is None:
            runner = self._make_runner()
            with self._watching(), self._uninterrupted():
                runner.start()
                self._runner = runner  # it runs

    def _uninterrupted(self) -> AbstractContextManager[None]:
        """Inside, Ctrl-C is let in only while waiting for workers."""
        return Interrupts().held()

    def _make_runner(self) -> Runner:
        buffer = self.replay_buffer
        return ThreadRunner(
            self._turn, wanted=lambda: getattr(buffer, "may_write", True), break_off=self._backend.breaker()
        )

    def _turn(self) -> bool:
        """One batch in the background; whether there is more to come. Whoever learns of an error closes: `_look`."""
        if self._more():
            self._finish()
        return self._more()

    def is_running(self) -> bool:
        """Whether it is collecting in the background; False before `start()` and once `total_frames` are made."""
        self._look()
        return self._why_closed is None and self._runner is not None and self._runner.running

    def pause(self) -> Paused:
        """Stop collecting in the background between two batches; returns when it has. For a block, or until `resume`.

        >>> with collector.pause():
        ...     buffer.dumps("somewhere")
        """
        return self._pause()

    def _pause(self, settle: Callable[[], None] | None = None, *, kept: bool = False) -> Paused:
        """Pause, and `settle` what is under way then; `kept`: until `resume`, also after a block."""
        self._open()
        runner = self._runner
        if runner is None:
            raise WrongState("there is nothing to pause: start() was not called")
        paused = Paused(self.resume, kept=kept)
        try:
            with self._watching():
                runner.pause(paused)
                self._look()
                if settle is not None:
                    settle()
            paused.pause.given = True  # last, and no call follows in which Ctrl-C could come
            return paused
        except BaseException:  # nobody knows of this pause, so nobody would end it
            runner.resume(paused)
            raise

    def resume(self, paused: Paused | None = None) -> None:
        """Go on after `pause()`; nothing happens to a collector that is closed, or was not paused."""
        if self._runner is not None and self._why_closed is None:
            self._runner.resume(paused)
            self._look()

    def bringing(self) -> bool:
        """Whether rows are still to come into the buffer; asked by the buffer when it has too few."""
        self._look(again=True)
        return self.is_running()

    def over(self) -> bool:
        """Whether no more rows will ever come into the buffer: all frames are made, or it is closed."""
        return self._why_closed is not None or not (self._more() if self._runner is None else self._runner.running)

    def _look(self, *, again: bool = False) -> None:
        """What went wrong in the background is raised here: once, or `again` whenever asked."""
        self._check_owner()
        runner = self._runner
        if runner is not None and self._watch is not None:
            self._watch.tell_background()
        error = None if runner is None else runner.failure()
        if runner is None or error is None:
            return
        with contextlib.suppress(Exception):
            self._close(f"it failed: {error!r}", failed=True)
        if again or not runner.told:
            runner.told = True
            raise error

    def _in_front(self) -> None:
        """Batches are taken here, in this thread."""
        self._open()
        if self._runner is not None:
            raise WrongState("this collector fills its replay buffer in the background: sample from there")

    def _ask(self, work: Callable[[], T]) -> T:
        """Have a worker do something between two batches."""
        with self._watching():
            return self._between(work)

    def _between(self, work: Callable[[], T]) -> T:
        return work() if self._runner is None else self._runner.between(work)

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers and close the envs; what went wrong in the background is raised then. May be called twice.

        A rollout that is made here meanwhile, in the background or by another thread, is broken off after the step it
        is in. `timeout`: seconds to wait for that (5 by default).
        """
        if self._elsewhere is not None:  # its owner's to end
            return
        patience = DEADLINE if timeout is None else timeout
        try:
            if self._runner is not None and self._why_closed is None:
                try:
                    self._runner.stop(patience)
                except WorkerSilent:
                    self._close("its thread does not end", close_env=close_env)
                    raise
            self._close("shutdown() was called", close_env=close_env)
            self._wait_for_env(patience)
            wait_for_ends()
            self._look()
            if self._watch is not None and self._runner is not None:
                self._watch.tell_background(ended=True)
        except Exception:
            if raise_on_error:
                raise

    def async_shutdown(self, *args: Any, **options: Any) -> Ended:
        """`shutdown`, by the name it has for collectors that run in the background.

        It has ended when this returns. What it returns may be awaited, as scripts do with TorchRL's `RayCollector`.
        """
        self.shutdown(*args, **options)
        return Ended()

    def _check_owner(self) -> None:
        """Refuse where this is a copy, in a fork."""
        if self._elsewhere is not None:
            raise WrongState(f"this {type(self).__name__} cannot be used here: {self._elsewhere}")

    def in_fork(self, why: str) -> None:
        """Called in a fork: this is a copy, whose workers, thread and memory are its owner's."""
        self._elsewhere = why
        refuse_all(self, why)

    def _close(self, why: str, *, close_env: bool = True, failed: bool = False) -> None:
        if self._ended or self._closing:
            return
        first = self._why_closed is None
        try:
            self._closing, self._why_closed = True, self._why_closed or why
            try:
                if first:
                    self._write_timeline()
            finally:  # a file that cannot be written keeps nobody alive
                self._send_away(close_env)
                if close_env:
                    self._backend.close(failed=failed)
            self._ended = True
        except KeyboardInterrupt:  # what is left is closed by whoever asks next, or when nobody has it any more
            raise
        except BaseException:
            self._ended = True
            raise
        finally:
            self._closing = False

    def _wait_for_env(self, timeout: float) -> None:
        """Wait until an env of this process is closed, if another thread was in it."""

    def _send_away(self, close_env: bool) -> None:
        """Another thread that waits for a batch leaves, or gets it, before what it waits on is closed.

        One that makes it in this process closes the env itself.
        """
        if self._busy not in (None, threading.get_ident()):
            self._backend.breaker()()
            away = self._backend.elsewhere or not close_env
            if away and self._collecting.acquire(timeout=LEAVE):
                self._collecting.release()

    def _closed_meanwhile(self) -> WrongState:
        """The error for whoever waited while it was closed."""
        why = self._why_closed or "it was broken off"
        return WrongState(f"this {type(self).__name__} was closed while it was at work: {why}")

    @property
    def closed(self) -> bool:
        """Whether it was shut down, or failed."""
        return self._why_closed is not None

    def _open(self) -> None:
        self._look()
        if self._why_closed is not None:
            raise WrongState(f"this {type(self).__name__} is closed: {self._why_closed}; make a new one")

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """A worker that fails inside, whatever it was asked, closes the collector."""
        self._open()
        try:
            yield
        except Halted as error:
            raise self._closed_meanwhile() from error
        except WorkerError as error:
            with contextlib.suppress(Exception):
                self._close(f"it failed: {error!r}", failed=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or not self.closed:  # else it has failed, and its error is on the way
            self.shutdown(raise_on_error=kind is None)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if not self._ended:
                self.shutdown()
