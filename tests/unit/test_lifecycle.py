"""The life of a collector: what closes an env, and what an error, an interrupt or another thread may not break."""

from __future__ import annotations

import pytest
import torch

from reap._foreign import torch_internals
from reap.collectors import Collector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv
from reap.errors import UsageError, WorkerRaised, WrongState
from reap.testing import CountingEnv, EchoPolicy


def test_a_failed_construction_closes_the_env():
    env = CountingEnv()
    with pytest.raises(UsageError):
        Collector(env, lambda observation: None, frames_per_batch=3)
    assert env.closed


def test_an_interrupt_while_a_rollout_is_finished():
    c = Collector(CountingEnv((50,)), EchoPolicy(), frames_per_batch=4)
    c.next()
    finish = c._backend.worker.ledger.close

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    c._backend.worker.ledger.close = interrupted
    with pytest.raises(KeyboardInterrupt):
        c.next()
    c._backend.worker.ledger.close = finish
    batch = c.next()
    assert batch["observation"][:, 1:].tolist() == [[1, 0], [1, 1], [1, 2], [1, 3]]  # a new episode …
    assert batch["collector", "traj_ids"].unique().tolist() == [1]  # … with an id of its own


def test_an_interrupt_when_a_batch_was_made(monkeypatch):
    c = Collector(CountingEnv((50,)), EchoPolicy(), frames_per_batch=4)
    c.next()

    usual = torch_internals.set_grad_enabled

    def interrupted(graded):
        usual(graded)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(torch_internals, "set_grad_enabled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            c.next()
    assert c.next()["observation"][:, 2].tolist() == [4, 5, 6, 7]  # nobody is collecting, and no frame was lost


def test_one_thread_at_a_time():
    c = Collector(CountingEnv(), EchoPolicy(), frames_per_batch=3)
    errors = []

    def inside(batch):
        try:
            c.next()
        except RuntimeError as error:
            errors.append(str(error))

    c.post_collect_hook = inside
    c.next()
    assert "collecting already" in errors[0]


def test_an_error_in_close_does_not_hide_the_first():
    class Both(CountingEnv):
        def step(self, action):
            raise OSError("the reason")

        def close(self):
            raise ConnectionError("a consequence")

    with pytest.raises(WorkerRaised, match="the reason"):
        Collector(Both(), EchoPolicy(), frames_per_batch=3).next()


def test_a_collector_that_closes_an_env_says_so():
    env = GymEnv(CountingEnv())
    c = Collector(env, EchoPolicy(), frames_per_batch=3, max_frames_per_traj=2)
    assert not env.is_closed
    c.shutdown()
    assert env.is_closed
    with pytest.raises(WrongState, match="GymEnv is closed; make a new one"):
        env.reset()


def test_a_collector_that_failed_stays_so_when_it_is_closed_again(monkeypatch):
    """Ctrl-C while it is closed: whoever closes what is left does not undo the failure."""

    class Fails(CountingEnv):
        left = 5

        def step(self, action):
            self.left -= 1
            if not self.left:
                raise OSError("the reason")
            return super().step(action)

    def interrupted(*_):
        raise KeyboardInterrupt

    c = Collector(Fails((50,)), EchoPolicy(), frames_per_batch=4)
    c.next()
    with monkeypatch.context() as patch:
        patch.setattr(c._life, "break_off_other_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            c.next()
    c.shutdown()
    assert c.state_dict()["frames"] == 4


@pytest.mark.parametrize("into", ["consumer", "buffer", "buffer that is written"])
def test_an_interrupt_in_a_hook_does_not_post_process_twice(into):
    """What `postproc` changes in place it changes once: the finished batch is kept until it is delivered."""
    buffer = None if into == "consumer" else ReplayBuffer(storage=LazyTensorStorage(100))
    calls = []

    def ten_times(batch):
        batch["next", "reward"] *= 10
        return batch

    def hook(batch):
        calls.append(batch)
        if len(calls) == 1:
            raise KeyboardInterrupt

    c = Collector(CountingEnv((5,)), EchoPolicy(), frames_per_batch=4, postproc=ten_times, replay_buffer=buffer)
    plain = Collector(CountingEnv((5,)), EchoPolicy(), frames_per_batch=4).next()["next", "reward"]
    if into == "buffer that is written":
        sink, write = c._pipeline.sink, c._pipeline.sink.write
        sink.write = lambda batch, worker: hook(batch) or write(batch, worker)
    else:
        c.post_collect_hook = hook
    with pytest.raises(KeyboardInterrupt):
        c.next()
    batch = c.next()
    rewards = batch["next", "reward"] if buffer is None else buffer[:]["next", "reward"]
    assert torch.equal(rewards.reshape(-1), 10 * plain.reshape(-1))
    c.shutdown()


def test_listeners_see_the_batch_after_a_loaded_state():
    seen = []
    c = Collector(CountingEnv((50,)), EchoPolicy(), frames_per_batch=4)
    c._listeners.add(seen.append)
    state = c.state_dict()
    first = c.next()
    c.load_state_dict(state)
    second = c.next()
    assert [id(batch) for batch in seen] == [id(first), id(second)]
    c.shutdown()
