"""TorchRL's ParallelEnv on reap's env processes: the same batches and the same env for its owner, or a plain reason."""

from __future__ import annotations

import functools
import gc
import os
import signal
import warnings

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector as TheirCollector
from torchrl.data import OneHot, Unbounded
from torchrl.envs import (
    CatFrames,
    ClipTransform,
    Compose,
    DoubleToFloat,
    EnvCreator,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    Timer,
    TransformedEnv,
    VecNorm,
)
from torchrl.modules import LSTMModule, QValueActor

from reap.collectors import Collector, MultiSyncCollector
from reap.envs.torchrl.captured import CapturedRows
from reap.envs.torchrl.parallel import ParallelLanes
from reap.errors import WorkerDied, WorkerRaised
from reap.seeding import chain as seeds_from
from reap.testing import no_leaks


class Pushes(nn.Module):
    """Away from the middle: episodes are short, and no two lanes' end together."""

    def forward(self, observation):
        return nn.functional.one_hot((observation[..., 0] > 0).long(), 2)


class Turns(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, observation):
        return observation[..., : self.size].float().tanh()


def gym_env(name):
    return GymEnv(name)


def chain(steps=None):
    return [VecNorm(in_keys=["observation", "reward"], decay=0.9), RewardSum(), StepCounter(max_steps=steps)]


def transformed(name, steps=None):
    return TransformedEnv(
        GymEnv(name), Compose(*chain(steps), CatFrames(3, -1, in_keys=["observation"], out_keys=["stack"]))
    )


def normalised():
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(VecNorm(in_keys=["observation"]), RewardSum()))


def limited():
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=4))


def lanes_of(make, lanes=3):
    """A worker's env that has several lanes."""
    return SerialEnv(lanes, make)


def lanes_transformed(name, steps, lanes=3):
    return TransformedEnv(lanes_of(functools.partial(gym_env, name), lanes), Compose(*chain(steps)))


def parallel(make, lanes=3, **options):
    return ParallelEnv(lanes, make, mp_start_method="fork", **options)


FORMS = {
    "bare": lambda name, steps: parallel(functools.partial(gym_env, name)),
    "inside": lambda name, steps: parallel(functools.partial(transformed, name, steps)),
    "inside, uncounted": lambda name, steps: parallel(normalised),
    "around": lambda name, steps: TransformedEnv(parallel(functools.partial(gym_env, name)), Compose(*chain(steps))),
    "both": lambda name, steps: TransformedEnv(
        parallel(functools.partial(transformed, name, steps)),
        Compose(
            InitTracker(), VecNorm(in_keys=["observation"]), ClipTransform(in_keys=["observation"], low=-2, high=2)
        ),
    ),
    "nested": lambda name, steps: TransformedEnv(
        TransformedEnv(parallel(functools.partial(gym_env, name)), InitTracker()),
        Compose(DoubleToFloat(), *chain(steps)),
    ),
    "lanes": lambda name, steps: parallel(functools.partial(lanes_of, functools.partial(gym_env, name)), 2),
    "lanes, inside": lambda name, steps: parallel(
        functools.partial(lanes_of, functools.partial(transformed, name, steps)), 2
    ),
    "lanes, between": lambda name, steps: parallel(functools.partial(lanes_transformed, name, steps), 3),
    "lanes, around": lambda name, steps: TransformedEnv(
        parallel(functools.partial(lanes_of, functools.partial(gym_env, name)), 2), Compose(*chain(steps))
    ),
    "one lane each, both": lambda name, steps: TransformedEnv(
        parallel(functools.partial(lanes_transformed, name, steps, 1), 3),
        Compose(InitTracker(), VecNorm(in_keys=["observation"])),
    ),
    "lanes, inside and around": lambda name, steps: TransformedEnv(
        parallel(functools.partial(lanes_of, functools.partial(transformed, name, steps)), 2),
        Compose(InitTracker(), VecNorm(in_keys=["observation"])),
    ),
    "lanes, between and around": lambda name, steps: TransformedEnv(
        parallel(functools.partial(lanes_transformed, name, steps), 2),
        Compose(InitTracker(), VecNorm(in_keys=["observation"])),
    ),
}
POLICIES = {"CartPole-v1": Pushes(), "Pendulum-v1": Turns(1), "HalfCheetah-v5": Turns(6)}


def policy_for(name):
    return TensorDictModule(POLICIES[name], in_keys=["observation"], out_keys=["action"])


def collected(cls, make, policy, frames=45, batches=3, seed=3, **options):
    """Batches, what the env's state was before the last of them, and how it was stepped."""
    env = make()
    if seed is not None:
        env.set_seed(seed)
    collector = cls(env, policy, frames_per_batch=frames, total_frames=frames * batches, **options)
    found, state = [], {}
    for n, batch in enumerate(collector):
        found.append(batch.clone())
        if n == batches - 2:
            state = dict(flat(env.state_dict()))
    told = collector.explain() if cls is Collector else ""
    collector.shutdown()
    assert cls is not Collector or env.is_closed
    return found, state, told


def flat(state, at=()):
    for key, value in state.items():
        if hasattr(value, "items"):
            yield from flat(value, (*at, key))
        elif isinstance(value, torch.Tensor):
            yield (*at, key), value.clone()


def assert_the_same(make, policy, **options):
    theirs, their_state, _ = collected(TheirCollector, make, policy, **options)
    with no_leaks():
        ours, our_state, told = collected(Collector, make, policy, **options)
    assert len(ours) == len(theirs)
    for a, b in zip(theirs, ours):
        assert a.batch_size == b.batch_size
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        for key in a.keys(True, True):
            assert a[key].dtype is b[key].dtype, key
            assert torch.equal(a[key], b[key]), key
    assert our_state.keys() == their_state.keys()
    for key, value in their_state.items():
        assert torch.equal(value, our_state[key]), key
    return told, ours


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "form", "options"),
    [
        ("CartPole-v1", "bare", {}),
        ("CartPole-v1", "bare", {"max_frames_per_traj": 5}),
        ("CartPole-v1", "inside", {}),
        pytest.param("CartPole-v1", "inside, uncounted", {"max_frames_per_traj": 5}, marks=slow),
        ("CartPole-v1", "around", {}),
        ("CartPole-v1", "both", {}),
        pytest.param("CartPole-v1", "nested", {}, marks=slow),
        ("CartPole-v1", "lanes", {"max_frames_per_traj": 5}),
        ("CartPole-v1", "lanes, inside", {}),
        pytest.param("CartPole-v1", "lanes, between", {}, marks=slow),
        ("CartPole-v1", "lanes, around", {}),
        pytest.param("CartPole-v1", "one lane each, both", {}, marks=slow),
        pytest.param("CartPole-v1", "lanes, inside and around", {}, marks=slow),
        pytest.param("CartPole-v1", "lanes, between and around", {}, marks=slow),
        pytest.param("CartPole-v1", "inside", {"reset_at_each_iter": True}, marks=slow),
        pytest.param("CartPole-v1", "lanes, inside", {"reset_at_each_iter": True, "steps": 4}, marks=slow),
        pytest.param("HalfCheetah-v5", "lanes, around", {"steps": 7}, marks=slow),
        pytest.param("CartPole-v1", "around", {"reset_at_each_iter": True}, marks=slow),
        pytest.param("Pendulum-v1", "bare", {"max_frames_per_traj": 5}, marks=slow),
        pytest.param("Pendulum-v1", "both", {"steps": 7}, marks=slow),
        pytest.param("HalfCheetah-v5", "inside", {"steps": 7}, marks=slow),
        pytest.param("HalfCheetah-v5", "nested", {"steps": 7}, marks=slow),
    ],
    ids=str,
)
def test_the_same_as_torchrls(name, form, options):
    options = dict(options)
    steps = options.pop("steps", None)
    told, batches = assert_the_same(lambda: FORMS[form](name, steps), policy_for(name), **options)
    if form in ("bare", "inside", "inside, uncounted", "lanes", "lanes, inside", "lanes, between"):
        assert "ParallelEnv in" in told
        assert "env processes of reap's" in told
    if form not in ("bare", "lanes"):
        assert "replays the torch calls of its transforms" in told
    assert any(batch["next", "done"][..., :-1, :].any() for batch in batches)  # resets in the middle


@pytest.mark.parametrize("form", ["around", "inside", "both", "parallel inside"])
def test_lanes_of_lanes_are_the_same_as_torchrls(form):
    one = functools.partial(gym_env, "CartPole-v1")
    forms = {
        "around": lambda: TransformedEnv(SerialEnv(2, functools.partial(lanes_of, one)), Compose(*chain(9))),
        "inside": lambda: SerialEnv(2, functools.partial(lanes_of, functools.partial(transformed, "CartPole-v1", 9))),
        "both": lambda: TransformedEnv(
            SerialEnv(2, functools.partial(lanes_transformed, "CartPole-v1", 9)), VecNorm(in_keys=["observation"])
        ),
        "parallel inside": lambda: TransformedEnv(
            SerialEnv(2, functools.partial(parallel, one, 2)), Compose(*chain(9))
        ),
    }
    told, _ = assert_the_same(forms[form], policy_for("CartPole-v1"), frames=66)
    assert "replays the torch calls of its transforms" in told


def in_processes(env, policy=None, frames=20, **options):
    """A collector that was handed this env; nothing of TorchRL's is started by that."""
    collector = Collector(env, policy, frames_per_batch=frames, **options)
    lanes = collector._backend.worker.env
    return collector, lanes


def seen(state, worker=0, what="count"):
    """What a VecNorm in a worker knows of observations."""
    return dict(flat(state))[f"worker{worker}", "transforms.0._extra_state", f"observation_{what}"].sum().item()


def children():
    """Processes of TorchRL's: started by multiprocessing."""
    import multiprocessing

    return multiprocessing.active_children()


def test_lanes_of_a_worker_are_moved_by_hand():
    """Resets of some, and steps, of workers that have several lanes; then the collector begins anew."""
    make = functools.partial(lanes_of, limited, 2)
    theirs = parallel(make, 2)
    theirs.reset()  # its processes are there
    with no_leaks():
        collector, lanes = in_processes(parallel(make, 2), policy_for("CartPole-v1"), frames=40)
        assert isinstance(lanes, ParallelLanes)
        collector.next()
        envs = collector.env, theirs
        for env in envs:
            env.set_seed(7)
        roots = [env.reset() for env in envs]
        for n in range(6):
            stepped = [env.step(policy_for("CartPole-v1")(root))["next"] for env, root in zip(envs, roots)]
            marked = [one.exclude("reward").clone() for one in stepped]
            for one in marked:
                one["_reset"] = torch.tensor([[[False], [n == 3]], [[n == 1], [True]]])
            roots = [env.reset(one) for env, one in zip(envs, marked)]
            for a, b in (stepped, roots):
                assert all(torch.equal(a[key], b[key]) for key in b.keys(True, True))
        assert collector.next()["step_count"][..., 0, :].sum() == 0
        collector.shutdown()
        theirs.close()
        del collector, lanes, envs, env, stepped, roots, marked, one, a, b


def test_the_env_stays_its_owners():
    """TorchRL's methods reach reap's processes, whoever calls them; none of TorchRL's is started."""
    env = TransformedEnv(parallel(functools.partial(transformed, "CartPole-v1"), lanes=2), InitTracker())
    with no_leaks():
        collector, lanes = in_processes(env, policy_for("CartPole-v1"))
        assert isinstance(lanes, CapturedRows)
        collector.next()
        collector.next()
        assert collector.env is env
        assert not env.is_closed
        assert not children()
        inner = env.base_env
        state = inner.state_dict()
        count = seen(state)
        assert count > 1
        assert inner.frame_skip() == [1, 1]
        rollout = env.rollout(4, policy_for("CartPole-v1"), break_when_any_done=False)
        assert rollout.shape == (2, 4)
        assert rollout["step_count"].squeeze(-1).tolist() == [[0, 1, 2, 3]] * 2
        batch = collector.next()  # moved by hand: new episodes
        assert batch["step_count"][:, 0].flatten().tolist() == [0, 0]
        assert seen(inner.state_dict()) > count
        inner.load_state_dict(state)
        assert seen(inner.state_dict()) == count
        assert len({worker.pid for worker in inner._workers}) == min(2, len(os.sched_getaffinity(0)))
        assert not children()
        collector.shutdown()
        del collector, lanes
    assert inner.is_closed
    assert "_shutdown_workers" not in vars(inner)


@pytest.mark.parametrize("lanes", [1, 3])
def test_seeds_are_torchrls(lanes):
    """What `set_seed` says, before the env is given away and after, in the lanes it says it for."""
    one = functools.partial(gym_env, "Pendulum-v1")
    make = functools.partial(parallel, one if lanes == 1 else functools.partial(lanes_of, one, lanes), lanes=2)
    found = []
    for kind in (make, one):
        env = kind()
        env.set_seed(5)
        found.append(env.reset()["observation"])
        env.close()
    assert torch.equal(found[0].flatten(0, -2)[0], found[1])
    env = make()
    env.set_seed(5)
    assert children()
    collector, inside = in_processes(env, frames=24)
    assert isinstance(inside, ParallelLanes)
    assert not children()
    assert torch.equal(collector.next()["observation"][..., 0, :], found[0])
    env.set_seed(5)
    assert torch.equal(env.reset()["observation"], found[0])
    collector.set_seed(5)
    seeded = collector.next()["observation"][..., 0, :].flatten(0, -2)
    for mine, seed in zip(seeded, seeds_from(5, 2 * lanes)[0]):
        first, _ = gym.make("Pendulum-v1").reset(seed=seed)
        assert torch.equal(mine, torch.as_tensor(first))
    collector.shutdown()


class Brittle(gym.Wrapper):
    """Its process ends, or its step raises, when it is told to."""

    def step(self, action):
        if os.environ.get("BRITTLE") == "raise":
            raise ValueError("brittle")
        if os.environ.get("BRITTLE") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def brittle(lane=0, how=None):
    if how is not None:
        os.environ["BRITTLE"] = how
    return GymWrapper(Brittle(gym.make("CartPole-v1")))


@pytest.mark.parametrize(("how", "error"), [("raise", WorkerRaised), ("die", WorkerDied)])
def test_an_env_process_that_fails_is_named(how, error):
    env = parallel(brittle, lanes=3, create_env_kwargs=[{}, {}, {"how": how}])
    os.environ.pop("BRITTLE", None)  # TorchRL has made one of each here
    with no_leaks():
        collector, lanes = in_processes(env, policy_for("CartPole-v1"), frames=30)
        assert len(lanes.processes) == 3  # envs of one's own may keep something in their process
        with pytest.raises(error, match="of lane 2"):
            collector.next()
        collector.shutdown()
        del collector, lanes
    assert env.is_closed


class OwnParallel(ParallelEnv):
    pass


def counted():
    return TransformedEnv(GymEnv("CartPole-v1"), Timer())


def hooked():
    env = parallel(functools.partial(gym_env, "CartPole-v1"), lanes=2)
    env.reset = lambda *args, **kwargs: ParallelEnv.reset(env, *args, **kwargs)
    return env


def used():
    env = parallel(functools.partial(gym_env, "CartPole-v1"), lanes=2)
    env.reset()
    return env


def counts_twice():
    env = parallel(functools.partial(transformed, "CartPole-v1"), lanes=2)
    return TransformedEnv(env, StepCounter())


def beside_one_that_cannot_be():
    bare = functools.partial(gym_env, "CartPole-v1")
    whole = [TransformedEnv(parallel(bare, lanes=2), RewardSum()), TransformedEnv(SerialEnv(2, bare), Timer())]
    return SerialEnv(2, [lambda one=one: one for one in whole])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (used, "its workers were running already"),
        (hooked, "one of its methods has been replaced"),
        (lambda: parallel(counted, lanes=2), "Timer is not a transform that reap can replay"),
        (lambda: TransformedEnv(parallel(counted, lanes=2), InitTracker()), "Timer is not a transform"),
        (lambda: OwnParallel(2, functools.partial(gym_env, "CartPole-v1"), mp_start_method="fork"), "TorchRL steps it"),
        (
            lambda: TransformedEnv(parallel(functools.partial(gym_env, "CartPole-v1"), lanes=2), Timer()),
            "Timer is not a transform that reap can replay",
        ),
        (counts_twice, "writes ['step_count'], which its workers keep as their own state"),
        (beside_one_that_cannot_be, "Timer is not a transform that reap can replay"),
    ],
    ids=[
        "used",
        "hooked",
        "unknown transform inside",
        "unknown inside, known around",
        "subclass",
        "unknown around",
        "carried",
        "beside another",
    ],
)
def test_what_is_left_to_torchrl_and_why(make, why):
    env = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector, _ = in_processes(env, policy_for("CartPole-v1"))
    assert why in collector.explain()
    assert "TorchRL steps it" in collector.explain()
    gc.collect()  # what was tried before is gone
    assert collector.next().numel() == 20
    collector.shutdown()
    assert not children()


def remembering(lanes=None):
    """An env that gives a recurrent policy its first state."""
    primer = recurrent().module[0].make_tensordict_primer()
    env = GymEnv("CartPole-v1") if lanes is None else SerialEnv(lanes, functools.partial(gym_env, "CartPole-v1"))
    return TransformedEnv(env, Compose(InitTracker(), StepCounter(), RewardSum(), primer))


def recurrent():
    torch.manual_seed(0)
    lstm = LSTMModule(input_size=4, hidden_size=6, in_key="observation", out_key="hidden")
    return TensorDictSequential(lstm, QValueActor(nn.Linear(6, 2), in_keys=["hidden"], spec=OneHot(2)))


@pytest.mark.parametrize(
    "options",
    [{}, {"init_random_frames": 50}, pytest.param({"lanes": 2, "reset_at_each_iter": True}, marks=slow)],
    ids=["one lane each", "random at first", "lanes"],
)
def test_a_recurrent_policy_whose_state_the_workers_begin(options):
    options = dict(options)
    make = functools.partial(remembering, options.pop("lanes", None))
    told, batches = assert_the_same(lambda: parallel(make, lanes=4), recurrent(), frames=96, **options)
    assert "env processes of reap's" in told
    assert "replays the torch calls of its transforms" in told
    states = batches[-1]["recurrent_state_h"]
    assert (states[batches[-1]["is_init"].squeeze(-1)] == 0).all()
    assert batches[-1]["is_init"].any()


class Probabilities(nn.Module):
    def forward(self, observation):
        return torch.stack([observation[..., 0].sigmoid(), 1 - observation[..., 0].sigmoid()], -1)


def test_probabilities_as_actions_of_lanes_that_share_a_process():
    policy = TensorDictModule(Probabilities(), in_keys=["observation"], out_keys=["action"])
    told, _ = assert_the_same(lambda: parallel(functools.partial(gym_env, "CartPole-v1"), lanes=4), policy, frames=48)
    assert "env processes of reap's" in told


@pytest.mark.parametrize("how", ["around", "random"])
def test_a_primer_that_stays_with_torchrl(how):
    make = remembering if how == "around" else drawing
    env = parallel(make, lanes=2)
    collector, _ = in_processes(TransformedEnv(env, VecNorm(in_keys=["observation"])) if how == "around" else env)
    assert (
        "put the primer around it" if how == "around" else "draws random initial values there"
    ) in collector.explain()
    collector.shutdown()
    assert not children()


def drawing():
    primer = TensorDictPrimer({"mood": Unbounded((2,))}, random=True)
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), primer))


def test_statistics_that_workers_share():
    """An EnvCreator gives all its envs one VecNorm."""
    env = parallel(EnvCreator(normalised), lanes=2)
    collector, lanes = in_processes(env, policy_for("CartPole-v1"))
    assert isinstance(lanes, ParallelLanes)
    for _ in range(3):
        collector.next()
    state = env.state_dict()
    collector.shutdown()
    assert seen(state, 0) == seen(state, 1) > 50  # of both lanes' sixty frames
    assert seen(state, 0, "sum") == seen(state, 1, "sum")


@slow
def test_in_workers_of_a_collector():
    make = functools.partial(parallel, functools.partial(transformed, "CartPole-v1"), 2)
    with no_leaks():
        collector = MultiSyncCollector([make, make], policy_for("CartPole-v1"), frames_per_batch=40, total_frames=80)
        assert [batch.numel() for batch in collector] == [40, 40]
        collector.shutdown()
        del collector


def test_without_capture_and_with_random_actions():
    env = parallel(functools.partial(transformed, "CartPole-v1"), lanes=2)
    collector, _ = in_processes(env, capture=False, max_frames_per_traj=None)
    assert "TorchRL steps it" in collector.explain()
    batch = collector.next()
    assert (batch["action"].sum(-1) == 1).all()
    collector.shutdown()
