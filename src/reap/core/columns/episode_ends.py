"""EpisodeEnds: records where episodes end while a rollout is filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reap.core.slot import Finals, Slot
from reap.spec import Key


class EpisodeEnds:
    """Where episodes ended in a rollout, and the successors there if the slot is compact: it has no column for them."""

    def __init__(self, slot: Slot, observation: Sequence[Key]) -> None:
        self.when: list[int] = []  # steps
        self.where: list[int] = []  # lanes
        self.compact = {i: key for i, key in enumerate(observation) if ("next", *key) not in slot.arrays}
        self._kept: list[tuple[int, list[int], list[np.ndarray[Any, Any]]]] = []

    def keep(self, step: int, lanes: list[int], rows: Sequence[np.ndarray[Any, Any]]) -> None:
        """Keep the successors of these lanes, which no later row has as its observation."""
        self._kept.append((step, lanes, [rows[i][lanes] for i in self.compact]))

    def finals(self, slot: Slot, steps: int, current: Sequence[np.ndarray[Any, Any]]) -> Finals:
        """Return all kept successors, and those of the last step, from `current`, for lanes whose episode continues."""
        over = {lane for step, lane in zip(self.when, self.where) if step == steps - 1}
        self.keep(steps - 1, [lane for lane in range(slot.layout.lanes) if lane not in over], current)
        kept = self._kept
        return Finals(
            lane=np.array([lane for _, lanes, _ in kept for lane in lanes], np.int64),
            step=np.repeat([t for t, _, _ in kept], [len(lanes) for _, lanes, _ in kept]),
            values={key: np.concatenate([v[n] for _, _, v in kept]) for n, key in enumerate(self.compact.values())},
            steps=slot.layout.steps,
            size=slot.layout.batch_size,
        )
