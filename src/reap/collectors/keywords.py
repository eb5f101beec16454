"""Keywords: the options of each collector, for editors and type checkers. Made from `Options`, not by hand.

`python -m tests.types.keywords --write` regenerates it, and a test fails when that is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict.nn import InteractionType
from typing_extensions import Required, TypedDict

from reap.spec import AnyKey
from reap.weight_update import WeightSyncScheme


class CommonOptions(TypedDict, total=False):
    """Options of every collector."""

    total_frames: int | None
    """Stop after this many; negative or None: never. The last batch is whole (an `AsyncBatchedCollector` cuts it)."""
    out_keys: Sequence[AnyKey] | None
    """The keys of the parts of the tuple that a function of tensors returns, the action among them."""
    max_frames_per_traj: int | None
    """Truncate episodes at this length and add `step_count`; -1, 0 or None: no limit."""
    init_random_frames: int | None
    """Take random actions until this many frames were delivered."""
    reset_at_each_iter: bool
    """Begin new episodes with every batch."""
    split_trajs: bool | None
    """Deliver `[trajectories, time]`, zero-padded, with `("collector", "mask")`."""
    trajs_per_batch: int | None
    """Deliver this many complete episodes at a time, in the order in which they end."""
    trajs_per_write: int | None
    """How many episodes go into the replay buffer in one write; None: all that have ended."""
    traj_format: Literal["padded", "cat"] | None
    """With `trajs_per_batch`: "padded" `[N, longest]` with a mask, or "cat" `[steps]`."""
    replay_buffer: Any
    """Where batches go; iterating then yields None. See docs/background.md."""
    extend_buffer: bool
    """False writes to the buffer step by step."""
    contiguous: bool | None
    """True: a batch of several lanes is copied so that its memory has lanes first, and `view(-1)` works; False: it is a
    transposed view, without a copy; None: True for TorchRL's envs, False for others."""
    postproc: Callable[[Any], Any] | None
    """Called with each batch; what it returns is delivered."""
    track_traj_ids: bool
    """False leaves `("collector", "traj_ids")` out."""
    track_policy_version: Any
    """Stamp each frame with the version of the weights that produced its action; a `PolicyVersion` counts the updates
    as well."""
    track_episodes: bool
    """Add `("collector", "episode_return")` and `("collector", "episode_length")`: return and length of each frame's
    episode so far, the frame included."""
    gamma: float | None
    """The discount of the `discounted_return` that `episodes()` then adds to its records; None: it adds none. Batches
    do not change."""
    exploration_type: InteractionType | str | None
    """How probabilistic policies sample; RANDOM by default."""
    compile_policy: bool | Mapping[str, Any] | None
    """Run the policy through torch.compile; a dict holds its arguments."""
    cudagraph_policy: bool | Mapping[str, Any] | None
    """Replay CUDA graphs: of the policy's step, or of whole rollouts if env and policy are on one GPU."""
    trust_policy: bool | None
    """True: call the policy with a TensorDict, without examining it."""
    deterministic: bool
    """Compute the actions of each lane separately, with random numbers of its own: a lane's data depends on its seed
    (`set_seed`), not on how many lanes share a process. See docs/reproducing.md."""
    capture: bool
    """Record once which torch calls the policy and TorchRL's transforms make, and replay these at each step if that
    gives the same results. False calls policy and transforms at every step. `explain()` says what is captured."""
    num_sub_threads: int
    """The number of torch threads in each worker."""
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None
    """`{"policy": scheme}`, with a scheme of `reap.weight_update` or of TorchRL; None: the collector chooses one that
    suits the policy. Other models are named by their path, "env.transform[0].module" or "postproc.critic". A single-
    process collector has no weights to send: `NoWeightSyncScheme` turns `update_policy_weights_` into a no-op; other
    schemes have no effect."""
    weight_updater: Any
    """A legacy updater, or a factory of one, through which weights are pushed."""
    timeout: float | None
    """Seconds for which a worker that has work may send nothing before it is reported as stuck; None: for ever, but
    after a minute the log says where it is. A worker sends one message per rollout (of an `AsyncBatchedCollector`, per
    step): give more than that takes."""
    start_method: Literal["forkserver", "spawn"]
    """How workers start, "forkserver" or "spawn"."""
    on_failure: Literal["raise", "restart", "drop"]
    """What to do when a worker dies, raises or is silent for longer than `timeout`: "raise" closes the collector and
    raises the error; "restart" starts another worker in its place; "drop" continues without it. See
    docs/failures.md."""
    max_restarts: int | None
    """With "restart": how many workers may be started again within `restart_window`; None: any number."""
    restart_window: float
    """Seconds over which restarts are counted."""
    on_restart: Callable[[Any], Any] | None
    """Called with a `reap.collectors.WorkerFailure` after each restart, and when a worker is dropped."""
    pre_collect_hook: Callable[[], Any] | None
    """Called before each batch is collected."""
    post_collect_hook: Callable[[Any], Any] | None
    """Called with each batch before it is delivered."""
    worker_idx: int | None
    """A number of your own for this collector, kept as its attribute `worker_idx`."""
    failure_dir: Any
    """A directory; when an env raises or returns invalid values, a file is written there with what
    `reap.testing.replay_failure` needs to repeat the failure. See docs/testing.md."""
    workers: Literal["inline"] | None
    """"inline": run the workers in this process, one after another, with the same data, so that `breakpoint()` and
    debuggers work in envs and policies; None: run them where the collector usually does. See docs/debugging.md."""


class BatchedCollectorOptions(CommonOptions, total=False):
    """Options of `AsyncBatchedCollector`."""

    frames_per_batch: Required[int]
    """Frames in a batch, over all lanes; if the lanes run in step, rounded up to a whole number of steps."""
    policy_factory: Callable[[], Any] | None
    """Makes the policy, in place of `policy`."""
    create_env_kwargs: Mapping[str, Any] | None
    """Keyword arguments for the env's factory."""
    device: torch.device | str | int | None
    """Fills `policy_device`, `env_device` and `storing_device` where they are not given."""
    policy_device: torch.device | str | int | None
    """Where the policy runs; it is copied there only if it lives elsewhere."""
    env_device: torch.device | str | int | None
    """Where the env's tensors live. Gymnasium envs step on the CPU in any case."""
    storing_device: torch.device | str | int | None
    """Where batches are delivered."""


class LanesInStepOptions(TypedDict, total=False):
    """Further options of every collector except `AsyncBatchedCollector`."""

    reset_when_done: bool
    """False: a lane whose episode ends rests until the batch is complete; its further rows are masked out."""
    compact_obs: bool
    """Store each observation once; `reap.trajectories.with_next` rebuilds `("next", observation)`."""
    set_truncated: bool
    """Mark the last step of every batch as truncated."""
    cat_results: Literal["stack"] | int | None
    """How workers' rollouts are joined: "stack" (the default), or along which dimension: 0 (lanes), -1 (time)."""
    update_at_each_batch: bool
    """Send the policy's weights to the workers before each batch."""
    preemptive_threshold: float | None
    """A batch waits for this share of the workers; the others stop early, and the rows they lack are masked."""
    max_lag: int | None
    """Drop rollouts made by weights more than this many updates old; `stats()` counts the dropped frames."""
    num_threads: int | None
    """Accepted and ignored: the number of threads of this process does not change."""
    init_fn: Callable[[], Any] | None
    """Called first in each worker."""
    hooks_in_workers: bool
    """Call both hooks in the workers, each with its own rollouts, instead of here with whole batches."""


class CollectorOptions(BatchedCollectorOptions, LanesInStepOptions, total=False):
    """Options of `Collector`; some require `num_collectors`."""

    return_same_td: bool
    """Deliver the same object every time, with new contents; copy what you keep."""
    interruptor: Any
    """An object whose `collection_stopped()` is called after each step; True ends the rollout early."""


class MultiCollectorOptions(CommonOptions, LanesInStepOptions, total=False):
    """Options of collectors with workers."""

    frames_per_batch: Required[int | Sequence[int]]
    """Frames in a batch, over all lanes; if the lanes run in step, rounded up to a whole number of steps. A list has
    one for each worker."""
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any] | None] | None
    """Makes the policy, in place of `policy`. A list has one for each worker."""
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    """Keyword arguments for the env's factory. A list has one for each worker."""
    device: torch.device | str | int | Sequence[torch.device | str | int | None] | None
    """Fills `policy_device`, `env_device` and `storing_device` where they are not given. A list has one for each
    worker."""
    policy_device: torch.device | str | int | Sequence[torch.device | str | int | None] | None
    """Where the policy runs; it is copied there only if it lives elsewhere. A list has one for each worker."""
    env_device: torch.device | str | int | Sequence[torch.device | str | int | None] | None
    """Where the env's tensors live. Gymnasium envs step on the CPU in any case. A list has one for each worker."""
    storing_device: torch.device | str | int | Sequence[torch.device | str | int | None] | None
    """Where batches are delivered. A list has one for each worker."""
