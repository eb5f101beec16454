"""Lanes in child processes, with the policy in the parent. A step costs one message per process.

    policy ──► row t (a slot both sides see) ──┬─ order: slot, t ──► child 0: the usual env class, on its lanes of row t
                                               └─ order: slot, t ──► child 1
    row t+1 ◄── copy ◄── row t ◄── results written in place, one byte back from each

A child resets a lane as soon as its episode ends and keeps the first observation ready, so the loop's reset costs no
message. Where a row is not in shared memory (an env used by hand, a slot that this env did not make), actions and
results go through one row that is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reap._system.affinity import Cores
from reap._system.fork_server.client import limits_as_worker_died
from reap._system.forks import guard, refuse_use
from reap._system.interrupts import Interrupts
from reap._system.messages.pickling import pack
from reap._system.processes import BOOT, DEADLINE, LAST_STEP, StartMethod, end
from reap._system.stacks import call_all
from reap._system.threads import LINGER, run_shutdown
from reap._system.worker_log import record
from reap.core.columns.batch_columns import layout_by_hand
from reap.core.env import Env, Rows
from reap.core.resume import CannotResume, packed, unpacked
from reap.core.shared_slots import SharedFile
from reap.core.slot import Layout, Row, RowKeys, Slot
from reap.envs.parallel.env_child import (
    ANSWERED,
    DRAW,
    PING,
    PONG,
    REBUILT,
    RESET,
    STEP,
    STEP_SOME,
    UNSEEDED,
    EnvChild,
    LanesChild,
    LooseValues,
    choices,
    firsts_in,
    loose_leaves,
    serve,
)
from reap.envs.parallel.env_process import EnvProcess
from reap.envs.parallel.lane_workers import joint_spec, joint_traits
from reap.errors import CorruptState, ReapError, SpecMismatch, UsageError, WorkerError
from reap.failures import FailurePolicy, RestartBudget, WorkerFailure
from reap.seeding import restart_seed
from reap.spec import EnvSpec, Key, Leaf, show


def _one_or_all(things: Sequence[Any]) -> Any:
    """Return the first of `things` if all are the same object, so that errors name it; else `things`."""
    return things[0] if all(one is things[0] for one in things) else things


def _without_spaces(columns: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
    """Return the shapes and dtypes of these columns, without their spaces."""
    return {key: Leaf(leaf.shape, leaf.dtype) for key, leaf in columns.items()}


class ProcessLanes(Env):
    """Envs in child processes, stepped as the lanes of one env."""

    runs_elsewhere = True
    _rebuilds = True  # whether the child processes can rebuild an env that raised, where `on_failure` allows it

    def __init__(
        self,
        makers: Sequence[Sequence[tuple[Any, Mapping[str, Any]]]],
        *,
        timeout: float | None = None,
        start_method: StartMethod = "forkserver",
        threads: int = 1,
        limit: int | None = None,
        child: Callable[..., EnvChild] = LanesChild,
        more_fds: Callable[[int, int], Sequence[int]] | None = None,
        cores: Sequence[Cores] | None = None,
        objects: bool = False,
        on_failure: FailurePolicy | None = None,
        budget: RestartBudget | None = None,
    ) -> None:
        self._timeout, self._limit, self._child = timeout, limit, child
        self._more_fds = more_fds  # returns further descriptors for a child, given its number and how many envs it has
        self._objects = objects  # whether observations may be text or objects: only where answers are read one by one
        self._cores = cores  # the cores each child runs on; None: any
        self._on_failure = on_failure or FailurePolicy()
        self._budget = budget or RestartBudget(self._on_failure)  # a given budget is shared with the caller
        self.reports_cuts = self._on_failure.action != "raise"
        self._lost: dict[EnvProcess, ReapError] = {}  # processes that failed in this step, and their errors
        self._dropped: list[int] = []  # lanes that are no longer stepped
        self._cut: list[int] = []  # lanes that were reset since the last step, because of a failure
        self.rebuilt: list[int] = []  # lanes that made no frame in this step: their envs raised and were rebuilt
        self._announced: list[tuple[Any, ...]] = []  # the `slot` calls that every process has received
        self._makers, self._start_method, self._threads = makers, start_method, threads
        self._last_seeds: dict[int, int] = {}  # the last seed of each lane that was seeded
        self._files: list[SharedFile] = []
        self.processes: list[EnvProcess] = []
        self._owner = os.getpid()
        self._action: dict[Key, Leaf] | None = None
        self._own_slot: Slot | None = None
        self._end, self._slot_count = 0, 0
        guard(self)
        try:
            with limits_as_worker_died("processes for the lanes"):
                self._start_all()
        except BaseException:
            self.close()
            raise

    def in_fork(self, why: str) -> None:
        """Refuse use in a forked copy: the processes and their answers belong to the process that started them."""
        refuse_use(self, why)

    def _start_all(self) -> None:
        for name in ("reap-rows", "reap-first", "reap-some"):
            self._files.append(SharedFile(name))
        self._slots, self._firsts, self._control = self._files
        for n in range(len(self._makers)):
            self.processes.append(self._start(n))
        for n in range(len(self.processes)):
            self._budget.build(n, functools.partial(self._receive_spec, n))
        self._join()
        for process in self.processes:
            self._call(process, "number_lanes", process.first, self.spec.lanes)
            record("start", process.name, "worker %s is ready", process.name)

    def _receive_spec(self, n: int) -> None:
        """Receive the spec of process `n`; if it has failed before, start another one in its place first."""
        process = self.processes[n]
        if process.failed:
            process.kill()
            process = self.processes[n] = self._start(n)
        process.spec, process.traits = process.answer(grace=BOOT)

    def _start(self, n: int) -> EnvProcess:
        makers = self._makers[n]
        make = functools.partial(self._child, makers=makers, limit=self._limit)
        if self._budget.policy.action == "restart" and self._rebuilds:
            make = functools.partial(make, rebuild=True)
        cores = None if self._cores is None else self._cores[n]
        target = pack(
            functools.partial(serve, make=make, threads=self._threads, cores=cores),
            "create_env_fn",
            {
                "create_env_fn": _one_or_all([maker[0] for maker in makers]),
                "create_env_kwargs": _one_or_all([maker[1] for maker in makers]),
            },
        )
        fds = [file.fd for file in self._files]
        fds += self._more_fds(n, len(makers)) if self._more_fds is not None else ()
        return EnvProcess.start(n, target, fds, self._start_method, self._timeout)

    def _join(self) -> None:
        self.spec, bounds = joint_spec([process.spec for process in self.processes])
        self.traits = joint_traits([process.traits for process in self.processes])
        self.has_after_step, self.draws = self.traits
        self._loose = loose_leaves(self.spec)
        if self._loose and not self._objects:
            keys = list(self.spec.observation)
            raise UsageError(
                f"{', '.join(show(keys[n]) for n in self._loose)} has no fixed shape (text, an object or "
                f"ragged), so it cannot be passed through shared memory step by step; use SerialEnv, or a "
                f"collector with workers (MultiSyncCollector)"
            )
        if self.reports_cuts:  # lanes make no frame in a step in which their process fails
            self.spec = dataclasses.replace(self.spec, rows="skipping")
        for process, (first, last) in zip(self.processes, bounds):
            process.first, process.last = first, last
        lanes = self.spec.lanes
        self._keys = RowKeys(self.spec)
        layout = Layout(self.spec.observation, 1, lanes, batched=True)
        self.first = firsts_in(self._firsts.map(max(layout.nbytes, 1)), layout)
        self._some, self._seeds = choices(self._control, lanes)
        self._seeds[:] = UNSEEDED
        self._fresh = np.zeros(lanes, bool)  # reset after their episode ended; the first observation waits in `first`

    def stacks(self) -> dict[str, str]:
        return call_all({f"worker {process.name}": process.child.ask_stack for process in self.processes})

    # ---- orders and answers ---------------------------------------------------------------------------------------

    def order(self, process: EnvProcess, what: int, lanes: Sequence[int] | None) -> None:
        """Send an order for some of a child's lanes, or all, on the shared row, without waiting for the answer."""
        self.choose(process.first, process.last, lanes)
        slot_number = self.slot_number(what)  # before the order: it may make the slot, which calls every process
        process.owes = True
        process.order(what, slot_number)

    def ping(self, process: EnvProcess, token: int) -> None:
        """Have a child answer with this token once it has carried out all earlier orders."""
        process.owes = False
        process.order(PING, 0, token)

    def choose(self, first: int, last: int, lanes: Sequence[int] | None) -> None:
        """Mark which of the lanes from `first` to `last` the next order is for; None: it is for all, without marks."""
        if lanes is not None:
            self._some[first:last] = False
            self._some[[lane for lane in lanes if first <= lane < last]] = True

    def seed(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Set the seeds for the next reset of `lanes`; None: no seeds."""
        self._seeds[list(lanes)] = UNSEEDED if seeds is None else seeds

    def slot_number(self, what: int) -> int:
        """Return the number of the shared slot for an order; a reset needs no slot."""
        return 0 if what == RESET else self._shared_slot().number_in_env or 0

    def _settle(self, process: EnvProcess) -> None:
        """Wait until a child has carried out all orders of a step that Ctrl-C interrupted.

        The interrupt may have come between any two lines, so it is unknown whether the step was sent or answered. The
        child therefore gets a PING with a new token: once it has answered that, it has answered all earlier orders.
        """
        read = self._read_objects if self._loose else self._read_byte
        with process.pings.next() as token:
            process.order(PING, 0, token)
            process.wait()
            while read(process) != token:
                process.wait()
            process.owes = False  # only now: this method may be interrupted too

    def read_answer(self, process: EnvProcess) -> int:
        """Read the byte with which a child has answered; returns 0, or the token of a PING."""
        token = self._read_objects(process) if self._loose else self._read_byte(process)
        process.owes = process.logged = False
        return token

    def _read_objects(self, process: EnvProcess) -> int:
        """Read the byte with which a child has answered, and the texts and objects that follow it."""
        with Interrupts().held():  # Ctrl-C must not separate the byte from its message
            token = self._read_byte(process)
            if not token:
                self._store_loose(process, process.answer())
            return token

    def _read_byte(self, process: EnvProcess) -> int:
        data = os.read(process.reply, 1)
        if data == REBUILT:
            self.rebuilt += self.count_rebuilt(process)
            return 0
        if data != ANSWERED and (not data or data[0] < PONG):
            raise process.death()
        return 0 if data == ANSWERED else data[0] - PONG

    def count_rebuilt(self, process: EnvProcess) -> list[int]:
        """Receive and count which envs of a process raised and were rebuilt; returns the lanes that made no frame."""
        with Interrupts().held():  # Ctrl-C must not come between receiving and counting
            raised, cut = process.answer()
            for error, seconds in raised:
                self._budget.count_rebuilt(process.number, process.named(error.unpack()), seconds)
            return [process.first + lane for lane in cut]

    def _store_loose(self, process: EnvProcess, values: LooseValues) -> None:
        """Write the texts and objects of stepped or reset lanes into `first` and the shared row."""
        lanes = [process.first + lane for lane in values.lanes]
        for n, (stepped, first) in zip(self._loose, values.leaves):
            self.first[n][lanes] = first
            if stepped is not None:
                self.shared_row().next[n][lanes] = stepped

    def _call(self, process: EnvProcess, name: str, *arguments: Any) -> Any:
        if process.owes:
            self._settle(process)
        return process.answer(process.call(name, *arguments))

    def _call_all(self, name: str, *arguments: Any) -> None:
        """Call every process. One that fails here is noted as lost; `introduce` repeats the call to its replacement."""
        for process in self.processes:
            if process not in self._lost:
                try:
                    self._call(process, name, *arguments)
                except WorkerError as error:
                    self._note_failure(process, error)

    # ---- memory ---------------------------------------------------------------------------------------------------

    def make_slot(self, layout: Layout, index: int) -> Slot:
        start, self._end = self._end, self._end + -(-layout.nbytes // 4096) * 4096
        with layout.needing_memory():
            block = self._slots.map(self._end)[start : start + layout.nbytes]
        slot = Slot(layout, index, layout.arrays(block))
        slot.block = block
        slot.number_in_env, self._slot_count = self._slot_count, self._slot_count + 1
        bare = Layout(_without_spaces(layout.columns), layout.steps, layout.lanes, batched=True)
        known = slot.number_in_env, bare, start, self._end
        self._announced.append(known)
        self._call_all("slot", *known)
        return slot

    def _shared_slot(self) -> Slot:
        """Return a slot of one step in shared memory, for rows that are not; kept while actions look the same."""
        if self._own_slot is None:
            assert self._action is not None
            self._own_slot = self.make_slot(layout_by_hand(self.spec, self._action), 0)
        return self._own_slot

    def shared_row(self) -> Row:
        """Return the one row of the slot from `_shared_slot`."""
        (row,) = self._shared_slot().cut(self._keys, self.first)
        return row

    # ---- the env --------------------------------------------------------------------------------------------------

    def already_expects(self, action: Mapping[Key, Leaf]) -> bool:
        """Return whether the processes already know that actions look like this."""
        return self._action == dict(action)

    def expect(self, action: Mapping[Key, Leaf]) -> None:
        if self.already_expects(action):
            return
        self._action = None  # until every process has accepted it
        self._call_all("expect", _without_spaces(action))
        self._action, self._own_slot = dict(action), None

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        chosen = list(lanes)
        if seeds is not None:
            self._last_seeds.update(zip(chosen, seeds))
            self.begin_episodes(chosen, seeds)
        elif wanted := [lane for lane in chosen if not self._fresh[lane]]:
            self.begin_episodes(wanted, None)
        self._fresh[chosen] = False
        for array, first in zip(into, self.first):
            array[chosen] = first[chosen]

    def begin_episodes(self, lanes: Sequence[int], seeds: Sequence[int] | None) -> None:
        """Start new episodes in `lanes`; their first observations are in `first` when this returns."""
        self.seed(lanes, seeds)
        self._order_all(RESET, lanes)
        self._finish_all()
        if self._lost:  # replacements reset all their lanes, also those not in `lanes`
            self._cut = sorted({*self._cut, *self._replace_lost()} - {*lanes})

    def draw(self, row: Row) -> None:
        shared = row if row.place is not None else self.shared_row()
        assert shared.place is not None
        self._order_all(DRAW, None, *shared.place)
        self._finish_all()
        if shared is not row:
            for mine, theirs in zip(row.action, shared.action):
                mine[...] = theirs

    def _order_all(self, what: int, lanes: Sequence[int] | None, slot_number: int = 0, step: int = 0) -> None:
        """Send an order to every process; or, with `lanes`, to those that hold some of them."""
        if lanes is not None:
            self.choose(0, self.spec.lanes, lanes)
        for process in self.processes:
            if process in self._lost:
                continue
            try:
                if process.owes:
                    self._settle(process)
                if lanes is None or self._some[process.first : process.last].any():
                    process.owes = True
                    process.order(what, slot_number, step)
            except ReapError as error:
                self._note_failure(process, error)

    def _finish_all(self) -> None:
        """Wait for every process that owes an answer."""
        for process in self.processes:
            if process.owes:
                try:
                    process.wait()
                    self.read_answer(process)
                except ReapError as error:
                    self._note_failure(process, error)

    def after_step(self, row: Row) -> None:
        """Copy what every lane sees next from `first`, where the children write it before they answer."""
        for after, following in zip(row.after, self.first):
            after[...] = following

    def send(self, lanes: Sequence[int], row: Row) -> None:
        shared = row
        if row.place is None:
            self._shared_slot().clear_flags()
            shared = self.shared_row()
            for mine, given in zip(shared.action, row.action):
                mine[...] = given
        self._sent = lanes, row
        self._shared = shared
        assert shared.place is not None
        if len(lanes) == self.spec.lanes:
            self._order_all(STEP, None, *shared.place)
        else:
            self._order_all(STEP_SOME, lanes, *shared.place)

    def recv(self) -> list[int]:
        self._finish_all()
        _, row = self._sent
        shared = self._shared
        if shared is not row:
            self._copy(shared, row)
        cut = self._replace_lost() if self._lost else []
        if self._cut or self.rebuilt:
            self._fresh[self._cut] = False  # stepped since that reset, with an action not meant for them
            self._fresh[self.rebuilt] = True
            cut = sorted({*cut, *self._cut, *self.rebuilt})
            self._cut, self.rebuilt = [], []
        if cut or self._dropped:
            row.leave_out([*cut, *self._dropped])
        done = row.done
        if not done.any() and not cut:
            return []
        self._fresh |= done
        ended: list[int] = np.flatnonzero(done).tolist()
        return sorted({*ended, *cut}) if cut else ended

    def _copy(self, shared: Row, row: Row) -> None:
        lanes, _ = self._sent
        at: Any = slice(None) if len(lanes) == self.spec.lanes else list(lanes)
        arrays = (*row.next[: len(shared.next)], *row.rewards, *row.flags)
        for mine, theirs in zip(arrays, (*shared.next, *shared.rewards, *shared.flags)):
            mine[at] = theirs[at]

    def open_state(self) -> Any:
        each = [self._call(process, "open_state") for process in self.processes]
        for process, one in zip(self.processes, each):
            if isinstance(one, str):
                raise CannotResume(f"env process {process.name}: {one}")
        return {"each": each, "fresh": torch.from_numpy(self._fresh.copy()), "first": packed(self.first)}

    def load_open_state(self, state: Any) -> None:
        if len(state["each"]) != len(self.processes):
            here, there = len(self.processes), len(state["each"])
            raise CorruptState(
                f"this state was saved with {there} env processes, but {here} are running; nothing was loaded"
            )
        for process, one in zip(self.processes, state["each"]):
            self._call(process, "load_open_state", one)
        self._fresh[...] = state["fresh"].numpy()
        for mine, kept in zip(self.first, unpacked(state["first"])):
            mine[...] = kept

    # ---- failures -------------------------------------------------------------------------------------------------

    def restarts(self) -> int:
        return self._budget.count

    def dropped(self) -> Sequence[int]:
        return self._dropped

    def _note_failure(self, process: EnvProcess, error: ReapError) -> None:
        """Note a process that failed, to be replaced when the others have answered; or raise `error`.

        Stepped by hand, the env always raises: its user could not see that lanes were reset.
        """
        if self._budget.policy.action == "raise" or (self.reports_cuts and self.driver is None):
            raise error
        process.owes = False
        self._lost[process] = error

    def take_lost(self) -> dict[EnvProcess, ReapError]:
        """Return and forget the processes noted by `_note_failure`, with their errors: the caller replaces them."""
        lost, self._lost = self._lost, {}
        return lost

    def _replace_lost(self) -> list[int]:
        """Replace the processes that failed, or drop their lanes; returns the lanes that were reset."""
        cut: list[int] = []
        for process, error in self.take_lost().items():
            lanes = range(process.first, process.last)
            self.retire(process)
            if self._on_failure.action == "drop":
                self._dropped += lanes
                self._on_failure.report(WorkerFailure(process.number, error, "drop", self._budget.count, 0.0))
            else:
                self._budget.replace(process.number, error, functools.partial(self._start_again, process))
                self._fresh[list(lanes)] = True
                cut += lanes
        if not self.processes:
            raise error
        return sorted(cut)

    def _start_again(self, before: EnvProcess) -> None:
        """Start a replacement for a process, tell it all that the old one knew, and reset its lanes."""
        new = self.start_again(before)
        try:
            spec, _ = new.answer(grace=BOOT)
            new.answer(self.introduce(new, spec))
            own = range(new.first, new.last)
            known = [self._last_seeds[lane] for lane in own if lane in self._last_seeds]
            seeds = [restart_seed(seed, new.restarts) for seed in known]
            self.seed(own, seeds if len(seeds) == len(own) else None)
            self.order(new, RESET, own)
            new.wait()
            self.read_answer(new)
        except BaseException:
            self.retire(new)
            raise

    def retire(self, process: EnvProcess) -> None:
        """Remove a process that failed or is no longer needed, and kill it."""
        if process in self.processes:
            self.processes.remove(process)
        process.kill()

    def start_again(self, before: EnvProcess) -> EnvProcess:
        """Start a replacement for a process without waiting; its first message will be its spec and traits."""
        with limits_as_worker_died("another process for the lanes"):
            new = self._start(before.number)
        new.first, new.last, new.restarts = before.first, before.last, before.restarts + 1
        new.spec, new.traits = before.spec, before.traits
        self.processes.append(new)
        self.processes.sort(key=lambda process: process.number)
        return new

    def introduce(self, new: EnvProcess, spec: EnvSpec) -> int:
        """Tell a replacement, once its spec has come, what the old process knew; returns the last call's number."""
        joint_spec([new.spec, spec])
        if spec.lanes != new.last - new.first:
            raise SpecMismatch(
                f"the replacement env has {spec.lanes} lanes, its predecessor had {new.last - new.first}"
            )
        number = new.call("number_lanes", new.first, self.spec.lanes)
        if self._action is not None:
            number = new.call("expect", _without_spaces(self._action))
        for slot in self._announced:
            number = new.call("slot", *slot)
        return number

    # ---- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        with Interrupts().held():  # takes a few seconds at most; an interrupt would leave children running
            self._close()

    def _close(self) -> None:
        children, self.processes = [process for process in self.processes if not process.ended], []
        for process in children:
            if process.silent:
                process.child.signal(signal.SIGTERM)
            process.hang_up()
        gone = functools.partial(end, [process.child for process in children], patience=LAST_STEP, deadline=DEADLINE)
        run_shutdown(gone, LINGER if any(process.failed for process in children) else None)
        for file in self._files:
            file.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
