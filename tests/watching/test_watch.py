"""The page of a run: who may see it, what it says, and that it ends with the run."""

from __future__ import annotations

import http.client
import json
import os
import stat
import urllib.parse

import pytest

from reap.cli import main
from reap.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.envs import GymEnv
from reap.errors import ReapError, UsageError, WrongArgument, WrongState
from reap.testing import CountingEnv, EchoPolicy
from reap.watching import registry
from tests.watching.browser import CHROMIUM, Browser
from tests.worlds.waiting import until


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    """A runtime directory for this test alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "reap"


def counting():
    return GymEnv(CountingEnv((3, 5), 0))


def running(kind=MultiSyncCollector, **options):
    return kind([counting] * 2, EchoPolicy(), **{"frames_per_batch": 40, **options})


def ask(url, path="data", host=None, method="GET"):
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    try:
        connection.request(method, f"{parts.path}{path}", headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, AsyncBatchedCollector])
def test_what_it_says(kind):
    with running(kind) as collector:
        watch = collector.watch()
        batches = 0
        while batches < 5 or not all(worker["frames"] for worker in watch.view()["workers"]):  # whoever is ready first
            collector.next()
            batches += 1
        collector.update_policy_weights_()
        status, body, headers = ask(watch.url)
        view = json.loads(body)
        stats = collector.stats()
        assert status == 200
        assert headers["Cache-Control"] == "no-store"
        assert (view["frames"], view["batches"], view["version"]) == (40 * batches, batches, 1)
        assert kind is MultiAsyncCollector or batches == 5
        assert view["episodes"] == stats["episodes"] > 0
        assert view["mean_return"] == pytest.approx(stats["mean_return"])
        assert len(view["workers"]) == (1 if kind is AsyncBatchedCollector else 2)
        assert sum(count for _, count in view["lags"]) == 40 * batches
        for worker in view["workers"]:
            assert sum(worker["split"].values()) == pytest.approx(1)
            assert worker["alive"]
            assert worker["doing"]
            assert kind is AsyncBatchedCollector or worker["memory"] > 1e6
        assert watch.view()["name"] == type(collector).__name__
        assert collector.watch() is watch
        found = json.loads(ask(watch.url, "stacks")[1])
        assert all("worker" in name for name in found)


def test_in_the_background():
    """Workers that fill a buffer by themselves are seen too, and nobody is asked."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    with running(MultiAsyncCollector, total_frames=400, replay_buffer=buffer) as collector:
        watch = collector.watch()
        collector.start()
        until(lambda: watch.view()["frames"] == 400)
        assert watch.view()["learner"] is None


def test_nothing_without_the_token():
    with Collector(counting, EchoPolicy(), frames_per_batch=8) as collector:
        url = collector.watch().url
        parts = urllib.parse.urlsplit(url)
        token = parts.path.strip("/")
        assert len(token) >= 32
        bare = f"http://{parts.netloc}/"
        for path in (
            "",
            "data",
            "stacks",
            "x/data",
            f"{token[:-1]}/data",
            f"{token}x/",
            f"../{token}/data",
            f"?{token}",
        ):
            status, body, _ = ask(bare, path)
            assert (status, body) == (404, b""), path
        assert ask(url, "other")[0] == 404
        assert ask(url, "")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "", "0.0.0.0:1"])
def test_another_hosts_name_is_refused(host):
    """A web page elsewhere cannot be led here by a name that it controls."""
    with Collector(counting, EchoPolicy(), frames_per_batch=8) as collector:
        status, body, _ = ask(collector.watch().url, host=host)
        assert (status, body) == (403, b"")


def test_it_only_reads():
    with Collector(counting, EchoPolicy(), frames_per_batch=8) as collector:
        for method in ("POST", "PUT", "DELETE"):
            assert ask(collector.watch().url, method=method)[0] == 501


def test_it_listens_here_alone_and_ends_with_the_collector(runtime):
    with Collector(counting, EchoPolicy(), frames_per_batch=8) as collector:
        watch = collector.watch()
        assert urllib.parse.urlsplit(watch.url).hostname == "127.0.0.1"
        assert [path.name for path in runtime.iterdir()] == [
            f"{os.getpid()}-{urllib.parse.urlsplit(watch.url).port}.json"
        ]
    assert not list(runtime.iterdir())
    with pytest.raises(OSError):
        ask(watch.url)
    with pytest.raises(WrongState, match="closed"):
        collector.watch()
    assert "closed" in repr(watch)


def test_it_does_not_keep_the_collector_alive():
    url = Collector(counting, EchoPolicy(), frames_per_batch=8).watch().url
    with pytest.raises(OSError):
        ask(url)


def test_the_file_is_its_users_alone(runtime):
    with Collector(counting, EchoPolicy(), frames_per_batch=8) as collector:
        collector.watch()
        (file,) = runtime.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700


def test_a_directory_that_others_may_write_to_is_refused(runtime):
    runtime.mkdir(mode=0o700)
    runtime.chmod(0o777)
    with Collector(counting, EchoPolicy(), frames_per_batch=8) as collector:
        with pytest.raises(UsageError, match="chmod 700"):
            collector.watch()
        assert collector.next() is not None  # and nothing is left of it


def test_files_of_the_dead_are_removed(runtime):
    registry.register({"pid": 2**22 + 1, "port": 1, "url": "http://127.0.0.1:1/x/", "name": "Collector"})
    (runtime / "1-2.json").write_text("not JSON")
    assert registry.registered() == []
    assert not list(runtime.iterdir())


@pytest.mark.parametrize("port", [-1, 70000, "http", 1.5, None])
def test_a_wrong_port_is_refused(port):
    with (
        Collector(counting, EchoPolicy(), frames_per_batch=8) as collector,
        pytest.raises((UsageError, WrongArgument), match="port"),
    ):
        collector.watch(port=port)


def test_an_error_in_the_background_is_left_to_its_owner():
    """A look from elsewhere does not take it away."""

    class Broken(CountingEnv):
        def step(self, action):
            raise RuntimeError("a wheel fell off")

    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    collector = Collector(lambda: GymEnv(Broken((3,), 0)), EchoPolicy(), frames_per_batch=8, replay_buffer=buffer)
    watch = collector.watch()
    collector.start()
    collector._runner._thread.join(10)
    watch.view()
    with pytest.raises(ReapError, match="a wheel fell off"):
        collector.is_running()


def test_in_a_terminal(capsys):
    with running() as collector:
        url = collector.watch().url
        for _ in range(4):
            collector.next()
        pid = str(os.getpid())
        assert main(["watch"]) == 0
        assert url in capsys.readouterr().out
        assert main(["watch", pid, "--once"]) == 0
        told = capsys.readouterr().out
        assert "MultiSyncCollector" in told
        assert "160 frames" in told
        assert "handing over" in told
        assert main(["watch", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["frames"] == 160
        assert main(["watch", pid, "--stacks"]) == 0
        assert "worker 1 (pid" in capsys.readouterr().out


def test_in_a_terminal_there_is_nothing(capsys):
    assert main(["watch"]) == 1
    assert main(["watch", "1"]) == 1
    assert "has not called collector.watch()" in capsys.readouterr().err
    assert main(["watch", "soon"]) == 1
    assert main(["watch", "http://127.0.0.1:9/x/", "--once"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_in_a_browser(tmp_path):
    """Numbers move without a reload, a click shows a stack, the end is told; no script fails, nothing is blocked."""
    with running(MultiAsyncCollector) as collector, Browser() as browser:
        watch = collector.watch()
        for _ in range(4):
            collector.next()
        browser.go(watch.url)
        browser.wait_for("document.querySelectorAll('tr.worker').length == 2")
        browser.wait_for("document.getElementById('tiles').innerText.includes('160')")
        assert browser.ask("document.getElementById('told').innerText").startswith(("the ", "handing", "nothing"))
        browser.ask("window.before = performance.timeOrigin")
        for _ in range(6):
            collector.next()
        browser.wait_for("document.getElementById('tiles').innerText.includes('400')")
        assert browser.ask("window.before === performance.timeOrigin"), "it was loaded again"
        browser.ask("document.querySelectorAll('tr.worker')[1].click()")
        browser.wait_for("(document.getElementById('stack') || {innerText: ''}).innerText.includes('worker 1 (pid')")
        browser.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
        collector.shutdown()
        browser.wait_for("document.getElementById('live').innerText.includes('ended')")
        assert not browser.errors
