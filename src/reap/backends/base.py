"""Backend: where workers live and how full slots reach the consumer.

    start ─► take ─► take ─► … ─► close          publish: weights, any time between two takes

    InlineBackend   one worker in this thread
    WorkerBackend   any number of workers = one Supervisor + one Transport + one Delivery

                          ┌── Delivery: which rollouts make a batch, and when a slot is reused
    WorkerBackend.take ───┤
                          └── Supervisor: which calls are pending, which workers have answered or are gone
                                 └── Transport: how calls, slots and weights reach a worker

A rollout that `take` returned belongs to the consumer; its slot is released when the last tensor on it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from reap._system.interrupts import Interrupts
from reap._system.processes import BOOT
from reap._system.silence import Silence
from reap.core.measuring.episode_log import EpisodeLog
from reap.core.measuring.times import WorkClock
from reap.core.slot import Finals, Layout, Slot
from reap.errors import WorkerDied, WorkerSilent
from reap.spec import Key
from reap.weight_update import WeightTransport
from reap.weights.shared import Packing

if TYPE_CHECKING:
    from reap.backends.supervisor import Supervisor
    from reap.backends.worker_handle import WorkerHandle


@dataclass(frozen=True)
class Rollout:
    """The columns of one full slot, and their metadata."""

    arrays: Mapping[Key, np.ndarray[Any, Any]]
    layout: Layout
    frames: int
    version: int
    worker: int = 0
    finals: Finals | None = None
    parts: Sequence[Rollout] = ()  # one rollout per worker, where their lengths differ


class Halted(BaseException):
    """Raised inside a `take` that another thread has cancelled."""


def halt_when(condition: Callable[[], bool], worker: Any) -> None:
    """Make a worker of this process check `condition` after every step, and raise `Halted` there once it holds."""
    usual = worker.should_stop

    def stop() -> bool:
        if condition():
            raise Halted
        return usual is not None and bool(usual())

    worker.should_stop = worker.loop.stop = stop


@dataclass(frozen=True)
class WorkerReport:
    """State and counts of one worker."""

    index: int
    alive: bool
    frames: int  # collected, whether or not the consumer has taken them
    rollouts: int
    size: int  # frames in a full rollout
    stats: Mapping[str, Any]  # its counts, keyed by the names in `reap.core.measuring.stats.COUNT_NAMES`


@dataclass(frozen=True)
class WorkerActivity:
    """What one worker is doing right now, as far as the parent knows without calling it."""

    index: int
    text: str
    pid: int | None  # of its own process, if that runs on this machine
    lanes: int


class Backend(Protocol):
    """The interface of every way to run workers."""

    @property
    def close_ends_take(self) -> bool:
        """Whether `close` ends the workers a `take` waits for; if not, the `take` ends after its current step."""

    @property
    def episodes(self) -> EpisodeLog:
        """The finished episodes of all workers that have been reported to this process."""

    @property
    def restarts(self) -> int:
        """How many times a worker was restarted."""

    @property
    def failed(self) -> bool:
        """Whether a worker has failed without being replaced or dropped, so that the backend is unusable."""
        return False

    def reports(self, clock: WorkClock) -> Sequence[WorkerReport]:
        """Return a report on each worker; after `close`, the reports as of that moment.

        `clock`: when this process was collecting; it gives the waiting time of a worker in this process only.
        """

    on_rollout: Callable[..., None] | None  # called with worker, span, frames and version of each rollout

    def profile(self, settings: Any) -> None:
        """Make workers trace their rollouts: settings by worker (core/measuring/profiling.py), None to end a trace."""

    def start(self) -> None:
        """Build the workers. Errors raised while building them are raised here."""

    def take(self, *, random: bool = False) -> Rollout:
        """Return the next full rollout; with `random`, one collected with random actions."""

    def rollout_lost(self) -> None:
        """Start new trajectories, because Ctrl-C or an error has lost the last rollout before its delivery.

        Does nothing where `uninterrupted()` already prevents that.
        """

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Return a context in which Ctrl-C is raised only while waiting for workers."""

    def canceller(self) -> Callable[[], None]:
        """Return a function that cancels a `take` from another thread: the `take` then raises `Halted`."""

    def publish(self, weights: Any = None) -> int:
        """Send the workers new weights (None: those of the policy they were built with); return the new version."""

    def reset(self, lanes: Sequence[int] | None = None) -> None:
        """Start new episodes."""

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        """Seed all lanes and start new episodes; return the next unused seed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue later: env states, trajectory ids and the weight version."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""

    def last_state(self, why: str) -> dict[str, Any]:
        """Return the part of `state_dict` that this process knows after workers have failed.

        `why` is recorded as the reason why their episodes ended. New trajectory ids will exceed all used so far.
        """

    def activity(self) -> list[WorkerActivity]:
        """Return what each worker is doing right now, without calling the workers. Any thread may call this."""

    def stacks(self) -> dict[str, str]:
        """Return the current stack of each worker, lane process and lane thread, by name. Any thread may call this."""

    def close(self, *, failed: bool = False) -> None:
        """End the workers. May be called twice. `failed`: an error is about to be raised; a thread may finish this."""


class WorkerLiveness(Protocol):
    """Whether a worker is alive, and how it ended."""

    @property
    def pid(self) -> int:
        """Its process id; 0 if it was never started."""

    @property
    def label(self) -> str:
        """Its process id and machine, as error messages show them after its name."""

    def gone(self) -> bool:
        """Return whether it has ended and will send nothing more."""

    def death(self) -> WorkerDied:
        """Return the error that says how it ended, once it is gone."""

    def ask_stack(self) -> str:
        """Return the current stacks of its threads; empty if it does not respond at all."""

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        """Return the error for a worker that has sent nothing for `seconds`."""


class WorkerConnection(Protocol):
    """The parent's connection to one worker. A restarted worker gets a new connection."""

    child: WorkerLiveness

    def call(self, data: bytes) -> None:
        """Send a numbered call, which the worker answers between two rollouts."""

    def fill(self, slot: int, *, random: bool) -> None:
        """Let the worker fill a slot; `random`: with random actions, if the worker does not decide that itself."""

    def receive(self) -> tuple[list[Any], bool]:
        """Return the messages received since the last call, and whether the worker is gone and none will follow."""


class WeightChannel(Protocol):
    """Publishes new weights to all workers at once."""

    packing: Packing

    def publish(self, named: Mapping[str, Tensor], version: int) -> None:
        """Make these the current weights; tensors that are not in `named` keep their values."""


class Transport(Protocol):
    """Carries calls, slots and weights to workers, and notices when they end. It knows nothing of batches."""

    weight_schemes: ClassVar[tuple[WeightTransport, ...]]  # supported ways to send weights
    can_add_workers: ClassVar[bool]  # whether more workers can be launched later
    startup_grace: float = BOOT  # extra seconds until a relaunched worker must have sent its first message

    def position(self, worker: WorkerHandle) -> dict[str, int]:
        """Return the step and lane a worker is in, as far as that can be seen from outside."""

    def open(self, workers: list[WorkerHandle], interrupts: Interrupts, silence: Silence) -> None:
        """Create what is needed before the first worker is launched."""

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        """Start these workers from their jobs, all at once. Each has a connection as soon as it is started."""

    def retire(self, worker: WorkerHandle) -> None:
        """End what is left of a failed worker, so that it can be launched again where that is possible."""

    def release_claims(self, worker: WorkerHandle) -> None:
        """Release the frames a dead worker had claimed but not collected, so that other workers collect them.

        `worker.frames` counts only the frames it finished.
        """

    def cannot_restart(self) -> str | None:
        """Return why a failed worker cannot be launched again; None if it can."""
        return None

    def wait(self, seconds: float | None) -> list[int]:
        """Wait up to `seconds` (None: forever) until workers have sent something or are gone; return their numbers."""

    def common_slots(self, workers: Sequence[WorkerHandle], whole: Layout, count: int) -> Callable[[int], Slot]:
        """Allocate `count` slots that all workers share, each filling its own lanes.

        Return a function from an index (-1: the last) to the slot.
        """

    def own_slots(self, workers: Sequence[WorkerHandle], count: int, *, here: bool = True) -> None:
        """Allocate `count` slots for each of these workers, as its `slots`; not `here`: only the worker reads them."""

    def begin_arguments(self, worker: WorkerHandle, packing: Packing | None) -> tuple[Any, ...]:
        """Return the arguments of a worker's `begin` call, which say where its memory and weights are."""

    def weight_channel(self, packing: Packing, needed: Sequence[str]) -> WeightChannel:
        """Return the channel that publishes weights to all workers, once all of them have begun."""

    def pass_weights(self, worker: WorkerHandle, data: bytes) -> Any:
        """Pass one worker its own weights; return the argument of its `load_weights` call that refers to them."""

    def resend_weights(self, worker: WorkerHandle) -> None:
        """Send a worker that was launched later the latest weights for all, if it does not find them by itself."""

    def set_random_frames(self, frames: int) -> None:
        """Collect the first `frames` frames of the run with random actions."""

    def cut_short(self, stop: bool) -> None:
        """Tell workers to end their rollouts early, or, with False, to complete them from now on."""

    def close(self, workers: Sequence[WorkerHandle]) -> None:
        """End these workers (all there are) within a few deadlines, and free all resources. May be called twice."""


class Delivery(Protocol):
    """Decides which rollouts make a batch, and when a slot is given to a worker again."""

    in_step: bool  # whether all frames of a batch have the same policy version
    unfinished: bool  # whether a batch is half collected, because Ctrl-C interrupted the wait for it

    def prepare(self, supervisor: Supervisor) -> None:
        """Allocate slots for the layouts the workers have reported; called again when workers are added."""

    def preempts(self, workers: int) -> bool:
        """Return whether rollouts may be cut short."""
        return False

    def take(self, *, random: bool, most: float) -> Rollout:
        """Return the next rollout; `most`: how many frames may still be ordered, if workers write them to a buffer."""

    def discard_unfinished(self) -> None:
        """Let workers finish the rollouts that were begun and not delivered, and discard these."""

    def discard_before(self, workers: Sequence[int], call: int) -> None:
        """Discard the undelivered rollouts that these workers collected before `call`, which started new episodes."""

    def discard_arrived(self) -> tuple[int, int]:
        """Discard the rollouts that were never taken; return their frames and their number. Workers must be idle."""
