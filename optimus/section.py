"""What every section of the configuration is."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict

from optimus.disk import user_path
from optimus.errors import UserError

Result = TypeVar("Result")


def reported_as_value(read: Callable[[str], Result], value: Any) -> Any:
    """What `read` makes of a text; other values are left to the tree. Raises `ValueError` for its `UserError`."""
    try:
        return read(value) if isinstance(value, str) else value
    except UserError as error:
        raise ValueError(str(error)) from None


def _expanded(text: str) -> Any:
    return text if "://" in text else str(reported_as_value(user_path, text))


PathText = Annotated[str, AfterValidator(_expanded)]  # ~ and $NAME are expanded when the tree is read; URLs stay


class Section(BaseModel):
    """A node of the tree: unknown keys and wrong types are errors, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def given(self, *keys: str) -> list[str]:
        """Those of these keys that have other values than their defaults."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
