"""WorkerServer: a worker and what it can be asked between two rollouts, wherever it lives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
from torch import Tensor, nn

from reap._system.conversation import Answer, answered
from reap._system.pickling import dumps
from reap._system.remote_errors import Raised
from reap.backends.worker_view import WorkerView
from reap.core.attribute_path import get_attribute
from reap.core.columns.assemble_ragged import assembler
from reap.core.ledger import TrajectoryIds
from reap.core.measuring.episode_log import Episodes
from reap.core.measuring.moments import Moments, Name, as_tensors
from reap.core.measuring.times import WorkClock
from reap.core.policies.as_policy import PolicyWarning
from reap.core.profiling import RolloutTracer, TraceSettings
from reap.core.resume import without_episodes
from reap.core.slot import Layout, Slot
from reap.core.worker import Plan, Worker
from reap.errors import UsageError
from reap.failures import RemoteRebuilds
from reap.spec import Key
from reap.weights import local
from reap.weights.shared import Packing
from reap.weights.strategy import Extracted

Hooks = tuple[Callable[[], Any] | None, Callable[[Any], Any] | None]  # before a rollout, and with each batch


def changed(hooks: Hooks | None, new: Mapping[str, Any]) -> Hooks:
    """These hooks, but for those in `new`, by their names."""
    before, after = hooks or (None, None)
    return new.get("pre_collect_hook", before), new.get("post_collect_hook", after)


class RowWriter(Protocol):
    """What brings full slots to where they belong."""

    before: Callable[[], Any] | None  # called before each rollout
    hook: Callable[[Any], Any] | None  # called with each batch
    postproc: Callable[[Any], Any] | None
    buffer: Any

    @property
    def wanted(self) -> bool:
        """Whether it is time for another rollout."""

    def write(self, slot: Slot) -> None:
        """Write what is in a full slot."""

    def forget(self) -> None:
        """Forget what is held back: it belongs to the time before."""


@dataclass(frozen=True)
class Job:
    """What a worker is started with, wherever it lives."""

    index: int
    workers: int
    plan: Plan
    entropy: int  # what its own random numbers begin with, unless it is seeded
    threads: int
    init: Callable[[], Any] | None = None
    hooks: Hooks | None = None  # None: none, or with a writer as it has them
    strategy: Any = None  # a user's own, by which weights are applied
    writer: Callable[..., RowWriter] | None = None  # makes, in the worker, what writes its rollouts into a buffer
    preempted: bool = False  # whether its rollouts may be cut short
    saves: bool = False  # whether it says after each rollout where it is, so that another can go on exactly there
    restarts: int = 0  # how many have been in its place before it
    nested: Callable[..., Any] | None = None  # makes a remote worker with processes of its own; None: a plain one


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself once it is built."""

    layout: Layout
    packing: Packing | None  # of its policy's weights; None: it has none, or not all of them are tensors
    needed: tuple[str, ...]  # the names an update may not leave out
    has_weights: bool  # whether its policy has weights at all
    lanes: int  # it has in all; a rollout may hold fewer
    learns: bool = False  # whether its env has running statistics that workers share
    warnings: tuple[str, ...] = ()  # what its owner is to be warned of: once, not by every worker


@dataclass(frozen=True)
class RolloutReady:
    """One rollout is in a slot."""

    slot: int
    frames: int
    version: int
    stats: Mapping[str, Any]
    finals: Any = None
    loose: Mapping[Key, Any] = field(default_factory=dict)  # columns of references: their values travel by themselves
    since: int = 0  # the call it began anew with
    span: tuple[float, float] = (0.0, 0.0)  # from when to when it was made
    episodes: Episodes | None = None  # that ended in it, by the clock of `span`
    statistics: Mapping[Name, Moments] | None = None  # that its env learns while it steps: what it has seen in all
    state_after: Mapping[str, Any] | None = None  # where the worker is after it, for another to go on from there


@dataclass(frozen=True)
class EnvRebuilt:
    """The env of one lane has raised, and was made anew; said unasked."""

    cause: Raised
    seconds: float  # that it took


HELLO = "hello"  # the first word of a worker's process: it is there, now the user's code begins
_ANEW = ("reset", "set_seed", "load_state")  # calls after which it begins anew


class WorkerServer:
    """A worker, by its number among so many. With a writer, its rollouts go where that brings them, and its hooks are
    the writer's.
    """

    interruptor: Any = None  # what may stop its rollouts
    # By which envs that raise are made anew, where its owner can be told at once.
    rebuilds: RemoteRebuilds | None = None

    def __init__(self, job: Job, plan: Plan, writer: Callable[[], RowWriter] | None = None) -> None:
        self.index = job.index
        self.doing = "starting"
        self.since = 0  # the call it began anew with
        self.writer: RowWriter | None = None
        self._tracer: RolloutTracer | None = None
        self._strategy = job.strategy
        self._saves = job.saves
        self._clock, self._in_rollouts = WorkClock(), 0.0
        self._build(plan, job.workers)
        self._hooks: Hooks = job.hooks or (None, None)
        if writer is not None:
            self.writer = writer()
            if job.hooks is not None:
                self.writer.before, self.writer.hook = job.hooks
        self.doing = "waiting"

    @property
    def hooks(self) -> Hooks:
        """What it calls before a rollout, and with each batch."""
        return self._hooks if self.writer is None else (self.writer.before, self.writer.hook)

    def _build(self, plan: Plan, workers: int) -> None:
        said: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as said:
                rebuilds = self.rebuilds if plan.tell_cuts else None
                self.worker = Worker(plan, ids=TrajectoryIds(self.index, workers), rebuilds=rebuilds)
        finally:
            for one in said:
                if not issubclass(one.category, PolicyWarning):
                    warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        model = self.worker.model
        named = local.named_tensors(model) if isinstance(model, nn.Module) else {}
        plain = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        self.tensors: list[Tensor] = list(plain.values())
        self.info = WorkerInfo(
            layout=self.worker.layout,
            packing=Packing.of(plain) if plain and len(plain) == len(named) else None,
            needed=tuple(n for n, _ in model.named_parameters(remove_duplicate=False)) if named else (),
            has_weights=isinstance(model, nn.Module),
            warnings=tuple(str(one.message) for one in said if issubclass(one.category, PolicyWarning)),
            lanes=self.worker.lanes,
            learns=bool(self.worker.running_statistics()),
        )

    def answer(self, call: int, name: str, arguments: Sequence[Any]) -> Answer:
        """Do what is asked. A wrong call is answered as such; what else goes wrong is the worker's end."""
        self.doing = name
        self.since = call if name in _ANEW else self.since
        answer = answered(call, lambda: getattr(self, f"do_{name}")(*arguments), UsageError)
        self.doing = "waiting"
        return answer

    def _refresh(self) -> None:
        """Act with the latest weights from here on."""

    def _collect(self, slot: Slot, *, random: bool) -> int:
        """One rollout, brought where the writer says if there is one; returns the frames made."""
        before, after = self.hooks
        self._clock.begin()
        if before is not None:
            self.doing = "in pre_collect_hook"
            before()
        self.doing = "collecting"
        self._refresh()
        frames = self._rollout(slot, random=random)
        if self.writer is not None:
            self.doing = "writing to the replay buffer"
            self.writer.write(slot)
        elif after is not None:
            self.doing = "in post_collect_hook"
            after(assembler(slot.layout)(slot.arrays, slot.layout))
        return frames

    def _rollout(self, slot: Slot, *, random: bool) -> int:
        return self.worker.fill(slot, random=random)

    def _full(self, number: int, slot: Slot, frames: int) -> RolloutReady:
        """Return what is said of a rollout in this slot."""
        worker = self.worker
        loose, finals = ({}, None) if self.writer is not None else (slot.hand_over(), slot.finals)
        return RolloutReady(
            number,
            frames,
            worker.version,
            self.counts(),
            finals,
            loose,
            self.since,
            worker.span,
            worker.ended_since(),
            self.do_statistics() or None,
            self._saved_state(),
        )

    def counts(self) -> dict[str, Any]:
        """Return what it has counted so far, the time between rollouts included."""
        found: dict[str, Any] = self.worker.summary()
        own = self._clock.seconds(self._in_rollouts)
        return {**found, **{name: found[name] + seconds for name, seconds in own.items()}}

    def _handed_over(self) -> None:
        """Note that a rollout was handed over: from here on the worker waits."""
        began, ended = self.worker.span
        self._in_rollouts += ended - began
        self._clock.end()

    def _forget(self) -> None:
        """Forget what is held back: it belongs to the time before."""
        if self.writer is not None:
            self.writer.forget()

    def _count_on(self, taken: int, *, loaded: bool = False) -> None:
        """Count from here on: so many of its frames were taken, and the others are not wanted any more."""

    # ---- calls ----------------------------------------------------------------------------------------------------

    def do_reset(self, taken: int) -> Any:
        """Begin new episodes; so many of its frames were taken. Returns the state it is in then."""
        self.worker.reset()
        self._count_on(taken)
        return self._saved_state()

    def do_set_seed(self, taken: int, seed: int, static: bool) -> Any:
        """Seed the lanes and begin new episodes; returns the state it is in then, where that is kept."""
        self._forget()
        self._count_on(taken)
        self.worker.set_seed(seed, static=static)
        return self._saved_state()

    def do_state(self) -> dict[str, Any]:
        """Return all that another worker needs to go on where this one is."""
        state = {"env_state_dict": self.worker.env.state_dict(), "traj_id": self.worker.ledger.counter.next}
        state |= {"policy_state_dict": self.do_weights()} if self.info.has_weights else {}
        if learned := self.do_statistics():
            state["statistics"] = [as_tensors(one) for one in learned.values()]
        return {**state, "policy_version": self.worker.version, "resume": self._open_state()}  # of these weights

    def _saved_state(self) -> dict[str, Any] | None:
        """Return where it is, for another to go on from there, if it is to say so."""
        return self._open_state() if self._saves else None

    def _open_state(self) -> dict[str, Any]:
        state = {"resume": self.worker.open_state()}
        if self.writer is not None:
            state = without_episodes(state, "it writes to a buffer; what it holds back of open episodes is not kept")
        return state["resume"]

    def do_load_state(self, taken: int, state: dict[str, Any], first_id: int, version: int) -> Any:
        """Go on from a state; without open episodes in it, with new ones whose ids are `first_id` or above."""
        self.worker.env.load_state_dict(state.get("env_state_dict", {}))
        if self.info.has_weights and state.get("policy_state_dict"):
            self._load(state["policy_state_dict"], int(state.get("policy_version", version)))
        if state.get("resume") is None:
            self.worker.ledger.counter.skip_to(first_id)
            self.worker.reset()  # episodes that were open elsewhere do not go on here
        else:
            self.worker.resume(state["resume"])
        self._count_on(taken, loaded=True)
        self._forget()
        return self._saved_state()

    def _load(self, weights: Any, version: int) -> None:
        self._refresh()  # older ones, seen now so that they are not taken for newer later
        if isinstance(weights, Extracted):
            self._strategy.apply_weights(self.worker.model, weights.weights)
        else:
            local.load(self.worker.model, weights)
        self.worker.version = version

    def do_statistics(self) -> dict[Name, Moments]:
        """Return what its env has learned by itself, by the names of its statistics."""
        return {one.name: one.own() for one in self.worker.running_statistics()}

    def do_hear_statistics(self, elsewhere: Mapping[Name, Moments]) -> None:
        """Learn what the envs of all others have learned."""
        for one in self.worker.running_statistics():
            if one.name in elsewhere:
                one.hear(elsewhere[one.name])

    def do_mark_cut(self) -> None:
        """The trajectories that were open here have ended with the worker whose place this one has taken."""
        self.worker.ledger.mark_cut(range(self.worker.lanes))

    def do_find(self, path: str, packed: bytes | None) -> Any:
        """Return what is at a path; a wrong one is the asker's mistake and leaves the worker as it is."""
        try:
            found = get_attribute(WorkerView(self, self.interruptor), path)
            if packed is not None:
                args, kwargs = cloudpickle.loads(packed)
                found = found(*args, **kwargs)
            dumps(found, path)  # here, where what cannot travel can still be told
            return found
        except Exception as error:
            return Raised.of(error, path)

    def do_apply(self, path: str, packed: bytes) -> Any:
        """Give a model at a path what a user's own strategy has made of its weights."""
        try:
            strategy, weights = cloudpickle.loads(packed)
            strategy.apply_weights(get_attribute(WorkerView(self, self.interruptor), path), weights)
        except Exception as error:
            return Raised.of(error, path)

    def do_profile(self, settings: TraceSettings | None) -> None:
        """Trace the rollouts to come; None: no more."""
        if self._tracer is not None:
            self._tracer.end()
        self._tracer = None if settings is None else RolloutTracer(self.worker, settings)

    def do_hooks(self, packed: bytes) -> None:
        """Other hooks from now on: a mapping with those that change."""
        self._hooks = changed(self.hooks, cloudpickle.loads(packed))
        if self.writer is not None:
            self.writer.before, self.writer.hook = self._hooks

    def do_weights(self) -> dict[str, Any]:
        """Return the weights that act, by name."""
        self._refresh()
        return local.detached(self.worker.model)


def what_it_did(worker: WorkerServer | None) -> str:
    """Return what a worker was at when it raised something; None: it was being built."""
    return "building it" if worker is None else worker.doing
