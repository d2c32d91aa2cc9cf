"""What every section of the configuration is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A node of the tree: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)
