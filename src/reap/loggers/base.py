"""The interface of loggers: `log(step, scalars, videos, histograms)` and `close`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from reap.errors import WrongArgument

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


class Logger(ABC):
    """Logs the numbers, videos and histograms of a run. The base class of all loggers.

    >>> with CSVLogger("runs/first") as logger:
    ...     logger.log(step, {"return": 12.0}, histograms={"action": batch["action"]})
    """

    fps = 30.0  # frame rate of logged videos

    def log(
        self,
        step: int,
        scalars: Mapping[str, Any] | None = None,
        videos: Mapping[str, Any] | None = None,
        histograms: Mapping[str, Any] | None = None,
    ) -> None:
        """Log values of this step.

        Args:
            step: usually the number of frames so far.
            scalars: numbers, or tensors of one value, by name; None values are left out.
            videos: `[time, height, width, channels]` bytes, or floats between 0 and 1, by name.
            histograms: arrays or tensors of any shape, by name; their distribution is logged.
        """
        for name, given in (("scalars", scalars), ("videos", videos), ("histograms", histograms)):
            if given is not None and not isinstance(given, Mapping):
                raise WrongArgument(f"{name} must be a mapping from names, as in log(step, scalars), got {given!r:.80}")
        try:
            step = int(step)
        except (TypeError, ValueError, RuntimeError) as cause:
            raise WrongArgument(f"step must be a whole number, as in log(step, scalars), got {step!r:.80}") from cause
        numbers = {name: as_number(name, value) for name, value in (scalars or {}).items() if value is not None}
        arrays = {name: as_values(value) for name, value in (histograms or {}).items()}
        self._log(step, numbers, dict(videos or {}), {name: one for name, one in arrays.items() if one.size})

    @abstractmethod
    def _log(
        self, step: int, scalars: dict[str, float], videos: dict[str, Any], histograms: dict[str, np.ndarray[Any, Any]]
    ) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Write what is still buffered, and close. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_number(name: str, value: Any) -> float:
    """Return a scalar of any kind as a float."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise WrongArgument(f"scalars holds {name!r}, which is not a number: {value!r:.80}") from cause


def as_values(value: Any) -> np.ndarray[Any, Any]:
    """Return the finite numbers of an array or tensor as a flat array."""
    array = value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else np.asarray(value, np.float64)
    flat = array.reshape(-1)
    finite: np.ndarray[Any, Any] = flat[np.isfinite(flat)]
    return finite


def summary_of(name: str, values: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return mean and quantiles of a distribution, for loggers without histograms."""
    found = np.quantile(values, QUANTILES)
    labels = [f"{name}/p{math.floor(100 * q):02}" for q in QUANTILES]
    return {f"{name}/mean": float(values.mean()), **dict(zip(labels, found.tolist()))}
