"""Events of workers, as records of Python's `logging` under the name `reap.workers`.

    start    INFO      the worker is ready: its env and policy are built
    end      INFO      it was told to end
    death    ERROR     it died, raised, or was silent for longer than `timeout`; the next record says what follows
    restart  WARNING   a new worker took its place
    drop     WARNING   the others go on without it
    slow     WARNING   it has been silent for a minute, and no `timeout` was given; with its stack, once

Each record has the attributes `event` (one of the words above) and `worker`: its number, with
its process id where one is at hand, as in "1 (pid 4242)".
"""

from __future__ import annotations

import logging
import threading

_log = logging.getLogger("reap.workers")
_LEVELS = {
    "start": logging.INFO,
    "end": logging.INFO,
    "death": logging.ERROR,
    "restart": logging.WARNING,
    "drop": logging.WARNING,
    "slow": logging.WARNING,
}


def record(event: str, worker: str, text: str, *arguments: object) -> None:
    """Log an event of a worker, unless the program is ending, and its workers with it."""
    if not threading.main_thread().is_alive():
        return
    _log.log(_LEVELS[event], text, *arguments, extra={"event": event, "worker": worker})
