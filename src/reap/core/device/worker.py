"""DeviceWorker: a worker whose lanes, policy and slot are on one device. The loop is the same.

fill ─► RolloutLoop.fill (rows are tensors, lanes that ended are reset by the env's own `after_step`) ─► ids, sums
        └──── with `plan.cuda_graphs`: all of it in one replay of a CUDA graph, see cudagraph_rollout.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reap.core.columns.batch_columns import columns_of
from reap.core.device.cudagraph_rollout import CudaGraphRollout
from reap.core.device.device_env import DeviceEnv
from reap.core.device.recurrent_lanes import DeviceRecurrentState
from reap.core.device.slots import DeviceLayout, DeviceLedger, DeviceSlot, DeviceStats
from reap.core.env import Env
from reap.core.measuring.episode_log import EPISODE_COLUMNS
from reap.core.measuring.stats import Stats
from reap.core.policies.action_masks import action_masks
from reap.core.policies.as_policy import as_policy
from reap.core.policies.call_policy import CallPolicy
from reap.core.policies.captured_policy import leaves_inputs_alone
from reap.core.policies.exploration import exploring
from reap.core.policies.recurrent_state import carry_of, needs_recurrent_state
from reap.core.policies.untouched import untouched
from reap.core.policy import Policy, RandomActions, TensorDictPolicy, TensorPolicy
from reap.core.rollout import RolloutLoop
from reap.core.slot import FLAGS, Pool, Slot
from reap.core.worker import Plan
from reap.core.worker_base import AnyWorker
from reap.errors import UsageError
from reap.spec import BatchShape, Key


def device_worker(plan: Plan, env: Env, model: Any, *, same_slot: bool = False) -> DeviceWorker | None:
    """Return a worker on the device `env` lives on, or None if something this plan asks for cannot be done there."""
    there = env.on_device()
    if there is None or plan.deterministic or plan.compact or plan.stop is not None or not plan.reset_when_done:
        return None
    wanted = [device for device in (plan.storing_device, plan.policy_device) if device is not None]
    if any(device.type != there.device.type or device.index not in (None, there.device.index) for device in wanted):
        return None
    carry, seeds = carry_of(model), env.pending_seeds
    try:
        return DeviceWorker(plan, there, model, carry, same_slot=same_slot)
    except _NeedsHost:
        env.pending_seeds = seeds  # the reset of the host's worker comes first after all
        return None


class _NeedsHost(Exception):
    """The policy reads what it wrote at the step before, so the host would have to tell it which lanes ended."""


class DeviceWorker(AnyWorker):
    """An env, a policy, the loop that joins them and the slot it fills, all on one device."""

    def __init__(
        self, plan: Plan, env: DeviceEnv, model: Any, carry: Mapping[Key, Tensor], *, same_slot: bool = False
    ) -> None:
        if needs_recurrent_state(env.spec, model, carry):
            env = DeviceRecurrentState(env, carry)
        self.plan, self.env, self.model, self._holders, self._carry = plan, env, model, env.holders, carry
        self.should_stop: Callable[[], bool] | None = None
        spec = env.spec
        self.device, self.lanes = env.device, spec.lanes
        one_by_one = Stats(self.lanes, plan.gamma) if plan.track_episodes else None
        self.stats = DeviceStats(self.lanes, self.device, one_by_one)
        self.ledger = DeviceLedger(spec, self.device, self.stats)
        self.tells_episodes = plan.track_episodes
        current: list[Any] = [
            torch.zeros(self.lanes, *leaf.shape, dtype=leaf.dtype, device=self.device)
            for leaf in spec.observation.values()
        ]
        self._first(env, current)
        self.policy = self._policy(current)
        env.expect({key: self.policy.outputs[key] for key in spec.action})
        first = {key: value.to(self.device) for key, value in carry.items()}
        self.random = _WithoutEnd(RandomActions(spec.action, self.policy.outputs, first, masks=action_masks(spec)))
        self.loop = RolloutLoop(env, _WithoutEnd(self.policy), current=current, exploration=plan.exploration)
        columns = columns_of(
            spec,
            self.policy,
            ids=plan.track_traj_ids,
            version=plan.track_policy_version,
            more=EPISODE_COLUMNS if plan.track_episodes else None,
        )
        look = BatchShape(contiguous=bool(plan.contiguous))
        self.layout = DeviceLayout(
            columns, plan.steps(self.lanes), self.lanes, batched=spec.batched, device=self.device, look=look
        )
        lent = 2 if self.device.type == "cuda" and not same_slot else 0  # elsewhere a batch is a copy
        self.pool = Pool(self.layout, limit=lent, make=DeviceSlot)  # type: ignore[arg-type]
        self._recordings: dict[int, CudaGraphRollout] = {}  # by slot index: each writes to its own slot

    def _policy(self, current: Sequence[Any]) -> Policy:
        spec, plan = self.env.spec, self.plan
        columns: dict[Key, Any] = dict(zip(spec.observation, current))
        for flag in FLAGS:
            columns[(flag,)] = torch.zeros(self.lanes, 1, dtype=torch.bool, device=self.device)
        policy = as_policy(self.model, plan.context(spec, columns, self._carry))
        if policy.remembers:
            if not isinstance(policy, TensorDictPolicy) or _reads_its_outputs(policy, self.model, columns, plan):
                raise _NeedsHost
            policy.keep_nothing()
        if isinstance(policy, TensorPolicy):
            policy.keep_on_device()
        if isinstance(policy, CallPolicy) and plan.cuda_graphs:  # in a graph a copy is a kernel at every step
            policy.trusted = leaves_inputs_alone(self.model, [columns[key].clone() for key in policy.inputs])
        return policy

    def fill(self, slot: Slot, *, random: bool = False) -> int:
        """Fill `slot` with one rollout; return the number of its frames."""
        self._before_rollout()
        self.stats.begin(self.version)
        policy = self.random.policy if random else self.policy
        if policy.remembers:
            raise UsageError(
                "a hook was added to the policy's modules after the collector was built; build the collector afterwards"
            )
        if self.plan.cuda_graphs and not random:
            self._play(slot)
        else:
            self._fill(slot, self.random if random else None)
        policy.end(slot, slot.layout.steps)
        self.ledger.stamp(slot, self.loop.stamp)
        frames = slot.layout.frames
        if self.stats.one_by_one is not None:
            self.ledger.account(slot, self.stats.one_by_one)
        self.stats.end(frames)
        return frames

    def _fill(self, slot: Slot, policy: Policy | None = None) -> None:
        self.loop.fill(slot, policy)
        self.ledger.close(slot)

    def _play(self, slot: Slot) -> None:
        if slot.index not in self._recordings:
            if self.device.type != "cuda":
                raise UsageError(f"cudagraph_policy is for lanes on a CUDA device; these are on {self.device}")
            columns: list[Any] = list(slot.arrays.values())
            state: list[Any] = [*self.loop.current, *self.ledger.tensors]
            owners = [*self._holders, *([self.model] if isinstance(self.model, torch.nn.Module) else [])]
            self._recordings[slot.index] = CudaGraphRollout(lambda: self._fill(slot), columns, state, owners)
        recording = self._recordings[slot.index]
        recording.look_again()
        recording.play()

    def _reset(self, lanes: Sequence[int], seeds: Sequence[int] | None = None, *, fresh_ids: bool = True) -> None:
        self.loop.reset(lanes, seeds)
        self.ledger.reset(lanes, fresh_ids=fresh_ids)


def _reads_its_outputs(policy: TensorDictPolicy, model: Any, columns: Mapping[Key, Any], plan: Plan) -> bool:
    """Return whether what a policy of TensorDicts wrote at one step changes what it writes at the next one.

    It is tried without any such values, with those it wrote, and with others, from the same random state.
    """
    inputs = tuple([columns[key].clone() for key in policy.inputs])

    def answer(kept: Mapping[Key, Any]) -> tuple[list[Any], dict[Key, Any]]:
        with untouched(model), torch.no_grad(), exploring(plan.exploration):
            values, kept = policy.answer(inputs, kept, tuple(inputs[0].shape[:1]))
            return [value.clone() for value in values], dict(kept)

    first, kept = answer({})
    if not all(isinstance(value, Tensor) for value in kept.values()):
        return True
    others = {key: ~value if value.dtype is torch.bool else value + 1 for key, value in kept.items()}
    return not all(
        len(first) == len(again) and all(torch.equal(a, b) for a, b in zip(first, again))
        for again, _ in map(answer, ({}, kept, others))
    )


class _WithoutEnd(Policy):
    """A policy as the loop calls it: without `end`, which waits for the device and is called after the rollout."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.inputs, self.outputs = policy.inputs, policy.outputs
        self.begin, self.act, self.forget = policy.begin, policy.act, policy.forget  # type: ignore[method-assign]

    @property
    def written(self) -> Sequence[Key]:
        return self.policy.written
