"""The run as typed values, and where each value comes from."""

from polarlm.config.errors import UserError
from polarlm.config.model import ModelConfig, RopeScaling

__all__ = ["ModelConfig", "RopeScaling", "UserError"]
