"""`reap.compat`: scripts that cannot be edited run on reap, and TorchRL is as it was afterwards."""

import functools
import inspect
import os
import subprocess
import sys
import textwrap
import warnings
from collections import UserList

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    import torchrl.collectors
    import torchrl.collectors.collectors
    import torchrl.collectors.distributed
    import torchrl.collectors.distributed.rpc
    import torchrl.collectors.utils
    import torchrl.collectors.weight_update
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

import reap.collectors
import reap.collectors.distributed
import reap.compat

pytestmark = pytest.mark.filterwarnings("ignore")


def names():
    modules = (
        torchrl.collectors,
        torchrl.collectors.collectors,
        torchrl.collectors.distributed,
        torchrl.collectors.distributed.rpc,
        torchrl.collectors.utils,
        torchrl.collectors.weight_update,
    )
    return [{name: getattr(module, name) for name in vars(module) if name[:2] != "__"} for module in modules]


def run(*arguments, cwd, **environment):
    """What a script under reap.compat prints, and how it ends."""
    command = [sys.executable, "-W", "ignore", "-m", "reap.compat", *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd, env=environment)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def test_install_and_uninstall_leave_torchrl_as_it_was():
    before = names()
    reap.compat.install()
    try:
        assert torchrl.collectors.Collector is reap.collectors.Collector
        assert torchrl.collectors.SyncDataCollector is reap.collectors.Collector
        assert torchrl.collectors.utils.split_trajectories is reap.collectors.utils.split_trajectories
        assert torchrl.collectors.distributed.RayCollector is reap.collectors.distributed.RayCollector
        assert torchrl.collectors.distributed.rpc.RPCCollector is reap.collectors.distributed.RPCCollector
        old = torchrl.collectors.collectors
        assert old.Collector is old.SyncDataCollector is reap.collectors.Collector
        assert old.split_trajectories is reap.collectors.utils.split_trajectories
        updaters = torchrl.collectors.weight_update
        assert updaters.VanillaWeightUpdater is reap.collectors.VanillaWeightUpdater
        assert updaters.WeightUpdaterBase is reap.collectors.WeightUpdaterBase
        reap.compat.install()  # twice is once
    finally:
        reap.compat.uninstall()
    assert names() == before
    reap.compat.uninstall()
    assert names() == before


def test_as_a_block_also_when_it_fails():
    before = names()
    with pytest.raises(RuntimeError, match="broken"), reap.compat.install() as installed:
        assert installed.names["torchrl.collectors.Collector"] is reap.collectors.Collector
        raise RuntimeError("broken")
    assert names() == before


@pytest.mark.parametrize(
    ("asking", "root"),
    [
        ("torchrl.collectors.llm.base", "torchrl"),
        ("torchrl.modules.inference_server._server", "torchrl"),
        ("torchrl.trainers.trainers", "reap"),  # they are given the script's collectors, and check them
        ("train", "reap"),
    ],
)
def test_torchrls_own_machinery_is_given_torchrls_own(asking, root):
    with reap.compat.install():
        there = {"__name__": asking}
        exec("from torchrl.collectors import BaseCollector", there)
        exec("from torchrl.collectors.weight_update import WeightUpdaterBase", there)
        exec("from torchrl.collectors.distributed import RayCollector", there)
    for name in ("BaseCollector", "WeightUpdaterBase", "RayCollector"):
        assert there[name].__module__.split(".")[0] == root


def test_what_is_no_collector_is_left_alone():
    import torchrl.modules
    import torchrl.weight_update

    ours = torchrl.weight_update.SharedMemWeightSyncScheme, torchrl.modules.RandomPolicy
    with reap.compat.install():
        assert (torchrl.weight_update.SharedMemWeightSyncScheme, torchrl.collectors.RandomPolicy) == ours


def test_a_script_as_it_is():
    with reap.compat.install():
        from torchrl.collectors import BaseCollector, Collector

        env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(5))
        collector = Collector(env, None, frames_per_batch=20, total_frames=40)
        assert isinstance(collector, BaseCollector)
        assert isinstance(collector, reap.collectors.Collector)
        assert [batch["step_count"].max().item() for batch in collector] == [4, 4]
        collector.shutdown()


def test_a_whole_script(tmp_path):
    write(tmp_path / "beside_it.py", "frames = 10")
    script = write(
        tmp_path / "train.py",
        """
        import sys
        from beside_it import frames
        from torchrl.collectors import SyncDataCollector
        from torchrl.envs import GymEnv

        collector = SyncDataCollector(GymEnv(sys.argv[1]), frames_per_batch=frames, total_frames=20)
        print(type(collector).__module__, [batch.numel() for batch in collector])
        collector.shutdown()
        """,
    )
    done = run(script, "CartPole-v1", cwd=tmp_path)
    assert done.stdout.strip() == "reap.collectors.single [10, 10]", done.stderr


def test_a_script_chooses_the_start_method_itself(tmp_path):
    """Without a main guard: only "fork" brings it through, and that can be chosen until TorchRL is imported."""
    script = write(
        tmp_path / "tutorial.py",
        """
        import multiprocessing, sys

        assert "torchrl" not in sys.modules
        assert multiprocessing.get_start_method(allow_none=True) is None
        multiprocessing.set_start_method("fork")

        from torchrl.collectors import Collector
        from torchrl.envs import GymEnv, ParallelEnv

        env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
        collector = Collector(env, frames_per_batch=20, total_frames=20)
        print(type(collector).__module__, [tuple(batch.shape) for batch in collector])
        collector.shutdown()
        """,
    )
    done = run(script, cwd=tmp_path)
    assert done.stdout.strip() == "reap.collectors.single [(2, 10)]", done.stderr


def test_a_module_of_a_package_and_the_processes_it_spawns(tmp_path):
    """Another sitecustomize is hidden by none of it."""
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "name.py", "which = 'torchrl.collectors'")
    write(
        tmp_path / "package" / "train.py",
        """
        import multiprocessing, os, sys
        from importlib import import_module
        from .name import which

        def child(queue):
            queue.put((os.environ["MINE"], import_module(which).Collector.__module__))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(*queue.get(timeout=60), sys.argv[1:])
            process.join()
        """,
    )
    write(tmp_path / "site" / "sitecustomize.py", "import os; os.environ['MINE'] = 'heard'")
    done = run("-m", "package.train", "--seed", "3", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout.strip() == "heard reap.collectors.single ['--seed', '3']", done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "usage: python -m reap.compat script.py"),
        (["-h"], 0, "python -m reap.compat -m package.module"),
        ([], 2, "give a script to run"),
        (["-m"], 2, "give a module to run"),
        (["-m", "nowhere.train"], 2, "no module named 'nowhere.train'"),
        (["-m", "leaves", "--help"], 5, "help of the script"),
        (["-m", "package"], 0, "package.__main__ package __main__"),
        (["--hlep"], 2, "no option '--hlep'"),
        (["nowhere.py"], 2, "can't open file 'nowhere.py'"),
        (["leaves.py", "--help"], 5, "help of the script"),
    ],
)
def test_the_command_line(arguments, code, said, tmp_path):
    write(tmp_path / "leaves.py", "import sys; assert sys.argv[1:] == ['--help']; print('help of the script'); exit(5)")
    write(tmp_path / "package" / "__init__.py", "")
    write(
        tmp_path / "package" / "__main__.py",
        "import sys; print(__spec__.name, __package__, sys.modules[__name__].__name__)",
    )
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


FAR = """
import sys
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from torchrl.envs import GymEnv
from torchrl.weight_update import DistributedWeightSyncScheme, RayWeightSyncScheme, RPCWeightSyncScheme

kinds = {
    "gloo": (DistributedCollector, DistributedWeightSyncScheme(backend="gloo"), {"launcher": "mp", "backend": "gloo"}),
    "rpc": (RPCCollector, RPCWeightSyncScheme(), {"launcher": "mp"}),
    "ray": (RayCollector, RayWeightSyncScheme(), {"ray_init_config": {"num_cpus": 1}}),
}

def make():
    from torchrl.collectors import Collector  # wherever it is imported
    assert Collector.__module__ == "reap.collectors.single"
    return GymEnv("Pendulum-v1")

if __name__ == "__main__":
    kind, scheme, options = kinds[sys.argv[1]]
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    collector = kind(
        [make], policy, frames_per_batch=10, total_frames=20, sync=True, collector_class=Collector,
        weight_sync_schemes={"policy": scheme}, **options,
    )
    for batch in collector:
        nn.init.constant_(policy.module.weight, 0.0)
        nn.init.constant_(policy.module.bias, 0.5)
        collector.update_policy_weights_()
    print(type(collector).__module__, bool((batch["action"] == 0.5).all()))
    collector.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo", "rpc", "ray"])
def test_distributed_collectors_and_their_schemes(kind, tmp_path):
    done = run(write(tmp_path / "train.py", FAR), kind, cwd=tmp_path)
    module = {"gloo": "torchdist"}.get(kind, kind)
    assert done.stdout.strip().splitlines()[-1:] == [f"reap.collectors.distributed.{module} True"], done.stderr


def configured(name):
    """Every argument of TorchRL's collector spelled out, as its hydra configurations do."""
    kind = getattr(torchrl.collectors, name)
    given = inspect.signature(kind.__init__).parameters.values()
    options = {p.name: p.default for p in given if p.default is not p.empty}
    if name == "AsyncCollector":  # what its configuration passes on in addition
        options |= {"use_buffers": False, "replay_buffer": None, "extend_buffer": False, "trust_policy": True}
        options |= {"compile_policy": None, "cudagraph_policy": None, "no_cuda_sync": False}
    options |= {"weight_updater": None, "weight_sync_schemes": None, "exploration_type": "RANDOM", "total_frames": 20}
    return options


@pytest.mark.parametrize("name", ["Collector", "AsyncCollector", "MultiSyncCollector", "MultiAsyncCollector"])
def test_configurations_of_torchrls_trainers(name):
    """Envs come in a list of the configuration's own kind, and what is not used is given as None."""
    options = configured(name)
    envs = UserList([functools.partial(GymEnv, "CartPole-v1")])
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        collector = getattr(reap.collectors, name)(envs, frames_per_batch=10, **options)
    assert [batch.numel() for batch in collector] == [10, 10]
    collector.shutdown()


def test_a_configuration_read_by_hydra():
    pytest.importorskip("hydra")
    from hydra.utils import instantiate
    from omegaconf import OmegaConf
    from torchrl.trainers.algorithms.configs import GymEnvConfig, MultiSyncCollectorConfig

    envs = [GymEnvConfig(env_name="CartPole-v1"), GymEnvConfig(env_name="CartPole-v1")]
    config = OmegaConf.structured(MultiSyncCollectorConfig(create_env_fn=envs, frames_per_batch=20, total_frames=20))
    with reap.compat.install():
        collector = instantiate(config)
    assert isinstance(collector, reap.collectors.MultiSyncCollector)
    assert [batch.shape for batch in collector] == [(2, 10)]
    collector.shutdown()
