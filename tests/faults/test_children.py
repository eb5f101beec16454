"""Child processes and what they say of themselves."""

from __future__ import annotations

import signal

from reap._system.messages.framed import until_ready
from reap._system.messages.pickling import dumps
from reap._system.processes import Child, end
from tests.worlds.faults import freeze


def test_a_stack_that_was_told_before_is_no_answer():
    """A child that was silent once and answered, then is frozen: it says nothing, and nothing is what is told of it."""

    def waits(connection, fds):
        connection.send_bytes(b"here")
        connection.recv_bytes()

    child = Child(dumps(waits, "waits"))
    try:
        assert until_ready([child.socket.fileno()], within=60)
        for _ in range(2):
            assert child.ask_stack().count("in waits") == 1
        freeze(child.pid)
        assert child.ask_stack(0.2) == ""
    finally:
        child.signal(signal.SIGKILL)
        end([child], patience=5, deadline=5)
