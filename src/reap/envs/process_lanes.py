"""Lanes in child processes, the policy here. One message per process and step.

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
import os
import pickle
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reap.children import BOOT, Child, Raised, StartMethod, dumps, end
from reap.core.env import Env, Rows
from reap.core.policy import RandomActions
from reap.core.rollout import columns_of
from reap.core.shared import SharedFile
from reap.core.slot import Layout, Row, RowKeys, Slot
from reap.envs.lane_host import BELL, CALL, DONE, SOME, STEP, serve_lanes
from reap.errors import ReapError, SpecMismatch, UsageError, WorkerSilent
from reap.spec import READY, EnvSpec, Key, Leaf

_DEADLINE = 5.0


class _Remote:
    """A child process and its lanes, `[first, last)` of all."""

    def __init__(self, child: Child, bell: int, reply: int) -> None:
        self.child, self.bell, self.reply = child, bell, reply
        self.inbox: deque[Any] = deque()
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
        self._by_hand: Slot | None = None
        self._end, self._places = 0, 0
        try:
            for n, own in enumerate(makers):
                self._children.append(self._start(n, own, start_method, threads))
            for remote in self._children:
                remote.spec = self._answer(remote, grace=BOOT)
            self._join()
            for remote in self._children:
                self._call(remote, "begin", remote.first, self.spec.lanes)
        except BaseException:
            self.close()
            raise

    def _start(self, n: int, makers: Any, start: StartMethod, threads: int) -> _Remote:
        theirs, bell = os.pipe()
        reply, answer = os.pipe()
        target = dumps(functools.partial(serve_lanes, makers=makers, threads=threads), "create_env_fn")
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
        self._all, self._keys = self.spec, RowKeys(self.spec)
        layout = Layout(first.observation, 1, lanes, batched=True)
        self._first = [array[0] for array in layout.arrays(self._firsts.map(max(layout.nbytes, 1))).values()]
        self._some = self._control.map(lanes).view(np.bool_)
        self._fresh = np.zeros(lanes, bool)  # ended and begun anew; the first observation waits in `_first`

    # ---- talking --------------------------------------------------------------------------------------------------

    def _ring(self, remote: _Remote, what: int, place: int = 0, step: int = 0) -> None:
        try:
            os.write(remote.bell, BELL.pack(what, place, step))
        except BrokenPipeError:
            raise self._gone(remote) from None

    def _gone(self, remote: _Remote) -> ReapError:
        """Why a child does not answer: what it said last, or how it ended."""
        remote.child.gone(1.0)
        self._hear(remote)
        for message in remote.inbox:
            if isinstance(message, Raised):
                return self._named(message.unpack(), remote)
        return remote.child.death().at(worker=self._name(remote))

    def _name(self, remote: _Remote) -> str:
        lanes = f"lanes {remote.first} to {remote.last - 1}" if remote.last else "lanes"
        return f"of {lanes} (pid {remote.child.pid})"

    def _named(self, error: ReapError, remote: _Remote) -> ReapError:
        if error.lane is not None:
            error.lane += remote.first
        return error.at(worker=self._name(remote))

    def _wait(self, remote: _Remote, fd: int) -> None:
        if self._timeout is not None and not select.select([fd, remote.child.sentinel], [], [], self._timeout)[0]:
            raise self._silent(remote)

    def _silent(self, remote: _Remote) -> WorkerSilent:
        return remote.child.silence(self._timeout or 0.0, self._timeout).at(worker=self._name(remote))

    def _finish(self, remote: _Remote) -> None:
        """The byte a child owes for a step."""
        self._wait(remote, remote.reply)
        data = os.read(remote.reply, 1)
        remote.owes = False
        if data != DONE:
            raise self._gone(remote)

    def _hear(self, remote: _Remote) -> None:
        remote.inbox += [pickle.loads(data) for data in remote.child.line.hear()]

    def _answer(self, remote: _Remote, grace: float = 0.0) -> Any:
        """The next message, which is also what an error comes as."""
        line, sentinel = remote.child.line, remote.child.sentinel
        deadline = None if self._timeout is None else time.monotonic() + self._timeout + grace
        while True:
            gone = remote.child.gone()  # asked first: what it said before is all there then
            self._hear(remote)
            if remote.inbox:
                break
            if gone:
                raise self._gone(remote)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            waiting = [] if line.flush() else [line.fileno()]
            if not any(select.select([line.fileno(), sentinel], waiting, [], left)):
                raise self._silent(remote)
        message = remote.inbox.popleft()
        if isinstance(message, Raised):
            raise self._named(message.unpack(), remote)
        return message

    def _call(self, remote: _Remote, name: str, *arguments: Any) -> None:
        if remote.owes:  # a step that was broken off (Ctrl-C)
            self._finish(remote)
        self._ask(remote, name, arguments)
        self._answer(remote)

    def _ask(self, remote: _Remote, name: str, arguments: Any) -> None:
        self._ring(remote, CALL)
        remote.child.line.say(dumps((name, arguments), name))

    # ---- memory ---------------------------------------------------------------------------------------------------

    def make_slot(self, layout: Layout, index: int) -> Slot:
        return self._shared_slot(layout, index)

    def _shared_slot(self, layout: Layout, index: int) -> Slot:
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

    def _exchange(self) -> Slot:
        """A slot of one step both sides see, for steps on rows they do not; kept while actions look the same."""
        if self._by_hand is None:
            assert self._action is not None
            policy = RandomActions(self._action)
            columns = columns_of(self._all, policy, ids=False, mask=False, version=False)
            self._by_hand = self._shared_slot(Layout(columns, 1, self._all.lanes, batched=True), 0)
        return self._by_hand

    def _shared_row(self) -> Row:
        (row,) = self._exchange().cut(self._keys, self._first)
        return row

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
                theirs = None if seeds is None else [seeds[lane] for lane in own]
                self._ask(remote, "reset", ([lane - remote.first for lane in own], theirs))
                asked.append(remote)
        for remote in asked:
            self._answer(remote)

    def send(self, lanes: Sequence[int], row: Row) -> None:
        shared = row
        if row.place is None:
            self._exchange().clear_flags()
            shared = self._shared_row()
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
                self._ring(remote, STEP if all_of_them else SOME, place, step)

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
            remote.child.line.close()
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
        self._each, self._ready = sizes.pop(), ready
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
        shared = self._shared = self._shared_row()
        assert shared.place is not None
        for at, remote in zip(self._windows(), self._in_hand):
            own = slice(remote.first, remote.last)
            for flag in (shared.done, shared.terminated, shared.truncated):
                flag[own] = False
            for mine, given in zip(shared.action, row.action):
                mine[own] = given[at]
            remote.owes = True
            self._away.append(remote)
            self._ring(remote, STEP, *shared.place)

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
