"""Conversation: numbered calls of a child process, and every way in which one can end.

    parent                                     child
    ask ───── number, name, arguments ───────► answered
    answer ◄─ Answer(number, value) ───────────┘        │ Raised: refused, or its end │ gone │ silent

Worker processes, processes that hold lanes and the inference server's process talk like this. What a child says unasked
has a number too, or none; who waits for an answer passes over those of calls that were broken off (Ctrl-C).
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
from reap._system.messages import until_ready
from reap._system.pickling import dumps
from reap._system.processes import Child
from reap._system.remote_errors import Raised

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What a call returned; or `Raised`, if it was refused and nothing has happened."""

    call: int
    value: Any


class ChildGone(Exception):
    """The child has ended, and said nothing more."""


class ChildSilent(Exception):
    """The child said nothing for as long as it was waited for."""


class Conversation:
    """The parent's side. `first`: the number of the last thing the child says unasked."""

    def __init__(self, child: Child, first: int = 0) -> None:
        self.child, self._calls = child, first
        self.inbox: deque[Any] = deque()  # what it has said and nobody has taken
        self.failed = False  # whether its last word was heard: what ended it

    def ask(self, name: str, *arguments: Any) -> int:
        """Send a call as far as it goes; returns the number of its answer."""
        data = dumps((self._calls + 1, name, arguments), name)
        with Interrupts().held():  # a number and its call belong together
            self._calls += 1
            self.child.line.say(data)
        return self._calls

    def hear(self) -> bool:
        """Put what it has said into the inbox; returns whether it is gone and that was all."""
        gone = self.child.gone()  # asked first: what it said before is all there then
        self.inbox += [pickle.loads(data) for data in self.child.line.hear()]
        return gone

    def next(self, within: float | None = None) -> Any:
        """Wait for its next message, so many seconds at most; raises what it raised, `ChildGone` or `ChildSilent`."""
        line, until = self.child.line, None if within is None else time.monotonic() + within
        while True:
            with Interrupts().held():  # what is half read when Ctrl-C comes would be lost
                gone = self.hear()
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
        """Wait for the answer to a call, so many seconds for each message. What the child raised is raised here."""
        while True:
            message = self.next(within)
            if isinstance(message, Answer) and message.call == call:
                if isinstance(message.value, Raised):
                    raise message.value.unpack()
                return message.value

    def unasked(self, within: float | None = None) -> Any:
        """Wait for what it says unasked. Answers that come before it are of calls that were broken off."""
        while isinstance(message := self.next(within), Answer):
            pass
        return message


# ---- the child's side -----------------------------------------------------------------------------------------------


def answered(call: int, work: Callable[[], Any], refused: type[Exception], doing: str = "") -> Answer:
    """The answer to a call: what `work` returns, or what it `refused` to do. What else it raises is the child's end."""
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
    """The life of a child, or of a worker elsewhere: it is built, serves, tells what it raised, and is closed."""
    built: T | None = None
    try:
        built = build()
        serve(built)
    except TOLD_TO_GO:
        raise
    except BaseException as error:  # also one that the end of our connection raised: then nobody hears it
        tell(Raised.of(error, doing(built)))
    finally:
        try:
            no_more_goodbyes()
        finally:  # the one goodbye there is may be said in this very moment
            if built is not None:
                close(built)
