"""A language model of one's own: gated causal convolutions instead of attention."""

import torch.nn.functional as F
from torch import Tensor, nn

from optimus.extend import ModelRow, ModelSpec, Normal


class Block(nn.Module):
    """Mixes the last `kernel` positions of each channel."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.conv = nn.Conv1d(2 * width, 2 * width, kernel, groups=2 * width, padding=kernel - 1)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        mixed = self.conv(self.up(h).mT)[..., : x.shape[1]].mT  # without the right padding: causal
        return x + self.down(mixed * F.silu(self.gate(h)))


class Mixer(nn.Module):
    """An embedding, `depth` blocks, a norm and an output layer."""

    def __init__(self, vocab: int, width: int, depth: int, kernel: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, kernel) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mixer(vocab: int, width: int, depth: int, kernel: int = 4) -> ModelSpec:
    return ModelSpec(
        Mixer(vocab, width, depth, kernel),
        blocks="layers",
        embedding="embed",
        head="head",
        initial={"*norm.weight": "ones", "*bias": "zeros", "*.conv.weight": Normal(0.3), "*": Normal(0.02)},
        splits={"layers.*.up": "colwise", "layers.*.gate": "colwise", "layers.*.down": "rowwise"},
    )


ROWS = [ModelRow("mixer", mixer, small={"width": 32, "depth": 1})]
