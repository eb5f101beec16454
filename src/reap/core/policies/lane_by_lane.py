"""LaneByLane: run the policy on each lane separately, with a random generator per lane.

    row t   lane 0 ──► its generator ──► policy on a batch of one ──► lane 0
            lane 1 ──► its generator ──► policy on a batch of one ──► lane 1

What a lane gets then depends only on its own seed, not on how many lanes share a process, nor on which. A batch of one
has the same bits wherever it is computed; batches of eight and of four may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from reap.core.policy import Policy, PolicyWrapper
from reap.core.slot import Layout, Row, RowKeys, Slot
from reap.errors import ReapError, UsageError
from reap.seeding import fresh_seed
from reap.spec import EnvSpec, Key

_SEED_SALT = 0x9E3779B9  # mixed into a lane's seed, because the env uses the seed itself


def spec_of_one(spec: EnvSpec, *, record: bool) -> EnvSpec:
    """Return the spec that each lane's policy sees; raise UsageError if lanes cannot be shown to it one by one."""
    unsupported = spec.look.dims is not None or any(leaf.loose for leaf in spec.observation.values())
    for wrong, why in (
        (spec.ready_of is not None, "asynchronous lanes"),
        (record, "CUDA graphs, which compute all lanes at once"),
        (unsupported, "lanes that have dimensions of their own, or values without a fixed shape"),
    ):
        if wrong:
            raise UsageError(
                f"deterministic=True runs the policy on each lane separately, which is not possible with {why}"
            )
    return dataclasses.replace(spec, lanes=1, batched=True)


class LaneGenerators:
    """The state of each lane's random generator. Only torch's generator is kept per lane."""

    def __init__(self, lanes: int) -> None:
        self.states = [_generator_state(fresh_seed()) for _ in range(lanes)]

    def seed(self, seeds: Sequence[int]) -> None:
        """Restart the generator of each lane with a seed of its own."""
        self.states[:] = [_generator_state(seed) for seed in seeds]


def _generator_state(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed ^ _SEED_SALT).get_state()


class LaneByLane(PolicyWrapper):
    """Runs one policy per lane, all of the same model; `spec` is the env's, with all lanes."""

    def __init__(self, policies: Sequence[Policy], noise: LaneGenerators, spec: EnvSpec) -> None:
        super().__init__(policies[0])
        self._policies, self._generators, self._spec = list(policies), noise, spec
        self.remembers = policies[0].remembers
        self._parts: dict[int, tuple[Slot, list[Slot]]] = {}  # of each slot: its lanes as slots of one lane
        self._keys: list[RowKeys] = []
        self._rows: list[list[Row]] = []
        self._t = 0

    def explain(self) -> str:
        return f"lane by lane (deterministic=True), each with its own random numbers: {super().explain()}"

    def begin(self, slot: Slot) -> None:
        parts = self._lanes_of(slot)
        before = torch.get_rng_state()
        for lane, (policy, part) in enumerate(zip(self._policies, parts)):
            policy.read_early = self.read_early
            torch.set_rng_state(self._generators.states[lane])
            policy.begin(part)
            self._generators.states[lane] = torch.get_rng_state()
        torch.set_rng_state(before)
        if not self._keys or self._keys[0].outputs != tuple(self.written):
            self._keys = [RowKeys(self._spec, policy.inputs, policy.written) for policy in self._policies]
        # Policies do not read what follows the last row: any memory of that shape will do.
        last = [parts[0].arrays[key][0] for key in self._spec.observation]
        self._rows = [list(part.cut(keys, last)) for part, keys in zip(parts, self._keys)]
        self._t = 0

    def _lanes_of(self, slot: Slot) -> list[Slot]:
        known = self._parts.get(id(slot))
        if known is not None and known[0] is slot:
            return known[1]
        whole = slot.layout
        layout = Layout(whole.columns, whole.steps, 1, batched=True)
        lanes = range(whole.lanes)
        parts = [Slot(layout, lane, {k: a[:, lane : lane + 1] for k, a in slot.arrays.items()}) for lane in lanes]
        self._parts[id(slot)] = slot, parts
        return parts

    def act(self, row: Row) -> None:
        t, states, before = self._t, self._generators.states, torch.get_rng_state()
        for lane, policy in enumerate(self._policies):
            torch.set_rng_state(states[lane])
            policy.act(self._rows[lane][t])
            states[lane] = torch.get_rng_state()
        torch.set_rng_state(before)
        self._t = t + 1

    def end(self, slot: Slot, steps: int) -> None:
        for lane, (policy, part) in enumerate(zip(self._policies, self._lanes_of(slot))):
            try:
                policy.end(part, steps)
            except ReapError as error:
                error.lane = lane  # the policy knows only one lane
                raise

    def forget(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._policies[lane].forget([0])

    def open_state(self) -> list[tuple[Key, Tensor]]:
        noise = [(("noise", str(lane)), state) for lane, state in enumerate(self._generators.states)]
        kept = [((str(n), *key), value) for n, one in enumerate(self._policies) for key, value in one.open_state()]
        return [*noise, *kept]

    def load_open_state(self, state: Sequence[tuple[Key, Tensor]]) -> None:
        kept: list[list[tuple[Key, Tensor]]] = [[] for _ in self._policies]
        for (of, *key), value in state:
            if of == "noise":
                self._generators.states[int(key[0])] = value
            else:
                kept[int(of)].append((tuple(key), value))
        for policy, own in zip(self._policies, kept):
            policy.load_open_state(own)
