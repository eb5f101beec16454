"""WorkerServer: a worker and the calls it answers between two rollouts, wherever it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
from torch import Tensor, nn

from reap._system.conversation import Answer, answered
from reap._system.messages.pickling import dumps
from reap._system.messages.remote_errors import Raised
from reap.backends.worker_view import WorkerView
from reap.core.attribute_path import get_attribute
from reap.core.columns.assemble_ragged import assembler
from reap.core.ledger import TrajectoryIds
from reap.core.measuring.episode_log import Episodes
from reap.core.measuring.moments import Moments, Name, as_tensors
from reap.core.measuring.profiling import RolloutTracer, TraceSettings
from reap.core.measuring.times import WorkClock
from reap.core.policies.as_policy import PolicyWarning
from reap.core.slot import Layout, Slot
from reap.core.worker import Plan, Worker
from reap.errors import UsageError
from reap.failures import RemoteRebuilds
from reap.spec import Key
from reap.weights import local
from reap.weights.shared import Packing
from reap.weights.strategy import Extracted

Hooks = tuple[Callable[[], Any] | None, Callable[[Any], Any] | None]  # called before each rollout, and with each batch


class RowWriter(Protocol):
    """Writes full slots to their destination, in the worker itself."""

    before: Callable[[], Any] | None  # called before each rollout
    hook: Callable[[Any], Any] | None  # called with each batch
    postproc: Callable[[Any], Any] | None
    buffer: Any

    @property
    def wanted(self) -> bool:
        """Whether the destination wants another rollout now."""

    def write(self, slot: Slot) -> None:
        """Write the rollout in a full slot."""

    def forget(self) -> None:
        """Drop the rows held back of unfinished episodes: after a new seed or state, trajectory ids may repeat."""


@dataclass(frozen=True)
class Job:
    """Everything a worker is started with, wherever it runs."""

    index: int
    workers: int
    plan: Plan
    entropy: int  # seeds its random generators, unless the collector is seeded
    threads: int
    init: Callable[[], Any] | None = None
    # `pre_collect_hook` and `post_collect_hook`; those not in it are the writer's own, or there are none.
    hooks: Mapping[str, Any] = field(default_factory=dict)
    strategy: Any = None  # a user's own strategy, which applies weights
    # Makes the writer of its rollouts. Called in the worker: with descriptors and the worker's number where memory is
    # shared, without arguments elsewhere.
    writer: Callable[..., RowWriter] | None = None
    preempted: bool = False  # whether its rollouts may be cut short
    saves: bool = False  # whether it sends its whole state with each rollout, so that a replacement can resume
    restarts: int = 0  # how many workers it replaces, one after another
    nested: Callable[..., Any] | None = None  # makes a worker with processes of its own; None: one loop


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker reports about itself once it is built."""

    layout: Layout
    packing: Packing | None  # of its policy's weights; None: it has none, or some are not tensors
    needed: tuple[str, ...]  # names of the weights that an update must contain
    has_weights: bool  # whether its policy has weights at all
    lanes: int  # of its env in all; a rollout may hold fewer
    learns: bool = False  # whether its env has running statistics that workers share
    warnings: tuple[str, ...] = ()  # shown to the user once, not by every worker


@dataclass(frozen=True)
class RolloutReady:
    """The message that a rollout is in a slot."""

    slot: int
    frames: int
    version: int
    stats: Mapping[str, Any]
    finals: Any = None
    loose: Mapping[Key, Any] = field(default_factory=dict)  # columns of references: values sent beside the slot
    after_call: int = 0  # the last call before it that started new episodes
    span: tuple[float, float] = (0.0, 0.0)  # when it began and ended
    episodes: Episodes | None = None  # that ended in it, by the clock of `span`
    statistics: Mapping[Name, Moments] | None = None  # running statistics of its env over everything it has seen
    state_after: Mapping[str, Any] | None = None  # the worker's state after it, for a replacement to resume from


@dataclass(frozen=True)
class EnvRebuilt:
    """The message that a lane's env has raised and was rebuilt; sent without a request."""

    cause: Raised
    seconds: float  # that the rebuild took


# First message of a worker process that shares memory: it has started, and runs the user's code next. Remote workers
# send none.
HELLO = "hello"
_STARTS_EPISODES = ("reset", "set_seed", "load_state")  # calls that start new episodes
_AT_A_PATH = ("find", "apply")  # calls of what is at a path, the first argument: no error there ends the worker


class WorkerServer:
    """Runs a worker and answers calls to it. With a writer, the writer stores its rollouts and holds its hooks."""

    interruptor: Any = None  # the object that may stop its rollouts
    # Rebuilds envs that raise, and reports each to the parent; None where that is not possible.
    rebuilds: RemoteRebuilds | None = None

    def __init__(self, job: Job, plan: Plan, writer: Callable[[], RowWriter] | None = None) -> None:
        self.index = job.index
        self.doing = "starting"
        self.after_call = 0  # the last call that started new episodes
        self.writer: RowWriter | None = None
        self._tracer: RolloutTracer | None = None
        self._strategy = job.strategy
        self._saves = job.saves
        self._clock, self._in_rollouts = WorkClock(), 0.0
        self._build(plan, job.workers)
        self._hooks: Hooks = None, None
        if writer is not None:
            self.writer = writer()
        self._change_hooks(job.hooks)
        self.doing = "waiting"

    @property
    def hooks(self) -> Hooks:
        """The hooks it calls before each rollout, and with each batch."""
        return self._hooks if self.writer is None else (self.writer.before, self.writer.hook)

    def _change_hooks(self, new: Mapping[str, Any]) -> None:
        """Replace the hooks named in `new`."""
        before, after = self.hooks
        self._hooks = new.get("pre_collect_hook", before), new.get("post_collect_hook", after)
        if self.writer is not None:
            self.writer.before, self.writer.hook = self._hooks

    def _build(self, plan: Plan, workers: int) -> None:
        caught: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                rebuilds = self.rebuilds if plan.cut_column else None
                self.worker = Worker(plan, ids=TrajectoryIds(self.index, workers), rebuilds=rebuilds)
        finally:
            for one in caught:
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
            warnings=tuple(str(one.message) for one in caught if issubclass(one.category, PolicyWarning)),
            lanes=self.worker.lanes,
            learns=bool(self.worker.running_statistics()),
        )

    def answer(self, call: int, name: str, arguments: Sequence[Any]) -> Answer:
        """Execute a call and return the answer. A `UsageError` is returned too; most other errors end the worker."""
        self.doing = name
        self.after_call = call if name in _STARTS_EPISODES else self.after_call
        refused, doing = (Exception, arguments[0]) if name in _AT_A_PATH else (UsageError, "")
        answer = answered(call, lambda: getattr(self, f"do_{name}")(*arguments), refused, doing)
        self.doing = "waiting"
        return answer

    def _refresh(self) -> None:
        """Load the latest weights, if there are new ones."""

    def _collect(self, slot: Slot, *, random: bool) -> int:
        """Collect one rollout, and write it if there is a writer; return the number of frames."""
        before, after = self.hooks
        self._clock.begin()
        if before is not None:
            self.doing = "pre_collect_hook"
            before()
        self.doing = "collecting"
        self._refresh()
        frames = self._rollout(slot, random=random)
        if self.writer is not None:
            self.doing = "writing to the replay buffer"
            self.writer.write(slot)
        elif after is not None:
            self.doing = "post_collect_hook"
            layout = slot.layout.in_place
            after(assembler(layout)(slot.arrays, layout))
        return frames

    def _rollout(self, slot: Slot, *, random: bool) -> int:
        return self.worker.fill(slot, random=random)

    def _ready_message(self, number: int, slot: Slot, frames: int) -> RolloutReady:
        """Return the message about the rollout in this slot."""
        worker = self.worker
        loose, finals = ({}, None) if self.writer is not None else (slot.take_references(), slot.finals)
        return RolloutReady(
            slot=number,
            frames=frames,
            version=worker.version,
            stats=self.counts(),
            finals=finals,
            loose=loose,
            after_call=self.after_call,
            span=worker.span,
            episodes=worker.take_episodes(),
            statistics=self.do_statistics() or None,
            state_after=self._saved_state(),
        )

    def counts(self) -> dict[str, Any]:
        """Return its counts so far, including the time between rollouts."""
        found: dict[str, Any] = self.worker.summary()
        own = self._clock.seconds(self._in_rollouts)
        return {**found, **{name: found[name] + seconds for name, seconds in own.items()}}

    def _handed_over(self) -> None:
        """Note that a rollout was handed over, so that the worker waits from here on."""
        began, ended = self.worker.span
        self._in_rollouts += ended - began
        self._clock.end()

    def _discard_held_back(self) -> None:
        """Let the writer drop rows that it holds back, because trajectory ids may repeat from here on."""
        if self.writer is not None:
            self.writer.forget()

    def _count_on(self, taken: int, *, loaded: bool = False) -> None:
        """Continue to count from `taken` frames: those it collected beyond them are discarded."""

    # ---- calls ----------------------------------------------------------------------------------------------------

    def do_reset(self, taken: int) -> Any:
        """Start new episodes, with `taken` of its frames taken so far. Return its state, if it is to be saved."""
        self.worker.reset()
        self._count_on(taken)
        return self._saved_state()

    def do_set_seed(self, taken: int, seed: int, static: bool) -> Any:
        """Seed the lanes and start new episodes. Return its state, if it is to be saved."""
        self._discard_held_back()
        self._count_on(taken)
        self.worker.set_seed(seed, static=static)
        return self._saved_state()

    def do_state(self) -> dict[str, Any]:
        """Return everything another worker needs to continue where this one is."""
        state = {"env_state_dict": self.worker.env.state_dict(), "traj_id": self.worker.ledger.counter.next}
        state |= {"policy_state_dict": self.do_weights()} if self.info.has_weights else {}
        if learned := self.do_statistics():
            state["statistics"] = [as_tensors(one) for one in learned.values()]
        state["policy_version"] = self.worker.version  # of the weights above
        return {**state, "resume": self._open_state()}

    def _saved_state(self) -> dict[str, Any] | None:
        """Return its state for a replacement to resume from (see `do_load_state`), if it is to be saved; else None."""
        return {"env_state_dict": self.worker.env.state_dict(), "resume": self._open_state()} if self._saves else None

    def _open_state(self) -> dict[str, Any]:
        why = "it writes to a buffer; the frames of open episodes that it holds back are not saved"
        return self.worker.open_state(None if self.writer is None else why)

    def do_load_state(self, taken: int, state: dict[str, Any], first_id: int, version: int) -> Any:
        """Continue from a state. If it has no open episodes, start new ones, with ids of at least `first_id`."""
        self.worker.env.load_state_dict(state.get("env_state_dict", {}))
        if self.info.has_weights and state.get("policy_state_dict"):
            self._load(state["policy_state_dict"], int(state.get("policy_version", version)))
        if state.get("resume") is None:
            self.worker.ledger.counter.skip_to(first_id)
            self.worker.reset()  # episodes that were open elsewhere cannot continue here
        else:
            self.worker.resume(state["resume"])
        self._count_on(taken, loaded=True)
        self._discard_held_back()
        return self._saved_state()

    def _load(self, weights: Any, version: int) -> None:
        self._refresh()  # read older published weights now, so that they do not overwrite these later
        if isinstance(weights, Extracted):
            self._strategy.apply_weights(self.worker.model, weights.weights)
        else:
            local.load(self.worker.model, weights)
        self.worker.version = version

    def do_statistics(self) -> dict[Name, Moments]:
        """Return the running statistics of its own env, by name."""
        return {one.name: one.own() for one in self.worker.running_statistics()}

    def do_hear_statistics(self, elsewhere: Mapping[Name, Moments]) -> None:
        """Take over the running statistics of all other workers' envs."""
        for one in self.worker.running_statistics():
            if one.name in elsewhere:
                one.set_elsewhere(elsewhere[one.name])

    def do_mark_cut(self) -> None:
        """Mark the trajectories that were open in this worker's predecessor as cut."""
        self.worker.ledger.mark_cut(range(self.worker.lanes))

    def do_find(self, path: str, packed: bytes | None) -> Any:
        """Return what is at a path, or what it returns when called, pickled."""
        found = get_attribute(WorkerView(self, self.interruptor), path)
        if packed is not None:
            args, kwargs = cloudpickle.loads(packed)
            found = found(*args, **kwargs)
        return dumps(found, path)  # here, where an object that cannot be pickled can still be reported

    def do_apply(self, path: str, packed: bytes) -> None:
        """Apply weights, extracted by a user's own strategy, to the model at a path."""
        strategy, weights = cloudpickle.loads(packed)
        strategy.apply_weights(get_attribute(WorkerView(self, self.interruptor), path), weights)

    def do_profile(self, settings: TraceSettings | None) -> None:
        """Trace the next rollouts; None stops tracing."""
        if self._tracer is not None:
            self._tracer.end()
        self._tracer = None if settings is None else RolloutTracer(self.worker, settings)

    def do_hooks(self, packed: bytes) -> None:
        """Replace hooks, given as a pickled mapping of those that change."""
        self._change_hooks(cloudpickle.loads(packed))

    def do_weights(self) -> dict[str, Any]:
        """Return the current weights, by name."""
        self._refresh()
        return local.detached(self.worker.model)


def what_it_did(worker: WorkerServer | None) -> str:
    """Return what a worker was doing when it raised; None: it was being built."""
    return "building the worker" if worker is None else worker.doing
