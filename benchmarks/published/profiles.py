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

    about: str = Field(description="Description of the framework, and sources of its properties.")
    attention: float = Field(1.0, ge=0, le=1)
    passes: float = Field(1.0, gt=0)
    overlap_tensor: float = Field(0.0, ge=0, le=1)
    gathers_again: bool = False
    overlap_shared: float = Field(0.0, ge=0, le=1)
    collectives: Algorithm = "ring"
    copies: Literal["expert", "rank", "node", "levels"] = "rank"
    attention_before: bool = False
    """True for an attention kernel of the previous generation of accelerators."""
    passes_eager: float | None = Field(None, gt=0)
    """`passes` without the compiler, or None without a compiler."""
    masks: bool = Field(False, description="Store the masks of dropout.")
    logits: float = Field(6.0, ge=0, description="Bytes per logit at the end of the forward pass.")
    whole_gradients: bool = False
    """True if gradients stay whole between microbatches as long as sharded parameters do."""
    late_gradients: bool = False
    """True if the backward pass allocates gradients one by one and the step frees them."""
    fragments: float = Field(1.0, ge=1)
    """Ratio of the allocator's memory of activations to their bytes; 1 counts allocations."""
    fixed: float = Field(0.0, ge=0, description="Other bytes, such as those of the device's context and of NCCL.")


class _File(Section):
    profiles: dict[str, FrameworkProfile]


@cache
def load_profile(name: str) -> FrameworkProfile:
    """Returns the profile of a framework. Raises `UserError` for an unknown name."""
    known = read_section(Path(__file__).with_name("profiles.yaml"), _File, "file of profiles").profiles
    if name not in known:
        raise UserError(f"framework '{name}' is not known; {nearest(name, known)}")
    return known[name]
