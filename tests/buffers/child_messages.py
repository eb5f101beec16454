"""Talking to a child, one message at a time."""

from __future__ import annotations

import pickle
import weakref
from multiprocessing.connection import wait

_heard = weakref.WeakKeyDictionary()


def tell(child, thing):
    child.socket.send(pickle.dumps(thing))


def hear(child):
    """What it said next; waits for it."""
    waiting = _heard.setdefault(child, [])
    while not waiting:
        wait([child.socket])
        waiting += child.socket.receive()
    return pickle.loads(waiting.pop(0))
