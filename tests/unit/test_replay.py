"""A replayed step gives the bits of torch by shorter ways: NumPy, fewer calls, whole columns at the end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from reap.core.capture.exact import Expression, Operand, as_numpy
from reap.core.capture.recorder import name_of
from reap.core.capture.replay import Captured

FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-38, 3e38])
)
TWO = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "__rsub__": Tensor.__rsub__,
    "gt": torch.gt,
    "le": torch.le,
    "eq": torch.eq,
}
ONE = {"neg": torch.neg, "abs": torch.abs, "square": torch.square}
WITH_A_NUMBER = {
    "add": lambda x, n: torch.add(x, n),
    "mul": lambda x, n: torch.mul(x, n),
    "div": lambda x, n: torch.div(x, n),
    "clamp_min": lambda x, n: torch.clamp_min(x, n),
    "clamp_max": lambda x, n: torch.clamp_max(x, n),
    "lt": lambda x, n: torch.lt(x, n),
    "__rsub__": lambda x, n: n - x,
}


def evaluated(expression, values):
    def value(a):
        if isinstance(a, Operand):
            return values[a.at]
        return evaluated(a, values) if isinstance(a, Expression) else a

    with np.errstate(all="ignore"):
        return expression.func(*map(value, expression.args))


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if a.dtype.is_floating_point:  # of NaN there are many
        number = ~(a.isnan() & b.isnan())
        a, b = a[number], b[number]
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def by_numpy(name, result, *args):
    operands = [Operand(i, a.to("meta")) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    rule = as_numpy(name, operands, {}, result.to("meta"))
    assert rule is not None, name
    return torch.from_numpy(
        np.asarray(evaluated(rule, {i: a.numpy() for i, a in enumerate(args) if isinstance(a, Tensor)}))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_numpy_gives_the_bits_of_torch(dtype, data):
    size = data.draw(st.integers(1, 19))
    x, y = (torch.tensor(data.draw(st.lists(FLOATS, min_size=size, max_size=size)), dtype=dtype) for _ in range(2))
    number = data.draw(st.one_of(st.integers(-5, 5), st.floats(-3, 3)).filter(lambda n: np.float32(n) != 0))
    for name, func in TWO.items():
        assert same_bits(by_numpy(name, func(x, y), x, y), func(x, y)), name
    for name, func in ONE.items():
        assert same_bits(by_numpy(name, func(x), x), func(x)), name
    for name, func in WITH_A_NUMBER.items():
        assert same_bits(by_numpy(name, func(x, number), x, number), func(x, number)), name
    assert same_bits(by_numpy("where", torch.where(x > y, x, y), x > y, x, y), torch.where(x > y, x, y))
    assert same_bits(by_numpy("pow", x.pow(2), x, 2), x.pow(2))


@pytest.mark.parametrize(
    ("name", "func", "args"),
    [
        ("sqrt", torch.sqrt, (torch.rand(4),)),  # torch's is not correctly rounded
        ("exp", torch.exp, (torch.rand(4),)),
        ("sum", torch.sum, (torch.rand(4, 3), -1)),
        ("add", torch.add, (torch.rand(4), torch.rand(4).double())),
        ("add", torch.add, (torch.arange(4), 0.5)),  # torch makes it float32, NumPy float64
        ("mul", torch.mul, (torch.rand(4).half(), 2)),
        ("clamp_min", torch.clamp_min, (torch.rand(4), 0)),  # which zero is taken is the library's choice
        ("add", torch.add, (torch.tensor(1.0), 1)),  # NumPy makes it a bare number
        ("add", torch.add, (torch.rand(100, 100), 1)),  # large: nothing to win
        ("long", Tensor.long, (torch.rand(4),)),
    ],
)
def test_what_numpy_might_do_otherwise_is_left_to_torch(name, func, args):
    operands = [Operand(i, a.to("meta")) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    assert as_numpy(name, operands, {}, func(*args).to("meta")) is None


def test_what_overflows_does_so_without_a_word_as_in_torch(recwarn):
    class Overflows(nn.Module):
        def forward(self, x):
            return (x * 1e38 * 1e38) / (x - x)

    model = Overflows()
    replay = Captured([model], lambda x: (model(x),), [[torch.rand(3)] for _ in range(3)])
    assert replay.bind()
    replay.halves([0])
    replay.run(torch.rand(3))
    assert not recwarn.list


class Samples(nn.Module):
    """A sample of each kind for which there is a shorter way, and columns that can wait."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.full((3,), 0.3))

    def forward(self, x):
        logits = self.last(torch.tanh(self.first(x)))
        normal = logits - logits.logsumexp(-1, keepdim=True)
        share = normal.exp()
        index = torch.multinomial(share.reshape(-1, 3), 1, True).reshape(x.shape[:-1])
        noise = torch.normal(mean=torch.zeros_like(logits), std=self.scale.expand_as(logits))
        log_prob = normal.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return index, logits + noise, log_prob, (share * normal).sum(-1), self.scale.expand_as(logits)


def halves_of(model, size, now):
    probes = [[torch.randn(*size, 4)] for _ in range(3)]
    replay = Captured([model], model, probes)
    assert replay.bind()
    return replay, replay.halves(now)


@pytest.mark.parametrize("size", [(), (1,), (8,)], ids=str)
def test_both_halves_make_what_the_whole_makes(size):
    torch.manual_seed(0)
    model = Samples()
    _, halves = halves_of(model, size, [0])
    assert halves is not None
    assert halves.now == (0,)
    inputs = [torch.randn(*size, 4) for _ in range(101)]
    torch.manual_seed(5)
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
    torch.manual_seed(5)
    with torch.no_grad():
        rows = [halves.run(x) for x in inputs]
        columns, same = halves.finish(rows, check=True)
    assert same
    for t, whole in enumerate(wanted):
        assert torch.equal(whole[0], torch.from_numpy(rows[t][0]))
        for column, at, moves in zip(columns, halves.rest, halves.moves):
            assert torch.equal(whole[at], column[t] if moves else column), at


def test_what_is_made_at_once_is_only_what_was_asked_for():
    _, halves = halves_of(Samples(), (), [0])
    asked = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            asked.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        halves.run(torch.randn(4))
    assert "gather" not in asked
    assert "multinomial" not in asked
    assert "linear" not in asked  # one row: addmv
    assert "logsumexp" in asked  # from which the action follows


def test_probabilities_that_multinomial_refuses_are_found_at_the_end():
    model = Samples()
    _, halves = halves_of(model, (2,), [0])
    inputs = [torch.randn(2, 4) for _ in range(5)]
    inputs[3][1] = torch.nan
    with torch.no_grad():
        columns, _ = halves.finish([halves.run(x) for x in inputs])
    said = [(column == check.value).tolist() for check, column in zip(halves.checks, columns[len(halves.rest) :])]
    assert [True, True, True, False, True] in said


class Softplus(nn.Module):
    """torch gives other bits for a row alone than for one among many."""

    def forward(self, x):
        return x * 2, nn.functional.softplus(x) + 1


def test_what_torch_computes_otherwise_for_columns_is_made_at_each_step():
    _, halves = halves_of(Softplus(), (3,), [0])
    x = torch.randn(3, 4)
    _, kept = halves.run(x)[0], halves.run(x)[1:]
    assert any(torch.equal(k, nn.functional.softplus(x)) for k in kept)


@pytest.mark.parametrize("model", [Samples(), Softplus()], ids=lambda m: type(m).__name__)
def test_looking_whether_a_step_can_be_cut_in_two_uses_no_random_numbers(model):
    replay = Captured([model], model, [[torch.randn(3, 4)] for _ in range(3)])
    assert replay.bind()
    before = torch.get_rng_state()
    replay.halves([0])
    assert torch.equal(before, torch.get_rng_state())


class Turned(nn.Module):
    """Each looks like something NumPy does, and is something else."""

    def forward(self, x):
        mask = (x > 0).where(x > 0.5, x.abs()[..., :1] > 25)  # a tensor's own `where`: the condition comes second
        return 3.0 / (x.abs() + 1), (x * mask.float()), x * 1e30 * 1e30


def test_divisions_by_a_tensor_and_a_tensors_own_where(recwarn):
    model = Turned()
    replay = Captured([model], model, [[torch.randn(3, 4)] for _ in range(3)])
    assert replay.bind()
    for _ in range(50):
        x = torch.randn(3, 4) * 30
        assert all(same_bits(a, b) for a, b in zip(model(x), replay.run(x)))
    assert not recwarn.list


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))

    def forward(self, x):
        return torch.clamp(x * 2.0, self.low, self.high) * 3.0


def test_a_bound_that_becomes_zero_later():
    model = Clamped()
    replay = Captured([model], lambda x: (model(x),), [[torch.randn(20)] for _ in range(3)])
    model.low.fill_(0.0)
    assert replay.bind()
    x = torch.tensor([-0.0, 0.0] * 10)
    assert same_bits(model(x), replay.run(x)[0])


class Powers(nn.Module):
    def forward(self, x):
        return x * 2, (x.abs() + 0.5) ** 1.7, torch.maximum(x, x.abs() * 0.0), torch.relu(x)


def test_columns_of_powers_and_signed_zeros_are_made_row_by_row():
    model = Powers()
    _, halves = halves_of(model, (3,), [0])
    inputs = [torch.randn(3, 4) * (torch.rand(3, 4) < 0.7) for _ in range(200)]
    columns, same = halves.finish([halves.run(x) for x in inputs], check=True)
    assert same
    for column, at in zip(columns, halves.rest):
        assert all(same_bits(model(x)[at], column[t]) for t, x in enumerate(inputs))


class Conjugated(nn.Module):
    def forward(self, x):
        return torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2)).conj().imag, x.sum(-1)


def test_what_is_no_array_is_made_as_it_was():
    replay, halves = halves_of(Conjugated(), (3,), [0])
    x = torch.randn(3, 4)
    assert halves is None
    assert torch.equal(replay.run(x)[0].resolve_neg(), Conjugated()(x)[0])


class Noisy(nn.Module):
    def forward(self, x):
        return torch.normal(mean=x[..., :1], std=x[..., 1:2] * 0.01 + 1), x.sum(-1)


def test_a_scale_that_normal_refuses_is_found_at_the_end():
    _, halves = halves_of(Noisy(), (2,), [0])
    inputs = [torch.randn(2, 4) for _ in range(4)]
    inputs[2][1, 1] = -300.0
    columns, _ = halves.finish([halves.run(x) for x in inputs])
    assert (columns[len(halves.rest)] == halves.checks[0].value).tolist() == [True, True, False, True]


def repeats(x, kept):
    """Calls that are made twice, and calls that only look so."""
    a, b = x.unsqueeze(-1), x.unsqueeze(-1)
    whole, number = x * 1, x * 1.0
    zero, other = 1 / (x * 0.0).abs(), 1 / -(x * 0.0).abs()
    before = kept * 2
    kept.add_(1)
    after = kept * 2
    drawn = torch.rand(3), torch.rand(3)
    return [(a + b).squeeze(-1), whole, number, zero, other, before + 0, after + 0, x + 5, x + 5, *drawn]


def test_what_is_computed_twice_is_computed_once():
    kept = torch.zeros(3)
    probes = [[torch.arange(3) + n] for n in range(4)]
    captured = Captured([], lambda x: repeats(x, kept), probes, writes=True)
    made = [call.func.__name__ for call in captured._body]
    assert made.count("unsqueeze") == 1
    assert made.count("rand") == 2
    assert made.count("add") == 5  # a + b, two of what is kept, and both that are returned, each in its own memory
    assert captured.bind()
    for n in range(3):
        x, mine = torch.tensor([n, 5, -n]), torch.full((3,), float(n))
        torch.manual_seed(n)
        want = repeats(x, mine)
        kept.fill_(n)
        torch.manual_seed(n)
        found = captured.run(x)
        assert all(same_bits(a, b) for a, b in zip(found, want))
        assert torch.equal(kept, mine)
        assert found[7].data_ptr() != found[8].data_ptr()


def calls_of(captured):
    return [name_of(call.func) for call in captured._body]


class Stack(nn.Module):
    """Keeps the last frames as CatFrames does: the buffer is rolled, its end is written."""

    def __init__(self, shape, dim, by):
        super().__init__()
        self.register_buffer("frames", torch.randn(shape))
        self.dim, self.by = dim, by

    def forward(self, x):
        rolled = torch.roll(self.frames, shifts=-self.by, dims=self.dim)
        self.frames.copy_(rolled)
        at = (slice(None),) * (self.frames.ndim + self.dim) + (slice(-self.by, None),)
        part = self.frames[at]
        part.copy_(x)
        self.frames[at] = part
        return self.frames.clone()


@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    size=st.integers(1, 6),
    by=st.integers(1, 3),
    tail=st.lists(st.integers(1, 3), max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_a_stack_of_frames_moves_where_it_is(lead, size, by, tail):
    size, dim = max(size, by), -len(tail) - 1
    frame = (*lead, by, *tail)
    theirs, ours = (Stack((*lead, size, *tail), dim, by) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    captured = Captured([ours], lambda x: [ours(x)], [[torch.randn(frame)] for _ in range(3)], writes=True)
    names = calls_of(captured)
    assert ("roll" in names) == bool(size % by)
    assert ("move_up" in names) == (size % by == 0)
    assert "__setitem__" not in names
    assert captured.bind()
    for n in range(5):
        x = torch.full(frame, math.nan) if n == 3 else torch.randn(frame)
        (made,) = captured.run(x)
        assert torch.equal(made.view(torch.int32), theirs(x).view(torch.int32))
        assert torch.equal(ours.frames.view(torch.int32), theirs.frames.view(torch.int32))


class RolledTwice(Stack):
    """What was rolled is looked at once more."""

    def forward(self, x):
        rolled = torch.roll(self.frames, shifts=-self.by, dims=self.dim)
        self.frames.copy_(rolled)
        self.frames[:, -1:] = self.frames[:, :1]
        return self.frames + x, rolled * 2


def test_a_roll_that_is_looked_at_again_stays():
    module, other = (RolledTwice((2, 3), -1, 1) for _ in range(2))
    other.load_state_dict(module.state_dict())
    captured = Captured([module], module, [[torch.randn(2, 1)] for _ in range(3)], writes=True)
    assert "roll" in calls_of(captured)
    assert "__setitem__" in calls_of(captured)
    assert captured.bind()
    for _ in range(3):
        x = torch.randn(2, 1)
        assert all(map(torch.equal, captured.run(x), other(x)))


def grey(x):
    """As torchvision makes it of a picture that TorchRL made floats of."""
    red, green, blue = torch.div(x.permute(0, -1, -3, -2), 255).unbind(dim=-3)
    return red.mul(0.2989).add(green.mul(0.587)).add(blue.mul(0.114))


def test_every_colour_has_the_same_grey():
    """All 2²⁴ of them, a quarter of a million at a time, in pictures of several sizes."""
    side = torch.arange(256, dtype=torch.uint8)
    captured = {}
    for red in range(0, 256, 4):
        colours = torch.cartesian_prod(side[red : red + 4], side, side)
        lanes = (1, 4, 7)[red // 4 % 3]
        whole = torch.zeros(lanes, -(-len(colours) // (lanes * 128)), 128, 3, dtype=torch.uint8)
        whole.view(-1, 3)[: len(colours)] = colours
        if lanes not in captured:
            probes = [[torch.randint_like(whole, 256)] for _ in range(3)]
            captured[lanes] = Captured([], lambda x: [grey(x)], probes)
            assert calls_of(captured[lanes]) == ["permute", "grey_pictures"]
            assert captured[lanes].bind()
        (made,) = captured[lanes].run(whole)
        assert torch.equal(made.view(torch.int32), grey(whole).view(torch.int32))


def test_pictures_in_another_order_or_looked_at_otherwise_are_made_as_recorded():
    def planes(x):  # colours lie apart
        red, green, blue = torch.div(x, 255).unbind(dim=-3)
        return [red.mul(0.2989).add(green.mul(0.587)).add(blue.mul(0.114))]

    def twice(x):
        red, green, blue = torch.div(x.permute(0, -1, -3, -2), 255).unbind(dim=-3)
        return [red.mul(0.2989).add(green.mul(0.587)).add(blue.mul(0.114)), red.mul(2)]

    for call, shape in ((planes, (2, 3, 90, 90)), (twice, (2, 90, 90, 3))):
        probes = [[torch.randint(256, shape, dtype=torch.uint8)] for _ in range(3)]
        captured = Captured([], call, probes)
        assert "grey_pictures" not in calls_of(captured)
        assert captured.bind()
        assert all(map(torch.equal, captured.run(*probes[0]), call(*probes[0])))


def test_what_a_step_was_bound_with_is_told_apart():
    """A step that stays bound must not outlive the values, or the memory, it was bound with."""
    mask, scale = torch.tensor([True, False]), torch.ones(2)
    probes = [[torch.randn(2)] for _ in range(3)]
    captured = Captured([], lambda x: [torch.where(~mask, x * (scale + 1), x)], probes)
    before = captured.bound_with(but=mask)
    mask.logical_not_()
    assert captured.bound_with(but=mask) == before
    scale.numpy()[0] = 3  # behind torch's back
    changed = captured.bound_with(but=mask)
    assert changed != before
    scale.data = scale.clone()
    assert captured.bound_with(but=mask) != changed
