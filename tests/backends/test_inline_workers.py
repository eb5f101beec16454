"""Workers in this process: the same data as in theirs, and debuggers see them."""

from __future__ import annotations

import io
import pdb
import sys
import threading
from functools import partial

import gymnasium
import pytest
import torch

from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedCollector, RayCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv, ParallelEnv, SerialEnv
from reap.errors import UsageError, WorkerRaised, WrongState
from reap.testing import CountingEnv, EchoPolicy, backend_checks


class Noisy(torch.nn.Module):
    """Draws from torch's global generator, as most policies do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self.linear(observation)).sample()


def assert_same(got, wanted):
    """Every entry, bit for bit."""
    assert set(got.keys(True, True)) == set(wanted.keys(True, True))
    for key in wanted.keys(True, True):
        assert torch.equal(got[key], wanted[key]), key


def cart_pole():
    return GymEnv("CartPole-v1")


@pytest.mark.parametrize("name", backend_checks)
def test_the_suite_of_every_backend(name):
    backend_checks[name](
        lambda env, policy, **options: MultiSyncCollector([env], policy, cat_results=0, workers="inline", **options)
    )


@pytest.mark.parametrize("options", [{}, {"init_random_frames": 60, "cat_results": 0}, {"trajs_per_batch": 4}])
def test_bit_for_bit_what_processes_make(options):
    """Also random actions, sampled policies, and after new weights and a new seed."""
    policy = Noisy()

    def collected(**more):
        before = torch.get_rng_state()
        with MultiSyncCollector([cart_pole] * 2, policy, frames_per_batch=60, **options, **more) as collector:
            collector.set_seed(7)
            batches = [collector.next() for _ in range(3)]
            with torch.no_grad():
                changed = {name: value + 0.5 for name, value in policy.state_dict().items()}
            collector.update_policy_weights_(changed)
            batches += [collector.next() for _ in range(2)]
            collector.set_seed(8)
            batches.append(collector.next())
        assert torch.equal(before, torch.get_rng_state()), "the generators of this process are left alone"
        return batches

    for there, here in zip(collected(), collected(workers="inline"), strict=True):
        assert_same(here, there)


def test_workers_that_go_their_own_way_take_turns():
    with MultiAsyncCollector(
        [cart_pole] * 3, Noisy(), frames_per_batch=30, total_frames=270, workers="inline"
    ) as collector:
        assert [batch.origin.worker for batch in collector] == [0, 1, 2] * 3
        assert "worker 0 (in this process)" in collector.stacks()


def test_many_envs_with_one_policy():
    envs = [partial(GymEnv, CountingEnv((3, 5), lane)) for lane in range(3)]
    with AsyncBatchedCollector(envs, EchoPolicy(), frames_per_batch=30, workers="inline") as collector:
        assert collector.next()["env_index"].tolist() == [0, 1, 2] * 10


@pytest.mark.parametrize("kind", [partial(DistributedCollector, sync=True), partial(RayCollector, sync=True)])
def test_workers_of_other_machines_are_here_too(kind):
    """Nothing is started anywhere."""
    with MultiSyncCollector([cart_pole] * 2, Noisy(), frames_per_batch=40) as collector:
        collector.set_seed(3)
        there = collector.next()
        weights = collector.get_cached_weights()
    with kind([cart_pole] * 2, Noisy(), frames_per_batch=40, workers="inline") as collector:
        collector.update_policy_weights_(weights)
        collector.set_seed(3)
        here = collector.next()
    assert_same(here.exclude("policy_version"), there.exclude("policy_version"))


@pytest.mark.parametrize("background", [False, True])
def test_into_a_buffer(background):
    def filled(**more):
        buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=8)
        with MultiSyncCollector(
            [partial(GymEnv, CountingEnv((3, 5), lane)) for lane in range(2)],
            EchoPolicy(),
            frames_per_batch=20,
            total_frames=100,
            replay_buffer=buffer,
            **more,
        ) as collector:
            if background and more:
                collector.start()
                while collector.is_running():
                    pass
            else:
                for _ in collector:
                    pass
        return buffer[:]

    there, here = filled(), filled(workers="inline")
    assert len(here) == len(there) == 100
    place = torch.tensor([10_000.0, 100.0, 1.0])  # lane, episode, step
    there, here = (rows[torch.argsort(rows["observation"] @ place)] for rows in (there, here))
    assert_same(here, there)


class Broken(gymnasium.Wrapper):
    """Raises in its fifth step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 5:
            raise RuntimeError("a wheel fell off")
        return super().step(action)


def broken():
    return GymEnv(Broken(gymnasium.make("CartPole-v1")))


def test_an_error_has_its_own_frames():
    """So that `pdb.pm()` shows the variables of the env."""
    collector = MultiSyncCollector([cart_pole, broken], None, frames_per_batch=40, workers="inline")
    with pytest.raises(WorkerRaised, match=r"worker 1 \(in this process\).*a wheel fell off") as caught:
        collector.next()
    for traceback in (caught.value.__traceback__, caught.value.__cause__.__traceback__):
        frame = traceback
        while frame.tb_next is not None:
            frame = frame.tb_next
        assert frame.tb_frame.f_locals["self"].steps == 5
    assert collector.closed


class BrokenPolicy(torch.nn.Module):
    """Raises when it is called for the fifth time."""

    steps = 0

    def forward(self, observation):
        self.steps += 1
        if self.steps == 5:
            raise RuntimeError("a wheel fell off")
        return torch.zeros(*observation.shape[:-1], 2)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("of", ["env", "policy"])
def test_post_mortem_is_in_the_users_own_code(lanes, of, monkeypatch, capsys):
    env, policy = (broken, None) if of == "env" else (cart_pole, BrokenPolicy())
    with pytest.raises(WorkerRaised) as caught:
        Collector(SerialEnv(lanes, env), policy, frames_per_batch=40, capture=False).next()
    for name, value in (("exc", caught.value), ("value", caught.value), ("traceback", caught.tb)):
        monkeypatch.setattr(sys, f"last_{name}", value, raising=False)  # as `python -i` leaves them
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 'steps', self.steps\nq\n"))
    pdb.pm()
    assert "('steps', 5)" in capsys.readouterr().out


def test_one_that_fails_is_started_again_here():
    with MultiSyncCollector(
        [cart_pole, broken], None, frames_per_batch=8, total_frames=80, workers="inline", on_failure="restart"
    ) as collector:
        assert sum(batch["collector", "cut"].any().item() for batch in collector) > 0
        assert collector.stats()["restarts"] > 0


class Interrupted(gymnasium.Wrapper):
    """Somebody presses Ctrl-C in its fifth step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 5:
            raise KeyboardInterrupt
        return super().step(action)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, AsyncBatchedCollector])
def test_ctrl_c_comes_at_once_and_it_goes_on(kind):
    envs = [cart_pole, lambda: GymEnv(Interrupted(gymnasium.make("CartPole-v1")))]
    with kind(envs, Noisy(), frames_per_batch=40, workers="inline") as collector:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                collector.next()
        for _ in range(3):
            assert collector.next().numel() == 40


def test_a_debugger_stops_in_the_env(monkeypatch):
    class Stopping(gymnasium.Wrapper):
        steps = 0

        def step(self, action):
            self.steps += 1
            if self.steps == 3:
                breakpoint()
            return super().step(action)

    told = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("p 'steps', self.steps\nc\n"), stdout=told, nosigint=True)
    monkeypatch.setattr(sys, "breakpointhook", lambda: debugger.set_trace(sys._getframe(1)))
    with MultiSyncCollector(
        [lambda: GymEnv(Stopping(gymnasium.make("CartPole-v1"))), cart_pole],
        None,
        frames_per_batch=20,
        workers="inline",
    ) as collector:
        assert collector.next().shape == (2, 10)
    assert "('steps', 3)" in told.getvalue()


class Stops(gymnasium.Wrapper):
    def step(self, action):
        breakpoint()
        return super().step(action)


class StopsWithPdb(gymnasium.Wrapper):
    def step(self, action):
        pdb.set_trace()
        return super().step(action)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Stops, r"breakpoint\(\) at .*test_inline_workers\.py:\d+"), (StopsWithPdb, r"just before .*workers\.py:\d+")],
)
@pytest.mark.parametrize("lanes", [False, True], ids=["worker", "lanes"])
def test_in_a_process_it_says_where_and_what_to_do(kind, said, lanes):
    def make():
        return GymEnv(kind(gymnasium.make("CartPole-v1")))

    if lanes:
        collector = Collector(ParallelEnv(1, make), None, frames_per_batch=4)
    else:
        collector = MultiSyncCollector([make], None, frames_per_batch=4)
    with pytest.raises(WrongState, match=said + r".*workers='inline'"):
        collector.next()


def test_where_another_debugger_is_chosen_it_is_asked(monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")  # none at all
    with MultiSyncCollector([lambda: GymEnv(Stops(gymnasium.make("CartPole-v1")))], None, frames_per_batch=4) as c:
        assert c.next().numel() == 4


INSIDE, CLOSED = threading.Event(), threading.Event()


class Patient(gymnasium.Wrapper):
    """Says when it is in a step; its steps never end an episode."""

    def step(self, action):
        sys.modules[__name__].INSIDE.set()
        return super().step(action)

    def close(self):
        sys.modules[__name__].CLOSED.set()
        super().close()


def test_closed_from_another_thread_in_the_middle():
    """It is broken off after the step it is in, however long the rollout is."""
    INSIDE.clear()
    CLOSED.clear()
    collector = MultiSyncCollector(
        [lambda: GymEnv(Patient(gymnasium.make("CartPole-v1")))], None, frames_per_batch=10**6, workers="inline"
    )
    thread = threading.Thread(target=lambda: INSIDE.wait() and collector.shutdown())
    thread.start()
    with pytest.raises(WrongState, match="closed while it was collecting"):
        collector.next()
    thread.join()
    assert CLOSED.is_set()


@pytest.mark.parametrize("wrong", ["process", True, 1])
def test_other_words_are_refused(wrong):
    with pytest.raises(UsageError, match=r"workers must be .*'inline'.*got"):
        MultiSyncCollector([cart_pole], None, frames_per_batch=4, workers=wrong)


def test_processes_inside_workers_are_refused():
    with pytest.raises(UsageError, match="collector_class"):
        DistributedCollector(
            [cart_pole], None, frames_per_batch=4, collector_class="sync", num_workers_per_collector=2, workers="inline"
        )


def test_a_collector_without_workers_takes_it_too():
    with Collector(SerialEnv(2, cart_pole), None, frames_per_batch=4, workers="inline") as collector:
        assert collector.next().numel() == 4
        assert collector.stacks() == {"worker 0 (in this process)": "(no batch is being collected)"}
