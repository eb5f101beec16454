"""EnvHooks: what only some envs have to say, beside the verbs of `Env`. Each has an answer that suits all others.

An adapter overrides the hooks it needs. An env around another (`Wrapped`) passes all of them on; a test goes through
this class one by one, so whoever adds a hook must decide about it there.

    policy chosen     bind_policy → make_policy │ (as_policy) → wrap_policy
    a rollout begins  looks_at → set_policy_keys
    each step         [draw] → step → [after_step]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from reap.core.measuring.moments import RunningStatistics
from reap.core.resume import CannotResume
from reap.core.slot import Row
from reap.spec import EnvSpec, Key


class EnvHooks:
    """The hooks of an env, and its traits, as most envs have them."""

    spec: EnvSpec
    has_after_step = False  # whether `after_step` has anything to do
    writes_after = False  # whether `after_step` writes all of `row.after`: the loop then copies no successors there
    draws = False  # whether random actions come from `draw`, step by step
    elsewhere = False  # whether lanes live in other processes or threads, and are closed there, whoever waits for them
    tells_cuts = False  # whether lanes may begin anew because what stepped them failed: `step` returns them, not done
    captures = True  # whether it may record what it asks of torch, and replay that

    @property
    def as_given(self) -> Any:
        """The env as its owner knows it, to which `collector.env` and paths that begin with "env" lead."""
        return self

    def report_lane(self, memory: Any) -> None:
        """Keep `memory[0]` at the lane that is being stepped, -1 in between, as far as that is known here."""

    def after_step(self, row: Row) -> None:
        """Called after successors were copied to `row.after`: a last word on what the next step will see."""

    def draw(self, row: Row) -> None:
        """Write a random action for every lane into `row`; called where `draws` says that none can be drawn ahead."""
        raise NotImplementedError

    def bind_policy(self, model: Any) -> None:
        """Learn which policy is going to act, as the user made it: it may be waiting for something of the env's."""

    def make_policy(self, model: Any, kind: Any, device: Any) -> Any:
        """Return the policy as only this env can run it, whose steps have no columns; None: `as_policy` decides."""
        return None

    def wrap_policy(self, policy: Any) -> Any:
        """Return a policy of TensorDicts that acts on the env's own TensorDict, where the env has one; or `policy`."""
        return policy

    def set_policy_keys(self, outputs: Sequence[Key]) -> None:
        """Learn the keys of `row.outputs`, before each rollout: some envs read more of them than the action."""

    def looks_at(self, outputs: Collection[Key]) -> Collection[Key]:
        """Return which of a policy's outputs the steps look at; the others need not be there before a rollout ends."""
        return self.spec.action

    def filled(self) -> int:
        """Return how many positions of the next row hold a lane that is ready."""
        return self.spec.lanes

    def running_statistics(self) -> Sequence[RunningStatistics]:
        """Return what is learned of the lanes' values while they are stepped, and shared with other workers."""
        return ()

    def rebuild_lanes(self, replace: Callable[..., Any]) -> bool:
        """From now on, make the env of a lane anew where it raises; returns False where that cannot be done.

        `replace(lane, error, make)` decides about it, and returns what `make()` has made. The step is no frame of that
        lane, which `step` returns among those that ended, not done.
        """
        return False

    def not_rebuilt(self) -> str:
        """Say why it cannot make the env of one lane anew."""
        return (
            f"{type(self).__name__} cannot make the env of one lane anew: give a factory of Gymnasium envs with "
            f"observations of fixed shapes, and no failure_dir"
        )

    def restarts(self) -> int:
        """Return how many of those that step lanes were started again, or made anew, after a failure."""
        return 0

    def dropped(self) -> Collection[int]:
        """Return the lanes that nobody steps any more, since what stepped them has failed."""
        return ()

    def explain(self) -> str:
        """Say who steps the lanes, in a sentence."""
        return "reap steps it"

    def stacks(self) -> dict[str, str]:
        """Where each process or thread that steps lanes is right now, by name; none, if this one does."""
        return {}

    def open_state(self) -> Any:
        """What the lanes are in the middle of, for the same env in another process to go on from; see core/resume.py.

        Whoever cannot say raises `CannotResume`.
        """
        raise CannotResume(f"{type(self).__name__} cannot save the middle of an episode")

    def load_open_state(self, state: Any) -> None:
        """Go on from what `open_state` said; nothing is reset."""
        raise NotImplementedError

    def lane_state(self, lane: int) -> Any:
        """What one lane is in the middle of, where that can be said of it alone; else `CannotResume`."""
        raise CannotResume(f"{type(self).__name__} cannot save the middle of one lane's episode")

    def load_lane_state(self, lane: int, state: Any) -> None:
        """Let one lane go on from what `lane_state` said."""
        raise NotImplementedError
