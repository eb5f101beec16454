"""Training scripts in the way of TorchRL's examples and tutorials: on reap they compute the same numbers, bit for bit.

    scripts/ppo.py  ──►  as it is, TorchRL's collectors     ──►  log ┐
                    └─►  with reap.compat, reap's in place  ──►  log ┴─ batches, losses, returns: equal

Each script seeds itself and appends what it sees to a list `log`. Both runs are in this process: a script looks its
names up when it runs, so it is the same as in a process of its own, which the last test shows.
"""

import contextlib
import math
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    import torchrl.collectors  # noqa: F401  (so that the first of two runs does not pay for it)

import reap.compat

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
SCRIPTS = Path(__file__).parent / "scripts"
CORE = ("ppo", "sac", "dqn", "tutorial_recurrent_dqn", "tutorial_buffers")  # the others are for `make test-all`
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))


def play(name, installed=contextlib.nullcontext):
    with warnings.catch_warnings(), installed():
        warnings.simplefilter("ignore")
        found = runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    return found["log"], type(found["collector"]).__module__.split(".")[0]


def leaves(entry):
    """Everything in one entry of a log, by name."""
    if isinstance(entry, TensorDictBase):
        return dict(entry.items(True, True)) | {"batch size": tuple(entry.batch_size)}
    return entry if isinstance(entry, dict) else {"value": entry}


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def difference(ours, theirs):
    """The first entry in which two logs differ, in words; None if they are equal."""
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        one, other = leaves(one), leaves(other)
        if one.keys() != other.keys():
            return f"entry {n}: {sorted(map(str, one))} here, {sorted(map(str, other))} there"
        for key in one:
            if not same(one[key], other[key]):
                return f"entry {n} of {len(ours)}: {key}: {one[key]!s:.200} here, {other[key]!s:.200} there"
    return None


def test_a_last_digit_is_a_difference():
    def log(value):
        return [TensorDict(a=torch.tensor([1.0, value]), batch_size=[2]), {"return": 2.0}, torch.tensor(value)]

    assert difference(log(1.0), log(1.0)) is None
    next_to_it = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    assert difference(log(next_to_it), log(1.0)).startswith("entry 0 of 3: a:")
    assert difference([log(1.0)[0].to(torch.float64)], log(1.0)[:1]).startswith("entry 0 of 1: a:")
    assert difference([{"return": 2.0, "more": 1}], [{"return": 2.0}]).startswith("entry 0: ")


@pytest.mark.parametrize(
    "name", [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_same_numbers(name):
    theirs, whose = play(name)
    ours, whose_then = play(name, reap.compat.install)
    assert (whose, whose_then) == ("torchrl", "reap")
    assert len(ours) == len(theirs) > 3
    assert difference(ours, theirs) is None


PRINTING = """
import runpy, sys, torch
found = runpy.run_path(sys.argv[1], run_name="__main__")
print(type(found["collector"]).__module__.split(".")[0])
print([float(sum(value.double().sum() for value in entry.values(True, True))) for entry in found["log"]])
"""


@pytest.mark.slow
def test_the_same_numbers_in_processes_of_their_own(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(PRINTING)
    printed = []
    for compat in ((), ("-m", "reap.compat")):
        command = [sys.executable, "-W", "ignore", *compat, str(driver), str(SCRIPTS / "tqc.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        printed.append([line for line in done.stdout.splitlines() if "INFO" not in line])
    (whose, theirs), (whose_then, ours) = printed
    assert (whose, whose_then) == ("torchrl", "reap")
    assert ours == theirs
