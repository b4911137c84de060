"""`python -m flowkit` is `flowkit`."""

import sys

from flowkit.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
