"""A child of the fork server: from fork to exit, and how it leaves when it is told to."""

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
from reap._system.pickling import Packed
from reap._system.process_state import adopt, finish_sharing
from reap._system.shared_objects.descriptors import received_fds

NOT_UNPACKED = "could not load what it was given: "  # in the file for stacks, and then why
GRACE = 1.0  # seconds a child has to clean up once its parent is gone
PDEATHSIG, SET_NAME, TIMERSLACK, SUBREAPER = 1, 15, 29, 36  # of prctl
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # a child closes its env, and goes


class Goodbye(BaseException):
    """Raised in a child by a signal that asks it to end, so that it unwinds and cleans up."""


TOLD_TO_GO = (Goodbye, SystemExit)  # whatever else ends a child is an error of what it runs, KeyboardInterrupt included


def ignore(*_: object) -> None:
    """Do nothing about a signal. Not SIG_IGN: programs that an env starts would inherit that."""


def run_child(connection_fd: int, stack_fd: int, fds: Sequence[int], tracker: int | None, server: str) -> NoReturn:
    """The life of a child, from fork to exit."""
    code = 1
    try:
        prctl(PDEATHSIG, signal.SIGKILL)  # die with the server
        wake_in_time()
        os.setpgid(0, 0)  # whatever is started from here on can be ended with us
        faulthandler.enable(stack_fd, all_threads=True)
        faulthandler.register(signal.SIGUSR1, stack_fd, all_threads=True)
        signal.signal(signal.SIGINT, ignore)  # Ctrl-C is the parent's business
        for number in ENDING:
            signal.signal(number, functools.partial(_goodbye, os.getpid()))
        sys.unraisablehook = _swallowed
        if tracker is not None:
            _take_tracker(tracker)
        packed = Packed(b"", received_fds(connection_fd))
        connection = Connection(connection_fd)
        prctl(SET_NAME, connection.recv_bytes()[:15])  # what `ps` shows
        adopt(connection.recv_bytes())
        refuse_breakpoints()  # in the environment that was just adopted
        packed.data = connection.recv_bytes()
        os.environ[MARK] = mark_of(os.getpid(), server)
        target = _unpacked(packed)
        del packed
        target(connection, fds)
        code = 0
    except _NotUnpacked as told:
        _write(stack_fd, f"{NOT_UNPACKED}{told}")
    except (EOFError, ConnectionError):  # nobody is there any more
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
        if code < 0:  # by the signal that ended us: whoever asks how we ended is told
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # in order, after all
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
            os.kill(os.getpid(), -code)
        os._exit(code)


class _NotUnpacked(Exception):
    """What a child was given could not be made from the bytes it came as: why, and the traceback."""


def _unpacked(packed: Packed) -> Callable[[Connection, Sequence[int]], None]:
    """What a child is to run. Whatever unpacking raises is told: imports and `__setstate__` are code of the user's."""
    try:
        target: Callable[[Connection, Sequence[int]], None] = packed.unpack()
    except Goodbye:
        raise
    except BaseException as error:
        raise _NotUnpacked(f"{error!r}\n{traceback.format_exc()}") from None
    return target


def _write(fd: int, text: str) -> None:
    """Where stacks are, for the parent to read when we are gone."""
    with contextlib.suppress(OSError):
        os.write(fd, text.encode(errors="replace"))


def _take_tracker(fd: int) -> None:
    """What is registered from here on is registered with the parent's resource tracker."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd, tracker._pid = fd, None


# ---- leaving ---------------------------------------------------------------------------------------------------------

# Code that calls the user's: a child that is asked to leave does so when it is back there. And whether it is asked,
# in place of being told: by the parent, which tells it a moment later.
_borders: set[CodeType] = set()
_asked: Callable[[], bool] | None = None


def leave_at(*borders: Callable[..., Any], asked: Callable[[], bool]) -> None:
    """Where this child leaves when a signal comes while `asked`: once whatever is called in one of these has returned.

    An env that is in the middle of a step may hold a lock that others wait for. A second signal is not waited for.
    """
    global _asked
    _borders.update(function.__code__ for function in borders)
    _asked = asked


def _leave_later(frame: FrameType | None, number: int) -> bool:
    """Say goodbye at the border this child comes back to, if it is asked to leave and is elsewhere.

    The border is watched as a debugger would, from now on: nobody pays for it before.
    """
    global _asked
    place = frame
    while place is not None and place.f_code not in _borders:
        place = place.f_back
    if _asked is None or place is None or place is frame or not _asked():
        return False
    _asked = None  # once

    def at_border(_: FrameType, event: str, __: Any) -> None:
        if event == "line":
            sys.settrace(None)
            no_more_goodbyes()
            raise Goodbye(number)

    place.f_trace = at_border
    sys.settrace(ignore)
    return True


def no_more_goodbyes() -> None:
    """What this child does from here on is cleaning up, which is not to be interrupted by being told to go."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if getattr(signal.getsignal(number), "func", None) is _goodbye:  # in no other process than a child
                signal.signal(number, ignore)


def _goodbye(whose: int, number: int, frame: FrameType | None = None) -> None:
    if os.getpid() != whose:  # a process that an env forked has nobody to say goodbye to
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if not _leave_later(frame, number):
        sys.settrace(None)
        no_more_goodbyes()
        raise Goodbye(number)


def _swallowed(what: Any) -> None:
    """An exception in a finalizer, which Python drops. A goodbye is said again a moment later."""
    if what.exc_type is Goodbye:
        number = what.exc_value.args[0]
        signal.signal(signal.SIGALRM, lambda *_: _goodbye(os.getpid(), number))
        signal.setitimer(signal.ITIMER_REAL, 0.001)
    else:
        sys.__unraisablehook__(what)


# ---- this process ---------------------------------------------------------------------------------------------------


def settle() -> None:
    """What is there now will stay: the garbage collector of this process need not look through it again and again."""
    gc.collect()
    gc.freeze()


def wake_in_time() -> None:
    """Let this thread, and those it starts, wake from a sleep when it is over, not up to 50 µs later (Linux)."""
    prctl(TIMERSLACK, 1)  # nanoseconds


def prctl(what: int, value: int | bytes) -> bool:
    """Call prctl, which only Linux has; returns whether the kernel did it."""
    if sys.platform != "linux":
        return False
    done: int = ctypes.CDLL(None).prctl(what, value if isinstance(value, bytes) else int(value), 0, 0, 0)
    return done == 0
