"""The base of every part of a run's configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A typed, immutable part of the configuration; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
