"""Every option of the single collector, on the predictable world, comparing whole arrays."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, TensorDictModule
from torch import nn

from reap.collectors import Collector, Evaluator
from reap.collectors.utils import split_trajectories
from reap.envs import GymEnv, SerialEnv
from reap.errors import UsageError, WrongArgument
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.testing.backend import LENGTHS, counting_lanes
from tests import example_count


def lanes(lengths=LENGTHS):
    return counting_lanes(tuple(map(tuple, lengths)))()


def collector(lengths=LENGTHS, policy=None, **options):
    options.setdefault("frames_per_batch", 12)
    return Collector(lanes(lengths), policy or EchoPolicy(), **options)


@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4),
    steps=st.integers(1, 7),
    batches=st.integers(1, 6),
    limit=st.none() | st.integers(1, 5),
)
@settings(max_examples=example_count(60), deadline=None)
def test_any_pattern_of_episodes(lengths, steps, batches, limit):
    world = CountingWorld(lengths, limit=limit)
    for _, batch in zip(
        range(batches), collector(lengths, frames_per_batch=steps * len(lengths), max_frames_per_traj=limit)
    ):
        assert_same(batch, world.batch(steps))


@pytest.mark.parametrize("steps", [1, 3, 1024, 1025, 2500])
def test_long_rollouts_are_cut_in_chunks(steps):
    world = CountingWorld(LENGTHS)
    c = collector(frames_per_batch=steps * 3)
    for _ in range(2):
        assert_same(c.next(), world.batch(steps))


def test_frames_per_batch_is_rounded_up_with_a_warning():
    with pytest.warns(UserWarning, match="frames_per_batch=10 is not a multiple of 3 lanes; batches hold 12"):
        c = collector(frames_per_batch=10)
    assert c.requested_frames_per_batch == 12
    assert c.frames_per_batch == 4
    assert_same(c.next(), CountingWorld(LENGTHS).batch(4))


def test_total_frames_overshoots_to_a_whole_batch():
    with pytest.warns(UserWarning, match="total_frames=25"):
        c = collector(total_frames=25)
    assert len(c) == 3
    assert [b.numel() for b in c] == [12, 12, 12]
    assert c.next() is None


@pytest.mark.parametrize("total", [-1, None])
def test_endless(total):
    c = collector(total_frames=total)
    assert sum(1 for _, _ in zip(range(50), c)) == 50
    with pytest.raises(TypeError, match="endless"):
        len(c)


def test_zero_frames_is_no_batch():
    assert list(collector(total_frames=0)) == []


def test_max_frames_per_traj():
    world = CountingWorld(LENGTHS, limit=2)
    for _, batch in zip(range(10), collector(max_frames_per_traj=2)):
        assert_same(batch, world.batch(4))


def test_max_frames_per_traj_keeps_termination_at_the_limit():
    world = CountingWorld([(2,)], limit=2)
    batch = collector([(2,)], frames_per_batch=8, max_frames_per_traj=2).next()
    assert_same(batch, world.batch(8))
    both = batch["next", "terminated"] & batch["next", "truncated"]
    assert both.any()


def test_max_frames_per_traj_refuses_an_env_that_counts_already():

    class Counts(CountingEnv):
        observation_space = gym.spaces.Dict(step_count=CountingEnv.observation_space)

        def _observation(self):
            return {"step_count": super()._observation()}

    with pytest.raises(ValueError, match="step_count"):
        Collector(GymEnv(Counts()), frames_per_batch=4, max_frames_per_traj=3)


def test_reset_at_each_iter():
    world = CountingWorld(LENGTHS)
    for _, batch in zip(range(8), collector(reset_at_each_iter=True)):
        world.begin_again()
        assert_same(batch, world.batch(4))


def test_reset_all_and_some():
    c, world = collector(), CountingWorld(LENGTHS)
    assert_same(c.next(), world.batch(4))
    c.reset()
    world.begin_again()
    assert_same(c.next(), world.batch(4))
    for index in (1, [1], torch.tensor([False, True, False])):
        c.reset(index)
        world._next_episode(1)
        assert_same(c.next(), world.batch(4))
    with pytest.raises(ValueError, match="there are 3"):
        c.reset(5)


def resting(world: CountingWorld, steps: int) -> dict:
    """What `reset_when_done=False` delivers: each lane's rows up to its end, then nothing."""
    shadow = world.batch(steps)
    done = shadow[("next", "done")][..., 0]
    valid = np.cumsum(done, 1) - done == 0
    for key, column in shadow.items():
        column[~valid] = -1 if key == ("collector", "traj_ids") else 0
    shadow[("collector", "mask")] = valid
    return shadow


def test_reset_when_done_false():
    # Lanes end after 3, 2 and 6 steps; batches of 4: the first two rest, the third goes on into the next batch.
    lengths = [(3,), (2,), (6,)]
    c = collector(lengths, reset_when_done=False)
    first = c.next()
    assert_same(first, resting(CountingWorld(lengths), 4))
    mask = first["collector", "mask"]
    assert mask.tolist() == [[True] * 3 + [False], [True] * 2 + [False] * 2, [True] * 4]
    second = c.next()
    assert second["collector", "mask"].tolist() == [
        [True] * 3 + [False],
        [True] * 2 + [False] * 2,
        [True] * 2 + [False] * 2,
    ]
    assert second["observation"][0, :, 1].tolist() == [1, 1, 1, 0]  # lane 0 is in its next episode
    assert second["observation"][2, :2, 2].tolist() == [4, 5]  # lane 2 went on
    assert second["collector", "traj_ids"].tolist() == [[3, 3, 3, -1], [4, 4, -1, -1], [2, 2, -1, -1]]
    assert c.stats()["frames"] == int(mask.sum() + second["collector", "mask"].sum())


def test_reset_when_done_false_ends_early_when_all_rest():
    c = collector([(2,), (2,)], frames_per_batch=20, reset_when_done=False)
    batch = c.next()
    assert batch["collector", "mask"].sum(1).tolist() == [2, 2]
    assert (batch["observation"][:, 2:] == 0).all()
    assert c.next()["observation"][:, 0, 1].tolist() == [1, 1]


def test_reset_when_done_false_and_split():
    split = collector([(3,), (2,), (6,)], reset_when_done=False, split_trajs=True).next()
    assert split["collector", "mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert split["observation"][..., 2].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0], [0, 1, 2, 3]]


def test_set_truncated_marks_the_last_step_and_nothing_else():
    world = CountingWorld(LENGTHS)
    for _, batch in zip(range(5), collector(set_truncated=True)):
        want = world.batch(4)
        want[("next", "truncated")][:, -1] = True
        want[("next", "done")][:, -1] = True
        assert_same(batch, want)


def test_split_trajs():
    world = CountingWorld(LENGTHS)
    for _, batch in zip(range(5), collector(split_trajs=True)):
        flat = {k: v.reshape(-1, *v.shape[2:]) for k, v in world.batch(4).items()}
        mask = batch["collector", "mask"]
        assert batch.ndim == 2
        rows = batch[mask]
        for key, want in flat.items():
            assert np.array_equal(rows[key].numpy(), want), key
        ids = batch["collector", "traj_ids"]
        assert all(len(set(i[m].tolist())) == 1 for i, m in zip(ids, mask))
        assert (batch["observation"][~mask] == 0).all()


def test_postproc_after_split_and_before_the_hook():
    calls = []

    def postproc(batch):
        calls.append(("postproc", batch.ndim, ("collector", "mask") in batch.keys(True)))
        return batch.set("extra", torch.ones(batch.batch_size))

    c = collector(
        split_trajs=True,
        postproc=postproc,
        pre_collect_hook=lambda: calls.append("pre"),
        post_collect_hook=lambda b: calls.append(("post", "extra" in b.keys())),
    )
    assert "extra" in c.next().keys()
    assert calls == ["pre", ("postproc", 2, True), ("post", True)]


def test_postproc_returning_none_is_named():
    with pytest.raises(UsageError, match="postproc returned None"):
        collector(postproc=lambda batch: None).next()


def test_hooks_can_be_set_later():
    c = collector()
    seen = []
    c.post_collect_hook = seen.append
    with pytest.raises(WrongArgument, match="post_collect_hook must be callable, got int"):
        c.post_collect_hook = 5
    batch = c.next()
    assert seen[0] is batch


def test_track_traj_ids_false_removes_the_entry():
    want = CountingWorld(LENGTHS).batch(4)
    del want[("collector", "traj_ids")]
    assert_same(collector(track_traj_ids=False).next(), want)
    with pytest.raises(ValueError, match="track_traj_ids"):
        collector(track_traj_ids=False, split_trajs=True)


def test_return_same_td_is_one_object():
    c, world = collector(return_same_td=True), CountingWorld(LENGTHS)
    seen = set()
    for _, batch in zip(range(5), c):
        assert_same(batch, world.batch(4))
        seen.add((id(batch), batch["observation"].data_ptr()))
    assert len(seen) == 1


def test_return_same_td_with_storing_device():
    c, world = collector(return_same_td=True, storing_device="cpu"), CountingWorld(LENGTHS)
    first = c.next()
    assert_same(first, world.batch(4))
    assert c.next() is first
    assert_same(first, world.batch(4))
    assert first.device == torch.device("cpu")


class After:
    """Says stop after so many questions, again and again."""

    def __init__(self, steps):
        self.steps, self.asked = steps, 0

    def collection_stopped(self):
        self.asked += 1
        return self.asked % self.steps == 0


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_interruptor_masks_what_was_not_collected(stop_after):
    c, world = collector(interruptor=After(stop_after)), CountingWorld(LENGTHS)
    for _ in range(12):  # ends fall on, before and after the interruption
        batch = c.next()
        mask = batch["collector", "mask"]
        assert mask.tolist() == [[True] * stop_after + [False] * (4 - stop_after)] * 3
        want = world.batch(stop_after)
        del want[("collector", "traj_ids")]
        for key, column in want.items():
            assert np.array_equal(batch[key][:, :stop_after].numpy(), column), key
            assert (batch[key][:, stop_after:] == 0).all()
        assert (batch["collector", "traj_ids"][:, stop_after:] == -1).all()


def test_interrupted_ids_are_unique_and_persist():
    c = collector(interruptor=After(2))
    episodes: dict[int, set] = {}
    for _ in range(20):
        batch = c.next()
        for lane, episode, traj in zip(
            batch["observation"][:, :2, 0].reshape(-1).tolist(),
            batch["observation"][:, :2, 1].reshape(-1).tolist(),
            batch["collector", "traj_ids"][:, :2].reshape(-1).tolist(),
        ):
            episodes.setdefault(traj, set()).add((lane, episode))
    assert all(len(who) == 1 for who in episodes.values())


def test_init_random_frames_counts_delivered_frames():
    with pytest.warns(UserWarning, match="init_random_frames=15"):
        c = collector(
            [(9,)],
            lambda observation: (observation[:1] * 0 + 100, observation),
            frames_per_batch=10,
            init_random_frames=15,
        )
    batches = [c.next() for _ in range(3)]
    assert all((b["action"] != 100).all() for b in batches[:2])
    assert all((b["output1"] == 0).all() for b in batches[:2])
    assert (batches[2]["action"] == 100).all()
    assert torch.equal(batches[2]["output1"], batches[2]["observation"])


def test_random_actions_follow_torch_seed_and_space():
    def run():
        torch.manual_seed(3)
        return Collector("CartPole-v1", frames_per_batch=200).next()["action"]

    actions = run()
    assert torch.equal(actions, run())
    assert (actions.sum(-1) == 1).all()
    assert actions.float().mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.15)


def test_track_policy_version_and_all_forms_of_weights():
    policy = EchoPolicy()
    c = collector([(4,)], policy, frames_per_batch=4, track_policy_version=True)

    def check(version, weight):
        batch = c.next()
        assert batch["policy_version"].tolist() == [version] * 4
        assert batch["next", "policy_version"].tolist() == [version] * 4
        assert batch["policy_version"].dtype is torch.int64
        want = (batch["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1, keepdim=True) * weight
        assert torch.equal(batch["action"], want)

    check(0, 1.0)
    other = EchoPolicy()
    forms = [
        lambda w: ((other,), {}),
        lambda w: ((TensorDict.from_module(other),), {}),
        lambda w: ((other.state_dict(),), {}),
        lambda w: ((), {"weights": dict(other.state_dict())}),
        lambda w: ((), {"policy": other}),
        lambda w: ((), {"weights": {0: other.state_dict()}, "worker_ids": 0}),
        lambda w: ((), {"weights_dict": {"policy": other}}),
        lambda w: ((other,), {"model_id": "policy"}),
        lambda w: (({"weight": torch.tensor(w)},), {}),
    ]
    for i, form in enumerate(forms, 1):
        with torch.no_grad():
            other.weight.fill_(float(i))
        args, kwargs = form(float(i))
        c.update_policy_weights_(*args, **kwargs)
        check(i, float(i))
    with torch.no_grad():
        policy.weight.fill_(0.5)
    c.update_policy_weights_()
    check(len(forms) + 1, 0.5)
    assert c.policy_version == len(forms) + 1 == c.get_policy_version() == c.stats()["policy_version"]


def test_weights_that_do_not_fit_change_nothing():
    policy = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    c = collector([(4,)], policy, frames_per_batch=4)
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    bad = {k: v + 1 for k, v in policy.state_dict().items()}
    with pytest.raises(UsageError, match="'1.weights'.*did you mean '1.weight'"):
        c.update_policy_weights_({**bad, "1.weights": torch.zeros(1)})
    with pytest.raises(UsageError, match="lack 1.*'1.bias'"):
        c.update_policy_weights_({k: v for k, v in bad.items() if k != "1.bias"})
    with pytest.raises(UsageError, match="shape"):
        c.update_policy_weights_({**bad, "1.weight": torch.zeros(2, 2)})
    with pytest.raises(UsageError, match="once"):
        c.update_policy_weights_(policy, weights=bad)
    with pytest.raises(KeyError, match="critic"):
        c.update_policy_weights_(weights_dict={"critic": bad})
    with pytest.raises(UsageError, match="worker 0 only"):
        c.update_policy_weights_(bad, worker_ids=[1])
    with pytest.raises(TypeError, match="int"):
        c.update_policy_weights_(3)
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())
    assert c.policy_version == 0


def test_a_random_policy_has_no_weights():
    with pytest.raises(RuntimeError, match="no weights"):
        Collector("CartPole-v1", frames_per_batch=4).update_policy_weights_()


def test_policy_factory():
    made = []

    def factory():
        made.append(EchoPolicy())
        return made[-1]

    c = Collector(lanes(), policy_factory=factory, frames_per_batch=12)
    assert len(made) == 1
    assert c.policy is made[0]
    assert_same(c.next(), CountingWorld(LENGTHS).batch(4))
    c.update_policy_weights_({"weight": torch.tensor(2.0)})
    with pytest.raises(TypeError, match="not both"):
        Collector(lanes(), EchoPolicy(), policy_factory=factory, frames_per_batch=12)


def test_create_env_fn_in_every_form():
    want = CountingWorld([(3, 1, 5)]).batch(6)
    for env in (
        CountingEnv(),
        GymEnv(CountingEnv()),
        CountingEnv,
        lambda: CountingEnv(),
        lambda: GymEnv(CountingEnv()),
        [CountingEnv],
    ):
        assert_same(Collector(env, EchoPolicy(), frames_per_batch=6).next(), want)
    batch = Collector(CountingEnv, EchoPolicy(), frames_per_batch=6, create_env_kwargs={"lengths": (2,)}).next()
    assert_same(batch, CountingWorld([(2,)]).batch(6))
    assert Collector("CartPole-v1", frames_per_batch=6).next()["observation"].shape == (6, 4)
    with pytest.raises(RuntimeError, match="create_env_kwargs"):
        Collector(GymEnv(CountingEnv()), frames_per_batch=6, create_env_kwargs={"lane": 1})
    with pytest.raises(ValueError, match="takes one env"):
        Collector([CountingEnv, CountingEnv], frames_per_batch=6)


def test_devices():
    plain = collector()
    assert plain.next().device is None
    for options in ({"device": "cpu"}, {"storing_device": "cpu"}, {"env_device": "cpu", "policy_device": "cpu"}):
        batch = collector(**options).next()
        assert batch.device == torch.device("cpu")
        assert_same(batch, CountingWorld(LENGTHS).batch(4))
    assert collector(policy_device="cpu").next().device is None
    policy = EchoPolicy()
    assert collector(policy=policy, policy_device="cpu").policy is policy  # it is there already: no copy


def test_policy_device_elsewhere_is_a_copy_updated_explicitly():
    policy = EchoPolicy().to("meta")
    from reap.weights.local import moved_to

    source = EchoPolicy()
    assert moved_to(source, torch.device("cpu")) is source
    moved = moved_to(source, torch.device("meta"))
    assert moved is not source
    assert moved.weight.device.type == "meta"
    assert source.weight.device.type == "cpu"
    assert policy.weight.device.type == "meta"


def test_exploration_type():
    class Coin(nn.Module):
        def forward(self, observation):
            return torch.zeros(*observation.shape[:-1], 1), torch.ones(*observation.shape[:-1], 1)

    from tensordict.nn import ProbabilisticTensorDictSequential

    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(Coin(), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal),
    )
    assert (collector(policy=policy).next()["action"] != 0).all()
    for kind in (InteractionType.MODE, "mean", InteractionType.DETERMINISTIC):
        assert (collector(policy=policy, exploration_type=kind).next()["action"] == 0).all()
    with pytest.raises(UsageError, match="exploration_type must be one of"):
        collector(policy=policy, exploration_type="wild")


def test_set_seed_returns_the_chain_and_begins_again():
    assert Collector(GymEnv("CartPole-v1"), frames_per_batch=3).set_seed(1) == 4087425277
    c = Collector(SerialEnv(3, "CartPole-v1"), frames_per_batch=3)
    assert c.set_seed(1) == 1864546186
    assert c.set_seed(5, static_seed=True) == 5
    same = c.next()["observation"]
    assert torch.equal(same[0], same[1])
    assert c.next()["collector", "traj_ids"][0].min() == 0  # nothing was burnt
    with pytest.raises(TypeError, match="seed"):
        c.set_seed("x")


def test_set_seed_in_the_middle_starts_new_trajectories():
    c = Collector("CartPole-v1", frames_per_batch=5)
    c.next()
    c.set_seed(3)
    again = c.next()
    assert again["collector", "traj_ids"][0] > 0

    assert np.array_equal(again["observation"][0], gym.make("CartPole-v1").reset(seed=3)[0])


def test_state_dict_layout():
    c = collector([(4,)], total_frames=48)
    c.next()
    state = c.state_dict()
    usual = {"policy_state_dict", "env_state_dict", "frames", "iter", "traj_pool", "policy_version"}
    assert set(state) == usual | {"resume", "episodes"}  # what TorchRL has, and what it takes to go on
    assert (state["frames"], state["iter"]) == (12, 0)  # iter is the index of the last batch
    with pytest.raises(UsageError, match="lacks"):
        c.load_state_dict({"frames": 1})


def test_rollout_is_not_counted():
    c, world = collector(total_frames=12), CountingWorld(LENGTHS)
    assert_same(c.rollout(), world.batch(4))
    assert_same(c.next(), world.batch(4))
    assert c.next() is None
    assert c.stats()["frames"] == 12


def test_stats():
    c = collector([(3,), (2,)], frames_per_batch=20, total_frames=40)
    list(c)
    stats = c.stats()
    assert {
        "frames": 40,
        "batches": 2,
        "total_frames": 40,
        "completed": True,
        "requested_frames_per_batch": 20,
        "policy_version": 0,
        "nan_rewards": 0,
    }.items() <= stats.items()
    assert stats["episodes"] == 6 + 10
    assert stats["mean_length"] == pytest.approx((6 * 3 + 10 * 2) / 16)


@given(
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3),
    steps=st.integers(1, 6),
    batches=st.integers(1, 6),
)
@settings(max_examples=example_count(40), deadline=None)
def test_returns_and_lengths_are_those_of_the_episodes(lengths, steps, batches):
    c = collector(lengths, frames_per_batch=steps * len(lengths))
    open_, returns, sizes = [0.0] * len(lengths), [], []
    length = [0] * len(lengths)
    for _ in range(batches):
        batch = c.next()
        batch = batch.reshape(len(lengths), steps)
        for t in range(steps):
            for lane in range(len(lengths)):
                open_[lane] += float(batch["next", "reward"][lane, t])
                length[lane] += 1
                if batch["next", "done"][lane, t]:
                    returns.append(open_[lane])
                    sizes.append(length[lane])
                    open_[lane], length[lane] = 0.0, 0
    found = c.episodes()
    assert [one["return"] for one in found] == pytest.approx(returns)
    assert [one["length"] for one in found] == sizes
    assert c.stats()["episodes"] == len(returns)


def test_repr_says_what_will_be_collected():
    text = repr(collector(total_frames=120))
    assert "3 lanes × 4 steps = 12 frames per batch" in text
    assert "120 in all (10 batches)" in text
    assert "EchoPolicy" in text
    assert "without end" in repr(collector())


def test_legacy_names_and_arguments():
    import reap.collectors as module

    with pytest.warns(DeprecationWarning, match="SyncDataCollector is called Collector"):
        assert module.SyncDataCollector is Collector
    with pytest.warns(DeprecationWarning, match="DataCollectorBase"):
        assert issubclass(Collector, module.DataCollectorBase)
    with pytest.warns(DeprecationWarning) as caught:
        c = collector(devices="cpu", passing_devices="cpu", exploration_mode="mode")
    assert {str(w.message).split()[0] for w in caught} == {"devices", "passing_devices", "exploration_mode"}
    assert c.next().device == torch.device("cpu")
    with pytest.raises(ValueError, match="same option"), pytest.warns(DeprecationWarning):
        collector(exploration_mode="mode", exploration_type="mean")


def test_compile_policy():
    torch._dynamo.reset()
    options = {"backend": "eager"}
    batch = collector(compile_policy=options).next()
    assert_same(batch, CountingWorld(LENGTHS).batch(4))
    policy = TensorDictModule(EchoPolicy(), ["observation"], ["action"])
    assert_same(collector(policy=policy, compile_policy=options).next(), CountingWorld(LENGTHS).batch(4))


def test_trust_policy_takes_a_tensordict_as_it_is():
    def policy(anything):
        return anything.set("action", EchoPolicy()(anything["observation"]))

    with pytest.raises(Exception, match="policy"):
        collector(policy=policy).next()
    assert_same(collector(policy=policy, trust_policy=True).next(), CountingWorld(LENGTHS).batch(4))


def test_split_trajectories_helper_is_where_scripts_look():
    batch = collector().next()
    assert split_trajectories(batch)["collector", "mask"].any()


def test_no_warning_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c = collector(total_frames=24)
        list(c)
        c.shutdown()


def test_sizes_as_numpy_and_floats_have_them():
    c = Collector(CountingEnv(), EchoPolicy(), frames_per_batch=np.int64(4), total_frames=8.0)
    assert len(list(c)) == 2
    with pytest.raises(TypeError, match="whole number"):
        Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4.5)


def test_warnings_point_at_the_caller():
    with pytest.warns(UserWarning, match="total_frames=5") as caught:
        Collector(CountingEnv(), frames_per_batch=4, total_frames=5)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning) as caught:
        Collector(CountingEnv(), frames_per_batch=4, exploration_mode="mode")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (
            Collector,
            {"num_workers": 2},
            r"'num_workers'; worker processes are MultiSyncCollector.* num_collectors=2\)$",
        ),
        (Collector, {"timeout": 3}, r"'timeout': it is for collectors with.*ParallelEnv\(…, timeout=…\)$"),
        (Collector, {"cat_results": 0}, "'cat_results': it is for collectors with worker processes$"),
        (Collector, {"frame_per_batch": 3}, "'frame_per_batch'; did you mean 'frames_per_batch'"),
        (Evaluator, {"num_episodes": 3}, "'num_episodes'; did you mean 'num_trajectories'"),
        (Evaluator, {"max_step": 3}, "'max_step'; did you mean 'max_steps'"),
    ],
)
def test_the_option_that_is_meant_is_named(kind, given, words):
    options = {"frames_per_batch": 4} | given
    with pytest.raises(WrongArgument, match=words):
        kind(CountingEnv, EchoPolicy(), **options)
