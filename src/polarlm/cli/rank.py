"""One rank of `polarlm train`: training, handed what it may not import itself, the writing of samples."""

from functools import partial

from polarlm.generate import write_samples
from polarlm.parallel import end_with
from polarlm.train.__main__ import main

if __name__ == "__main__":
    end_with(partial(main, after_save=write_samples))
