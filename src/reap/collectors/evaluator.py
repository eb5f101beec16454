"""Evaluator: how good is a policy now? Whole episodes, with the weights of the moment of asking, here or meanwhile.

    evaluate(step=k) ─────────────────────────────────────────► {"eval/reward": …, "eval/step": k}
    trigger_eval(step=k) ──► a thread collects, you go on ──► poll() / wait() ──► the same

Every lane contributes equally many episodes, its first ones: lanes with short episodes do not weigh more than others.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn
from typing_extensions import Self

from reap.arguments import function, mapping, one_of, whole
from reap.backends.base import Halted
from reap.collectors.background import ended_by
from reap.collectors.multi import MultiSyncCollector
from reap.collectors.single import Collector
from reap.errors import UsageError, WrongArgument, WrongState
from reap.spec import AnyKey
from reap.threads import join
from reap.weights.local import load

_BUSY = ("skip", "error", "queue")
_PATIENCE = 1_000_000  # frames without a single end before saying that there will never be one
_DEADLINE = 5.0  # seconds to end, unless told otherwise
_LATER = ("num_gpus", "ray_kwargs", "weight_sync_schemes", "collector_cls")


class Evaluator:
    """Measures a policy over whole episodes.

    >>> evaluator = Evaluator("CartPole-v1", policy, num_trajectories=5, max_steps=200)
    >>> evaluator.evaluate(step=0)["eval/num_episodes"]
    5

    Args:
        env: an env, or a factory of one, as for `Collector`.
        policy: acts; a copy of it, so that training can go on meanwhile.
        policy_factory: makes the policy, in place of `policy`.
        num_trajectories: episodes per evaluation.
        max_steps: cut episodes after so many steps.
        frames_per_batch: frames collected at a time.
        collector_kwargs: further options of the collector.
        log_prefix: what the names of the metrics begin with.
        reward_keys: where the reward is.
        done_keys: where the end of an episode is marked.
        device: where the policy acts.
        exploration_type: how the policy samples.
        metrics_fn: takes a batch, returns further metrics by name; those of several batches are averaged.
        dump_video: write what the video recorders of a TorchRL env have recorded.
        on_result: called with the metrics of each evaluation in the background, in its thread.
        busy_policy: what `trigger_eval` does while one is going on: "skip" it, raise an "error", or "queue".
        backend: where episodes are played: "thread" (this process) or "process".
        init_fn: called first in the process.
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
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
        on_result: Callable[[dict[str, Any]], Any] | None = None,
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
        self._policy = copy.deepcopy(policy) if policy is not None else policy_factory() if policy_factory else None
        options: dict[str, Any] = {
            "frames_per_batch": frames_per_batch or 200,
            "total_frames": -1,
            "max_frames_per_traj": max_steps,
            "exploration_type": exploration_type,
            "policy_device": device,
            **(collector_kwargs or {}),
        }
        if backend == "process":
            options |= {"cat_results": 0} | ({} if init_fn is None else {"init_fn": init_fn})
            self._collector: Any = MultiSyncCollector([env], self._policy, **options)
        else:
            self._collector = Collector(env, self._policy, **options)
            self._freeze()
        self._break_off: Callable[[], None] | None = self._collector._backend.breaker()
        self._one = threading.Lock()  # one evaluation at a time
        self._news = threading.Condition()  # guards the four below
        self._thread: threading.Thread | None = None  # at work, or nobody
        self._left = 0  # asked for and not answered yet
        self._queue: deque[tuple[Any, int | None]] = deque()
        self._results: deque[dict[str, Any] | BaseException] = deque()
        self._closed = False

    # ---- asking ---------------------------------------------------------------------------------------------------

    def evaluate(self, weights: Any = None, step: int | None = None) -> dict[str, Any]:
        """Play the episodes now; `weights` None: those of the policy given, as they are at this moment."""
        self._open()
        with self._one:
            return self._play(self._snapshot(weights), step)

    def trigger_eval(self, weights: Any = None, step: int | None = None) -> bool:
        """Play them in the background; False: one is going on, and this one is skipped."""
        self._open()
        if self.pending:
            if self._busy_policy == "error":
                raise WrongState("an evaluation is going on; wait() for it, or give busy_policy='queue'")
            if self._busy_policy == "skip":
                return False
        asked = self._snapshot(weights), step
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
                if self._on_result is not None:
                    self._on_result(result)
            except Exception as error:  # raised where it is asked for
                result = error
            except Halted:
                result = WrongState("this evaluation was broken off: its Evaluator was shut down")
            except BaseException as cause:
                result = ended_by(cause, "the evaluating thread")
            with self._news:
                self._results.append(result)
                self._left -= 1
                self._news.notify_all()

    def _snapshot(self, weights: Any) -> Any:
        given = self._source if weights is None else weights
        if isinstance(given, nn.Module):
            return self.extract_weights(given)
        return weights  # a function has none

    def _play(self, weights: Any, step: int | None) -> dict[str, Any]:
        if weights is not None:
            if isinstance(self._collector, MultiSyncCollector):
                self._collector.update_policy_weights_(weights)
            else:
                load(self._collector.policy, weights)
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
                extra.append(self._metrics(batch))
        seconds = time.perf_counter() - began
        returns, lengths = scores.first(self._wanted)
        found: dict[str, Any] = {
            "reward": float(np.mean(returns)),
            "reward_std": float(np.std(returns, ddof=1)) if len(returns) > 1 else 0.0,
            "num_episodes": len(returns),
            "episode_length": float(np.mean(lengths)),
            "fps": frames / seconds,
        }
        found |= {} if step is None else {"step": step}
        for name in extra[0] if extra else ():
            found[name] = float(np.mean([one[name] for one in extra]))
        self._dump_videos(step)
        return {f"{self._prefix}/{name}": value for name, value in found.items()}

    def _parts(self) -> list[Any]:
        """The modules of a TorchRL env that is played here."""
        inner = getattr(getattr(self._collector, "env", None), "env", None)
        return list(inner.modules()) if isinstance(inner, nn.Module) else []

    def _freeze(self) -> None:
        """Moving normalisations do not move while a policy is measured."""
        for part in self._parts():
            if type(part).__name__.startswith("VecNorm") and callable(getattr(part, "freeze", None)):
                part.freeze()

    def _dump_videos(self, step: int | None) -> None:
        for part in self._parts() if self._dump else ():
            if type(part).__name__ == "VideoRecorder":
                part.dump(suffix=None if step is None else str(step))

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

    def _open(self) -> None:
        if self._closed:
            raise WrongState("this Evaluator is closed; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _Scores:
    """Returns and lengths of the first episodes of every lane."""

    def __init__(self, lanes: int, wanted: int) -> None:
        self._quota = -(-wanted // lanes)
        self._done: list[list[tuple[float, int]]] = [[] for _ in range(lanes)]
        self._open = [(0.0, 0)] * lanes

    @property
    def enough(self) -> bool:
        return all(len(lane) >= self._quota for lane in self._done)

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

    def first(self, wanted: int) -> tuple[list[float], list[int]]:
        """Episode by episode over the lanes, so many."""
        rows = [lane[k] for k in range(self._quota) for lane in self._done][:wanted]
        returns, lengths = zip(*rows)
        return list(returns), list(lengths)
