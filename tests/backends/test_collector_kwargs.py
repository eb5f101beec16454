"""`collector_kwargs` of distributed collectors: merged with the collector's own options, for all workers or each."""

import warnings

import pytest
import torch

from reap.collectors.distributed import DistributedCollector, DistributedSyncCollector, RayCollector, RPCCollector
from reap.collectors.distributed.collector_kwargs import merge_options
from reap.errors import SpecMismatch, UsageError, WrongArgument
from reap.testing import EchoPolicy
from tests.worlds.faults import healthy


def made(collector_kwargs, workers=2, **options):
    return DistributedSyncCollector(
        [healthy()] * workers, EchoPolicy(), frames_per_batch=8, collector_kwargs=collector_kwargs, **options
    )


def test_what_is_said_twice_alike_is_said_once():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"device": "cpu", "storing_device": "cpu", "max_frames_per_traj": 3, "frames_per_batch": 8}
        assert merge_options(options, dict(options), ()) == (options, None)


def test_the_collectors_own_option_holds():
    with pytest.warns(
        UserWarning, match=r"collector_kwargs holds max_frames_per_traj=2, but the collector itself was given"
    ):
        collector = made({"max_frames_per_traj": 2, "track_policy_version": True}, max_frames_per_traj=3)
    with collector:
        batch = collector.next()
    assert batch["next", "step_count"].max() == 3
    assert "policy_version" in batch.keys()


def test_hooks_of_the_workers_hold_before_the_collectors():
    def own(batch):
        raise AssertionError

    theirs = []
    with made({"post_collect_hook": lambda batch: theirs.append(batch.batch_size)}, post_collect_hook=own) as collector:
        collector.next()
    assert theirs == [(2, 4)]


def test_two_postprocs_are_called_one_after_the_other():
    def add(batch):
        return batch.set("made", batch["observation"] + 1)

    def double(batch):
        return batch.set("made", batch["made"] * 2)

    with made({"postproc": add}, postproc=double) as collector:
        batch = collector.next()
    assert torch.equal(batch["made"], (batch["observation"] + 1) * 2)


def test_a_list_has_a_mapping_for_each_worker():
    with made([{"max_frames_per_traj": n, "track_policy_version": True} for n in (1, 2)]) as collector:
        batch = collector.next()
    assert batch["next", "step_count"].flatten(1).amax(1).tolist() == [1, 2]
    assert "policy_version" in batch.keys()


@pytest.mark.parametrize(
    ("error", "given", "words"),
    [
        (SpecMismatch, [{}], "collector_kwargs holds 1 mappings for 2 workers"),
        (UsageError, [], "collector_kwargs is an empty list"),
        (
            UsageError,
            [{"total_frames": 3}, {}],
            r"collector_kwargs\[0\] holds 'total_frames', which must be the same for all workers",
        ),
        (WrongArgument, [3, 4], "collector_kwargs must be a mapping, or a list of mappings, got int"),
        (
            UsageError,
            {"launcher": "mp"},
            "collector_kwargs holds 'launcher', which is an argument of the collector itself",
        ),
        (WrongArgument, {"no_such_option": 1}, "has no option 'no_such_option'"),
    ],
    ids=str,
)
def test_wrong_ones(error, given, words):
    with pytest.raises(error, match=words):
        made(given)


@pytest.mark.parametrize("kind", [DistributedCollector, RPCCollector, RayCollector])
def test_every_kind_of_distributed_collector_merges_them(kind):
    """As far as their construction: what is wrong is said when both are together."""
    given = {"device": "cpu", "frames_per_batch": 8, "exploration_type": "of no such kind"}
    with pytest.raises((UsageError, WrongArgument), match="of no such kind"):
        kind([healthy()], EchoPolicy(), frames_per_batch=8, device="cpu", collector_kwargs=given)
