"""Private names of torch: the only place that uses them, and what is done without.

Each name may go in another version of torch. What is decided here is decided when the file is imported: users of it
find the fast way, the public one, or `False` for "torch does not say", and then they take their general path.
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
    """Whether a call of this module is one of its class's `forward`, and nobody else's; False if torch does not say."""
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
    """The hooks around `forward` of a module, where `KNOWS_HOOKS`."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


# Whether this thread has gradients. One of C is called or it is not; in the public one, which is Python, Ctrl-C
# can come before it did anything.
set_grad_enabled: Callable[[bool], Any] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)

# How often a tensor was changed in place. Without it nothing can be recorded: what a call changed would not be known.
KNOWS_CHANGES = hasattr(Tensor, "_version")
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")

# The dicts in which a module holds its own. Without them, or versions, a policy is compared value by value.
_HOLDERS = ("_parameters", "_modules")
SEES_REPLACED = KNOWS_CHANGES and all(isinstance(getattr(_module, name, None), dict) for name in _HOLDERS)
holders: Callable[[nn.Module], tuple[dict[str, Any], ...]] = operator.attrgetter(*_HOLDERS)

# Names of torch's own functions, as those who watch its calls are told them. One that is gone is never told.
METADATA = frozenset({"_version", "_is_zerotensor"})
SIZED_BY_VALUES = frozenset({"_unique2"})
HARMLESS = frozenset({"_set_grad_enabled", "_is_functorch_wrapped_tensor", "_has_torch_function"})
CHECKS_OF_DISTRIBUTIONS = frozenset({"__init__", "_validate_sample"})  # which raise for wrong values, and only that


def _copy_one_by_one(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for column, value in zip(into, values):
        column.copy_(value)


# Copies each of a list of tensors to its place, with one call, and few kernels on a GPU.
copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = getattr(torch, "_foreach_copy_", _copy_one_by_one)


# ---- torch.distributed ----------------------------------------------------------------------------------------------


def gloo_group(store: Any, rank: int, size: int, listen: str, timeout: timedelta) -> Any:
    """Join a gloo group, and listen on one address of this host.

    The public way leaves the choice to gloo, which a variable of the environment tells the interface; the loopback
    interface is the only one whose name follows from its address.
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
    """Have a variable of the environment name the loopback interface, for the length of the block."""
    before = os.environ.get(variable)
    os.environ[variable] = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


# What agents of `torch.distributed.rpc` use between machines: sockets. What else there is needs one machine.
BETWEEN_MACHINES = {"_transports": ["uv"], "_channels": ["basic"]}
# Shared memory, met at a Unix socket without a path: an agent that also knew the others would listen at 17 TCP ports of
# the loopback interface, where a port scan ends it.
ON_ONE_MACHINE = {"_transports": ["shm"], "_channels": ["cma", "basic"]}


def start_rpc_agent(store: Any, own: str, rank: int, size: int | None, options: Mapping[str, Any]) -> Any:
    """Start this process's agent of `torch.distributed.rpc`, and return it when all are there.

    `size` None: nobody else is waited for, and others are made known to it one by one, by `introduce_rpc_agent`.

    Not by `init_rpc`: that has all agents call one another, and gloo besides, before anything is done. Where torch does
    not take one of the options above, its agents choose for themselves.
    """
    from torch.distributed import autograd, rpc
    from torch.distributed.rpc import TensorPipeAgent  # type: ignore[attr-defined]

    start, begin_gradients = getattr(rpc.api, "_init_rpc_states", None), getattr(autograd, "_init", None)
    if start is None or begin_gradients is None:  # agents ask for the second, too, though no gradients go through calls
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
    """Whether an agent can be told of others that come later, and of those that are gone."""
    from torch.distributed.rpc import TensorPipeAgent  # type: ignore[attr-defined]

    return hasattr(TensorPipeAgent, "_update_group_membership")


def introduce_rpc_agent(agent: Any, name: str, number: int, *, gone: bool = False) -> None:
    """Let an agent know another, whose address is in its store by this name; `gone`: let it forget that one."""
    from torch.distributed.rpc import WorkerInfo  # type: ignore[attr-defined]

    agent._update_group_membership(WorkerInfo(name, number), [], {}, not gone)


# The guard inside torch.inference_mode. It is entered and left by C, in which Python lets no Ctrl-C in: a mode that was
# entered and never left would be the user's. Where torch has it no more, there is no inference mode.
INFERENCE_GUARD: Any = getattr(torch._C, "_InferenceMode", None)
