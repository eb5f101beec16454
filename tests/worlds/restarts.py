"""What the restart tests share: envs that fail once, and a check that each lane's rows are true around a failure."""

from __future__ import annotations

import torch

from reap.collectors import MultiAsyncCollector
from reap.testing import CountingEnv
from reap.testing.faults import inject

LENGTHS = (3, 1, 5)


class Once(CountingEnv):
    """Fails in its `at`-th step, if there is a file that says so; takes the file away."""

    def __init__(self, note, fault, *, at=20, lane=1):
        super().__init__(LENGTHS, lane)
        self.note, self.fault, self.left = note, fault, at

    def step(self, action):
        self.left -= 1
        if self.left == 0 and self.note.exists():
            self.note.unlink()
            inject(self.fault)
        return super().step(action)


class BuildsOnlyWithout(CountingEnv):
    """Cannot be built as often as there are files; takes one away each time."""

    def __init__(self, folder, fault):
        notes = sorted(folder.iterdir())
        if notes:
            notes[0].unlink()
            inject(fault)
        super().__init__(LENGTHS, 1)


def failing(note, fault, **more):
    note.touch()
    return lambda: Once(note, fault, **more)


def check_lane(rows, lane, limit=None):
    """Rows of one lane in the order in which they were made: trajectories are true, ids are never given twice.

    Returns how many trajectories were cut.
    """
    seen, cuts = set(), 0
    ids = rows["collector", "traj_ids"]
    starts = [0, *((ids[1:] != ids[:-1]).nonzero().squeeze(-1) + 1).tolist()]
    for first, end in zip(starts, [*starts[1:], len(ids)]):
        one = rows[first:end]
        own = int(ids[first])
        assert own not in seen, "an id was given twice"
        seen.add(own)
        steps = torch.arange(len(one), dtype=torch.float32)
        episode = float(one["observation"][0, 1])
        assert (one["observation"][:, 0] == lane).all()
        assert (one["observation"][:, 1] == episode).all()
        assert torch.equal(one["observation"][:, 2], steps)
        assert torch.equal(one["next", "observation"][:, 2], steps + 1)
        assert torch.equal(one["action"][:, 0], 3 * lane + 5 * episode + 7 * steps)
        assert torch.equal(one["next", "reward"][:, 0], steps + 1 + one["action"][:, 0] / 8)
        whole = len(one) == min(LENGTHS[int(episode) % len(LENGTHS)], limit or 99)
        assert bool(one["next", "done"][-1]) == whole
        assert not one["next", "done"][:-1].any()
        cut_before = bool(one["collector", "cut"][0]) if "cut" in one["collector"].keys() else False
        if first:
            ended = bool(rows["next", "done"][first - 1])
            assert cut_before or ended, "a trajectory that did not end is marked by the row after it"
        cuts += cut_before
    return cuts


def by_lane(batches, kind):
    """All rows of each of two workers of one lane, in the order in which they came."""
    lanes = {0: [], 1: []}
    for batch in batches:
        for lane in (0, 1) if kind is not MultiAsyncCollector else (batch.origin.worker,):
            rows = batch if kind is MultiAsyncCollector else batch[lane]
            if "mask" in rows["collector"].keys():
                rows = rows[rows["collector", "mask"]]
            if len(rows):
                lanes[lane].append(rows.clone())
    return {lane: torch.cat(rows) for lane, rows in lanes.items() if rows}


def check_lane_exactly(rows, lane):
    """Every row of a lane in order of time: no episode is missing either. Returns how many trajectories were cut."""
    cuts = check_lane(rows, lane)
    first = torch.cat([torch.ones(1, dtype=bool), rows["collector", "traj_ids"].diff() != 0])
    episodes, cut = rows["observation"][first, 1].tolist(), rows["collector", "cut"][first].tolist()
    expected = -1
    for episode, begun_anew in zip(episodes, cut):
        expected = 0 if begun_anew else expected + 1
        assert episode == expected
    assert int(rows["collector", "cut"].sum()) == cuts
    return cuts
