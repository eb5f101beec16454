"""Options at random, with a fixed seed: whatever is given is taken, or refused by an error of reap that names it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from reap.buffers.transforms import Transforms
from reap.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiStep,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from reap.errors import ReapError
from reap.testing import no_leaks
from tests.worlds.buffers import line

nan, inf = float("nan"), float("inf")

NUMBERS = [
    nan,
    inf,
    -inf,
    -1,
    0,
    0.5,
    1.0,
    3,
    10**30,
    2**63,
    -(2**70),
    10**400,
    1e300,
    np.float32(0.5),
    np.int64(2),
]
OTHERS = [True, False, np.True_, "x", "", None, [], {}, (), object(), b"x", print, int, 1 + 2j, lambda: 3, ("a", 3)]
TENSORS = [
    np.zeros(2),
    torch.tensor(2),
    torch.tensor(nan),
    torch.zeros(2, 3),
    torch.zeros(0),
    torch.float32,
    torch.int8,
]
THINGS = [
    *(lambda: LazyTensorStorage(5), RandomSampler(), SamplesPerInsert(1), MultiStep(0.9, 2)),
    *(torch.Generator(), "cpu", "auto", "cuda:99", "max", ("next", "done"), "a\0b", torch.device("cpu"), "/proc/none"),
]
JUNK = [*NUMBERS, *OTHERS, *TENSORS, *THINGS]


def storage():
    return LazyTensorStorage(5)


CONSTRUCTORS = {
    SamplesPerInsert: ({"ratio": 1}, "ratio tolerance min_size timeout"),
    LazyTensorStorage: ({"max_size": 5}, "max_size device ndim shared_init compilable"),
    LazyMemmapStorage: (
        {"max_size": 5},
        "max_size scratch_dir device ndim existsok shared_init compilable",
    ),
    RandomSampler: ({}, ""),
    SamplerWithoutReplacement: ({}, "drop_last shuffle"),
    PrioritizedSampler: (
        {"max_capacity": 5, "alpha": 1, "beta": 1},
        "max_capacity alpha beta eps dtype reduction",
    ),
    SliceSampler: (
        {"slice_len": 2},
        "num_slices slice_len end_key traj_key cache_values truncated_key strict_length burn_in",
    ),
    MultiStep: ({"gamma": 0.9, "n_steps": 2}, "gamma n_steps"),
    ReplayBuffer: (
        {"storage": storage},
        "storage sampler writer collate_fn pin_memory prefetch transform batch_size dim_extend generator shared "
        "compilable delayed_init limiter",
    ),
    TensorDictReplayBuffer: ({"storage": storage}, "storage sampler batch_size priority_key transform"),
    PrioritizedReplayBuffer: (
        {"alpha": 1, "beta": 1, "storage": storage},
        "alpha beta eps storage batch_size prefetch limiter",
    ),
    TensorDictPrioritizedReplayBuffer: (
        {"alpha": 1, "beta": 1, "storage": storage},
        "alpha beta eps storage priority_key reduction",
    ),
}


def check_named(error, words, given):
    assert any(word in str(error) for word in words), (given, str(error))


def used(made):
    """A little life: what was taken must work, or be refused, as well."""
    if isinstance(made, (LazyTensorStorage, LazyMemmapStorage)):
        made = ReplayBuffer(storage=made, batch_size=2)
    elif isinstance(made, SamplesPerInsert):
        made = ReplayBuffer(storage=storage(), batch_size=2, limiter=made)
    elif isinstance(made, MultiStep):
        made = ReplayBuffer(storage=storage(), batch_size=2, transform=made)
    elif not isinstance(made, ReplayBuffer):
        made = ReplayBuffer(storage=storage(), batch_size=4, sampler=made)
    if not callable(made.transforms[0] if made.transforms else None) and made._collate is None:
        made.extend(line(5))
        if (made.batch_size or 0) < 100 and made.limiter is None:
            made.sample(made.batch_size or 4)
    made.shutdown()


@pytest.mark.parametrize("kind", CONSTRUCTORS, ids=lambda kind: kind.__name__)
def test_constructors(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, names = CONSTRUCTORS[kind]
    names, chance, refused = names.split(), random.Random(15), 0
    with no_leaks():
        for _ in range(300):
            wrong = {
                name: chance.choice(JUNK) for name in chance.sample(names, min(len(names), chance.choice([1, 1, 2])))
            }
            try:
                used(kind(**{**base, **wrong}))
            except ReapError as error:
                refused += 1
                check_named(error, [*wrong, *base, "max_size", "batch_size", "episode"], wrong)
    assert not names or refused > 20


@pytest.mark.parametrize("kind", CONSTRUCTORS, ids=lambda kind: kind.__name__)
def test_every_option_alone_is_named(kind, tmp_path, monkeypatch):
    """What is wrong with one option is told with its name, and with what was given."""
    monkeypatch.chdir(tmp_path)
    base, names = CONSTRUCTORS[kind]
    for name in names.split():
        for junk in JUNK:
            try:
                kind(**{**base, name: junk})
            except ReapError as error:
                check_named(error, [name], junk)


NEVER = {
    "ratio": [nan, inf, -1, 0, True, "1", None],
    "tolerance": [nan, inf, -1, True, "1"],
    "min_size": [nan, 0, 1.0, True, "1", None],
    "timeout": [nan, -1, 0, True, "1", None],
    "max_size": [nan, 0, 5.0, True, "5", None],
    "max_capacity": [nan, 0, 5.0, True, "5", None],
    "alpha": [nan, inf, -1, True, "1", None, 10**400],
    "beta": [nan, inf, -1, True, "1", None],
    "eps": [nan, inf, -1, True, "1", None],
    "gamma": [nan, inf, -1, 1.5, True, "1", None],
    "n_steps": [nan, inf, 0, 1.5, True, "1", None, 10**30],
    "batch_size": [nan, inf, 0, 1.5, True, "1", 10**30],
    "prefetch": [nan, inf, -1, 1.5, True, "1", 10**30],
    "slice_len": [nan, inf, 0, 1.5, True, "1"],
    "burn_in": [nan, inf, -1, 1.5, True, "1", None],
    "device": ["x", 3, nan, True],
    "generator": [3, "x", True],
    "transform": [3, "x", nan],
    "collate_fn": [3, "x", nan],
    "priority_key": [3, "", (), None, ("a", 3)],
    "reduction": ["x", 3, None, np.zeros(2)],
}


@pytest.mark.parametrize("kind", CONSTRUCTORS, ids=lambda kind: kind.__name__)
def test_what_is_never_right(kind):
    base, names = CONSTRUCTORS[kind]
    for name in names.split():
        for wrong in NEVER.get(name, []):
            with pytest.raises(ReapError, match=rf"{name}.*got") as caught:
                kind(**{**base, name: wrong})
            if not (isinstance(wrong, float) and math.isnan(wrong)):
                assert repr(wrong)[:20] in str(caught.value).replace("\n", " ")


def test_methods():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1, beta=1, storage=LazyTensorStorage(8), batch_size=2)
    buffer.extend(line(5))
    calls = {
        "sample": (lambda x: buffer.sample(x), "batch_size"),
        "extend": (lambda x: buffer.extend(x), ""),
        "add": (lambda x: buffer.add(x), ""),
        "list": (lambda x: buffer.extend([x, x]), ""),
        "index": (lambda x: buffer.update_priority(x, torch.ones(1)), "index|priority"),
        "priority": (lambda x: buffer.update_priority(torch.zeros(1, dtype=torch.int64), x), "priorit|index"),
        "sampled": (lambda x: buffer.update_tensordict_priority(x), "data|sample"),
        "getitem": (lambda x: buffer[x], "index|row"),
        "dumps": (lambda x: buffer.dumps(x) if not isinstance(x, str) else None, "path"),
        "loads": (lambda x: buffer.loads(x), "path"),
        "load_state_dict": (lambda x: buffer.load_state_dict(x), "state"),
        "insert_transform": (lambda x: buffer.insert_transform(x, print), "index|MultiStep"),
        "append_transform": (lambda x: None if callable(x) else buffer.append_transform(x), "transform"),
        "set_rng": (lambda x: buffer.set_rng(x), "generator"),
        "timeout": (lambda x: buffer.watch(x), "timeout"),
        "worker": (lambda x: buffer.watch(None, x), "worker"),
    }
    odd = [torch.zeros(3).to_sparse(), torch.zeros(3, dtype=torch.float8_e5m2), torch.zeros((), dtype=torch.complex64)]
    odd += [TensorDict({}, [3]), TensorDict({"a": torch.zeros(3).to_sparse()}, [3]), slice(None, "x"), [1, "x"], [[]]]
    for name, (call, wanted) in calls.items():
        for junk in [*JUNK, *odd]:
            rows, written = len(buffer), buffer.write_count
            try:
                call(junk)
            except ReapError as error:
                check_named(error, wanted.split("|"), (name, junk))
                assert (len(buffer), buffer.write_count) == (rows, written), name
            while buffer.transforms:
                buffer._set_transforms(Transforms([]))
            buffer.set_rng(None)
    buffer.watch(None)
    assert len(buffer.sample()) == 2


def test_powers_that_overflow_are_refused():
    """Not priorities without an end, which would make every sample the same row."""
    buffer = PrioritizedReplayBuffer(alpha=400.0, beta=1, storage=LazyTensorStorage(8), batch_size=2)
    buffer.extend(line(5))
    with pytest.raises(ReapError, match=r"priority 1e\+10 to the power of alpha=400"):
        buffer.update_priority(torch.tensor([0]), torch.tensor([1e10]))
    buffer.sample()
    buffer = PrioritizedReplayBuffer(alpha=1, beta=1, eps=0.0, storage=LazyTensorStorage(8), batch_size=2)
    buffer.extend(line(5))
    buffer.update_priority(torch.arange(5), torch.zeros(5))
    with pytest.raises(ReapError, match="every priority is zero"):
        buffer.sample()
