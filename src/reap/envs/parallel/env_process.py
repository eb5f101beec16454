"""EnvProcess: the parent's handle on a child process that holds lanes.

    order pipe ──► order code and row               a few numbers in one write
    reply pipe ◄── one byte for each order          done, done with rebuilt envs, failed, or the token of a PING
    messages   ◄─► calls and their answers          shapes of actions, memory, errors

The child's side is env_child.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from typing import Any, TypeVar

from reap._system import silence
from reap._system.conversation import ChildGone, ChildSilent, Conversation
from reap._system.interrupts import Interrupts
from reap._system.messages.pickling import Packed
from reap._system.messages.remote_errors import Raised
from reap._system.processes import DEADLINE, Child, StartMethod, end
from reap._system.worker_log import record
from reap.envs.parallel.env_child import CALL, ORDER, Traits
from reap.envs.parallel.lane_workers import lanes_named
from reap.envs.parallel.pings import Pings
from reap.errors import ReapError, WorkerSilent
from reap.spec import EnvSpec

E = TypeVar("E", bound=ReapError)


class EnvProcess:
    """A child process and its lanes `[first, last)`. It may take `timeout` seconds for one answer."""

    def __init__(self, number: int, child: Child, order_fd: int, reply: int, timeout: float | None) -> None:
        self.number, self.child, self.reply, self.order_fd = number, child, reply, order_fd
        self._timeout = timeout
        self.conversation = Conversation(child)
        self._poll = select.poll()  # wakes on an answer, on a message, and when the child has ended
        # Without a timeout the reply pipe, which closes with the child, is enough.
        for fd in (reply, child.socket.fileno()) if timeout is None else (reply, child.sentinel, child.socket.fileno()):
            self._poll.register(fd, select.POLLIN)
        self.pings = Pings()
        self.logged = False  # whether its silence is in the log already
        self.spec: EnvSpec
        self.traits: Traits
        self.first = self.last = 0
        self.restarts = 0  # how many processes were in its place before
        self.owes = False  # an order was sent and its answer has not come, or that is not known
        self.silent = False  # it exceeded its timeout
        self.failed = False  # it ended, raised or exceeded its timeout: its end is not waited for long
        self.ended = False

    @classmethod
    def start(
        cls, number: int, target: Packed, fds: Sequence[int], start: StartMethod, timeout: float | None
    ) -> EnvProcess:
        """Start a child that runs `target` with an order pipe, a reply pipe and the descriptors `fds`."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as handed:
            theirs, order_fd = os.pipe()
            handed.callback(os.close, theirs)
            ours.callback(os.close, order_fd)
            reply, answer = os.pipe()
            handed.callback(os.close, answer)
            ours.callback(os.close, reply)
            child = Child(target, fds=[theirs, answer, *fds], start=start, name=f"reap-lanes-{number}")
            ours.pop_all()
        return cls(number, child, order_fd, reply, timeout)

    @property
    def name(self) -> str:
        """The name of this process in errors and in the log."""
        return f"of {lanes_named(self.first, self.last)}{self.child.label}"

    # ---- orders and calls -----------------------------------------------------------------------------------------

    def order(self, what: int, slot_number: int = 0, step: int = 0) -> None:
        """Send an order, with its row if it needs one, without waiting for the answer."""
        try:
            os.write(self.order_fd, ORDER.pack(what, slot_number, step))
        except BrokenPipeError:
            raise self.death() from None

    def call(self, name: str, *arguments: Any) -> int:
        """Send a call; returns the number its answer will have."""
        with Interrupts().held():  # Ctrl-C must not separate the CALL order from its message
            self.order(CALL)
            return self.conversation.call(name, *arguments)

    # ---- answers --------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the reply pipe has something to read, or the child has ended.

        Messages are read meanwhile: the child may send one before it writes to the reply pipe, and a message that does
        not fit into the socket's buffer would block it.
        """
        timeout, line = self._timeout, self.child.socket.fileno()
        while True:
            ready = self._poll.poll(1000 * (silence.LOGGED_AFTER if timeout is None else timeout))
            if ready and ready[0][0] != line:  # poll() lists the line last, as it was registered last
                return
            if ready:
                self.receive()
                if ready[0][1] & select.POLLHUP:  # the child is ending: the reply pipe will be closed in a moment
                    self._poll.unregister(line)
            elif timeout is None:
                self._log_silence()
            else:
                raise self.silent_error()

    def receive(self) -> None:
        """Move messages that have come into the inbox, so that the child can send more."""
        with Interrupts().held():  # Ctrl-C must not lose a message that was read
            self.conversation.receive()

    def answer(self, call: int | None = None, grace: float = 0.0) -> Any:
        """Wait for the answer to a call; None: for the next message sent without a call."""
        within = (silence.LOGGED_AFTER if self._timeout is None else self._timeout) + grace
        try:
            while True:
                try:
                    return (
                        self.conversation.next_unrequested(within)
                        if call is None
                        else self.conversation.answer(call, within)
                    )
                except ChildSilent:
                    if self._timeout is not None:
                        raise
                    self._log_silence()
        except (ChildGone, ChildSilent) as reason:
            error = self.death() if isinstance(reason, ChildGone) else self.silent_error()
            raise error from error.__cause__
        except ReapError as error:
            self.failed = self.failed or self.conversation.failed
            self.named(error)
            raise

    # ---- errors ---------------------------------------------------------------------------------------------------

    def named(self, error: ReapError) -> ReapError:
        """Return an error of this child with its name, and with the lane's number among all lanes."""
        if error.lane is not None:
            error.lane += self.first
        return error.at(worker=self.name)

    def death(self) -> ReapError:
        """Return the error for a child that has ended: the error it sent last, or how it ended."""
        self.failed = True
        self.conversation.receive()
        if not self.conversation.inbox:
            self.child.gone(1.0)
            self.conversation.receive()
        for message in self.conversation.inbox:
            if isinstance(message, Raised):
                return self._logged(message.unpack())
        return self._logged(self.child.death())

    def silent_error(self) -> WorkerSilent:
        """Return the error for a child that exceeded its timeout."""
        self.failed = self.silent = True
        return self._logged(self.child.silence(self._timeout or 0.0, self._timeout))

    def _logged(self, error: E) -> E:
        self.named(error)
        record("death", self.name, "%s", str(error).partition("\n")[0])
        return error

    def _log_silence(self) -> None:
        """Log, once for each order, that the child has sent nothing for a long time."""
        if not self.logged:
            self.logged = True
            silence.log(f"worker {self.name}", silence.LOGGED_AFTER, self.child.ask_stack())

    # ---- closing --------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the process at once, whatever it is doing. May be called twice."""
        if not self.ended:
            with Interrupts().held():  # takes a few seconds at most; an interrupt would leak descriptors
                self.child.signal(signal.SIGKILL)
                self.hang_up()
                end([self.child], patience=0.0, deadline=DEADLINE)

    def hang_up(self) -> None:
        """Close the pipes and the connection to the child, upon which it ends by itself."""
        self.ended = True
        for fd in (self.order_fd, self.reply):
            os.close(fd)
        self.child.socket.close()
