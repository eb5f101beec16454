"""`import reap` is cheap, and brings the names that most scripts need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import reap

ROOT = Path(__file__).parents[2]


def test_names_are_those_of_their_modules():
    import reap.collectors
    import reap.data
    import reap.envs

    assert reap.Collector is reap.collectors.Collector
    assert reap.GymEnv is reap.envs.GymEnv
    assert reap.ReplayBuffer is reap.data.ReplayBuffer
    assert reap.__all__ == sorted(reap.__all__, key=lambda n: (n[0].islower(), n))
    for name in reap.__all__:
        assert getattr(reap, name).__doc__
        assert name in dir(reap)
    with pytest.raises(AttributeError, match="has no attribute 'Collecter'"):
        reap.Collecter


def test_type_checkers_see_the_same_names():
    text = (ROOT / "src" / "reap" / "__init__.py").read_text()
    shown = re.findall(r"^    from reap\.(\w+) import (\w+) as \2$", text, re.M)
    assert {name: place for place, name in shown} == reap._PLACES


def test_importing_is_cheap_and_modules_come_when_asked_for():
    code = """
import sys, reap
assert "torch" not in sys.modules
batch = reap.Collector("CartPole-v1", frames_per_batch=10).next()
assert reap.data.record and reap.checkpoint.save and reap.loggers.CSVLogger
assert len(batch) == 10
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100)


def test_errors_name_extras_that_exist():
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {*re.findall(r"^(\w+) = \[", text, re.M)}
    asked = set()
    for path in (ROOT / "src").rglob("*.py"):
        asked |= {*re.findall(r"""missing\("[^"]+", "(\w+)"\)""", path.read_text())}
        asked |= {*re.findall(r"reap\[(\w+)\]", path.read_text())}
    assert len(asked) > 8
    assert asked <= extras
    everything = re.search(r"^all = \[\"reap\[([\w,]+)\]", text, re.M)
    assert {*everything[1].split(",")} == extras - {"all", "bench", "test", "docs", "dev"}
