"""The command line: `reap collect`, `bench`, `check`, `doctor`, `show`, `watch` and `join`; also `python -m reap`."""

from reap.cli.main import main

__all__ = ["main"]
