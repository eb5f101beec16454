"""What is told of a Ray actor that died: what Ray knows of the reason, and not how Ray calls the actor."""

import pytest

pytest.importorskip("ray")
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

from reap.backends.remote.ray import _death_text

DETAIL = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
    "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker "
    "crashed unexpectedly due to SIGSEGV or another unexpected error."
)


def test_the_reason_is_whole_and_has_no_ids():
    error = ActorDiedError(
        ActorDiedErrorContext(
            actor_id=bytes(16),
            class_name="ReapWorker",
            pid=4711,
            ray_namespace="af708fa2-9622-40c3-b827-096a9445fd84",
            node_ip_address="127.0.0.1",
            error_message="The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            f"Worker exit detail: {DETAIL}",
        )
    )
    assert "actor_id" in str(error)
    assert _death_text(error) == f"its actor died: {DETAIL}"


def test_what_has_no_such_detail_is_told_as_it_is():
    assert _death_text(ActorDiedError()) == "its actor died: The actor died unexpectedly before finishing this task."


def test_a_long_traceback_keeps_its_end():
    error = RuntimeError(
        "The actor died because of an error raised in its creation task,\n" + "  line\n" * 500 + "KeyError: 'x'"
    )
    told = _death_text(error)
    assert told.startswith("its actor died: The actor died because of an error raised in its creation task, line")
    assert told.endswith("line KeyError: 'x'")
    assert len(told) < 1000
