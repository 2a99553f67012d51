"""One process on each node that reports back: what is wrong there, and an environment to be put there."""
