"""The runner: prints the scoreboard, and writes it as JSON with the machine, versions and commit it was made on."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from benchmarks import __doc__ as ABOUT
from benchmarks import machine
from benchmarks.board import ALL, HAND, QUICK, REAP, SCOREBOARD, TORCHRL, Missing, Ratio, Row, Workload
from benchmarks.catalogue import workloads

FIRST = (TORCHRL, REAP, HAND)  # columns of their own; other systems are told by name


def figure(value: float) -> str:
    if value >= 1e7:
        return f"{value / 1e6:,.0f}M"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def told(row: Row) -> str:
    """One line of the board: figures, then ratios with aims."""
    columns = "".join(f"{figure(row.figures[who]) if who in row.figures else '–':>11}" for who in FIRST)
    parts = []
    for who, ratio in row.ratios.items():
        aim = ""
        if ratio.aim is not None:
            aim = f" {'≤' if ratio.at_most else '≥'} {ratio.aim:g} {'ok' if ratio.met else 'MISSED'}"
        parts.append(f"{who} {ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f}){aim}")
    others = [f"{who} {figure(value)}" for who, value in row.figures.items() if who not in FIRST]
    more = f"   [{', '.join(others)}]" if others else ""
    return f"{row.name:52}{columns} {row.unit:9} {'; '.join(parts)}{more}{'   ' + row.note if row.note else ''}"


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """What C libraries write to stderr while they are loaded is nobody's figure."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def chosen(given: argparse.Namespace) -> list[Workload]:
    words = [word.lower() for word in given.only]
    found = []
    for one in workloads():
        text = f"{one.group}: {one.name}".lower()
        if all(word in text for word in words) and (given.all or given.only or one.board):
            found.append(one)
    return found


def run(these: Sequence[Workload], budget: Any, save: Callable[[list[Row], dict[str, str]], None]) -> None:
    """Print and save line by line: the rows so far, and those that failed or had to be left out, with the reason."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    group = ""
    for workload in these:
        if workload.group != group:
            group = workload.group
            print(f"\n{group:52}{''.join(f'{who:>11}' for who in FIRST)}           reap beside", flush=True)
        reason = None
        try:
            with hushed():
                found = workload.rows(budget)
        except (Missing, ImportError, gym.error.DependencyNotInstalled) as missing:
            reason = f"not installed: {missing}"
        except Exception as error:
            traceback.print_exc()
            reason = f"failed: {error!r}"
        if reason is None:
            rows += found
            print("\n".join(map(told, found)), flush=True)
        else:
            left_out[f"{workload.group}: {workload.name}"] = reason
            print(f"{workload.name:52} left out: {reason.splitlines()[0]}", flush=True)
        save(rows, left_out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="everything, with peers, longer")
    parser.add_argument("--quick", action="store_true", help="shortest batches, two rounds: does it run?")
    parser.add_argument("--only", nargs="+", default=[], help="workloads whose group or name holds all these words")
    parser.add_argument("--json", type=Path, default=Path("bench-results/board.json"), help="where the figures go")
    parser.add_argument("--seconds", type=float, help="of each half of a race; more of them, less noise")
    parser.add_argument("--frames", type=int, help="of each training script, end to end: as many as it takes to learn")
    parser.add_argument("--list", action="store_true", help="print the names and aims, run nothing")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    these = chosen(given)
    if given.list:
        for one in these:
            aims = ", ".join(f"{who} {aim:g}" for who, aim in one.aims.items())
            print(f"{'board' if one.board else 'all':6} {one.group}: {one.name}   {aims}")
        return 0
    if not these:
        parser.error(f"no workload holds {' '.join(given.only)!r}; --list tells their names")
    record: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "kind": "quick" if given.quick else "all" if given.all else "board",
        "machine": machine.describe(),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }
    began = time.perf_counter()
    given.json.parent.mkdir(parents=True, exist_ok=True)

    def save(rows: list[Row], left_out: dict[str, str]) -> None:
        record["load_after"] = machine.describe()["load"]
        record["seconds"] = round(time.perf_counter() - began, 1)
        record["left_out"], record["rows"] = left_out, [row.to_json() for row in rows]
        given.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        budget = replace(QUICK if given.quick else ALL if given.all else SCOREBOARD, frames=given.frames)
        run(these, budget if given.seconds is None else replace(budget, seconds=given.seconds), save)
    finally:
        torch.set_num_threads(threads)
    told_aims = [ratio for row in record["rows"] for ratio in row["ratios"].values() if ratio["aim"] is not None]
    met = sum(Ratio(**ratio).met for ratio in told_aims)
    load = record["machine"]["load"]
    print(
        f"\n{met} of {len(told_aims)} aims met, {len(record['left_out'])} left out, {record['seconds']:.0f} s", end=""
    )
    print(f"; load {load:.1f} before it began" + (": NOT QUIET" if load > 0.5 else ""))
    print(given.json)
    return int(any(reason.startswith("failed") for reason in record["left_out"].values()))


if __name__ == "__main__":
    sys.exit(main())
