"""The base of every part of a run's configuration."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

LARGEST_SIZE = 2**31 - 1
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]  # of an axis or a batch: an array's index
Many = Annotated[int, Field(ge=1, le=2**20)]  # ranks, layers, heads: what a process is asked to count through
_LARGEST = 2**63 - 1  # of any number


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

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_extremes(cls, value: Any) -> Any:
        """Numbers that no array counts with, and texts that no system takes for a name."""
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and each > _LARGEST:
                raise ValueError(f"should be at most {_LARGEST}")
            if isinstance(each, str) and "\0" in each:
                raise ValueError("should not hold the character NUL")
        return value
