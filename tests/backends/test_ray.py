"""Workers that are Ray actors, on a real local cluster: the behaviour suite, and what only Ray can do."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from reap.collectors import Collector, MultiSyncCollector
from reap.collectors.distributed import RayAsyncCollector, RayCollector, RayEvalWorker
from reap.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer, SamplesPerInsert
from reap.envs import GymEnv
from reap.errors import SpecMismatch, UsageError, WorkerDied, WorkerRaised, WorkerSilent, WrongArgument, WrongState
from reap.seeding import chain
from reap.testing import CountingEnv, CountingWorld, EchoPolicy, assert_same, no_leaks
from reap.testing.backend import backend_checks, closed_says_so
from reap.weight_update import RayWeightSyncScheme
from tests.worlds.faults import (
    BOUND,
    PROMISED,
    ROOM,
    ClosesWhenLet,
    RaisesThen,
    Stuck,
    alive,
    all_gone,
    faulty,
    gated,
    healthy,
    pids,
    within,
)

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(400)  # every actor is an interpreter that Ray starts and that imports torch
SMALL = {"num_cpus": 0.25}
MIX = torch.tensor([3.0, 5.0, 7.0])
MAKERS = {
    "sync": lambda env, policy, **options: RayCollector(
        [env], policy, sync=True, cat_results=0, remote_configs=SMALL, **options
    ),
    "async": lambda env, policy, **options: RayCollector([env], policy, remote_configs=SMALL, **options),
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One for all; with a first actor, of which Ray keeps a socket for as long as it is connected."""
    calm = {"worker_niceness": 0}  # Ray's own, 15, is 3% of a core beside other tests
    few = {"num_cpus": 2, "object_store_memory": 200 * 2**20}
    ray.init(**few, include_dashboard=False, log_to_driver=False, _system_config=calm)

    class First:
        def say(self):
            return "hello"

    ray.get(ray.remote(First).options(num_cpus=0).remote().say.remote())
    yield
    ray.shutdown()


class Placed(EchoPolicy):
    def pid(self):
        return os.getpid()


def collect(makers, policy=None, **options):
    return RayCollector(makers, policy or EchoPolicy(), **{"frames_per_batch": 8, "remote_configs": SMALL, **options})


def acts_with(batch, weight):
    """Whether the weights that acted are these."""
    return torch.equal(batch["action"], weight * (batch["observation"] * MIX).sum(-1, keepdim=True))


def double(policy, collector):
    with torch.no_grad():
        policy.weight.fill_(2.0)
    collector.update_policy_weights_()


# An actor takes seconds to start, wherever it is: the suite is for `make test-all`, one rich test of each kind is here.
@pytest.mark.parametrize(
    ("kind", "check"),
    [pytest.param(kind, check, marks=pytest.mark.slow) for kind in MAKERS for check in backend_checks],
)
def test_ray(kind, check):
    backend_checks[check](MAKERS[kind])


def test_in_step():
    """Both actors' lanes, bit for bit; weights, seeds and state; then a third actor."""
    world = CountingWorld([(3, 1, 5)] * 2)
    policy = EchoPolicy()
    with no_leaks(sockets=False):
        c = collect([healthy(0), healthy(1)], policy, sync=True, frames_per_batch=16, track_policy_version=True)
        for _ in range(20):
            want = {k: v for k, v in world.batch(8).items() if k != ("collector", "traj_ids")}
            assert_same(c.next().exclude("policy_version", ("next", "policy_version"), ("collector", "traj_ids")), want)
        double(policy, c)
        batch = c.next()
        assert acts_with(batch, 2.0)
        assert (batch["policy_version"] == 1).all()
        seen = int(batch["collector", "traj_ids"].max())
        c.add_collectors([healthy(2)])
        assert c.num_workers == len(c.remote_collectors) == 3
        batch = c.next()
        assert batch.batch_size == (3, 8)
        assert acts_with(batch, 2.0)
        assert (batch["policy_version"] == 1).all()
        assert batch["collector", "traj_ids"][2].min() >= 2**32 > seen
        workers = pids(c)
        with within(BOUND):
            c.stop_remote_collectors()
        closed_says_so(c)
        assert all_gone(workers, within=0.1)
        del c, batch


@pytest.mark.slow
def test_in_the_background_an_actor_is_added_between_two_batches():
    """With all that follows: no batch is arranged for the lanes there were before."""
    memory = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=8)
    c = collect([healthy()], sync=True, replay_buffer=memory)
    learn, threads = c._learn_sizes, []
    c._learn_sizes = lambda: (threads.append(threading.current_thread().name), learn())
    c.start()
    c.add_collectors([healthy(1)])
    count = memory.write_count
    while memory.write_count < count + 64:
        memory.sample()
    c.shutdown()
    assert threads == ["reap-collector"]
    del c._learn_sizes


@pytest.mark.parametrize("sync", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_dead_actor_is_replaced(sync):
    """Killed in a rollout and in an update: the new one has the latest weights, and trajectories of its own."""
    policy = EchoPolicy()
    c = collect([healthy(), healthy(1)], policy, sync=sync, restart=True, track_policy_version=True)
    last = int(c.next()["collector", "traj_ids"].max())
    os.kill(pids(c)[1], signal.SIGKILL)
    double(policy, c)
    batch = c.next()
    while not (c.stats()["restarts"] == 1 and (batch["collector", "traj_ids"] >= 2**32).any()):
        batch = c.next()
        assert acts_with(batch, torch.where(batch["policy_version"] == 0, 1.0, 2.0).unsqueeze(-1))
        last = max(last, int((batch["collector", "traj_ids"] % 2**32).max()))
    assert (batch["policy_version"] == 1).all()
    assert last < 2**32
    assert c.stats()["workers_alive"] == 2
    c.shutdown()


@pytest.mark.parametrize("on_failure", ["restart", "drop"])
def test_an_actor_that_fails_is_replaced_or_left_out(on_failure):
    """Also one that raised something: its actor lives on, and is ended."""
    told = []
    c = collect([healthy(), faulty("raise", 21)], sync=True, on_failure=on_failure, on_restart=told.append)
    while not told:
        c.next()
    (failure,) = told
    assert (failure.worker, failure.action) == (1, on_failure)
    assert "an injected fault" in str(failure.cause)
    batch = c.next()
    if on_failure == "drop":
        assert not batch["collector", "mask"][1].any()
    else:
        assert (batch["collector", "traj_ids"][1] >= 2**32).all()
    c.shutdown()


@pytest.mark.slow
def test_weights_for_one_actor():
    """Also for the one that comes in its place, and after a state was loaded; until there are others for all."""

    def killed(worker):
        os.kill(pids(c)[worker], signal.SIGKILL)
        while c.stats()["restarts"] == before:
            c.next()
        return c.next()[worker]

    policy, before = EchoPolicy(), 0
    c = collect([healthy(), healthy(1)], policy, sync=True, restart=True, track_policy_version=True)
    c.update_policy_weights_({0: {"weight": torch.tensor(2.0)}, 1: {"weight": torch.tensor(3.0)}})
    batch = c.next()
    assert acts_with(batch[0], 2.0)
    assert acts_with(batch[1], 3.0)
    batch = killed(1)
    assert acts_with(batch, 3.0)
    assert (batch["policy_version"] == 1).all()
    state, before = c.state_dict(), 1
    c.update_policy_weights_()
    assert acts_with(c.next(), 1.0)
    c.load_state_dict(state)
    batch = killed(1)
    assert acts_with(batch, 3.0)
    assert (batch["policy_version"] == 1).all()
    c.shutdown()


def test_a_dead_actor_is_named():
    """In a step; while it is built; and whoever updates is told too."""
    c = collect([healthy(), faulty("exit", 21)])
    workers = pids(c)
    with pytest.raises(WorkerDied, match=rf"worker 1 \(pid {workers[1]}\): its actor died"):
        while True:
            c.update_policy_weights_()
            c.next()
    assert c.closed
    c.shutdown()  # waits for those that are being ended
    assert all_gone(workers, within=10)
    with no_leaks(sockets=False), pytest.raises(WorkerDied, match=r"worker 0 \(.*\): its actor died"):
        collect([faulty("kill", 0, "reset")], restart=True)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), [("stop", "does not answer"), ("hang", r"faults\.py.*in inject")])
def test_a_silent_actor_is_told_and_ended_in_time(fault, words):
    c = collect([healthy(), faulty(fault, 21)], timeout=1.0)
    workers, last = pids(c), time.monotonic()
    with pytest.raises(WorkerSilent, match=rf"(?s)worker 1 .*sent nothing for .*timeout=1.0.*{words}"):
        while True:
            c.next()
            last = time.monotonic()
    took = time.monotonic() - last
    assert took < 1.0 + PROMISED + ROOM, f"{took:.1f} s"
    c.shutdown()
    assert all_gone(workers, within=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_without_a_timeout_the_log_says_where_it_is(background, log):
    """And it is waited for."""
    buffer = {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=8)} if background else {}
    with collect([healthy(), gated(log.gate)], **buffer) as c:
        log.be_impatient()
        if background:
            c.start()
        while not log.told:
            time.sleep(0.01) if background else c.next()
        frames = c.stats()["worker_frames"]
        while c.stats()["worker_frames"] < frames + 64:
            time.sleep(0.01) if background else c.next()
        assert not c.closed
    (told,) = log.told
    assert "worker 1 (pid" in told


@pytest.mark.parametrize("beside", ["slow", pytest.param("stop", marks=pytest.mark.slow)])
def test_an_error_does_not_wait_for_others_to_close(beside, tmp_path):
    """It comes while the other actor is still there; that is closed after, and `shutdown` waits for it."""
    note = tmp_path / "stuck"
    note.touch() if beside == "slow" else None
    other = (lambda: ClosesWhenLet(tmp_path)) if beside == "slow" else lambda: Stuck(note, "stop")
    with no_leaks(sockets=False):
        c = collect([other, lambda: RaisesThen(note)], sync=True)
        workers = pids(c)
        with pytest.raises(WorkerRaised, match="an injected fault"):
            c.next()
        assert alive(workers[0]), "the error came after it had ended"
        assert c.closed
        (tmp_path / "may").touch()
        c.shutdown()
        assert all_gone(workers, within=0.1)
        assert (tmp_path / "closed").exists() == (beside == "slow")
        del c


@pytest.mark.slow
def test_sockets_do_not_add_up():
    def sockets():
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and "socket:" in os.readlink(link) for link in links)

    counts = []
    for _ in range(6):
        with collect([healthy(), healthy(1)]) as c:
            c.next()
        counts.append(sockets())
    assert max(counts[3:]) <= max(counts[:3]) + 1


def test_shutdown_in_the_middle_of_a_step():
    with no_leaks(sockets=False):
        c = collect([faulty("hang", 2)])
        workers = pids(c)
        with within(BOUND):
            c.shutdown()
        assert all_gone(workers, within=0.1)
        del c


def assert_begins(batch, *keys):
    """In these columns the batch is the first that each lane makes."""
    want = CountingWorld([(3, 1, 5)]).batch(8)
    for key in keys:
        for lane in batch[key]:
            assert torch.equal(lane, torch.as_tensor(want[key])[0])


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_team_inside(kind):
    """One actor, two processes in it: their lanes, weights, seeds; one of them dies and is named by both numbers."""
    policy = Placed()
    with no_leaks(sockets=False):
        c = collect(
            [lambda: healthy(0)()],
            policy,
            sync=True,
            cat_results=0,
            frames_per_batch=16,
            collector_class=MultiSyncCollector if kind == "sync" else "async",
            num_workers_per_collector=2,
            track_policy_version=True,
        )
        (inside,) = c.get_distant_attr("worker_idx")
        assert inside == [0, 1]
        batch = c.next()
        if kind == "sync":
            assert_begins(batch, ("observation",), ("next", "reward"))
        assert batch.batch_size == ((2, 8) if kind == "sync" else (16,))
        assert acts_with(batch, 1.0)
        double(policy, c)
        while (batch["policy_version"] == 0).any():
            batch = c.next()
            assert acts_with(batch, torch.where(batch["policy_version"] == 0, 1.0, 2.0).unsqueeze(-1))
        assert c.set_seed(3) == chain(3, 2)[1]
        state = c.state_dict()
        c.load_state_dict(state)
        if kind == "sync":  # else some are made already
            seen, batch = batch["collector", "traj_ids"].max(), c.next()
            assert_begins(batch, ("observation",))  # the episodes that the seed began go on, under their own ids
            assert batch["collector", "traj_ids"].min() > seen
            assert batch["collector", "traj_ids"].max() >= int(state["traj_pool"]["traj_id"])
        (numbers,) = c.map_fn("policy.pid")
        os.kill(numbers[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"worker 0/1 \(pid {numbers[1]}\).*SIGKILL"):
            while True:
                c.next()
        assert all_gone(numbers, within=BOUND)
        del c, batch


def test_a_buffer_of_its_own():
    """Actors write into it, in front and in the background; rows are true; what is wrong is raised here."""
    with no_leaks(sockets=False):
        buffer = RayReplayBuffer(storage=lambda: LazyTensorStorage(1000), batch_size=32)
        c = collect([healthy(), healthy(1)], total_frames=80, replay_buffer=buffer, max_weight_update_interval=2)
        assert [c.next() for _ in range(5)] == [None] * 5
        assert len(buffer) >= 40
        assert c.policy_version == 2
        c.start()
        while c.is_running():
            buffer.sample()
        c.shutdown()
        assert len(buffer) == buffer.write_count == 80
        sample = buffer.sample()
        assert sample.batch_size == (32,)
        assert acts_with(sample, 1.0)
        assert set(buffer[torch.arange(80)]["observation"][:, 0].tolist()) == {0.0, 1.0}
        buffer.sample(4).zero_()  # ours to write to
        with pytest.raises(UsageError, match="batch dimension"):
            buffer.extend(sample[0])
        state = buffer.state_dict()
        buffer.empty()
        assert len(buffer) == 0
        buffer.load_state_dict(state)
        assert len(buffer) == 80
        ray.kill(buffer._actor)
        with pytest.raises(WorkerDied, match="actor is gone"):
            while True:  # it is killed in its own time
                len(buffer)
        assert not buffer.is_alive
        buffer.shutdown()
        with pytest.raises(WrongState, match="closed"):
            buffer.sample()
        del c, buffer, sample


@pytest.mark.parametrize("buffer", ["actor", "here"])
def test_pause_returns_when_nothing_is_under_way(buffer):
    """What actors were asked for is made, and in the buffer if they write there themselves."""
    if buffer == "actor":
        memory = RayReplayBuffer(storage=lambda: LazyTensorStorage(100_000), batch_size=8)
    else:
        memory = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=8)
    c = collect([healthy(), healthy(1)], replay_buffer=memory)
    c.start()
    memory.sample()
    for _ in range(3):
        with c.pause(timeout=60):
            assert not any(remote.pending_slots for remote in c._backend.workers)
            stats = c.stats()
            assert stats["frames"] == memory.write_count
            assert stats["worker_frames"] >= stats["frames"]
            assert buffer == "here" or stats["worker_frames"] == stats["frames"]
            before = c._backend.workers[0].frames
        while c.stats()["frames"] == stats["frames"]:
            memory.sample()
        assert c._backend.workers[0].frames >= before
    with c.pause(resume=False):
        pass
    count = memory.write_count
    assert c.stats()["frames"] == count
    c.resume()

    async def end():
        await c.async_shutdown(shutdown_ray=False)

    asyncio.run(end())
    assert ray.is_initialized()
    assert c.stats()["worker_frames"] >= count
    memory.shutdown() if buffer == "actor" else None


def test_a_learners_loop_ends_with_the_collector():
    memory = RayReplayBuffer(
        storage=lambda: LazyTensorStorage(1000), batch_size=8, limiter=SamplesPerInsert(1, tolerance=0, timeout=60)
    )
    with collect([healthy(), healthy(1)], replay_buffer=memory, total_frames=80) as c:
        with pytest.raises(WrongState, match=r"call .*\.start\(\) first"):
            memory.sample_while(c)
        c.start()
        drawn = sum(len(sample) for sample in memory.sample_while(c))
        assert memory.write_count == 80
        assert 79 <= drawn <= 79 + 16
    memory.shutdown()


@pytest.mark.slow
def test_a_buffer_of_torchrls():
    """Actors write into it through its own clients."""
    theirs = pytest.importorskip("torchrl.data")
    storage = functools.partial(theirs.LazyTensorStorage, 100)
    buffer = theirs.RayReplayBuffer(storage=storage, batch_size=8, remote_config={"num_cpus": 0})
    c = collect([healthy()], total_frames=40, replay_buffer=buffer)
    assert list(c) == [None] * 5
    assert len(buffer) == 40
    assert acts_with(buffer.sample(), 1.0)
    c.shutdown()
    buffer.shutdown()


@pytest.mark.slow
def test_a_buffer_that_cannot_be_made():
    with no_leaks(sockets=False), pytest.raises(UsageError, match="batch_size"):
        RayReplayBuffer(storage=lambda: LazyTensorStorage(10), batch_size=-1)


def test_into_a_buffer_of_this_process_by_the_front_door():
    """With a placement group, a scheme by name, and weights after each batch."""
    group = ray.util.placement_group([{"CPU": 0.25}])
    where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=16)
    c = Collector(
        healthy(),
        EchoPolicy(),
        backend="ray",
        num_collectors=1,
        frames_per_batch=8,
        total_frames=40,
        replay_buffer=buffer,
        track_policy_version=True,
        weight_sync_schemes={"policy": RayWeightSyncScheme()},
        backend_options={"remote_configs": {**SMALL, "scheduling_strategy": where}, "update_after_each_batch": True},
    )
    assert isinstance(c, RayAsyncCollector)
    assert list(c) == [None] * 5
    assert len(buffer) == 40
    assert c.policy_version == 4
    c.shutdown()
    ray.util.remove_placement_group(group)


class Doubling:
    """A strategy that sends a policy's weight twice as large."""

    def extract_weights(self, source):
        return 2 * source.weight.detach()

    def apply_weights(self, destination, weights):
        with torch.no_grad():
            destination.weight.copy_(weights)


def test_a_strategy_of_ones_own():
    policy, schemes = EchoPolicy(), {"policy": RayWeightSyncScheme(Doubling())}
    with collect([healthy()], policy, sync=True, weight_sync_schemes=schemes) as c:
        for factor in (1.0, 3.0):
            torch.nn.init.constant_(policy.weight, factor)
            c.update_policy_weights_()
            batch = c.next()
            assert torch.equal(batch["action"], 2 * factor * (batch["observation"] * MIX).sum(-1, keepdim=True))


def test_wrong_arguments():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    for error, words, wrong in (
        (UsageError, "num_collectors is 3", {"num_collectors": 3}),
        (WrongArgument, "ray_init_config", {"ray_init_config": "auto"}),
        (SpecMismatch, "remote_configs holds 2", {"remote_configs": [SMALL] * 2}),
        (WrongArgument, "remote_configs must hold mappings", {"remote_configs": ["cpu"]}),
        (WrongArgument, "remote_configs must be a mapping.*got 3", {"remote_configs": 3}),
        (WrongArgument, "restart must be True or False, got 'yes'", {"restart": "yes"}),
        (UsageError, "num_workers_per_collector", {"num_workers_per_collector": 2}),
        (UsageError, "num_workers_per_collector", {"num_workers_per_collector": 0, "collector_class": "sync"}),
        (UsageError, "'sync'", {"collector_class": "synk"}),
        (TypeError, "collector_class", {"collector_class": ReplayBuffer}),
        (
            UsageError,
            "Own defines rollout, which workers would never call",
            {"collector_class": type("Own", (Collector,), {"rollout": print})},
        ),
        (UsageError, "use_env_creator", {"use_env_creator": True}),
        (UsageError, "weight_recv_schemes", {"weight_recv_schemes": {"policy": RayWeightSyncScheme()}}),
        (UsageError, "max_weight_update_interval", {"max_weight_update_interval": 0}),
        (UsageError, "update_after_each_batch", {"update_after_each_batch": True, "max_weight_update_interval": 3}),
        (UsageError, "collector_kwargs", {"collector_kwargs": 3}),
        (UsageError, "preemptive_threshold", {"preemptive_threshold": 0.5, "sync": True}),
        (WrongArgument, "return_same_td", {"replay_buffer": buffer, "return_same_td": True}),
    ):
        with pytest.raises(error, match=words):
            collect([healthy()], **wrong)
    with pytest.raises(UsageError, match="transport"):
        RayReplayBuffer(storage=lambda: LazyTensorStorage(10), transport="distributed")


def test_an_evaluation_in_an_actor():
    class Weighted(torch.nn.Module):
        """The action is the weight."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, observation):
            return self.weight.expand(*observation.shape[:-1], 1)

    def env_maker():
        class Payer(CountingEnv):
            def step(self, action):
                observation, _, *rest = super().step(action)
                return observation, float(action[0]), *rest

        return GymEnv(Payer((4,)))

    seen = []
    worker = RayEvalWorker(None, env_maker, lambda env: Weighted(), num_gpus=0, num_cpus=0.25, name="plays")
    try:
        assert worker.poll() is None
        policy = Weighted()
        with torch.no_grad():
            policy.weight.fill_(2.0)
        for weights in (policy, TensorDict.from_module(policy).data):
            worker.submit(weights, max_steps=10)
            seen.append(worker.poll(60))
        other = RayEvalWorker.from_name("plays")
        other.submit(policy, max_steps=8, break_when_any_done=False)
        seen.append(other.poll(60))
    finally:
        worker.shutdown()
        worker.shutdown()
    assert seen == [{"reward": 8.0, "frames": None}] * 3
    with pytest.raises(WrongState, match="shut down"):
        worker.submit(None, max_steps=1)


def test_actors_tell_their_episodes_and_share_what_their_envs_learn():
    from reap.envs.transforms import NormalizeObservation, TransformedEnv
    from tests.backends.episodes import GAMMA, LENGTHS, check

    with collect([functools.partial(CountingEnv, LENGTHS, w) for w in range(2)], sync=True, gamma=GAMMA) as c:
        found = []
        for _ in range(6):
            c.next()
            found += c.episodes()
        assert len(found) == c.stats()["episodes"] > 0
        check(found, {(0, 0): 0, (1, 0): 1}, frames=24)
    normalize = NormalizeObservation()
    with collect([lambda: TransformedEnv(CountingEnv((50,), 3), normalize)] * 2, sync=True) as c:
        for _ in range(3):
            c.next()
    assert normalize.statistics().count == pytest.approx(2 * (1 + 12), abs=1e-3)
    assert normalize.statistics().mean == pytest.approx([3, 0, 6], abs=1e-3)
