"""Names of envs: where they are looked for, here and in workers."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import gymnasium as gym
import pytest

from reap.collectors import Collector, MultiSyncCollector
from reap.envs import GymEnv, ParallelEnv, SerialEnv
from reap.errors import UsageError
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same, no_leaks


@pytest.fixture
def an_id():
    """An id that only this process knows."""
    name = "reap-test/Counts-v3"
    gym.register(name, entry_point=CountingEnv, kwargs={"lengths": (3, 1)}, disable_env_checker=True)
    yield name
    del gym.registry[name]


def test_ids_of_the_caller_work_in_workers(an_id):
    world = CountingWorld([(3, 1)])
    with MultiSyncCollector([an_id], EchoPolicy(), frames_per_batch=6, cat_results=0) as collector:
        assert_same(collector.next(), world.batch(6))
    for lanes in (ParallelEnv, SerialEnv):
        with Collector(lanes(2, an_id), EchoPolicy(), frames_per_batch=12) as collector:
            want = CountingWorld([(3, 1)]).batch(6)["observation",][0].tolist()
            assert collector.next()["observation"].tolist() == [want, want]


def test_ids_are_found_as_gymnasium_finds_them(an_id):
    for name in (an_id, "reap-test/Counts", f"reap.testing:{an_id}"):
        assert GymEnv(name, lengths=(4,)).rollout(9).shape == (4,)
    assert len(GymEnv(gym.spec(an_id), num_envs=2).reset()) == 2


def test_ids_nobody_knows_are_refused_before_any_worker_starts():
    with no_leaks():
        for make in (
            lambda: Collector("Nowhere-v7", frames_per_batch=4),
            lambda: MultiSyncCollector(["CartPole-v1", "Nowhere-v7"], frames_per_batch=4),
            lambda: ParallelEnv(2, "Nowhere-v7"),
        ):
            with pytest.raises(UsageError, match="Gymnasium knows no env 'Nowhere-v7' in this process"):
                make()


def test_atari_ids_need_no_import(programs):
    pytest.importorskip("ale_py")
    code = """
        import sys
        from reap.collectors import MultiSyncCollector, Collector
        if __name__ == "__main__":
            batch = MultiSyncCollector(["ALE/Pong-v5"], frames_per_batch=2, cat_results=0).next()
            assert batch["next", "pixels" if "pixels" in batch else "observation"].shape == (2, 210, 160, 3)
            assert Collector("ALE/Pong-v5", frames_per_batch=2).next().shape == (2,)
    """
    done = programs.run(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_an_entry_point_in_the_main_module(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent("""
        import gymnasium as gym
        from reap.collectors import MultiSyncCollector
        from reap.testing import CountingEnv
        class Mine(CountingEnv): ...
        if __name__ == "__main__":
            gym.register("Mine-v0", entry_point="__main__:Mine", disable_env_checker=True)
            print(MultiSyncCollector(["Mine-v0"], frames_per_batch=3, cat_results=0).next()["observation"].shape)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert "[3, 3]" in done.stdout, done.stderr
