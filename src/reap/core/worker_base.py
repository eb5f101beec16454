"""What workers have in common, wherever their rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reap.core.env import CLOSED, Env
from reap.core.policy import Policy
from reap.core.rollout import RolloutLoop
from reap.errors import ReapError, UsageError, WorkerRaised
from reap.seeding import chain, seed_process


class AnyWorker:
    """How a worker begins, is seeded and ends."""

    plan: Any
    env: Env
    loop: RolloutLoop
    lanes: int
    stats: Any
    model: Any  # the policy as the user made it
    policy: Policy

    @property
    def version(self) -> int:
        """Of the weights that act."""
        return self.loop.version

    @version.setter
    def version(self, version: int) -> None:
        self.loop.version = version

    @property
    def span(self) -> tuple[float, float]:
        """When the last rollout began and ended."""
        found: tuple[float, float] = self.stats.span
        return found

    def summary(self) -> dict[str, Any]:
        """Its statistics so far."""
        found: dict[str, Any] = self.stats.summary()
        return found

    def ended_since(self) -> Any:
        """Episodes that ended since this was asked last."""
        return self.stats.ended_since()

    def explain(self) -> str:
        """How env and policy are run, a line each."""
        name = "" if self.model is None else f" {type(self.model).__name__}"
        return f"env: {self.env.explain()}\npolicy{name}: {self.policy.explain()}"

    def _first(self, env: Env, current: Sequence[Any]) -> None:
        """Begin everywhere; the env may have been seeded by hand."""
        seeds, env.pending_seeds = env.pending_seeds, None
        try:
            env.reset(range(env.spec.lanes), current, seeds)
        except ReapError:
            raise
        except Exception as cause:
            raise WorkerRaised(f"env.reset raised {cause!r}") from cause

    def _before_rollout(self) -> None:
        """Begin anew where that is asked for each time, or where somebody else has moved the lanes since."""
        if self.plan.reset_at_each_iter or self.env.driver is not self.loop.me:
            self._reset(range(self.lanes))
            self.env.driver = self.loop.me

    def reset(self, lanes: Sequence[int] | None = None) -> None:
        """New episodes in `lanes`, or in all."""
        if lanes is not None and len(lanes) < self.lanes and not self.env.spec.single_resets:
            raise UsageError(f"reset({list(lanes)}): this env cannot reset single lanes")
        self._reset(range(self.lanes) if lanes is None else lanes)

    def _reset(self, lanes: Sequence[int], seeds: Sequence[int] | None = None, *, fresh_ids: bool = True) -> None:
        raise NotImplementedError

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        """Seed process and lanes and begin again; returns the link after the last lane's."""
        seeds, following = chain(seed, self.lanes, static=static)
        seed_process(seed)
        # Ids nobody has seen yet stay: a seeded run begins at trajectory 0 like any other.
        self._reset(range(self.lanes), seeds, fresh_ids=self.stats.frames > 0)
        return following

    def close(self) -> None:
        """Close the env."""
        self.env.driver = CLOSED
        self.env.close()
