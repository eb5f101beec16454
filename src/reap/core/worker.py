"""Worker: one running fill loop.   take a free slot → fill it → hand it over.

Wherever a worker lives (this process, another one, another machine), the same code builds it from a `Plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType

from reap.core.columns.batch_columns import columns_of, current_for
from reap.core.device.cudagraph_policy import pin, pinned, recorded
from reap.core.env import Env
from reap.core.lanes.ready import ENV_INDEX, NEXT_LANE_AT, Sorter, delivered
from reap.core.lanes.stream import Stream
from reap.core.ledger import Ledger, TrajectoryIds
from reap.core.measuring.episode_log import EPISODE_COLUMNS
from reap.core.measuring.stats import Stats
from reap.core.policies.action_masks import action_masks
from reap.core.policies.as_policy import PolicyContext, as_policy
from reap.core.policies.buckets import Bucketed
from reap.core.policies.captured_policy import captured
from reap.core.policies.lane_by_lane import LaneByLane, LaneGenerators, spec_of_one
from reap.core.policies.per_lane_policy import PerLanePolicy
from reap.core.policies.recurrent_state import carry_of, with_recurrent_state
from reap.core.policy import Policy, RandomActions, TensorDictPolicy, TensorPolicy, visible_columns
from reap.core.quota import EpisodeQuota
from reap.core.rollout import RolloutLoop
from reap.core.slot import CUT, FIRST, FRAME, MASK, Layout, Pool, Slot
from reap.core.worker_base import AnyWorker
from reap.errors import UsageError
from reap.failures import Rebuilds
from reap.seeding import chain
from reap.spec import EnvSpec, Key, Leaf, show_keys


@dataclass(frozen=True)
class Plan:
    """The frozen description a worker is built from."""

    make_env: Callable[[], Env]
    make_policy: Callable[[], Any]
    steps: Callable[[int], int]  # lanes → steps per rollout
    exploration: InteractionType = InteractionType.RANDOM
    policy_device: torch.device | None = None  # the device that policy inputs must be moved to
    shown_device: torch.device | None = None  # the device of the TensorDicts that TensorDict policies receive
    trust_policy: bool = False
    out_keys: Sequence[Key] | None = None  # names for the parts of a tuple that the policy returns
    capture: bool = True  # record the torch calls of policy and env, and replay them if the results are the same
    compile_policy: dict[str, Any] | None = None
    reset_when_done: bool = True
    reset_at_each_iter: bool = False
    track_traj_ids: bool = True
    track_policy_version: bool = False
    track_episodes: bool = False  # add columns with return and length of each frame's episode so far
    gamma: float | None = None  # also report episode returns discounted by this factor
    cut_column: bool = False  # add a column that marks where failures ended trajectories
    deterministic: bool = False  # act lane by lane, each with its own random numbers (core/policies/lane_by_lane.py)
    masked: bool = False  # add a column that says which rows are frames, even if all are
    stop: Callable[[], bool] | None = None
    episodes: int | None = None  # end a rollout when all lanes together have played this many since the last reset
    compact: bool = False
    contiguous: bool | None = None  # deliver batches with lanes first in memory too; None: the env's default
    storing_device: torch.device | None = None
    cuda_graphs: bool = False  # run whole rollouts, or the policy's steps, as CUDA graphs
    stream: bool = False  # for ready lanes: batches of frames as they came, not as many frames of every lane

    def context(
        self, spec: EnvSpec, columns: Mapping[Key, Any], carry: Mapping[Key, Any], **more: Any
    ) -> PolicyContext:
        """Return the context in which `as_policy` builds the policy, with the options of this plan."""
        more |= {"trust": self.trust_policy, "out_keys": self.out_keys, "compile": self.compile_policy}
        return PolicyContext(spec, columns, self.exploration, carry=list(carry), **more)


class Worker(AnyWorker):
    """An env, a policy and the loop that joins them.

    Args:
        plan: what it is built from.
        built: env and policy, if they are built already.
        same_slot: whether all rollouts go into one slot.
        ids: numbers its trajectories.
        rebuilds: the budget for envs that are rebuilt after they raised.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        built: tuple[Env, Any] | None = None,
        same_slot: bool = False,
        ids: TrajectoryIds | None = None,
        rebuilds: Any = None,
    ) -> None:
        self.plan = plan
        self.should_stop = plan.stop  # called after every step
        self._filling: Slot | None = None
        self._ids = ids or TrajectoryIds()
        env = plan.make_env() if built is None else built[0]
        try:
            self._build(plan, env, plan.make_policy() if built is None else built[1], same_slot, rebuilds)
        except BaseException:
            env.close()  # the worker was not built, so no one else can close it
            raise

    def _build(self, plan: Plan, env: Env, model: Any, same_slot: bool, budget: Any) -> None:
        self.model = model
        env.captures = plan.capture
        env.bind_policy(self.model)
        self.rebuilds = Rebuilds(budget, env, plan)
        self.carry = {key: first for key, first in carry_of(self.model).items() if key not in env.spec.primed}
        self.env = with_recurrent_state(env, self.model, self.carry)
        spec = self.env.spec
        if not plan.reset_when_done and not spec.single_steps:
            raise UsageError("reset_when_done=False lets single lanes rest, but this env steps all its lanes at once")
        self.lanes = spec.all_lanes
        self._quota = None if plan.episodes is None else EpisodeQuota(plan.episodes, self.lanes)
        if self._quota is not None:
            self.should_stop = self._episodes_played
        self.stats: Stats = Stats(self.lanes, plan.gamma)
        current = current_for(spec.observation, spec.lanes)
        self._first(self.env, current)
        self._draw = self.env.draw if self.env.draws else None
        self._lane_generators = LaneGenerators(spec.lanes) if plan.deterministic else None
        self.policy = self._make_policy(spec, current)
        self.env.expect({key: self.policy.outputs[key] for key in spec.action})
        outputs = self.policy.outputs
        self.random: Policy = RandomActions(spec.action, outputs, self.carry, self._draw, action_masks(spec))
        if self._lane_generators is not None and self._draw is None:
            self.random = LaneByLane([copy(self.random) for _ in range(spec.lanes)], self._lane_generators, spec)
        skips = spec.rows == "skipping" or self.env.reports_cuts
        self.ledger = Ledger(spec, self._ids, self.stats, reset_when_done=plan.reset_when_done, skips=skips)
        self.loop = RolloutLoop(
            self.env,
            self.policy,
            current=current,
            ledger=self.ledger if spec.ready_of is None else None,
            exploration=plan.exploration,
            reset_when_done=plan.reset_when_done,
            stop=self.should_stop,
        )
        self.rebuilds.driver = self.loop.driver_token
        self.layout = self._layout()
        if same_slot and self.layout.loose:
            raise UsageError(
                f"return_same_td overwrites the memory of one batch, but the values of "
                f"{show_keys(list(self.layout.loose)[:1])} are separate objects: leave return_same_td out"
            )
        make = pinned(self.env.make_slot, plan.policy_device)
        # Worker processes make no slot in it: theirs lie in memory that they share with the parent.
        self.pool = Pool(self.layout, limit=0 if same_slot else 2, make=make)

    def _layout(self) -> Layout:
        """Return the layout of a batch's slot; for asynchronous lanes, also create sorter and log."""
        spec, plan = self.env.spec, self.plan
        may_skip = self.env.reports_cuts or (plan.cut_column and not plan.compact)  # the same for all workers
        cuts = plan.cut_column or self.env.reports_cuts
        more = {(*FIRST, *key): leaf for key, leaf in spec.observation.items() if leaf.once}
        more |= (EPISODE_COLUMNS if plan.track_episodes else {}) | ({CUT: Leaf((), torch.bool)} if cuts else {})
        columns = columns_of(
            spec,
            self.policy,
            ids=plan.track_traj_ids,
            mask=plan.masked or not plan.reset_when_done or self.should_stop is not None or may_skip,
            version=plan.track_policy_version,
            compact=plan.compact,
            more=more,
        )
        if plan.compact:
            self._check_compact(columns)
        stream = plan.stream or (self._quota is not None and spec.ready_of is not None)
        steps = plan.steps(self.lanes) * (self.lanes if stream and not plan.stream else 1)
        self.sorter: Sorter | None = None
        if spec.ready_of is not None:
            self._check_ready(columns)
            self.sorter = (Stream if stream else Sorter)(columns, self.lanes)
            frames = steps if stream else steps * self.lanes
            self._log = Slot(Layout(columns, -(-frames // spec.lanes), spec.lanes, batched=True))
            pin(self._log.block, plan.policy_device)
            columns = {key: columns[key] for key in delivered(columns)}
            if self.env.reports_cuts and not stream:
                columns[MASK] = Leaf((), torch.bool)  # for lanes that were dropped
        if stream:
            columns[ENV_INDEX] = Leaf((), torch.int64)
            if self._quota is not None:
                columns[MASK] = Leaf((), torch.bool)
        lanes, batched = (1, False) if stream else (self.lanes, spec.batched)
        contiguous = spec.look.contiguous if plan.contiguous is None else plan.contiguous
        look = replace(spec.look, inner={**self.policy.inner, **spec.look.inner}, contiguous=contiguous)
        return Layout(columns, steps, lanes, batched=batched, look=look)

    def _check_ready(self, columns: Mapping[Key, Leaf]) -> None:
        if self.plan.stop is not None:
            raise UsageError("interruptor does not work with asynchronous lanes: it stops all lanes at one step")
        written = [key for key in self.policy.outputs if key[0] == "next" and key[1:] not in self.carry]
        if written:
            raise UsageError(
                f"with asynchronous lanes the policy may write ('next', …) only for a declared carry, not "
                f"{show_keys(written)}"
            )

    def _check_compact(self, columns: Mapping[Key, Leaf]) -> None:
        if MASK in columns or self.env.has_after_step:
            raise UsageError(
                "compact_obs needs whole rows; this env, reset_when_done=False or an interruptor skips some"
            )
        if FRAME in columns:
            raise UsageError(
                "compact_obs stores tensors of one shape; this env's steps are stored as whole TensorDicts"
            )
        odd = [key for key, leaf in columns.items() if leaf.ragged or leaf.once]
        if odd:
            what = "ragged" if columns[odd[0]].ragged else "stacked"
            raise UsageError(f"compact_obs stores tensors of one shape; {show_keys(odd[:1])} is {what}: leave it out")
        both = [key for key in self.env.spec.observation if key in self.policy.outputs]
        if both:
            raise UsageError(
                f"compact_obs needs observations as the env made them; the policy overwrites {show_keys(both)}"
            )

    def set_seed(self, seed: int, *, static: bool = False) -> int:
        if self._lane_generators is not None:
            self._lane_generators.seed(chain(seed, self.lanes, static=static)[0])
        return super().set_seed(seed, static=static)

    def _make_policy(self, spec: EnvSpec, current: Sequence[Any]) -> Policy:
        """Return the policy for all lanes; with `deterministic`, a policy that acts on each lane by itself."""
        if self._lane_generators is None:
            return self._make_one_policy(spec, current)
        one = spec_of_one(spec, record=self.plan.cuda_graphs)
        policies = [self._make_one_policy(one, [array[:1] for array in current]) for _ in range(spec.lanes)]
        return LaneByLane(policies, self._lane_generators, spec)

    def _make_one_policy(self, spec: EnvSpec, current: Sequence[Any]) -> Policy:
        plan = self.plan
        own: Policy | None = self.env.make_policy(self.model, plan.exploration, plan.policy_device or plan.shown_device)
        columns = visible_columns(spec, current)
        places = {"device": plan.policy_device, "shown": plan.shown_device}
        context = plan.context(spec, columns, self.carry, draw=self._draw, **places)
        if own is not None and plan.out_keys is not None:
            raise UsageError("out_keys names the parts of a tuple of tensors; the steps of this env have other values")
        policy = own or as_policy(self.model, context)
        if plan.cuda_graphs:
            policy = recorded(policy, self.model, plan.policy_device)
        elif own is None and plan.capture and spec.ready_of is None and plan.compile_policy is None:
            policy = captured(policy, self.model, columns, plan.exploration)
        if isinstance(policy, TensorDictPolicy):
            return self.env.wrap_policy(policy) if spec.ready_of is None else PerLanePolicy(policy, spec.ready_of)
        if spec.ready_of is not None and plan.compile_policy is None and isinstance(policy, TensorPolicy):
            policy = Bucketed(policy, spec.lanes, self.env.filled)
        return policy

    def fill(self, slot: Slot, *, random: bool = False) -> int:
        """Collect one rollout into `slot`, and return the number of frames it made."""
        self._before_rollout()
        times = self.loop.times = self.stats.begin(self.loop.version)
        before = self.stats.frames
        policy = self.random if random else None
        self._filling = slot if self.sorter is None else self._log
        if self.sorter is None:
            self.loop.fill(slot, policy)
        else:
            self._fill_sorted(slot, self.sorter, policy)
        self.env.driver = self.loop.driver_token  # TorchRL's env may have taken the loop's steps for the user's
        self.stats.end(times)
        return self.stats.frames - before

    def _fill_sorted(self, slot: Slot, sorter: Sorter, policy: Policy | None) -> None:
        """Run the same loop on a log that holds lanes in the order they became ready, until `slot` can be filled.

        The sorter writes the frames to `slot`: lane by lane, or in the order in which they came.
        """
        if self.policy.remembers:
            raise UsageError(
                "this policy reads what it wrote at the previous step, which with asynchronous lanes belongs "
                "to another lane; declare it as carry, or use a stateless policy"
            )
        try:
            slot.clear_flags()
            while missing := sorter.missing_frames(slot.layout.steps):
                self._stop_after(missing)
                steps = self.loop.fill(self._log, policy)
                sorter.feed(self._log, self.loop.stamp, steps, slot)
                sorter.dropped = self.env.dropped()
                if self._quota is not None and self._quota.met:
                    break
            sorter.deliver(slot, self.ledger)
        except BaseException:  # also Ctrl-C: nobody knows where the lanes are, so the next rollout resets all
            self.loop.due = list(self.loop.lanes)
            sorter.clear()
            self.ledger.reset(range(self.lanes))
            raise

    def _stop_after(self, missing: int) -> None:
        """Make the loop stop once it has made `missing` frames, and leave later ones to the next rollout."""
        mask, at = self._log.arrays[MASK], self.loop.at
        made = 0

        def enough() -> bool:
            nonlocal made
            made += int(np.count_nonzero(mask[at[0]]))
            halt = self.should_stop is not None and self.should_stop()  # called at every step: it may count them
            return halt or made >= missing

        self.loop.stop = enough

    def _episodes_played(self) -> bool:
        """Count the episodes that the last step ended, and return whether the rollout should stop."""
        assert self._filling is not None
        assert self._quota is not None
        arrays, at = self._filling.arrays, int(self.loop.at[0])
        ended = np.flatnonzero(arrays[("next", "done")][at, :, 0])
        if len(ended):
            self._quota.count(ended if self.sorter is None else arrays[NEXT_LANE_AT][at, ended])
        return self._quota.met or (self.plan.stop is not None and self.plan.stop())

    def _cannot_resume(self) -> str | None:
        if self.sorter is not None:
            return "its lanes are asynchronous, and frames in flight cannot be saved"
        return None if self._quota is None else "it plays a fixed number of whole episodes, each from its beginning"

    def reset(self, lanes: Sequence[int] | None = None) -> None:
        """Start new episodes in `lanes`, or in all, and restart the count of episodes."""
        super().reset(lanes)
        if self._quota is not None:
            self._quota.begin()

    def _reset(self, lanes: Sequence[int], seeds: Sequence[int] | None = None, *, fresh_ids: bool = True) -> None:
        if self.sorter is None:
            return self.loop.reset(lanes, seeds, fresh_ids=fresh_ids)
        self.loop.reset(self.loop.lanes, seeds)
        self.sorter.clear()
        self.ledger.reset(range(self.lanes), fresh_ids=fresh_ids)
        return None
