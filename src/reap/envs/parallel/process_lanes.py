"""Lanes in child processes, the policy here. One message per process and step.

    policy ──► row t (a slot both sides see) ──┬─ order: slot, t ──► child 0: the usual env class, on its lanes of row t
                                               └─ order: slot, t ──► child 1
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
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from reap._system import silence
from reap._system.affinity import Cores
from reap._system.conversation import ChildGone, ChildSilent, Conversation
from reap._system.fork_server.client import enough_room
from reap._system.forks import guard, refuse_all
from reap._system.interrupts import Interrupts
from reap._system.messages import until_ready
from reap._system.pickling import pack
from reap._system.processes import BOOT, DEADLINE, LAST_STEP, Child, StartMethod, end
from reap._system.remote_errors import Raised
from reap._system.stacks import all_at_once
from reap._system.threads import LINGER, see_to
from reap._system.worker_log import record
from reap.core.env import Env, Rows
from reap.core.policy import RandomActions
from reap.core.resume import CannotResume, packed, unpacked
from reap.core.rollout import columns_of
from reap.core.shared_slots import SharedFile
from reap.core.slot import Layout, Row, RowKeys, Slot
from reap.envs.parallel.env_child import (
    BEGIN,
    CALL,
    DONE,
    DRAW,
    ORDER,
    PING,
    PONG,
    REBUILT,
    SOME,
    STEP,
    UNSEEDED,
    EnvChild,
    LanesChild,
    LooseValues,
    Traits,
    choices,
    firsts_in,
    loose_leaves,
    serve,
)
from reap.envs.parallel.lane_workers import joint_spec, joint_traits, lanes_named
from reap.errors import CorruptState, ReapError, SpecMismatch, UsageError, WorkerError, WorkerSilent
from reap.failures import FailurePolicy, RestartBudget, WorkerFailure
from reap.seeding import restart_seed
from reap.spec import EnvSpec, Key, Leaf, show

_TOKENS = 200
E = TypeVar("E", bound=ReapError)


def _alone(things: Sequence[Any]) -> Any:
    """The only one, if there is but one: so errors name it."""
    return things[0] if all(one is things[0] for one in things) else things


def _bare(action: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
    """How actions look, without what they may be."""
    return {key: Leaf(leaf.shape, leaf.dtype) for key, leaf in action.items()}


def _logged(name: str, error: E) -> E:
    """The error for a child that has failed, which the log tells of, too."""
    error.at(worker=name)
    record("death", name, "%s", str(error).partition("\n")[0])
    return error


class EnvProcess:
    """A child process and its lanes, `[first, last)` of all."""

    def __init__(self, number: int, child: Child, order_fd: int, reply: int) -> None:
        self.number, self.child, self.order_fd, self.reply = number, child, order_fd, reply
        self.talk = Conversation(child)
        self.told = select.poll()  # something was written to `reply`, or nobody is there who could
        self.told.register(reply, select.POLLIN)
        self.logged = False  # it is in the log that it is silent
        self.spec: EnvSpec
        self.traits: Traits
        self.first = self.last = 0
        self.restarts = 0  # how many have been in its place before it
        self.owes = False  # a step was sent, its answer has not come; or it is not known
        self.silent = False  # it took too long
        self.met = self.ended = False

    def log_silence(self, name: str) -> None:
        """Nothing came from it for a long time, and it is waited for: say so, once for what it was asked."""
        if not self.logged:
            self.logged = True
            silence.log(f"worker {name}", silence.LOGGED_AFTER, self.child.ask_stack())

    def end(self) -> None:
        """End it at once: it has failed, whatever it may still be doing. May be called twice."""
        if self.ended:
            return
        self.ended = True
        self.child.signal(signal.SIGKILL)
        self.child.line.close()
        for fd in (self.order_fd, self.reply):
            os.close(fd)
        end([self.child], patience=0.0, deadline=DEADLINE)


class ProcessLanes(Env):
    """Envs in child processes as lanes of one."""

    elsewhere = True
    _rebuilds = True  # whether its processes can make envs that raised anew, where that may be

    def __init__(
        self,
        makers: Sequence[Sequence[tuple[Any, Mapping[str, Any]]]],
        *,
        timeout: float | None = None,
        start_method: StartMethod = "forkserver",
        threads: int = 1,
        limit: int | None = None,
        host: Callable[..., EnvChild] = LanesChild,
        wires: Callable[[int, int], Sequence[int]] | None = None,
        cores: Sequence[Cores] | None = None,
        cells: bool = False,
        on_failure: FailurePolicy | None = None,
        budget: RestartBudget | None = None,
    ) -> None:
        self._timeout, self._limit, self._host = timeout, limit, host
        self._wires = wires  # further descriptors for a child: of its number, and that of its envs
        self._cells = cells  # whether texts and objects may be observed: then lanes come one answer at a time
        self._cores = cores  # where each child runs; None: anywhere
        self._on_failure = on_failure or FailurePolicy()
        self._budget = budget or RestartBudget(self._on_failure)  # one that is given is also somebody else's
        self.tells_cuts = self._on_failure.action != "raise"
        self._lost: dict[EnvProcess, ReapError] = {}  # processes that failed in this step, and why
        self._dropped: list[int] = []  # lanes that are stepped no more
        self._cut: list[int] = []  # lanes that have begun anew since the last step, because of a failure
        self.rebuilt: list[int] = []  # lanes that made no frame in this step: their envs have raised, and are others
        self._announced: list[tuple[Any, ...]] = []  # slots that every process knows
        self._makers, self._start_method, self._threads = makers, start_method, threads
        self._last_seeds: dict[int, int] = {}  # of lanes that were seeded
        self._files: list[SharedFile] = []
        self.remotes: list[EnvProcess] = []
        self._owner, self._failed = os.getpid(), False
        self._action: dict[Key, Leaf] | None = None
        self._by_hand: Slot | None = None
        self._end, self._places = 0, 0
        self._token = 0  # of the last settling
        guard(self)
        try:
            with enough_room("processes for the lanes"):
                self._begin()
        except BaseException:
            self.close()
            raise

    def in_fork(self, why: str) -> None:
        """Called in a fork: the processes, and what they answer, are its owner's."""
        refuse_all(self, why)

    def _begin(self) -> None:
        for name in ("reap-rows", "reap-first", "reap-some"):
            self._files.append(SharedFile(name))
        self._slots, self._firsts, self._control = self._files
        for n in range(len(self._makers)):
            self.remotes.append(self._start(n))
        for n in range(len(self.remotes)):
            self._budget.build(n, functools.partial(self._meet, n))
        self._join()
        for remote in self.remotes:
            self._call(remote, "begin", remote.first, self.spec.lanes)
            record("start", self._name(remote), "worker %s is there", self._name(remote))

    def _meet(self, n: int) -> None:
        """Hear what the first process in a place is like, or another, if that one has failed."""
        remote = self.remotes[n]
        if remote.met:
            remote.end()
            remote = self.remotes[n] = self._start(n)
            self._failed = False
        remote.met = True
        remote.spec, remote.traits = self._answer(remote, grace=BOOT)

    def _start(self, n: int) -> EnvProcess:
        makers, start, threads = self._makers[n], self._start_method, self._threads
        make = functools.partial(self._host, makers=makers, limit=self._limit)
        if self._budget.policy.action == "restart" and self._rebuilds:
            make = functools.partial(make, rebuild=True)
        cores = None if self._cores is None else self._cores[n]
        target = pack(
            functools.partial(serve, make=make, threads=threads, cores=cores),
            "create_env_fn",
            {
                "create_env_fn": _alone([maker[0] for maker in makers]),
                "create_env_kwargs": _alone([maker[1] for maker in makers]),
            },
        )
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as handed:
            theirs, order_fd = os.pipe()
            handed.callback(os.close, theirs)
            ours.callback(os.close, order_fd)
            reply, answer = os.pipe()
            handed.callback(os.close, answer)
            ours.callback(os.close, reply)
            fds = [theirs, answer, *(file.fd for file in self._files)]
            fds += self._wires(n, len(makers)) if self._wires is not None else ()
            child = Child(target, fds=fds, start=start, name=f"reap-lanes-{n}")
            ours.pop_all()
        return EnvProcess(n, child, order_fd, reply)

    def _join(self) -> None:
        self.spec, bounds = joint_spec([remote.spec for remote in self.remotes])
        self.traits = joint_traits([remote.traits for remote in self.remotes])
        self.has_after_step, self.draws = self.traits
        self._loose = loose_leaves(self.spec)
        if self._loose and not self._cells:
            keys = list(self.spec.observation)
            raise UsageError(
                f"{', '.join(show(keys[n]) for n in self._loose)} has no fixed shape (text, an object or ragged), so "
                f"it cannot lie in memory that processes share step by step; take SerialEnv, or a collector with "
                f"workers (MultiSyncCollector)"
            )
        if self.tells_cuts:  # a step in which a process fails is no frame of its lanes
            self.spec = dataclasses.replace(self.spec, rows="skipping")
        for remote, (first, last) in zip(self.remotes, bounds):
            remote.first, remote.last = first, last
        lanes = self.spec.lanes
        self._keys = RowKeys(self.spec)
        layout = Layout(self.spec.observation, 1, lanes, batched=True)
        self.first = firsts_in(self._firsts.map(max(layout.nbytes, 1)), layout)
        self._some, self._seeds = choices(self._control, lanes)
        self._seeds[:] = UNSEEDED
        self._fresh = np.zeros(lanes, bool)  # ended and begun anew; the first observation waits in `first`

    def stacks(self) -> dict[str, str]:
        return all_at_once({f"worker {self._name(remote)}": remote.child.ask_stack for remote in self.remotes})

    # ---- talking --------------------------------------------------------------------------------------------------

    def order(self, remote: EnvProcess, what: int, lanes: Sequence[int] | None) -> None:
        """Let a child do something on the row everybody sees, with some of its lanes or all; not waited for."""
        self.choose(remote.first, remote.last, lanes)
        place = self.place(what)  # before the order: the slot may have to be made, which asks everybody
        remote.owes = True
        self._ring(remote, what, place)

    def ping(self, remote: EnvProcess, token: int) -> None:
        """Let a child answer with this token when it has done all it was told."""
        remote.owes = False
        self._ring(remote, PING, 0, token)

    def choose(self, first: int, last: int, lanes: Sequence[int] | None) -> None:
        """Of the lanes from `first` to `last`, which are meant; None: nobody will ask."""
        if lanes is not None:
            self._some[first:last] = False
            self._some[[lane for lane in lanes if first <= lane < last]] = True

    def seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        """With which seeds `lanes` begin, when they are next told to through the order pipe."""
        self._seeds[list(lanes)] = UNSEEDED if seeds is None else seeds

    def place(self, what: int) -> int:
        """The number of the slot everybody sees; new episodes need none."""
        return 0 if what == BEGIN else self._exchange().place or 0

    def _ring(self, remote: EnvProcess, what: int, place: int = 0, step: int = 0) -> None:
        self.write(remote, ORDER.pack(what, place, step))

    def write(self, remote: EnvProcess, orders: bytes) -> None:
        """Orders, as the child reads them."""
        try:
            os.write(remote.order_fd, orders)
        except BrokenPipeError:
            raise self.gone(remote) from None

    def gone(self, remote: EnvProcess) -> ReapError:
        """Why a child does not answer: what it said last, or how it ended."""
        self._failed = True
        remote.talk.hear()
        if not remote.talk.inbox:
            remote.child.gone(1.0)
            remote.talk.hear()
        for message in remote.talk.inbox:
            if isinstance(message, Raised):
                return _logged(self._name(remote), self.named(message.unpack(), remote))
        return _logged(self._name(remote), remote.child.death())

    def _name(self, remote: EnvProcess) -> str:
        return f"of {lanes_named(remote.first, remote.last)}{remote.child.label}"

    def named(self, error: ReapError, remote: EnvProcess) -> ReapError:
        if error.lane is not None:
            error.lane += remote.first
        return error.at(worker=self._name(remote))

    def _wait(self, remote: EnvProcess, fd: int) -> None:
        if self._timeout is None:
            while not remote.told.poll(1000 * silence.LOGGED_AFTER):
                remote.log_silence(self._name(remote))
        elif not until_ready([fd, remote.child.sentinel], within=self._timeout):
            raise self.silence_of(remote)

    def silence_of(self, remote: EnvProcess) -> WorkerSilent:
        """The error for a child that has not answered for too long."""
        self._failed = True
        remote.silent = True
        return _logged(self._name(remote), remote.child.silence(self._timeout or 0.0, self._timeout))

    def finish(self, remote: EnvProcess) -> None:
        """Wait for the byte a child owes for a step."""
        self._wait(remote, remote.reply)
        self.take(remote)

    def _settle(self, remote: EnvProcess) -> None:
        """A step was broken off (Ctrl-C), between any two lines: whether it was sent, and answered, is not known.

        So it is asked something it was never asked before: who has answered that has answered all that came before.
        """
        self._token = self._token % _TOKENS + 1
        self._ring(remote, PING, 0, self._token)
        while True:
            self._wait(remote, remote.reply)
            if self._read(remote) == self._token:
                break
        remote.owes = False  # not before: this may be broken off too

    def take(self, remote: EnvProcess) -> int:
        """The byte a child owes, which is there: 0, or the token of what it was asked."""
        token = self._read(remote)
        remote.owes = remote.logged = False
        return token

    def _read(self, remote: EnvProcess) -> int:
        if not self._loose:
            return self._byte(remote)
        with Interrupts().held():  # the byte and what belongs to it are taken together
            token = self._byte(remote)
            if not token:
                self._put_cells(remote, self._answer(remote))
            return token

    def _byte(self, remote: EnvProcess) -> int:
        data = os.read(remote.reply, 1)
        if data == REBUILT:
            self.rebuilt += self.count_rebuilt(remote)
            return 0
        if data != DONE and (not data or data[0] < PONG):
            raise self.gone(remote)
        return 0 if data == DONE else data[0] - PONG

    def count_rebuilt(self, remote: EnvProcess) -> list[int]:
        """Hear which envs of a process have raised and were made anew; returns the lanes that have made no frame."""
        with Interrupts().held():  # what is heard is also counted
            told, cut = self._answer(remote)
            for raised, seconds in told:
                self._budget.count_rebuilt(remote.number, self.named(raised.unpack(), remote), seconds)
            return [remote.first + lane for lane in cut]

    def _put_cells(self, remote: EnvProcess, told: LooseValues) -> None:
        """Texts and objects of lanes that were stepped, or begun, where their numbers are."""
        lanes = [remote.first + lane for lane in told.lanes]
        for n, (stepped, first) in zip(self._loose, told.leaves):
            self.first[n][lanes] = first
            if stepped is not None:
                self.shared_row().next[n][lanes] = stepped

    def _answer(self, remote: EnvProcess, call: int | None = None, grace: float = 0.0) -> Any:
        """The answer to a call; None: the next message, whatever it is."""
        within = (silence.LOGGED_AFTER if self._timeout is None else self._timeout) + grace
        try:
            while True:
                try:
                    return remote.talk.next(within) if call is None else remote.talk.answer(call, within)
                except ChildSilent:
                    if self._timeout is not None:
                        raise
                    remote.log_silence(self._name(remote))
        except (ChildGone, ChildSilent) as end:
            error = self.gone(remote) if isinstance(end, ChildGone) else self.silence_of(remote)
            raise error from error.__cause__
        except ReapError as error:
            self._failed = self._failed or remote.talk.failed
            self.named(error, remote)
            raise

    def _call(self, remote: EnvProcess, name: str, *arguments: Any) -> Any:
        if remote.owes:
            self._settle(remote)
        return self._answer(remote, self._ask(remote, name, *arguments))

    def _tell_all(self, name: str, *arguments: Any) -> None:
        """Call every process; one that fails meanwhile, and may be replaced, learns of it then."""
        for remote in self.remotes:
            if remote not in self._lost:
                try:
                    self._call(remote, name, *arguments)
                except WorkerError as error:
                    self._lose(remote, error)

    def _ask(self, remote: EnvProcess, name: str, *arguments: Any) -> int:
        """Send a message; returns the number its answer will have."""
        with Interrupts().held():  # the order pipe and what it rings for belong together
            self._ring(remote, CALL)
            return remote.talk.ask(name, *arguments)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def make_slot(self, layout: Layout, index: int) -> Slot:
        return self._shared_slot(layout, index)

    def _shared_slot(self, layout: Layout, index: int) -> Slot:
        start, self._end = self._end, self._end + -(-layout.nbytes // 4096) * 4096
        with layout.needing_memory():
            block = self._slots.map(self._end)[start : start + layout.nbytes]
        slot = Slot(layout, index, layout.arrays(block))
        slot.block = block
        slot.place, self._places = self._places, self._places + 1
        bare = Layout(
            {k: Leaf(v.shape, v.dtype) for k, v in layout.columns.items()}, layout.steps, layout.lanes, batched=True
        )
        known = slot.place, bare, start, self._end
        self._announced.append(known)
        self._tell_all("slot", *known)
        return slot

    def _exchange(self) -> Slot:
        """A slot of one step both sides see, for steps on rows they do not; kept while actions look the same."""
        if self._by_hand is None:
            assert self._action is not None
            policy = RandomActions(self._action)
            columns = columns_of(self.spec, policy, ids=False, mask=False, version=False)
            self._by_hand = self._shared_slot(Layout(columns, 1, self.spec.lanes, batched=True), 0)
        return self._by_hand

    def shared_row(self) -> Row:
        """The one row of that slot."""
        (row,) = self._exchange().cut(self._keys, self.first)
        return row

    # ---- the env --------------------------------------------------------------------------------------------------

    def expects(self, action: Mapping[Key, Leaf]) -> bool:
        """Whether it is known already that actions look like this."""
        return self._action == dict(action)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        if self._action == dict(action):
            return
        self._action = None  # until everybody has understood
        self._tell_all("expect", _bare(action))
        self._action, self._by_hand = dict(action), None

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        chosen = list(lanes)
        wanted = [lane for lane in chosen if seeds is not None or not self._fresh[lane]]
        if wanted:
            given = dict(zip(chosen, seeds)) if seeds is not None else None
            self._last_seeds.update(given or {})
            self.begin(wanted, given)
        self._fresh[chosen] = False
        for array, first in zip(into, self.first):
            array[chosen] = first[chosen]

    def begin(self, lanes: Sequence[int], seeds: Mapping[int, int] | None) -> None:
        """New episodes in `lanes`; first observations are in `first` when this returns."""
        asked = []
        for remote in self.remotes:
            own = [lane for lane in lanes if remote.first <= lane < remote.last]
            if own:
                try:
                    if remote.owes:
                        self._settle(remote)
                except ReapError as error:
                    self._lose(remote, error)
                    continue
                theirs = None if seeds is None else [seeds[lane] for lane in own]
                asked.append((remote, self._ask(remote, "reset", [lane - remote.first for lane in own], theirs)))
        for remote, number in asked:
            try:
                self._answer(remote, number)
            except ReapError as error:
                self._lose(remote, error)
        if self._lost:  # their lanes begin anew, those that were not asked too
            self._cut = [lane for lane in self._replace_lost() if lane not in lanes]

    def draw(self, row: Row) -> None:
        shared = row if row.place is not None else self.shared_row()
        assert shared.place is not None
        for remote in self.remotes:
            try:
                if remote.owes:
                    self._settle(remote)
                remote.owes = True
                self._ring(remote, DRAW, *shared.place)
            except ReapError as error:
                self._lose(remote, error)
        self.finish_all()
        if shared is not row:
            for mine, theirs in zip(row.action, shared.action):
                mine[...] = theirs

    def finish_all(self) -> None:
        """Wait for everybody who was sent something."""
        for remote in self.remotes:
            if remote.owes:
                try:
                    self.finish(remote)
                except ReapError as error:
                    self._lose(remote, error)

    def after_step(self, row: Row) -> None:
        """What every lane sees next lies in `first` with the answer."""
        for after, following in zip(row.after, self.first):
            after[...] = following

    def send(self, lanes: Sequence[int], row: Row) -> None:
        shared = row
        if row.place is None:
            self._exchange().clear_flags()
            shared = self.shared_row()
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
        for remote in self.remotes:
            if remote in self._lost:
                continue
            try:
                if remote.owes:
                    self._settle(remote)
                if all_of_them or self._some[remote.first : remote.last].any():
                    remote.owes = True
                    self._ring(remote, STEP if all_of_them else SOME, place, step)
            except ReapError as error:
                self._lose(remote, error)

    def recv(self) -> list[int]:
        self.finish_all()
        _, row = self._sent
        shared = self._shared
        if shared is not row:
            self._copy(shared, row)
        cut = self._replace_lost() if self._lost else []
        if self._cut or self.rebuilt:
            self._fresh[self._cut] = False  # they have been stepped, with an action that was none of theirs
            self._fresh[self.rebuilt] = True
            cut = sorted({*cut, *self._cut, *self.rebuilt})
            self._cut, self.rebuilt = [], []
        if cut or self._dropped:
            self._skip(row, [*cut, *self._dropped])
        done = row.done
        if not done.any() and not cut:
            return []
        self._fresh |= done
        ended: list[int] = np.flatnonzero(done).tolist()
        return sorted({*ended, *cut}) if cut else ended

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

    def open_state(self) -> Any:
        each = [self._call(remote, "open_state") for remote in self.remotes]
        for remote, one in zip(self.remotes, each):
            if isinstance(one, str):
                raise CannotResume(f"env process {self._name(remote)}: {one}")
        return {"each": each, "fresh": torch.from_numpy(self._fresh.copy()), "first": packed(self.first)}

    def load_open_state(self, state: Any) -> None:
        if len(state["each"]) != len(self.remotes):
            raise CorruptState(
                f"this state is of {len(state['each'])} env processes, here are {len(self.remotes)}; nothing was loaded"
            )
        for remote, one in zip(self.remotes, state["each"]):
            self._call(remote, "load_open_state", one)
        self._fresh[...] = state["fresh"].numpy()
        for mine, kept in zip(self.first, unpacked(state["first"])):
            mine[...] = kept

    # ---- failures -------------------------------------------------------------------------------------------------

    def restarts(self) -> int:
        return self._budget.count

    def dropped(self) -> Sequence[int]:
        return self._dropped

    def _lose(self, remote: EnvProcess, error: ReapError) -> None:
        """A process has failed in a step: it is replaced when the others have answered. By hand, nobody would know."""
        if self._budget.policy.action == "raise" or (self.tells_cuts and self.driver is None):
            raise error
        remote.owes = False
        self._lost[remote] = error

    def take_lost(self) -> dict[EnvProcess, ReapError]:
        """Processes that have failed while all were told something, and why; for whoever replaces them."""
        lost, self._lost = self._lost, {}
        return lost

    def _replace_lost(self) -> list[int]:
        """Put others in the place of processes that failed, or go on without; returns the lanes that begin anew."""
        lost, self._lost = self._lost, {}
        cut: list[int] = []
        for remote, error in lost.items():
            lanes = range(remote.first, remote.last)
            self.retire(remote)
            if self._on_failure.action == "drop":
                self._dropped += lanes
                self._on_failure.report(WorkerFailure(remote.number, error, "drop", self._budget.count, 0.0))
            else:
                self._budget.replace(remote.number, error, functools.partial(self._start_again, remote))
                self._fresh[list(lanes)] = True
                cut += lanes
        if not self.remotes:
            raise error
        self._failed = False
        return sorted(cut)

    def _start_again(self, before: EnvProcess) -> None:
        """Another process in the place of one, which knows all that the one before it knew; its lanes begin anew."""
        new = self.start_again(before)
        try:
            spec, _ = self._answer(new, grace=BOOT)
            self._answer(new, self.introduce(new, spec))
            own = range(new.first, new.last)
            known = [self._last_seeds[lane] for lane in own if lane in self._last_seeds]
            seeds = [restart_seed(seed, new.restarts) for seed in known]
            self._call(new, "reset", list(range(len(own))), seeds if len(seeds) == len(own) else None)
        except BaseException:
            self.retire(new)
            raise

    def retire(self, remote: EnvProcess) -> None:
        """A process has failed, or is not wanted any more: whatever it is doing, it ends."""
        if remote in self.remotes:
            self.remotes.remove(remote)
        remote.end()
        self._failed = False

    def start_again(self, before: EnvProcess) -> EnvProcess:
        """Start another process in the place of one, and wait for nothing; what it says first is what it is like."""
        with enough_room("another process for the lanes"):
            new = self._start(before.number)
        new.first, new.last, new.restarts = before.first, before.last, before.restarts + 1
        new.spec, new.traits = before.spec, before.traits
        self.remotes.append(new)
        self.remotes.sort(key=lambda remote: remote.number)
        return new

    def introduce(self, new: EnvProcess, spec: EnvSpec) -> int:
        """Tell a process that is there what the one before it knew; returns the number of the last answer."""
        joint_spec([new.spec, spec])
        if spec.lanes != new.last - new.first:
            raise SpecMismatch(f"it has {spec.lanes} lanes, and the one before it had {new.last - new.first}")
        number = self._ask(new, "begin", new.first, self.spec.lanes)
        if self._action is not None:
            number = self._ask(new, "expect", _bare(self._action))
        for slot in self._announced:
            number = self._ask(new, "slot", *slot)
        return number

    def _skip(self, row: Row, lanes: list[int]) -> None:
        """This step is no frame of these lanes."""
        if row.mask is not None:
            row.mask[lanes] = False
        for array in (*row.next, *row.rewards):
            array[lanes] = 0
        for flag in (row.done, row.terminated, row.truncated):
            flag[lanes] = False

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        with Interrupts().held():  # a few seconds at most; interrupted, it would leave children to themselves
            self._close()

    def _close(self) -> None:
        children, self.remotes = [remote for remote in self.remotes if not remote.ended], []
        for remote in children:
            if remote.silent:
                remote.child.signal(signal.SIGTERM)
            os.close(remote.order_fd)
            os.close(remote.reply)
            remote.child.line.close()
        gone = functools.partial(end, [remote.child for remote in children], patience=LAST_STEP, deadline=DEADLINE)
        see_to(gone, LINGER if self._failed else None)
        for file in self._files:
            file.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
