"""Envs that start programs, as those with a simulator do: in every way a program can be started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from reap.testing import CountingEnv

COMMANDS = {
    "a child": {"args": ["sleep", "600"]},
    "a session": {"args": ["sleep", "600"], "start_new_session": True},
    "a daemon": {"args": ["sh", "-c", "setsid sleep 600 & echo $!"], "stdout": subprocess.PIPE},
}


def start_programs(folder):
    """Start a program in each way, in this process, and note their numbers."""
    numbers = []
    for name, options in COMMANDS.items():
        program = subprocess.Popen(**options)
        numbers.append(int(program.stdout.readline()) if name == "a daemon" else program.pid)
    note = Path(folder) / f"started-{os.getpid()}"
    note.with_suffix(".part").write_text(" ".join(map(str, numbers)))
    note.with_suffix(".part").rename(note)
    return numbers


def started(folder):
    """The numbers of all programs that were started."""
    return [int(pid) for note in Path(folder).glob("started-*") for pid in note.read_text().split()]


def closed(folder):
    """The processes whose env was closed."""
    return {int(note.name.split("-")[1]) for note in Path(folder).glob("closed-*")}


class Simulated(CountingEnv):
    """Leaves its programs to whoever ends its process; says that it was closed."""

    def __init__(self, folder, lane=0):
        super().__init__((3, 1, 5), lane)
        self.folder = folder
        start_programs(folder)

    def close(self):
        (Path(self.folder) / f"closed-{os.getpid()}").touch()
        super().close()
