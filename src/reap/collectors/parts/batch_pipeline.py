"""BatchPipeline: turns rollouts into delivered batches, and counts frames and batches.

backend.take ─► assemble ─► arrange ─► split ─► postproc ─► hook ─┬─► consumer
                                                                  └─► sink ─► replay buffer

The batch is kept until it is delivered, post-processed once: Ctrl-C in a hook loses nothing and repeats only the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from reap.backends.base import Backend, Rollout
from reap.collectors.buffer_writers import Sink, mark_truncated, post_processed
from reap.collectors.options import Options
from reap.collectors.parts.arrangements import Arrangement, Part
from reap.collectors.parts.listeners import Listeners
from reap.core.columns.assemble_ragged import assembler
from reap.core.columns.lane_major import LaneMajorCopies
from reap.errors import UsageError
from reap.trajectories import FINAL, WholeTrajectories

OwnRollout = Callable[[], tuple[TensorDictBase, Rollout | None]]
_PATIENCE = 100  # rollouts without a whole episode, after which `fetch` raises if there can never be one


class BatchPipeline:
    """Makes the batches of one collector. `sink` receives them in place of the consumer, if there is one."""

    def __init__(self, options: Options, sink: Sink | None) -> None:
        self.arrangement, self.listeners = Arrangement(), Listeners()
        self.frames = self.batches = 0  # frames collected, and batches delivered
        self.taken: list[Part] = []  # arranged batches that are not yet split, post-processed and shown to the hook
        self.ready: TensorDictBase | None = None  # a finished batch that the consumer has not received yet
        whole = options.trajs_per_batch is not None and options.replay_buffer is None
        self.whole = WholeTrajectories() if whole else None
        self._options, self.sink = options, sink
        self._total, self._random, self._storing = options.total, options.random_frames, options.devices[1]
        self.storing_by_worker: dict[int, torch.device | None] | None = None  # None: the same for all workers
        self._copies = LaneMajorCopies()
        # With return_same_td: the batch of views on the slot, and the object that is delivered every time.
        self._same: tuple[TensorDictBase, TensorDictBase] | None = None

    def more(self) -> bool:
        """Return whether another batch can come: one is in hand, or frames or whole episodes are left."""
        left = self.whole is not None and len(self.whole) >= (self._options.trajs_per_batch or 0)
        return left or self.frames < self._total or bool(self.taken) or self.ready is not None

    def forget(self) -> None:
        """Drop everything that is held back: after a new seed or a loaded state, trajectory ids may repeat."""
        self.drop_taken()
        if self.sink is not None:
            self.sink.forget()
        self.whole = None if self.whole is None else WholeTrajectories()

    def drop_taken(self) -> None:
        """Drop a batch that was taken but not delivered, because Ctrl-C came in between."""
        self.taken, self.ready = [], None
        self.listeners.forget()

    # ---- taking ---------------------------------------------------------------------------------------------------

    def next_assembled(self, backend: Backend) -> tuple[TensorDictBase, Rollout]:
        """Return the next rollout that the arrangement admits, assembled as `[lanes, T]`."""
        while True:
            rollout = backend.take(random=self.frames < self._random)
            if rollout.parts:
                batch = torch.cat([self._assembled(part) for part in rollout.parts], -1)
            else:
                batch = self._assembled(rollout)
            self.arrangement.rename(batch, rollout.worker)
            if self.arrangement.admits(batch, rollout):
                return batch, rollout

    def fetch(self, backend: Backend, own: OwnRollout | None = None) -> None:
        """Take one rollout into `taken`; with `trajs_per_batch`, as many as that number of complete episodes needs.

        `own` calls the `rollout` method of a user's subclass: it returns a batch, and the rollout behind it or None.
        """
        fruitless = 0
        while True:
            whole, wanted = self.whole, self._options.trajs_per_batch
            if whole is not None and wanted is not None and len(whole) >= wanted:
                self.taken = [Part(whole.take(wanted, self._options.traj_format or "padded"))]
                return
            if self.frames >= self._total:
                return
            batch, rollout = self.next_assembled(backend) if own is None else own()
            self.frames += batch.numel() if rollout is None else rollout.frames
            if whole is None:
                if self.arrangement.cuts and self.frames > self._total:
                    excess = int(self.frames - self._total)
                    batch, self.frames = batch[:-excess], int(self._total)
                self.taken = [Part(batch)] if own is not None or rollout is None else self._arranged(batch, rollout)
                return
            before = len(whole)
            parts = () if rollout is None or own is not None else rollout.parts
            if parts:
                for piece, part in zip(batch.split([part.layout.steps for part in parts], -1), parts):
                    whole.feed(piece, part.worker)
            else:
                whole.feed(batch, 0 if rollout is None else rollout.worker)
            fruitless = 0 if len(whole) > before else fruitless + 1
            if fruitless >= _PATIENCE and self._options.reset_at_each_iter:
                raise UsageError(
                    f"no episode ended within {batch.shape[-1]} steps in {fruitless} rollouts, and reset_at_each_iter "
                    f"begins new ones with each, so no episode can ever be complete; raise frames_per_batch, or leave "
                    f"reset_at_each_iter out"
                )

    def _arranged(self, batch: TensorDictBase, rollout: Rollout) -> list[Part]:
        """Return one batch for the consumer, or for a buffer one part per worker."""
        if self.sink is not None:
            return self.arrangement.by_worker(batch, rollout)
        return [Part(self.arrangement.arrange(batch, rollout))]

    def _assembled(self, rollout: Rollout) -> TensorDictBase:
        """Return a rollout as a batch, on the storing device."""
        if self._options.set_truncated:
            mark_truncated(rollout.arrays, rollout.layout)
        copied = rollout.layout.look.contiguous
        if self._same is None or copied:
            arrays = rollout.arrays
            if copied and rollout.layout is not self._copies.idle_for:
                arrays = self._copies.of(arrays, rollout.layout)
            batch = assembler(rollout.layout)(arrays, rollout.layout)
            if rollout.finals is not None:
                batch.set_non_tensor(FINAL, rollout.finals)
        else:
            batch = self._same[0]
        storing = self._storing if self.storing_by_worker is None else self.storing_by_worker.get(rollout.worker)
        if self._same is None:
            delivered = batch if storing is None else batch.to(storing)
            if self._options.return_same_td:
                self._same = batch, delivered
            return delivered
        delivered = self._same[1]
        if copied or (storing is not None and storing.type != "cpu"):
            delivered.update_(batch)
        return delivered

    # ---- delivering -----------------------------------------------------------------------------------------------

    def deliver(
        self, postproc: Callable[[Any], Any] | None, hook: Callable[[Any], Any] | None
    ) -> TensorDictBase | None:
        """Finish the fetched batch and return it; None if it went to the sink, or if nothing was fetched."""
        if not self.taken:
            return None
        split = self.arrangement.split if self._options.split_trajs else None
        while self.taken:
            part = self.taken[0]
            done = part.batch
            if not part.finished and (split is not None or postproc is not None):
                done = post_processed(done, split=split, postproc=postproc)
            if hook is not None or self.listeners.all or self.sink is not None:
                # Kept first: after Ctrl-C in hook or sink, a postproc that changes the batch must not run again.
                self.taken[0] = Part(done, part.worker, finished=True)
                if hook is not None:
                    hook(done)
                self.listeners.show(done, (self.batches, len(self.taken)))
            if self.sink is None:
                self.batches += 1
                self.taken = []  # last: no loop or call lies between here and `ready = …` in which Ctrl-C could come
                return done
            self.sink.write(done, part.worker)
            self.taken = self.taken[1:]
        self.batches += 1
        return None

    def empty(self, batch: TensorDictBase, postproc: Callable[[Any], Any] | None) -> TensorDictBase:
        """Return this batch of zeros `[lanes, T]` in the form in which it would be delivered; count nothing."""
        batch = batch if self._storing is None else batch.to(self._storing)
        self.arrangement.rename(batch)
        split = self.arrangement.split if self._options.split_trajs else None
        return post_processed(batch, split=split, postproc=postproc)
