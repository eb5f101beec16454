"""Three machines that are network namespaces: a hub, where the collector lives, and two others; one far away.

a 10.213.77.2 ── veth ── 10.213.77.1 hub ── 20 ms ── 10.213.77.3 b
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

HUB, A, B = "10.213.77.1", "10.213.77.2", "10.213.77.3"
DELAY = 0.02


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Machines:
    def __init__(self) -> None:
        self.hub, self.a, self.b = (f"reap-{name}-{os.getpid()}" for name in ("hub", "a", "b"))
        self._slow: subprocess.Popen[str] | None = None

    def up(self) -> None:
        """Raises OSError where that is not permitted."""
        for number, name in enumerate((self.hub, self.a, self.b)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            # Ports of its own: an agent of RPC needs on every machine the one it has on its own.
            self._write(name, "ip_local_port_range", f"{33000 + 9000 * number} {41999 + 9000 * number}")
        ip("-n", self.hub, "link", "add", "to-a", "type", "veth", "peer", "name", "up0", "netns", self.a)
        command = [sys.executable, str(Path(__file__).parent / "slow_link.py"), str(DELAY)]
        self._slow = subprocess.Popen([*command, self.hub, "to-b", self.b, "up0"], stdout=subprocess.PIPE, text=True)
        if (self._slow.stdout.readline() if self._slow.stdout else "") != "ready\n":
            raise OSError("no tun devices")
        for device, name, address in (("to-a", self.a, A), ("to-b", self.b, B)):
            ip("-n", self.hub, "addr", "add", HUB, "peer", address, "dev", device)
            ip("-n", self.hub, "link", "set", device, "up")
            ip("-n", name, "addr", "add", address, "peer", HUB, "dev", "up0")
            ip("-n", name, "link", "set", "up0", "up")
            ip("-n", name, "route", "add", "default", "via", HUB)
        self._write(self.hub, "ip_forward", "1")

    def _write(self, name: str, setting: str, value: str) -> None:
        write = ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}"]
        subprocess.run(["ip", "netns", "exec", name, *write], check=True)

    def down(self) -> None:
        if self._slow is not None:
            self._slow.kill()
            self._slow.wait()
        for name in (self.hub, self.a, self.b):
            with contextlib.suppress(OSError):
                ip("netns", "del", name)
