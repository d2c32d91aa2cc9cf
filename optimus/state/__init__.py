"""The home of the model state: chunks, and the optimizer step on them."""

from optimus.state.boxes import Box, boxes
from optimus.state.loading import Send, load_boxes
from optimus.state.model_state import ModelState
from optimus.state.plan import bytes_by_kind, divisions, plan_chunks, writers

__all__ = ["Box", "ModelState", "Send", "boxes", "bytes_by_kind", "divisions", "load_boxes", "plan_chunks", "writers"]
