"""AsyncBatchedCollector: each option does what it says, in threads and in processes."""

from __future__ import annotations

import inspect
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import distributions, nn

from reap.collectors import AsyncBatchedCollector, RandomPolicy
from reap.core.policies.exploration import ExplorationType
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv
from reap.errors import UsageError, WrongArgument
from reap.testing import CountingEnv, EchoPolicy, no_leaks


class Says(CountingEnv):
    """Says in its reward who steps it: the process, or the thread."""

    def __init__(self, lane, thread):
        super().__init__((4,), lane)
        self._thread = thread

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        who = threading.get_native_id() if self._thread else os.getpid()
        return observation, float(who), terminated, truncated, info


def who_steps(thread, count=4, **options):
    """For each env: who has stepped it."""
    make = [lambda n=n: GymEnv(Says(n, thread)) for n in range(count)]
    with no_leaks():
        with AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=40 * count, **options) as c:
            batch, found = c.next(), []
            while len(set(batch["env_index"].tolist())) < count:  # a busy machine may leave one out for long
                batch = torch.cat([batch, c.next()])
            for n in range(count):
                (one,) = set(batch["next", "reward"][batch["env_index"] == n].flatten().tolist())
                found.append(int(one))
        del c, batch
    return found


@pytest.mark.parametrize(
    ("options", "workers", "here"),
    [
        ({"env_backend": "threading"}, 4, True),
        ({}, 4, True),
        ({"env_backend": "threading", "envs_per_worker": 2}, 2, True),
        ({"env_backend": "multiprocessing"}, 4, False),
        ({"backend": "multiprocessing", "envs_per_worker": 2}, 2, False),
        ({"env_backend": "multiprocessing", "envs_per_worker": 3}, 2, False),  # as many in each
        ({"env_backend": "multiprocessing", "envs_per_worker": 4}, 1, False),
    ],
)
def test_who_steps_the_envs(options, workers, here):
    threads = options.get("env_backend", "threading") == "threading" and "backend" not in options
    found = who_steps(threads, **options)
    assert len(set(found)) == workers
    assert [found.index(one) for one in found] == sorted(found.index(one) for one in found), "neighbours share a worker"
    assert threading.get_native_id() not in found
    if not threads:
        assert (os.getpid() in found) is here


def test_repr_adds_up():
    envs = [lambda: GymEnv("CartPole-v1")] * 3
    with AsyncBatchedCollector(envs, RandomPolicy(), frames_per_batch=200, total_frames=1000) as collector:
        text = repr(collector)
    assert "AsyncBatchedCollector(3 envs, as they are ready: 200 frames per batch, 1,000 in all (5 batches);" in text
    assert "×" not in text


def test_the_signature_shows_every_option():
    names = list(inspect.signature(AsyncBatchedCollector).parameters)
    assert names[:4] == ["create_env_fn", "policy", "frames_per_batch", "max_batch_size"]
    assert {"env_backend", "envs_per_worker", "postproc", "replay_buffer"} <= {*names}
    assert "compact_obs" not in names


def test_threads_of_a_process():
    where = {"env_backend": "multiprocessing", "envs_per_worker": 4, "worker_threads": True}
    assert len(set(who_steps(True, **where))) == 4
    (pid,) = set(who_steps(False, **where))
    assert pid != os.getpid()


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_exploration(backend):
    def policy():
        return ProbabilisticTensorDictSequential(
            TensorDictModule(nn.Linear(3, 1), ["observation"], ["loc"]),
            TensorDictModule(lambda loc: torch.full_like(loc, 0.5), ["loc"], ["scale"]),
            ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=distributions.Normal),
        )

    make = [lambda n=n: GymEnv(CountingEnv((3,), n)) for n in range(3)]
    for kind, same in ((ExplorationType.DETERMINISTIC, True), (ExplorationType.RANDOM, False), (None, False)):
        options = {} if kind is None else {"exploration_type": kind}
        with AsyncBatchedCollector(make, policy(), frames_per_batch=30, env_backend=backend, **options) as c:
            batch = c.next()
        assert torch.equal(batch["action"], batch["loc"]) is same


def test_a_factory_is_called_once_here_and_its_policy_learns():
    made = []

    def factory():
        made.append((os.getpid(), EchoPolicy()))
        return made[-1][1]

    make = [lambda n=n: GymEnv(CountingEnv((3,), n)) for n in range(3)]
    with AsyncBatchedCollector(
        make, policy_factory=factory, frames_per_batch=30, env_backend="multiprocessing", envs_per_worker=3
    ) as c:
        first = c.next()
        assert [pid for pid, _ in made] == [os.getpid()]
        assert torch.equal(first["action"], EchoPolicy()(first["observation"]))
        weights = EchoPolicy()
        with torch.no_grad():
            weights.weight.fill_(5.0)
        c.update_policy_weights_(weights)
        c.next()
        batch = c.next()
        assert torch.equal(batch["action"], EchoPolicy()(batch["observation"]) * 5)
        assert (batch["policy_version"] == 1).all()
    with pytest.raises(WrongArgument, match="policy or policy_factory, not both"):
        AsyncBatchedCollector(make, EchoPolicy(), policy_factory=factory, frames_per_batch=30)


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_postproc_and_hooks_see_every_batch_once(backend):
    seen, hooked = [], []

    def postproc(batch):
        seen.append(batch["env_index"].clone())
        return batch.set("double", batch["observation"] * 2).exclude("action")

    make = [lambda n=n: GymEnv(CountingEnv((3,), n)) for n in range(3)]
    with AsyncBatchedCollector(
        make,
        EchoPolicy(),
        frames_per_batch=12,
        total_frames=40,
        postproc=postproc,
        post_collect_hook=hooked.append,
        env_backend=backend,
    ) as c:
        batches = list(c)
    assert [len(batch) for batch in batches] == [12, 12, 12, 4]
    assert [len(one) for one in seen] == [len(batch) for batch in batches]
    for batch, index in zip(batches, seen):
        assert "action" not in batch
        assert torch.equal(batch["double"], batch["observation"] * 2)
        assert torch.equal(batch["env_index"], index)
    assert len(hooked) == 4


def test_reset_at_each_iter_begins_every_env_anew():
    make = [lambda n=n: GymEnv(CountingEnv((50,), n)) for n in range(3)]
    with AsyncBatchedCollector(make, EchoPolicy(), frames_per_batch=12, reset_at_each_iter=True) as c:
        for episode in (1, 2, 3):
            batch = c.next()
            for n in set(batch["env_index"].tolist()):
                own = batch["observation"][batch["env_index"] == n]
                assert own.tolist() == [[n, episode, t] for t in range(len(own))]


def test_frames_of_one_dimension_only():
    with pytest.raises(UsageError, match="yield_completed_trajectories delivers one episode at a time"):
        AsyncBatchedCollector(
            [lambda: GymEnv(CountingEnv())],
            EchoPolicy(),
            frames_per_batch=12,
            yield_completed_trajectories=True,
            trajs_per_batch=2,
        )


def made(policy=None, **options):
    makers = [lambda: GymEnv(CountingEnv())] * 2
    return AsyncBatchedCollector(makers, policy or EchoPolicy(), frames_per_batch=12, **options)


class Scaled(nn.Module):
    """Echoes with a weight, so that there is something to update."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, observation):
        return observation[..., :1] * self.scale


@pytest.mark.parametrize("key", ["mine", ("about", "version")], ids=str)
def test_versions_begin_where_asked_under_the_name_asked_for(key):
    with made(Scaled(), policy_version=5, policy_version_key=key) as c:
        assert c.policy_version == 5
        fake, first = c.fake_tensordict(), c.next()
        assert set(fake.keys(True, True)) == set(first.keys(True, True))
        c.update_policy_weights_(Scaled())
        assert c.policy_version == 6
        second = c.next()
    assert first[key].tolist() == [5] * 12
    following = (key,) if isinstance(key, str) else key
    assert torch.equal(first[("next", *following)], first[key])
    assert set(second[key].tolist()) <= {5, 6}
    assert second[key].tolist()[-1] == 6
    assert "policy_version" not in set(first.keys())


def test_versions_may_have_no_name():
    with made(policy_version_key=None) as c:
        assert not any("version" in str(name) for name in c.next().keys(True))


def test_versions_under_another_name_reach_a_buffer():
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    with made(policy_version=3, policy_version_key="mine", replay_buffer=buffer, total_frames=24) as c:
        for _ in c:
            pass
    assert buffer.sample()["mine"].tolist() == [3] * 4


def test_config_objects_in_place_of_the_options():
    sizes = SimpleNamespace(max_batch_size=1, min_batch_size=1, timeout=0.5)
    seen = []

    class Sizes(EchoPolicy):
        def forward(self, observation):
            seen.append(len(observation))
            return super().forward(observation)

    places = SimpleNamespace(policy_device="cpu", env_device=None, output_device=None, storing_device="cpu")
    with made(Sizes(), server_config=sizes, device_config=places) as c:
        batch = c.next()
    assert batch.device == torch.device("cpu")
    assert set(seen[1:]) == {1}  # the first call is the trial


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"server_config": SimpleNamespace(max_batch_size=4, min_batch_size=1), "max_batch_size": 4},
            ValueError,
            "server_config already sets max_batch_size; give only one of them",
        ),
        (
            {"server_config": SimpleNamespace(max_batch_size=4, min_batch_size=1), "server_timeout": 0.1},
            ValueError,
            "server_config already sets server_timeout",
        ),
        ({"server_config": {"max_batch_size": 4}}, TypeError, "server_config must be an object with max_batch_size"),
        ({"device_config": "cpu"}, TypeError, "device_config must be an object with policy_device"),
        ({"policy_version": "one"}, TypeError, "policy_version must be a whole number, got 'one'"),
        ({"policy_version_key": 3}, TypeError, "policy_version_key must be a key.* got 3"),
        (
            {"policy_version_key": "action"},
            ValueError,
            "policy_version_key 'action' is already the name of another entry",
        ),
        (
            {"policy_version_key": ("action", "by")},
            ValueError,
            "policy_version_key .* is already the name of another entry",
        ),
        ({"policy_version_key": "next"}, ValueError, "policy_version_key 'next' is already the name of another entry"),
        ({"policy_version_key": None, "track_policy_version": True}, ValueError, "policy_version_key=None delivers no"),
    ],
)
def test_configs_and_versions_that_cannot_be(options, error, message):
    with no_leaks(), pytest.raises(error, match=message):
        made(**options)


def test_a_device_is_said_once():
    places = SimpleNamespace(policy_device="cpu", env_device=None, output_device=None, storing_device=None)
    with pytest.raises(ValueError, match="device_config already sets device; give only one of them"):
        made(device="cpu", device_config=places)


@pytest.mark.parametrize("both", [True, False])
def test_policy_or_policy_factory(both):
    given = {"policy": EchoPolicy(), "policy_factory": EchoPolicy} if both else {}
    with pytest.raises(TypeError, match="give policy or policy_factory"):
        AsyncBatchedCollector([lambda: GymEnv(CountingEnv())], frames_per_batch=12, **given)


def test_a_script_may_say_what_torchrl_does_by_default():
    nothing = dict.fromkeys(("worker_affinity", "driver_affinity", "server_config", "device_config"))
    sizes = {"max_batch_size": None, "min_batch_size": None}
    versions = {"policy_version": 0, "policy_version_key": "policy_version"}
    makers = [lambda: GymEnv(CountingEnv())] * 2
    with AsyncBatchedCollector(makers, EchoPolicy(), frames_per_batch=12, **nothing, **sizes, **versions) as c:
        assert c.next()["policy_version"].tolist() == [0] * 12


class Pinned(CountingEnv):
    """Made on one core, and has to be stepped there."""

    def __init__(self, core):
        super().__init__()
        os.sched_setaffinity(0, {core})
        self._core = core

    def step(self, action):
        assert os.sched_getaffinity(0) == {self._core}
        return super().step(action)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
@pytest.mark.parametrize(
    "where",
    [{"env_backend": "threading"}, {"env_backend": "multiprocessing"}],
    ids=["threads", "processes"],
)
def test_a_factory_runs_where_its_env_lives(where):
    before = os.sched_getaffinity(0)
    core = min(before)
    with AsyncBatchedCollector([lambda: GymEnv(Pinned(core))] * 2, EchoPolicy(), frames_per_batch=12, **where) as c:
        c.next()
    assert os.sched_getaffinity(0) == before


class Counting(TensorDictModuleBase):
    """Takes a whole TensorDict, and finds there what it wrote at the last step."""

    in_keys, out_keys = ("observation",), ("action",)

    def forward(self, td):
        td["count"] = td.get("count", torch.zeros(*td.batch_size, 1)) + 1
        td["action"] = 1000 * td["count"] + td["observation"][..., 2:]
        td["team"] = TensorDict({"value": td["count"].expand(*td.batch_size, 3)}, [*td.batch_size, 3])
        return td


@pytest.mark.parametrize(
    "options",
    [
        {"env_backend": "threading"},
        {"env_backend": "multiprocessing", "envs_per_worker": 2},
        {"env_backend": "multiprocessing", "max_batch_size": 2},
    ],
)
def test_a_policy_of_whole_tensordicts_sees_each_env_alone(options):
    makers = [lambda n=n: GymEnv(CountingEnv((3, 1, 5), n)) for n in range(4)]
    with no_leaks():
        with AsyncBatchedCollector(makers, Counting(), frames_per_batch=60, total_frames=240, **options) as c:
            frames = torch.cat([batch.cpu() for batch in c])
        del c
        for env in range(4):
            own = frames[frames["env_index"] == env]
            step = own["observation"][:, 2:]
            assert len(own), "an env that never came"
            assert torch.equal(own["count"], step + 1)
            assert own["team"].batch_size == (len(own), 3)  # a branch with dimensions of its own
            assert torch.equal(own["team", "value"], own["count"].expand(-1, 3))
            assert torch.equal(own["action"], 1000 * (step + 1) + step)
