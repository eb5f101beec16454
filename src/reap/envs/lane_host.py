"""The other side of ParallelEnv: what runs in a process that holds lanes.

    bell ──► slot, step ──► env.step on its lanes of that row ──► lanes that ended begin anew ──► one byte back

The env is the very class users have in one process; its rows merely lie in shared memory.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from reap.children import Raised, send
from reap.core.env import Env
from reap.core.shared import SharedFile
from reap.core.slot import Layout, Row, RowKeys, Slot
from reap.envs.accept import as_env
from reap.envs.limit import StepLimit
from reap.envs.serial import joined
from reap.errors import UsageError
from reap.spec import Key, Leaf

BELL = struct.Struct("iii")  # what, slot, step
STEP, SOME, CALL, BEGIN = 0, 1, 2, 3  # a step of all lanes, of some; a message; new episodes in some
DONE, FAILED = b"\1", b"\2"


def built(makers: Any, limit: int | None = None) -> Env:
    """The lanes of one group as one env; episodes end after `limit` steps, if there is one."""
    lanes = [as_env(make, kwargs) for make, kwargs in makers]
    env = joined(lanes) if len(lanes) > 1 else lanes[0]
    if env.tidies or any(leaf.loose for leaf in env.spec.observation.values()):
        env.close()
        raise UsageError(f"{type(env).__name__} cannot be run elsewhere; give it to a collector as it is")
    return env if limit is None else StepLimit(env, limit)


def serve_lanes(
    connection: Connection, fds: Sequence[int], makers: Any, threads: int, limit: int | None = None
) -> None:
    """The life of a child: build the lanes, then step them whenever the bell rings."""
    torch.set_num_threads(threads)
    bell, reply, *files = fds
    env = None
    try:
        env = built(makers, limit)
        send(connection, env.spec)
        host = _Host(env, connection, *(SharedFile(fd=fd) for fd in files))
        host.serve(bell, reply)
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            send(connection, Raised.of(error, "the env"))
            os.write(reply, FAILED)
    finally:
        if env is not None:
            env.close()


class _Host:
    """Lanes of a child, and the memory it shares with the parent."""

    def __init__(
        self, env: Env, connection: Connection, slots: SharedFile, firsts: SharedFile, some: SharedFile
    ) -> None:
        self._env, self._connection, self._files = env, connection, (slots, firsts, some)
        self._keys = RowKeys(env.spec)
        self._rows: dict[int, list[Row]] = {}

    def serve(self, bell: int, reply: int) -> None:
        env, lanes = self._env, range(self._env.spec.lanes)
        while len(data := os.read(bell, BELL.size)) == BELL.size:
            what, place, step = BELL.unpack(data)
            if what == CALL:
                name, arguments = self._connection.recv()
                getattr(self, f"do_{name}")(*arguments)
                send(self._connection, None)
                continue
            chosen: Sequence[int] = lanes if what == STEP else np.flatnonzero(self._some).tolist()
            if what == BEGIN:
                env.reset(chosen, self._first)
                os.write(reply, DONE)
                continue
            ended = env.step(chosen, self._rows[place][step])
            if ended:
                env.reset(ended, self._first)  # at once: it will be wanted, and the others may still be stepping
            os.write(reply, DONE)

    def do_begin(self, first: int, lanes: int) -> None:
        self._from, self._to = first, first + self._env.spec.lanes
        layout = Layout(self._env.spec.observation, 1, lanes, batched=True)
        arrays = layout.arrays(self._files[1].map(max(layout.nbytes, 1))).values()
        self._first = [array[0, self._from : self._to] for array in arrays]
        self._some = self._files[2].map(lanes).view(np.bool_)[self._from : self._to]

    def do_slot(self, place: int, layout: Layout, start: int, end: int) -> None:
        arrays = layout.arrays(self._files[0].map(end)[start : start + layout.nbytes])
        own = Layout(layout.columns, layout.steps, self._env.spec.lanes, batched=True)
        slot = Slot(own, place, {key: array[:, self._from : self._to] for key, array in arrays.items()})
        self._rows[place] = list(slot.cut(self._keys, self._first))

    def do_expect(self, action: Mapping[Key, Leaf]) -> None:
        self._env.expect(action)

    def do_reset(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        self._env.reset(lanes, self._first, seeds)
