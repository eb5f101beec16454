"""Code of the user's own, wherever it hides, is read before it is captured; what it looks up is looked at again."""

import contextlib
import functools
import types

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical, Normal

from reap.collectors import Collector
from reap.core.capture.provable import why_not

CALLS = types.SimpleNamespace(made=0)
SCALE = 1.0
LEVELS = [1.0]
COMPARED = 3  # rollouts; after these none is compared for long


def counting(function):
    @functools.wraps(function)
    def counted(*args):
        CALLS.made += 1
        return function(*args)

    return counted


def named_after_torchs(x):
    CALLS.made += 1
    return x


functools.update_wrapper(named_after_torchs, torch.nn.functional.relu)


@torch.no_grad()
def counted_without_gradients(x):
    CALLS.made += 1
    return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, observation):
        return self.layer(observation)

    def counted(self, observation):
        CALLS.made += 1
        return self.layer(observation)


class Decorated(Net):
    @counting
    def forward(self, observation):
        return self.layer(observation)


class CallsAWrappedHelper(Net):
    def forward(self, observation):
        return counted_without_gradients(self.layer(observation))


class CallsAHelperWithAnotherName(Net):
    def forward(self, observation):
        return named_after_torchs(self.layer(observation))


class Parent(Net):
    def forward(self, observation):
        CALLS.made += 1
        return self.layer(observation)


class CallsItsParent(Parent):
    def forward(self, observation):
        return super().forward(observation) * 2


class CallsAMethodOfAChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = Net()

    def forward(self, observation):
        return self.child.counted(observation)


class CallableObject:
    def __init__(self):
        self.weight = torch.randn(4, 2)

    def __call__(self, observation):
        CALLS.made += 1
        return observation @ self.weight


class CountingNormal(Normal):
    def rsample(self, *args, **kwargs):
        CALLS.made += 1
        return super().rsample(*args, **kwargs)


@torch.jit.script
def add_one(total: torch.Tensor) -> torch.Tensor:
    total += 1
    return total


class WritesThroughTorchScript(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, observation):
        add_one(self.total)
        return self.layer(observation)


def in_tensordict(module, **options):
    return TensorDictModule(module, in_keys=["observation"], out_keys=["action"], **options)


def drawing(family):
    spread = TensorDictModule(Spread(), in_keys=["observation"], out_keys=["loc", "scale"])
    sampler = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=family, default_interaction_type="random", return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(spread, sampler)


class Spread(Net):
    def forward(self, observation):
        found = self.layer(observation)
        return found, found.exp()


COUNTING = {
    "a decorator": Decorated,
    "a helper below torch's decorator": CallsAWrappedHelper,
    "a helper that bears the name of torch's": CallsAHelperWithAnotherName,
    "a parent's forward": CallsItsParent,
    "a method of a child": CallsAMethodOfAChild,
    "a callable object": lambda: in_tensordict(CallableObject()),
    "a partial": lambda: in_tensordict(functools.partial(Net.counted, Net())),
    "a method by its name": lambda: in_tensordict(Net(), method="counted"),
    "a distribution": lambda: drawing(CountingNormal),
}


def explained(collector):
    (line,) = [line for line in collector.explain().splitlines() if line.startswith("policy")]
    return line


@pytest.mark.parametrize("kind", COUNTING)
def test_code_that_does_more_than_compute_is_called_wherever_it_is(kind):
    collector = Collector("CartPole-v1", COUNTING[kind](), frames_per_batch=20)
    CALLS.made = 0
    collector.next()
    assert CALLS.made == 20
    assert "called at each step" in explained(collector)
    collector.shutdown()


def test_what_torchscript_has_compiled_is_called():
    policy = WritesThroughTorchScript()
    collector = Collector("CartPole-v1", policy, frames_per_batch=20)
    collector.next()
    assert policy.total.item() == 20
    assert "which TorchScript has compiled" in explained(collector)
    collector.shutdown()


# ---- what changes between two rollouts -------------------------------------------------------------------------------


def scaled(x):
    return x * SCALE


def scaled_by_another(x):
    return scaled(x)


def levelled(x):
    return x * LEVELS[0]


class ScaledByAHelper(Net):
    def forward(self, observation):
        return scaled(self.layer(observation))


class ScaledByAHelpersHelper(Net):
    def forward(self, observation):
        return scaled_by_another(self.layer(observation))


class ScaledByAList(Net):
    def forward(self, observation):
        return levelled(self.layer(observation))


class ScaledInAFunctionOfItsOwn(Net):
    def forward(self, observation):
        def scaled_here(x):
            return x * SCALE

        return scaled_here(self.layer(observation))


class Settings(Net):
    def __init__(self):
        super().__init__()
        self.settings = types.SimpleNamespace(scale=1.0)


class ScaledByAChildsSettings(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = Settings()

    def forward(self, observation):
        return self.child(observation) * self.child.settings.scale


class ScaledNormal(Normal):
    def __init__(self, loc, scale):
        super().__init__(loc * SCALE, scale)


class NormalOfAClassesScale(Normal):
    scaled_by = 1.0

    def __init__(self, loc, scale):
        super().__init__(loc * self.scaled_by, scale)


def set_scale(policy):
    global SCALE
    SCALE = -1.0


def set_level(policy):
    LEVELS[0] = -1.0


def set_childs(policy):
    policy.child.settings.scale = -1.0


def set_classes(policy):
    NormalOfAClassesScale.scaled_by = -1.0


CHANGED = {
    "a helper's variable": (ScaledByAHelper, set_scale),
    "a variable of a helper's helper": (ScaledByAHelpersHelper, set_scale),
    "a helper's list": (ScaledByAList, set_level),
    "a variable in a function inside": (ScaledInAFunctionOfItsOwn, set_scale),
    "settings of a child": (ScaledByAChildsSettings, set_childs),
    "a variable of a distribution": (lambda: drawing(ScaledNormal), set_scale),
    "an attribute of a distribution's class": (lambda: drawing(NormalOfAClassesScale), set_classes),
}


@pytest.fixture
def restore_generator():
    yield
    _put_back()


def _put_back():
    global SCALE
    SCALE, LEVELS[0], NormalOfAClassesScale.scaled_by = 1.0, 1.0, 1.0


def batches(make, change, *, capture):
    _put_back()
    torch.manual_seed(0)
    policy = make()
    collector = Collector("CartPole-v1", policy, frames_per_batch=40, capture=capture)
    collector.set_seed(1)
    found = []
    for rollout in range(COMPARED + 2):
        if rollout == COMPARED:
            change(policy)
        found.append(collector.next().clone())
    collector.shutdown()
    return found


@pytest.mark.parametrize("kind", CHANGED)
def test_what_the_code_looks_up_is_seen_to_change(kind, restore_generator):
    make, change = CHANGED[kind]
    called, captured = (batches(make, change, capture=capture) for capture in (False, True))
    assert all(bool((a == b).all()) for a, b in zip(called, captured))


# ---- what the process is set to --------------------------------------------------------------------------------------


class Sampling(Net):
    def forward(self, observation):
        choice = Categorical(logits=self.layer(observation).float() + torch.ones(2).float())
        action = choice.sample()
        return {"action": torch.eye(2, dtype=torch.float32)[action], "log_prob": choice.log_prob(action)}


def test_autocast_that_is_entered_later_is_seen():
    def run(capture):
        with contextlib.ExitStack() as stack:
            later = torch.autocast("cpu", dtype=torch.bfloat16)
            return batches(Sampling, lambda policy: stack.enter_context(later), capture=capture)

    assert all(bool((a == b).all()) for a, b in zip(run(False), run(True)))


class MakesOnes(Net):
    def forward(self, observation):
        return (self.layer(observation) * torch.tensor(1 / 3)).sum(-1, keepdim=True) * torch.full((2,), 1 / 3).float()


def test_another_default_type_is_seen():
    def run(capture):
        try:
            return batches(MakesOnes, lambda policy: torch.set_default_dtype(torch.float64), capture=capture)
        finally:
            torch.set_default_dtype(torch.float32)

    assert all(bool((a == b).all()) for a, b in zip(run(False), run(True)))


@pytest.mark.parametrize("asks", ["get_num_threads", "initial_seed", "get_default_dtype", "set_num_threads"])
def test_code_that_asks_what_the_process_is_set_to_is_called(asks):
    names = {"torch": torch}
    exec(f"def forward(self, observation):\n    torch.{asks}\n    return self.layer(observation)", names)
    kind = type("Asks", (Net,), {"forward": names["forward"]})
    assert why_not(kind()) == f"its Asks uses {asks}"
    assert why_not(Net()) is None
