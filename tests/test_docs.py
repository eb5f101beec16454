"""What the documents say is what runs."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


BLOCKS = {f"{path.name}-{i}": code for path in PAGES for i, code in enumerate(blocks(path)) if "..." not in code}
READER = """
import gc, json, sys, traceback, types, warnings

told = {}
for name, code in json.loads(sys.argv[1]).items():
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            exec(compile(code, name, "exec"), main.__dict__)
            told[name] = "fine"
        except BaseException:
            told[name] = traceback.format_exc()
    del main
    gc.collect()  # collectors that the page does not shut down
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def read(programs):
    """What became of each block. All run in one program, one after the other, each with a `__main__` of its own."""
    done = programs.run(READER, json.dumps(BLOCKS), cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(400)  # the first waits for all
@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks_run(name, read):
    assert read[name] == "fine", read[name]


def test_the_option_table_is_the_docstring():
    from reap.collectors.options import Options

    rows: list[list[str]] = []
    for line in (inspect.getdoc(Options) or "").split("Args:\n")[1].splitlines():
        if match := re.match(r"    (\w+): (.*)", line):
            rows.append([match[1], match[2]])
        elif line.strip():
            rows[-1][1] += " " + line.strip()
    page = (ROOT / "docs" / "collecting.md").read_text()
    for name, text in rows:
        assert f"| `{name}` | {text} |" in page
    import dataclasses

    assert {name for name, _ in rows} == {f.name for f in dataclasses.fields(Options)}


def test_the_checklist_is_whole_and_its_tests_exist():
    page = (ROOT / "docs" / "from-torchrl.md").read_text().split("## The checklist")[1]
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", page, re.M)]
    assert rows == list(range(1, 116))
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", page):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {name}"


def test_links_lead_somewhere():
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_docstring_examples_of_public_names_run():
    import doctest

    import reap.envs.adapters.gymnasium
    import reap.envs.base
    import reap.envs.serial
    import reap.testing.counting

    for module in (reap.envs.adapters.gymnasium, reap.envs.serial, reap.testing.counting):
        result = doctest.testmod(module, extraglobs={"GymEnv": reap.envs.adapters.gymnasium.GymEnv})
        assert result.attempted
        assert not result.failed
