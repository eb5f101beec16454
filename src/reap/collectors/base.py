"""BaseCollector: what all collectors have in common, which is everything but where their workers live.

options ─► plan ─► backend.take ─► assemble ─► split ─► postproc ─► hook ─► consumer
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.utils.data import IterableDataset
from typing_extensions import Self

from reap.backends.base import Backend, Rollout
from reap.collectors.options import Options
from reap.collectors.timeline import Profiled
from reap.collectors.updaters import as_updater
from reap.core.exploration import exploration_type
from reap.core.frames import mark_frames
from reap.core.paths import follow
from reap.core.ragged import assembler
from reap.core.slot import FRAME, MASK, Layout
from reap.errors import UsageError, WorkerError, WorkerRaised, WrongArgument, WrongState
from reap.spec import Key
from reap.trajectories import FINAL, WholeTrajectories, split_trajectories

_SHOWN = (
    "max_frames_per_traj",
    "reset_at_each_iter",
    "reset_when_done",
    "set_truncated",
    "traj_format",
    "trajs_per_batch",
    "worker_idx",
)
_PATIENCE = 100  # rollouts without a whole episode before saying that there will never be one


class BaseCollector(Profiled, IterableDataset):  # type: ignore[type-arg]
    """Iterates over batches of experience. See `Collector`."""

    options: Options
    requested_frames_per_batch: int
    _backend: Backend

    def _prepare(self, options: Options) -> None:
        self.options = options
        self._frames = 0
        self._batches = 0
        self._version = 0
        self._why_closed: str | None = None
        self._busy = False
        self._taken: TensorDictBase | None = None  # a batch that is to be split, post-processed and shown to the hook
        self._ready: TensorDictBase | None = None  # one that is to be delivered
        self._same: tuple[TensorDictBase, TensorDictBase] | None = None  # on the slot, and as delivered
        self.pre_collect_hook, self.post_collect_hook = options.pre_collect_hook, options.post_collect_hook
        self.postproc = options.postproc
        self._updater = as_updater(options.weight_updater)
        if self._updater is not None and hasattr(self._updater, "register_collector"):
            self._updater.register_collector(self)
        # Names scripts look at.
        self.total_frames, self.init_random_frames = options.total, options.random_frames
        self.split_trajs = bool(options.split_trajs)
        self.exploration_type = exploration_type(options.exploration_type)
        self.policy_device, self.storing_device = options.devices
        for name in _SHOWN:
            setattr(self, name, getattr(options, name))
        self._whole = None if options.trajs_per_batch is None else WholeTrajectories()
        self._storing = options.devices[1]
        if self._storing is not None and hasattr(self.postproc, "to"):
            self.postproc.to(self._storing)  # type: ignore[union-attr]

    def _check_sizes(self, lanes: int) -> None:
        """How many frames a batch really holds; warns about every rounding."""
        steps = -(-self.options.frames_per_batch // lanes)
        self.requested_frames_per_batch = steps * lanes
        self._warn_rounding(self.options.frames_per_batch, steps * lanes, f"{lanes} lanes", depth=4)

    def _warn_rounding(self, asked: int, size: int, what: str, *, depth: int) -> None:
        """`depth` is how far up the user's own line is."""
        options = self.options
        if size != asked:
            warnings.warn(
                f"frames_per_batch={asked} is not a multiple of {what}; batches hold {size}",
                stacklevel=depth,
            )
        if options.total != float("inf") and options.total % size:
            warnings.warn(
                f"total_frames={options.total_frames} is not a multiple of a batch of {size}; the last batch is whole",
                stacklevel=depth,
            )
        if options.random_frames % size:
            warnings.warn(
                f"init_random_frames={options.random_frames} is not a multiple of a batch of {size}; "
                f"whole batches are random",
                stacklevel=depth,
            )

    # ---- iterating ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self.iterator()

    def iterator(self) -> Iterator[TensorDictBase]:
        """Batches until `total_frames`; a new iterator goes on where the last one stopped."""
        self._open()
        return self._iterate()

    def _iterate(self) -> Iterator[TensorDictBase]:
        while self._why_closed is None and self._more():
            batch = self._collect()
            if batch is None:
                return
            yield batch

    def next(self) -> TensorDictBase | None:
        """The next batch, or None when `total_frames` is reached."""
        self._open()
        return self._collect() if self._more() else None

    def rollout(self) -> TensorDictBase:
        """One rollout as it comes: not counted, split or post-processed."""
        with self._watching():
            return self._arrange(*self._take(random=self._frames < self.options.random_frames))

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        """From now on, call this with each batch before it is delivered; None: nothing."""
        self.post_collect_hook = hook

    def __len__(self) -> int:
        if self.options.total == float("inf"):
            raise WrongArgument("an endless collector has no length (total_frames is -1)")
        return math.ceil(self.options.total / self.requested_frames_per_batch)

    def _collect(self) -> TensorDictBase | None:
        if self._busy:
            raise WrongState(f"this {type(self).__name__} is collecting already, in another thread or a hook")
        self._busy, began = True, time.perf_counter()
        try:
            if self._ready is None:  # else Ctrl-C came when it was about to be delivered
                self._ready = self._finish()
        except Exception as error:
            with contextlib.suppress(Exception):  # what close may raise must not hide what happened
                self._close(f"it failed: {error!r}")
            raise
        finally:
            self._busy = False
        if self._timeline is not None:
            self._timeline.waiting(began, time.perf_counter())
        out, self._ready = self._ready, None  # last, and nothing is called after it that could be interrupted
        return out

    def _finish(self) -> TensorDictBase | None:
        """A batch as it is delivered. Each stage is put down before the next: Ctrl-C in a hook loses none."""
        options = self.options
        if self._taken is None:
            if self.pre_collect_hook is not None:
                self.pre_collect_hook()
            self._fetch()
        out = self._taken
        if out is None:
            return None
        if options.split_trajs:
            out = self._split(out)
        if self.postproc is not None:
            out = self.postproc(out)
            if out is None:
                raise UsageError("postproc returned None; it must return the batch")
        if self.post_collect_hook is not None:
            self.post_collect_hook(out)
        self._batches += 1
        self._taken = None
        return out

    def _fetch(self) -> None:
        self._taken = self._next_batch()

    def _forget(self) -> None:
        """What is held belongs to the time before."""
        self._taken = self._ready = None
        self._whole = None if self._whole is None else WholeTrajectories()

    def _more(self) -> bool:
        """Whether a further batch may come: one is in hand, frames are left to collect, or whole episodes."""
        left = self._whole is not None and len(self._whole) >= (self.options.trajs_per_batch or 0)
        return left or self._frames < self.options.total or self._taken is not None or self._ready is not None

    def _next_batch(self) -> TensorDictBase | None:
        """One rollout; or as many as it takes to have `trajs_per_batch` complete episodes, None if they never come."""
        fruitless = 0
        while True:
            whole, wanted = self._whole, self.options.trajs_per_batch
            if whole is not None and wanted is not None and len(whole) >= wanted:
                return whole.take(wanted, self.options.traj_format or "padded")
            if self._frames >= self.options.total:
                return None
            batch, rollout = self._take(random=self._frames < self.options.random_frames)
            self._frames += rollout.frames
            if whole is None:
                return self._arrange(batch, rollout)
            before, begin = len(whole), 0
            for part in rollout.parts or (rollout,):
                whole.feed(batch[..., begin : begin + part.layout.steps], part.worker)
                begin += part.layout.steps
            fruitless = 0 if len(whole) > before else fruitless + 1
            if fruitless >= _PATIENCE and self.options.reset_at_each_iter:
                steps = rollout.layout.steps
                raise UsageError(
                    f"no episode ended within {steps} steps in {fruitless} rollouts, and reset_at_each_iter begins "
                    f"anew with each: none can ever be whole; raise frames_per_batch or leave reset_at_each_iter out"
                )

    def _take(self, *, random: bool) -> tuple[TensorDictBase, Rollout]:
        rollout = self._backend.take(random=random)
        if rollout.parts:
            return torch.cat([self._assembled(part) for part in rollout.parts], -1), rollout
        return self._assembled(rollout), rollout

    def _assembled(self, rollout: Rollout) -> TensorDictBase:
        """A rollout as the batch it is, where batches are to be stored."""
        if self.options.set_truncated:
            _mark_truncated(rollout.arrays, rollout.layout)
        if self._same is None:
            batch = assembler(rollout.layout)(rollout.arrays, rollout.layout)
            if rollout.finals is not None:
                batch.set_non_tensor(FINAL, rollout.finals)
        else:
            batch, delivered = self._same
        storing = self._storing
        if self._same is None:
            delivered = batch if storing is None else batch.to(storing)
            if self.options.return_same_td:
                self._same = batch, delivered
        elif storing is not None and storing.type != "cpu":
            delivered.update_(batch)
        return delivered

    def _arrange(self, batch: TensorDictBase, rollout: Rollout) -> TensorDictBase:
        """The batch `[lanes, T]` in the shape this collector delivers."""
        return batch

    def _split(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch as `[trajectories, time]`."""
        return split_trajectories(batch, prefix="collector")

    # ---- weights, seeds, state ------------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
    ) -> None:
        """Give the acting policy new weights.

        Without an argument: those of the policy the collector was made with (where that very module acts, nothing has
        to be copied and only the version is counted). Else a module, a TensorDict of parameters, a state dict, a nested
        dict, or one of these per worker, `{0: …}`.
        """
        self._open()
        if policy_weights is not None:
            warnings.warn("policy_weights is deprecated, use weights", DeprecationWarning, stacklevel=2)
            weights = policy_weights if weights is None else weights
        given = {
            name: value
            for name, value in {
                "policy_or_weights": policy_or_weights,
                "weights": weights,
                "policy": policy,
                "weights_dict": weights_dict,
            }.items()
            if value is not None
        }
        if len(given) > 1:
            raise UsageError(f"give the weights once, not as {' and '.join(given)}")
        if weights_dict is not None and model_id is not None:
            raise UsageError("weights_dict names its models; leave model_id out")
        (chosen,) = given.values() or (None,)
        models = {model_id or "policy": chosen} if weights_dict is None else dict(weights_dict)
        with self._watching():
            for name, one in models.items():
                if name != "policy":
                    self._load_model(name, one)
                elif self._updater is not None:
                    self._updater.push_weights(one, worker_ids)
                else:
                    self._take_weights(one, worker_ids)

    def _take_weights(self, weights: Any, worker_ids: int | Sequence[int] | None) -> None:
        self._version = self._publish(weights, worker_ids)
        count = getattr(self.options.track_policy_version, "increment_version", None)
        if count is not None:
            count()

    def _load_model(self, path: str, weights: Any) -> None:
        """New weights for a module elsewhere than in the policy, by its path: a transform of the env."""
        if not path.startswith("env"):
            raise _UnknownModel(f"model {path!r} is not here; this collector has 'policy', and paths in 'env'")
        if weights is None:
            raise UsageError(f"model {path!r} needs weights; only 'policy' knows where its own come from")
        if isinstance(weights, nn.Module):
            weights = weights.state_dict()
        elif isinstance(weights, TensorDictBase):
            weights = dict(weights.flatten_keys(".").items())
        try:
            self.map_fn(f"{path}.load_state_dict", [(weights,)] * getattr(self, "num_workers", 1))
        except (AttributeError, WorkerRaised) as cause:
            raise _UnknownModel(
                f"model {path!r} is not here; this collector has 'policy', and paths in 'env'"
            ) from cause

    def _publish(self, weights: Any, worker_ids: int | Sequence[int] | None) -> int:
        """Hand weights on to the only worker, of which per-worker weights name at most its own."""
        ids = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids or [0])
        if ids != [0]:
            raise UsageError(f"worker_ids {ids}: this collector has worker 0 only")
        if isinstance(weights, dict) and weights and all(isinstance(k, int) for k in weights):
            if list(weights) != [0]:
                raise UsageError(f"weights are given for workers {list(weights)}: this collector has worker 0 only")
            weights = weights[0]
        return self._backend.publish(weights)

    @property
    def policy_version(self) -> int:
        """How often weights were updated; 0 is the policy as constructed."""
        return self._version

    def get_policy_version(self) -> int:
        """`policy_version`, as a call."""
        return self._version

    def increment_version(self) -> None:
        """Say that the policy was changed: its weights are handed on, as a new version."""
        self.update_policy_weights_()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed lanes, policy noise, torch and NumPy of the worker, and begin new episodes; returns the next seed."""
        with self._watching():
            following = self._backend.set_seed(seed, static=static_seed)
        self._forget()
        return following

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on: policy, env, counters."""
        with self._watching():
            backend = self._backend.state_dict()
        state = {**backend, "frames": self._frames, "iter": self._batches - 1}
        if isinstance(self.policy, nn.Module):
            state["policy_state_dict"] = self.policy.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """The counterpart of `state_dict`. Episodes begin anew, with fresh trajectory ids."""
        self._open()
        needed = {"frames", "iter", "traj_pool"}
        if strict and not needed <= state_dict.keys():
            raise UsageError(f"state_dict lacks {sorted(needed - state_dict.keys())}")
        if "policy_state_dict" in state_dict and isinstance(self.policy, nn.Module):
            self.policy.load_state_dict(state_dict["policy_state_dict"], strict=strict)
        with self._watching():
            self._backend.load_state_dict(dict(state_dict))
        self._forget()
        self._frames, self._batches = int(state_dict.get("frames", 0)), int(state_dict.get("iter", -1)) + 1
        self._version = int(state_dict.get("policy_version", self._version))

    @property
    def policy(self) -> Any:
        """The policy that acts."""
        raise NotImplementedError

    def get_model(self, model_id: str) -> Any:
        """The model at this path, as weights are named by: "policy"."""
        return follow(self, model_id)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what is at this path: `cascade_execute("policy.eval")`."""
        return follow(self, attr_path)(*args, **kwargs)

    def get_distant_attr(self, attr: str) -> Any:
        """What is at this path of a worker, whose "policy" and "env" are the ones that act: `"policy.in_keys"`."""
        raise NotImplementedError

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call what is at this path in every worker, with arguments of its own; what they return, in order."""
        raise NotImplementedError

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy that acts; of several, the first."""
        return self._of_first(f"policy.{attr}")

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the lanes being stepped; of several workers, the first one's."""
        return self._of_first(f"env.{attr}")

    def _of_first(self, path: str) -> Any:
        return self.get_distant_attr(path)

    def stats(self) -> dict[str, Any]:
        """Counts and rates so far."""
        raise NotImplementedError

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the workers and close the envs. May be called twice."""
        try:
            self._close("shutdown() was called", close_env=close_env)
        except Exception:
            if raise_on_error:
                raise

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """`shutdown`, by the name it has for collectors that run in the background."""
        self.shutdown(timeout, close_env, raise_on_error)

    def _close(self, why: str, *, close_env: bool = True) -> None:
        if self._why_closed is None:
            self._why_closed = why
            self.disable_profile()
            if close_env:
                self._backend.close()

    @property
    def closed(self) -> bool:
        """Whether it was shut down, or failed."""
        return self._why_closed is not None

    def _open(self) -> None:
        if self._why_closed is not None:
            raise WrongState(f"this {type(self).__name__} is closed: {self._why_closed}; make a new one")

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """A worker that fails inside, whatever it was asked, closes the collector."""
        self._open()
        try:
            yield
        except WorkerError as error:
            with contextlib.suppress(Exception):
                self._close(f"it failed: {error!r}")
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.shutdown()


class _UnknownModel(UsageError, KeyError):
    __str__ = UsageError.__str__  # KeyError would print the message in quotes


def _mark_truncated(arrays: Mapping[Key, np.ndarray[Any, Any]], layout: Layout) -> None:
    """The last frame of every lane ends here, as far as the learner is concerned."""
    if FRAME in layout.columns:
        mark_frames(arrays)
        return
    marked = [key for key in arrays if (key[0], key[-1]) == ("next", "truncated") and key not in layout.look.hidden]
    if not marked:
        raise WrongState("set_truncated marks the last step as truncated; this env has no such flag")
    flags = [(*key[:-1], flag) for key in marked for flag in ("truncated", "done")]
    if MASK not in arrays:
        for flag in flags:
            arrays[flag][-1] = True
        return
    mask = arrays[MASK]
    lane = np.flatnonzero(mask.any(0))  # a lane may have made no frame at all
    last = len(mask) - 1 - mask[::-1, lane].argmax(0)
    for flag in flags:
        arrays[flag][last, lane] = True
