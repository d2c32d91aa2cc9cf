"""Checkpoints: what is written where, atomically, and reading it back."""

from typing import TYPE_CHECKING

from optimus.checkpoint.folder import DamagedError, Description, find_checkpoint, list_checkpoints, read_description
from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.checkpoint.reader import Reader, verify
    from optimus.checkpoint.saving import Saver, Target
    from optimus.checkpoint.store import load_model, load_state, save_model

__all__ = [
    "DamagedError",
    "Description",
    "Reader",
    "Saver",
    "Target",
    "find_checkpoint",
    "list_checkpoints",
    "load_model",
    "load_state",
    "read_description",
    "save_model",
    "verify",
]

_READER, _SAVING, _STORE = (f"optimus.checkpoint.{name}" for name in ("reader", "saving", "store"))
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Reader": _READER,
        "Saver": _SAVING,
        "Target": _SAVING,
        "load_model": _STORE,
        "load_state": _STORE,
        "save_model": _STORE,
        "verify": _READER,
    },
)
