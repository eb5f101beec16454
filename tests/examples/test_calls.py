"""Python calls per frame may only fall."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrl")
pytest.importorskip("mujoco")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_python_calls_per_frame_only_fall():
    from benchmarks.calls import TABLE, versions

    table = json.loads(TABLE.read_text())
    if versions() != table["versions"]:
        pytest.skip(f"the table is for {table['versions']}, here is {versions()}")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.calls", "--json"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=True).stdout
    found, known = json.loads(out.splitlines()[-1]), table["counts"]
    assert found.keys() == known.keys(), "python -m benchmarks.calls --write"
    risen, fallen = [], []
    for name, now in found.items():
        before = known[name]["calls"]
        told = f"{name}: {before / now['frames']:.2f} calls per frame before, {now['calls'] / now['frames']:.2f} now"
        if now["calls"] > before:
            risen.append(told)
        elif now["calls"] < 0.98 * before:
            fallen.append(told)
    assert not risen, "\n".join(["more Python per frame than the table allows:", *risen])
    assert not fallen, "\n".join(["less than the table says: python -m benchmarks.calls --write keeps it", *fallen])
