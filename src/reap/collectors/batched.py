"""AsyncBatchedCollector: envs in threads or processes, and one policy here that acts for the envs that are ready.

    envs in threads or processes ──► ready ──► one forward for all of them ──► actions ──► envs
                                       └──► frames in the order in which they came ──► batch [frames_per_batch]

The collecting loop itself batches the requests: there is no second thread between envs and policy, and no queue.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from typing_extensions import Self, Unpack

from reap._system.affinity import Masks, mask
from reap.arguments import count, flag, one_of, whole
from reap.collectors.keywords import BatchedCollectorOptions
from reap.collectors.options import WORKERS_ONLY, is_list, read_options, shows_options
from reap.collectors.parts.arrangements import Arrangement
from reap.collectors.plans import EnvMaker
from reap.collectors.single import Collector
from reap.core.policy import rand_step_as_policy
from reap.core.slot import VERSION
from reap.core.worker import Plan
from reap.envs import AsyncEnvPool
from reap.errors import UsageError, WrongArgument
from reap.spec import AnyKey, Key, as_key, show

# Options that are handed to `AsyncEnvPool`, under the same names.
_POOL_OPTIONS = (
    *("create_env_kwargs", "max_frames_per_traj", "num_sub_threads", "start_method", "timeout"),
    *("on_failure", "max_restarts", "restart_window", "on_restart"),
)
# Options that need workers with policies of their own, batches with equally many frames of each lane, or lanes in step.
UNSUPPORTED = (WORKERS_ONLY - {"num_sub_threads", "start_method", "timeout"}) | {
    "compact_obs",
    "interruptor",
    "reset_when_done",
    "return_same_td",
    "set_truncated",
}
# Accepted and ignored, so that scripts run unchanged: they tune queues and threads that this collector does not have.
_WITHOUT_EFFECT = (
    "server_timeout",
    "transport",
    "env_exchange",
    "transition_chunk_size",
    "policy_backend",
    "weight_sync",
    "weight_sync_model_id",
    "verbose",
)


def _attributes(name: str, config: Any, members: Sequence[str]) -> list[Any]:
    """Return these attributes of a config object; raise if it lacks one."""
    lacking = [one for one in members if not hasattr(config, one)]
    if lacking:
        raise WrongArgument(f"{name} must be an object with {', '.join(members)}; {config!r} has no {lacking[0]}")
    return [getattr(config, one) for one in members]


def _refuse_both(name: str, others: Sequence[str], given: Sequence[Any]) -> None:
    also = [other for other, value in zip(others, given) if value is not None]
    if also:
        raise UsageError(f"{name} already sets {' and '.join(also)}; give only one of them")


def _check_parts(name: str, create_env_fn: Any, policy: Any, options: Mapping[str, Any]) -> None:
    """Raise unless there are envs, exactly one policy, and, if there is a buffer, one that stores single frames."""
    factory = options.get("policy_factory")
    if not is_list(create_env_fn) or not create_env_fn:
        raise WrongArgument(f"create_env_fn must be a list with one factory per env, got {create_env_fn!r}")
    if policy is not None and factory is not None:
        raise WrongArgument("give policy or policy_factory, not both")
    if policy is None and factory is None:
        raise WrongArgument("give policy or policy_factory; RandomPolicy() takes random actions")
    dims = getattr(getattr(options.get("replay_buffer"), "storage", None), "ndim", 1)  # TorchRL's have a number
    if dims > 1:
        raise UsageError(
            f"replay_buffer stores rows of {dims} dimensions, but {name} delivers frames of many envs in one; "
            f"give its storage ndim=1"
        )


def _batch_sizes(config: Any, fewest: int | None, most: int | None, server_timeout: Any) -> tuple[int, int]:
    """Return the fewest and the most envs for which one call of the policy computes actions."""
    if config is not None:
        _refuse_both(
            "server_config", ("max_batch_size", "min_batch_size", "server_timeout"), (most, fewest, server_timeout)
        )
        most, fewest = _attributes("server_config", config, ("max_batch_size", "min_batch_size"))
    fewest, most = 1 if fewest is None else fewest, 64 if most is None else most
    for what, size in (("min_batch_size", fewest), ("max_batch_size", most)):
        count(what, size)
    if fewest > most:
        raise UsageError(f"min_batch_size is {fewest}, above max_batch_size, which is {most}")
    return fewest, most


def _devices(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device options that a `device_config` holds."""
    places = ("policy_device", "env_device", "storing_device", "output_device")
    _refuse_both("device_config", ("device", *places), [options.get(one) for one in ("device", *places)])
    *chosen, output = _attributes("device_config", config, places)
    chosen[1] = output if chosen[1] is None else chosen[1]  # the policy's output goes to the envs, so to their device
    return dict(zip(places, chosen))


def _checked_key(key: Any) -> Key:
    if not isinstance(key, (str, tuple)) or not key or not all(isinstance(part, str) and part for part in as_key(key)):
        raise WrongArgument(f"policy_version_key must be a key, a string or a tuple of them, or None; got {key!r}")
    return as_key(key)


class _FrameStream(Arrangement):
    """Delivers frames in the order in which they came. `version_key`: the key of their version; None: the usual one."""

    cuts = True  # frames may be cut anywhere, since envs have no fixed share of a batch

    def __init__(self, version_key: Key | None) -> None:
        self._version_key = version_key

    def rename(self, batch: TensorDictBase, worker: int = 0) -> None:
        if self._version_key is not None:
            for root in ((), ("next",)):
                batch.rename_key_((*root, *VERSION), (*root, *self._version_key))

    def split(self, batch: TensorDictBase) -> TensorDictBase:
        order = torch.argsort(batch["collector", "traj_ids"], stable=True)
        return super().split(batch[order])


@shows_options(without=UNSUPPORTED)
class AsyncBatchedCollector(Collector):
    """Collects from many envs at once; the policy acts for the envs that are ready.

    >>> collector = AsyncBatchedCollector(
    ...     create_env_fn=[lambda: GymEnv("CartPole-v1")] * 8, policy=policy, frames_per_batch=200, total_frames=10_000
    ... )
    >>> for batch in collector:
    ...     batch["env_index"]                        # the env of each frame

    A batch is a TensorDict `[frames_per_batch]` of frames in the order in which they came: each env's frames are in
    order of time, and a slow env does not delay the others. The last batch is cut at `total_frames`.

    Args:
        create_env_fn: a list with one factory (or Gymnasium id) for each env.
        policy: as for `Collector`; it acts in this process. Give either this or `policy_factory`.
        max_batch_size: the most envs that one call of the policy acts for; None: 64. It is never more than half of the
            envs (rounded up), so that the others step meanwhile, unless `min_batch_size` is larger.
        min_batch_size: the fewest; None: 1.
        backend: another name for `env_backend`, which takes precedence; None: "threading".
        env_backend: "threading" for envs that wait, "multiprocessing" for envs that compute; None: what `backend` says.
        server_config: an object with `max_batch_size` and `min_batch_size`, in place of these two (TorchRL's
            `InferenceServerConfig`); its other settings are ignored, as there is no server.
        device_config: an object with `policy_device`, `env_device`, `output_device` and `storing_device`, in place of
            these options (TorchRL's `InferenceDeviceConfig`).
        policy_version: the version number of the first weights.
        policy_version_key: the key of a frame's policy version; None: frames have none.
        envs_per_worker: how many envs share a thread or process, which steps them one after another.
        worker_threads: with processes: step each env in a thread of its own there, not one after another.
        yield_completed_trajectories: deliver whole episodes `[length]`, one at a time, as they end.
        worker_affinity: with processes, on Linux: the cores of each process: a list of lists, or a function of its
            number.
        driver_affinity: on Linux: the cores of the thread that collects, while it collects.
        **options: see `reap.collectors.options.Options`.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Always create this class: here `backend` chooses where the envs live, not another collector."""
        return object.__new__(cls)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        backend: Literal["threading", "multiprocessing"] | None = None,
        env_backend: Literal["threading", "multiprocessing"] | None = None,
        envs_per_worker: int = 1,
        worker_threads: bool = False,
        yield_completed_trajectories: bool = False,
        worker_affinity: Masks | None = None,
        driver_affinity: Sequence[int] | None = None,
        server_config: Any = None,
        device_config: Any = None,
        policy_version: int = 0,
        policy_version_key: AnyKey | None = "policy_version",
        **keywords: Unpack[BatchedCollectorOptions],
    ) -> None:
        name = type(self).__name__
        options: dict[str, Any] = {**keywords}
        fewest, most = _batch_sizes(server_config, min_batch_size, max_batch_size, options.get("server_timeout"))
        if device_config is not None:
            options.update(_devices(device_config, options))
        for unused in _WITHOUT_EFFECT:
            options.pop(unused, None)
        policy_version = whole("policy_version", policy_version, least=None, none=True) or 0
        version_key = None if policy_version_key is None else _checked_key(policy_version_key)
        if version_key is None and options.setdefault("track_policy_version", False):
            raise UsageError(
                "policy_version_key=None delivers no version; leave track_policy_version out, or set it to False"
            )
        one_of("backend", backend, ("threading", "multiprocessing"), none=True)
        one_of("env_backend", env_backend, ("threading", "multiprocessing"), none=True)
        flag("yield_completed_trajectories", yield_completed_trajectories)
        cores = None if driver_affinity is None else mask("driver_affinity", driver_affinity)
        _check_parts(name, create_env_fn, policy, options)
        if yield_completed_trajectories:
            if options.get("trajs_per_batch") is not None or options.get("split_trajs"):
                raise UsageError(
                    "yield_completed_trajectories delivers one episode at a time; leave trajs_per_batch and "
                    "split_trajs out"
                )
            options.update(trajs_per_batch=1, traj_format="cat")
        options.setdefault("track_policy_version", True)
        settings = read_options(name, options, without=UNSUPPORTED)
        policy = rand_step_as_policy(policy)
        self._prepare(settings)
        pool = functools.partial(
            AsyncEnvPool,
            list(create_env_fn),
            backend=settings.workers or env_backend or backend or "threading",
            envs_per_worker=envs_per_worker,
            worker_threads=worker_threads and settings.workers is None,
            min_ready=fewest,
            max_ready=most,
            worker_affinity=None if settings.workers == "inline" else worker_affinity,
            **{name: getattr(settings, name) for name in _POOL_OPTIONS},
        )
        make_env = EnvMaker(pool, None, None, settings.failure_dir)
        self._start_worker(policy, make_env, lambda lanes: settings.frames_per_batch, cores)
        try:
            self._name_versions(policy_version, version_key)
        except BaseException:
            self._backend.close()
            raise
        self.frames_per_batch = self.requested_frames_per_batch = settings.frames_per_batch

    def _adjust_plan(self, plan: Plan) -> Plan:
        return dataclasses.replace(plan, stream=True, masked=False)  # no mask: dropped envs leave no gaps in a stream

    def _shape(self) -> str:
        envs = self._backend.worker.lanes
        return f"{envs} env{'s' * (envs > 1)}, as they are ready: "

    def _name_versions(self, first: int, key: Key | None) -> None:
        """Count versions from `first`, deliver them under `key`, and raise if a batch has another entry there."""
        self._weights.version = self._backend.worker.loop.version = first
        name = key if self.options.track_policy_version and key != VERSION else None
        others = self._backend.worker.layout.columns
        if name is not None and any(name[: len(other)] == other[: len(name)] for other in others):
            raise UsageError(f"policy_version_key {show(name)} is already the name of another entry in the batch")
        self._pipeline.arrangement = _FrameStream(name)
