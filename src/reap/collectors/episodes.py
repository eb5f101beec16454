"""EpisodePlayer: plays an exact number of whole episodes, in this process or in one of its own.

    collector ─► batches ─► drop rows beyond a lane's share ─► whole episodes, "padded" [n, longest] or "cat" [steps]

Each lane plays its share of the episodes and only its first ones count, so lanes with short episodes do not weigh more
than others. A rollout stops when the last wanted episode ends, wherever the other lanes are. Only lanes on a device
play the rollout to its end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from reap._foreign import torchrl_internals
from reap.collectors.multi import MultiSyncCollector
from reap.collectors.single import Collector
from reap.core.attribute_path import get_attribute
from reap.core.env import Env
from reap.core.lanes.ready import ENV_INDEX
from reap.core.quota import EpisodeQuota
from reap.core.slot import MASK, TRAJ_IDS
from reap.core.worker import Plan
from reap.envs.accept import as_env, is_env
from reap.errors import UsageError
from reap.spec import Key, as_key, own_entry
from reap.trajectories import WholeTrajectories, ended
from reap.video import films_of
from reap.weights.local import load

_PATIENCE = 1_000_000  # frames without a finished episode, after which `play` raises
_ALWAYS_KEPT = ("done", "reward")  # last parts of keys: those of agents are below the name of their group
_OWN_COUNT: Key = ("evaluator_step_count",)  # counts towards max_steps if the env has a step_count of its own


class _StopsWithEpisodes:
    """Mixin for a collector whose rollouts stop once the wanted episodes have ended."""

    _episodes: int

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def _warn_rounding(self, *_: Any, **__: Any) -> None:
        """Do not warn: the user never sees how many frames are collected at a time."""


class EpisodeCollector(_StopsWithEpisodes, Collector):
    """Plays episodes in this process."""

    def __init__(self, episodes: int, env: Any, policy: Any, **options: Any) -> None:
        self._episodes = episodes
        super().__init__(env, policy, **options)

    def _adjust_plan(self, plan: Plan) -> Plan:
        return dataclasses.replace(plan, episodes=self._episodes)


class EpisodeProcessCollector(_StopsWithEpisodes, MultiSyncCollector):
    """Plays episodes in a process of its own."""

    def __init__(self, episodes: int, env: Any, policy: Any, **options: Any) -> None:
        self._episodes = episodes
        super().__init__([env], policy, **options)

    def _plans(self, *arguments: Any) -> list[Any]:
        return [dataclasses.replace(plan, episodes=self._episodes) for plan in super()._plans(*arguments)]


class EpisodePlayer:
    """Plays `episodes` at a time with an env and a policy. `lanes`: the env, or with `process` a factory of one."""

    def __init__(
        self, lanes: Any, policy: Any, *, episodes: int, layout: str, process: bool, options: Mapping[str, Any]
    ) -> None:
        self._count, self._layout = episodes, layout
        self.collector: Collector | MultiSyncCollector
        if process:
            self.collector = EpisodeProcessCollector(episodes, lanes, policy, **{**options, "cat_results": 0})
            count = self.collector._backend.workers[0].info.lanes
        else:
            self.collector = EpisodeCollector(episodes, lanes, policy, **options)
            count = self.collector._backend.worker.lanes
        self._quota = EpisodeQuota(episodes, count)

    def canceller(self) -> Callable[[], None]:
        """Return a function that breaks off a running `play`; it may be called from any thread."""
        stop: Callable[[], None] = self.collector._backend.canceller()
        return stop

    def play(self, keys: Sequence[Key] | None = None) -> tuple[TensorDictBase, int]:
        """Reset and play; return the episodes and the number of frames. `keys`: what to keep beside done and reward."""
        self.collector.reset()
        self._quota.begin()
        whole = WholeTrajectories()
        frames = 0
        while len(whole) < self._count:
            batch = self.collector.next()
            frames += self._feed(whole, batch, keys)
            if frames > _PATIENCE and not len(whole):
                raise UsageError(f"no episode ended within {frames:,} frames; give max_steps")
        return whole.take(self._count, self._layout), frames

    def _feed(self, whole: WholeTrajectories, batch: TensorDictBase, keys: Sequence[Key] | None) -> int:
        ids = batch.get(TRAJ_IDS)
        real = (ids >= 0).reshape(-1).cpu()
        over = ended(batch.reshape(-1)).cpu() & real
        lane = own_entry(batch, ENV_INDEX)
        if lane is None:
            steps = batch.batch_size[-1]
            lane = torch.arange(len(real) // steps).repeat_interleave(steps)
        wanted = np.zeros(len(real), bool)
        made = real.numpy()
        wanted[made] = self._quota.counted(lane.reshape(-1).cpu().numpy()[made], over.numpy()[made])
        if keys is not None:
            flags = [key for key in map(as_key, batch.keys(True, True)) if key[0] == "next" and key[-1] in _ALWAYS_KEPT]
            batch = batch.select(*keys, *flags, TRAJ_IDS, ENV_INDEX, strict=False)
        kept = torch.from_numpy(wanted).reshape(ids.shape).to(ids.device)
        whole.feed(batch.exclude(MASK).set(TRAJ_IDS, torch.where(kept, ids, -1)))
        return int(made.sum())

    def load(self, path: str, weights: Any) -> None:
        """Load weights into the model at `path`: "policy", or a module of the env."""
        if path == "policy" and isinstance(self.collector, MultiSyncCollector):
            self.collector.update_policy_weights_(weights)
        else:
            self._call_with_env(functools.partial(_load_at, path=path, weights=weights))

    def check(self, path: str) -> None:
        """Raise if there is no model at `path`. With a process, only loading the weights finds that out."""
        if not isinstance(self.collector, MultiSyncCollector):
            _model_at(self.collector, path)

    def dump_videos(self, step: Any) -> None:
        """Have the video recorders of a TorchRL env write what they recorded, in the process of the env."""
        self._call_with_env(functools.partial(_dump_videos, step=step))

    def film(self, episodes: int) -> None:
        """Have every `FilmedEnv` record its next `episodes` episodes."""
        self._call_with_env(functools.partial(_film, episodes=episodes))

    def write_film(self, path: Any) -> None:
        """Write the recorded episodes to `path`, in the process of the env."""
        self._call_with_env(functools.partial(_write_film, path=path))

    def _call_with_env(self, function: Callable[[Any], Any]) -> None:
        """Call a function with the object that has the env: the collector, or the worker in the worker's process."""
        if isinstance(self.collector, MultiSyncCollector):
            self.collector.map_fn("apply", [(function,)])
        else:
            function(self.collector)


def _load_at(root: Any, path: str, weights: Any) -> None:
    load(_model_at(root, path), weights)


def _model_at(root: Any, path: str) -> nn.Module:
    try:
        found = get_attribute(root, path)
    except (AttributeError, LookupError, TypeError) as cause:
        raise UsageError(f"weights_dict names {path!r}, which is not there ({cause}); {_models_of(root)}") from cause
    if not isinstance(found, nn.Module):
        raise UsageError(f"weights_dict names {path!r}, a {type(found).__name__} without weights; {_models_of(root)}")
    return found


def _models_of(root: Any) -> str:
    known = {"policy": root.policy}
    transform = getattr(root.env, "transform", None) if isinstance(root.env, nn.Module) else None
    if isinstance(transform, nn.Module):
        known["env.transform"] = transform
        inner = getattr(transform, "transforms", ())
        known.update({f"env.transform[{n}]": one for n, one in enumerate(inner)})
    return "there are " + ", ".join(f"{path!r} ({type(one).__name__})" for path, one in known.items())


def _dump_videos(root: Any, step: Any) -> None:
    for part in modules_of(root.env):
        if type(part).__name__ == "VideoRecorder":
            part.dump(step=step)  # type: ignore[operator]


def _film(root: Any, episodes: int) -> None:
    for film in films_of(root.env):
        film.begin(episodes)


def _write_film(root: Any, path: Any) -> None:
    for film in films_of(root.env):
        film.dump(path)


def build(env: Any) -> Any:
    """Return the env: the one given, or the one that the given factory makes."""
    return env() if callable(env) and not is_env(env) else env


def lanes_of(env: Any, max_steps: int | None) -> Env:
    """Return the env's lanes, with episodes of at most `max_steps` and the statistics of VecNorm transforms frozen."""
    given = build(env)
    for part in modules_of(given):
        if type(part).__name__.startswith("VecNorm") and callable(getattr(part, "freeze", None)):
            part.freeze()  # type: ignore[operator]
    try:
        return as_env(given, None, max_steps)
    except UsageError:
        if max_steps is None:
            raise
    return as_env(given, None, max_steps, _OWN_COUNT)  # the env may have a step_count of its own


def modules_of(env: Any) -> list[nn.Module]:
    """Return the modules of a TorchRL env, and of the envs that it steps in this process."""
    if not isinstance(env, nn.Module):
        return []
    found = list(env.modules())
    for part in list(found):
        if type(part).__name__ == "SerialEnv" and part.is_closed:
            part.start()  # type: ignore[operator]  # it makes its envs only then
        for inner in torchrl_internals.serial_envs(part):
            found += modules_of(inner)
    return found
