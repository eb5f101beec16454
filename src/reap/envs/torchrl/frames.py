"""TorchRL's envs whose steps do not fit into rows: text, objects, ragged tensors, lazy stacks.

root TensorDict ──► policy ──► env.step_and_maybe_reset ──► the frame, kept unchanged
     ▲                                  │
     └────────── next root ◄────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from reap.core.assemble import tree_of
from reap.core.env import Rows
from reap.core.policies.exploration import exploring
from reap.core.policies.outputs import by_name
from reap.core.policies.recurrent_state import carry_of
from reap.core.policies.signature import bind_exploration, match, takes_tensordict
from reap.core.policies.untouched import untouched
from reap.core.policy import Policy, RandomPolicy
from reap.core.slot import FLAGS, FRAME, Row
from reap.envs.torchrl.rows import TorchRLEnv
from reap.errors import UsageError, WorkerRaised, reraise
from reap.spec import BatchShape, EnvSpec, Key, Leaf, as_key, show_keys

_NUMBER: Key = ("_reward",)  # one number per lane, for statistics


class FramePolicy(Policy):
    """Acts on the env's own TensorDict: `swap` calls the policy on it and replaces it by the result."""

    outputs: Mapping[Key, Any] = {}

    def __init__(self, call: Callable[[Any], Any], swap: Callable[[Callable[[Any], Any]], None]) -> None:
        self._call, self._swap = call, swap

    def act(self, row: Row) -> None:
        self._swap(self._call)


class TorchRLFrames(TorchRLEnv):
    """A TorchRL env whose steps are kept as whole frames."""

    def __init__(self, env: Any, root: TensorDictBase) -> None:
        size = tuple(env.batch_size)
        flags = {(*at, flag) for at in ((), ("next",)) for flag in FLAGS}
        spec = EnvSpec(
            observation={},
            action={},
            lanes=int(np.prod(size, dtype=np.int64)),
            batched=bool(size),
            reward={_NUMBER: Leaf((1,), torch.float32), FRAME[1:]: Leaf((), None)},
            single_steps=False,
            look=BatchShape(
                dims=size if len(size) > 1 else None, hidden=frozenset({*flags, ("next", *_NUMBER), FRAME})
            ),
            primed=frozenset(as_key(key) for key in env.observation_spec.keys(True, True)),
        )
        super().__init__(env, root, spec)

    def reset(self, lanes: Sequence[int], into: Rows, seeds: Sequence[int] | None = None) -> None:
        self.begin(lanes, seeds)

    def draw(self, row: Row) -> None:
        self.root = self.env.rand_action(self.root)

    def make_policy(self, model: Any, exploration: Any, device: Any) -> FramePolicy | None:
        if model is None or isinstance(model, RandomPolicy):
            return None
        lost = [key for key in carry_of(model) if key not in self.spec.primed]
        if lost:
            raise UsageError(f"this env's steps are kept as TorchRL makes them: add a primer for {show_keys(lost)}")
        call = model
        if not isinstance(model, TensorDictModuleBase) and not takes_tensordict(model):
            keys = [as_key(key) for key in self.env.observation_spec.keys(True, True)]
            call = _on_columns(
                bind_exploration(model, exploration), match(model, keys), [as_key(key) for key in self.env.action_keys]
            )
        try:
            with untouched(model), torch.no_grad(), exploring(exploration):
                first = self.root.clone()
                seen = call(first if device is None else first.to(device))
            if seen is not None and not isinstance(seen, TensorDictBase):
                call, seen = _returning_names(call), TensorDict(tree_of(by_name(seen)))
        except Exception as cause:
            raise WorkerRaised(f"the policy raised {cause!r} when given a first observation") from cause
        written = set() if seen is None else {as_key(key) for key in seen.keys(True)}
        lacking = [as_key(key) for key in self.env.action_keys if as_key(key) not in written]
        if lacking and seen is not None:
            raise UsageError(f"policy does not write the env's action {show_keys(lacking)}")

        def swap(call: Callable[[Any], Any]) -> None:
            given = self.root if device is None else self.root.to(device)
            out = call(given)
            if device is not None:
                out = (given if out is None else out).to(self.env.device or "cpu")
            if out is not None and out is not self.root:  # a new one, maybe of outputs alone: the env needs all keys
                self.root = self.root.update(out)

        return FramePolicy(call, swap)

    def step(self, lanes: Sequence[int], row: Row) -> list[int]:
        try:
            frame, self.root = self.env.step_and_maybe_reset(self.root)
            reached = frame.get("next")
            over = self.ended(reached)
            row.rewards[1][0] = frame
            row.reward[:] = self._number(reached)
        except Exception as cause:
            reraise("env.step", cause)
        row.done[:] = over
        self._ended = np.flatnonzero(over).tolist()
        return self._ended

    def _number(self, reached: TensorDictBase) -> Any:
        """Return one number per lane for the statistics: the mean of its first reward."""
        reward = reached.get(self.env.reward_keys[0], None) if self.env.reward_keys else None
        if not isinstance(reward, torch.Tensor):
            return 0.0
        return reward.reshape(self.spec.lanes, -1).float().mean(-1).numpy(force=True)


def _on_columns(model: Any, reads: Sequence[Key], action: Sequence[Key]) -> Callable[[TensorDictBase], Any]:
    """Turn a policy of plain values into one that reads a TensorDict and writes all its outputs there."""

    def call(td: TensorDictBase) -> Any:
        return td.update(tree_of(by_name(model(*[td.get(key) for key in reads]), action)))

    return call


def _returning_names(call: Callable[[Any], Any]) -> Callable[[TensorDictBase], Any]:
    """Turn a policy that returns its outputs by name into one that writes them into the TensorDict it was given."""
    return lambda td: td.update(tree_of(by_name(call(td))))
