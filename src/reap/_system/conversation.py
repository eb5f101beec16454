"""Conversation: numbered calls to a child process, and every way in which a call can end.

    parent                                     child
    call ──── number, name, arguments ───────► answered
    answer ◄─ Answer(number, value) ───────────┘        │ Raised: a refusal, or the child's end │ gone │ silent

Worker processes, processes that hold lanes and the inference server's process talk like this. (A collector's
`Supervisor` waits for the answers of all its workers at once, so it uses `receive_from` in place of a `Conversation`.)
What a child sends without a request has a reserved number, or none. Waiting for an answer skips answers to calls that
Ctrl-C broke off.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from reap._system.fork_server.child import TOLD_TO_GO, no_more_goodbyes
from reap._system.interrupts import Interrupts
from reap._system.messages.framed import until_ready
from reap._system.messages.pickling import dumps
from reap._system.messages.remote_errors import Raised
from reap._system.processes import Child

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """The return value of a call; or `Raised`, if it raised an error of the kind that the child survives."""

    call: int
    value: Any


class ChildGone(Exception):
    """The child has ended, and has sent no more messages."""


class ChildSilent(Exception):
    """The child sent nothing for as long as the caller waited."""


def receive_from(child: Child) -> tuple[list[Any], bool]:
    """Return the messages that a child has sent, and whether it is gone, so that no more will come."""
    gone = child.gone()  # checked first: then all that the child sent before its end is there to be read
    return [pickle.loads(data) for data in child.socket.receive()], gone


class Conversation:
    """The parent's side. Numbers up to `first` are reserved for what the child sends without a request."""

    def __init__(self, child: Child, first: int = 0) -> None:
        self.child, self._calls = child, first
        self.inbox: deque[Any] = deque()  # messages received that nobody has taken yet
        self.failed = False  # whether the error that ended the child was received

    def call(self, name: str, *arguments: Any) -> int:
        """Send a call as far as the socket takes it; return its number, which its answer will have."""
        data = dumps((self._calls + 1, name, arguments), name)
        with Interrupts().held():  # the number is counted only if its call is sent
            self._calls += 1
            self.child.socket.send(data)
        return self._calls

    def receive(self) -> bool:
        """Move the received messages into the inbox; return whether the child is gone, so that no more will come."""
        messages, gone = receive_from(self.child)
        self.inbox += messages
        return gone

    def next(self, within: float | None = None) -> Any:
        """Return its next message, waiting up to `within` seconds; raise its error, `ChildGone` or `ChildSilent`."""
        line, until = self.child.socket, None if within is None else time.monotonic() + within
        while True:
            with Interrupts().held():  # Ctrl-C in the middle of reading would lose a message
                gone = self.receive()
            if self.inbox:
                message = self.inbox.popleft()
                if isinstance(message, Raised):
                    self.failed = True
                    raise message.unpack()
                return message
            if gone:
                raise ChildGone
            left = None if until is None else max(0.0, until - time.monotonic())
            waiting = [] if line.flush() else [line.fileno()]
            if not until_ready([line.fileno(), self.child.sentinel], waiting, left):
                raise ChildSilent

    def answer(self, call: int, within: float | None = None) -> Any:
        """Return the answer to a call, or raise the child's error; wait up to `within` seconds for each message."""
        while True:
            message = self.next(within)
            if isinstance(message, Answer) and message.call == call:
                if isinstance(message.value, Raised):
                    raise message.value.unpack()
                return message.value

    def next_unrequested(self, within: float | None = None) -> Any:
        """Return the next message sent without a request. Answers before it belong to broken-off calls."""
        while isinstance(message := self.next(within), Answer):
            pass
        return message


# ---- the child's side -----------------------------------------------------------------------------------------------


def answered(call: int, work: Callable[[], Any], refused: type[Exception], doing: str = "") -> Answer:
    """Return the answer to a call: what `work` returns, or its `refused` error. Any other error ends the child."""
    try:
        return Answer(call, work())
    except refused as error:
        return Answer(call, Raised.of(error, doing))


def live(
    build: Callable[[], T],
    serve: Callable[[T], None],
    *,
    tell: Callable[[Raised], None],
    doing: Callable[[T | None], str],
    close: Callable[[T], None],
) -> None:
    """Run a child, or a worker elsewhere: build it, let it serve, send what it raised to the parent, and close it."""
    built: T | None = None
    try:
        built = build()
        serve(built)
    except TOLD_TO_GO:
        raise
    except BaseException as error:  # also one caused by a lost connection: then nobody receives it
        tell(Raised.of(error, doing(built)))
    finally:
        try:
            no_more_goodbyes()
        finally:  # the one Goodbye there is may be raised during that call
            if built is not None:
                close(built)
