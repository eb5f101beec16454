"""Envs of every library in the middle of their episodes: a collector that loads the state goes on bit for bit."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import nn

from reap.collectors import Collector, MultiSyncCollector
from reap.envs import DMEnv, EnvPoolEnv, GymEnv, JaxEnv, ParallelEnv, PettingZooEnv, PufferLibEnv, SerialEnv
from reap.testing import CountingEnv, EchoPolicy
from tests.worlds.envs import Auto, Bindable, Honest, Town
from tests.worlds.resume import Noisy, Samples, Secretive, goes_on, gym_lanes, through_a_file


def collects(make_env, make_policy=lambda: None, **options):
    def make():
        torch.manual_seed(0)
        env = make_env()
        lanes = env.batch_size.numel()
        return Collector(env, make_policy(), frames_per_batch=lanes * 13, total_frames=-1, **options)

    return make


def vector(mode, name="CartPole-v1", wrap=lambda env: env, **options):
    envs = [lambda: gym.make(name, **options)] * 3
    return lambda: GymEnv(wrap(SyncVectorEnv(envs, autoreset_mode=mode)), categorical_action_encoding=True)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("limit", [None, 17])
def test_gymnasiums_sync_vector_env(mode, limit):
    options = {} if limit is None else {"max_frames_per_traj": limit}
    if limit is not None and mode is AutoresetMode.SAME_STEP:
        options = {"init_random_frames": 39}
    goes_on(collects(vector(mode), lambda: Samples(4, choices=2), **options))


def test_vector_envs_with_wrappers_around_and_inside():
    normal = gym.wrappers.vector.NormalizeObservation
    goes_on(collects(vector(AutoresetMode.NEXT_STEP, wrap=normal), lambda: Samples(4, choices=2)))
    goes_on(collects(vector(AutoresetMode.SAME_STEP, "HalfCheetah-v5"), lambda: Samples(17, numbers=6)))


def test_a_vector_env_that_steps_all_lanes_itself():
    def make_env():
        return GymEnv(
            gym.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point"), categorical_action_encoding=True
        )

    goes_on(collects(make_env, lambda: Samples(4, choices=2)))


def test_gymnasiums_async_vector_env_says_why_it_begins_anew():
    def make_env():
        return GymEnv(AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2), categorical_action_encoding=True)

    with collects(make_env, lambda: Samples(4, choices=2))() as first:
        first.next()
        assert "use SyncVectorEnv" in first.state_dict()["resume"]["why"]


PLAN = ([(0, 6)], [(0, 2), (4, 7)], [(1, 3), (6, 6)])


class Goes(nn.Module):
    """Random numbers of torch, whatever is seen."""

    def forward(self, tensordict):
        seen = next(iter(tensordict.select(("agents", "observation"), "observation", strict=False).values(True, True)))
        key = ("agents", "action") if "agents" in tensordict.keys() else "action"
        return tensordict.set(key, torch.randn(*seen.shape[:-1], 1))


@pytest.mark.parametrize("mode", ["group", "lanes"])
def test_pettingzoo(mode):
    goes_on(collects(lambda: PettingZooEnv(Town(PLAN), mode=mode), Goes))


def test_pettingzoo_several_worlds():
    make_env = lambda: SerialEnv(2, lambda: PettingZooEnv(Town(PLAN)))  # noqa: E731
    goes_on(collects(make_env, Goes))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pettingzoo_in_turns():
    pytest.importorskip("pettingzoo")
    from pettingzoo.classic import tictactoe_v3

    goes_on(collects(lambda: PettingZooEnv(tictactoe_v3.env(), categorical_action_encoding=True), Masked))
    from tests.worlds.pettingzoo import Table

    def make_env():
        return SerialEnv(2, lambda: PettingZooEnv(Table(deaths={3: [1]}, length=9)))

    goes_on(collects(make_env, Goes))


class Masked(nn.Module):
    def forward(self, tensordict):
        mask = tensordict["action_mask"].float()
        return tensordict.set("action", torch.distributions.Categorical(probs=mask).sample())


@pytest.mark.parametrize(("domain", "task", "acts"), [("cartpole", "balance", 1), ("walker", "walk", 6)])
def test_dm_control(domain, task, acts):
    suite = pytest.importorskip("dm_control.suite")

    def make_env():
        return SerialEnv(2, lambda: DMEnv(suite.load(domain, task, task_kwargs={"random": 1})))

    goes_on(collects(make_env, max_frames_per_traj=17))


def test_jax():
    gymnax = pytest.importorskip("gymnax")

    def make(name):
        env, params = gymnax.make(name)
        return lambda: JaxEnv(env, params, num_envs=3, seed=1)

    goes_on(collects(make("CartPole-v1"), lambda: Samples(4, choices=2), max_frames_per_traj=9))
    goes_on(collects(make("Pendulum-v1"), lambda: Samples(3, numbers=1), max_frames_per_traj=17))


class Saves:
    """What PufferLib-style envs are asked for."""

    def get_state(self):
        return [env.__dict__.copy() for env in self.envs]

    def set_state(self, state):
        for env, held in zip(self.envs, state):
            env.__dict__.update(held)


class SavesHonest(Saves, Honest):
    pass


class SavesBindable(Saves, Bindable):
    pass


class SavesAuto(Saves, Auto):
    pass


@pytest.mark.parametrize(
    ("kind", "options"), [(SavesHonest, {}), (SavesBindable, {}), (SavesAuto, {"lost_finals": "repeat"})]
)
def test_puffer(kind, options):
    goes_on(collects(lambda: PufferLibEnv(kind([(3, 1, 5), (2, 7)]), **options), EchoPolicy))


def test_a_puffer_env_that_does_not_say_begins_anew():
    with collects(lambda: PufferLibEnv(Honest([(3,), (2, 7)])), EchoPolicy)() as first:
        first.next()
        assert "get_state() and set_state(state)" in first.state_dict()["resume"]["why"]


def test_envpool_says_why_it_begins_anew():
    envpool = pytest.importorskip("envpool")
    with collects(lambda: EnvPoolEnv(envpool.make_gymnasium("CartPole-v1", num_envs=2)))() as first:
        first.next()
        assert "C++" in first.state_dict()["resume"]["why"]


def lanes(name="CartPole-v1"):
    return lambda: GymEnv(name, categorical_action_encoding=True)


PARALLEL = {
    "a process each": (lambda: ParallelEnv(3, lanes()), lambda: Samples(4, choices=2), {}),
    "two lanes in a process": (lambda: ParallelEnv(4, lanes(), num_workers=2), lambda: Samples(4, choices=2), {}),
    "cut": (lambda: ParallelEnv(2, lanes("Pendulum-v1")), Noisy, {"max_frames_per_traj": 17}),
    "lanes inside": (lambda: ParallelEnv(2, gym_lanes("CartPole-v1", 2)), lambda: Samples(4, choices=2), {}),
    "agents": (lambda: ParallelEnv(2, lambda: PettingZooEnv(Town(PLAN))), Goes, {}),
    "not reset": (lambda: ParallelEnv(3, lanes()), lambda: Samples(4, choices=2), {"reset_when_done": False}),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_lanes_in_processes(name):
    make_env, make_policy, options = PARALLEL[name]
    goes_on(collects(make_env, make_policy, **options))


def test_lanes_in_processes_of_workers():
    def make():
        torch.manual_seed(0)
        env = lambda: ParallelEnv(2, lanes())  # noqa: E731
        return MultiSyncCollector([env] * 2, Samples(4, choices=2), frames_per_batch=52)

    goes_on(make)


class RandomOfItsOwn(CountingEnv):
    """Draws from its process's generators."""

    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, float(np.random.rand() + torch.rand(())), *rest


def test_generators_of_env_processes_go_on():
    goes_on(
        collects(lambda: ParallelEnv(2, [lambda n=n: GymEnv(RandomOfItsOwn((3, 5), n)) for n in (0, 1)]), EchoPolicy)
    )


def test_an_env_in_a_process_that_cannot_say_begins_anew():
    with collects(lambda: ParallelEnv(2, lambda: GymEnv(Secretive())))() as first:
        first.next()
        state = through_a_file(first.state_dict())
        assert "of lane 0" in state["resume"]["why"]
        assert "Secretive cannot be pickled" in state["resume"]["why"]
        first.load_state_dict(state)
        assert (first.next()["observation"][:, 0] == 0).all()


def torchrl_one(transformed):
    import torchrl.envs as envs

    env = envs.GymEnv("CartPole-v1", categorical_action_encoding=True)
    return envs.TransformedEnv(env, envs.StepCounter(20)) if transformed else env


def torchrl_parallel(transformed):
    import torchrl.envs as envs

    env = envs.ParallelEnv(2, functools.partial(torchrl_one, transformed), mp_start_method="fork")
    return envs.TransformedEnv(env, envs.RewardSum()) if transformed else env


class OnTensorDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, tensordict):
        logits = self.net(tensordict["observation"])
        return tensordict.set("action", torch.distributions.Categorical(logits=logits).sample())


@pytest.fixture
def torchrl():
    """What TorchRL imports when it makes its first env keeps the frames of whoever made it: this one, not a test's."""
    pytest.importorskip("torchrl")
    torchrl_one(False).close()


@pytest.mark.usefixtures("torchrl")
@pytest.mark.parametrize("transformed", [False, True])
def test_torchrls_parallel_env(transformed):

    def make():
        torch.manual_seed(0)
        return Collector(torchrl_parallel(transformed), OnTensorDict(), frames_per_batch=26, total_frames=-1)

    with make() as first:
        first.next()
        assert "env processes of reap's" in first.explain() or transformed
    goes_on(make)
