"""The benchmark as a picture: one bar per case, the hand-written loop at 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Frames per second of reap and TorchRL as a fraction of the hand-written loop's."""
    labels = [f"{r['case']}\n{r['policy']} policy" for r in results]
    ours = [r["reap_to_hand"] for r in results]
    theirs = [r["reap_to_hand"] / r["reap_to_torchrl"] if "reap_to_torchrl" in r else 0.0 for r in results]
    rows = range(len(results))
    figure, axes = plt.subplots(figsize=(9, 0.62 * len(results) + 1.2))
    axes.barh([y - 0.2 for y in rows], ours, 0.38, color="#2f7d4f", label="reap")
    axes.barh([y + 0.2 for y in rows], theirs, 0.38, color="#c46a3a", label="TorchRL 0.14.1")
    for y, (a, b) in enumerate(zip(ours, theirs)):
        axes.text(a + 0.01, y - 0.2, f"{a:.2f}", va="center", fontsize=8)
        axes.text(b + 0.01, y + 0.2, f"{b:.3f}", va="center", fontsize=8)
    axes.axvline(1.0, color="black", lw=1, ls="--")
    axes.set_yticks(list(rows), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("frames per second, hand-written loop = 1")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_doors(results: list[dict[str, Any]], path: Path) -> None:
    """reap's speed at every door as a fraction of its contender's, and the target as a mark."""
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(results) + 1.2))
    for y, r in enumerate(results):
        axes.barh(y, r["ratio"], 0.6, color="#2f7d4f" if r["ratio"] >= r["target"] else "#c46a3a")
        axes.plot([r["target"]] * 2, [y - 0.4, y + 0.4], color="black", lw=2)
        axes.text(r["ratio"] * 1.03, y, f"{r['ratio']:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(results)), [f"{r['case']}\nover {r['over']}" for r in results], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(0.5, max([2.0, *(2 * r["ratio"] for r in results)]))
    axes.invert_yaxis()
    axes.set_xlabel("frames per second, contender = 1; the mark is the target")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_multi(results: list[dict[str, Any]], path: Path) -> None:
    """The same for several processes: above, what should be high; below, what should be low."""
    high = [r for r in results if not r.get("at_most")]
    low = [r for r in results if r.get("at_most")]
    figure, both = plt.subplots(
        2, 1, figsize=(9, 0.45 * len(results) + 2.4), height_ratios=[max(1, len(high)), max(1, len(low))]
    )
    for axes, shown, words in zip(both, (high, low), ("contender = 1, logarithmic", "at most the mark")):
        for y, r in enumerate(shown):
            met = r["target"] is None or (r["ratio"] <= r["target"] if shown is low else r["ratio"] >= r["target"])
            axes.barh(y, r["ratio"], 0.6, color="#2f7d4f" if met else "#c46a3a")
            if r["target"] is not None:
                axes.plot([r["target"]] * 2, [y - 0.4, y + 0.4], color="black", lw=2)
            axes.text(r["ratio"], y, f" {r['ratio']:.2f}", va="center", fontsize=8)
        axes.set_yticks(range(len(shown)), [f"{r['case']}\nover {r['over']}" for r in shown], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(words)
    if high:
        both[0].set_xscale("log")
        both[0].set_xlim(0.4, max([2.0, *(2 * r["ratio"] for r in high)]))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_gpu(measured: dict[str, Any], path: Path) -> None:
    """Frames per second by hand and with reap, logarithmic."""
    results = measured["results"]
    figure, axes = plt.subplots(figsize=(9, 0.62 * len(results) + 1.2))
    for shift, who, color in ((-0.2, "hand", "#8a8a8a"), (0.2, "reap", "#2f7d4f")):
        fps = [r["frames_per_second"][who] for r in results]
        axes.barh([y + shift for y in range(len(results))], fps, 0.38, color=color, label=who)
        for y, value in enumerate(fps):
            axes.text(value * 1.05, y + shift, f"{value:,.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(results)), [f"{r['case']}\nratio {r['ratio']:.2f}" for r in results], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(1e4, 2e10)
    axes.invert_yaxis()
    axes.set_xlabel(f"frames per second, {measured['device']}, torch {measured['torch']}")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
