"""For the API reference: examples in docstrings are shown as code, options of collectors are linked to."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1(?:>>>|\.\.\.) ?.*)*", re.M)


def _fenced(match: re.Match[str]) -> str:
    lines = match[0].splitlines()
    code = [line[len(match[1]) + 4 :] for line in lines]  # without ">>> " and "... "
    return "\n".join(match[1] + line for line in ("```python", *code, "```"))


OPTIONS = "reap.collectors.options.Options"


def _with_required(function: griffe.Function) -> None:
    """Show `frames_per_batch`, the one option that must be given, where the others are `**options`."""
    named = list(function.parameters)
    options = str(named[-1].annotation)
    if named[-1].kind is griffe.ParameterKind.var_keyword and options.endswith("CollectorOptions]"):
        in_this_process = options in ("Unpack[CollectorOptions]", "Unpack[BatchedCollectorOptions]")
        kind = "int" if in_this_process else "int | Sequence[int]"
        required = griffe.Parameter(
            "frames_per_batch", annotation=kind, kind=griffe.ParameterKind.keyword_only, default=None
        )
        front = [p for p in named if p.kind is griffe.ParameterKind.positional_or_keyword]
        function.parameters = griffe.Parameters(*front, required, *named[len(front) :])


class ExamplesAsCode(griffe.Extension):
    """Replaces prompts by fences before a docstring is parsed."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.name == "__init__" and func.parameters:
            _with_required(func)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            shown = EXAMPLE.sub(_fenced, obj.docstring.value)
            obj.docstring.value = shown.replace(f"see `{OPTIONS}`", f"see [`{OPTIONS}`][{OPTIONS}]")
