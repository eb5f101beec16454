"""check_backend: one behaviour suite for every backend, present and future.

A backend is given as a *maker*: `make(create_env_fn, policy, **options)` returns a collector whose worker steps the
env that `create_env_fn()` makes. Every check builds what it needs, compares whole arrays with `CountingWorld`, and
closes what it opened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from reap.envs import GymEnv, SerialEnv
from reap.errors import ReapError, WrongState
from reap.testing.counting import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.testing.leaks import no_leaks

Make = Callable[..., Any]
LENGTHS = ((3, 1, 5), (2, 2, 7), (4,))


def counting_lanes(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Callable[[], Any]:
    """Return a factory of one env with a CountingEnv per entry of `lengths`."""

    def make() -> Any:
        if len(lengths) == 1:
            return GymEnv(CountingEnv(lengths[0], 0))
        factories = [lambda one=one, lane=lane: GymEnv(CountingEnv(one, lane)) for lane, one in enumerate(lengths)]
        return SerialEnv(len(lengths), factories)

    return make


def _predicted(
    make: Make, frames: int, batches: int, lengths: tuple[tuple[int, ...], ...] = LENGTHS
) -> tuple[Any, CountingWorld]:
    """Return a collector of `batches` batches of `frames` frames, and the world that predicts them."""
    collector = make(counting_lanes(lengths), EchoPolicy(), frames_per_batch=frames, total_frames=frames * batches)
    return collector, CountingWorld(lengths)


def exact_lanes(make: Make) -> None:
    """Many batches of several lanes equal the predicted ones, bit for bit."""
    collector, world = _predicted(make, 12, 200)
    count = 0
    for batch in collector:
        assert_same(batch, world.batch(4))
        assert batch.names[-1] == "time"
        count += 1
    assert count == 200 == len(collector)
    collector.shutdown()


def exact_single(make: Make) -> None:
    """A single env's batches have no lane dimension."""
    collector, world = _predicted(make, 7, 10, ((3, 1, 5),))
    for batch in collector:
        assert batch.batch_size == torch.Size([7])
        assert_same(batch, world.batch(7))
    collector.shutdown()


def batches_are_kept(make: Make) -> None:
    """Batches that the consumer keeps never change, however many there are; dropped ones are recycled."""
    collector, world = _predicted(make, 6, 20)
    kept = list(collector)
    for batch in kept:
        assert_same(batch, world.batch(2))
    collector.shutdown()


def consumer_may_write(make: Make) -> None:
    """What the consumer writes into a batch does not appear in any later one."""
    collector, world = _predicted(make, 6, 20)
    for batch in collector:
        assert_same(batch, world.batch(2))
        for value in batch.values(True, True):
            value.fill_(1)
    collector.shutdown()


def iterated_again(make: Make) -> None:
    """Leaving the loop and entering it again loses no frame and repeats none."""
    collector, world = _predicted(make, 6, 9)
    seen = 0
    while seen < 9:
        for batch in collector:
            assert_same(batch, world.batch(2))
            seen += 1
            if seen % 2 == 0:
                break
    assert collector.next() is None
    collector.shutdown()


def weights_are_explicit(make: Make) -> None:
    """A weight update changes the acting weights and the version; later frames show both."""
    policy = EchoPolicy()
    collector = make(counting_lanes(), policy, frames_per_batch=6, total_frames=-1, track_policy_version=True)
    first = collector.next()
    assert (first["policy_version"] == 0).all()
    with torch.no_grad():
        policy.weight.fill_(2.0)
    collector.update_policy_weights_(policy)
    for _ in range(20):  # asynchronous backends may still deliver older frames, which must have the older version
        batch = collector.next()
        weight = torch.where(batch["policy_version"] == 0, 1.0, 2.0).unsqueeze(-1)
        mix = torch.tensor([3.0, 5.0, 7.0])
        want = (batch["observation"] * mix).sum(-1, keepdim=True) * weight
        assert torch.equal(batch["action"], want)
        assert torch.equal(batch["policy_version"], batch["next", "policy_version"])
        if (batch["policy_version"] == 1).all():
            break
    assert (batch["policy_version"] == 1).all()
    collector.shutdown()


def seeds_reproduce(make: Make) -> None:
    """The same seed gives the same frames again, from the first frame on."""

    def run() -> Any:
        collector = make(lambda: GymEnv("CartPole-v1"), None, frames_per_batch=50, total_frames=100)
        following = collector.set_seed(7)
        batches = [b.clone() for b in collector]
        collector.shutdown()
        return following, torch.cat(batches)

    (next_a, a), (next_b, b) = run(), run()
    assert next_a == next_b
    assert (a == b).all()
    import gymnasium as gym

    first, _ = gym.make("CartPole-v1").reset(seed=7)
    assert np.array_equal(a["observation"][0].numpy(), first), "the first frame does not belong to the seeded state"


def errors_name_their_place(make: Make) -> None:
    """An error of an env is raised with lane, step and the original exception; the collector is closed."""

    class Boom(CountingEnv):
        def step(self, action: Any) -> Any:
            if self.episode == 1 and self.t == 1:
                raise OverflowError("boom")
            return super().step(action)

    def lanes() -> Any:
        return SerialEnv(2, [lambda: GymEnv(CountingEnv((9,), 0)), lambda: GymEnv(Boom((3,), 1))])

    collector = make(lanes, EchoPolicy(), frames_per_batch=8, total_frames=-1)
    world = CountingWorld([(9,), (3,)])
    kept = collector.next()
    try:
        collector.next()
    except ReapError as error:
        assert "lane 1" in str(error) and "boom" in str(error), str(error)
        assert "step 0" in str(error), str(error)
        assert isinstance(error.__cause__, OverflowError)
    else:
        raise AssertionError("an env that raises went unnoticed")
    assert_same(kept, world.batch(4))
    closed_says_so(collector)
    collector.shutdown()


def closed_says_so(collector: Any) -> None:
    """A closed collector refuses to be used, and says why."""
    for use in (collector.next, lambda: next(iter(collector)), lambda: collector.set_seed(0)):
        try:
            use()
        except WrongState as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("a closed collector was used without an error")


def shuts_down(make: Make) -> None:
    """Shutdown is idempotent, also after `with` and in the middle of an iteration, and leaves nothing behind."""
    with no_leaks():
        collector = make(counting_lanes(), EchoPolicy(), frames_per_batch=6, total_frames=-1)
        next(iter(collector))
        collector.shutdown()
        collector.shutdown()
        closed_says_so(collector)
        with make(counting_lanes(), EchoPolicy(), frames_per_batch=6, total_frames=-1) as collector:
            collector.next()
        closed_says_so(collector)
        for _ in make(counting_lanes(), EchoPolicy(), frames_per_batch=6, total_frames=12):
            pass
        del collector, _  # a batch that is kept would keep its memory


def state_goes_on(make: Make) -> None:
    """A state dict restores counters and weights, and no trajectory id is used twice."""
    policy = EchoPolicy()
    one = make(counting_lanes(), policy, frames_per_batch=6, total_frames=18)
    before = one.next()
    one.update_policy_weights_({"weight": torch.tensor(3.0), "mix": torch.tensor([3.0, 5.0, 7.0])})
    state = one.state_dict()
    one.shutdown()
    two = make(counting_lanes(), EchoPolicy(), frames_per_batch=6, total_frames=18)
    two.load_state_dict(state)
    rest = list(two)
    assert len(rest) == 2
    ids, over = before["collector", "traj_ids"], before["next", "done"][..., -1, 0]
    opened = {*ids[..., -1][~over].tolist()}  # these may continue
    assert {*rest[0]["collector", "traj_ids"].reshape(-1).tolist()}.isdisjoint({*ids.reshape(-1).tolist()} - opened)
    assert torch.equal(
        rest[0]["action"], (rest[0]["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1, keepdim=True) * 3.0
    )
    two.shutdown()


backend_checks: dict[str, Callable[[Make], None]] = {
    check.__name__: check
    for check in (
        exact_lanes,
        exact_single,
        batches_are_kept,
        consumer_may_write,
        iterated_again,
        weights_are_explicit,
        seeds_reproduce,
        errors_name_their_place,
        shuts_down,
        state_goes_on,
    )
}


def check_backend(make: Make) -> None:
    """Run every check; the first that fails names the broken promise.

    >>> check_backend(lambda env, policy, **options: Collector(env, policy, **options))
    """
    for name, check in backend_checks.items():
        try:
            check(make)
        except Exception as error:
            raise AssertionError(f"{name}: {check.__doc__} — {error}") from error
