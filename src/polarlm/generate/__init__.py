"""Letting a model write: how the next token is chosen, the cache of keys and values, and the loop around them."""

from polarlm.generate.cache import KVCache
from polarlm.generate.engine import generate
from polarlm.generate.row import Completion
from polarlm.generate.sampling import Sampler
from polarlm.generate.settings import Settings
from polarlm.generate.stop import StopStrings

__all__ = ["Completion", "KVCache", "Sampler", "Settings", "StopStrings", "generate"]
