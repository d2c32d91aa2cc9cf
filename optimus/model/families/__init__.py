"""The families of published models, one file each. Start with `family.py`; `olmoe.py` is an example.

Every module of this package with a `FAMILY` defines a family, so a new file adds a family.
"""

import pkgutil
from functools import cache
from importlib import import_module

from optimus.errors import nearest
from optimus.model.families.family import Choice, Family, Field, Further, Key, Multiple, Same

__all__ = ["Choice", "Family", "Field", "Further", "Key", "Multiple", "Same", "families", "family_named"]


@cache
def families() -> dict[str, Family]:
    """Returns all families by their `model_type` in config.json."""
    modules = (import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.model_type: family for family in found}


def family_named(name: str) -> Family:
    """Returns the family `name`. Raises `ValueError` with the known names if there is no family of this name."""
    if name not in families():
        raise ValueError(f"family '{name}' is unknown; known are {', '.join(families())}: {nearest(name, families())}")
    return families()[name]
