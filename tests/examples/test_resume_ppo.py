"""examples/resume_ppo.py, killed as hard as can be, learns what it would have learned undisturbed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, run

UPDATES = "6"


@pytest.mark.timeout(200)
def test_killed_twice_it_learns_the_same(tmp_path: Path) -> None:
    args = ("--updates", UPDATES, "--run")
    undisturbed = run("resume_ppo.py", *args, str(tmp_path / "one"), cwd=tmp_path, timeout=100)
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = undisturbed.stdout.splitlines()[-2:]

    for after in (2, 1):  # updates of each life
        command = [sys.executable, str(EXAMPLES / "resume_ppo.py"), *args, str(tmp_path / "two")]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            seen = 0
            for line in process.stdout:
                seen += line.startswith("update")
                if seen == after:
                    process.kill()  # SIGKILL, somewhere in the next update or its checkpoint
                    break
        assert process.returncode == -9
    last = run("resume_ppo.py", *args, str(tmp_path / "two"), cwd=tmp_path, timeout=100)
    assert last.returncode == 0, last.stderr
    first, *_, curve, weights = last.stdout.splitlines()
    assert first.startswith("goes on after update")
    assert 3 <= int(first.split()[-1]) < int(UPDATES)
    assert [curve, weights] == expected, "the same curve and the same weights, bit for bit"
