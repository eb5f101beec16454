"""Envs around another pass on every hook of Env, one by one; whoever adds a hook must decide about it here."""

import dataclasses
import inspect

import pytest
import torch

from reap.core.device.device_env import DeviceEnv, WrappedOnDevice
from reap.core.env import Env
from reap.core.env_hooks import EnvHooks
from reap.core.policies.recurrent_state import RecurrentState
from reap.core.wrapped import Wrapped
from reap.envs import GymEnv
from reap.envs.step_limit import StepLimit
from reap.spec import Leaf
from reap.testing import CountingEnv

NOT_PASSED_ON = {"send", "recv", "on_device"}  # Wrapped says why
VOCABULARY = {name: value for name, value in (vars(EnvHooks) | vars(Env)).items() if not name.startswith("_")}
METHODS = sorted(name for name, value in VOCABULARY.items() if inspect.isfunction(value) and name not in NOT_PASSED_ON)
ATTRIBUTES = ("pending_seeds", "driver", "captures")  # written to by whoever has the env in hand
TRAITS = ("has_after_step", "draws", "reports_cuts", "runs_elsewhere")  # what the env is like, said once
LEFT = ("writes_after",)  # of rows on a device only; where a wrapper adds leaves the loop copies them


class Heard(Env):
    """Remembers which of its hooks were called, and answers with something to be recognised by."""

    has_after_step = draws = reports_cuts = runs_elsewhere = True

    def __init__(self):
        self.spec = GymEnv(CountingEnv((3,))).lanes_env.spec
        self.heard = []

    expect = reset = close = None  # replaced below, as all others


def _hook(name):
    def hear(self, *arguments):
        self.heard.append((name, arguments))
        return name

    return hear


for _name in METHODS:
    setattr(Heard, _name, _hook(_name))
Heard.__abstractmethods__ = frozenset()


def on_device(env, spec):
    return DeviceEnv(env, spec, torch.device("cpu"), [])


def twice_on_device(env, spec):
    return WrappedOnDevice(on_device(env, spec), spec)


everywhere = pytest.mark.parametrize("wrap", [Wrapped, on_device, twice_on_device])


@everywhere
@pytest.mark.parametrize("name", METHODS)
def test_every_hook_is_passed_on_with_what_it_was_given(name, wrap):
    inner = Heard()
    hook = getattr(wrap(inner, inner.spec), name)
    arguments = [object() for _ in inspect.signature(getattr(Env, name)).parameters][1:]
    answer = hook(*arguments)
    assert inner.heard == [(name, tuple(arguments))]
    if inspect.signature(getattr(Env, name)).return_annotation != "None":
        assert answer == name, "what it answered is lost"


@everywhere
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_what_is_set_is_set_inside(name, wrap):
    inner = Heard()
    outer, value = wrap(inner, inner.spec), object()
    setattr(outer, name, value)
    assert getattr(inner, name) is value
    assert getattr(outer, name) is value


@everywhere
@pytest.mark.parametrize("name", TRAITS)
def test_what_it_is_like_is_what_the_inner_one_is_like(name, wrap):
    inner = Heard()
    assert getattr(wrap(inner, inner.spec), name) is True


def test_every_attribute_of_an_env_is_thought_of():
    plain = {name for name, value in VOCABULARY.items() if not callable(value)}
    assert plain == {*ATTRIBUTES, *TRAITS, *LEFT, "as_given"}


def test_the_verbs_are_few_and_everything_else_is_a_hook():
    verbs = {name for name in vars(Env) if not name.startswith("_")} - {"pending_seeds", "driver"}
    life = {"expect", "reset", "send", "recv", "step", "close", "state_dict", "load_state_dict"}
    assert verbs == {*life, "make_slot", "on_device"}, "what only some envs have to say goes into EnvHooks"
    assert not verbs & vars(EnvHooks).keys()


@pytest.mark.parametrize(
    "around", [lambda env: StepLimit(env, 3), lambda env: RecurrentState(env, {("hidden",): torch.zeros(2)})]
)
def test_a_policy_that_may_read_more_is_not_lent_to_an_env_that_has_less(around):
    inner, policy = Heard(), object()
    assert around(inner).wrap_policy(policy) is policy
    assert not inner.heard


def test_lending_looks_at_what_is_observed():
    inner = Heard()
    more = dataclasses.replace(inner.spec, observation={**inner.spec.observation, ("more",): Leaf((), torch.int64)})
    assert Wrapped(inner, more).wrap_policy("policy") == "policy"
    assert Wrapped(inner, inner.spec).wrap_policy("policy") == "wrap_policy"
