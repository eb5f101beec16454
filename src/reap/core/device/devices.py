"""Devices: find a device by its name; raise a plain error if there is none of that name on this machine."""

from __future__ import annotations

from typing import Any

import torch

from reap.errors import WrongArgument


def named_device(name: str, value: Any) -> torch.device | None:
    """Return the device that the argument called `name` has as its value; None for None."""
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError) as cause:
        raise WrongArgument(f"{name} must name a device, got {value!r}") from cause
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WrongArgument(f"{name} is {value!r}, but torch sees no GPU here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise WrongArgument(
            f"{name} is {value!r}, but torch sees {torch.cuda.device_count()} GPUs here, from cuda:0 on"
        )
    return device
