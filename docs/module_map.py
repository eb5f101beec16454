"""The list of modules at the end of docs/design.md, made from each module's own first line.

python docs/module_map.py    writes it; a test says if the page is out of date
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parent / "design.md"
SOURCE = Path(__file__).parent.parent / "src" / "reap"
HEADING = "## Every module\n"
# Packages from the bottom up; sub-packages follow their package.
PACKAGES = [
    "",
    *("_foreign", "_system", "core", "weights", "envs", "inference", "buffers", "backends", "collectors"),
    *("data", "loggers", "watching", "modules", "cli", "compat", "testing"),
]
TOP = "What users import beside the packages below."


def first_line(path: Path) -> str:
    """Return the first sentence of a module's docstring, or of its first line where that goes on with an example."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return re.split(r"\s{3,}", " ".join(paragraph.splitlines()))[0]


def section(package: Path) -> str:
    """Return the table of one package."""
    place = package.relative_to(SOURCE).as_posix()
    title = f"**`src/reap/`** {TOP}" if place == "." else f"**`{place}/`** {first_line(package / '__init__.py')}"
    rows = [
        f"| `{'.'.join(path.relative_to(SOURCE).with_suffix('').parts)}` | {first_line(path)} |"
        for path in sorted(package.glob("*.py"))
        if path.name != "__init__.py"
    ]
    return "\n".join([title, *(["", "| module | |", "|---|---|", *rows] if rows else [])]) + "\n"


def module_map() -> str:
    """Return the whole list."""
    found = []
    for name in PACKAGES:
        package = SOURCE / name
        inside = sorted(path.parent for path in package.rglob("__init__.py")) if name else [package]
        found += [section(one) for one in inside]
    return "\n".join(found)


def page() -> str:
    """Return docs/design.md with the list as it should be."""
    return PAGE.read_text().partition(HEADING)[0] + HEADING + "\n" + module_map()


if __name__ == "__main__":
    PAGE.write_text(page())
