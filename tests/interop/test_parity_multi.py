"""Workers in processes: the same batches, answers and refusals as TorchRL's."""

import contextlib
import sys
import warnings

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn

from tests.worlds.pairs import LIBRARIES, actor, assert_identical, columns, differs, reap
from tests.worlds.worker_groups import IDS, assert_same_runs, both, build, renumbered, said, take, team

pytestmark = pytest.mark.filterwarnings("ignore")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SYNC, ASYNC, ONE = "MultiSyncCollector", "MultiAsyncCollector", "AsyncCollector"


def add_column(td):
    return td.set("twice", td["observation"] * 2)


# ---- batches --------------------------------------------------------------------------------------------------------

STALE_DONE = differs("every batch ends truncated; TorchRL's done is an older batch's from the second on")
JOINED = {
    "stack": {},
    "stack lanes": {"lanes": 2},
    "along 0 lanes": {"cat_results": 0, "lanes": 2},
    "along -1": {"cat_results": -1},
    "along -1 lanes": {"cat_results": -1, "lanes": 2},
    "along 1 lanes": {"cat_results": 1, "lanes": 2},
    "along -2 lanes": {"cat_results": -2, "lanes": 2},
    "frames of each, along 0": {"frames_per_batch": [4, 8], "cat_results": 0},
    "frames of each, along -1 lanes": {"frames_per_batch": [4, 8], "cat_results": -1, "lanes": 2, "device": "cpu"},
    "frames of each, split": {"frames_per_batch": [4, 8], "cat_results": -1, "split_trajs": True},
    "rounded, overshooting": {"frames_per_batch": 13, "total_frames": 30, "lanes": 2},
    "split": {"split_trajs": True, "postproc": add_column},
    "split lanes along -1": {"split_trajs": True, "lanes": 2, "cat_results": -1},
    "limit lanes": {"max_frames_per_traj": 3, "lanes": 2},
    "reset each time": {"reset_at_each_iter": True},
    "version": {"track_policy_version": True, "exploration_type": InteractionType.DETERMINISTIC},
    "devices": {"device": ["cpu", "cpu"], "policy_device": "cpu", "env_device": ["cpu", "cpu"]},
    "factories": {"policy_factory": [lambda made=actor("counting"): made] * 2},
    "nested": {"kind": "nested dict"},
    "defaults spelled out": {
        "num_workers": None,
        "policy_factory": None,
        "collector_class": None,
        "preemptive_threshold": 1.0,
        "num_threads": None,
        "num_sub_threads": 1,
        "cat_results": None,
        "replay_buffer": None,
        "extend_buffer": True,
        "weight_updater": None,
        "weight_sync_schemes": None,
        "weight_recv_schemes": None,
        "trajs_per_write": None,
        "init_fn": None,
        "auto_register_policy_transforms": None,
        "worker_idx": None,
    },
}


def run_both(what, **options):
    """Where TorchRL splits what several workers made, two of them may give their trajectories one number."""
    colliding = what == SYNC and "split_trajs" in options
    with both(what, **{"total_frames": 36, **options}) as made:
        return assert_same_runs(made, anew=colliding)


@pytest.mark.parametrize("name", JOINED)
def test_synchronous(name):
    options = dict(JOINED[name])
    if "policy_factory" in options and options["policy_factory"] is None:
        del options["policy_factory"]
    run_both(SYNC, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lanes": 2, "frames_per_batch": 13, "total_frames": 30},
        {"max_frames_per_traj": 3, "device": ["cpu"]},
        {"split_trajs": True, "lanes": 2, "postproc": add_column},
        {"trajs_per_batch": 3, "traj_format": "padded"},
        {"trajs_per_batch": 3, "traj_format": "cat"},
        {"reset_at_each_iter": True, "track_policy_version": True},
        {"preemptive_threshold": 0.5, "policy_factory": lambda made=actor("counting"): made},
    ],
    ids=lambda options: " ".join(options) or "usual",
)
def test_one_asynchronous_worker(options):
    """With one worker even asynchronous batches have one order only."""
    run_both(ONE, **options)


def by_worker(batches, first_lanes):
    """Each worker's batches as one, in time; the first number of an observation is the lane."""
    whole = {}
    for batch in batches:
        lane = int(batch["observation"].reshape(-1, 3)[0, 0])
        whole.setdefault(lane, []).append(batch)
    assert set(whole) <= set(first_lanes)
    return {lane: torch.cat(renumbered(some), -1) for lane, some in whole.items()}


@pytest.mark.parametrize("lanes", [None, 2])
def test_asynchronous_workers_one_by_one(lanes):
    """Who comes when is a race; what each worker delivers is not. Numbers of trajectories never meet."""
    with both(ASYNC, lanes=lanes, total_frames=120) as made:
        batches = {name: take(c) for name, c in made.items()}
    assert len(batches["reap"]) == len(batches["torchrl"]) == 10
    for one, other in zip(batches["reap"], batches["torchrl"]):
        assert (one.batch_size, one.names) == (other.batch_size, other.names)
        assert columns(one) == columns(other)
    owner = {}
    for batch in batches["reap"]:
        for i in batch[IDS].unique().tolist():
            mine = int(batch["observation"].reshape(-1, 3)[0, 0])
            assert owner.setdefault(i, mine) == mine
    got, want = (by_worker(batches[name], [0, lanes or 1]) for name in ("reap", "torchrl"))
    for lane in got.keys() & want.keys():
        size = min(got[lane].shape[-1], want[lane].shape[-1])
        assert_identical(
            got[lane][..., :size].exclude("collector").clone(), want[lane][..., :size].exclude("collector").clone()
        )


def episodes(batches):
    """Whole trajectories by lane and episode."""
    found = {}
    for batch in batches:
        for row in batch.unbind(0) if batch.ndim == 2 else [batch]:
            row = row[row["collector", "mask"]] if ("collector", "mask") in row.keys(True) else row
            key = tuple(row["observation"][0, :2].int().tolist())
            assert key not in found
            found[key] = row.exclude("collector").clone()
    return found


@pytest.mark.parametrize("options", [{"traj_format": "padded"}, {"traj_format": "cat", "lanes": 2}], ids=str)
def test_whole_trajectories_of_several_workers(options):
    """One at a time none is left over, so both deliver the same ones; TorchRL's order is that of its racing numbers."""
    with both(SYNC, trajs_per_batch=1, total_frames=48, **options) as made:
        got, want = (episodes(take(made[name])) for name in ("reap", "torchrl"))
    assert got.keys() == want.keys()
    for key, one in got.items():
        assert_identical(one, want[key])


@differs("trajectories come in the order in which they end; TorchRL sorts those of one rollout by number")
def test_order_of_whole_trajectories():
    with both(ONE, trajs_per_batch=3, traj_format="cat", lanes=2, total_frames=36) as made:
        assert_same_runs(made)


@STALE_DONE
def test_truncated_at_the_end_of_each_batch():
    run_both(SYNC, set_truncated=True)


def test_first_batch_truncated_at_its_end():
    run_both(SYNC, set_truncated=True, total_frames=12)


@differs("compact batches keep the last observations, to bootstrap from")
def test_compact_observations_keep_nothing_else():
    run_both(SYNC, compact_obs=True)


def test_compact_observations():
    with both(SYNC, compact_obs=True, total_frames=24) as made:
        for got, want in zip(take(made["reap"]), take(made["torchrl"])):
            del got["collector", "final"]
            assert_identical(*(renumbered([one])[0] for one in (got, want)))


@pytest.mark.parametrize("what", [SYNC, ONE])
def test_random_frames_come_first(what):
    with both(what, kind="vector", init_random_frames=15, total_frames=48) as made:
        batches = {name: take(c) for name, c in made.items()}
    for got, want in zip(batches["reap"], batches["torchrl"]):
        assert columns(got) == columns(want)
        assert (got.batch_size, got.names) == (want.batch_size, want.names)
    for some in batches.values():
        assert [bool(b["scores"].any()) for b in some] == [False, False, True, True]


def test_keywords_of_each_env():
    made = {}
    for name, library in LIBRARIES.items():
        wrap = library.envs.GymWrapper
        envs = [lambda wrap=wrap, **kwargs: wrap(reap.testing.CountingEnv(**kwargs))] * 2
        options = {"create_env_kwargs": [{"lengths": (2, 5), "lane": 4}, {"lengths": (3,), "lane": 7}]}
        made[name] = build(name, SYNC, envs, actor("counting"), frames_per_batch=12, total_frames=24, **options)
    got = assert_same_runs(made)
    assert got[0]["observation"][:, 0, 0].tolist() == [4, 7]
    for collector in made.values():
        collector.shutdown()


def test_batches_are_never_overwritten():
    for what in (SYNC, ONE):
        with both(what, total_frames=60) as made:
            for collector in made.values():
                kept, copies = [], []
                for batch in collector:
                    kept.append(batch)
                    copies.append(batch.clone())
                for batch, copy in zip(kept, copies):
                    assert_identical(batch, copy)


# ---- the front door -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        (ASYNC, [12], {"num_collectors": 2}),
        (SYNC, [2, 6], {"num_collectors": 2, "sync": True}),
        (SYNC, [12], {"backend": "multiprocessing", "sync": True, "backend_options": {"cat_results": 0}}),
        (ASYNC, [12], {"backend": "process", "return_same_td": False, "track_traj_ids": True}),
    ],
    ids=str,
)
def test_front_door(kind, shape, options):
    for name in LIBRARIES:
        collector = build(name, "Collector", team(name), actor("counting"), frames_per_batch=12, **options)
        assert type(collector).__name__ == kind
        assert isinstance(collector, LIBRARIES[name].collectors.BaseCollector)
        assert list(next(iter(collector)).shape) == shape
        collector.shutdown()


@pytest.mark.parametrize("sync", [True, False])
def test_one_env_for_several_workers(sync):
    for name, library in LIBRARIES.items():
        collector = build(
            name, "MultiCollector", team(name)[0], actor("counting"), sync=sync, num_workers=2, frames_per_batch=12
        )
        assert type(collector) is getattr(library.collectors, SYNC if sync else ASYNC)
        assert collector.num_workers == 2
        collector.shutdown()


# ---- wrong calls ----------------------------------------------------------------------------------------------------


def wrong(error, what=SYNC, envs=None, policy=None, **options):
    return pytest.param(error, what, envs, policy, options, id=f"{error.__name__} {what} {options or envs}")


ONE_ENV = "one env"  # in place of a list of two


@pytest.mark.parametrize(
    ("error", "what", "envs", "policy", "options"),
    [
        wrong(TypeError, frames_per_batch=None),
        wrong(TypeError, envs=ONE_ENV),
        wrong(ValueError, envs=[]),
        wrong(TypeError, envs=[3, 3]),
        wrong(TypeError, "MultiCollector"),
        wrong(TypeError, whatever=1),
        wrong(TypeError, return_same_td=True),
        wrong(TypeError, num_collectors=2),
        wrong(TypeError, "AsyncCollector"),
        wrong(TypeError, policy=lambda x, y, z: x),
        wrong(ValueError, frames_per_batch=[4, 4, 4]),
        wrong(ValueError, create_env_kwargs=[{}] * 3),
        wrong(RuntimeError, device=["cpu"] * 3),
        wrong(RuntimeError, policy_device=["cpu"] * 3),
        wrong(RuntimeError, storing_device=["cpu"]),
        wrong(ValueError, cat_results="cat"),
        wrong(ValueError, cat_results=0.5),
        wrong(ValueError, preemptive_threshold=1.5),
        wrong(ValueError, ASYNC, cat_results=0),
        wrong(ValueError, traj_format="cat"),
        wrong(ValueError, traj_format="long"),
        wrong(RuntimeError, frames_per_batch=[4, 8]),
        wrong(RuntimeError, cat_results=1),
        wrong(TypeError, "Collector", num_collectors=2.0),
        wrong(TypeError, "Collector", num_collectors=True),
        wrong(ValueError, "Collector", num_collectors=0),
        wrong(ValueError, "Collector", num_collectors=3),
        wrong(TypeError, "Collector", num_collectors=2, sync="yes"),
        wrong(ValueError, "Collector", num_collectors=2, backend_options={"sync": True}),
        wrong(ValueError, "Collector", num_collectors=2, backend_options={"num_workers": 2}),
        wrong(ValueError, "Collector", num_collectors=2, backend_options={"frames_per_batch": 3}),
        wrong(TypeError, "Collector", num_collectors=2, backend_options={"nonsense": 3}),
        wrong(ValueError, "Collector", ONE_ENV, backend_options={"cat_results": 0}),
        wrong(ValueError, "Collector", ONE_ENV, sync=False),
        wrong(ValueError, "Collector", ONE_ENV, backend="thread"),
        wrong(ValueError, "Collector", ONE_ENV, backend="direct", num_collectors=2),
    ],
)
def test_wrong_calls(error, what, envs, policy, options):
    """Some are found at construction, some of TorchRL's only with the first batches."""
    options = {"frames_per_batch": 12, **options}
    if options["frames_per_batch"] is None:
        del options["frames_per_batch"]
    for name in LIBRARIES:
        given = team(name)[0] if envs is ONE_ENV else team(name) if envs is None else envs
        with pytest.raises(error), contextlib.ExitStack() as after:
            collector = build(name, what, given, policy or actor("counting"), **options)
            after.callback(collector.shutdown)
            take(collector, 2)


def test_an_env_that_cannot_be_built():
    """TorchRL raises what it raised, reap tells where and has it as the cause."""
    for name in LIBRARIES:
        with pytest.raises(Exception) as caught:
            build(name, SYNC, [lambda: 1 / 0] * 2, actor("counting"), frames_per_batch=12)
        assert ZeroDivisionError in (type(caught.value), type(caught.value.__cause__))


class Ends(reap.testing.CountingEnv):
    def step(self, action):
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize("what", [SYNC, ASYNC])
def test_an_env_that_raises(what):
    for name, library in LIBRARIES.items():
        wrap = library.envs.GymWrapper
        collector = build(name, what, [lambda wrap=wrap: wrap(Ends((3,)))] * 2, actor("counting"), frames_per_batch=12)
        with pytest.raises(RuntimeError):
            next(iter(collector))
        collector.shutdown()


# ---- what it can be asked -------------------------------------------------------------------------------------------


def linear(value=None):
    torch.manual_seed(5)
    made = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    if value is not None:
        with torch.no_grad():
            for one in made.parameters():
                one.fill_(value)
    return made


@pytest.fixture(scope="module")
def crews():
    """Two workers of two lanes in each library, one batch old. Tests of this section may take more of them."""
    with both(SYNC, lanes=2, kind="vector", policy=linear, total_frames=240) as made:
        seeds = {name: [c.set_seed(1), c.set_seed(5, static_seed=True)] for name, c in made.items()}
        iterators = {name: iter(c) for name, c in made.items()}
        for one in iterators.values():
            next(one)
        yield made, iterators, seeds


@pytest.fixture
def crew(crews):
    return crews[0]


def test_chain_of_seeds(crews):
    seeds = crews[2]
    assert seeds["reap"] == seeds["torchrl"]


@pytest.mark.parametrize("what", ["num_workers", "requested_frames_per_batch", "total_frames", "init_random_frames"])
def test_numbers(crew, what):
    assert getattr(crew["reap"], what) == getattr(crew["torchrl"], what)


@pytest.mark.parametrize(
    "what",
    [
        "closed",
        "split_trajs",
        "reset_at_each_iter",
        "reset_when_done",
        "set_truncated",
        "trajs_per_batch",
        "exploration_type",
        "update_at_each_batch",
        "cat_results",
        "postproc",
        "pre_collect_hook",
        "post_collect_hook",
        "worker_idx",
    ],
)
def test_what_it_was_told(crew, what):
    assert getattr(crew["reap"], what) == getattr(crew["torchrl"], what)


def test_len_and_sizes(crew):
    assert len(crew["reap"]) == len(crew["torchrl"]) == 20
    assert crew["reap"].frames_per_batch_worker(worker_idx=1) == 6
    for collector in crew.values():
        with pytest.raises(NotImplementedError):
            collector.fake_tensordict()


@pytest.mark.parametrize("workers", ["aggregate", "per_worker", "both"])
def test_stats(crew, workers):
    want, got = crew["torchrl"].stats(workers=workers), crew["reap"].stats(workers=workers)
    assert {name: got.get(name) for name in want} == want


def test_stats_of_nobody(crew):
    for collector in crew.values():
        with pytest.raises(ValueError):
            collector.stats(workers="some")


def kinds(state):
    """The structure of a state: keys all the way down."""
    return {key: kinds(value) if isinstance(value, dict) else None for key, value in state.items()}


def test_state(crew):
    want, got = crew["torchrl"].state_dict(), crew["reap"].state_dict()
    for worker in ("worker0", "worker1"):
        want[worker].pop("env_state_dict")  # TorchRL's holds an empty entry for each lane
        for key, value in want[worker]["policy_state_dict"].items():
            assert torch.equal(got[worker]["policy_state_dict"][key], value)
        assert int(got[worker]["frames"]) == int(want[worker]["frames"])
        assert int(got[worker]["iter"]) == int(want[worker]["iter"])
    assert (got["frames"], got["iter"]) == (want["frames"], want["iter"])
    shown = kinds(got)
    for key, value in kinds(want).items():
        assert key in shown
        if value is not None:
            assert value.keys() <= shown[key].keys()


@pytest.mark.parametrize("path", ["policy.in_keys", "policy.out_keys[0]", "policy.module.out_features", "worker_idx"])
def test_what_workers_hold(crew, path):
    assert crew["reap"].get_distant_attr(path) == crew["torchrl"].get_distant_attr(path)


def test_policy_by_name(crew):
    for collector in crew.values():
        assert collector.getattr_policy("in_keys") == ["observation"]
        assert collector.get_model("policy") is collector.policy
        assert collector.cascade_execute("policy.get_submodule", "module") is collector.policy.module
        with pytest.raises(AttributeError):
            collector.get_model("critic")
    assert crew["reap"].getattr_env("spec").lanes == 2


def test_calls_in_workers(crew):
    args, kwargs = [("module",), ("module",)], [{}, {}]
    for collector in crew.values():
        assert [m.out_features for m in collector.map_fn("policy.get_submodule", args, kwargs)] == [2, 2]
        with pytest.raises(ValueError):
            collector.map_fn("policy.get_submodule", args[:1])


def test_wrong_questions_leave_the_workers_alive(crews):
    made, iterators, _ = crews
    ours = made["reap"]
    with pytest.raises(AttributeError, match="nonsense"):
        ours.get_distant_attr("policy.nonsense")
    with pytest.raises(ValueError, match="is not a path"):
        ours.get_distant_attr("policy..x")
    with pytest.raises(RuntimeError, match="raised"):
        ours.map_fn("policy.get_submodule", [(3,), (3,)])
    with pytest.raises(ValueError, match="cannot be sent"):
        ours.map_fn("policy.parameters")
    assert list(next(iterators["reap"]).shape) == [2, 2, 3]
    next(iterators["torchrl"])  # so that both have made as many


WEIGHTS = {
    "nothing": lambda p: ((), {}),
    "module": lambda p: ((p,), {}),
    "policy=": lambda p: ((), {"policy": p}),
    "TensorDict": lambda p: ((TensorDict.from_module(p),), {}),
    "values": lambda p: ((TensorDict.from_module(p).data,), {}),
    "weights=": lambda p: ((), {"weights": TensorDict.from_module(p).data}),
    "policy_weights=": lambda p: ((), {"policy_weights": TensorDict.from_module(p).data}),
    "some workers": lambda p: ((), {"worker_ids": [0, 1]}),
    "one worker": lambda p: ((), {"worker_ids": 1}),
    "by model": lambda p: ((), {"weights_dict": {"policy": TensorDict.from_module(p).data}}),
    "model_id": lambda p: ((), {"model_id": "policy"}),
}


@pytest.mark.parametrize("form", WEIGHTS)
def test_forms_of_weights(crews, form):
    """The workers act with what was given. (TorchRL's share the trainer's memory, so they may have it before.)"""
    made, iterators, _ = crews
    for name, collector in made.items():
        policy = collector.policy
        with torch.no_grad():
            policy.module.bias.add_(0.125)
        args, kwargs = WEIGHTS[form](policy)
        collector.update_policy_weights_(*args, **kwargs)
        batch = next(iterators[name])
        acted = policy.module(batch["observation"])
        chosen = 1 if form == "one worker" else slice(None)
        torch.testing.assert_close(acted[chosen], batch["action"][chosen])


WRONG_WEIGHTS = {
    "twice": (ValueError, lambda p: ((p,), {"weights": p})),
    "twice by name": (ValueError, lambda p: ((), {"policy": p, "weights": p})),
    "two ways to name a model": (ValueError, lambda p: ((), {"weights_dict": {"policy": p}, "model_id": "policy"})),
    "unknown worker": (ValueError, lambda p: ((), {"worker_ids": [7]})),
    "unknown model": (KeyError, lambda p: ((), {"model_id": "critic"})),
    "unknown models": (KeyError, lambda p: ((), {"weights_dict": {"critic": None}})),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_wrong_weights(crew, name):
    error, form = WRONG_WEIGHTS[name]
    for collector in crew.values():
        args, kwargs = form(collector.policy)
        with pytest.raises(error):
            collector.update_policy_weights_(*args, **kwargs)


def test_no_weights_to_take():
    """Made in the workers, or no weights at all: there is no source for an update without an argument."""
    for options in ({"policy_factory": lambda: linear(1.0)}, {}):
        with both(SYNC, kind="vector", policy=lambda: None, **options) as made:
            for collector in made.values():
                with pytest.raises(RuntimeError):
                    collector.update_policy_weights_()


def test_a_factory_and_a_source_of_weights():
    """The factory makes what acts; its weights are the policy's, from the first batch on."""
    for name in LIBRARIES:
        source = linear(1.0)
        envs = team(name, kind="vector")
        options = {"frames_per_batch": 12, "policy_factory": lambda: linear(5.0)}
        collector = build(name, SYNC, envs, source, **options)
        iterator = iter(collector)
        for value in (1.0, 3.0):
            batch = next(iterator)
            torch.testing.assert_close(batch["action"][..., 0], (batch["observation"].sum(-1) + 1) * value)
            with torch.no_grad():
                for one in source.parameters():
                    one.fill_(3.0)
            collector.update_policy_weights_()
        collector.shutdown()


def test_update_at_each_batch():
    for name in LIBRARIES:
        policy = linear(1.0)
        collector = build(name, SYNC, team(name, kind="vector"), policy, frames_per_batch=12, update_at_each_batch=True)
        iterator = iter(collector)
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                for one in policy.parameters():
                    one.fill_(value)
            batch = next(iterator)
            torch.testing.assert_close(batch["action"][..., 0], (batch["observation"].sum(-1) + 1) * value)
        collector.shutdown()


# ---- between batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [None, [False, True]], ids=str)
def test_reset(marked):
    with both(SYNC, total_frames=60) as made:
        iterators = {name: iter(c) for name, c in made.items()}
        rows = {name: [next(one).clone()] for name, one in iterators.items()}
        for collector in made.values():
            collector.reset(marked)
        for name, one in iterators.items():
            rows[name] += [next(one).clone(), next(one).clone()]
    for got, want in zip(*(renumbered(rows[name]) for name in ("reap", "torchrl"))):
        assert_identical(got, want)


def test_state_is_loaded():
    """What is left is delivered; numbers of trajectories go on after those that were used."""
    with both(SYNC, kind="vector", policy=linear, total_frames=48) as old:
        used = {name: take(c, 2) for name, c in old.items()}
        states = {name: c.state_dict() for name, c in old.items()}
    with both(SYNC, kind="vector", policy=lambda: linear(0.0), total_frames=48) as new:
        for name, collector in new.items():
            collector.load_state_dict(states[name])
        left = {name: take(c) for name, c in new.items()}
    assert len(left["reap"]) == len(left["torchrl"]) == 2
    last = used["reap"][-1]
    opened = {*last[IDS][..., -1][~last["next", "done"][..., -1, 0]].tolist()}  # these go on
    before = {number for batch in used["reap"] for number in batch[IDS].reshape(-1).tolist()}
    assert {*left["reap"][0][IDS].reshape(-1).tolist()}.isdisjoint(before - opened)
    for batch in left["reap"]:
        torch.testing.assert_close(linear().module(batch["observation"]), batch["action"])


def test_the_end():
    """Workers outlive the last batch; envs end with them; shutting down twice is one too many, and harmless."""
    for what in (SYNC, ASYNC):
        with both(what, total_frames=12) as made:
            for collector in made.values():
                assert len(take(collector)) == 1
                assert collector.stats()["workers_alive"] == 2
                with pytest.raises(RuntimeError):
                    collector.shutdown(close_env=False)
                collector.async_shutdown()
                collector.shutdown()
            assert made["reap"].closed


def test_hooks():
    """A hook that is assigned runs in the workers, with what each has made, and what it writes is delivered."""

    def negate(batch):
        batch["observation"].neg_()

    for what in (SYNC, ASYNC):
        with both(what, total_frames=36) as made:
            for collector in made.values():
                collector.set_post_collect_hook(negate)
                assert collector.post_collect_hook is negate
                assert bool((next(iter(collector))["observation"] <= 0).all())


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("frames_per_batch", {"frames_per_batch": 13}),
        ("total_frames", {"total_frames": 30}),
    ],
)
def test_rounding_is_announced(option, options):
    for name in LIBRARIES:
        made = []
        with warnings.catch_warnings():
            words = said(
                lambda: made.append(
                    build(name, SYNC, team(name), actor("counting"), **{"frames_per_batch": 12, **options})
                )
            )
        made[0].shutdown()
        assert any(option in text for text in words), f"{name}: {words}"


# ---- policies of other libraries ------------------------------------------------------------------------------------


def test_probabilistic_actor():
    from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal

    def make():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        read = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
        return ProbabilisticActor(read, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)

    with both(ONE, kind="vector", policy=make, exploration_type="deterministic", total_frames=24) as made:
        got, want = (renumbered(take(made[name])) for name in ("reap", "torchrl"))
    for ours, theirs in zip(got, want):
        assert columns(ours) == columns(theirs)
        for key in columns(theirs):
            torch.testing.assert_close(ours[key], theirs[key])


def test_one_hot_actor_of_cartpole():
    from torchrl.modules import OneHotCategorical, ProbabilisticActor

    def make():
        torch.manual_seed(3)
        read = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
        return ProbabilisticActor(read, in_keys=["logits"], distribution_class=OneHotCategorical)

    with both(SYNC, kind="CartPole-v1", policy=make, exploration_type="mode", lanes=2, total_frames=24) as made:
        assert_same_runs(made)


def test_recurrent_policy():
    """reap carries the memory by itself, across batches, and begins anew with every episode."""
    from torchrl.modules import LSTMModule

    torch.manual_seed(3)
    memory = LSTMModule(input_size=3, hidden_size=4, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(4, 2), in_keys=["features"], out_keys=["action"])
    policy = TensorDictSequential(memory, head)
    collector = build("reap", SYNC, team("reap", kind="vector"), policy, frames_per_batch=12, total_frames=48)
    batches = take(collector)
    collector.shutdown()
    assert len(batches) == 4
    for batch in batches:
        rows = batch if batch.ndim == 2 else batch.unsqueeze(0)
        begins = rows["is_init"].squeeze(-1)
        assert not rows["recurrent_state_h"][begins].any()
        inside = ~begins[:, 1:]
        torch.testing.assert_close(
            rows["recurrent_state_h"][:, 1:][inside], rows["next", "recurrent_state_h"][:, :-1][inside]
        )


# ---- ParallelEnv ----------------------------------------------------------------------------------------------------


def parallel(name, lanes=3, kind="counting"):
    one = team(name, lanes, kind=kind)
    library = LIBRARIES[name].envs
    return (
        library.ParallelEnv(lanes, one) if name == "reap" else library.ParallelEnv(lanes, one, mp_start_method="fork")
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [("nested dict", {}), ("CartPole-v1", {}), ("counting", {"split_trajs": True, "max_frames_per_traj": 3})],
)
def test_parallel_env(kind, options):
    made = {}
    for name in LIBRARIES:
        made[name] = build(
            name, "Collector", parallel(name, kind=kind), actor(kind), frames_per_batch=18, total_frames=54, **options
        )
    want, got = take(made["torchrl"]), take(made["reap"])
    assert len(got) == len(want) == 3
    for ours, theirs in zip(got, want):
        assert_identical(ours, theirs)
    for collector in made.values():
        collector.shutdown()


def test_parallel_env_by_hand():
    envs = {name: parallel(name) for name in LIBRARIES}
    assert envs["reap"].batch_size == envs["torchrl"].batch_size
    assert_identical(*(envs[name].reset() for name in ("reap", "torchrl")))
    got, want = (envs[name].rollout(4, actor("counting")) for name in ("reap", "torchrl"))
    assert_identical(got.detach(), want.detach())
    assert envs["reap"].set_seed(1) == envs["torchrl"].set_seed(1) == 1864546186
    for env in envs.values():
        env.close()


# ---- scripts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIBRARIES)
def test_script_of_a_batched_env(name):
    """Four Pendulums in parallel, one collector, new weights now and then."""
    envs, collecting = LIBRARIES[name].envs, LIBRARIES[name].collectors
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    options = {} if name == "reap" else {"mp_start_method": "fork"}
    env = envs.ParallelEnv(4, lambda: envs.GymEnv("Pendulum-v1"), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = collecting.SyncDataCollector if name == "reap" else collecting.Collector
    collector = old(env, policy=policy, frames_per_batch=200, total_frames=600)
    shapes = []
    for data in collector:
        shapes.append(list(data.shape))
        collector.update_policy_weights_()
    collector.shutdown()
    assert shapes == [[4, 50]] * 3


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("sync", [True, False])
def test_script_of_several_workers(name, sync):
    """CartPole in two workers, and a policy whose weights are sent after each batch."""
    envs = LIBRARIES[name].envs
    policy = TensorDictModule(
        nn.Sequential(nn.Linear(4, 2), nn.Hardsigmoid()), in_keys=["observation"], out_keys=["action"]
    )
    collector = build(
        name,
        "MultiCollector",
        [lambda: envs.GymEnv("CartPole-v1")] * 2,
        policy,
        frames_per_batch=100,
        total_frames=300,
        sync=sync,
    )
    shapes = []
    for data in collector:
        shapes.append(list(data.shape))
        collector.update_policy_weights_()
    collector.shutdown()
    assert shapes == [[2, 50] if sync else [100]] * 3
