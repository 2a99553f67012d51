"""PolarLM: from raw text to a trained, evaluated and served language model, on a laptop or a supercomputer."""

__version__ = "0.1.0"
