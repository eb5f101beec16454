"""What cannot travel to another process: refused by name, with the way to it, what it is, and what to do instead."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gzip
import io
import logging
import mmap
import multiprocessing
import os
import queue
import selectors
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from select import epoll, poll

import cloudpickle
import pytest
import torch
from torch import nn

from reap._system.messages.pickling import dumps, pack
from reap.envs import ParallelEnv
from reap.errors import UsageError
from reap.testing import CountingEnv


class Numbered:
    """Wraps a descriptor as many libraries do: a number, and a `fileno`."""

    def __init__(self, number):
        self._number = number

    def fileno(self):
        return self._number


class Holder:
    def __init__(self, held):
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class Stateful(Holder):
    """Says itself what of it is pickled; what it leaves out is not its reason."""

    def __init__(self, held):
        super().__init__(held)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {"kept": self.held}


class Wrapping(Holder):
    """Pickles by itself what it holds."""

    def __getstate__(self):
        return cloudpickle.dumps(self.held)


class Acting(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.net[1].held = held


@contextlib.contextmanager
def closed(thing):
    thing.close()
    yield thing


@contextlib.contextmanager
def nothing_to_close(thing):
    yield thing


def program():
    """What `Popen` returns, without starting anything."""
    made = subprocess.Popen.__new__(subprocess.Popen)
    made.pid, made._waitpid_lock = 123, threading.Lock()
    return made


@contextlib.contextmanager
def numbered():
    ends = os.pipe()
    yield Numbered(ends[1])
    for end in ends:
        os.close(end)


FILE, PATH = "file", "give its path, and open it inside the factory"
# ruff: noqa: SIM115 (what opens them is entered below)
KINDS = {
    "r": (lambda path: open(path), f"open {FILE} .*'r'", PATH),
    "w": (lambda path: open(path, "w"), f"open {FILE} .*'w'", PATH),
    "r+": (lambda path: open(path, "r+"), f"open {FILE} .*'r\\+'", PATH),
    "append": (lambda path: open(path, "a"), f"open {FILE} .*'a'", PATH),
    "rb": (lambda path: open(path, "rb"), f"open {FILE} .*'rb'", PATH),
    "unbuffered": (lambda path: open(path, "rb", buffering=0), f"open {FILE} .*'rb'", PATH),
    "closed": (lambda path: closed(open(path)), f"closed {FILE}", PATH),
    "gzip": (lambda path: gzip.open(path, "wb"), f"open {FILE}", PATH),
    "temporary": (lambda path: tempfile.NamedTemporaryFile(), f"open {FILE} \\('/", "open it inside the factory"),
    "temporary text": (lambda path: tempfile.TemporaryFile("w+"), f"open {FILE}", PATH),
    "stdin": (lambda path: nothing_to_close(io.TextIOWrapper(open(0, "rb", closefd=False))), f"open {FILE}", PATH),
    "end of os.pipe": (lambda path: os.fdopen(os.open(path, os.O_RDONLY), "rb"), f"open {FILE}", PATH),
    "number": (lambda path: numbered(), "Numbered, which holds descriptor", "which are duplicated, or open it inside"),
    "closed pipe": (lambda path: closed(multiprocessing.Pipe()[0]), "a closed connection", "give one that is open"),
    "closed socket": (lambda path: closed(socket.socket()), "a closed socket", "give one that is open"),
    "mmap": (lambda path: mmap.mmap(-1, 10), "a memory map", "shared_memory"),
    "epoll": (lambda path: epoll(), "select.epoll", "make it inside the factory"),
    "poll": (lambda path: nothing_to_close(poll()), "select.poll", "make it inside the factory"),
    "selector": (lambda path: selectors.DefaultSelector(), "selectors.EpollSelector", "make it inside the factory"),
    "program": (
        lambda path: nothing_to_close(program()),
        r"a program started here \(pid",
        "start it inside the factory",
    ),
    "thread": (lambda path: nothing_to_close(threading.Thread(name="mine")), "a thread .'mine'", "start it inside"),
    "lock": (lambda path: nothing_to_close(threading.Lock()), "a threading lock", "the one from multiprocessing"),
    "rlock": (lambda path: nothing_to_close(threading.RLock()), "a threading lock", "the one from multiprocessing"),
    "event": (lambda path: nothing_to_close(threading.Event()), "threading.Event", "the one from multiprocessing"),
    "queue": (lambda path: nothing_to_close(queue.Queue()), "queue.Queue for threads", "the one from multiprocessing"),
    "generator": (lambda path: nothing_to_close(n for n in "abc"), "the generator .*genexpr", "give the function"),
    "pointer": (lambda path: nothing_to_close(ctypes.pointer(ctypes.c_int(3))), "a pointer", "make it inside"),
    "database": (lambda path: contextlib.closing(sqlite3.connect(":memory:")), "a database", "connect inside"),
    "logging": (lambda path: contextlib.closing(logging.FileHandler(path)), "logging.FileHandler", "add the handler"),
    "executor": (
        lambda path: ThreadPoolExecutor(1),
        "ThreadPoolExecutor, whose workers belong to this process",
        "make it inside",
    ),
    "history": (
        lambda path: nothing_to_close((torch.ones(1, requires_grad=True) * 2).share_memory_()),
        "Tensor",
        "detach",
    ),
}


def use(*_, **__):
    return "CartPole-v1"


def with_default(held):
    def make(a, b=1, thing=held, *, c=2):
        return thing

    return make


def with_keyword_default(held):
    def make(a, *, c=2, thing=held):
        return thing

    return make


def with_class(held):
    class Made:
        kept = held

    return Made


PLACES = {
    "itself": (lambda held: held, ""),
    "closure": (lambda held: lambda: held, "closure variable 'held'"),
    "inner closure": (lambda held: lambda: (lambda: held)(), "closure variable 'held'"),
    "default": (with_default, "default of 'thing'"),
    "keyword default": (with_keyword_default, "default of 'thing'"),
    "attribute": (lambda held: Holder(held), "attribute 'held'"),
    "slot": (lambda held: Slotted(held), "attribute 'held'"),
    "class attribute": (with_class, "class attribute 'kept'"),
    "state": (lambda held: Stateful(held), "attribute 'kept'"),
    "wrapper": (lambda held: Wrapping(Holder(held)), "attribute 'held' → attribute 'held'"),
    "argument": (lambda held: functools.partial(use, 1, held), "argument 1"),
    "keyword": (lambda held: functools.partial(use, log=held), "argument 'log'"),
    "method": (lambda held: Holder(held).__init__, "the object of its method '__init__' → attribute 'held'"),
    "containers": (lambda held: {"a": [1, ("b", {"c": held})]}, "item 'a' → item 1 → item 1 → item 'c'"),
    "policy": (Acting, "module 'net' → module '1' → attribute 'held'"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_travel_is_refused_with_the_way_to_it(kind, tmp_path):
    make, what, instead = KINDS[kind]
    path = tmp_path / "a"
    path.write_text("text")
    with make(path) as held:
        for place, (wrap, way) in PLACES.items():
            thing = wrap(held)
            for send in (pack,) if kind == "history" else (pack, dumps):  # which it loses, as bytes
                with pytest.raises(UsageError, match=what) as caught:
                    send(thing, "create_env_fn")
                text = str(caught.value)
                assert text.startswith("create_env_fn cannot be sent to another process: create_env_fn "), place
                assert f"→ {way} is " in text or not way, f"{place}: {text}"
                assert instead in text, f"{place}: {text}"


def test_a_global_of_the_script_is_found():
    space = {"__name__": "__main__", "log": threading.Lock()}
    exec("def make():\n    return inner()\ndef inner():\n    return log", space)
    with pytest.raises(UsageError, match="make → global variable 'inner' → global variable 'log' is a threading lock"):
        pack(space["make"], "make")


def test_what_is_shared_is_refused_with_the_way_to_it_where_it_has_to_leave_the_machine():
    for thing in (multiprocessing.Pipe()[0], multiprocessing.get_context("spawn").Lock(), socket.socket()):
        with contextlib.closing(thing) if hasattr(thing, "close") else contextlib.nullcontext():
            pack(Holder(thing), "policy")
            with pytest.raises(UsageError, match="policy → attribute 'held' is .*process of this machine"):
                dumps(Holder(thing), "policy")


def test_what_is_no_descriptor_travels():
    """Text in memory, an object that says itself how it is pickled, and the other process's own standard output."""

    class Reopens(Numbered):
        def __reduce__(self):
            return str, ("reopened",)

    with numbered() as one:
        assert pack(Reopens(one.fileno()), "it").unpack() == "reopened"
    assert pack(Numbered(-1), "it").unpack().fileno() == -1
    assert pack(io.StringIO("text"), "it").unpack().read() == "text"
    assert pack(sys.__stdout__, "it").unpack() is not None


def test_nobody_else_s_pickling_is_changed(tmp_path):
    path = tmp_path / "a"
    path.write_text("text")
    with open(path) as file:
        with pytest.raises(UsageError):
            pack(file, "it")
        assert cloudpickle.loads(cloudpickle.dumps(file)).read() == "text"


def test_lanes_name_the_part_of_the_users_factory():
    with pytest.raises(UsageError, match="process: create_env_fn → argument 'lock' is a threading lock"):
        ParallelEnv(2, functools.partial(CountingEnv, lock=threading.Lock()))
    with pytest.raises(UsageError, match="process: create_env_kwargs → item 'lock' is a threading lock"):
        ParallelEnv(2, CountingEnv, create_env_kwargs={"lock": threading.Lock()})
