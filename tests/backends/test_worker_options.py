"""What a collector with workers checks itself, and asks each of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from reap.errors import UsageError
from reap.testing import CountingEnv, EchoPolicy
from reap.testing.backend import counting_lanes

SAID = "exploration_type is DETERMINISTIC, but the policy's action changes with the random seed"


class Sampling(nn.Module):
    def forward(self, observation):
        return torch.randn(*observation.shape[:-1], 1)


def test_what_is_asked_of_no_worker_changes_none():
    policy = EchoPolicy()
    with MultiSyncCollector([CountingEnv] * 2, policy, frames_per_batch=8) as c:
        policy.weight.data.fill_(2.0)
        c.update_policy_weights_(worker_ids=[])
        assert c.policy_version == 0
        assert float(c.next()["action"][..., 1:, :].abs().max()) > 0
        assert [float(w["weight"]) for w in c.map_fn("policy.state_dict")] == [1.0, 1.0]
        c.update_policy_weights_(worker_ids=torch.tensor([1]))
        assert [float(w["weight"]) for w in c.map_fn("policy.state_dict")] == [1.0, 2.0]
    Collector(CountingEnv(), policy, frames_per_batch=3).update_policy_weights_(worker_ids=[])


@pytest.mark.parametrize(("old", "new"), [("devices", "device"), ("passing_devices", "storing_device")])
def test_an_option_is_given_by_one_of_its_names(old, new):
    with pytest.warns(DeprecationWarning), pytest.raises(UsageError, match=f"{old} and {new} are the same option"):
        MultiSyncCollector([CountingEnv] * 2, frames_per_batch=8, **{old: "cpu", new: ["cpu", "cpu"]})
    with pytest.warns(DeprecationWarning):
        MultiSyncCollector([CountingEnv] * 2, frames_per_batch=8, **{old: "cpu", new: None}).shutdown()


@pytest.mark.parametrize("bad", [[0, 4], [4, -1], [4.5, 4], ["4", 4], [True, 8]])
def test_frames_of_each_worker_are_checked_here(bad):
    with pytest.raises(UsageError, match="frames_per_batch must be"):
        MultiSyncCollector([CountingEnv] * 2, frames_per_batch=bad)


def test_means_of_workers_count_episodes():
    with MultiSyncCollector(
        [lambda: CountingEnv((2,)), lambda: CountingEnv((20,))],
        lambda observation: observation[..., :1] * 0,
        frames_per_batch=40,
    ) as c:
        c.next()
        assert c.stats()["mean_length"] == pytest.approx((10 * 2 + 1 * 20) / 11)


def test_help_names_the_number_of_workers():
    import inspect

    for kind in (MultiSyncCollector, MultiAsyncCollector):
        assert inspect.signature(kind).parameters["num_workers"].default is None


def test_workers_warn_of_a_policy_once_and_here(capfd):
    """Not each of them, in its own process, where nobody can filter it."""
    with pytest.warns(UserWarning, match=SAID) as said:
        MultiSyncCollector(
            [counting_lanes()] * 2, Sampling(), frames_per_batch=12, exploration_type="deterministic"
        ).shutdown()
    assert len([one for one in said if SAID in str(one.message)]) == 1
    assert SAID not in capfd.readouterr().err


def test_each_worker_may_have_a_storing_device_of_its_own():
    options = {"frames_per_batch": 8, "total_frames": 32, "storing_device": ["cpu", None]}
    lanes = [lambda: CountingEnv((50,), 0), lambda: CountingEnv((50,), 1)]
    with MultiAsyncCollector(lanes, EchoPolicy(), **options) as c:
        found = {int(batch["observation"][0, 0]): batch.device for batch in c}
    assert found.keys() <= {0, 1}
    assert all(device == (None if lane else torch.device("cpu")) for lane, device in found.items())
    with MultiSyncCollector([CountingEnv] * 2, EchoPolicy(), **options) as c:
        assert c.next().device == torch.device("cpu")  # where several devices are joined
