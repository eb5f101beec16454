"""For the API reference: examples in docstrings, lines after `>>>`, are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1(?:>>>|\.\.\.) ?.*)*", re.M)


def _fenced(match: re.Match[str]) -> str:
    lines = match[0].splitlines()
    code = [line[len(match[1]) + 4 :] for line in lines]  # without ">>> " and "... "
    return "\n".join(match[1] + line for line in ("```python", *code, "```"))


class ExamplesAsCode(griffe.Extension):
    """Replaces prompts by fences before a docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)
