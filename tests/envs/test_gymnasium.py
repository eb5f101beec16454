"""Gymnasium through reap: every space, by hand and by the collector."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from reap.collectors import Collector
from reap.envs import EnvBase, GymEnv, GymWrapper, SerialEnv
from reap.errors import SpecMismatch, UsageError, WorkerRaised, WrongArgument
from reap.seeding import next_seed
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Any_(gym.Env):
    """Samples its observation space, remembers its observations and the actions it got."""

    def __init__(self, observation_space=BOX, action_space=BOX, info=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_space.seed(0)
        self.seen, self.got, self.info = [], [], info or (lambda t: {})

    def _observe(self):
        self.seen.append(self.observation_space.sample())
        return self.seen[-1]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), self.info(0)

    def step(self, action):
        assert self.action_space.contains(action), action
        self.got.append(action)
        return self._observe(), 1.0, False, False, self.info(len(self.got))


def run(observation_space=BOX, action_space=BOX, policy=None, steps=6, **kwargs):
    env = Any_(observation_space, action_space)
    batch = Collector(GymEnv(env, **kwargs), policy, frames_per_batch=steps).next()
    return env, batch


# ---- observations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "categorical", "columns"),
    [
        (spaces.Box(-1, 1, (), np.float64), False, {"observation": ((1,), torch.float64, lambda o: [o])}),
        (spaces.Box(-1, 1, (2, 3), np.float64), False, {"observation": ((2, 3), torch.float64, lambda o: o)}),
        (spaces.Box(0, 255, (4, 5, 3), np.uint8), False, {"pixels": ((4, 5, 3), torch.uint8, lambda o: o)}),
        (spaces.Box(0, 255, (4, 5), np.uint8), False, {"observation": ((4, 5), torch.uint8, lambda o: o)}),
        (spaces.Discrete(4), False, {"observation": ((4,), torch.int64, lambda o: np.eye(4)[o])}),
        (spaces.Discrete(4), True, {"observation": ((), torch.int64, lambda o: o)}),
        (spaces.Discrete(4, start=7), False, {"observation": ((4,), torch.int64, lambda o: np.eye(4)[o - 7])}),
        (spaces.Discrete(4, start=7), True, {"observation": ((), torch.int64, lambda o: o - 7)}),
        (spaces.MultiBinary(3), False, {"observation": ((3,), torch.int8, lambda o: o)}),
        (spaces.MultiDiscrete([2, 3]), True, {"observation": ((2,), torch.int64, lambda o: o)}),
        (
            spaces.MultiDiscrete([2, 3]),
            False,
            {"observation": ((5,), torch.int64, lambda o: [*np.eye(2)[o[0]], *np.eye(3)[o[1]]])},
        ),
        (spaces.MultiDiscrete([3, 3]), False, {"observation": ((2, 3), torch.int64, lambda o: np.eye(3)[o])}),
        (
            spaces.MultiDiscrete([3, 3], start=[5, 6]),
            False,
            {"observation": ((2, 3), torch.int64, lambda o: np.eye(3)[o - [5, 6]])},
        ),
        (spaces.Tuple((BOX, BOX)), False, {"observation": ((2, 2), torch.float32, lambda o: np.stack(o))}),
        (
            spaces.Tuple((BOX, spaces.Discrete(3))),
            True,
            {
                ("observation", "0"): ((2,), torch.float32, lambda o: o[0]),
                ("observation", "1"): ((), torch.int64, lambda o: o[1]),
            },
        ),
        (
            spaces.Dict(state=BOX, inner=spaces.Dict(a=BOX, b=spaces.Discrete(2), c=spaces.Tuple((BOX, BOX)))),
            False,
            {
                "observation": ((2,), torch.float32, lambda o: o["state"]),
                ("inner", "a"): ((2,), torch.float32, lambda o: o["inner"]["a"]),
                ("inner", "b"): ((2,), torch.int64, lambda o: np.eye(2)[o["inner"]["b"]]),
                ("inner", "c"): ((2, 2), torch.float32, lambda o: np.stack(o["inner"]["c"])),
            },
        ),
    ],
    ids=lambda given: None if isinstance(given, dict) else str(given),
)
def test_observation_spaces(space, categorical, columns):
    env, batch = run(space, categorical_action_encoding=categorical)
    for key, (shape, dtype, form) in columns.items():
        want = np.array([form(o) for o in env.seen])
        for root, rows in (((), want[:6]), (("next",), want[1:7])):
            column = batch[(*root, *((key,) if isinstance(key, str) else key))]
            assert column.shape == (6, *shape)
            assert column.dtype is dtype
            assert np.array_equal(column.numpy(), rows)


def test_spaces_without_a_tensor_form_are_refused():
    with pytest.raises(UsageError, match="action space Text"):
        run(action_space=spaces.Text(5))
    with pytest.raises(UsageError, match="both be called 'observation'"):
        run(spaces.Dict(state=BOX, observation=BOX))


def test_values_outside_a_discrete_space_are_named():
    class Wrong(Any_):
        def _observe(self):
            return 9

    with pytest.raises(SpecMismatch, match="returned 9 for Discrete"):
        Collector(GymEnv(Wrong(spaces.Discrete(3))), frames_per_batch=2)


# ---- actions ---------------------------------------------------------------------------------------------------------

DISCRETE = {
    "index": lambda o: torch.tensor(2),
    "index [1]": lambda o: torch.tensor([2]),
    "one-hot": lambda o: torch.tensor([0, 0, 1, 0]),
    "scores": lambda o: torch.tensor([0.1, -3.0, 0.2, 0.0]),
    "bool": lambda o: torch.tensor([False, False, True, False]),
}


@pytest.mark.parametrize("form", DISCRETE)
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("categorical", [False, True])
def test_discrete_actions_in_any_form(form, start, categorical):
    env, batch = run(
        action_space=spaces.Discrete(4, start=start),
        policy=lambda observation: DISCRETE[form](observation),
        categorical_action_encoding=categorical,
    )
    assert env.got == [2 + start] * 6
    assert all(type(a) is int for a in env.got)
    assert torch.equal(batch["action"][0], DISCRETE[form](None))


@pytest.mark.parametrize(
    ("space", "action", "got"),
    [
        (spaces.MultiDiscrete([2, 3]), torch.tensor([1, 2]), [1, 2]),
        (spaces.MultiDiscrete([2, 3]), torch.tensor([0, 1, 0, 0, 1]), [1, 2]),
        (spaces.MultiDiscrete([3, 3]), torch.tensor([[0, 0, 1], [0, 1, 0]]), [2, 1]),
        (spaces.MultiDiscrete([3, 3], start=[10, 20]), torch.tensor([[0, 0, 1], [0, 1, 0]]), [12, 21]),
        (spaces.MultiBinary(3), torch.tensor([1, 0, 1], dtype=torch.int8), [1, 0, 1]),
        (spaces.Box(-1, 1, (2, 2), np.float64), torch.full((2, 2), 0.5), [[0.5, 0.5], [0.5, 0.5]]),
        (spaces.Box(-1, 1, (), np.float32), torch.tensor([0.5]), 0.5),
    ],
    ids=str,
)
def test_other_actions(space, action, got):
    env, batch = run(action_space=space, policy=lambda observation: action)
    assert all(np.array_equal(a, got) for a in env.got)
    assert torch.equal(batch["action"][3], action)


def test_dict_and_tuple_actions():
    space = spaces.Dict(move=BOX, inner=spaces.Tuple((spaces.Discrete(3), spaces.Discrete(2))))
    env, batch = run(
        action_space=space, policy=lambda observation: (torch.tensor([0.25, 0.5]), torch.tensor(2), torch.tensor(1))
    )
    assert set(batch["action"].keys(True, True)) == {"move", ("inner", "0"), ("inner", "1")}
    assert env.got[0]["inner"] == (2, 1)
    assert np.array_equal(env.got[0]["move"], np.array([0.25, 0.5], np.float32))
    env, batch = run(action_space=space)  # random
    assert len(env.got) == 6
    assert batch["action", "inner", "0"].shape == (6, 3)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([[2, 2], [2, 2]]),
        spaces.MultiBinary(3),
        spaces.Box(np.array([-1, 5], np.float32), np.array([1, 9], np.float32)),
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Box(np.array([0.0, -np.inf]), np.array([np.inf, 3.0]), dtype=np.float64),
        spaces.Box(0, 3, (2,), np.int64),
    ],
    ids=str,
)
@pytest.mark.parametrize("categorical", [False, True])
def test_random_actions_lie_in_the_space(space, categorical):
    env, _ = run(action_space=space, steps=200, categorical_action_encoding=categorical)
    assert len(env.got) == 200  # `step` asserted that each lies in the space
    assert len({str(a) for a in env.got}) > 1


def test_what_an_env_keeps_or_changes_of_an_action_is_its_own():
    class Keeps(Any_):
        def step(self, action):
            result = super().step(action)
            action += 0.125
            return result

    env = Keeps()
    c = Collector(
        SerialEnv(2, [lambda: env, lambda: Keeps()]), lambda observation: observation * 0.5, frames_per_batch=8
    )
    batches = [c.next() for _ in range(5)]
    want = torch.cat([b["observation"][0] for b in batches]) * 0.5
    assert torch.equal(torch.cat([b["action"][0] for b in batches]), want)
    assert np.allclose(np.stack(env.got), want.numpy() + 0.125)


# ---- GymEnv's arguments ----------------------------------------------------------------------------------------------


def test_frame_skip_adds_rewards_and_stops_at_the_end():
    batch = Collector(
        GymEnv(CountingEnv((5,)), frame_skip=2), lambda observation: observation[:1] * 0, frames_per_batch=4
    ).next()
    assert batch["next", "observation"][:, 2].tolist() == [2, 4, 5, 2]
    assert batch["next", "reward"][:, 0].tolist() == [3, 7, 5, 3]
    assert batch["next", "done"][:, 0].tolist() == [False, False, True, False]
    with pytest.raises(UsageError, match="frame_skip"):
        GymEnv(CountingEnv(), frame_skip=0)


class Painter(CountingEnv):
    render_mode = "rgb_array"

    def render(self):
        return np.full((4, 5, 3), self.t, np.uint8)


def test_from_pixels():
    env = GymEnv(Painter((5,)), from_pixels=True, pixels_only=False)
    batch = Collector(env, lambda observation: observation[:1], frames_per_batch=6).next()
    assert batch["pixels"].shape == (6, 4, 5, 3)
    assert batch["pixels"].dtype is torch.uint8
    assert batch["pixels"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 0]
    assert batch["next", "pixels"][:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5, 1]
    assert batch["observation"][:, 2].tolist() == [0, 1, 2, 3, 4, 0]
    only = Collector(GymEnv(Painter((5,)), from_pixels=True), frames_per_batch=6).next()
    assert "observation" not in only.keys()
    assert only["next", "pixels"][:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5, 1]


def test_info_columns():
    def info(t):
        return {"speed": 0.5 * t, "force": np.array([t, -t]), "ignored": "text"} if t else {}

    env = GymEnv(Any_(info=info), info_keys={"speed": np.float64, "force": (np.int64, (2,)), "absent": np.float32})
    batch = Collector(env, frames_per_batch=5).next()
    assert batch["next", "speed"].tolist() == [0.5, 1, 1.5, 2, 2.5]
    assert batch["speed"].tolist() == [0, 0.5, 1, 1.5, 2]
    assert batch["next", "force"][:, 1].tolist() == [-1, -2, -3, -4, -5]
    assert batch["absent"].eq(0).all()
    assert "ignored" not in batch.keys()
    assert (
        Collector(GymEnv(Any_(info=info), info_keys=["speed"]), frames_per_batch=5).next()["speed"].dtype
        is torch.float32
    )
    with pytest.raises(UsageError, match="observation keys already"):
        GymEnv(Any_(), info_keys=["observation"])
    with pytest.raises(WrongArgument, match="list of names"):
        GymEnv(Any_(), info_keys="speed")


def test_make_kwargs():
    assert GymEnv("Pendulum-v1", g=1.0).lanes_env.envs[0].unwrapped.g == 1.0
    with pytest.raises(WrongArgument, match="are arguments of gymnasium.make"):
        GymEnv(CountingEnv(), g=1.0)
    with pytest.raises(WrongArgument, match="an id or a gymnasium.Env, got int"):
        GymEnv(3)
    assert GymWrapper is GymEnv


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_step_by_hand_equals_the_collector():
    env: EnvBase = GymEnv(CountingEnv())
    world = CountingWorld([(3, 1, 5)]).batch(12)
    policy = EchoPolicy()
    td = env.reset()
    for t in range(12):
        td["action"] = policy(td["observation"]).detach()
        td, root = env.step_and_maybe_reset(td)
        for key in (("observation",), ("action",), ("next", "observation"), ("next", "reward"), ("next", "done")):
            assert np.array_equal(td[key].numpy(), world[key][0, t]), (key, t)
        td = root


def test_lanes_by_hand():
    env = SerialEnv(2, [lambda: CountingEnv((2,)), lambda: CountingEnv((3,), 1)])
    td = env.reset()
    assert td.batch_size == torch.Size([2])
    assert td["done"].shape == (2, 1)
    for t in (1, 2):
        td["action"] = torch.zeros(2, 1)
        td, root = env.step_and_maybe_reset(td)
        assert td["next", "observation"][:, 2].tolist() == [t, t]
        td = root
    assert td["observation"].tolist() == [[0, 1, 0], [1, 0, 2]]
    assert not td["done"].any()
    with pytest.raises(SpecMismatch, match="batch is"):
        env.step(td.set("action", torch.zeros(2, 1)).clone()[:1])
    with pytest.raises(WrongArgument, match="needs 'action'"):
        env.step(env.reset())


def test_rollout_by_hand():
    env = GymEnv(CountingEnv((3, 5)))
    out = env.rollout(10, EchoPolicy())
    assert out.batch_size == torch.Size([3])
    assert out.names == ["time"]
    assert out["next", "done"][:, 0].tolist() == [False, False, True]
    want = CountingWorld([(3, 5)]).batch(3)
    del want[("collector", "traj_ids")]
    assert_same(out, want)
    on = env.rollout(10, EchoPolicy(), break_when_any_done=False)
    assert on["observation"][:, 2].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert GymEnv("CartPole-v1").rollout(5)["action"].shape == (5, 2)
    with pytest.raises(UsageError, match="max_steps"):
        env.rollout(0)


def test_rand_step_and_specs():
    env = GymEnv("CartPole-v1")
    td = env.rand_step(env.reset())
    assert td["next", "reward"].tolist() == [1.0]
    assert env.action_spec.n == 2
    assert env.action_spec.shape == (2,)
    assert env.action_key == "action"
    assert env.observation_spec["observation"].shape == (4,)
    assert "observation" in repr(env)
    box = GymEnv("Pendulum-v1").action_spec
    assert (box.low.item(), box.high.item()) == (-2.0, 2.0)
    assert box.rand((3, 4)).shape == (3, 4, 1)


def test_set_seed_by_hand():
    env = GymEnv("CartPole-v1")
    assert env.set_seed(1) == next_seed(1) == 4087425277
    first = env.reset()["observation"].numpy()
    assert np.array_equal(first, gym.make("CartPole-v1").reset(seed=1)[0])
    assert not np.array_equal(env.reset()["observation"].numpy(), first)
    assert SerialEnv(3, "CartPole-v1").set_seed(1) == 1864546186
    assert env.set_seed(9, static_seed=True) == 9


def test_serial_env_checks_its_arguments():
    with pytest.raises(WrongArgument, match="num_workers must be"):
        SerialEnv(0, CountingEnv)
    with pytest.raises(UsageError, match="create_env_fn holds 1"):
        SerialEnv(2, [CountingEnv])
    with pytest.raises(UsageError, match="one env object, which cannot be several lanes"):
        SerialEnv(2, GymEnv(CountingEnv()))
    with pytest.raises(UsageError, match="create_env_kwargs holds 1"):
        SerialEnv(2, CountingEnv, create_env_kwargs=[{}])
    with pytest.raises(SpecMismatch, match="encoded differently"):
        SerialEnv(2, [lambda: GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)])
    env = SerialEnv(2, CountingEnv, create_env_kwargs=[{"lane": 4}, {"lane": 6}])
    assert env.reset()["observation"][:, 0].tolist() == [4, 6]


def test_serial_env_closes_what_it_cannot_join():
    made = []

    def counting():
        made.append(CountingEnv())
        return GymEnv(made[-1])

    def fails():
        raise OverflowError("boom")

    mine = counting()
    with pytest.raises(OverflowError):
        SerialEnv(3, [mine, counting, fails])
    with pytest.raises(SpecMismatch, match="encoded differently"):
        SerialEnv(2, [counting, lambda: GymEnv(CountingEnv(), categorical_action_encoding=True)])
    assert [env.closed for env in made] == [False, True, True]  # a finished env is its owner's


def test_real_envs():
    for name, shape, dtype in (
        ("CartPole-v1", (4,), torch.float32),
        ("Pendulum-v1", (3,), torch.float32),
        ("MountainCarContinuous-v0", (2,), torch.float32),
        ("FrozenLake-v1", (16,), torch.int64),
        ("Blackjack-v1", None, None),
    ):
        batch = Collector(SerialEnv(2, name), frames_per_batch=60).next()
        assert batch.batch_size == torch.Size([2, 30])
        if shape is not None:
            assert batch["observation"].shape[2:] == shape
            assert batch["observation"].dtype is dtype
        open_ = ~batch["next", "done"][:, :-1, 0]
        for key in batch["next"].keys(True, True):
            if key not in ("reward", "done", "terminated", "truncated"):
                key = key if isinstance(key, tuple) else (key,)
                after, root = batch[("next", *key)][:, :-1][open_], batch[key][:, 1:][open_]
                assert torch.equal(after, root), key


def test_mujoco():
    pytest.importorskip("mujoco")
    c = Collector(SerialEnv(2, "HalfCheetah-v5"), frames_per_batch=40, max_frames_per_traj=7)
    batch = c.next()
    assert batch["observation"].dtype is torch.float64
    assert batch["action"].shape == (2, 20, 6)
    assert batch["next", "truncated"].sum() == 4
    assert (batch["next", "step_count"] == batch["step_count"] + 1).all()


def test_atari():
    ale = pytest.importorskip("ale_py")
    gym.register_envs(ale)
    c = Collector(SerialEnv(2, "ALE/Pong-v5"), frames_per_batch=40)
    batch = c.next()
    assert batch["pixels"].shape == (2, 20, 210, 160, 3)
    assert batch["pixels"].dtype is torch.uint8
    assert torch.equal(batch["next", "pixels"][:, :-1], batch["pixels"][:, 1:])
    assert batch["action"].shape == (2, 20, 6)


def test_async_vector_env_without_shared_memory():
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv([CountingEnv], shared_memory=False, context="fork")
    with pytest.raises(UsageError, match="shared_memory=True or another autoreset_mode"):
        Collector(env, frames_per_batch=3)
    env.close()


# ---- what gymnasium.make puts around an env --------------------------------------------------------------------------


def test_gymnasiums_checks_are_made_in_the_first_episode_only(monkeypatch):
    """Afterwards they could find nothing: reap looks at what an env returns, and resets before it steps."""
    looked = []
    pass_on = gym.wrappers.PassiveEnvChecker.step

    def step(self, action):
        looked.append(action)
        return pass_on(self, action)

    monkeypatch.setattr(gym.wrappers.PassiveEnvChecker, "step", step)
    env = gym.make("CartPole-v1", max_episode_steps=5)
    batch = Collector(env, lambda observation: torch.tensor([1, 0]), frames_per_batch=23).next()
    assert len(looked) == 5
    assert batch["next", "truncated"].flatten().nonzero().flatten().tolist() == [4, 9, 14, 19]
    assert not batch["next", "terminated"].any()
    assert env._elapsed_steps == 3  # TimeLimit's own count, as ever


def test_what_the_checker_says_in_the_first_episode_is_heard():
    gym.register("Sloppy-v0", lambda: Any_(info=lambda t: {} if t == 0 else []))
    try:
        with pytest.raises(WorkerRaised, match="info"):
            Collector("Sloppy-v0", None, frames_per_batch=3).next()
    finally:
        del gym.registry["Sloppy-v0"]


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_users_wrapper_sees_every_step(where):
    class Sees(gym.Wrapper):
        steps = 0

        def step(self, action):
            self.steps += 1
            return super().step(action)

    if where == "outside":
        env = seen = Sees(gym.make("CartPole-v1", max_episode_steps=5))
    else:
        seen = Sees(gym.make("CartPole-v1", max_episode_steps=9).unwrapped)
        env = gym.wrappers.TimeLimit(gym.wrappers.OrderEnforcing(seen), 5)
    batch = Collector(env, lambda observation: torch.tensor([1, 0]), frames_per_batch=23).next()
    assert seen.steps == 23
    assert batch["next", "truncated"].sum() == 4


def recorded(env, keys, lanes):
    """What RecordEpisodeStatistics said at the ends of episodes, and what reap has counted."""
    c = Collector(GymEnv(env, info_keys=keys), frames_per_batch=120 * lanes)
    batch = c.next().reshape(-1)
    done = batch["next", "done"][:, 0]
    told = batch["next", "episode"]
    assert not any(value[~done].any() for value in told.values())
    return {name: sorted(value[done].tolist()) for name, value in told.items()}, c.episodes()


def test_record_episode_statistics_tells_what_episodes_does():
    from gymnasium.wrappers import RecordEpisodeStatistics

    told, episodes = recorded(RecordEpisodeStatistics(gym.make("CartPole-v1")), ["episode"], 1)
    assert told.keys() == {"r", "l", "t"}
    assert told["r"] == told["l"] == sorted(one["length"] for one in episodes)
    assert episodes
    keys = {("episode", "l"): np.int64}
    told, episodes = recorded(RecordEpisodeStatistics(gym.make("CartPole-v1")), keys, 1)
    assert told == {"l": sorted(one["length"] for one in episodes)}


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode))
@pytest.mark.parametrize("inside", [True, False])
def test_record_episode_statistics_of_vector_envs(mode, inside):
    from gymnasium import wrappers

    def one():
        env = gym.make("CartPole-v1")
        return wrappers.RecordEpisodeStatistics(env) if inside else env

    env = gym.vector.SyncVectorEnv([one] * 3, autoreset_mode=mode)
    env = env if inside else wrappers.vector.RecordEpisodeStatistics(env)
    told, episodes = recorded(env, ["episode"], 3)
    if mode is gym.vector.AutoresetMode.SAME_STEP and not inside and gym.__version__ < "1.4":
        pytest.skip("this wrapper of Gymnasium leaves out the first step of every episode but the first")
    assert told["l"] == sorted(one["length"] for one in episodes)
    assert told["r"] == sorted(one["return"] for one in episodes)
    assert len(episodes) > 3


def test_an_env_that_cannot_be_closed_leaves_none_open():
    class Stuck(CountingEnv):
        def close(self):
            raise OSError("stuck")

    envs = [Stuck(), CountingEnv()]
    collector = Collector(SerialEnv(2, [lambda: envs[0], lambda: envs[1]]), EchoPolicy(), frames_per_batch=4)
    with pytest.raises(OSError, match="stuck"):
        collector.shutdown()
    assert envs[1].closed
