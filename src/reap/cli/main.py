"""The entry point: runs a command, and prints errors in one line, without a traceback unless `--traceback` is given."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from reap import __version__
from reap.cli import bench, check, collect, doctor, show, watch
from reap.errors import ReapError
from reap.join import add_arguments, run

_COMMANDS = (collect, bench, check, doctor, show, watch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status of the process."""
    parser = argparse.ArgumentParser(
        prog="reap", description="Experience for reinforcement learning on PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"reap {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        name = module.__name__.rpartition(".")[2]
        added = commands.add_parser(
            name,
            help=(module.__doc__ or "").partition(": ")[2].splitlines()[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(added)
        added.set_defaults(run=module.run)
    joining = commands.add_parser("join", help="run workers of this machine for a collector on another")
    add_arguments(joining)
    joining.set_defaults(run=run)
    args = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        return command(args)
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ReapError, AssertionError, OSError) as error:
        if args.traceback:
            raise
        print(f"reap: {error}", file=sys.stderr)
        return 1
