"""LaneWorkers: what threads and child processes that step groups of lanes have in common."""

from __future__ import annotations

import pytest

from reap.envs.parallel.env_child import RESET
from reap.envs.parallel.thread_workers import InlineEnv, ThreadWorkers
from reap.testing import CountingEnv


@pytest.fixture
def workers():
    """Three groups of one lane each, stepped by the calling thread."""
    made = ThreadWorkers([[(CountingEnv, {"lengths": (3, 1), "lane": n})] for n in range(3)], kind=InlineEnv)
    yield made
    made.close()


def one_at_a_time(workers, monkeypatch):
    """Have `_answers` return one answer per call, as if the groups were slow."""

    def answers(wait):
        group, _, token = workers.queue.get_nowait()
        return [(group, token)]

    monkeypatch.setattr(workers, "_answers", answers)


def test_only_its_own_answer_ends_the_wait_for_a_ping(workers, monkeypatch):
    workers.order([2], RESET, [2])  # broken off: nobody reads its answer,
    with workers._pings.next() as token:
        workers._ping(2, token)  # nor that to an earlier PING
    one_at_a_time(workers, monkeypatch)
    workers.settle()
    assert workers.queue.empty(), "an answer was left for the next order"
