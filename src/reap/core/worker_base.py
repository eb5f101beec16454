"""The base class of workers, whose rows may be in host memory or on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reap.core.env import CLOSED, Env
from reap.core.measuring.moments import RunningStatistics
from reap.core.policy import Policy
from reap.core.resume import FORMAT, CannotResume, check, generators, packed, set_generators, unpacked
from reap.core.rollout import RolloutLoop
from reap.errors import UsageError, reraise
from reap.seeding import chain, seed_process
from reap.spec import Leaf, as_tensor


class AnyWorker:
    """The base of all workers: how they reset, seed, save, resume and close."""

    plan: Any
    env: Env
    loop: RolloutLoop
    lanes: int
    stats: Any
    ledger: Any
    model: Any  # the policy as the user made it
    policy: Policy
    tells_episodes = True  # whether it can report its episodes one by one
    # Whether the last rollout was never delivered. `loop.due` and `env.driver` say too that lanes have to be reset, but
    # `open_state` begins new episodes for this reason only.
    _rollout_lost = False

    @property
    def version(self) -> int:
        """The version of the policy's current weights."""
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
        """Return its statistics so far."""
        found: dict[str, Any] = self.stats.summary()
        return found

    def take_episodes(self) -> Any:
        """Return the episodes that ended since the last call."""
        return self.stats.take_episodes()

    def running_statistics(self) -> Sequence[RunningStatistics]:
        """Return the statistics that its env updates while it is stepped."""
        return self.env.running_statistics()

    def explain(self) -> str:
        """Return how env and policy are run, in one line each."""
        name = "" if self.model is None else f" {type(self.model).__name__}"
        return f"env: {self.env.explain()}\npolicy{name}: {self.policy.explain()}"

    def _first(self, env: Env, current: Sequence[Any]) -> None:
        """Reset all lanes for the first time, with the seeds that the user may have set by hand."""
        seeds, env.pending_seeds = env.pending_seeds, None
        try:
            env.reset(range(env.spec.lanes), current, seeds)
        except Exception as cause:
            reraise("env.reset", cause)

    def _before_rollout(self) -> None:
        """Reset all lanes if the plan asks for it before each rollout, or if they are not where the last batch ended.

        They are elsewhere after a lost rollout, or when the user moved the env by hand.
        """
        if self.plan.reset_at_each_iter or self._rollout_lost or self.env.driver is not self.loop.driver_token:
            self._begin(range(self.lanes))

    def reset_all_next(self) -> None:
        """Note that the last rollout was lost (Ctrl-C): the next one starts new trajectories in all lanes."""
        self._rollout_lost = True

    def reset(self, lanes: Sequence[int] | None = None) -> None:
        """Start new episodes in `lanes`, or in all."""
        if lanes is not None and len(lanes) < self.lanes and not self.env.spec.single_resets:
            raise UsageError(f"reset({list(lanes)}): this env cannot reset single lanes")
        self._begin(range(self.lanes) if lanes is None else lanes)

    def _begin(self, lanes: Sequence[int], seeds: Sequence[int] | None = None, *, fresh_ids: bool = True) -> None:
        self._reset(lanes, seeds, fresh_ids=fresh_ids)
        if len({*lanes}) == self.lanes:  # all lanes stand at a first observation, whatever moved them before
            self.env.driver = self.loop.driver_token
            self._rollout_lost = False

    def _reset(self, lanes: Sequence[int], seeds: Sequence[int] | None = None, *, fresh_ids: bool = True) -> None:
        raise NotImplementedError

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        """Seed the process and the lanes and reset them; return the seed that follows the last lane's in the chain."""
        seeds, following = chain(seed, self.lanes, static=static)
        seed_process(seed)
        # Before the first rollout the ids are kept, so that a seeded run begins at trajectory 0 like any other.
        self._begin(range(self.lanes), seeds, fresh_ids=self.stats.frames > 0)
        return following

    def open_state(self, why: str | None = None) -> dict[str, Any]:
        """Return the state from which another worker can resume (see core/resume.py).

        `why`: a reason not to save the open episodes; a worker that resumes then starts new ones.
        """
        if self._rollout_lost and why is None:
            self._begin(range(self.lanes))  # a trajectory must not continue after frames that were lost
        why, env, current, policy = why or self._cannot_resume(), None, [], []
        try:
            if why is None:
                env, policy = self.env.open_state(), self.policy.open_state()
                current = [self._save_leaf(leaf, array) for leaf, array in self._next_observation()]
        except CannotResume as reason:
            why = str(reason)
        state = {"format": FORMAT, "lanes": self.lanes, "why": why, "env": env, "current": current, "policy": policy}
        ledger = {"ids": torch.as_tensor(self.ledger.ids).cpu().clone(), "next_id": self.ledger.counter.next}
        counts = {"due": list(self.loop.due), "statistics": self.stats.state()}
        return {**state, **ledger, **counts, "random": generators()}  # last, after anything that could draw from them

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from the `open_state` of another worker."""
        check(state, self.lanes, [leaf for leaf, _ in self._next_observation()])
        resumes = state["why"] is None
        if resumes:
            self.env.load_open_state(state["env"])
            self.policy.load_open_state(state["policy"])
            for (leaf, array), kept in zip(self._next_observation(), state["current"]):
                self._restore_leaf(leaf, array, kept)
        self.ledger.counter.resume_at(int(state["next_id"]))
        if resumes:
            torch.as_tensor(self.ledger.ids).copy_(state["ids"])
            self.loop.due = list(state["due"])
        else:
            self._reset(range(self.lanes))
        self.stats.load(state["statistics"], opened=resumes)
        self.env.driver, self._rollout_lost = self.loop.driver_token, False
        if state["random"] is not None:
            set_generators(state["random"])  # last: nothing may draw from them before the next step

    def _cannot_resume(self) -> str | None:
        """Return why this worker's episodes cannot be resumed, whatever its env supports; None if they can."""
        return None

    def _next_observation(self) -> list[tuple[Leaf, Any]]:
        """Return the leaves and values of the next observation of all lanes."""
        return list(zip(self.env.spec.observation.values(), self.loop.current))

    def _save_leaf(self, leaf: Leaf, array: Any) -> Any:
        return packed(array) if leaf.loose else as_tensor(array, leaf.dtype).cpu().clone()

    def _restore_leaf(self, leaf: Leaf, array: Any, kept: Any) -> None:
        if leaf.loose:
            array[...] = unpacked(kept)
        else:
            as_tensor(array, leaf.dtype).copy_(kept)

    def close(self) -> None:
        """Close the env."""
        self.env.driver = CLOSED
        self.env.close()
