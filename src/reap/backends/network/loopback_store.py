"""A store of torch.distributed that listens on the loopback address alone; by default it listens on all addresses."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reap.backends.network.authenticated_listener import LOOPBACK
from reap.errors import UsageError


def loopback_store(port: int, timeout: timedelta) -> TCPStore:
    """Return a store that listens at this port, or at any free port if it is 0."""
    try:
        listening = socket.create_server((LOOPBACK, port), backlog=1024)
    except OSError as error:
        raise UsageError(f"tcp_port {port}: {error}") from None
    port = listening.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
