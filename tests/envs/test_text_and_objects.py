"""Text, objects and tensors of their own shape: the predictable world tells its story, and every word is known."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from tensordict.nn import TensorDictModule

from reap.collectors import Collector
from reap.collectors.utils import split_trajectories
from reap.envs import GymEnv, PettingZooEnv, SerialEnv
from reap.errors import SpecMismatch, UsageError
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, check_env
from reap.trajectories import with_next
from tests import example_count
from tests.worlds.envs import CountingVector, SkippingWorld

BOX = CountingEnv.observation_space
WORDS = spaces.Text(60, charset="abcdefghijklmnopqrstuvwxyz0123456789 ")
PAIR = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def text_of(lane, episode, t):
    return f"lane {int(lane)} episode {int(episode)} step {int(t)}"


def items_of(lane, episode, t):
    """As many pairs as steps were made."""
    return np.array([[lane, episode * 10 + i] for i in range(int(t))], np.float32).reshape(-1, 2)


class TextEnv(CountingEnv):
    observation_space = spaces.Dict(observation=BOX, text=WORDS)

    def _observation(self):
        return {"observation": super()._observation(), "text": text_of(self.lane, self.episode, self.t)}


class StoryEnv(CountingEnv):
    observation_space = spaces.Dict(observation=BOX, text=WORDS, items=spaces.Sequence(PAIR))

    def _observation(self):
        items = tuple(items_of(self.lane, self.episode, self.t))
        text = text_of(self.lane, self.episode, self.t)
        return {"observation": super()._observation(), "text": text, "items": items}


class StackedEnv(StoryEnv):
    """The same, its sequence as one array."""

    observation_space = spaces.Dict(observation=BOX, text=WORDS, items=spaces.Sequence(PAIR, stack=True))

    def _observation(self):
        return {**super()._observation(), "items": items_of(self.lane, self.episode, self.t)}


class ScribblingEnv(StackedEnv):
    """The same, and writes over what it gave before."""

    memory = None

    def _observation(self):
        if self.memory is not None:
            self.memory["items"][...] = -1
        self.memory = super()._observation()
        return self.memory


def makers(kind, lengths):
    return [lambda one=one, lane=lane: kind(one, lane) for lane, one in enumerate(lengths)]


def assert_story(batch, expected):
    """Every column of the batch, frame by frame."""
    batch = batch if batch.ndim == 2 else batch.unsqueeze(0)
    for key, want in expected.items():
        assert np.array_equal(batch.get(key).numpy(), want), key
    for root in ((), ("next",)):
        seen = expected[(*root, "observation")]
        assert batch.get((*root, "text")).tolist() == [[text_of(*at) for at in lane] for lane in seen]
        if isinstance(batch, LazyStackedTensorDict):
            for lane, row in enumerate(batch.unbind(0)):
                for t, items in enumerate(row.get((*root, "items"), as_list=True)):
                    assert torch.equal(items, torch.from_numpy(items_of(*seen[lane, t]))), (root, lane, t)


DOORS = {
    "serial": lambda kind, lengths: SerialEnv(len(lengths), makers(kind, lengths)),
    **{
        f"sync vector, {mode.value}": lambda kind, lengths, mode=mode: SyncVectorEnv(
            makers(kind, lengths), autoreset_mode=mode
        )
        for mode in AutoresetMode
    },
}
patterns = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", [TextEnv, StoryEnv, StackedEnv, ScribblingEnv])
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), steps=st.integers(1, 7))
@settings(max_examples=example_count(20), deadline=None)
def test_one_lane(kind, lengths, steps):
    c = Collector(kind(lengths), EchoPolicy(), frames_per_batch=steps)
    world = CountingWorld([lengths])
    for _ in range(4):
        batch = c.next()
        assert batch.batch_size == torch.Size([steps])
        assert batch.names == ["time"]
        assert_story(batch, world.batch(steps))


@pytest.mark.parametrize("kind", [TextEnv, StoryEnv, StackedEnv])
@pytest.mark.parametrize("door", DOORS)
@given(lengths=patterns, steps=st.integers(1, 6), limit=st.sampled_from([None, 2]))
@settings(max_examples=example_count(10), deadline=None)
def test_lanes(kind, door, lengths, steps, limit):
    options = {} if limit is None else {"max_frames_per_traj": limit}
    c = Collector(DOORS[door](kind, lengths), EchoPolicy(), frames_per_batch=steps * len(lengths), **options)
    world = CountingWorld(lengths, limit=limit)
    for _ in range(3):
        batch = c.next()
        assert batch.names == [None, "time"]
        assert_story(batch, world.batch(steps))


def test_async_vector_env():
    lengths = [(3, 1), (2,)]
    env = AsyncVectorEnv(
        makers(TextEnv, lengths), shared_memory=False, autoreset_mode=AutoresetMode.SAME_STEP, context="fork"
    )
    c = Collector(env, EchoPolicy(), frames_per_batch=8)
    world = CountingWorld(lengths)
    for _ in range(3):
        assert_story(c.next(), world.batch(4))
    c.shutdown()


class TellingVector(CountingVector):
    """A vector env written by hand that cannot reset single lanes: its steps that are resets are no frames."""

    def __init__(self, lengths):
        super().__init__(lengths, AutoresetMode.NEXT_STEP)
        self.single_observation_space = StoryEnv.observation_space

    def _tell(self, seen):
        items = tuple(tuple(items_of(*one)) for one in seen)
        return {"observation": seen, "text": tuple(text_of(*one) for one in seen), "items": items}

    def reset(self, **options):
        seen, info = super().reset(**options)
        return self._tell(seen), info

    def step(self, actions):
        seen, *rest = super().step(actions)
        return self._tell(seen), *rest


@given(lengths=patterns, steps=st.integers(1, 8))
@settings(max_examples=example_count(20), deadline=None)
def test_skipped_steps_leave_blanks(lengths, steps):
    c = Collector(TellingVector(lengths), EchoPolicy(), frames_per_batch=steps * len(lengths))
    world = SkippingWorld(lengths)
    for _ in range(3):
        batch, want = c.next(), world.batch(steps)
        for key, column in want.items():
            assert np.array_equal(batch.get(key).numpy(), column), key
        for lane, row in enumerate(batch.unbind(0)):
            for t, frame in enumerate(row.unbind(0)):
                for part in (frame, frame["next"]):
                    real = want[("collector", "mask")][lane, t]
                    assert part["text"] == (text_of(*part["observation"]) if real else "")
                    assert np.array_equal(part["items"], items_of(*part["observation"]))


def test_last_observations_of_different_shape_in_one_step():
    lengths = [(2,), (1, 1)]
    env = SyncVectorEnv(makers(StackedEnv, lengths), autoreset_mode=AutoresetMode.SAME_STEP)
    c = Collector(env, EchoPolicy(), frames_per_batch=12)
    world = CountingWorld(lengths)
    for _ in range(3):
        assert_story(c.next(), world.batch(6))


def two(kind=StoryEnv, lengths=((3, 2), (2,))):
    return SerialEnv(len(lengths), makers(kind, lengths))


def test_batches_look_as_torchrl_makes_them():
    batch = Collector(two(TextEnv), frames_per_batch=12).next()
    assert isinstance(batch, TensorDict)
    assert isinstance(batch.get("text"), NonTensorStack)
    assert isinstance(batch[0, 1].get("text"), NonTensorData)
    assert batch[0, 1]["text"] == "lane 0 episode 0 step 1"
    assert batch[1]["next", "text"][:2] == ["lane 1 episode 0 step 1", "lane 1 episode 0 step 2"]

    batch = Collector(two(), frames_per_batch=12).next()
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch["observation"].shape == (2, 6, 3)
    assert batch[1, 1]["items"].shape == (1, 2)
    assert batch[1, 1]["next", "items"].shape == (2, 2)
    assert batch.get("items", as_padded_tensor=True).shape == (2, 6, 2, 2)
    assert batch[0].get("items", as_nested_tensor=True).offsets().tolist() == [0, 0, 1, 3, 3, 4, 4]
    with pytest.raises(RuntimeError, match="stack"):
        batch["items"]


def test_kept_batches_never_change_and_are_the_consumers_own():
    c = Collector(two(), EchoPolicy(), frames_per_batch=8)
    world = CountingWorld([(3, 2), (2,)])
    kept = [(c.next(), world.batch(4)) for _ in range(5)]
    for batch, want in kept:
        assert_story(batch, want)
    for batch, _ in kept[:3]:
        for row in batch.unbind(0):
            for frame in row.unbind(0):
                frame["next", "items"].fill_(-9)
    assert all(
        torch.equal(frame["items"], torch.from_numpy(items_of(*frame["observation"])))
        for batch, _ in kept
        for row in batch.unbind(0)
        for frame in row.unbind(0)
    )
    assert_story(c.next(), world.batch(4))


class Thing:
    """An observation of no known kind, counted while it lives."""

    alive = weakref.WeakSet()

    def __init__(self, where):
        self.where = where
        self.alive.add(self)

    def __deepcopy__(self, _):
        return Thing(self.where)


class Anything(gym.Space):
    def contains(self, x):
        return isinstance(x, Thing)


class ThingEnv(CountingEnv):
    observation_space = spaces.Dict(observation=BOX, thing=Anything())
    thing = None

    def _observation(self):
        if self.thing is None:
            self.thing = Thing(None)
        self.thing.where = (self.lane, self.episode, self.t)  # one object, changed at every step
        return {"observation": super()._observation(), "thing": self.thing}


def living():
    gc.collect()
    return len(Thing.alive)


def test_objects_are_copied_and_live_as_long_as_their_batch():
    before = living()
    c = Collector(two(ThingEnv), EchoPolicy(), frames_per_batch=8)
    world = CountingWorld([(3, 2), (2,)])
    idle = living()
    held = []
    for i in range(6):
        batch, want = c.next(), world.batch(4)
        for root in ((), ("next",)):
            cells = batch.get((*root, "thing")).tolist()
            assert [[list(x.where) for x in lane] for lane in cells] == want[(*root, "observation")].tolist()
        if i < 4:
            held.append(batch)
    del batch, cells
    held.clear()
    assert living() == idle
    c.next()
    assert living() == idle
    del c
    assert living() == before


def test_a_rollout_that_fails_keeps_nothing():
    class Fails(ThingEnv):
        def step(self, action):
            if self.episode == 1:
                raise OSError("gone")
            return super().step(action)

    c = Collector(Fails((3,)), EchoPolicy(), frames_per_batch=8)
    idle = living()
    with pytest.raises(Exception, match="gone"):
        c.next()
    assert living() == idle


# ---- policies --------------------------------------------------------------------------------------------------------


def said(text):
    return torch.tensor([[float(one.split()[-1])] for one in text])


def test_policies_read_text_and_items():
    def by_list(text, items):
        assert [int(t[0]) for t in said(text)] == [len(x) for x in items]
        items[0].fill_(7)  # its own copy
        return said(text)

    def by_tensordict(td):
        assert isinstance(td, LazyStackedTensorDict)
        td["action"] = said(td.get("text").tolist()) + torch.tensor(
            [[x.numel()] for x in td.get("items", as_list=True)]
        )
        return td

    module = TensorDictModule(said, in_keys=["text"], out_keys=["action"])
    for policy, scale in ((by_list, 1), (by_tensordict, 3), (module, 1)):
        c = Collector(two(), policy, frames_per_batch=8)
        world = CountingWorld([(3, 2), (2,)])
        for _ in range(3):
            batch, want = c.next(), world.batch(4)
            assert torch.equal(batch["action"], batch["observation"][..., 2:] * scale)
            assert np.array_equal(batch["next", "observation"], want[("next", "observation")])
            assert all(bool((x != 7).all()) for row in batch.get("items", as_list=True) for x in row)


def test_one_lane_is_read_without_a_list():
    def policy(text, items):
        assert text == text_of(0, *text.split()[3::2])
        return torch.tensor([float(len(items))])

    module = TensorDictModule(policy, in_keys=["text", "items"], out_keys=["action"])
    for one in (policy, module):
        batch = Collector(StoryEnv((3, 2)), one, frames_per_batch=9).next()
        assert torch.equal(batch["action"], batch["observation"][:, 2:])


def test_policies_that_read_tensors_see_nothing_new():
    from reap.core.policies.call_policy import CallPolicy
    from reap.core.policies.flat_policy import FlatPolicy

    modules = {
        FlatPolicy: TensorDictModule(EchoPolicy(), in_keys=["observation"], out_keys=["action"]),
        CallPolicy: EchoPolicy(),
    }
    for kind, policy in modules.items():
        c = Collector(two(), policy, frames_per_batch=8, capture=False)
        assert type(c._backend.worker.policy) is kind
        assert_story(c.next(), CountingWorld([(3, 2), (2,)]).batch(4))

    seen = []
    module = modules[FlatPolicy]
    module.register_forward_pre_hook(lambda m, args: seen.append(type(args[0])))  # no longer flat
    assert_story(Collector(two(), module, frames_per_batch=8).next(), CountingWorld([(3, 2), (2,)]).batch(4))
    assert set(seen) == {TensorDict}


def test_a_policy_may_not_write_over_them():
    module = TensorDictModule(lambda o: (o[..., :1], o), in_keys=["observation"], out_keys=["action", "text"])
    with pytest.raises(SpecMismatch, match="policy writes 'text'"):
        Collector(two(), module, frames_per_batch=8)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TextEnv, StoryEnv])
def test_split_trajectories(kind):
    c = Collector(two(kind), EchoPolicy(), frames_per_batch=8, split_trajs=True)
    batch = c.next()
    mask = batch["collector", "mask"]
    assert mask.sum(1).tolist() == [3, 1, 2, 2]
    for row, valid in zip(batch.unbind(0), mask):
        for frame, real in zip(row.unbind(0), valid):
            for root in ((), ("next",)):
                seen = frame[(*root, "observation")]
                assert frame[(*root, "text")] == (text_of(*seen) if real else None)
                if kind is StoryEnv:
                    assert torch.equal(frame[(*root, "items")], torch.from_numpy(items_of(*seen)) * bool(real))
    with pytest.raises(UsageError, match="as_nested"):
        split_trajectories(Collector(two(kind), frames_per_batch=8).next(), as_nested=True)


@pytest.mark.parametrize("kind", [TextEnv, StoryEnv])
@pytest.mark.parametrize("layout", ["padded", "cat"])
def test_whole_trajectories(kind, layout):
    c = Collector(two(kind), EchoPolicy(), frames_per_batch=4, trajs_per_batch=3, traj_format=layout)
    for _ in range(3):
        batch = c.next()
        flat = batch[batch["collector", "mask"]] if layout == "padded" else batch
        assert int(flat["next", "done"].sum()) == 3
        for frame in flat.unbind(0):
            assert frame["text"] == text_of(*frame["observation"])
            assert frame["next", "text"] == text_of(*frame["next", "observation"])
            if kind is StoryEnv:
                assert len(frame["next", "items"]) == frame["next", "observation"][2]


@pytest.mark.parametrize("kind", [TextEnv, StoryEnv])
def test_lanes_at_rest_show_blanks(kind):
    def policy(text):
        return torch.tensor([[float(len(one))] for one in text])

    c = Collector(two(kind, ((3,), (2,))), policy, frames_per_batch=10, reset_when_done=False)
    batch = c.next()
    assert batch["collector", "mask"].sum(1).tolist() == [3, 2]
    assert batch.get("text").tolist()[1] == [text_of(1, 0, 0), text_of(1, 0, 1), "", "", ""]
    assert batch.get(("next", "text")).tolist()[1] == [text_of(1, 0, 1), text_of(1, 0, 2), "", "", ""]
    if kind is StoryEnv:
        assert [len(x) for x in batch.get("items", as_list=True)[0]] == [0, 1, 2, 0, 0]


def test_truncation_is_marked_in_lazy_batches_too():
    batch = Collector(two(), EchoPolicy(), frames_per_batch=8, set_truncated=True).next()
    assert batch["next", "truncated"][..., -1, 0].tolist() == [True, True]


def test_storing_device_and_random_frames():
    c = Collector(two(), EchoPolicy(), frames_per_batch=8, storing_device="cpu", init_random_frames=8)
    batch = c.next()
    assert batch[1, 1]["text"] == text_of(1, 0, 1)
    want = CountingWorld([(3, 2), (2,)])
    want.batch(4)
    assert_story(c.next(), want.batch(4))


def test_compact_observations():
    full = Collector(two(TextEnv), EchoPolicy(), frames_per_batch=8).next()
    batch = Collector(two(TextEnv), EchoPolicy(), frames_per_batch=8, compact_obs=True).next()
    assert ("next", "observation") not in batch.keys(True)
    batch = with_next(batch)
    assert torch.equal(batch["next", "observation"], full["next", "observation"])
    assert batch.get(("next", "text")).tolist() == full.get(("next", "text")).tolist()
    with pytest.raises(UsageError, match=r"compact_obs.*'items'.*ragged"):
        Collector(two(), frames_per_batch=8, compact_obs=True)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"return_same_td.*'text'"):
        Collector(two(), frames_per_batch=8, return_same_td=True)
    with pytest.raises(UsageError, match="'words'.*no tensor form"):
        GymEnv(TextEnv(), info_keys={"words": spaces.Sequence(BOX)})
    with pytest.raises(UsageError, match="no tensor form"):
        GymEnv(TextEnv(), info_keys={"words": spaces.Text(3)})

    class Mute(TextEnv):
        def _observation(self):
            return {**super()._observation(), "text": None}

    with pytest.raises(SpecMismatch, match="None for a Text space"):
        Collector(Mute(), frames_per_batch=8)


def test_objects_that_cannot_be_copied_are_named():
    class Locked(ThingEnv):
        def _observation(self):
            return {**super()._observation(), "thing": threading.Lock()}

    with pytest.raises(SpecMismatch, match="lane 0.*a lock among the observations cannot be copied"):
        Collector(Locked(), frames_per_batch=8)


def test_a_policy_with_memory():
    class Remembers(torch.nn.Module):
        carry = {"words": torch.zeros(1)}

        def forward(self, text, words):
            words = words + torch.tensor([[float(len(one.split()))] for one in text])
            return words, words

    batch = Collector(two(), Remembers(), frames_per_batch=8).next()
    assert torch.equal(batch["action"], (batch["observation"][..., 2:] + 1) * 6)


def test_agents_with_text_are_refused():
    from pettingzoo import ParallelEnv

    class Talk(ParallelEnv):
        metadata = {"name": "talk"}
        possible_agents = agents = ["a", "b"]

        def observation_space(self, agent):
            return spaces.Text(5)

        def action_space(self, agent):
            return spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            return {"a": "hi", "b": "ho"}, {"a": {}, "b": {}}

    with pytest.raises(UsageError, match="Text.*no tensor form"):
        PettingZooEnv(Talk())


# ---- spaces ----------------------------------------------------------------------------------------------------------


class Sampled(gym.Env):
    action_space = PAIR

    def __init__(self, space):
        self.observation_space, self.seen = space, []
        space.seed(1)

    def _observe(self):
        value = self.observation_space.sample()
        self.seen.append(copy.deepcopy(value))
        return value

    def reset(self, *, seed=None, options=None):
        return self._observe(), {}

    def step(self, action):
        return self._observe(), 1.0, False, False, {}


class Patches(gym.Space):
    """Images of any height."""

    def __init__(self, shape=(-1, 3)):
        super().__init__(shape, np.float32)

    def sample(self):
        return self.np_random.random((int(self.np_random.integers(0, 4)), 3), np.float32)

    def contains(self, x):
        return x.shape[1:] == (3,)


SPACES = {
    "boxes": (spaces.Sequence(PAIR), lambda v: np.array(v, np.float32).reshape(-1, 2)),
    "boxes, stacked": (spaces.Sequence(PAIR, stack=True), lambda v: v),
    "numbers": (spaces.Sequence(spaces.Box(0, 1, (), np.float64)), lambda v: np.array(v).reshape(-1, 1)),
    "choices": (spaces.Sequence(spaces.Discrete(4, start=2)), lambda v: np.eye(4)[np.array(v, int).reshape(-1) - 2]),
    "bits": (spaces.Sequence(spaces.MultiBinary(3), stack=True), lambda v: v),
    "own": (Patches(), lambda v: v),
    "own, free": (Patches(None), lambda v: v),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("vector", [False, True])
def test_ragged_spaces(name, vector):
    space, form = SPACES[name]
    space = copy.deepcopy(space)
    env = Sampled(space)
    c = Collector(SyncVectorEnv([lambda: env]) if vector else GymEnv(env), frames_per_batch=12)
    batch = c.next()
    batch = batch[0] if vector else batch
    for root, rows in (((), env.seen[:12]), (("next",), env.seen[1:13])):
        for have, value in zip(batch.get((*root, "observation"), as_list=True), rows):
            want = torch.as_tensor(np.array(form(value)))
            assert have.shape == want.shape
            assert torch.equal(have.double(), want.double())
    assert {x.dtype for x in batch.get("observation", as_list=True)} == {batch[0]["observation"].dtype}


OBJECTS = {
    "text": spaces.Text(9),
    "graph": spaces.Graph(PAIR, spaces.Discrete(3)),
    "one of": spaces.OneOf((spaces.Discrete(2), PAIR)),
    "texts": spaces.Sequence(spaces.Text(4)),
    "dicts": spaces.Sequence(spaces.Dict(a=PAIR, b=spaces.Text(3))),
    "sequences": spaces.Sequence(spaces.Sequence(PAIR)),
}


def alike(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(np.array_equal(a, b))


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("vector", [False, True])
def test_object_spaces(name, vector):
    env = Sampled(spaces.Dict(x=PAIR, thing=copy.deepcopy(OBJECTS[name])))
    c = Collector(SyncVectorEnv([lambda: env]) if vector else GymEnv(env), frames_per_batch=9)
    batch = c.next()
    batch = batch[0] if vector else batch
    assert isinstance(batch, TensorDict)
    for t in range(9):
        for frame, seen in ((batch[t], env.seen[t]), (batch[t]["next"], env.seen[t + 1])):
            assert np.array_equal(frame["x"], seen["x"])
            assert alike(frame.get("thing").data, seen["thing"])


def test_a_bare_text_and_a_tuple_with_text():
    env = Sampled(spaces.Text(6))
    assert Collector(GymEnv(env), frames_per_batch=5).next().get("observation").tolist() == env.seen[:5]
    env = Sampled(spaces.Tuple((spaces.Text(6), spaces.Text(6))))
    batch = Collector(GymEnv(env), frames_per_batch=5).next()
    assert batch.get(("next", "observation", "1")).tolist() == [seen[1] for seen in env.seen[1:6]]


def test_an_array_of_the_wrong_rank_is_named():
    class Wrong(Patches):
        def sample(self):
            return np.zeros((2, 4), np.float32)

    with pytest.raises(SpecMismatch, match=r"float32\[2, 4\], its space says float32\[2, 3\]"):
        Collector(GymEnv(Sampled(Wrong())), frames_per_batch=5)


# ---- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TextEnv, StoryEnv])
def test_by_hand(kind):
    env = two(kind)
    td = env.reset()
    for t in (1, 2):
        assert td.get("text").tolist() == [text_of(*seen) for seen in td["observation"]]
        stepped, td = env.step_and_maybe_reset(env.rand_action(td))
        assert stepped.get(("next", "text")).tolist() == [text_of(lane, 0, t) for lane in range(2)]
    assert td.get("text").tolist() == [text_of(0, 0, 2), text_of(1, 1, 0)]
    assert not td["done"].any()
    if kind is StoryEnv:
        assert [len(x) for x in td.get("items", as_list=True)] == [2, 0]
    batch = env.rollout(4, EchoPolicy(), break_when_any_done=False)
    assert batch.get("text").tolist() == [[text_of(*seen) for seen in lane] for lane in batch["observation"]]
    assert env.rollout(9).batch_size == torch.Size([2, 2])

    one = GymEnv(kind((2,)))
    td = one.rand_step(one.reset())
    assert (td["text"], td["next", "text"]) == (text_of(0, 0, 0), text_of(0, 0, 1))
    assert one.rollout(5).get("text").tolist() == [text_of(0, 1, 0), text_of(0, 1, 1)]


@pytest.mark.parametrize("kind", [TextEnv, StoryEnv, ScribblingEnv, ThingEnv])
def test_check_env_lets_them_pass(kind):
    assert not [remark for remark in check_env(lambda: kind((4,))) if "changes the observation" not in remark]


def test_envs_of_others():
    with pytest.raises(TypeError, match="create_env_kwargs must be a mapping"):
        Collector(CountingEnv, frames_per_batch=3, create_env_kwargs=[1])
    with pytest.raises(UsageError, match="already has several lanes"):
        SerialEnv(2, lambda: CountingVector([(3,)], AutoresetMode.SAME_STEP))
