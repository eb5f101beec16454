"""Evaluator: how good is a policy now? Whole episodes, with the weights of the moment of asking, here or meanwhile.

    evaluate(step=k) ─────────────────────────────────────────► {"eval/reward": …, "eval/step": k}
    trigger_eval(step=k) ──► a thread collects, you go on ──► poll() / wait() ──► the same

Every lane contributes equally many episodes, its first ones: lanes with short episodes do not weigh more than others.
In this process no more than these are played, if the env is stepped step by step.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn
from typing_extensions import Self

from reap.arguments import function, mapping, one_of, whole
from reap.backends.base import Halted
from reap.collectors.background import ended_by
from reap.collectors.multi import MultiSyncCollector
from reap.collectors.single import Collector
from reap.core.env import Env
from reap.core.paths import follow
from reap.envs.accept import as_env, is_env
from reap.errors import UsageError, WrongArgument, WrongState
from reap.forks import guard, refuse_all
from reap.spec import AnyKey, Key
from reap.threads import join
from reap.weights.local import copied, load

_BUSY = ("skip", "error", "queue")
_PATIENCE = 1_000_000  # frames without a single end before saying that there will never be one
_DEADLINE = 5.0  # seconds to end, unless told otherwise
_OWN_COUNT: Key = ("evaluator_step_count",)  # where max_steps is counted if the env counts steps itself
_log = logging.getLogger("reap")
_LATER = ("num_gpus", "ray_kwargs", "weight_sync_schemes", "collector_cls")


class Evaluator:
    """Measures a policy over whole episodes.

    >>> evaluator = Evaluator("CartPole-v1", policy, num_trajectories=5, max_steps=200)
    >>> evaluator.evaluate(step=0)["eval/num_episodes"]
    5

    Args:
        env: an env, or a factory of one, as for `Collector`.
        policy: acts; a copy of it, so that training can go on meanwhile.
        policy_factory: makes the policy, in place of `policy`; called with the env, if it takes an argument.
        num_trajectories: episodes per evaluation.
        max_steps: cut episodes after so many steps; an env may count and cut for itself as well.
        frames_per_batch: frames collected at a time.
        collector_kwargs: further options of the collector; with a `traj_format`, `metrics_fn` sees whole episodes so.
        log_prefix: what the names of the metrics begin with.
        reward_keys: where the reward is.
        done_keys: where the end of an episode is marked.
        device: where the policy acts.
        exploration_type: how the policy samples.
        metrics_fn: takes a batch, returns further metrics by name; those of several batches are averaged.
        dump_video: write what the video recorders of a TorchRL env have recorded.
        on_result: called with the metrics of each evaluation, as a TensorDict, in the thread that evaluates. What it
            raises is logged, and ends nothing.
        busy_policy: what `trigger_eval` does while one is going on: "skip" it, raise an "error", or "queue".
        backend: where episodes are played: "thread" (this process) or "process".
        init_fn: called first in the process.
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        collector_kwargs: Mapping[str, Any] | None = None,
        log_prefix: str = "eval",
        reward_keys: AnyKey = ("next", "reward"),
        done_keys: AnyKey = ("next", "done"),
        device: Any = None,
        exploration_type: InteractionType | str = InteractionType.DETERMINISTIC,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, float]] | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDictBase], Any] | None = None,
        busy_policy: str = "skip",
        backend: str = "thread",
        init_fn: Callable[[], Any] | None = None,
        **later: Any,
    ) -> None:
        unknown = [name for name in later if name not in _LATER]
        if unknown:
            raise WrongArgument(f"Evaluator has no option {unknown[0]!r}")
        given = [name for name, value in later.items() if value is not None]
        if given or (isinstance(backend, str) and backend == "ray"):
            raise UsageError(f"Evaluator does not support {(given or ['backend=ray'])[0]}; 'thread' and 'process' play")
        one_of("backend", backend, ("thread", "process"))
        one_of("busy_policy", busy_policy, _BUSY)
        if (policy is None) == (policy_factory is None):
            raise WrongArgument("Evaluator needs policy or policy_factory, and not both")
        if isinstance(num_trajectories, bool) or not isinstance(num_trajectories, int) or num_trajectories < 1:
            raise UsageError(f"num_trajectories must be a whole number ≥ 1, got {num_trajectories!r}")
        whole("max_steps", max_steps, least=None, none=True)
        whole("frames_per_batch", frames_per_batch, none=True)
        mapping("collector_kwargs", collector_kwargs)
        for name, value in (("policy_factory", policy_factory), ("metrics_fn", metrics_fn), ("on_result", on_result)):
            function(name, value)
        self._wanted, self._prefix, self._busy_policy = num_trajectories, log_prefix, busy_policy
        self._reward, self._done, self._metrics = reward_keys, done_keys, metrics_fn
        self._dump, self._on_result = dump_video, on_result
        self._source = policy
        self._enough = _Enough(num_trajectories)
        options: dict[str, Any] = {
            "frames_per_batch": frames_per_batch or 200,
            "total_frames": -1,
            "exploration_type": exploration_type,
            "policy_device": device,
            **(collector_kwargs or {}),
        }
        if options.get("traj_format") is not None:
            options.setdefault("trajs_per_batch", num_trajectories)
        max_steps = options.pop("max_frames_per_traj", max_steps)
        self._collector: Any
        if backend == "process":
            self._policy = self._policy_for(policy, policy_factory, env)
            options |= {"cat_results": 0} | ({} if init_fn is None else {"init_fn": init_fn})
            make = functools.partial(_lanes_of, env, max_steps)
            self._collector = MultiSyncCollector([make], self._policy, **options)
        else:
            own, given = not is_env(env) and callable(env), _made(env)
            try:
                self._policy = self._policy_for(policy, policy_factory, given)
                lanes = _lanes_of(given, max_steps)
                by_steps = lanes.spec.ready_of is None and type(lanes).on_device is Env.on_device
                if by_steps and options.get("trajs_per_batch") is None:
                    options.setdefault("interruptor", self._enough)
                self._collector = Collector(lanes, self._policy, **options)
            except BaseException:
                if own:
                    given.close()
                raise
            if options.get("interruptor") is self._enough:
                self._enough.look_at(self._collector)
        self._break_off: Callable[[], None] | None = self._collector._backend.breaker()
        self._one = threading.Lock()  # one evaluation at a time
        self._news = threading.Condition()  # guards the four below
        self._thread: threading.Thread | None = None  # at work, or nobody
        self._left = 0  # asked for and not answered yet
        self._queue: deque[tuple[dict[str, Any], Any]] = deque()
        self._results: deque[dict[str, Any] | BaseException] = deque()
        self._closed = False
        self._steps = 0  # of evaluations that were given no number
        self._elsewhere: str | None = None  # why it is not this process's own
        guard(self)

    def in_fork(self, why: str) -> None:
        """Called in a fork: its thread is not here, and its workers are its owner's."""
        self._elsewhere, self._one, self._news = why, threading.Lock(), threading.Condition()
        self._thread, self._left = None, 0
        self._queue.clear()
        refuse_all(self, why)

    @staticmethod
    def _policy_for(policy: Any, factory: Callable[..., Any] | None, env: Any) -> Any:
        """A copy of the policy, or what the factory makes, of the env if it asks for it."""
        if factory is None:
            return copied(policy)
        if not _takes_one(factory):
            return factory()
        given = _made(env)
        try:
            return factory(given)
        finally:
            if given is not env:  # the one that is played lives elsewhere
                given.close()

    # ---- asking ---------------------------------------------------------------------------------------------------

    def evaluate(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Play the episodes now; `weights` None: those of the policy given, as they are at this moment.

        `weights_dict` has weights by path, as `{"policy": …, "env.transform[0]": …}`. Where `step` is None evaluations
        are numbered, from 0.
        """
        self._open()
        asked = self._asked(weights, weights_dict), self._numbered(step)
        with self._one:
            found = self._play(*asked)
        self._tell(found)
        return found

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Play them in the background; False: one is going on, and this one is skipped."""
        self._open()
        if self.pending:
            if self._busy_policy == "error":
                raise WrongState("an evaluation is going on; wait() for it, or give busy_policy='queue'")
            if self._busy_policy == "skip":
                return False
        asked = self._asked(weights, weights_dict), self._numbered(step)
        with self._news:
            self._queue.append(asked)
            self._left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="reap-evaluator", daemon=True)
                self._thread.start()
        return True

    @property
    def pending(self) -> bool:
        """Whether an evaluation is going on or waiting."""
        return self._left > 0

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """The next result of the background, in order; None if none is there within `timeout` seconds."""
        return self._next(timeout)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next result, waited for; None if nothing is pending, or it took longer than `timeout` seconds."""
        return self._next(timeout)

    def _next(self, timeout: float | None) -> dict[str, Any] | None:
        self._own()
        with self._news:
            self._news.wait_for(lambda: self._results or not self._left, timeout)
            if not self._results:
                return None
            found = self._results.popleft()
        if isinstance(found, BaseException):
            raise found
        return found

    # ---- playing --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._news:
                if not self._queue:
                    self._thread = None  # with the lock held: whoever asks next starts another
                    return
                weights, step = self._queue.popleft()
            result: dict[str, Any] | BaseException
            try:
                with self._one:
                    result = self._play(weights, step)
                self._tell(result)
            except (Exception, Halted) as error:  # raised where it is asked for
                result = error
                if isinstance(error, Halted) or isinstance(error.__cause__, Halted):
                    result = WrongState("this evaluation was broken off: its Evaluator was shut down")
            except BaseException as cause:
                result = ended_by(cause, "the evaluating thread")
            with self._news:
                self._results.append(result)
                self._left -= 1
                self._news.notify_all()

    def _tell(self, found: Mapping[str, Any]) -> None:
        if self._on_result is None:
            return
        try:
            self._on_result(TensorDict({name: _tensor(value) for name, value in found.items()}))
        except Exception:
            _log.exception("Evaluator: on_result raised; the evaluation counts all the same")

    def _numbered(self, step: Any) -> Any:
        if step is None:
            step, self._steps = self._steps, self._steps + 1
        return step

    def _asked(self, weights: Any, by_path: Mapping[str, Any] | None) -> dict[str, Any]:
        """Weights by path, as they are now."""
        if by_path is not None and not isinstance(by_path, Mapping):
            raise WrongArgument(f"weights_dict must be a mapping of paths to weights, got {type(by_path).__name__}")
        others = [path for path in by_path or () if path != "policy"]
        if others and isinstance(self._collector, MultiSyncCollector):
            raise UsageError(f"weights_dict names {others[0]!r}; backend='process' can be sent those of 'policy' alone")
        given = self._source if weights is None else weights
        asked = {"policy": given, **(by_path or {})}
        taken = {
            path: self.extract_weights(one) if isinstance(one, nn.Module) else one
            for path, one in asked.items()
            if isinstance(one, nn.Module) or path in (by_path or ()) or weights is not None  # a function has none
        }
        return {path: one for path, one in taken.items() if one is not None}

    def _play(self, weights: Mapping[str, Any], step: Any) -> dict[str, Any]:
        for path, one in weights.items():
            if isinstance(self._collector, MultiSyncCollector):
                self._collector.update_policy_weights_(one)
            else:
                load(follow(self._collector, path), one)
        self._enough.begin()
        began = time.perf_counter()
        self._collector.reset()
        scores: _Scores | None = None
        extra: list[Mapping[str, float]] = []
        frames = 0
        while scores is None or not scores.enough:
            batch = self._collector.next()
            reward, done = batch.get(self._reward), batch.get(self._done)
            steps = batch.batch_size[-1]
            reward = reward.reshape(*batch.batch_size, -1).double().mean(-1).reshape(-1, steps).numpy(force=True)
            done = done.reshape(*batch.batch_size, -1).any(-1).reshape(-1, steps).numpy(force=True)
            mask = batch.get(("collector", "mask"), None)
            real = np.ones_like(done) if mask is None else mask.reshape(-1, steps).numpy(force=True)
            scores = scores or _Scores(len(reward), self._wanted)
            scores.feed(reward * real, done & real, real)
            frames += int(real.sum())
            if frames > _PATIENCE and not scores.any:
                raise UsageError(f"no episode ended within {frames:,} frames; give max_steps")
            if self._metrics is not None:
                extra.append(self._metrics(self._enough.played(batch)))
        seconds = time.perf_counter() - began
        returns, lengths = scores.first()
        found: dict[str, Any] = {
            "reward": float(np.mean(returns)),
            "reward_std": float(np.std(returns, ddof=1)) if len(returns) > 1 else 0.0,
            "num_episodes": len(returns),
            "episode_length": float(np.mean(lengths)),
            "fps": frames / seconds,
        }
        found["step"] = step
        for name in extra[0] if extra else ():
            found[name] = float(np.mean([one[name] for one in extra]))
        self._dump_videos(step)
        return {f"{self._prefix}/{name}": value for name, value in found.items()}

    def _dump_videos(self, step: Any) -> None:
        for part in _modules_of(getattr(self._collector, "env", None)) if self._dump else ():
            if type(part).__name__ == "VideoRecorder":
                part.dump(step=step)  # type: ignore[operator]

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDictBase:
        """A policy's weights as they are now, for `evaluate`."""
        return TensorDict.from_module(policy).data.clone()

    # ---- state and end --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The collector's state; refused while something is pending."""
        self._open()
        if self.pending:
            raise WrongState("an evaluation is going on; wait() for it before state_dict()")
        return {"collector": self._collector.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The counterpart of `state_dict`."""
        self._open()
        if self.pending:
            raise WrongState("an evaluation is going on; wait() for it before load_state_dict()")
        self._collector.load_state_dict(state_dict["collector"])

    def shutdown(self, timeout: float | None = None) -> None:
        """Break off what is going on, after the step it is in; drop what waits; close the env. May be called twice.

        `timeout`: seconds to wait for that step (5 by default); then `WorkerSilent`, with its stack.
        """
        self._closed = True
        with self._news:
            self._left -= len(self._queue)
            self._queue.clear()
            thread = self._thread
            self._news.notify_all()
        if thread is not None:
            if self._break_off is not None:
                self._break_off()
            join(thread, _DEADLINE if timeout is None else timeout, "the evaluating thread, whose env stays open,")
        collector, self._collector, self._break_off = self._collector, None, None  # its memory goes with it
        if collector is not None:
            collector.shutdown()

    def _own(self) -> None:
        if self._elsewhere is not None:
            raise WrongState(f"this Evaluator cannot be used here: {self._elsewhere}")

    def _open(self) -> None:
        self._own()
        if self._closed:
            raise WrongState("this Evaluator is closed; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _Enough:
    """Ends a rollout with the last episode that is wanted (a collector's `interruptor`)."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._backend: Any = None
        self._left = np.zeros(0, np.int64)  # episodes each lane has still to end

    def look_at(self, collector: Collector) -> None:
        self._backend = collector._inline

    def begin(self) -> None:
        if self._backend is not None:
            self._left = np.array(_quotas(self._backend.worker.lanes, self._wanted))

    def played(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch without the steps nobody made."""
        if self._backend is None:
            return batch
        steps = int(batch.get(("collector", "mask")).reshape(-1, batch.batch_size[-1])[0].sum())
        return batch[..., :steps].exclude(("collector", "mask"))

    def collection_stopped(self) -> bool:
        backend = self._backend
        if backend is None:
            return False
        self._left -= backend.filling.arrays[("next", "done")][int(backend.worker.loop.at[0]), :, 0]
        return not bool((self._left > 0).any())


def _quotas(lanes: int, wanted: int) -> list[int]:
    """How many episodes each lane plays, so many in all."""
    each, rest = divmod(wanted, lanes)
    return [each + (lane < rest) for lane in range(lanes)]


def _made(env: Any) -> Any:
    """The env itself, where a factory was given."""
    return env() if callable(env) and not is_env(env) else env


def _lanes_of(env: Any, max_steps: int | None) -> Env:
    """The lanes to be played, with episodes of at most `max_steps`; moving normalisations do not move meanwhile."""
    given = _made(env)
    for part in _modules_of(given):
        if type(part).__name__.startswith("VecNorm") and callable(getattr(part, "freeze", None)):
            part.freeze()  # type: ignore[operator]
    try:
        return as_env(given, None, max_steps)
    except UsageError:
        if max_steps is None:
            raise
    return as_env(given, None, max_steps, _OWN_COUNT)  # it may have a step_count of its own


def _modules_of(env: Any) -> list[nn.Module]:
    """The modules of a TorchRL env, and of those it steps in this process."""
    if not isinstance(env, nn.Module):
        return []
    found = list(env.modules())
    for part in list(found):
        if type(part).__name__ == "SerialEnv" and part.is_closed:
            part.start()  # type: ignore[operator]  # its parts are made only then
        for inner in vars(part).get("_envs") or ():  # of a SerialEnv; asked by name its parts would answer, too
            found += _modules_of(inner)
    return found


def _takes_one(factory: Callable[..., Any]) -> bool:
    """Whether a factory of policies wants the env: it has a parameter that must be given."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    must = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in must and one.default is inspect.Parameter.empty for one in parameters)


def _tensor(value: Any) -> torch.Tensor:
    found = torch.as_tensor(value)
    return found.float() if found.dtype is torch.float64 else found


class _Scores:
    """Returns and lengths of the first episodes of every lane."""

    def __init__(self, lanes: int, wanted: int) -> None:
        self._quotas = _quotas(lanes, wanted)
        self._done: list[list[tuple[float, int]]] = [[] for _ in range(lanes)]
        self._open = [(0.0, 0)] * lanes

    @property
    def enough(self) -> bool:
        return all(len(lane) >= quota for lane, quota in zip(self._done, self._quotas))

    @property
    def any(self) -> bool:
        return any(self._done)

    def feed(self, reward: np.ndarray[Any, Any], done: np.ndarray[Any, Any], real: np.ndarray[Any, Any]) -> None:
        """Rewards `[lanes, T]`, where episodes end, and which rows are frames at all."""
        for lane, (rewards, ends, frames) in enumerate(zip(reward, done, real)):
            total, length = self._open[lane]
            at = 0
            for end in np.flatnonzero(ends) + 1:
                self._done[lane].append((total + float(rewards[at:end].sum()), length + int(frames[at:end].sum())))
                total, length, at = 0.0, 0, int(end)
            self._open[lane] = total + float(rewards[at:].sum()), length + int(frames[at:].sum())

    def first(self) -> tuple[list[float], list[int]]:
        """Episode by episode over the lanes."""
        own = [lane[:quota] for lane, quota in zip(self._done, self._quotas)]
        rows = [lane[k] for k in range(max(self._quotas)) for lane in own if k < len(lane)]
        returns, lengths = zip(*rows)
        return list(returns), list(lengths)
