"""RLlib's env runners on the work of `benchmarks.on_ray`: 2 actors × 16 CartPole lanes × 128 steps, to this process.

A script of its own, for an interpreter that has RLlib (which asks for an older gymnasium than reap is tested with):
`python -m benchmarks.on_ray --rllib /path/to/that/python` starts it. For each line it reads, a number of seconds, it
writes how many frames per second came.
"""

from __future__ import annotations

import sys
import time
from typing import Any

ACTORS, LANES, STEPS = 2, 16, 128


def group() -> Any:
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    ray.init(address="local", num_cpus=ACTORS, include_dashboard=False, log_to_driver=False)
    config = PPOConfig().environment("CartPole-v1")
    config = config.env_runners(
        num_env_runners=ACTORS, num_envs_per_env_runner=LANES, explore=False, rollout_fragment_length=STEPS
    )
    model = DefaultModelConfig(fcnet_hiddens=[64], fcnet_activation="tanh")
    return EnvRunnerGroup(config=config.rl_module(model_config=model), local_env_runner=False)


def frames(runners: Any) -> int:
    """One rollout of each, here."""
    found = runners.foreach_env_runner(lambda runner: runner.sample(num_timesteps=LANES * STEPS))
    return sum(len(episode) for episodes in found for episode in episodes)


def main() -> None:
    runners = group()
    frames(runners)
    print("ready", flush=True)
    for line in sys.stdin:
        began, made = time.perf_counter(), 0
        while time.perf_counter() - began < float(line):
            made += frames(runners)
        print(made / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main()
