"""The house in order: imports go down only, the public names are the listed ones, nothing happens at import."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "reap"
FLOORS = [
    {"arguments", "errors", "spec", "seeding", "trajectories"}
    | {
        "children",
        "fork_server",
        "forks",
        "pickling",
        "refusals",
        "process_state",
        "cores",
        "interrupts",
        "listener",
        "temporary",
    }
    | {"silence", "threads"},
    {"core"},
    {"weights"},
    {"weight_update"},
    {"backends", "envs", "inference", "buffers"},
    {"collectors", "data", "modules"},
    {"testing", "cli", "compat", "join"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reap"):
            yield (node.module or "").split(".")[1:2]
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("reap."):
                    yield name.name.split(".")[1:2]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path):
    here = room(path)
    if here == "__init__":
        return
    for found in imported(path):
        for there in found:
            assert there in FLOOR, f"{there} has no floor"
            if there != here:
                assert FLOOR[there] < FLOOR[here] or FLOOR[here] == 0, f"{here} (floor {FLOOR[here]}) imports {there}"


@pytest.mark.parametrize(
    "module",
    [
        "reap.collectors",
        "reap.collectors.distributed",
        "reap.collectors.utils",
        "reap.compat",
        "reap.data",
        "reap.envs",
        "reap.modules",
        "reap.testing",
        "reap.weight_update",
    ],
)
def test_public_names_exist_and_are_documented(module):
    found = importlib.import_module(module)
    assert found.__all__ == sorted(found.__all__, key=lambda n: (n[0].islower(), n))
    for name in found.__all__:
        assert (getattr(found, name).__doc__ or "").strip(), f"{module}.{name} has no docstring"


def test_importing_changes_nothing():
    code = """
import multiprocessing, os, threading, torch, random, numpy, tensordict.nn.probabilistic as p
before = (torch.get_num_threads(), multiprocessing.get_start_method(allow_none=True), dict(os.environ),
          threading.active_count(), torch.initial_seed(), random.getstate(), p._interaction_type)
import reap, reap.collectors, reap.data, reap.envs, reap.testing, reap.collectors.utils
after = (torch.get_num_threads(), multiprocessing.get_start_method(allow_none=True), dict(os.environ),
         threading.active_count(), torch.initial_seed(), random.getstate(), p._interaction_type)
assert before == after
import sys
assert not {"torchrl", "matplotlib", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_the_core_is_short():
    reading = ["env", "slot", "rollout", "worker", "assemble"]
    assert sum(len((SOURCE / "core" / f"{name}.py").read_text().splitlines()) for name in reading) < 1100


def test_no_file_is_two():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 700, path


def test_the_signature_shows_every_option():
    import inspect

    from reap.collectors import Collector

    names = list(inspect.signature(Collector).parameters)
    assert names[:3] == ["create_env_fn", "policy", "frames_per_batch"]
    assert "reset_when_done" in names
    with pytest.raises(TypeError):
        inspect.signature(Collector).bind("CartPole-v1", None, 5)
