"""JAX envs: the predictable world in each of their dialects, and gymnax and brax against loops written by hand."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reap.collectors import Collector
from reap.envs import JaxEnv
from reap.envs.adapters.jax import JaxLanes
from reap.envs.adapters.torch_native import DeviceTorchLanes
from reap.errors import MissingDependency, UsageError, WrongArgument, WrongState
from reap.seeding import chain
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from tests import example_count

jax = pytest.importorskip("jax")
jnp = jax.numpy

SEED, EPISODES, LIMIT = 3, 40, 100


def key_of(seed, episode, t):
    """The documented way from a lane's seed to the key of one step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(seed), episode), t)


@functools.cache
def first_keys(lanes):
    """[lane, episode] → the key its reset is given."""
    seeds = np.array(chain(SEED, lanes)[0], np.uint32)
    return jax.vmap(lambda s: jax.vmap(lambda e: key_of(s, e, 0))(jnp.arange(EPISODES)))(seeds)


class Count(NamedTuple):
    lane: jax.Array
    episode: jax.Array
    t: jax.Array
    length: jax.Array
    time: jax.Array


class Counting:
    """CountingEnv as a pure function. It has no memory: which lane and episode begins, it can only see by its key."""

    def __init__(self, lengths):
        self.keys = first_keys(len(lengths))
        self.lengths = jnp.array([[one[e % len(one)] for e in range(EPISODES)] for one in lengths])

    def begin(self, key):
        lane, episode = jnp.divmod((self.keys == key).all(-1).argmax(), EPISODES)
        length = self.lengths[lane, episode]
        return Count(lane, episode, jnp.int32(0), length, jnp.where(episode % 2, LIMIT - length, 0))

    def look(self, state):
        return jnp.stack([state.lane, state.episode, state.t]).astype(jnp.float32)

    def go(self, state, action):
        state = state._replace(t=state.t + 1, time=state.time + 1)
        return state, state.t + action[0] / 8

    def over(self, state):
        return state.t >= state.length


class Params(NamedTuple):
    max_steps_in_episode: int = LIMIT

    def replace(self, **changes):
        return self._replace(**changes)


class OldGymnax(Counting):
    """Before 1.0: one `done`, and a limit among the parameters. Odd episodes begin so late that they run into it."""

    default_params = Params()

    def action_space(self, params):
        return SimpleNamespace(low=-1e9, high=1e9, shape=(1,), dtype=np.float32)

    def observation_space(self, params):
        return None

    def reset_env(self, key, params):
        state = self.begin(key)
        return self.look(state), state

    def step_env(self, key, state, action, params):
        state, reward = self.go(state, action)
        return self.look(state), state, reward, self.is_terminal(state, params), {}

    def is_terminal(self, state, params):
        return (self.over(state) & (state.episode % 2 == 0)) | (state.time >= params.max_steps_in_episode)


class NewGymnax(OldGymnax):
    """From 1.0 on: the env tells the two apart."""

    def is_terminal(self, state, params):
        return self.over(state) & (state.episode % 2 == 0)

    def is_truncated(self, state, params):
        return state.time >= params.max_steps_in_episode


class State(NamedTuple):
    inner: Count
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict


class Brax(Counting):
    observation_size, action_size = 3, 1

    def reset(self, rng):
        state = self.begin(rng)
        return State(state, self.look(state), jnp.float32(0), jnp.float32(0), {"truncation": jnp.float32(0)})

    def step(self, state, action):
        inner, reward = self.go(state.inner, action)
        over, odd = self.over(inner), inner.episode % 2 == 1
        return State(inner, self.look(inner), reward, over.astype(float), {"truncation": (over & odd).astype(float)})


@pytest.mark.parametrize("dialect", [OldGymnax, NewGymnax, Brax])
@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 6),
    limit=st.none() | st.integers(1, 4),
)
@example(lengths=[(1,), (1,), (1,)], steps=6, limit=None)  # every step ends every lane
@example(lengths=[(4,), (4, 2)], steps=4, limit=None)  # together, at the edge of the batch
@settings(max_examples=example_count(2), deadline=None)
def test_the_predictable_world(dialect, lengths, steps, limit):
    env = JaxEnv(dialect(lengths), num_envs=len(lengths), seed=SEED)
    c = Collector(env, EchoPolicy(), frames_per_batch=steps * len(lengths), max_frames_per_traj=limit)
    world = CountingWorld(lengths, limit=limit)
    for _ in range(4):
        assert_same(c.next(), world.batch(steps))


def test_set_seed_begins_the_episodes_anew():
    env = JaxEnv(NewGymnax([(3, 1), (2,)]), num_envs=2)
    c = Collector(env, EchoPolicy(), frames_per_batch=12)
    for _ in range(2):
        c.set_seed(SEED)
        batch = c.next()
        want = CountingWorld([(3, 1), (2,)]).batch(6)
        assert np.array_equal(batch["observation"], want[("observation",)])


def test_seeds_where_rows_are_on_the_device():
    """The same lanes with the same seeds, whether their rows are the host's or tensors."""
    lanes = JaxEnv(NewGymnax([(3, 1), (2,)]), num_envs=2).lanes_env
    there, here = torch.zeros(2, 3), np.zeros((2, 3), np.float32)
    for seed in (SEED, SEED, SEED + 1):
        seeds = chain(seed, 2)[0]
        DeviceTorchLanes(lanes).reset(range(2), [there], seeds)
        lanes.reset(range(2), [here], seeds)
        assert np.array_equal(there, here)
        keys = [np.asarray(jax.random.PRNGKey(one)).tolist() for one in seeds]
        assert np.asarray(lanes.env._keys).tolist() == keys


def test_tensors_cross_without_a_copy():
    env = JaxEnv(NewGymnax([(3,), (3,)]), num_envs=2, seed=SEED).lanes_env.env
    env.reset(torch.ones(2, dtype=torch.bool))
    seen = []
    compiled = env._step_lanes
    env._step_lanes = lambda *given: (seen.append(given[-1]), compiled(*given))[1]
    shown, show = [], env._to_torch
    env._to_torch = lambda leaves: (shown.append(leaves[0]), show(leaves))[1]
    action = torch.zeros(2, 1)
    observation, *_ = env.step(action)
    assert seen[0].unsafe_buffer_pointer() == action.data_ptr()
    assert shown[0].unsafe_buffer_pointer() == observation.data_ptr()


def test_dict_bool_and_discrete_observations():
    class Rich(NewGymnax):
        def observation_space(self, params):
            return SimpleNamespace(spaces={"room": SimpleNamespace(n=7)})

        def look(self, state):
            return {"room": state.t, "inner": {"odd": state.t % 2 == 1, "far": state.t * 2.0}, "state": jnp.ones(2)}

        def action_space(self, params):
            return SimpleNamespace(n=3)

        def go(self, state, action):
            return super().go(state, action[None])

    for categorical in (True, False):
        env = JaxEnv(Rich([(5,)]), seed=SEED, categorical_action_encoding=categorical)
        batch = Collector(env, frames_per_batch=4).next()[0]
        room = batch["room"] if categorical else batch["room"].argmax(-1)
        assert batch["room"].dtype is torch.int64
        assert room.tolist() == [0, 1, 2, 3]
        assert batch["inner", "odd"][:, 0].tolist() == [0, 1, 0, 1]
        assert batch["next", "inner", "far"][:, 0].tolist() == [2, 4, 6, 8]
        assert batch["observation"].shape == (4, 2)
        chosen = batch["action"] if categorical else batch["action"].argmax(-1)
        assert torch.equal(batch["next", "reward"][:, 0], torch.arange(1, 5) + chosen / 8)


def gymnax_cartpole(limit):
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make("CartPole-v1")
    return env, params.replace(max_steps_in_episode=limit)


@pytest.mark.parametrize("limit", [12, 500])
def test_cartpole_follows_a_loop_by_hand(limit):
    env, params = gymnax_cartpole(limit)
    lanes, steps = 3, 60

    def policy(observation):
        balance = (observation[..., 2] + observation[..., 3] * 0.1 > 0.01).long()
        return balance if limit == 12 else torch.ones_like(balance)

    c = Collector(JaxEnv(env, params, num_envs=lanes), policy, frames_per_batch=lanes * steps)
    c.set_seed(11)
    got = c.next()
    reset, step = jax.jit(env.reset_env), jax.jit(env.step_env)
    for lane, seed in enumerate(chain(11, lanes)[0]):
        episode, t = 0, 0
        obs, state = reset(key_of(seed, 0, 0), params)
        for i in range(steps):
            row = got[lane, i]
            assert np.allclose(row["observation"], obs, atol=1e-6)
            t += 1
            obs, state, reward, *_ = step(key_of(seed, episode, t), state, int(row["action"]), params)
            fell = bool(abs(obs[0]) > params.x_threshold or abs(obs[2]) > params.theta_threshold_radians)
            assert np.allclose(row["next", "observation"], obs, atol=1e-6)  # also where the episode ends
            assert row["next", "reward"].item() == reward == 1
            assert (row["next", "terminated"].item(), row["next", "truncated"].item()) == (fell, t >= limit)
            if fell or t >= limit:
                episode, t = episode + 1, 0
                obs, state = reset(key_of(seed, episode, 0), params)
    assert got["next", "truncated" if limit == 12 else "terminated"].any()


def test_seeds_reproduce_and_lanes_differ():
    env, params = gymnax_cartpole(500)

    def run(**seeds):
        env_ = JaxEnv(env, params, num_envs=4, **seeds)
        return Collector(env_, lambda observation: (observation[..., 1] < 0).long(), frames_per_batch=400).next()

    first = run(seed=5)
    assert (run(seed=5) == first).all()
    assert len(first["observation"][:, 0].unique(dim=0)) == 4
    assert not (run(seed=6)["observation"] == first["observation"]).all()
    assert not (run()["observation"] == run()["observation"]).all()


def test_given_as_it_is():
    env, _ = gymnax_cartpole(500)
    c = Collector(env, frames_per_batch=10)
    assert type(c.env) is JaxLanes
    assert c.next().batch_size == (1, 10)
    assert Collector(lambda: Brax([(3,)]), EchoPolicy(), frames_per_batch=10).next().batch_size == (1, 10)
    with pytest.raises(WrongState, match="the env is already made"):
        Collector(env, create_env_kwargs={"a": 1}, frames_per_batch=10)


def test_brax_for_real():
    envs = pytest.importorskip("brax.envs")

    def make(**options):
        return envs.create("inverted_pendulum", episode_length=7, backend="generalized", **options)

    env = make(auto_reset=False)
    c = Collector(JaxEnv(env, num_envs=2), lambda observation: observation[..., :1].sin(), frames_per_batch=40)
    c.set_seed(11)
    got = c.next()
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    ends = 0
    for lane, seed in enumerate(chain(11, 2)[0]):
        episode = 0
        state = reset(key_of(seed, 0, 0))
        for i in range(20):
            row = got[lane, i]
            assert np.allclose(row["observation"], state.obs, atol=1e-5)
            state = step(state, jnp.asarray(row["action"].numpy()))
            assert np.allclose(row["next", "observation"], state.obs, atol=1e-5)
            assert bool(row["next", "done"]) == bool(state.done)
            assert bool(row["next", "truncated"]) == bool(state.info["truncation"])
            if state.done:
                ends, episode = ends + 1, episode + 1
                state = reset(key_of(seed, episode, 0))
    assert ends >= 4
    for options in ({"auto_reset": True}, {"auto_reset": False, "batch_size": 4}):
        with pytest.raises(UsageError, match="resets or vectorises the env, which reap does itself"):
            JaxEnv(make(**options))


def test_what_is_refused():
    with pytest.raises(WrongArgument, match="JaxEnv takes an env with reset_env and step_env .*, got CountingEnv"):
        JaxEnv(CountingEnv())
    with pytest.raises(WrongArgument, match="num_envs must be a whole number of at least 1, got 0"):
        JaxEnv(Brax([(3,)]), num_envs=0)
    with pytest.raises(WrongArgument, match="params are for gymnax envs"):
        JaxEnv(Brax([(3,)]), Params())

    class AutoResetWrapper(Brax): ...

    with pytest.raises(UsageError, match="AutoResetWrapper resets or vectorises the env"):
        JaxEnv(AutoResetWrapper([(3,)]))

    class Pairs(NewGymnax):
        def look(self, state):
            return state.t, state.t

    with pytest.raises(UsageError, match="must be an array or a dict of arrays, not tuple"):
        JaxEnv(Pairs([(3,)]))

    class TwoActions(NewGymnax):
        def action_space(self, params):
            return "two"

    with pytest.raises(UsageError, match="must be Discrete or a Box, not two"):
        JaxEnv(TwoActions([(3,)]))


def test_without_jax(monkeypatch):
    env = Brax([(3,)])
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingDependency, match=r"jax is not installed; pip install 'reap\[jax\]'"):
        JaxEnv(env)


def test_gymnax_wrappers_are_refused():
    env, params = gymnax_cartpole(500)
    wrappers = pytest.importorskip("gymnax.wrappers")
    with pytest.raises(WrongArgument, match="without its wrappers"):
        JaxEnv(wrappers.LogWrapper(env), params)
