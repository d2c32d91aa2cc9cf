"""What every section of the configuration is."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from optimus.disk import user_path
from optimus.errors import UserError


def _expanded(text: str) -> str:
    try:
        return str(user_path(text))
    except UserError as error:
        raise ValueError(str(error)) from None


PathText = Annotated[str, AfterValidator(_expanded)]  # ~ and $NAME are expanded when the tree is read


class Section(BaseModel):
    """A node of the tree: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)
