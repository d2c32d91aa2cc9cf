"""The families of models. A module of this package with a `FAMILY` defines a family."""

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from optimus.errors import nearest
from optimus.model.families import common as common
from optimus.model.families.family import Choice, Family, Field, Further, Key, Multiple, Same
from optimus.plugins import Table

__all__ = ["Choice", "Family", "Field", "Further", "Key", "Multiple", "Same", "families", "family_named"]


def families() -> Mapping[str, Family]:
    """Returns all families by name, including plugins' families."""
    return FAMILIES


def _library_families() -> dict[str, Family]:
    modules = (import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in found}


FAMILIES = Table("family", Family, _library_families)


def family_named(name: str) -> Family:
    """Returns the family `name`. Raises `ValueError` if there is no such family."""
    if name not in families():
        raise ValueError(f"family '{name}' is unknown; known are {', '.join(families())}: {nearest(name, families())}")
    return families()[name]
