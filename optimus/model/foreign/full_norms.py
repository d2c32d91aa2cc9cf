"""Reads the epsilon and the gain of RMS norms, and defines an RMS norm with a constant statistic."""

import torch
from torch import Tensor, nn

from optimus.kernels.backend import compute_dtype


def epsilon_of(module: nn.Module) -> float:
    """Returns the module's first float attribute with `eps` in its name; without one, torch's default for an
    `nn.RMSNorm`, and 1e-6 for any other module."""
    values = [value for key, value in vars(module).items() if "eps" in key and isinstance(value, float)]
    if not values and isinstance(module, nn.RMSNorm):
        weight = module.weight  # None without elementwise_affine
        return torch.finfo(torch.float32 if weight is None else compute_dtype(weight.dtype)).eps
    return values[0] if values else 1e-6


def rms_gain(module: nn.Module, weight: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    """Returns the gain of `module`, `weight` or 1 + `weight`; None if `module` is no RMS norm that maps x to y."""
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon_of(module))
    for gain in (weight, 1 + weight):
        if torch.allclose(scaled * gain, y.detach().to(scaled), rtol=1e-4, atol=1e-4):
            return gain
    return None


class ConstantNorm(nn.Module):
    """An RMS norm whose statistic has no gradient. The gain is `weight` + `plus`.

    If given, `statistics` replaces the computed statistics: each call takes the next item, and the first item follows
    the last. `seen` has the statistic of every call.
    """

    def __init__(self, weight: nn.Parameter, eps: float, plus: float, statistics: list[Tensor] | None = None) -> None:
        super().__init__()
        self.weight, self.eps, self.plus, self.statistics = weight, eps, plus, statistics
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies x by the statistic and the gain."""
        statistic = torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.statistics is not None:
            statistic = self.statistics[len(self.seen) % len(self.statistics)]
        self.seen.append(statistic)
        return x * statistic * (self.weight + self.plus)


def offset_of(norm: nn.Module) -> float:
    """Returns 1 if a norm's gain is 1 + weight, else 0."""
    weight = norm.get_parameter("weight").detach()
    x = torch.ones(1, len(weight)).to(weight)
    with torch.no_grad():
        y = norm(x)
    return 1.0 if torch.allclose(y, (1 + weight).to(y).expand_as(y), rtol=1e-3, atol=1e-3) else 0.0
