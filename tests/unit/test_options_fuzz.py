"""Whatever options are given, in whatever combination: they are taken, or refused by an error that names one of them.

Nothing is started: whoever gets as far as starting workers, or making lanes, has accepted everything.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import warnings

import numpy as np
import pytest
import torch

from reap.backends.inline import InlineBackend
from reap.backends.worker_backend import WorkerBackend
from reap.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from reap.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from reap.collectors.distributed.remote import FarCollector, RemotePlacement
from reap.collectors.options import Options
from reap.envs import AsyncEnvPool, ParallelEnv, SerialEnv
from reap.envs.parallel.process_lanes import ProcessLanes
from reap.envs.parallel.thread_workers import ThreadWorkers
from reap.errors import ReapError
from reap.modules import InferenceServer
from reap.testing import CountingEnv, EchoPolicy

SETS, SEED = 300, 0


def counting(**_):
    return CountingEnv()


FRAMES = {"frames_per_batch": 8}
# What is always given, and what else the constructor has that its signature does not show.
CONSTRUCTORS = {
    "Collector": (Collector, (counting, EchoPolicy()), FRAMES, ("backend", "num_collectors", "sync")),
    "MultiSyncCollector": (MultiSyncCollector, ([counting] * 2, EchoPolicy()), FRAMES, ()),
    "MultiAsyncCollector": (MultiAsyncCollector, ([counting] * 2, EchoPolicy()), FRAMES, ()),
    "AsyncCollector": (AsyncCollector, (counting, EchoPolicy()), FRAMES, ("num_workers",)),
    "AsyncBatchedCollector": (AsyncBatchedCollector, ([counting] * 2, EchoPolicy()), FRAMES, ()),
    "DistributedCollector": (DistributedCollector, ([counting] * 2, EchoPolicy()), FRAMES, ()),
    "RPCCollector": (RPCCollector, ([counting] * 2, EchoPolicy()), FRAMES, ()),
    "RayCollector": (RayCollector, ([counting] * 2, EchoPolicy()), FRAMES, ()),
    "ParallelEnv": (ParallelEnv, (2, counting), {}, ()),
    "AsyncEnvPool": (AsyncEnvPool, ([counting] * 2,), {}, ()),
    "SerialEnv": (SerialEnv, (2, counting), {}, ()),
    "Evaluator": (Evaluator, (counting, EchoPolicy()), {}, ()),
    "InferenceServer": (InferenceServer, (EchoPolicy(),), {}, ()),
}
ODD = (
    None, True, False, 0, 1, -1, 3, 64, 2**31, 2**70, 0.5, 1e6, 1e300, math.nan, math.inf, -math.inf, 1j, "", "x", "3",
    "cuda:99", "meta", b"x", [], [1], [1, 2], (), {}, {"a": 1}, {1: 2}, set(), object, len, (lambda: None),
    np.int64(3), np.float64("nan"), np.array([1, 2]), torch.tensor(3), torch.tensor([1.0, 2.0]), range(3),
)  # fmt: skip


class Accepted(BaseException):
    """Nothing was refused."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def started(*_, **__):
        raise Accepted

    monkeypatch.setattr(InlineBackend, "start", lambda self: self._plan.make_env() and started())
    monkeypatch.setattr(WorkerBackend, "start", started)
    monkeypatch.setattr(ProcessLanes, "__init__", started)
    monkeypatch.setattr(ThreadWorkers, "__init__", started)
    for kind in (ProcessLanes, ThreadWorkers):
        monkeypatch.setattr(kind, "__del__", lambda self: None)


def outcome(make, arguments, options):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make(*arguments, **options)
    except Accepted:
        return None
    except ReapError as error:
        return error
    for close in ("close", "shutdown"):
        getattr(made, close, lambda: None)()
    return None


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_refusal_names_the_argument(name):
    if name.startswith("Ray"):
        pytest.importorskip("ray")
    make, arguments, usual, more = CONSTRUCTORS[name]
    given = [p for p in inspect.signature(make).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names = {p.name for p in given[len(arguments) :]} | set(more)
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(make.__init__, follow_wrapped=False).parameters.values()):
        names |= {"no_such_option"}
    if issubclass(make, FarCollector):
        (placement,) = {one for one in RemotePlacement.__subclasses__() if one.__module__ == make.__module__}
        names |= {field.name for field in dataclasses.fields(Options)} | set(placement.own)
    names = sorted(names)
    draw = random.Random(SEED)
    wrong, refused = [], 0
    for number in range(SETS):
        # Each by itself at first, then several at once.
        chosen = (
            [names[number % len(names)]]
            if number < SETS // 2
            else draw.sample(names, draw.randint(2, min(4, len(names))))
        )
        options = {one: draw.choice(ODD) for one in chosen}
        told = {one: repr(value)[:40] for one, value in options.items()}
        try:
            error = outcome(make, arguments, {**usual, **options})
        except Exception as bare:
            wrong.append(f"{told}: {type(bare).__name__}({str(bare)[:100]!r})")
            continue
        refused += error is not None
        named = {*chosen, *(str(key) for value in options.values() if isinstance(value, dict) for key in value)}
        if error is not None and not any(one in str(error) for one in named):
            wrong.append(f"{told}: names none of them: {str(error)[:160]!r}")
    assert not wrong, f"{len(wrong)} of {SETS}:\n" + "\n".join(wrong)
    assert refused > SETS / 4, "nothing is checked here"
