"""Runs the scripts of `examples/` as a user would: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str, cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
