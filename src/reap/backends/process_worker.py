"""The other side of the process backend: what runs in a worker's process.

    free pipe ──► slot number ──► refresh weights ──► fill ──┬──────────► "full" ──► connection
                                                             └► writer ─► "full" ──► connection    (a replay buffer)
    connection ──► call (seed, reset, state …), answered between two rollouts

The worker waits for a free slot and for nothing else; it ends when the connection does. With a writer it can also be
let run free: then it waits for nobody, and says what it has made in the control block.
"""

from __future__ import annotations

import os
import pickle
import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Protocol

import cloudpickle
import torch
from torch import Tensor, nn

from reap.backends.control import NOWHERE, Control
from reap.children import Raised, dumps, send, settle
from reap.core.graphed import pin
from reap.core.ledger import TrajectoryIds
from reap.core.paths import follow
from reap.core.shared import SharedFile, SharedSlots
from reap.core.slot import Layout, Slot
from reap.core.worker import Plan, Worker
from reap.errors import UsageError
from reap.seeding import seed_process
from reap.spec import Key
from reap.weights import local
from reap.weights.shared import Packing, SharedWeights

HELLO = "hello"  # the first word of a worker: the process is there, now the user's code begins
_LOOK = 2  # milliseconds between looks at a buffer that wants no more rows for now


class Writer(Protocol):
    """What brings full slots to where they belong."""

    before: Callable[[], Any] | None  # called before each rollout

    @property
    def wanted(self) -> bool:
        """Whether it is time for another rollout."""

    def write(self, slot: Slot) -> None:
        """Bring it there."""

    def forget(self) -> None:
        """What is held back belongs to the time before."""

    def set_hook(self, packed: bytes) -> None:
        """What to call with each batch from now on."""


@dataclass(frozen=True)
class Job:
    """What a worker's process is started with."""

    index: int
    workers: int
    plan: Plan
    threads: int
    entropy: int
    init: Callable[[], Any] | None = None
    preempted: bool = False
    writer: Callable[[Sequence[int]], Writer] | None = None  # from descriptors


@dataclass(frozen=True)
class About:
    """What a worker says of itself once it is built."""

    layout: Layout
    packing: Packing | None  # of its policy's weights; None: it has none, or not all of them are tensors
    needed: tuple[str, ...]  # the names an update may not leave out
    weighs: bool  # whether its policy has weights at all


@dataclass(frozen=True)
class Memory:
    """Where its slots are: `count` slots of `layout`, its own lanes from `first` on; in the common file or its own."""

    layout: Layout
    count: int
    first: int
    common: bool
    packing: Packing | None


@dataclass(frozen=True)
class Full:
    """One rollout is in a slot."""

    slot: int
    frames: int
    version: int
    stats: dict[str, Any]
    finals: Any = None
    loose: Mapping[Key, Any] = field(default_factory=dict)  # columns of references: their values travel by themselves
    since: int = 0  # the call it began anew with
    span: tuple[float, float] = (0.0, 0.0)  # from when to when it was made


@dataclass(frozen=True)
class Answer:
    """What a call returned; or `Raised`, if it was a wrong call and nothing has happened."""

    call: int
    value: Any


ANEW = ("reset", "set_seed", "load_state")  # calls after which it begins anew


def run_worker(connection: Connection, fds: Sequence[int], job: Job) -> None:
    """The life of a worker."""
    send(connection, HELLO)
    torch.set_num_threads(job.threads)
    seed_process(job.entropy)
    free, common, own, weights, control, parcel, *buffer = fds
    host = None
    try:
        host = _Host(job, connection, control=SharedFile(fd=control), parcel=parcel, buffer=buffer)
        send(connection, host.about)
        memory = connection.recv()
        host.remember(memory, SharedFile(fd=common if memory.common else own), SharedFile(fd=weights))
        settle()
        send(connection, "ready")
        host.serve(free)
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        send(connection, Raised.of(error, "building it" if host is None else host.doing))
    finally:
        if host is not None:
            host.worker.close()


class _Host:
    """A worker and what ties it to the parent."""

    def __init__(
        self, job: Job, connection: Connection, *, control: SharedFile, parcel: int, buffer: Sequence[int]
    ) -> None:
        self._connection, self._job, self._parcel = connection, job, parcel
        self._control = Control(control, job.workers)
        self._at = self._control.step[job.index :][:1]
        self._free = self._resting = False  # whether it runs free, and whether it is paused then
        self.doing = "starting"
        self._since = 0
        if job.init is not None:
            job.init()
        plan = job.plan
        if job.preempted:
            words = self._control
            plan = replace(plan, stop=lambda: words.stop)
        self.worker = Worker(plan, ids=TrajectoryIds(job.index, job.workers))
        self._writer = None if job.writer is None else job.writer(buffer)
        self.worker.loop.at = self._at  # the parent can tell where we were, whatever happens to us
        self.worker.env.say_lane_in(memoryview(self._control.lane[job.index :][:1]))  # type: ignore[arg-type]
        self._slots: dict[int, Slot] = {}
        self._shared: SharedWeights | None = None
        model = self.worker.model
        named = local.named_tensors(model) if isinstance(model, nn.Module) else {}
        plain = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        self._tensors: list[Tensor] = list(plain.values())
        self.about = About(
            layout=self.worker.layout,
            packing=Packing.of(plain) if plain and len(plain) == len(named) else None,
            needed=tuple(n for n, _ in model.named_parameters(remove_duplicate=False)) if named else (),
            weighs=isinstance(model, nn.Module),
        )

    def remember(self, memory: Memory, slots: SharedFile, weights: SharedFile) -> None:
        """Map the memory the parent has made."""
        whole = SharedSlots(slots, memory.layout, memory.count)
        pin(whole.block, self.worker.plan.policy_device)
        self._slots = {i: whole.window(i, self.worker.layout, memory.first) for i in range(memory.count)}
        if memory.packing is not None:
            self._shared = SharedWeights(weights, memory.packing)
            if self._job.index == 0:
                self._shared.begin_with(self._tensors)

    def serve(self, free: int) -> None:
        """Until the parent is gone: answer calls, and fill whatever slot is free. Calls first."""
        calls = self._connection.fileno()
        both, only_calls = select.poll(), select.poll()
        both.register(free, select.POLLIN)
        for poll in (both, only_calls):
            poll.register(calls, select.POLLIN)
        while True:
            poll = only_calls if self._free else both
            ready = {fd for fd, _ in poll.poll(self._rest() if self._free else None)}
            if calls in ready:
                call, name, arguments = self._connection.recv()
                self.doing = name
                self._since = call if name in ANEW else self._since
                try:
                    value = getattr(self, f"do_{name}")(*arguments)
                except UsageError as error:
                    value = Raised.of(error)
                send(self._connection, Answer(call, value))
            elif self._free:
                self._run_free()
            else:
                data = os.read(free, 1)
                if not data:
                    return
                self._fill(self._slots[data[0]])

    def _fill(self, slot: Slot) -> None:
        worker = self.worker
        claimed = self._control.claim(self._job.index, self._size, most=self._control.random)
        frames = self._collect(slot, random=claimed is not None)
        loose, finals = ({}, None) if self._writer is not None else (slot.hand_over(), slot.finals)
        stats, version = worker.stats.summary(), worker.loop.version
        full = Full(slot.index, frames, version, stats, finals, loose, self._since, worker.stats.span)
        self._connection.send_bytes(cloudpickle.dumps(full) if loose else pickle.dumps(full))

    def _collect(self, slot: Slot, *, random: bool) -> int:
        """One rollout, brought to the buffer if there is one; returns the frames made."""
        self.doing = "collecting"
        writer = self._writer
        if writer is not None and writer.before is not None:
            writer.before()
        self._refresh()
        frames = self.worker.fill(slot, random=random)
        self._at[0] = NOWHERE
        if writer is not None:
            self.doing = "writing to the replay buffer"
            writer.write(slot)
        return frames

    def _rest(self) -> int | None:
        """Milliseconds until it is worth a look whether to go on; None: until somebody says something."""
        if self._resting or self._control.claimed.sum() >= self._control.total:
            return None
        return 0 if self._writer is not None and self._writer.wanted else _LOOK

    def _run_free(self) -> None:
        words, index = self._control, self._job.index
        if self._writer is None or not self._writer.wanted:
            return
        before = words.claim(index, self._size, most=words.total)
        if before is not None:
            frames = self._collect(self._slots[0], random=before < words.random)
            words.finish(index, frames, self._size, self.worker.stats.summary())

    @property
    def _size(self) -> int:
        return self.worker.layout.steps * self.worker.layout.lanes

    def _refresh(self) -> None:
        """Act with the latest weights from here on."""
        if self._shared is not None and (version := self._shared.refresh(self._tensors)) is not None:
            self.worker.loop.version = version

    # ---- calls ----------------------------------------------------------------------------------------------------

    def do_run(self) -> None:
        """From here on it needs no slots."""
        self._free = True

    def do_rest(self, resting: bool) -> None:
        """Pause, or go on."""
        self._resting = resting

    def do_hook(self, packed: bytes) -> None:
        if self._writer is not None:
            self._writer.set_hook(packed)

    def do_reset(self, taken: int) -> None:
        self.worker.reset()
        self._forget_claims(taken)

    def do_set_seed(self, taken: int, seed: int, static: bool) -> int:
        self._forget()
        self._forget_claims(taken)
        return self.worker.set_seed(seed, static=static)

    def _forget_claims(self, taken: int) -> None:
        """Frames nobody has taken are not wanted any more; without a buffer, that is, where they lie already."""
        if self._writer is None:
            self._control.claimed[self._job.index] = taken

    def do_state(self) -> dict[str, Any]:
        state = {"env_state_dict": self.worker.env.state_dict(), "traj_id": self.worker.ledger.counter.next}
        return {**state, "policy_state_dict": self.do_weights()} if self.about.weighs else state

    def do_load_state(self, taken: int, state: dict[str, Any], first_id: int, version: int) -> None:
        self.worker.env.load_state_dict(state.get("env_state_dict", {}))
        self.worker.ledger.counter.skip_to(first_id)
        if self.about.weighs and state.get("policy_state_dict"):
            self._load(state["policy_state_dict"], version)
        self.worker.reset()  # episodes that were open elsewhere do not go on here
        self._control.claimed[self._job.index] = taken
        self._forget()

    def _forget(self) -> None:
        if self._writer is not None:
            self._writer.forget()

    def do_load_weights(self, size: int, version: int) -> None:
        """Weights that came as a parcel, for this worker alone."""
        self._load(cloudpickle.loads(os.pread(self._parcel, size, 0)), version)

    def _load(self, weights: Any, version: int) -> None:
        self._refresh()  # older ones, seen now so that they are not taken for newer later
        local.load(self.worker.model, weights)
        self.worker.loop.version = version

    def do_find(self, path: str, packed: bytes | None) -> Any:
        """What is at a path; a wrong one is the asker's mistake and leaves the worker as it is."""
        worker = self.worker
        try:
            found = follow(SimpleNamespace(policy=worker.model, env=worker.env, worker_idx=self._job.index), path)
            if packed is not None:
                args, kwargs = cloudpickle.loads(packed)
                found = found(*args, **kwargs)
            dumps(found, path)  # here, where what cannot travel can still be told
            return found
        except Exception as error:
            return Raised.of(error, path)

    def do_weights(self) -> dict[str, Any]:
        self._refresh()
        named = local.named_tensors(self.worker.model)
        return {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in named.items()}
