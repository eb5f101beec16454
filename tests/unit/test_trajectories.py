"""split_trajectories against a loop anyone can read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from reap.errors import UsageError
from reap.trajectories import split_trajectories
from tests import example_count


def pieces(ids, values):
    """Runs of equal ids along each lane, one list per run."""
    found = []
    for lane_ids, lane in zip(ids.reshape(-1, ids.shape[-1]).tolist(), values.reshape(-1, ids.shape[-1]).tolist()):
        last = None
        for i, v in zip(lane_ids, lane):
            if i != last:
                found.append([])
            found[-1].append(v)
            last = i
    return found


@given(st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=example_count(80), deadline=None)
def test_padded(lanes, steps, rng, with_ids):
    done = torch.tensor([[rng.random() < 0.3 for _ in range(steps)] for _ in range(lanes)])
    begins = torch.ones_like(done)
    begins[:, 1:] = done[:, :-1]
    ids = begins.reshape(-1).cumsum(0).reshape(lanes, steps) - 1
    x = torch.arange(1.0, lanes * steps + 1).reshape(lanes, steps)
    td = TensorDict({"x": x, "next": {"done": done.unsqueeze(-1)}}, batch_size=[lanes, steps])
    if with_ids:
        td["collector", "traj_ids"] = ids * 3 + 1
    out = split_trajectories(td)
    want = pieces(ids, x)
    mask = out["collector", "mask"] if with_ids else out["mask"]
    assert out.batch_size == torch.Size([len(want), max(map(len, want))])
    assert [row[m].tolist() for row, m in zip(out["x"], mask)] == want
    assert (out["x"][~mask] == 0).all()
    nested = split_trajectories(td, as_nested=True)
    assert [t.tolist() for t in nested["x"].unbind()] == want


def test_keys():
    td = TensorDict({"x": torch.arange(4), "a": {"who": torch.tensor([7, 7, 8, 8])}}, batch_size=[4])
    out = split_trajectories(td, trajectory_key=("a", "who"))
    assert out["a", "mask"].all()
    assert out["x"].tolist() == [[0, 1], [2, 3]]
    td = TensorDict({"p": {"traj_ids": torch.tensor([1, 2, 2])}}, batch_size=[3])
    assert split_trajectories(td, prefix="p")["p", "mask"].tolist() == [[True, False], [True, True]]
    td = TensorDict({"next": {"over": torch.tensor([[False], [True], [False]])}}, batch_size=[3])
    assert split_trajectories(td, done_key="over")["mask"].tolist() == [[True, True], [True, False]]
    with pytest.raises(UsageError, match="nothing says where episodes end"):
        split_trajectories(TensorDict({"x": torch.zeros(3)}, batch_size=[3]))
    with pytest.raises(UsageError, match="time dimension"):
        split_trajectories(TensorDict({}))


def test_rows_without_a_frame_are_left_out():
    td = TensorDict(
        {
            "x": torch.arange(8.0).reshape(2, 4),
            "collector": {
                "traj_ids": torch.tensor([[0, 0, -1, -1], [1, 1, 1, 2]]),
                "mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool),
            },
        },
        batch_size=[2, 4],
    )
    out = split_trajectories(td)
    assert out["collector", "mask"].sum(1).tolist() == [2, 3, 1]
    assert out["x"][out["collector", "mask"]].tolist() == [0, 1, 4, 5, 6, 7]


def test_the_input_is_left_alone():
    td = TensorDict({"x": torch.arange(3), "next": {"done": torch.zeros(3, 1, dtype=torch.bool)}}, batch_size=[3])
    before = set(td.keys(True))
    split_trajectories(td)
    assert set(td.keys(True)) == before


def test_many_short_trajectories_are_fast():
    import sys

    done = torch.from_numpy(np.random.default_rng(0).random((64, 1000)) < 0.05)
    td = TensorDict({"x": torch.zeros(64, 1000, 8), "next": {"done": done.unsqueeze(-1)}}, batch_size=[64, 1000])
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" or event == "c_call"

    sys.setprofile(count)
    split_trajectories(td)
    sys.setprofile(None)
    assert calls < 3000  # about 3,200 trajectories: fewer calls than that cannot be a loop over them
