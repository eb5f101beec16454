"""Mistakes that a type checker finds, each marked by the word at its end."""

from __future__ import annotations

import reap
from reap.collectors.distributed import RayCollector
from reap.data import export, record
from reap.envs import AsyncEnvPool

reap.MultiSyncCollector("CartPole-v1", num_worker=3, frames_per_batch=10)  # mistake
reap.Collector("CartPole-v1", frame_per_batch=10)  # mistake
reap.Collector("CartPole-v1", frames_per_batch="10")  # mistake
reap.Collector("CartPole-v1")  # mistake
reap.Collector("CartPole-v1", None, frames_per_batch=10, num_worker=3)  # mistake
reap.AsyncBatchedCollector(["CartPole-v1"], frames_per_batch=10, set_truncated=True)  # mistake
reap.AsyncCollector("CartPole-v1", frames_per_batch=10, on_failure="ignore")  # mistake
RayCollector("CartPole-v1", num_worker=3, frames_per_batch=10)  # mistake
reap.Collector("CartPole-v1", frames_per_batch=10).nxt()  # mistake
reap.AsyncBatchedCollector(["CartPole-v1"], frames_per_batch=10, env_backend="thread")  # mistake
reap.Collector("CartPole-v1", frames_per_batch=10, backend="rya")  # mistake
reap.Collector("CartPole-v1", frames_per_batch=10, traj_format="concat")  # mistake
reap.Collector("CartPole-v1", frames_per_batch=10).stats("each")  # mistake
reap.Collector("CartPole-v1", frames_per_batch=10).progress(display="bar")  # mistake
reap.Evaluator("CartPole-v1", num_trajectory=3)  # mistake
reap.Evaluator("CartPole-v1", busy_policy="wait")  # mistake
AsyncEnvPool(["CartPole-v1"], backend="thread")  # mistake
export([], "somewhere", format="zip")  # mistake
record(reap.Collector("CartPole-v1", frames_per_batch=10), "somewhere", format="zip")  # mistake
