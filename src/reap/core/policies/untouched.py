"""untouched: try out a user's object without leaving a trace."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from reap.core.capture.generator_state import is_shared
from reap.core.resume import generators, set_generators


@contextlib.contextmanager
def untouched(policy: Any) -> Iterator[None]:
    """Restore random generators, buffers and attributes on exit; generators only if no other thread draws from them."""
    parts = stateful_parts(policy).values()
    attributes = [(m, type(m), dict(vars(m))) for m in parts]
    modules = [m for m in parts if isinstance(m, nn.Module)]
    buffers = [(m, name, b, b.clone()) for m in modules for name, b in m.named_buffers(recurse=False)]
    drawn_from = None if is_shared() else generators()
    held = [value for _, _, before in attributes for value in before.values()]
    own = [(g, g.get_state()) for g in held if isinstance(g, torch.Generator)]
    drawn = [(g.bit_generator, g.bit_generator.state) for g in held if isinstance(g, np.random.Generator)]
    try:
        yield
    finally:
        for owner, kind, before in attributes:
            if type(owner) is not kind:
                continue  # a lazy module was initialised, which is not undone
            now = vars(owner)
            made = _registered(owner)
            before = {n: v for n, v in before.items() if n not in made}  # layers made on the first call stay
            for name in [n for n in now if n not in before]:
                del now[name]
            now.update(before)
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                buffer.copy_(value)
                if getattr(owner, name, None) is not buffer:  # it was replaced by another tensor
                    setattr(owner, name, buffer)
        for generator, state in own:
            generator.set_state(state)
        for bits, there in drawn:
            bits.state = there
        if drawn_from is not None:
            set_generators(drawn_from)


def stateful_parts(policy: Any) -> dict[str, Any]:
    """Return a policy, or all modules in it, by path; without those that hold no attributes of their own."""
    parts = dict(policy.named_modules()) if isinstance(policy, nn.Module) else {"": policy}
    return {
        path: part
        for path, part in parts.items()
        if hasattr(part, "__dict__") and not inspect.isroutine(part) and not inspect.isclass(part)
    }


def _registered(owner: Any) -> set[str]:
    """Return the names under which a module holds layers, parameters and buffers."""
    if not isinstance(owner, nn.Module):
        return set()
    held = (owner.named_parameters, owner.named_buffers)
    own = {name for named in held for name, _ in named(recurse=False, remove_duplicate=False)}
    return own | {name for name, _ in owner.named_modules(remove_duplicate=False) if "." not in name}
