"""Options: every option of every collector, declared, documented and checked in one place."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, TypeVar

import torch
from tensordict.nn import InteractionType

from reap.arguments import MOST, flag, function, mapping, one_of, seconds, whole
from reap.core.device.devices import named_device
from reap.core.policies.exploration import exploration_type
from reap.errors import UsageError, WrongArgument, nearest, warn
from reap.failures import FailurePolicy, failure_policy
from reap.spec import AnyKey, Key, as_key
from reap.weight_update import WeightSyncScheme, WeightTransport, as_scheme
from reap.weights.strategy import own_strategy

_LEGACY = {
    "devices": "device",
    "passing_devices": "storing_device",
    "exploration_mode": "exploration_type",
}
_MODELS = ("policy", "env", "postproc")  # where a model's path can begin, for weights that are sent to it
HOOKS = ("pre_collect_hook", "post_collect_hook")
_ONLY_IN_TORCHRL = {"collector_class", "weight_recv_schemes"}
# Options of collectors whose workers are processes of their own.
WORKERS_ONLY = frozenset(
    {
        "cat_results",
        "update_at_each_batch",
        "preemptive_threshold",
        "max_lag",
        "num_sub_threads",
        "num_threads",
        "init_fn",
        "hooks_in_workers",
        "timeout",
        "start_method",
    }
)
# Those of `WORKERS_ONLY` that `ParallelEnv` takes too.
_PARALLEL_ENV_OPTIONS = ("timeout", "start_method", "num_sub_threads")
# Hints for unknown names, where the most similar option is not the one that is meant.
_WORKERS = "; worker processes are MultiSyncCollector([make_env] * 2, …), or Collector(…, num_collectors=2)"
_HINTS = {"num_workers": _WORKERS, "n_workers": _WORKERS}
_FLAGS = (
    "capture",
    "deterministic",
    "reset_at_each_iter",
    "reset_when_done",
    "split_trajs",
    "extend_buffer",
    "compact_obs",
    "track_traj_ids",
    "track_episodes",
    "return_same_td",
    "set_truncated",
    "trust_policy",
    "update_at_each_batch",
    "hooks_in_workers",
)
T = TypeVar("T")
# Accepted and ignored, so that scripts run unchanged: they tune TorchRL's implementation and do not change the data.
_WITHOUT_EFFECT = ("use_buffers", "no_cuda_sync", "auto_register_policy_transforms")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of all collectors.

    Args:
        frames_per_batch: frames in a batch, over all lanes; if the lanes run in step, rounded up to a whole number of
            steps.
        total_frames: stop after this many; negative or None: never. The last batch is whole (an
            `AsyncBatchedCollector` cuts it).
        policy_factory: makes the policy, in place of `policy`.
        out_keys: the keys of the parts of the tuple that a function of tensors returns, the action among them.
        create_env_kwargs: keyword arguments for the env's factory.
        device: fills `policy_device`, `env_device` and `storing_device` where they are not given.
        policy_device: where the policy runs; it is copied there only if it lives elsewhere.
        env_device: where the env's tensors live. Gymnasium envs step on the CPU in any case.
        storing_device: where batches are delivered.
        max_frames_per_traj: truncate episodes at this length and add `step_count`; -1, 0 or None: no limit.
        init_random_frames: take random actions until this many frames were delivered.
        reset_at_each_iter: begin new episodes with every batch.
        reset_when_done: False: a lane whose episode ends rests until the batch is complete; its further rows are masked
            out.
        split_trajs: deliver `[trajectories, time]`, zero-padded, with `("collector", "mask")`.
        trajs_per_batch: deliver this many complete episodes at a time, in the order in which they end.
        trajs_per_write: how many episodes go into the replay buffer in one write; None: all that have ended.
        traj_format: with `trajs_per_batch`: "padded" `[N, longest]` with a mask, or "cat" `[steps]`.
        replay_buffer: where batches go; iterating then yields None. See docs/background.md.
        extend_buffer: False writes to the buffer step by step.
        compact_obs: store each observation once; `reap.trajectories.with_next` rebuilds `("next", observation)`.
        contiguous: True: a batch of several lanes is copied so that its memory has lanes first, and `view(-1)` works;
            False: it is a transposed view, without a copy; None: True for TorchRL's envs, False for others.
        postproc: called with each batch; what it returns is delivered.
        track_traj_ids: False leaves `("collector", "traj_ids")` out.
        track_policy_version: stamp each frame with the version of the weights that produced its action; a
            `PolicyVersion` counts the updates as well.
        track_episodes: add `("collector", "episode_return")` and `("collector", "episode_length")`: return and length
            of each frame's episode so far, the frame included.
        gamma: the discount of the `discounted_return` that `episodes()` then adds to its records; None: it adds none.
            Batches do not change.
        exploration_type: how probabilistic policies sample; RANDOM by default.
        return_same_td: deliver the same object every time, with new contents; copy what you keep.
        set_truncated: mark the last step of every batch as truncated.
        interruptor: an object whose `collection_stopped()` is called after each step; True ends the rollout early.
        compile_policy: run the policy through torch.compile; a dict holds its arguments.
        cudagraph_policy: replay CUDA graphs: of the policy's step, or of whole rollouts if env and policy are on one
            GPU.
        trust_policy: True: call the policy with a TensorDict, without examining it.
        deterministic: compute the actions of each lane separately, with random numbers of its own: a lane's data
            depends on its seed (`set_seed`), not on how many lanes share a process. See docs/reproducing.md.
        capture: record once which torch calls the policy and TorchRL's transforms make, and replay these at each step
            if that gives the same results. False calls policy and transforms at every step. `explain()` says what is
            captured.
        cat_results: how workers' rollouts are joined: "stack" (the default), or along which dimension: 0 (lanes),
            -1 (time).
        update_at_each_batch: send the policy's weights to the workers before each batch.
        preemptive_threshold: a batch waits for this share of the workers; the others stop early, and the rows they
            lack are masked.
        max_lag: drop rollouts made by weights more than this many updates old; `stats()` counts the dropped frames.
        num_sub_threads: the number of torch threads in each worker.
        num_threads: accepted and ignored: the number of threads of this process does not change.
        init_fn: called first in each worker.
        weight_sync_schemes: `{"policy": scheme}`, with a scheme of `reap.weight_update` or of TorchRL; None: the
            collector chooses one that suits the policy. Other models are named by their path,
            "env.transform[0].module" or "postproc.critic".
            A single-process collector has no weights to send: `NoWeightSyncScheme` turns `update_policy_weights_` into
            a no-op; other schemes have no effect.
        weight_updater: a legacy updater, or a factory of one, through which weights are pushed.
        timeout: seconds for which a worker that has work may send nothing before it is reported as stuck; None: for
            ever, but after a minute the log says where it is. A worker sends one message per rollout (of an
            `AsyncBatchedCollector`, per step): give more than that takes.
        start_method: how workers start, "forkserver" or "spawn".
        on_failure: what to do when a worker dies, raises or is silent for longer than `timeout`: "raise" closes the
            collector and raises the error; "restart" starts another worker in its place; "drop" continues without it.
            See docs/failures.md.
        max_restarts: with "restart": how many workers may be started again within `restart_window`; None: any number.
        restart_window: seconds over which restarts are counted.
        on_restart: called with a `reap.collectors.WorkerFailure` after each restart, and when a worker is dropped.
        pre_collect_hook: called before each batch is collected.
        post_collect_hook: called with each batch before it is delivered.
        hooks_in_workers: call both hooks in the workers, each with its own rollouts, instead of here with whole
            batches.
        worker_idx: a number of your own for this collector, kept as its attribute `worker_idx`.
        failure_dir: a directory; when an env raises or returns invalid values, a file is written there with what
            `reap.testing.replay_failure` needs to repeat the failure. See docs/testing.md.
        workers: "inline": run the workers in this process, one after another, with the same data, so that
            `breakpoint()` and debuggers work in envs and policies; None: run them where the collector usually does. See
            docs/debugging.md.
    """

    frames_per_batch: int
    total_frames: int | None = -1
    policy_factory: Callable[[], Any] | None = None
    out_keys: Sequence[AnyKey] | None = None
    create_env_kwargs: Mapping[str, Any] | None = None
    device: torch.device | str | int | None = None
    policy_device: torch.device | str | int | None = None
    env_device: torch.device | str | int | None = None
    storing_device: torch.device | str | int | None = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    split_trajs: bool | None = None
    trajs_per_batch: int | None = None
    trajs_per_write: int | None = None
    traj_format: Literal["padded", "cat"] | None = None
    replay_buffer: Any = None
    extend_buffer: bool = True
    compact_obs: bool = False
    contiguous: bool | None = None
    postproc: Callable[[Any], Any] | None = None
    track_traj_ids: bool = True
    track_policy_version: Any = False
    track_episodes: bool = False
    gamma: float | None = None
    exploration_type: InteractionType | str | None = InteractionType.RANDOM
    return_same_td: bool = False
    set_truncated: bool = False
    interruptor: Any = None
    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None
    trust_policy: bool | None = None
    deterministic: bool = False
    capture: bool = True
    cat_results: Literal["stack"] | int | None = None
    update_at_each_batch: bool = False
    preemptive_threshold: float | None = None
    max_lag: int | None = None
    num_sub_threads: int = 1
    num_threads: int | None = None
    init_fn: Callable[[], Any] | None = None
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None
    weight_updater: Any = None
    timeout: float | None = None
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    on_failure: Literal["raise", "restart", "drop"] = "raise"
    max_restarts: int | None = 10
    restart_window: float = 600.0
    on_restart: Callable[[Any], Any] | None = None
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
    hooks_in_workers: bool = False
    worker_idx: int | None = None
    failure_dir: Any = None
    workers: Literal["inline"] | None = None

    def __post_init__(self) -> None:
        self._whole("frames_per_batch", least=1)
        for name in ("total_frames", "max_frames_per_traj", "init_random_frames", "worker_idx"):
            most = None if name == "total_frames" else MOST
            least = None if name in ("total_frames", "worker_idx") else -1  # any negative total is without end
            self._whole(name, least=least, most=most, none=True)
        for name in ("postproc", *HOOKS, "policy_factory", "init_fn"):
            function(name, getattr(self, name))
        for name in _FLAGS:
            flag(name, getattr(self, name), none=True)
        self.out_key_tuples  # noqa: B018  # raises if `out_keys` is invalid
        mapping("create_env_kwargs", self.create_env_kwargs)
        for name in ("compile_policy", "cudagraph_policy"):
            value = getattr(self, name)
            if not isinstance(value, (bool, type(None), Mapping)):
                raise WrongArgument(f"{name} must be True, False or a mapping of options, got {value!r}")
        if self.interruptor is not None and not callable(getattr(self.interruptor, "collection_stopped", None)):
            kind = type(self.interruptor).__name__
            raise WrongArgument(f"interruptor needs a method collection_stopped(), got {kind}")
        if self.split_trajs and not self.track_traj_ids:
            raise UsageError("split_trajs=True needs track_traj_ids=True")
        self._check_trajectories()
        self._check_buffer()
        self._check_workers()
        if self.failure_dir is not None:
            if not isinstance(self.failure_dir, (str, os.PathLike)) or not str(self.failure_dir):
                raise WrongArgument(f"failure_dir must be a directory or None, got {self.failure_dir!r}")
            # Workers may have another working directory.
            object.__setattr__(self, "failure_dir", os.path.abspath(self.failure_dir))
        if self.contiguous is not None and not isinstance(self.contiguous, bool):
            raise WrongArgument(f"contiguous must be True, False or None, got {self.contiguous!r}")
        if self.compact_obs and (self.split_trajs or self.return_same_td):
            raise UsageError(
                "compact_obs cannot be combined with split_trajs or return_same_td; split what with_next returns"
            )
        counter = self.track_policy_version
        if not isinstance(counter, bool) and not callable(getattr(counter, "increment_version", None)):
            raise WrongArgument(f"track_policy_version must be True, False or a PolicyVersion, got {counter!r}")
        self._share("gamma")
        exploration_type(self.exploration_type)
        for name in ("device", "policy_device", "env_device", "storing_device"):
            self._device(name)

    def _check_trajectories(self) -> None:
        one_of("traj_format", self.traj_format, ("padded", "cat"), none=True)
        if self.trajs_per_batch is None:
            if self.traj_format == "cat":
                raise UsageError("traj_format='cat' needs trajs_per_batch")
            return
        self._whole("trajs_per_batch", least=1)
        for name, bad in (
            ("split_trajs", True),
            ("track_traj_ids", False),
            ("return_same_td", True),
            ("compact_obs", True),
            ("set_truncated", True),
        ):
            if bool(getattr(self, name)) is bad:
                raise UsageError(
                    f"trajs_per_batch delivers whole episodes with ids; {name}={bad} cannot be combined with it"
                )
        if self.max_lag is not None:
            raise UsageError(
                "max_lag may drop the middle of an episode, but trajs_per_batch needs whole episodes; give one"
            )

    def _check_buffer(self) -> None:
        self._whole("trajs_per_write", least=1, none=True)
        if self.trajs_per_write is not None and (self.trajs_per_batch is None or self.replay_buffer is None):
            raise UsageError("trajs_per_write is for episodes in a buffer; give trajs_per_batch and replay_buffer too")
        if self.replay_buffer is None:
            return
        if self.return_same_td:
            raise WrongArgument("return_same_td delivers batches; with replay_buffer there are none")
        for name in ("postproc", "split_trajs", "trajs_per_batch"):
            if not self.extend_buffer and getattr(self, name):
                raise WrongArgument(f"extend_buffer=False writes step by step; {name} needs whole batches")
        room = getattr(getattr(self.replay_buffer, "_storage", None), "max_size", None)
        if isinstance(room, int) and room < self.frames_per_batch and self.trajs_per_batch is None:
            warn(
                f"the replay buffer has room for {room} frames, and frames_per_batch={self.frames_per_batch}: part of "
                f"each batch is overwritten before it can be sampled"
            )

    def _check_workers(self) -> None:
        self._whole("max_lag", least=0, none=True)
        self._whole("num_sub_threads", least=1)
        self._whole("num_threads", least=1, none=True)
        cat = self.cat_results
        if not (cat is None or (isinstance(cat, str) and cat == "stack")) and (
            isinstance(cat, bool) or not isinstance(cat, int)
        ):
            raise UsageError(f"cat_results must be 'stack' or a dimension like 0 or -1, got {cat!r}")
        self._share("preemptive_threshold")
        schemes = self.weight_sync_schemes
        if schemes is not None:
            if isinstance(schemes, Mapping):
                schemes = {model: as_scheme(scheme) for model, scheme in schemes.items()}
                object.__setattr__(self, "weight_sync_schemes", schemes)
            if not isinstance(schemes, Mapping) or not all(isinstance(s, WeightSyncScheme) for s in schemes.values()):
                raise WrongArgument(f"weight_sync_schemes must map names of models to schemes, got {schemes!r}")
            for name in schemes:
                if str(name).replace("[", ".").split(".")[0] not in _MODELS:
                    raise UsageError(
                        f"weight_sync_schemes names {name!r}; a collector has 'policy', and models by their path in "
                        f"'env' and 'postproc', like 'env.transform[0].module'"
                    )
        seconds("timeout", self.timeout)
        one_of("workers", self.workers, ("inline",), none=True)
        one_of("start_method", self.start_method, ("forkserver", "spawn"))
        if self.failures.action == "drop" and self.compact_obs:
            raise UsageError(
                "on_failure='drop' masks the lanes of a dropped worker, but compact_obs needs complete rows; leave one "
                "out"
            )

    def _whole(self, name: str, *, least: int | None = None, most: int | None = MOST, none: bool = False) -> None:
        object.__setattr__(self, name, whole(name, getattr(self, name), least=least, most=most, none=none))

    def _share(self, name: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value <= 1):
            raise UsageError(f"{name} must lie between 0 and 1, got {value!r}")

    def _device(self, name: str) -> torch.device | None:
        return named_device(name, getattr(self, name))

    @property
    def devices(self) -> tuple[torch.device | None, torch.device | None]:
        """The policy device and the storing device, with defaults from the other device options."""
        common = self._device("device")
        policy = self._device("policy_device") or common
        env = self._device("env_device") or common
        storing = self._device("storing_device") or common
        if storing is None and env is not None and env == policy:
            storing = env
        return policy, storing

    @property
    def device_and_env_device(self) -> tuple[torch.device | None, torch.device | None]:
        """`device` and `env_device` as torch devices; `env_device` is the same as `device` where it is not given."""
        common = self._device("device")
        return common, self._device("env_device") or common

    @property
    def contiguous_batches(self) -> bool | None:
        """`contiguous`; False for rows that no user code sees before a buffer, which copies them anyway."""
        unseen = self.postproc is None and self.post_collect_hook is None
        return False if self.replay_buffer is not None and unseen else self.contiguous

    @property
    def total(self) -> int | float:
        """The number of frames to deliver in all; infinite if there is no limit."""
        return float("inf") if self.total_frames is None or self.total_frames < 0 else self.total_frames

    @property
    def weight_transport(self) -> WeightTransport | None:
        """The weight transport that `weight_sync_schemes` chooses for the policy; None if it chooses none."""
        scheme = (self.weight_sync_schemes or {}).get("policy")
        if scheme is not None and scheme.transport != "none" and own_strategy(scheme.strategy) is not None:
            return "per_worker"  # a user's own strategy may extract anything, which is sent to each worker separately
        return None if scheme is None else scheme.transport

    def strategy(self, model: str = "policy") -> Any:
        """Return the user's own strategy for the weights of this model; None if there is none."""
        scheme = (self.weight_sync_schemes or {}).get(model)
        return None if scheme is None or scheme.transport == "none" else own_strategy(scheme.strategy)

    @property
    def first_weights(self) -> Any:
        """The policy's first weights, given to its scheme before the collector was made; for all, or by worker."""
        scheme = (self.weight_sync_schemes or {}).get("policy")
        return None if scheme is None else scheme.first

    @property
    def failures(self) -> FailurePolicy:
        """The policy for workers that fail."""
        return failure_policy(self.on_failure, self.max_restarts, self.restart_window, self.on_restart)

    @property
    def random_frames(self) -> int:
        """The number of frames to collect with random actions."""
        return max(self.init_random_frames or 0, 0)

    @property
    def out_key_tuples(self) -> list[Key] | None:
        """`out_keys`, each as a tuple."""
        given = self.out_keys
        if given is None:
            return None
        keys = [as_key(key) for key in given if key and isinstance(key, (str, tuple))] if is_list(given) else []
        if not keys or len(keys) != len(given) or len({*keys}) != len(keys):
            raise WrongArgument(f"out_keys must be a list of different keys, as ['action', 'value'], got {given!r}")
        return keys

    @property
    def compiling(self) -> dict[str, Any] | None:
        """The arguments for torch.compile; None if the policy is not compiled."""
        if not self.compile_policy:
            return None
        return dict(self.compile_policy) if isinstance(self.compile_policy, Mapping) else {}


def read_options(owner: str, given: dict[str, Any], *, without: Set[str] = frozenset()) -> Options:
    """Return keywords as `Options`. Legacy names cause a warning, unknown names an error that suggests the nearest one.

    `without` names the options that the collector `owner` does not have.
    """
    given = dict(given)
    for old, new in _LEGACY.items():
        if old in given:
            accept_legacy(old, new, both=given.get(new) is not None)
            given[new] = given.pop(old)
    if given.get("use_buffers") and given.get("replay_buffer") is not None:
        raise WrongArgument("use_buffers=True keeps batches; with replay_buffer there are none to keep")
    for name in _WITHOUT_EFFECT:
        given.pop(name, None)
    for name in sorted(_ONLY_IN_TORCHRL & given.keys()):
        value = given.pop(name)
        if value is not None and value is not False:
            raise UsageError(f"{owner} does not support {name} yet")
    fields = {f.name for f in dataclasses.fields(Options)} - without
    for name in given:
        if name in without:
            raise WrongArgument(f"{owner} has no option {name!r}: {_why_unsupported(name)}")
        if name not in fields:
            hint = _HINTS.get(name) or nearest(name, fields)
            raise WrongArgument(f"{owner} has no option {name!r}{hint}")
    if given.get("frames_per_batch") is None:
        raise WrongArgument(f"{owner} needs frames_per_batch: how many frames a batch holds")
    return Options(**given)


def accept_legacy(old: str, new: str, *, both: bool) -> None:
    """Warn that the option `old` is now called `new`; raise if both are given."""
    warn(f"{old} is deprecated, use {new}", DeprecationWarning)
    if both:
        raise UsageError(f"{old} and {new} are the same option; give one")


def _why_unsupported(name: str) -> str:
    """Return the reason why a collector lacks an option that other collectors have."""
    if name not in WORKERS_ONLY:
        return "it needs lanes that run in step, and this collector's lanes do not"
    also = f". An env with worker processes takes it itself: ParallelEnv(…, {name}=…)"
    return f"it is for collectors with worker processes{also if name in _PARALLEL_ENV_OPTIONS else ''}"


def is_list(value: Any) -> bool:
    """Return whether this is a list with an entry for each worker: any sequence, so that configuration files work."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def option_docs() -> dict[str, str]:
    """Return the description of each option, by name: the lines under "Args:" above, joined."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(Options.__doc__ or "").partition("Args:\n")[2].splitlines():
        begun = re.match(r" {4}(\w+): (.*)", line)
        if begun is not None:
            name, found[begun[1]] = begun[1], begun[2]
        elif name:
            found[name] += f" {line.strip()}"
    return found


def shows_options(
    *, without: Set[str] = frozenset(), more: type | None = None, defaults: Mapping[str, Any] | None = None
) -> Callable[[type[T]], type[T]]:
    """Decorate a collector so that `help`, `inspect.signature` and notebooks show every option it takes, described.

    Editors and type checkers, which run no code, find the same in `reap.collectors.keywords`. `without` names options
    that the collector does not take; `more` is a TypedDict with further keywords that it takes, and `defaults` holds
    their default values other than None.
    """

    def decorate(cls: type[T]) -> type[T]:
        if made := {"__new__", "__init__"} & vars(cls).keys():  # else the class shows its base's signature
            shown = _signature(cls.__init__, without, getattr(more, "__annotations__", {}), defaults or {})
            for name in made:
                getattr(cls, name).__signature__ = shown
        if cls.__doc__ is not None and (head := cls.__doc__.partition("    **options: see")[0]) != cls.__doc__:
            lines = [
                textwrap.fill(f"{name}: {text}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12)
                for name, text in option_docs().items()
                if name not in without
            ]
            cls.__doc__ = head.rstrip(" ") + "\n".join([*lines, "    "])
        return cls

    return decorate


def _signature(
    init: Callable[..., Any], without: Set[str], more: Mapping[str, Any], defaults: Mapping[str, Any]
) -> inspect.Signature:
    """Return a signature of `init`'s own parameters and every option it takes, required ones first."""
    own = [p for p in inspect.signature(init).parameters.values() if p.kind is not p.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [
        inspect.Parameter(
            f.name,
            keyword,
            default=inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default,
            annotation=f.type,
        )
        for f in dataclasses.fields(Options)
        if f.name not in without
    ]
    known = {f.name for f in dataclasses.fields(Options)} | {p.name for p in own}
    besides = [
        inspect.Parameter(name, keyword, default=defaults.get(name), annotation=getattr(kind, "__forward_arg__", kind))
        for name, kind in more.items()
        if name not in known
    ]
    front = [p for p in own if p.kind is not keyword]
    return inspect.Signature([*front, *shown[:1], *own[len(front) :], *shown[1:], *besides])
