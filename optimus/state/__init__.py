"""The home of the model state: chunks, and the optimizer step on them."""

from optimus.state.model_state import ModelState

__all__ = ["ModelState"]
