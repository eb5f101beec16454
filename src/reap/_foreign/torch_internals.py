"""The only place that uses private names of torch, with a fallback for each name that is gone.

Another version of torch may lack any of these names. Everything is decided when this file is imported: its users find
the fast way, the public one, or `False` for "torch does not say", in which case they take their general path.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from reap.errors import MissingDependency

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)
_module = nn.Module()
KNOWS_HOOKS = all(hasattr(_module, name) for name in _HOOKS) and all(hasattr(torch_module, n) for n in _GLOBAL_HOOKS)
GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = (
    tuple(getattr(torch_module, name) for name in _GLOBAL_HOOKS) if KNOWS_HOOKS else ()
)


def is_unhooked(module: nn.Module) -> bool:
    """Return whether calling this module runs its class's `forward` and nothing else; False if torch does not say."""
    return KNOWS_HOOKS and not (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks around a module's `forward`; only valid where `KNOWS_HOOKS`."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


# Switches gradients on or off for this thread. The C function either runs or does not; Ctrl-C can break off the public
# one, which is Python, before it had an effect.
set_grad_enabled: Callable[[bool], Any] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)

# How often a tensor was changed in place. Without it nothing can be recorded: what a call changed would be unknown.
KNOWS_CHANGES = hasattr(Tensor, "_version")
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")

# The dicts that hold a module's parameters and submodules. Without them or versions, policies are compared by value.
_HOLDERS = ("_parameters", "_modules")
SEES_REPLACED = KNOWS_CHANGES and all(isinstance(getattr(_module, name, None), dict) for name in _HOLDERS)
holders: Callable[[nn.Module], tuple[dict[str, Any], ...]] = operator.attrgetter(*_HOLDERS)

# Names of torch's own functions, as a `TorchFunctionMode` reports them. A name that torch no longer has never occurs.
METADATA = frozenset({"_version", "_is_zerotensor"})
SIZED_BY_VALUES = frozenset({"_unique2"})
HARMLESS = frozenset({"_set_grad_enabled", "_is_functorch_wrapped_tensor", "_has_torch_function"})
CHECKS_OF_DISTRIBUTIONS = frozenset({"__init__", "_validate_sample"})  # they only raise for invalid values


def _copy_one_by_one(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for column, value in zip(into, values):
        column.copy_(value)


# Copies each tensor of a list to its destination in one call, with few kernels on a GPU.
copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = getattr(torch, "_foreach_copy_", _copy_one_by_one)


# ---- torch.distributed ----------------------------------------------------------------------------------------------


def gloo_group(store: Any, rank: int, size: int, listen: str, timeout: timedelta) -> Any:
    """Join a gloo group, and listen on one address of this host.

    The public constructor lets gloo choose the address, by an environment variable that names a network interface. Only
    the loopback interface can be named that way, because its name follows from its address.
    """
    from torch.distributed import ProcessGroupGloo

    make = getattr(ProcessGroupGloo, "_Options", None)
    if make is not None:
        options = make()
        if hasattr(options, "_devices") and hasattr(options, "_timeout"):
            options._devices = [ProcessGroupGloo.create_device(hostname=listen)]
            options._timeout = timeout
            return ProcessGroupGloo(store, rank, size, options)
    with on_loopback("GLOO_SOCKET_IFNAME") if listen.startswith("127.") else contextlib.nullcontext():
        return ProcessGroupGloo(store, rank, size, timeout)


@contextlib.contextmanager
def on_loopback(variable: str) -> Iterator[None]:
    """Set an environment variable to the name of the loopback interface for the length of the block."""
    before = os.environ.get(variable)
    os.environ[variable] = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


# Agents of `torch.distributed.rpc` use sockets between machines. Every other transport needs one machine.
BETWEEN_MACHINES = {"_transports": ["uv"], "_channels": ["basic"]}
# Shared memory, negotiated over a Unix socket without a path: an agent that also offered the other transports would
# listen at 17 TCP ports of the loopback interface, where a port scan ends it.
ON_ONE_MACHINE = {"_transports": ["shm"], "_channels": ["cma", "basic"]}


def start_rpc_agent(store: Any, own: str, rank: int, size: int | None, options: Mapping[str, Any]) -> Any:
    """Start this process's agent of `torch.distributed.rpc`, and return it when all agents are there.

    With `size` None it waits for no other agent; the others are made known one by one, by `introduce_rpc_agent`.

    This replaces `init_rpc`, which makes all agents call one another, and gloo besides, before anything else. Options
    that this version of torch does not accept are left out, and its agents choose for themselves.
    """
    from torch.distributed import autograd, rpc
    from torch.distributed.rpc import TensorPipeAgent  # type: ignore[attr-defined]

    start, begin_gradients = getattr(rpc.api, "_init_rpc_states", None), getattr(autograd, "_init", None)
    if start is None or begin_gradients is None:  # agents need autograd, though calls carry no gradients
        raise MissingDependency(
            f"torch {torch.__version__} starts the agents of torch.distributed.rpc in another way than RPCCollector "
            f"knows; DistributedCollector and RayCollector need none"
        )
    known = inspect.signature(rpc.TensorPipeRpcBackendOptions).parameters
    made = rpc.TensorPipeRpcBackendOptions(**{name: value for name, value in options.items() if name in known})
    begin_gradients(rank)
    agent = TensorPipeAgent(store, own, rank, size, made, {}, [])
    start(agent)
    return agent


def can_introduce_rpc_agents() -> bool:
    """Return whether an agent can be told about others that join later, and about those that have left."""
    from torch.distributed.rpc import TensorPipeAgent  # type: ignore[attr-defined]

    return hasattr(TensorPipeAgent, "_update_group_membership")


def introduce_rpc_agent(agent: Any, name: str, number: int, *, gone: bool = False) -> None:
    """Make another agent, whose address is in the store under this name, known to this one; `gone` removes it."""
    from torch.distributed.rpc import WorkerInfo  # type: ignore[attr-defined]

    agent._update_group_membership(WorkerInfo(name, number), [], {}, not gone)


# The guard inside torch.inference_mode. C code enters and leaves it, so Ctrl-C cannot come in between: a mode that was
# entered and never left would stay on in the user's code. Where torch lacks the guard, reap uses no inference mode.
INFERENCE_GUARD: Any = getattr(torch._C, "_InferenceMode", None)
