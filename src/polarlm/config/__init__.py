"""The run as typed values, and where each value comes from."""

from polarlm.config.errors import UserError

__all__ = ["UserError"]
