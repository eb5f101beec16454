"""A failure is written down (`failure_dir=`) and happens again, in a fresh env, at the same step."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
from torch import nn

from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.envs import GymEnv, ParallelEnv, SerialEnv
from reap.errors import CorruptState, ReapError, SpecMismatch, UsageError, WorkerRaised, WrongState
from reap.testing import EchoPolicy, replay_failure


class Cracks(gym.Env):
    """A walk by its own random numbers and the actions; it fails where both have led it far enough."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (3,))
    action_space = gym.spaces.Box(-1e6, 1e6, (1,))
    wrong = False

    def __init__(self, edge=9.0):
        self.edge, self.at, self.t = edge, 0.0, 0

    def _seen(self):
        return [self.at, self.t, 0.0] if not (self.wrong and self.at > self.edge) else [self.at, self.t]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.t = float(self.np_random.normal()), 0
        return self._seen(), {}

    def step(self, action):
        self.at += float(self.np_random.normal()) + 0.1 * float(action[0])
        self.t += 1
        if self.at > self.edge and not self.wrong:
            raise OverflowError(f"over the edge at {self.at!r}")
        return self._seen(), 1.0, self.t >= 12, False, {}


class Wrong(Cracks):
    wrong = True


class BadReset(Cracks):
    def __init__(self):
        super().__init__(1e9)
        self.episodes = 0

    def reset(self, **options):
        self.episodes += 1
        if self.episodes == 4:
            raise OverflowError("no more")
        return super().reset(**options)


class Pushes(nn.Module):
    def forward(self, observation):
        return torch.randn(*observation.shape[:-1], 1)


def lanes(kind=Cracks):
    return lambda: SerialEnv(2, lambda: GymEnv(kind()))


def failing(collector):
    collector.set_seed(3)
    with pytest.raises(ReapError) as caught:
        for _ in range(1000):
            collector.next()
    assert caught.value.failure_file is not None
    assert f"replay_failure({caught.value.failure_file!r})" in str(caught.value)
    return caught.value.with_traceback(None)  # whose frames would keep the env


MAKERS = {
    "single": lambda **options: Collector(lanes()(), Pushes(), frames_per_batch=20, **options),
    "factory": lambda **options: Collector(lanes(), Pushes(), frames_per_batch=20, **options),
    "cut": lambda **options: Collector(lanes(), Pushes(), frames_per_batch=20, max_frames_per_traj=11, **options),
    "sync": lambda **options: MultiSyncCollector([lanes()] * 2, Pushes(), frames_per_batch=40, **options),
    "async": lambda **options: MultiAsyncCollector([lanes()] * 2, Pushes(), frames_per_batch=20, **options),
}


class Endless(Cracks):
    def step(self, action):
        seen, reward, _, _, info = super().step(action)
        return seen, reward, False, False, info


@pytest.mark.parametrize("steps", [1, 5])
def test_a_failure_in_an_episode_that_was_resumed(tmp_path, steps):
    make = lambda: Collector(lanes(Endless), Pushes(), frames_per_batch=2 * steps, failure_dir=tmp_path)  # noqa: E731
    with make() as collector:
        collector.set_seed(3)
        collector.next()
        state = collector.state_dict()
    collector = make()
    collector.load_state_dict(state)
    with pytest.raises(ReapError) as caught:
        for _ in range(1000):
            collector.next()
    error = caught.value.with_traceback(None)
    with pytest.raises(WorkerRaised, match="over the edge") as again:
        replay_failure(error.failure_file, trusted=True)
    assert str(again.value.__cause__) == str(error.__cause__), "the very same number"


@pytest.mark.parametrize("kind", MAKERS)
def test_it_happens_again(kind, tmp_path):
    error = failing(MAKERS[kind](failure_dir=tmp_path / "there"))
    about = torch.load(error.failure_file, weights_only=True)
    assert about["lane"] == error.lane
    assert about["worker"] == (None if kind in ("single", "factory", "cut") else int(error.worker.split()[0]))
    assert 0 < about["steps"] <= 12
    for _ in range(2):  # as often as one likes
        with pytest.raises(WorkerRaised, match="over the edge") as again:
            replay_failure(error.failure_file, trusted=True)
        assert str(again.value.__cause__) == str(error.__cause__), "the very same number"


def test_a_frame_that_is_refused(tmp_path):
    error = failing(Collector(lanes(Wrong), Pushes(), frames_per_batch=20, failure_dir=tmp_path))
    with pytest.raises(type(error)) as again:
        replay_failure(error.failure_file, trusted=True)
    assert isinstance(error, (SpecMismatch, WorkerRaised))
    assert again.value.args == error.args


def test_a_reset_that_raises(tmp_path):
    error = failing(Collector(lanes(BadReset), Pushes(), frames_per_batch=20, failure_dir=tmp_path))
    with pytest.raises(WorkerRaised, match="no more"):
        replay_failure(error.failure_file, trusted=True)


def test_an_env_in_a_process_begins_with_its_seed(tmp_path):
    env = ParallelEnv(2, lambda: GymEnv(Cracks(2.0)))
    collector = Collector(env, Pushes(), frames_per_batch=20, failure_dir=tmp_path)
    error = failing(collector)
    about = torch.load(error.failure_file, weights_only=True)
    make = lambda: SerialEnv(2, lambda: GymEnv(Cracks(2.0)))  # noqa: E731
    with pytest.raises(WorkerRaised if about["exact"] else ReapError, match="over the edge"):
        replay_failure(error.failure_file, trusted=True, env=make)


def test_a_repaired_env_does_not_fail(tmp_path, monkeypatch):
    error = failing(MAKERS["single"](failure_dir=tmp_path))
    monkeypatch.setattr(Cracks, "step", lambda self, action: (self._seen(), 1.0, False, False, {}))
    with pytest.raises(WrongState, match="the env raised nothing this time; the recorded failure was: .*over the edge"):
        replay_failure(error.failure_file, trusted=True)


def test_what_is_collected_is_the_same(tmp_path):
    batches = []
    for options in ({}, {"failure_dir": tmp_path}):
        torch.manual_seed(0)
        with Collector(SerialEnv(2, lambda: GymEnv("CartPole-v1")), None, frames_per_batch=400, **options) as c:
            c.set_seed(1)
            batches.append(c.next().clone())
    assert (batches[0] == batches[1]).all()
    assert not list(tmp_path.iterdir())


def test_a_full_or_forbidden_place_does_not_hide_the_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    collector = MAKERS["single"](failure_dir=tmp_path / "file" / "below")
    collector.set_seed(3)
    with pytest.raises(WorkerRaised, match="over the edge") as caught:
        for _ in range(1000):
            collector.next()
    assert caught.value.failure_file is None
    assert "could not be written there" in caplog.text


def test_wrong_calls(tmp_path):
    with pytest.raises(UsageError, match="failure_dir"):
        MAKERS["single"](failure_dir=3)
    with pytest.raises(UsageError, match="asynchronous lanes"):
        AsyncBatchedCollector([lambda: GymEnv(Cracks())] * 2, EchoPolicy(), frames_per_batch=8, failure_dir=tmp_path)
    error = failing(MAKERS["single"](failure_dir=tmp_path))
    with pytest.raises(UsageError, match="trusted=True"):
        replay_failure(error.failure_file)
    (tmp_path / "no.pt").write_bytes(b"no")
    with pytest.raises(CorruptState, match="is not a failure"):
        replay_failure(tmp_path / "no.pt", trusted=True)
    with pytest.raises(FileNotFoundError):
        replay_failure(tmp_path / "none.pt", trusted=True)
