"""docs/from-torchrl.md says what becomes of everything that TorchRL's collectors offer; and what it says is so."""

import inspect
import warnings
from pathlib import Path

import pytest

import reap.collectors
import reap.collectors.distributed
import reap.weight_update
from reap.errors import UsageError, WrongArgument, WrongState

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    import torchrl.collectors
    import torchrl.collectors.distributed
    import torchrl.weight_update
    from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv

pytestmark = pytest.mark.filterwarnings("ignore")
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "from-torchrl.md").read_text()
KINDS = ("Collector", "AsyncCollector", "MultiSyncCollector", "MultiAsyncCollector", "AsyncBatchedCollector")
FAR = ("DistributedCollector", "DistributedSyncCollector", "RPCCollector", "RayCollector")


def public(*modules):
    return sorted({name for module in modules for name in module.__all__})


@pytest.mark.parametrize(
    "name", public(torchrl.collectors, torchrl.collectors.distributed, torchrl.weight_update), ids=str
)
def test_every_name_is_on_the_page_or_here(name):
    homes = reap.collectors, reap.collectors.distributed, reap.weight_update
    assert f"`{name}`" in PAGE or any(hasattr(home, name) for home in homes)


def arguments(kind):
    named = inspect.signature(kind.__init__).parameters.values()
    return {one.name for one in named if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)} - {"self"}


@pytest.mark.parametrize("name", [*KINDS, "Evaluator"])
def test_every_argument_is_on_the_page_or_taken(name):
    ours = arguments(getattr(reap.collectors, name))
    told = {one for one in arguments(getattr(torchrl.collectors, name)) if f"`{one}`" in PAGE}
    assert arguments(getattr(torchrl.collectors, name)) - ours - told == set()


@pytest.mark.parametrize("name", FAR)
def test_every_argument_of_far_collectors_is_on_a_page(name):
    pages = PAGE + (DOCS / "distributed.md").read_text() + (DOCS / "ray.md").read_text()
    theirs = arguments(getattr(torchrl.collectors.distributed, name))
    assert [one for one in theirs if f"`{one}`" not in pages and f"`{one}=" not in pages] == []


def env():
    return GymEnv("CartPole-v1")


def collect(make=env, **options):
    return reap.collectors.Collector(make, frames_per_batch=20, **options)


def test_lanes_rest_where_gymnasiums_envs_are_stepped():
    for make in (env, lambda: SerialEnv(2, env)):
        with collect(make, reset_when_done=False) as collector:
            assert collector.next().numel() == 20
    with pytest.raises(UsageError, match="reset_when_done=False"):
        collect(lambda: TransformedEnv(env(), StepCounter()), reset_when_done=False)


NOT_HERE = {
    "weight_recv_schemes": lambda: collect(weight_recv_schemes={}),
    "collector_class": lambda: collect(collector_class=reap.collectors.Collector),
    "Evaluator's backend": lambda: reap.collectors.Evaluator(env, backend="ray"),
    "Evaluator's num_gpus": lambda: reap.collectors.Evaluator(env, num_gpus=1),
    "Evaluator's collector_cls": lambda: reap.collectors.Evaluator(env, collector_cls=reap.collectors.Collector),
    "RayModuleTransformScheme": lambda: collect(
        weight_sync_schemes={"env.transform": torchrl.weight_update.RayModuleTransformScheme()}
    ),
    "SharedMemTransport": reap.weight_update.SharedMemTransport,
    "RPC over processes": lambda: reap.collectors.MultiSyncCollector(
        [env], frames_per_batch=20, weight_sync_schemes={"policy": reap.weight_update.RPCWeightSyncScheme()}
    ),
    "RPC by hand": lambda: reap.weight_update.RPCWeightSyncScheme().connect(),
}


@pytest.mark.parametrize("what", NOT_HERE.values(), ids=NOT_HERE)
def test_what_is_not_here_says_so(what):
    with pytest.raises((UsageError, WrongArgument, WrongState)):
        what()


def test_no_warning_about_a_default_that_will_stay():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        collect(trajs_per_batch=1).shutdown()


def test_what_a_collector_was_given_is_read_under_its_name():
    with collect(compact_obs=True, env_device="cpu", trust_policy=True) as collector:
        assert (collector.compact_obs, collector.env_device.type, collector.device) == (True, "cpu", None)
        assert (collector.track_traj_ids, collector.trajs_per_write, collector.trust_policy) == (True, None, True)
        assert (collector.extend_buffer, collector.return_same_td, collector.weight_updater) == (True, False, None)
        for insides in ("policy_weights", "get_weights_fn", "policy_version_tracker", "local_init_rb"):
            assert not hasattr(collector, insides)
