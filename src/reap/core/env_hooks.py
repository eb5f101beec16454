"""EnvHooks: methods that only some envs need, beside those of `Env`. Each has a default that suits all other envs.

An adapter overrides the hooks it needs. An env around another (`Wrapped`) forwards all of them. A test checks each hook
of this class, so a new hook needs a decision in `Wrapped`.

    policy chosen     bind_policy → make_policy │ (as_policy) → wrap_policy
    a rollout begins  outputs_read → set_policy_keys
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
    """The optional methods and traits of an env, with the defaults that most envs keep."""

    spec: EnvSpec
    has_after_step = False  # whether `after_step` has anything to do
    writes_after = False  # whether `after_step` writes all of `row.after`: the loop then copies no successors there
    draws = False  # whether random actions come from `draw`, step by step
    runs_elsewhere = False  # whether lanes live in other processes or threads, where `close` can end them during a step
    # Whether lanes may restart after a failure: `step` then returns them among the ended, not done.
    reports_cuts = False
    captures = True  # whether the env may record its torch calls and replay them

    @property
    def as_given(self) -> Any:
        """The env object the user knows: `collector.env`, and the root of attribute paths that begin with "env"."""
        return self

    def report_lane(self, memory: Any) -> None:
        """Keep the number of the lane being stepped in `memory[0]`, -1 between steps, if this env knows it."""

    def after_step(self, row: Row) -> None:
        """Change what the next step will see; the loop calls this after it copied successors to `row.after`."""

    def draw(self, row: Row) -> None:
        """Write a random action for every lane into `row`. Called at each step if `draws` is set."""
        raise NotImplementedError

    def bind_policy(self, model: Any) -> None:
        """Receive the user's policy object before the worker's policy is built.

        A TorchRL env gives its action spec to a policy made without one.
        """

    def make_policy(self, model: Any, exploration: Any, device: Any) -> Any:
        """Return the policy that runs `model`, if this env's steps have no columns; None: `as_policy` decides."""
        return None

    def wrap_policy(self, policy: Any) -> Any:
        """Return a TensorDict policy that acts on the env's own TensorDict, if the env has one; else `policy`."""
        return policy

    def set_policy_keys(self, outputs: Sequence[Key]) -> None:
        """Learn the keys of `row.outputs` before each rollout, for envs that read more of them than the action."""

    def outputs_read(self, outputs: Collection[Key]) -> Collection[Key]:
        """Return which of a policy's outputs `step` reads; the others may be written at the end of the rollout."""
        return self.spec.action

    def filled(self) -> int:
        """Return the number of positions in the next row that hold a ready lane."""
        return self.spec.lanes

    def running_statistics(self) -> Sequence[RunningStatistics]:
        """Return the statistics (such as normalization moments) that the env updates and shares with other workers."""
        return ()

    def rebuild_lanes(self, replace: Callable[..., Any]) -> bool:
        """Let the env rebuild a single lane when it raises; return False if this env cannot.

        `replace(lane, error, make)` decides whether to, and returns the env that `make()` built. The failed step is not
        a frame of that lane: `step` returns the lane among those that ended, but not done.
        """
        return False

    def why_not_rebuilt(self) -> str:
        """Return the reason why this env cannot rebuild a single lane."""
        return (
            f"{type(self).__name__} cannot rebuild a single lane; use a factory of Gymnasium envs with "
            f"fixed-shape observations and no failure_dir"
        )

    def restarts(self) -> int:
        """Return how many workers that step lanes were restarted, or lanes rebuilt, after a failure."""
        return 0

    def dropped(self) -> Collection[int]:
        """Return the lanes that are no longer stepped, because the worker that stepped them failed."""
        return ()

    def explain(self) -> str:
        """Return a sentence that says how the lanes are stepped."""
        return "reap steps it"

    def stacks(self) -> dict[str, str]:
        """Return the current stack of each process or thread that steps lanes, by name; empty if this thread does."""
        return {}

    def open_state(self) -> Any:
        """Return the state of the open episodes, from which the same env in another process can continue.

        An env that cannot save it raises `CannotResume` (see core/resume.py).
        """
        raise CannotResume(f"{type(self).__name__} cannot save an open episode")

    def load_open_state(self, state: Any) -> None:
        """Continue the episodes that `open_state` saved; nothing is reset."""
        raise NotImplementedError

    def lane_state(self, lane: int) -> Any:
        """Return the state of one lane's open episode; raise `CannotResume` if it cannot be saved for a single lane."""
        raise CannotResume(f"{type(self).__name__} cannot save one lane's open episode")

    def load_lane_state(self, lane: int, state: Any) -> None:
        """Continue one lane's episode from what `lane_state` returned."""
        raise NotImplementedError
