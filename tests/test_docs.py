"""What the documents say is what runs."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(<!-- slow -->\n)?```(\w*)\n(.*?)^```$", re.S | re.M)


def blocks(*, slow: bool) -> dict[str, str]:
    """Python blocks by page and number; those that a comment calls slow, or the others."""
    found = {}
    for path in PAGES:
        code = [match for match in FENCE.finditer(path.read_text()) if match[2] == "python"]
        for i, match in enumerate(code):
            if bool(match[1]) == slow:
                found[f"{path.relative_to(ROOT).as_posix().removeprefix('docs/')}-{i}"] = match[3]
    return found


BLOCKS = blocks(slow=False)
SLOW = blocks(slow=True)
READER = """
FRAMES = {
    "tutorials/atari.md-0": "64",
    "tutorials/dqn.md-0": "1280",
    "tutorials/multi-agent.md-0": "1600",
    "tutorials/offline.md-0": "1600",
    "tutorials/sac.md-0": "512",
}
import gc, json, os, sys, traceback, types, warnings

import torch

torch.set_num_threads(1)  # two that spin, waiting for each other, take a busy machine's time
told = {}
for name, code in json.loads(sys.argv[1]).items():
    os.environ["FRAMES"] = FRAMES.get(name, "2048")  # tutorials train for as long as this says
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
    done = programs.run(READER, json.dumps(BLOCKS), cwd=ROOT, timeout=380)
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


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", SLOW)
def test_slow_python_blocks_run(name, programs):
    frames = "import os\n\nos.environ['FRAMES'] = '2048'\n"
    done = programs.run(frames + SLOW[name], cwd=ROOT, timeout=180)
    assert done.returncode == 0, done.stderr


def test_no_python_block_is_left_out():
    """Only blocks that run are called python; what is shown of others is text, or a console."""
    for path in PAGES:
        for match in FENCE.finditer(path.read_text()):
            assert match[2] in ("", "python", "console", "text", "yaml"), f"{path.name}: {match[2]}"
            called = match[2] or not re.search(r"^(import|from) \w", match[3], re.M)
            assert called, f"{path.name}: python that is not called so:\n{match[3]}"


def test_diagrams_are_pictures_and_lines_fit():
    """In a browser 1,200 pixels wide a line of code holds about 120 characters."""
    for path in PAGES:
        for match in FENCE.finditer(path.read_text()):
            drawn = "[┌┐└┘├┤┬┴│]|─►" if match[2] == "" else "─►"  # what a program prints may have frames
            assert not re.search(drawn, match[3]), f"{path.name}: {match[3]}"
            assert max(map(len, match[3].splitlines())) <= 120, f"{path.name}: {match[3]}"


def anchors(page: str) -> set[str]:
    """What the headings of a page are called in links."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M)
    names: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())
        names.append(f"{name}_{names.count(name)}" if name in names else name)
    return {*names}


def test_links_lead_somewhere():
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
            if "://" in target:
                continue
            there = path.parent / target if target else path
            assert there.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in anchors(there.read_text()), f"{path.name}: {target}#{anchor}"


def test_every_page_is_in_the_navigation_and_every_picture_is_shown():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    told = re.findall(r"(\S+\.md)$", nav, re.M)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(told) == len({*told})
    assert {*told} == pages
    text = "".join(path.read_text() for path in PAGES) + (ROOT / "mkdocs.yml").read_text()
    for picture in [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "docs").rglob("*.png")]:
        assert picture.name in text, f"{picture} is shown nowhere"


def test_diagrams_are_what_the_script_draws(tmp_path, monkeypatch):
    import importlib.util

    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "images" / "draw.py")
    assert spec
    assert spec.loader
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    monkeypatch.setattr(draw, "HERE", tmp_path)
    draw.main()
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "docs" / "images" / path.name).read_text(), f"{path.name}: run draw.py"


PUBLIC = (
    *("collectors", "collectors.distributed", "envs", "data", "modules", "weight_update", "loggers", "testing"),
    *("compat", "checkpoint", "trajectories", "errors", "envs.transforms"),
)
ELSEWHERE = {"reap", "reap.cli", "reap.collectors.utils"}  # the same names as elsewhere, or none that is imported


def test_the_reference_has_every_public_name():
    import importlib
    import pkgutil

    import reap

    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = {*re.findall(r"^::: reap\.([\w.]+)$", text, re.M)}
    by_hand = {*re.findall(r"^## (\w+)$", text, re.M)}
    for package in PUBLIC:
        module = importlib.import_module(f"reap.{package}")
        wanted = inspect.isclass if package == "errors" else callable  # its functions are for reap itself
        here = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__ and wanted(v)]
        names = getattr(module, "__all__", [n for n in here if not n.startswith("_")])
        missing = {n for n in names if f"{package}.{n}" not in shown and n not in by_hand}
        assert not missing, f"not in docs/reference: {sorted(missing)} of reap.{package}"
    assert "collectors.options.Options" in shown
    for name in reap.__all__:
        assert f"`reap.{name}`" in text
    for name in shown:  # and nothing that is gone
        package, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(f"reap.{package}"), last), name
    listed = {
        found.name
        for found in pkgutil.walk_packages(reap.__path__, "reap.")
        if not re.search(r"\._|\.(core|backends|buffers|inference|weights|startup|__main__)\b", found.name)
        and re.search(r"^__all__ =", Path(found.module_finder.find_spec(found.name).origin).read_text(), re.M)
    }
    assert listed - ELSEWHERE <= {f"reap.{package}" for package in PUBLIC}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings")
    import subprocess
    import sys

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        for address in re.findall(r"<(?:link|script|img)[^>]+(?:href|src)=\"?(https?://[^\s\">]+)", page.read_text()):
            raise AssertionError(f"{page.name} fetches {address}")
    collectors = (tmp_path / "reference" / "collectors.html").read_text()
    assert 'href="options.html#reap.collectors.options.Options"' in collectors
    for name in ("Collector", "MultiSyncCollector", "AsyncBatchedCollector"):
        signature = collectors.partition(f'id="reap.collectors.{name}"')[2].partition("Bases:")[0]
        assert "frames_per_batch" in signature, name


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
