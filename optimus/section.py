"""The base class of the configuration's sections, and the types of the sections' paths."""

from collections.abc import Callable
from copy import deepcopy
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict

from optimus.copies import is_url, url_text
from optimus.disk import user_path
from optimus.errors import UserError

Result = TypeVar("Result")


def reported_as_value(read: Callable[[str], Result], value: Any) -> Any:
    """Applies `read` to a string, and returns any other value unchanged. Converts a `UserError` of `read` to a
    `ValueError`.
    """
    try:
        return read(value) if isinstance(value, str) else value
    except UserError as error:
        raise ValueError(str(error)) from None


def _expanded(text: str) -> Any:
    return str(reported_as_value(user_path, text))


def _expanded_or_url(text: str) -> Any:
    return url_text(text) if is_url(text) else _expanded(text)


PathText = Annotated[str, AfterValidator(_expanded)]  # validation expands ~ and $NAME, and refuses URLs
PathOrUrl = Annotated[str, AfterValidator(_expanded_or_url)]


class Section(BaseModel):
    """A node of the configuration tree; unknown keys, wrong types, NaN and infinity are errors."""

    __slots__ = ("_locked",)  # pydantic neither copies nor compares this attribute
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def locked(self) -> bool:
        """True if assignments raise an error."""
        return getattr(self, "_locked", False)

    def lock(self) -> None:
        """Makes assignments to this section and its subsections raise an error.

        The contents of lists and dicts can still change.

        Copies each value first, because other sections may share the value.
        """
        for name in type(self).model_fields:
            own = self.__dict__[name] = deepcopy(getattr(self, name))
            for each in own if isinstance(own, list) else [own]:
                if isinstance(each, Section):
                    each.lock()
        object.__setattr__(self, "_locked", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.locked:
            raise RuntimeError(
                f"the configuration of a resolved run is locked: change {name} before the run is resolved"
            )
        super().__setattr__(name, value)

    def non_default(self, *keys: str) -> list[str]:
        """Returns the `keys` whose values differ from the defaults."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
