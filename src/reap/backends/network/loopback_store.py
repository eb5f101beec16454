"""A store of torch.distributed that listens on the loopback address alone; by itself it would on all there are."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reap.backends.network.authenticated_listener import LOOPBACK
from reap.errors import UsageError


def loopback_store(port: int, timeout: timedelta) -> TCPStore:
    """At this port, or any if it is 0."""
    try:
        listening = socket.create_server((LOOPBACK, port), backlog=1024)
    except OSError as error:
        raise UsageError(f"tcp_port {port}: {error}") from None
    port = listening.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
