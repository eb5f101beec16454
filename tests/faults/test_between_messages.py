"""Workers that die between two messages: everything that was said before is true, and nobody is asked in vain."""

from __future__ import annotations

import os
import signal

import torch

from reap.backends.local.shared_memory import ProcessConnection, SharedMemoryTransport
from reap.collectors import MultiSyncCollector
from tests.faults.worlds import all_gone, collect, freeze, healthy, pids


class DiesAfterAnswering:
    """Inside, worker 0 dies when its next answer was heard, while the others have not answered yet."""

    def __init__(self, collector, monkeypatch, others=(1,)):
        self.pids, self.others, self.patch = pids(collector), others, monkeypatch

    def __enter__(self):
        original, retired = ProcessConnection.hear, SharedMemoryTransport.retire
        for other in self.others:
            freeze(self.pids[other])

        def hear(connection):
            said, gone = original(connection)
            if said and connection.index == 0 and connection.child.pid == self.pids[0]:
                os.kill(self.pids[0], signal.SIGKILL)
                assert all_gone(self.pids[:1], 10)
            return said, gone

        def retire(transport, worker):
            retired(transport, worker)
            for other in self.others:  # they answer when it was noticed
                os.kill(self.pids[other], signal.SIGCONT)

        self.patch.setattr(ProcessConnection, "hear", hear)
        self.patch.setattr(SharedMemoryTransport, "retire", retire)

    def __exit__(self, *_):
        self.patch.undo()


def test_a_worker_that_answers_and_is_dropped_gives_no_answer(monkeypatch):
    with collect(MultiSyncCollector, [healthy(0), healthy(1), healthy(2)], frames_per_batch=12, on_failure="drop") as c:
        c.next()
        with DiesAfterAnswering(c, monkeypatch, others=(1, 2)):
            assert c.get_distant_attr("worker_idx") == [1, 2]
        assert c.get_distant_attr("worker_idx") == [1, 2]


def test_a_state_is_of_the_worker_it_is_named_after(monkeypatch):
    with collect(MultiSyncCollector, [healthy(0), healthy(1)], on_failure="drop") as c:
        c.next()
        c.update_policy_weights_({1: {"weight": torch.tensor(2.0)}})
        with DiesAfterAnswering(c, monkeypatch):
            state = c.state_dict()
        assert "worker0" not in state
        assert float(state["worker1"]["policy_state_dict"]["weight"]) == 2.0
