"""as_policy: decide once which kind of Policy a user's policy becomes.

    policy ──► random actions │ a flat program │ a TensorDictModule │ a callable on TensorDicts │ a function of tensors
               `KINDS` are tried in this order; the first one that fits becomes the policy, after a probe

Whatever can be decided once is decided here, by calling the policy on a real observation. These calls leave no trace:
random generators, buffers and attributes are restored. The first call fixes the columns the policy writes; a later call
whose output looks different raises an error that names the key.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict.nn import InteractionType, TensorDictModuleBase
from torch import nn

from reap.core.capture.generator_state import is_shared
from reap.core.columns.object_columns import ObjectColumn
from reap.core.policies.action_masks import action_masks
from reap.core.policies.call_policy import CallPolicy
from reap.core.policies.exploration import FIXED, exploring
from reap.core.policies.flat import flatten
from reap.core.policies.flat_policy import FlatPolicy, NotFlat
from reap.core.policies.kept_on_self import assigned, attributes, depends_on, same_values
from reap.core.policies.signature import bind_exploration, match, takes_tensordict
from reap.core.policies.untouched import untouched
from reap.core.policy import Policy, RandomActions, RandomPolicy, TensorDictPolicy, TensorPolicy
from reap.core.slot import Row
from reap.errors import ReapError, SpecMismatch, UsageError, WorkerRaised, WrongArgument, WrongState, warn
from reap.spec import LANE_AT, EnvSpec, Key, Leaf, as_key, show, show_keys


class PolicyWarning(UserWarning):
    """A warning about a policy that runs all the same; a collector with several workers issues it once."""


_SEEDS = 6  # random seeds the action is compared for: of two choices, one may come up several times in a row
_DECLARE = "a recurrent policy declares its state as an attribute: carry = {'key': first value of one lane}"


@dataclass(frozen=True)
class PolicyContext:
    """What `as_policy` needs to know: the env's spec, the columns the policy will see, and the user's options."""

    spec: EnvSpec
    columns: Mapping[Key, Any]  # one real value of every column the policy may read, in the shape it will see
    exploration: InteractionType | None
    carry: Sequence[Key] = ()  # recurrent state that the policy gives a first value; the env does so for `spec.primed`
    device: torch.device | None = None  # the device the policy computes on, if not the one its rows are on
    shown: torch.device | None = None  # the `device` of the TensorDicts made for the policy
    out_keys: Sequence[Key] | None = None  # names for the parts of a tuple the policy returns
    trust: bool = False  # the policy takes a TensorDict, whatever its signature says
    compile: Mapping[str, Any] | None = None  # options for torch.compile; None: not compiled
    draw: Callable[[Row], None] | None = None  # draws one step's random actions, if only the env can draw them

    @property
    def observation(self) -> list[Key]:
        """The env's observations, without the policy's own state and without `LANE_AT`."""
        return [key for key in self.spec.observation if key not in self.carry and key != LANE_AT]

    @property
    def loose(self) -> dict[Key, Leaf]:
        """The loose columns, whose values are objects instead of tensors of one shape."""
        return {key: column.leaf for key, column in self.columns.items() if isinstance(column, ObjectColumn)}


def as_policy(policy: Any, context: PolicyContext) -> Policy:
    """Return `policy` as a Policy, of the first kind in `KINDS` that fits it."""
    if not callable(policy) and not _acts_at_random(policy):
        raise WrongArgument(f"policy must be a module, a callable or None, got {type(policy).__name__}")
    found = next(made for kind in KINDS if (made := kind(policy, context)) is not None)
    if context.out_keys is not None and not isinstance(found, CallPolicy):
        who = "RandomPolicy" if isinstance(found, RandomActions) else type(policy).__name__
        raise UsageError(
            f"out_keys names the parts of a returned tuple; {who} already names its outputs. Remove out_keys"
        )
    return found


# ---- the kinds ------------------------------------------------------------------------------------------------------


def _random_actions(policy: Any, context: PolicyContext) -> Policy | None:
    """Return random actions if the policy is None or only draws, from the policy's own action space or the env's."""
    if not _acts_at_random(policy):
        return None
    action = context.spec.action
    if isinstance(policy, RandomPolicy) and len(action) == 1:
        ((key, own),) = action.items()
        if isinstance(policy.action_spec, Leaf) and context.draw is None:
            masks = action_masks(context.spec) if policy.action_spec.space == own.space else {}
            return RandomActions({key: policy.action_spec}, masks=masks)
        policy.action_spec = policy.action_spec or own
    return RandomActions(action, draw=context.draw, masks=action_masks(context.spec))


def _flat_program(policy: Any, context: PolicyContext) -> Policy | None:
    """Return TensorDictModules as a flat list of tensor operations, if that is possible and all they read is there."""
    program = flatten(policy, context.exploration) if isinstance(policy, TensorDictModuleBase) else None
    if program is None or not context.columns.keys() - context.loose.keys() >= {*program.inputs}:
        return None
    try:
        flat = _probed(FlatPolicy(program, _tensordict_policy(policy, context), context.device), policy, context)
    except NotFlat:
        return None
    if context.compile is not None:
        flat.compile(context.compile)
    return flat


def _tensordict_module(policy: Any, context: PolicyContext) -> Policy | None:
    """Return any other TensorDictModule, called as a module at each step."""
    if not isinstance(policy, TensorDictModuleBase):
        return None
    made = _called_on_tensordict(policy, context)
    lost = [key for key in _missing_inputs(policy, context.columns) if ("next", *key) in made.outputs]
    if lost:
        warn(
            f"policy reads {show_keys(lost)}, which the env does not provide, and writes "
            f"{show_keys([('next', *key) for key in lost])}, which is not carried to the next step, so "
            f"{show_keys(lost)} is None at every step. Write it under its own name, or declare it ({_DECLARE})",
            PolicyWarning,
        )
    return made


def _callable_on_tensordicts(policy: Any, context: PolicyContext) -> Policy | None:
    """Return a callable that takes a TensorDict, according to its signature or to the user (`trust`)."""
    return _called_on_tensordict(policy, context) if context.trust or takes_tensordict(policy) else None


def _function_of_tensors(policy: Any, context: PolicyContext) -> Policy:
    """Return anything else as a function of the observations it names as parameters, or of the only one there is."""
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        raise WrongState(
            f"{type(policy).__name__} has in_keys and out_keys but is not a TensorDictModuleBase; "
            "subclass it, or pass trust_policy=True if it takes a TensorDict"
        )
    taken = match(policy, context.observation, context.spec.side, context.carry)
    call = policy if context.compile is None else torch.compile(policy, **context.compile)
    call = bind_exploration(policy, context.exploration, call, taken)
    made = CallPolicy(call, taken, list(context.spec.action), context.carry, context.device, context.out_keys)
    return _probed(made, policy, context)


KINDS: Sequence[Callable[[Any, PolicyContext], Policy | None]] = (
    _random_actions,
    _flat_program,
    _tensordict_module,
    _callable_on_tensordicts,
    _function_of_tensors,
)


def _acts_at_random(policy: Any) -> bool:
    return policy is None or isinstance(policy, RandomPolicy) or waits_for_spec(policy)


def waits_for_spec(policy: Any) -> bool:
    """Return whether this is TorchRL's RandomPolicy without a spec, which draws from the env's action space."""
    return hasattr(policy, "set_action_spec_from_env") and getattr(policy, "action_spec", policy) is None


def _called_on_tensordict(policy: Any, context: PolicyContext) -> Policy:
    """Return a policy that calls the user's object itself on a TensorDict at each step."""
    whole = _tensordict_policy(policy, context)
    if context.compile is not None:
        whole.call = torch.compile(policy, **context.compile)
    if not isinstance(policy, TensorDictModuleBase) and not hasattr(policy, "out_keys"):
        whole.call = bind_exploration(policy, context.exploration, whole.call)
    return _probed(whole, policy, context)


def _tensordict_policy(policy: Any, context: PolicyContext) -> TensorDictPolicy:
    """Return the user's object on TensorDicts of all columns, except loose ones that its `in_keys` leave out."""
    inputs, loose = tuple(context.columns), context.loose
    if isinstance(policy, TensorDictModuleBase):
        reads = [as_key(key) for key in getattr(policy, "in_keys", ())]
        inputs = tuple(key for key in inputs if key not in loose or any(key[: len(r)] == r for r in reads))
    read = {key: leaf for key, leaf in loose.items() if key in inputs}
    spec = context.spec
    return TensorDictPolicy(policy, inputs, spec.size, context.device, read, spec.look.inner, context.shown)


def _missing_inputs(policy: Any, columns: Mapping[Key, Any]) -> list[Key]:
    """Return the keys a TensorDictModule reads and nobody provides: tensordict calls it with None for these.

    What it writes under such a key, it finds there at the next step (see `TensorDictPolicy`).
    """
    if not isinstance(policy, TensorDictModuleBase):
        return []
    if any(getattr(part, "partial_tolerant", False) for part in policy.modules()):
        return []
    written = [as_key(k) for k in getattr(policy, "out_keys", ())]

    def filled(key: Key) -> bool:  # whether `key` is a branch under which another module writes
        return any(len(w) > len(key) and w[: len(key)] == key for w in written)

    reads = map(as_key, getattr(policy, "in_keys", ()))
    return [key for key in reads if key not in columns and not filled(key)]


# ---- the probe ------------------------------------------------------------------------------------------------------

T = TypeVar("T", bound=TensorPolicy)


def _probed(candidate: T, policy: Any, context: PolicyContext) -> T:
    """Return `candidate`, the form `policy` took, after one call on a first observation that fixes its outputs."""
    columns, size, exploration = context.columns, context.spec.size, context.exploration
    absent = [key for key in candidate.inputs if key not in columns]
    if absent:
        raise _missing(absent, columns)
    first = [columns[key] if key in context.loose else columns[key].clone() for key in candidate.inputs]
    optional = _missing_inputs(policy, columns)
    before, shapes = attributes(policy), {leaf.shape for leaf in context.spec.observation.values()}
    try:
        with untouched(policy), torch.no_grad(), exploring(exploration):
            candidate.probe(tuple(first), size)
            kept = assigned(policy, before, size, shapes)
    except (ReapError, NotFlat):
        raise
    except Exception as cause:
        if optional:
            raise _missing(optional, columns, cause) from cause
        raise _probe_error(policy, candidate.inputs, first, cause) from cause
    _check_outputs(candidate.outputs, context, optional)
    if kept and not is_shared() and depends_on(policy, kept, lambda: [*_run(candidate, first, context, 0).values()]):
        names = ", ".join(".".join(filter(None, key)) for key in kept)
        warn(
            f"policy {type(policy).__name__} keeps state on itself ({names}); it is not reset when an episode ends "
            f"and does not move with its lane. {_DECLARE[0].upper()}{_DECLARE[1:]}, takes it as a parameter and "
            f"returns its new value (docs/policies.md, Memory)",
            PolicyWarning,
        )
    drawn = type(policy).__name__ == "RandomPolicy"
    if exploration in FIXED and not drawn and _varies_by_seed(policy, candidate, first, context):
        warn(
            f"exploration_type is {exploration.name}, but the policy's action changes with the random seed: it samples "
            f"by itself, or has dropout or noise in train mode. Give it a parameter `deterministic`, which then "
            f"receives True; or read tensordict.nn.probabilistic.interaction_type() before sampling, sample in a "
            f"ProbabilisticTensorDictModule, or call eval()",
            PolicyWarning,
        )
    return candidate


def _probe_error(policy: Any, keys: Sequence[Key], first: Sequence[Any], cause: Exception) -> WorkerRaised:
    """Return the error for a policy that raised on a first observation; it says so if dtypes are the likely cause."""
    given = ", ".join(f"{show(k)} {_shown_dtype(v.dtype)}{list(v.shape)}" for k, v in zip(keys, first))
    seen = {v.dtype for v in first if isinstance(v, torch.Tensor) and v.is_floating_point()}
    held = {p.dtype for p in policy.parameters()} if isinstance(policy, nn.Module) else set()
    cure = ""
    if held and seen - held:
        here, there = (" and ".join(sorted(map(_shown_dtype, dtypes))) for dtypes in (seen - held, held))
        cure = (
            f". Its parameters are {there}, the observation is {here}: cast the observation with "
            f"TransformedEnv(env, CastObservation()) of reap.envs.transforms, or the policy with policy.to(dtype)"
        )
    return WorkerRaised(f"the policy raised {cause!r} when given a first observation: {given}{cure}")


def _shown_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _check_outputs(outputs: Mapping[Key, Leaf], context: PolicyContext, optional: Sequence[Key]) -> None:
    """Raise unless the policy writes the action, the next value of each state in its carry, no next value of a state
    without a first value, and columns that it also reads with the shape and dtype it reads.
    """
    lacking = [key for key in context.spec.action if key not in outputs]
    if lacking:
        raise UsageError(
            f"policy writes {show_keys(outputs)} but not the env's action {show_keys(lacking)}; "
            f"add it to the policy's outputs"
        )
    lost = [key for key in context.carry if ("next", *key) not in outputs]
    if lost:
        raise UsageError(
            f"policy declares the carry {show_keys(lost)} but does not give its new value: a function returns it, at "
            f"the end of a tuple or under its own name, and a TensorDictModule writes {show(('next', *lost[0]))}"
        )
    known = {*context.carry, *context.spec.primed, *optional}
    new = [key for key in outputs if key[0] == "next" and key[1:] not in known]
    if new:
        raise UsageError(
            f"policy writes {show_keys(new)} but {show_keys([key[1:] for key in new])} has no first value; {_DECLARE}"
        )
    lanes = len(context.spec.size)
    for key, leaf in outputs.items():
        seen = context.columns.get(key[1:] if key[0] == "next" else key)
        if seen is not None and (tuple(seen.shape[lanes:]), seen.dtype) != (leaf.shape, leaf.dtype):
            raise SpecMismatch(f"policy writes {show(key)} as {leaf}, but reads it as {seen.dtype}{list(seen.shape)}")


def _missing(absent: Sequence[Key], columns: Mapping[Key, Any], cause: Exception | None = None) -> UsageError:
    without = "" if cause is None else f"; called without them, it raised {cause!r}"
    return UsageError(f"policy reads {show_keys(absent)}; the env provides {show_keys(columns)}{without} ({_DECLARE})")


def _run(candidate: TensorPolicy, first: Sequence[Any], context: PolicyContext, seed: int) -> dict[Key, Any]:
    """Return what the policy writes for a first observation, after seeding the random generators with `seed`."""
    inputs = tuple(value if isinstance(value, ObjectColumn) else value.clone() for value in first)
    with torch.no_grad(), exploring(context.exploration):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return dict(zip(candidate.written, candidate.once(inputs)))


def _varies_by_seed(policy: Any, candidate: TensorPolicy, first: Sequence[Any], context: PolicyContext) -> bool:
    """Return whether observation and random seed together determine the action, but the observation alone does not."""
    if is_shared():
        return False  # seeding would disturb the other thread that draws from these generators

    def decided(seed: int) -> list[Any]:
        with untouched(policy):
            values = _run(candidate, first, context, seed)
        return [values[key] for key in context.spec.action]

    try:
        reference = decided(0)
        if not same_values(reference, decided(0)):
            return False  # it has a state that `untouched` cannot restore, so nothing can be concluded
        return not all(same_values(reference, decided(seed)) for seed in range(1, _SEEDS))
    except Exception:  # such as from a policy that can be called only once; collecting reports what it raises then
        return False
