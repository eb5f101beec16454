"""Windows of n steps and burn-in, against a model in plain Python: whatever lies around them, they never cross it."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from reap.collectors import Collector
from reap.data import (
    LazyTensorStorage,
    MultiStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from reap.errors import UsageError, WrongArgument, WrongState
from reap.testing import CountingEnv, EchoPolicy
from tests import example_count
from tests.buffers.child_messages import hear, tell
from tests.worlds.buffers import episodes, half_a_row, start, stop

SAMPLERS = {
    "random": lambda capacity: RandomSampler(),
    "prioritized": lambda capacity: PrioritizedSampler(capacity, 0.7, 0.5),
    "once": lambda capacity: SamplerWithoutReplacement(),
    "slices": lambda capacity: SliceSampler(slice_len=2, truncated_key=None),
}


def frames(ids, steps, done):
    """Rows that say who they are; what they bring is theirs alone."""
    ids, steps = torch.as_tensor(ids), torch.as_tensor(steps)
    done = torch.as_tensor(done).reshape(*ids.shape, 1)
    seen = torch.stack([ids, steps], -1).float()
    after = {"observation": seen + torch.tensor([0.0, 1.0]), "reward": reward(ids, steps).float().unsqueeze(-1)}
    after |= {"done": done, "terminated": done & (ids % 2 == 0).unsqueeze(-1)}
    after["pixels"] = (ids * 3 + steps + 1).to(torch.uint8)[..., None].expand(*ids.shape, 300).contiguous()
    return TensorDict({"observation": seen, "next": after, "collector": {"traj_ids": ids}}, batch_size=ids.shape)


def reward(ids, steps):
    return (ids * 5 + steps * 3) % 17 - 4


def check(sample, window, gamma, n_steps):
    """A sample, and for each of its rows the (id, step, done) of the window it must have."""
    told = [rows[:n_steps] for rows in window]
    ids, first, last = (torch.tensor([rows[k][c] for rows in told]) for k, c in ((0, 0), (0, 1), (-1, 1)))
    length = torch.tensor([len(rows) for rows in told])
    assert torch.equal(sample["observation"], torch.stack([ids, first], -1).float())
    assert torch.equal(sample["steps_to_next_obs"], length)
    assert torch.allclose(sample["gamma"], gamma ** length.float())
    after = sample["next"]
    assert torch.equal(after["observation"], torch.stack([ids, last + 1], -1).float())
    assert torch.equal(after["pixels"][:, 0], (ids * 3 + last + 1).to(torch.uint8))
    done = torch.tensor([rows[-1][2] for rows in told])
    assert torch.equal(after["done"][:, 0], done)
    assert torch.equal(after["terminated"][:, 0], done & (ids % 2 == 0))
    total = [sum(gamma**k * reward(*row[:2]) for k, row in enumerate(rows)) for rows in told]
    assert torch.allclose(after["reward"][:, 0], torch.tensor(total, dtype=torch.float32), atol=1e-5)
    assert torch.equal(after["original_reward"][:, 0], reward(ids, first).float())


class World:
    """Three writers with lanes of their own; what each position of the ring holds, and whether it goes on."""

    def __init__(self, capacity, sampler, n_steps, gamma):
        self.capacity, self.n_steps, self.gamma = capacity, n_steps, gamma
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=SAMPLERS[sampler](capacity),
            batch_size=8,
            transform=MultiStep(gamma, n_steps),
        )
        fds, about = self.buffer.handle()
        self.writers = [self.buffer]
        self.writers += [ReplayBuffer.open([os.dup(fd) for fd in fds], about) for _ in range(2)]
        self.rows, self.state, self.serial = [], {}, 0

    def write(self, data):
        w, steps = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 6))
        lanes = w + 1
        ids, at = np.zeros((lanes, steps), int), np.zeros((lanes, steps), int)
        done = np.zeros((lanes, steps), bool)
        for lane in range(lanes):
            for t in range(steps):
                if self.state.get((w, lane)) is None:
                    self.serial += 1
                    self.state[w, lane] = self.serial, 0
                ids[lane, t], at[lane, t] = self.state[w, lane]
                done[lane, t] = data.draw(st.integers(0, 4)) == 0
                self.state[w, lane] = None if done[lane, t] else (int(ids[lane, t]), int(at[lane, t]) + 1)
        batch = frames(ids, at, done)
        self.writers[w].extend(batch if lanes > 1 else batch[0])
        self.rows += zip(ids.reshape(-1).tolist(), at.reshape(-1).tolist(), done.reshape(-1).tolist())

    def die(self, data):
        """A writer is killed between reserve and commit."""
        self.lose(data.draw(st.integers(1, 4)))

    def lose(self, count):
        """A writer is killed, and so many rows with it."""
        ring = self.buffer._memory.ring
        _first, entry = ring.reserve(count)
        with ring.lock.locked():
            ring.lock.release(entry)  # what the kernel does for a process that dies
        for _ in range(2):
            ring.window()
        self.rows += [None] * count

    def window(self, position):
        """The frames that follow each other from there."""
        found = [self.rows[position]]
        for row in self.rows[position + 1 :]:
            if row is None or found[-1][2] or row[:2] != (found[-1][0], found[-1][1] + 1):
                break
            found.append(row)
        return found

    def sample(self):
        low = max(len(self.rows) - self.capacity, 0)
        live = [p for p in range(low, len(self.rows)) if self.rows[p] is not None]
        if not live:
            with pytest.raises(WrongState, match="empty"):
                self.buffer.sample()
            return
        try:
            sample = self.buffer.sample()
        except WrongState:  # no run is as long as a slice
            assert isinstance(self.buffer.sampler, SliceSampler)
            assert all(len(self.window(p)) < 2 for p in live)
            return
        positions = [p + low for p in ((sample["index"] - low) % self.capacity).tolist()]
        assert set(positions) <= set(live)
        check(sample, [self.window(p) for p in positions], self.gamma, self.n_steps)
        rows = sorted(p % self.capacity for p in live)
        windows = [self.window(low + (row - low) % self.capacity) for row in rows]
        check(self.buffer[:], windows, self.gamma, self.n_steps)


@settings(max_examples=example_count(120), deadline=None)
@given(
    data=st.data(),
    sampler=st.sampled_from(list(SAMPLERS)),
    capacity=st.integers(6, 40),
    n_steps=st.integers(1, 5),
    gamma=st.sampled_from([1.0, 0.5, 0.0]),
    verbs=st.lists(st.sampled_from(["write", "write", "write", "die", "sample"]), min_size=2, max_size=14),
)
def test_windows_never_cross(data, sampler, capacity, n_steps, gamma, verbs):
    """An episode, a writer, a lane, the end of the ring, a crash: in any order."""
    world = World(capacity, sampler, n_steps, gamma)
    for verb in ["write", *verbs, "sample"]:
        (world.sample if verb == "sample" else lambda: getattr(world, verb)(data))()


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_a_ring_of_nothing_but_what_dead_writers_left_is_empty(sampler):
    world = World(6, sampler, 1, 1.0)
    world.writers[0].extend(frames([1, 1], [0, 1], [False, True]))
    world.rows += [(1, 0, False), (1, 1, True)]
    world.sample()
    for count in (1, 2, 3):
        world.lose(count)
    world.sample()


def test_while_three_processes_write():
    """The ring wraps many times under the reader; a window is whole or is drawn again."""
    count, size, gamma, n = 900, 7, 0.5, 3
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(500), batch_size=128, transform=MultiStep(gamma=gamma, n_steps=n)
    )
    children = start(buffer, [episodes(count, size)] * 3)
    try:
        for child in children:
            tell(child, "go")
        samples = 0
        while buffer.write_count < 3 * count * size:
            if not len(buffer):
                continue
            sample = buffer.sample()
            step, left = sample["step"], sample["steps_to_next_obs"]
            assert torch.equal(left, (size - step).clamp(max=n))
            first = sample["collector", "traj_ids"].double() * 1000 + step
            total = sum((k < left) * gamma**k * (first + k) for k in range(n))
            assert torch.allclose(sample["next", "reward"][:, 0], total)
            samples += 1
        assert samples > 3
    finally:
        stop(children)


def test_a_window_ends_where_a_writer_was_killed():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=64, transform=MultiStep(1.0, 4))
    children = start(buffer, [half_a_row])
    ids, steps = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    batch = TensorDict(
        {
            "observation": torch.stack([ids, steps], -1).float(),
            "step": steps,
            "next": {"done": torch.zeros(8, 1, dtype=torch.bool), "reward": steps.double().unsqueeze(-1)},
            "collector": {"traj_ids": ids},
        },
        batch_size=[8],
    )
    try:
        buffer.extend(batch[:4])
        tell(children[0], "go")
        assert hear(children[0]) == "writing"
        os.kill(children[0].pid, signal.SIGKILL)
        assert children[0].gone(10)
        buffer.extend(batch[4:])  # the same episode, behind the hole
        assert [len(buffer) for _ in range(2)][1] == 8
        sample = buffer.sample()
        assert set(sample["step"].tolist()) == set(range(8))
        assert torch.equal(sample["steps_to_next_obs"], 4 - sample["step"] % 4)
    finally:
        stop(children)


def test_what_is_sampled_later_sees_what_came_meanwhile():
    """Batches as short as they like: a window grows with its episode."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=32, transform=MultiStep(0.5, 3))
    rows = [(0, t, t == 4) for t in range(5)]
    for t in range(5):
        buffer.add(frames([0], [t], [t == 4])[0])
        sample = buffer.sample()
        check(sample, [rows[i : t + 1] for i in sample["index"].tolist()], 0.5, 3)


def test_other_transforms_come_after():
    buffer = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=256, transform=MultiStep(1.0, 2))
    buffer.append_transform(lambda sample: sample["next", "reward"] * 10)
    buffer.extend(frames([0, 0, 0], [0, 1, 2], [False, False, True]))
    each = reward(torch.zeros(3), torch.arange(3))
    assert set(buffer.sample()[:, 0].tolist()) == {
        10 * v for v in (each + torch.cat([each[1:], each[:1] * 0])).tolist()
    }
    assert [type(t).__name__ for t in buffer.transforms] == ["MultiStep", "function"]
    with pytest.raises(UsageError, match="first transform"):
        buffer.append_transform(MultiStep(1.0, 2))
    with pytest.raises(UsageError, match="first transform"):
        buffer.insert_transform(0, lambda sample: sample)
    assert len(buffer.transforms) == 2


@pytest.mark.parametrize(
    ("gamma", "n_steps", "match"), [(1.5, 2, "gamma"), ("x", 2, "gamma"), (0.9, 0, "n_steps"), (0.9, 2.0, "n_steps")]
)
def test_wrong_arguments(gamma, n_steps, match):
    with pytest.raises(UsageError, match=match):
        MultiStep(gamma, n_steps)


def test_what_it_needs():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2, transform=MultiStep(0.9, 2))
    with pytest.raises(WrongState, match="empty"):
        buffer.sample()
    buffer.extend(TensorDict({"next": {"reward": torch.zeros(2, 1)}}, [2]))
    with pytest.raises(UsageError, match="where episodes end"):
        buffer.sample()
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2, transform=MultiStep(0.9, 2))
    buffer.extend(TensorDict({"next": {"done": torch.zeros(2, 1, dtype=torch.bool)}}, [2]))
    with pytest.raises(UsageError, match="no reward"):
        buffer.sample()
    with pytest.raises(WrongArgument, match="TensorDict"):
        MultiStep(0.9, 2)(torch.zeros(3))


def test_a_batch_by_itself():
    """As postproc: lanes, masks and rewards in several places; what was given stays as it was."""
    batch = frames(
        [[0, 0, 2, 2], [1, 1, 1, 1]], [[0, 1, 0, 1], [0, 1, 2, 3]], [[False, True, False, False], [False] * 4]
    )
    batch["next", "agents"] = TensorDict({"reward": torch.arange(16).reshape(2, 4, 2)}, [2, 4, 2])
    batch["collector", "mask"] = torch.tensor([[True] * 4, [True, True, False, False]])
    before = batch.clone()
    out = MultiStep(0.5, 3)(batch)
    assert (batch == before).all()
    assert out.batch_size == (2, 4)
    rows = [(0, 0, False), (0, 1, True)], [(0, 1, True)], [(2, 0, False), (2, 1, False)], [(2, 1, False)]
    rows += [(1, 0, False), (1, 1, False)], [(1, 1, False)], [(1, 2, False), (1, 3, False)], [(1, 3, False)]
    check(out.reshape(-1), rows, 0.5, 3)
    agents = batch["next", "agents", "reward"].float()
    assert torch.equal(out["next", "agents", "reward"][0, 0], agents[0, 0] + 0.5 * agents[0, 1])
    assert torch.equal(out["next", "agents", "original_reward"], batch["next", "agents", "reward"])


def test_as_torchrl_has_it():
    """Same keys, shapes and values; but the flags are those of the frame it bootstraps from, not of the first."""
    torchrl = pytest.importorskip("torchrl.data")
    ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [2, 2, 3, 3, 3, 3, 3, 3]])
    steps = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
    done = torch.zeros(2, 8, dtype=torch.bool)
    done[0, 4] = done[1, 1] = True
    batch = frames(ids, steps, done)
    theirs = torchrl.MultiStep(0.5, 3)(batch.clone())
    ours = MultiStep(0.5, 3)(batch)
    ending = {("next", "done"), ("next", "terminated")}
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True)) - {"nonterminal"}
    for key in set(ours.keys(True, True)) - ending:
        assert ours[key].dtype is theirs[key].dtype, key
        assert torch.allclose(ours[key].float(), theirs[key].float()), key
    assert torch.equal(theirs["next", "done"][..., 0], done)
    assert ours["next", "done"][..., 0].nonzero().tolist() == [[0, 2], [0, 3], [0, 4], [1, 0], [1, 1]]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(16), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=16
    )
    buffer.append_transform(MultiStep(gamma=0.5, n_steps=3))
    for lane in batch:
        buffer.extend(lane)
    assert (buffer.sample().exclude("index") == ours.reshape(-1)).all()


def test_in_a_collector():
    """Written by workers, sampled with what comes after; and as their postproc."""
    from reap.collectors import Collector
    from reap.envs import SerialEnv
    from reap.testing import CountingEnv, EchoPolicy

    def make(**options):
        return Collector(
            SerialEnv(2, [lambda: CountingEnv((3, 5), 0), lambda: CountingEnv((4,), 1)]),
            EchoPolicy(),
            frames_per_batch=40,
            total_frames=40,
            **options,
        )

    with make(postproc=MultiStep(0.9, 3)) as collector:
        ours = collector.next().reshape(-1)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(40), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=40
    )
    buffer.append_transform(MultiStep(0.9, 3))
    with make(replay_buffer=buffer) as collector:
        for _ in collector:
            pass
    later = buffer.sample()
    assert set(ours["steps_to_next_obs"].tolist()) == {1, 2, 3}
    for key in later.keys(True, True):
        assert torch.equal(later[key], ours[key]), key


@settings(max_examples=example_count(60), deadline=None)
@given(data=st.data(), strict=st.booleans(), capacity=st.integers(6, 40))
def test_burn_in_never_crosses(data, strict, capacity):
    length = data.draw(st.integers(1, 4))
    warm = data.draw(st.integers(0, length - 1))
    world = World(capacity, "random", 1, 1.0)
    fds, about = world.buffer.handle()
    sampler = SliceSampler(slice_len=length, burn_in=warm, strict_length=strict)
    buffer = TensorDictReplayBuffer.open([os.dup(fd) for fd in fds], about, sampler=sampler, batch_size=8 * length)
    for verb in data.draw(st.lists(st.sampled_from(["write", "write", "die"]), min_size=1, max_size=8)):
        getattr(world, verb)(data)
    low = max(len(world.rows) - capacity, 0)
    runs = [len(world.window(p)) for p in range(low, len(world.rows)) if world.rows[p] is not None]
    least = length if strict else warm + 1
    if max(runs, default=0) < least:
        with pytest.raises(WrongState):
            buffer.sample()
        return
    sample = buffer.sample()
    seen = [tuple(row) for row in sample["observation"].long().tolist()]
    over = sample["next", "truncated"][:, 0].tolist()
    marked = sample["burn_in"].tolist() if warm else [False] * len(seen)
    slices, at = 0, 0
    while at < len(seen):
        end = over.index(True, at) + 1
        assert seen[at:end] == [(seen[at][0], seen[at][1] + k) for k in range(end - at)]
        assert marked[at:end] == [k < warm for k in range(end - at)]
        assert end - at == length if strict else warm < end - at <= length
        slices, at = slices + 1, end
    assert slices == 8
    assert warm or "burn_in" not in sample.keys()


def test_burn_in_arguments():
    for wrong in (-1, True, 1.0):
        with pytest.raises(UsageError, match="burn_in must be a whole number >= 0"):
            SliceSampler(slice_len=4, burn_in=wrong)
    with pytest.raises(UsageError, match="leaves nothing"):
        SliceSampler(slice_len=4, burn_in=4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(num_slices=2, burn_in=3))
    buffer.extend(frames([0] * 9, range(9), [False] * 9))
    with pytest.raises(UsageError, match="leaves nothing"):
        buffer.sample(6)
    _, info = buffer.sample(8, return_info=True)
    assert info["burn_in"].tolist() == [True, True, True, False] * 2


def test_burn_in_with_torchrls_transform():
    """Its BurnInTransform takes slices as [slices, steps]: what it makes of ours is what it makes of the rows."""
    pytest.importorskip("torchrl")
    from torchrl.envs.transforms import BurnInTransform
    from torchrl.modules import GRUModule

    torch.manual_seed(0)
    gru = GRUModule(
        input_size=2,
        hidden_size=3,
        in_keys=["observation", "hidden"],
        out_keys=["out", ("next", "hidden")],
        default_recurrent_mode=True,
    )
    rows = frames([0] * 20, range(20), [False] * 20)
    rows["hidden"], rows["is_init"] = torch.zeros(20, 1, 3), torch.zeros(20, 1, dtype=torch.bool)
    sampler = SliceSampler(slice_len=6, burn_in=2)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=sampler, batch_size=24, collate_fn=lambda sample: sample.reshape(-1, 6)
    )
    buffer.extend(rows)
    buffer.append_transform(BurnInTransform(modules=[gru], burn_in=sampler.burn_in))
    sample = buffer.sample()
    assert sample.batch_size == (4, 4)
    assert not sample["burn_in"].any()
    first = sample["index"][:, 0] - 2
    with torch.no_grad():
        warm = gru(torch.stack([rows[int(i) : int(i) + 2] for i in first]))
    assert torch.allclose(sample["hidden"][:, 0], warm["next", "hidden"][:, -1])
    assert sample["hidden"].abs().sum() > 0


def test_a_truncation_that_steps_ahead_have_reached_stays():
    frames = Collector(CountingEnv((4, 1, 6)), EchoPolicy(), frames_per_batch=90).next()
    memory = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=2), batch_size=200, transform=MultiStep(0.5, 3)
    )
    memory.extend(frames)
    sample = memory.sample()["next"]
    assert torch.equal(sample["done"], sample["terminated"] | sample["truncated"])
