"""Progress: iterate over the batches of a collector and show how far it is.

    62%|██████▏   | 62k/100k frames · 31,402/s · return 187.3 · lag 1

Uses tqdm in terminals and notebooks, rich on request, and else a plain line every ten seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TextIO

from reap.arguments import one_of, whole
from reap.errors import WrongArgument, missing, warn

_EVERY = 10.0  # seconds between two plain lines
Show = Callable[[int, str], None]  # called with the frames so far, and a text about them


def progress(
    collector: Any,
    total: int | None = None,
    *,
    display: Literal["tqdm", "rich", "plain", "none"] | None = None,
    logger: Any = None,
    file: Any = None,
) -> Iterator[Any]:
    """Iterate over a collector's batches and show how far it is; see `BaseCollector.progress`."""
    whole("total", total, least=1, none=True)
    one_of("display", display, _DISPLAY, none=True)
    if logger is not None and not callable(getattr(logger, "log", None)):
        raise WrongArgument(f"logger needs a method log(step, scalars), as those of reap.loggers, got {logger!r}")
    end = float(collector.options.total) if total is None else float(total)
    return _batches(collector, end, display or _default_display(file), logger, sys.stderr if file is None else file)


def _batches(collector: Any, end: float, display: str, logger: Any, file: TextIO) -> Iterator[Any]:
    clock = _Clock()
    first = collector.stats()["frames"]
    with _DISPLAY[display](None if end == float("inf") else int(end), first, file) as show:
        if first >= end:
            if end != collector.options.total:  # having reached its own total needs no warning
                warn(
                    f"there is nothing to collect: {first:,} frames are made, and the total of {int(end):,} counts "
                    f"from the collector's beginning; for more, give a larger one"
                )
            return
        for batch in collector:
            scalars = clock.numbers(collector.stats(), batch)
            frames = scalars.pop("frames")
            show(frames, _summary(scalars))
            if logger is not None:
                logger.log(frames, {f"collector/{name}": value for name, value in scalars.items()})
            yield batch
            if frames >= end:
                return


def _summary(scalars: dict[str, Any]) -> str:
    """Format the numbers of a collector as half a line."""
    parts = [f"{scalars['frames_per_second']:,.0f}/s"]
    if scalars["mean_return"] is not None:
        parts.append(f"return {scalars['mean_return']:.4g}")
    if scalars["lag"] is not None:
        parts.append(f"lag {scalars['lag']:.2g}")
    return " · ".join(parts)


class _Clock:
    """Measures frames per second, including the learner's time between batches; a mean over the last few batches."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._rate = 0.0

    def numbers(self, stats: dict[str, Any], batch: Any) -> dict[str, Any]:
        now, frames = time.perf_counter(), int(stats["frames"])
        if self._last is not None and now > self._last[0]:
            rate = (frames - self._last[1]) / (now - self._last[0])
            self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
        self._last = now, frames
        return {
            "frames": frames,
            "frames_per_second": self._rate or stats["frames_per_second"],
            "mean_return": stats["mean_return"],
            "mean_length": stats["mean_length"],
            "episodes": stats["episodes"],
            "lag": _lag(batch, stats["policy_version"]),
        }


def _lag(batch: Any, version: int) -> float | None:
    """Return by how many updates the batch's weights are behind, on average; None if frames carry no policy version."""
    versions = None if batch is None else batch.get("policy_version", None)
    return None if versions is None or not versions.numel() else float(version - versions.double().mean())


def _default_display(file: Any) -> str:
    """Return the display that suits the output: a bar where one can be drawn, else plain lines."""
    drawn = "ipykernel" in sys.modules or (
        (sys.stderr if file is None else file).isatty() and os.environ.get("TERM") != "dumb"
    )
    return "tqdm" if drawn and importlib.util.find_spec("tqdm") is not None else "plain"


@contextlib.contextmanager
def _tqdm(total: int | None, first: int, file: TextIO) -> Iterator[Show]:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise missing("tqdm", "progress") from None
    own = {} if file is sys.stderr else {"file": file}  # only if it is not the default: a notebook's bar takes no file
    with tqdm(total=total, initial=first, unit=" frames", unit_scale=True, **own) as bar:

        def show(frames: int, text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(frames - bar.n)

        yield show


@contextlib.contextmanager
def _rich(total: int | None, first: int, file: TextIO) -> Iterator[Show]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        raise missing("rich", "progress") from None
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("frames {task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=file)) as bar:
        task = bar.add_task("", total=total, completed=first, text="")
        yield lambda frames, text: bar.update(task, completed=frames, text=text)


@contextlib.contextmanager
def _plain(total: int | None, first: int, file: TextIO) -> Iterator[Show]:
    last, said = time.monotonic(), ""

    def show(frames: int, text: str) -> None:
        nonlocal last, said
        said = f"{frames:,} frames{f' ({frames / total:.0%})' if total else ''} · {text}"
        if time.monotonic() - last >= _EVERY:
            last = time.monotonic()
            print(said, file=file, flush=True)
            said = ""

    try:
        yield show
    finally:
        if said:
            print(said, file=file, flush=True)


_DISPLAY: dict[str, Callable[[int | None, int, TextIO], contextlib.AbstractContextManager[Show]]] = {
    "tqdm": _tqdm,
    "rich": _rich,
    "plain": _plain,
    "none": lambda *_: contextlib.nullcontext(lambda frames, text: None),
}
