"""What holds for every test: one thread, so that forked workers (ranks.py) never wait for a dead pool of threads."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
