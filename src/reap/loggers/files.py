"""Loggers to CSV and JSON lines files, which need no other library. Videos are mp4 files beside them."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from reap.errors import WrongState
from reap.loggers.base import Logger, summary_of
from reap.video import write_video

Histograms = dict[str, np.ndarray[Any, Any]]


class JSONLLogger(Logger):
    """Writes a line of JSON per call: step, seconds since the start, scalars, histograms and paths of videos.

    >>> logger = JSONLLogger("runs/first")           # runs/first/log.jsonl

    A later run in the same directory is appended to the file.
    """

    def __init__(self, directory: Any) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = (self.directory / "log.jsonl").open("a", encoding="utf-8")
        self._began = time.monotonic()

    def _log(self, step: int, scalars: dict[str, float], videos: dict[str, Any], histograms: Histograms) -> None:
        _check_open(self, self._file)
        row: dict[str, Any] = {"step": step, "seconds": round(time.monotonic() - self._began, 3)}
        # JSON has no NaN or infinity: readers fail on them.
        row |= {name: value if math.isfinite(value) else str(value) for name, value in scalars.items()}
        for name, values in histograms.items():
            counts, edges = np.histogram(values, bins=30)
            row[name] = {"counts": counts.tolist(), "edges": edges.tolist()}
        row |= {name: str(_video(self.directory, name, step, video, self.fps)) for name, video in videos.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()  # so that the file is complete if the run is killed

    def close(self) -> None:
        self._file.close()


class CSVLogger(Logger):
    """Writes a row per call, with a column per name. Histograms are written as mean and quantiles.

    >>> logger = CSVLogger("runs/first")             # runs/first/log.csv

    A new name adds a column: the whole file is rewritten and replaced.
    """

    def __init__(self, directory: Any) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._path = self.directory / "log.csv"
        self._names: list[str] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                self._names = next(csv.reader(file), [])
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._began = time.monotonic()

    def _log(self, step: int, scalars: dict[str, float], videos: dict[str, Any], histograms: Histograms) -> None:
        _check_open(self, self._file)
        row: dict[str, Any] = {"step": step, "seconds": round(time.monotonic() - self._began, 3), **scalars}
        for name, values in histograms.items():
            row |= summary_of(name, values)
        row |= {name: _video(self.directory, name, step, video, self.fps) for name, video in videos.items()}
        new = [name for name in row if name not in self._names]
        if new:
            self._add_columns(new)
        csv.writer(self._file).writerow([row.get(name, "") for name in self._names])
        self._file.flush()

    def _add_columns(self, new: list[str]) -> None:
        self._file.close()
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        self._names += new
        fresh = self._path.with_suffix(".csv.new")
        with fresh.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self._names, *([*row, *[""] * (len(self._names) - len(row))] for row in rows)])
        os.replace(fresh, self._path)
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


class SeveralLoggers(Logger):
    """Logs to several loggers at once.

    >>> logger = SeveralLoggers(CSVLogger("runs/first"), TensorBoardLogger("runs/first"))
    """

    def __init__(self, *loggers: Logger) -> None:
        self._loggers = loggers

    def _log(self, step: int, scalars: dict[str, float], videos: dict[str, Any], histograms: Histograms) -> None:
        for logger in self._loggers:
            logger.log(step, scalars, videos, histograms)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all of them, even if one fails
            for logger in self._loggers:
                stack.callback(logger.close)


def _check_open(logger: Logger, file: TextIO) -> None:
    if file.closed:
        raise WrongState(
            f"this {type(logger).__name__} is closed; a new one with the same directory appends to its file"
        )


def _video(directory: Path, name: str, step: int, video: Any, fps: float) -> Path:
    place = Path("videos") / f"{name.replace('/', '_')}_{step}.mp4"
    write_video(directory / place, video, fps)
    return place
