"""Describes how well a training framework uses a machine. The defaults describe this library."""

from typing import Literal

from pydantic import Field

from optimus.optim.rule import Rule
from optimus.plan.collectives import Algorithm
from optimus.section import Section

_FP32 = 4.0  # bytes


class Profile(Section):
    """The properties of a framework that determine the predicted time and memory.

    The machine's `overlap` multiplies all `overlap_*` shares.
    """

    speed: float = Field(1.0, gt=0, description="Computing speed relative to the prediction.")
    attention: float = Field(0.9, ge=0, le=1)
    """Speed of the attention kernel relative to the machine's best; 0: the kernel stores scores in memory."""
    products: Literal["fp16", "fp8", "fp4"] | None = None
    """Precision of the matmuls; None: `train.precision`. The head, the router and attention use bf16 instead of fp8 and
    fp4."""
    recompute: frozenset[str] = frozenset()
    """Recomputation besides the configured one: act (the activation function between the matmuls of a feed-forward
    layer), scores (the attention core alone), products (all but the attention core and every second matmul). The three
    change the predicted time, not the predicted memory."""
    passes: float = Field(1.2, gt=0)
    """Memory traffic between matmuls, relative to fused kernels."""
    passes_experts: float | None = Field(None, gt=0)
    """Memory traffic between the matmuls of experts, and in dispatch, relative to fused kernels; None: `passes`."""
    host: float = Field(0.0, ge=0)
    """Seconds that the host needs to launch all kernels of one block with experts, per microbatch."""
    cast: float = Field(3.0, ge=0)
    """Bytes that a cast to fp8 or fp4 reads and writes per element of each operand."""
    overlap_data: float = Field(1.0, ge=0, le=1)
    """Share of the backward pass that overlaps the reduction of gradients."""
    overlap_gather: float = Field(1.0, ge=0, le=1)
    """Share of computation that overlaps the all-gather of parameters and, if parameters are sharded, the
    reduce-scatter of gradients."""
    overlap_tensor: float = Field(0.2, ge=0, le=1)
    """Share of the tensor-parallel collectives that computation overlaps."""
    gathers_again: bool = True
    """True if, with sequence parallelism, the backward pass all-gathers the input of a product again, instead of keeping
    the gathered input."""
    overlap_expert: float = Field(0.0, ge=0, le=1)
    """Share of the expert-parallel collectives that computation overlaps."""
    overlap_shared: float = Field(1.0, ge=0, le=1)
    """Share of the shared experts' computation that overlaps dispatch and combine, except with dispatch by
    all-gather."""
    collectives: Algorithm = "chosen"
    """Algorithm of collectives on several nodes. chosen: this library's choice, also within a node. ring, hierarchical:
    one ring or two levels; best: the faster of ring and hierarchical. library, pccl: all-gathers and reduce-scatters by
    the vendor's library or PCCL, with the measured figures of the machine file."""
    gathers: int = Field(0, ge=0)
    """Number of all-gathers of a block's parameters, and of reduce-scatters of the block's gradients, if parameters are
    sharded; 0: few large collectives."""
    copies: Literal["expert", "rank", "node", "levels"] = "levels"
    """Copies of a token that dispatch sends. expert: one copy to each chosen expert. rank: one copy to each rank with a
    chosen expert. node: one copy to each node with a chosen expert, with overlap of the transfers on both levels.
    levels: like node, without overlap (`parallel.dispatch.two_level`)."""
    broadcast: float = Field(0.0, ge=0)
    """Seconds to add for each rank's broadcast of its updated parameters."""
    blocking: bool = Field(False, description="True if ranks of a pipeline wait for their transfers.")
    gradient: float = Field(4.0, gt=0, description="Bytes of an accumulated gradient, per parameter.")
    reduced: float = Field(4.0, gt=0, description="Bytes of a gradient in its reduction, per parameter.")
    state: float | None = Field(None, gt=0)
    """Bytes of master weights and moments per parameter; None: the bytes that the update rules need, 12 with AdamW."""
    update: float = Field(2.5, gt=0)
    """Memory traffic of the update, without the gradient, as a multiple of the bytes of master weights and moments. The
    default is the traffic of one fused kernel."""
    host_traffic: float = Field(0.0, ge=0)
    """Bytes per updated parameter that a step moves between host and device."""

    def state_bytes(self, rule: Rule) -> float:
        """Returns the bytes of master weights and of the state of `rule`, per parameter; 0 for frozen parameters."""
        if not rule.trains:
            return 0.0
        return _FP32 * (1 + len(rule.kinds)) if self.state is None else self.state
