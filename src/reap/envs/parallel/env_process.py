"""EnvProcess: a child process that holds lanes, as its parent sees it.

    order pipe ──► what to do, on which row         a few numbers, written at once
    reply pipe ◄── one byte for each order          done, done with envs made anew, failed, or a question's token
    messages   ◄─► calls and their answers          how actions look, memory, resets, errors

The other side is env_child.py.
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
from reap._system.pickling import Packed
from reap._system.processes import DEADLINE, Child, StartMethod, end
from reap._system.remote_errors import Raised
from reap._system.worker_log import record
from reap.envs.parallel.env_child import CALL, ORDER, Traits
from reap.envs.parallel.lane_workers import lanes_named
from reap.errors import ReapError, WorkerSilent
from reap.spec import EnvSpec

E = TypeVar("E", bound=ReapError)


class EnvProcess:
    """A child process and its lanes, `[first, last)` of all. It may take `timeout` seconds for one answer."""

    def __init__(self, number: int, child: Child, order_fd: int, reply: int, timeout: float | None) -> None:
        self.number, self.child, self.reply, self.order_fd = number, child, reply, order_fd
        self._timeout = timeout
        self.talk = Conversation(child)
        self._told = select.poll()  # something was written to `reply`, or nobody is there who could; or to the line
        for fd in (reply, child.line.fileno()) if timeout is None else (reply, child.sentinel, child.line.fileno()):
            self._told.register(fd, select.POLLIN)
        self.logged = False  # it is in the log that it is silent
        self.spec: EnvSpec
        self.traits: Traits
        self.first = self.last = 0
        self.restarts = 0  # how many have been in its place before it
        self.owes = False  # a step was sent, its answer has not come; or it is not known
        self.silent = False  # it took too long
        self.failed = False  # it has ended, raised or taken too long: nobody waits long for its end
        self.ended = False

    @classmethod
    def start(
        cls, number: int, target: Packed, fds: Sequence[int], start: StartMethod, timeout: float | None
    ) -> EnvProcess:
        """Start a child that runs `target` with an order pipe, a reply pipe and these descriptors."""
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
        """By which errors and the log call it."""
        return f"of {lanes_named(self.first, self.last)}{self.child.label}"

    # ---- what it is told ------------------------------------------------------------------------------------------

    def order(self, what: int, place: int = 0, step: int = 0) -> None:
        """Have it do something, on this row where it needs one; not waited for."""
        try:
            os.write(self.order_fd, ORDER.pack(what, place, step))
        except BrokenPipeError:
            raise self.gone() from None

    def ask(self, name: str, *arguments: Any) -> int:
        """Send a call; returns the number its answer will have."""
        with Interrupts().held():  # the order pipe and what it rings for belong together
            self.order(CALL)
            return self.talk.ask(name, *arguments)

    # ---- what it says ---------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until there is something in the reply pipe, or nobody who could write to it.

        Messages are heard meanwhile: one that is large, or comes after answers to calls that were broken off (Ctrl-C),
        does not go into the socket, and the child writes to the reply pipe when it has.
        """
        timeout, line = self._timeout, self.child.line.fileno()
        while True:
            ready = self._told.poll(1000 * (silence.LOGGED_AFTER if timeout is None else timeout))
            if ready and ready[0][0] != line:  # the line was registered last, so it comes last
                return
            if ready:
                self.hear()
                if ready[0][1] & select.POLLHUP:  # it is about to end: the reply pipe says so in a moment
                    self._told.unregister(line)
            elif timeout is None:
                self._log_silence()
            else:
                raise self.silence()

    def hear(self) -> None:
        """Keep the messages that have come for whoever wants them, so that it can send others."""
        with Interrupts().held():  # what is read is also kept
            self.talk.hear()

    def answer(self, call: int | None = None, grace: float = 0.0) -> Any:
        """Wait for the answer to a call; None: for the next thing it says unasked."""
        within = (silence.LOGGED_AFTER if self._timeout is None else self._timeout) + grace
        try:
            while True:
                try:
                    return self.talk.unasked(within) if call is None else self.talk.answer(call, within)
                except ChildSilent:
                    if self._timeout is not None:
                        raise
                    self._log_silence()
        except (ChildGone, ChildSilent) as reason:
            error = self.gone() if isinstance(reason, ChildGone) else self.silence()
            raise error from error.__cause__
        except ReapError as error:
            self.failed = self.failed or self.talk.failed
            self.named(error)
            raise

    # ---- what is wrong with it ------------------------------------------------------------------------------------

    def named(self, error: ReapError) -> ReapError:
        """An error that it has told, with the lane as everybody counts it, and with its name."""
        if error.lane is not None:
            error.lane += self.first
        return error.at(worker=self.name)

    def gone(self) -> ReapError:
        """The error for one that has ended: what it said last, or how it ended."""
        self.failed = True
        self.talk.hear()
        if not self.talk.inbox:
            self.child.gone(1.0)
            self.talk.hear()
        for message in self.talk.inbox:
            if isinstance(message, Raised):
                return self._logged(self.named(message.unpack()))
        return self._logged(self.child.death())

    def silence(self) -> WorkerSilent:
        """The error for one that has not answered for too long."""
        self.failed = self.silent = True
        return self._logged(self.child.silence(self._timeout or 0.0, self._timeout))

    def _logged(self, error: E) -> E:
        error.at(worker=self.name)
        record("death", self.name, "%s", str(error).partition("\n")[0])
        return error

    def _log_silence(self) -> None:
        """Nothing came from it for a long time, and it is waited for: say so, once for what it was asked."""
        if not self.logged:
            self.logged = True
            silence.log(f"worker {self.name}", silence.LOGGED_AFTER, self.child.ask_stack())

    # ---- its end --------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End it at once: it has failed, whatever it may still be doing. May be called twice."""
        if not self.ended:
            with Interrupts().held():  # a few seconds at most; interrupted, it would leave descriptors behind
                self.child.signal(signal.SIGKILL)
                self.hang_up()
                end([self.child], patience=0.0, deadline=DEADLINE)

    def hang_up(self) -> None:
        """Close all that leads to it, upon which it ends by itself."""
        self.ended = True
        for fd in (self.order_fd, self.reply):
            os.close(fd)
        self.child.line.close()
