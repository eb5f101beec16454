"""Paths into workers, hooks that run there, and what their states hold: by the names of TorchRL's worker collectors."""

import inspect
import os
import threading

import pytest
import torch

from reap.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from reap.collectors.distributed import DistributedSyncCollector
from reap.data import LazyTensorStorage, ReplayBuffer
from reap.errors import UsageError, WorkerRaised, WrongArgument
from reap.testing import EchoPolicy
from tests.worlds.faults import healthy


class Scaled(torch.nn.Module):
    """A postproc with a model inside."""

    def __init__(self):
        super().__init__()
        self.critic = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.critic.weight, 1.0)

    def forward(self, batch):
        return batch.set("value", self.critic(batch["observation"][..., :1]).detach())


def buffer():
    return ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)


def made(kind=MultiSyncCollector, **options):
    return kind([healthy()] * 2, EchoPolicy(), **{"frames_per_batch": 8, **options})


# ---- paths ---------------------------------------------------------------------------------------------------------


def test_the_worker_itself():
    with made() as collector:
        collector.next()
        collector.update_policy_weights_()
        collector.next()
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        assert collector.get_distant_attr("policy_version") == [1, 1]
        assert collector.map_fn("get_policy_version") == [1, 1]
        assert [stats["frames"] for stats in collector.map_fn("stats")] == [8, 8]
        assert [state["policy_version"] for state in collector.map_fn("state_dict")] == [1, 1]
        assert collector.get_distant_attr("frames_per_batch") == [4, 4]
        assert collector.get_distant_attr("compiled_policy") == [False, False]
        assert collector.get_distant_attr("interruptor") == [None, None]
        assert collector.map_fn("get_model", [("policy.weight",)] * 2)[0] == 1
        with pytest.raises(AttributeError, match="nothing_of_that_name"):
            collector.get_distant_attr("nothing_of_that_name")
        with pytest.raises(UsageError, match="call it on the collector itself"):
            collector.map_fn("set_seed", [(1,)] * 2)
        assert collector.next().batch_size == (2, 4)


class OnlyThere:
    """Can be unpickled only in the process that made it, as a simulator's object that needs a display."""

    def __reduce__(self):
        return _only_in, (os.getpid(),)


def _only_in(pid):
    if os.getpid() != pid:
        raise ModuleNotFoundError("no display here")
    return OnlyThere()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, DistributedSyncCollector])
def test_an_answer_that_cannot_be_unpickled_here(kind):
    """Nothing that came along with it is lost, and nobody waits for the answer any more."""
    with kind([healthy(), healthy(1)], EchoPolicy(), frames_per_batch=8, total_frames=-1) as collector:
        collector.next()
        with pytest.raises(WorkerRaised, match="reading apply raised ModuleNotFoundError.*no display here") as caught:
            collector.map_fn("apply", [(lambda view: OnlyThere(),)] * 2)
        assert caught.value.worker.startswith("0 (pid ")
        assert all(worker.pending_call is None for worker in collector._backend.workers)
        for _ in range(10):
            collector.next()
        assert collector.get_distant_attr("worker_idx") == [0, 1]


def test_the_buffer_a_worker_writes_to():
    memory = buffer()
    with made(replay_buffer=memory, total_frames=16) as collector:
        list(collector)
        assert collector.get_distant_attr("replay_buffer.write_count") == [16, 16]
        assert collector.getattr_rb("write_count") == memory.write_count == 16
        assert collector.map_fn("replay_buffer.__len__") == [16, 16]


def test_what_may_stop_a_worker():
    with made(preemptive_threshold=0.5) as collector:
        collector.next()
        for move, stopped in (("stop_collection", True), ("start_collection", False)):
            collector.map_fn(f"interruptor.{move}")
            assert [one.collection_stopped() for one in collector.get_distant_attr("interruptor")] == [stopped] * 2
            assert collector.map_fn("interruptor.collection_stopped") == [stopped] * 2


def test_weights_for_each_by_map_fn():
    with made(track_policy_version=True) as collector:
        weights = [({"weight": torch.tensor(float(w)), "mix": EchoPolicy().mix},) for w in (2, 3)]
        collector.map_fn("update_policy_weights_", weights)
        batch = collector.next()
        echo = (batch["observation"] * EchoPolicy().mix).sum(-1, keepdim=True)
        assert torch.equal(batch["action"], echo * torch.tensor([2.0, 3.0]).reshape(2, 1, 1))
        assert collector.policy_version == 1
        collector.map_fn("reset")
        assert collector.next()["collector", "traj_ids"].min() >= 2


def test_paths_of_one_process():
    class Never:
        def collection_stopped(self):
            return False

    never, memory = Never(), buffer()
    with Collector(healthy(), EchoPolicy(), frames_per_batch=8, interruptor=never, replay_buffer=memory) as collector:
        assert collector.get_distant_attr("interruptor") is never
        assert collector.get_distant_attr("replay_buffer") is memory
        assert collector.map_fn("interruptor.collection_stopped") == [False]
        assert collector.compiled_policy is False
    compiled = Collector(healthy(), EchoPolicy(), frames_per_batch=8, compile_policy={"backend": "eager"})
    assert compiled.compiled_policy is True
    compiled.shutdown()


def test_the_front_doors_arguments_are_shown():
    names = list(inspect.signature(Collector).parameters)
    assert {"backend", "num_collectors", "sync", "backend_options"} <= set(names)
    assert "backend" not in inspect.signature(MultiSyncCollector).parameters


# ---- models beside the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, DistributedSyncCollector])
def test_a_model_in_postproc(kind):
    from reap.weight_update import MultiProcessWeightSyncScheme

    postproc = Scaled()
    schemes = {"policy": MultiProcessWeightSyncScheme(), "postproc.critic": MultiProcessWeightSyncScheme()}
    with made(kind, postproc=postproc, weight_sync_schemes=schemes) as collector:
        collector.update_policy_weights_({"weight": torch.tensor([[3.0]])}, model_id="postproc.critic")
        batch = collector.next()
        assert torch.equal(batch["value"], 3 * batch["observation"][..., :1])
        collector.update_policy_weights_(model_id="postproc.critic")  # its own
        with pytest.raises(KeyError, match="this collector has no model 'postproc.actor'"):
            collector.update_policy_weights_({"weight": torch.ones(1, 1)}, model_id="postproc.actor")


def test_a_model_in_the_postproc_of_workers():
    """Workers that write to a buffer have a postproc of their own: new weights reach it, and those trained here."""
    postproc, memory = Scaled(), buffer()
    with made(postproc=postproc, replay_buffer=memory) as collector:
        collector.update_policy_weights_({"weight": torch.tensor([[3.0]])}, model_id="postproc.critic")
        collector.next()
        rows = memory[:]
        assert torch.equal(rows["value"], 3 * rows["observation"][..., :1])
        torch.nn.init.constant_(postproc.critic.weight, 5.0)
        collector.update_policy_weights_(weights_dict={"policy": None, "postproc.critic": None})
        collector.next()
        rows = memory[:][-8:]
        assert torch.equal(rows["value"], 5 * rows["observation"][..., :1])
        assert [float(w) for w in collector.get_distant_attr("postproc.critic.weight")] == [5.0, 5.0]


def test_a_model_that_is_nowhere():
    from reap.weight_update import SharedMemWeightSyncScheme

    with pytest.raises(UsageError, match=r"weight_sync_schemes names 'critic'; a collector has 'policy', and models"):
        made(weight_sync_schemes={"critic": SharedMemWeightSyncScheme()})
    with made() as collector, pytest.raises(UsageError, match=r"model 'env.spec' exists only in the workers"):
        collector.update_policy_weights_(model_id="env.spec")


# ---- hooks ------------------------------------------------------------------------------------------------------


def test_hooks_in_workers():
    """Both are called there, once for each rollout, and what they write into the batch is delivered."""

    def before():
        os.environ["COUNTED"] = str(int(os.environ.get("COUNTED", 0)) + 1)

    def after(batch):
        batch["action"].fill_(int(os.environ["COUNTED"]))

    for kind in (MultiSyncCollector, MultiAsyncCollector, DistributedSyncCollector):
        with made(kind, hooks_in_workers=True, pre_collect_hook=before, post_collect_hook=after) as collector:
            counts = [collector.next()["action"].unique().tolist() for _ in range(2)]
            assert counts[0] == [1]
            assert collector.post_collect_hook is after
            assert "COUNTED" not in os.environ


def test_hooks_that_are_given_run_here_and_those_that_are_assigned_in_the_workers():
    seen = []
    with made(post_collect_hook=lambda batch: seen.append(batch.batch_size)) as collector:
        collector.next()
        assert seen == [(2, 4)]

        def mark(batch):
            batch["action"].fill_(os.getpid())

        collector.post_collect_hook = mark
        found = set(collector.next()["action"].flatten().tolist())
        assert len(found) == 2
        assert os.getpid() not in found
        assert len(seen) == 1
        collector.post_collect_hook = None
        assert collector.post_collect_hook is None
        assert not found & set(collector.next()["action"].flatten().tolist())
        with pytest.raises(WrongArgument, match="pre_collect_hook must be callable, got int"):
            collector.pre_collect_hook = 3


def test_a_hook_that_is_refused_leaves_the_one_before_it():
    seen, lock = [], threading.Lock()
    options = {
        "pre_collect_hook": lambda: seen.append("before"),
        "post_collect_hook": lambda batch: seen.append("after"),
    }
    with made(**options) as collector:
        for name, given in options.items():
            for wrong, refusal in ((3, f"{name} must be callable"), (lambda *_: lock, name)):
                with pytest.raises(UsageError, match=refusal):
                    setattr(collector, name, wrong)
                assert getattr(collector, name) is given
        collector.next()
        assert seen == ["before", "after"]


def test_a_hook_that_raises_in_a_worker():
    def fails():
        raise OSError("no disk")

    collector = made(hooks_in_workers=True, pre_collect_hook=fails)
    with pytest.raises(WorkerRaised, match="pre_collect_hook raised OSError.*no disk"):
        collector.next()
    assert collector.closed


def test_a_worker_in_this_process_has_no_other_place_for_hooks():
    with pytest.raises(WrongArgument, match="hooks_in_workers"):
        Collector(healthy(), EchoPolicy(), frames_per_batch=8, hooks_in_workers=True)


# ---- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MultiSyncCollector, DistributedSyncCollector])
def test_states_of_workers_hold_their_versions(kind):
    with made(kind, track_policy_version=True) as collector:
        collector.update_policy_weights_()
        collector.update_policy_weights_(worker_ids=[1])
        state = collector.state_dict()
        assert [state[f"worker{w}"]["policy_version"] for w in (0, 1)] == [1, 2]
    with made(kind, track_policy_version=True) as collector:
        collector.load_state_dict(state)
        assert collector.next()["policy_version"][:, 0].flatten().tolist() == [1, 2]


def test_the_end_may_be_awaited():
    import asyncio

    async def life(collector):
        collector.next()
        await collector.async_shutdown()
        return collector.closed

    assert asyncio.run(life(AsyncCollector(healthy(), EchoPolicy(), frames_per_batch=8)))
