"""The hot loop: `RolloutLoop.fill` is the only loop in reap that steps an env.

    current ──► row 0            row t: policy.act → env.step → next, reward, flags
                │                       │
                └── after ◄── copy ◄────┘   (a lane that ended: after ◄── env.reset)
                                            last row: after = current, the first observation of the next rollout

Cost of one step beyond policy and env (2 cores, five leaves): one call each, one NumPy row copy per observation leaf,
about 2–4 µs. Clearing flags and writing trajectory ids and versions happens once per rollout, not once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType

from reap.core.columns.episode_ends import EpisodeEnds
from reap.core.env import Env
from reap.core.ledger import Ledger
from reap.core.measuring.times import StepTimes
from reap.core.policies.exploration import exploring
from reap.core.policy import Policy
from reap.core.slot import FIRST, MASK, VERSION, Row, RowKeys, Slot
from reap.errors import ReapError, raised_by, reraise


class RolloutLoop:
    """Fills slots with rollouts of one env under one policy; each rollout continues where the last one stopped."""

    def __init__(
        self,
        env: Env,
        policy: Policy,
        *,
        current: Sequence[np.ndarray[Any, Any]],
        ledger: Ledger | None = None,
        exploration: InteractionType | None = InteractionType.RANDOM,
        reset_when_done: bool = True,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.env, self.policy, self.current, self.ledger = env, policy, current, ledger
        self.exploration, self.reset_when_done, self.stop = exploration, reset_when_done, stop
        self.version = 0
        self.times: StepTimes | None = None  # measures the steps of this rollout; None: they are not timed
        self.at = np.zeros(1, np.int64)  # the current step; a worker process puts shared memory here
        spec = env.spec
        self.lanes = range(spec.lanes)
        self._actions = {key: policy.outputs[key] for key in spec.action}
        # Outputs that the next row begins with: the next recurrent state, and observations the policy overwrites.
        self._carried = [key for key in policy.outputs if key[0] == "next" or key in spec.observation]
        self._stamps = VERSION not in policy.outputs  # else the policy writes the version of the weights that acted
        self.due: Sequence[int] = []  # lanes that ended and have not been reset yet
        self._keys = self._row_keys()
        self.driver_token = env.driver = object()  # marks this loop as the one that moved the env last

    def _row_keys(self) -> RowKeys:
        copied = not self.env.writes_after
        return RowKeys(self.env.spec, self.policy.inputs, self.policy.written, copied=copied)

    @property
    def stamp(self) -> int | None:
        """The version to stamp frames with; None: the policy writes it."""
        return self.version if self._stamps else None

    def reset(self, lanes: Sequence[int], seeds: Sequence[int] | None = None, *, fresh_ids: bool = True) -> None:
        """Start new episodes in `lanes`, between two rollouts."""
        try:
            self.env.reset(lanes, self.current, seeds)
        except Exception as cause:
            reraise("env.reset", cause)
        chosen = list(lanes)
        self.due = sorted({*self.due}.difference(chosen))
        if self.ledger is not None:
            self.ledger.reset(chosen, fresh_ids=fresh_ids)
        self.policy.forget(chosen)

    def fill(self, slot: Slot, policy: Policy | None = None) -> int:
        """Collect one rollout into `slot` and return its number of steps.

        It is shorter than the slot only if `stop` ended it, or if all lanes ended and are not reset during a rollout.
        """
        policy = policy or self.policy
        self._begin(slot, policy)
        act, step, reset, at = policy.act, self.env.step, self.env.reset, self.at
        forget = policy.forget if policy.remembers else None
        after_step = self.env.after_step if self.env.has_after_step else None
        if self.times is not None:
            act, step, reset, after_step = self.times.around(act, step, reset, after_step)
        lanes: Sequence[int] = self.lanes
        resets = self.reset_when_done
        ends = EpisodeEnds(slot, self._keys.observation)
        when, where, compact = ends.when, ends.where, ends.compact
        due: list[int] = []  # lanes that ended and are not reset in this rollout
        self.due = lanes  # if Ctrl-C interrupts this rollout, the lanes' position is unknown: the next resets them all
        t, acted = 0, True
        try:
            with torch.no_grad(), exploring(self.exploration):
                for t, row in enumerate(slot.cut(self._keys, self.current)):
                    acted = False
                    at[0] = t
                    act(row)
                    acted = True
                    ended = step(lanes, row)
                    for after, successor in row.copies:
                        after[...] = successor
                    if after_step is not None:
                        after_step(row)
                    if due:
                        for after in row.after:
                            after[due] = 0  # these lanes were not stepped, so their successors are stale memory
                    if ended:
                        when += [t] * len(ended)
                        where += ended
                        if compact:
                            ends.keep(t, ended, row.next)  # before a reset overwrites it
                        if not resets:
                            due += ended
                            lanes = [lane for lane in lanes if lane not in ended]
                            if not lanes:
                                break
                    if (stop := self.stop) is not None and stop():  # read at each step: another thread may set it
                        due = ended if resets else due
                        break
                    if ended and resets:
                        reset(ended, row.after)
                        if forget is not None:
                            forget(ended)
        except ReapError as error:
            error.at(step=t)
            raise
        except Exception as cause:
            who = "the env" if acted else "the policy"
            raise raised_by(f"{who} raised", cause).at(step=t) from cause
        self._finish(slot, policy, t + 1, row, ends, due)
        return t + 1

    def _begin(self, slot: Slot, policy: Policy) -> None:
        """Prepare env, policy and slot for the first row, whatever was done to them since the last rollout."""
        self.env.expect(self._actions)  # the user may have stepped the env by hand with other actions
        if self.due:
            self.reset(self.due)
        slot.clear_flags()
        policy.read_early = {*self._carried, *self.env.outputs_read(policy.outputs)}
        policy.begin(slot)
        if policy is self.policy and self._keys.outputs != tuple(policy.written):
            self._keys = self._row_keys()  # a hook was added to the user's module, or removed
        self.env.set_policy_keys(self._keys.outputs)
        arrays = slot.arrays
        if MASK in arrays:
            arrays[MASK][...] = True
        for key, value in zip(self._keys.observation, self.current):
            arrays[key][0] = value
            if (*FIRST, *key) in arrays:
                arrays[(*FIRST, *key)][0] = value

    def _finish(self, slot: Slot, policy: Policy, steps: int, row: Row, ends: EpisodeEnds, due: list[int]) -> None:
        """Complete the slot after its last step, whose row is `row`; the next rollout resets the lanes in `due`."""
        if steps < slot.layout.steps:  # a short rollout: `current` is not the last row's `after`
            for mine, last in zip(self.current, row.after):
                mine[...] = last
        if ends.compact:
            slot.finals = ends.finals(slot, steps, self.current)
        try:
            policy.end(slot, steps)
        except Exception as cause:
            reraise("the policy", cause)
        if self.ledger is not None:
            when, where = np.array(ends.when, np.int64), np.array(ends.where, np.int64)
            self.ledger.close(slot, steps, when, where, due=due, version=self.stamp)
        self.due = sorted(due)  # last: if Ctrl-C comes before this, the batch is lost and all lanes are reset
