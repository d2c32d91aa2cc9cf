"""The home of the model state: chunks, and the optimizer step on them."""

from optimus.state.model_state import ModelState
from optimus.state.plan import bytes_by_kind, divisions, plan_chunks

__all__ = ["ModelState", "bytes_by_kind", "divisions", "plan_chunks"]
