"""How well training code uses a machine, as numbers that predictions are multiplied with: by default, this library's.

`speed` is the one fitted constant. Profiles of other frameworks, whose published speeds the planner is checked with, are
beside the package (`benchmarks/published/profiles.yaml`).
"""

from typing import Literal

from pydantic import Field

from optimus.optim.rule import Rule
from optimus.plan.collectives import Algorithm
from optimus.section import Section

_FP32 = 4.0  # bytes


class Profile(Section):
    """What a framework fuses, overlaps and stores per parameter."""

    speed: float = Field(1.0, gt=0, description="Its computing speed to the predicted one.")
    attention: float = Field(0.9, ge=0, le=1)
    """Speed of its attention kernel to the machine's best; 0: scores are stored in memory."""
    products: Literal["fp16", "fp8", "fp4"] | None = None
    """Type of the matrix products, where it is another than `train.precision`."""
    recompute: frozenset[str] = frozenset()
    """Recomputed besides: act (what lies between the products of a feed-forward layer), scores (the attention's core alone)
    or products (all but that core and every second matrix product)."""
    passes: float = Field(1.2, gt=0)
    """Memory traffic of what is no matrix product, to that of fused kernels."""
    passes_experts: float | None = Field(None, gt=0)
    """The same between the products of experts, and in dispatch; None: as elsewhere."""
    host: float = Field(0.0, ge=0)
    """Seconds that the host needs to start a microbatch's passes of a block with experts."""
    cast: float = Field(3.0, ge=0)
    """Bytes read and written per element of either factor to make it fp8 or fp4, before each product."""
    overlap_data: float = Field(1.0, ge=0, le=1)
    """Share of the backward pass beside which gradients are reduced."""
    overlap_gather: float = Field(1.0, ge=0, le=1)
    """Share of computing beside which parameters are gathered."""
    overlap_tensor: float = Field(0.2, ge=0, le=1)
    """Share of the tensor-parallel collectives that is overlapped."""
    overlap_expert: float = Field(0.0, ge=0, le=1)
    """Share of the expert-parallel collectives that is overlapped."""
    overlap_shared: float = Field(1.0, ge=0, le=1)
    """Share of the computing of experts that all tokens meet beside which tokens go to those that they choose, and back."""
    collectives: Algorithm = "chosen"
    """chosen: as this library chooses (`choices`). Or whether groups on several nodes are one ring, hierarchical, or
    whichever is faster; or gather and scatter as the vendor's library or PCCL have been measured on this machine."""
    gathers: int = Field(0, ge=0)
    """Collectives in which the parameters of a block are gathered, and its gradients scattered; 0: so large ones that
    their number makes no difference."""
    copies: Literal["expert", "rank", "node", "levels"] = "levels"
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
    host_traffic: float = Field(0.0, ge=0)
    """Bytes per updated parameter between host and device in a step, where the optimizer's state is on the host."""

    def state_bytes(self, rule: Rule) -> float:
        """Bytes of master weights and of what `rule` stores, per parameter; none of those that are frozen."""
        if not rule.trains:
            return 0.0
        return _FP32 * (1 + len(rule.kinds)) if self.state is None else self.state
