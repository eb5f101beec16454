"""Private names of other libraries may go: without each of them the same data are collected."""

import ast
import json
import subprocess
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from reap._foreign import torchrl_internals
from reap.backends.remote.ray import _on_loopback, _starts_cluster
from reap.collectors import Collector
from reap.errors import UsageError
from tests.interop.without_names import Counting, turns
from tests.test_house import KNOWN_BY_ONE, MODULES, NOT_FOREIGN, named

pytest.importorskip("torchrl")
LIBRARIES = ("torch", "tensordict", "torchrl")


def counting():
    from torchrl.envs import GymWrapper

    return GymWrapper(Counting(), categorical_action_encoding=True)


def names_of(library: str) -> list[str]:
    tree = ast.parse(MODULES[f"_foreign.{library}_internals"].read_text())
    return sorted({name for name, _ in named(tree, texts=True)} - NOT_FOREIGN)


# What is told instead, where there is no other way to the same data.
OTHERWISE = {
    **{(name, "parallel"): "left to TorchRL" for name in torchrl_internals.PARALLEL},
    **{(name, "weights"): "refused" for name in ("_device_mapping_info", "_params_map", "_shared_transport")},
    **{(name, "rpc"): "refused" for name in ("_init", "_init_rpc_states")},
}
NAMES = [(library, name) for library in LIBRARIES for name in names_of(library)]


@pytest.fixture(scope="module")
def found():
    asked = {library: names_of(library) for library in LIBRARIES}
    command = [sys.executable, "-W", "ignore", "-m", "tests.interop.without_names"]
    ended = subprocess.run(
        command, input=json.dumps(asked), cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("library", LIBRARIES)
def test_all_is_collected_with_them(found, library):
    assert not [told for told in found[library]["usual"].values() if "Traceback" in str(told)]


@pytest.mark.parametrize(("library", "name"), NAMES)
def test_the_same_is_collected_without(found, library, name):
    usual, without = found[library]["usual"], found[library]["without"][name]
    assert without
    for world, data in without.items():
        if (name, world) == ("_update_group_membership", "rpc"):
            assert data == [usual[world][0], False], "others cannot be introduced, but calls arrive"
        else:
            assert data == OTHERWISE.get((name, world), usual[world]), world


@pytest.mark.parametrize("name", sorted(KNOWN_BY_ONE["envs.adapters.gymnasium_checks"]))
def test_gymnasiums_checks_stay_without(name):
    """Wrappers that do not say whether they are done are called."""

    def played(source):
        space: dict = {}
        exec(source, space)
        env = gym.make("CartPole-v1", max_episode_steps=5)
        seen = [env.reset(seed=0)[0].tolist()]
        for n in range(5):
            step = space["unchecked_step"](env) or env.step
            seen.append([env.step(1)[0].tolist(), *env.reset(seed=1)[0].tolist()] if n < 2 else step(n % 2)[:4])
        return str(seen)

    source = MODULES["envs.adapters.gymnasium_checks"].read_text()
    assert played(source.replace(name, f"{name}_gone")) == played(source)


def seeded(source):
    from dm_control import suite

    space: dict = {}
    exec(source, space)
    env = space["DmAsGym"](suite.load("cartpole", "balance"))
    try:
        return str([env.reset(seed=3), env.step(np.zeros(1))])
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("name", sorted(KNOWN_BY_ONE["envs.adapters.dm"]))
def test_dm_control_is_seeded_without_or_says_that_it_cannot_be(name):
    pytest.importorskip("dm_control")
    source = MODULES["envs.adapters.dm"].read_text()
    usual, without = seeded(source), seeded(source.replace(name, f"{name}_gone"))
    assert usual == seeded(source)
    assert "cannot be seeded from outside" in without if name == "_random" else without == usual


def test_every_screen_of_a_game_is_drawn_without_the_method_that_reads_it():
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    env = gym.make("PongNoFrameskip-v4")
    for name, drawn in (("_get_obs", False), ("_get_obs_gone", True)):
        space: dict = {}
        exec(MODULES["envs.adapters.atari"].read_text().replace("_get_obs", name), space)
        env.reset(seed=0)
        seen = space["undrawn_step"](env, env.step)(0)[0]
        assert (seen is not space["UNDRAWN"]) == drawn
    env.close()


def test_ray_does_without_its_private_module(caplog):
    ray = types.SimpleNamespace()
    assert not _starts_cluster(ray, {})
    assert _starts_cluster(ray, {"address": "local"})
    with _on_loopback(ray):
        assert "listens on all interfaces" in caplog.text


def test_parallel_envs_are_left_to_torchrl(monkeypatch):
    """With workers of TorchRL's own, and the same data."""
    from torchrl.envs import ParallelEnv, SerialEnv

    def collected(kind):
        collector = Collector(kind(2, counting), turns, frames_per_batch=20)
        told, batch = collector.explain(), collector.next().clone()
        collector.shutdown()
        return told, batch

    monkeypatch.setattr(torchrl_internals, "PARALLEL", (*torchrl_internals.PARALLEL, "_gone"))
    told, batch = collected(ParallelEnv)
    assert "this version of TorchRL manages its workers differently" in told
    _, usual = collected(SerialEnv)
    assert {*batch.keys(True, True)} == {*usual.keys(True, True)}
    assert (batch == usual).all()
