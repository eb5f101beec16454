"""reap show: describe a recorded dataset, plot it, print an episode, or write its images as a video.

reap show runs/cartpole
reap show runs/cartpole --episode 3
reap show runs/cartpole --plot returns.png
reap show runs/pong --episode 0 --play episode.mp4
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from reap.data import Dataset, load
from reap.errors import UsageError, missing
from reap.video import write_video

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60  # bars per row
_ROWS = 40  # steps of an episode that are printed: the first and the last 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("path", metavar="PATH", help="a dataset of any format that reap writes")
    parser.add_argument("--episode", type=int, help="show this one, step by step")
    parser.add_argument("--plot", metavar="FILE.png", help="returns and lengths of all episodes, drawn")
    parser.add_argument("--play", metavar="FILE.mp4", help="an episode's images as a video (default: episode 0)")
    parser.add_argument("--key", help="which entry holds the images; by default the first that looks like it")
    parser.add_argument("--fps", type=float, default=30, help="of the video (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the dataset or an episode, plot it, or write a video."""
    dataset = load(args.path)
    number = args.episode
    if number is not None and not 0 <= number < len(dataset):
        raise UsageError(f"--episode must be from 0 to {len(dataset) - 1}, got {number}")
    if args.play is not None:
        episode = dataset[number or 0]
        print(write_video(args.play, episode[_images(dataset, args.key)], args.fps))
    elif args.plot is not None:
        _plot(dataset, args.plot)
        print(args.plot)
    elif number is not None:
        _show_episode(dataset[number])
    else:
        _show_dataset(dataset)
    return 0


def returns_of(dataset: Dataset) -> list[float]:
    """Return the sum of rewards of each episode."""
    return [float(one["next", "reward"].double().sum()) for one in dataset]


def _show_dataset(dataset: Dataset) -> None:
    print(dataset)
    for name in ("created", "seed", "policy", "collector"):
        if dataset.metadata.get(name) is not None:
            print(f"  {name:12} {dataset.metadata[name]}")
    print(f"  {'versions':12} {', '.join(f'{k} {v}' for k, v in dataset.metadata['versions'].items())}")
    print()
    for column in dataset.columns:
        print(f"  {column.name:28} {str(column.dtype).removeprefix('torch.'):10} {list(column.shape)}")
    print()
    lengths = np.array(dataset.lengths, np.float64)
    rows = {"lengths": lengths}
    if any(column.key == ("next", "reward") for column in dataset.columns):
        rows["returns"] = np.array(returns_of(dataset))
    for name, values in rows.items():
        low, middle, high = np.quantile(values, [0, 0.5, 1])
        print(f"  {name:8} {low:10.4g} least {middle:10.4g} median {high:10.4g} most   {sparkline(values)}")


def sparkline(values: Any) -> str:
    """Return a series of numbers as a row of bars. Of a long series, each bar is a mean."""
    parts = [part.mean() for part in np.array_split(np.asarray(values, np.float64), min(_WIDTH, len(values)))]
    low, high = min(parts), max(parts)
    span = (high - low) or 1.0
    return "".join(_BARS[1 + round(7 * (value - low) / span)] for value in parts)


def _show_episode(episode: Any) -> None:
    wanted = (("action",), ("next", "reward"), ("next", "terminated"), ("next", "truncated"), ("observation",))
    keys = [key for key in wanted if episode.get(key, None) is not None]
    steps = len(episode)
    for step in range(steps):
        if steps > _ROWS and _ROWS // 2 <= step < steps - _ROWS // 2:
            if step == _ROWS // 2:
                print(f"  … {steps - _ROWS} more")
            continue
        parts = []
        for key in keys:
            values = episode[key][step].reshape(-1)
            shown = ", ".join(f"{value:.4g}" for value in values[:6].double().tolist())
            parts.append(f"{key[-1]} {shown}{' …' if values.numel() > 6 else ''}")
        print(f"  {step:5}  {'   '.join(parts)}")


def _images(dataset: Dataset, key: str | None) -> tuple[str, ...]:
    """Return the key of the images: a uint8 entry with a height, a width and one or three channels."""
    for column in dataset.columns:
        sides = [side for side in column.shape if side not in (1, 3)]
        drawn = str(column.dtype) == "torch.uint8" and len(column.shape) in (2, 3) and len(sides) == 2
        if column.key[0] != "next" and (column.name == key if key is not None else drawn):
            return column.key
    raise UsageError(
        f"{dataset.path} has no images to play; record_video(env, policy, path) films an env"
        if key is None
        else f"{dataset.path} has no {key!r}; it has {[column.name for column in dataset.columns]}"
    )


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure to be saved to a file; width and height are in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing("matplotlib", "demo") from None
    return Figure(figsize=(width, height))


def _plot(dataset: Dataset, path: str) -> None:
    figure = new_figure(8, 5)
    axes = figure.subplots(2, 1, sharex=True)
    for axis, name, values in zip(axes, ("return", "length"), (returns_of(dataset), dataset.lengths)):
        axis.plot(values, ".")
        axis.set_ylabel(name)
    axes[0].set_title(str(dataset.metadata.get("env") or dataset.path))
    axes[1].set_xlabel("episode")
    figure.savefig(path)
