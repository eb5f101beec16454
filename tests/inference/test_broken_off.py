"""Ctrl-C while a client or a server's owner waits for an answer: the next question gets its own."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from reap.modules import InferenceServer, ProcessInferenceServer
from reap.testing import no_leaks


class Gate(nn.Module):
    """Doubles what it sees, when somebody has written to a pipe."""

    def __init__(self, gate):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.gate = gate

    def forward(self, observation):
        os.read(self.gate, 1)
        return observation * self.weight


def row(value):
    return TensorDict({"observation": torch.tensor([float(value)])})


def interrupted(call, *arguments):
    """Break a call off while it waits."""
    waiting = threading.get_ident()
    timer = threading.Timer(0.3, signal.pthread_kill, (waiting, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call(*arguments)
    timer.join()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_answer_nobody_waited_for_is_not_the_next_one(kind):
    gate, open_gate = os.pipe()
    with no_leaks():
        with InferenceServer(Gate(gate), min_batch_size=1) as server:
            client = server.client(kind)
            os.write(open_gate, b"1")
            assert client(row(1))["action"].item() == 2
            interrupted(client, row(5))
            os.write(open_gate, b"111")
            assert client(row(7))["action"].item() == 14
            assert client(row(8))["action"].item() == 16
            client.close()
        del server, client
    os.close(gate)
    os.close(open_gate)


def test_a_call_that_was_broken_off_is_not_the_next_ones_answer(tmp_path):
    path = tmp_path / "gate"
    os.mkfifo(path)

    def make():
        return Gate(os.open(path, os.O_RDWR))

    ours = os.open(path, os.O_RDWR)
    with no_leaks():
        with ProcessInferenceServer(make, min_batch_size=1) as server:
            client, found = server.client(), []
            asker = threading.Thread(target=lambda ask=client: found.append(ask(row(1))["action"].item()))
            asker.start()
            while not server.stats()["clients"]:
                pass
            threading.Event().wait(0.2)  # its batch has begun: an update waits for it
            interrupted(server.update_policy_weights_, {"weight": torch.tensor(3.0)})
            os.write(ours, b"11")
            asker.join()
            assert server.stats()["policy_version"] == 1
            assert server.update_policy_weights_({"weight": torch.tensor(5.0)}) == 2
            assert (found, client(row(1))["action"].item()) == ([2.0], 5.0)
            client.close()
        del server, client, asker
    os.close(ours)
