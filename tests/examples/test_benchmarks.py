"""The benchmarks run: shortest batches, two rounds, no judgement about speed."""

import importlib.util
import json
import sys

import pytest
import torch


@pytest.mark.slow
def test_every_door_is_measured(tmp_path, monkeypatch, capsys):
    for library in ("envpool", "pettingzoo", "torchrl", "matplotlib"):
        pytest.importorskip(library)
    from benchmarks.doors import DOORS, main

    monkeypatch.chdir(tmp_path)
    results = main(["--quick"])
    assert [r["case"] for r in results] == [door.name for door in DOORS]
    assert all(r["ratio"] > 0 for r in results)
    assert json.loads((tmp_path / "bench-results/doors.json").read_text()) == {"quick": True, "results": results}
    assert (tmp_path / "bench-results/doors.png").read_bytes().startswith(b"\x89PNG")
    (small,) = (r["memory"]["compact"] for r in results if "memory" in r)
    assert small <= 1.15  # bytes do not depend on the machine
    told = capsys.readouterr().out
    assert all(door.name in told for door in DOORS)


@pytest.mark.parametrize("kind", ["Sync", "Async", "Central"])
def test_the_loops_by_hand_deliver_what_happened(kind):
    """Every lane's frames follow each other, within batches and from one to the next, and episodes end as they did."""
    from benchmarks import by_hand
    from benchmarks.workloads import Case

    lanes, steps = 3, 40
    loop = getattr(by_hand, kind)(Case("CartPole-v1", "CartPole-v1", lanes, steps), 2)
    try:
        batches = [{name: column.clone() for name, column in loop().items()} for _ in range(6)]
    finally:
        loop.close()
    own = [batches]
    if kind == "Async":  # one worker's, and the other's: trajectories are numbered apart

        def second(batch):
            return bool(((batch["ids"] >> 40) == 2).any()) or batch["ids"][0].tolist() == [3, 4, 5]

        own = [[b for b in batches if second(b) is which] for which in (False, True)]
    for part in filter(None, own):
        whole = {name: torch.cat([b[name] for b in part]) for name in part[0]}
        assert whole["obs"].shape == (len(part) * steps, lanes if kind == "Async" else 2 * lanes, 4)
        done, ids = whole["done"], whole["ids"]
        assert done.any()
        assert done.equal(whole["terminated"] | whole["truncated"])
        last = whole["next_obs"]
        assert whole["terminated"].equal((last[..., 0].abs() > 2.4) | (last[..., 2].abs() > 0.20943951))
        goes_on = ~done[:-1]
        assert whole["obs"][1:][goes_on].equal(last[:-1][goes_on])
        assert (whole["obs"][1:][~goes_on].abs() <= 0.05).all()  # where an episode of CartPole begins
        assert (ids[1:] == ids[:-1]).equal(goes_on)
        assert (whole["reward"] == 1).all()
        assert set(whole["action"].unique().tolist()) == {0, 1}


@pytest.mark.slow
def test_two_processes_are_measured(tmp_path, monkeypatch, capsys):
    for library in ("matplotlib", "mujoco"):
        pytest.importorskip(library)
    from benchmarks.multi import PAIRS, main

    monkeypatch.chdir(tmp_path)
    results = main(["--quick", "--no-peers"])
    told = capsys.readouterr().out
    names = [r["case"] for r in results]
    assert all(pair.name in names or f"{pair.name}: not installed" in told for pair in PAIRS)
    assert {"start-up of 8 workers, cold", "start-up of 8 workers, warm", "idle workers, sync"} <= set(names)
    assert all(r["ratio"] > 0 or "idle" in r["case"] for r in results)
    assert json.loads((tmp_path / "bench-results/multi.json").read_text()) == {"quick": True, "results": results}
    assert (tmp_path / "bench-results/multi.png").read_bytes().startswith(b"\x89PNG")


def test_an_interpreter_without_the_peer_is_named():
    from benchmarks.interpreters import opened

    assert importlib.util.find_spec("pufferlib") is None, "it goes with no gymnasium the tests know"
    there = opened(sys.executable, "pufferlib_vector")
    with pytest.raises(SystemExit, match=r"cannot run .*pufferlib_vector\.py; try it by hand"), there:
        pass


def test_buffers_are_measured(capsys):
    pytest.importorskip("torchrl")
    from benchmarks.buffers import CASES, main

    results = main(["--rows", "20000", "--rounds", "3"])
    assert list(results) == list(CASES)
    assert all(results[case]["ratio"] > 0 for case in ("uniform", "slices", "extend", "ingest", "writing"))
    assert all(case in capsys.readouterr().out for case in CASES[:1])


@pytest.mark.slow
def test_whoever_is_ready_is_measured(tmp_path, monkeypatch, capsys):
    from benchmarks.batched import CASES, main

    monkeypatch.chdir(tmp_path)
    results = main(["--quick", "--no-torchrl"])
    assert [r["case"] for r in results] == [case.name for case in CASES]
    assert all(rate > 0 for r in results for rate in r["fps"].values())
    assert results[0]["to_ideal"].keys() == {"reap", "hand"}
    assert json.loads((tmp_path / "bench-results/batched.json").read_text()) == {"quick": True, "results": results}
    told = capsys.readouterr().out
    assert all(case.name in told for case in CASES)


def test_torchrls_envs_in_three_hands():
    pytest.importorskip("torchrl")
    from benchmarks.dropin import Custom, envs, measure, policy

    make, width, actions = envs()["TransformedEnv: counters"]
    for acting in (policy(width, actions), Custom(width, actions)):
        found = measure(make, acting, frames=40, rounds=2)
        assert all(found[how] > 0 for how in ("rollout", "TorchRL", "reap", "faster"))


def test_the_simulation_knows_the_plain_cases():
    """Nobody waits; then one thing after the other is the only one that is slow; then a tree that can be drawn."""
    from benchmarks.scale_sim import STAR, Costs, Shape, Work, arrival, simulate

    free = Costs(per_batch=0.0, per_byte=0.0, network=1e15, latency=0.0)
    work = Work(frame_bytes=100, frames=100, rate=1000.0, weights=10**6, update_every=1.0)

    def speed(workers, **costs):
        found = simulate(workers, STAR, work, Costs(**{**vars(free), **costs}), rollouts=40)
        return found.frames_per_second, found.wall

    assert speed(50) == (pytest.approx(50_000, rel=0.02), "workers")
    assert speed(50, per_batch=0.01) == (pytest.approx(10_000, rel=0.02), "consumer")  # 100 frames in 10 ms
    assert speed(50, per_byte=1e-6) == (pytest.approx(10_000, rel=0.02), "consumer")  # 10 kB at a µs each
    assert speed(50, network=1e6)[0] == pytest.approx(10_000, rel=0.02)
    assert speed(1, latency=1.0)[0] == pytest.approx(4 * 100 / 2.1, rel=0.1)  # four slots, each under way for 2 s
    assert simulate(100, STAR, work, Costs(network=1e8, latency=0.0)).delay == pytest.approx(1.0)
    # One sends to two, who send to two: after 1 s and 2 s; then 2, 3 and 3, 4.
    assert [arrival(n, 2, 1.0, 0.0) for n in range(1, 7)] == [1, 2, 2, 3, 3, 3]
    half = Shape("two by two", node=2, fan_out=2)
    both = simulate(50, half, work, Costs(**{**vars(free), "per_batch": 0.01}), rollouts=40)
    assert both.frames_per_second == pytest.approx(20_000, rel=0.02)  # half as many batches


def test_far_and_wide(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from benchmarks.scale_sim import CASES, SHAPES, main

    rows = main(["--most", "300", "--picture", str(tmp_path / "scaling.png")])
    assert len(rows) == len(CASES) * len(SHAPES) * 4
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("workers ") >= len(rows)


@pytest.mark.slow
def test_roads_are_measured(capsys):
    from benchmarks.roads import main, weights

    found = main(["--only", "distributed", "--rounds", "1", "--seconds", "0.2", "--case", "pixels"])
    assert found["pixels"]["distributed"][0] > 0
    assert "GB/s" in capsys.readouterr().out
    assert weights("distributed", 1, updates=3, parameters=1000) < 1


@pytest.mark.slow
def test_ray_is_measured(capsys):
    pytest.importorskip("ray")
    from benchmarks.on_ray import main

    found = main(["--seconds", "0.1", "--rounds", "1", "--no-peers"])
    assert set(found) == {"frames", "pixels", "weights"}
    assert found["frames"]["reap, processes"] > 0
    assert "GB/s" in capsys.readouterr().out
