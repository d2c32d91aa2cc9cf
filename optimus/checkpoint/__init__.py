"""Checkpoints: what is written where, atomically, and reading it back."""

from typing import TYPE_CHECKING

from optimus.checkpoint.folder import Description, find_checkpoint, list_checkpoints, read_description
from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.checkpoint.store import load_model, load_state, save_model, save_state

__all__ = [
    "Description",
    "find_checkpoint",
    "list_checkpoints",
    "load_model",
    "load_state",
    "read_description",
    "save_model",
    "save_state",
]

_STORE = "optimus.checkpoint.store"
__getattr__ = lazy_exports(
    __name__, {"load_model": _STORE, "load_state": _STORE, "save_model": _STORE, "save_state": _STORE}
)
