"""Makes `reap/collectors/keywords.py`, which type checkers read: `python -m tests.types.keywords --write`."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import reap.collectors.keywords as made
from reap.collectors.batched import UNSUPPORTED as NOT_BATCHED
from reap.collectors.multi import IN_PROCESS_ONLY as NOT_MULTI
from reap.collectors.multi import PER_WORKER
from reap.collectors.options import Options, option_docs

HEAD = '''"""Keywords: the options of each collector, for editors and type checkers. Made from `Options`, not by hand.

`python -m tests.types.keywords --write` regenerates it, and a test fails when that is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict.nn import InteractionType
from typing_extensions import Required, TypedDict

from reap.spec import AnyKey
from reap.weight_update import WeightSyncScheme
'''


def text() -> str:
    """Return the module as it should be."""
    fields = {field.name: field for field in dataclasses.fields(Options)}
    docs = option_docs()
    assert docs.keys() == fields.keys(), docs.keys() ^ fields.keys()
    each = {*PER_WORKER, "frames_per_batch"}

    def declared(names: Iterable[str], *, wide: bool = False) -> str:
        lines = []
        for name in fields:
            if name not in names:
                continue
            kind = str(fields[name].type).replace("'", '"')
            if wide:
                none = " | None" * kind.endswith(" | None")
                kind = f"{kind.removesuffix(none)} | Sequence[{kind}]{none}"
            if name == "frames_per_batch":
                kind = f"Required[{kind}]"
            told = docs[name] + " A list has one for each worker." * wide
            told = told[0].upper() + told[1:]
            lines.append(f"    {name}: {kind}")
            lines.append(textwrap.fill(f'"""{told}"""', 120, initial_indent="    ", subsequent_indent="    "))
        return "\n".join(lines)

    def typed(name: str, base: str, doc: str, entries: str) -> str:
        return f'\n\nclass {name}({base}, total=False):\n    """{doc}"""\n\n{entries}\n'

    common = fields.keys() - each - NOT_BATCHED - NOT_MULTI
    return HEAD + "".join(
        (
            typed("CommonOptions", "TypedDict", "Options of every collector.", declared(common)),
            typed(
                "BatchedCollectorOptions",
                "CommonOptions",
                "Options of `AsyncBatchedCollector`.",
                declared(each),
            ),
            typed(
                "LanesInStepOptions",
                "TypedDict",
                "Further options of every collector except `AsyncBatchedCollector`.",
                declared(NOT_BATCHED - NOT_MULTI),
            ),
            typed(
                "CollectorOptions",
                "BatchedCollectorOptions, LanesInStepOptions",
                "Options of `Collector`; some require `num_collectors`.",
                declared(NOT_BATCHED & NOT_MULTI),
            ),
            typed(
                "MultiCollectorOptions",
                "CommonOptions, LanesInStepOptions",
                "Options of collectors with workers.",
                declared(each, wide=True),
            ),
        )
    )


PATH = Path(made.__file__)

if __name__ == "__main__" and "--write" in sys.argv:
    PATH.write_text(text())
