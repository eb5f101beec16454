"""MLflowLogger: logs to an MLflow run on a tracking server or in a local store."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reap.errors import missing
from reap.loggers.base import Logger, summary_of
from reap.video import write_video


class MLflowLogger(Logger):
    """Logs to an MLflow run. Histograms are logged as mean and quantiles, videos as artifacts.

    >>> logger = MLflowLogger("my-experiment", tracking_uri="sqlite:///mlflow.db")

    Args:
        experiment: the experiment's name; it is created if it does not exist.
        name: the run's name.
        config: parameters to store with the run.
        tracking_uri: the server or the store; None: MLflow's own setting.
    """

    def __init__(
        self,
        experiment: str,
        name: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError:
            raise missing("mlflow", "mlflow") from None
        self._client, self._metric = MlflowClient(tracking_uri), Metric  # no global state: runs may be parallel
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self.run_id: str = self._client.create_run(number, run_name=name).info.run_id
        self._open = True
        for key, value in (config or {}).items():
            self._client.log_param(self.run_id, key, value)

    def _log(
        self, step: int, scalars: dict[str, float], videos: dict[str, Any], histograms: dict[str, np.ndarray[Any, Any]]
    ) -> None:
        numbers = dict(scalars)
        for name, values in histograms.items():
            numbers |= summary_of(name, values)
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics)
        with tempfile.TemporaryDirectory() as place:
            for name, video in videos.items():
                path = write_video(Path(place) / f"{name.replace('/', '_')}_{step}.mp4", video, self.fps)
                self._client.log_artifact(self.run_id, str(path), "videos")

    def close(self) -> None:
        if self._open:
            self._open = False
            self._client.set_terminated(self.run_id)
