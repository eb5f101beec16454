"""Sample Factory's sampler on the work of `benchmarks.multi`: 2 workers × 16 CartPole lanes, to this process.

A script of its own, for an interpreter that has Sample Factory (which asks for an older gymnasium and numpy than reap
is tested with): `python -m benchmarks.multi --sample-factory /path/to/that/python` starts it. For each line it reads, a
number of frames, it makes as many and writes how many seconds it took.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import gymnasium as gym

ARGUMENTS = [
    "--env=cart",
    "--algo=APPO",
    "--experiment=sampling",
    "--device=cpu",
    "--num_workers=2",
    "--num_envs_per_worker=16",
    "--rollout=128",
    "--use_rnn=False",
    "--normalize_input=False",
    "--normalize_returns=False",
    "--encoder_mlp_layers",
    "64",
    "64",
    "--nonlinearity=tanh",
    "--serial_mode=False",
    "--async_rl=True",
    "--restart_behavior=overwrite",
]


def make(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def sampler(folder: str) -> Any:
    from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
    from sample_factory.algo.utils.env_info import extract_env_info
    from sample_factory.algo.utils.make_env import make_env_func_batched
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env

    register_env("cart", make)
    arguments = [*ARGUMENTS, f"--train_dir={folder}"]
    cfg = parse_full_cfg(parse_sf_args(arguments)[0], arguments)
    env = make_env_func_batched(cfg, env_config=None)
    info = extract_env_info(env, cfg)
    env.close()
    made = SyncSamplingAPI(cfg, info)
    made.start()
    return made


def main() -> None:
    from sample_factory.algo.utils.rl_utils import samples_per_trajectory

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # it writes its log to where answers go
    with tempfile.TemporaryDirectory() as folder:
        made = sampler(folder)
        samples_per_trajectory(made.get_trajectories_sync())
        answers.write("ready\n")
        for line in sys.stdin:
            began, frames = time.perf_counter(), 0
            while frames < int(line):
                frames += samples_per_trajectory(made.get_trajectories_sync())
            answers.write(f"{(time.perf_counter() - began) * int(line) / frames}\n")
        made.stop()


if __name__ == "__main__":
    main()
