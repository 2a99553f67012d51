"""One rank of `polarlm train`: training, handed what it may not import itself, the writing of samples."""

import sys

from polarlm.generate import write_samples
from polarlm.train.__main__ import main

if __name__ == "__main__":
    sys.exit(main(after_save=write_samples))
