"""What users do with a buffer, on data they can predict: every frame says which episode it is of, and which step."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from reap.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from reap.errors import SpecMismatch, UsageError, WrongArgument, WrongState
from tests import example_count
from tests.worlds.buffers import check_row, frames, line


@pytest.fixture(params=["memory", "disk", "named"])
def storage(request, tmp_path):
    def make(size):
        if request.param == "memory":
            return LazyTensorStorage(size)
        return LazyMemmapStorage(size, scratch_dir=tmp_path / "rows" if request.param == "named" else None)

    return make


def test_rows_come_back_as_they_went_in(storage):
    buffer = TensorDictReplayBuffer(storage=storage(35), batch_size=64)
    assert buffer.extend(line(20)).tolist() == list(range(20))
    assert buffer.extend(line(20, 20)).tolist() == [*range(20, 35), *range(5)]
    assert buffer.add(line(1, 40)[0]) == 5
    assert (len(buffer), buffer.write_count) == (35, 41)
    expected = torch.tensor([*range(35, 41), *range(6, 35)])
    assert (buffer[:]["step"] == expected).all()
    assert buffer[3]["step"] == 38
    assert buffer[3].batch_size == torch.Size([])
    assert buffer[torch.tensor([7, 1])]["step"].tolist() == [7, 36]
    assert buffer[-1]["step"] == 34
    sample = buffer.sample()
    check_row(sample)
    assert (sample["step"] == expected[sample["index"]]).all()
    assert buffer.sample(5).batch_size == torch.Size([5])
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 0)
    assert buffer.extend(line(3)).tolist() == [0, 1, 2]


def test_more_than_the_ring_holds():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    assert buffer.extend(line(3)).tolist() == [0, 1, 2]
    assert buffer.extend(line(25, 3)).tolist() == [i % 10 for i in range(3, 28)]
    assert buffer[:]["step"].tolist() == [20, 21, 22, 23, 24, 25, 26, 27, 18, 19]
    assert buffer.write_count == 28


def test_wide_and_odd_leaves(storage):
    buffer = ReplayBuffer(storage=storage(50), batch_size=32)
    buffer.extend(frames(torch.arange(30) // 7, torch.arange(30) % 7, pixels=True))
    sample = buffer.sample()
    check_row(sample)
    assert sample["half"].dtype is torch.bfloat16
    assert (sample["half"].long() == sample["step"]).all()
    assert (sample["pixels"] == (sample["collector", "traj_ids"] * 7 + sample["step"])[:, None, None]).all()
    assert all(value.is_contiguous() for value in sample.values(True, True))


def test_samples_are_the_callers_own():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    buffer.extend(line(10))
    buffer.sample()["observation"].fill_(-1)
    assert (buffer[:]["observation"] >= 0).all()


def test_bare_tensors():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=8)
    buffer.extend(torch.arange(12))
    assert set(buffer.sample().tolist()) <= set(range(2, 12))
    assert buffer[0] == 10


@settings(max_examples=example_count(100), deadline=None)
@given(st.data(), st.integers(4, 40), st.booleans(), st.booleans())
def test_slices_never_cross(data, capacity, with_ids, flat):
    """Several writers with several lanes each, in any order; episodes of any length; the ring wraps."""
    length = data.draw(st.integers(1, 4))
    sampler = SliceSampler(slice_len=length)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=8 * length)
    writers = [buffer, *(TensorDictReplayBuffer.open(*_again(buffer)) for _ in range(2))]
    lanes = {w: data.draw(st.integers(1, 3)) if with_ids or not flat else 1 for w in range(3)}
    state = {(w, lane): None for w in range(3) for lane in range(lanes[w])}
    serial = 0
    written = []
    for _ in range(data.draw(st.integers(1, 12))):
        w, steps = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 6))
        ids, at, done = np.zeros((lanes[w], steps), int), np.zeros((lanes[w], steps), int), []
        for lane in range(lanes[w]):
            for t in range(steps):
                if state[w, lane] is None:
                    serial += 1
                    state[w, lane] = (serial, 0)
                ids[lane, t], at[lane, t] = state[w, lane]
                end = data.draw(st.integers(0, 4)) == 0
                state[w, lane] = None if end else (ids[lane, t], at[lane, t] + 1)
                done.append(end)
        batch = frames(ids, at, np.array(done).reshape(ids.shape))
        if lanes[w] == 1:
            batch = batch[0]
        written += zip(batch["collector", "traj_ids"].reshape(-1).tolist(), batch["step"].reshape(-1).tolist())
        if not with_ids:
            batch = batch.exclude(("collector", "traj_ids"))
            batch["id"] = torch.as_tensor(ids).reshape(batch.batch_size)
        writers[w].extend(batch)
    kept = written[-capacity:]
    assert len(buffer) == len(kept)
    # What the runs must be: neighbours in the ring that follow each other in an episode.
    runs = [[kept[0]]]
    for before, row in itertools.pairwise(kept):
        if row == (before[0], before[1] + 1):
            runs[-1].append(row)
        else:
            runs.append([row])
    _starts, lengths = buffer._memory.runs.table()
    if with_ids or flat:
        assert lengths.tolist() == [len(run) for run in runs]
    if max(lengths) < length:
        with pytest.raises(WrongState, match="no episode has"):
            buffer.sample()
        return
    sample = buffer.sample().reshape(8, length)
    ids = sample["collector", "traj_ids"] if with_ids else sample["id"]
    assert (ids == ids[:, :1]).all()
    assert (sample["step"].diff(dim=1) == 1).all()
    assert not sample["next", "done"][:, :-1].any()
    assert sample["next", "done"][:, -1].all()
    assert sample["next", "truncated"][:, -1].all()


def _again(buffer):
    import os

    fds, description = buffer.handle()
    return [os.dup(fd) for fd in fds], description


def test_episodes_go_on_from_batch_to_batch():
    sampler = SliceSampler(slice_len=10)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=20)
    for t in range(10):
        buffer.add(line(1, t)[0])
    assert buffer.sample()["step"].tolist() == [*range(10)] * 2
    buffer.extend(line(5, 10))
    assert buffer._memory.runs.table()[1].tolist() == [15]


def test_slices_of_short_episodes():
    sampler = SliceSampler(slice_len=8, strict_length=False)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=16)
    buffer.extend(frames(torch.arange(30) // 3, torch.arange(30) % 3))
    sample = buffer.sample()
    assert sample["step"].tolist() == [0, 1, 2] * 2
    assert sample["next", "done"][:, 0].tolist() == [False, False, True] * 2


def test_frames_that_are_none_are_left_out():
    batch = frames([[0, 0, 0], [1, 1, 1]], [[0, 1, 2], [0, 1, 2]])
    batch["collector", "mask"] = torch.tensor([[True, True, False], [True, True, True]])
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    assert len(buffer.extend(batch)) == 5
    assert buffer[:]["step"].tolist() == [0, 1, 0, 1, 2]
    assert buffer._memory.runs.table()[1].tolist() == [2, 3]


@pytest.mark.parametrize("prefetch", [None, 4])
def test_a_round_is_a_round(prefetch):
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=8, prefetch=prefetch)
    buffer.extend(line(20))
    for _ in range(3):
        assert torch.cat([batch["step"] for batch in buffer]).sort().values.tolist() == list(range(20))
    buffer.shutdown()


def test_without_replacement():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(), batch_size=8)
    buffer.extend(line(20))
    for _ in range(2):
        batches = [batch["step"].tolist() for batch in buffer]
        assert [len(b) for b in batches] == [8, 8, 4]
        assert sorted(functools.reduce(operator.iadd, batches, [])) == list(range(20))
    whole = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(True, False), batch_size=8)
    whole.extend(line(20))
    assert [batch["step"].tolist() for batch in whole] == [[*range(8)], [*range(8, 16)]]
    whole.sample()
    whole.extend(line(16, 20))  # what was left of the round is written over: a new one begins
    assert whole.sample()["step"].tolist() == [16, 17, 18, 19, 20, 21, 22, 23]


def test_priorities_decide():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(8), batch_size=4000
    )
    buffer.extend(line(8))
    assert (buffer.sample()["priority_weight"] == 1).all()
    buffer.update_priority(torch.arange(8), torch.tensor([0, 0, 1, 0, 0, 3, 0, 4.0]) + 1e-12)
    sample = buffer.sample()
    counts = torch.bincount(sample["index"], minlength=8)
    assert counts[[0, 1, 3, 4, 6]].sum() == 0
    assert torch.allclose(counts[[2, 5, 7]] / 4000, torch.tensor([1, 3, 4]) / 8, atol=0.04)
    sample["td_error"] = torch.ones(4000, 1)
    buffer.update_tensordict_priority(sample)
    assert buffer.sampler.default_priority == 4
    buffer.extend(line(1, 8))  # a new row has the largest priority seen
    assert buffer.sampler._tree[np.array([0])] < 1e-11
    buffer.sample()
    assert buffer.sampler._tree[np.array([0])] == 4
    with pytest.raises(UsageError, match="td_error"):
        buffer.update_tensordict_priority(sample.exclude("td_error"))


def test_priorities_that_come_with_the_data():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), batch_size=100)
    buffer.extend(line(4).set("td_error", torch.tensor([0.0, 5, 0, 0])))
    assert set(buffer.sample()["step"].tolist()) == {1}


def test_priorities_of_frames_that_are_left_out():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), batch_size=100)
    data = line(4).set("td_error", torch.tensor([0.0, 5, 0, 2]))
    assert len(buffer.extend(data.set(("collector", "mask"), torch.tensor([True, False, True, True])))) == 3
    assert set(buffer.sample()["step"].tolist()) == {3}


def test_plain_prioritized_buffer():
    buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(8), batch_size=16)
    buffer.extend(line(8))
    sample, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], torch.rand(16))
    assert set(info) == {"index", "priority_weight"}
    assert "index" not in sample.keys()


@pytest.mark.parametrize("where", ["dict", "disk"])
@pytest.mark.parametrize("kind", [RandomSampler, SliceSampler, PrioritizedSampler, SamplerWithoutReplacement])
def test_state_comes_back(where, kind, tmp_path):
    def make():
        sampler = {
            SliceSampler: lambda: SliceSampler(slice_len=2),
            PrioritizedSampler: lambda: PrioritizedSampler(24, 0.7, 0.5),
        }.get(kind, kind)()
        return TensorDictReplayBuffer(storage=LazyTensorStorage(24), sampler=sampler, batch_size=6)

    old, new = make(), make()
    for i in range(10):
        old.extend(frames(torch.full((4,), i), torch.arange(4)))
    old.sample()
    old.update_priority(torch.arange(24), torch.rand(24))
    new.extend(line(7).exclude("nothing"))
    if where == "dict":
        new.load_state_dict(old.state_dict())
    else:
        old.dumps(tmp_path / "here")
        new.loads(tmp_path / "here")
    assert (len(new), new.write_count) == (24, 40)
    assert (new[:] == old[:]).all()
    for _ in range(3):
        torch.manual_seed(0)
        first = old.sample()
        torch.manual_seed(0)
        assert (new.sample() == first).all()
        index = [b.extend(frames(torch.full((5,), 99), torch.arange(5))).tolist() for b in (old, new)]
        assert index[0] == index[1]
    with pytest.raises(UsageError, match="24 rows"):
        ReplayBuffer(storage=LazyTensorStorage(5)).load_state_dict(old.state_dict())
    with pytest.raises(UsageError, match="no dumped buffer"):
        new.loads(tmp_path / "nowhere")


def test_transforms_and_collate():
    class Double:
        def inv(self, data):
            return data.set("observation", data["observation"] / 2)

        def __call__(self, sample):
            return sample.set("observation", sample["observation"] * 2)

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=5, transform=Double(), collate_fn=lambda x: x)
    buffer.append_transform(lambda x: x.set("twice", x["observation"] * 2))
    buffer.extend(line(8).clone())
    sample = buffer.sample()
    check_row(sample)
    assert (sample["twice"] == 2 * sample["observation"]).all()


def test_prefetch_and_its_thread():
    before = threading.active_count()
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=5, prefetch=3)
    with pytest.raises(WrongState):
        buffer.sample()
    buffer.extend(line(8))
    for _ in range(10):
        check_row(buffer.sample())
    buffer.shutdown()
    assert threading.active_count() == before


def test_many_threads_share_one_prefetch():
    before, interval = threading.active_count(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=5, prefetch=1)
            buffer.extend(line(8))
            together, errors = threading.Barrier(8), []

            def ask(buffer=buffer, together=together, errors=errors):
                together.wait()
                try:
                    for _ in range(5):
                        check_row(buffer.sample())
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            buffer.shutdown()
            assert not errors
            assert threading.active_count() == before
    finally:
        sys.setswitchinterval(interval)


def test_slices_of_nothing_are_refused():
    for size in (0, -1, True, 2.0):
        for name in ("num_slices", "slice_len"):
            with pytest.raises(UsageError, match=f"{name} must be a whole number >= 1, got {size}"):
                SliceSampler(**{name: size})


def test_seeds_decide():
    generator = torch.Generator().manual_seed(3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=9, generator=generator)
    buffer.extend(line(50))
    first = buffer.sample()
    generator.manual_seed(3)
    assert (buffer.sample() == first).all()


def test_errors_say_what_to_do(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    with pytest.raises(WrongState, match="empty"):
        buffer.sample()
    with pytest.raises(WrongState, match="empty"):
        buffer[0]
    buffer.extend(line(4))
    with pytest.raises(SpecMismatch, match="lacks 'observation'"):
        buffer.extend(line(4).exclude("observation"))
    with pytest.raises(SpecMismatch, match="has the new column 'more'"):
        buffer.extend(line(4).set("more", torch.zeros(4)))
    with pytest.raises(SpecMismatch, match=r"'step' is float32\[\], the buffer's rows have int64\[\]"):
        buffer.extend(line(4).set("step", torch.zeros(4)))
    with pytest.raises(UsageError, match="add takes a single frame"):
        buffer.extend(line(4)[0])
    with pytest.raises(WrongArgument, match="TensorDicts, tensors or lists of them"):
        buffer.extend([1, 2])
    assert buffer.write_count == 4  # none of this cost a row
    with pytest.raises(WrongState, match="batch_size"):
        ReplayBuffer(storage=LazyTensorStorage(8)).sample()
    with pytest.raises(UsageError, match="max_size must be a whole number >= 1, got 0"):
        LazyTensorStorage(0)
    with pytest.raises(UsageError, match="written in turn"):
        ReplayBuffer(storage=LazyTensorStorage(8), writer=object())
    with pytest.raises(WrongArgument, match="exactly one of"):
        SliceSampler()
    with pytest.raises(UsageError, match="alpha"):
        PrioritizedSampler(8, -1, 0.5)
    with pytest.raises(WrongArgument, match=r"Storage of reap\.data"):
        ReplayBuffer(storage=3)
    sliced = ReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=3), batch_size=4)
    sliced.extend(line(4).select("observation"))
    with pytest.raises(WrongState, match="cannot be cut"):
        sliced.sample()
    with pytest.raises(UsageError, match="where episodes end"):
        sliced.sample(3)
    wrong = ReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(9, 1, 1), batch_size=4)
    wrong.extend(line(4))
    with pytest.raises(UsageError, match="max_capacity is 9"):
        wrong.sample()
    first = LazyMemmapStorage(8, scratch_dir=tmp_path)
    ReplayBuffer(storage=first)
    with pytest.raises(UsageError, match="existsok"):
        ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path))
    ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path, existsok=True))


def test_a_failing_write_leaves_a_hole(monkeypatch):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=2), batch_size=4)
    buffer.extend(line(5))
    rows = buffer._memory.rows
    with monkeypatch.context() as patch:
        patch.setattr(rows, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            buffer.extend(line(3, 5))
    buffer.extend(line(4, 8))
    assert (len(buffer), buffer.write_count) == (9, 9)
    assert buffer._memory.runs.table()[1].tolist() == [5, 4]
    plain = ReplayBuffer.open(*_again(buffer))
    assert set(plain.sample(500)["step"].tolist()) == {0, 1, 2, 3, 4, 8, 9, 10, 11}
    every = ReplayBuffer.open(*_again(buffer), sampler=SamplerWithoutReplacement())
    assert sorted(every.sample(20)["step"].tolist()) == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    by_priority = ReplayBuffer.open(*_again(buffer), sampler=PrioritizedSampler(20, 1, 1))
    assert set(by_priority.sample(500)["step"].tolist()) == {0, 1, 2, 3, 4, 8, 9, 10, 11}


def test_columns_of_any_kind_come_back_apart():
    """Narrow, wide, empty, without NumPy's like: dense tensors in the order of the batch, that share nothing."""
    rows = TensorDict(
        {
            "c": torch.arange(40).to(torch.bfloat16).reshape(20, 2),
            "a": {"y": torch.arange(20), "x": {"flag": torch.arange(20) % 2 == 0, "nothing": torch.zeros(20, 0)}},
            "wide": torch.arange(20 * 100.0).reshape(20, 100),
            "b": torch.arange(20) % 3 == 0,
            "d": torch.arange(40, 80).to(torch.bfloat16).reshape(20, 2),
        },
        batch_size=[20],
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=32)
    buffer.extend(rows)
    sample, info = buffer.sample(return_info=True)
    wanted = rows[info["index"]]
    assert list(sample.keys(True, True)) == list(rows.keys(True, True))
    for key, column in sample.items(True, True):
        assert column.is_contiguous()
        assert column.dtype is wanted[key].dtype
        assert torch.equal(column, wanted[key])
    sample["c"].zero_()
    sample["b"].fill_(True)
    assert [sample["d"]._version, sample["a", "x", "flag"]._version] == [0, 0]  # autograd asks for these
    assert torch.equal(sample["d"], wanted["d"])
    assert torch.equal(sample["a", "x", "flag"], wanted["a", "x", "flag"])


def test_a_sample_stays_as_it_was_when_more_are_drawn():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=64)
    buffer.extend(TensorDict({"number": torch.arange(1000)}, [1000]))
    kept = [buffer.sample(return_info=True) for _ in range(20)]
    for sample, info in kept:
        assert torch.equal(sample["number"], info["index"])
    assert len({tuple(info["index"].tolist()) for _, info in kept}) == 20


STARVING = """
import sys, torch
from tensordict import TensorDict
from reap.data import LazyTensorStorage, ReplayBuffer, SamplesPerInsert
limiter = SamplesPerInsert(1, tolerance=8, min_size=10, timeout=600)
buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8, prefetch=2, limiter=limiter)
buffer.extend(TensorDict({"a": torch.arange(20)}, [20]))
buffer.sample()
while buffer._memory.ring.words[6] < 24:  # so many may be sampled: the thread waits for rows now
    pass
if sys.argv[1] == "told":
    buffer.shutdown()
elif sys.argv[1] == "dropped":
    buffer.__del__()
print("ends")
"""


@pytest.mark.parametrize("how", ["told", "dropped", "forgotten"])
def test_a_thread_that_waits_for_rows_ends_with_the_program(how, programs):
    done = programs.run(STARVING, how)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ends", "")


def test_one_sampler_for_two_buffers_in_two_threads():
    """Nobody draws from a buffer what was drawn for another."""
    sampler = RandomSampler()
    small, large = (
        ReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler, batch_size=64) for n in (10_000, 20_000)
    )
    small.extend(TensorDict({"number": torch.arange(100)}, [100]))
    large.extend(TensorDict({"number": torch.arange(20_000)}, [20_000]))
    over, failed = threading.Event(), []

    def read(buffer, limit):
        while not over.is_set():
            sample, info = buffer.sample(return_info=True)
            if int(info["index"].max()) >= limit or not torch.equal(sample["number"], info["index"]):
                failed.append(limit)
                over.set()

    threads = [threading.Thread(target=read, args=pair) for pair in ((small, 100), (large, 20_000))]
    for thread in threads:
        thread.start()
    over.wait(2)
    over.set()
    for thread in threads:
        thread.join()
    assert not failed


def test_nothing_may_be_written():
    """A batch that a filter left empty costs nothing, before the columns are known and after."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    for shape in ([0], [3, 0], [0, 3]):
        empty = frames(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))
        assert buffer.extend(empty).tolist() == []
        assert (len(buffer), buffer.write_count) == (0, 0)
    buffer.extend(line(3))
    assert buffer.extend(line(0)).tolist() == []
    buffer.extend(line(2, 3))
    assert buffer._memory.runs.table()[1].tolist() == [5]


def test_frames_in_a_list():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    assert buffer.extend([line(1, t)[0] for t in range(3)]).tolist() == [0, 1, 2]
    assert buffer[:]["step"].tolist() == [0, 1, 2]
    plain = ReplayBuffer(storage=LazyTensorStorage(8))
    assert plain.extend([torch.tensor(3.0), torch.tensor(4.0)]).tolist() == [0, 1]
    assert plain[:].tolist() == [3, 4]
    with pytest.raises(WrongArgument, match="lists of them, got list"):
        plain.extend([])


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "x", True])
def test_sizes_that_are_none(wrong):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(line(4))
    for call in (buffer.sample, lambda n: ReplayBuffer(batch_size=n), lambda n: ReplayBuffer(prefetch=n or -1)):
        with pytest.raises(UsageError, match=r"(batch_size|prefetch) must be a whole number >= [01], got"):
            call(wrong)


def test_rows_by_number_are_transformed_like_samples():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8), batch_size=4, transform=lambda rows: rows.set("twice", rows["step"] * 2)
    )
    buffer.extend(line(11))
    assert buffer[:]["twice"].tolist() == [16, 18, 20, 6, 8, 10, 12, 14]
    assert buffer[2]["twice"] == 20
    assert buffer[np.array([[0, 1], [2, 3]])]["twice"].tolist() == [[16, 18], [20, 6]]


@pytest.mark.parametrize(
    ("index", "priority"),
    [([-1], [1.0]), ([100], [1.0]), ([True], [1.0]), ([0.5], [1.0]), ([1], [float("inf")]), ([1, 2, 3], [1.0, 2.0])],
)
def test_wrong_priorities_change_nothing(index, priority):
    memory = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100, 1.0, 0.5), batch_size=50)
    memory.extend(TensorDict({"number": torch.arange(100)}, [100]))
    with pytest.raises(UsageError, match="index must hold|priorit"):
        memory.update_priority(torch.tensor(index), torch.tensor(priority))
    assert len(memory.sample(1000)["number"].unique()) > 50


def test_a_state_that_does_not_fit_loses_nothing(tmp_path):
    memory = ReplayBuffer(storage=LazyMemmapStorage(100, tmp_path), sampler=PrioritizedSampler(100, 1.0, 0.5))
    memory.extend(TensorDict({"number": torch.arange(20)}, [20]))
    other = ReplayBuffer(storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100, 1.0, 0.5))
    other.extend(TensorDict({"word": torch.arange(20)}, [20]))
    plain = ReplayBuffer(storage=LazyTensorStorage(100))
    plain.extend(TensorDict({"number": torch.arange(20)}, [20]))
    for wrong in (other, plain):
        with pytest.raises(UsageError):
            memory.load_state_dict(wrong.state_dict())
        assert sorted(memory[:]["number"].tolist()) == list(range(20))


def test_rows_by_number_are_not_read_while_a_sample_is_drawn():
    """Both read the index of episodes, which brings itself up to date."""
    drawing, go_on = threading.Event(), threading.Event()

    class Slow(RandomSampler):
        def draw(self, *args):
            drawing.set()
            assert go_on.wait(60)
            return super().draw(*args)

    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=Slow(), batch_size=4)
    buffer.extend(TensorDict({"x": torch.arange(10)}, [10]))
    got: list[int] = []
    threads = [threading.Thread(target=buffer.sample), threading.Thread(target=lambda: got.append(int(buffer[3]["x"])))]
    threads[0].start()
    assert drawing.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    assert got == []
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert got == [3]
