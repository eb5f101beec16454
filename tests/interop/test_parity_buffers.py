"""replay_buffer=: the rows that TorchRL's collector writes into TorchRL's buffer, bit for bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchrl")
from torchrl.data import LazyTensorStorage, ReplayBuffer

import reap.data
from tests.worlds.pairs import Each, actor, assert_identical, assert_identical_tensors, collectors, env_makers

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(kind, lanes, *, ndim=1, **options):
    """What each library has written after four batches, and what iterating gave."""
    memory = Each.of(lambda: ReplayBuffer(storage=LazyTensorStorage(500, ndim=ndim)))
    made = collectors(
        env_makers(kind, lanes),
        lambda: actor(kind),
        frames_per_batch=30,
        total_frames=120,
        replay_buffer=memory,
        **options,
    )
    for collector in made.values():
        assert list(collector) == [None] * 4
        collector.shutdown()
    counts = {name: (len(one), one.write_count) for name, one in memory.items()}
    assert counts["reap"] == counts["torchrl"]
    return {name: one[:] for name, one in memory.items()}


@pytest.mark.parametrize("kind", ["counting", "CartPole-v1", "nested dict"])
@pytest.mark.parametrize("lanes", [None, 3])
def test_batches(kind, lanes):
    made = rows(kind, lanes)
    assert_identical(made["reap"], made["torchrl"])


@pytest.mark.parametrize(
    ("options", "ndim"),
    [
        ({}, 2),
        ({"extend_buffer": False}, 1),
        ({"compact_obs": True}, 1),
        ({"set_truncated": True}, 1),
        ({"max_frames_per_traj": 2}, 1),
        ({"postproc": lambda batch: batch.set("twice", batch["observation"] * 2)}, 1),
        ({"post_collect_hook": lambda batch: None}, 1),
    ],
    ids=["steps", "add", "compact", "truncated", "limit", "postproc", "hook"],
)
def test_options(options, ndim):
    made = rows("counting", 3, ndim=ndim, **options)
    assert_identical(made["reap"], made["torchrl"])


def test_whole_episodes():
    """The same ones; TorchRL sorts those that end in one rollout by number, reap has them in the order they end."""
    made = rows("counting", 3, trajs_per_batch=2)
    by_id = {}
    for name, found in made.items():
        order = torch.argsort(found["collector", "traj_ids"], stable=True)
        by_id[name] = found[order]
    assert_identical(by_id["reap"], by_id["torchrl"])


def test_reaps_buffer_under_torchrls_collector_and_the_other_way_round():
    memory = Each(torchrl=reap.data.ReplayBuffer(storage=reap.data.LazyTensorStorage(500)))
    memory["reap"] = ReplayBuffer(storage=LazyTensorStorage(500))
    made = collectors(
        env_makers("counting"), lambda: actor("counting"), frames_per_batch=30, total_frames=120, replay_buffer=memory
    )
    for collector in made.values():
        assert list(collector) == [None] * 4
        collector.shutdown()
    ours, theirs = memory["torchrl"][:], memory["reap"][:]
    for key in theirs.keys(True, True):
        assert_identical_tensors(ours[key], theirs[key])


def test_wrong_combinations_are_the_same_kind_of_error():
    for options in (
        {"return_same_td": True},
        {"use_buffers": True},
        {"extend_buffer": False, "postproc": lambda batch: batch},
        {"extend_buffer": False, "split_trajs": True},
    ):
        for name in ("torchrl", "reap"):
            with pytest.raises(TypeError):
                import torchrl.collectors

                import reap.collectors

                library = torchrl if name == "torchrl" else reap
                library.collectors.Collector(
                    env_makers("counting")[name],
                    frames_per_batch=30,
                    replay_buffer=ReplayBuffer(storage=LazyTensorStorage(500)),
                    **options,
                )


def test_start_needs_a_buffer_in_both():
    for collector in collectors(env_makers("counting"), lambda: actor("counting"), frames_per_batch=30).values():
        with pytest.raises(RuntimeError):
            collector.start()
        collector.shutdown()
