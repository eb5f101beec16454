"""Exceptions of another process: sent as bytes, raised again here with their cause and their traceback as text."""

from __future__ import annotations

import dataclasses
import pickle
import traceback

from reap._system.debugging import debugger_left
from reap._system.messages.pickling import dumps
from reap.errors import ReapError, WorkerRaised, as_raised


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error sent by a child: itself and its cause as bytes, as far as they can be pickled, the traceback as text."""

    error: bytes
    cause: bytes
    text: str

    @classmethod
    def of(cls, error: BaseException, doing: str = "") -> Raised:
        """Return the message for an error just caught; one that is not reap's is reported as raised by `doing`."""
        error = debugger_left(error) or as_raised(f"{doing} raised", error)
        text = "".join(traceback.format_exception(error.__cause__ or error))
        return cls(_error_bytes(error), _error_bytes(error.__cause__), text)

    def unpack(self) -> ReapError:
        """Return the error to raise here, with its original cause, and the remote traceback at the end of the chain."""
        try:
            raised, cause = pickle.loads(self.error), pickle.loads(self.cause)
        except Exception:  # its class can only be imported in the child
            raised, cause = WorkerRaised(self.text.strip().rsplit("\n", 1)[-1]), None
        error: ReapError = raised if isinstance(raised, ReapError) else WorkerRaised(repr(raised))
        if cause is not None:
            cause.__cause__ = RemoteTraceback(self.text)
        error.__cause__ = cause if cause is not None else RemoteTraceback(self.text)
        return error


def _error_bytes(error: BaseException | None) -> bytes:
    try:
        data = dumps(error, "an error")
        pickle.loads(data)  # some exceptions can be pickled but not unpickled
    except Exception:
        if isinstance(error, ReapError):
            plain = WorkerRaised(str(error.args[0] if error.args else error)).at(lane=error.lane, step=error.step)
            return dumps(plain, "an error")
        return dumps(RuntimeError(f"{type(error).__name__}: {error}"), "an error")
    return data
