from __future__ import annotations

import signal

import pytest
import torch

torch.set_num_threads(1)
# Started in the background by a shell, we would ignore Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        # Processes that share the tests out agree on them by name: an address is another one in each.
        raise pytest.UsageError(f"the names of these tests hold addresses of objects, give them ids: {unstable}")
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
