"""split_trajectories: any pattern of ends, any key, the same cut as TorchRL's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.collectors.utils import split_trajectories as theirs

import reap.collectors.utils
from tests.worlds.pairs import assert_identical, differs

ours = reap.collectors.utils.split_trajectories
pytestmark = pytest.mark.filterwarnings("ignore")


def rollout(done, ids=None, *, done_key=("done",), flag_dim=True, device=None, names=True):
    """A batch with these ends: columns of several dtypes and shapes, nested and flat."""
    size = done.shape
    n = done.numel()
    count = torch.arange(1, n + 1).reshape(size)
    td = TensorDict(
        {
            "observation": count.unsqueeze(-1) * torch.tensor([1.0, -2.0, 0.5]),
            "action": count.to(torch.int8),
            "agent": {"value": count.double().unsqueeze(-1)},
            "next": {"reward": count.unsqueeze(-1).float() / 8, "image": count[..., None, None].expand(*size, 2, 2)},
        },
        batch_size=size,
        device=device,
        names=[None] * (len(size) - 1) + ["time"] if names else None,
    )
    td["next"].set(done_key, done.unsqueeze(-1) if flag_dim else done)
    if ids is not None:
        td.set(ids, ids_of(done))
    return td


def ids_of(done):
    """Unique ids, not in order, as lanes that run side by side have them."""
    begins = torch.ones_like(done)
    begins[..., 1:] = done[..., :-1]
    number = begins.reshape(-1).cumsum(0).reshape(done.shape)
    return 100 + number * 7 % 101  # 101 is prime: different numbers stay different


def compare(td, **options):
    untouched = td.clone()
    assert_identical(ours(td, **options), theirs(td.clone(), **options))
    assert_identical(td, untouched, "the input")


def pattern(*size, seed=0, rate=0.3):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.random(size) < rate)


SIZES = [(1,), (9,), (30,), (1, 6), (4, 7), (5, 1)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("ids", [("collector", "traj_ids"), "traj_ids", None], ids=["collector", "root", "from done"])
@pytest.mark.parametrize("rate", [0.3, 1.0], ids=["some ends", "all ends"])
def test_any_size(size, ids, rate):
    compare(rollout(pattern(*size, rate=rate), ids))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("ids", [("collector", "traj_ids"), None], ids=["ids", "from done"])
@pytest.mark.parametrize("end", [False, True], ids=["goes on", "ends"])
def test_every_lane_is_one_whole_trajectory(size, ids, end):
    done = torch.zeros(size, dtype=torch.bool)
    done[..., -1] = end
    compare(rollout(done, ids))


@pytest.mark.parametrize("lanes", [(2, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.4], ids=["whole lanes", "some ends"])
def test_three_dimensions(lanes, rate):
    compare(rollout(pattern(*lanes, 6, rate=rate), ("collector", "traj_ids")))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data(), lanes=st.integers(0, 4), steps=st.integers(1, 12), with_ids=st.booleans())
def test_any_pattern(data, lanes, steps, with_ids):
    size = (lanes, steps) if lanes else (steps,)
    flags = data.draw(st.lists(st.booleans(), min_size=max(lanes, 1) * steps, max_size=max(lanes, 1) * steps))
    compare(rollout(torch.tensor(flags).reshape(size), ("collector", "traj_ids") if with_ids else None))


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (("collector", "traj_ids"), {"prefix": "collector"}),
        (("meta", "traj_ids"), {"prefix": "meta"}),
        (("meta", "deep", "traj_ids"), {"prefix": ("meta", "deep")}),
        (None, {"prefix": "meta"}),
        ("episode", {"trajectory_key": "episode"}),
        (("agent", "episode"), {"trajectory_key": ("agent", "episode")}),
        (None, {"trajectory_key": "episode"}),
        (("collector", "traj_ids"), {"trajectory_key": ("collector", "traj_ids"), "prefix": "meta"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(12,), (3, 7)], ids=str)
def test_where_ids_and_mask_live(size, ids, options):
    compare(rollout(pattern(*size), ids), **options)


@pytest.mark.parametrize("done_key", ["over", ("agent", "over")], ids=str)
@pytest.mark.parametrize("size", [(12,), (3, 7)], ids=str)
def test_another_flag_ends_trajectories(size, done_key):
    key = (done_key,) if isinstance(done_key, str) else done_key
    compare(rollout(pattern(*size), done_key=key), done_key=done_key)


@pytest.mark.parametrize("size", [(12,), (3, 7)], ids=str)
@pytest.mark.parametrize("ids", [("collector", "traj_ids"), None], ids=["ids", "from done"])
def test_flags_without_a_last_dimension(size, ids):
    compare(rollout(pattern(*size), ids, flag_dim=False))


@pytest.mark.parametrize("size", [(12,), (3, 7)], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.3], ids=["whole lanes", "some ends"])
def test_device_and_names(size, rate):
    compare(rollout(pattern(*size, rate=rate), "traj_ids", device="cpu"))
    compare(rollout(pattern(*size, rate=rate), "traj_ids", names=False))


@pytest.mark.parametrize("size", [(12,), (3, 7)], ids=str)
@pytest.mark.parametrize("ids", [("collector", "traj_ids"), None], ids=["ids", "from done"])
def test_nested_tensors(size, ids):
    compare(rollout(pattern(*size), ids), as_nested=True)


@differs("whole lanes are nested, TorchRL returns them padded")
@pytest.mark.parametrize("size", [(12,), (3, 7)], ids=str)
def test_nested_tensors_of_whole_lanes(size):
    compare(rollout(pattern(*size, rate=0.0), "traj_ids"), as_nested=True)
