"""Bugs that were found by reading or by trying; each failed before it was mended."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from benchmarks.envs_and_policies import Crowd
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions, nn

from reap.collectors import Collector, Evaluator, MultiSyncCollector, RandomPolicy
from reap.envs import EnvPoolEnv, GymEnv, PettingZooEnv, SerialEnv, TorchEnv
from reap.errors import SpecMismatch, UsageError, WorkerRaised, WrongState
from reap.spec import Leaf
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.trajectories import with_next
from tests.envs.test_pettingzoo import PLAN, Town
from tests.envs.test_torch_native import CountingTorch
from tests.envs.test_turns import Table
from tests.envs.test_world import CountingVector


class Steps(nn.Module):
    carry = {"seen": torch.zeros(1)}

    def forward(self, observation, seen):
        return observation[..., :1], seen + 1


def test_memory_where_a_step_is_spent_on_a_reset():
    c = Collector(CountingVector([(3,), (2,)], AutoresetMode.NEXT_STEP), Steps(), frames_per_batch=40)
    for _ in range(3):
        batch = c.next()
        rows = batch[batch["collector", "mask"]]
        assert torch.equal(rows["seen"], rows["observation"][:, 2:])
        assert torch.equal(rows["is_init"], rows["observation"][:, 2:] == 0)


def test_memory_of_agents_as_lanes():
    class Stays(nn.Module):
        carry = {"seen": torch.zeros(1)}

        def forward(self, observation, seen):
            return observation[..., :1], seen + 1

    c = Collector(PettingZooEnv(Town(PLAN), mode="lanes"), Stays(), frames_per_batch=40)
    batch = torch.cat([c.next() for _ in range(2)], 1)
    mask = batch["collector", "mask"]
    for lane in range(4):
        count = 0
        for t in range(20):
            if mask[lane, t]:
                assert batch["seen"][lane, t, 0] == count
                count = 0 if batch["next", "done"][lane, t] else count + 1


def test_lanes_that_cannot_be_reset_singly_say_so_at_once():
    town = PettingZooEnv(Town(PLAN), mode="lanes")
    with pytest.raises(UsageError, match="max_frames_per_traj resets single lanes"):
        Collector(town, frames_per_batch=8, max_frames_per_traj=2)
    with pytest.raises(UsageError, match="cannot reset single lanes"):
        Collector(PettingZooEnv(Town(PLAN), mode="lanes"), frames_per_batch=8).reset(0)
    for env in (CountingVector([(3,)], AutoresetMode.SAME_STEP), TorchEnv(CountingTorch([(3,)]))):
        with pytest.raises(UsageError, match="steps all its lanes at once"):
            Collector(env, frames_per_batch=8, reset_when_done=False)


def normal(*followers, **kwargs):
    return TensorDictSequential(
        TensorDictModule(lambda o: (o[..., :1], o[..., :1] * 0 + 1), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=distributions.Normal, return_log_prob=True
        ),
        *followers,
    )


def test_log_prob_of_parameters_a_later_module_overwrites():
    policy = normal(TensorDictModule(lambda o: o[..., :1] * 0 + 100, ["observation"], ["loc"]))
    batch = Collector(CountingEnv(), policy, frames_per_batch=20).next()
    want = distributions.Normal(batch["observation"][:, :1], torch.ones(20, 1)).log_prob(batch["action"])
    assert torch.allclose(batch["action_log_prob"], want)


@pytest.mark.parametrize(
    ("family", "params", "values", "what"),
    [
        (distributions.Normal, ["loc", "scale"], (0.0, -1.0), "not above 0"),
        (distributions.Normal, ["loc", "scale"], (float("nan"), 1.0), "NaN as 'loc'"),
        (distributions.Categorical, ["logits"], (float("inf"),), r"\+inf"),
        (distributions.Categorical, ["logits"], (-float("inf"),), "nothing but -inf"),
    ],
)
def test_parameters_a_distribution_would_refuse(family, params, values, what):
    class Late(nn.Module):
        """Right when it is first tried, wrong later."""

        def __init__(self):
            super().__init__()
            self.bad = False

        def forward(self, o):
            good = (0.0, 1.0) if len(params) == 2 else (0.0,)
            out = tuple(
                torch.full((*o.shape[:-1], 1 if len(params) == 2 else 2), v) for v in (values if self.bad else good)
            )
            return out if len(out) > 1 else out[0]

    class Env(CountingEnv):
        action_space = gym.spaces.Box(-9, 9, (1,), np.float32) if len(params) == 2 else gym.spaces.Discrete(2)

        def step(self, action):
            return super().step(0.0)

    late = Late()
    policy = TensorDictSequential(
        TensorDictModule(late, ["observation"], params),
        ProbabilisticTensorDictModule(params, ["action"], distribution_class=family),
    )
    c = Collector(GymEnv(Env(), categorical_action_encoding=True), policy, frames_per_batch=4)
    late.bad = True
    with pytest.raises(SpecMismatch, match=f"lane 0, step 0: the policy wrote .*{what}"):
        c.next()


def test_what_a_policy_keeps_is_its_own():
    class Delta(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = None

        def forward(self, observation):
            last = observation if self.before is None else self.before
            self.before = observation
            return observation[..., 2:] - last[..., 2:]

    c = Collector(CountingEnv((50,)), Delta(), frames_per_batch=1)
    deltas = [float(c.next()["action"]) for _ in range(8)]
    assert deltas == [0.0] + [1.0] * 7

    def act(td):
        last = td.get("before", td["observation"])
        td["before"] = td["observation"]
        return td.set("action", td["observation"][..., 2:] - last[..., 2:])

    c = Collector(CountingEnv((50,)), act, frames_per_batch=2)
    seen = []
    for _ in range(4):
        batch = c.next()
        seen += batch["action"].reshape(-1).tolist()
        batch["observation"].fill_(1000.0)
    assert seen == [0.0] + [1.0] * 7


def test_a_policy_that_changes_what_it_sees_does_not_change_the_data():
    c = Collector(CountingEnv(), lambda observation: observation.mul_(3)[..., :1] * 0, frames_per_batch=9)
    want = CountingWorld([(3, 1, 5)]).batch(9)
    assert np.array_equal(c.next()["observation"].numpy(), want[("observation",)][0])


def test_fewer_outputs_than_before():
    class Fewer(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, observation):
            self.calls += 1
            return (observation[..., :1], observation) if self.calls < 3 else (observation[..., :1],)

    with pytest.raises(SpecMismatch, match="step 2: the policy returned 1 tensors now; before there were .*'output1'"):
        Collector(CountingEnv(), Fewer(), frames_per_batch=5).next()

    def vanishing(td):
        vanishing.calls += 1
        td.set("action", td["observation"][..., :1])
        return td.set("extra", td["action"]) if vanishing.calls < 3 else td.select("action")

    vanishing.calls = 0
    with pytest.raises(SpecMismatch, match="did not write 'extra' this time"):
        Collector(CountingEnv(), vanishing, frames_per_batch=5).next()


@pytest.mark.parametrize("name", ["reward", "done", "truncated", "next", "collector", "action", "policy_version"])
def test_names_that_are_taken(name):
    class Named(CountingEnv):
        observation_space = gym.spaces.Dict({name: CountingEnv.observation_space, "x": CountingEnv.observation_space})

        def _observation(self):
            return {name: super()._observation(), "x": super()._observation()}

    with pytest.raises(SpecMismatch, match=f"'{name}'.*rename it"):
        Collector(Named(), frames_per_batch=3)
    if name == "reward":
        with pytest.raises(SpecMismatch, match="rename it"):
            Collector(GymEnv(CountingEnv(), info_keys=["reward"]), frames_per_batch=3)


def test_whole_episodes_of_a_seeded_or_restored_run_begin_there():
    c = Collector(CountingEnv((5,)), EchoPolicy(), frames_per_batch=3, trajs_per_batch=1)
    c.next()
    c.set_seed(1)
    assert c.next()["observation"][0, 0].tolist() == [0, 0, 0]
    c.load_state_dict(c.state_dict())
    assert c.next()["observation"][0, :, 2].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match="set_truncated"):
        Collector(CountingEnv(), frames_per_batch=3, trajs_per_batch=1, set_truncated=True)


def test_set_truncated_marks_the_last_frame_of_a_short_batch():
    class Stop:
        def collection_stopped(self):
            Stop.n = getattr(Stop, "n", 0) + 1
            return Stop.n % 2 == 0

    batch = Collector(
        SerialEnv(2, lambda: CountingEnv((9,))),
        EchoPolicy(),
        frames_per_batch=8,
        set_truncated=True,
        interruptor=Stop(),
    ).next()
    assert batch["next", "truncated"][..., 0].tolist() == [[False, True, False, False]] * 2
    assert batch["next", "done"][..., 0].tolist() == [[False, True, False, False]] * 2


def test_lanes_that_are_one_env():
    env = CountingEnv()
    for make in (env, lambda: env):
        with pytest.raises(UsageError, match="same env object"):
            SerialEnv(2, make)


def test_a_seed_given_to_the_env_by_hand_is_used():
    env = GymEnv("CartPole-v1")
    env.set_seed(5)
    batch = Collector(env, frames_per_batch=3).next()
    assert np.array_equal(batch["observation"][0], gym.make("CartPole-v1").reset(seed=5)[0])


def test_compact_refuses_what_it_could_not_rebuild():
    overwrites = TensorDictSequential(
        TensorDictModule(lambda o: o + 1, ["observation"], ["observation"]),
        TensorDictModule(lambda o: o[..., :1], ["observation"], ["action"]),
    )
    with pytest.raises(UsageError, match="the policy overwrites"):
        Collector(CountingEnv(), overwrites, frames_per_batch=4, compact_obs=True)
    batch = Collector(SerialEnv(2, CountingEnv), EchoPolicy(), frames_per_batch=8, compact_obs=True).next()
    for bad in (batch.reshape(-1), batch[:, :2]):
        with pytest.raises(UsageError, match="neither cut nor reshaped|as a compact_obs collector delivers it"):
            with_next(bad)


def test_lengths_count_frames_only():
    c = Collector(CountingVector([(3,), (2,)], AutoresetMode.NEXT_STEP), EchoPolicy(), frames_per_batch=40)
    for _ in range(3):
        c.next()
    assert set(c._inline.worker.stats.lengths) == {2, 3}


def test_by_hand_and_by_collector_in_turn():
    class Two(CountingEnv):
        action_space = gym.spaces.Discrete(2)

        def step(self, action):
            self.got = action
            return super().step(0.0)

    inner = Two()
    env = GymEnv(inner)
    c = Collector(env, lambda observation: torch.tensor(1), frames_per_batch=2)
    c.next()
    env.step(env.reset().set("action", torch.tensor([0, 1])))
    assert inner.got == 1
    c.next()
    assert inner.got == 1


def test_rollout_goes_on_where_step_stopped():
    env = GymEnv(CountingEnv((9,)))
    td = env.reset()
    for _ in range(2):
        td = env.step(td.set("action", torch.zeros(1)))["next"]
    out = env.rollout(3, EchoPolicy(), auto_reset=False)
    assert out["observation"][:, 2].tolist() == [2, 3, 4]


def test_torch_env_with_an_offset_and_a_state():
    class Offset(CountingTorch):
        single_observation_space = gym.spaces.Dict(state=CountingEnv.observation_space)
        single_action_space = gym.spaces.Discrete(3, start=5)

        def look(self):
            return {"state": super().look()}

        def step(self, action):
            self.got = action
            return super().step(action.unsqueeze(1).float())

    inner = Offset([(4,), (4,)])
    batch = Collector(TorchEnv(inner), lambda observation: torch.tensor([0, 2]), frames_per_batch=4).next()
    assert inner.got.tolist() == [5, 7]
    assert batch["observation"].shape == (2, 2, 3)


def test_small_things():
    leaf = Leaf((1,), torch.float32, gym.spaces.Box(0, 0.5, (1,), np.float32))
    assert Collector(CountingEnv(), RandomPolicy(leaf), frames_per_batch=50).next()["action"].abs().max() <= 0.5

    class Called(TensorDictModule):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs).set("action", torch.full((1,), 7.0))

    assert (
        Collector(CountingEnv(), Called(EchoPolicy(), ["observation"], ["action"]), frames_per_batch=3).next()["action"]
        == 7
    ).all()

    class NoReward(CountingEnv):
        def step(self, action):
            return (*super().step(action)[:1], None, False, False, {})

    with pytest.raises(SpecMismatch, match="None as the reward"):
        Collector(NoReward(), frames_per_batch=2).next()

    class Wraps(CountingEnv):
        observation_space = gym.spaces.Box(-100, 100, (1,), np.int8)

        def _observation(self):
            return np.array([300])

    with pytest.raises(SpecMismatch, match="int64"):
        Collector(Wraps(), frames_per_batch=2)

    class One(CountingEnv):
        action_space = gym.spaces.Discrete(1, start=4)

        def step(self, action):
            assert action == 4
            return super().step(0.0)

    for categorical in (False, True):
        Collector(GymEnv(One(), categorical_action_encoding=categorical), frames_per_batch=5).next()
    with pytest.raises(SpecMismatch, match="outside MultiDiscrete"):

        class Many(CountingEnv):
            action_space = gym.spaces.MultiDiscrete([2, 2])

        Collector(Many(), lambda observation: torch.tensor([0, 2]), frames_per_batch=2).next()


def test_resting_lanes_show_the_policy_nothing_old():
    seen = []

    def policy(observation):
        seen.append(observation.clone())
        return observation[..., :1]

    c = Collector(
        SerialEnv(2, [lambda: CountingEnv((1,)), lambda: CountingEnv((9,), 1)]),
        policy,
        frames_per_batch=8,
        reset_when_done=False,
    )
    for _ in range(4):
        batch = c.next()
        batch["next", "observation"].fill_(float("nan"))
        del batch
    assert not torch.stack(seen).isnan().any()


def test_a_failed_construction_closes_the_env():
    env = CountingEnv()
    with pytest.raises(UsageError):
        Collector(env, lambda observation: None, frames_per_batch=3)
    assert env.closed


def test_carry_and_overwritten_observations_must_keep_their_look():
    class Grows(nn.Module):
        carry = {"h": torch.zeros(1)}

        def forward(self, observation, h):
            return observation[..., :1], torch.cat([h, h], -1)

    with pytest.raises(SpecMismatch, match=r"writes \('next', 'h'\) as float32\[2\]"):
        Collector(CountingEnv(), Grows(), frames_per_batch=3)
    other = TensorDictModule(lambda o: (o[..., :1], o[..., :2]), ["observation"], ["action", "observation"])
    with pytest.raises(SpecMismatch, match="writes 'observation' as float32.2."):
        Collector(CountingEnv(), other, frames_per_batch=3)
    half = Steps()
    half.carry = {"seen": torch.zeros(1, dtype=torch.bfloat16)}
    with pytest.raises(UsageError, match="bfloat16"):
        Collector(CountingEnv(), half, frames_per_batch=3)


def test_lazy_modules_keep_the_shape_they_found():
    policy = nn.Sequential(nn.LazyLinear(1))
    c = Collector(CountingEnv(), policy, frames_per_batch=3)
    c.next()
    assert policy[0].in_features == 3


def test_sizes_as_numpy_and_floats_have_them():
    c = Collector(CountingEnv(), EchoPolicy(), frames_per_batch=np.int64(4), total_frames=8.0)
    assert len(list(c)) == 2
    with pytest.raises(TypeError, match="whole number"):
        Collector(CountingEnv(), EchoPolicy(), frames_per_batch=4.5)


def test_a_plain_sequential_with_counters_beside_the_observation():
    policy = nn.Sequential(nn.Linear(3, 1))
    Collector(GymEnv(CountingEnv(), info_keys=["episode"]), policy, frames_per_batch=4, max_frames_per_traj=2).next()


def test_warnings_point_at_the_caller():
    with pytest.warns(UserWarning, match="total_frames=5") as caught:
        Collector(CountingEnv(), frames_per_batch=4, total_frames=5)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning) as caught:
        Collector(CountingEnv(), frames_per_batch=4, exploration_mode="mode")
    assert caught[0].filename == __file__


def test_compile_is_not_forgotten():
    calls = []

    def backend(module, inputs):
        calls.append(module)
        return module

    torch._dynamo.reset()
    for policy in (
        EchoPolicy(),
        TensorDictModule(EchoPolicy(), ["observation"], ["action"]),
        lambda td: td.set("action", td["observation"][..., :1]),
    ):
        before = len(calls)
        Collector(CountingEnv(), policy, frames_per_batch=3, compile_policy={"backend": backend}).next()
        assert len(calls) > before


def test_envs_of_others():
    with pytest.raises(TypeError, match="create_env_kwargs must be a mapping"):
        Collector(CountingEnv, frames_per_batch=3, create_env_kwargs=[1])
    with pytest.raises(UsageError, match="has lanes of its own already"):
        SerialEnv(2, lambda: CountingVector([(3,)], AutoresetMode.SAME_STEP))


def test_same_step_without_single_resets_can_begin_again():
    c = Collector(CountingVector([(1,), (5,)], AutoresetMode.SAME_STEP), EchoPolicy(), frames_per_batch=8)
    c.next()
    c.reset()
    batch = c.next()
    assert batch["observation"][:, 0, 2].tolist() == [0, 0]
    with pytest.raises(WorkerRaised):

        class Bad(CountingVector):
            def reset(self, **_):
                raise OSError

        Collector(Bad([(1,)], AutoresetMode.SAME_STEP), frames_per_batch=4)
    assert_same(
        Collector(CountingVector([(2,)], AutoresetMode.SAME_STEP), EchoPolicy(), frames_per_batch=4).next(),
        CountingWorld([(2,)]).batch(4),
    )


def test_a_layer_that_is_used_twice():
    act, tied = nn.Tanh(), nn.Linear(3, 3)
    net = nn.Sequential(tied, act, tied, act, nn.Linear(3, 1))
    batch = Collector(CountingEnv(), TensorDictModule(net, ["observation"], ["action"]), frames_per_batch=9).next()
    with torch.no_grad():
        want = torch.stack([net(o) for o in batch["observation"]])
    assert torch.equal(batch["action"], want)


def test_an_interrupt_while_a_rollout_is_finished():
    c = Collector(CountingEnv((50,)), EchoPolicy(), frames_per_batch=4)
    c.next()
    finish = c._inline.worker.ledger.close

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    c._inline.worker.ledger.close = interrupted
    with pytest.raises(KeyboardInterrupt):
        c.next()
    c._inline.worker.ledger.close = finish
    batch = c.next()
    assert batch["observation"][:, 1:].tolist() == [[1, 0], [1, 1], [1, 2], [1, 3]]  # a new episode …
    assert batch["collector", "traj_ids"].unique().tolist() == [1]  # … with an id of its own


def test_keeping_one_column_keeps_no_other():
    class Image(CountingEnv):
        observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)

        def _observation(self):
            return np.zeros((64, 64, 3), np.uint8)

    c = Collector(Image(), frames_per_batch=50)
    kept = [c.next()["next", "reward"] for _ in range(6)]
    assert all(r.untyped_storage().nbytes() == 200 for r in kept)
    weights = [r.numpy().base for r in kept[2:]]  # copied out of the reserve: nothing of the images hangs on them
    assert all(w is None or getattr(w, "nbytes", 0) <= 200 for w in weights)


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


def test_a_list_is_not_a_tuple():
    with pytest.raises(SpecMismatch, match="as list; tensors are expected"):
        Collector("CartPole-v1", lambda observation: [1, 0], frames_per_batch=3)


def test_layers_made_on_the_first_call_stay():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = None

        def forward(self, observation):
            if self.net is None:
                self.net = nn.Linear(observation.shape[-1], 1)
            return self.net(observation)

    policy = Late()
    c = Collector(CountingEnv(), policy, frames_per_batch=3)
    first = policy.net
    assert first is not None
    c.next()
    assert policy.net is first


def test_a_policy_may_not_take_a_name():
    for name in ("done", "reward", "collector", "step_count"):
        policy = TensorDictModule(lambda o: (o[..., :1], o[..., :1]), ["observation"], ["action", name])
        with pytest.raises(SpecMismatch, match=f"policy writes '{name}'"):
            Collector(CountingEnv(), policy, frames_per_batch=3, max_frames_per_traj=2)


def test_async_vector_env_without_shared_memory():
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv([CountingEnv], shared_memory=False)
    with pytest.raises(UsageError, match="shared_memory=True or another autoreset_mode"):
        Collector(env, frames_per_batch=3)
    env.close()


def test_whole_episodes_that_can_never_come():
    c = Collector(CountingEnv((50,)), EchoPolicy(), frames_per_batch=3, trajs_per_batch=1, reset_at_each_iter=True)
    with pytest.raises(UsageError, match="none can ever be whole"):
        c.next()


def test_whole_episodes_of_a_rollout_without_a_frame():
    env = CountingVector([(1,), (1,)], AutoresetMode.NEXT_STEP)
    c = Collector(env, EchoPolicy(), frames_per_batch=2, trajs_per_batch=4)
    assert c.next()["collector", "mask"].tolist() == [[True]] * 4


def test_masked_rows_have_no_version():
    c = Collector(
        SerialEnv(2, [lambda: CountingEnv((1,)), lambda: CountingEnv((9,), 1)]),
        EchoPolicy(),
        frames_per_batch=8,
        reset_when_done=False,
        track_policy_version=True,
    )
    c.update_policy_weights_()
    batch = c.next()
    assert torch.equal(batch["policy_version"], batch["collector", "mask"].long())


def test_memory_that_begins_elsewhere_and_random_frames():
    policy = Steps()
    policy.carry = {"seen": torch.tensor([5.0])}
    c = Collector(CountingEnv((50,)), policy, frames_per_batch=4, init_random_frames=4)
    c.next()
    assert c.next()["seen"][:, 0].tolist() == [5, 6, 7, 8]


def test_more_wrong_things():
    with pytest.raises(TypeError, match="2\\*\\*63"):
        Collector(CountingEnv(), frames_per_batch=3).set_seed(2**70)
    if not torch.cuda.is_available():
        with pytest.raises(TypeError, match="sees no GPU"):
            Collector(CountingEnv(), frames_per_batch=3, storing_device="cuda")
    with pytest.raises(ValueError, match="there are 1"):
        Collector(CountingEnv(), frames_per_batch=3).reset(0.5)

    class Blind(CountingEnv):
        observation_space = gym.spaces.Dict()

    with pytest.raises(UsageError, match="is empty"):
        Collector(Blind(), frames_per_batch=3)

    class Old(CountingEnv):
        def step(self, action):
            return super().step(action)[:4]

    with pytest.raises(WorkerRaised, match="what env.step returned cannot be read"):
        Collector(Old(), EchoPolicy(), frames_per_batch=3).next()


def test_a_seed_given_by_hand_reaches_an_env_with_a_limit():
    env = GymEnv("CartPole-v1")
    env.set_seed(5)
    batch = Collector(env, frames_per_batch=3, max_frames_per_traj=50).next()
    assert np.array_equal(batch["observation"][0], gym.make("CartPole-v1").reset(seed=5)[0])


def test_set_truncated_marks_frames_only():
    c = Collector(
        PettingZooEnv(Town(PLAN), mode="lanes"),
        lambda observation: observation[..., :1],
        frames_per_batch=4 * 3,
        set_truncated=True,
    )
    for _ in range(4):
        batch = c.next()
        mask, cut = batch["collector", "mask"], batch["next", "truncated"][..., 0]
        assert not cut[~mask].any()
        for lane in range(4):
            frames = mask[lane].nonzero().reshape(-1).tolist()
            assert not frames or cut[lane, frames[-1]]


def test_a_lane_without_a_frame_in_a_rollout_keeps_its_episode():
    """Two players, rollouts of one move each: half of the lanes make no frame, and their episode is not over."""
    c = Collector(Table(length=6), lambda observation: observation[..., :1], frames_per_batch=3, trajs_per_batch=2)
    whole = Collector(Table(length=6), lambda observation: observation[..., :1], frames_per_batch=60, trajs_per_batch=2)
    assert sorted(c.next()["collector", "mask"].sum(-1)) == sorted(whole.next()["collector", "mask"].sum(-1))


def test_what_is_asked_of_no_worker_changes_none():
    policy = EchoPolicy()
    with MultiSyncCollector([CountingEnv] * 2, policy, frames_per_batch=8) as c:
        policy.weight.data.fill_(2.0)
        c.update_policy_weights_(worker_ids=[])
        assert c.policy_version == 0
        assert float(c.next()["action"][..., 1:, :].abs().max()) > 0
        assert [float(w["weight"]) for w in c.map_fn("policy.state_dict")] == [1.0, 1.0]
        c.update_policy_weights_(worker_ids=torch.tensor([1]))
        assert [float(w["weight"]) for w in c.map_fn("policy.state_dict")] == [1.0, 2.0]
    Collector(CountingEnv(), policy, frames_per_batch=3).update_policy_weights_(worker_ids=[])


@pytest.mark.parametrize("bad", [[0, 4], [4, -1], [4.5, 4], ["4", 4], [True, 8]])
def test_frames_of_each_worker_are_checked_here(bad):
    with pytest.raises(UsageError, match="frames_per_batch must be"):
        MultiSyncCollector([CountingEnv] * 2, frames_per_batch=bad)


def test_means_of_workers_count_episodes():
    with MultiSyncCollector(
        [lambda: CountingEnv((2,)), lambda: CountingEnv((20,))],
        lambda observation: observation[..., :1] * 0,
        frames_per_batch=40,
    ) as c:
        c.next()
        assert c.stats()["mean_length"] == pytest.approx((10 * 2 + 1 * 20) / 11)


def test_who_uses_the_env_by_hand_leaves_no_false_successor():
    """TorchRL goes on as if nobody had touched the env, and delivers a step that never was."""
    env = GymEnv(CountingEnv((100,)))
    c = Collector(env, EchoPolicy(), frames_per_batch=4)
    c.next()
    for use in (lambda: env.rollout(3), env.reset, lambda: Collector(env, EchoPolicy(), frames_per_batch=2).next()):
        use()
        first = c.next()
        assert first["observation"][:, 2].tolist() == [0, 1, 2, 3]
        assert torch.equal(first["next", "observation"][:-1], first["observation"][1:])
        second = c.next()
        assert second["observation"][:, 2].tolist() == [4, 5, 6, 7]
        assert torch.equal(second["collector", "traj_ids"], first["collector", "traj_ids"])


def test_agents_are_truncated_by_a_limit():
    c = Collector(PettingZooEnv(Crowd(4, day=50)), None, frames_per_batch=9, max_frames_per_traj=3)
    batch = c.next()
    cut = torch.tensor([False, False, True] * 3)
    for flag in ("truncated", "done"):
        assert torch.equal(batch["next", "agents", flag][..., 0], cut[:, None].expand(9, 4))
    assert not batch["next", "agents", "terminated"].any()


@pytest.mark.parametrize("mode", ["group", "lanes"])
def test_an_agent_does_not_leave_in_silence(mode):
    class Silent(Crowd):
        def step(self, actions):
            seen, earned, over, cut, info = super().step(actions)
            return seen, earned, dict.fromkeys(over, False), cut, info

    c = Collector(PettingZooEnv(Silent(4, day=5), mode=mode), None, frames_per_batch=40)
    with pytest.raises(SpecMismatch, match="agent 'agent_3' has left env.agents, but"):
        c.next()


def test_evaluation_counts_frames_only():
    worlds = CountingVector(
        [(3,), (2,)], AutoresetMode.NEXT_STEP
    )  # every episode is followed by a step without a frame
    with Evaluator(lambda: worlds, EchoPolicy(), num_trajectories=4, frames_per_batch=40) as evaluator:
        assert evaluator.evaluate()["eval/episode_length"] == 2.5


def test_a_pool_is_seeded():
    pytest.importorskip("envpool")

    def first(seed, batches=0, **options):
        c = Collector(EnvPoolEnv("CartPole-v1", num_envs=3, **options), frames_per_batch=30)
        for _ in range(batches):
            c.next()
        c.set_seed(seed)
        batch = c.next()
        return {tuple(row) for row in batch["observation"].reshape(-1, 4)[:: batch.shape[-1]].tolist()}

    for options in ({}, {"batch_size": 2}):
        assert first(11, **options) == first(11, batches=2, **options) != first(12, **options)


def test_the_last_frame_is_marked_not_a_blank_one():
    from reap.core.frames import mark_frames
    from reap.core.slot import FRAME

    frames = [TensorDict({"next": {"truncated": torch.zeros(1, dtype=torch.bool)}}, []) for _ in range(2)]
    column = np.full((4, 1), None, object)
    column[0, 0], column[1, 0] = frames
    mark_frames({FRAME: column})
    assert [bool(frame["next", "truncated"]) for frame in frames] == [False, True]


def test_a_collector_that_closes_an_env_says_so():
    env = GymEnv(CountingEnv())
    c = Collector(env, EchoPolicy(), frames_per_batch=3, max_frames_per_traj=2)
    assert not env.is_closed
    c.shutdown()
    assert env.is_closed
    with pytest.raises(WrongState, match="GymEnv is closed; make a new one"):
        env.reset()
