"""PolarLM: from raw text to a trained language model that writes."""

__version__ = "0.1.0"
