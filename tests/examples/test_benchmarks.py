"""The benchmarks run and compare like with like; their page is made from their JSON. No judgement about speed."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
pytest.importorskip("torchrl")


def board(*arguments):
    from benchmarks.__main__ import main

    assert main(["--quick", *arguments]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ("samples in forward", "8 lanes"),
        ("nested dict",),
        ("memory of compact_obs",),
        ("RewardSum, StepCounter, InitTracker; code on TensorDicts",),
    ],
    ids=lambda words: words[0],
)
def test_workloads_are_measured(words, tmp_path, capsys):
    board("--only", *words, "--json", str(tmp_path / "run.json"))
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["kind"] == "quick"
    assert record["rows"]
    assert record["left_out"] == {}
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["cores"] >= 1
    told = capsys.readouterr().out
    for row in record["rows"]:
        assert row["name"] in told
        assert all(value > 0 for value in row["figures"].values())
        assert all(ratio["low"] <= ratio["value"] <= ratio["high"] for ratio in row["ratios"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [
        "scripts",
        "bare envs",
        "modules and functions",
        "end to end",
        "env adapters",
        "two worker processes",
        "transforms",
    ]
    + ["whoever is ready", "replay buffers", "env.rollout", "remote workers: distributed"],
)
def test_every_workload_of_a_group_runs(group, tmp_path):
    board("--all", "--only", group, "--json", str(tmp_path / "run.json"))


def test_every_name_is_there_once_and_the_aims_are_on_the_board():
    from benchmarks.catalogue import workloads

    names = [(one.group, one.name) for one in workloads()]
    assert len(set(names)) == len(names)
    assert sum(one.board for one in workloads()) > 40


def test_a_word_nobody_holds_is_an_error(capsys):
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit):
        main(["--only", "no such workload"])
    assert "--list tells their names" in capsys.readouterr().err


# ---- the loops by hand make the data of the scripts -----------------------------------------------------------------


def both(script, steps=6):
    """The columns of the loop by hand `[T, N, …]`, and reap's batch, from the same seeds."""
    import reap.collectors

    model, env = script.model(), script.env()
    for module in model.modules():
        if hasattr(module, "eps_end"):  # an EGreedyModule: exploring is drawn in another order by hand
            module.eps.zero_()
    env.set_seed(3, static_seed=True)
    collector = reap.collectors.Collector(env, model, frames_per_batch=steps * script.lanes)
    torch.manual_seed(5)
    batch = collector.next()
    collector.shutdown()
    loop = script.by_hand(model, steps, 3)
    torch.manual_seed(5)
    made = {key: torch.from_numpy(column.copy()) for key, column in loop().items()}
    loop.close()
    if script.lanes > 1:
        batch = batch.reshape(script.lanes, steps).transpose(0, 1)
    return made, batch


def same(mine, theirs, exact):
    theirs = theirs.reshape(mine.shape)
    torch.testing.assert_close(mine, theirs, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)


@pytest.mark.parametrize(
    "words",
    [
        ("PPO, HalfCheetah-v5", "1 lane"),
        ("PPO, HalfCheetah-v5", "8 lanes"),
        ("PPO, Pendulum-v1", "8 lanes"),
        ("SAC, HalfCheetah-v5", "1 lane"),
        ("SAC's actor", "1 lane"),
        ("TD3's actor", "1 lane"),
        ("ProbabilisticActor, Categorical, CartPole-v1", "8 lanes"),
        ("ProbabilisticActor, TanhNormal", "1 lane"),
        ("samples in forward", "8 lanes"),
    ],
    ids=", ".join,
)
def test_a_loop_by_hand_makes_the_data_of_its_script(words):
    from benchmarks.scripts import SCRIPTS

    ((script, _, _),) = (
        found for (_, name), found in SCRIPTS.items() if words[0] in name and name.endswith(f", {words[1]}")
    )
    made, batch = both(script)
    names = {"successor": ("next", "observation"), "reward": ("next", "reward"), "done": ("next", "done")}
    names |= {"episode_reward": ("next", "episode_reward"), "step_count": ("next", "step_count")}
    names |= {"log_prob": "output1", "value": "output2"} if script.in_key else {}
    keys = {"observation", "successor", "action", "reward", "done"} | (made.keys() & {"action_log_prob", "log_prob"})
    for key in keys | (made.keys() & {"loc", "scale", "logits", "episode_reward", "step_count"}):
        same(made[key], batch[names.get(key, key)], exact=False)


def test_the_recurrent_loop_makes_the_data_of_its_script():
    from benchmarks.scripts_more import SCRIPTS

    made, batch = both(SCRIPTS["recurrent DQN, CartPole-v1, 8 lanes"][0])
    same(made["observation"], batch["observation"], exact=True)
    same(made["action_value"], batch["action_value"], exact=False)
    same(made["next_h"], batch["next", "recurrent_state_h"], exact=False)
    same(made["recurrent_state_c"], batch["recurrent_state_c"], exact=False)
    same(made["is_init"], batch["is_init"], exact=True)


@pytest.mark.slow
def test_the_loop_around_pong_makes_the_data_of_its_script():
    from benchmarks.board import Missing
    from benchmarks.scripts_more import pong_script, prepare_atari

    try:
        prepare_atari()
    except Missing as missing:
        pytest.skip(str(missing))
    made, batch = both(pong_script(processes=False, noops=0), steps=5)
    same(made["observation"], batch["pixels"], exact=False)
    same(made["action"], batch["action"], exact=True)
    same(made["successor"], batch["next", "pixels"], exact=False)
    same(made["episode_reward"], batch["next", "episode_reward"], exact=True)


def test_lanes_in_processes_make_the_data_of_lanes_in_this_one():
    import gymnasium as gym
    from benchmarks.by_hand import Loop, SerialLanes
    from benchmarks.scripts_more import ProcessLanes

    def act(x):
        return {"action": (x[:, 2] > 0).long()}

    makes = [lambda: gym.make("CartPole-v1")] * 4
    lanes = SerialLanes([make() for make in makes], 0), ProcessLanes(makes, 2, 0)
    first, second = (Loop(each, act, 60, counters=True) for each in lanes)
    try:
        mine, theirs = first(), second()
        assert mine["done"].any()
        for key, column in mine.items():
            np.testing.assert_array_equal(column, theirs[key], err_msg=key)
    finally:
        second.close()


@pytest.mark.parametrize("kind", ["Sync", "Async", "Central"])
def test_the_loops_by_hand_deliver_what_happened(kind):
    """Every lane's frames follow each other, within batches and from one to the next, and episodes end as they did."""
    from benchmarks import processes_by_hand
    from benchmarks.envs_and_policies import Case

    lanes, steps = 3, 40
    loop = getattr(processes_by_hand, kind)(Case("CartPole-v1", "CartPole-v1", lanes, steps), 2)
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


def test_an_interpreter_without_the_peer_is_named():
    from benchmarks.interpreters import opened

    assert importlib.util.find_spec("pufferlib") is None, "it goes with no gymnasium the tests know"
    there = opened(sys.executable, "pufferlib_vector")
    with pytest.raises(SystemExit, match=r"cannot run .*pufferlib_vector\.py; try it by hand"), there:
        pass


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_report_makes_from_the_committed_runs():
    from benchmarks.report import RESULTS, pages, read

    runs = sorted(RESULTS.glob("*.json"))
    assert runs
    for where, text in pages(read(runs)).items():
        assert (ROOT / where).read_text() == text, f"{where}: run python -m benchmarks.report"


def test_the_report_tells_a_missed_aim_and_the_later_run():
    from benchmarks.board import HAND, REAP, Ratio, Row
    from benchmarks.report import filled, latest, pages

    def record(when, value):
        row = Row("a group", "a line", "frames/s", {REAP: 90.0, HAND: 100.0}, {HAND: Ratio(value, value, value, 0.9)})
        machine = {"cpu": "x", "cores": 2, "load": 0.0}
        told = {"when": when, "kind": "board", "seconds": 1, "commit": "abc", "versions": {}, "left_out": {}}
        return {**told, "machine": machine, "load_after": 0.0, "rows": [row.to_json()]}

    runs = [record("2020-01-01", 0.95), record("2021-01-01", 0.5)]
    page = pages(runs)[Path("docs/benchmarks.md")]
    assert "**0.50**, aim 0.9" in page
    assert "0.95" not in page
    asked = "before\n<!-- benchmarks: a group -->\nold\n<!-- end -->\nafter"
    new = filled(asked, latest(runs))
    assert "a line" in new
    assert "old" not in new
    assert filled(new, latest(runs)) == new
    assert "old" in filled(asked, {})  # a group nobody measured keeps what the page says
    assert "not to be relied on" not in page
    runs[1]["machine"]["load"] = 9.0
    assert "not to be relied on: others computed meanwhile" in pages(runs)[Path("docs/benchmarks.md")]


# ---- the simulation -------------------------------------------------------------------------------------------------


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
