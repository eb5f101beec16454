"""docs/benchmarks.md, its charts and the tables in other pages, from the JSON of runs.

    python -m benchmarks.report [benchmarks/results/*.json]      writes them
    python -m benchmarks.report --check                          says which are not what the JSON makes

Later runs win where two tell of the same workload. Another page asks for the ratios of a group by two comments; what is
between them stays until there is a run on a quiet machine:

    <!-- benchmarks: TorchRL's scripts -->
    …
    <!-- end -->
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.board import HAND, REAP, TORCHRL, Row

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = Path("docs/benchmarks.md")
LEADING = (TORCHRL, REAP, HAND)
GREEN, RED, GREY = "#2f7d4f", "#c46a3a", "#8a8a8a"
INTRO = """# Benchmarks

This page is made from `benchmarks/results/*.json` by `python -m benchmarks.report`; a test says if it is not.

```
make bench                            the scoreboard, at most six minutes; figures in bench-results/board.json
make bench-all                        everything, with peers
python -m benchmarks --only atari     what holds this in its group or name
python -m benchmarks --list           what there is
```

Systems take turns inside one run. A ratio is the median over the rounds of paired timings: how many times as fast reap
is. In brackets are its quartiles, in bold what misses its aim. The loop by hand is what an expert would write for just
this case: preallocated arrays, the same columns, `torch.inference_mode`, one thread. Frames per second vary with the
machine and the minute, ratios to the loop by about 5% between runs, those to TorchRL by 15%.
"""


# ---- words ----------------------------------------------------------------------------------------------------------


QUIET = 0.35  # load for each core before a run, above which others computed


def number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.3g} million"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio_words(row: Row, who: str) -> str:
    """As `0.92 (0.90–0.94), aim 0.85`."""
    if who not in row.ratios:
        return "–"
    ratio = row.ratios[who]
    times = "×" if ratio.value >= 2 and not ratio.at_most else ""
    value = f"{ratio.value:.1f}{times}" if ratio.value >= 10 else f"{ratio.value:.2f}{times}"
    spread = f" ({ratio.low:.1f}–{ratio.high:.1f})" if ratio.value >= 10 else f" ({ratio.low:.2f}–{ratio.high:.2f})"
    text = (value if ratio.met else f"**{value}**") + (spread if ratio.low != ratio.high else "")
    if ratio.aim is not None:
        text += f", aim {'at most ' if ratio.at_most else ''}{ratio.aim:g}"
    return text


def table(rows: Sequence[Row]) -> str:
    """One group as a table: figures, reap's ratios to the two who are everywhere, and to others by name."""
    theirs = any(TORCHRL in row.ratios for row in rows)
    hand = any(HAND in row.ratios for row in rows)
    counted = any(row.calls for row in rows)
    columns = ["", "figures"]
    columns += (
        ["reap / by hand"] * hand
        + ["reap / TorchRL"] * theirs
        + ["reap / others"]
        + ["Python calls per frame"] * counted
    )
    lines = []
    for row in rows:
        names = [who for who in LEADING if who in row.figures] + [who for who in row.figures if who not in LEADING]
        figures = " · ".join(f"{who} {number(row.figures[who])}" for who in names) + f" {row.unit}"
        others = "; ".join(f"{who} {ratio_words(row, who)}" for who in row.ratios if who not in LEADING)
        cells = [row.name + (f" ({row.note})" if row.note else ""), figures]
        cells += [ratio_words(row, HAND)] * hand + [ratio_words(row, TORCHRL)] * theirs + [others or "–"]
        if counted:
            cells.append(" · ".join(f"{who} {row.calls[who]:.0f}" for who in names if who in row.calls) or "–")
        lines.append(cells)
    keep = [i for i, name in enumerate(columns) if name != "reap / others" or any(cells[i] != "–" for cells in lines)]
    shown = [[cells[i] for i in keep] for cells in [columns, ["---"] * len(columns), *lines]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in shown)


def short_table(rows: Sequence[Row]) -> str:
    """One group as other pages show it: reap's ratios, no more."""

    def word(row: Row, who: str) -> str:
        if who not in row.ratios:
            return "–"
        value = row.ratios[who].value
        return f"{value:.1f}×" if who == TORCHRL else f"{value:.2f}"

    columns = [who for who in (HAND, TORCHRL) if any(who in row.ratios for row in rows)]
    lines = [["", *(f"reap / {who}" for who in columns)], ["---"] * (1 + len(columns))]
    lines += [[row.name, *(word(row, who) for who in columns)] for row in rows if row.ratios.keys() & {*columns}]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# ---- charts ---------------------------------------------------------------------------------------------------------


def chart(title: str, rows: Sequence[Row]) -> str:
    """An SVG: a bar for reap and for TorchRL in each row, the loop by hand at 1; the mark is the aim."""
    bars, top, left, wide = [], 34, 330, 420
    shown = [row for row in rows if HAND in row.ratios]
    most = max([1.2, *(row.ratios[HAND].value for row in shown)]) * 1.1
    unit = wide / most
    y = top
    for row in shown:
        ours = row.ratios[HAND]
        theirs = ours.value / row.ratios[TORCHRL].value if TORCHRL in row.ratios else None
        bars.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(row.name)}</text>')
        color = GREEN if ours.met else RED
        bars.append(f'<rect x="{left}" y="{y + 2}" width="{ours.value * unit:.1f}" height="10" fill="{color}"/>')
        bars.append(f'<text x="{left + ours.value * unit + 4:.1f}" y="{y + 11}">{ours.value:.2f}</text>')
        if theirs is not None:
            bars.append(f'<rect x="{left}" y="{y + 13}" width="{theirs * unit:.1f}" height="6" fill="{GREY}"/>')
        if ours.aim is not None:
            x = left + ours.aim * unit
            bars.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 14}" stroke="black" stroke-width="2"/>')
        y += 24
    x = left + unit
    bars.append(f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{y}" stroke="black" stroke-dasharray="4 3"/>')
    words = "frames per second, the loop by hand at 1: reap, below it TorchRL; the mark is the aim"
    size = f'width="{left + wide + 60}" height="{y + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    back = '<rect width="100%" height="100%" fill="white"/>'
    heading = f'<text x="8" y="14" font-size="13">{html.escape(title)}</text><text x="8" y="28">{words}</text>'
    return "\n".join([head, back, heading, *bars, "</svg>"]) + "\n"


# ---- pages ----------------------------------------------------------------------------------------------------------


def latest(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[Row, int]]]:
    """By group and name: the row, and the number of the run that told it."""
    found: dict[str, dict[str, tuple[Row, int]]] = {}
    for n, record in enumerate(records):
        for told in record["rows"]:
            row = Row.from_json(told)
            found.setdefault(row.group, {})[row.name] = row, n
    return found


def caveat(record: Mapping[str, Any]) -> str:
    """Why the figures of a run are not to be relied on, or nothing."""
    reasons = ["shortest batches, two rounds"] * (record["kind"] == "quick")
    machine = record["machine"]
    reasons += ["others computed meanwhile"] * (machine["load"] > QUIET * machine.get("of", machine["cores"]))
    return f"**not to be relied on: {', '.join(reasons)}**" if reasons else ""


def about(record: Mapping[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    load = f"load {machine['load']:g} before, {record['load_after']:g} after"
    doubt = f"; {caveat(record)}" if caveat(record) else ""
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    made = f"{record['when']}, `{record['kind']}`, {record['seconds']:.0f} s"
    cores = f"{machine['cores']} of {machine.get('of', machine['cores'])} cores"
    return f"{made}: {machine['cpu']}, {cores}{gpu}, {load}{doubt}; {record['commit']}; {libraries}"


def file_name(group: str) -> str:
    return "bench-" + re.sub(r"[^a-z]+", "-", group.lower()).strip("-") + ".svg"


def pages(records: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """All files the report makes, by path below the root."""
    groups = latest(records)
    made: dict[Path, str] = {}
    text = [INTRO]
    for group, found in groups.items():
        rows = [row for row, _ in found.values()]
        text.append(f"## {group[0].upper()}{group[1:]}\n\n{table(rows)}\n")
        if sum(HAND in row.ratios for row in rows) > 1:
            made[PAGE.parent / file_name(group)] = chart(group, rows)
            text.append(f"![{group}]({file_name(group)})\n")
        runs = sorted({n for _, n in found.values()})
        told = (f"{n + 1}" + (f" ({caveat(records[n])})" if caveat(records[n]) else "") for n in runs)
        text.append(f"Run {', '.join(told)}.\n")
    text.append("## Runs\n\n" + "\n".join(f"{n + 1}. {about(record)}" for n, record in enumerate(records)) + "\n")
    left = {name: why for record in records for name, why in record["left_out"].items()}
    if left:
        text.append(
            "Left out:\n\n" + "\n".join(f"- {name}: {why.splitlines()[0]}" for name, why in left.items()) + "\n"
        )
    made[PAGE] = "\n".join(text)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        where = path.relative_to(ROOT)
        old = path.read_text()
        if where != PAGE and "<!-- benchmarks:" in old:
            made[where] = filled(old, latest([record for record in records if not caveat(record)]))
    return made


def filled(page: str, groups: Mapping[str, Mapping[str, tuple[Row, int]]]) -> str:
    """A page with the tables it asks for."""

    def put(asked: re.Match[str]) -> str:
        rows = [row for row, _ in groups.get(asked[1], {}).values()]
        return f"<!-- benchmarks: {asked[1]} -->\n{short_table(rows) if rows else asked[2].strip()}\n<!-- end -->"

    return re.sub(r"<!-- benchmarks: (.*?) -->\n(.*?)<!-- end -->", put, page, flags=re.S)


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Runs, the oldest first."""
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda record: record["when"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, default=sorted(RESULTS.glob("*.json")))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    wrong = []
    for where, text in pages(read(given.runs)).items():
        path = ROOT / where
        if path.exists() and path.read_text() == text:
            continue
        wrong.append(where)
        if not given.check:
            path.write_text(text)
            print(where)
    if given.check and wrong:
        print("not what benchmarks/results makes: " + ", ".join(map(str, wrong)) + "; run python -m benchmarks.report")
    return int(given.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
