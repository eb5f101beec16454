"""The child's side of ParallelEnv and AsyncEnvPool: what runs in a process that holds lanes.

    order pipe ──► slot, step ──► env.step on its lanes of that row ──► lanes that ended are reset ──► one byte back

The env is the same class that users have in one process; only its rows lie in shared memory.
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

from reap._system.affinity import Cores, pin_process
from reap._system.conversation import answered, live
from reap._system.fork_server.child import freeze_objects
from reap._system.messages.framed import send
from reap._system.messages.pickling import dumps
from reap._system.messages.remote_errors import Raised
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

ORDER = struct.Struct("iii")  # order code; slot; step, or the token of a PING
STEP = 0  # step all lanes
STEP_SOME = 1  # step the chosen lanes
CALL = 2  # read a call from the connection
RESET = 3  # start new episodes in the chosen lanes
PING = 4  # answer once all earlier orders are done
END = 5  # end the thread
DRAW = 6  # draw random actions for all lanes
REBUILD = 7  # replace the env of this thread
UNSEEDED = -1
ANSWERED, FAILED, REBUILT = b"\1", b"\2", b"\3"
FDS = 5  # order pipe, reply pipe and three files; further descriptors belong to the child class
PONG = 16  # plus the token of the PING: the byte that answers it
TOKENS = 200  # how many tokens there are at most: PONG plus a token must fit into one byte


class Traits(NamedTuple):
    """Two traits of a group of lanes (see `EnvHooks`): `after_step` changes what is seen next; it draws actions."""

    has_after_step: bool
    draws: bool


class Rebuilt(NamedTuple):
    """Envs that raised and were rebuilt: what each raised, how many seconds the rebuilding took, and which lanes made
    no frame because of it.
    """

    told: list[tuple[Raised, float]]
    cut: list[int]


class RebuiltLanes:
    """Collects which envs of a group were rebuilt, to report it; `cut`: lanes whose step is no frame."""

    def __init__(self, env: Env) -> None:
        self.told: list[tuple[Raised, float]] = []
        self.cut: list[int] = []
        self.first = 0  # the number of the group's first lane, added to the lanes in errors
        env.rebuild_lanes(RemoteRebuilds(self._tell).replace)

    def _tell(self, error: ReapError, seconds: float) -> None:
        if error.lane is not None:
            error.lane += self.first
        self.told.append((Raised.of(error, "the env"), seconds))

    def take(self) -> Rebuilt:
        """Return all that was collected, and forget it."""
        found = Rebuilt(self.told, self.cut)
        self.told, self.cut = [], []
        return found


class LooseValues(NamedTuple):
    """Values with no place in shared memory, of stepped or reset lanes: per leaf, successors and first observations."""

    lanes: list[int]
    leaves: list[tuple[Any, Any]]


def built(makers: Any, limit: int | None = None) -> Env:
    """Build the lanes of one group as one env; episodes end after `limit` steps, if there is a limit."""
    env = joined(makers) if len(makers) > 1 else torchrl_cells(as_env(*makers[0]))
    spec = env.spec
    if any(leaf.loose for leaf in spec.reward.values()):
        env.close()
        also = "" if len(makers) == 1 else "; for envs that share a worker, also text and objects"
        raise UsageError(
            f"what this env returns has no fixed shape (ragged tensors, lazy stacks, tensorclasses, actions "
            f"that are not tensors{also}), so it cannot be passed on step by step; use SerialEnv, or a "
            f"collector with workers (MultiSyncCollector)"
        )
    if env.has_after_step and (spec.rows != "whole" or spec.ready_of is not None):
        env.close()
        raise UsageError(f"{type(env).__name__} cannot be run in a worker; pass it to a collector unchanged")
    return env if limit is None else StepLimit(env, limit)


def loose_leaves(spec: EnvSpec) -> list[int]:
    """Return the indices of observations that are text, objects or ragged: these are sent as messages."""
    return [n for n, leaf in enumerate(spec.observation.values()) if leaf.loose]


def firsts_in(block: np.ndarray[Any, Any], layout: Layout) -> list[np.ndarray[Any, Any]]:
    """Return the arrays for first observations of all lanes, in shared memory; loose leaves get arrays of their own."""
    slot = Slot(layout, 0, layout.arrays(block))
    return [slot.arrays[key][0] for key in layout.columns]


def advance(env: Env, lanes: Sequence[int], row: Row, into: Rows, rebuilt: RebuiltLanes | None = None) -> None:
    """Step `lanes`, and at once reset those whose episodes ended; other groups may still be stepping.

    `into` gets their first observations. From an env that has `after_step` it gets what every lane sees next, because
    an agent may be reset without its lane.
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
    """Return two arrays in shared memory: which lanes an order is for, and the seeds of resets (`UNSEEDED`: none)."""
    block = file.map(9 * lanes)
    return block[8 * lanes :].view(np.bool_), block[: 8 * lanes].view(np.int64)


def reset_some(env: Env, lanes: Sequence[int], into: Rows, seeds: np.ndarray[Any, Any]) -> None:
    """Start new episodes in `lanes`, each with its seed if it was given one."""
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
    """Run a child: build its envs, send their spec, carry out orders, and report errors to the parent."""
    order_fd, reply, *files = fds[:FDS]

    def build() -> EnvChild:
        pin_process(cores)  # first: threads inherit these cores, and torch starts some threads at once
        torch.set_num_threads(threads)
        seed_process(fresh_seed())  # children forked from one server would draw the same numbers
        return make(connection, fds)

    def serve_orders(child: EnvChild) -> None:
        child.files = [SharedFile(fd=fd) for fd in files]
        freeze_objects()
        send(connection, (child.spec, child.traits))
        child.serve(order_fd)

    def tell(raised: Raised) -> None:
        with contextlib.suppress(OSError):
            send(connection, raised)
            os.write(reply, FAILED)

    live(build, serve_orders, tell=tell, doing=lambda _: "the env", close=lambda child: child.close())


class EnvChild(abc.ABC):
    """The lanes of a child and the files it shares with the parent: rows, first observations, chosen lanes, seeds."""

    files: list[SharedFile]
    _parts: Sequence[Env] = ()  # its envs, where their open state can be saved

    def __init__(self, spec: EnvSpec, traits: Traits, connection: Connection, fds: Sequence[int]) -> None:
        self.spec, self.traits, self._connection, self._reply = spec, traits, connection, fds[1]
        self._keys = RowKeys(spec)

    def serve(self, order_fd: int) -> None:
        """Carry out orders from the order pipe until the parent has closed it."""
        while len(data := os.read(order_fd, ORDER.size)) == ORDER.size:
            what, slot_number, step = ORDER.unpack(data)
            if what == CALL:
                number, name, arguments = self._connection.recv()
                work = functools.partial(getattr(self, f"do_{name}"), *arguments)
                send(self._connection, answered(number, work, SpecMismatch))  # refused: the parent may call again
            else:
                self._execute(what, slot_number, step)

    def do_number_lanes(self, first: int, lanes: int) -> None:
        """Learn the number of this child's first lane; `_first`, `_some` and `_seeds` become views of shared memory."""
        self._from, self._to = first, first + self.spec.lanes
        layout = Layout(self.spec.observation, 1, lanes, batched=True)
        firsts = firsts_in(self.files[1].map(max(layout.nbytes, 1)), layout)
        self._first = [first[self._from : self._to] for first in firsts]
        some, seeds = choices(self.files[2], lanes)
        self._some, self._seeds = some[self._from : self._to], seeds[self._from : self._to]

    def do_open_state(self) -> Any:
        """Return the open state of its envs and random generators; or, as a string, why that cannot be known."""
        try:
            return {"envs": [env.open_state() for env in self._parts], "random": generators()}
        except CannotResume as why:
            return str(why)

    def do_load_open_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `do_open_state` returned."""
        for env, one in zip(self._parts, state["envs"]):
            env.load_open_state(one)
        set_generators(state["random"])

    def _rows_of(self, layout: Layout, start: int, end: int, first: int, last: int, env: EnvSpec) -> list[Row]:
        """Return the rows of a slot, cut to this child's lanes from `first` to `last`, which are one env."""
        arrays = layout.arrays(self.files[0].map(end)[start : start + layout.nbytes])
        own = slice(self._from + first, self._from + last)
        lanes = Layout(layout.columns, layout.steps, last - first, batched=env.batched, look=env.look)
        slot = Slot(lanes, 0, {key: array[:, own] for key, array in arrays.items()})
        return list(slot.cut(self._keys, [array[first:last] for array in self._first]))

    def _answer_ping(self, what: int, token: int) -> bool:
        """Answer a PING, since all orders before it are done; returns whether the order was one."""
        if what == PING:
            os.write(self._reply, bytes([PONG + token]))
        return what == PING

    def _answer(self) -> None:
        os.write(self._reply, ANSWERED)

    def _execute(self, what: int, slot_number: int, step: int) -> None:
        """Carry out an order that is not a call; not used where threads read their orders themselves."""
        raise NotImplementedError

    @abc.abstractmethod
    def do_slot(self, slot_number: int, layout: Layout, start: int, end: int) -> None:
        """Learn of a new slot of this number, which lies from `start` in a file that now has `end` bytes."""

    @abc.abstractmethod
    def do_expect(self, action: Mapping[Key, Leaf]) -> None:
        """Learn the shapes and dtypes of actions."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the envs."""


class LanesChild(EnvChild):
    """All lanes of a child as one env, stepped in its main thread."""

    def __init__(
        self, connection: Connection, fds: Sequence[int], *, makers: Any, limit: int | None, rebuild: bool = False
    ) -> None:
        self._env = built(makers, limit)
        self._rebuilt = RebuiltLanes(self._env) if rebuild else None
        self._parts = [self._env]
        super().__init__(self._env.spec, Traits(self._env.has_after_step, self._env.draws), connection, fds)
        self._rows: dict[int, list[Row]] = {}
        self._loose = loose_leaves(self.spec)

    def _execute(self, what: int, slot_number: int, step: int) -> None:
        if self._answer_ping(what, step):
            return
        chosen: Sequence[int] = range(self.spec.lanes) if what == STEP else np.flatnonzero(self._some).tolist()
        if what == RESET:
            reset_some(self._env, chosen, self._first, self._seeds)
        elif what == DRAW:
            self._env.draw(self._rows[slot_number][step])
        else:
            advance(self._env, chosen, self._rows[slot_number][step], self._first, self._rebuilt)
        if not self._loose:
            if self._rebuilt is None or not self._rebuilt.told:
                self._answer()
                return
            send(self._connection, self._rebuilt.take())  # before the byte: a parent that has read the byte reads this
            os.write(self._reply, REBUILT)
            return
        stepped = self._rows[slot_number][step].next if what in (STEP, STEP_SOME) else None
        told = LooseValues(
            list(chosen), [(stepped and stepped[n][chosen], self._first[n][chosen]) for n in self._loose]
        )
        packed = dumps(told, "an observation")  # before the answer: it may fail
        self._answer()  # before the message: it may be too large for the socket, which the parent reads after the byte
        self._connection.send_bytes(packed)

    def do_slot(self, slot_number: int, layout: Layout, start: int, end: int) -> None:
        self._rows[slot_number] = self._rows_of(layout, start, end, 0, self.spec.lanes, self.spec)

    def do_expect(self, action: Mapping[Key, Leaf]) -> None:
        self._env.expect(action)

    def close(self) -> None:
        self._env.close()
