"""`reap.compat`: scripts that cannot be edited run on reap, and TorchRL is as it was afterwards."""

import subprocess
import sys
import textwrap
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    import torchrl.collectors
    import torchrl.collectors.collectors
    import torchrl.collectors.utils
    import torchrl.collectors.weight_update
    import torchrl.weight_update
    import torchrl.weight_update.weight_sync_schemes
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

import reap.collectors
import reap.compat
import reap.weight_update

pytestmark = pytest.mark.filterwarnings("ignore")


def names():
    modules = (
        torchrl.collectors,
        torchrl.collectors.collectors,
        torchrl.collectors.utils,
        torchrl.collectors.weight_update,
        torchrl.weight_update,
        torchrl.weight_update.weight_sync_schemes,
    )
    return [{name: value for name, value in vars(module).items() if name[:2] != "__"} for module in modules]


def test_install_and_uninstall_leave_torchrl_as_it_was():
    before = names()
    reap.compat.install()
    try:
        assert torchrl.collectors.Collector is reap.collectors.Collector
        assert torchrl.collectors.SyncDataCollector is reap.collectors.Collector
        assert torchrl.collectors.utils.split_trajectories is reap.collectors.utils.split_trajectories
        assert torchrl.weight_update.SharedMemWeightSyncScheme is reap.weight_update.SharedMemWeightSyncScheme
        old, schemes = torchrl.collectors.collectors, torchrl.weight_update.weight_sync_schemes
        assert old.Collector is old.SyncDataCollector is reap.collectors.Collector
        assert old.split_trajectories is reap.collectors.utils.split_trajectories
        updaters = torchrl.collectors.weight_update
        assert updaters.VanillaWeightUpdater is reap.collectors.VanillaWeightUpdater
        assert updaters.WeightUpdaterBase is reap.collectors.WeightUpdaterBase
        assert schemes.WeightSyncScheme is reap.weight_update.WeightSyncScheme
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
    script = tmp_path / "train.py"
    (tmp_path / "beside_it.py").write_text("frames = 10")
    script.write_text(
        textwrap.dedent("""
        import sys
        from beside_it import frames
        from torchrl.collectors import SyncDataCollector
        from torchrl.envs import GymEnv

        collector = SyncDataCollector(GymEnv(sys.argv[1]), frames_per_batch=frames, total_frames=20)
        print(type(collector).__module__, [batch.numel() for batch in collector])
        collector.shutdown()
        """)
    )
    command = [sys.executable, "-W", "ignore", "-m", "reap.compat", str(script), "CartPole-v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "reap.collectors.single [10, 10]", done.stderr


def test_without_a_script():
    with pytest.raises(ValueError, match="needs a script"):
        reap.compat.main([])
