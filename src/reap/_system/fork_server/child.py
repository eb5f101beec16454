"""A child of the fork server: what it does from fork to exit, and how it exits when it is told to."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import CodeType, FrameType
from typing import Any, NoReturn

from reap._system.debugging import refuse_breakpoints
from reap._system.fork_server.orphans import MARK, mark_of
from reap._system.messages.pickling import Packed
from reap._system.process_state import adopt, finish_sharing
from reap._system.shared_objects.descriptors import received_fds

NOT_UNPACKED = "could not load what it was given: "  # starts the text in the file for stacks; the reason follows
GRACE = 1.0  # seconds a child has to clean up once its parent is gone
PDEATHSIG, SET_NAME, TIMERSLACK, SUBREAPER = 1, 15, 29, 36  # of prctl
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # on these a child closes its env and exits


class Goodbye(BaseException):
    """Raised in a child by a signal that tells it to end, so that its stack unwinds and it cleans up."""


# Any other exception that ends a child is an error of the code it runs, KeyboardInterrupt included.
TOLD_TO_GO = (Goodbye, SystemExit)


def ignore(*_: object) -> None:
    """Ignore a signal. SIG_IGN would not do: programs that an env starts inherit it."""


def run_child(connection_fd: int, stack_fd: int, fds: Sequence[int], tracker: int | None, server: str) -> NoReturn:
    """Run a child, from fork to exit."""
    code = 1
    try:
        prctl(PDEATHSIG, signal.SIGKILL)  # die with the server
        wake_in_time()
        os.setpgid(0, 0)  # programs it starts from here on are in its group, and can be killed with it
        faulthandler.enable(stack_fd, all_threads=True)
        faulthandler.register(signal.SIGUSR1, stack_fd, all_threads=True)
        signal.signal(signal.SIGINT, ignore)  # the parent handles Ctrl-C
        for number in ENDING:
            signal.signal(number, functools.partial(_goodbye, os.getpid()))
        sys.unraisablehook = _swallowed
        if tracker is not None:
            _take_tracker(tracker)
        packed = Packed(b"", received_fds(connection_fd))
        connection = Connection(connection_fd)
        prctl(SET_NAME, connection.recv_bytes()[:15])  # what `ps` shows
        adopt(connection.recv_bytes())
        refuse_breakpoints()  # reads PYTHONBREAKPOINT of the environment that was just adopted
        packed.data = connection.recv_bytes()
        os.environ[MARK] = mark_of(os.getpid(), server)
        target = _unpacked(packed)
        del packed
        target(connection, fds)
        code = 0
    except _NotUnpacked as told:
        _write(stack_fd, f"{NOT_UNPACKED}{told}")
    except (EOFError, ConnectionError):  # the parent is gone
        code = 0
    except Goodbye as told:
        code = -told.args[0]
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
        _write(stack_fd, traceback.format_exc())
    finally:
        no_more_goodbyes()
        with contextlib.suppress(Exception):
            finish_sharing(GRACE)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if code < 0:  # end by the same signal, so that the parent sees why
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump: this is an orderly end
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
            os.kill(os.getpid(), -code)
        os._exit(code)


class _NotUnpacked(Exception):
    """The child could not unpack what it was given: the reason, and the traceback."""


def _unpacked(packed: Packed) -> Callable[[Connection, Sequence[int]], None]:
    """Return the function the child runs. Any error is reported: imports and `__setstate__` run the user's code."""
    try:
        target: Callable[[Connection, Sequence[int]], None] = packed.unpack()
    except Goodbye:
        raise
    except BaseException as error:
        raise _NotUnpacked(f"{error!r}\n{traceback.format_exc()}") from None
    return target


def _write(fd: int, text: str) -> None:
    """Write text where stacks are written, for the parent to read when this child is gone."""
    with contextlib.suppress(OSError):
        os.write(fd, text.encode(errors="replace"))


def _take_tracker(fd: int) -> None:
    """Register everything from here on with the parent's resource tracker."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd, tracker._pid = fd, None


# ---- leaving ---------------------------------------------------------------------------------------------------------

# Functions that call the user's code: a child asked to leave does so when control has returned to one of them. And how
# it knows that the parent has asked it to leave, which the parent does a moment before it insists.
_borders: set[CodeType] = set()
_asked: Callable[[], bool] | None = None


def leave_at(*borders: Callable[..., Any], asked: Callable[[], bool]) -> None:
    """Let a signal that comes while `asked()` is true end this child only when control returns to one of `borders`.

    An env in the middle of a step may hold a lock that others wait for. A second signal ends the child at once.
    """
    global _asked
    _borders.update(function.__code__ for function in borders)
    _asked = asked


def _leave_later(frame: FrameType | None, number: int) -> bool:
    """Raise `Goodbye` when control returns to a border, if the parent has asked and the child is in the user's code.

    Return whether that is so. A trace function watches for the return, as a debugger does: it costs nothing before.
    """
    global _asked
    place = frame
    while place is not None and place.f_code not in _borders:
        place = place.f_back
    if _asked is None or place is None or place is frame or not _asked():
        return False
    _asked = None  # a second signal ends the child at once

    def at_border(_: FrameType, event: str, __: Any) -> None:
        if event == "line":
            sys.settrace(None)
            no_more_goodbyes()
            raise Goodbye(number)

    place.f_trace = at_border
    sys.settrace(ignore)
    return True


def no_more_goodbyes() -> None:
    """Ignore signals that end this child from here on: only cleaning up is left, and nothing may interrupt it."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if getattr(signal.getsignal(number), "func", None) is _goodbye:  # only children have this handler
                signal.signal(number, ignore)


def _goodbye(whose: int, number: int, frame: FrameType | None = None) -> None:
    if os.getpid() != whose:  # a process that an env forked: it just ends
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if not _leave_later(frame, number):
        sys.settrace(None)
        no_more_goodbyes()
        raise Goodbye(number)


def _swallowed(what: Any) -> None:
    """Handle an exception in a finalizer, which Python drops. A dropped `Goodbye` is raised again a moment later."""
    if what.exc_type is Goodbye:
        number = what.exc_value.args[0]
        signal.signal(signal.SIGALRM, lambda *_: _goodbye(os.getpid(), number))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(what)


# ---- this process ---------------------------------------------------------------------------------------------------


def freeze_objects() -> None:
    """Exempt all objects that exist now from garbage collection: they stay, and need not be scanned each time."""
    gc.collect()
    gc.freeze()


def wake_in_time() -> None:
    """Make sleeps of this thread, and of threads it starts, end on time, not up to 50 µs later (Linux)."""
    prctl(TIMERSLACK, 1)  # nanoseconds


def prctl(what: int, value: int | bytes) -> bool:
    """Call prctl, which only Linux has; return whether the kernel did it."""
    if sys.platform != "linux":
        return False
    done: int = ctypes.CDLL(None).prctl(what, value if isinstance(value, bytes) else int(value), 0, 0, 0)
    return done == 0
