"""Every option of the collector, alone and in company: the batches of both libraries are identical."""

import pytest
import torch
from torchrl.data.postprocs import MultiStep

from reap.testing import CountingEnv
from tests.worlds.pairs import (
    LIBRARIES,
    Each,
    actor,
    assert_identical,
    assert_same_batches,
    collectors,
    columns,
    env_makers,
    make,
    run,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def compare(lanes=None, kind="counting", batches=3, **options):
    made = collectors(env_makers(kind, lanes), lambda: actor(kind), **{"frames_per_batch": 12, **options})
    return assert_same_batches(made, batches)


def add_column(td):
    return td.set("doubled", td["next", "reward"] * 2)


OPTIONS = {
    "one step": {"frames_per_batch": 1},
    "uneven batches": {"frames_per_batch": 11},
    "even total": {"total_frames": 24},
    "uneven total": {"frames_per_batch": 10, "total_frames": 25},
    "endless as None": {"total_frames": None},
    "limit": {"max_frames_per_traj": 2},
    "limit where an episode ends anyway": {"max_frames_per_traj": 3},
    "limit of one": {"max_frames_per_traj": 1},
    "no limit as 0": {"max_frames_per_traj": 0},
    "no limit as -1": {"max_frames_per_traj": -1},
    "reset each time": {"reset_at_each_iter": True},
    "truncated flag": {"set_truncated": True},
    "truncated flag and limit": {"set_truncated": True, "max_frames_per_traj": 4},
    "split": {"split_trajs": True},
    "split one step": {"split_trajs": True, "frames_per_batch": 1},
    "split with limit": {"split_trajs": True, "max_frames_per_traj": 2},
    "split whole lanes": {"split_trajs": True, "reset_at_each_iter": True, "frames_per_batch": 3},
    "split with truncated flag": {"split_trajs": True, "set_truncated": True},
    "no ids": {"track_traj_ids": False},
    "no ids, reset and truncated": {"track_traj_ids": False, "set_truncated": True, "reset_at_each_iter": True},
    "postproc": {"postproc": add_column},
    "postproc another shape": {"postproc": lambda td: td.reshape(-1).select("observation", "action")},
    "postproc after split": {"postproc": add_column, "split_trajs": True},
    "device": {"device": "cpu"},
    "device as object": {"device": torch.device("cpu")},
    "storing device": {"storing_device": "cpu"},
    "policy device": {"policy_device": "cpu"},
    "env device": {"env_device": "cpu"},
    "policy and env device": {"policy_device": "cpu", "env_device": "cpu"},
    "device and split": {"device": "cpu", "split_trajs": True},
    "trusted": {"trust_policy": True},
    "buffers": {"use_buffers": True},
    "no buffers": {"use_buffers": False},
    "no synchronisation": {"no_cuda_sync": True},
    "same batch object": {"return_same_td": True},
    "same batch object, truncated flag": {"return_same_td": True, "set_truncated": True},
    "same batch object, device": {"return_same_td": True, "device": "cpu"},
    "same batch object, split": {"return_same_td": True, "split_trajs": True},
    "defaults spelled out": {
        "policy_factory": None,
        "create_env_kwargs": None,
        "max_frames_per_traj": None,
        "init_random_frames": None,
        "split_trajs": None,
        "postproc": None,
        "interruptor": None,
        "replay_buffer": None,
        "compile_policy": None,
        "cudagraph_policy": None,
        "reset_when_done": True,
        "return_same_td": False,
        "backend": None,
    },
    "all at once": {
        "max_frames_per_traj": 4,
        "split_trajs": True,
        "reset_at_each_iter": True,
        "set_truncated": True,
        "device": "cpu",
        "postproc": add_column,
        "total_frames": 40,
    },
}


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, lanes):
    compare(lanes, **OPTIONS[name])


@pytest.mark.parametrize("kind", ["CartPole-v1", "HalfCheetah-v5", "nested dict", "pixels"])
@pytest.mark.parametrize("name", ["split with limit", "all at once"])
def test_option_with_other_envs(name, kind):
    compare(2, kind, **OPTIONS[name])


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("options", [{}, {"split_trajs": True}, {"device": "cpu"}], ids=str)
def test_multi_step_returns(options, lanes):
    """TorchRL's own post-processing; it is stateful, so each library gets one."""
    compare(lanes, postproc=Each.of(lambda: MultiStep(gamma=0.9, n_steps=3)), **options)


def test_default_of_extend_buffer_spelled_out():
    compare(extend_buffer=True)


@pytest.mark.parametrize("lanes", [None, 2])
def test_nothing_comes_of_no_frames(lanes):
    made = collectors(env_makers("counting", lanes), lambda: actor("counting"), frames_per_batch=6, total_frames=0)
    assert [run(c) for c in made.values()] == [[], []]


def test_policy_version_before_any_update():
    got = compare(track_policy_version=True)
    assert got[0]["policy_version"].tolist() == [0] * 12


@pytest.mark.parametrize("lanes", [None, 2])
def test_same_batch_object(lanes):
    for collector in collectors(
        env_makers("counting", lanes), lambda: actor("counting"), frames_per_batch=6, return_same_td=True
    ).values():
        iterator = iter(collector)
        first = next(iterator)
        before = first["observation"].clone()
        assert next(iterator) is first
        assert not torch.equal(first["observation"], before)


@pytest.mark.parametrize("lanes", [None, 2])
def test_batches_are_never_overwritten(lanes):
    for collector in collectors(
        env_makers("counting", lanes), lambda: actor("counting"), frames_per_batch=6, total_frames=36
    ).values():
        kept, copies = [], []
        for batch in collector:
            kept.append(batch)
            copies.append(batch.clone())
        for batch, copy in zip(kept, copies):
            assert_identical(batch, copy)


# ---- random frames --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("kind", ["vector", "nested dict", "multi-binary"])
@pytest.mark.parametrize(("random_frames", "random_batches"), [(12, 1), (15, 2)])
def test_random_frames_come_first(kind, lanes, random_frames, random_batches):
    """Random actions differ, so only what they look like is compared; then the policy's own column begins."""
    made = collectors(
        env_makers(kind, lanes), lambda: actor(kind), frames_per_batch=12, init_random_frames=random_frames
    )
    batches = {name: run(c, random_batches + 1) for name, c in made.items()}
    for got, want in zip(batches["reap"], batches["torchrl"]):
        assert columns(got) == columns(want)
        assert (got.batch_size, got.names, got.device) == (want.batch_size, want.names, want.device)
    for some in batches.values():
        assert [bool(b["scores"].any()) for b in some] == [False] * random_batches + [True]


def test_rollout_while_actions_are_random():
    made = collectors(env_makers("vector"), lambda: actor("vector"), frames_per_batch=6, init_random_frames=12)
    got, want = (bool(made[name].rollout()["scores"].any()) for name in ("reap", "torchrl"))
    assert got == want


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("kind", ["discrete", "multi-discrete", "multi-discrete equal", "multi-binary", "vector"])
def test_random_policy_looks_alike(kind, lanes):
    made = collectors(env_makers(kind, lanes), lambda: None, frames_per_batch=60)
    got, want = (run(made[name], 1)[0] for name in ("reap", "torchrl"))
    assert columns(got) == columns(want)
    assert (got.batch_size, got.names, got.device) == (want.batch_size, want.names, want.device)
    if kind == "vector":
        for batch in (got, want):
            assert 0.5 < batch["action"].abs().max() <= 1
    else:
        assert got["action"].unique().tolist() == want["action"].unique().tolist() == [0, 1]
    if kind not in ("vector", "multi-binary"):
        assert torch.equal(got["action"].sum(-1).unique(), want["action"].sum(-1).unique())


@pytest.mark.parametrize("lanes", [None, 2])
def test_random_policy_objects(lanes):
    for name, library in LIBRARIES.items():
        policy = library.collectors.RandomPolicy()
        collector = library.collectors.Collector(env_makers("discrete", lanes)[name], policy, frames_per_batch=12)
        (batch,) = run(collector, 1)
        assert batch["action"].sum().item() == 12  # one-hot


# ---- where envs come from -------------------------------------------------------------------------------------------


def test_create_env_kwargs():
    envs = env_makers(lambda _lane, **kwargs: CountingEnv(**kwargs))
    made = collectors(
        envs, lambda: actor("counting"), frames_per_batch=12, create_env_kwargs={"lengths": (2, 5), "lane": 4}
    )
    assert assert_same_batches(made)[0]["observation"][0].tolist() == [4, 0, 0]


@pytest.mark.parametrize("lanes", [None, 2])
def test_list_of_one_env(lanes):
    envs = {name: [one] for name, one in env_makers("counting", lanes).items()}
    assert_same_batches(collectors(envs, lambda: actor("counting"), frames_per_batch=12))


@pytest.mark.parametrize("lanes", [None, 2])
def test_finished_env(lanes):
    envs = {name: one() for name, one in env_makers("counting", lanes).items()}
    assert_same_batches(collectors(envs, lambda: actor("counting"), frames_per_batch=12))


# ---- hooks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [None, 2])
def test_hooks(lanes):
    """pre, steps, split, postproc, post: the same calls in the same order, with the same data."""
    story = Each.of(list)

    def options(name):
        def envs(lane):
            env = make("counting", lane)
            plain = env.step

            def step(action):
                story[name].append("step")
                return plain(action)

            env.step = step
            return env

        def postproc(td):
            story[name].append(("postproc", list(td.batch_size)))
            return td.set("seen", td["observation"] * 2)

        return envs, {
            "pre_collect_hook": lambda: story[name].append("pre"),
            "post_collect_hook": lambda td: story[name].append(("post", list(td.batch_size), "seen" in td.keys())),
            "postproc": postproc,
        }

    made = {}
    for name, library in LIBRARIES.items():
        envs, hooks = options(name)
        made[name] = library.collectors.Collector(
            env_makers(envs, lanes)[name], actor("counting"), frames_per_batch=6, split_trajs=True, **hooks
        )
    assert_same_batches(made, 3)
    assert story["reap"] == story["torchrl"]
    assert story["reap"].count("pre") == 3


def test_hooks_can_be_set_later():
    calls = Each.of(list)
    made = collectors(env_makers("counting"), lambda: actor("counting"), frames_per_batch=6)
    for name, collector in made.items():
        collector.pre_collect_hook = lambda name=name: calls[name].append("pre")
        collector.post_collect_hook = lambda td, name=name: calls[name].append(td["observation"].sum().item())
    assert_same_batches(made, 2)
    assert calls["reap"] == calls["torchrl"]
    assert len(calls["reap"]) == 4


@pytest.mark.parametrize("hook", ["pre_collect_hook", "post_collect_hook", "postproc"])
def test_errors_of_hooks_are_raised(hook):
    def fail(*_):
        raise ZeroDivisionError("mine")

    for collector in collectors(
        env_makers("counting"), lambda: actor("counting"), frames_per_batch=6, **{hook: fail}
    ).values():
        with pytest.raises(ZeroDivisionError, match="mine"):
            next(iter(collector))


# ---- warnings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "options"),
    [
        (2, {"frames_per_batch": 11}),
        (None, {"frames_per_batch": 10, "total_frames": 25}),
        (None, {"frames_per_batch": 10, "init_random_frames": 15}),
    ],
    ids=["frames_per_batch", "total_frames", "init_random_frames"],
)
def test_rounding_is_announced(lanes, options):
    for name, library in LIBRARIES.items():
        with pytest.warns(UserWarning, match=f"(?i){list(options)[-1]}"):
            library.collectors.Collector(env_makers("counting", lanes)[name], actor("counting"), **options)
