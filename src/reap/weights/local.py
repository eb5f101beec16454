"""Weights within one process: accepts them in any form, and updates a module with all of them or none.

module · TensorDict · state dict · nested dict · {worker: …}   ──►  {"layer.weight": tensor, …}  ──►  copy_
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from reap._system.messages.pickling import shared_in
from reap.errors import SpecMismatch, WrongArgument, nearest

_EXTRA = "_extra_state"
EXTRA_STATE = "__extra_state__"  # the entry for a module's extra state in a TensorDict of weights


def as_named(weights: Any) -> dict[str, Any]:
    """Return weights as a flat dict, with nested names joined by dots."""
    if isinstance(weights, nn.Module):
        return named_tensors(weights)
    if isinstance(weights, TensorDictBase):
        return _named_in(weights)
    if isinstance(weights, Mapping):
        named: dict[str, Any] = {}
        for name, value in weights.items():
            # An extra state may be any object, so a mapping there is a value.
            if isinstance(value, (Mapping, TensorDictBase)) and not str(name).endswith(_EXTRA):
                named.update({f"{name}.{inner}": v for inner, v in as_named(value).items()})
            else:
                named[str(name)] = value
        return named
    raise WrongArgument(f"weights must be a module, a TensorDict or a state dict, got {type(weights).__name__}")


def by_worker(weights: Any) -> bool:
    """Return whether `weights` is a dict of weights by worker number."""
    return isinstance(weights, dict) and bool(weights) and all(isinstance(worker, int) for worker in weights)


def detached(weights: Any) -> dict[str, Any]:
    """Return weights by name, ready to be sent: on the CPU and detached from autograd."""
    return {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in as_named(weights).items()}


def _named_in(weights: TensorDictBase, prefix: str = "") -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name in weights.keys():  # noqa: SIM118
        value = weights.get(name)
        if name == EXTRA_STATE:
            named[prefix + _EXTRA] = value.to_dict() if isinstance(value, TensorDictBase) else weights[name]
        elif isinstance(value, TensorDictBase):
            named.update(_named_in(value, f"{prefix}{name}."))
        else:
            named[prefix + name] = value
    return named


def named_tensors(module: nn.Module) -> dict[str, Any]:
    """Return a module's parameters, buffers and extra states by name."""
    named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    named.update({k: v for k, v in module.state_dict().items() if k.endswith(_EXTRA)})
    return named


def checked_weights(weights: Any, own: Mapping[str, tuple[int, ...] | None], needed: Iterable[str]) -> dict[str, Any]:
    """Return `weights` by name; raise SpecMismatch unless they fit a policy and include all names in `needed`.

    `own` gives the shapes of the policy's tensors by name; None: not a tensor.
    """
    new = {k: v for k, v in as_named(weights).items() if isinstance(v, Tensor) or k.endswith(_EXTRA)}
    unknown = [name for name in new if name not in own]
    if unknown:
        raise SpecMismatch(f"weights hold {unknown[0]!r}, which the policy does not have{nearest(unknown[0], own)}")
    missing = [name for name in needed if name not in new]
    if missing:
        raise SpecMismatch(f"weights lack {len(missing)} of the policy's parameters, first {missing[0]!r}")
    for name, value in new.items():
        shape = own[name]
        if isinstance(value, Tensor) and shape is not None and tuple(value.shape) != shape:
            raise SpecMismatch(f"{name!r} has shape {list(value.shape)}, the policy's {list(shape)}")
    return new


def load(module: nn.Module, weights: Any, needed: Iterable[str] | None = None) -> None:
    """Copy `weights` into `module`, after checking all of them.

    `needed`: the names that must be among them; None: all parameters.
    """
    own = named_tensors(module)
    shapes = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in own.items()}
    if needed is None:
        needed = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    new = checked_weights(weights, shapes, needed)
    with torch.no_grad():
        for name, value in new.items():
            if name.endswith(_EXTRA):
                module.get_submodule(name[: -len(_EXTRA)].rstrip(".")).set_extra_state(value)
            elif own[name] is not value:
                own[name].copy_(value)


def moved_to(policy: Any, device: torch.device | None) -> Any:
    """Return the policy on `device`: itself if it is there already, else a copy that requires no gradients."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = [*policy.parameters(), *policy.buffers()]
    if all(_same_device(t.device, device) for t in tensors):
        return policy
    return copied(policy).to(device).requires_grad_(False)


def copied(policy: Any) -> Any:
    """Return a deep copy that shares the original's `multiprocessing` objects, which cannot be copied."""
    return copy.deepcopy(policy, shared_in(policy))


def unshared(policy: Any) -> Any:
    """Move parameters and buffers out of shared memory, because this process will write to them; return the policy."""
    if isinstance(policy, nn.Module):
        own: dict[int, torch.UntypedStorage] = {}  # new storages by the old: tensors that shared one still do
        for tensor in (*policy.parameters(), *policy.buffers()):
            if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    own[storage.data_ptr()] = cast(Any, storage).clone()
                mine = own[storage.data_ptr()]
                view = tensor.storage_offset(), tensor.size(), tensor.stride()
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(mine, *view)
    return policy


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (b.index is None or a.index == b.index)
