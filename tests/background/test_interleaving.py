"""Whatever is done with a collector in the background, in whatever order: rows are true, counts are right, it ends."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reap.data import MultiStep, SliceSampler
from reap.errors import WorkerDied
from reap.testing import EchoPolicy
from tests.worlds.background import IN_STEP, LENGTHS, MIX, buffer, check_rows, make
from tests.worlds.faults import pids
from tests.worlds.waiting import until

verbs = st.lists(
    st.sampled_from(
        ["grow", "grow", "sample", "sample", "slices", "windows", "pause", "resume", "weights", "seed", "stats", "rows"]
    ),
    min_size=3,
    max_size=14,
)


class Model:
    """What is known from outside: weights by version, pauses, the count of rows."""

    def __init__(self, kind, capacity, whole):
        self.rows = buffer(capacity, 12)
        fds, about = self.rows.handle()
        self.slices = type(self.rows).open([os.dup(fd) for fd in fds], about, sampler=SliceSampler(slice_len=2))
        self.ahead = type(self.rows).open([os.dup(fd) for fd in fds], about, transform=MultiStep(1.0, 3))
        options = {"trajs_per_batch": 1} if whole else {}
        self.collector = make(kind, self.rows, track_policy_version=True, **options)
        self.mine, self.version, self.pauses, self.count = EchoPolicy(), 0, 0, 0
        self.collector.start()

    def true(self, rows):
        check_rows(rows.exclude("index", "truncated"))
        assert rows["policy_version"].max() <= self.version
        weight = rows["policy_version"][:, None] + 1.0
        assert torch.equal(rows["action"], (rows["observation"] * MIX).sum(-1, keepdim=True) * weight)

    def grow(self):
        if not self.pauses:
            count = self.rows.write_count
            until(lambda: self.rows.write_count > count)

    def sample(self):
        if len(self.rows):
            self.true(self.rows.sample())

    def slices_(self):
        if self.rows.write_count > 40:
            pairs = self.slices.sample()
            seen = pairs["observation"].reshape(-1, 2, 3)
            assert torch.equal(seen[:, 1] - seen[:, 0], torch.tensor([0.0, 0.0, 1.0]).expand(len(seen), 3))
            assert (pairs["collector", "traj_ids"].reshape(-1, 2).diff() == 0).all()

    def windows(self):
        """Up to three steps of one episode, none of another lane, worker or lap."""
        if len(self.rows):
            rows = self.ahead.sample()
            seen, after, steps = rows["observation"], rows["next", "observation"], rows["steps_to_next_obs"]
            assert torch.equal(after[:, 2] - seen[:, 2], steps.float())
            assert torch.equal(after[:, :2], seen[:, :2])
            ends = torch.tensor([LENGTHS[int(k)][int(n) % len(LENGTHS[int(k)])] for k, n, _ in seen])
            assert torch.equal(rows["next", "done"][:, 0], after[:, 2] == ends)

    def all_rows(self):
        if len(self.rows):
            self.true(self.rows[:])

    def pause(self):
        self.collector.pause()
        self.pauses += 1
        self.count = self.rows.write_count

    def resume(self):
        self.collector.resume()
        self.pauses = max(self.pauses - 1, 0)

    def weights(self):
        self.version += 1
        with torch.no_grad():
            self.mine.weight.fill_(self.version + 1.0)
        self.collector.update_policy_weights_(self.mine)

    def do(self, verb):
        verbs = {"slices": self.slices_, "rows": self.all_rows, "seed": lambda: self.collector.set_seed(7)}
        (verbs.get(verb) or getattr(self, verb, None) or getattr(self.collector, verb))()
        if self.pauses:
            assert self.rows.write_count == self.count, f"written while paused, after {verb}"


@pytest.mark.parametrize("kind", IN_STEP)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(verbs=verbs, capacity=st.sampled_from([64, 150, 5000]), whole=st.booleans(), kill=st.booleans())
def test_any_order(kind, verbs, capacity, whole, kill):
    model = Model(kind, capacity, whole)
    try:
        for verb in verbs:
            model.do(verb)
        if kill and kind != "single":
            os.kill(pids(model.collector)[0], signal.SIGKILL)
            with pytest.raises(WorkerDied):
                while True:
                    model.collector.stats()
            model.all_rows()
            model.sample()
            model.windows()
            assert len(model.rows) <= capacity
            if len(model.rows):
                again = model.rows[:].exclude("index")[:10]
                for _ in range(capacity // len(again) + 1):
                    model.rows.extend(again)
                assert len(model.rows) == capacity
    finally:
        model.collector.shutdown(raise_on_error=False)
    if not kill and not whole:  # one that is told to go may have written a rollout, and not said so any more
        assert 0 <= model.rows.write_count - model.collector.stats()["frames"] <= 2 * 20
    model.sample()
