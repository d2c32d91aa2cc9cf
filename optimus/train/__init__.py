"""The training run: checks before it, the step, the loop, the hooks around it."""

from typing import TYPE_CHECKING

from optimus.lazy import callable_package, lazy_exports

if TYPE_CHECKING:
    from optimus.train.start import train

__all__ = ["train"]

__getattr__, __dir__ = lazy_exports(__name__, {"train": "optimus.train.start"})
callable_package(__name__, "train")
