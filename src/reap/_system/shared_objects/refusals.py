"""Refusals: which part of what a user gave us cannot be sent to another process, and what to do instead.

    create_env_fn ── fails ──► its parts, as pickling sees them ──► the one that fails by itself ──► its parts ──► …
                               closure, defaults, arguments, attributes, items                       the last is named

This runs only after pickling has failed, so it may take its time: it pickles each part alone.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import inspect
import pickle
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from torch import nn

_DEEPEST = 64  # levels of parts within parts
_PLAIN = (int, float, complex, str, bytes, bytearray, bool, type(None), type(...))

_MADE_THERE = "make it inside the factory, which runs in the process that uses it"
_SHARED = f"use the one from multiprocessing (its Lock, Event, Queue … can be sent to workers), or {_MADE_THERE}"
_OPEN = "give one that is open"
_PICKLING = {"__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__"}

# Parts that are named as a whole instead of searched: what each is in words, and what to do instead. Keyed by the names
# of their classes, because not all exist on every system, and none should be imported for this.
_KINDS: dict[str, tuple[Callable[[Any], str], str]] = {
    "tempfile._TemporaryFileWrapper": (lambda it: f"an open file ({it.name!r})", "open it inside the factory"),
    "_io._IOBase": (lambda it: _file(it), "give its path, and open it inside the factory"),
    "multiprocessing.connection._ConnectionBase": (lambda it: f"{_open_or_closed(it.closed)} connection", _OPEN),
    "_socket.socket": (lambda it: f"{_open_or_closed(it.fileno() < 0)} socket", _OPEN),
    "mmap.mmap": (lambda it: "a memory map", "take multiprocessing.shared_memory, or map it inside the factory"),
    "subprocess.Popen": (lambda it: f"a program started here (pid {it.pid})", "start it inside the factory"),
    "threading.Thread": (lambda it: f"a thread ({it.name!r})", "start it inside the factory"),
    "_thread.lock": (lambda it: "a threading lock", _SHARED),
    "_thread.RLock": (lambda it: "a threading lock", _SHARED),
    "threading.Event": (lambda it: _name_of(it), _SHARED),
    "threading.Condition": (lambda it: _name_of(it), _SHARED),
    "threading.Semaphore": (lambda it: _name_of(it), _SHARED),
    "threading.Barrier": (lambda it: _name_of(it), _SHARED),
    "queue.Queue": (lambda it: f"{_name_of(it)} for threads", _SHARED),
    "_queue.SimpleQueue": (lambda it: f"{_name_of(it)} for threads", _SHARED),
    "sqlite3.Connection": (lambda it: "a connection to a database", "give its path, and connect inside the factory"),
    "select.epoll": (lambda it: _name_of(it), _MADE_THERE),
    "selectors.BaseSelector": (lambda it: _name_of(it), _MADE_THERE),
    "logging.Handler": (lambda it: _name_of(it), "give the logger's name, and add the handler inside the factory"),
    "concurrent.futures._base.Executor": (
        lambda it: f"{_name_of(it)}, whose workers belong to this process",
        _MADE_THERE,
    ),
    "builtins.generator": (lambda it: f"the generator {it.__qualname__}", "give the function that makes it"),
    "_ctypes._Pointer": (lambda it: "a pointer, which means nothing in another process", _MADE_THERE),
}


def holds_number(thing: Any) -> int | None:
    """Return the descriptor that pickling `thing` would send as a mere number; None if there is none.

    That is so for objects that have a `fileno` and do not define how they are pickled.
    """
    kind: Any = type(thing)
    if not hasattr(kind, "fileno") or any(vars(one).keys() & _PICKLING for one in kind.__mro__[:-1]):
        return None
    with contextlib.suppress(Exception):
        number = thing.fileno()
        return number if isinstance(number, int) and number >= 0 else None
    return None


def refusal(given: Mapping[str, Any], why: Callable[[Any], Exception | None]) -> str | None:
    """Return an error text for the first of `given` that cannot be sent: which part of it, why, and what to do instead.

    `why` returns the reason why something cannot be pickled, or None. Returns None if everything can be sent.
    """
    for name, thing in given.items():
        if (cause := why(thing)) is not None:
            path, part, cause = _find(thing, cause, why)
            what, instead = _describe(part)
            place = " → ".join([name, *path])
            return f"{name} cannot be sent to another process: {place} is {what}: {cause}; {instead}"
    return None


def _find(thing: Any, cause: Exception, why: Callable[[Any], Exception | None]) -> tuple[list[str], Any, Exception]:
    """Return the path to the innermost part that fails by itself, that part, and the reason."""
    path: list[str] = []
    seen = [thing]
    while len(seen) < _DEEPEST and _known_kind(seen[-1]) is None and type(seen[-1]) not in copyreg.dispatch_table:
        for label, part in _parts(seen[-1]):
            if isinstance(part, _PLAIN) or any(part is one for one in seen):
                continue
            if (found := why(part)) is not None:
                path.append(label)
                seen.append(part)
                cause = found
                break
        else:
            break
    return path, seen[-1], cause


def _known_kind(part: Any) -> tuple[str, str] | None:
    for kind in type(part).__mro__:
        if (found := _KINDS.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            words, instead = found
            return words(part), instead
    return None


def _describe(part: Any) -> tuple[str, str]:
    if (found := _known_kind(part)) is not None:
        return found
    if (number := holds_number(part)) is not None:
        what = (
            f"{_name_of(part)}, which holds descriptor {number} as a number, which means something else in every "
            f"process"
        )
        return (
            what,
            "give a socket or a connection of multiprocessing, which are duplicated, or open it inside the factory",
        )
    return _name_of(part), _MADE_THERE


def _name_of(part: Any) -> str:
    kind = type(part)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    if callable(part) and hasattr(part, "__qualname__"):
        return f"the {'class' if isinstance(part, type) else 'function'} {part.__qualname__}"
    return f"a{'n' if name[0] in 'aeiouAEIOU' else ''} {name}"


def _open_or_closed(closed: bool) -> str:
    return "a closed" if closed else "an open"


def _file(it: Any) -> str:
    found = {word: getattr(it, word, None) for word in ("name", "mode")}
    words = [f"{word} {value!r}" for word, value in found.items() if isinstance(value, (str, int))]
    return f"{_open_or_closed(it.closed)} file" + (f" ({', '.join(words)})" if words else "")


# ---- parts, as pickling sees them ---------------------------------------------------------------------------------


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping) and not hasattr(thing, "batch_size"):
        yield from ((f"item {key!r}", part) for key, part in thing.items())
        yield from (("a key", key) for key in thing)
    elif isinstance(thing, (list, tuple, deque, Set)):
        names = getattr(thing, "_fields", range(len(thing)))
        yield from ((f"item {name!r}", part) for name, part in zip(names, thing))
    elif isinstance(thing, functools.partial):
        yield from ((f"argument {n}", part) for n, part in enumerate(thing.args))
        yield from ((f"argument {name!r}", part) for name, part in thing.keywords.items())
        yield "its function", thing.func
    elif isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing)
    elif isinstance(thing, (types.MethodType, types.BuiltinMethodType)):
        yield f"the object of its method {thing.__name__!r}", thing.__self__
        yield "its function", getattr(thing, "__func__", None)
    elif isinstance(thing, type):
        yield from ((f"class attribute {name!r}", part) for name, part in list(vars(thing).items()))
        yield from (("its base class", base) for base in thing.__bases__)
    elif isinstance(thing, (property, functools.cached_property, staticmethod, classmethod)):
        yield from (("its function", getattr(thing, name, None)) for name in ("fget", "fset", "func", "__func__"))
    else:
        yield from _parts_of_object(thing)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield f"closure variable {name!r}", cell.cell_contents
    named = [one.name for one in inspect.signature(function).parameters.values() if one.default is not one.empty]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"default of {name!r}", part) for name, part in zip(named, defaults))
    yield from ((f"attribute {name!r}", part) for name, part in vars(function).items())
    for name in _globals_of(function.__code__):
        if name in function.__globals__:
            yield f"global variable {name!r}", function.__globals__[name]


def _globals_of(code: types.CodeType) -> Iterator[str]:
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def _parts_of_object(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, nn.Module):
        yield from ((f"module {name!r}", part) for name, part in thing.named_children())
    try:
        reduced = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # it pickles its content by itself, or cannot be pickled: then its attributes may show why
        yield from _attributes(getattr(thing, "__dict__", {}))
        return
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, *_ = (*reduced, None)
    for one in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(one, dict):
            yield from _attributes(one)
        elif one is not None:
            yield "its state", one
    yield from ((f"part {n} of what it is made from", part) for n, part in enumerate(arguments or ()))


def _attributes(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"attribute {name!r}", part) for name, part in list(state.items()))
