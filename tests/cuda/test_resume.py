"""A run on the GPU that ends, and goes on in another process: bit for bit the batches it would have delivered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Categorical

from reap.collectors import Collector, MultiSyncCollector
from reap.envs import GymEnv, SerialEnv, TorchEnv
from reap.envs.adapters.torch_envs import TorchCartPole
from tests.worlds.resume import Samples, same

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BATCHES = 3


class Remembers(nn.Module):
    """Draws, and carries what it drew to the next step of the episode."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 2)
        self.carry = {"drawn": torch.zeros(1)}

    def forward(self, observation, drawn):
        action = Categorical(logits=self.net(torch.cat([observation.float(), drawn], -1))).sample()
        return action, drawn * 0.5 + action.unsqueeze(-1).float()


def lanes():
    return SerialEnv(3, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))


def on_device(policy, **options):
    env = TorchEnv(TorchCartPole(64, device="cuda", limit=20))
    return Collector(env, policy.cuda(), frames_per_batch=64 * 13, total_frames=-1, **options)


MAKERS = {
    "lanes on the GPU": lambda: on_device(Samples(4, choices=2)),
    "a recorded rollout": lambda: on_device(Samples(4, choices=2), cudagraph_policy=True),
    "a limit": lambda: on_device(Samples(4, choices=2), max_frames_per_traj=9),
    "a carry": lambda: on_device(Remembers()),
    "a policy on the GPU": lambda: Collector(
        lanes(), Samples(4, choices=2), frames_per_batch=39, policy_device="cuda", total_frames=-1
    ),
    "batches on the GPU": lambda: Collector(
        lanes(), Samples(4, choices=2), frames_per_batch=39, storing_device="cuda", total_frames=-1
    ),
    "workers with the policy on the GPU": lambda: MultiSyncCollector(
        [lanes] * 2, Samples(4, choices=2), frames_per_batch=78, policy_device="cuda", total_frames=-1
    ),
}


def made(name):
    torch.manual_seed(0)
    return MAKERS[name]()


def begin(name, folder):
    """Three batches, the state, and what follows."""
    with made(name) as c:
        c.set_seed(7)
        for _ in range(BATCHES):
            c.next()
        torch.save(c.state_dict(), f"{folder}/state.pt")
        torch.save([c.next().cpu().to_dict() for _ in range(BATCHES)], f"{folder}/expected.pt")


def go_on(name, folder):
    """In another process, after another beginning of which nothing is left."""
    from tensordict import TensorDict

    with made(name) as c:
        c.next()
        c.load_state_dict(torch.load(f"{folder}/state.pt", weights_only=True))
        for expected in torch.load(f"{folder}/expected.pt", weights_only=True):
            batch = c.next().cpu()
            same(batch, TensorDict(expected, batch.batch_size))


def run(step, name, folder):
    code = f"from tests.cuda.test_resume import {step}; {step}({name!r}, {str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MAKERS)
def test_another_process_goes_on(name, tmp_path):
    run("begin", name, tmp_path)
    run("go_on", name, tmp_path)
