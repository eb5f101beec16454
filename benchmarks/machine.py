"""What a run was made on: nobody can read a figure without it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "tensordict", "torchrl", "gymnasium", "numpy", "mujoco", "ale-py", "envpool", "pettingzoo", "ray")
ROOT = Path(__file__).parent.parent


def describe() -> dict[str, Any]:
    """The machine and its load now."""
    model = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": model, "cores": cores, "system": platform.platform(), "load": round(os.getloadavg()[0], 2)}
    found["of"] = os.cpu_count()  # cores in all: the load is theirs
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """The commit, and whether anything was changed since."""

    def git(*words: str) -> str:
        out = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return out.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return git("rev-parse", "--short=10", "HEAD") + (" and changes" if changed else "")
