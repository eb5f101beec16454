"""The examples run as a user would run them: as scripts, in a process of their own."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.examples.scripts import run


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_ppo_cartpole_runs_on_a_small_budget(tmp_path: Path) -> None:
    plot = tmp_path / "curve.png"
    done = run("ppo_cartpole.py", "--frames", "4096", "--plot", str(plot), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert re.search(r"2,048 frames +[\d,]+ frames/s +mean return +\d+\.\d", done.stdout), done.stdout
    # Two batches cannot be enough; the script has to say so, and a lowered budget is no failure.
    assert re.match(r"not learned: mean return \d+ over the last \d+ episodes after 4,096 frames", last_line(done))
    assert "Warning" not in done.stderr
    assert is_png(plot)
    assert list(tmp_path.iterdir()) == [plot]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ppo_cartpole_learns(tmp_path: Path) -> None:
    done = run("ppo_cartpole.py", "--seed", "0", cwd=tmp_path, timeout=350)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.match(r"solved: mean return (\d+) over the last 100 episodes", last_line(done))
    assert told, done.stdout
    assert int(told[1]) >= 450
    assert is_png(tmp_path / "demo.png")


@pytest.mark.parametrize(
    ("name", "frames"), [("dqn_cartpole.py", 2048), ("sac_pendulum.py", 1024), ("distributed_sac.py", 1024)]
)
def test_learning_from_a_buffer_runs_on_a_small_budget(name: str, frames: int, tmp_path: Path) -> None:
    done = run(name, "--frames", str(frames), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    told = re.match(
        rf"(not learned|solved): mean return -?\d+ of 100 \w+ after {frames:,} frames and (\d+) updates",
        last_line(done),
    )
    assert told, done.stdout
    assert int(told[2]) > 50  # the limiter makes sure of it, however slow the learner is beside the workers
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "least", "options"),
    [
        ("dqn_cartpole.py", 400, ["--seed", "0", "--target", "501"]),  # never reached: what was learned is to last
        ("dqn_cartpole.py", 400, ["--seed", "1"]),
        ("dqn_cartpole.py", 400, ["--seed", "2"]),
        ("sac_pendulum.py", -250, ["--seed", "0"]),
        ("distributed_sac.py", -250, ["--seed", "0"]),
    ],
)
def test_learning_from_a_buffer(name: str, least: int, options: list[str], tmp_path: Path) -> None:
    done = run(name, *options, cwd=tmp_path, timeout=650)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.match(r"solved: mean return (-?\d+) of 100", last_line(done))
    assert told, done.stdout
    assert int(told[1]) >= least


@pytest.mark.parametrize(
    ("frames", "word"),
    [(4096, "not learned"), pytest.param(None, "solved", marks=[pytest.mark.slow, pytest.mark.timeout(400)])],
)
def test_ray_ppo(frames: int | None, word: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    done = run("ray_ppo.py", *(["--frames", str(frames)] if frames else []), cwd=tmp_path, timeout=350)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(rf"{word}: mean return \d+ after [\d,]+ frames in \d+ s, 0 actors replaced", last_line(done))
    assert "Warning" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.rstrip().splitlines()[-1]
