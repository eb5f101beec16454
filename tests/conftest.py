from __future__ import annotations

import re
import signal
from collections import Counter

import pytest
import torch

torch.set_num_threads(1)
# Started in the background by a shell, we would ignore Ctrl-C, and so would every program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _give_every_test_one_name(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def _give_every_test_one_name(items: list[pytest.Item]) -> None:
    """Take the addresses of objects out of the tests' names: processes that run side by side must agree on them."""
    seen: Counter[str] = Counter()
    for item in items:
        name = re.sub(r" at 0x[0-9a-f]+", "", item.nodeid)
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name.removesuffix(']')}#{seen[name]}]"
        item._nodeid = name
