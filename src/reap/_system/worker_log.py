"""What happens to workers, as records of Python's `logging`, under the name `reap.workers`.

    start    INFO      a worker is there: its env and policy are built
    end      INFO      it was told to go, and did
    death    ERROR     it died, raised, or was silent for longer than `timeout`; what is done about it follows
    restart  WARNING   another took its place
    drop     WARNING   the others go on without it
    slow     WARNING   it has been silent for a minute, and no `timeout` was given; with its stack, once

Each record has the attributes `event` (one of the words above) and `worker` (its name in errors).
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
    """Write down what has happened to a worker; but not when the program ends, and its workers with it."""
    if not threading.main_thread().is_alive():
        return
    _log.log(_LEVELS[event], text, *arguments, extra={"event": event, "worker": worker})
