"""From raw text to batches of tokens, in the paper's three steps (Optimus, section 4 "Data preprocessing").

`prepare` tokenises documents into one stream, shuffles all training instances with one keyed permutation and gathers
them into shards; `Shards` opens the folder it leaves; `TokenLoader` hands each rank its part of every global batch.
Names load on first use, so that importing the package costs nothing.
"""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.config.sizes import parse_size
    from optimus.data.loader import TokenLoader
    from optimus.data.permutation import Permutation
    from optimus.data.preparation import prepare
    from optimus.data.shards import Shards

__all__ = ["Permutation", "Shards", "TokenLoader", "parse_size", "prepare"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Permutation": "optimus.data.permutation",
        "Shards": "optimus.data.shards",
        "TokenLoader": "optimus.data.loader",
        "parse_size": "optimus.config.sizes",
        "prepare": "optimus.data.preparation",
    },
)
