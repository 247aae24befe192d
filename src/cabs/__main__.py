"""``python -m cabs`` is the ``cabs`` command."""

import sys

from cabs.cli import main

if __name__ == "__main__":
    sys.exit(main())
