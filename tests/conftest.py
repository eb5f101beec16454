from __future__ import annotations

import gc
import logging
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from reap._system import silence
from reap.testing import no_leaks
from tests.programs import Programs
from tests.slow_tests import is_slow
from tests.worlds.faults import OpensGate

HERE = Path(__file__).parent
FAILED = pytest.StashKey[bool]()  # a test that failed holds on to what it had: that is not another failure

torch.set_num_threads(1)
# A shell ignores the first two in what it starts in the background, `nohup` the third; every program that a test starts
# would inherit that.
USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for number, usual in USUAL.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# The same examples each time, unless one is looking for new ones: `make test` is red for a reason, never by luck.
settings.register_profile("same", max_examples=50, derandomize=True, database=None, deadline=None)
settings.register_profile("new", max_examples=1000, deadline=None)
settings.load_profile("same")

# Files are shared out in this order: the longest first, or one of them would be left for the end, alone.
LONGEST = (
    "install/test_extras.py",
    "backends/test_ray.py",
    "interop/test_parity_multi.py",
    "faults/test_parent.py",
    "test_docs.py",
    "faults/test_deaths.py",
    "interop/test_parallel_envs.py",
    "interop/test_grid.py",
    "interop/test_captured_envs.py",
    "background/test_running.py",
    "backends/test_multi.py",
    "faults/test_host_process.py",
    "faults/test_launchers.py",
    "examples/test_examples.py",
    "faults/test_remote_workers.py",
    "interop/test_compat.py",
    "faults/test_forks.py",
    "faults/test_programs.py",
    "interop/test_scripts.py",
    "envs/test_jax.py",
    "examples/test_calls.py",
    "buffers/test_full_disk.py",
    "backends/test_shared_objects.py",
)


@pytest.hookimpl(tryfirst=True)  # before they are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.nodeid.removeprefix("tests/")):
            item.add_marker(pytest.mark.slow)
    places = {str(HERE / file): place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(str(item.path), len(LONGEST)))
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        # Processes that share the tests out agree on them by name: an address is another one in each.
        raise pytest.UsageError(f"the names of these tests hold addresses of objects, give them ids: {unstable}")
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def pytest_collection_finish() -> None:
    """What was imported stays: garbage is looked for among the rest, many times as fast."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def programs():
    """Runs programs of their own; see tests/programs.py."""
    made = Programs()
    yield made
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    item.stash[FAILED] = item.stash.get(FAILED, False) or call.excinfo is not None  # also where that was expected


@pytest.fixture(autouse=True)
def _nothing_stays_behind(request: pytest.FixtureRequest):
    """Whatever reap starts or opens in a test has ended with it; fixtures of a wider scope are older than this one."""
    guard = no_leaks(libraries=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    guard.__enter__()
    yield
    for number, usual in handlers.items():
        left = signal.signal(number, usual)  # TorchRL's storages in files install one, until the first Ctrl-C
        assert not str(getattr(left, "__module__", "")).startswith("reap"), f"left behind: a handler of {number!r}"
    graded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)  # the tests after this one are not to blame
    assert graded, "left behind: gradients are off in this thread"
    request.node.funcargs.clear()  # what the test was given is no longer needed, but would live on
    if not request.node.stash[FAILED] and request.node.get_closest_marker("leaves_a_thread") is None:
        guard.__exit__(None, None, None)


@pytest.fixture
def log(tmp_path, monkeypatch):
    """What reap logs; its first line opens `gate`."""
    handler = OpensGate(tmp_path / "gate")
    handler.be_impatient = lambda: monkeypatch.setattr(silence, "LOGGED_AFTER", 0.6)
    logging.getLogger("reap").addHandler(handler)
    yield handler
    logging.getLogger("reap").removeHandler(handler)
