"""Peers that cannot live beside the gymnasium and numpy the project is tested with: each in an interpreter of its own.

A script there writes "ready", then answers each line it reads with another (see pufferlib_vector.py, rllib_runners.py,
sample_factory_sampler.py).
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def opened(python: str, name: str) -> Iterator[Callable[[str], str]]:
    """The script of this name, run by that interpreter: what it answers to a line."""
    script = Path(__file__).with_name(f"{name}.py")
    child = subprocess.Popen(
        [python, "-W", "ignore", str(script)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=script.parent,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    asked, told = child.stdin, child.stdout

    def ask(question: str) -> str:
        asked.write(f"{question}\n")
        asked.flush()
        answer = told.readline()
        if not answer:
            raise SystemExit(f"{script} has ended in {python}; try it by hand")
        return answer

    try:
        if "ready\n" not in told:  # what libraries say on their way is passed over
            raise SystemExit(f"{python} cannot run {script}; try it by hand")
        yield ask
    finally:
        with contextlib.suppress(BrokenPipeError):
            asked.close()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        told.close()
