"""Policies of whole TensorDicts on a TorchRL env's own: the same batches as on one built from columns."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from reap.collectors import Collector
from reap.envs.torchrl.root_policy import RootPolicy
from reap.envs.torchrl.rows import TorchRLRows
from reap.errors import SpecMismatch, WorkerRaised
from tests.worlds.pairs import LIBRARIES, assert_identical

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.envs import (
        CatFrames,
        Compose,
        GymEnv,
        InitTracker,
        ParallelEnv,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
    )
    from torchrl.testing import mocking_classes as mocks

pytestmark = pytest.mark.filterwarnings("ignore")


def gym():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


ENVS = {
    "one": lambda: TransformedEnv(gym(), Compose(InitTracker(), RewardSum(), StepCounter(9))),
    "lanes": lambda: TransformedEnv(SerialEnv(3, gym), StepCounter(9)),
    "frames": lambda: TransformedEnv(gym(), CatFrames(3, dim=-1, in_keys=["observation"])),
    "by hand": lambda: mocks.CountingEnv(max_steps=4),
    "batched by hand": lambda: mocks.CountingBatchedEnv(max_steps=torch.tensor([3, 5]), batch_size=[2]),
}


class Counts(TensorDictModuleBase):
    """Acts on how often it was asked in this episode, which it leaves in the TensorDict, once in the open."""

    in_keys, out_keys = ("observation",), ("action", "asked")

    def __init__(self, like, how="in place"):
        super().__init__()
        self._like, self._how = like, how

    def forward(self, td):
        before = td.get("_asked", None)
        asked = torch.zeros(*td.batch_size, 1) if before is None else before
        out = td if self._how != "another" else td.select("observation")
        out.set("asked", asked + td["observation"].float().sum(-1, keepdim=True) / 128)
        action = (asked.squeeze(-1) % 2) if self._like.ndim == td.ndim else (asked % 2).expand(self._like.shape)
        out.set("action", action.to(self._like.dtype))
        out.set("_asked", asked + 1)
        if self._how == "spoils":
            td["observation"].mul_(0)
        if self._how == "rewrites":
            out.set("observation", td["observation"] + 1)
        return None if self._how == "nothing" else out


def batches(make, how, *, lent=True, count=4, **options):
    torch.manual_seed(0)
    env = make()
    env.set_seed(1)
    action = env.rand_action(env.reset())["action"]
    frames = 8 * max(1, env.batch_size.numel())
    with pytest.MonkeyPatch.context() as patch:
        if not lent:
            patch.setattr(TorchRLRows, "wrap_policy", lambda self, policy: policy)
        collector = Collector(env, Counts(action, how), frames_per_batch=frames, capture=False, **options)
    acting = collector._backend.worker.policy
    assert isinstance(acting, RootPolicy) == lent
    found = [collector.next().clone() for _ in range(count)]
    collector.shutdown()
    return found


@pytest.mark.parametrize("how", ["in place", "nothing", "another", "spoils", "rewrites"])
@pytest.mark.parametrize("env", ENVS)
def test_the_same_as_on_columns(env, how):
    for ours, other in zip(batches(ENVS[env], how), batches(ENVS[env], how, lent=False)):
        assert_identical(ours, other)


@pytest.mark.parametrize("options", [{"reset_at_each_iter": True}, {"init_random_frames": 20}], ids=str)
@pytest.mark.parametrize("env", ["one", "lanes"])
def test_across_resets_and_random_frames(env, options):
    ours, other = (batches(ENVS[env], "in place", lent=lent, **options) for lent in (True, False))
    for one, two in zip(ours, other):
        assert_identical(one, two)


@pytest.mark.parametrize("env", ["one", "lanes"])
def test_nothing_of_an_ended_episode_is_found(env):
    for batch in batches(ENVS[env], "in place"):
        first = batch["step_count"] == 0
        asked = batch["asked"] - batch["observation"].sum(-1, keepdim=True) / 128
        assert first.any()
        assert torch.equal(asked.round(), batch["step_count"].float())


def test_what_a_policy_left_is_found_where_the_env_drops_it():
    """ParallelEnv makes a root of its own keys alone at every step; noise and counters would have no memory."""
    env = ParallelEnv(2, ENVS["one"], mp_start_method="fork")
    env.set_seed(1)
    collector = Collector(env, Counts(env.rand_action(env.reset())["action"]), frames_per_batch=24)
    batch = collector.next()
    collector.shutdown()
    assert batch["step_count"].max() > 5
    assert torch.equal(batch["action"], batch["step_count"].squeeze(-1) % 2)


def test_the_same_as_torchrl_where_episodes_do_not_end():
    made = {}
    for name, library in LIBRARIES.items():
        env = TransformedEnv(SerialEnv(2, gym), RewardSum())
        env.set_seed(3)
        policy = Counts(env.rand_action(env.reset())["action"])
        collector = library.collectors.Collector(env, policy, frames_per_batch=12)
        made[name] = next(iter(collector)).clone()
        collector.shutdown()
    assert_identical(made["reap"], made["torchrl"])


@pytest.mark.parametrize("env", ["by hand", "batched by hand"])
def test_an_observation_written_again_is_written_even_if_it_was_equal_at_first(env):
    """Counters begin at 0, and twice 0 is 0."""

    class Doubles(Counts):
        def forward(self, td):
            td["observation"] = td["observation"] * 2
            return td.set("action", torch.ones_like(self._like))

    made = {}
    for name, library in LIBRARIES.items():
        made_env = ENVS[env]()
        policy = Doubles(made_env.rand_action(made_env.reset())["action"])
        collector = library.collectors.Collector(made_env, policy, frames_per_batch=6 * made_env.batch_size.numel())
        made[name] = next(iter(collector)).clone()
        collector.shutdown()
    assert made["torchrl"]["observation"].max() > made["torchrl"]["next", "observation"].max()
    assert_identical(made["reap"], made["torchrl"])


@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("env", ["one", "lanes"])
def test_branches_a_policy_writes_keep_their_batch_dimensions(env, lent, monkeypatch):
    class Branches(Counts):
        def forward(self, td):
            team = TensorDict({"value": torch.ones(*td.batch_size, 3, 2)}, [*td.batch_size, 3])
            return super().forward(td).set("team", team.set(("of", "it"), torch.ones(*td.batch_size, 3)))

    if not lent:
        monkeypatch.setattr(TorchRLRows, "wrap_policy", lambda self, policy: policy)
    made = {}
    for name, library in LIBRARIES.items():
        made_env = ENVS[env]()
        policy = Branches(made_env.rand_action(made_env.reset())["action"])
        collector = library.collectors.Collector(made_env, policy, frames_per_batch=12)
        made[name] = next(iter(collector)).clone()
        collector.shutdown()
    assert made["torchrl"]["team"].ndim == made["torchrl"].ndim + 1
    assert_identical(made["reap"]["team"], made["torchrl"]["team"])


def test_flags_that_were_only_copied_are_not_outputs():
    class Copies(Counts):
        def forward(self, td):
            return td.update(super().forward(td.clone()))

    env = ENVS["one"]()
    collector = Collector(env, Copies(env.rand_action(env.reset())["action"]), frames_per_batch=20)
    assert {"done", "step_count"}.isdisjoint(key[0] for key in collector._backend.worker.policy.outputs)
    collector.shutdown()


@pytest.mark.parametrize("env", ["CountingEnvWithString", "EnvWithMetadata", "EnvWithDynamicSpec"])
def test_frames_of_a_policy_that_returns_its_outputs_alone_are_whole(env):
    class Alone(Counts):
        def forward(self, td):
            return td.empty().set("action", torch.ones_like(self._like))

    made = {}
    for name, library in LIBRARIES.items():
        made_env = getattr(mocks, env)()
        made_env.set_seed(0)
        torch.manual_seed(0)
        policy = Alone(made_env.rand_action(made_env.reset())["action"])
        collector = library.collectors.Collector(made_env, policy, frames_per_batch=6)
        made[name] = next(iter(collector))
        collector.shutdown()
    assert set(made["reap"].keys(True)) == set(made["torchrl"].keys(True))


def test_broken_off_it_begins_anew():
    """Nothing the policy left in the root of before is found."""
    env, calls = ENVS["one"](), [0]
    policy = Counts(env.rand_action(env.reset())["action"])
    collector = Collector(env, policy, frames_per_batch=8)
    collector.next()
    honest = env.step_and_maybe_reset

    def step(root):
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return honest(root)

    env.step_and_maybe_reset = step
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    batch = collector.next()
    assert torch.equal(batch["action"], batch["step_count"].squeeze(-1) % 2)
    collector.shutdown()


def test_an_output_that_goes_missing_is_named():
    class Forgets(Counts):
        calls = 0

        def forward(self, td):
            Forgets.calls += 1
            out = super().forward(td)
            return out.exclude("asked") if Forgets.calls > 5 else out

    env = ENVS["one"]()
    collector = Collector(env, Forgets(env.rand_action(env.reset())["action"], "another"), frames_per_batch=20)
    with pytest.raises((SpecMismatch, WorkerRaised), match="did not write 'asked'"):
        collector.next()
    collector.shutdown()
