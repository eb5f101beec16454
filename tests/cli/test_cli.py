"""The command line does what it says, and says what is wrong in a line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from reap import checkpoint
from reap.cli import main
from reap.data import load

FILE = """
import gymnasium as gym
import numpy as np
import torch
from torch import nn


class Pictures(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (8, 10, 3), np.uint8)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return np.zeros((8, 10, 3), np.uint8), {}

    def step(self, action):
        self.step_count += 1
        seen = np.full((8, 10, 3), 20 * self.step_count, np.uint8)
        return seen, float(action[0]), self.step_count == 7, False, {}


class Broken(Pictures):
    def step(self, action):
        return super().step(action)[:4]


class Always(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return self.value.expand(*observation.shape[:-3], 1)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize("command", ["collect", "bench", "check", "doctor", "show", "join"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: reap {command}" in capsys.readouterr().out


def test_it_is_a_module_and_a_script():
    done = subprocess.run(
        [sys.executable, "-m", "reap", "--version"], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.startswith("reap ")


@pytest.mark.parametrize("workers", [0, 2])
def test_collect_and_show(file, tmp_path, capsys, workers):
    out = str(tmp_path / "data")
    command = ["collect", f"{file}:Pictures", "--policy", f"{file}:Always", "--frames", "300", "--out", out]
    assert main([*command, "--workers", str(workers), "--lanes", "2", "--seed", "3"]) == 0
    dataset = load(out)
    assert dataset.metadata["seed"] == 3
    assert set(dataset.lengths) == {7}
    assert sum(dataset.lengths) >= 200
    capsys.readouterr()
    assert main(["show", out]) == 0
    told = capsys.readouterr().out
    assert "mine.py:Pictures" in told
    assert "uint8      [8, 10, 3]" in told
    assert main(["show", out, "--episode", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7
    assert main(["show", out, "--episode", "99999"]) == 1
    assert "--episode must be from 0 to" in capsys.readouterr().err


def test_show_plays_and_plots(file, tmp_path):
    pytest.importorskip("av")
    pytest.importorskip("matplotlib")
    from reap.video import read_video

    out = str(tmp_path / "data.npz")
    assert main(["collect", f"{file}:Pictures", "--frames", "50", "--out", out]) == 0
    assert main(["show", out, "--play", str(tmp_path / "one.mp4")]) == 0
    frames = read_video(tmp_path / "one.mp4")
    assert np.abs(frames.mean((1, 2, 3)) - 20 * np.arange(7)).max() < 4
    assert main(["show", out, "--plot", str(tmp_path / "one.png")]) == 0
    assert (tmp_path / "one.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["state_dict", "checkpoint"])
def test_weights_are_loaded(file, tmp_path, kind):
    policy = nn.Module()
    policy.value = nn.Parameter(torch.full((1,), 0.5))
    where = tmp_path / "weights"
    if kind == "checkpoint":
        checkpoint.save(where, policy=policy)
    else:
        torch.save(policy.state_dict(), where)
    command = ["collect", f"{file}:Pictures", "--policy", f"{file}:Always", "--weights", str(where)]
    assert main([*command, "--frames", "50", "--out", str(tmp_path / "data")]) == 0
    assert (load(tmp_path / "data").frames["action"] == 0.5).all()


def test_check(file, capsys):
    assert main(["check", f"{file}:Pictures"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["check", f"{file}:Broken"]) == 1
    assert "would not give true data" in capsys.readouterr().err


def test_doctor(capsys):
    assert main(["doctor"]) in (0, 1)
    told = capsys.readouterr().out
    assert torch.__version__.split("+")[0] in told
    assert "cores" in told


def test_doctor_tells_of_a_missing_pygame(capsys, monkeypatch):
    def version(name):
        if name == "pygame":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "av is installed without pygame" in told
    assert "pip install 'reap[video]'" in told
    assert "pip install 'reap[pettingzoo]'" in told


@pytest.mark.timeout(120)
def test_bench_prints_a_line_that_runs(file, capsys):
    command = ["bench", f"{file}:Pictures", "--policy", f"{file}:Always", "--seconds", "0.05", "--workers", "2"]
    plot = Path(file).parent / "bench.png"
    assert main([*command, "--plot", str(plot)] if importlib.util.find_spec("matplotlib") else command) == 0
    told = capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG") or not importlib.util.find_spec("matplotlib")
    assert len(re.findall(r"env \d+% · policy \d+% · transport \d+% · loop \d+%", told)) == 6
    assert told.count("frames/s") == 8
    assert told.count("◄ best") == 1
    code = told.strip().splitlines()[-1]
    names: dict[str, object] = {}
    exec("from reap.collectors import *\nfrom reap.envs import *", names)
    exec(compile(FILE, "mine", "exec"), names)
    names["policy"] = names["Always"]()
    with eval(code, names) as collector:
        assert collector.next() is not None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["collect", "NoSuchEnv-v0", "--out", "x"], "Gymnasium knows no env"),
        (["collect", "nothing.py:make", "--out", "x"], "there is no file nothing.py"),
        (["collect", "math:nothing", "--out", "x"], "math has no function or class 'nothing'"),
        (["collect", "no_such_module:make", "--out", "x"], "No module named 'no_such_module'"),
        (["collect", "CartPole-v1", "--weights", "x", "--out", "x"], "--weights are for a policy"),
        (["show", "nowhere"], "does not exist"),
    ],
    ids=["id", "file", "name", "module", "weights", "show"],
)
def test_what_is_wrong_is_told_in_a_line(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 1
    told = capsys.readouterr().err.strip()
    assert message in told
    assert "Traceback" not in told
