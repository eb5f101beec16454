"""Videos: frames of an env as an mp4 file, and envs that film themselves while a policy plays."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec as Registered

from reap.errors import MissingDependency, SpecMismatch, UsageError, missing

_FPS = 30  # for envs that do not say how fast they are


def as_frames(video: Any) -> np.ndarray[Any, Any]:
    """Return a video as bytes `[T, H, W, 3]`, from an array, a tensor, a list of frames or a file."""
    if isinstance(video, (str, Path)):
        return read_video(video)
    if isinstance(video, (list, tuple)):
        video = np.stack([np.asarray(frame) for frame in video]) if len(video) else np.zeros((0, 2, 2, 3), np.uint8)
    frames = video.detach().cpu().numpy() if isinstance(video, torch.Tensor) else np.asarray(video)
    if frames.ndim == 5 and len(frames) == 1:  # a batch of one, as some loggers expect it
        frames = frames[0]
    if frames.ndim == 3:
        frames = frames[..., None]
    if frames.ndim != 4:
        raise SpecMismatch(f"a video is [time, height, width, channels], got {list(frames.shape)}")
    if frames.shape[-1] not in (1, 3) and frames.shape[1] in (1, 3):
        frames = frames.transpose(0, 2, 3, 1)
    if frames.shape[-1] not in (1, 3):
        raise SpecMismatch(f"a video has 1 or 3 channels, got {list(frames.shape)}")
    if np.issubdtype(frames.dtype, np.floating):  # values between 0 and 1
        frames = (frames.clip(0, 1) * 255).round()
    return np.ascontiguousarray(np.broadcast_to(frames, (*frames.shape[:3], 3)), dtype=np.uint8)


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise missing("av", "video") from None
    return av


def read_video(path: Any) -> np.ndarray[Any, Any]:
    """Return the frames of a file, `[T, H, W, 3]`."""
    with _av().open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def write_video(path: Any, video: Any, fps: float = _FPS) -> Path:
    """Write frames as an H.264 mp4 file that browsers play."""
    av = _av()
    frames = as_frames(video)
    if not len(frames):
        raise UsageError(f"there is no frame to write to {path}")
    # The codec halves the resolution of colours, so sizes must be even: an odd row or column is doubled.
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(place), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "20"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return place


class FilmedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A Gymnasium env that records its rendered frames, episode by episode."""

    def __init__(self, env: gym.Env[Any, Any], wanted_by: str = "record_video") -> None:
        super().__init__(env)
        if env.render_mode != "rgb_array":
            raise UsageError(
                f"{wanted_by}: a video needs an env that draws itself: make it with render_mode='rgb_array' (it has "
                f"{env.render_mode!r}), or give the id and leave that to reap"
            )
        self.fps = float(env.metadata.get("render_fps") or _FPS)
        self._episodes: list[list[Any]] = []
        self._wanted = 0

    def begin(self, episodes: int) -> None:
        """Film the next `episodes` episodes."""
        self._episodes, self._wanted = [], episodes

    def reset(self, **options: Any) -> Any:
        out = self.env.reset(**options)
        if self._episodes and len(self._episodes[-1]) == 1:
            self._episodes.pop()  # it was reset without a step
        if len(self._episodes) < self._wanted:
            self._episodes.append([self._look()])
        else:
            self._wanted = 0  # the requested episodes are complete
        return out

    def step(self, action: Any) -> Any:
        out = self.env.step(action)
        if self._wanted:
            self._episodes[-1].append(self._look())
        return out

    def _look(self) -> Any:
        try:
            return self.env.render()
        except gym.error.DependencyNotInstalled as cause:
            raise MissingDependency(
                f"{self.env} cannot draw itself: {cause}; pip install 'reap[video]' brings pygame, with which most draw"
            ) from cause

    def dump(self, path: Any, fps: float | None = None) -> Path:
        """Write the episodes since `begin` to one file, one after another, and discard them."""
        frames = [frame for one in self._episodes if len(one) > 1 for frame in one]
        self.begin(0)
        return write_video(path, frames, fps or self.fps)


def filmed(env: Any, wanted_by: str = "record_video") -> Any:
    """Return a registered Gymnasium env, an env, or a factory of one, as an env that films itself.

    Of a reap env with several lanes, only the first lane is filmed. Errors name `wanted_by`, the option that needs it.
    """
    made = env() if callable(env) and (isinstance(env, type) or not hasattr(env, "reset")) else env
    if isinstance(made, Registered):
        made = gym.make(made, render_mode="rgb_array")
    if isinstance(made, FilmedEnv):
        return made
    if isinstance(made, gym.Env):
        return FilmedEnv(made, wanted_by)
    lanes = getattr(made, "lanes_env", made)
    if not hasattr(lanes, "wrap_first"):
        raise UsageError(
            f"{wanted_by}: videos are made of Gymnasium envs in one process; reap cannot draw {type(made).__name__}. "
            f"Give a Gymnasium id, an env made with render_mode='rgb_array', or a GymEnv or SerialEnv of such"
        )
    if not films_of(lanes):
        lanes.wrap_first(lambda first: FilmedEnv(first, wanted_by))
    return made


def films_of(lanes: Any) -> Sequence[FilmedEnv]:
    """Return those of these lanes' envs that film themselves."""
    return [one for one in getattr(lanes, "envs", ()) if isinstance(one, FilmedEnv)]
