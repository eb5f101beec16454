"""Several workers of each library on the same envs, and what their batches have in common.

    world(w)  ──►  torchrl MultiSync / MultiAsync  ──►  batches ┐
              └─►  reap MultiSync / MultiAsync     ──►  batches ┴─ identical, but for the numbers of trajectories

TorchRL's workers draw these numbers from one counter, in the order in which they happen to be scheduled; so both sides
are renumbered by first appearance before they are compared: what is left is who shares a number with whom.

TorchRL's workers are forked here: they start in a second, where spawned ones take up to ten.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch

from tests.worlds import pairs
from tests.worlds.pairs import LIBRARIES, actor, assert_identical, env_makers, make

for _module in (pairs, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(_module)  # reap's workers need not import them, and torchrl with them
IDS = ("collector", "traj_ids")


def team(library: str, workers: int = 2, lanes: int | None = None, kind: str = "counting", **wrap: Any) -> list[Any]:
    """Env factories, one per worker; every lane of every worker is another one."""
    each = lanes or 1
    return [
        env_makers(lambda lane, w=w, **_: make(kind, w * each + lane), lanes, **wrap)[library] for w in range(workers)
    ]


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """TorchRL starts its processes as torch.multiprocessing is told to; reap does not look at it."""
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        torch.multiprocessing.set_start_method(before, force=True)


def build(library: str, what: str, envs: Any, policy: Any = None, **options: Any) -> Any:
    """A collector of this library, by its name."""
    make_one = getattr(LIBRARIES[library].collectors, what)
    own = {k: v[library] if isinstance(v, pairs.Each) else v for k, v in options.items()}
    with forking() if library == "torchrl" else contextlib.nullcontext():
        return make_one(envs, policy, **own)


@contextlib.contextmanager
def both(
    what: str,
    *,
    workers: int = 2,
    lanes: int | None = None,
    kind: str = "counting",
    policy: Callable[[], Any] | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """A collector of each library; closed at the end."""
    made: dict[str, Any] = {}
    policy = policy or (lambda: actor(kind))
    try:
        for library in LIBRARIES:
            envs = team(library, workers, lanes, kind)
            torch.manual_seed(0)
            one = "AsyncCollector" in what and not what.startswith("Multi")
            acting = None if "policy_factory" in options else policy()
            made[library] = build(
                library, what, envs[0] if one else envs, acting, **{"frames_per_batch": 12, **options}
            )
        yield made
    finally:
        for collector in made.values():
            collector.shutdown()


def take(collector: Any, count: int | None = None) -> list[Any]:
    """So many batches (None: all of them), copied."""
    out = []
    if count == 0:
        return out
    for batch in collector:
        out.append(batch.clone())
        if len(out) == count:
            break
    return out


def renumbered(batches: list[Any], *, anew: bool = False) -> list[Any]:
    """With trajectories numbered in the order in which they appear; -1, and 0 where the mask is False, stay.

    `anew` begins with 0 in each batch.
    """
    names: dict[int, int] = {}
    for batch in batches:
        names = {} if anew else names
        ids = batch.get(IDS, None)
        if ids is None:
            continue
        mask = batch.get(("collector", "mask"), torch.ones_like(ids, dtype=torch.bool))
        flat = ids.reshape(-1).tolist()
        valid = mask.reshape(-1).tolist()
        new = [names.setdefault(i, len(names)) if ok and i >= 0 else i for i, ok in zip(flat, valid)]
        batch.set(IDS, torch.tensor(new).reshape(ids.shape))
    return batches


def assert_same_runs(made: dict[str, Any], *, anew: bool = False) -> list[Any]:
    """All batches of both, compared in everything but the numbers of trajectories; returns reap's."""
    want, got = (renumbered(take(made[name]), anew=anew) for name in ("torchrl", "reap"))
    assert len(got) == len(want), f"{len(got)} batches, TorchRL {len(want)}"
    assert got, "no batch came"
    for i, (ours, theirs) in enumerate(zip(got, want)):
        assert_identical(ours, theirs, f"batch {i}")
    return got


def said(call: Callable[[], Any]) -> list[str]:
    """The UserWarnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
