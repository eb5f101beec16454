"""The timeline: one file of all workers and the consumer, in true order."""

import json

import pytest
import torch
from torch import nn

from reap.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, ProfileConfig
from reap.collectors.parts import profiling
from reap.envs import GymEnv
from reap.errors import UsageError, WrongState
from reap.testing import CountingEnv


def env():
    return GymEnv(CountingEnv())


def spans(path, name):
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return rows, [(rows[e["tid"]], e["ts"], e["ts"] + e["dur"], e["args"]) for e in events if e["name"] == name]


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_one_timeline_of_all_workers(kind, tmp_path):
    written = []
    collector = kind([env] * 2, None, frames_per_batch=8)
    collector.enable_profile(
        num_rollouts=3, save_path=tmp_path / "trace.json", on_trace_ready=written.append, record_shapes=True
    )
    assert collector.profile_config.num_rollouts == 3
    for _ in collector:  # whoever is first is taken first: on a busy machine one may be late
        if written:
            break
    collector.shutdown()
    assert written == [tmp_path / "trace.json"]
    rows, rollouts = spans(written[0], "rollout")
    assert set(rows.values()) == {"worker 0", "worker 1", "consumer"}
    for worker in ("worker 0", "worker 1"):
        own = [(began, ended) for who, began, ended, _ in rollouts if who == worker]
        assert len(own) == 2  # the first of three is warm-up
        assert own[0][0] < own[0][1] <= own[1][0] < own[1][1]
    assert all(about["frames"] == (4 if kind is MultiSyncCollector else 8) for *_, about in rollouts)
    _, waits = spans(written[0], "wait")
    _, learning = spans(written[0], "your code")
    assert len(waits) == len(learning) + 1 or len(waits) == len(learning)


def test_here_and_only_until_disabled(tmp_path):
    path = tmp_path / "trace.json"
    collector = Collector(env, None, frames_per_batch=4)
    collector.enable_profile(num_rollouts=10, warmup_rollouts=0, save_path=path)
    collector.next()
    collector.next()
    collector.disable_profile()
    assert collector.profile_config is None
    collector.next()
    collector.shutdown()
    (first, second), (wait, _) = spans(path, "rollout")[1], spans(path, "wait")[1]
    assert first[2] <= second[1]
    assert wait[1] <= first[1] < first[2] <= wait[2]  # in one process, waiting is collecting


def test_the_whole_run_by_default(tmp_path):
    path = tmp_path / "trace.json"
    collector = Collector(env, nn.Linear(3, 1), frames_per_batch=4, total_frames=40)
    collector.enable_profile(save_path=path, activities=["cpu"], with_stack=False)
    assert [batch.numel() for batch in collector] == [4] * 10
    assert not path.exists()
    collector.shutdown()
    assert len(spans(path, "rollout")[1]) == 10
    assert len(spans(path, "wait")[1]) == 10
    trace = json.loads(path.with_stem("trace_0").read_text())["traceEvents"]
    calls = [event for event in trace if event["name"] == "aten::addmm"]
    assert 8 <= len(calls) < 16  # of the second and third rollout, four steps each, and what compares them


def test_a_timeline_that_grows_too_long_says_where_it_ends(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(profiling, "_MOST", 7)
    path = tmp_path / "trace.json"
    with Collector(env, None, frames_per_batch=4, total_frames=40) as collector:
        collector.enable_profile(save_path=path, activities=[])
        assert len(list(collector)) == 10
    assert sum(len(spans(path, name)[1]) for name in ("rollout", "wait", "your code")) == 7
    assert "trace.json is full: it holds the first 7 spans; later ones are not recorded" in caplog.text


def test_bad_input(tmp_path):
    collector = Collector(env, None, frames_per_batch=4)
    with pytest.raises(UsageError, match="must be above warmup_rollouts"):
        collector.enable_profile(num_rollouts=1)
    with pytest.raises(UsageError, match="workers names 3"):
        collector.enable_profile(workers=[3])
    with pytest.raises(TypeError, match="no option 'activitys'"):
        collector.enable_profile(activitys=[])
    with pytest.raises(UsageError, match="must be above"):
        ProfileConfig(num_rollouts=2, warmup_rollouts=2)
    collector.next()
    with pytest.raises(WrongState, match="before the first batch"):
        collector.enable_profile()
    collector.shutdown()


def test_a_file_that_cannot_be_written_leaves_no_env_open(tmp_path):
    env = CountingEnv()
    collector = Collector(GymEnv(env), frames_per_batch=4)
    collector.enable_profile(save_path=tmp_path / "nowhere" / "profile.json")
    collector.next()
    with pytest.raises(FileNotFoundError):
        collector.shutdown()
    assert env.closed


def operators(path):
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_a_trace_of_the_rollouts_by_torchs_profiler(tmp_path):
    collector = Collector(env, nn.Linear(3, 1), frames_per_batch=4)
    collector.enable_profile(num_rollouts=2, save_path=tmp_path / "trace.json", activities=["cpu"], with_stack=False)
    config, trace = collector.profile_config, tmp_path / "trace_0.json"
    collector.next()
    assert not trace.exists(), "warm-up was traced"
    collector.next()
    assert any("addmm" in name or "linear" in name for name in operators(trace))
    written = trace.stat().st_mtime_ns
    collector.next()
    collector.shutdown()
    assert trace.stat().st_mtime_ns == written
    assert config.get_save_path(0) == trace
    assert (tmp_path / "trace.json").exists(), "the timeline lies beside it"


def test_traces_of_workers_are_made_where_they_are(tmp_path):
    collector = MultiSyncCollector([env] * 2, nn.Linear(3, 1), frames_per_batch=8)
    collector.enable_profile(
        workers=[1],
        num_rollouts=2,
        save_path=str(tmp_path / "of_{worker_idx}.json"),
        activities=["cpu"],
        with_stack=False,
    )
    for _ in range(3):
        collector.next()
    collector.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of_1.json", "of_timeline.json"]
    assert any("addmm" in name or "linear" in name for name in operators(tmp_path / "of_1.json"))


def test_a_trace_ends_with_disable_profile(tmp_path):
    collector = Collector(env, nn.Linear(3, 1), frames_per_batch=4)
    collector.enable_profile(
        num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "trace.json", activities=["cpu"], with_stack=False
    )
    collector.next()
    collector.disable_profile()
    assert operators(tmp_path / "trace_0.json")
    collector.shutdown()


def test_the_members_of_a_config():
    config = ProfileConfig(workers=[0, 2], activities=["CPU"])
    assert [config.should_profile_worker(n) for n in range(3)] == [True, False, True]
    assert config.get_activities() == [torch.profiler.ProfilerActivity.CPU]
    assert str(config.get_save_path(2)) == "collector_profile_2.json"
    assert str(ProfileConfig(save_path="a/{worker_idx}.json").get_save_path(3)) == "a/3.json"
    assert ProfileConfig().activities == ["cpu", "cuda"]
    assert ProfileConfig().should_profile_worker(7)
    for wrong in ({"activities": ["tpu"]}, {"warmup_rollouts": -1}, {"num_rollouts": 2.5}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            ProfileConfig(**wrong)
