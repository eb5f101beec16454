"""Everything reap raises, in one tree.

    ReapError
    ├── UsageError (ValueError)          a wrong call, raised in the caller's frame before anything starts
    │   ├── WrongArgument (TypeError)        an argument of the wrong kind, missing, or unknown
    │   ├── CorruptState                     a dump or a state that is damaged; nothing of it was loaded
    │   ├── WrongIndex (IndexError)          rows that a buffer does not have
    │   ├── WrongState (RuntimeError)        a right call at the wrong time (a closed collector, no policy to update)
    │   │   └── Starved                          a sample needs rows that are missing, and nothing will bring them
    │   └── SpecMismatch (RuntimeError)      two sides disagree on a shape or dtype; both are printed
    ├── WorkerError (RuntimeError)       collecting failed
    │   ├── WorkerRaised                     env or policy raised; the original exception is the cause
    │   ├── WorkerDied                       its process ended: exit code or signal, and its last stack if there is one
    │   ├── WorkerSilent                     it sent nothing for longer than `timeout`; with its stack
    │   └── ServerGone                       the client's inference server is shut down, or its process has ended
    ├── RecordingFailed (RuntimeError)   a recording could not be written to its file; the cause says why
    ├── NoSpace (OSError)                a disk or the memory is too small for what was requested; nothing was lost
    ├── NotReady (TimeoutError)          answers did not arrive in time; wait for them again
    └── MissingDependency (ImportError)  an optional library is not installed

Messages say who, what, where, and what to do next.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import NoReturn

from typing_extensions import Self


class ReapError(Exception):
    """The root of every error reap raises on purpose."""

    worker: str | None = None
    lane: int | None = None
    step: int | None = None
    failure_file: str | None = None  # to pass to `reap.testing.replay_failure`; set where `failure_dir` is given

    def at(self, *, lane: int | None = None, step: int | None = None, worker: str | None = None) -> Self:
        """Add where it happened, unless that is known already; return the error."""
        self.worker = worker if self.worker is None else self.worker
        self.lane = lane if self.lane is None else self.lane
        self.step = step if self.step is None else self.step
        return self

    def __str__(self) -> str:
        known = (("worker", self.worker), ("lane", self.lane), ("step", self.step))
        places = [f"{name} {n}" for name, n in known if n is not None]
        message = super().__str__()
        written = "" if self.failure_file is None else f"; to see it again: replay_failure({self.failure_file!r})"
        return f"{', '.join(places)}: {message}{written}" if places else message + written


class UsageError(ReapError, ValueError):
    """A wrong call: nothing was started and nothing was lost.

    A `SpecMismatch` may also come from a worker in the middle of a rollout; then the collector is closed.
    """


class WrongArgument(UsageError, TypeError):
    """An argument of the wrong kind, a missing one, or one that does not exist."""


class WrongIndex(UsageError, IndexError):
    """Row numbers that are out of range, or an index that is not row numbers at all."""


class CorruptState(UsageError):
    """A dumped buffer, or a `state_dict`, that differs from what was written. Nothing of it was loaded."""


class WrongState(UsageError, RuntimeError):
    """A right call at the wrong time."""


class Starved(WrongState):
    """A sample needs rows that are not there, and nothing is about to bring them."""


class SpecMismatch(UsageError, RuntimeError):
    """Two sides disagree on a shape, a number, a dtype or a set of keys."""


class WorkerError(ReapError, RuntimeError):
    """Collecting failed inside a worker."""


class WorkerRaised(WorkerError):
    """The user's code raised in a worker (env, policy, hook, factory, …); `__cause__` is its exception."""


class WorkerDied(WorkerError):
    """A worker's process ended by itself, or was killed."""


class WorkerSilent(WorkerError):
    """A worker sent nothing for longer than the user's deadline."""


class ServerGone(WorkerError):
    """The inference server is shut down, or its process has ended: no answer will come."""


class RecordingFailed(ReapError, RuntimeError):
    """Episodes could not be written to a dataset; `__cause__` is what its format or the disk said."""


class NoSpace(ReapError, OSError):
    """A disk or the memory is too small for what was requested. What was there before is intact."""


class NotReady(ReapError, TimeoutError):
    """Answers did not arrive in time. Nothing is lost: they can be waited for again."""


class MissingDependency(ReapError, ImportError):
    """An optional library is needed; the message holds the pip line."""


def missing(library: str, extra: str) -> MissingDependency:
    """Return the error for an absent optional library."""
    return MissingDependency(f"{library} is not installed; pip install 'reap[{extra}]'")


def nearest(word: str, words: Iterable[str]) -> str:
    """Return a hint at the closest of `words`, or nothing when none is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def reraise(what: str, cause: Exception) -> NoReturn:
    """Raise a `WorkerRaised` caused by what the user's code raised; an error of reap's is raised unchanged."""
    raise as_raised(f"{what} raised", cause)


def as_raised(what: str, cause: BaseException) -> ReapError:
    """Return `cause` if it is an error of reap's, else a `WorkerRaised` that begins with `what` and is caused by it."""
    return cause if isinstance(cause, ReapError) else raised_by(what, cause)


def raised_by(what: str, cause: BaseException) -> WorkerRaised:
    """Return the error that reports a user's, with that one's traceback: `pdb.pm()` stops where it was raised."""
    error = WorkerRaised(f"{what} {cause!r}").with_traceback(cause.__traceback__)
    error.__cause__ = cause
    return error


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the user's own line: the nearest one on the stack outside reap."""
    frame, depth = sys._getframe(1), 2  # a stacklevel of 1 would be the line below
    # Judged by module, not file: methods that a dataclass generates have no file.
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "reap":
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, category, stacklevel=depth)
