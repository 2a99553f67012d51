"""What a JSON file must hold, as a type."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Record(BaseModel):
    """What a JSON file holds, by its types; keys beside those declared are left alone."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def check(cls, value: Any) -> None:
        """
        Raises:
            ValueError: the value is not like this; says where and why.
        """
        try:
            cls.model_validate(value)
        except ValidationError as error:
            raise ValueError(_describe(error)) from None


def _describe(error: ValidationError) -> str:
    fault = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, fault["loc"]))
    message = fault["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return f"`{where}` {message}" if where else f"the whole {message}"
