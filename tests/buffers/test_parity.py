"""Beside TorchRL's samplers: the same names, the same keys and shapes, the same distributions."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import reap.data as ours

theirs = pytest.importorskip("torchrl.data")


def world(lengths):
    """Episodes of these lengths, one after another; the last one is unfinished."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    count = len(ids)
    done = np.append(ids[1:] != ids[:-1], False)
    leaves = {
        "observation": torch.arange(count).float().unsqueeze(-1),
        "action": torch.zeros(count, 2),
        "collector": {"traj_ids": torch.from_numpy(ids)},
        "next": {
            "observation": torch.arange(count).float().unsqueeze(-1) + 1,
            "done": torch.from_numpy(done).unsqueeze(-1),
            "terminated": torch.from_numpy(done).unsqueeze(-1),
            "truncated": torch.zeros(count, 1, dtype=torch.bool),
            "reward": torch.ones(count, 1),
        },
    }
    return TensorDict(leaves, batch_size=[count])


def pair(sampler, batch_size, capacity=64, kind="TensorDictReplayBuffer"):
    for library in (ours, theirs):
        buffer = getattr(library, kind)(
            storage=library.LazyTensorStorage(capacity), sampler=sampler(library), batch_size=batch_size
        )
        yield buffer


def alike(mine, other):
    """Two histograms of the same number of draws: chi-square, far in its tail."""
    mine, other = np.asarray(mine, float), np.asarray(other, float)
    used = mine + other > 0
    square = ((mine - other) ** 2)[used] / (mine + other)[used]
    freedom = used.sum() - 1
    assert square.sum() < freedom + 6 * np.sqrt(2 * max(freedom, 1)), (mine, other)


def shapes(sample):
    return {key: (tuple(value.shape), value.dtype) for key, value in sample.items(True, True)}


SAMPLERS = {
    "random": (lambda d: d.RandomSampler(), 20),
    "slices": (lambda d: d.SliceSampler(slice_len=4, traj_key=("collector", "traj_ids")), 20),
    "slices by done": (lambda d: d.SliceSampler(num_slices=5), 20),
    "once": (lambda d: d.SamplerWithoutReplacement(), 8),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_same_samples(name, kind):
    torch.manual_seed(0)
    sampler, size = SAMPLERS[name]
    mine, other = pair(sampler, size, kind=kind)
    counts = []
    for buffer in (mine, other):
        for _ in range(2):
            index = buffer.extend(world([9, 3, 14, 4, 10]))
        assert index.tolist() == [*range(40, 64), *range(16)]
        seen = np.zeros(64)
        for _ in range(120):
            seen += np.bincount(buffer.sample()["observation"][:, 0].long().numpy(), minlength=64)
        counts.append(seen)
    first, second = shapes(mine.sample()), shapes(other.sample())
    if "slices" in name and kind != "ReplayBuffer":
        assert (first.pop("index")[0], second.pop("index")[0]) == ((20,), (20, 1))  # as everywhere else in reap
    assert first == second
    assert (len(mine), mine.write_count) == (len(other), other.write_count)
    if (
        "slices" not in name
    ):  # those have a test of their own, without a wrap: TorchRL does not see the seam as reap does
        alike(*counts)


@pytest.mark.parametrize("name", ["slices", "slices by done"])
def test_slices_begin_alike(name):
    torch.manual_seed(0)
    sampler, size = SAMPLERS[name]
    counts = []
    for buffer in pair(sampler, size):
        buffer.extend(world([9, 3, 14, 4, 10]))
        starts = [buffer.sample()["observation"].reshape(-1, 4)[:, 0].long().numpy() for _ in range(400)]
        counts.append(np.bincount(np.concatenate(starts), minlength=40))
    alike(*counts)


def test_slice_ends_are_marked_alike():
    samples = []
    for buffer in pair(lambda d: d.SliceSampler(slice_len=5), 5):
        buffer.extend(world([6, 1])[:5])  # only one slice is possible
        sample = buffer.sample()
        samples.append(sample.select("next", "observation"))
    assert (samples[0]["next", "truncated"] == samples[1]["next", "truncated"]).all()
    assert (samples[0]["next", "done"] == samples[1]["next", "done"]).all()
    assert (samples[0]["next", "terminated"] == samples[1]["next", "terminated"]).all()


def test_priorities_as_the_paper_has_them():
    """TorchRL's tree is compiled and may be absent: the formula itself."""
    torch.manual_seed(0)
    buffer = ours.TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=ours.LazyTensorStorage(40), batch_size=20_000
    )
    buffer.extend(world([40]))
    priority = torch.linspace(0.1, 5, 40)
    buffer.update_priority(torch.arange(40), priority)
    sample = buffer.sample()
    mass = (priority.double() + 1e-8) ** 0.7
    expected = 20_000 * mass / mass.sum()
    square = (torch.bincount(sample["index"], minlength=40) - expected) ** 2 / expected
    assert square.sum() < 39 + 6 * np.sqrt(78)
    assert torch.allclose(sample["priority_weight"], ((mass / mass.min()) ** -0.5)[sample["index"]].float())


@pytest.mark.parametrize("name", ours.__all__)
def test_same_names_and_arguments(name):
    """Whoever changes the import finds every argument that reap has under the same name."""
    if name in (
        "Sampler",
        "SamplesPerInsert",
        "Storage",
        "Dataset",
        "export",
        "load",
        "record",
    ):  # what the others are made of, and what is ours alone
        return
    known = set(inspect.signature(getattr(theirs, name).__init__).parameters)
    mine = set(inspect.signature(getattr(ours, name).__init__).parameters)
    options = {"options", "kwargs", "_", "args", "limiter", "burn_in"}  # the last two are ours alone
    wide = known & {"kwargs", "args"}
    assert wide or mine - options <= known
