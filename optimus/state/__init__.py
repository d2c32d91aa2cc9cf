"""The home of the model state: chunks, and the optimizer step on them."""

from optimus.state.boxes import Box, boxes, whole_boxes
from optimus.state.gathering import Gathering
from optimus.state.loading import Send, load_boxes
from optimus.state.model_state import ModelState
from optimus.state.plan import bytes_by_kind, divisions, elements_written, plan_chunks, plan_stages, writers

__all__ = [
    "Box",
    "Gathering",
    "ModelState",
    "Send",
    "boxes",
    "bytes_by_kind",
    "divisions",
    "elements_written",
    "load_boxes",
    "plan_chunks",
    "plan_stages",
    "whole_boxes",
    "writers",
]
