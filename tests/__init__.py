from __future__ import annotations


def examples(count: int) -> int:
    """How many to draw: so many in `make test`, ten times as many in `make test-all` (see the profiles in conftest)."""
    from hypothesis import settings  # not for the processes that a test starts, which import this too

    return count * settings.default.max_examples // 100
