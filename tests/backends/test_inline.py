"""The inline backend passes the suite every backend passes."""

from __future__ import annotations

import pytest

from reap.collectors import Collector
from reap.testing import backend_checks, check_backend


@pytest.mark.parametrize("name", backend_checks)
def test_inline(name: str) -> None:
    backend_checks[name](Collector)


def test_check_backend_names_the_broken_promise() -> None:
    class Forgetful(Collector):
        """Delivers the same object over and over: batches that are kept change."""

        def __init__(self, env, policy, **options):
            super().__init__(env, policy, return_same_td=True, **options)

    with pytest.raises(AssertionError, match="batches_are_kept"):
        check_backend(Forgetful)
