"""How well a training program uses a machine, as data: what it fuses, what it overlaps, what it keeps per parameter.

`optimus` is this library; the others are those whose published speeds the planner is checked with. Each has one constant,
`speed`, that is fitted to what has been measured with it; everything else is a property that its documentation states.
"""

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from optimus.config.load import read_section
from optimus.errors import UserError, nearest
from optimus.optim.rule import Rule
from optimus.plan.collectives import Algorithm
from optimus.section import Section

_FP32 = 4.0  # bytes


class Software(Section):
    """One training program."""

    about: str = Field(description="What it is, and where its properties are stated.")
    speed: float = Field(1.0, gt=0, description="Its computing speed to the predicted one: the one fitted constant.")
    attention: float = Field(1.0, ge=0, le=1)
    """Speed of its attention kernel to the machine's best; 0: scores are kept in memory."""
    causal: bool = True
    """Whether attention leaves out the half of the scores that a causal mask hides."""
    attention_before: bool = False
    """Whether that kernel was written for the generation of accelerators before."""
    passes: float = Field(1.0, gt=0)
    """Memory traffic of what is no matrix product, to that of fused kernels."""
    passes_eager: float | None = Field(None, gt=0)
    """The same where it runs without its compiler; None: it has none."""
    passes_experts: float | None = Field(None, gt=0)
    """The same between the products of experts, and on the way there and back; None: as elsewhere."""
    host: float = Field(0.0, ge=0)
    """Seconds that the host needs to start a microbatch's passes of a block with experts."""
    cast: float = Field(3.0, ge=0)
    """Bytes read and written per element of either factor to make it fp8 or fp4, before each product."""
    overlap_data: float = Field(1.0, ge=0, le=1)
    """Share of the backward pass beside which gradients are reduced."""
    overlap_gather: float = Field(1.0, ge=0, le=1)
    """Share of computing beside which parameters are gathered."""
    overlap_tensor: float = Field(0.0, ge=0, le=1)
    """Share of the tensor-parallel collectives that is hidden."""
    overlap_expert: float = Field(0.0, ge=0, le=1)
    """Share of the expert-parallel collectives that is hidden."""
    collectives: Algorithm = "ring"
    """Whether groups on several nodes are one ring, go node by node, or whichever is faster; or gather and scatter as
    the vendor's library or PCCL have been measured on this machine; or as this library chooses (`choices`)."""
    gathers: int = Field(0, ge=0)
    """Collectives in which the parameters of a block are gathered, and its gradients scattered; 0: so large ones that
    their number makes no difference."""
    copies: Literal["expert", "rank", "node", "levels"] = "rank"
    """A token is sent once to each chosen expert, to each rank, or to each node that has one, and on that while others come;
    levels: to each node, and when all are there to its ranks (`parallel.dispatch.two_level`)."""
    broadcast: float = Field(0.0, ge=0)
    """Seconds of one broadcast, where each rank in turn sends the others the parameters that it has updated; 0: they
    are gathered in one collective."""
    blocking: bool = Field(False, description="Whether a pipeline's ranks wait for their transfers.")
    gradient: float = Field(4.0, gt=0, description="Bytes of an accumulated gradient, per parameter.")
    reduced: float = Field(4.0, gt=0, description="Of these, what is sent to be reduced.")
    state: float | None = Field(None, gt=0)
    """Bytes of master weights and moments, per parameter; None: as the update rules have it, with AdamW 12."""
    update: float = Field(2.5, gt=0)
    """Times that a step moves that state: read and written, with the gradient and the parameter, where the update is
    one kernel."""
    masks: bool = Field(False, description="Whether it keeps the masks of dropout.")
    logits: float = Field(6.0, ge=0, description="Bytes per logit at the end of the forward pass.")
    whole_gradients: bool = False
    """Whether gradients stay whole between microbatches where sharded parameters do."""
    late_gradients: bool = False
    """Whether gradients are allocated as the backward pass makes them, and freed by the step. (The search does not
    count on it.)"""
    fragments: float = Field(1.0, ge=1)
    """Room that activations take in the allocator, to their bytes; 1: as it counts allocations."""
    fixed: float = Field(0.0, ge=0, description="Bytes besides, such as those of the device's context and of NCCL.")

    def kept(self, rule: Rule) -> float:
        """Bytes of master weights and of what `rule` keeps, per parameter; none of those that are frozen."""
        if not rule.trains:
            return 0.0
        return _FP32 * (1 + len(rule.kinds)) if self.state is None else self.state


class Softwares(Section):
    """The file."""

    software: dict[str, Software]


@cache
def load_software(name: str = "optimus") -> Software:
    """A training program by name. Raises `UserError` when it is not known."""
    known = read_section(Path(__file__).with_name("software.yaml"), Softwares).software
    if name not in known:
        raise UserError(f"software '{name}' is not known; {nearest(name, known)}")
    return known[name]
