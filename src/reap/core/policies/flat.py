"""A chain of TensorDictModules as a flat list of calls on plain tensors.

`flatten(policy)` returns a `Program`, or None when any module does something of its own (another `forward`, a hook, a
keyword, an in-place rule) and must be called as a module. The program makes the same calls to torch in the same order,
so its numbers, and the random numbers it consumes, are those of the modules it replaces. Two things are done
differently, for speed. The log-probabilities of categorical and normal samples are computed once per rollout from the
recorded columns: the same arithmetic, bit for bit. And a categorical sample is drawn without normalising the logits
first: the same draw, except for ties within one rounding (about one sample in ten million).

    Sequential(Linear, Tanh, Linear) → Categorical        regs:  observation | logits | action
    ───────────────────────────────────────────────►      ops:   linear tanh linear | softmax exponential argmax
                                                          after the rollout:  log-prob of the column

Every `bind()`, once per rollout, looks parameters and hooks up again, so replacing `layer.weight` or adding a hook
between two rollouts takes effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import DETERMINISTIC_REGISTER
from torch import Tensor, distributions, nn

from reap._foreign import tensordict_internals, torch_internals, torchrl_internals
from reap.spec import Key, as_key, private

Op = Callable[[list[Any]], None]


class Deferred(NamedTuple):
    """A column that `compute` makes after the rollout from the columns `reads`."""

    reads: tuple[Key, ...]
    compute: Callable[..., Tensor]


_HALF_LOG_TAU = math.log(math.sqrt(2 * math.pi))

# Layers without options, each of which is just a function.
_PURE: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Tanh: torch.tanh, nn.Sigmoid: torch.sigmoid}
_IN_PLACE: dict[Any, Callable[..., Tensor]] = {torch.tanh: torch.tanh_, torch.relu: torch.relu_}
_CALLS = (nn.Module.__call__, TensorDictModule.__call__, ProbabilisticTensorDictModule.__call__)
_CONTAINERS = (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward)


Check = tuple[Callable[[Tensor], Tensor], str]  # which values are valid, and how the error describes the others

# Arguments the distributions themselves would reject at each step; they are checked once per rollout.
_CHECKS: dict[Any, tuple[Check, ...]] = {
    distributions.Categorical: ((lambda logits: logits.logsumexp(-1).isfinite(), "NaN, +inf or only -inf"),),
    distributions.Normal: (
        (lambda loc: ~loc.isnan(), "NaN"),
        (lambda scale: scale > 0, "NaN or a value that is not above 0"),
    ),
}


def _is_sampler(m: nn.Module) -> bool:
    """Return whether a module draws from a distribution in the way of tensordict's class, or of TorchRL's subclass."""
    forward = type(m).forward
    if getattr(forward, "__qualname__", "") == "SafeProbabilisticModule.forward":
        return forward.__module__.startswith("torchrl.modules.")
    return forward is ProbabilisticTensorDictModule.forward


class Program:
    """Calls on a list of registers: the inputs come first, then one register for every value a module writes."""

    def __init__(self, policy: nn.Module, exploration: InteractionType | None) -> None:
        self.policy, self.exploration = policy, exploration
        self.inputs: list[Key] = []
        self.outputs: list[Key] = []
        self.written: list[Key] = []
        self.deferred: dict[Key, Deferred] = {}
        self.checked: dict[Key, Check] = {}  # arguments of distributions, checked after the rollout
        self.opaque = False  # whether a module in it might keep or change its inputs
        self.taken: list[int] = []  # registers of the written outputs
        self.ops: list[Op] = []
        self.blank: list[Any] = []

    def bind(self) -> bool:
        """Read the modules in their current state; return False if they can no longer be run flat."""
        leaves = _leaves(self.policy)
        if leaves is None:
            return False
        written: dict[Key, None] = {}
        at: dict[Key, int] = {}
        for m in leaves:
            for key in map(as_key, _reads(m)):
                if key not in written:
                    at.setdefault(key, len(at))
            written.update(dict.fromkeys(map(as_key, _writes(m))))
        self.inputs = list(at)
        self.ops = []
        self.deferred, self.checked, self.opaque = {}, {}, False
        registers = len(at)
        for i, m in enumerate(leaves):
            sources = [at[as_key(key)] for key in _reads(m)]
            writes = [as_key(key) for key in _writes(m)]
            # A key written twice gets a new register each time: the first value may still be needed.
            targets = list(range(registers, registers + len(writes)))
            registers += len(writes)
            at.update(zip(writes, targets))
            later = {as_key(key) for follower in leaves[i + 1 :] for key in (*_reads(follower), *_writes(follower))}
            deferred = None if later.intersection(writes) else _deferred(m, self.exploration)
            rewritten = {as_key(key) for follower in leaves[i + 1 :] for key in _writes(follower)}
            if deferred is not None and not rewritten.intersection(deferred.reads):
                self.deferred[writes[-1]] = deferred
                targets = targets[:1]
            if _is_sampler(m):
                family, _ = _known_distribution(m, self.exploration)
                self.checked.update(zip(map(as_key, _reads(m)), _CHECKS.get(family, ())))
            elif _known_layers(m) is None:
                self.opaque = True
            self.ops.append(_compile(m, sources, targets, self.exploration))
        self.blank = [None] * (registers - len(self.inputs))
        self.outputs = [key for key in written if not private(key)]
        self.written = [key for key in self.outputs if key not in self.deferred]
        self.taken = [at[key] for key in self.written]
        return True

    def run(self, *inputs: Tensor) -> tuple[Any, ...]:
        """Return the outputs for these inputs, in the order of `written`, which does not have the deferred ones."""
        regs = [*inputs, *self.blank]
        for op in self.ops:
            op(regs)
        return tuple([regs[i] for i in self.taken])


def flatten(policy: Any, exploration: InteractionType | None) -> Program | None:
    """Return the policy as a program, or None if it must be called as a module."""
    if not isinstance(policy, nn.Module):
        return None
    program = Program(policy, exploration)
    return program if program.bind() else None


def _leaves(m: nn.Module) -> list[nn.Module] | None:
    forward = type(m).forward
    if not torch_internals.is_unhooked(m) or type(m).__call__ not in _CALLS:
        return None
    if forward is TensorDictModule.forward:
        return [m] if tensordict_internals.is_plain_module(m) else None
    if _is_sampler(m):
        # TorchRL computes log-probabilities of some distributions in its own way; those modules are captured instead.
        ours = forward is ProbabilisticTensorDictModule.forward
        plain = tensordict_internals.is_plain_sampler(m) and (ours or _known_distribution(m, InteractionType.RANDOM)[0])
        return [m] if plain else None
    if forward in _CONTAINERS:
        parts = tensordict_internals.parts_of(m)
        if parts is None:
            return None
        leaves: list[nn.Module] = []
        for child in parts:
            found = _leaves(child)
            if found is None:
                return None
            leaves += found
        return leaves
    return None


def _reads(m: Any) -> Sequence[Any]:
    return m.in_keys  # type: ignore[no-any-return]


def _writes(m: Any) -> Sequence[Any]:
    if _is_sampler(m):
        return [*m.dist_sample_keys, *([m.log_prob_key] if m.return_log_prob else [])]
    return m.out_keys  # type: ignore[no-any-return]


def _known_layers(m: Any) -> list[tuple[Callable[..., Tensor], tuple[Any, ...]]] | None:
    """Return the layers of a module if it calls nothing but `ours`, functions known to leave their inputs alone."""
    layers = _layers(m.module) if m.method is None else None
    ours = {F.linear, torch.relu, *_PURE.values()}
    return layers if layers is not None and all(call in ours for call, _ in layers) else None


def _compile(m: Any, sources: list[int], targets: list[int], exploration: InteractionType | None) -> Op:
    if _is_sampler(m):
        return _sampler(m, sources, targets, exploration)
    call = m.module if m.method is None else getattr(m.module, m.method)
    layers = _layers(call)
    if len(targets) == 1:
        target = targets[0]
        if len(sources) == 1 and layers is not None:
            return _chain(layers, sources[0], target)

        def one(regs: list[Any]) -> None:
            out = call(*[regs[i] for i in sources])
            regs[target] = out[0] if isinstance(out, tuple) and len(out) == 1 else out

        return one

    def many(regs: list[Any]) -> None:
        out = call(*[regs[i] for i in sources])
        if not isinstance(out, tuple):
            out = tuple(out[k] for k in m.out_keys) if hasattr(out, "keys") else (out,)
        if len(out) != len(targets):
            raise RuntimeError(f"the module returned {len(out)} tensors for out_keys {m.out_keys}")
        for i, value in zip(targets, out):
            regs[i] = value

    return many


def _chain(layers: list[tuple[Callable[..., Tensor], tuple[Any, ...]]], source: int, target: int) -> Op:
    # Nobody else holds what a linear layer returned, so the activation after it may work in place.
    pairs = list(zip(layers, [None, *layers]))
    layers = [
        (_IN_PLACE[call], args) if call in _IN_PLACE and before is not None and before[0] is F.linear else (call, args)
        for (call, args), before in pairs
    ]

    def chain(regs: list[Any]) -> None:
        x = regs[source]
        for call, args in layers:
            x = call(x, *args)
        regs[target] = x

    return chain


def _layers(call: Any) -> list[tuple[Callable[..., Tensor], tuple[Any, ...]]] | None:
    """Return a module as (function, arguments) pairs; a layer of an unknown kind is its own function."""
    if not isinstance(call, nn.Module):
        return None
    if not torch_internals.is_unhooked(call):
        return [(call, ())]
    kind = type(call)
    if kind.forward is nn.Sequential.forward or _is_mlp(call):
        pairs: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = []
        layers: Any = call
        for child in layers:  # `children` would leave out a layer that is used twice
            pairs += _layers(child) or []
        return pairs
    if kind is nn.Linear:
        return [(F.linear, (call.weight, call.bias))]
    if kind in _PURE:
        return [(_PURE[kind], ())]
    if kind is nn.ReLU and not call.inplace:
        return [(torch.relu, ())]
    if kind is nn.Identity:
        return []
    return [(call, ())]


def _is_mlp(module: nn.Module) -> bool:
    """Return whether this is TorchRL's MLP with one input and one output dimension: just a sequence of layers."""
    kind = type(module)
    ours = kind.__name__ == "MLP" and kind.__module__.startswith("torchrl.modules.models")
    return ours and torchrl_internals.is_a_sequence(module)


def _known_distribution(m: Any, exploration: InteractionType | None) -> tuple[Any, InteractionType]:
    """Return which distribution is sampled and how, if this file has code for both; (None, exploration) otherwise."""
    family = m.distribution_class
    names = [k[-1] if isinstance(k, tuple) else k for k in m.dist_keys]
    exploration = m.default_interaction_type if exploration is None else exploration
    known = {distributions.Categorical: ["logits"], distributions.Normal: ["loc", "scale"]}.get(family)
    if m.distribution_kwargs or known != names:
        return None, exploration
    fixed = exploration is InteractionType.DETERMINISTIC
    asked = DETERMINISTIC_REGISTER.get(family, exploration) if fixed else exploration
    exact = {InteractionType.RANDOM, InteractionType.MODE}
    if family is distributions.Normal:
        exact.add(InteractionType.MEAN)
    return (family, asked) if asked in exact else (None, exploration)


def _deferred(m: Any, exploration: InteractionType | None) -> Deferred | None:
    """Return how a module's log-probabilities are computed from its columns, if they can be."""
    if not _is_sampler(m) or not m.return_log_prob:
        return None
    family, _ = _known_distribution(m, exploration)
    reads = tuple(as_key(key) for key in (*m.in_keys, *m.dist_sample_keys))
    if family is distributions.Categorical:
        return Deferred(reads, _categorical_log_prob)
    return Deferred(reads, _normal_log_prob) if family is distributions.Normal else None


def _sampler(m: Any, sources: list[int], targets: list[int], exploration: InteractionType | None) -> Op:
    family, asked = _known_distribution(m, exploration)
    random = asked is InteractionType.RANDOM
    if len(targets) == 1 and family is distributions.Categorical:
        return _categorical(sources[0], targets[0], random)
    if len(targets) == 1 and family is distributions.Normal:
        return _normal(sources[0], sources[1], targets[0], random)
    names = [k[-1] if isinstance(k, tuple) else k for k in m.dist_keys]
    fixed, make, draw = dict(m.distribution_kwargs), m.distribution_class, tensordict_internals.draw_of(m)

    def sample(regs: list[Any]) -> None:
        dist = make(**{n: regs[i] for n, i in zip(names, sources)}, **fixed)
        out = draw(dist, interaction_type=asked)
        if isinstance(out, tuple):
            (out,) = out
        regs[targets[0]] = out
        if len(targets) == 2:
            regs[targets[1]] = dist.log_prob(out)

    return sample


def _categorical(source: int, target: int, random: bool) -> Op:
    """Sample as torch.distributions.Categorical(logits=…): soft-max and `multinomial`, without objects and checks."""
    softmax, empty_like = torch.softmax, torch.empty_like

    def sample(regs: list[Any]) -> None:
        logits = regs[source]
        if random:
            probs = softmax(logits, -1)
            regs[target] = probs.div_(empty_like(probs).exponential_(1)).argmax(-1)
        else:
            regs[target] = logits.argmax(-1)

    return sample


def _categorical_log_prob(logits: Tensor, value: Tensor) -> Tensor:
    logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.gather(-1, value.unsqueeze(-1)).squeeze(-1)


def _normal(loc_at: int, scale_at: int, target: int, random: bool) -> Op:
    """Sample as torch.distributions.Normal(loc, scale): by the same calls, without objects and checks."""
    empty = torch.empty

    def sample(regs: list[Any]) -> None:
        loc, scale = regs[loc_at], regs[scale_at]
        if loc.shape != scale.shape:
            loc, scale = torch.broadcast_tensors(loc, scale)  # type: ignore[no-untyped-call]
        regs[target] = loc + empty(loc.shape, dtype=loc.dtype, device=loc.device).normal_() * scale if random else loc

    return sample


def _normal_log_prob(loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
    return -((value - loc) ** 2) / (2 * scale**2) - scale.log() - _HALF_LOG_TAU
