"""What is done with a batch after it came: the same operations work on it, with the same results."""

import copy
import functools
import io
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.worlds.pairs import actor, assert_identical, collectors, differs, env_makers

pytestmark = pytest.mark.filterwarnings("ignore")


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


OPERATIONS = {
    "reshape": lambda td: td.reshape(-1),
    "flatten": lambda td: td.flatten(0, td.ndim - 1),
    "permute": lambda td: td.transpose(0, -1).contiguous(),
    "split": lambda td: TensorDict.cat(list(td.reshape(-1).split(5))),
    "index": lambda td: td[..., 2:5],
    "shuffle": lambda td: td.reshape(-1)[torch.arange(11, -1, -1)],
    "unbind": lambda td: torch.stack(list(td.unbind(-1)), -1),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td], -1),
    "clone": lambda td: td.clone(),
    "deepcopy": copy.deepcopy,
    "contiguous": lambda td: td.contiguous(),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "save a copy": lambda td: saved(td.clone()),
    "memmap": lambda td: td.memmap().to_tensordict(),
    "share memory": lambda td: td.share_memory_().to_tensordict(),
    "consolidate": lambda td: td.consolidate().to_tensordict(),
    "float64": lambda td: td.to(torch.float64),
    "dict": lambda td: TensorDict(td.to_dict(), td.batch_size),
    "set": lambda td: td.set("more", td["next", "reward"] * 2).set_(("next", "done"), td["next", "done"] | True),
    "in place": lambda td: (td["observation"].add_(1), td["next", "reward"].mul_(2), td)[-1],
    "delete": lambda td: (td.pop("scores"), td)[-1],
    "rename": lambda td: td.rename_key_("action", "old_action"),
    "gather": lambda td: td.gather(-1, torch.zeros(*td.shape[:-1], 2, dtype=torch.int64)),
    "where": lambda td: torch.where(td["next", "done"].squeeze(-1), td, td.apply(torch.zeros_like)),
    "save": lambda td: saved(td),
    "save as dict": lambda td: TensorDict(saved(td.to_dict()), td.batch_size),
}
VIEWS = {
    "view": lambda td: td.view(-1),
    "view a column": lambda td: TensorDict(reward=td["next", "reward"].view(-1)),
}


@functools.cache
def endless(kind, lanes):
    """Collectors that go on from test to test, step by step with each other."""
    return collectors(env_makers(kind, lanes), lambda: actor(kind), frames_per_batch=12)


def fresh(lanes, kind="counting"):
    """The next batch of reap, and the same one of TorchRL."""
    made = endless(kind, lanes)
    return next(iter(made["reap"])), next(iter(made["torchrl"]))


def compare(operation, lanes):
    ours, theirs = fresh(lanes)
    assert_identical(ours, theirs)
    assert_identical(operation(ours), operation(theirs))


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name, lanes):
    compare(OPERATIONS[name], lanes)


STRIDED = differs("lanes are a transposed view of time-major memory: view(-1) wants .contiguous()", RuntimeError)


@pytest.mark.parametrize("lanes", [None, pytest.param(2, marks=STRIDED)])
@pytest.mark.parametrize("name", VIEWS)
def test_view(name, lanes):
    compare(VIEWS[name], lanes)


@pytest.mark.parametrize("lanes", [None, 2])
def test_size_of_a_pickle(lanes):
    ours, theirs = fresh(lanes, "pixels")
    assert len(pickle.dumps(ours)) < 2 * len(pickle.dumps(theirs))


@pytest.mark.parametrize("lanes", [None, 2])
def test_numpy(lanes):
    got, want = (batch.numpy() for batch in fresh(lanes))
    assert got["next"].keys() == want["next"].keys()
    for key in want["next"]:
        assert np.array_equal(got["next"][key], want["next"][key])


@pytest.mark.parametrize("lanes", [None, 2])
def test_changing_a_batch_does_not_change_what_comes(lanes):
    for batch in fresh(lanes):
        batch.apply_(lambda x: x.fill_(1))
    assert_identical(*fresh(lanes))
