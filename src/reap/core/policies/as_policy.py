"""as_policy: which kind of Policy a user's policy becomes, decided once.

What can be decided once is decided here, by one probing call on a real observation that leaves no trace: random
generators, buffers and attributes are put back. The probe fixes the columns the policy writes; after it, a call whose
output looks different is an error that names the key.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, TensorDictModuleBase
from torch import nn

from reap.core.columns.object_columns import ObjectColumn
from reap.core.policies.exploration import exploring
from reap.core.policies.flat import flatten
from reap.core.policy import (
    CallPolicy,
    FlatPolicy,
    NotFlat,
    Policy,
    RandomActions,
    RandomPolicy,
    TensorDictPolicy,
    TensorPolicy,
)
from reap.core.slot import Row
from reap.errors import ReapError, SpecMismatch, UsageError, WorkerRaised, WrongArgument, WrongState
from reap.spec import Key, Leaf, as_key, show, show_keys


class PolicyWarning(UserWarning):
    """What is to be known of a policy that is run all the same; of several workers' policies it is said once."""


@contextlib.contextmanager
def untouched(policy: Any) -> Iterator[None]:
    """Put random generators, buffers and attributes back as they were."""
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else [policy]
    objects = [m for m in modules if hasattr(m, "__dict__") and not inspect.isroutine(m) and not inspect.isclass(m)]
    attributes = [(m, type(m), dict(vars(m))) for m in objects]
    buffers = [(b, b.clone()) for b in policy.buffers()] if isinstance(policy, nn.Module) else []
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    held = [value for _, _, before in attributes for value in before.values()]
    own = [(g, g.get_state()) for g in held if isinstance(g, torch.Generator)]
    drawn = [(g.bit_generator, g.bit_generator.state) for g in held if isinstance(g, np.random.Generator)]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for owner, kind, before in attributes:
            if type(owner) is not kind:
                continue  # a lazy module has found its shape: that is not undone
            now = vars(owner)
            made = _registered(owner)
            before = {n: v for n, v in before.items() if n not in made}  # layers made on the first call stay
            for name in [n for n in now if n not in before]:
                del now[name]
            now.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for generator, state in own:
            generator.set_state(state)
        for bits, there in drawn:
            bits.state = there
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _registered(owner: Any) -> set[str]:
    """The names under which a module holds layers, parameters and buffers."""
    if not isinstance(owner, nn.Module):
        return set()
    held = (owner.named_parameters, owner.named_buffers)
    own = {name for named in held for name, _ in named(recurse=False, remove_duplicate=False)}
    return own | {name for name, _ in owner.named_modules(remove_duplicate=False) if "." not in name}


_FIXED = (InteractionType.DETERMINISTIC, InteractionType.MODE, InteractionType.MEAN, InteractionType.MEDIAN)
_SEEDS = 6  # with which an action is looked at: of two choices one may come up several times
_DECLARE = "a recurrent policy declares its state as an attribute: carry = {'key': first value of one lane}"


def waits_for_spec(policy: Any) -> bool:
    """Whether this is TorchRL's RandomPolicy without a spec: it draws from the env's action space."""
    return hasattr(policy, "set_action_spec_from_env") and getattr(policy, "action_spec", policy) is None


def _samples(
    policy: Any, candidate: TensorPolicy, first: Sequence[Any], action: Iterable[Key], kind: InteractionType | None
) -> bool:
    """Whether the action follows from the observation and the random seed, but not from the observation alone."""

    def decided(seed: int) -> list[Any]:
        inputs = tuple(value if isinstance(value, ObjectColumn) else value.clone() for value in first)
        with untouched(policy), torch.no_grad(), exploring(kind):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            values = dict(zip(candidate.written, candidate.once(inputs)))
        return [torch.as_tensor(values[key]) for key in action]

    def same(one: list[Any], other: list[Any]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other))

    try:
        asked = decided(0)
        if not same(asked, decided(0)):
            return False  # by a state of its own that cannot be put back: who knows
        return not all(same(asked, decided(seed)) for seed in range(1, _SEEDS))
    except Exception:  # a policy that can be called once only; what it raises when it acts is told then
        return False


def _missing(absent: Sequence[Key], columns: Mapping[Key, Any], cause: Exception | None = None) -> UsageError:
    without = "" if cause is None else f"; called without, it raised {cause!r}"
    return UsageError(f"policy reads {show_keys(absent)}; the env provides {show_keys(columns)}{without} ({_DECLARE})")


def _optional(policy: Any, columns: Mapping[Key, Any]) -> list[Key]:
    """What a TensorDictModule reads and nobody provides: it is called with None there, as tensordict does it.

    What it writes under that name it finds at the next step (see `TensorDictPolicy`).
    """
    if not isinstance(policy, TensorDictModuleBase):
        return []
    if any(getattr(part, "partial_tolerant", False) for part in policy.modules()):
        return []
    written = [as_key(k) for k in getattr(policy, "out_keys", ())]

    def filled(key: Key) -> bool:  # a branch, by an earlier module
        return any(len(w) > len(key) and w[: len(key)] == key for w in written)

    reads = map(as_key, getattr(policy, "in_keys", ()))
    return [key for key in reads if key not in columns and not filled(key)]


def as_policy(
    policy: Any,
    *,
    columns: Mapping[Key, Any],
    observation: Sequence[Key],
    side: frozenset[Key] = frozenset(),
    carry: Sequence[Key] = (),
    action: Mapping[Key, Leaf],
    size: tuple[int, ...],
    primed: frozenset[Key] = frozenset(),
    inner: Mapping[Key, tuple[int, ...]] | None = None,
    kind: InteractionType | None,
    device: torch.device | None = None,
    shown: torch.device | None = None,
    trust: bool = False,
    compile: Mapping[str, Any] | None = None,
    draw: Callable[[Row], None] | None = None,
) -> Policy:
    """`policy` as a Policy.

    `columns` holds one real value of every column a policy may read (`observation` and `carry` keys, flags), shaped as
    the policy will see them; `size` are their leading dimensions, those of the lanes. A carry is begun by the policy, a
    `primed` leaf by the env; of both the policy writes the next value. A policy of TensorDicts sees `shown` as their
    device.
    """
    if policy is None or isinstance(policy, RandomPolicy) or waits_for_spec(policy):
        if isinstance(policy, RandomPolicy) and len(action) == 1:
            ((key, own),) = action.items()
            if isinstance(policy.action_spec, Leaf) and draw is None:
                return RandomActions({key: policy.action_spec})
            policy.action_spec = policy.action_spec or own
        return RandomActions(action, draw=draw)
    if not callable(policy):
        raise WrongArgument(f"policy must be a module, a callable or None, got {type(policy).__name__}")

    loose = {key: column.leaf for key, column in columns.items() if isinstance(column, ObjectColumn)}

    optional = _optional(policy, columns)

    def probed(candidate: Any) -> Any:
        absent = [k for k in candidate.inputs if k not in columns]
        if absent:
            raise _missing(absent, columns)
        first = [columns[k] if k in loose else columns[k].clone() for k in candidate.inputs]
        try:
            with untouched(policy), torch.no_grad(), exploring(kind):
                candidate.probe(tuple(first), size)
        except (ReapError, NotFlat):
            raise
        except Exception as cause:
            if optional:
                raise _missing(optional, columns, cause) from cause
            given = ", ".join(f"{show(k)} {list(v.shape)}" for k, v in zip(candidate.inputs, first))
            raise WorkerRaised(f"the policy raised {cause!r} when given a first observation: {given}") from cause
        lacking = [k for k in action if k not in candidate.outputs]
        if lacking:
            raise UsageError(
                f"policy writes {show_keys(candidate.outputs)} but not the env's action {show_keys(lacking)}; "
                f"add it to the policy's outputs"
            )
        lost = [k for k in carry if ("next", *k) not in candidate.outputs]
        if lost:
            raise UsageError(f"policy declares the carry {show_keys(lost)} but does not write it under 'next'")
        known = {*carry, *primed, *optional}
        new = [k for k in candidate.outputs if k[0] == "next" and k[1:] not in known]
        if new:
            raise UsageError(f"policy writes {show_keys(new)}, but nothing says how that begins; {_DECLARE}")
        for key, leaf in candidate.outputs.items():
            seen = columns.get(key[1:] if key[0] == "next" else key)
            if seen is not None and (tuple(seen.shape[len(size) :]), seen.dtype) != (
                leaf.shape,
                leaf.dtype,
            ):
                raise SpecMismatch(
                    f"policy writes {show(key)} as {leaf}; it reads it as {seen.dtype}{list(seen.shape)}"
                )
        if (
            kind in _FIXED
            and type(policy).__name__ != "RandomPolicy"
            and _samples(policy, candidate, first, action, kind)
        ):
            warnings.warn(
                f"exploration_type is {kind.name}, but the policy's action changes with the random seed: it samples by "
                f"itself, or has dropout or noise in train mode. Sample in a ProbabilisticTensorDictModule, ask "
                f"tensordict.nn.probabilistic.interaction_type() before sampling, or call eval()",
                PolicyWarning,
                stacklevel=2,
            )
        return candidate

    inputs = tuple(columns)
    if isinstance(
        policy, TensorDictModuleBase
    ):  # it says what it reads: loose columns it does not are no concern of it
        reads = [as_key(k) for k in getattr(policy, "in_keys", ())]
        inputs = tuple(k for k in columns if k not in loose or any(k[: len(r)] == r for r in reads))
    read = {k: leaf for k, leaf in loose.items() if k in inputs}
    whole = TensorDictPolicy(policy, inputs, size, device, read, inner, shown)

    def as_it_is() -> Policy:
        if compile is not None:
            whole.call = torch.compile(policy, **compile)
        return probed(whole)  # type: ignore[no-any-return]

    if trust and not isinstance(policy, TensorDictModuleBase):
        return as_it_is()
    if isinstance(policy, TensorDictModuleBase):
        program = flatten(policy, kind)
        if program is not None and loose.keys().isdisjoint(program.inputs) and columns.keys() >= set(program.inputs):
            try:
                flat: FlatPolicy = probed(FlatPolicy(program, whole, device))
                if compile is not None:
                    flat.compile(compile)
                return flat
            except NotFlat:
                pass
        made = as_it_is()
        lost = [k for k in optional if ("next", *k) in made.outputs]
        if lost:
            warnings.warn(
                f"policy reads {show_keys(lost)}, which nobody provides, and writes its next value, which nobody "
                f"carries: it is None at every step. Write it under its own name, or declare it ({_DECLARE})",
                PolicyWarning,
                stacklevel=2,
            )
        return made
    names = _parameters(policy)
    if names is not None and takes_tensordict(policy):
        return as_it_is()
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        raise WrongState(
            f"{type(policy).__name__} has in_keys and out_keys but is no TensorDictModuleBase; "
            "subclass it, or pass trust_policy=True if it takes a TensorDict"
        )
    taken = match(policy, observation, side, carry)
    call = policy if compile is None else torch.compile(policy, **compile)
    return probed(CallPolicy(call, taken, list(action), carry, device))  # type: ignore[no-any-return]


def _parameters(policy: Any) -> list[inspect.Parameter] | None:
    target = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def takes_tensordict(policy: Any) -> bool:
    """One parameter, named or annotated as a TensorDict."""
    names = [p for p in _parameters(policy) or () if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in names if p.default is p.empty] or names[:1]
    if len(required) != 1:
        return False
    (one,) = required
    note = one.annotation
    text = note if isinstance(note, str) else getattr(note, "__name__", "")
    return one.name in ("tensordict", "td") or text.split(".")[-1] in ("TensorDict", "TensorDictBase")


def match(
    policy: Any, observation: Sequence[Key], side: frozenset[Key] = frozenset(), carry: Sequence[Key] = ()
) -> list[Key]:
    """Which keys a callable takes: by the names of its parameters; the only one left for the only one left."""
    params = _parameters(policy)
    keys = {k[0]: k for k in (*observation, *carry) if len(k) == 1}
    if params is None:
        positional, required, variadic = [], [], True
    else:
        positional = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = [p for p in positional if p.default is p.empty]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in params)
    named: dict[str, Key] = {p.name: keys[p.name] for p in positional if p.name in keys}
    strange = [p for p in required if p.name not in keys]
    others = [k for k in observation if k not in named.values() and k not in side]
    if len(strange) == 1 and len(others) == 1:
        named[strange[0].name] = others[0]
        strange = []
    if not strange and named:
        taken: list[Key] = []
        for p in positional:
            if p.name not in named:
                break  # arguments are passed by position: stop at the first that is not a key
            taken.append(named[p.name])
        return taken
    if not required and (variadic or len(positional) == 1) and len(others) == 1:
        return [others[0], *carry]
    said = "unknown" if params is None else [p.name for p in params]
    raise WrongArgument(
        f"cannot tell what policy {type(policy).__name__} reads: its parameters are {said}, the env's observations "
        f"{show_keys(observation)}. Name the parameters after the keys, or wrap it in a TensorDictModule"
    )
