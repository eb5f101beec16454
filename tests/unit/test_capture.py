"""Captured policies are the policies, bit for bit, or are not captured."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from reap._foreign import torch_internals
from reap.core.capture.provable import why_not
from reap.core.capture.recorder import NotCaptured
from reap.core.capture.replay import Captured


@pytest.fixture(autouse=True)
def checks_of_distributions():
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)  # TorchRL, if another test imported it, turned them off
    yield
    Distribution.set_default_validate_args(before)


def net(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


class ActorCritic(nn.Module):
    """As people write them: networks, a distribution made in forward, log-probability, entropy and value."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = net(3), net(1)

    def forward(self, x):
        dist = Categorical(logits=self.actor(x))
        action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.critic(x)


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_std = net(2), nn.Parameter(torch.full((2,), -0.5))

    def forward(self, x):
        mean = self.mean(x)
        dist = Normal(mean, self.log_std.clamp(-5, 2).exp().expand_as(mean))
        action = dist.sample()
        return action, dist.log_prob(action).sum(-1)


class Squashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net(4)

    def forward(self, x):
        mean, log_std = self.body(x).chunk(2, -1)
        dist = Independent(Normal(mean, log_std.sigmoid() + 0.1), 1)
        raw = dist.rsample()
        action = torch.tanh(raw)
        return action, dist.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6).sum(-1)


class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = net(3)
        self.register_buffer("eps", torch.tensor(0.5))

    def forward(self, x):
        best = self.q(x).argmax(-1)
        return torch.where(torch.rand(best.shape) < self.eps, torch.randint_like(best, 3), best)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.q, self.out = nn.Linear(1, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.3)

    def forward(self, x):
        tokens = self.drop(self.embed(x.unsqueeze(-1)))
        q, k, v = self.q(self.norm(tokens)).chunk(3, -1)
        mixed = tokens + nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.mean(-2))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        h, c = self.cell(x)
        return self.head(h), h, c


class Noise(nn.Module):
    """Random numbers drawn in place into memory made on the spot."""

    def forward(self, x):
        noise = torch.empty_like(x)
        noise.normal_(0, 0.1)
        noise[..., 0] = 0
        return x + noise


class StateDecides(nn.Module):
    """What it does follows from a parameter."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * 2 if self.gain > 0 else x


WORLD = [ActorCritic, Gaussian, Squashed, Greedy, Attention, Noise, StateDecides]


def outputs(model):
    def call(*inputs):
        out = model(*inputs)
        return out if isinstance(out, tuple) else (out,)

    return call


def captured(model, size=(8,), probes=3):
    return Captured([model], outputs(model), [[torch.randn(*size, 4)] for _ in range(probes)])


@pytest.mark.parametrize("size", [(), (1,), (8,), (2, 3)], ids=str)
@pytest.mark.parametrize("make", WORLD, ids=lambda m: m.__name__)
def test_the_replay_is_the_policy(make, size):
    torch.manual_seed(0)
    model = make()
    replay = captured(model, size)
    assert replay.bind()
    for _ in range(20):
        x = torch.randn(*size, 4) * 3
        state = torch.get_rng_state()
        with torch.no_grad():
            wanted = outputs(model)(x)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            got = replay.run(x)
        assert torch.equal(after, torch.get_rng_state())
        assert len(got) == len(wanted) + len(replay.checks)
        for a, b in zip(wanted, got):
            assert a.dtype is b.dtype
            assert torch.equal(a, b)
        assert all(c.read(v) == c.value for c, v in zip(replay.checks, got[len(wanted) :]))


def test_cells_work_too():
    replay = captured(Cell())
    assert replay.bind()


class DependsOnData(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class ReadsAValue(nn.Module):
    def forward(self, x):
        return x * float(x.reshape(-1)[0])


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2


class CountsInABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * 2


class ChangesItsInput(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class ChangesAViewOfItsInput(nn.Module):
    def forward(self, x):
        x[..., 0] = 0
        return x * 2


class RollsNumpysDice(nn.Module):
    def forward(self, x):
        return x + float(np.random.rand())


class RollsPythonsDice(nn.Module):
    def forward(self, x):
        return x + random.random()


class RollsItsOwnDice(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        return x + torch.from_numpy(self.rng.normal(size=x.shape)).float()


class GoesThroughNumpy(nn.Module):
    def forward(self, x):
        return torch.from_numpy(np.tanh(x.numpy()))


SEEN = []
CALLS = 0


class TellsAGlobal(nn.Module):
    def forward(self, x):
        SEEN.append(x.shape)
        return x * 2


class CountsInAGlobal(nn.Module):
    def forward(self, x):
        global CALLS
        CALLS += 1
        return x * 2


def tells_its_maker():
    seen = []

    class Tells(nn.Module):
        def forward(self, x):
            seen.append(1)
            return x * 2

    return Tells()


def hooked():
    model = net(2)
    model[1].register_forward_hook(lambda *_: None)
    return model


class NeedsGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net(1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(self.body(x).sum(), x)
        return g


@pytest.mark.parametrize(
    "make",
    [
        DependsOnData,
        ReadsAValue,
        Counts,
        CountsInABuffer,
        ChangesItsInput,
        ChangesAViewOfItsInput,
        RollsNumpysDice,
        RollsPythonsDice,
        RollsItsOwnDice,
        GoesThroughNumpy,
        NeedsGradients,
        TellsAGlobal,
        CountsInAGlobal,
        tells_its_maker,
        hooked,
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    ],
    ids=lambda m: getattr(m, "__name__", ""),
)
def test_what_a_replay_would_not_do_is_not_captured(make):
    with pytest.raises(NotCaptured):
        captured(make())


def test_what_a_parameter_decides_is_decided_anew():
    model = StateDecides()
    replay = captured(model)
    assert replay.bind()
    with torch.no_grad():
        model.gain.fill_(-1)
    assert not replay.bind()


def test_weights_changed_in_place_are_used_from_the_next_rollout():
    model = Gaussian()
    replay = captured(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    assert replay.bind()
    assert replay.agrees([torch.randn(8, 4)])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(16, 4))),
        lambda m: m.eval() if m.training else m.train(),
        lambda m: m[1].register_forward_hook(lambda *a: None),
        lambda m: m[0].register_forward_pre_hook(lambda *a: None),
        lambda m: setattr(m[0], "extra", 1),
        lambda m: m.__setitem__(1, nn.Sigmoid()),
        lambda m: m.append(nn.Tanh()),
        lambda m: setattr(m[0], "forward", lambda x: x),
        lambda m: setattr(m[0], "__class__", type("Other", (nn.Linear,), {})),
    ],
)
def test_a_changed_module_is_seen(change):
    model = net(2)
    replay = captured(model)
    assert replay.bind()
    change(model)
    assert not replay.bind()


def test_a_variable_of_the_program_that_is_replaced_is_seen():
    gain = torch.tensor(2.0)

    class Scales(nn.Module):
        def forward(self, x):
            return x * gain

    replay = captured(Scales())
    assert replay.bind()
    gain = torch.tensor(3.0)
    assert not replay.bind()


def test_a_hook_for_all_modules_is_seen():
    replay = captured(net(2))
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    try:
        assert not replay.bind()
    finally:
        handle.remove()
    assert replay.bind()


def test_what_a_distribution_would_refuse_is_reported():
    model = ActorCritic()
    replay = captured(model)
    assert replay.bind()
    x = torch.randn(8, 4)
    x[3, 0] = torch.nan
    with torch.no_grad(), pytest.raises(ValueError, match="Categorical"):
        model(x)
    try:
        values = replay.run(x)
    except RuntimeError:  # multinomial refuses NaN by itself
        return
    assert any(c.read(v) != c.value for c, v in zip(replay.checks, values[4:]))


def test_what_follows_from_parameters_alone_is_computed_once_per_rollout():
    model = Gaussian()
    replay = captured(model)
    replay.bind()
    names = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        replay.run(torch.randn(8, 4))
    assert "exp" not in names
    assert "linear" in names


# ---- found by somebody who tried to break it -------------------------------------------------------------------------


class SizedByValues(nn.Module):
    def forward(self, x):
        big = x[x.abs() > 25]
        return x if big.numel() == 0 else x * 0


class Catches(nn.Module):
    def forward(self, x):
        try:
            dist = Categorical(probs=torch.softmax(x, -1))
        except ValueError:
            dist = Categorical(probs=torch.ones(4))
        return dist.sample()


class UpdatesStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


@pytest.mark.parametrize("make", [SizedByValues, UpdatesStatistics])
def test_what_values_decide_without_a_word_is_not_captured(make):
    model = make()
    with pytest.raises(NotCaptured):
        captured(model)
    captured(UpdatesStatistics().eval())


def test_one_that_catches_errors_is_called():
    assert why_not(Catches()) is not None
    assert why_not(ActorCritic()) is None


class Gains(nn.Module):
    gain = 2.0

    def __init__(self):
        super().__init__()
        self.inside = ([1.0],)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.gain * self.inside[0][0] * self.weight * (2 if self.weight.requires_grad else 1)


@pytest.mark.parametrize("change", ["class", "list in a tuple", "requires_grad"])
def test_more_that_a_module_relies_on_is_seen(change, monkeypatch):
    model = Gains()
    replay = captured(model)
    assert replay.bind()
    if change == "class":
        monkeypatch.setattr(Gains, "gain", 3.0)
    elif change == "requires_grad":
        model.weight.requires_grad_(False)
    else:
        model.inside[0][0] = 2.0
    assert not replay.bind()


@torch.no_grad()
def test_without_torchs_guard_there_is_no_inference_mode(monkeypatch):
    torch.manual_seed(0)
    model, x = ActorCritic(), torch.randn(8, 4)
    assert captured(model).run(x)[0].is_inference()
    monkeypatch.setattr(torch_internals, "INFERENCE_GUARD", None)
    replay = captured(model)
    torch.manual_seed(1)
    wanted = outputs(model)(x)
    torch.manual_seed(1)
    got = replay.run(x)
    assert all(map(torch.equal, wanted, got))
    assert not any(value.is_inference() for value in got)


class LooksBack(nn.Module):
    """Results that are computed, views of them, and views of what is changed in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        y = (x * self.weight).abs() + 1.0
        rows = y.reshape(-1, 2)
        left, right = rows.unbind(-1)
        z = torch.empty_like(left).copy_(left * right)
        z += rows.sum(-1)
        total = (z.sqrt() - right).clamp(-3.0, 3.0)
        return total, rows[..., :1], y.clone(), (left - 1).reshape(-1, 2).sum(0)


def test_what_was_returned_stays_as_it_was():
    torch.manual_seed(0)
    model = LooksBack()
    replay = captured(model)
    assert replay.bind()
    with torch.no_grad():
        kept = []
        for _ in range(5):
            x = torch.randn(8, 4)
            kept.append((outputs(model)(x), replay.run(x)))
    for wanted, got in kept:
        assert all(map(torch.equal, wanted, got))
