"""Join a collector: run workers for it on this machine.

    python -m reap.join --new-secret FILE                                 once; copy the file to every machine
    python -m reap.join --address HOST:PORT --secret-file FILE            on each machine (--workers N: for N of them)

The collector is one with `launcher="join"`; see docs/distributed.md. Ends when the collector does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from reap.backends.network.launchers import PATIENCE, join, new_secret
from reap.backends.network.node_connection import CLOSED
from reap.errors import ReapError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if the collector was closed normally."""
    parser = argparse.ArgumentParser(
        prog="python -m reap.join", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command, which `reap join` has too."""
    parser.add_argument("--address", metavar="HOST:PORT", help="where the collector listens")
    parser.add_argument(
        "--secret-file", metavar="FILE", help="what both sides know; nobody else may be able to read it"
    )
    parser.add_argument("--workers", type=int, default=1, help="how many to run here (default: %(default)s)")
    parser.add_argument("--listen", metavar="ADDRESS", help="of this machine; by default the one that leads to HOST")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds to wait for the collector")
    parser.add_argument("--again", action="store_true", help="when the collector ends, wait for the next")
    parser.add_argument("--new-secret", metavar="FILE", type=Path, help="make such a file, and do nothing else")
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed arguments, and return its exit status."""
    try:
        if args.new_secret is not None:
            new_secret(args.new_secret)
            return 0
        host, colon, port = (args.address or "").rpartition(":")
        if not colon or not port.isdigit() or not 0 < int(port) < 2**16:
            args.refuse(f"--address must be HOST:PORT, got {args.address!r}")
        names = ("workers", "listen", "patience", "again")
        why = join(host, int(port), args.secret_file, **{name: getattr(args, name) for name in names})
    except (ReapError, ConnectionError) as error:
        print(f"reap.join: {error}", file=sys.stderr)
        return 1
    print(f"reap.join: {why}", file=sys.stderr)
    return 0 if why == CLOSED else 1


if __name__ == "__main__":
    sys.exit(main())
