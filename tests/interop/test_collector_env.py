"""`collector.env`: the user's own TorchRL env, whichever way reap steps it."""

import copy
import pickle

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.testing import mocking_classes as mocks

from reap.collectors import Collector, MultiSyncCollector

pytestmark = pytest.mark.filterwarnings("ignore")
MADE = {
    "bare": lambda: GymEnv("CartPole-v1"),
    "transformed": lambda: TransformedEnv(GymEnv("CartPole-v1"), RewardSum()),
    "lanes": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    "transformed lanes": lambda: TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), StepCounter()),
    "lanes that are transformed": lambda: SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter())),
}


@pytest.fixture(params=list(MADE))
def make(request):
    return MADE[request.param]


def firsts(batch):
    """The first observation of every lane."""
    rows = batch["observation"]
    return rows.reshape(-1, rows.shape[-2], 4)[:, 0]


def test_it_is_the_env_that_was_given(make):
    env = make()
    with Collector(env, None, frames_per_batch=4) as collector:
        assert collector.env is env
        assert collector.getattr_env("full_action_spec_unbatched") == env.full_action_spec_unbatched
        assert collector.env.reset()["observation"].shape == (*env.batch_size, 4)


def test_the_env_of_a_worker():
    with MultiSyncCollector([MADE["bare"]] * 2, None, frames_per_batch=8) as collector:
        assert collector.getattr_env("full_action_spec_unbatched") == GymEnv("CartPole-v1").full_action_spec_unbatched
        assert [root["observation"].shape for root in collector.map_fn("env.reset")] == [(4,), (4,)]


def test_moved_by_hand_it_begins_anew(make):
    """Rows must follow from one another: after `env.reset()` the observation acted on is one of a new episode."""
    with Collector(make(), None, frames_per_batch=8) as collector:
        before = collector.next()["collector", "traj_ids"]
        collector.env.reset()
        collector.env.rollout(3)
        batch = collector.next()
        assert batch["collector", "traj_ids"].min() > before.max()
        assert bool((firsts(batch).abs() <= 0.05).all())  # CartPole's first states


def test_moved_by_hand_and_reset_it_begins_anew_once(make):
    """Not again with the next batch: where it was seeded, the seeded state would be gone."""
    with Collector(make(), None, frames_per_batch=8) as collector:
        collector.next()
        collector.env.rollout(3)
        collector.set_seed(3)
        want = torch.as_tensor(gym.make("CartPole-v1").reset(seed=3)[0])
        assert torch.equal(firsts(collector.next())[0], want)
    own = gym.make("CartPole-v1")
    own.reset(seed=3)
    with Collector(GymEnv("CartPole-v1"), None, frames_per_batch=8) as collector:
        collector.env.set_seed(3)
        collector.reset()
        assert torch.equal(firsts(collector.next())[0], torch.as_tensor(own.reset()[0]))


def test_looking_at_it_begins_nothing():
    env = mocks.CountingEnv(max_steps=100)
    policy = TensorDictModule(lambda o: torch.ones_like(o, dtype=torch.int8), ["observation"], ["action"])
    with Collector(env, policy, frames_per_batch=4) as collector:
        for begin in (0, 4, 8):
            assert collector.env.max_steps == 100
            assert collector.next()["observation"].reshape(-1).tolist() == list(range(begin, begin + 4))


def test_an_env_that_was_handed_out_can_still_be_copied():
    env = GymEnv("CartPole-v1")
    with Collector(env, None, frames_per_batch=4) as collector:
        for twin in (copy.deepcopy(collector.env), pickle.loads(pickle.dumps(collector.env))):
            assert twin is not env
            assert twin.rollout(2)["observation"].shape == (2, 4)
        first = collector.next()["collector", "traj_ids"][0]
        assert first == 0  # the copies moved nothing here
    assert not {"reset", "step"} & vars(env).keys()


def test_after_set_seed_every_env_begins_in_the_seeded_state(make):
    want = torch.as_tensor(gym.make("CartPole-v1").reset(seed=3)[0])
    found = []
    for kind in (
        lambda: Collector(make(), None, frames_per_batch=8),
        lambda: MultiSyncCollector([make], None, frames_per_batch=8),
    ):
        with kind() as collector:
            collector.set_seed(3)
            found.append(firsts(collector.next()))
            assert torch.equal(found[-1][0], want)
    assert torch.equal(*found)


def test_lanes_are_seeded_alike_however_they_are_wrapped():
    found = []
    for name in ("lanes", "transformed lanes", "lanes that are transformed"):
        for static in (False, True):
            with Collector(MADE[name](), None, frames_per_batch=8) as collector:
                collector.set_seed(3, static_seed=static)
                found.append(firsts(collector.next()))
    for other in (found[0::2], found[1::2]):
        assert all(torch.equal(other[0], one) for one in other)


def test_a_trainer_of_torchrls_finds_the_action_spec():
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import SACLoss, SoftUpdate
    from torchrl.trainers.algorithms.sac import SACTrainer

    net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 2), NormalParamExtractor())
    env = GymEnv("Pendulum-v1")
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        spec=env.action_spec,
    )
    actor(env.reset())

    class Q(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, observation, action):
            return self.net(torch.cat([observation, action], -1))

    loss = SACLoss(actor, ValueOperator(Q(), in_keys=["observation", "action"]), action_spec=env.action_spec)
    loss.make_value_estimator(gamma=0.99)
    trainer = SACTrainer(
        collector=Collector(env, actor, frames_per_batch=20, total_frames=60),
        total_frames=60,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), 1e-3),
        logger=None,
        replay_buffer=TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8),
        target_net_updater=SoftUpdate(loss, tau=0.01),
        progress_bar=False,
        enable_logging=False,
    )
    trainer.train()
    assert trainer.collected_frames == 60
