"""A buffer's dump: whole or the one before, whatever happens; and nothing is loaded that is not as it was written."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from reap._system import checked_files
from reap.buffers import snapshots
from reap.buffers.samplers import Sampler
from reap.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from reap.errors import CorruptState, SpecMismatch, UsageError, WrongArgument
from tests.worlds.buffers import frames, line, on_a_small_disk

SIZE = 12
SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=2),
    "priorities": lambda: PrioritizedSampler(SIZE, 0.7, 0.5),
    "rounds": SamplerWithoutReplacement,
}


def make(kind="priorities", rows=None):
    buffer = ReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=SAMPLERS[kind](), batch_size=4)
    if rows is not None:
        buffer.extend(rows)
        buffer.sample()
        buffer.update_priority(torch.arange(3), torch.tensor([0.5, 2.0, 1.0]))
    return buffer


def fingerprint(buffer):
    """All there is to know about a buffer, as plain values."""

    def plain(value):
        if isinstance(value, dict):
            return {str(key): plain(inside) for key, inside in value.items()}
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return plain({**buffer.state_dict(), "words": None, "sampler": None}), buffer[:]["step"].tolist()


def short(n=9):
    return line(n, 100).select("step", ("next", "done"))


@pytest.fixture
def dumped(tmp_path):
    """A dump, and a buffer with other rows that is to keep them."""
    make(rows=short()).dumps(tmp_path)
    return tmp_path, make(rows=short(5))


def test_any_byte_that_changed_is_found_and_changes_nothing(dumped):
    path, buffer = dumped
    before, chance = fingerprint(buffer), random.Random(0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in [*range(0, len(whole), 1 + len(whole) // 400), *range(len(whole) - 70, len(whole))]:
            wrong = bytearray(whole)
            wrong[at] ^= 1 << chance.randrange(8)
            file.write_bytes(wrong)
            with pytest.raises(CorruptState):
                buffer.loads(path)
        for length in {0, 1, len(whole) - 1, *chance.sample(range(len(whole)), 50)}:
            file.write_bytes(whole[:length])
            with pytest.raises(CorruptState):
                buffer.loads(path)
        for more in (b"\n", b"x", whole):
            file.write_bytes(whole + more)
            with pytest.raises(CorruptState):
                buffer.loads(path)
        file.write_bytes(whole)
    assert fingerprint(buffer) == before
    buffer.loads(path)
    assert buffer[:]["step"].tolist() == list(range(100, 109))


def test_a_missing_file_is_told(dumped):
    path, buffer = dumped
    before = fingerprint(buffer)
    (rows,) = path.glob("rows-*.pt")
    rows.unlink()
    with pytest.raises(CorruptState, match=f"missing.*{rows.name}"):
        buffer.loads(path)
    (path / "buffer.json").unlink()
    with pytest.raises(UsageError, match="holds no dumped buffer"):
        buffer.loads(path)
    assert fingerprint(buffer) == before


JUNK = [None, True, -1, 2**80, 1.5, float("nan"), "x", [], {}, torch.zeros(3), torch.zeros(9, dtype=torch.int64)]
JUNK += [torch.full((9,), 7, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.float64) - 1, torch.tensor(3)]


def places(state, at=()):
    """Where something can be wrong in a state."""
    for key, value in state.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from places(value, (*at, key))


def changed(state, place, value, *, drop=False):
    """A copy of a state with something else in one place."""
    copy = dict(state)
    if len(place) > 1:
        copy[place[0]] = changed(state[place[0]], place[1:], value, drop=drop)
    elif drop:
        del copy[place[0]]
    else:
        copy[place[0]] = value
    return copy


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_state_that_is_malformed_anywhere_changes_nothing(kind):
    state, buffer = make(kind, short()).state_dict(), make(kind, short(5))
    before = fingerprint(buffer)
    for place in list(places(state)):
        wrong = [changed(state, place, None, drop=True)]
        wrong += [changed(state, place, junk) for junk in JUNK if place[0] != "rows" or len(place) == 1 or _other(junk)]
        for one in wrong:
            if place[0] == "sampler" and isinstance(one.get("sampler"), dict) and _fits(one["sampler"], place[1:]):
                continue
            with pytest.raises((CorruptState, SpecMismatch, UsageError)):
                buffer.load_state_dict(one)
            assert len(buffer) == 5, place
    for wrong in (None, 3, [state]):
        with pytest.raises(WrongArgument, match="what state_dict"):
            buffer.load_state_dict(wrong)
    assert fingerprint(buffer) == before


def _fits(state, place):
    """What is no junk for a sampler: it has no state, or that is a value like any other."""
    likes = {"largest": "1.5", "known": "True", "ran_out": "True", "left": repr(torch.zeros(9, dtype=torch.int64))}
    return not place or (place[0] in state and repr(state[place[0]]) == likes.get(place[0]))


def _other(junk):
    """Not by chance a column like those that are there."""
    return not isinstance(junk, torch.Tensor) or junk.shape != (9,) or junk.dtype is not torch.int64


def test_a_column_that_is_short_is_refused():
    state, buffer = make(rows=short()).state_dict(), make(rows=short(5))
    state["rows"]["step",] = state["rows"]["step",][:7]
    with pytest.raises(CorruptState, match="column 'step' must have 9 rows, got"):
        buffer.load_state_dict(state)
    assert len(buffer) == 5


class Hostile:
    """Runs a command where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_nothing_that_is_read_is_executed(tmp_path):
    mark, path, buffer = tmp_path / "executed", tmp_path / "dump", make(rows=short(5))
    make(rows=short()).dumps(path)
    (rows,) = path.glob("rows-*.pt")
    about = json.loads((path / "buffer.json").read_text().splitlines()[0])
    whole = torch.load(rows, weights_only=True)
    for place in [(), ("rows",), ("marks",), ("sampler",), ("sampler", "tree"), ("rows", ("step",))]:
        torch.save(changed(whole, place, Hostile(mark)) if place else Hostile(mark), rows)
        data = rows.read_bytes()
        text = json.dumps({**about, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        (path / "buffer.json").write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
        with pytest.raises(CorruptState):
            buffer.loads(path)
        # As before there were checksums.
        (path / "rows.pt").write_bytes(data)
        (path / "buffer.json").write_text(json.dumps({k: about[k] for k in ("capacity", "words", "count", "sampled")}))
        with pytest.raises(CorruptState):
            buffer.loads(path)
    import pickle

    for name in ("buffer.json", rows.name):
        (path / name).write_bytes(pickle.dumps(Hostile(mark)))
        with pytest.raises(CorruptState):
            buffer.loads(path)
    assert not mark.exists()
    torch.save(Hostile(mark), rows)
    torch.load(rows, weights_only=False)  # it would have been seen
    assert mark.exists()
    assert len(buffer) == 5


def test_the_file_a_dump_names_is_its_own(tmp_path):
    path, buffer = tmp_path / "dump", make(rows=short(5))
    make(rows=short()).dumps(path)
    about = json.loads((path / "buffer.json").read_text().splitlines()[0])
    text = json.dumps({**about, "file": "../elsewhere.pt"})
    (path / "buffer.json").write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    with pytest.raises(CorruptState, match="not part of a dump"):
        buffer.loads(path)


def test_dumps_from_before_there_were_checksums_are_read(tmp_path):
    state = make(rows=short()).state_dict()
    torch.save({name: state[name] for name in ("rows", "marks", "sampler")}, tmp_path / "rows.pt")
    about = {name: state[name] for name in ("capacity", "words", "count", "sampled")}
    (tmp_path / "buffer.json").write_text(json.dumps(about))
    buffer = make()
    buffer.loads(tmp_path)
    assert buffer[:]["step"].tolist() == list(range(100, 109))
    (tmp_path / "mine.pt").write_text("not a dump's")
    buffer.dumps(tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert (len(names), names[:2], names[2][:5]) == (3, ["buffer.json", "mine.pt"], "rows-")
    make().loads(tmp_path)


def test_what_a_users_sampler_raises_costs_nothing():
    class Odd(Sampler):
        seen = 0

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state, shift=0):
            self.seen = state["seen"]
            if self.seen == 13:
                raise ArithmeticError("unlucky")

    buffer = ReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=Odd())
    fresh = ReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=Odd())
    buffer.extend(short())
    state = {**buffer.state_dict(), "sampler": {"seen": 13}}
    for one in (buffer, fresh):
        with pytest.raises(ArithmeticError):
            one.load_state_dict(state)
        assert one.sampler.seen == 0
    assert len(buffer) == 9
    assert not fresh.initialized


def test_rows_that_were_being_written_are_holes_afterwards():
    """Not rows of whatever was in that place before."""
    old, new = make("slices", line(12)), make("slices")
    new.extend(frames(torch.full((12,), 9), torch.arange(900, 912)))
    first, entry = old._memory.ring.reserve(5)
    assert first == 12
    state = old.state_dict()
    assert len(state["marks"]) == 7
    old._memory.ring.abandon(entry)
    new.load_state_dict(state)
    assert len(new) == 7
    assert new[:]["step"].tolist() == [*range(5, 12)]
    assert new.extend(frames(torch.full((3,), 5), torch.arange(3))).tolist() == [0, 1, 2]
    assert new[:]["step"].tolist() == [0, 1, 2, *range(5, 12)]


def versioned(version):
    buffer = ReplayBuffer(storage=LazyTensorStorage(50))
    buffer.extend(TensorDict({"version": torch.full((30,), version)}, [30]))
    return buffer


def version_in(path):
    """Which dump is there: it must be one, and whole."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(50))
    buffer.loads(path)
    (found,) = buffer[:]["version"].unique().tolist()
    return found


def test_whatever_line_it_is_killed_at_the_dump_before_or_after_is_there(tmp_path):
    """What is on the disk at each line of the writing is what a process killed there leaves."""
    path, left = tmp_path / "dump", tmp_path / "left"
    versioned(1).dumps(path)
    moments = 0

    def look(frame, event, _):
        nonlocal moments
        if frame.f_code.co_filename not in (snapshots.__file__, checked_files.__file__):
            return None
        if event == "line" and (frame.f_code.co_name != "write" or moments % 5 == 0):
            shutil.copytree(path, left / str(moments))
        moments += event == "line"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        versioned(2).dumps(path)
    finally:
        sys.settrace(before)
    found = [version_in(left / name) for name in sorted(os.listdir(left), key=int)]
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert len(os.listdir(left / "60")) == 3  # the new one's file is there, and not in force
    shutil.copytree(left / "60", path, dirs_exist_ok=True)
    versioned(3).dumps(path)
    assert len(os.listdir(path)) == 2  # what the killed one left is gone
    assert version_in(path) == 3


KILLED = """
import itertools, sys, torch
from tests.buffers.test_dumps import versioned

for version in itertools.count(1):
    versioned(version).dumps(sys.argv[1])
    print(version, flush=True)
"""


def test_a_process_killed_while_it_dumps_leaves_a_dump(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        told = [int(process.stdout.readline()) for _ in range(5)][-1]
        process.kill()
        told = max([told, *(int(line) for line in process.stdout if line.endswith("\n"))])
    assert version_in(tmp_path) in (told, told + 1)


def test_on_a_full_disk_the_dump_before_is_whole(tmp_path):
    """However much room is left: for nothing, for half of the rows, for the rows and not for what names them."""
    program = """
def versioned(version):
    buffer = ReplayBuffer(storage=LazyTensorStorage(50))
    buffer.extend(TensorDict({"version": torch.full((50, 100), version)}, [50]))
    return buffer

path, rest = disk + "/dump", disk + "/rest"
versioned(0).dumps(path)
before, refusals = 0, 0
for version in range(1, 12):
    size = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with open(rest, "wb") as file:
        file.truncate(0)
        os.posix_fallocate(file.fileno(), 0, size - (version - 1) * 8192 or 1)
    names = sorted(os.listdir(path))
    try:
        versioned(version).dumps(path)
        before = version
    except NoSpace as error:
        assert path in str(error) and "the previous dump is complete" in str(error)
        assert sorted(os.listdir(path)) == names
        refusals += 1
    os.unlink(rest)
    buffer = ReplayBuffer(storage=LazyTensorStorage(50))
    buffer.loads(path)
    assert (buffer[:]["version"] == before).all()
assert refusals > 4 and before == 11, (refusals, before)
print("ends")
"""
    on_a_small_disk(program, tmp_path / "disk")


def test_a_dump_that_cannot_be_written_says_where(tmp_path):
    (tmp_path / "file").write_text("")
    buffer = make(rows=short())
    with pytest.raises(UsageError, match=r"path='.*file'.*cannot be written"):
        buffer.dumps(tmp_path / "file")
    with pytest.raises(UsageError, match=r"path='.*file' holds no dumped buffer"):
        buffer.loads(tmp_path / "file")
    for wrong in (3, None, np.zeros(3), b"x"):
        for verb in (buffer.dumps, buffer.loads):
            with pytest.raises(WrongArgument, match="path must be the name of a directory, got"):
                verb(wrong)
    with pytest.raises(UsageError, match="path must be the name of a directory"):
        buffer.dumps("a\0b")


def test_a_buffer_that_was_emptied_has_a_state():
    buffer, other = make(rows=short()), make(rows=short(5))
    buffer.empty()
    other.load_state_dict(buffer.state_dict())
    assert (len(other), other.write_count) == (0, 0)
    other.extend(short(3))
    assert len(other[torch.zeros(0, dtype=torch.int64)]) == 0
    assert other[:]["step"].tolist() == [100, 101, 102]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_state_can_be_saved_and_loaded_any_number_of_times(kind):
    """Positions stay small enough to count: each time they move on by a lap or two, and do not double."""
    buffer = make(kind, short())
    rows = buffer[:]
    for _ in range(100):
        buffer.load_state_dict(buffer.state_dict())
    assert (buffer[:] == rows).all()
    assert buffer.state_dict()["words"]["head"] < 1000 * buffer.storage.max_size
