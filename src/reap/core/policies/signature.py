"""Signatures: find out from a callable's parameters what to call it with."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tensordict.nn import InteractionType
from torch import nn

from reap.core.policies.exploration import FIXED
from reap.errors import WrongArgument
from reap.spec import Key, show_keys

EXPLORATION = ("deterministic", "exploration_type")  # parameters that say how to act, not what is observed
_AGENT_KEYS = ("done", "terminated", "truncated", "mask")  # keys that a group of agents has beside its observations


def exploration_keywords(policy: Any, exploration: InteractionType | None) -> dict[str, Any]:
    """Return the keyword arguments that tell a callable how to explore, for those parameters that it has."""
    named = {p.name for p in _parameters(policy) or () if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in zip(EXPLORATION, (exploration in FIXED, exploration)) if name in named}


def bind_exploration(
    policy: Any, exploration: InteractionType | None, call: Any = None, reads: Sequence[Key] = ()
) -> Any:
    """Return `policy`, or `call` in its place, with the exploration type bound to the parameters it has for that."""
    call, seen = policy if call is None else call, {key[-1] for key in reads}
    keywords = {name: value for name, value in exploration_keywords(policy, exploration).items() if name not in seen}
    return functools.partial(call, **keywords) if keywords else call


def _parameters(policy: Any) -> list[inspect.Parameter] | None:
    target = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def takes_tensordict(policy: Any) -> bool:
    """Return whether a callable takes one parameter, which is named or annotated as a TensorDict."""
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
    """Return the keys a callable takes, by parameter names; a single unmatched parameter takes the single key left.

    A parameter is matched to a nested key by the key's last part, if no other key has the same last part.
    """
    if isinstance(policy, type):
        raise WrongArgument(
            f"policy is the class {policy.__name__}: give an instance, or policy_factory={policy.__name__}"
        )
    params = _parameters(policy)
    if params == []:
        raise WrongArgument("policy takes no observation; give a function that makes the policy as policy_factory")
    lasts = Counter(k[-1] for k in observation)
    keys = {k[-1]: k for k in observation if lasts[k[-1]] == 1}
    keys |= {k[0]: k for k in (*observation, *carry) if len(k) == 1}
    how = [name for name in EXPLORATION if name not in keys]
    if params is None:
        positional, required, variadic = [], [], True
    else:
        positional = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in how]
        required = [p for p in positional if p.default is p.empty]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in params)
    named: dict[str, Key] = {p.name: keys[p.name] for p in positional if p.name in keys}
    unmatched = [p for p in required if p.name not in keys]
    flags = {(*k[:-1], flag) for k in observation if len(k) > 1 and k[-1] == "done" for flag in _AGENT_KEYS}
    others = [k for k in observation if k not in named.values() and k not in side and k not in flags]
    if len(unmatched) == 1 and len(others) == 1:
        named[unmatched[0].name] = others[0]
        unmatched = []
    if not unmatched and named:
        taken: list[Key] = []
        for p in positional:
            if p.name not in named:
                break  # arguments are passed by position: stop at the first that is not a key
            taken.append(named[p.name])
        early = [p.name for p in (params or ())[: len(taken)] if p.name in how]
        if early:
            raise WrongArgument(
                f"policy {type(policy).__name__}: its parameter {early[0]} must come after the observations"
            )
        return taken
    if not required and (variadic or len(positional) == 1) and len(others) == 1:
        return [others[0], *carry]
    said = "unknown" if params is None else [p.name for p in params]
    declared = f", its carry {show_keys(carry)}" if carry else ""
    state = f"carry = {{{unmatched[0].name!r}: first value of one lane}}" if unmatched and named else "carry = {…}"
    raise WrongArgument(
        f"cannot tell what policy {type(policy).__name__} reads: its parameters are {said}, the env's observations "
        f"{show_keys(observation)}{declared}. Name the parameters after the keys, declare a state that it remembers "
        f"from step to step as an attribute, {state}, or wrap it in a TensorDictModule"
    )
