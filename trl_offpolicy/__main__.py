"""``python -m trl_offpolicy``: the command line."""

import sys

from trl_offpolicy.cli import main

if __name__ == "__main__":
    sys.exit(main())
