"""TorchRL's ParallelEnv on reap's env processes.

    collecting   row of a slot ──► reap's env processes ──► the same row        (ProcessLanes; without TorchRL)
    by hand      env.reset(), env.step(td), env.state_dict(), env.any_attribute
                    └──► TorchRL's own parent code ──► Channel ──► the same processes, which answer as its workers would

The env object stays the user's, with reap's processes as its workers. TorchRL's workers are never started; if
`set_seed` has started them already, and nothing else was done with them, reap's processes replace them with the same
seeds. When the lanes are closed, the env is TorchRL's own again.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from reap._foreign import torchrl_internals
from reap.core.capture.recorder import NotCaptured
from reap.core.columns.batch_columns import layout_by_hand
from reap.core.slot import Row, RowKeys
from reap.envs.parallel.process_lanes import ProcessLanes
from reap.envs.torchrl.by_hand import SEEDED_BY_RESET, replaced, taken_back
from reap.envs.torchrl.captured import Array, Base
from reap.envs.torchrl.rows import OfTorchRL, looks_like
from reap.errors import UsageError, WorkerError, WrongState
from reap.spec import Key, Leaf, as_key, show_keys

_MOVES = ("reset", "step", "step_and_maybe_reset", "seed")  # commands that move the lanes


class NotTakenOver(UsageError):
    """This ParallelEnv is left to TorchRL, for the reason in the message."""


class NeedsOwnProcess(NotTakenOver):
    """Each of these envs needs a process of its own, since they may share state inside one."""


class Recipe(NamedTuple):
    """How a process builds the env of one of TorchRL's workers."""

    make: Callable[..., Any]
    keywords: Mapping[str, Any]
    seed: int | None  # the seed that TorchRL's worker was given, if any
    running: bool  # whether TorchRL's worker was running already
    shared: bool  # whether the env shares its process with others
    below: bool  # whether there are transforms around TorchRL's ParallelEnv


def parallel_lanes(env: Any, *, below: bool = False) -> ParallelLanes:
    """Return a TorchRL ParallelEnv as lanes in reap's processes; `NotTakenOver` if the results could differ.

    `below`: whether there are transforms around it.
    """
    running = _check_takeover(env)
    seeds = torchrl_internals.seeds_of(env) if running else [None] * env.num_workers
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lanes = _start_lanes(env, min(env.num_workers, most), seeds, running, below)
    except NeedsOwnProcess:
        lanes = _start_lanes(env, env.num_workers, seeds, running, below)
    if running:
        env.close()
    lanes.take_over()
    return lanes


def _check_takeover(env: Any) -> bool:
    """Return whether TorchRL's workers are running; `NotTakenOver` for reasons known before any env is built."""
    if not torchrl_internals.is_known_parallel(type(env)):
        raise NotTakenOver("this version of TorchRL manages its workers differently")
    if replaced(env, torchrl_internals.MOVES_OF_PARALLEL):
        raise NotTakenOver("one of its methods has been replaced")
    if not torchrl_internals.owns_workers(env):
        raise NotTakenOver("it shares the workers of another ParallelEnv")
    if not torchrl_internals.has_fixed_memory(env):
        raise NotTakenOver("its workers' results have no fixed place in memory")
    if len(env.batch_size) > 2:
        raise NotTakenOver("the lanes of each of its workers are in several dimensions")
    if env.device is not None and env.device.type != "cpu":
        raise NotTakenOver(f"its results are on {env.device}")
    if not all(map(callable, env.create_env_fn)):
        raise NotTakenOver("it was made from env objects, not factories")
    if env.is_closed:
        return False
    if not torchrl_internals.is_unmoved(env):
        raise NotTakenOver("its workers were running already, and have made steps or resets")
    return True


def _start_lanes(env: Any, processes: int, seeds: Sequence[int | None], running: bool, below: bool) -> ParallelLanes:
    from reap.envs.torchrl.parallel_child import TorchRLChild  # late: it imports this module

    shared = processes < env.num_workers
    recipes = [
        Recipe(make, dict(keywords), seed, running, shared, below)
        for make, keywords, seed in zip(env.create_env_fn, env.create_env_kwargs, seeds)
    ]
    bounds = np.linspace(0, len(recipes), processes + 1).astype(int)
    shares: list[Any] = [recipes[a:b] for a, b in itertools.pairwise(bounds)]
    start = "spawn" if torchrl_internals.is_spawned(env) else "forkserver"
    try:
        return ParallelLanes(env, shares, child=TorchRLChild, start_method=start, threads=env.num_sub_threads)
    except NotTakenOver:
        raise
    except (UsageError, WorkerError) as cause:  # envs that differ, factories only a fork can pass on: TorchRL may try
        raise NotTakenOver(f"its envs could not be built in a process of reap: {cause}") from cause


class ParallelLanes(OfTorchRL, ProcessLanes):
    """The envs of TorchRL's ParallelEnv `outer`, as lanes in reap's processes."""

    _rebuilds = False

    def __init__(self, outer: Any, shares: Sequence[Any], **options: Any) -> None:
        self.outer = None  # first: `close` reads it
        super().__init__(shares, **options)
        if not looks_like(self.spec, outer):
            self.close()
            raise NotTakenOver("its workers' results have other shapes or types than its specs say")
        self.outer = outer
        size = tuple(outer.batch_size)
        look = replace(self.spec.look, contiguous=True, dims=size if len(size) > 1 else None)
        self.spec = replace(self.spec, look=look)  # batches as from TorchRL's collectors
        self._each = self.spec.lanes // outer.num_workers  # lanes per worker
        self.draws = False
        self._process_of = [(process, n) for process, share in zip(self.processes, shares) for n in range(len(share))]
        self._calls: dict[int, tuple[Any, int]] = {}  # by worker: a command of TorchRL's and the number of its call
        self.stepped_by: str | None = None  # what made the last step: a "row", or a "command" of TorchRL's
        self._captures = True
        self._carried = frozenset(map(as_key, outer.full_state_spec.keys(True, True)))
        self._passed: list[Key] = []  # those policy outputs that are next values of what the workers carry
        self._passed_at: list[tuple[int, int]] = []  # the index of each among outputs, and among observations

    def take_over(self) -> None:
        """Make reap's processes the workers of TorchRL's object."""
        env, count = self.outer, self.outer.num_workers
        torchrl_internals.give_workers(
            env,
            [Channel(self, n) for n in range(count)],
            [WorkerProcess(self, n) for n in range(count)],
            [LoadedEvent(self, n) for n in range(count)],
            {name: _ReplacedMethod(self, name) for name in (torchrl_internals.SHUT_DOWN, torchrl_internals.WAIT)},
        )
        vars(env)[SEEDED_BY_RESET] = True

    def let_go(self) -> None:
        """Undo `take_over`: the env object is TorchRL's own again, and closed."""
        env, self.outer = self.outer, None
        if env is None or not isinstance(vars(env).get(torchrl_internals.SHUT_DOWN), _ReplacedMethod):
            return
        taken_back(env)
        vars(env).pop(SEEDED_BY_RESET, None)
        torchrl_internals.take_workers(env)

    # ---- TorchRL's commands -----------------------------------------------------------------------------------------

    def send_command(self, worker: int, command: Any, data: Any) -> None:
        """Send one of TorchRL's commands to the process of a worker."""
        shared = self.outer.shared_tensordicts[worker]
        root = shared.exclude("next")
        if command == "reset":
            keys, keywords = data
            data = (root.select(*keys, strict=False).clone() if keys else None), keywords
        elif command in ("step", "step_and_maybe_reset"):
            passed = (data or {}).get("next_td_passthrough_keys")
            data = root.clone()
            if passed is not None:
                data.set("next", shared.get("next").select(*passed).clone())
        process, number = self._process_of[worker]
        if process.owes:
            self._settle(process)
        if command in _MOVES:
            self._fresh[worker * self._each : (worker + 1) * self._each] = False
            self.stepped_by = "command" if command.startswith("step") else None
        self._calls[worker] = command, process.call("torchrl", number, command, data)

    def receive_answer(self, worker: int) -> Any:
        """Wait for a worker's answer and return it; results of steps and resets go to where TorchRL looks for them."""
        command, number = self._calls.pop(worker)
        (value,) = self._process_of[worker][0].answer(number)
        env = self.outer
        shared = env.shared_tensordicts[worker]
        if command == "reset":
            shared.update_(value, keys_to_update=torchrl_internals.reset_keys(env))
        elif command in ("step", "step_and_maybe_reset"):
            next_, root = value
            shared.get("next").update_(next_)
            shared.exclude("next").update_(root)
        elif command == "seed":
            return "seeded", value
        name = "_".join(command) if isinstance(command, (tuple, list)) else command
        return (name if command == "state_dict" else f"{name}_done"), value

    def receive_all(self) -> None:
        """Wait for all workers that were sent a command."""
        for worker in list(self._calls):
            self.receive_answer(worker)

    # ---- the env ----------------------------------------------------------------------------------------------------

    @property
    def captures(self) -> bool:
        return self._captures

    @captures.setter
    def captures(self, captures: bool) -> None:
        if captures != self._captures:
            self._captures = captures
            for process in self.processes:
                self._call(process, "capture", captures)

    def set_policy_keys(self, outputs: Sequence[Key]) -> None:
        told = [key for key in outputs if key in self._carried]
        if told:
            raise UsageError(
                f"the policy writes {show_keys(told)}, which TorchRL's ParallelEnv would pass to its workers "
                f"as their own state; write it under another name, or use SerialEnv"
            )
        passed = self._next_values(outputs)
        observed = list(self.spec.observation)
        self._passed_at = [(list(outputs).index(key), observed.index(key[1:])) for key in passed]
        if passed != self._passed:
            for process in self.processes:
                self._call(process, "policy_keys", passed)
            self._passed = passed

    def outputs_read(self, outputs: Collection[Key]) -> Collection[Key]:
        return [*self.spec.action, *self._next_values(outputs)]

    def _next_values(self, outputs: Collection[Key]) -> list[Key]:
        """Return the policy outputs that are next values of what the workers carry: recurrent states."""
        return [key for key in outputs if key[0] == "next" and key[1:] in self._carried]

    def explain(self) -> str:
        inside = self._call(self.processes[0], "explain")
        return f"TorchRL's ParallelEnv in {len(self.processes)} env processes of reap's; there {inside}"

    def send(self, lanes: Sequence[int], row: Row) -> None:
        self.stepped_by = "row"
        if row.place is None and self._passed:
            shared = self.shared_row()
            for output, observed in self._passed_at:
                shared.next[observed][...] = row.outputs[output].reshape(shared.next[observed].shape)
        super().send(lanes, row)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.outer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.outer.load_state_dict(state)

    def close(self) -> None:
        super().close()
        if self._owner == os.getpid():
            self.let_go()


class Channel:
    """What TorchRL takes for the pipe to one of its workers."""

    def __init__(self, lanes: ParallelLanes, worker: int) -> None:
        self._lanes, self._worker = weakref.ref(lanes), worker

    def send(self, message: tuple[Any, Any]) -> None:
        self._open_lanes().send_command(self._worker, *message)

    def recv(self) -> Any:
        return self._open_lanes().receive_answer(self._worker)

    def close(self) -> None:
        pass

    def _open_lanes(self) -> ParallelLanes:
        lanes = self._lanes()
        if lanes is None or lanes.outer is None:
            raise WrongState("the collector that used this ParallelEnv is shut down, and its processes have ended")
        return lanes


class LoadedEvent(Channel):
    """What TorchRL takes for the event a worker sets when it has loaded a state."""

    def wait(self, timeout: float | None = None) -> bool:
        self.recv()
        return True

    def clear(self) -> None:
        pass


class WorkerProcess(Channel):
    """What TorchRL takes for a worker's process. If the process has died, the next command raises reap's error."""

    _closed = False
    exitcode = None

    def is_alive(self) -> bool:
        return self._lanes() is not None

    @property
    def pid(self) -> int | None:
        """The id of the process that holds the worker's env."""
        pid: int | None = self._open_lanes()._process_of[self._worker][0].child.pid
        return pid


class _ReplacedMethod:
    """Replaces one of the env object's methods while its workers are reap's; the object cannot be copied meanwhile."""

    def __init__(self, lanes: ParallelLanes, name: str) -> None:
        self._lanes, self._name = weakref.ref(lanes), name

    def __call__(self, workers: Sequence[int] = ()) -> None:
        lanes = self._lanes()
        if lanes is not None:
            lanes.close() if self._name == torchrl_internals.SHUT_DOWN else lanes.receive_all()

    def __reduce__(self) -> Any:
        raise TypeError("a ParallelEnv a collector is using cannot be pickled or copied; shut the collector down first")


class ParallelBase(Base):
    """A ParallelEnv below transforms, with reap's processes as its workers."""

    lanes: ParallelLanes

    def __init__(self, env: Any, lanes: ParallelLanes) -> None:
        super().__init__(env, lanes)
        self._memory: tuple[Any, list[Row], dict[Key, np.ndarray[Any, Any]]] | None = None

    def begin(self, lanes: Sequence[int]) -> Sequence[Array]:
        """Reset `lanes`, and return the other lanes as TorchRL's ParallelEnv does: as their last step has left them.

        In a worker that resets some of its lanes, the other lanes are zeros.
        """
        if self.given:
            return super().begin(lanes)
        if self.lanes.stepped_by == "row":
            last = dict(zip(self.keys, self._rows[self._turn][1]))
            values = [torch.from_numpy(last[key]) for key in self.reset_keys]
        elif self.lanes.stepped_by == "command":
            next_ = self.env.shared_tensordict_parent.get("next")
            values = [next_.get(key) for key in self.reset_keys]
        else:
            values = []
        for mine, value in zip(self.first, values):
            mine.copy_(value)
        self.lanes.stepped_by = None
        if len(self.size) > 1:
            workers = sorted({lane // self.size[1] for lane in lanes})
            for mine in self.first:
                mine[workers] = 0
        return super().begin(lanes)

    def prepare(self) -> None:
        """Make room for the results of two steps in memory that the processes share."""
        spec, dims = self.lanes.spec, len(self.size)
        keys = [as_key(key) for key in self.env.action_keys]
        action = {key: Leaf(tuple(a.shape[dims:]), a.dtype) for key, a in zip(keys, self.asked)}
        self.lanes.expect(action)
        if self._memory is None or self._memory[0] != action:
            slot = self.lanes.make_slot(layout_by_hand(spec, action, 2), 0)
            self._memory = action, list(slot.cut(RowKeys(spec), self.lanes.first)), slot.arrays
        _, rows, arrays = self._memory
        self._rows = []
        self.fresh = self.fresh or len(self.read) > 1  # there is room for two calls only
        for n, row in enumerate(rows):
            found = [arrays[("next", *as_key(key))][n] for key in self.keys]
            results = tuple(array.reshape(*self.size, *array.shape[1:]) for array in found)
            kinds = [(t.shape, t.dtype) for t in map(torch.from_numpy, results)]
            if kinds != [(t.shape, t.dtype) for t in self.stepped]:
                raise NotCaptured("TorchRL's ParallelEnv returns other shapes or types than its envs")
            self._rows.append((row, results, self.lanes.step))

    def _act(self, row: Row, actions: Sequence[Array]) -> None:
        for mine, given in zip(row.action, actions):  # into memory that the processes share
            mine[...] = given.reshape(mine.shape)
