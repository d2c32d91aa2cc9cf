"""From raw text to batches of tokens, in the paper's three steps (Optimus, section 4 "Data preprocessing").

`prepare` tokenises documents into one stream, shuffles all training instances with one keyed permutation and gathers
them into shards; `Shards` opens the folder it leaves; `TokenLoader` hands each rank its part of every global batch.
Names load on first use, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimus.data.loader import TokenLoader
    from optimus.data.permutation import Permutation
    from optimus.data.preparation import parse_size, prepare
    from optimus.data.shards import Shards

_HOMES = {
    "Permutation": "permutation",
    "Shards": "shards",
    "TokenLoader": "loader",
    "parse_size": "preparation",
    "prepare": "preparation",
}

__all__ = ["Permutation", "Shards", "TokenLoader", "parse_size", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
