"""Policies with memory: carried per lane, begun anew with every episode, delivered so that it can be replayed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from reap.collectors import AsyncBatchedCollector, Collector
from reap.core.policies.as_policy import PolicyWarning
from reap.envs import GymEnv, SerialEnv
from reap.errors import UsageError
from reap.testing import CountingEnv
from tests import example_count
from tests.worlds.envs import CountingVector

LENGTHS = [(3, 1, 5), (2, 2, 7), (4,)]


def lanes(lengths=LENGTHS):
    return SerialEnv(len(lengths), [lambda one=one, i=i: CountingEnv(one, i) for i, one in enumerate(lengths)])


class Steps(nn.Module):
    """Counts the steps it has seen in this episode: its memory must equal the env's own count."""

    carry = {"seen": torch.zeros(1)}

    def forward(self, observation, seen):
        return observation[..., :1], seen + 1


class GRU(nn.Module):
    def __init__(self, inputs=3, hidden=8):
        super().__init__()
        self.cell, self.head = nn.GRUCell(inputs, hidden), nn.Linear(hidden, 1)
        self.carry = {"hidden": torch.zeros(hidden)}

    def forward(self, observation, hidden):
        hidden = self.cell(observation, hidden)
        return self.head(hidden), hidden


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3),
    steps=st.integers(1, 6),
)
@settings(max_examples=example_count(30), deadline=None)
def test_memory_is_kept_in_an_episode_and_begun_anew_after_it(lengths, steps):
    c = Collector(lanes(lengths), Steps(), frames_per_batch=steps * len(lengths))
    for _ in range(4):
        batch = c.next()
        t = batch["observation"][..., 2:]
        assert torch.equal(batch["seen"], t)
        assert torch.equal(batch["next", "seen"], t + 1)
        assert torch.equal(batch["is_init"], t == 0)
        assert not batch["next", "is_init"].any()
        assert batch["is_init"].dtype is torch.bool


def test_a_carry_that_begins_elsewhere_than_zero():
    policy = Steps()
    policy.carry = {"seen": torch.tensor([10.0])}
    batch = Collector(lanes(), policy, frames_per_batch=30).next()
    assert torch.equal(batch["seen"], batch["observation"][..., 2:] + 10)


def replay(batch, step, hidden, first):
    """Run the rows of a batch again, in order of time, from the delivered state of the first row."""
    outputs = []
    state = batch[hidden][:, 0]
    for t in range(batch.shape[1]):
        state = torch.where(batch["is_init"][:, t], first, state)
        assert torch.equal(state, batch[hidden][:, t])
        action, state = step(batch["observation"][:, t], state)
        outputs.append(action)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("form", ["module", "TensorDictModule", "sequence"])
def test_replaying_reproduces_the_online_outputs_bit_for_bit(form):
    torch.manual_seed(0)
    net = GRU()
    policy = {
        "module": lambda: net,
        "TensorDictModule": lambda: TensorDictModule(net, ["observation", "hidden"], ["action", ("next", "hidden")]),
        "sequence": lambda: TensorDictSequential(
            TensorDictModule(lambda o: o * 0.5, ["observation"], ["scaled"]),
            TensorDictModule(net, ["scaled", "hidden"], ["action", ("next", "hidden")]),
        ),
    }[form]()
    scale = 0.5 if form == "sequence" else 1.0
    c = Collector(lanes(), policy, frames_per_batch=45)
    for _ in range(3):
        batch = c.next()
        with torch.no_grad():
            again = replay(batch, lambda o, h: net(o * scale, h), "hidden", torch.zeros(8))
        assert torch.equal(again, batch["action"])


def test_single_env_and_rollout_by_hand():
    batch = Collector(CountingEnv(), Steps(), frames_per_batch=12).next()
    assert batch["seen"].shape == (12, 1)
    assert torch.equal(batch["seen"], batch["observation"][:, 2:])
    out = GymEnv(CountingEnv((9,))).rollout(5, Steps())
    assert out["seen"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_memory_survives_resets_limits_and_random_frames():
    c = Collector(lanes(), Steps(), frames_per_batch=12, max_frames_per_traj=2, init_random_frames=12)
    random = c.next()
    assert random["next", "seen"].eq(0).all()  # nobody acted
    c.reset()
    for _ in range(3):
        batch = c.next()
        assert torch.equal(batch["seen"], batch["step_count"].float())
    c.set_seed(1)
    assert c.next()["is_init"][:, 0].all()


def test_an_interrupted_batch_goes_on_with_its_memory():
    class Stop:
        asked = 0

        def collection_stopped(self):
            self.asked += 1
            return self.asked % 3 == 0

    c = Collector(SerialEnv(2, lambda: CountingEnv((50,))), Steps(), frames_per_batch=10, interruptor=Stop())
    seen = torch.cat([b["seen"][:, :3] for b in (c.next() for _ in range(5))], 1)
    assert seen[0, :, 0].tolist() == list(range(15))


def test_losing_the_carry_is_an_error():
    class Forgets(nn.Module):
        carry = {"seen": torch.zeros(1)}

        def forward(self, observation, seen):
            return observation[..., :1]

    with pytest.raises(UsageError, match=r"the new carry, \['seen'\] are expected"):
        Collector(lanes(), Forgets(), frames_per_batch=12)
    lost = TensorDictModule(lambda o, h: o[..., :1], ["observation", "seen"], ["action"])
    lost.carry = {"seen": torch.zeros(1)}
    with pytest.raises(UsageError, match="declares the carry.*does not give"):
        Collector(lanes(), lost, frames_per_batch=12)
    undeclared = TensorDictModule(lambda o: (o[..., :1], o), ["observation"], ["action", ("next", "h")])
    with pytest.raises(UsageError, match="has no first value.*carry ="):
        Collector(lanes(), undeclared, frames_per_batch=12)
    unknown = TensorDictModule(lambda o, h: (o[..., :1], h + 1), ["observation", "h"], ["action", ("next", "h")])
    with pytest.raises(UsageError, match="policy reads.*'h'.*carry ="):
        Collector(lanes(), unknown, frames_per_batch=12)
    clash = Steps()
    clash.carry = {"observation": torch.zeros(3)}
    with pytest.raises(UsageError, match="already an observation of the env"):
        Collector(lanes(), clash, frames_per_batch=12)
    wrong = Steps()
    wrong.carry = {"seen": 3}
    with pytest.raises(TypeError, match="must be a tensor"):
        Collector(lanes(), wrong, frames_per_batch=12)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("single", [False, True])
def test_torchrl_recurrent_modules(kind, single):
    modules = pytest.importorskip("torchrl.modules")
    torch.manual_seed(0)
    if kind == "lstm":
        net = modules.LSTMModule(input_size=3, hidden_size=6, in_key="observation", out_key="feature")
        states = ["recurrent_state_h", "recurrent_state_c"]
    else:
        net = modules.GRUModule(input_size=3, hidden_size=6, in_key="observation", out_key="feature")
        states = ["recurrent_state"]
    policy = TensorDictSequential(net, TensorDictModule(nn.Linear(6, 1), ["feature"], ["action"]))
    env = CountingEnv() if single else lanes()
    c = Collector(env, policy, frames_per_batch=12)
    for _ in range(3):
        batch = c.next().reshape(1 if single else 3, -1)
        for key in states:
            assert batch[key].shape[2:] == (1, 6)
            assert (batch[key][batch["is_init"].squeeze(-1)] == 0).all()
            going = ~batch["next", "done"][:, :-1, 0]
            assert torch.equal(batch["next", key][:, :-1][going], batch[key][:, 1:][going])
        with torch.no_grad():
            for t in range(batch.shape[1]):  # each row replays by itself from its own state
                row = batch[:, t].select("observation", "is_init", *states).clone()
                again = policy(row[0] if single else row)["action"]
                assert torch.equal(again.reshape(batch[:, t]["action"].shape), batch[:, t]["action"])


def test_versions_of_numpy_and_dtypes():
    policy = Steps()
    policy.carry = {"seen": torch.zeros(1, dtype=torch.float64)}
    batch = Collector(lanes(), policy, frames_per_batch=12).next()
    assert batch["seen"].dtype is torch.float64
    assert np.array_equal(batch["seen"].numpy(), batch["observation"][..., 2:].double().numpy())


def begins_by_itself(observation, hidden=None):
    hidden = observation.new_full((*observation.shape[:-1], 1), -5.0) if hidden is None else hidden
    return hidden, hidden + 1


def optional():
    return TensorDictModule(begins_by_itself, ["observation", "hidden"], ["action", "hidden"])


@pytest.mark.parametrize("make", [lambda: lanes(((3,), (4,))), lambda: GymEnv(CountingEnv((3,)))], ids=["lanes", "one"])
def test_an_input_nobody_provides_is_none_at_first_and_where_all_lanes_have_ended(make):
    """A lane that ends while others go on finds zeros."""
    c = Collector(make(), optional(), frames_per_batch=16)
    batch = c.next()
    first, new = (batch[0], 0) if batch.ndim == 2 else (batch, -5)
    assert first["action"][:7, 0].tolist() == [-5, -4, -3, new, new + 1, new + 2, new]
    c.reset()
    assert c.next()["action"][..., 0].reshape(-1)[0] == -5
    assert torch.equal(batch["hidden"], batch["action"] + 1)


def test_seeds_make_the_first_value_again():
    c = Collector(lanes(((3,), (4,))), optional(), frames_per_batch=8)
    c.set_seed(1)
    first = c.next()["action"].clone()
    c.set_seed(1)
    assert torch.equal(c.next()["action"], first)


def test_random_frames_leave_nothing_where_an_input_is_none_at_first():
    c = Collector(lanes(((9,), (9,))), optional(), frames_per_batch=8, init_random_frames=8)
    c.next()
    assert c.next()["action"][:, 0, 0].tolist() == [-5, -5]


def test_cells_of_torch_begin_by_themselves():
    cell = TensorDictModule(nn.GRUCell(3, 8), ["observation", "hidden"], ["hidden"])
    policy = TensorDictSequential(cell, TensorDictModule(nn.Linear(8, 1), ["hidden"], ["action"]))
    batch = Collector(lanes(((3,), (4,))), policy, frames_per_batch=8).next()
    hidden = None
    for t in range(3):
        hidden = policy[0].module(batch["observation"][:, t], hidden)
        assert torch.allclose(batch["hidden"][:, t], hidden, atol=1e-6)


def test_lanes_taken_as_they_come_remember_each_its_own():
    envs = [lambda: GymEnv(CountingEnv((99,)))] * 3
    with AsyncBatchedCollector(envs, optional(), frames_per_batch=30, min_batch_size=3) as c:
        batch = c.next()
    for n in range(3):
        of = batch[batch["env_index"] == n]
        assert of["action"][:, 0].tolist() == [-5.0 + t for t in range(len(of))]


def test_memory_where_a_step_is_spent_on_a_reset():
    c = Collector(CountingVector([(3,), (2,)], AutoresetMode.NEXT_STEP), Steps(), frames_per_batch=40)
    for _ in range(3):
        batch = c.next()
        rows = batch[batch["collector", "mask"]]
        assert torch.equal(rows["seen"], rows["observation"][:, 2:])
        assert torch.equal(rows["is_init"], rows["observation"][:, 2:] == 0)


def test_memory_that_begins_elsewhere_and_random_frames():
    policy = Steps()
    policy.carry = {"seen": torch.tensor([5.0])}
    c = Collector(CountingEnv((50,)), policy, frames_per_batch=4, init_random_frames=4)
    c.next()
    assert c.next()["seen"][:, 0].tolist() == [5, 6, 7, 8]


class OnItself(nn.Module):
    """Keeps something on itself, in one of several ways; an LSTM's state is a tuple, with the layers first."""

    def __init__(self, what):
        super().__init__()
        self.what, self.h, self.calls, self.seen = what, None, 0, None
        self.cell, self.lstm, self.norm = nn.GRUCell(3, 8), nn.LSTM(3, 8, 2), nn.BatchNorm1d(3)
        self.head = nn.Linear(8, 1)

    def forward(self, observation):
        self.calls += 1
        if self.what == "state":
            self.h = self.cell(observation, self.h)
            return self.head(self.h)
        if self.what == "lstm":
            out, self.h = self.lstm(observation[None], self.h)
            return self.head(out[0])
        if self.what == "look":
            self.seen = self.cell(observation)  # for somebody who wants to see it; it does not act by it
            return self.head(self.seen)
        if self.what == "norm":
            return self.head(self.cell(self.norm(observation)))
        mean = observation.mean(0)  # statistics, of as many numbers as there are lanes
        self.seen = mean if self.seen is None else 0.9 * self.seen + 0.1 * mean
        return self.head(self.cell(observation - self.seen))


@pytest.mark.parametrize("what", ["state", "lstm"])
def test_state_that_a_policy_keeps_on_itself_is_warned_of(what):
    policy = OnItself(what)
    with pytest.warns(PolicyWarning, match="OnItself keeps state on itself \\(h\\); it is not reset.*carry") as told:
        collector = Collector(lanes(), policy, frames_per_batch=12)
    assert [one.filename for one in told] == [__file__], "the line of who made it"
    assert policy.h is None
    assert policy.calls == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector.next()


@pytest.mark.parametrize("what", ["look", "norm", "statistics"])
def test_what_else_a_policy_keeps_on_itself_is_its_own(what):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Collector(lanes(), OnItself(what), frames_per_batch=12).next()


class Two(nn.Module):
    """Has two states, `h` and `c`."""

    carry = {"h": torch.zeros(1), "c": torch.zeros(1)}

    def __init__(self, gives=lambda action, h, c: (action, h, c)):
        super().__init__()
        self.gives = gives

    def forward(self, observation, h, c):
        return self.gives(observation[..., :1], h + 1, c + 2)


class OneOfTwo(Two):
    carry = {"h": torch.zeros(1)}


class NoneOfTwo(Two):
    carry = None


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        (NoneOfTwo(), {}, r"observations \['observation'\]\. .* carry = {'h': first value of one lane}"),
        (OneOfTwo(), {}, r"its carry \['h'\]\. .* carry = {'c': first value of one lane}"),
        (Two(lambda a, h, c: {"action": a, "h": h}), {}, r"carry \['c'\] but does not give.*under its own name"),
        (Two(lambda a, h, c: (a, h)), {}, r"\['action'\], and then the new carry, \['h', 'c'\] are expected"),
        (
            Two(lambda a, h, c: (a, h)),
            {"out_keys": ["action"]},
            r"2 tensors; out_keys names \['action'\], and then the new carry, \['h', 'c'\]",
        ),
    ],
)
def test_errors_say_what_to_do_with_states(policy, options, words):
    with pytest.raises(UsageError, match=words):
        Collector(lanes(), policy, frames_per_batch=12, **options)


@pytest.mark.parametrize("named", [["action", "value"], ["action", "value", "h", "c"], ["action", "value", "h"]])
def test_out_keys_may_name_the_states(named):
    policy = Two(lambda action, h, c: (action, action + 7, h, c))
    batch = Collector(lanes(), policy, frames_per_batch=24, out_keys=named).next()
    t = batch["observation"][..., 2:]
    assert torch.equal(batch["h"], t)
    assert torch.equal(batch["next", "c"], 2 * t + 2)
    assert torch.equal(batch["value"], batch["action"] + 7)
