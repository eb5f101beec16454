"""ProcessInferenceServer: the policy in a process of its own, and what happens when either side ends."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from reap.collectors import MultiSyncCollector
from reap.envs import GymEnv, SerialEnv
from reap.errors import (
    NotReady,
    ServerGone,
    SpecMismatch,
    UsageError,
    WorkerRaised,
    WorkerSilent,
    WrongArgument,
    WrongState,
)
from reap.modules import InferenceServer, ProcessInferenceServer
from reap.testing import CountingEnv, EchoPolicy, no_leaks
from tests.worlds.faults import freeze
from tests.worlds.waiting import until


class Scale(nn.Module):
    """Says by how much it multiplies, and in which process."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, observation):
        return observation * self.weight, torch.full(observation.shape[:1], os.getpid())


def row(*values):
    return TensorDict({"observation": torch.tensor([float(v) for v in values])})


def test_the_policy_acts_elsewhere_and_learns():
    with no_leaks():
        with ProcessInferenceServer(Scale, timeout=0.001) as server:
            assert server.is_alive
            near, other = server.client("thread"), server.client()
            td = near(row(1, 3))
            assert td["action"].tolist() == [2, 6]
            assert td["output1"].item() == server._child.pid != os.getpid()
            weights = Scale()
            with torch.no_grad():
                weights.weight.fill_(5.0)
            for version, given in enumerate((weights, weights.state_dict(), TensorDict(weights.state_dict())), 1):
                assert server.update_policy_weights_(given) == version == server.policy_version
                td = other(row(1))
                assert (td["action"].item(), td["policy_version"].item()) == (5.0, version)
            stats = server.stats()
            assert (stats["requests"], stats["clients"], stats["policy_version"]) == (4, 2, 3)
            with pytest.raises(SpecMismatch, match="which the policy does not have"):
                server.update_policy_weights_({"wight": torch.tensor(1.0)})
            with pytest.raises(WrongArgument, match="weights must be given"):
                server.update_policy_weights_(None)
        with pytest.raises(ServerGone):
            near(row(1))
        with pytest.raises(WrongState, match="closed: it was shut down"):
            server.client()
        assert not server.is_alive
        server.shutdown()
        del server, near, other


def test_workers_ask_it():
    def lanes(first):
        return lambda: SerialEnv(2, [lambda n=n: GymEnv(CountingEnv((3, 2), first + n)) for n in range(2)])

    options = {"frames_per_batch": 20, "total_frames": 60}
    with ProcessInferenceServer(EchoPolicy) as server:
        client = server.client(policy_version_key=None)
        with MultiSyncCollector([lanes(0), lanes(2)], client, **options) as c:
            got = [batch.clone() for batch in c]
    with MultiSyncCollector([lanes(0), lanes(2)], EchoPolicy(), **options) as c:
        assert all((one == other).all() for one, other in zip(got, c))
    assert len(got) == 3


def test_its_death_is_told_to_everybody():
    class Waits(nn.Module):
        def forward(self, observation):
            time.sleep(60)
            return observation

    with no_leaks():
        server = ProcessInferenceServer(Waits, min_batch_size=1)
        client, told = server.client(), []

        def ask(one):
            try:
                one(row(1))
            except Exception as error:
                told.append(error)

        asker = threading.Thread(target=ask, args=(client,))
        asker.start()
        until(lambda server=server: server.stats()["clients"])
        os.kill(server._child.pid, signal.SIGKILL)
        asker.join(10)
        assert [type(error) for error in told] == [ServerGone]
        for use, given in ((server.stats, ()), (server.update_policy_weights_, ({},)), (server.client, ())):
            with pytest.raises(ServerGone, match="killed by SIGKILL"):
                use(*given)
        server.shutdown()
        told.clear()
        client.close()
        del server, client, use, asker


def test_what_goes_wrong_at_the_start_is_told():
    def broken():
        raise OSError("no such file")

    with no_leaks():
        with pytest.raises(WorkerRaised, match=r"policy_factory raised OSError\('no such file'\)") as caught:
            ProcessInferenceServer(broken)
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(UsageError, match="max_batch_size must be a whole number ≥ 1, got 0"):
            ProcessInferenceServer(Scale, max_batch_size=0)
        with pytest.raises(WrongArgument, match="policy_factory must be a callable, got int"):
            ProcessInferenceServer(3)
        with pytest.raises(WrongArgument, match="has no option 'max_batchsize'; did you mean 'max_batch_size'"):
            ProcessInferenceServer(Scale, max_batchsize=1)
        with pytest.raises(UsageError, match="num_threads must be a whole number ≥ 1, got 0"):
            ProcessInferenceServer(Scale, num_threads=0)
        with pytest.raises(UsageError, match="startup_timeout must be a number of seconds > 0 or None, got '1'"):
            ProcessInferenceServer(Scale, startup_timeout="1")
        del caught


def test_a_factory_that_takes_too_long_is_given_up():
    def slow():
        time.sleep(60)

    began = time.monotonic()
    with no_leaks(), pytest.raises(WorkerSilent, match=r"did not return within 0\.5 s \(startup_timeout\)"):
        ProcessInferenceServer(slow, startup_timeout=0.5)
    assert time.monotonic() - began < 30  # not as long as a process may take to import


def test_a_client_waits_as_long_as_it_was_told():
    """For a server that is stopped, when it is asked and when it is first met; the next answer is its own again."""
    with no_leaks():
        with ProcessInferenceServer(Scale, timeout=0.001) as server:
            known, new = (server.client(timeout=0.2) for _ in range(2))
            assert known(row(1))["action"].item() == 2
            freeze(server._child.pid)
            large = TensorDict({"observation": torch.zeros(1_000_000)})  # more than the socket takes at once
            for client, given in ((known, row(3)), (new, row(3)), (known, large)):
                with pytest.raises(NotReady, match=r"did not answer within 0.2 s"):
                    client(given)
            os.kill(server._child.pid, signal.SIGCONT)
            patient = server.client(timeout=20)
            for client in (patient, pickle.loads(pickle.dumps(patient))):
                assert client(row(5))["action"].item() == 10
                client.close()
            known.close(), new.close()
        for wrong in (0, -1, float("inf"), float("nan"), "5", True):
            with pytest.raises(UsageError, match="timeout must be"):
                server.client(timeout=wrong)


def test_a_client_in_a_thread_waits_as_long_as_it_was_told():
    go, began = threading.Event(), threading.Event()

    def policy(observation):
        began.set()
        go.wait()
        return observation * 2

    with no_leaks(), InferenceServer(policy, timeout=0.001) as server:
        hasty, patient = server.client(timeout=0.1), server.client()
        with pytest.raises(TimeoutError, match="did not answer within 0.1 s"):
            hasty(row(1))
        assert began.is_set()
        go.set()
        assert hasty(row(4))["action"].item() == 8
        assert patient(row(5))["action"].item() == 10
        for wrong in (0, float("inf"), "5"):
            with pytest.raises(UsageError, match="timeout must be"):
                server.client("process", timeout=wrong)
        hasty.close(), patient.close()
