from __future__ import annotations


def example_count(count: int) -> int:
    """How many to draw: half of that in `make test`, ten times that in `make test-all` (the profiles in conftest)."""
    from hypothesis import settings  # not for the processes that a test starts, which import this too

    assert settings.default is not None
    return count * settings.default.max_examples // 100
