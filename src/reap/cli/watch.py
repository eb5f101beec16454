"""reap watch: show live in this terminal what a run is doing.

reap watch                 list your programs that have called collector.watch()
reap watch 71234           show the one with this process id
reap watch http://127.0.0.1:40213/…/
reap watch 71234 --once    show it once, for scripts; --json for programs
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.parse
from typing import Any

from reap.errors import NotReady, UsageError, missing
from reap.watching.diagnosis import PARTS
from reap.watching.registry import registered

_PATIENCE = 5.0  # seconds to wait for an answer
_BAR = 28  # characters
_COLORS = {"env": "blue", "policy": "magenta", "loop": "white", "transport": "yellow", "wait": "bright_black"}
_NAMES = {"transport": "handing over", "wait": "waiting"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "which", nargs="?", metavar="RUN", help="a process number, or the address that collector.watch() gives"
    )
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--json", action="store_true", help="look once: the view as JSON")
    parser.add_argument("--stacks", action="store_true", help="look once: where each worker is right now")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to look (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Show a run, or list those that can be watched. Return 1 if the list is empty, else 0."""
    if args.which is None:
        return _list()
    url = _address(args.which)
    if args.json or args.stacks:
        found = _get(url, "stacks" if args.stacks else "data")
        if args.json:
            print(json.dumps(found, indent=1))
        else:
            print("\n\n".join(f"{name}\n{stack}" for name, stack in found.items()))
        return 0
    return _show(url, once=args.once, every=args.every)


def _list() -> int:
    entries = registered()
    for entry in entries:
        print(f"{entry['pid']:>8}  {entry['name']}  {entry['url']}")
    if not entries:
        print("no run can be watched; call collector.watch() in a run of yours", file=sys.stderr)
    return int(not entries)


def _address(run: str) -> str:
    if run.startswith("http://"):
        return run
    if not run.isdigit():
        raise UsageError(f"run must be a process number, or the address of collector.watch(), got {run!r}")
    found = [entry["url"] for entry in registered() if entry["pid"] == int(run)]
    if not found:
        raise UsageError(f"process {run} cannot be watched: it is not yours, or has not called collector.watch()")
    return str(found[-1])


def _get(url: str, what: str) -> Any:
    """Return the JSON at this path of a run's page. No proxy is used: the page is on this machine."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PATIENCE)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/{what}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise NotReady(f"{parts.netloc} answered {answer.status} {answer.reason}; check the token in the address")
        return json.loads(answer.read())
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(f"{parts.netloc} does not answer ({error}): the run has ended") from error
    finally:
        connection.close()


def _show(url: str, *, once: bool, every: float) -> int:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise missing("rich", "progress") from None
    console = Console()
    if once:
        console.print(_renderable(_get(url, "data")))
        return 0
    try:
        with Live(_renderable(_get(url, "data")), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(_renderable(_get(url, "data")), refresh=True)
    except KeyboardInterrupt:
        return 0
    except NotReady:
        console.print("the run has ended")
        return 0


def _renderable(view: dict[str, Any]) -> Any:
    """Return a view as a renderable of rich."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    total = "" if view["total"] is None else f" of {view['total']:,.0f}"
    head = (
        f"{view['name']}, pid {view['pid']}: {view['frames']:,} frames{total}, {view['frames_per_second']:,.0f}/s; "
        f"{view['episodes']:,} episodes, return {_number(view['mean_return'])}, length {_number(view['mean_length'])}; "
        f"policy version {view['version']}, {view['restarts']} restarts, {_bytes(view['memory'])}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in (("worker", "left"), ("frames/s", "right"), ("is doing", "left"), ("time", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    table.add_column("memory", justify="right")
    for worker in view["workers"]:
        table.add_row(
            f"{worker['index']}" + (f" ({worker['pid']})" if worker["pid"] else ""),
            f"{worker['frames_per_second']:,.0f}",
            worker["doing"],
            _bar(worker["split"]),
            _bytes(worker["memory"]),
            style="" if worker["alive"] else "red",
        )
    keys = Text("  ").join(
        Text(f"■ {_NAMES.get(part, part)} {view['split'][part]:.0%}", style=_COLORS[part]) for part in PARTS
    )
    lags = sum(count for _, count in view["lags"])
    lag = "  ".join(f"{age}: {count / lags:.0%}" for age, count in view["lags"][:8]) if lags else "–"
    return Group(
        Text(head), Text(f"\n▶ {view['diagnosis']['text']}", style="bold"), table, keys, Text(f"lag (updates)  {lag}")
    )


def _bar(split: dict[str, float]) -> Any:
    from rich.text import Text

    bar, done = Text(), 0.0
    for part in PARTS:
        begin, done = round(done * _BAR), done + split[part]
        bar.append("█" * (round(done * _BAR) - begin), style=_COLORS[part])
    return bar


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _bytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.0f} MB"
