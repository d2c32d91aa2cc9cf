"""A dense model for PyTorch's own tensor parallelism (`parallelize_module`, DTensor), for `bench tensor-parallel`.

The architecture is that of our `olmo` family, made of `nn.Linear` and torch's operations. The plan is that of PyTorch's
tutorial and of torchtitan: projections column- and row-wise, a split vocabulary, a parallel loss, with or without
sequence parallelism.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from optimus.config import ModelConfig
from optimus.kernels.rotary import rotary_reference, rotary_table
from optimus.model import Transformer


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.q, self.k, self.v, self.out = (nn.Linear(config.hidden, config.hidden, bias=False) for _ in range(4))

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q, k, v = (project(x_BSH).unflatten(-1, (-1, self.head_size)) for project in (self.q, self.k, self.v))
        q, k = (rotary_reference(x, (cos_SD, sin_SD)) for x in (q, k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.hidden, config.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSH)) * self.up(x_BSH))


class Block(nn.Module):
    """Attention and feed-forward layer, each after a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (
            nn.LayerNorm(config.hidden, config.norm_eps, elementwise_affine=False) for _ in range(2)
        )
        self.attention, self.mlp = Attention(config), FeedForward(config)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos_SD, sin_SD)
        return x_BSH + self.mlp(self.mlp_norm(x_BSH))


class Dense(nn.Module):
    """A dense model from tokens [B, S] to logits [B, S, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps, elementwise_affine=False)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        table = rotary_table(
            torch.arange(tokens_BS.shape[1]), self.config.hidden // self.config.heads, self.config.rope_theta
        )
        x_BSH = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSH = block(x_BSH, *table)
        return self.head(self.norm(x_BSH))


@torch.no_grad()
def same_weights(ours: Transformer) -> Dense:
    """Returns the rival with the weights of a whole model of ours."""
    model = Dense(ours.config)
    model.embedding.weight.copy_(ours.embedding.weight)
    model.head.weight.copy_(ours.head.weight)
    given = dict(ours.named_parameters())
    for name, weight in model.blocks.named_parameters(prefix="blocks"):
        block, layer, part = name.removesuffix(".weight").rsplit(".", 2)
        if part in ("out", "down"):
            weight.copy_(given[f"{block}.{layer}.{part}.weight"])
        else:
            stacked, parts = ("qkv", "qkv") if layer == "attention" else ("gate_up", ("gate", "up"))
            weight.copy_(given[f"{block}.{layer}.{stacked}.weight"][parts.index(part)])
    return model


def parallelize(model: Dense, mesh: DeviceMesh, *, sequence: bool) -> Dense:
    """Splits the model over the ranks of `mesh`."""
    rows = Shard(1) if sequence else Replicate()
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=rows)
    block: dict[str, Any] = {f"attention.{name}": column for name in "qkv"}
    block |= {"attention.out": row, "mlp.gate": column, "mlp.up": column, "mlp.down": row}
    whole: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        inputs: dict[str, Any] = {
            "input_layouts": (rows, None, None),
            "desired_input_layouts": (Replicate(), None, None),
        }
        block |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        block |= {"attention": PrepareModuleInput(**inputs)}
        block |= {"mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))}
        whole |= {"norm": SequenceParallel()}
    parallelize_module(model, mesh, whole)
    for one in model.blocks:
        parallelize_module(one, mesh, block)
    return model
