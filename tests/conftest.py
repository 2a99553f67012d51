"""What holds for every test: one thread, so that forked workers (ranks.py) never wait for a dead pool of threads; and
no presets of the person who runs them."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ["XDG_CONFIG_HOME"] = os.devnull
