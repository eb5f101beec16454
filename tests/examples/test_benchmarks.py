"""The benchmarks run: shortest batches, two rounds, no judgement about speed."""

import json

import pytest


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


def test_buffers_are_measured(capsys):
    pytest.importorskip("torchrl")
    from benchmarks.buffers import CASES, main

    results = main(["--rows", "20000", "--rounds", "3"])
    assert list(results) == list(CASES)
    assert all(results[case]["ratio"] > 0 for case in ("uniform", "slices", "extend"))
    assert all(case in capsys.readouterr().out for case in CASES[:1])
