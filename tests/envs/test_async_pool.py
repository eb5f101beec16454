"""AsyncEnvPool by hand: sent to one by one, answering in the order in which they are ready."""

from __future__ import annotations

import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from reap.envs import AsyncEnvPool, GymEnv, TorchCartPole, TorchEnv
from reap.errors import (
    NotReady,
    SpecMismatch,
    UsageError,
    WorkerDied,
    WorkerRaised,
    WorkerSilent,
    WrongArgument,
    WrongState,
)
from reap.seeding import chain
from reap.testing import CountingEnv, FaultyEnv, no_leaks
from tests.worlds.waiting import until

BACKENDS = ("threading", "multiprocessing")
LENGTHS = ((3, 1), (2,), (4,), (2, 5))


def makers(lengths=LENGTHS):
    return [lambda one=one, lane=lane: GymEnv(CountingEnv(one, lane)) for lane, one in enumerate(lengths)]


def actions(values, **more):
    return TensorDict({"action": torch.tensor(values, dtype=torch.float32)[:, None], **more}, [len(values)])


@pytest.mark.parametrize(
    ("backend", "per_worker", "threads"),
    [("threading", 1, False), ("threading", 2, False), ("multiprocessing", 3, False), ("multiprocessing", 2, True)],
)
def test_every_env_goes_its_own_way(backend, per_worker, threads):
    """Random subsets are sent and received; each env reports what CountingEnv predicts, reset by hand when it ends."""
    rng = np.random.default_rng(0)
    with no_leaks():
        pool = AsyncEnvPool(makers(), backend=backend, envs_per_worker=per_worker, worker_threads=threads)
        pool.async_reset_send()
        td = pool.async_reset_recv(min_get=4)
        assert sorted(td["env_index"].tolist()) == [0, 1, 2, 3]
        at = dict.fromkeys(range(4), (0, 0))
        idle, away, over = {0, 1, 2, 3}, set(), set()
        for _ in range(150):
            to_step = [int(n) for n in rng.permutation(sorted(idle - over))[: rng.integers(0, 3)]]
            if to_step:
                pool.async_step_send(actions(to_step, mark=torch.tensor(to_step)), env_index=to_step)
                idle, away = idle - {*to_step}, away | {*to_step}
            for lane in sorted(over):
                pool.async_reset_send(env_index=lane)
                first = pool.async_reset_recv(env_index=lane)
                at[lane] = at[lane][0] + 1, 0
                assert first["observation"].tolist() == [[lane, at[lane][0], 0]]
            over.clear()
            if not away:
                continue
            back = pool.async_step_recv(min_get=int(rng.integers(1, min(3, len(away)) + 1)), max_get=3)
            for frame in back.unbind(0):
                lane = int(frame["env_index"])
                episode, t = at[lane]
                length = LENGTHS[lane][episode % len(LENGTHS[lane])]
                assert frame["mark"] == lane == frame["action"]
                assert frame["next", "observation"].tolist() == [lane, episode, t + 1]
                assert frame["next", "reward"].tolist() == [t + 1 + lane / 8]
                assert bool(frame["next", "done"]) is (t + 1 == length)
                assert bool(frame["next", "terminated"]) is (t + 1 == length and episode % 2 == 0)
                at[lane] = episode, t + 1
                away, idle = away - {lane}, idle | {lane}
                if t + 1 == length:
                    over.add(lane)
        assert sum(episode for episode, _ in at.values()) > 12
        pool.close()
        del pool  # whoever keeps it keeps the memory it shares


def test_answers_come_in_the_order_in_which_they_are_ready():
    gates = [threading.Event() for _ in range(3)]

    class Gated(CountingEnv):
        def step(self, action):
            gates[self.lane].wait(20)
            return super().step(action)

    with AsyncEnvPool([lambda n=n: GymEnv(Gated((9,), n)) for n in range(3)]) as pool:
        pool.reset()
        pool.async_step_send(actions([0, 1, 2]))
        for lane in (2, 0, 1):
            gates[lane].set()
            assert pool.async_step_recv()["env_index"].tolist() == [lane]


def test_threads_of_a_process_step_at_the_same_time():
    class Meets(CountingEnv):
        def step(self, action):
            vars(threading).setdefault("_reap_test", threading.Barrier(2)).wait(10)  # one for all envs of a process
            return super().step(action)

    make = [lambda n=n: GymEnv(Meets((9,), n)) for n in range(2)]
    with AsyncEnvPool(make, backend="multiprocessing", envs_per_worker=2, worker_threads=True) as pool:
        pool.reset()
        assert pool.step(actions([0, 0]))["next", "observation"][:, 2].tolist() == [1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_together(backend):
    with AsyncEnvPool(makers(), backend=backend, envs_per_worker=2) as pool:
        assert pool.batch_size == torch.Size([4])
        pool.set_seed(5)
        td = pool.reset()
        assert td["observation"].tolist() == [[n, 0, 0] for n in range(4)]
        td = pool.step(pool.rand_action(td))
        assert td["next", "observation"].tolist() == [[n, 0, 1] for n in range(4)]
        assert td["next", "done"].shape == (4, 1)


def test_wrong_calls_say_what_to_do():
    with AsyncEnvPool(makers()) as pool:
        with pytest.raises(WrongState, match=r"no env has begun an episode; call reset\(\)"):
            pool.async_step_send(actions([0, 1, 2, 3]))
        pool.reset()
        with pytest.raises(WrongState, match="async_step_recv waits for 1 answers, but 0 were sent for"):
            pool.async_step_recv()
        pool.async_step_send(actions([0.0]), env_index=1)
        with pytest.raises(WrongState, match="env 1 has not been received since it was sent to"):
            pool.async_step_send(actions([0.0]), env_index=1)
        with pytest.raises(WrongState, match="waits for 2 answers, but 1 were sent for"):
            pool.async_step_recv(min_get=2)
        with pytest.raises(WrongState, match=r"reset\(\) is for all envs, but env 1 has not been received"):
            pool.reset()
        pool.async_step_recv()
        with pytest.raises(UsageError, match=r"env_index must hold numbers between 0 and 3, got \[4\]"):
            pool.async_step_send(actions([0.0]), env_index=4)
        with pytest.raises(UsageError, match="names an env twice"):
            pool.async_step_send(actions([0.0, 0.0]), env_index=[1, 1])
        with pytest.raises(SpecMismatch, match=r"2 envs are sent to, but the tensordict is \[1\]"):
            pool.async_step_send(actions([0.0]), env_index=[0, 1])
        with pytest.raises(WrongArgument, match="a step needs 'action'"):
            pool.async_step_send(TensorDict({"act": torch.zeros(1, 1)}, [1]), env_index=0)
    with pytest.raises(WrongState, match="closed"):
        pool.reset()
    with pytest.raises(WrongArgument, match="create_env_fns must be a list"):
        AsyncEnvPool(makers()[0])
    with pytest.raises(UsageError, match="did you mean 'threading'"):
        AsyncEnvPool(makers(), backend="thread")
    with pytest.raises(UsageError, match="envs_per_worker must be a whole number ≥ 1, got 0"):
        AsyncEnvPool(makers(), envs_per_worker=0)
    with pytest.raises(UsageError, match="worker_threads are threads of processes"):
        AsyncEnvPool(makers(), worker_threads=True)
    with pytest.raises(SpecMismatch, match="workers 0 and 1 have different envs"):
        AsyncEnvPool([lambda: GymEnv("CartPole-v1"), lambda: GymEnv("Pendulum-v1")])
    with AsyncEnvPool([lambda: TorchEnv(TorchCartPole(3))]) as pool:
        pool.reset()
        with pytest.raises(UsageError, match="envs 0 to 2 can only be stepped together"):
            pool.async_step_send(TensorDict({"action": torch.zeros(1, dtype=torch.int64)}, [1]), env_index=0)


WHERE = [("threading", False), ("multiprocessing", False), ("multiprocessing", True)]


@pytest.mark.parametrize(("backend", "threads"), WHERE)
def test_recv_gives_up_in_time_and_loses_nothing(backend, threads, tmp_path):
    """Env 1 answers when a file appears, wherever it runs; what env 0 answered waits for the next call."""
    gate = tmp_path / "go"

    class Gated(CountingEnv):
        def _wait(self):
            until(lambda: self.lane != 1 or gate.exists())

        def step(self, action):
            self._wait()
            return super().step(action)

        def reset(self, **options):
            if self.episode >= 0:
                self._wait()
            return super().reset(**options)

    make = [lambda n=n: GymEnv(Gated((9,), n)) for n in range(2)]
    with no_leaks():
        pool = AsyncEnvPool(make, backend=backend, worker_threads=threads)
        pool.reset()
        for what in ("step", "reset"):
            recv = getattr(pool, f"async_{what}_recv")
            getattr(pool, f"async_{what}_send")(actions([0, 1]))
            with pytest.raises(NotReady, match=rf"async_{what}_recv waited 0\.3 s for 2 answers, 1 came") as caught:
                recv(min_get=2, timeout=0.3)
            assert isinstance(caught.value, TimeoutError)
            with pytest.raises(NotReady, match="for 1 answers, 0 came"):
                recv(env_index=1, timeout=0)
            assert recv(timeout=0)["env_index"].tolist() == [0]
            with pytest.raises(WrongState, match="env 1 has not been received since it was sent to"):
                pool.async_reset_send(env_index=1)
            gate.touch()
            back = recv(timeout=30)
            assert back["env_index"].tolist() == [1]
            gate.unlink()
        assert back["observation"].tolist() == [[1, 1, 0]]
        with pytest.raises(UsageError, match="timeout must be a number of seconds ≥ 0, got -1"):
            pool.async_step_recv(timeout=-1)
        pool.close()
        del pool, recv, caught


@pytest.mark.parametrize("threads", [False, True])
def test_a_pool_nobody_holds_ends(threads):
    with no_leaks():
        pool = AsyncEnvPool(makers(), backend="multiprocessing", envs_per_worker=2, worker_threads=threads)
        pool.reset()
        pool.async_step_send(actions([0, 1, 2, 3]))
        del pool


@pytest.mark.parametrize("threads", [False, True])
def test_a_death_ends_a_wait_before_its_time(threads):
    with no_leaks():
        pool = AsyncEnvPool(faulty("kill"), backend="multiprocessing", worker_threads=threads)
        pool.reset()
        pool.step(actions([0, 0, 0]))
        pool.async_step_send(actions([0, 0, 0]))
        with pytest.raises(WorkerDied, match=r"of lane 1 .*SIGKILL"):
            pool.async_step_recv(min_get=3, timeout=60)
        pool.close()
        del pool


@pytest.mark.parametrize(("backend", "per_worker", "threads"), [(b, n, t) for (b, t) in WHERE for n in (1, 2)])
def test_seeds_go_to_their_envs(backend, per_worker, threads):
    """CartPole's first observation follows from its seed; an env without one, and without `set_seed`, is unlike it."""

    def first(seed):
        return gym.make("CartPole-v1").reset(seed=seed)[0].tolist()

    make = [lambda: GymEnv("CartPole-v1")] * 4
    with AsyncEnvPool(make, backend=backend, envs_per_worker=per_worker, worker_threads=threads) as pool:
        pool.async_reset_send(env_index=[2, 0], seeds=[7, 8])
        pool.async_reset_send(env_index=[1])
        got = {int(td["env_index"]): td["observation"].tolist() for td in pool.async_reset_recv(min_get=3).unbind(0)}
        assert (got[2], got[0]) == (first(7), first(8))
        assert got[1] not in (first(7), first(8))
        following = pool.set_seed(3)
        seeds, after = chain(3, 4)
        assert following == after
        pool.async_reset_send(env_index=[1])
        assert pool.async_reset_recv()["observation"].tolist() == [first(seeds[1])]
        td = pool.reset()  # the other three have theirs left
        assert [td["observation"][n].tolist() == first(seeds[n]) for n in range(4)] == [True, False, True, True]
        pool.async_reset_send(seeds=torch.tensor([5, 5, 5, 5]))
        assert pool.async_reset_recv(min_get=4)["observation"].tolist() == [first(5)] * 4
        with pytest.raises(UsageError, match="seeds must hold one number for each env that is sent to, 4 here; got 1"):
            pool.async_reset_send(seeds=3)
        with pytest.raises(WrongArgument, match="seed must be a whole number"):
            pool.async_reset_send(env_index=0, seeds=-3)


def test_a_seed_begins_an_env_anew_that_has_begun_already():
    """An env that ended waits with its first observation; a seed is not to be lost on it."""
    with AsyncEnvPool(makers(((1,),))) as pool:
        pool.reset()
        assert pool.step(actions([0]))["next", "done"].item()
        pool.async_reset_send()
        assert pool.async_reset_recv()["observation"].tolist() == [[0, 1, 0]]
        assert pool.step(actions([0]))["next", "done"].item()
        pool.async_reset_send(seeds=[4])  # CountingEnv counts from 0 again
        assert pool.async_reset_recv()["observation"].tolist() == [[0, 0, 0]]


# ---- faults ---------------------------------------------------------------------------------------------------------


def faulty(fault, where="step"):
    """Two good envs, and between them one that fails at its second step."""
    good = makers(((9,), (9,)))
    return [good[0], lambda: GymEnv(FaultyEnv(CountingEnv((9,), 1), at=1, fault=fault, where=where)), good[1]]


def until_it_fails(pool):
    pool.reset()
    for _ in range(3):
        pool.step(actions([0, 0, 0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_that_raises_is_named(backend):
    with no_leaks():
        pool = AsyncEnvPool(faulty("raise"), backend=backend)
        with pytest.raises(WorkerRaised, match=r"of lane 1.*lane 1.*an injected fault") as caught:
            until_it_fails(pool)
        assert isinstance(caught.value.__cause__, RuntimeError)
        pool.close()
        del pool, caught


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_that_cannot_be_built_is_named(backend):
    def broken():
        raise OSError("no such simulator")

    with no_leaks(), pytest.raises(WorkerRaised, match="no such simulator"):
        AsyncEnvPool([*makers(), broken], backend=backend)


def test_a_process_that_dies_is_named():
    with no_leaks():
        pool = AsyncEnvPool(faulty("kill"), backend="multiprocessing")
        with pytest.raises(WorkerDied, match=r"of lane 1 .*SIGKILL"):
            until_it_fails(pool)
        pool.close()
        del pool


def test_a_process_that_hangs_is_named_while_the_others_go_on():
    with no_leaks():
        pool = AsyncEnvPool(faulty("hang"), backend="multiprocessing", timeout=2.0)
        pool.reset()
        pool.step(actions([0, 0, 0]))
        pool.async_step_send(actions([0, 0, 0]))
        with pytest.raises(WorkerSilent, match=r"(?s)of lane 1 .*sent nothing for 2\.0 s .*faults\.py"):
            while True:  # the others answer whatever the one does
                lanes = pool.async_step_recv()["env_index"].tolist()
                assert 1 not in lanes
                pool.async_step_send(actions([0.0] * len(lanes)), env_index=lanes)
        pool.close()
        del pool


def test_a_thread_that_hangs_is_named_and_left_behind_with_a_warning(monkeypatch):
    import reap.envs.parallel.thread_workers as module

    monkeypatch.setattr(module, "DEADLINE", 0.2)
    stuck = threading.Event()

    class Stuck(CountingEnv):
        def step(self, action):
            stuck.wait(60)
            return super().step(action)

    pool = AsyncEnvPool([makers()[0], lambda: GymEnv(Stuck((9,), 1))], timeout=1.0)
    pool.reset()
    pool.async_step_send(actions([0, 0]))
    assert pool.async_step_recv()["env_index"].tolist() == [0]
    with pytest.raises(WorkerSilent, match=r"(?s)of lane 1 .*sent nothing for 1\.0 s .*stuck\.wait"):
        pool.async_step_recv()
    with pytest.warns(RuntimeWarning, match=r"(?s)of lane 1 .*is still inside its env"):
        pool.close()
    stuck.set()


def test_what_was_sent_is_returned_even_if_the_caller_changes_it_later():
    with AsyncEnvPool(makers()) as pool:
        td = pool.reset().set("action", torch.ones(4, 1))
        pool.async_step_send(td)
        td["action"] += 1
        td["observation"].zero_()
        back = pool.async_step_recv(min_get=4)
        assert back["action"].tolist() == [[1.0]] * 4
        assert back["observation"][:, 0].tolist() == back["env_index"].tolist()


def test_random_actions_for_some_envs():
    with AsyncEnvPool(makers()) as pool:
        some = pool.rand_action(pool.reset()[1:3])
        assert some["action"].shape == (2, 1)
        pool.async_step_send(some)
        assert sorted(pool.async_step_recv(min_get=2)["env_index"].tolist()) == [1, 2]
        assert pool.rand_action()["action"].shape == (4, 1)


def test_the_observation_spec_has_only_what_users_get():
    with AsyncEnvPool(makers()) as pool:
        assert list(pool.observation_spec) == ["observation"]
        assert "_" not in repr(pool).partition("batch_size")[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_and_maybe_reset(backend):
    """Each env reports what CountingEnv predicts, and goes on in its next episode by itself."""
    with AsyncEnvPool(makers(), backend=backend, envs_per_worker=2) as pool:
        td = pool.reset()
        at = [(0, 0)] * 4
        for _ in range(9):
            stepped, td = pool.step_and_maybe_reset(pool.rand_action(td))
            for lane, (episode, t) in enumerate(at):
                assert stepped["next", "observation"][lane].tolist() == [lane, episode, t + 1]
                over = t + 1 == LENGTHS[lane][episode % len(LENGTHS[lane])]
                assert bool(stepped["next", "done"][lane]) is over
                at[lane] = (episode + 1, 0) if over else (episode, t + 1)
            assert td["observation"].tolist() == [[lane, *where] for lane, where in enumerate(at)]
            assert not td["done"].any()
            assert "reward" not in td
            assert td["env_index"].tolist() == [0, 1, 2, 3]
