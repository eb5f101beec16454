"""WorkerView: the attributes of a worker that paths can address, named as in TorchRL's worker collectors.

policy.in_keys   env.transform[0].loc   replay_buffer.write_count   interruptor   postproc.critic   stats   state_dict
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reap.core.attribute_path import get_attribute
from reap.errors import UsageError

if TYPE_CHECKING:
    from reap.backends.worker_server import WorkerServer

_FROM_OUTSIDE = ("reset", "set_seed", "load_state_dict", "shutdown", "next", "iterator", "start", "pause", "resume")


class WorkerView:
    """The object that attribute paths start from in a worker. `interruptor`: what may stop its rollouts, or None."""

    closed = False

    def __init__(self, server: WorkerServer, interruptor: Any = None) -> None:
        worker, plan = server.worker, server.worker.plan
        self.policy, self.env, self.worker_idx = worker.model, worker.env.as_given, server.index
        self.interruptor = interruptor
        self.compiled_policy, self.cudagraphed_policy = plan.compile_policy is not None, plan.cuda_graphs
        self.exploration_type, self.reset_at_each_iter = plan.exploration, plan.reset_at_each_iter
        self.frames_per_batch = worker.layout.steps
        self.requested_frames_per_batch = worker.layout.frames
        self.policy_version = worker.loop.version
        self.pre_collect_hook, self.post_collect_hook = server.hooks
        writer = server.writer
        self.replay_buffer: Any = None if writer is None else writer.buffer
        self.postproc: Any = None if writer is None else writer.postproc
        self._server = server

    def __getattr__(self, name: str) -> Any:
        if name in _FROM_OUTSIDE:
            raise UsageError(f"{name!r} is for all workers at once: call it on the collector itself")
        raise AttributeError(f"a worker has no {name!r}")

    def explain(self) -> str:
        """Return a description of how its env and policy are run."""
        return self._server.worker.explain()

    def apply(self, function: Callable[[WorkerView], Any]) -> Any:
        """Call a function with this view and return its result."""
        return function(self)

    def get_model(self, model_id: str) -> Any:
        """Return the model at this path."""
        return get_attribute(self, model_id)

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of its policy."""
        return get_attribute(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of its env."""
        return get_attribute(self.env, attr)

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer it writes to."""
        return get_attribute(self.replay_buffer, attr)

    def get_policy_version(self) -> int:
        """Return the version of the weights it acts with."""
        return self.policy_version

    def stats(self) -> dict[str, Any]:
        """Return its counts."""
        stats = self._server.worker.stats
        return {"frames": stats.frames, "batches": stats.rollouts, **self._server.counts()}

    def state_dict(self) -> dict[str, Any]:
        """Return its part of the collector's `state_dict`."""
        return self._server.do_state()
