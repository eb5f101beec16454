"""Bad input: a clear error that names what was given and what is expected, and loses nothing."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from reap.collectors import Collector, RandomPolicy
from reap.envs import GymEnv, SerialEnv
from reap.errors import SpecMismatch, UsageError, WorkerRaised, WrongArgument, WrongState
from reap.spec import Leaf
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same


class Broken(CountingEnv):
    """A CountingEnv that misbehaves at one step of its life: `how` replaces what that step would return."""

    def __init__(self, how, at=5, **kwargs):
        super().__init__(**kwargs)
        self.how, self.at, self.steps = how, at, 0

    def step(self, action):
        self.steps += 1
        result = super().step(action)
        return self.how(*result) if self.steps == self.at else result


def change_observation(to):
    return lambda obs, *rest: (to, *rest)


def raise_(error):
    def how(*_):
        raise error

    return how


def test_unknown_option_names_the_nearest():
    with pytest.raises(TypeError, match="no option 'frame_per_batch'; did you mean 'frames_per_batch'"):
        Collector(CountingEnv(), frame_per_batch=3)
    with pytest.raises(TypeError, match="no option 'zzz'$"):
        Collector(CountingEnv(), frames_per_batch=3, zzz=1)


def test_options_that_come_later_say_so():
    with pytest.raises(UsageError, match="does not support collector_class yet"):
        Collector(CountingEnv(), frames_per_batch=3, collector_class="MyCollector")
    with pytest.raises(UsageError, match="secret_file"):
        Collector(CountingEnv, frames_per_batch=3, backend="distributed", backend_options={"launcher": "join"})


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, TypeError, "needs frames_per_batch"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be at least 1, got 0"),
        ({"frames_per_batch": 2.5}, TypeError, "frames_per_batch must be a whole number, got 2.5"),
        ({"frames_per_batch": True}, TypeError, "whole number"),
        ({"frames_per_batch": 3, "total_frames": "many"}, TypeError, "total_frames must be a whole number"),
        ({"frames_per_batch": 3, "postproc": 3}, TypeError, "postproc must be callable, got int"),
        ({"frames_per_batch": 3, "interruptor": 3}, TypeError, "collection_stopped"),
        ({"frames_per_batch": 3, "device": "gpux"}, TypeError, "device must name a device, got 'gpux'"),
        ({"frames_per_batch": 3, "track_policy_version": "yes"}, TypeError, "track_policy_version"),
        ({"frames_per_batch": 3, "policy": 3}, TypeError, "policy must be a module"),
    ],
)
def test_wrong_values(options, kind, message):
    with pytest.raises(kind, match=message):
        Collector(CountingEnv(), **options)


@pytest.mark.parametrize("env", [3, None, object(), lambda: 3])
def test_what_is_not_an_env(env):
    with pytest.raises(WrongArgument, match="create_env_fn must be an env, a Gymnasium id or a factory"):
        Collector(env, frames_per_batch=3)


def test_lanes_with_different_spaces_print_both():
    with pytest.raises(SpecMismatch, match="lane 1 has observation_space.*lane 0 has Box"):
        SerialEnv(2, ["CartPole-v1", "Acrobot-v1"])


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (np.zeros(4, np.float32), r"lane 1, step 1.*float32\[4\].*float32\[3\]"),
        (np.zeros((3, 1), np.float32), r"lane 1, step 1.*float32\[3, 1\]"),
        (np.zeros(1, np.float32), r"float32\[1\]"),  # would broadcast silently
        (np.zeros(3, np.complex64), "complex64"),
        (np.array(["a", "b", "c"]), "U1"),
        (7.0, r"float64\[\]"),
        (None, r"object\[\]"),
    ],
)
def test_observation_that_changes_its_shape_or_dtype(to, message):
    def make():
        return SerialEnv(2, [CountingEnv, lambda: Broken(change_observation(to), lane=1)])

    c = Collector(make(), EchoPolicy(), frames_per_batch=6)
    kept = c.next()
    with pytest.raises(SpecMismatch, match=message):
        c.next()
    assert_same(kept, CountingWorld([(3, 1, 5)] * 2).batch(3) | {})  # frames delivered before stay valid
    with pytest.raises(WrongState, match="closed: it failed"):
        c.next()


def test_observation_of_a_kindred_dtype_is_converted():
    c = Collector(Broken(lambda o, *r: (o.astype(np.float64), *r)), EchoPolicy(), frames_per_batch=9)
    assert_same(c.next(), CountingWorld([(3, 1, 5)]).batch(9))


def test_a_float_image_is_not_rounded_to_bytes():
    class Image(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros((4, 4, 3), np.uint8), {}

        def step(self, action):
            return np.full((4, 4, 3), 0.5), 0.0, False, False, {}

    with pytest.raises(SpecMismatch, match="float64.*uint8"):
        Collector(Image(), frames_per_batch=2).next()


@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_env_that_raises(where):
    boom = OSError("the simulator is gone")

    class Raises(CountingEnv):
        def step(self, action):
            if where == "step" and self.episode == 2:
                raise boom
            return super().step(action)

        def reset(self, **kwargs):
            if where == "reset" and self.episode == 1:
                raise boom
            return super().reset(**kwargs)

    c = Collector(SerialEnv(2, [CountingEnv, lambda: Raises(lane=1)]), EchoPolicy(), frames_per_batch=20)
    with pytest.raises(
        WorkerRaised, match=f"lane 1, step {4 if where == 'step' else 3}: env.{where} raised OSError"
    ) as caught:
        c.next()
    assert caught.value.__cause__ is boom
    assert isinstance(caught.value, RuntimeError)
    assert (caught.value.lane, caught.value.step) == (1, 4 if where == "step" else 3)


def test_an_env_that_raises_at_the_first_reset():
    class Never(CountingEnv):
        def reset(self, **kwargs):
            raise OSError("no display")

    with pytest.raises(WorkerRaised, match="lane 0: env.reset raised OSError") as caught:
        Collector(Never(), frames_per_batch=3)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_reward_that_is_no_number():
    c = Collector(Broken(lambda o, r, *rest: (o, "much", *rest)), EchoPolicy(), frames_per_batch=9)
    with pytest.raises(WorkerRaised, match="lane 0, step 4"):
        c.next()


def test_nan_rewards_are_allowed_and_counted():
    c = Collector(Broken(lambda o, r, *rest: (o, float("nan"), *rest)), EchoPolicy(), frames_per_batch=9)
    batch = c.next()
    assert batch["next", "reward"].isnan().sum() == 1
    stats = c.stats()
    assert stats["nan_rewards"] == 1
    assert np.isfinite(stats["mean_return"])


def test_keyboard_interrupt_passes_through():
    c = Collector(Broken(raise_(KeyboardInterrupt())), EchoPolicy(), frames_per_batch=9)
    with pytest.raises(KeyboardInterrupt):
        c.next()
    world = CountingWorld([(3, 1, 5)])
    world.batch(4)  # the interrupted rollout got so far: into the third episode
    world.ids = [0]  # but delivered nothing, and gave out no ids
    world.next_id = 1
    world.begin_again()
    assert_same(c.next(), world.batch(9))
    c.shutdown()


class Fails(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, observation):
        self.calls += 1
        if self.calls == self.at:
            raise ArithmeticError("bad weights")
        return observation[..., :1]


def test_a_policy_that_raises():
    c = Collector(SerialEnv(2, CountingEnv), Fails(7), frames_per_batch=8)
    c.next()
    with pytest.raises(WorkerRaised, match="step 2: the policy raised ArithmeticError") as caught:
        c.next()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    with pytest.raises(WorkerRaised, match="the policy raised ArithmeticError.*first observation: 'observation'"):
        Collector(CountingEnv(), Fails(1), frames_per_batch=8)


def test_a_policy_missing_an_input():
    policy = TensorDictModule(nn.Linear(3, 1), ["pixels"], ["action"])
    with pytest.raises(UsageError, match=r"policy reads \['pixels'\]; the env provides \['observation'"):
        Collector(CountingEnv(), policy, frames_per_batch=3)


def test_a_policy_without_an_action():
    policy = TensorDictModule(nn.Linear(3, 1), ["observation"], ["logits"])
    with pytest.raises(UsageError, match=r"writes \['logits'\] but not the env's action \['action'\]"):
        Collector(CountingEnv(), policy, frames_per_batch=3)
    with pytest.raises(UsageError, match="but not the env's action"):
        Collector(CountingEnv(), lambda td: td.set("act", td["observation"]), frames_per_batch=3)
    with pytest.raises(UsageError, match="returned None"):
        Collector(CountingEnv(), lambda observation: None, frames_per_batch=3)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda o: o, r"policy writes 'action' as float32\[3\], the env's action space is Box"),
        (lambda o: o[..., 0], r"float32\[\]"),
        (lambda o: o[..., :1] * 1j, "complex64"),
        (lambda o: "left", "str; tensors are expected"),
    ],
)
def test_an_action_the_env_cannot_take(output, message):
    with pytest.raises(SpecMismatch, match=message):
        Collector(CountingEnv(), lambda observation: output(observation), frames_per_batch=3)


def test_a_policy_that_forgets_the_lanes():
    with pytest.raises(SpecMismatch, match="2 lanes need"):
        Collector(SerialEnv(2, CountingEnv), lambda observation: torch.zeros(1), frames_per_batch=4)


@pytest.mark.parametrize("change", [lambda a: a.double(), lambda a: a.reshape(1, 1), lambda a: a[0]])
def test_a_policy_that_changes_its_output(change):
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, observation):
            self.calls += 1
            action = observation[..., :1]
            return change(action) if self.calls == 3 else action

    c = Collector(CountingEnv(), Fickle(), frames_per_batch=6)
    with pytest.raises(SpecMismatch, match=r"step 2: the policy's output 'action' changed: float32\[1\] before"):
        c.next()


def test_an_action_out_of_range():
    with pytest.raises(SpecMismatch, match=r"step 0: policy chose action 2 of 2 \(0 to 1\)"):
        Collector("CartPole-v1", lambda observation: torch.tensor(2), frames_per_batch=3).next()


def test_a_policy_nobody_can_place():
    class Two(CountingEnv):
        observation_space = gym.spaces.Dict(a=CountingEnv.observation_space, b=CountingEnv.observation_space)

        def _observation(self):
            return {"a": super()._observation(), "b": super()._observation()}

    with pytest.raises(TypeError, match=r"its parameters are \['x'\], the env's observations \['a', 'b'\]"):
        Collector(Two(), lambda x: x, frames_per_batch=3)
    with pytest.raises(RuntimeError, match="in_keys and out_keys"):

        class Almost:
            in_keys, out_keys = ["a"], ["action"]

            def __call__(self, a):
                return a

        Collector(Two(), Almost(), frames_per_batch=3)


def test_a_closed_env_is_refused():
    env = GymEnv(CountingEnv())
    env.close()
    with pytest.raises(WrongState, match="closed"):
        env.reset()
    with pytest.raises(WrongState, match="closed"):
        Collector(env, frames_per_batch=3)


def test_shutdown_closes_the_env_once_asked():
    env = CountingEnv()
    c = Collector(env, frames_per_batch=3)
    assert not env.closed
    c.shutdown()
    assert env.closed
    assert "closed: shutdown() was called" in repr(c)
    kept = CountingEnv()
    Collector(kept, frames_per_batch=3).shutdown(close_env=False)
    assert not kept.closed


def test_garbage_collection_closes_the_env():
    import gc

    env = CountingEnv()
    c = Collector(env, frames_per_batch=3)
    c.next()
    del c
    gc.collect()
    assert env.closed


def test_small_things():
    leaf = Leaf((1,), torch.float32, gym.spaces.Box(0, 0.5, (1,), np.float32))
    assert Collector(CountingEnv(), RandomPolicy(leaf), frames_per_batch=50).next()["action"].abs().max() <= 0.5

    class Called(TensorDictModule):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs).set("action", torch.full((1,), 7.0))

    assert (
        Collector(CountingEnv(), Called(EchoPolicy(), ["observation"], ["action"]), frames_per_batch=3).next()["action"]
        == 7
    ).all()

    class NoReward(CountingEnv):
        def step(self, action):
            return (*super().step(action)[:1], None, False, False, {})

    with pytest.raises(SpecMismatch, match="None as the reward"):
        Collector(NoReward(), frames_per_batch=2).next()

    class Wraps(CountingEnv):
        observation_space = gym.spaces.Box(-100, 100, (1,), np.int8)

        def _observation(self):
            return np.array([300])

    with pytest.raises(SpecMismatch, match="int64"):
        Collector(Wraps(), frames_per_batch=2)

    class One(CountingEnv):
        action_space = gym.spaces.Discrete(1, start=4)

        def step(self, action):
            assert action == 4
            return super().step(0.0)

    for categorical in (False, True):
        Collector(GymEnv(One(), categorical_action_encoding=categorical), frames_per_batch=5).next()
    with pytest.raises(SpecMismatch, match="outside MultiDiscrete"):

        class Many(CountingEnv):
            action_space = gym.spaces.MultiDiscrete([2, 2])

        Collector(Many(), lambda observation: torch.tensor([0, 2]), frames_per_batch=2).next()


def test_more_wrong_things():
    with pytest.raises(TypeError, match="2\\*\\*63"):
        Collector(CountingEnv(), frames_per_batch=3).set_seed(2**70)
    if not torch.cuda.is_available():
        with pytest.raises(TypeError, match="sees no GPU"):
            Collector(CountingEnv(), frames_per_batch=3, storing_device="cuda")
    with pytest.raises(ValueError, match="there are 1"):
        Collector(CountingEnv(), frames_per_batch=3).reset(0.5)

    class Blind(CountingEnv):
        observation_space = gym.spaces.Dict()

    with pytest.raises(UsageError, match="is empty"):
        Collector(Blind(), frames_per_batch=3)

    class Old(CountingEnv):
        def step(self, action):
            return super().step(action)[:4]

    with pytest.raises(WorkerRaised, match="what env.step returned cannot be read"):
        Collector(Old(), EchoPolicy(), frames_per_batch=3).next()


@pytest.mark.parametrize("step", [0, 1])
def test_an_unreadable_observation_is_not_blamed_on_the_code_of_the_env(step):
    class Unread(CountingEnv):
        observation_space = gym.spaces.Discrete(4)

        def _observation(self):
            return [0] if self.t == step else self.t

    what = "step" if step else "reset"
    with pytest.raises(WorkerRaised, match=rf"lane 0.*: what env\.{what} returned cannot be read: TypeError"):
        Collector(Unread(), frames_per_batch=3).next()
