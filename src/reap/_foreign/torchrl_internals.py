"""Private names of TorchRL: the only place that uses them, and what is done without."""

from __future__ import annotations

from typing import Any


def is_a_sequence(mlp: Any) -> bool:
    """Whether TorchRL's MLP does nothing but call its layers: it has one input and one output dimension."""
    return not getattr(mlp, "_reshape_out", True)
