"""`python -m polarlm` is the command `polarlm`."""

import sys

from polarlm.cli import main

if __name__ == "__main__":
    sys.exit(main())
