"""AsyncBatchedCollector with TorchRL's envs: of every kind, in threads and in processes, the frames `Collector` has.

Which env comes when is nobody's promise, so frames are compared lane by lane, every key, bit for bit.
"""

from __future__ import annotations

import os
import signal
import warnings

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from tensordict.nn import TensorDictModuleBase

from reap.collectors import AsyncBatchedCollector, Collector, RandomPolicy
from reap.envs import AsyncEnvPool
from reap.envs import ParallelEnv as Processes
from reap.errors import UsageError
from reap.testing import no_leaks
from tests.worlds.scenarios import ENVS, FRAMES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
    from torchrl.envs import ActionMask, EnvBase, InitTracker, TransformedEnv
    from torchrl.modules import LSTMModule

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(90)]

RANDOM = {"stateless", "agents", "scalar action"}  # what they show is drawn from the process's generator
ROWS = sorted(set(ENVS) - FRAMES - RANDOM)


class Walk(EnvBase):
    """Somebody's own env: adds its actions up, and ends beyond `goal`."""

    def __init__(self, goal=3.0):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Bounded(0.5, 1.5, (1,))
        self.reward_spec = Unbounded((1,))
        self.goal, self.at = goal, torch.zeros(1)

    def _reset(self, tensordict=None, **_):
        self.at = torch.zeros(1)
        return TensorDict({"observation": self.at.clone()})

    def _step(self, tensordict):
        step = tensordict.get("action").to(torch.float32)
        self.at = self.at + step
        return TensorDict({"observation": self.at.clone(), "reward": step, "done": self.at >= self.goal})

    def _set_seed(self, seed):
        pass


class Thing:
    def __init__(self, at):
        self.at = at


class Says(EnvBase):
    """Says where it is, in words and as an object; four steps long."""

    def __init__(self, size=0):
        super().__init__()
        self.observation_spec = Composite(
            observation=Unbounded((1,)), said=NonTensor(shape=(), example_data=""), thing=NonTensor(shape=())
        )
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.at, self.more = 0, " " * size

    def _seen(self):
        seen = {"observation": torch.tensor([float(self.at)]), "said": f"at {self.at}{self.more}"}
        return seen | {"thing": NonTensorData(Thing(self.at))}

    def _reset(self, tensordict=None, **_):
        self.at = 0
        return TensorDict(self._seen())

    def _step(self, tensordict):
        self.at += 1
        return TensorDict({**self._seen(), "reward": torch.ones(1), "done": torch.tensor([self.at == 4])})

    def _set_seed(self, seed):
        pass


def spoken_to(td):
    """The action is how much was said."""
    return td.set("action", torch.tensor([[float(len(text))] for text in td["said"]]))


class ByRow(TensorDictModuleBase):
    """Chooses among fixed random actions by what a lane sees: deterministic, whoever else is decided about."""

    def __init__(self, env):
        super().__init__()
        torch.manual_seed(7)
        specs = env.full_action_spec_unbatched
        self.bank = {key: torch.stack([specs[key].rand() for _ in range(5)]) for key in env.action_keys}
        self.in_keys = [key for key in env.observation_spec.keys(True, True) if isinstance(key, str)]
        self.out_keys = list(env.action_keys)

    def forward(self, td):
        size = td.batch_size
        total = sum(td.get(key).double().reshape(*size, -1).sum(-1) for key in self.in_keys)
        chosen = (torch.as_tensor(total).abs() * 13).long().expand(size) % 5
        for key, bank in self.bank.items():
            td.set(key, bank[chosen])
        return td


OURS = ("env_index", ("collector", "traj_ids"), "policy_version", ("next", "policy_version"))


def by_lane(batches, lanes):
    flat = torch.cat(batches)
    return [flat[flat["env_index"] == lane].exclude(*OURS) for lane in range(lanes)]


def assert_the_frames_of_a_collector(make, policy, lanes, **options):
    """Two envs of `lanes` lanes each: every lane's frames begin like those of `Collector`."""
    frames, batches = 12 * 2 * lanes, []
    with AsyncBatchedCollector([make] * 2, policy, frames_per_batch=frames, total_frames=-1, **options) as c:
        while len(batches) < 2 or min(map(len, by_lane(batches, 2 * lanes))) < 6:  # each in its own time
            batches.append(c.next().clone())
    ours = by_lane(batches, 2 * lanes)
    with Collector(make, policy, frames_per_batch=lanes * max(map(len, ours)), total_frames=-1) as c:
        theirs = c.next().exclude(*OURS).reshape(lanes, -1)
    for lane, mine in enumerate(ours):
        want = theirs[lane % lanes][: len(mine)]
        assert set(mine.keys(True, True)) == set(want.keys(True, True))
        for key in want.keys(True):
            value = mine.get(key)
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, want.get(key)), (lane, key)
            else:
                assert value.batch_size == want.get(key).batch_size, (lane, key)


@pytest.mark.parametrize("kind", ROWS)
def test_every_kind_in_threads(kind):
    env = ENVS[kind]()
    assert_the_frames_of_a_collector(ENVS[kind], ByRow(env), env.batch_size.numel(), env_backend="threading")


@pytest.mark.parametrize("kind", sorted(RANDOM))
def test_kinds_that_draw_look_the_same(kind):
    policy = ByRow(ENVS[kind]())
    with AsyncBatchedCollector([ENVS[kind]] * 2, policy, frames_per_batch=20, env_backend="threading") as c:
        ours = c.next().exclude(*OURS)
    with Collector(ENVS[kind], policy, frames_per_batch=20) as c:
        theirs = c.next().exclude(*OURS)
    assert {k: (v.shape, v.dtype) for k, v in ours.items(True)} == {
        k: (v.shape, v.dtype) for k, v in theirs.items(True)
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("groups", {}),
        ("counting", {"worker_threads": True, "envs_per_worker": 2}),
        pytest.param("gym with counters", {"envs_per_worker": 2}, marks=pytest.mark.slow),
        pytest.param("groups over lanes", {"worker_threads": True, "envs_per_worker": 2}, marks=pytest.mark.slow),
        pytest.param("matrix of lanes", {}, marks=pytest.mark.slow),
    ],
)
def test_kinds_in_processes(kind, options):
    env = ENVS[kind]()
    where = {"env_backend": "multiprocessing", **options}
    assert_the_frames_of_a_collector(ENVS[kind], ByRow(env), env.batch_size.numel(), **where)


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_an_env_of_ones_own_gets_its_actions(backend):
    def two_steps(observation):
        return torch.where(observation < 1, 1.0, 1.25)

    with no_leaks():
        with AsyncBatchedCollector([Walk] * 2, two_steps, frames_per_batch=30, env_backend=backend) as c:
            batches = [c.next().clone()]
            while min(map(len, by_lane(batches, 2))) < 4:  # each in its own time
                batches.append(c.next().clone())
            lanes = by_lane(batches, 2)
        for frames in lanes:
            assert frames["action"].flatten().tolist()[:4] == [1.0, 1.25, 1.25, 1.0]
            assert frames["next", "observation"].flatten().tolist()[:4] == [1.0, 2.25, 3.5, 1.0]
            assert frames["next", "done"].flatten().tolist()[:4] == [False, False, True, False]
        del c, lanes, frames


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_random_actions_are_drawn_by_the_env_itself(backend):
    with AsyncBatchedCollector(
        [Walk] * 3, RandomPolicy(), frames_per_batch=60, env_backend=backend, max_batch_size=2
    ) as c:
        batch = c.next()
    action = batch["action"]
    assert bool(((action >= 0.5) & (action <= 1.5)).all())
    assert len(set(action.flatten().tolist())) > 30
    assert torch.equal(batch["next", "observation"], batch["observation"] + action), "another env's action"


class Masked(EnvBase):
    """One of five actions is allowed, another one at every step."""

    def __init__(self):
        super().__init__()
        self.action_spec = Categorical(5, shape=())
        self.observation_spec = Composite(
            observation=Unbounded((1,)), action_mask=Categorical(2, shape=(5,), dtype=torch.bool)
        )
        self.reward_spec = Unbounded((1,))
        self.count = 0

    def _seen(self):
        mask = torch.arange(5) == self.count % 5
        return TensorDict({"observation": torch.tensor([float(self.count)]), "action_mask": mask})

    def _reset(self, tensordict=None, **_):
        self.count = 0
        return self._seen()

    def _step(self, tensordict):
        self.count += 1
        return self._seen().update({"reward": torch.zeros(1), "done": torch.tensor([self.count == 7])})

    def _set_seed(self, seed):
        pass


def test_random_actions_keep_to_the_mask():
    make = [lambda: TransformedEnv(Masked(), ActionMask())] * 2
    with AsyncBatchedCollector(make, RandomPolicy(), frames_per_batch=30, env_backend="threading") as c:
        batch = c.next()
    assert torch.equal(batch["action"], batch["action_mask"].long().argmax(-1))


def test_random_frames_come_first_and_then_the_policy():
    with AsyncBatchedCollector(
        [Walk] * 2, torch.ones_like, frames_per_batch=20, init_random_frames=20, env_backend="threading"
    ) as c:
        first, second = c.next().clone(), c.next()
    assert not bool((first["action"] == 1).all())
    assert int((second["action"] != 1).sum()) <= 2, "more than the envs that were under way"


WORDS = {"text", "metadata"}  # texts and objects among the observations


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_texts_and_objects_are_those_of_their_frames(backend):
    """TorchRL's takes them in both, too."""
    with AsyncBatchedCollector([Says] * 2, spoken_to, frames_per_batch=12, env_backend=backend) as c:
        for batch in (c.next(), c.next()):
            for frame in batch.unbind(0):
                at = int(frame["observation"])
                assert frame["said"] == f"at {at}"
                assert frame["next", "said"] == f"at {at + 1}"
                assert frame["thing"].at == at
                assert frame["next", "thing"].at == at + 1
                assert frame["action"].item() == len(frame["said"]), "the policy has read another one's text"


def test_whole_episodes_with_their_texts():
    with AsyncBatchedCollector(
        [Says] * 2, spoken_to, frames_per_batch=8, env_backend="threading", yield_completed_trajectories=True
    ) as c:
        assert c.next()["said"] == [f"at {n}" for n in range(4)]


@pytest.mark.parametrize("kind", sorted(WORDS))
def test_kinds_with_words_have_the_keys_of_a_collector(kind):
    """Counting envs count up; how many lanes are asked about is nobody's concern."""

    def act(td):
        return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int32))

    with AsyncBatchedCollector([ENVS[kind]] * 2, act, frames_per_batch=8, env_backend="threading") as c:
        mine = c.next()
    with Collector(ENVS[kind], act, frames_per_batch=8) as c:
        other = c.next()
    keys = {key for key in mine.keys(True) if key not in OURS}
    assert keys == {key for key in other.keys(True) if key not in OURS}


def test_a_pool_by_hand_brings_texts():
    pool = AsyncEnvPool([Says] * 2, backend="threading")
    td = pool.reset()
    assert td["said"] == ["at 0", "at 0"]
    pool.async_step_send(td.set("action", torch.ones(2, 1)))
    assert pool.async_step_recv(min_get=2)["next", "said"] == ["at 1", "at 1"]
    pool.close()


def test_texts_larger_than_a_pipe_come_through():
    def make():
        return Says(size=1_000_000)

    with AsyncBatchedCollector([make] * 2, spoken_to, frames_per_batch=6, env_backend="multiprocessing") as c:
        assert all(len(text) > 1_000_000 for text in c.next()["next", "said"])


@pytest.mark.parametrize("kind", sorted(FRAMES - WORDS))
def test_what_has_no_fixed_shape_is_refused_by_name(kind):
    with pytest.raises(UsageError, match="has no fixed shape .* use SerialEnv, or a collector with workers"):
        AsyncBatchedCollector([ENVS[kind]] * 2, lambda td: td, frames_per_batch=8, env_backend="threading")


def test_envs_that_share_a_worker_are_stepped_one_after_another():
    make = [lambda goal=goal: Walk(goal) for goal in (2.0, 3.0, 4.0, 5.0)]
    with AsyncBatchedCollector(
        make, torch.ones_like, frames_per_batch=80, env_backend="threading", envs_per_worker=2
    ) as c:
        lanes = by_lane([c.next()], 4)
    for frames, length in zip(lanes, (2, 3, 4, 5)):
        done = frames["next", "done"].flatten()
        assert done.tolist() == [n % length == length - 1 for n in range(len(done))]


@pytest.mark.parametrize("backend", ["threading", pytest.param("multiprocessing", marks=pytest.mark.slow)])
def test_a_recurrent_policy_beside_an_env_with_its_primer(backend):
    torch.manual_seed(0)
    lstm = LSTMModule(input_size=1, hidden_size=4, in_key="observation", out_key="action")
    lstm.eval()

    def make():
        env = TransformedEnv(Walk(2.0), InitTracker())
        return env.append_transform(lstm.make_tensordict_primer())

    class Act(TensorDictModuleBase):
        in_keys, out_keys = lstm.in_keys, lstm.out_keys

        def __init__(self):
            super().__init__()
            self.lstm = lstm

        def forward(self, td):
            self.lstm(td)
            return td.set("action", td.get("action").sum(-1, keepdim=True).abs() + 0.5)

    found = {}
    for n in (1, 3):
        with AsyncBatchedCollector([make] * n, Act(), frames_per_batch=30 * n, env_backend=backend) as c:
            found[n] = by_lane([c.next().clone()], n)
    with Collector(make, Act(), frames_per_batch=90) as c:
        want = c.next()
    for frames in (*found[1], *found[3]):
        for key in ("observation", "action", lstm.in_keys[1], ("next", lstm.in_keys[1])):
            torch.testing.assert_close(frames[key], want[key][: len(frames)], msg=str(key))


def test_processes_under_one_policy_step_torchrls_envs():
    """reap's ParallelEnv, whose lanes are told of their actions the same way."""
    env = ENVS["groups"]()
    policy = ByRow(env)
    with Collector(Processes(2, ENVS["groups"]), policy, frames_per_batch=40) as c:
        lanes = c.next().exclude(*OURS)
    with Collector(ENVS["groups"], policy, frames_per_batch=20) as c:
        one = c.next().exclude(*OURS)
    for mine in lanes:
        for key in one.keys(True, True):
            assert torch.equal(mine[key], one[key]), key
    with Collector(Processes(2, Walk), None, frames_per_batch=40) as c:
        random = c.next()
    assert torch.equal(random["next", "observation"], random["observation"] + random["action"])


@pytest.mark.parametrize("backend", ["threading", pytest.param("multiprocessing", marks=pytest.mark.slow)])
def test_a_pool_by_hand_steps_torchrls_envs(backend):
    pool = AsyncEnvPool([Walk] * 2, backend=backend)
    td = pool.reset()
    pool.async_step_send(td.set("action", torch.tensor([[1.0], [1.25]])))
    back = pool.async_step_recv(min_get=2)
    assert sorted(back["next", "observation"].flatten().tolist()) == [1.0, 1.25]
    td = pool.rand_action(pool.reset())
    assert bool(((td["action"] >= 0.5) & (td["action"] <= 1.5)).all())
    pool.close()


def test_a_draw_that_was_broken_off_before_it_was_sent_is_not_waited_for():
    """Ctrl-C may come between any two lines."""
    with Collector(Processes(2, Walk, timeout=5.0), None, frames_per_batch=8) as collector:
        lanes = collector._backend.worker.env
        assert lanes.draws
        for _ in range(3):
            for process in lanes.processes:
                process.owes = True
            batch = collector.next()
            follows = torch.where(batch["next", "done"], 0, batch["observation"] + batch["action"])
            assert torch.equal(batch["observation"][:, 1:], follows[:, :-1])


class DiesOnce(Walk):
    """Ends its process when it is asked for a random action in the middle of an episode, if there is a note."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def rand_action(self, tensordict=None):
        if self.at > 1 and self.note.exists():
            self.note.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().rand_action(tensordict)


def test_a_process_that_dies_when_it_is_asked_for_actions_is_replaced(tmp_path):
    told, note = [], tmp_path / "note"
    note.touch()
    env = Processes(2, [Walk, lambda: DiesOnce(note)], on_failure="restart", on_restart=told.append)
    with Collector(env, None, frames_per_batch=32, total_frames=64) as collector:
        batches = torch.cat([batch.clone() for batch in collector], 1)
    assert [failure.worker for failure in told] == [1]
    for lane in (0, 1):
        rows = batches[lane][batches["collector", "mask"][lane]]
        same = rows["collector", "traj_ids"][1:] == rows["collector", "traj_ids"][:-1]
        follows = torch.where(same[:, None], (rows["observation"] + rows["action"])[:-1], 0)
        assert torch.equal(rows["observation"][1:], follows)
        ended = (~same & ~rows["next", "done"][:-1, 0]).sum()
        assert (len(rows), int(ended), int(rows["collector", "cut"].sum())) == (batches.shape[1] - lane, lane, lane)
