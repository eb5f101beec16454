"""What a policy returns by name: all of it is delivered, under those names, by every collector."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor, nn

from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.core.device.worker import DeviceWorker
from reap.envs import GymEnv, TorchEnv
from reap.envs.adapters.torch_native import DeviceTorchLanes, TorchLanes
from reap.errors import SpecMismatch, UsageError
from reap.modules import InferenceServer
from reap.testing import CountingEnv
from reap.testing.backend import counting_lanes
from tests.worlds.device import CountingDevice


class Out(NamedTuple):
    action: Tensor
    value: Tensor
    dist: dict


@dataclasses.dataclass
class Record:
    action: Tensor
    value: Tensor
    dist: dict
    attention: Tensor | None = None  # nothing is there: nothing is delivered


@tensorclass
class Classy:
    action: Tensor
    value: Tensor
    dist: TensorDict


def parts(observation):
    return {
        "action": observation.sum(-1, keepdim=True),
        "value": observation[..., 0] * 2,
        "dist": {"loc": observation + 1, "deep": {"scale": observation[..., 1].long()}},
    }


def as_dict(observation):
    return parts(observation)


def as_tensordict(observation):
    return TensorDict(parts(observation), batch_size=observation.shape[:-1])


def as_named_tuple(observation):
    return Out(**parts(observation))


def as_dataclass(observation):
    return Record(**parts(observation))


def as_tensorclass(observation):
    found = parts(observation)
    found["dist"] = TensorDict(found["dist"], batch_size=observation.shape[:-1])
    return Classy(**found, batch_size=observation.shape[:-1])


class Module(nn.Module):
    def forward(self, observation):
        return parts(observation)


def dict_of_tensordict(td):
    return parts(td["observation"])


def named_tuple_of_tensordict(td):
    return Out(**parts(td["observation"]))


KINDS = [
    as_dict,
    as_tensordict,
    as_named_tuple,
    as_dataclass,
    as_tensorclass,
    Module(),
    dict_of_tensordict,
    named_tuple_of_tensordict,
]
NAMES = [getattr(kind, "__name__", "module") for kind in KINDS]


def check(batch, reads=lambda batch: batch["observation"]):
    """Every part is there, frame by frame, and nothing else that a policy could have written."""
    expected = TensorDict(parts(reads(batch)), batch_size=batch.batch_size)
    for key, value in expected.items(True, True):
        assert torch.equal(batch[key], value), key
    extra = set(batch.keys()) - {"observation", "done", "terminated", "truncated", "next", "collector", "env_index"}
    assert extra - {"policy_version"} == {"action", "value", "dist"}


@pytest.mark.parametrize("policy", KINDS, ids=NAMES)
@pytest.mark.parametrize("lanes", [((3, 2),), ((3, 2), (2,))], ids=["single", "lanes"])
def test_all_of_it_is_delivered_under_its_names(policy, lanes):
    c = Collector(counting_lanes(lanes)(), policy, frames_per_batch=4 * len(lanes))
    for _ in range(3):
        check(c.next())


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_by_workers(kind):
    with kind([counting_lanes()] * 2, as_named_tuple, frames_per_batch=24) as c:
        check(c.next())


def test_by_ready_lanes():
    envs = [lambda: GymEnv(CountingEnv((3, 1)))] * 3
    for policy in (as_dict, dict_of_tensordict):
        with AsyncBatchedCollector(envs, policy, frames_per_batch=12) as c:
            check(c.next())


def test_by_an_inference_server():
    rows = TensorDict({"observation": torch.arange(12.0).reshape(4, 3)}, batch_size=[4])
    for policy in KINDS:
        with InferenceServer(policy, timeout=0.0, in_keys=["observation"]) as server:
            answer = server.client(policy_version_key=None)(rows)
        expected = TensorDict(parts(rows["observation"]), batch_size=[4])
        assert set(answer.keys(True, True)) == {"observation", *expected.keys(True, True)}, policy
        assert all(torch.equal(answer[key], value) for key, value in expected.items(True, True))


def test_by_lanes_on_a_device(monkeypatch):
    monkeypatch.setattr(TorchLanes, "on_device", lambda self: DeviceTorchLanes(self))
    c = Collector(TorchEnv(CountingDevice([(3, 1), (2,)])), as_dataclass, frames_per_batch=8)
    assert isinstance(c._backend.worker, DeviceWorker)
    check(c.next())


def test_a_carry_may_be_returned_under_its_own_name():
    class Counting(nn.Module):
        carry = {"hidden": torch.zeros(2)}

        def forward(self, observation, hidden):
            return {"hidden": hidden + 1, "action": hidden[..., :1], "seen": hidden}

    batch = Collector(counting_lanes(((9,), (9,)))(), Counting(), frames_per_batch=8).next()
    assert batch["hidden"][0, :, 0].tolist() == [0, 1, 2, 3]
    assert torch.equal(batch["next", "hidden"], batch["hidden"] + 1)
    assert torch.equal(batch["seen"], batch["hidden"])


def test_private_names_are_not_delivered():
    policy = lambda observation: {"action": observation[..., :1], "_cache": observation}  # noqa: E731
    assert "_cache" not in Collector(counting_lanes()(), policy, frames_per_batch=12).next().keys(True)


class Fickle:
    """Returns one thing less, or more, from its third call on: the first is a look at it."""

    def __init__(self, change):
        self.calls, self.change = 0, change

    def __call__(self, observation):
        self.calls += 1
        out = {"action": observation[..., :1], "value": observation}
        return self.change(out) if self.calls > 2 else out


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda out: {"action": out["action"]}, "value"), (lambda out: {**out, "late": out["value"]}, "late")],
    ids=["less", "more"],
)
def test_names_that_come_and_go_are_named(change, said):
    with pytest.raises(SpecMismatch, match=said):
        Collector(counting_lanes()(), Fickle(change), frames_per_batch=24).next()


@pytest.mark.parametrize(
    ("out", "error", "said"),
    [
        (lambda o: {"value": o}, UsageError, r"\['value'\] but not the env's action \['action'\]"),
        (lambda o: Out(o[..., :1], "high", {}), SpecMismatch, "'value' as str"),
        (lambda o: {"action": o[..., :1], "value": o.sum()}, SpecMismatch, "'value' of shape"),
        (lambda o: {"action": o[..., :1], "reward": o}, SpecMismatch, "'reward', a name"),
        (lambda o: {"action": o[..., :1], 3: o}, SpecMismatch, "3"),
    ],
)
def test_what_cannot_be_delivered_is_named(out, error, said):
    with pytest.raises(error, match=said):
        Collector(counting_lanes()(), lambda observation: out(observation), frames_per_batch=12)
