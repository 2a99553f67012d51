"""Letting a model write: how the next token is chosen, the cache of keys and values, the loop around them, and
samples of a run."""

from polarlm.generate.cache import KVCache
from polarlm.generate.engine import generate
from polarlm.generate.row import Completion
from polarlm.generate.samples import write_samples
from polarlm.generate.sampling import Sampler
from polarlm.generate.settings import Settings
from polarlm.generate.stop import StopStrings

__all__ = ["Completion", "KVCache", "Sampler", "Settings", "StopStrings", "generate", "write_samples"]
