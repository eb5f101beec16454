"""Videos hold what the env looked like, frame by frame, of the episodes that were asked for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("av")

from reap.collectors import Evaluator, record_video
from reap.core.policies.as_policy import PolicyWarning
from reap.core.resume import generators, set_generators
from reap.envs import GymEnv, SerialEnv, TorchEnv, TorchPendulum
from reap.envs.transforms import ScaleReward, TransformedEnv
from reap.errors import MissingDependency, UsageError
from reap.loggers import JSONLLogger
from reap.video import as_frames, read_video, write_video


class Gray(gym.Env):
    """Grows brighter by 8 with each step; episodes of 10 steps. Counts how often it was played."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, render_mode="rgb_array", length=10):
        self.render_mode, self.length, self.step_count, self.resets, self.steps = render_mode, length, 0, 0, 0

    def reset(self, *, seed=None, options=None):
        self.resets, self.step_count = self.resets + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.step_count, self.steps = self.step_count + 1, self.steps + 1
        return np.full(1, self.step_count, np.float32), 1.0, self.step_count == self.length, False, {}

    def render(self):
        return np.full((33, 48, 3), 8 * self.step_count, np.uint8)


def still(observation):
    return torch.zeros_like(observation)


def test_frames_are_those_of_the_episodes(tmp_path):
    found = record_video(Gray(), still, tmp_path / "play.mp4", episodes=2)
    frames = read_video(found["video"])
    assert frames.shape == (22, 34, 48, 3)  # with the first observation of each; an odd row is seen twice
    wanted = [8 * step for step in [*range(11), *range(11)]]
    assert np.abs(frames.mean((1, 2, 3)) - wanted).max() < 3
    assert (found["reward"], found["episode_length"], found["num_episodes"]) == (10.0, 10.0, 2)


def test_a_cut_episode(tmp_path):
    found = record_video(Gray, still, tmp_path / "play.mp4", max_steps=4)
    assert len(read_video(found["video"])) == 5


def test_real_envs_by_their_ids(tmp_path):
    pytest.importorskip("pygame")
    found = record_video("CartPole-v1", None, tmp_path / "play.mp4", seed=0)
    frames = read_video(found["video"])
    assert frames.shape[1:] == (400, 600, 3)
    assert len(frames) == found["episode_length"] + 1
    assert frames.std() > 5


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluator_films_one_episode_each_time(tmp_path, backend):
    logger = JSONLLogger(tmp_path / "log")
    with Evaluator(
        Gray, still, num_trajectories=3, video_dir=tmp_path / "videos", logger=logger, backend=backend
    ) as evaluator:
        found = [evaluator.evaluate(step=step) for step in (0, 500)]
    logger.close()
    assert [one["eval/video"] for one in found] == [str(tmp_path / "videos" / f"eval_{n}.mp4") for n in (0, 500)]
    for one in found:
        assert len(read_video(one["eval/video"])) == 11
    rows = [json.loads(line) for line in (tmp_path / "log" / "log.jsonl").read_text().splitlines()]
    assert [(row["step"], row["eval/reward"]) for row in rows] == [(0, 10.0), (500, 10.0)]
    assert len(read_video(tmp_path / "log" / rows[1]["eval/video"])) == 11


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_so_many_episodes_are_played_and_not_more(lanes):
    envs = [Gray(length=10 + n) for n in range(lanes)]
    it = iter(envs)
    with Evaluator(SerialEnv(lanes, lambda: next(it)), still, num_trajectories=6) as evaluator:
        before = sum(env.steps for env in envs)
        found = evaluator.evaluate()
        played = sum(env.steps for env in envs) - before
    assert found["eval/num_episodes"] == 6
    share = 6 // lanes
    wanted = sum(share * (10 + n) for n in range(lanes))
    assert wanted <= played <= wanted + lanes * share * lanes  # lanes that are done wait at most for the longest


def test_what_deterministic_meant_is_told():
    class Noisy(nn.Module):
        def forward(self, observation):
            return torch.rand_like(observation)

    with Evaluator(Gray, still) as evaluator:
        assert evaluator.explain().startswith("exploration_type DETERMINISTIC: the policy has no distribution")
    with pytest.warns(PolicyWarning, match="exploration_type is DETERMINISTIC, but the policy's action changes"):
        Evaluator(Gray, Noisy()).shutdown()


def test_envs_that_cannot_be_drawn_are_told(tmp_path):
    with pytest.raises(UsageError, match="render_mode='rgb_array'"):
        record_video(Gray(render_mode=None), still, tmp_path / "x.mp4")
    with pytest.raises(UsageError, match="render_mode='rgb_array'"):
        record_video(GymEnv(Gray(render_mode=None)), still, tmp_path / "x.mp4")
    with pytest.raises(UsageError, match="has 2; give a factory of a single env"):
        record_video(SerialEnv(2, Gray), still, tmp_path / "x.mp4")
    with pytest.raises(UsageError, match="cannot draw TorchEnv. Give a Gymnasium id, an env made with render_mode"):
        record_video(TorchEnv(TorchPendulum(1)), still, tmp_path / "x.mp4")


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv(Gray()),
        lambda: SerialEnv(1, lambda: GymEnv(Gray())),
        lambda: TransformedEnv(GymEnv(Gray()), ScaleReward(2.0)),
    ],
    ids=["GymEnv", "SerialEnv", "TransformedEnv"],
)
@pytest.mark.parametrize("finished", [False, True])
def test_envs_of_reap_are_filmed(tmp_path, make, finished):
    found = record_video(make() if finished else make, still, tmp_path / "play.mp4", episodes=2, max_steps=8)
    frames = read_video(found["video"])
    wanted = [8 * step for step in [*range(9), *range(9)]]
    assert np.abs(frames.mean((1, 2, 3)) - wanted).max() < 3


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluator_films_the_first_of_several_lanes(tmp_path, backend):
    def make():
        lengths = iter((5, 9))
        return SerialEnv(2, lambda: GymEnv(Gray(length=next(lengths))))

    with Evaluator(make, still, num_trajectories=4, video_dir=tmp_path, backend=backend) as evaluator:
        for step in range(2):
            assert len(read_video(evaluator.evaluate(step=step)["eval/video"])) == 6


def test_a_seed_leaves_the_programs_generators_alone(tmp_path):
    def drawn():
        return torch.rand(1).item(), np.random.rand(), random.random()

    def noisy(observation):
        return torch.rand_like(observation)

    before = generators()
    wanted = [drawn() for _ in range(2)]
    set_generators(before)
    found = []
    for _ in range(2):
        record_video(Gray, noisy, tmp_path / "play.mp4", seed=7, max_steps=3, deterministic=False)
        found.append(drawn())
    assert found == wanted


_FRESH = """
import sys
from reap.collectors import Evaluator, record_video
film, backend, place = sys.argv[1:]
if film == "record_video":
    record_video("ALE/Pong-v5", None, place + "/eval_0.mp4", max_steps=3)
else:
    import torch
    act = lambda pixels: torch.nn.functional.one_hot(torch.tensor(2), 6)
    with Evaluator("ALE/Pong-v5", act, num_trajectories=1, max_steps=3, video_dir=place, backend=backend) as e:
        e.evaluate()
"""


@pytest.mark.parametrize(("film", "backend"), [("record_video", ""), ("Evaluator", "thread"), ("Evaluator", "process")])
def test_atari_ids_need_no_import(tmp_path, film, backend):
    pytest.importorskip("ale_py")
    program = tmp_path / "program.py"
    program.write_text(f"if __name__ == '__main__':\n{textwrap.indent(_FRESH, '    ')}")
    command = [sys.executable, str(program), film, backend, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(read_video(tmp_path / "eval_0.mp4")) == 4


def test_a_missing_renderer_is_told_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)  # importing it fails
    with pytest.raises(MissingDependency, match=r"pygame is not installed.*; pip install 'reap\[video\]'"):
        record_video("CartPole-v1", None, tmp_path / "x.mp4")


@pytest.mark.parametrize("extra", ["video", "pettingzoo"])
def test_the_extras_that_need_pygame_bring_it(extra):
    lines = (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines()
    (brought,) = [line for line in lines if line.startswith(f"{extra} = [")]
    assert '"pygame>=2"' in brought


@pytest.mark.parametrize(
    "video",
    [
        np.full((4, 6, 8, 3), 200, np.uint8),
        np.full((4, 3, 6, 8), 200, np.uint8),
        torch.full((4, 6, 8), 200, dtype=torch.uint8),
        [np.full((6, 8, 3), 200, np.uint8)] * 4,
        np.full((4, 6, 8, 3), 200 / 255, np.float32),
        torch.full((1, 4, 3, 6, 8), 200, dtype=torch.uint8),
    ],
    ids=["last", "first", "gray", "list", "floats", "batch"],
)
def test_videos_come_in_many_shapes(video, tmp_path):
    frames = as_frames(video)
    assert frames.shape == (4, 6, 8, 3)
    assert (frames == 200).all()
    again = as_frames(write_video(tmp_path / "x.mp4", video))
    assert np.abs(again.astype(int) - 200).max() < 5
