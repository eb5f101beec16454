"""Slots, ids and statistics on a device. The loop is the same; nothing is read from the device before a batch is made.

    DeviceSlot     columns `[T, N, …]` as tensors; on a GPU a batch is lent as on the host, elsewhere it is copied
    DeviceLedger   trajectory ids, computed on the device
    DeviceStats    returns and lengths, summed on the device; read only on request

The ids are the same as those of the host's `Ledger`.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reap.core.measuring.episode_log import EPISODE_LENGTH, EPISODE_RETURN, NO_EPISODES, RECENT, Episodes
from reap.core.measuring.stats import Stats
from reap.core.slot import FLAGS, TRAJ_IDS, VERSION, Layout, Slot
from reap.spec import USUAL, BatchShape, EnvSpec, Key, Leaf


class DeviceLayout(Layout):
    """A layout whose columns are tensors on a device."""

    def __init__(
        self,
        columns: Mapping[Key, Leaf],
        steps: int,
        lanes: int,
        *,
        batched: bool,
        device: torch.device,
        look: BatchShape = USUAL,
    ) -> None:
        super().__init__(columns, steps, lanes, batched=batched, look=look)
        self.device = device

    def tensor(self, key: Key, array: Any) -> Tensor:
        return array  # type: ignore[no-any-return]


class DeviceSlot(Slot):
    """A slot whose columns are tensors on the device."""

    def __init__(self, layout: DeviceLayout, index: int = 0) -> None:
        size = (layout.steps, layout.lanes)
        columns: dict[Key, Any] = {
            key: torch.zeros(*size, *leaf.shape, dtype=leaf.dtype, device=layout.device)
            for key, leaf in layout.columns.items()
        }
        # The root's flags lie side by side, to be cleared by one call. Those in `next` need none: each step writes all.
        self._root = torch.zeros(len(FLAGS), *size, 1, dtype=torch.bool, device=layout.device)
        columns.update({(flag,): self._root[at] for at, flag in enumerate(FLAGS)})
        super().__init__(layout, index, columns)

    def clear_flags(self) -> None:
        self._root.zero_()

    def put(self, key: Key, values: Tensor) -> None:
        self.arrays[key][: len(values)] = values

    def copied(self) -> dict[Key, Any]:
        return {key: column.clone() for key, column in self.arrays.items()}  # type: ignore[attr-defined]

    def lend(self) -> dict[Key, Any]:
        columns: dict[Key, Any] = self.arrays
        owners = {key: Lent(column) for key, column in columns.items()}
        self._ended = deque()
        self._loan = [weakref.ref(owner, self._ended.append) for owner in owners.values()]  # type: ignore[arg-type]
        return {key: owner.tensor() for key, owner in owners.items()}


class Lent:
    """A column on a GPU as foreign memory: torch keeps this object just as long as any tensor views the column."""

    def __init__(self, column: Tensor) -> None:
        self._dtype = column.dtype
        self._column = column.view(torch.int16) if column.dtype is torch.bfloat16 else column  # not in the protocol

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self._column.__cuda_array_interface__)

    def tensor(self) -> Tensor:
        """Return the column as a tensor that is lent to the consumer."""
        lent = torch.as_tensor(self, device=self._column.device)
        return lent.view(self._dtype) if self._dtype is torch.bfloat16 else lent


class DeviceStats:
    """The counts of one worker; `summary` and `state` read those that are on the device.

    `one_by_one` is a host `Stats` that counts every episode, if the plan tracks episodes.
    """

    def __init__(self, lanes: int, device: torch.device, one_by_one: Stats | None = None) -> None:
        self.one_by_one = one_by_one
        self.loaded_seconds = 0.0
        self.frames = self.rollouts = 0
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # of one rollout: return, length, ends, NaNs
        self._totals = torch.zeros_like(self._sums)
        self._recent: deque[Tensor] = deque(maxlen=RECENT)
        self._return = torch.zeros(lanes, dtype=torch.float64, device=device)
        self._length = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._clock = _Clock(device)

    def begin(self, version: int = 0) -> None:
        """Note that a rollout starts, with weights of this version."""
        self._clock.start()
        if self.one_by_one is not None:
            self.one_by_one.begin(version)

    def end(self, frames: int) -> None:
        """Count a full rollout of so many frames, which `rollout` has summed."""
        self._clock.stop()
        self.frames, self.rollouts = self.frames + frames, self.rollouts + 1
        self._totals += self._sums
        self._recent.append(self._sums.clone())

    def forget(self, mask: Tensor) -> None:
        """Drop what is summed of open episodes in these lanes: episodes cut short by a reset are not counted."""
        self._return.masked_fill_(mask, 0)
        self._length.masked_fill_(mask, 0)
        if self.one_by_one is not None:
            self.one_by_one.forget(mask.cpu().nonzero()[:, 0].tolist())

    def take_episodes(self) -> Episodes:
        """Return the episodes that ended since the last call; none if episodes are not tracked one by one."""
        return NO_EPISODES if self.one_by_one is None else self.one_by_one.take_episodes()

    def rollout(self, reward: Tensor, frames: Tensor, ends: Tensor) -> None:
        """Sum the rewards `[T, N]` of one rollout in which so many episodes ended.

        The first `frames` of each lane belong to episodes that ended, the others to one that goes on.
        """
        steps = len(reward)
        number = reward.nan_to_num(0.0, 0.0, 0.0)
        ended = frames > 0
        place = torch.arange(steps, device=reward.device)[:, None]
        inside = _sum(torch.where(place < frames, number, 0.0))
        torch.sum(torch.where(ended, inside + self._return, 0.0), 0, out=self._sums[0])  # in float64
        torch.sum(torch.where(ended, frames + self._length, 0), 0, dtype=torch.float64, out=self._sums[1])
        self._sums[2] = ends
        self._sums[3] = reward.isnan().to(torch.bfloat16).sum(dtype=torch.float32)
        torch.add(_sum(number) - inside, self._return.masked_fill(ended, 0), out=self._return)
        torch.add(steps - frames, self._length.masked_fill(ended, 0), out=self._length)

    def summary(self) -> dict[str, Any]:
        """Return the counts; means are over the last rollouts that hold a hundred episodes (None if none has ended)."""
        _, _, episodes, nans = self._totals.tolist()
        returns = lengths = ends = 0.0
        for sums in reversed(self._recent):
            r, n, e, _ = sums.tolist()
            returns, lengths, ends = returns + r, lengths + n, ends + e
            if ends >= RECENT:
                break
        seconds = self._clock.seconds()
        summed = {"mean_return": returns / ends if ends else None, "mean_length": lengths / ends if ends else None}
        return {
            **(summed if self.one_by_one is None else {}),
            "episodes": int(episodes),
            "nan_rewards": int(nans),
            "collect_seconds": seconds,
            "frames_per_second": self.frames / seconds if seconds else 0.0,
            "env_seconds": None,  # the device does the work of both later: not told apart
            "policy_seconds": None,
            "transport_seconds": 0.0,
            "wait_seconds": 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Return everything that is counted, so that another worker can continue from it."""
        opened = {"open_return": self._return.cpu(), "open_length": self._length.cpu()}
        sums = {"sums": self._totals.cpu(), "recent": [one.cpu() for one in self._recent]}
        each = {} if self.one_by_one is None else {"one_by_one": self.one_by_one.state()}
        counts = {"frames": self.frames, "rollouts": self.rollouts, "seconds": self._clock.seconds()}
        return {**counts, **sums, **opened, **each}

    def load(self, state: Mapping[str, Any], *, opened: bool) -> None:
        """Continue counting from `state`; with `opened`, the episodes that were open go on too."""
        self.frames, self.rollouts = state["frames"], state["rollouts"]
        self._clock.resume_at(state["seconds"])
        self.loaded_seconds = state["seconds"]
        self._totals.copy_(state["sums"])
        self._recent = deque([one.to(self._totals.device) for one in state["recent"]], maxlen=RECENT)
        if self.one_by_one is not None and "one_by_one" in state:
            self.one_by_one.load(state["one_by_one"], opened=opened)
        if opened:
            self._return.copy_(state["open_return"])
            self._length.copy_(state["open_length"])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that change from rollout to rollout."""
        return [self._return, self._length]


class _Clock:
    """Sums the seconds between `start` and `stop` as the device measures them; only `seconds` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._done = 0.0
        self._began: Any = None
        self._running: deque[tuple[Any, Any]] = deque()

    def start(self) -> None:
        self._began = _event(self._device) if self._cuda else time.perf_counter()

    def stop(self) -> None:
        if not self._cuda:
            self._done += time.perf_counter() - self._began
            return
        self._running.append((self._began, _event(self._device)))
        while self._running and self._running[0][1].query():
            self._add()

    def resume_at(self, seconds: float) -> None:
        self._running.clear()
        self._done = seconds

    def seconds(self) -> float:
        while self._running:
            self._running[0][1].synchronize()
            self._add()
        return self._done

    def _add(self) -> None:
        start, stop = self._running.popleft()
        self._done += start.elapsed_time(stop) / 1e3


def _event(device: torch.device) -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _sum(numbers: Tensor) -> Tensor:
    """Sum over the steps of a rollout, in a precision for which torch makes no copy of all the numbers first."""
    return numbers.sum(0, dtype=torch.float32 if numbers.dtype in (torch.float16, torch.bfloat16) else None)


def _counting_dtype(largest: int) -> torch.dtype:
    """Return the narrowest dtype that counts to `largest`: a million lanes' counts are read and written many times."""
    return torch.int16 if largest < 2**15 else torch.int32 if largest < 2**31 else torch.int64


class DeviceCounter:
    """The id of the next trajectory, on a device."""

    def __init__(self, first: int, device: torch.device) -> None:
        self.tensor = torch.tensor(first, dtype=torch.int64, device=device)

    @property
    def next(self) -> int:
        """The next free id; reading it waits for the device."""
        return int(self.tensor)

    def resume_at(self, first: int) -> None:
        """Continue at `first`."""
        self.tensor.fill_(first)

    def skip_to(self, first: int) -> None:
        """Continue at `first`, or above if the ids are there already."""
        self.tensor.clamp_(min=first)


class DeviceLedger:
    """Keeps trajectory ids and counts of one env's lanes from rollout to rollout."""

    def __init__(self, spec: EnvSpec, device: torch.device, stats: DeviceStats) -> None:
        self.stats = stats
        self._reward = ("next", *next(iter(spec.reward)))
        self.ids = torch.arange(spec.lanes, device=device)
        self.counter = DeviceCounter(spec.lanes, device)

    def reset(self, lanes: Sequence[int], *, fresh_ids: bool = True) -> None:
        """Note that these lanes were reset between two rollouts."""
        chosen = torch.as_tensor(list(lanes), device=self.ids.device)
        mask = torch.zeros(len(self.ids), dtype=torch.bool, device=self.ids.device)
        mask[chosen] = True
        if fresh_ids:
            self.ids[chosen] = self.counter.tensor + torch.arange(len(chosen), device=self.ids.device)
            self.counter.tensor += len(chosen)
        self.stats.forget(mask)

    def close(self, slot: Slot) -> None:
        """Write the trajectory ids of a rollout that is over, and sum its rewards.

        It makes few passes over `[T, N]` and launches few kernels: with a million lanes the passes take the time, with
        a few thousand the launches.
        """
        columns: Mapping[Key, Any] = slot.arrays
        done, reward = columns[("next", "done")][..., 0], columns[self._reward]
        # Number the ends in order of time and lane; these numbers become the ids of the episodes that follow. Later ids
        # are larger, so a lane's current id is the maximum given to it so far, and that maximum's step is its last end.
        new = done.reshape(-1).cumsum(0, dtype=_counting_dtype(done.numel())).reshape(done.shape)
        ends = new[-1, -1].clone()
        given, place = torch.where(done, new, 0).cummax(0)
        frames = torch.where(given[-1] > 0, place[-1] + 1, 0)
        one = reward.numel() == done.numel()
        self.stats.rollout(
            reward.reshape(done.shape) if one else reward.reshape(*done.shape, -1).mean(-1), frames, ends
        )
        if TRAJ_IDS not in columns:
            return
        ids, named = columns[TRAJ_IDS], given > 0
        given = given + (self.counter.tensor.reshape(1) - 1)  # a 1-D tensor, else the sum is as narrow as `given`
        ids[0] = self.ids
        torch.where(named[:-1], given[:-1], self.ids, out=ids[1:])
        torch.where(named[-1], given[-1], self.ids, out=self.ids)
        self.counter.tensor += ends

    def stamp(self, slot: Slot, version: int | None) -> None:
        """Write the policy version that made the frames; None: the policy has written the versions itself."""
        columns: Mapping[Key, Any] = slot.arrays
        if version is None:
            if ("next", *VERSION) in columns:
                columns[("next", *VERSION)].copy_(columns[VERSION])
            return
        for key in (VERSION, ("next", *VERSION)):
            if key in slot.arrays:
                slot.arrays[key].fill_(version)  # type: ignore[attr-defined]

    def account(self, slot: Slot, episodes: Stats) -> None:
        """Count each episode that ended in a rollout on the host, which copies its rewards and flags every time."""
        columns: Mapping[Key, Any] = slot.arrays
        done, reward = columns[("next", "done")][..., 0], columns[self._reward]
        number = reward.reshape(*done.shape, -1).to("cpu", torch.float64).mean(-1).numpy()
        when, where = done.cpu().numpy().nonzero()
        ended = columns[("next", "terminated")][..., 0].cpu().numpy()[when, where]
        versions = columns[VERSION].cpu().numpy()[when, where] if VERSION in columns else None
        found = episodes.rollout(
            number, when, where, frames=number.size, terminated=ended, versions=versions, so_far=True
        )
        assert found is not None
        columns[EPISODE_RETURN].copy_(torch.from_numpy(found.returns))
        columns[EPISODE_LENGTH].copy_(torch.from_numpy(found.lengths))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that change from rollout to rollout."""
        return [self.ids, self.counter.tensor, *self.stats.tensors]
