"""ParallelEnv: lanes in child processes, the policy here. One message per process and step.

    policy ──► row t (a slot both sides see) ──┬─ bell: slot, t ──► child 0: the usual env class, on its lanes of row t
                                               └─ bell: slot, t ──► child 1
    row t+1 ◄── copy ◄── row t ◄── results written in place, one byte back from each

A child resets a lane as soon as it ended and keeps the first observation ready, so the loop's reset costs no message.
Where a row is not in shared memory (an env used by hand, a slot of somebody else), actions and results go through one
row that is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import select
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from reap.children import Child, Raised, StartMethod, dumps, end, send
from reap.core.env import Env, Rows
from reap.core.shared import SharedFile
from reap.core.slot import FLAGS, MASK, Layout, Row, RowKeys, Slot
from reap.envs.accept import as_env
from reap.envs.base import EnvBase
from reap.envs.serial import joined, one_each
from reap.errors import ReapError, SpecMismatch, UsageError, WorkerDied, WorkerRaised, WorkerSilent, WrongArgument
from reap.spec import READY, EnvSpec, Key, Leaf

_BELL = struct.Struct("iii")  # what, slot, step
_STEP, _SOME, _CALL = 0, 1, 2
_DONE, _FAILED = b"\1", b"\2"
_DEADLINE = 5.0


class _Remote:
    """A child process and its lanes, `[first, last)` of all."""

    def __init__(self, child: Child, bell: int, reply: int) -> None:
        self.child, self.bell, self.reply = child, bell, reply
        self.spec: EnvSpec
        self.first = self.last = 0
        self.owes = False  # a step was sent, its answer has not come


class ProcessLanes(Env):
    """Envs in child processes as lanes of one."""

    def __init__(
        self,
        makers: Sequence[Sequence[tuple[Any, Mapping[str, Any]]]],
        *,
        timeout: float | None = None,
        start_method: StartMethod = "forkserver",
        threads: int = 1,
    ) -> None:
        self._timeout = timeout
        self._slots, self._firsts, self._control = (
            SharedFile("reap-rows"),
            SharedFile("reap-first"),
            SharedFile("reap-some"),
        )
        self._children: list[_Remote] = []
        self._owner = os.getpid()
        self._action: dict[Key, Leaf] | None = None
        self._by_hand: tuple[tuple[Key, ...], Slot, Row] | None = None
        self._end, self._places = 0, 0
        try:
            for n, own in enumerate(makers):
                self._children.append(self._start(n, own, start_method, threads))
            for remote in self._children:
                remote.spec = self._answer(remote)
            self._join()
            for remote in self._children:
                self._call(remote, "begin", remote.first, self.spec.lanes)
        except BaseException:
            self.close()
            raise

    def _start(self, n: int, makers: Any, start: StartMethod, threads: int) -> _Remote:
        theirs, bell = os.pipe()
        reply, answer = os.pipe()
        target = dumps(functools.partial(_serve, makers=makers, threads=threads), "create_env_fn")
        fds = [theirs, answer, self._slots.fd, self._firsts.fd, self._control.fd]
        try:
            child = Child(target, fds=fds, start=start, name=f"reap-lanes-{n}")
        except BaseException:
            os.close(bell)
            os.close(reply)
            raise
        finally:
            os.close(theirs)
            os.close(answer)
        return _Remote(child, bell, reply)

    def _join(self) -> None:
        first = self._children[0].spec
        lanes = 0
        for n, remote in enumerate(self._children):
            spec = remote.spec
            for mine, other in (
                (first.observation, spec.observation),
                (first.action, spec.action),
                (first.reward, spec.reward),
            ):
                if [(k, v.shape, v.dtype) for k, v in mine.items()] != [
                    (k, v.shape, v.dtype) for k, v in other.items()
                ]:
                    raise SpecMismatch(f"processes 0 and {n} have different envs: {first} and {spec}")
            remote.first, remote.last = lanes, lanes + spec.lanes
            lanes = remote.last
        if first.rows != "whole" or first.ready_of is not None:
            raise UsageError("this env brings lanes of its own that skip steps; give it to a collector as it is")
        self.spec = EnvSpec(
            observation=first.observation,
            action=first.action,
            lanes=lanes,
            batched=True,
            reward=first.reward,
            single_steps=all(r.spec.single_steps for r in self._children),
            single_resets=all(r.spec.single_resets for r in self._children),
            side=first.side,
        )
        layout = Layout(first.observation, 1, lanes, batched=True)
        self._first = [array[0] for array in layout.arrays(self._firsts.map(max(layout.nbytes, 1))).values()]
        self._some = self._control.map(lanes).view(np.bool_)
        self._fresh = np.zeros(lanes, bool)  # ended and begun anew; the first observation waits in `_first`

    # ---- talking --------------------------------------------------------------------------------------------------

    def _ring(self, remote: _Remote, what: int, place: int = 0, step: int = 0) -> None:
        try:
            os.write(remote.bell, _BELL.pack(what, place, step))
        except BrokenPipeError:
            raise self._gone(remote) from None

    def _gone(self, remote: _Remote) -> ReapError:
        """Why a child does not answer: what it said last, or how it ended."""
        with contextlib.suppress(EOFError, OSError):
            while remote.child.connection.poll():
                message = remote.child.connection.recv()
                if isinstance(message, Raised):
                    return self._named(message.unpack(), remote)
        remote.child.gone(1.0)
        stack = remote.child.stack()
        told = remote.child.how_it_ended() + (f"; its last stack:\n{stack}" if stack else "")
        return WorkerDied(told).at(worker=self._name(remote))

    def _name(self, remote: _Remote) -> str:
        lanes = f"lanes {remote.first} to {remote.last - 1}" if remote.last else "lanes"
        return f"of {lanes} (pid {remote.child.pid})"

    def _named(self, error: ReapError, remote: _Remote) -> ReapError:
        if error.lane is not None:
            error.lane += remote.first
        return error.at(worker=self._name(remote))

    def _wait(self, remote: _Remote, fd: int) -> None:
        if self._timeout is None or select.select([fd, remote.child.sentinel], [], [], self._timeout)[0]:
            return
        stack = remote.child.ask_stack() or "(it does not answer signals)"
        raise WorkerSilent(f"sent nothing for {self._timeout} s; its stack:\n{stack}").at(worker=self._name(remote))

    def _finish(self, remote: _Remote) -> None:
        """The byte a child owes for a step."""
        self._wait(remote, remote.reply)
        data = os.read(remote.reply, 1)
        remote.owes = False
        if data != _DONE:
            raise self._gone(remote)

    def _answer(self, remote: _Remote) -> Any:
        """The next message, which is also what an error comes as."""
        connection, sentinel = remote.child.connection, remote.child.sentinel
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not connection.poll(0):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = select.select([connection.fileno(), sentinel], [], [], left)[0]
            if not ready:
                self._wait(remote, connection.fileno())
            if sentinel in ready and not connection.poll(0):
                raise self._gone(remote)
        try:
            message = connection.recv()
        except (EOFError, ConnectionError):
            raise self._gone(remote) from None
        if isinstance(message, Raised):
            raise self._named(message.unpack(), remote)
        return message

    def _call(self, remote: _Remote, name: str, *arguments: Any) -> None:
        if remote.owes:  # a step that was broken off (Ctrl-C)
            self._finish(remote)
        self._ring(remote, _CALL)
        send(remote.child.connection, (name, arguments))
        self._answer(remote)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def make_slot(self, layout: Layout, index: int) -> Slot:
        start, self._end = self._end, self._end + -(-layout.nbytes // 4096) * 4096
        block = self._slots.map(self._end)[start : start + layout.nbytes]
        slot = Slot(layout, index, layout.arrays(block))
        slot.place, self._places = self._places, self._places + 1
        bare = Layout(
            {k: Leaf(v.shape, v.dtype) for k, v in layout.columns.items()}, layout.steps, layout.lanes, batched=True
        )
        for remote in self._children:
            self._call(remote, "slot", slot.place, bare, start, self._end)
        return slot

    def _row_by_hand(self, row: Row) -> Row:
        """A row both sides see, for a step on one they do not."""
        assert self._action is not None
        keys = (*self._action, MASK) if row.mask is not None else tuple(self._action)
        if self._by_hand is None or self._by_hand[0] != keys:
            columns = _columns(self.spec, self._action)
            if row.mask is not None:
                columns[MASK] = Leaf((), torch.bool)
            slot = self.make_slot(Layout(columns, 1, self.spec.lanes, batched=True), 0)
            (shared,) = slot.cut(RowKeys(self.spec), self._first)
            self._by_hand = keys, slot, shared
        _, slot, shared = self._by_hand
        slot.clear_flags()
        return shared

    # ---- the env --------------------------------------------------------------------------------------------------

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        if self._action == dict(action):
            return
        bare = {key: Leaf(leaf.shape, leaf.dtype) for key, leaf in action.items()}
        for remote in self._children:
            self._call(remote, "expect", bare)
        self._action, self._by_hand = dict(action), None

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        chosen = list(lanes)
        wanted = [lane for lane in chosen if seeds is not None or not self._fresh[lane]]
        if wanted:
            given = dict(zip(chosen, seeds)) if seeds is not None else None
            self._reset(wanted, given)
        self._fresh[chosen] = False
        for array, first in zip(into, self._first):
            array[chosen] = first[chosen]

    def _reset(self, lanes: Sequence[int], seeds: Mapping[int, int] | None) -> None:
        asked = []
        for remote in self._children:
            own = [lane for lane in lanes if remote.first <= lane < remote.last]
            if own:
                if remote.owes:
                    self._finish(remote)
                self._ring(remote, _CALL)
                theirs = None if seeds is None else [seeds[lane] for lane in own]
                send(remote.child.connection, ("reset", ([lane - remote.first for lane in own], theirs)))
                asked.append(remote)
        for remote in asked:
            self._answer(remote)

    def send(self, lanes: Sequence[int], row: Row) -> None:
        shared = row
        if row.place is None:
            shared = self._row_by_hand(row)
            for mine, given in zip(shared.action, row.action):
                mine[...] = given
        self._sent = lanes, row
        self._shared = shared
        assert shared.place is not None
        place, step = shared.place
        all_of_them = len(lanes) == self.spec.lanes
        if not all_of_them:
            self._some[:] = False
            self._some[list(lanes)] = True
        for remote in self._children:
            if remote.owes:
                self._finish(remote)
            if all_of_them or self._some[remote.first : remote.last].any():
                remote.owes = True
                self._ring(remote, _STEP if all_of_them else _SOME, place, step)

    def recv(self) -> list[int]:
        for remote in self._children:
            if remote.owes:
                self._finish(remote)
        _, row = self._sent
        shared = self._shared
        if shared is not row:
            self._copy(shared, row)
        done = row.done
        if not done.any():
            return []
        self._fresh |= done
        ended: list[int] = np.flatnonzero(done).tolist()
        return ended

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        self.send(lanes, row)
        return self.recv()

    def _copy(self, shared: Row, row: Row) -> None:
        lanes, _ = self._sent
        at: Any = slice(None) if len(lanes) == self.spec.lanes else list(lanes)
        for mine, theirs in zip((*row.next[: len(shared.next)], *row.rewards), (*shared.next, *shared.rewards)):
            mine[at] = theirs[at]
        for mine, theirs in (
            (row.done, shared.done),
            (row.terminated, shared.terminated),
            (row.truncated, shared.truncated),
        ):
            mine[at] = theirs[at]

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        children, self._children = self._children, []
        for remote in children:
            os.close(remote.bell)
            os.close(remote.reply)
            remote.child.connection.close()
        end([remote.child for remote in children], patience=0.4 * _DEADLINE, deadline=_DEADLINE)
        for file in (self._slots, self._firsts, self._control):
            file.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class ReadyProcessLanes(ProcessLanes):
    """The same, but stepped as they are ready: of all processes, the lanes of `ready` at a time (see core/ready.py).

    Who is ready cannot be known when a child writes its results, so they come through the row both sides share.
    """

    tidies = True

    def __init__(self, makers: Sequence[Sequence[tuple[Any, Mapping[str, Any]]]], ready: int, **options: Any) -> None:
        super().__init__(makers, **options)
        sizes = {remote.last - remote.first for remote in self._children}
        if len(sizes) != 1:
            self.close()
            raise UsageError(f"ready needs as many lanes in every process, there are {sorted(sizes)}")
        self._all, self._each, self._ready = self.spec, sizes.pop(), ready
        self._lane = len(self.spec.observation)
        self.spec = dataclasses.replace(
            self._all,
            observation={**self._all.observation, READY: Leaf((), torch.int64)},
            lanes=ready * self._each,
            ready_of=self._all.lanes,
            rows="skipping",
            single_steps=False,
            single_resets=False,
            side=self._all.side | {READY},
        )
        self._in_hand: list[_Remote] = []
        self._away: list[_Remote] = []  # in the order in which they were sent
        self._just_reset: deque[_Remote] = deque()  # begun anew, not handed out yet

    def make_slot(self, layout: Layout, index: int) -> Slot:
        return Slot(layout, index)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        """All lanes begin anew; `into` gets those of the first processes, the others are the first to come back."""
        for remote in self._children:
            if remote.owes:
                self._finish(remote)
        self._away.clear()
        everyone = range(self._all.lanes)
        self._reset(everyone, None if seeds is None else dict(zip(everyone, seeds)))
        self._in_hand, self._just_reset = self._children[: self._ready], deque(self._children[self._ready :])
        for at, remote in zip(self._windows(), self._in_hand):
            self._hand_out(remote, at, into, self._first)

    def _windows(self) -> list[slice]:
        return [slice(p * self._each, (p + 1) * self._each) for p in range(self._ready)]

    def _hand_out(self, remote: _Remote, at: slice, into: Rows, values: Rows) -> None:
        for array, value in zip(into, values):
            array[at] = value[remote.first : remote.last]
        into[self._lane][at] = range(remote.first, remote.last)

    def send(self, lanes: Sequence[int], row: Row) -> None:
        self._sent = lanes, row
        shared = self._shared = self._exchange()
        assert shared.place is not None
        for at, remote in zip(self._windows(), self._in_hand):
            own = slice(remote.first, remote.last)
            for flag in (shared.done, shared.terminated, shared.truncated):
                flag[own] = False
            for mine, given in zip(shared.action, row.action):
                mine[own] = given[at]
            remote.owes = True
            self._away.append(remote)
            self._ring(remote, _STEP, *shared.place)

    def _exchange(self) -> Row:
        if self._by_hand is None:
            assert self._action is not None
            slot = super().make_slot(Layout(_columns(self._all, self._action), 1, self._all.lanes, batched=True), 0)
            (shared,) = slot.cut(RowKeys(self._all), self._first)
            self._by_hand = (), slot, shared
        return self._by_hand[2]

    def recv(self) -> list[int]:
        _, row = self._sent
        shared = self._shared
        assert row.mask is not None
        self._in_hand, self._began = [], []
        for at in self._windows():
            if self._just_reset:
                remote = self._just_reset.popleft()
                self._hand_out(remote, at, row.next, self._first)
                row.mask[at] = False
            else:
                remote = self._first_ready()
                own = slice(remote.first, remote.last)
                self._hand_out(remote, at, row.next, shared.next)
                for mine, theirs in zip(row.rewards, shared.rewards):
                    mine[at] = theirs[own]
                done = shared.done[own]
                if done.any():
                    row.done[at], row.terminated[at] = done, shared.terminated[own]
                    row.truncated[at] = shared.truncated[own]
                    began = np.flatnonzero(done)
                    self._began.append((at.start + began, remote.first + began))
            self._in_hand.append(remote)
        return []  # nobody is to be reset: the children have done it

    def _first_ready(self) -> _Remote:
        """Of those that have answered, the one that was sent first: nobody is passed over for ever."""
        ready = set(select.select([remote.reply for remote in self._away], [], [], self._timeout)[0])
        at = next((n for n, remote in enumerate(self._away) if remote.reply in ready), 0)
        remote = self._away.pop(at)
        self._finish(remote)
        return remote

    def tidy(self, row: Row) -> None:
        for at, lanes in self._began:
            for after, first in zip(row.after, self._first):
                after[at] = first[lanes]


def _columns(spec: EnvSpec, action: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
    """What one step needs, and nothing else."""
    flag = Leaf((1,), torch.bool)
    columns: dict[Key, Leaf] = {(*root, f): flag for root in ((), ("next",)) for f in FLAGS}
    columns.update(spec.observation)
    columns.update(action)
    columns.update({("next", *key): leaf for key, leaf in spec.observation.items()})
    columns.update({("next", *key): leaf for key, leaf in spec.reward.items()})
    return columns


# ---- the other side -----------------------------------------------------------------------------------------------


def _serve(connection: Connection, fds: Sequence[int], makers: Any, threads: int) -> None:
    """The life of a child: build the lanes, then step them whenever the bell rings."""
    torch.set_num_threads(threads)
    bell, reply, *files = fds
    env = None
    try:
        lanes = [as_env(make, kwargs) for make, kwargs in makers]
        env = joined(lanes) if len(lanes) > 1 else lanes[0]
        if env.tidies or any(leaf.loose for leaf in env.spec.observation.values()):
            raise UsageError(f"ParallelEnv cannot run {type(env).__name__} elsewhere; give it to a collector as it is")
        send(connection, env.spec)
        host = _Host(env, connection, *(SharedFile(fd=fd) for fd in files))
        host.serve(bell, reply)
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        wrapped = error if isinstance(error, ReapError) else WorkerRaised(f"the env raised {error!r}")
        if wrapped is not error:
            wrapped.__cause__ = error
        with contextlib.suppress(OSError):
            send(connection, Raised.of(wrapped))
            os.write(reply, _FAILED)
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
        while len(data := os.read(bell, _BELL.size)) == _BELL.size:
            what, place, step = _BELL.unpack(data)
            if what == _CALL:
                name, arguments = self._connection.recv()
                getattr(self, f"do_{name}")(*arguments)
                send(self._connection, None)
                continue
            chosen: Sequence[int] = lanes if what == _STEP else np.flatnonzero(self._some).tolist()
            ended = env.step(chosen, self._rows[place][step])
            if ended:
                env.reset(ended, self._first)  # at once: it will be wanted, and the others may still be stepping
            os.write(reply, _DONE)

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


# ---- the face -----------------------------------------------------------------------------------------------------


class ParallelEnv(EnvBase):
    """Envs in processes of their own, as lanes of one.

    >>> env = ParallelEnv(4, lambda: GymEnv("CartPole-v1"))
    >>> collector = Collector(env, policy, frames_per_batch=400)      # batches [4, 100]

    Args:
        num_envs: how many lanes.
        create_env_fn: a factory, a Gymnasium id, or a list with one per lane.
        num_workers: how many processes share the lanes; one per lane if not given.
        ready: step the lanes of so many processes at a time, whichever are ready; None: all in step. A slow lane then
            holds nobody up until the batch is to be whole. For collectors only.
        create_env_kwargs: keywords for the factories, one mapping or a list.
        timeout: seconds a process may take for one step before it is reported as stuck; None: for ever.
        start_method: "forkserver" or "spawn".
        num_sub_threads: torch threads of each process.
    """

    def __init__(
        self,
        num_envs: int | None = None,
        create_env_fn: Any = None,
        *,
        num_workers: int | None = None,
        ready: int | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        start_method: StartMethod = "forkserver",
        num_sub_threads: int = 1,
        device: Any = None,
    ) -> None:
        lanes = num_workers if num_envs is None else num_envs  # as keywords, TorchRL calls the lanes workers
        if create_env_fn is None:
            raise WrongArgument("ParallelEnv needs create_env_fn: a factory, or one per lane")
        made = one_each("num_envs", lanes, create_env_fn, create_env_kwargs)
        count = len(made) if num_workers is None else num_workers
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(made):
            raise UsageError(f"num_workers must lie between 1 and the {len(made)} lanes, got {count!r}")
        bounds = np.linspace(0, len(made), count + 1).astype(int)
        shares = [made[a:b] for a, b in itertools.pairwise(bounds)]
        options: dict[str, Any] = {"timeout": timeout, "start_method": start_method, "threads": num_sub_threads}
        if ready is not None and (isinstance(ready, bool) or not isinstance(ready, int) or not 1 <= ready < count):
            raise UsageError(f"ready must lie between 1 and {count - 1}, below the number of processes, got {ready!r}")
        env = ProcessLanes(shares, **options) if ready is None else ReadyProcessLanes(shares, ready, **options)
        super().__init__(env, device=device)
