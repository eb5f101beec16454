"""What each extra is for, tried in an environment that has this extra alone: `python extras.py EXTRA DIRECTORY ROOT`.

One function for each extra, by its name. It is given a directory to write to, and the root of the sources for what is
not installed (the tests, the docs, the benchmarks).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def play(env, policy=None, frames=20):
    from reap import Collector

    with Collector(env, policy, frames_per_batch=frames) as collector:
        batch = collector.next()
    assert batch.numel() == frames
    return batch


def recorded(path, format=None):
    import reap

    with reap.Collector("CartPole-v1", frames_per_batch=200) as collector, reap.data.record(collector, path, format):
        collector.next()
    assert len(reap.data.load(path)) > 2
    return path


def module(*arguments, where, **more):
    """Run `python -m …` in a directory that is not the source's."""
    subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=where, check=True, timeout=600, env=os.environ | more
    )


def cartpole():
    from reap.envs import GymEnv

    return GymEnv("CartPole-v1")


def ray(where, root):
    from reap.collectors.distributed import RayCollector

    local = {"address": "local", "num_cpus": 2, "log_to_driver": False, "include_dashboard": False}
    with RayCollector([cartpole] * 2, None, frames_per_batch=40, sync=True, ray_init_config=local) as collector:
        assert collector.next().numel() == 40


def slurm(where, root):
    from reap.collectors.distributed import DistributedCollector

    jobs = {"launcher": "submitit", "slurm_kwargs": {"folder": where, "timeout_min": 2, "cluster": "local"}}
    with DistributedCollector([cartpole], None, frames_per_batch=40, **jobs) as collector:
        assert collector.next().numel() == 40


def torchrl(where, root):
    import reap.compat

    reap.compat.install()
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    assert Collector.__module__.startswith("reap.")
    with Collector(lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter()), frames_per_batch=20) as collector:
        assert collector.next()["step_count"].max() > 0


def envpool(where, root):
    from reap.envs import EnvPoolEnv

    play(EnvPoolEnv("CartPole-v1", num_envs=4))


def pettingzoo(where, root):
    import gymnasium as gym
    import numpy as np
    from pettingzoo import ParallelEnv

    from reap.envs import PettingZooEnv

    class Two(ParallelEnv):
        metadata = {"name": "two"}
        possible_agents = ["a", "b"]

        def observation_space(self, agent):
            return gym.spaces.Box(-1, 1, (3,), np.float32)

        def action_space(self, agent):
            return gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.agents = [*self.possible_agents]
            return {name: np.zeros(3, np.float32) for name in self.agents}, {name: {} for name in self.agents}

        def step(self, actions):
            seen, _ = self.reset()
            return seen, dict.fromkeys(seen, 1.0), dict.fromkeys(seen, False), dict.fromkeys(seen, False), {}

    assert play(PettingZooEnv(Two()))["agents", "observation"].shape == (20, 2, 3)
    assert play(PettingZooEnv(Two(), mode="lanes")).shape == (2, 10)


def mujoco(where, root):
    assert play("HalfCheetah-v5")["observation"].shape == (20, 17)


def atari(where, root):
    import ale_py
    import gymnasium as gym

    def preprocessed():
        gym.register_envs(ale_py)
        return gym.wrappers.AtariPreprocessing(gym.make("ALE/Pong-v5", frameskip=1))  # needs OpenCV

    assert play("ALE/Pong-v5")["pixels"].shape[1:] == (210, 160, 3)
    assert play(preprocessed)["observation"].shape[1:] == (84, 84)


def dm(where, root):
    import dm_env
    import numpy as np

    from reap.envs import DMEnv

    class Three(dm_env.Environment):
        def observation_spec(self):
            return dm_env.specs.Array((3,), np.float32)

        def action_spec(self):
            return dm_env.specs.BoundedArray((1,), np.float32, -1, 1)

        def reset(self):
            return dm_env.restart(np.zeros(3, np.float32))

        def step(self, action):
            return dm_env.transition(1.0, np.ones(3, np.float32))

    assert play(DMEnv(Three()))["observation"].sum() == 3 * 19


def jax(where, root):
    from types import SimpleNamespace

    import jax
    import numpy as np

    from reap.envs import JaxEnv

    class Counting:  # of gymnax's kind
        default_params = SimpleNamespace(max_steps_in_episode=5)

        def action_space(self, params):
            return SimpleNamespace(low=-1.0, high=1.0, shape=(1,), dtype=np.float32)

        def observation_space(self, params):
            return None

        def reset_env(self, key, params):
            return jax.numpy.zeros(3), jax.numpy.int32(0)

        def step_env(self, key, state, action, params):
            return jax.numpy.ones(3) * state, state + 1, action[0], self.is_terminal(state + 1, params), {}

        def is_terminal(self, state, params):
            return state >= 5

    batch = play(JaxEnv(Counting(), num_envs=4))
    assert batch["next", "done"].sum() == 4


def minari(where, root):
    os.environ["MINARI_DATASETS_PATH"] = str(where)
    import minari

    recorded(where / "cartpole-v0", "minari")
    assert minari.load_dataset("cartpole-v0").total_episodes > 2


def hdf5(where, root):
    import h5py

    with h5py.File(recorded(where / "cartpole.hdf5")) as file:
        assert len(file["observations"]) == len(file["timeouts"])


def parquet(where, root):
    import pyarrow.parquet

    assert len(pyarrow.parquet.read_table(recorded(where / "cartpole", "parquet") / "data"))
    recorded(where / "robot", "lerobot")


def progress(where, root):
    from reap import Collector

    for display in ("tqdm", "rich"):
        with Collector("CartPole-v1", frames_per_batch=20) as collector:
            for _ in collector.progress(60, display=display):
                pass
    module("reap", "watch", "--help", where=where)


def tensorboard(where, root):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from reap.loggers import TensorBoardLogger

    with TensorBoardLogger(where / "events") as logger:
        logger.log(10, {"return": 2.5})
    found = EventAccumulator(str(where / "events")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("return")] == [(10, 2.5)]


def wandb(where, root):
    from reap.loggers import WandbLogger

    with WandbLogger("reap-test", mode="offline", directory=where) as logger:
        logger.log(10, {"return": 2.5})
    assert list(where.glob("wandb/offline-run-*/*.wandb"))


def mlflow(where, root):
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    from reap.loggers import MLflowLogger

    store = (where / "store").as_uri()
    with MLflowLogger("reap-test", tracking_uri=store) as logger:
        logger.log(10, {"return": 2.5})
    (found,) = MlflowClient(store).get_metric_history(logger.run_id, "return")
    assert (found.step, found.value) == (10, 2.5)


def video(where, root):
    import gymnasium as gym
    import numpy as np

    from reap import record_video
    from reap.video import read_video

    class Grey(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
        metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
        render_mode = "rgb_array"

        def reset(self, *, seed=None, options=None):
            self.left = 5
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.left -= 1
            return np.zeros(3, np.float32), 1.0, self.left == 0, False, {}

        def render(self):
            return np.full((32, 48, 3), 100, np.uint8)

    assert record_video(Grey(), None, where / "play.mp4", deterministic=False)["reward"] == 5
    assert read_video(where / "play.mp4").shape[1:] == (32, 48, 3)


def demo(where, root):
    module("reap", "show", recorded(where / "data"), "--plot", where / "returns.png", where=where)
    assert (where / "returns.png").read_bytes()[:4] == b"\x89PNG"


def bench(where, root):
    board = where / "board.json"
    module("benchmarks", "--only", "DQN's", "Pong", "--quick", "--json", board, where=where, PYTHONPATH=str(root))
    assert json.loads(board.read_text())["rows"], board.read_text()  # it needs TorchRL, Atari and torchvision


def test(where, root):
    module("pytest", "-p", "no:cacheprovider", root / "tests/unit/test_slots.py", where=where)


def docs(where, root):
    module("mkdocs", "build", "--strict", "-q", "-f", root / "mkdocs.yml", "-d", where / "site", where=where)
    assert (where / "site" / "index.html").exists()


def dev(where, root):
    module("ruff", "check", "--no-cache", root / "src", where=where)
    module("mypy", "--version", where=where)
    module("pyright", "--version", where=where)


if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        place = Path(sys.argv[2]) / f"of-{name}"  # no name that could be imported
        place.mkdir()
        globals()[name](place, Path(sys.argv[3]))
        print(f"{name} is fine", flush=True)
