"""Keywords: the options of each collector, for editors and type checkers. Made from `Options`, not by hand.

`python -m tests.types.keywords --write` makes it anew, and a test says when that is due.
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
    """What every collector can be told."""

    total_frames: int | None
    """Stop after this many; negative or None: never. The last batch is whole (an `AsyncBatchedCollector` cuts it)."""
    out_keys: Sequence[AnyKey] | None
    """What the parts of a tuple that a function of tensors returns are called, the action among them."""
    max_frames_per_traj: int | None
    """Truncate episodes at this length and add `step_count`; -1, 0 or None: no limit."""
    init_random_frames: int | None
    """Random actions until this many frames were delivered."""
    reset_at_each_iter: bool
    """Begin new episodes with every batch."""
    split_trajs: bool | None
    """Deliver `[trajectories, time]`, zero-padded, with `("collector", "mask")`."""
    trajs_per_batch: int | None
    """Deliver so many complete episodes at a time, in the order in which they end."""
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
    """Stamp frames with the version of the weights that acted; a `PolicyVersion` counts along."""
    track_episodes: bool
    """Add `("collector", "episode_return")` and `("collector", "episode_length")`: return and length of each frame's
    episode so far, the frame included."""
    gamma: float | None
    """Discount by which `episodes()` also gives a `discounted_return`; None: it does not. It changes no data."""
    exploration_type: InteractionType | str | None
    """How probabilistic policies sample; RANDOM by default."""
    compile_policy: bool | Mapping[str, Any] | None
    """Run the policy through torch.compile; a dict holds its arguments."""
    cudagraph_policy: bool | Mapping[str, Any] | None
    """Replay CUDA graphs: the policy's step, or where env and policy are on one GPU whole rollouts."""
    trust_policy: bool | None
    """The policy takes a TensorDict; do not look at it any closer."""
    deterministic: bool
    """Decide about each lane by itself, with random numbers of its own: what a lane gets depends on its seed
    (`set_seed`), not on how many lanes share a process. See docs/reproducing.md."""
    capture: bool
    """Record once what the policy and TorchRL's transforms ask of torch, and replay that at each step, where this is
    the same. False calls them at every step. `explain()` says what is captured."""
    num_sub_threads: int
    """Torch threads of each worker."""
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None
    """`{"policy": scheme}`, of `reap.weight_update` or TorchRL's; None: what suits the policy. Other models are named
    by their path, "env.transform[0].module" or "postproc.critic". A single-process collector has no weights to send:
    `NoWeightSyncScheme` turns `update_policy_weights_` into a no-op; other schemes have no effect."""
    weight_updater: Any
    """A legacy updater, or a factory of one, through which weights are pushed."""
    timeout: float | None
    """Seconds without a word from a worker that has work before it is reported as stuck; None: for ever, but after a
    minute the log says where it is."""
    start_method: Literal["forkserver", "spawn"]
    """How workers start, "forkserver" or "spawn"."""
    on_failure: Literal["raise", "restart", "drop"]
    """What is done about a worker that dies, raises or is silent for longer than `timeout`: "raise" closes everything
    and raises its error; "restart" puts another in its place; "drop" goes on without it. See docs/failures.md."""
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
    """A number of your own for this collector, kept as its `worker_idx`."""
    failure_dir: Any
    """A directory; when an env raises, or what it returned is refused, a file there holds what
    `reap.testing.replay_failure` needs to let it happen again. See docs/testing.md."""
    workers: Literal["inline"] | None
    """"inline": run the workers in this process, one after another, with the same data, so that `breakpoint()` and
    debuggers work in envs and policies; None: where they belong. See docs/debugging.md."""


class BatchedCollectorOptions(CommonOptions, total=False):
    """What `AsyncBatchedCollector` can be told."""

    frames_per_batch: Required[int]
    """Frames in a batch, over all lanes; where lanes go in step, rounded up to a whole number of steps."""
    policy_factory: Callable[[], Any] | None
    """Makes the policy, in place of `policy`."""
    create_env_kwargs: Mapping[str, Any] | None
    """Keywords for the env's factory."""
    device: torch.device | str | int | None
    """Fills `policy_device`, `env_device` and `storing_device` where they are not given."""
    policy_device: torch.device | str | int | None
    """Where the policy runs; it is copied there only if it lives elsewhere."""
    env_device: torch.device | str | int | None
    """Where the env's tensors live. Gymnasium envs step on the CPU whatever it says."""
    storing_device: torch.device | str | int | None
    """Where batches are delivered."""


class LanesInStepOptions(TypedDict, total=False):
    """What every collector but `AsyncBatchedCollector` can be told besides."""

    reset_when_done: bool
    """False: a lane that ends rests until the batch is over; its rows are masked out."""
    compact_obs: bool
    """Store each observation once; `reap.trajectories.with_next` rebuilds `("next", observation)`."""
    set_truncated: bool
    """Mark the last step of every batch as truncated."""
    cat_results: Literal["stack"] | int | None
    """How workers' rollouts are joined: "stack" (the default), or along which dimension: 0 (lanes), -1 (time)."""
    update_at_each_batch: bool
    """Send the policy's weights to the workers before each batch."""
    preemptive_threshold: float | None
    """A batch waits for this share of the workers; the others stop, what they lack is masked."""
    max_lag: int | None
    """Drop rollouts made by weights more than so many updates old; `stats()` counts what was dropped."""
    num_threads: int | None
    """Accepted; threads of this process are left as they are."""
    init_fn: Callable[[], Any] | None
    """Called first in each worker."""
    hooks_in_workers: bool
    """Call both hooks in the workers, with what each has made, in place of here with whole batches."""


class CollectorOptions(BatchedCollectorOptions, LanesInStepOptions, total=False):
    """What `Collector` can be told; some of it goes with `num_collectors` only."""

    return_same_td: bool
    """Deliver the same object over and over; copy what you keep."""
    interruptor: Any
    """An object whose `collection_stopped()` is asked after each step; True ends the rollout early."""


class MultiCollectorOptions(CommonOptions, LanesInStepOptions, total=False):
    """What collectors with workers can be told."""

    frames_per_batch: Required[int | Sequence[int]]
    """Frames in a batch, over all lanes; where lanes go in step, rounded up to a whole number of steps. A list has one
    for each worker."""
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any] | None] | None
    """Makes the policy, in place of `policy`. A list has one for each worker."""
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    """Keywords for the env's factory. A list has one for each worker."""
    device: torch.device | str | int | Sequence[torch.device | str | int | None] | None
    """Fills `policy_device`, `env_device` and `storing_device` where they are not given. A list has one for each
    worker."""
    policy_device: torch.device | str | int | Sequence[torch.device | str | int | None] | None
    """Where the policy runs; it is copied there only if it lives elsewhere. A list has one for each worker."""
    env_device: torch.device | str | int | Sequence[torch.device | str | int | None] | None
    """Where the env's tensors live. Gymnasium envs step on the CPU whatever it says. A list has one for each worker."""
    storing_device: torch.device | str | int | Sequence[torch.device | str | int | None] | None
    """Where batches are delivered. A list has one for each worker."""
