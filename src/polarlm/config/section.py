"""The base of every part of a run's configuration."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A typed, immutable part of the configuration; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """A flag without its value reads as true, and true would count as 1."""
        assert info.field_name
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("needs a value; true and false are for switches")
        return value
