"""Whatever listens, under fire for some seconds; `python -m tests.faults.fuzz` does it for as long as one likes."""

from __future__ import annotations

import os
import resource
import socket

import pytest

from reap._system.listener import Listener
from reap.backends.network.authenticated_listener import LOOPBACK, AuthenticatedListener
from reap.errors import ReapError
from reap.testing import no_leaks
from tests.faults.fuzz import run


def test_strangers_get_nowhere_and_cost_nothing():
    found = run(6.0)
    assert not found["failures"], found
    assert not found["fooled"], "a pickle of a stranger was loaded"
    assert found["after"]["pickles"] == 0, "something was unpickled before anybody had proved anything"
    assert found["friends"] >= 2, "who has the secret is let in meanwhile"
    assert min(found["counts"].values()) > 20, found
    assert found["after"]["fds"] <= found["first"]["fds"] + 4, "who came and went, friends too, has left nothing"
    assert found["most"]["threads"] <= found["after"]["threads"] + 6  # friends that are just being received
    assert found["most"]["fds"] <= found["after"]["fds"] + 2 * 128 + 10
    assert found["after"]["rss"] - found["before"]["rss"] < 8_000, "KiB"


@pytest.mark.parametrize("spare", range(6))
def test_a_listener_without_descriptors_is_an_error_with_a_name(spare):
    """Whichever of its descriptors is the one too many: an error of reap's, and none of the others stays open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with no_leaks():
        listening = socket.create_server((LOOPBACK, 0)) if spare < 3 else None
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, limits[1]))
        try:
            with pytest.raises(ReapError, match="the listener at|the relay between|cannot listen"):
                if listening is not None:
                    Listener(listening, "test", b"secret", lambda *_: None)
                else:
                    AuthenticatedListener(LOOPBACK, 0, b"secret", {})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
