"""What a collector can be asked and told between two batches."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from tests.worlds.pairs import actor, assert_identical, assert_same_batches, collectors, differs, env_makers, run

pytestmark = pytest.mark.filterwarnings("ignore")


def made_with(lanes=None, kind="counting", **options):
    return collectors(env_makers(kind, lanes), lambda: actor(kind), **{"frames_per_batch": 12, **options})


@pytest.mark.parametrize(("frames", "total"), [(12, 36), (10, 25), (7, 7), (5, 3)])
@pytest.mark.parametrize("lanes", [None, 2])
def test_len(lanes, frames, total):
    made = made_with(lanes, frames_per_batch=frames, total_frames=total)
    assert len(made["reap"]) == len(made["torchrl"]) == len(run(made["reap"]))


def test_len_of_an_endless_collector():
    for collector in made_with().values():
        with pytest.raises(TypeError):
            len(collector)


@pytest.mark.parametrize("lanes", [None, 2])
def test_sizes(lanes):
    made = made_with(lanes, frames_per_batch=10)
    for what in ("frames_per_batch", "requested_frames_per_batch"):
        assert getattr(made["reap"], what) == getattr(made["torchrl"], what)


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split_trajs": True},
        pytest.param(
            {"device": "cpu"},
            marks=differs("next() keeps the batch's device entry"),
        ),
    ],
    ids=str,
)
def test_next(lanes, options):
    """One batch after another, then None."""
    made = made_with(lanes, total_frames=24, **options)
    for _ in range(2):
        assert_identical(made["reap"].next(), made["torchrl"].next())
    assert made["reap"].next() is None
    assert made["torchrl"].next() is None


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize(
    "options", [{}, {"split_trajs": True}, {"reset_at_each_iter": True}, {"postproc": lambda _: None}]
)
def test_rollout(lanes, options):
    """Neither split nor post-processed nor counted."""
    made = made_with(lanes, total_frames=12, **options)
    for _ in range(3):
        assert_identical(made["reap"].rollout().clone(), made["torchrl"].rollout().clone())


@pytest.mark.parametrize("lanes", [None, 2])
def test_rollout_between_batches(lanes):
    made = made_with(lanes)
    assert_same_batches(made, 1)
    assert_identical(made["reap"].rollout().clone(), made["torchrl"].rollout().clone())
    assert_same_batches(made, 1)


@pytest.mark.parametrize(("lanes", "index"), [(None, None), (None, "all"), (2, None), (2, "all"), (2, "some")])
def test_reset_between_batches(lanes, index):
    """A new episode and a new id for each lane that is reset, and only for those."""
    made = made_with(lanes, frames_per_batch=6)
    assert_same_batches(made, 1)
    mask = torch.tensor([True] * (lanes or 1)) if index == "all" else torch.tensor([False, True])
    for collector in made.values():
        if index is None:
            collector.reset()
        else:
            collector.reset(mask if lanes else mask[0])
    assert_same_batches(made, 2)


@pytest.mark.parametrize("lanes", [None, 2])
def test_iterated_again_after_break(lanes):
    made = made_with(lanes, total_frames=60)
    assert_same_batches(made, 2)
    assert_same_batches(made, 1)
    assert len(assert_same_batches(made, None)) == 2
    assert [run(c) for c in made.values()] == [[], []]


@pytest.mark.parametrize("lanes", [None, 2])
def test_iterator(lanes):
    made = made_with(lanes)
    for got, want, _ in zip(made["reap"].iterator(), made["torchrl"].iterator(), range(3)):
        assert_identical(got, want)


# ---- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "static"), [(0, False), (1, False), (2**32 - 2, False), (12345, True)])
@pytest.mark.parametrize("lanes", [None, 3])
def test_chain_of_seeds(lanes, seed, static):
    made = made_with(lanes, "CartPole-v1")
    got, want = (made[name].set_seed(seed, static_seed=static) for name in ("reap", "torchrl"))
    assert got == want
    envs = env_makers("CartPole-v1", lanes)
    got, want = (envs[name]().set_seed(seed, static_seed=static) for name in ("reap", "torchrl"))
    assert got == want


def test_the_chain_that_the_behaviour_notes_name():
    assert made_with()["reap"].set_seed(1) == 4087425277
    assert made_with(3)["reap"].set_seed(1) == 1864546186


@pytest.mark.parametrize("lanes", [None, 2])
def test_seeded_env(lanes):
    """The first `reset` after `set_seed` by hand shows the seeded state in reap; TorchRL's own reset came before it."""
    envs = env_makers("CartPole-v1", lanes)
    ours, theirs = envs["reap"](), envs["torchrl"]()
    assert ours.set_seed(7) == theirs.set_seed(7)
    ours.reset()
    assert_identical(ours.reset(), theirs.reset())


# ---- state ----------------------------------------------------------------------------------------------------------


def linear():
    torch.manual_seed(5)
    return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("lanes", [None, 2])
def test_state_dict(lanes):
    made = collectors(env_makers("vector", lanes), linear, frames_per_batch=12)
    assert_same_batches(made, 2)
    got, want = made["reap"].state_dict(), made["torchrl"].state_dict()
    assert want.keys() <= got.keys()
    assert got["frames"] == want["frames"] == 24
    assert list(got["policy_state_dict"]) == list(want["policy_state_dict"])
    for name, value in want["policy_state_dict"].items():
        assert torch.equal(got["policy_state_dict"][name], value)
    assert got["traj_pool"].keys() == want["traj_pool"].keys()


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_iter_in_state_dict(batches):
    made = made_with()
    for collector in made.values():
        for _ in range(batches):
            collector.next()
    assert made["reap"].state_dict()["iter"] == made["torchrl"].state_dict()["iter"]


@pytest.mark.parametrize("lanes", [None, 2])
def test_state_is_loaded(lanes):
    """Counters and weights come back; the remaining frames are delivered, with ids that were never used before."""

    def build():
        return collectors(env_makers("vector", lanes), linear, frames_per_batch=12, total_frames=48)

    old = build()
    used = assert_same_batches(old, 2)
    for collector in old.values():
        with torch.no_grad():
            collector.policy.module.weight.fill_(0.25)
    new = build()
    for name, collector in new.items():
        collector.load_state_dict(old[name].state_dict())
    left = {name: run(c) for name, c in new.items()}
    assert len(left["reap"]) == len(left["torchrl"]) == 2
    for name in new:
        assert bool((new[name].policy.module.weight == 0.25).all())
    last = max(b["collector", "traj_ids"].max().item() for b in used)
    assert left["reap"][0]["collector", "traj_ids"].min().item() > last


# ---- weights --------------------------------------------------------------------------------------------------------


class Own:
    """Each library's policy, and the collectors that use them."""

    def __init__(self, lanes, **options):
        self.policies = []

        def keep():
            self.policies.append(linear())
            return self.policies[-1]

        self.made = collectors(env_makers("vector", lanes), keep, frames_per_batch=6, **options)


def acted(policy, batch):
    """Whether these weights chose the actions of this batch."""
    return torch.allclose(policy.module(batch["observation"]), batch["action"], atol=1e-6)


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("options", [{}, {"policy_device": "cpu"}, {"device": "cpu"}], ids=str)
def test_update_without_an_argument(lanes, options):
    own = Own(lanes, **options)
    before = assert_same_batches(own.made, 1)
    for policy, collector in zip(own.policies, own.made.values()):
        with torch.no_grad():
            policy.module.weight.mul_(3)
        collector.update_policy_weights_()
    after = assert_same_batches(own.made, 1)
    assert acted(own.policies[1], after[0])
    assert not acted(own.policies[1], before[0])


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("form", ["positional", "weights"])
def test_update_from_a_tensordict(lanes, form):
    own = Own(lanes)
    assert_same_batches(own.made, 1)
    other = linear()
    with torch.no_grad():
        other.module.weight.mul_(-5)
    weights = TensorDict.from_module(other).data.clone()
    for collector in own.made.values():
        if form == "weights":
            collector.update_policy_weights_(weights=weights)
        else:
            collector.update_policy_weights_(weights)
    after = assert_same_batches(own.made, 1)
    assert acted(other, after[0])


def test_update_from_live_parameters():
    """TensorDict.from_module(policy) as it is, parameters that need grad and all."""
    own = Own(2)
    other = linear()
    with torch.no_grad():
        other.module.bias.add_(1)
    for collector in own.made.values():
        collector.update_policy_weights_(TensorDict.from_module(other))
    assert_same_batches(own.made, 1)
    for policy in own.policies:
        assert torch.equal(policy.module.bias, other.module.bias)
        assert policy.module.bias is not other.module.bias


@pytest.mark.parametrize("lanes", [None, 2])
def test_the_policy_is_the_one_given(lanes):
    """No policy_device, or one where the policy lives already: the very same object acts."""
    for options in ({}, {"policy_device": "cpu"}):
        own = Own(lanes, **options)
        for policy, collector in zip(own.policies, own.made.values()):
            assert list(map(id, policy.parameters())) == list(map(id, collector.policy.parameters()))


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [None, 2])
def test_shutdown_twice(lanes):
    for collector in made_with(lanes).values():
        next(iter(collector))
        collector.shutdown()
        collector.shutdown()


def test_stats():
    made = made_with(total_frames=24)
    assert_same_batches(made, 1)
    want = made["torchrl"].stats()
    got = made["reap"].stats()
    assert {name: got.get(name) for name in want} == want


def test_a_collector_is_an_iterable_dataset():
    for collector in made_with().values():
        assert isinstance(collector, torch.utils.data.IterableDataset)
