"""The other side of ParallelEnv and AsyncEnvPool: what runs in a process that holds lanes.

    order pipe ──► slot, step ──► env.step on its lanes of that row ──► lanes that ended begin anew ──► one byte back

The env is the very class users have in one process; its rows merely lie in shared memory.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from reap._system.affinity import Cores, settle_on
from reap._system.conversation import answered, live
from reap._system.fork_server.child import settle
from reap._system.messages import send
from reap._system.pickling import dumps
from reap._system.remote_errors import Raised
from reap.core.env import Env, Rows
from reap.core.resume import CannotResume, generators, set_generators
from reap.core.shared_slots import SharedFile
from reap.core.slot import Layout, Row, RowKeys, Slot
from reap.envs.accept import as_env
from reap.envs.serial import joined
from reap.envs.step_limit import StepLimit
from reap.envs.torchrl.lanes import torchrl_cells
from reap.errors import ReapError, SpecMismatch, UsageError
from reap.failures import RemoteRebuilds
from reap.seeding import fresh_seed, seed_process
from reap.spec import EnvSpec, Key, Leaf

ORDER = struct.Struct("iii")  # what; slot; step, or the token of a PING
STEP = 0  # step all lanes
STEP_SOME = 1  # step the chosen lanes
CALL = 2  # read a message
RESET = 3  # new episodes in the chosen lanes
PING = 4  # answer when all before is done
END = 5  # go home
DRAW = 6  # random actions for all lanes
REBUILD = 7  # another env in this thread
UNSEEDED = -1
ANSWERED, FAILED, REBUILT = b"\1", b"\2", b"\3"
FDS = 5  # order pipe, reply and three files; what follows is the child class's own
PONG = 16  # plus the token of the question
TOKENS = 200  # so many at most: with PONG they are one byte


class Traits(NamedTuple):
    """What a group of lanes does beside stepping (see `Env`): the last word on what is seen next, random actions."""

    has_after_step: bool
    draws: bool


class Rebuilt(NamedTuple):
    """Envs that have raised and were made anew in their place: what they raised and how many seconds it took, and which
    lanes have made no frame because of it.
    """

    told: list[tuple[Raised, float]]
    cut: list[int]


class RebuiltLanes:
    """What is to be told of envs of a group that were made anew; `cut`: lanes whose step is no frame."""

    def __init__(self, env: Env) -> None:
        self.told: list[tuple[Raised, float]] = []
        self.cut: list[int] = []
        self.first = 0  # what the number of its first lane is, for whoever is told
        env.rebuild_lanes(RemoteRebuilds(self._tell).replace)

    def _tell(self, error: ReapError, seconds: float) -> None:
        if error.lane is not None:
            error.lane += self.first
        self.told.append((Raised.of(error, "the env"), seconds))

    def take(self) -> Rebuilt:
        """Return all there is to tell, and forget it."""
        found = Rebuilt(self.told, self.cut)
        self.told, self.cut = [], []
        return found


class LooseValues(NamedTuple):
    """What has no place in shared memory, of lanes that were stepped or begun: leaf by leaf, successors and firsts."""

    lanes: list[int]
    leaves: list[tuple[Any, Any]]


def built(makers: Any, limit: int | None = None) -> Env:
    """The lanes of one group as one env; episodes end after `limit` steps, if there is one."""
    env = joined(makers) if len(makers) > 1 else torchrl_cells(as_env(*makers[0]))
    spec = env.spec
    if any(leaf.loose for leaf in spec.reward.values()):
        env.close()
        also = "" if len(makers) == 1 else "; of envs that share a worker text and objects, too"
        raise UsageError(
            f"what this env returns has no fixed shape (ragged tensors, lazy stacks, tensorclasses, actions that are "
            f"no tensors{also}), so it cannot be taken step by step; take SerialEnv, or a collector with workers "
            f"(MultiSyncCollector)"
        )
    if env.has_after_step and (spec.rows != "whole" or spec.ready_of is not None):
        env.close()
        raise UsageError(f"{type(env).__name__} cannot be run elsewhere; give it to a collector as it is")
    return env if limit is None else StepLimit(env, limit)


def loose_leaves(spec: EnvSpec) -> list[int]:
    """Which observations are texts, objects or ragged: they travel as messages, not in shared memory."""
    return [n for n, leaf in enumerate(spec.observation.values()) if leaf.loose]


def firsts_in(block: np.ndarray[Any, Any], layout: Layout) -> list[np.ndarray[Any, Any]]:
    """First observations of all lanes in shared memory; those without bytes beside it."""
    slot = Slot(layout, 0, layout.arrays(block))
    return [slot.arrays[key][0] for key in layout.columns]


def advance(env: Env, lanes: Sequence[int], row: Row, into: Rows, rebuilt: RebuiltLanes | None = None) -> None:
    """One step of `lanes`; those that ended begin anew at once: they will be wanted, and others may still be stepping.

    `into` gets first observations; of an env that tidies what every lane sees next, as agents may begin anew alone.
    """
    ended = env.step(lanes, row)
    if env.has_after_step:
        at = list(lanes)
        for array, successor in zip(into, row.next):
            array[at] = successor[at]
        following = Row()
        following.after = tuple(into)
        env.after_step(following)
    if ended:
        if rebuilt is not None and rebuilt.told:
            rebuilt.cut += [lane for lane in ended if not row.done[lane]]
        env.reset(ended, into)


def choices(file: SharedFile, lanes: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Which lanes are meant, where not all are; and with which seeds episodes begin, `UNSEEDED` for none."""
    block = file.map(9 * lanes)
    return block[8 * lanes :].view(np.bool_), block[: 8 * lanes].view(np.int64)


def reset_some(env: Env, lanes: Sequence[int], into: Rows, seeds: np.ndarray[Any, Any]) -> None:
    """New episodes in `lanes`, each with its seed if it was given one."""
    seeded = [lane for lane in lanes if seeds[lane] != UNSEEDED]
    if seeded:
        env.reset(seeded, into, seeds[seeded].tolist())
    if len(seeded) < len(lanes):
        env.reset([lane for lane in lanes if seeds[lane] == UNSEEDED], into)


def serve(
    connection: Connection,
    fds: Sequence[int],
    make: Callable[[Connection, Sequence[int]], EnvChild],
    threads: int,
    cores: Cores | None,
) -> None:
    """The life of a child: it makes its envs, says what they are like, does what it is told; its errors are told."""
    order_fd, reply, *files = fds[:FDS]

    def build() -> EnvChild:
        settle_on(cores)  # first: threads run where whoever starts them does, and torch starts some at once
        torch.set_num_threads(threads)
        seed_process(fresh_seed())  # forked from one server: all would draw the same numbers
        return make(connection, fds)

    def serve_orders(child: EnvChild) -> None:
        child.files = [SharedFile(fd=fd) for fd in files]
        settle()
        send(connection, (child.spec, child.traits))
        child.serve(order_fd)

    def tell(raised: Raised) -> None:
        with contextlib.suppress(OSError):
            send(connection, raised)
            os.write(reply, FAILED)

    live(build, serve_orders, tell=tell, doing=lambda _: "the env", close=lambda child: child.close())


class EnvChild(abc.ABC):
    """Lanes of a child, and the memory it shares with the parent: files of rows, of first observations, of choices."""

    files: list[SharedFile]
    _parts: Sequence[Env] = ()  # its envs, where they can be asked what they are in the middle of

    def __init__(self, spec: EnvSpec, traits: Traits, connection: Connection, fds: Sequence[int]) -> None:
        self.spec, self.traits, self._connection, self._reply = spec, traits, connection, fds[1]
        self._keys = RowKeys(spec)

    def serve(self, order_fd: int) -> None:
        """Do what the order pipe says until nobody is there to write to it."""
        while len(data := os.read(order_fd, ORDER.size)) == ORDER.size:
            what, place, step = ORDER.unpack(data)
            if what == CALL:
                number, name, arguments = self._connection.recv()
                work = functools.partial(getattr(self, f"do_{name}"), *arguments)
                send(self._connection, answered(number, work, SpecMismatch))  # refused: another may be asked for
            else:
                self._obey(what, place, step)

    def do_begin(self, first: int, lanes: int) -> None:
        """Which lanes of all are ours: from now on `_first` and `_some` are what the parent sees."""
        self._from, self._to = first, first + self.spec.lanes
        layout = Layout(self.spec.observation, 1, lanes, batched=True)
        firsts = firsts_in(self.files[1].map(max(layout.nbytes, 1)), layout)
        self._first = [first[self._from : self._to] for first in firsts]
        some, seeds = choices(self.files[2], lanes)
        self._some, self._seeds = some[self._from : self._to], seeds[self._from : self._to]

    def do_open_state(self) -> Any:
        """What its envs are in the middle of, and where its random generators are; a text: why that is not known."""
        try:
            return {"envs": [env.open_state() for env in self._parts], "random": generators()}
        except CannotResume as why:
            return str(why)

    def do_load_open_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `do_open_state` returned."""
        for env, one in zip(self._parts, state["envs"]):
            env.load_open_state(one)
        set_generators(state["random"])

    def _rows_of(self, layout: Layout, start: int, end: int, first: int, last: int, env: EnvSpec) -> list[Row]:
        """Rows of a slot, of our lanes from `first` to `last`, which are one env."""
        arrays = layout.arrays(self.files[0].map(end)[start : start + layout.nbytes])
        own = slice(self._from + first, self._from + last)
        lanes = Layout(layout.columns, layout.steps, last - first, batched=env.batched, look=env.look)
        slot = Slot(lanes, 0, {key: array[:, own] for key, array in arrays.items()})
        return list(slot.cut(self._keys, [array[first:last] for array in self._first]))

    def _answered(self, what: int, token: int) -> bool:
        """Answer a PING, when the orders before it are done; returns whether it was one."""
        if what == PING:
            os.write(self._reply, bytes([PONG + token]))
        return what == PING

    def _answer(self) -> None:
        os.write(self._reply, ANSWERED)

    def _obey(self, what: int, place: int, step: int) -> None:
        """Whatever is no message; nothing, where lanes are told otherwise."""
        raise NotImplementedError

    @abc.abstractmethod
    def do_slot(self, place: int, layout: Layout, start: int, end: int) -> None:
        """Learn of a new slot, which is called `place` and lies in these bytes."""

    @abc.abstractmethod
    def do_expect(self, action: Mapping[Key, Leaf]) -> None:
        """Learn how actions will look."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the envs."""


class LanesChild(EnvChild):
    """All lanes as one env, in the child's own thread."""

    def __init__(
        self, connection: Connection, fds: Sequence[int], *, makers: Any, limit: int | None, rebuild: bool = False
    ) -> None:
        self._env = built(makers, limit)
        self._rebuilt = RebuiltLanes(self._env) if rebuild else None
        self._parts = [self._env]
        super().__init__(self._env.spec, Traits(self._env.has_after_step, self._env.draws), connection, fds)
        self._rows: dict[int, list[Row]] = {}
        self._loose = loose_leaves(self.spec)

    def _obey(self, what: int, place: int, step: int) -> None:
        if self._answered(what, step):
            return
        chosen: Sequence[int] = range(self.spec.lanes) if what == STEP else np.flatnonzero(self._some).tolist()
        if what == RESET:
            reset_some(self._env, chosen, self._first, self._seeds)
        elif what == DRAW:
            self._env.draw(self._rows[place][step])
        else:
            advance(self._env, chosen, self._rows[place][step], self._first, self._rebuilt)
        if not self._loose:
            if self._rebuilt is None or not self._rebuilt.told:
                self._answer()
                return
            send(self._connection, self._rebuilt.take())  # before the byte: who has read that reads this
            os.write(self._reply, REBUILT)
            return
        stepped = self._rows[place][step].next if what in (STEP, STEP_SOME) else None
        told = LooseValues(
            list(chosen), [(stepped and stepped[n][chosen], self._first[n][chosen]) for n in self._loose]
        )
        packed = dumps(told, "an observation")  # before it says that it is done: it may fail
        self._answer()  # before what it says: who does not listen yet would leave us waiting
        self._connection.send_bytes(packed)

    def do_slot(self, place: int, layout: Layout, start: int, end: int) -> None:
        self._rows[place] = self._rows_of(layout, start, end, 0, self.spec.lanes, self.spec)

    def do_expect(self, action: Mapping[Key, Leaf]) -> None:
        self._env.expect(action)

    def do_reset(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Begin new episodes in `lanes`."""
        self._env.reset(lanes, self._first, seeds)

    def close(self) -> None:
        self._env.close()
