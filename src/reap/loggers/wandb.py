"""WandbLogger: logs to a run of Weights & Biases, online, or offline in a directory for `wandb sync`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reap.errors import missing
from reap.loggers.base import Logger
from reap.video import write_video


class WandbLogger(Logger):
    """Logs to a Weights & Biases run.

    >>> logger = WandbLogger("my-project", mode="offline", directory="runs/first")

    Args:
        project: the project's name.
        name: the run's name.
        config: values to store with the run.
        mode: "online", "offline" or "disabled"; None: W&B's own setting.
        directory: where W&B keeps its files; None: the working directory.
        options: further arguments of `wandb.init`.
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        mode: str | None = None,
        directory: Any = None,
        **options: Any,
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise missing("wandb", "wandb") from None
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        settings = {"project": project, "name": name, "config": dict(config or {}), "mode": mode, **options}
        self.run: Any = wandb.init(dir=None if directory is None else str(directory), **settings)

    def _log(
        self, step: int, scalars: dict[str, float], videos: dict[str, Any], histograms: dict[str, np.ndarray[Any, Any]]
    ) -> None:
        row: dict[str, Any] = dict(scalars)
        row |= {name: self._wandb.Histogram(values) for name, values in histograms.items()}
        with tempfile.TemporaryDirectory() as place:
            for number, (name, video) in enumerate(videos.items()):
                path = write_video(Path(place) / f"{number}.mp4", video, self.fps)
                row[name] = self._wandb.Video(str(path), format="mp4")
            self.run.log(row, step=step)

    def close(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish()
