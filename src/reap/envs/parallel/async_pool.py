"""AsyncEnvPool: the public class for envs in threads or processes that are sent to one by one and answer when ready.

    async_step_send(td) ──► actions into the row all workers see ──► worker 0 ┐
                                                               └───► worker 1 ├──► async_step_recv(min_get=2)
                                                               └───► worker 2 ┘    the first two, in order of arrival

A worker with several envs steps together those whose actions it has received. Actions and results lie in memory that
both sides see; only text and objects are pickled.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from reap import arguments
from reap._system.affinity import Masks, masks
from reap._system.forks import guard, refuse_use
from reap._system.processes import StartMethod
from reap.core.assemble import tree_of
from reap.core.columns.assemble_ragged import frame
from reap.core.columns.object_columns import ObjectColumn
from reap.core.device.devices import named_device
from reap.core.slot import FLAGS
from reap.envs.base import EnvBase
from reap.envs.parallel.async_lanes import ReadyLanes
from reap.envs.parallel.env_child import RESET, STEP_SOME, UNSEEDED
from reap.envs.parallel.lane_workers import LaneWorkers
from reap.envs.parallel.process_workers import MOST_THREADS, ProcessWorkers, ThreadedProcessWorkers
from reap.envs.parallel.thread_workers import InlineEnv, ThreadWorkers
from reap.envs.serial import one_each
from reap.errors import NotReady, ReapError, SpecMismatch, UsageError, WrongArgument, WrongState
from reap.failures import FailureAction, WorkerFailure, failure_policy
from reap.seeding import chain
from reap.spec import Key, Leaf, show

_BACKENDS = ("threading", "multiprocessing", "inline")


class AsyncEnvPool(EnvBase):
    """Envs in threads or processes that answer as they are ready.

    >>> pool = AsyncEnvPool([lambda: GymEnv("CartPole-v1")] * 8, backend="multiprocessing")
    >>> td = pool.reset()
    >>> pool.async_step_send(pool.rand_action(td))
    >>> first = pool.async_step_recv(min_get=2)      # at least two, whichever were first: see first["env_index"]

    Args:
        create_env_fns: one factory (or Gymnasium id) for each env.
        backend: "threading", for envs that wait; "multiprocessing", for envs that compute; "inline", one after another
            in the calling thread, for a debugger.
        envs_per_worker: how many envs share a thread or process at most; each has the same number.
        worker_threads: step each env of a process in a thread of its own: for envs that wait, beside a busy policy.
        min_ready: for collectors: the fewest envs the policy acts on at a time.
        max_ready: for collectors: the most envs the policy acts on at a time; None: half of them. It is never more than
            half, so that the others step meanwhile, unless `min_ready` is more.
        create_env_kwargs: keywords for the factories, one mapping or a list.
        timeout: seconds an env may take for one answer before it is reported as stuck; None: no limit.
        max_frames_per_traj: truncate episodes at this length and add `step_count`.
        start_method: how processes start, "forkserver" or "spawn".
        num_sub_threads: torch threads of each process.
        worker_affinity: with processes, on Linux: the cores of each, as a list of lists or a function of its number.
        on_failure: what to do about an env that raises, hangs longer than `timeout`, or whose process dies: "raise" its
            error; "restart" it, in its thread or in another process, which resets its lanes; "drop" it. A thread that
            hangs cannot be replaced. See docs/failures.md.
        max_restarts: how many restarts are allowed within `restart_window` seconds; None: any number.
        restart_window: seconds over which restarts are counted.
        on_restart: called with a `reap.collectors.WorkerFailure` after each restart, and when one is dropped.
        device: where tensors used by hand (`reset`, `step`) are placed.
    """

    def __init__(
        self,
        create_env_fns: Any,
        *,
        backend: Literal["threading", "multiprocessing", "inline"] = "threading",
        envs_per_worker: int = 1,
        worker_threads: bool = False,
        min_ready: int = 1,
        max_ready: int | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        max_frames_per_traj: int | None = None,
        start_method: StartMethod = "forkserver",
        num_sub_threads: int = 1,
        worker_affinity: Masks | None = None,
        on_failure: FailureAction = "raise",
        max_restarts: int | None = 10,
        restart_window: float = 600.0,
        on_restart: Callable[[WorkerFailure], Any] | None = None,
        device: Any = None,
    ) -> None:
        if not isinstance(create_env_fns, (list, tuple)) or not create_env_fns:
            raise WrongArgument(f"create_env_fns must be a list with one factory per env, got {create_env_fns!r}")
        arguments.one_of("backend", backend, _BACKENDS)
        arguments.flag("worker_threads", worker_threads)
        arguments.one_of("start_method", start_method, ("forkserver", "spawn"))
        arguments.count("envs_per_worker", envs_per_worker)
        arguments.seconds("timeout", timeout)
        arguments.count("min_ready", min_ready)
        arguments.count("max_ready", 1 if max_ready is None else max_ready)
        arguments.count("num_sub_threads", num_sub_threads)
        max_frames_per_traj = arguments.whole("max_frames_per_traj", max_frames_per_traj, least=None, none=True)
        failures = failure_policy(on_failure, max_restarts, restart_window, on_restart)
        place = named_device("device", device)
        made = one_each("the number of envs", len(create_env_fns), list(create_env_fns), create_env_kwargs)
        most = min(envs_per_worker, MOST_THREADS) if worker_threads else envs_per_worker
        each = next(n for n in range(min(most, len(made)), 0, -1) if len(made) % n == 0)
        shares = [made[at : at + each] for at in range(0, len(made), each)]
        if worker_threads and backend != "multiprocessing":
            raise UsageError("worker_threads are threads of processes; they need backend='multiprocessing'")
        if worker_affinity is not None and backend != "multiprocessing":
            raise UsageError("worker_affinity places processes on cores; it needs backend='multiprocessing'")
        limit = max_frames_per_traj if max_frames_per_traj and max_frames_per_traj > 0 else None
        options: dict[str, Any] = {"limit": limit, "on_failure": failures}
        lane_workers: LaneWorkers
        if backend == "threading":
            lane_workers = ThreadWorkers(shares, timeout=timeout, **options)
        elif backend == "inline":
            lane_workers = ThreadWorkers(shares, kind=InlineEnv, **options)
        else:
            if worker_affinity is not None:
                options["cores"] = masks("worker_affinity", worker_affinity, len(shares), len(made))
            options |= {"timeout": timeout, "start_method": start_method, "threads": num_sub_threads}
            lane_workers = (ThreadedProcessWorkers if worker_threads else ProcessWorkers)(shares, **options)
        self._lane_workers = lane_workers
        self.num_envs = lane_workers.spec.lanes
        groups = len(lane_workers.bounds)
        least = -(-min_ready * groups // self.num_envs)
        most = groups if max_ready is None else max(1, max_ready * groups // self.num_envs)
        half = -(-groups // 2)  # the policy acts on one half while the other is stepping
        super().__init__(
            ReadyLanes(lane_workers, min(least, groups), min(max(half, least), most, groups)), device=place
        )
        self._group_of = [group for group, (first, last) in enumerate(lane_workers.bounds) for _ in range(first, last)]
        self._action: dict[Key, Leaf] | None = None
        self._begun = np.zeros(self.num_envs, bool)
        self._failure: str | None = None
        guard(self)
        self._clear_orders()

    def in_fork(self, why: str) -> None:
        """Refuse use in a forked copy: the envs and their answers belong to the process that started them."""
        self._failure = why
        refuse_use(self, why)

    def _clear_orders(self) -> None:
        """Forget which lanes are under way, and with what."""
        self._sent: dict[int, tuple[TensorDictBase, int]] = {}  # lanes under way: what was sent, and which row of it
        self._orders: dict[int, tuple[int, list[int]]] = {}  # groups under way: their order, and for which lanes
        self._queue: dict[int, deque[tuple[int, int]]] = {}  # orders for groups that are under way: order, lane
        self._ready: dict[int, deque[int]] = {STEP_SOME: deque(), RESET: deque()}  # lanes that have answered
        self._busy: dict[int, int] = {}  # lanes under way or not received yet, and their order
        self._fresh = np.zeros(self.num_envs, bool)  # reset already; the first observation waits

    @property
    def batch_size(self) -> torch.Size:
        """`[N]`: one dimension, of the envs."""
        return torch.Size([self.num_envs])

    # ---- all together ---------------------------------------------------------------------------------------------

    def reset(self) -> TensorDictBase:
        """Begin new episodes in all envs and wait for them."""
        self._use_by_hand()
        self._check_all_idle("reset")
        seeds, self.lanes_env.pending_seeds = self.lanes_env.pending_seeds, None
        with self._noting_failure():
            self._lane_workers.begin(seeds)
        self._clear_orders()
        self._begun[:] = True
        return self._first_of(list(range(self.num_envs)))

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step all envs, and wait for them; the result goes under "next"."""
        self._use_by_hand()
        self._check_all_idle("step")
        self.async_step_send(tensordict, range(self.num_envs))
        back = self.async_step_recv(min_get=self.num_envs)
        order = torch.argsort(back["env_index"])
        return tensordict.set("next", back["next"][order])

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step all envs, reset those that ended, and return the step and the TensorDict to start the next step from."""
        stepped = self.step(tensordict)
        root: Any = stepped["next"].exclude(*self._lane_workers.spec.reward)
        root.set("env_index", torch.arange(self.num_envs))
        over = root["done"].reshape(-1)
        if count := int(over.sum()):
            self.async_reset_send(root[over])
            root = torch.cat([root[~over], self.async_reset_recv(min_get=count)])
            root = root[torch.argsort(root["env_index"])]
        return stepped, root

    # ---- as they are ready ----------------------------------------------------------------------------------------

    def async_step_send(self, tensordict: TensorDictBase, env_index: Any = None) -> None:
        """Start a step of some envs with the actions in `tensordict` `[k]`.

        The envs are those in `env_index`, or else in the entry "env_index" of `tensordict`, or else all.
        """
        self._use_by_hand()
        lanes = self._lanes_for(tensordict, env_index)
        self._check_may_step(lanes)  # first: the row written below also holds actions and flags of lanes under way
        td = (tensordict if tensordict.ndim else tensordict.unsqueeze(0)).exclude("next", "env_index").clone()
        actions = self._actions(td, lanes)
        row = self._lane_workers.row()
        for array, value in zip(row.action, actions.values()):
            array[lanes] = value.reshape(len(lanes), *array.shape[1:])
        for n, lane in enumerate(lanes):
            self._sent[lane] = td, n
        self._order(STEP_SOME, lanes)

    def async_step_recv(
        self, min_get: int = 1, env_index: Any = None, *, max_get: int | None = None, timeout: float | None = None
    ) -> TensorDictBase:
        """Wait for steps of at least `min_get` envs, or of all in `env_index`, in the order of their answers.

        Returns what was sent to these envs, with the results under "next". `max_get` leaves further answers for the
        next call. After `timeout` seconds without enough answers it raises `NotReady`, a TimeoutError; the answers that
        came stay for the next call.
        """
        lanes = self._receive(STEP_SOME, min_get, max_get, env_index, timeout)
        row, at = self._lane_workers.row(), np.array(lanes)
        spec = self._lane_workers.spec
        columns: dict[Key, Any] = {(name,): flag[:, None] for name, flag in zip(FLAGS, row.flags)}
        columns.update(zip((*spec.observation, *spec.reward), (*row.next, *row.rewards)))
        following = self._tensordict({key: array[at] for key, array in columns.items()}, lanes)
        given = [self._sent.pop(lane) for lane in lanes]
        out = _rows_of(given)
        out.set("env_index", torch.from_numpy(at))
        over = at[row.done[at]]
        self._fresh[over] = True
        for flag in row.flags:
            flag[over] = False
        return out.set("next", following)

    def async_reset_send(
        self, tensordict: TensorDictBase | None = None, env_index: Any = None, *, seeds: Any = None
    ) -> None:
        """Start new episodes in the envs of `env_index`, or of the entry "env_index" of `tensordict`, or in all.

        `seeds` holds one seed for each of them, in that order; without it, those of an earlier `set_seed` are used.
        """
        self._use_by_hand()
        lanes = self._lanes_for(tensordict, env_index)
        given = self._unused_seeds(lanes) if seeds is None else _seeds(seeds, len(lanes))
        self._check_idle(lanes)
        self._order(RESET, lanes, given)
        self._begun[lanes] = True

    def async_reset_recv(
        self, min_get: int = 1, env_index: Any = None, *, max_get: int | None = None, timeout: float | None = None
    ) -> TensorDictBase:
        """Wait for first observations of at least `min_get` envs; arguments and errors as in `async_step_recv`."""
        return self._first_of(self._receive(RESET, min_get, max_get, env_index, timeout))

    # ---- internals ------------------------------------------------------------------------------------------------

    def _unused_seeds(self, lanes: Sequence[int]) -> list[int]:
        """Return the seeds of an earlier `set_seed` that these envs have not used yet."""
        pending = self.lanes_env.pending_seeds
        return [UNSEEDED] * len(lanes) if pending is None else [pending[lane] for lane in lanes]

    def _check_idle(self, lanes: Sequence[int]) -> None:
        busy = [lane for lane in lanes if lane in self._busy]
        if busy:
            raise WrongState(
                f"env {busy[0]} has not been received since it was sent to; call {self._receiver(busy[0])} first"
            )

    def _receiver(self, lane: int) -> str:
        return "async_reset_recv" if self._busy[lane] == RESET else "async_step_recv"

    def _check_may_step(self, lanes: Sequence[int]) -> None:
        self._check_idle(lanes)
        for lane in lanes:
            if not self._begun[lane]:
                who = f"env {lane} has not begun an episode" if self._begun.any() else "no env has begun an episode"
                raise WrongState(f"{who}; call reset() or async_reset_send() first")
        for first, last in () if self._lane_workers.spec.single_steps else self._lane_workers.bounds:
            if 0 < len({lane for lane in lanes if first <= lane < last}) < last - first:
                raise UsageError(
                    f"envs {first} to {last - 1} can only be stepped together; send actions to all of them"
                )

    def _order(self, what: int, lanes: Sequence[int], seeds: Sequence[int] = ()) -> None:
        if what == RESET:
            self._lane_workers.seed(lanes, seeds)
            if self.lanes_env.pending_seeds is not None:  # each seed is used once
                begun = {*lanes}
                self.lanes_env.pending_seeds = [
                    UNSEEDED if lane in begun else seed for lane, seed in enumerate(self.lanes_env.pending_seeds)
                ]
        given = dict(zip(lanes, seeds))
        for lane in lanes:
            self._busy[lane] = what
            if self._fresh[lane] and given.get(lane) == UNSEEDED:  # its worker reset it when its episode ended
                self._ready[RESET].append(lane)
            else:
                self._queue.setdefault(self._group_of[lane], deque()).append((what, lane))
            self._fresh[lane] = False
        for group in {self._group_of[lane] for lane in lanes}:
            self._order_next(group)

    def _order_next(self, group: int) -> None:
        """Send a group, if it is idle, its next orders of one kind."""
        queue = self._queue.get(group)
        if not queue or group in self._orders:
            return
        what, lanes = queue[0][0], []
        while queue and queue[0][0] == what:
            lanes.append(queue.popleft()[1])
        self._orders[group] = what, lanes
        with self._noting_failure():
            self._lane_workers.order([group], what, lanes)

    def _receive(
        self, what: int, min_get: int, max_get: int | None, env_index: Any, timeout: float | None
    ) -> list[int]:
        self._use_by_hand()
        arguments.seconds("timeout", timeout, zero=True)
        arguments.whole("min_get", min_get, least=None)
        arguments.count("max_get", 1 if max_get is None else max_get)
        if max_get is not None and max_get < min_get:
            raise UsageError(f"max_get is {max_get}, below min_get, which is {min_get}")
        deadline = None if timeout is None else time.monotonic() + timeout
        name = "async_step" if what == STEP_SOME else "async_reset"
        pending = {lane for lane, why in self._busy.items() if why == what}
        wanted = pending if env_index is None else set(_numbers(env_index, self.num_envs))
        least = len(wanted) if env_index is not None else min_get
        if not wanted <= pending or not 1 <= least <= len(wanted):
            raise WrongState(
                f"{name}_recv waits for {least} answers, but {len(wanted & pending)} were sent for by {name}_send"
            )
        ready = self._ready[what]
        while (came := sum(lane in wanted for lane in ready)) < least:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with self._noting_failure():
                answered = self._lane_workers.answered(left)
            if not answered:
                raise NotReady(
                    f"{name}_recv waited {timeout} s for {least} answers, {came} came; they stay for the next call"
                )
            for group in answered:
                kind, lanes = self._orders.pop(group)
                self._ready[kind].extend(lanes)
                self._order_next(group)
        found = [lane for lane in ready if lane in wanted][:max_get]
        self._ready[what] = deque(lane for lane in ready if lane not in set(found))
        for lane in found:
            del self._busy[lane]
        return found

    def _first_of(self, lanes: list[int]) -> TensorDictBase:
        columns = {
            key: array[lanes] for key, array in zip(self._lane_workers.spec.observation, self._lane_workers.first)
        }
        columns.update({(flag,): np.zeros((len(lanes), 1), bool) for flag in FLAGS})
        return self._tensordict(columns, lanes).set("env_index", torch.tensor(lanes))

    def _tensordict(self, columns: Mapping[Key, np.ndarray[Any, Any]], lanes: Sequence[int]) -> TensorDictBase:
        observation = self._lane_workers.spec.observation
        loose = {key: observation[key] for key in columns if key in observation and observation[key].loose}
        leaves = {key: torch.from_numpy(array) for key, array in columns.items() if key not in loose}
        if not loose:
            return TensorDict(tree_of(leaves), batch_size=[len(lanes)], device=self.device)
        cells = {key: ObjectColumn(leaf, columns[key], True).clone() for key, leaf in loose.items()}
        return frame({**leaves, **cells}, loose, len(lanes), self.device)

    def _lanes_for(self, td: TensorDictBase | None, env_index: Any) -> list[int]:
        if td is not None and not isinstance(td, TensorDictBase):
            raise WrongArgument(f"tensordict must be a TensorDict, got {type(td).__name__}")
        if env_index is None and td is not None:
            env_index = td.get("env_index", None)
        lanes = list(range(self.num_envs)) if env_index is None else _numbers(env_index, self.num_envs)
        if td is not None and td.ndim and len(lanes) != td.batch_size[0]:
            raise SpecMismatch(f"{len(lanes)} envs are sent to, but the tensordict is {list(td.batch_size)}")
        return lanes

    def _actions(self, td: TensorDictBase, lanes: Sequence[int]) -> dict[Key, np.ndarray[Any, Any]]:
        values = {}
        for key in self._lane_workers.spec.action:
            value = td.get(key, None)
            if value is None:
                raise WrongArgument(f"a step needs {show(key)} in the tensordict; it holds {list(td.keys(True))}")
            values[key] = value.detach().cpu()
        looks = {key: Leaf(tuple(value.shape[1:]), value.dtype) for key, value in values.items()}
        if looks != self._action:
            if self._orders or STEP_SOME in self._busy.values():  # answers not received yet lie in the row, too
                raise WrongState(
                    "these actions have other shapes or types than those sent before; receive the envs that were "
                    "sent to first"
                )
            self._action = None  # until every env has accepted it
            self._lane_workers.expect(looks)
            self._action = looks
        return {key: value.numpy() for key, value in values.items()}

    def _use_by_hand(self) -> None:
        """Refuse what only a collector may do; wait for steps that a collector has begun, and forget them."""
        if self.is_closed:
            raise WrongState(f"{type(self).__name__} is closed; make a new one")
        if (action := self._lane_workers.on_failure.action) != "raise":
            raise UsageError(
                f"on_failure={action!r} drops the step in which an env fails. Only a collector can mask such "
                f"steps; use on_failure='raise' when you call the pool yourself"
            )
        if self._failure is not None:
            raise WrongState(f"{type(self).__name__} has failed: {self._failure}; close it and make a new one")
        if self.lanes_env.driver is not None:
            with self._noting_failure():
                self._lane_workers.settle()
            self._clear_orders()
            self._begun[:] = False
            self.lanes_env.driver = None

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Remember a failure, so that later calls refuse: other envs' answers may be lost, and would never come."""
        try:
            yield
        except ReapError as error:
            self._failure = str(error).partition("\n")[0]
            raise

    def _check_all_idle(self, what: str) -> None:
        if self._busy:
            lane = min(self._busy)
            raise WrongState(
                f"{what}() is for all envs, but env {lane} has not been received since it was sent to; "
                f"call {self._receiver(lane)} first"
            )


def _numbers(env_index: Any, count: int) -> list[int]:
    """Return the numbers of envs, given as one, several, a tensor, or whatever a tensordict stores them in."""
    given = env_index.tolist() if hasattr(env_index, "tolist") else env_index
    several = isinstance(given, Iterable) and not isinstance(given, str)
    lanes = [n.item() if hasattr(n, "item") else n for n in given] if several else [given]
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < count for n in lanes):
        raise UsageError(f"env_index must hold numbers between 0 and {count - 1}, got {lanes}")
    if len(set(lanes)) != len(lanes):
        raise UsageError(f"env_index names an env twice: {lanes}")
    return lanes


def _seeds(given: Any, count: int) -> list[int]:
    """Return a checked seed for each env."""
    seeds = given.tolist() if hasattr(given, "tolist") else given
    seeds = [seeds] if isinstance(seeds, int) else list(seeds)
    if len(seeds) != count:
        raise UsageError(f"seeds must hold one number for each env that is sent to, {count} here; got {len(seeds)}")
    return [chain(seed, 1)[0][0] for seed in seeds]


def _rows_of(given: Sequence[tuple[TensorDictBase, int]]) -> TensorDictBase:
    """Return these rows of several tensordicts as one tensordict, in this order."""
    sources: dict[int, tuple[TensorDictBase, list[int], list[int]]] = {}
    for n, (td, row) in enumerate(given):
        _, rows, places = sources.setdefault(id(td), (td, [], []))
        rows.append(row)
        places.append(n)
    parts = [td[rows] for td, rows, _ in sources.values()]
    if len(parts) == 1:
        return parts[0]
    order = torch.argsort(torch.tensor([n for _, _, places in sources.values() for n in places]))
    return torch.cat(parts)[order]
