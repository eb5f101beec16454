"""Workers on other machines: real ones as far as the network goes, each a namespace with addresses of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.machines import Machines


@pytest.mark.slow  # a minute of waiting for links that are cut
@pytest.mark.timeout(300)
def test_several_machines():
    """All of inside_machines.py, in the hub's namespace."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here to make network namespaces with")
    machines = Machines()
    try:
        try:
            machines.up()
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        inside = Path(__file__).with_name("inside_machines.py")
        done = subprocess.run(
            ["ip", "netns", "exec", machines.hub, sys.executable, "-m", "pytest", "-x", "--tb=short", str(inside)],
            env={**os.environ, "REAP_TEST_MACHINES": f"{machines.a} {machines.b}"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=280,
        )
    finally:
        machines.down()
    assert done.returncode == 0, done.stdout + done.stderr
