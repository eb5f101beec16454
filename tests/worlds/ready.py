"""Asynchronous lanes that answer as a test says, without a process or a thread."""

from __future__ import annotations

from dataclasses import replace

import torch

from reap.core.env import Env
from reap.envs import GymEnv, as_env
from reap.spec import LANE_AT, Leaf
from reap.testing import CountingEnv


class Scripted(Env):
    """Lanes of CountingEnv. Of the lanes that were stepped, those that `choose` names answer."""

    runs_elsewhere = True

    def __init__(self, lengths, most, choose):
        self.envs = [CountingEnv(one, lane) for lane, one in enumerate(lengths)]
        spec = as_env(GymEnv(CountingEnv())).spec
        lane = {LANE_AT: Leaf((), torch.int64)}
        self.spec = replace(
            spec,
            observation={**spec.observation, **lane},
            lanes=most,
            ready_of=len(lengths),
            batched=True,
            rows="skipping",
            single_steps=False,
            single_resets=False,
            side=frozenset(lane),
        )
        self.has_after_step = True
        self._choose = choose

    def expect(self, action):
        pass

    def reset(self, lanes, into, seeds=None):
        self._seen = [env.reset()[0] for env in self.envs]
        self._stepped, self._new = [], list(range(len(self.envs)))
        self._hand = [self._new.pop(0) for _ in range(self.spec.lanes)]
        self._write(into)

    def _write(self, into):
        seen, lane_at = into
        seen[: len(self._hand)] = [self._seen[lane] for lane in self._hand]
        lane_at[:] = -1
        lane_at[: len(self._hand)] = self._hand

    def send(self, lanes, row):
        self._row = row
        self._stepped += zip(self._hand, row.action[0].copy())

    def recv(self):
        row, self._began = self._row, []
        if self._new:  # these lanes come back from the reset, without a frame
            self._hand = [self._new.pop(0) for _ in range(min(len(self._new), self.spec.lanes))]
            self._write(row.next)
            row.mask[:] = False
            return []
        came = [self._stepped.pop(at) for at in self._choose(len(self._stepped), self.spec.lanes)]
        self._hand = [lane for lane, _ in came]
        row.mask[len(came) :] = False
        for at, (lane, action) in enumerate(came):
            self._seen[lane], reward, terminated, truncated, _ = self.envs[lane].step(action)
            row.rewards[0][at] = reward
            row.terminated[at], row.truncated[at], row.done[at] = terminated, truncated, terminated or truncated
        self._write(row.next)
        for at, (lane, _) in enumerate(came):
            if row.done[at]:
                self._seen[lane] = self.envs[lane].reset()[0]
                self._began.append((at, lane))
        return []

    def after_step(self, row):
        for at, lane in self._began:
            row.after[0][at] = self._seen[lane]

    def close(self):
        pass
