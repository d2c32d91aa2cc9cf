"""Profiles of the frameworks whose published speeds and memory test the planner (`profiles.yaml`).

Each has one constant, `speed`, which is fitted to measurements of the framework; every other value is a property that
its documentation states.
"""

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from optimus.config.load import read_section
from optimus.errors import UserError, nearest
from optimus.plan.collectives import Algorithm
from optimus.plan.profile import Profile
from optimus.section import Section


class FrameworkProfile(Profile):
    """One framework: the planner's factors, and properties that affect its memory alone."""

    about: str = Field(description="What it is, and where its properties are stated.")
    attention: float = Field(1.0, ge=0, le=1)
    passes: float = Field(1.0, gt=0)
    overlap_tensor: float = Field(0.0, ge=0, le=1)
    overlap_shared: float = Field(0.0, ge=0, le=1)
    collectives: Algorithm = "ring"
    copies: Literal["expert", "rank", "node", "levels"] = "rank"
    attention_before: bool = False
    """Whether its attention kernel was written for the generation of accelerators before."""
    passes_eager: float | None = Field(None, gt=0)
    """`passes` where it runs without its compiler; None: it has none."""
    masks: bool = Field(False, description="Whether it stores the masks of dropout.")
    logits: float = Field(6.0, ge=0, description="Bytes per logit at the end of the forward pass.")
    whole_gradients: bool = False
    """Whether gradients stay whole between microbatches where sharded parameters do."""
    late_gradients: bool = False
    """Whether gradients are allocated as the backward pass makes them, and freed by the step."""
    fragments: float = Field(1.0, ge=1)
    """Memory that activations take in the allocator, to their bytes; 1: as it counts allocations."""
    fixed: float = Field(0.0, ge=0, description="Bytes besides, such as those of the device's context and of NCCL.")


class _File(Section):
    profiles: dict[str, FrameworkProfile]


@cache
def load_profile(name: str) -> FrameworkProfile:
    """Returns the profile of a framework. Raises `UserError` for an unknown name."""
    known = read_section(Path(__file__).with_name("profiles.yaml"), _File).profiles
    if name not in known:
        raise UserError(f"framework '{name}' is not known; {nearest(name, known)}")
    return known[name]
