"""What a child takes over from its parent when it is started, and what it does for other processes at its end.

The process that forks children was started earlier. So each child is sent the parent's import path, directory,
environment variables, and `multiprocessing`'s authentication key, as they are when the child is requested.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import pickle
import sys
import threading


def state_for_child() -> bytes:
    """Return the state of this process that a child takes over."""
    key = bytes(multiprocessing.current_process().authkey)
    return pickle.dumps((sys.path, os.getcwd(), dict(os.environ), key))


def adopt(state: bytes) -> None:
    """Take over the parent's state."""
    sys.path[:], directory, environment, key = pickle.loads(state)
    with contextlib.suppress(OSError):
        os.chdir(directory)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    multiprocessing.current_process().authkey = key  # for managers and for sending tensors


def finish_sharing(patience: float) -> None:
    """Do what a process of `multiprocessing` does at its end: let queues send what was put, and disconnect managers.

    For at most `patience` seconds: a queue that nobody reads would block for ever.
    """
    if multiprocessing.util._finalizer_registry:  # type: ignore[attr-defined]
        work = multiprocessing.util._run_finalizers  # type: ignore[attr-defined]
        thread = threading.Thread(target=work, name="reap-finish", daemon=True)
        thread.start()
        thread.join(patience)
