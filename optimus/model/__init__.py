"""Transformers written for one device: no module of this package communicates or depends on how models are sharded."""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.model.batch import Batch
    from optimus.model.cache import KVCache
    from optimus.model.transformer import Losses, Transformer

__all__ = ["Batch", "KVCache", "Losses", "Transformer"]

_HOME = "optimus.model.transformer"
__getattr__, __dir__ = lazy_exports(
    __name__, {"Batch": "optimus.model.batch", "KVCache": "optimus.model.cache", "Losses": _HOME, "Transformer": _HOME}
)
