"""Workers that come by themselves: started by hand, or as jobs of submitit (its local executor here)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from reap._system import silence
from reap.backends.network.launchers import new_secret, read_secret
from reap.collectors import Collector
from reap.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RPCCollector,
    RPCSyncCollector,
    submitit_delayed_launcher,
)
from reap.errors import UsageError, WorkerDied, WorkerRaised, WorkerSilent
from reap.join import main as join
from reap.testing import CountingWorld, EchoPolicy, assert_same, no_leaks
from tests.worlds.faults import (
    BOUND,
    SOON,
    all_gone,
    check_what_is_left_out,
    collect,
    faulty,
    freeze,
    healthy,
    pids,
    within,
)


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("node") / "secret"
    assert join(["--new-secret", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def port():
    return 29000 + os.getpid() % 700


@pytest.fixture(scope="module")
def node(secret, port):
    """Two workers, lent to one collector after the other."""
    command = [sys.executable, "-m", "reap.join", "--address", f"127.0.0.1:{port}", "--secret-file", str(secret)]
    process = subprocess.Popen([*command, "--workers", "2", "--again"])
    yield process
    process.terminate()
    process.wait()


@pytest.fixture
def options(node, secret, port):
    return {"launcher": "join", "secret_file": secret, "tcp_port": port, "join_timeout": 60}


@pytest.fixture(scope="module", autouse=True)
def a_first_of_each(node, secret, port):
    """Torch keeps a pipe of the first store, and descriptors of the first agent, for the rest of the process."""
    for kind in (DistributedCollector, RPCCollector):
        c = collect(kind, [healthy(), healthy(1)], launcher="join", secret_file=secret, tcp_port=port)
        assert c.next().numel() == 8
        c.shutdown()


@pytest.mark.parametrize("kind", [DistributedSyncCollector, RPCSyncCollector])
def test_a_node_started_by_hand(kind, options):
    """Bit for bit; versions are stamped by whoever acted; what goes wrong there is told as if it were here."""
    world = CountingWorld([(3, 1, 5)] * 2)
    with no_leaks():
        c = collect(kind, [healthy(), healthy(1)], frames_per_batch=16, track_traj_ids=False, **options)
        for _ in range(5):
            assert_same(c.next(), {k: v for k, v in world.batch(8).items() if k != ("collector", "traj_ids")})
        c.shutdown()
        for fault, error, words in (
            ("raise", WorkerRaised, "an injected fault"),
            ("exit", WorkerDied, "exited with code 3"),
        ):
            c = collect(kind, [healthy(), faulty(fault, 21)], **options)
            with pytest.raises(error, match=words) as caught:
                for _ in range(20):
                    c.next()
            assert "at 127.0.0.1" in caught.value.worker
            with within(BOUND):
                c.shutdown()
        del c, caught


@pytest.mark.parametrize("kind", [DistributedSyncCollector, RPCSyncCollector])
def test_what_an_update_leaves_out_stays_as_it_was(kind, options):
    check_what_is_left_out(kind, **options)


def test_one_that_takes_no_weights(options):
    """It is named after `timeout`; and Ctrl-C is let in, after which everything goes on where it was."""
    policy = EchoPolicy()
    with no_leaks():
        c = collect(DistributedCollector, [healthy(), healthy(1)], policy, timeout=3, **options)
        c.next()
        worker = pids(c)[1]
        freeze(worker)
        ctrl_c = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        with within(SOON), pytest.raises(KeyboardInterrupt):
            ctrl_c.start()
            while True:
                c.update_policy_weights_()
        ctrl_c.join()
        os.kill(worker, signal.SIGCONT)
        with torch.no_grad():
            policy.weight.fill_(2.0)
        c.update_policy_weights_()
        for _ in range(12):
            batch = c.next()
        assert torch.equal(batch["action"], 2 * (batch["observation"] * policy.mix).sum(-1, keepdim=True))
        freeze(worker)
        with within(2 * BOUND), pytest.raises(WorkerSilent, match=rf"worker 1 \(pid {worker}"):
            while True:
                c.update_policy_weights_()
        assert all_gone([worker], within=BOUND)
        del c, batch


def test_one_that_takes_no_weights_is_in_the_log_where_there_is_no_timeout(options, monkeypatch):
    told = []

    class Waking(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
            os.kill(worker, signal.SIGCONT)

    handler = Waking()
    logging.getLogger("reap").addHandler(handler)
    try:
        with collect(DistributedCollector, [healthy(), healthy(1)], **options) as c:
            c.next()
            worker = pids(c)[1]
            monkeypatch.setattr(silence, "LOGGED_AFTER", 0.5)
            os.kill(worker, signal.SIGSTOP)
            while not told:
                c.update_policy_weights_()
            version = c.policy_version
            c.update_policy_weights_()
            assert c.policy_version == version + 1
    finally:
        logging.getLogger("reap").removeHandler(handler)
    assert f"worker 1 (pid {worker} at 127.0.0.1), which has to load new weights, sent nothing for" in told[0]


def test_max_lag_holds_between_machines(options):
    """No batch was made by weights more than so many updates old; what was is counted."""
    c = collect(DistributedCollector, [healthy(), healthy(1)], track_policy_version=True, max_lag=1, **options)
    policy = c.policy
    for version in range(1, 30):
        with torch.no_grad():
            policy.weight.fill_(float(version))
        c.update_policy_weights_()
        batch = c.next()
        assert (batch["policy_version"] >= version - 1).all()
        weight = batch["policy_version"].clamp(min=1).float().unsqueeze(-1)  # what acted is what is stamped
        echo = (batch["observation"] * torch.tensor([3.0, 5.0, 7.0])).sum(-1, keepdim=True)
        assert torch.equal(batch["action"], echo * weight)
    assert c.stats()["dropped_frames"] > 0
    c.shutdown()


def test_who_is_not_let_in(options, secret, port, tmp_path, capfd):
    other, opened, short = tmp_path / "other", tmp_path / "opened", tmp_path / "short"
    new_secret(other)
    with pytest.raises(UsageError, match="was not changed"):
        new_secret(other)
    opened.write_text("x" * 64)
    opened.chmod(0o644)
    short.write_text("x")
    short.chmod(0o600)
    for path, words in ((opened, "chmod 600"), (short, "at least 16"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(UsageError, match=words):
            read_secret(path)
    c = collect(DistributedCollector, [healthy(), healthy(1)], **options)
    assert join(["--address", f"127.0.0.1:{port}", "--secret-file", str(other)]) == 1
    assert "refused the connection" in capfd.readouterr().err
    assert c.next().numel() == 8
    c.shutdown()
    assert join(["--address", "127.0.0.1:1", "--secret-file", str(other), "--patience", "0.1"]) == 1
    assert "no collector listens at 127.0.0.1:1" in capfd.readouterr().err


def test_nobody_comes(secret):
    with no_leaks(), within(SOON), pytest.raises(WorkerDied, match=r"only 0 of 1 workers connected to 127.0.0.1:\d+"):
        collect(DistributedCollector, [healthy()], launcher=None, secret_file=secret, join_timeout=0.5)


def test_jobs_of_submitit(tmp_path):
    pytest.importorskip("submitit")
    jobs = {"launcher": "submitit", "slurm_kwargs": {"folder": tmp_path, "timeout_min": 2}}
    with no_leaks():
        c = collect(DistributedCollector, [healthy()], track_policy_version=True, **jobs)
        c.update_policy_weights_()
        assert {int(c.next()["policy_version"].max()) for _ in range(20)} == {1}
        with within(BOUND):
            c.shutdown()
        del c
    assert not list(tmp_path.glob("secret*"))
    with pytest.raises(UsageError, match="slurm_kwargs.*timeout_minutes"):
        collect(
            DistributedCollector,
            [healthy()],
            launcher="submitit",
            slurm_kwargs={"folder": tmp_path, "timeout_minutes": 2},
        )


def test_delayed_jobs(tmp_path):
    """The collector itself is in a job, and finds its workers."""
    pytest.importorskip("submitit")
    conf = {"folder": tmp_path, "timeout_min": 2}

    @submitit_delayed_launcher(
        num_jobs=2, framework="rpc", submitit_main_conf=conf, submitit_collection_conf={"timeout_min": 2}
    )
    def main():
        from reap.collectors.distributed import RPCSyncCollector
        from reap.testing import CountingEnv, EchoPolicy

        makers = [lambda: CountingEnv((3, 1, 5), 0), lambda: CountingEnv((3, 1, 5), 1)]
        c = RPCSyncCollector(makers, EchoPolicy(), frames_per_batch=8, total_frames=32, launcher="submitit_delayed")
        shapes = [tuple(batch.shape) for batch in c]
        c.shutdown()
        return shapes, os.getpid()

    shapes, pid = main()
    assert shapes == [(2, 4)] * 4
    assert pid != os.getpid()
    assert not list(tmp_path.glob("meeting*"))
    with pytest.raises(UsageError, match="submitit_delayed_launcher"):
        collect(DistributedCollector, [healthy()], launcher="submitit_delayed")


def test_wrong_arguments(tmp_path):
    good = tmp_path / "secret"
    new_secret(good)
    for wrong, words in (
        ({"launcher": "sp"}, "launcher"),
        ({"launcher": "join"}, "secret_file"),
        ({"launcher": "join", "secret_file": good, "listen": "0.0.0.0"}, "0.0.0.0"),
        ({"launcher": "join", "secret_file": good, "listen": "203.0.113.7"}, "cannot listen on 203.0.113.7"),
        ({"launcher": "join", "secret_file": good, "join_timeout": -1}, "join_timeout"),
        ({"listen": "127.0.0.1"}, "listen is for launcher"),
        ({"slurm_kwargs": {}}, "slurm_kwargs is for launcher 'submitit'"),
        ({"launcher": "submitit", "slurm_kwargs": 3}, "slurm_kwargs"),
        ({"tcp_port": "x"}, "tcp_port"),
        ({"backend": "smoke"}, "backend must be"),
        ({"visible_devices": ["cuda:0"]}, "storing_device"),
        ({"tensorpipe_options": 3}, "tensorpipe_options"),
    ):
        with no_leaks(), pytest.raises(UsageError, match=words):
            RPCCollector([healthy()], EchoPolicy(), frames_per_batch=8, **wrong)
    with pytest.raises(UsageError, match="slurm_kwargs"):
        Collector(healthy(), EchoPolicy(), frames_per_batch=8, backend="submitit", backend_options={"slurm_kwargs": 3})
    with pytest.raises(UsageError, match="are the same option"):
        collect(DistributedCollector, [healthy()], update_interval=1, max_weight_update_interval=2)
    for wrong in ({"framework": "smoke"}, {"num_jobs": 0}, {"tcpport": "x"}):
        with pytest.raises(UsageError):
            submitit_delayed_launcher(**{"num_jobs": 1, **wrong})
    for wrong in ("127.0.0.1", "127.0.0.1:99999"):  # else it would wait for somebody who cannot come
        with pytest.raises(SystemExit):
            join(["--address", wrong, "--secret-file", str(good), "--patience", "0.1"])
