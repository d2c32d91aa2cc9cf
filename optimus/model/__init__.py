"""Models, built for one device."""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.model.batch import Batch
    from optimus.model.cache import KVCache
    from optimus.model.causal import CausalModel, Losses
    from optimus.model.transformer import Transformer

__all__ = ["Batch", "CausalModel", "KVCache", "Losses", "Transformer"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the module
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "Batch": "optimus.model.batch",
            "CausalModel": "optimus.model.causal",
            "KVCache": "optimus.model.cache",
            "Losses": "optimus.model.causal",
            "Transformer": "optimus.model.transformer",
        },
    )
