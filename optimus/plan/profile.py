"""Describes how well a training framework uses a machine. The defaults describe this library.

The profiles of other frameworks are outside the package (`benchmarks/published/profiles.yaml`).
"""

from typing import Literal

from pydantic import Field

from optimus.optim.rule import Rule
from optimus.plan.collectives import Algorithm
from optimus.section import Section

_FP32 = 4.0  # bytes


class Profile(Section):
    """A framework's fused kernels, overlap of communication, and bytes per parameter."""

    speed: float = Field(1.0, gt=0, description="Computing speed relative to the prediction.")
    attention: float = Field(0.9, ge=0, le=1)
    """Speed of the framework's attention kernel relative to the machine's best; 0: the kernel stores scores in memory."""
    products: Literal["fp16", "fp8", "fp4"] | None = None
    """Type of the matmuls; None: `train.precision`."""
    recompute: frozenset[str] = frozenset()
    """Additional recomputation: act (the activation function between the matmuls of a feed-forward layer), scores (the
    attention core alone) or products (all but the attention core and every second matmul)."""
    passes: float = Field(1.2, gt=0)
    """Memory traffic between matmuls, relative to fused kernels."""
    passes_experts: float | None = Field(None, gt=0)
    """Memory traffic between the matmuls of experts, and in dispatch, relative to fused kernels; None: the same as
    `passes`."""
    host: float = Field(0.0, ge=0)
    """Seconds that the host needs to launch a microbatch's passes of a block with experts."""
    cast: float = Field(3.0, ge=0)
    """Bytes that a cast to fp8 or fp4 reads and writes per element of either operand, before each matmul."""
    overlap_data: float = Field(1.0, ge=0, le=1)
    """Share of the backward pass that overlaps the reduction of gradients."""
    overlap_gather: float = Field(1.0, ge=0, le=1)
    """Share of computation that overlaps the all-gather of parameters and, if parameters are sharded, the
    reduce-scatter of gradients."""
    overlap_tensor: float = Field(0.2, ge=0, le=1)
    """Share of the tensor-parallel collectives that computation overlaps."""
    overlap_expert: float = Field(0.0, ge=0, le=1)
    """Share of the expert-parallel collectives that computation overlaps."""
    overlap_shared: float = Field(1.0, ge=0, le=1)
    """Share of the shared experts' computation that overlaps the dispatch of tokens to the chosen experts, and the
    combine."""
    collectives: Algorithm = "chosen"
    """Algorithm of collectives on several nodes; chosen also applies within a node. chosen: this library's choice.
    ring, hierarchical: one ring or two levels; best: the faster of ring and hierarchical. library, pccl: all-gathers
    and reduce-scatters by the vendor's library or PCCL, with the measured figures of the machine file."""
    gathers: int = Field(0, ge=0)
    """Number of all-gathers of a block's parameters, and also number of reduce-scatters of its gradients; 0:
    collectives so large that their number makes no difference."""
    copies: Literal["expert", "rank", "node", "levels"] = "levels"
    """Copies of a token that dispatch sends. expert: one copy to each chosen expert. rank: one copy to each rank with a
    chosen expert. node: one copy to each node with a chosen expert; the node forwards the token to its ranks while
    other tokens arrive. levels: like node, but the node forwards tokens after all tokens have arrived
    (`parallel.dispatch.two_level`)."""
    broadcast: float = Field(0.0, ge=0)
    """Seconds to add for each rank's broadcast, for frameworks in which each rank in turn broadcasts its updated
    parameters."""
    blocking: bool = Field(False, description="True if ranks of a pipeline wait for their transfers.")
    gradient: float = Field(4.0, gt=0, description="Bytes of an accumulated gradient, per parameter.")
    reduced: float = Field(4.0, gt=0, description="Bytes of a gradient in its reduction, per parameter.")
    state: float | None = Field(None, gt=0)
    """Bytes of master weights and moments per parameter; None: the bytes that the update rules need, 12 with AdamW."""
    update: float = Field(2.5, gt=0)
    """Memory traffic of the update, as a multiple of `state`. The default is the traffic of one kernel, which reads
    state and gradient, and writes state and parameter."""
    host_traffic: float = Field(0.0, ge=0)
    """Bytes per updated parameter that a step moves between host and device, for frameworks with the optimizer state
    on the host."""

    def state_bytes(self, rule: Rule) -> float:
        """Returns the bytes of master weights and of the state of `rule`, per parameter; 0 for frozen parameters."""
        if not rule.trains:
            return 0.0
        return _FP32 * (1 + len(rule.kinds)) if self.state is None else self.state
