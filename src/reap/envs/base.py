"""EnvBase: the env class that users call by hand. `reset`, `step` and `rollout` take and return TensorDicts.

A collector uses only the lanes underneath (`.lanes_env`) and runs no code of this module.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn.probabilistic import interaction_type
from typing_extensions import Self

from reap.core.columns.assemble_ragged import assembler, frame
from reap.core.columns.batch_columns import columns_of, current_for, layout_by_hand
from reap.core.env import CLOSED, Env
from reap.core.ledger import Ledger, TrajectoryIds
from reap.core.measuring.stats import Stats
from reap.core.policies.as_policy import PolicyContext, as_policy
from reap.core.policies.recurrent_state import carry_of, with_recurrent_state
from reap.core.policy import visible_columns
from reap.core.rollout import RolloutLoop
from reap.core.slot import FLAGS, Layout, RowKeys, Slot
from reap.errors import SpecMismatch, UsageError, WrongArgument, WrongState
from reap.seeding import chain
from reap.spec import AnyKey, Key, Leaf, as_key, private, show


class EnvBase:
    """An env, or several lanes of it, for use by hand.

    >>> env = GymEnv("CartPole-v1")
    >>> td = env.reset()
    >>> td = env.rand_step(td)
    >>> td["next", "reward"]
    tensor([1.])
    """

    def __init__(self, lanes_env: Env, *, device: Any = None) -> None:
        self.lanes_env = lanes_env
        self.device = torch.device(device) if device is not None else None
        self._current = current_for(lanes_env.spec.observation, lanes_env.spec.lanes)
        self._step_slot: tuple[tuple[Leaf, ...], Slot] | None = None

    # ---- shapes and specs ---------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> torch.Size:
        """`[]` for a single env, `[N]` for lanes."""
        spec = self.lanes_env.spec
        return torch.Size([spec.lanes] if spec.batched else [])

    @property
    def observation_spec(self) -> dict[AnyKey, Leaf]:
        """The observation leaves by key."""
        leaves = self.lanes_env.spec.observation.items()
        return {k[0] if len(k) == 1 else k: leaf for k, leaf in leaves if not private(k)}

    @property
    def action_keys(self) -> list[AnyKey]:
        """Keys of the action leaves."""
        return [k[0] if len(k) == 1 else k for k in self.lanes_env.spec.action]

    @property
    def action_key(self) -> AnyKey:
        """The key of the only action leaf."""
        return self._only_action()[0]

    @property
    def action_spec(self) -> Leaf:
        """The only action leaf."""
        return self._only_action()[1]

    def _only_action(self) -> tuple[AnyKey, Leaf]:
        action = self.lanes_env.spec.action
        if len(action) != 1:
            raise UsageError(f"this env has {len(action)} action leaves; see action_keys")
        ((key, leaf),) = action.items()
        return (key[0] if len(key) == 1 else key), leaf

    def __repr__(self) -> str:
        leaves: dict[str, Any] = {"observation": self.observation_spec, "action": self.lanes_env.spec.action}
        text = "; ".join(
            f"{what} {', '.join(f'{show(as_key(k))} {v}' for k, v in of.items())}" for what, of in leaves.items()
        )
        return f"{type(self).__name__}({text}; batch_size={list(self.batch_size)})"

    # ---- seeding and stepping -------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed each lane at the next `reset`, and return the seed that follows the last lane's."""
        self.lanes_env.pending_seeds, following = chain(seed, self.lanes_env.spec.all_lanes, static=static_seed)
        return following

    def reset(self) -> TensorDictBase:
        """Begin a new episode in every lane, and return the first observations."""
        self._check_open()
        self.lanes_env.driver = None
        seeds, self.lanes_env.pending_seeds = self.lanes_env.pending_seeds, None
        self.lanes_env.reset(range(self.lanes_env.spec.lanes), self._current, seeds)
        td = self._current_observations()
        for flag in FLAGS:
            td.set(flag, torch.zeros(*self.batch_size, 1, dtype=torch.bool))
        return td

    def _current_observations(self) -> TensorDictBase:
        """Return a copy of each lane's current observation as a TensorDict."""
        spec = self.lanes_env.spec
        columns = visible_columns(spec, self._current)
        loose = {key: leaf for key, leaf in spec.observation.items() if leaf.loose}
        lanes = spec.lanes if spec.batched else None
        return frame({key: columns[key].clone() for key in spec.observation}, loose, lanes, self.device)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write a random action into `tensordict` (a new one if None), and return it."""
        td = TensorDict({}, batch_size=self.batch_size, device=self.device) if tensordict is None else tensordict
        for key, leaf in self.lanes_env.spec.action.items():
            td.set(key, leaf.rand(tuple(td.batch_size or self.batch_size)))
        return td

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step every lane with a random action."""
        return self.step(self.rand_action(tensordict))

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step every lane with the action in `tensordict`, and write the result under "next"."""
        self._check_open()
        spec = self.lanes_env.spec
        if spec.rows != "whole":
            raise UsageError(f"{type(self).__name__} makes steps that are not frames, which only a collector can skip")
        actions = {}
        for key in spec.action:
            value = tensordict.get(key, None)
            if value is None:
                raise WrongArgument(f"step needs {show(key)} in the tensordict; it holds {list(tensordict.keys(True))}")
            if value.shape[: len(self.batch_size)] != self.batch_size:
                raise SpecMismatch(
                    f"{show(key)} has shape {list(value.shape)}, the env's batch is {list(self.batch_size)}"
                )
            actions[key] = value.detach().cpu()
        slot = self._slot({k: Leaf(tuple(v.shape[len(self.batch_size) :]), v.dtype) for k, v in actions.items()})
        slot.clear_flags()
        (row,) = slot.cut(RowKeys(spec), self._current)
        for array, value in zip(row.action, actions.values()):
            array[...] = value.numpy().reshape(array.shape)
        self.lanes_env.driver = None
        self.lanes_env.step(range(spec.lanes), row)
        for mine, successor in zip(self._current, row.next):
            mine[...] = successor
        batch = assembler(slot.layout)(slot.copied(), slot.layout)
        following = batch["next"][(slice(None), 0) if spec.batched else 0]
        tensordict.set("next", following if self.device is None else following.to(self.device))
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, reset the lanes that ended, and return the step and the TensorDict to start the next step from.

        The second holds each lane's successor, or its reset observation where the episode ended.
        """
        stepped = self.step(tensordict)
        root = stepped["next"].exclude(*self.lanes_env.spec.reward)
        done = root["done"].reshape(-1)
        if bool(done.any()):
            lanes = done.nonzero().reshape(-1).tolist()
            self.lanes_env.reset(lanes, self._current)
            fresh = self._current_observations()
            for key in map(as_key, root.keys(True, True)):
                if key not in self.lanes_env.spec.observation:
                    fresh.set(key, root.get(key))
            root = fresh
            for flag in FLAGS:
                root.set(flag, torch.zeros(*self.batch_size, 1, dtype=torch.bool))
        return stepped, root

    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
    ) -> TensorDictBase:
        """Return up to `max_steps` steps under `policy` (random if None) as a batch `[…, time]`.

        All lanes are reset first if `auto_reset` is set or the policy is recurrent.
        """
        self._check_open()
        if max_steps < 1:
            raise UsageError(f"max_steps must be at least 1, got {max_steps}")
        memory = carry_of(policy)
        env = with_recurrent_state(self.lanes_env, policy, memory)
        spec = env.spec
        remembers = len(spec.observation) > len(self._current)
        current = current_for(spec.observation, spec.lanes) if remembers else self._current
        if auto_reset or remembers:
            seeds, self.lanes_env.pending_seeds = self.lanes_env.pending_seeds, None
            env.reset(range(spec.lanes), current, seeds)
        kind = interaction_type()
        chosen = as_policy(policy, PolicyContext(spec, visible_columns(spec, current), kind, carry=list(memory)))
        slot = Slot(Layout(columns_of(spec, chosen), max_steps, spec.lanes, batched=spec.batched))
        ledger = Ledger(spec, TrajectoryIds(), Stats(spec.lanes))
        loop = RolloutLoop(env, chosen, current=current, ledger=ledger, exploration=kind)
        if break_when_any_done:
            done = slot.arrays["next", "done"]
            loop.stop = lambda: bool(done[loop.at[0]].any())
        steps = loop.fill(slot)
        batch: TensorDictBase = assembler(slot.layout)(slot.arrays, slot.layout)
        batch = batch[..., :steps] if steps < max_steps else batch
        return batch.to(self.device) if self.device is not None else batch

    def close(self, **_: Any) -> None:
        """Close the env. May be called more than once."""
        self.lanes_env.driver = CLOSED
        self.lanes_env.close()

    @property
    def is_closed(self) -> bool:
        """Whether the env was closed, by hand or by a collector."""
        return self.lanes_env.driver is CLOSED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.lanes_env.spec.ready_of is not None:
            raise UsageError(f"{type(self).__name__} returns lanes as they become ready; only a collector can step it")
        if self.is_closed:
            raise WrongState(f"{type(self).__name__} is closed; make a new one")

    def _slot(self, action: dict[Key, Leaf]) -> Slot:
        """Return the one-row slot that `step` uses. It is reused as long as actions keep their shapes and dtypes."""
        leaves = tuple(action.values())
        self.lanes_env.expect(action)  # a collector may have set another action format since
        if self._step_slot is None or self._step_slot[0] != leaves:
            self._step_slot = leaves, Slot(layout_by_hand(self.lanes_env.spec, action))
        return self._step_slot[1]
