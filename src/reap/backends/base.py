"""Backend: where workers live and how full slots reach the consumer.

    start ─► take ─► take ─► … ─► close          publish: weights, any time between two takes

    InlineBackend   one worker in this thread
    WorkerBackend   workers elsewhere = one Supervisor + one Transport + one Delivery

                          ┌── Delivery: which rollouts make a batch, and when a slot is given out again
    WorkerBackend.take ───┤
                          └── Supervisor: who was asked what, who has answered, who is gone
                                 └── Transport: how calls, slots and weights reach a worker

A taken rollout is the consumer's; its slot is released when the last tensor on it dies.
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
    """The columns of one full slot, and what is known about them."""

    arrays: Mapping[Key, np.ndarray[Any, Any]]
    layout: Layout
    frames: int
    version: int
    worker: int = 0
    finals: Finals | None = None
    parts: Sequence[Rollout] = ()  # where workers' rollouts have different lengths: one by one


class Halted(BaseException):
    """Raised by a take that was broken off on purpose, from another thread."""


def break_off_when(asked: Callable[[], bool], worker: Any) -> None:
    """Have a worker of this process ask after every step, as of an interruptor; `Halted` is raised there if so."""
    usual = worker.should_stop

    def stop() -> bool:
        if asked():
            raise Halted
        return usual is not None and bool(usual())

    worker.should_stop = worker.loop.stop = stop


@dataclass(frozen=True)
class WorkerReport:
    """What is known of one worker."""

    index: int
    alive: bool
    frames: int  # made, whether anybody has taken them or not
    rollouts: int
    size: int  # frames of a whole rollout
    stats: Mapping[str, Any]  # its counts, by the names in `reap.core.stats.TOLD`


@dataclass(frozen=True)
class WorkerActivity:
    """What one worker is doing right now, as far as that is known without asking it."""

    index: int
    text: str
    pid: int | None  # of its own process, if that is on this machine
    lanes: int


class Backend(Protocol):
    """What every way of running workers can do."""

    @property
    def close_ends_take(self) -> bool:
        """Whether `close` ends the workers a take waits for; if not, the take is broken off after the step it is in."""

    @property
    def episodes(self) -> EpisodeLog:
        """The episodes of all workers, as far as it is known here which have ended."""

    @property
    def restarts(self) -> int:
        """How many workers were started again."""

    @property
    def failed(self) -> bool:
        """Whether a worker has ended, so that none of them can be used any more."""
        return False

    def reports(self, clock: WorkClock) -> Sequence[WorkerReport]:
        """Return what is known here of each worker; once it is closed, what was known then.

        `clock`: when batches were made here, by which a worker that lives here waits.
        """

    on_rollout: Callable[..., None] | None  # told worker, span, frames and version of each rollout

    def profile(self, settings: Any) -> None:
        """Let workers trace their rollouts: settings by worker (core/profiling.py), None to end it."""

    def start(self) -> None:
        """Build the workers. Errors of their construction are raised here."""

    def take(self, *, random: bool = False) -> Rollout:
        """Return the next full rollout; `random` asks for random actions."""

    def lost(self) -> None:
        """Ctrl-C, or an error, has taken the last rollout from whoever took it: no trajectory goes on after it.

        Nothing where `uninterrupted` keeps that from happening.
        """

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Inside, Ctrl-C is let in only while waiting for workers."""

    def breaker(self) -> Callable[[], None]:
        """From now on a take can be broken off from another thread, by calling this; it raises `Halted`."""

    def publish(self, weights: Any = None) -> int:
        """Give workers new weights (None: those of the policy they were built with); returns the new version."""

    def reset(self, lanes: Sequence[int] | None = None) -> None:
        """Begin new episodes."""

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        """Seed everything and begin new episodes; returns the seed that follows."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on: env states, trajectory ids, the version of the weights."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""

    def last_state(self, why: str) -> dict[str, Any]:
        """What `state_dict` gives as far as it is known here, once workers have failed: `why` their episodes are over.

        The ids it goes on with are above all that were ever given.
        """

    def activity(self) -> list[WorkerActivity]:
        """Return what each worker is doing right now. Nobody is asked; any thread may call it."""

    def stacks(self) -> dict[str, str]:
        """Return where each worker, and each process or thread of lanes, is right now, by name. Any thread may ask."""

    def close(self, *, failed: bool = False) -> None:
        """End the workers. May be called twice. `failed`: an error waits to be told, so it may go on in a thread."""


class WorkerLiveness(Protocol):
    """Whether a worker lives, and how it ended."""

    @property
    def pid(self) -> int:
        """The number of its process; 0 if it never lived."""

    @property
    def label(self) -> str:
        """The number of its process, and where that is, as errors show them after its name."""

    def gone(self) -> bool:
        """Return whether nothing will come from it any more."""

    def death(self) -> WorkerDied:
        """Return the error for one that is gone: how it ended."""

    def ask_stack(self) -> str:
        """Return where its threads are right now; empty if it does not answer at all."""

    def silence(self, seconds: float, timeout: float | None) -> WorkerSilent:
        """Return the error for one that sent nothing for so long."""


class WorkerConnection(Protocol):
    """One worker as a transport reaches it. Another takes its place when the worker is started again."""

    child: WorkerLiveness

    def call(self, data: bytes) -> None:
        """Send a numbered call: it is answered between two rollouts."""

    def fill(self, slot: int, *, random: bool) -> None:
        """Give permission to fill a slot; `random`: with random actions, where the worker does not know by itself."""

    def hear(self) -> tuple[list[Any], bool]:
        """Return what it has said since the last call, and whether it is gone, so that no more will come."""


class WeightChannel(Protocol):
    """Where new weights for all workers are written."""

    packing: Packing

    def publish(self, named: Mapping[str, Tensor], version: int) -> None:
        """Make these the current ones; what is not among them stays as it was."""


class Transport(Protocol):
    """How calls, slots and weights reach workers, and how their end is noticed. It knows nothing of batches."""

    weight_schemes: ClassVar[tuple[WeightTransport, ...]]  # ways that weights can take
    can_add_workers: ClassVar[bool]  # whether further workers can be launched later
    startup_grace: float = BOOT  # seconds more than usual until one that is launched again says its first word

    def position(self, worker: WorkerHandle) -> dict[str, int]:
        """In which step and lane a worker is, as far as that can be known from outside."""

    def open(self, workers: list[WorkerHandle], interrupts: Interrupts, silence: Silence) -> None:
        """Make what is needed before the first worker is launched."""

    def launch(self, workers: Sequence[WorkerHandle]) -> None:
        """Start these, all at once, from their jobs; each has a connection from its first moment on."""

    def retire(self, worker: WorkerHandle) -> None:
        """End what is left of a worker that has failed. It may be launched again, where that is possible."""

    def release_claims(self, worker: WorkerHandle) -> None:
        """What a worker had begun on when it ended is for others to make; its `frames` are all it has made."""

    def cannot_restart(self) -> str | None:
        """Return why a worker that failed cannot be launched again; None: it can."""
        return None

    def wait(self, seconds: float | None) -> list[int]:
        """Wait for so long (None: as long as it takes) until a worker has spoken or is gone: the numbers of those."""

    def common_slots(self, workers: Sequence[WorkerHandle], whole: Layout, count: int) -> Callable[[int], Slot]:
        """So many slots of which each worker fills its lanes; returns what makes the one of an index (-1: the last)."""

    def own_slots(self, workers: Sequence[WorkerHandle], count: int, *, here: bool = True) -> None:
        """So many slots for each of these workers, which are its `slots`; not `here`: nobody but itself reads them."""

    def begin_arguments(self, worker: WorkerHandle, packing: Packing | None) -> tuple[Any, ...]:
        """Return what a worker is told when memory and weights are ready: where they are."""

    def weight_channel(self, packing: Packing, needed: Sequence[str]) -> WeightChannel:
        """Return where weights for all are published, once all workers have begun."""

    def pass_weights(self, worker: WorkerHandle, data: bytes) -> Any:
        """Bring the weights of one worker to it; returns what it is told of them."""

    def resend_weights(self, worker: WorkerHandle) -> None:
        """Send the latest weights for all to one that was launched later, where it does not find them by itself."""

    def set_random_frames(self, frames: int) -> None:
        """So many frames of the run have random actions."""

    def cut_short(self, stop: bool) -> None:
        """Let rollouts end where they are; False: from now on they go to their end."""

    def close(self, workers: Sequence[WorkerHandle]) -> None:
        """End these workers, which are all, within a few deadlines, and free what was opened. May be called twice."""


class Delivery(Protocol):
    """Which rollouts make a batch, and when a slot is given out again."""

    in_step: bool  # whether all frames of a batch have one version
    unfinished: bool  # whether a batch is half made: Ctrl-C interrupted who waited for it

    def prepare(self, supervisor: Supervisor) -> None:
        """Make room for rollouts, as workers have said what these look like; again when there are more workers."""

    def preempts(self, workers: int) -> bool:
        """Return whether rollouts may be cut short."""

    def take(self, *, random: bool, most: float) -> Rollout:
        """The next rollout; `most`: how many frames may still be asked for, where they are written as they are made."""

    def forget_unfinished(self) -> None:
        """Have what was begun and not delivered made to the end, and forget it."""

    def begin_anew(self, workers: Sequence[int], call: int) -> None:
        """These have begun new episodes with this call: what they had made before it is not delivered any more."""

    def settle(self) -> tuple[int, int]:
        """Frames and rollouts nobody has taken; they are forgotten. Workers have nothing to do."""
