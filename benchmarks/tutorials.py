"""Learning curves of the tutorials, from the scripts that their pages show.

python -m benchmarks.tutorials [ppo-torchrl dqn …]      runs each as it stands and draws docs/images/curve-….svg
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
LINE = re.compile(r"^ *([\d,]+) (frames|updates) +return +(-?[\d.]+)$", re.M)
# Lines in place of a progress bar, for scripts that show one.
LINES = """
from reap.collectors import BaseCollector


def progress(self, *_, **__):
    for batch in self:
        yield batch
        stats = self.stats()
        if stats["mean_return"] is not None:
            print(f"{stats['frames']} frames   return {stats['mean_return']:.1f}")


BaseCollector.progress = progress
"""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 260, 56, 38, 34


def script(page: str) -> str:
    """The one program that a tutorial shows."""
    found: list[str] = re.findall(r"```python\n(.*?)```", (DOCS / "tutorials" / f"{page}.md").read_text(), re.S)
    return max(found, key=len)


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two."""
    step = 10.0 ** len(str(int((high - low) / 5))) / 10
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
    first = -(-low // step) * step
    return [first + i * step for i in range(int((high - first) / step) + 1)]


def curve(title: str, points: Sequence[tuple[float, float]], unit: str) -> str:
    """An SVG of mean return over frames, or updates."""
    most = max(x for x, _ in points)
    low, high = min(0.0, *(y for _, y in points)), max(0.0, *(y for _, y in points))
    high += (high - low) * 0.05

    def place(x: float, y: float) -> tuple[float, float]:
        across, down = WIDTH - LEFT - 20, HEIGHT - BOTTOM - TOP
        return LEFT + x / most * across, TOP + (high - y) / (high - low) * down

    drawn = []
    for y in ticks(low, high):
        _, at = place(0, y)
        drawn.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - 20}" y2="{at:.1f}" stroke="#ddd"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y:,.0f}</text>')
    for x in ticks(0, most):
        at, _ = place(x, 0)
        label = f"{x / 1000:,.0f}k" if x else "0"
        drawn.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in points))
    drawn.append(f'<polyline points="{line}" fill="none" stroke="#00796b" stroke-width="2.5" stroke-linejoin="round"/>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="#333">'
    words = f'<text x="{LEFT - 8}" y="18" font-size="14">{html.escape(title)}</text>'
    under = f'<text x="{WIDTH - 20}" y="{HEIGHT - 4}" text-anchor="end">{unit}</text>'
    return "\n".join([head, '<rect width="100%" height="100%" rx="6" fill="white"/>', words, under, *drawn, "</svg>"])


def main(pages: Sequence[str]) -> None:
    for page in pages or sorted(path.stem for path in (DOCS / "tutorials").glob("*.md") if path.stem != "index"):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", LINES + script(page)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{page}:\n{done.stderr}")
        points = [(float(x.replace(",", "")), float(y)) for x, _, y in LINE.findall(done.stdout)]
        unit = LINE.findall(done.stdout)[0][1]
        heading = (DOCS / "tutorials" / f"{page}.md").read_text().partition("\n")[0].removeprefix("# ")
        (DOCS / "images" / f"curve-{page}.svg").write_text(curve(f"{heading}: mean return", points, unit) + "\n")
        print(f"{page}: {points[-1][1]:.1f} after {points[-1][0]:,.0f} {unit}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
