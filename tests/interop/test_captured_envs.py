"""TorchRL's transformed envs, captured: the same batches and the same statistics as TorchRL's own collector's."""

from __future__ import annotations

import io
import threading
import types

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector as TheirCollector
from torchrl.data import Unbounded
from torchrl.envs import (
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    DTypeCastTransform,
    EndOfLifeTransform,
    FlattenObservation,
    FrameSkipTransform,
    GrayScale,
    GymEnv,
    GymWrapper,
    InitTracker,
    NoopResetEnv,
    ObservationNorm,
    RandomTruncationTransform,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    TensorDictPrimer,
    ToTensorImage,
    TrajCounter,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.envs.transforms import Transform

from reap.collectors import Collector
from reap.envs.torchrl.captured import CapturedRows
from tests import example_count

CHAINS = {
    "StepCounter": lambda: [StepCounter()],
    "StepCounter that ends": lambda: [StepCounter(max_steps=7)],
    "RewardSum": lambda: [RewardSum()],
    "InitTracker": lambda: [InitTracker()],
    "ObservationNorm": lambda: [ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"])],
    "ObservationNorm, standard": lambda: [
        ObservationNorm(loc=torch.tensor(0.5), scale=torch.tensor(2.0), in_keys=["observation"], standard_normal=True)
    ],
    "VecNorm": lambda: [VecNorm(in_keys=["observation"])],
    "VecNorm of rewards": lambda: [VecNorm(in_keys=["observation", "reward"], decay=0.9)],
    "VecNormV2": lambda: [VecNormV2(in_keys=["observation"])],
    "RewardScaling": lambda: [RewardScaling(loc=0.1, scale=3.0)],
    "RewardClipping": lambda: [RewardClipping(-0.5, 0.5)],
    "SignTransform": lambda: [SignTransform(in_keys=["reward"])],
    "ClipTransform": lambda: [ClipTransform(in_keys=["observation"], low=-0.02, high=0.02)],
    "Unsqueeze": lambda: [UnsqueezeTransform(-1, in_keys=["observation"], out_keys=["wide"])],
    "Unsqueeze, Squeeze": lambda: [
        UnsqueezeTransform(-1, in_keys=["observation"], out_keys=["wide"]),
        SqueezeTransform(-1, in_keys=["wide"], out_keys=["narrow"]),
    ],
    "CatTensors": lambda: [
        RewardSum(),
        CatTensors(in_keys=["observation", "episode_reward"], out_key="both", del_keys=False),
    ],
    "CatFrames": lambda: [CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["stack"])],
    "Rename": lambda: [RenameTransform(in_keys=["reward"], out_keys=["raw"], create_copy=True)],
    "DTypeCast": lambda: [
        DTypeCastTransform(torch.float32, torch.float64, in_keys=["observation"], out_keys=["double"])
    ],
    "Flatten": lambda: [
        UnsqueezeTransform(-1, in_keys=["observation"], out_keys=["wide"]),
        FlattenObservation(-2, -1, in_keys=["wide"]),
    ],
    "TrajCounter": lambda: [TrajCounter(), RewardSum()],
    "RandomTruncation": lambda: [StepCounter(), RandomTruncationTransform(3, 12, prob=0.6, first_episode_prob=0.3)],
    "RandomTruncation, once": lambda: [StepCounter(), RandomTruncationTransform(3, 12)],
    "as PPO": lambda: [
        VecNorm(in_keys=["observation"], decay=0.99999, eps=1e-2),
        ClipTransform(in_keys=["observation"], low=-10, high=10),
        RewardSum(),
        StepCounter(max_steps=40),
    ],
}
FORMS = {
    "one": lambda chain: TransformedEnv(GymEnv("CartPole-v1"), Compose(*chain())),
    "around": lambda chain: TransformedEnv(SerialEnv(3, lambda: GymEnv("CartPole-v1")), Compose(*chain())),
    "inside": lambda chain: SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), Compose(*chain()))),
    "both": lambda chain: TransformedEnv(
        SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), Compose(*chain()))), InitTracker(init_key="begun")
    ),
    "nested": lambda chain: TransformedEnv(
        TransformedEnv(GymEnv("CartPole-v1"), InitTracker(init_key="begun")), Compose(*chain())
    ),
}


class Leans(nn.Module):
    """An action that follows from the observation; changes its mind now and then, so that episodes differ."""

    def forward(self, observation):
        left = (observation[..., 2] + 0.3 * observation[..., 0].sin()) < 0
        return nn.functional.one_hot(left.long(), 2)


def flat(state, at=()):
    for key, value in state.items():
        if hasattr(value, "items"):
            yield from flat(value, (*at, key))
        elif isinstance(value, torch.Tensor):
            yield (*at, key), value.clone()


def collected(cls, make, frames=96, batches=3, between=None, **options):
    env = make()
    env.set_seed(3)
    torch.manual_seed(3)
    policy = TensorDictModule(Leans(), in_keys=["observation"], out_keys=["action"])
    collector = cls(env, policy, frames_per_batch=frames, total_frames=frames * batches, **options)
    found, state = [], {}
    for n, batch in enumerate(collector):
        found.append(batch.clone())
        if n < batches - 1:  # with the last batch TorchRL's collector closes the env
            state = dict(flat(env.state_dict()))
        if between is not None:
            between(env, n)
    ours = getattr(collector, "_backend", None)
    lanes = None if ours is None else ours.worker.env
    collector.shutdown()
    return found, state, lanes


def assert_the_same(make, *, captured=True, **options):
    theirs, their_state, _ = collected(TheirCollector, make, **options)
    ours, our_state, lanes = collected(Collector, make, **options)
    assert isinstance(lanes, CapturedRows) == captured, lanes
    assert not captured or lanes.why is None, lanes.why
    for a, b in zip(theirs, ours):
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        for key in a.keys(True, True):
            assert a[key].dtype is b[key].dtype, key
            assert torch.equal(a[key], b[key]), key
    assert our_state.keys() == their_state.keys()
    for key, value in their_state.items():
        assert torch.equal(value, our_state[key]), key
    return lanes


@pytest.mark.parametrize(
    "form", ["one", "around", "inside", *(pytest.param(name, marks=pytest.mark.slow) for name in ("both", "nested"))]
)
@pytest.mark.parametrize("chain", CHAINS)
def test_each_transform(chain, form):
    assert_the_same(lambda: FORMS[form](CHAINS[chain]))


@pytest.mark.parametrize("form", ["one", "around"])
@pytest.mark.parametrize("options", [{"max_frames_per_traj": 9}, {"reset_at_each_iter": True}, {"frames": 12}], ids=str)
def test_with_options_that_end_episodes(options, form):
    assert_the_same(lambda: FORMS[form](CHAINS["VecNorm of rewards"]), **options)


def test_resets_stay_bound_for_a_few_sets_of_lanes_only(monkeypatch):
    """With many lanes hardly two resets are of the same ones: what is kept of them may not grow with the rollout."""
    monkeypatch.setattr("reap.envs.torchrl.captured._RUNS", 2)
    lanes = assert_the_same(lambda: FORMS["around"](CHAINS["VecNorm of rewards"]), frames=300)
    (reset,) = (one for one in lanes._resets.values() if not isinstance(one, int))
    assert len(reset.runs) == 2


@settings(max_examples=example_count(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chain=st.permutations(
        [
            "StepCounter that ends",
            "RewardSum",
            "InitTracker",
            "VecNorm",
            "ObservationNorm",
            "RewardScaling",
            "ClipTransform",
            "CatFrames",
            "DTypeCast",
        ]
    ),
    length=st.integers(1, 6),
    form=st.sampled_from(["one", "around", "inside"]),
)
def test_chains_in_any_order(chain, length, form):
    def transforms():
        return [transform for name in chain[:length] for transform in CHAINS[name]()]

    assert_the_same(lambda: FORMS[form](transforms), frames=48, batches=2)


class LooksAtValues(Transform):
    """Not to be captured: what it does follows from what it sees."""

    def __init__(self):
        super().__init__(in_keys=["observation"], out_keys=["observation"])

    def _apply_transform(self, observation):
        return observation * 2 if observation.sum() > 0 else observation

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


class Counts(Transform):
    """Not to be captured: it keeps count in Python."""

    def __init__(self):
        super().__init__(in_keys=["observation"], out_keys=["observation"])
        self.steps = 0

    def _apply_transform(self, observation):
        self.steps += 1
        return observation + self.steps

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


@pytest.mark.parametrize("make", [LooksAtValues, Counts])
def test_a_transform_that_cannot_be_captured_is_torchrls(make):
    assert_the_same(lambda: FORMS["one"](lambda: [make(), RewardSum()]), captured=False)


class OwnClip(ClipTransform):
    """A subclass may do anything."""

    def _apply_transform(self, observation):
        return super()._apply_transform(observation) * 2


def test_a_subclass_of_a_known_transform_is_torchrls():
    assert_the_same(lambda: FORMS["one"](lambda: [OwnClip(in_keys=["observation"], low=-1, high=1)]), captured=False)


def freeze(env, n):
    if n == 0:
        env.transform[0].freeze()


def append(env, n):
    if n == 0:
        env.append_transform(RewardScaling(loc=0.0, scale=2.0))


def rescale(env, n):
    env.transform[0].loc.add_(1) if n == 0 else env.transform[0].scale.mul_(2)


@pytest.mark.parametrize("form", ["one", "around"])
@pytest.mark.parametrize(
    ("chain", "between"),
    [("VecNorm", freeze), ("VecNorm of rewards", append), ("ObservationNorm, standard", rescale)],
    ids=["frozen", "appended", "rescaled"],
)
def test_a_transform_changed_between_batches(chain, between, form):
    assert_the_same(lambda: FORMS[form](CHAINS[chain]), between=between)


@pytest.mark.parametrize("chain", ["ObservationNorm, standard", "VecNorm"])
def test_resets_that_stay_bound_see_what_was_changed(chain):
    """What a recorded reset was bound with is looked at again in each rollout."""

    def change(env, n):
        if chain == "VecNorm":
            env.transform[0].frozen = bool(n % 2)
        else:
            env.transform[0].scale.numpy()[...] += 0.5  # behind torch's back

    assert_the_same(lambda: FORMS["around"](CHAINS[chain]), between=change, frames=300)


class CountsSeldom(Transform):
    """Counts where no recording would notice: in a namespace of the program, and to many before it does anything."""

    def _call(self, next_tensordict):
        COUNTED.steps += 1
        next_tensordict["observation"] = next_tensordict["observation"] * (1 if COUNTED.steps < 60 else 2)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset


COUNTED = types.SimpleNamespace(steps=0)


def append_own(env, n):
    if n == 0:
        COUNTED.steps = 0
        env.append_transform(CountsSeldom())


def replace_method(env, n):
    if n == 0:
        clip = env.transform[0]
        COUNTED.steps, inner = 0, clip._apply_transform

        def counted(observation):
            COUNTED.steps += 1
            return inner(observation) * (1 if COUNTED.steps < 60 else 2)

        clip._apply_transform = counted


@pytest.mark.parametrize(("change", "name"), [(append_own, "CountsSeldom"), (replace_method, "ClipTransform")])
def test_code_of_the_users_own_that_comes_later_is_torchrls(change, name):
    def make():
        return FORMS["one"](lambda: [ClipTransform(in_keys=["observation"], low=-1, high=1), RewardSum()])

    (theirs, *_), (ours, _, lanes) = (collected(cls, make, between=change) for cls in (TheirCollector, Collector))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(theirs, ours) for key in a.keys(True, True))
    assert lanes.why == f"{name} is not a transform that reap can replay"


def doubled(env):
    """An env with a method of its owner's in place of its own."""
    env.read_reward = lambda reward: type(env).read_reward(env, reward) * 2
    return env


@pytest.mark.parametrize("form", ["one", "lanes", "transformed lanes", "lanes, later"])
def test_a_method_replaced_in_an_env_is_called(form):
    def make():
        change = (lambda env: env) if form == "lanes, later" else doubled
        if form == "one":
            return change(GymEnv("CartPole-v1"))
        lanes = SerialEnv(2, lambda: change(GymEnv("CartPole-v1")))
        return lanes if form == "lanes" else TransformedEnv(lanes, RewardSum())

    def later(env, n):
        if n == 0 and form == "lanes, later":
            doubled(env.base_env._envs[1])

    theirs, ours = (collected(cls, make, between=later)[0] for cls in (TheirCollector, Collector))
    assert theirs[-1]["next", "reward"].max() == 2
    assert all(torch.equal(a[key], b[key]) for a, b in zip(theirs, ours) for key in a.keys(True, True))


def test_nothing_is_captured_where_that_is_switched_off():
    _, _, lanes = collected(Collector, lambda: FORMS["one"](CHAINS["as PPO"]), capture=False)
    assert lanes._captured is None


def test_mujoco_in_doubles():
    def make():
        base = SerialEnv(2, lambda: GymEnv("HalfCheetah-v5"))
        return TransformedEnv(base, Compose(*CHAINS["as PPO"](), DoubleToFloat(in_keys=["observation"])))

    class Runs(nn.Module):
        def forward(self, observation):
            return observation[..., :6].tanh()

    found = {}
    for cls in (TheirCollector, Collector):
        env = make()
        env.set_seed(0)
        collector = cls(
            env, TensorDictModule(Runs(), ["observation"], ["action"]), frames_per_batch=100, total_frames=300
        )
        found[cls] = [batch.clone() for batch in collector]
        collector.shutdown()
    for a, b in zip(found[TheirCollector], found[Collector]):
        for key in a.keys(True, True):
            assert np.array_equal(a[key].numpy(), b[key].numpy()), key


def test_looking_at_the_env_changes_nothing():
    """`collector.env` is the user's env, moved by hand from now on; that nobody moved it is known."""
    make = lambda: FORMS["around"](CHAINS["as PPO"])  # noqa: E731
    found = []
    for look in (False, True):
        env = make()
        env.set_seed(3)
        policy = TensorDictModule(Leans(), in_keys=["observation"], out_keys=["action"])
        collector = Collector(env, policy, frames_per_batch=96)
        if look:
            assert collector.env is env
        found.append([collector.next().clone() for _ in range(3)])
        assert "replays the torch calls" in collector.explain()
        collector.shutdown()
    for a, b in zip(*found):
        for key in a.keys(True, True):
            assert torch.equal(a[key], b[key]), key


def test_a_learner_in_another_thread_loses_no_update():
    """While a policy is recorded and compared, nothing is written to its parameters."""
    policy = nn.Linear(4, 2)
    collector = Collector("CartPole-v1", policy, frames_per_batch=2)
    stop, steps = threading.Event(), [0]

    def learn():
        while not stop.is_set():
            with torch.no_grad():
                policy.bias += 1
            steps[0] += 1

    with torch.no_grad():
        policy.bias.zero_()
    learner = threading.Thread(target=learn)
    learner.start()
    for _ in range(40):
        collector.next()
    stop.set()
    learner.join()
    collector.shutdown()
    assert torch.equal(policy.bias.detach(), torch.full((2,), float(steps[0]))) or steps[0] > 2**24


def atari(lanes):
    gym.register_envs(ale_py)

    def one():
        return TransformedEnv(
            GymEnv("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0, categorical_action_encoding=True),
            Compose(
                NoopResetEnv(noops=5),
                FrameSkipTransform(4),
                EndOfLifeTransform(),
                ToTensorImage(in_keys=["pixels"]),
                GrayScale(in_keys=["pixels"]),
                CatFrames(N=2, dim=-3, in_keys=["pixels"]),
                RewardSum(),
                StepCounter(max_steps=60),
            ),
        )

    return one() if lanes == 1 else SerialEnv(lanes, one)


class Cycles(nn.Module):
    """Actions that follow from the number of the step."""

    def forward(self, step_count):
        return (step_count.squeeze(-1) * 7 + step_count.squeeze(-1) // 5) % 4


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_atari_script(lanes):
    """Lives are asked of the env at each step; steps are repeated; resets make steps of their own."""

    def batches(cls):
        torch.manual_seed(0)
        env = atari(lanes)
        env.set_seed(3)
        policy = TensorDictModule(Cycles(), in_keys=["step_count"], out_keys=["action"])
        collector = cls(env, policy, frames_per_batch=100, total_frames=300)
        found = [batch.clone() for batch in collector]
        lanes_env = getattr(collector, "_backend", None) and collector._backend.worker.env
        collector.shutdown()
        return found, lanes_env

    theirs, _ = batches(TheirCollector)
    ours, captured = batches(Collector)
    assert isinstance(captured, CapturedRows)
    assert captured.why is None
    for a, b in zip(theirs, ours):
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        for key in a.keys(True, True):
            assert a[key].dtype is b[key].dtype, key
            assert torch.equal(a[key], b[key]), key
    assert any(batch["next", "end-of-life"].any() for batch in theirs)


class Guesses(nn.Module):
    """Draws from torch's generator, as resets do."""

    def forward(self, observation):
        return nn.functional.one_hot((torch.rand(observation.shape[:-1]) < 0.5).long(), 2)


@pytest.mark.parametrize("default", ["random", "function"])
def test_random_first_values_and_those_of_a_function(default):
    """A reset that draws uses up as many random numbers as ever; a function of somebody's is called as often."""

    def batches(**capture):
        torch.manual_seed(0)
        made = iter(range(10_000))
        options = (
            {"random": True}
            if default == "random"
            else {"default_value": lambda: torch.full((3, 3), float(next(made)))}
        )
        primer = TensorDictPrimer({"h": Unbounded((3,))}, expand_specs=True, **options)
        env = TransformedEnv(SerialEnv(3, lambda: GymEnv("CartPole-v1")), primer)
        env.set_seed(3)
        policy = TensorDictModule(Guesses(), in_keys=["observation"], out_keys=["action"])
        collector = Collector(env, policy, frames_per_batch=150, total_frames=750, **capture)
        found = [batch.clone() for batch in collector]
        collector.shutdown()
        return found

    for a, b in zip(batches(capture=False), batches()):
        for key in ("h", "action", "observation", ("next", "h")):
            assert torch.equal(a[key], b[key]), key


def test_an_env_is_never_stepped_in_inference_mode():
    class Watches(gym.Wrapper):
        seen = set()

        def step(self, action):
            self.seen.add(torch.is_inference_mode_enabled())
            return self.env.step(action)

        def reset(self, **kwargs):
            self.seen.add(torch.is_inference_mode_enabled())
            return self.env.reset(**kwargs)

    base = SerialEnv(2, lambda: GymWrapper(Watches(gym.make("CartPole-v1"))))
    env = TransformedEnv(base, Compose(*CHAINS["as PPO"]()))
    collector = Collector(env, TensorDictModule(Leans(), ["observation"], ["action"]), frames_per_batch=200)
    for _ in range(3):
        next(iter(collector))
    assert "replays" in collector.explain()
    assert Watches.seen == {False}
    collector.shutdown()


def reset_by_hand(env, n):
    env.reset()


@pytest.mark.parametrize("chain", ["VecNorm", "VecNormV2"])
def test_an_env_its_owner_resets_between_batches(chain):
    """Statistics see what lanes began with that go on while others begin anew, whoever has reset them."""
    assert_the_same(lambda: FORMS["around"](CHAINS[chain]), between=reset_by_hand, batches=5)


class Probabilities(nn.Module):
    """Probabilities where a choice is expected, as an OneHotCategorical's mean is."""

    def forward(self, observation):
        return torch.stack([observation[..., 0].sigmoid(), 1 - observation[..., 0].sigmoid()], -1)


@pytest.mark.parametrize("form", ["one", "around"])
def test_probabilities_are_cut_to_whole_numbers_as_torchrl_does(form):
    found = []
    for cls in (TheirCollector, Collector):
        env = FORMS[form](CHAINS["RewardSum"])
        env.set_seed(3)
        policy = TensorDictModule(Probabilities(), in_keys=["observation"], out_keys=["action"])
        collector = cls(env, policy, frames_per_batch=60, total_frames=60)
        found.append(collector.next().clone())
        collector.shutdown()
    theirs, ours = found
    for key in theirs.keys(True, True):
        assert torch.equal(theirs[key], ours[key]), key


def test_another_collector_goes_on_with_what_lanes_began_with():
    def make():
        torch.manual_seed(3)
        policy = TensorDictModule(Leans(), in_keys=["observation"], out_keys=["action"])
        return Collector(FORMS["around"](CHAINS["VecNorm"]), policy, frames_per_batch=96, total_frames=-1)

    first, second = make(), make()
    first.set_seed(7)
    for _ in range(3):
        first.next()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    expected = [first.next().clone() for _ in range(3)]
    second.next()
    second.load_state_dict(state)
    for wanted in expected:
        got = second.next()
        for key in wanted.keys(True, True):
            assert torch.equal(wanted[key], got[key]), key
    first.shutdown()
    second.shutdown()


def test_no_more_sets_of_lanes_are_counted_than_are_recorded(monkeypatch):
    monkeypatch.setattr("reap.envs.torchrl.captured._PATTERNS", 1)
    lanes = assert_the_same(lambda: FORMS["inside"](CHAINS["StepCounter"]), frames=300)
    assert len(lanes._resets) == 1
