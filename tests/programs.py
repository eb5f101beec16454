"""Programs of their own, without the seconds it takes each to import torch: forks of one that has imported it.

    test ══ code, arguments, files ══► server (torch and reap are imported, nothing was run) ── fork ──► program
      ▲                                   │
      └────────── how it ended ◄──────────┘

A program has a `__main__` of its own and ends as any does. What is about importing, or about how Python was started, is
not for this: such tests start an interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Programs:
    """The test's end."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        command = [sys.executable, "-m", "tests.programs", str(there.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[there.fileno()], cwd=ROOT, start_new_session=True)
        there.close()
        self._line = here

    def run(self, code: str, *arguments: str, cwd: Path | None = None, timeout: float = 100, **environment: str):
        """Run `python -c code *arguments` to its end."""
        request = {"arguments": arguments, "cwd": str(cwd or Path.cwd()), "environment": {**os.environ, **environment}}
        with contextlib.ExitStack() as stack:
            asked, output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            asked.write(json.dumps({"code": code, **request}).encode())
            asked.flush()
            ended, tell = os.pipe()
            status = stack.enter_context(open(ended, "rb", buffering=0))
            try:
                socket.send_fds(self._line, [b"x"], [asked.fileno(), output.fileno(), errors.fileno(), tell])
            finally:
                os.close(tell)
            pid = int.from_bytes(status.read(8), "little", signed=True)
            if not select.select([status], [], [], timeout)[0]:
                os.kill(pid, signal.SIGKILL)
            number = int.from_bytes(status.read(8), "little", signed=True)
            for file in (output, errors):
                file.seek(0)
            said = [file.read().decode() for file in (output, errors)]
        return subprocess.CompletedProcess(["-c", *arguments], number, *said)

    def close(self) -> None:
        self._line.close()
        self._server.wait()


def serve(line: socket.socket) -> dict | None:
    """Fork what is asked for, and tell how it ended. Returns in each program, with its request; here at the end."""
    running: dict[int, tuple[int, int]] = {}  # pid and whom to tell, by the descriptor that is readable at its end
    while True:
        for ready in select.select([line, *running], [], [])[0]:
            if ready is not line:
                pid, tell = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(tell, code.to_bytes(8, "little", signed=True))
                os.close(tell)
                os.close(ready)
                continue
            said, fds, _, _ = socket.recv_fds(line, 1, 4)
            if not said:
                return None
            pid = os.fork()
            if not pid:
                line.close()
                for one, (_, other) in running.items():
                    os.close(one), os.close(other)
                return becomes(*fds)
            for fd in fds[:3]:
                os.close(fd)
            os.write(fds[3], pid.to_bytes(8, "little", signed=True))
            running[os.pidfd_open(pid)] = pid, fds[3]


def becomes(request: int, output: int, errors: int, tell: int) -> dict:
    """Make this process one that was started for the request."""
    os.close(tell)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((nothing, output, errors)):
        os.dup2(fd, number)
        os.close(fd)
    os.lseek(request, 0, os.SEEK_SET)
    with open(request) as file:
        asked = json.load(file)
    os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return asked


def main() -> None:
    """Serve, with what a program would import first imported."""
    import gymnasium
    import numpy
    import tensordict.nn
    import torch

    import reap.collectors
    import reap.data
    import reap.envs
    import reap.testing

    del gymnasium, numpy, tensordict, torch, reap
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        sys.argv[:] = ["-c", *asked["arguments"]]
        sys.path[0] = ""
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(compile(asked["code"], "<string>", "exec"), program.__dict__)


if __name__ == "__main__":
    main()
