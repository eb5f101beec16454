"""InferenceServer: when batches leave, what each client gets, and what happens when somebody goes."""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import signal
import threading
import time

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from reap._system.messages.framed import send
from reap._system.messages.pickling import dumps
from reap._system.processes import Child, end
from reap.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from reap.envs import GymEnv, SerialEnv
from reap.errors import ServerGone, SpecMismatch, UsageError, WorkerRaised, WrongArgument, WrongState
from reap.inference.requests import Request, RequestQueue
from reap.modules import InferenceServer
from reap.testing import CountingEnv, EchoPolicy, no_leaks
from tests.buffers.child_messages import hear
from tests.worlds.waiting import until


class Scale(nn.Module):
    """Says by how much it multiplies, and how many rows it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.sizes = []

    def forward(self, observation):
        self.sizes.append(len(observation))
        return observation * self.weight


def row(*values):
    return TensorDict({"observation": torch.tensor([float(v) for v in values])})


def together(*calls):
    """Run calls in a thread each; what they returned or raised, in order."""
    found = [None] * len(calls)

    def run(n, call):
        try:
            found[n] = call()
        except Exception as error:
            found[n] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


# ---- when a batch leaves ------------------------------------------------------------------------------------------


def waiting(line, *clients, rows=None):
    for client in clients:
        line.put(Request(client, {}, rows))


def test_a_batch_leaves_when_it_is_full():
    line = RequestQueue(most=3, enough=3, timeout=1e9)
    clients = [line.enter() for _ in range(9)]
    waiting(line, *clients[:5])
    assert [r.client for r in line.take()] == clients[:3]
    waiting(line, clients[5])
    assert [r.client for r in line.take()] == clients[3:6]


def test_a_batch_leaves_when_its_oldest_has_waited():
    line = RequestQueue(most=3, enough=3, timeout=0.05)
    clients = [line.enter() for _ in range(2)]
    began = time.monotonic()
    waiting(line, clients[0])
    assert len(line.take()) == 1
    assert time.monotonic() - began >= 0.05


def test_a_batch_leaves_when_every_client_is_waiting():
    line = RequestQueue(most=64, enough=64, timeout=1e9)
    first, second, third = (line.enter() for _ in range(3))
    waiting(line, first, second)
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(line.take()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "the third could still come"
    line.leave(third)
    thread.join(10)
    assert [r.client for r in taken] == [first, second]


def test_requests_of_one_that_left_are_dropped_and_large_ones_go_alone():
    line = RequestQueue(most=4, enough=1, timeout=1e9)
    first, second = line.enter(), line.enter()
    waiting(line, first)
    line.leave(first)
    waiting(line, second, rows=9)
    waiting(line, second)
    assert [r.rows for r in line.take()] == [9]
    assert [r.rows for r in line.take()] == [1]


# ---- what each client gets ----------------------------------------------------------------------------------------


def test_threads_are_answered_together_each_with_its_own_rows():
    policy = Scale()
    with no_leaks(), InferenceServer(policy, timeout=1e9) as server:
        clients = [server.client() for _ in range(4)]
        for turn in range(20):
            found = together(*(functools.partial(client, row(n, turn)) for n, client in enumerate(clients)))
            for n, td in enumerate(found):
                assert td["action"].tolist() == [2.0 * n, 2.0 * turn]
                assert td["policy_version"].item() == 0
                assert td["observation"].tolist() == [n, turn]
        stats = server.stats()
    assert policy.sizes == [4] * 20
    assert (stats["requests"], stats["batches"], stats["mean_batch_size"]) == (80, 20, 4.0)
    assert stats["batch_sizes"] == {4: 20}
    assert stats["clients"] == 4
    assert 0 <= stats["queue_ms_p50"] <= stats["queue_ms_p95"]
    assert 0 < stats["utilisation"] <= 1


def test_rows_come_in_any_number_and_shape():
    with InferenceServer(Scale()) as server:
        client = server.client()
        many = TensorDict({"observation": torch.arange(24.0).reshape(2, 3, 4)}, [2, 3])
        assert torch.equal(client(many)["action"], many["observation"] * 2)
        assert client(many)["policy_version"].shape == (2, 3)


def test_buckets_pad_what_the_policy_sees_and_nobody_else():
    policy = Scale()
    with InferenceServer(policy, max_batch_size=6, buckets=True) as server:
        client = server.client()
        for rows in (1, 2, 3, 5, 6):
            given = TensorDict({"observation": torch.rand(rows, 3)}, [rows])
            assert torch.equal(client(given)["action"], given["observation"] * 2)
    assert policy.sizes == [1, 2, 4, 6, 6]
    with pytest.raises(UsageError, match=r"largest of buckets must hold max_batch_size=6, got \[4\]"):
        InferenceServer(policy, max_batch_size=6, buckets=[4])


def test_weights_change_between_batches_and_answers_name_the_version():
    class Torn(nn.Module):
        """Reads its weight twice: an update inside a batch would show."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.0))

        def forward(self, observation):
            before = self.weight.item()
            time.sleep(0.001)
            return torch.stack(
                [torch.full_like(observation, before), torch.full_like(observation, self.weight.item())], -1
            )

    source = Torn()
    with InferenceServer(Torn(), timeout=0) as server:
        client, stop, seen = server.client(), threading.Event(), []

        def ask():
            while not stop.is_set():
                td = client(row(0))
                seen.append((*td["action"].flatten().tolist(), td["policy_version"].item()))

        asker = threading.Thread(target=ask)
        asker.start()
        for version in range(1, 30):
            source.weight.data.fill_(float(version))
            assert server.update_policy_weights_(source) == version
            if version % 5 == 0:
                until(lambda seen=seen, so_far=len(seen): len(seen) > so_far + 1)
        stop.set()
        asker.join(10)
    assert all(first == second == version for first, second, version in seen)
    assert len({version for *_, version in seen}) > 3


def test_tensordict_policies_and_factories():
    def make():
        return TensorDictModule(nn.Linear(3, 2), in_keys=[("a", "b")], out_keys=[("c", "d"), "_private"][:1])

    with InferenceServer(policy_factory=make, device="cpu") as server:
        td = server.client()(TensorDict({"a": {"b": torch.ones(3)}, "other": torch.ones(1)}))
        assert torch.equal(td["c", "d"], server.policy.module(torch.ones(3)))
        with pytest.raises(WrongArgument, match=r"the policy reads \[\('a', 'b'\)\]"):
            server.client()(row(1))


# ---- processes ----------------------------------------------------------------------------------------------------


def ask_many(connection, fds, client, turns):
    """A client's process: asks, reports each answer, then waits to be ended."""
    for turn in range(turns):
        td = client(row(turn, 1))
        send(connection, (td["action"].tolist(), int(td["policy_version"])))
    with contextlib.suppress(EOFError):
        connection.recv_bytes()


def answers(child, count):
    return [hear(child) for _ in range(count)]


def test_processes_are_clients_too_and_one_that_dies_is_forgotten():
    with no_leaks():
        with InferenceServer(Scale(), timeout=0.01) as server:
            client = server.client("process")
            targets = [dumps(functools.partial(ask_many, client=client, turns=turns), "client") for turns in (3, 10**9)]
            polite, endless = (Child(target, name="asks") for target in targets)
            try:
                assert answers(polite, 3) == [([2.0 * n, 2.0], 0) for n in range(3)]
                assert len(answers(endless, 1)) >= 1
                polite.socket.close()
                endless.signal(signal.SIGKILL)
                assert endless.gone(10)
                until(lambda: server.stats()["clients"] == 0)
                assert server.client()(row(4))["action"].tolist() == [8.0]  # nobody waits for the dead
            finally:
                end([polite, endless], patience=1.0, deadline=5.0)
        client.close()


def serve(connection, fds):
    with InferenceServer(Scale()) as server:
        send(connection, server.client("process"))
        with contextlib.suppress(EOFError):
            connection.recv_bytes()


def test_a_client_of_a_dead_server_is_told():
    with no_leaks():
        child = Child(dumps(serve, "server"), name="serves")
        try:
            (client,) = answers(child, 1)
            assert client(row(3))["action"].tolist() == [6.0]
            child.signal(signal.SIGKILL)
            assert child.gone(10)
            for _ in range(2):
                with pytest.raises(ServerGone, match="the inference server is gone"):
                    client(row(3))
        finally:
            end([child], patience=1.0, deadline=5.0)


def test_shutting_down_answers_everybody_who_waits():
    with no_leaks():
        entered, leave = threading.Event(), threading.Event()

        def policy(observation):
            entered.set()
            leave.wait(10)
            return observation

        server = InferenceServer(policy, min_batch_size=1)
        clients = [server.client() for _ in range(3)]
        found = []

        def ask(some):
            found.extend(together(*(functools.partial(client, row(1)) for client in some)))

        threads = [threading.Thread(target=ask, args=(some,)) for some in (clients[:1], clients[1:])]
        threads[0].start()
        assert entered.wait(10)  # the first is being computed; the others come too late for its batch
        threads[1].start()
        until(lambda: len(server._queue._waiting) == 2)
        ender = threading.Thread(target=server.shutdown)
        ender.start()
        until(lambda: server._queue._closed is not None)
        leave.set()
        for thread in (ender, *threads):
            thread.join(10)
        assert sorted(type(one).__name__ for one in found) == ["ServerGone", "ServerGone", "TensorDict"]
        with pytest.raises(ServerGone, match="it was shut down"):
            clients[0](row(1))
        with pytest.raises(WrongState, match="closed: it was shut down"):
            server.start()
        server.shutdown()
        assert not server.is_alive


def test_a_policy_that_does_not_return_holds_nobody_for_ever(monkeypatch):
    import reap.inference.server as module

    monkeypatch.setattr(module, "DEADLINE", 0.3)
    entered, leave = threading.Event(), threading.Event()

    def stuck(observation):
        entered.set()
        leave.wait(60)
        return observation

    server = InferenceServer(stuck, min_batch_size=1)
    near, far = server.client(), server.client("process")
    found = []
    asker = threading.Thread(
        target=lambda: found.extend(together(*(functools.partial(c, row(1)) for c in (near, far))))
    )
    asker.start()
    assert entered.wait(10)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="did not return within"):
        server.shutdown()
    assert time.monotonic() - began < 5
    asker.join(10)
    assert [type(one) for one in found] == [ServerGone, ServerGone]
    leave.set()
    until(lambda: all(t.name != "reap-inference" for t in threading.enumerate()))
    far.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_policy_that_ends_the_thread_leaves_nobody_waiting():
    def leaves(observation):
        raise SystemExit(3)

    with no_leaks(), InferenceServer(leaves) as server:
        client = server.client()
        with pytest.raises(WorkerRaised, match=r"raised SystemExit\(3\)"):
            client(row(1))
        until(lambda: not server.is_alive)
        with pytest.raises(ServerGone, match="its thread has ended"):
            client(row(1))


def test_a_compiled_policy_meets_few_shapes():
    """Every batch size from 1 to 8, and four graphs: one for each bucket."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    net = nn.Linear(3, 2)
    with InferenceServer(torch.compile(net, backend=backend, dynamic=False), max_batch_size=8, buckets=True) as server:
        client = server.client()
        for _ in range(2):
            for rows in range(1, 9):
                given = TensorDict({"observation": torch.rand(rows, 3)}, [rows])
                torch.testing.assert_close(client(given)["action"], net(given["observation"]).detach())
    assert len(graphs) == 4


def test_a_policy_that_raises_fails_its_batch_only():
    class Picky(nn.Module):
        def forward(self, observation):
            if bool((observation < 0).any()):
                raise OverflowError("negative")
            return observation

    with InferenceServer(Picky()) as server:
        client, far = server.client(), server.client("process")
        for one in (client, far):
            with pytest.raises(
                WorkerRaised, match=r"the policy of the inference server raised OverflowError"
            ) as caught:
                one(row(-1))
            assert isinstance(caught.value.__cause__, OverflowError)
            assert one(row(1))["action"].tolist() == [1.0]
        far.close()


def test_a_request_that_does_not_fit_fails_alone():
    with InferenceServer(nn.Linear(2, 1), timeout=0.1) as server:
        good, wrong, narrow = (server.client() for _ in range(3))
        found = together(
            lambda: good(row(1, 2)),
            lambda: wrong(row(1, 2, 3)),
            lambda: narrow(TensorDict({"observation": torch.zeros(2, dtype=torch.float64)})),
        )
        assert found[0]["action"].shape == (1,)
        assert all(isinstance(error, WorkerRaised) for error in found[1:])
        assert "cannot be multiplied" in str(found[1])


def test_clients_may_be_asked_for_by_many_threads_at_once():
    with no_leaks():
        for _ in range(5):
            with InferenceServer(Scale()) as server:
                met = threading.Barrier(8)
                clients = together(*[lambda met=met, s=server: (met.wait(), s.client("process"))] * 8)
                names = [thread.name for thread in threading.enumerate()]
                assert (names.count("reap-inference"), names.count("reap-clients")) == (1, 1)
            del server, clients


def test_no_rows_are_no_rows():
    with InferenceServer(Scale(), buckets=True) as server:
        for kind in ("thread", "process"):
            client = server.client(kind)
            td = client(TensorDict({"observation": torch.zeros(0, 3)}, [0]))
            assert (td["action"].shape, td["policy_version"].shape) == ((0, 3), (0,))
            client.close()


def test_a_server_nobody_holds_ends():
    with no_leaks():
        server = InferenceServer(Scale())
        client = server.client()
        del server
        gc.collect()
        assert client(row(1))["action"].tolist() == [2.0], "somebody may still ask"
        del client
        gc.collect()
        until(lambda: all(t.name != "reap-inference" for t in threading.enumerate()))


def lanes(first):
    return lambda: SerialEnv(2, [lambda n=n: GymEnv(CountingEnv((3, 2), first + n)) for n in range(2)])


def test_a_client_is_a_policy():
    with InferenceServer(EchoPolicy()) as server:
        client = server.client(policy_version_key=None)
        with (
            Collector(lanes(0), client, frames_per_batch=20) as c,
            Collector(lanes(0), EchoPolicy(), frames_per_batch=20) as direct,
        ):
            for _ in range(3):
                assert (c.next() == direct.next()).all()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_client_is_a_policy_in_worker_processes(kind):
    with InferenceServer(EchoPolicy()) as server:
        client = server.client(kind)
        options = {"frames_per_batch": 20, "total_frames": 60}
        with MultiSyncCollector([lanes(0), lanes(2)], client, **options) as c:
            got = [batch.clone() for batch in c]
        with MultiSyncCollector([lanes(0), lanes(2)], EchoPolicy(), **options) as c:
            assert all((one.exclude("policy_version") == other).all() for one, other in zip(got, c))
        assert len(got) == 3
        assert all((batch["policy_version"] == 0).all() for batch in got)


@pytest.mark.parametrize("options", [{}, {"track_policy_version": True}], ids=["as it is", "tracked"])
def test_frames_name_the_version_of_the_server_that_acted(options):
    """As the server's client is documented, its version and all; the collector's own updates are others."""
    with InferenceServer(EchoPolicy()) as server:
        with Collector(lanes(0), server.client(), frames_per_batch=20, **options) as c:
            first = c.next()
            server.update_policy_weights_()
            second = c.next()
        with Collector(lanes(0), EchoPolicy(), frames_per_batch=20) as direct:
            for batch, version in ((first, 0), (second, 1)):
                assert (batch["policy_version"] == version).all()
                assert batch["policy_version"].shape == batch.batch_size
                assert (("next", "policy_version") in batch.keys(True)) == bool(options)
                rest = batch.exclude("policy_version", ("next", "policy_version"))
                assert (rest == direct.next()).all()
    if options:
        assert (second["next", "policy_version"] == 1).all()


def test_versions_stay_beside_their_frames_where_lanes_are_taken_as_they_come():
    with InferenceServer(EchoPolicy(), timeout=0.0) as server:
        envs = [lambda: GymEnv(CountingEnv((3, 1)))] * 3
        with AsyncBatchedCollector(envs, server.client(), frames_per_batch=12) as c:
            assert (c.next()["policy_version"] == 0).all()
            server.update_policy_weights_()
            c.next()  # begun with the old ones, ended with the new
            batch = c.next()
    assert (batch["policy_version"] == 1).all()
    assert (batch["next", "policy_version"] == 1).all()


def test_a_client_that_was_sent_away_can_be_asked_here_too():
    with InferenceServer(EchoPolicy(), timeout=60.0) as server:
        client = server.client()
        elsewhere = pickle.loads(pickle.dumps(client))
        assert server.stats()["clients"] == 0
        for one in (elsewhere, client):
            assert one(TensorDict({"observation": torch.ones(3)}))["action"] is not None
            one.close()
        with pytest.raises(ServerGone, match="this client is closed"):
            pickle.dumps(client)


def test_a_version_of_another_kind_is_refused():
    policy = lambda observation: {"action": observation[..., :1], "policy_version": observation}  # noqa: E731
    with pytest.raises(SpecMismatch, match="policy writes 'policy_version' as"):
        Collector(lanes(0), policy, frames_per_batch=20)


def test_bad_arguments_are_named():
    with pytest.raises(WrongArgument, match="either policy or policy_factory"):
        InferenceServer()
    with pytest.raises(UsageError, match="max_batch_size must be a whole number ≥ 1, got 0"):
        InferenceServer(Scale(), max_batch_size=0)
    with pytest.raises(UsageError, match="min_batch_size is 9, above max_batch_size, which is 4"):
        InferenceServer(Scale(), max_batch_size=4, min_batch_size=9)
    with pytest.raises(UsageError, match="timeout must be a number of seconds ≥ 0, got -1"):
        InferenceServer(Scale(), timeout=-1)
    with pytest.raises(UsageError, match="min_batch_size must be a whole number ≥ 1, got 0"):
        InferenceServer(Scale(), min_batch_size=0)
    with pytest.raises(UsageError, match="buckets must be True or hold whole numbers ≥ 1, got 5"):
        InferenceServer(Scale(), buckets=5)
    with pytest.raises(UsageError, match=r"largest of buckets must hold max_batch_size=64, got \[\]"):
        InferenceServer(Scale(), buckets=[])
    with pytest.raises(WrongArgument, match="in_keys must be a list of keys, got 'observation'"):
        InferenceServer(Scale(), in_keys="observation")
    with pytest.raises(WrongArgument, match="device must name a device, got 'nope'"):
        InferenceServer(Scale(), device="nope")
    with (
        InferenceServer(Scale()) as server,
        pytest.raises(WrongArgument, match="a client takes a TensorDict, got Tensor"),
    ):
        server.client()(torch.zeros(4))
    with InferenceServer(Scale()) as server, pytest.raises(UsageError, match="'thread' or 'process', got 'ray'"):
        server.client("ray")
