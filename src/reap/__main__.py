"""`python -m reap`: the command line."""

import sys

from reap.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
