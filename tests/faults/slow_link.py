"""A link between two network namespaces on which every packet takes its time.

    python slow_link.py SECONDS NAMESPACE DEVICE NAMESPACE DEVICE

Kernels here may lack netem; a pair of tun devices and a process that holds packets back do the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUN, _NO_INFO, _NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000


def tun(namespace: str, device: str) -> int:
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN | _NO_INFO))
    return fd


def main(seconds: float, *places: str) -> None:
    one, other = tun(*places[:2]), tun(*places[2:])
    print("ready", flush=True)
    held: deque[tuple[float, int, bytes]] = deque()
    with selectors.DefaultSelector() as selector:
        for fd, to in ((one, other), (other, one)):
            selector.register(fd, selectors.EVENT_READ, to)
        while True:
            for key, _ in selector.select(max(0.0, held[0][0] - time.monotonic()) if held else None):
                held.append((time.monotonic() + seconds, key.data, os.read(key.fd, 65536)))
            while held and held[0][0] <= time.monotonic():
                _, to, packet = held.popleft()
                with contextlib.suppress(OSError):  # a device that is down loses packets, as links do
                    os.write(to, packet)


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
