"""Inputs of the benchmark of the sparse block: shapes, weights, and tokens with a given routing.

The data determine the load, so that every contestant's own router makes the same choices. Each token belongs to a
pattern, which sets one input feature. The router's column for that feature holds the pattern's addition to the logits
of the experts. The load `learned` adds nothing: random logits spread the tokens nearly evenly.

Legend: T tokens, H hidden, I intermediate, J = 2 I, E experts, K experts per token, P patterns.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import preset
from optimus.config import preset_names
from optimus.errors import UserError, nearest

LOADS = ("learned", "uniform", "zipf", "one-hot")
_FORBIDDEN = -16.0  # added to a logit, leaves a probability of 1e-7
# Of an input: large, so that the router's weights, which multiply rounding errors of the input's gradient, stay small
_FLAG = 8.0
_KEEP_APART = 2.0  # least distance of the last chosen expert from the next one, in roundings of the logit


class Shape(NamedTuple):
    """The dimensions of a block."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    experts_per_token: int

    def __str__(self) -> str:
        return "/".join(map(str, self[1:]))

    def flops(self, tokens: int) -> int:
        """Returns the FLOPs of the experts, forward and backward: three matrices, three products each, 2 operations a
        term."""
        return 18 * tokens * self.experts_per_token * self.hidden * self.intermediate


class Weights(NamedTuple):
    """Parameters of a block, or their gradients."""

    router_EH: Tensor
    gate_up_EJH: Tensor
    down_EHI: Tensor


class Inputs(NamedTuple):
    """The input of a pass, and the gradient of its output."""

    x_TH: Tensor  # a leaf with a gradient
    y_grad_TH: Tensor

    def first(self, tokens: int) -> "Inputs":
        return Inputs(self.x_TH.detach()[:tokens].clone().requires_grad_(), self.y_grad_TH[:tokens].clone())


_SHAPES = {"olmoe": Shape("olmoe", 2048, 1024, 64, 8), "small": Shape("small", 512, 256, 32, 4)}


def parse_shape(text: str) -> Shape:
    """Returns the shape of `olmoe` (2048/1024/64/8), `small` (512/256/32/4), a preset with experts, or H/I/E/K.

    H/I/E/K is hidden/intermediate/experts/chosen. Raises `UserError` for any other text.
    """
    if text in _SHAPES:
        return _SHAPES[text]
    if text in preset_names():
        model = preset(text)
        if model.experts is None or model.experts_per_token is None:
            raise UserError(f"--shape {text}: this preset has no experts; choose one that has, or olmoe, or H/I/E/K")
        return Shape(text, model.hidden, model.intermediate, model.experts, model.experts_per_token)
    if "/" not in text:
        raise UserError(f"--shape {text}: no such block; {nearest(text, [*_SHAPES, *preset_names()])} or H/I/E/K")
    numbers = [int(word) if word.isdecimal() else 0 for word in text.split("/")]
    if len(numbers) != 4 or min(numbers) < 1 or numbers[3] > numbers[2]:
        raise UserError(
            f"--shape {text}: give hidden/intermediate/experts/chosen, chosen at most experts: 2048/1024/64/8"
        )
    return Shape(text, *numbers)


def make_weights(shape: Shape, dtype: torch.dtype, device: torch.device) -> Weights:
    """Returns random weights that keep the size of activations, equal for equal seeds of torch."""

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(std=size[-1] ** -0.5)

    hidden, intermediate, experts = shape.hidden, shape.intermediate, shape.experts
    return Weights(
        normal(experts, hidden), normal(experts, 2 * intermediate, hidden), normal(experts, hidden, intermediate)
    )


def make_inputs(shape: Shape, weights: Weights, tokens: int, load: str) -> tuple[Weights, Inputs]:
    """Returns weights with a changed router, and inputs, that route `tokens` tokens by `load`.

    - `learned`: by random logits, nearly balanced.
    - `uniform`: token t to experts t*K ... t*K + K-1 modulo E, as with `Router(force_balanced=True)`.
    - `zipf`: as learned, with the logit of expert e lowered by log(e + 1), so that odds fall as 1, 1/2, 1/3 ...
    - `one-hot`: every token to experts 0 ... K-1.

    Tokens that another order of rounding might route elsewhere are drawn again.
    """
    router_EH = weights.router_EH.clone()
    bias_PE, pattern_T = _patterns(shape, tokens, load)
    patterns = len(bias_PE)
    if patterns > shape.hidden:
        raise UserError(f"--shape {shape.name}: {load} routing here needs hidden of at least {patterns}")
    router_EH[:, :patterns] = (bias_PE.T / _FLAG).to(router_EH)
    flags_TP = F.one_hot(pattern_T, patterns) if patterns else pattern_T[:, None][:, :0]
    flags_TP = _FLAG * flags_TP.to(router_EH)
    x_TH = torch.empty(tokens, shape.hidden, dtype=router_EH.dtype, device=router_EH.device)
    redraw = torch.arange(tokens, device=x_TH.device)
    while len(redraw):
        x_TH[redraw] = torch.randn(len(redraw), shape.hidden, device=x_TH.device).to(x_TH)
        x_TH[redraw, :patterns] = flags_TP[redraw]
        redraw = redraw[_undecided(F.linear(x_TH[redraw], router_EH), shape.experts_per_token)]
    y_grad_TH = torch.randn(tokens, shape.hidden, device=x_TH.device).to(x_TH)
    return weights._replace(router_EH=router_EH), Inputs(x_TH.requires_grad_(), y_grad_TH)


def _patterns(shape: Shape, tokens: int, load: str) -> tuple[Tensor, Tensor]:
    """Returns each pattern's addition to the logits, and each token's pattern."""
    experts, chosen = shape.experts, shape.experts_per_token
    nobody_else = torch.zeros(tokens, dtype=torch.long)
    if load == "learned":
        return torch.empty(0, experts), nobody_else
    if load == "zipf":
        return -torch.arange(1, experts + 1).log()[None], nobody_else
    patterns = 1 if load == "one-hot" else experts // math.gcd(experts, chosen)
    bias_PE = torch.full((patterns, experts), _FORBIDDEN)
    first_P = torch.arange(patterns)[:, None] * chosen
    bias_PE.scatter_(1, (first_P + torch.arange(chosen)) % experts, 0.0)
    return bias_PE, torch.arange(tokens) % patterns


def _undecided(logits_TE: Tensor, chosen: int) -> Tensor:
    """Returns, for each token, whether its last chosen expert and the next one are too close to distinguish."""
    if chosen == logits_TE.shape[1]:
        return torch.zeros(len(logits_TE), dtype=torch.bool, device=logits_TE.device)
    last_T, next_T = logits_TE.float().topk(chosen + 1).values[:, -2:].unbind(1)
    rounding = torch.finfo(logits_TE.dtype).eps * last_T.abs().clamp(min=1)
    return last_T - next_T < _KEEP_APART * rounding
