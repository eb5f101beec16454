"""What a child process has of its parent from the moment it is started, and what it does for others at its end.

The process that forks children was started before: import path, directory, environment variables and the key by which
processes of `multiprocessing` know each other are handed to each child as they are when it is asked for.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import pickle
import sys
import threading


def state_for_child() -> bytes:
    """This process's state, for a child."""
    key = bytes(multiprocessing.current_process().authkey)
    return pickle.dumps((sys.path, os.getcwd(), dict(os.environ), key))


def adopt(state: bytes) -> None:
    """Take over what the parent has."""
    sys.path[:], directory, environment, key = pickle.loads(state)
    with contextlib.suppress(OSError):
        os.chdir(directory)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    multiprocessing.current_process().authkey = key  # managers, and whoever sends a tensor, ask for it


def finish_sharing(patience: float) -> None:
    """What a process of `multiprocessing` does at its end: queues send what was put into them, managers are left.

    For so many seconds at most: a queue that nobody reads would hold it for ever.
    """
    if multiprocessing.util._finalizer_registry:  # type: ignore[attr-defined]
        work = multiprocessing.util._run_finalizers  # type: ignore[attr-defined]
        thread = threading.Thread(target=work, name="reap-finish", daemon=True)
        thread.start()
        thread.join(patience)
