"""A world you can predict, and checks that run in it. Public: use it for your own envs, policies and backends.

CountingEnv    an env whose every frame follows from its lane, episode and step
EchoPolicy     a policy whose action tells what it saw
CountingWorld  the batches the two must produce, computed without reap
check_backend  one behaviour suite for every backend
FaultyEnv      an env that raises, exits, crashes, hangs or runs out of memory at a given step; inject does so anywhere
replay_failure reproduces a failure that a collector recorded in a file
no_leaks       fails if a thread, process, descriptor or shared-memory file is left behind
"""

from reap.testing.backend import backend_checks, check_backend
from reap.testing.counting import CountingEnv, CountingWorld, EchoPolicy, assert_same
from reap.testing.env import check_env
from reap.testing.faults import FaultyEnv, inject
from reap.testing.leaks import no_leaks
from reap.testing.replay import replay_failure

__all__ = [
    "CountingEnv",
    "CountingWorld",
    "EchoPolicy",
    "FaultyEnv",
    "assert_same",
    "backend_checks",
    "check_backend",
    "check_env",
    "inject",
    "no_leaks",
    "replay_failure",
]
