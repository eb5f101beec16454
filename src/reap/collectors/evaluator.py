"""Evaluator: measures a policy over whole episodes, with its weights at the time of the call, now or in the background.

    evaluate(step=k) ─────────────────────────────────────────► {"eval/reward": …, "eval/step": k}
    trigger_eval(step=k) ──► a thread collects, you go on ──► poll() / wait() ──► the same

episodes.py plays the episodes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from torch import nn
from typing_extensions import Self, TypedDict, Unpack

from reap._system.forks import guard, refuse_use
from reap._system.processes import DEADLINE
from reap._system.threads import join
from reap.arguments import count, function, mapping, one_of, whole
from reap.backends.base import Halted
from reap.collectors.episodes import EpisodePlayer, build, lanes_of
from reap.collectors.parts.background import ended_by
from reap.core.capture.generator_state import use_own_generator
from reap.core.policies.signature import exploration_keywords
from reap.core.policy import RandomPolicy
from reap.core.resume import generators, set_generators
from reap.core.slot import MASK, TRAJ_IDS
from reap.envs.accept import is_env
from reap.envs.gym_registry import for_workers
from reap.errors import UsageError, WrongArgument, WrongState, nearest
from reap.spec import AnyKey, Key, as_key, own_entry
from reap.video import FilmedEnv, filmed, films_of
from reap.weights.local import copied

_BUSY = ("skip", "error", "queue")
_FRAMES = 1_000  # the most frames collected at a time, unless `frames_per_batch` says otherwise
_REWARD: Key = ("next", "reward")
_SUMMED: Key = ("next", "episode_reward")  # where TorchRL's RewardSum has an episode's return
_log = logging.getLogger("reap")


class _UnsupportedOptions(TypedDict, total=False):
    """Options of TorchRL's `Evaluator` that this one accepts only as None."""

    num_gpus: Any
    ray_kwargs: Any
    weight_sync_schemes: Any
    collector_cls: Any


class Evaluator:
    """Measures a policy over whole episodes.

    >>> evaluator = Evaluator("CartPole-v1", policy, num_trajectories=5, max_steps=200)
    >>> evaluator.evaluate(step=0)["eval/num_episodes"]
    5

    Args:
        env: an env, or a factory of one, as for `Collector`.
        policy: the policy to measure. A copy of it acts, so that training can continue meanwhile.
        policy_factory: makes the policy, in place of `policy`; called with the env if it has a required parameter.
        num_trajectories: episodes per evaluation, divided evenly among the lanes.
        max_steps: cut episodes after this many steps; the env may also count and cut them itself.
        frames_per_batch: frames collected at a time; None: `max_steps`, 1,000 at most.
        collector_kwargs: further options of the collector. `traj_format` sets the layout in which `metrics_fn` gets
            the episodes.
        log_prefix: the prefix of the names of the metrics.
        reward_keys: the key of the reward; by default the env's own: ("next", "agents", "reward") for a PettingZoo
            group. The return of an episode is the mean of its agents' returns. If the env sums rewards itself
            (`RewardSum`), its sum is the return.
        done_keys: accepted and ignored: episodes end where trajectories do.
        device: where the policy acts.
        exploration_type: how the policy samples.
        metrics_fn: receives the episodes, `[num_trajectories, longest]` with `("collector", "mask")`, or `[steps]` with
            `traj_format="cat"`; returns further metrics by name.
        dump_video: write what the video recorders of a TorchRL env have recorded.
        video_dir: film the first episode of each evaluation (of the first lane, if there are several) of a Gymnasium
            env: `<video_dir>/<log_prefix>_<step>.mp4`.
        logger: one of `reap.loggers`; it receives the metrics and the video of each evaluation.
        on_result: called with the metrics of each evaluation, as a TensorDict, in the thread that evaluates. An error
            it raises is logged and stops nothing.
        busy_policy: what `trigger_eval` does while an evaluation is running: "skip" the new one, raise an "error", or
            "queue" it.
        backend: where episodes are played: "thread" (this process) or "process".
        init_fn: called first in the worker process, with `backend="process"`.
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
        video_dir: Any = None,
        logger: Any = None,
        on_result: Callable[[TensorDictBase], Any] | None = None,
        busy_policy: Literal["skip", "error", "queue"] = "skip",
        backend: Literal["thread", "process"] = "thread",
        init_fn: Callable[[], Any] | None = None,
        **unsupported: Unpack[_UnsupportedOptions],
    ) -> None:
        _refuse_unsupported(unsupported, backend)
        one_of("backend", backend, ("thread", "process"))
        one_of("busy_policy", busy_policy, _BUSY)
        if (policy is None) == (policy_factory is None):
            raise WrongArgument("Evaluator needs policy or policy_factory, and not both")
        count("num_trajectories", num_trajectories)
        whole("max_steps", max_steps, least=0 if frames_per_batch is None else None, none=True)
        whole("frames_per_batch", frames_per_batch, none=True)
        mapping("collector_kwargs", collector_kwargs)
        for name, value in (("policy_factory", policy_factory), ("metrics_fn", metrics_fn), ("on_result", on_result)):
            function(name, value)
        self._num_trajectories, self._prefix, self._busy_policy = num_trajectories, log_prefix, busy_policy
        if not isinstance(reward_keys, (str, tuple, list)) or not all(isinstance(one, str) for one in reward_keys):
            raise WrongArgument(f"reward_keys must be a key, a string or a tuple of strings, got {reward_keys!r}")
        self._reward, self._metrics = as_key(reward_keys), metrics_fn
        self._dump, self._on_result, self._logger = dump_video, on_result, logger
        if logger is not None and not callable(getattr(logger, "log", None)):
            raise WrongArgument(f"logger needs a method log(step, scalars, videos), got {type(logger).__name__}")
        if video_dir is not None and not isinstance(video_dir, (str, Path)):
            raise WrongArgument(f"video_dir must be a directory, got {video_dir!r}")
        self._videos = None if video_dir is None else Path(video_dir)
        if self._videos is not None:
            env = functools.partial(filmed, for_workers(env), "video_dir")
        self._source = policy
        options: dict[str, Any] = {
            "frames_per_batch": frames_per_batch or min(max_steps or _FRAMES, _FRAMES),
            "total_frames": -1,
            "exploration_type": exploration_type,
            "policy_device": device,
            **(collector_kwargs or {}),
        }
        layout, self._postproc = self._episode_options(options)
        max_steps = options.pop("max_frames_per_traj", max_steps)
        process = backend == "process"
        own, given = not is_env(env) and callable(env) and not process, env if process else build(env)
        try:
            self._policy = self._policy_for(policy, policy_factory, given)
            if process and init_fn is not None:
                options["init_fn"] = init_fn
            self._player: Any = self._make_player(given, max_steps, layout, options, process=process)
        except BaseException:
            if own:
                given.close()
            raise
        self._break_off: Callable[[], None] | None = self._player.canceller()
        self._play_lock = threading.Lock()  # one evaluation at a time
        self._changed = threading.Condition()  # guards the four below
        self._thread: threading.Thread | None = None  # plays queued evaluations; None while there are none
        self._unanswered = 0  # evaluations that were triggered and have no result yet
        self._queue: deque[tuple[dict[str, Any], Any]] = deque()
        self._results: deque[dict[str, Any] | BaseException] = deque()
        self._closed = False
        self._next_step = 0  # the number of the next evaluation that is given no `step`
        self._why_foreign: str | None = None  # in a forked copy: why it cannot be used there
        guard(self)

    def _make_player(
        self, env: Any, max_steps: int | None, layout: str, options: Mapping[str, Any], *, process: bool
    ) -> EpisodePlayer:
        """Return the player of the episodes, in a process of its own or in this one."""
        lanes: Any = functools.partial(lanes_of, env, max_steps) if process else lanes_of(env, max_steps)
        with _in_eval_mode(self._policy):
            return EpisodePlayer(
                lanes, self._policy, episodes=self._num_trajectories, layout=layout, process=process, options=options
            )

    def in_fork(self, why: str) -> None:
        """Refuse every further use. Called in a forked process, whose copy owns no thread and no workers."""
        self._why_foreign, self._play_lock, self._changed = why, threading.Lock(), threading.Condition()
        self._thread, self._unanswered = None, 0
        self._queue.clear()
        refuse_use(self, why)

    def _episode_options(self, options: dict[str, Any]) -> tuple[str, Callable[..., Any] | None]:
        """Remove `traj_format` and `postproc`, which apply to whole episodes here, from the options; return both."""
        layout = options.pop("traj_format", None) or "padded"
        one_of("collector_kwargs: traj_format", layout, ("padded", "cat"))
        given = options.pop("trajs_per_batch", None)
        if given not in (None, self._num_trajectories):
            raise UsageError(
                f"collector_kwargs: trajs_per_batch is {given!r}, but num_trajectories is {self._num_trajectories}; "
                f"leave trajs_per_batch out"
            )
        if options.pop("split_trajs", None):
            raise UsageError(
                "collector_kwargs: split_trajs is not supported: metrics_fn already receives whole episodes; leave "
                "it out"
            )
        if not options.setdefault("track_traj_ids", True):
            raise UsageError(
                "collector_kwargs: track_traj_ids=False is not supported: episodes are found by their ids; leave it out"
            )
        postproc = options.pop("postproc", None)
        function("collector_kwargs: postproc", postproc)
        return layout, postproc

    @staticmethod
    def _policy_for(policy: Any, factory: Callable[..., Any] | None, env: Any) -> Any:
        """Return a copy of the policy, or the policy the factory makes, which is given the env if it takes one."""
        if factory is None:
            return copied(policy)
        if not _takes_env(factory):
            return factory()
        given = build(env)
        try:
            return factory(given)
        finally:
            if given is not env:  # it was made only for the factory; the worker process makes the one that is played
                given.close()

    # ---- asking ---------------------------------------------------------------------------------------------------

    def evaluate(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Play the episodes now, and return the metrics.

        `weights`: the weights to play with; None: the current ones of the policy given to the constructor.
        `weights_dict` holds weights by path, as `{"policy": …, "env.transform[0]": …}`. Evaluations without a `step`
        are numbered from 0.
        """
        self._check_open()
        request = self._weights_by_path(weights, weights_dict), self._step_number(step)
        with self._play_lock:
            found = self._play(*request)
        self._report(found)
        return found

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Start an evaluation in the background; return False if it was skipped because another one is running."""
        self._check_open()
        if self.pending:
            if self._busy_policy == "error":
                raise WrongState("an evaluation is running; call wait() first, or give busy_policy='queue'")
            if self._busy_policy == "skip":
                return False
        request = self._weights_by_path(weights, weights_dict), self._step_number(step)
        with self._changed:
            self._queue.append(request)
            self._unanswered += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_queue, name="reap-evaluator", daemon=True)
                self._thread.start()
        return True

    @property
    def pending(self) -> bool:
        """Whether an evaluation is running or queued."""
        return self._unanswered > 0

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """Return the next result of the background, in order; None if there is none within `timeout` seconds."""
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for the next result and return it; None if nothing is pending, or after `timeout` seconds."""
        self._check_owner()
        with self._changed:
            self._changed.wait_for(lambda: self._results or not self._unanswered, timeout)
            if not self._results:
                return None
            found = self._results.popleft()
        if isinstance(found, BaseException):
            raise found
        return found

    # ---- playing --------------------------------------------------------------------------------------------------

    def _run_queue(self) -> None:
        use_own_generator()
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None  # while holding the lock: the next `trigger_eval` starts a new thread
                    return
                weights, step = self._queue.popleft()
            result: dict[str, Any] | BaseException
            try:
                with self._play_lock:
                    result = self._play(weights, step)
                self._report(result)
            except (Exception, Halted) as error:  # `wait` raises it
                result = error
                if isinstance(error, Halted) or isinstance(error.__cause__, Halted):
                    result = WrongState("this evaluation was interrupted: its Evaluator was shut down")
            except BaseException as cause:
                result = ended_by(cause, "the evaluating thread")
            with self._changed:
                self._results.append(result)
                self._unanswered -= 1
                self._changed.notify_all()

    def _report(self, found: Mapping[str, Any]) -> None:
        step = found[f"{self._prefix}/step"]
        videos = {name: value for name, value in found.items() if name == f"{self._prefix}/video"}
        numbers = {name: value for name, value in found.items() if name not in videos}
        try:
            if self._logger is not None:
                self._logger.log(step, {k: v for k, v in numbers.items() if not k.endswith("/step")}, videos)
            if self._on_result is not None:
                self._on_result(TensorDict({name: _as_tensor(value) for name, value in numbers.items()}))
        except Exception:
            _log.exception("Evaluator: on_result or logger raised; the result of the evaluation is kept")

    def explain(self) -> str:
        """Explain how the policy chooses actions, given `exploration_type`, and how env and policy run.

        >>> print(evaluator.explain())
        exploration_type DETERMINISTIC: the policy's distributions return their action for this type
        """
        self._check_open()
        kind = self._player.collector.exploration_type
        name = "None" if kind is None else kind.name
        parts = self._policy.modules() if isinstance(self._policy, nn.Module) else ()
        heard = exploration_keywords(self._policy, kind)
        if any(isinstance(part, ProbabilisticTensorDictModule) for part in parts):
            meaning = "the policy's distributions return their action for this type"
        elif heard:
            meaning = " and ".join(f"its parameter {name} is {value!r}" for name, value in heard.items())
        else:
            meaning = (
                "the policy has no distribution that reap recognizes, and no parameter `deterministic`: it is called "
                "in evaluation mode, and can read the type with tensordict.nn.probabilistic.interaction_type()"
            )
        return f"exploration_type {name}: {meaning}\n{self._player.collector.explain()}"

    def _step_number(self, step: Any) -> Any:
        if step is None:
            step, self._next_step = self._next_step, self._next_step + 1
        return step

    def _weights_by_path(self, weights: Any, by_path: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the weights to play with, by path. Modules' weights are copied now, since training may change them."""
        if by_path is not None and not isinstance(by_path, Mapping):
            raise WrongArgument(f"weights_dict must be a mapping of paths to weights, got {type(by_path).__name__}")
        for path in by_path or ():
            if not isinstance(path, str):
                raise WrongArgument(f"weights_dict must name models by paths, as 'policy'; got {path!r}")
            self._player.check(path)
        given = self._source if weights is None else weights
        models = {"policy": given, **(by_path or {})}
        taken = {
            path: self.extract_weights(one) if isinstance(one, nn.Module) else one
            for path, one in models.items()
            # A policy that is a function has no weights to take.
            if isinstance(one, nn.Module) or path in (by_path or ()) or weights is not None
        }
        return {path: one for path, one in taken.items() if one is not None}

    def _play(self, weights: Mapping[str, Any], step: Any) -> dict[str, Any]:
        for path, one in weights.items():
            self._player.load(path, one)
        keys = [self._reward, _SUMMED]
        if self._videos is not None:
            self._player.film(1)
        began = time.perf_counter()
        with _in_eval_mode(self._policy):
            episodes, frames = self._player.play(None if self._metrics or self._postproc else keys)
        seconds = time.perf_counter() - began
        if self._postproc is not None:
            episodes = self._postproc(episodes)
        returns, lengths = _returns_and_lengths(episodes, _reward_in(episodes, self._reward))
        found: dict[str, Any] = {
            "reward": float(np.mean(returns)),
            "reward_std": float(np.std(returns, ddof=1)) if len(returns) > 1 else 0.0,
            "num_episodes": len(returns),
            "episode_length": float(np.mean(lengths)),
            "fps": frames / seconds,
            "step": step,
        }
        found.update(self._metrics(episodes) if self._metrics is not None else {})
        if self._dump:
            self._player.dump_videos(step)
        if self._videos is not None:
            found["video"] = str(self._videos / f"{self._prefix.replace('/', '_')}_{step}.mp4")
            self._player.write_film(found["video"])
        return {f"{self._prefix}/{name}": value for name, value in found.items()}

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDictBase:
        """Return a copy of a policy's current weights, for `evaluate`."""
        return TensorDict.from_module(policy).data.clone()

    # ---- state and end --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state; raise `WrongState` while an evaluation is pending."""
        self._check_open()
        if self.pending:
            raise WrongState("an evaluation is running; call wait() before state_dict()")
        return {"collector": self._player.collector.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; raise `WrongState` while an evaluation is pending."""
        self._check_open()
        if self.pending:
            raise WrongState("an evaluation is running; call wait() before load_state_dict()")
        self._player.collector.load_state_dict(state_dict["collector"])

    def shutdown(self, timeout: float | None = None) -> None:
        """Break off a running evaluation after its current step, drop queued ones, close the env. May be called twice.

        `timeout`: seconds to wait for that step (5 by default), after which `WorkerSilent` is raised, with its stack.
        """
        self._closed = True
        with self._changed:
            self._unanswered -= len(self._queue)
            self._queue.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            if self._break_off is not None:
                self._break_off()
            join(thread, DEADLINE if timeout is None else timeout, "the evaluating thread, whose env stays open,")
        player, self._player, self._break_off = self._player, None, None  # drop the references, to free the memory
        if player is not None:
            player.collector.shutdown()

    def _check_owner(self) -> None:
        if self._why_foreign is not None:
            raise WrongState(f"this Evaluator cannot be used here: {self._why_foreign}")

    def _check_open(self) -> None:
        self._check_owner()
        if self._closed:
            raise WrongState("this Evaluator is closed; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _refuse_unsupported(unsupported: Mapping[str, Any], backend: Any) -> None:
    """Raise for unknown options, and for options of TorchRL's `Evaluator` that this one lacks."""
    unknown = [name for name in unsupported if name not in _UnsupportedOptions.__annotations__]
    if unknown:
        known = inspect.signature(Evaluator).parameters.keys() - {"unsupported"}
        hint = "; did you mean 'num_trajectories'?" if "episodes" in unknown[0] else nearest(unknown[0], known)
        raise WrongArgument(f"Evaluator has no option {unknown[0]!r}{hint}")
    given = [name for name, value in unsupported.items() if value is not None]
    if given or (isinstance(backend, str) and backend == "ray"):
        wrong = (given or ["backend='ray'"])[0]
        raise UsageError(f"Evaluator does not support {wrong}; its backends are 'thread' and 'process'")


def _takes_env(factory: Callable[..., Any]) -> bool:
    """Return whether a policy factory takes the env: whether it has a required parameter."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    must = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in must and one.default is inspect.Parameter.empty for one in parameters)


@contextlib.contextmanager
def _in_eval_mode(policy: Any) -> Iterator[None]:
    """Put a policy's modules into evaluation mode for the block, and back into their former modes after it."""
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    modes = [module.training for module in modules]
    if isinstance(policy, nn.Module):
        policy.eval()
    try:
        yield
    finally:
        for module, mode in zip(modules, modes):
            module.training = mode


def _reward_in(episodes: TensorDictBase, wanted: Key) -> Key:
    """Return the key of the reward in these episodes: the one that was named, or by default the only one there is."""
    found = [key for key in map(as_key, episodes.keys(True, True)) if key[0] == "next" and key[-1] == _REWARD[-1]]
    if any(episodes.get(key, None) is not None for key in (wanted, _SUMMED)):
        return wanted
    if wanted != _REWARD or len(found) != 1:
        raise UsageError(
            f"Evaluator: the episodes have no {wanted}; name the reward's key with reward_keys=…. Rewards found: "
            f"{found or 'none'}"
        )
    return found[0]


def _returns_and_lengths(episodes: TensorDictBase, reward: Key) -> tuple[list[float], list[float]]:
    """Compute the return and the length of each episode."""
    mask = own_entry(episodes, MASK)
    if mask is None:
        sizes = episodes.get(TRAJ_IDS).unique_consecutive(return_counts=True)[1].tolist()
        rows = list(episodes.split(sizes))
    else:
        rows = [one[: int(frames)] for one, frames in zip(episodes, mask.sum(-1))]
    returns = []
    for one in rows:
        summed = one.get(_SUMMED, None)
        value = one.get(reward).sum(0) if summed is None else summed[-1]
        returns.append(float(value.double().mean()))
    return returns, [float(len(one)) for one in rows]


def _as_tensor(value: Any) -> torch.Tensor:
    found = torch.as_tensor(value)
    return found.float() if found.dtype is torch.float64 else found


def record_video(
    env: Any,
    policy: Any,
    path: Any,
    *,
    episodes: int = 1,
    max_steps: int | None = None,
    deterministic: bool = True,
    seed: int | None = None,
    fps: float | None = None,
) -> dict[str, Any]:
    """Film a policy playing whole episodes; return their metrics by name, and the path of the video.

    >>> record_video("CartPole-v1", policy, "play.mp4")["reward"]

    Args:
        env: a Gymnasium id, an env made with `render_mode="rgb_array"`, a `GymEnv` of one, or a factory of either.
        policy: as for `Collector`; None plays random actions. It plays deterministically, in evaluation mode; a warning
            says so if it samples nevertheless.
        path: the mp4 file.
        episodes: how many episodes, one after another in one video.
        max_steps: cut episodes after this many steps.
        deterministic: False: the policy samples as in training.
        seed: seeds the env and the policy's noise. The random generators of your program are restored afterwards.
        fps: frames per second; None: what the env says.
    """
    kind = InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
    before = None if seed is None else generators()
    playing = Evaluator(
        functools.partial(filmed, for_workers(env)),
        RandomPolicy() if policy is None else policy,
        num_trajectories=episodes,
        max_steps=max_steps,
        exploration_type=kind,
        log_prefix="video",
    )
    try:
        with playing:
            film = _only_film(playing._player.collector)
            if seed is not None:
                playing._player.collector.set_seed(seed)
            film.begin(episodes)
            found = playing.evaluate()
            place = film.dump(path, fps)
    finally:
        if before is not None:
            set_generators(before)
    return {name.removeprefix("video/"): value for name, value in found.items() if name != "video/step"} | {
        "video": str(place)
    }


def _only_film(collector: Any) -> FilmedEnv:
    """Return the one filmed env; raise if there are more lanes, whose episodes nobody would see."""
    lanes = collector.env
    if lanes.spec.lanes > 1:
        raise UsageError(
            f"record_video films one lane, but this env has {lanes.spec.lanes}; give a factory of a single env, "
            f"or Evaluator(video_dir=…), which films the first lane"
        )
    (film,) = films_of(lanes)
    return film
