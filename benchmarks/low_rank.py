"""A training step with low-rank factors of frozen weights: two thin products against the merged weight.

The merged weight, which pruned weights need, is what all weights had before. Both contestants have the same model and the
same losses; the model has a hidden size of 1,024 and factors of rank 16 in every projection.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from typer import Option

from benchmarks.harness import Result, Rounds, check_agreement, take_turns
from optimus.kernels.gradient_buffer import TensorBuffer
from optimus.model import Transformer
from optimus.model.architecture import ModelConfig
from optimus.model.init import initialize
from optimus.model.linear import Linear

SIZES = {"hidden": 1024, "layers": 2, "heads": 16, "intermediate": 2816, "vocab": 2048}


def run(
    rounds: Rounds = 5,
    rank: Annotated[int, Option(help="Rank of the factors.")] = 16,
    tokens: Annotated[int, Option(help="Tokens of a step.")] = 512,
) -> Result:
    """Returns rows (best seconds of forward and backward pass) and the ratio `low_rank.thin_vs_merged` of their speeds."""
    model = Transformer(ModelConfig.model_validate({"family": "llama", **SIZES}))
    initialize(model, seed=0, std=0.02)
    projections = [module for module in model.modules() if isinstance(module, Linear)]
    gradients = {}
    for each in projections:
        each.add_factors(rank)
        each.weight.requires_grad_(False)
        for factor in (each.lora_b, each.lora_a):
            assert factor is not None
            torch.nn.init.normal_(factor, std=0.02)
            gradients[factor] = TensorBuffer(torch.zeros_like(factor))
        each.gradients = gradients
    batch_BS = torch.randint(SIZES["vocab"], (2, tokens // 2), generator=torch.Generator().manual_seed(0))

    def step(pruned: bool) -> tuple[float, float]:
        for each in projections:
            each.pruned = pruned
        began = time.perf_counter()
        loss = model.losses(batch_BS).cross_entropy
        loss.backward()
        return time.perf_counter() - began, loss.item()

    contestants: dict[str, Callable[[], tuple[float, float]]] = {
        "thin products": partial(step, False),
        "merged weight": partial(step, True),
    }
    seen = take_turns(contestants, rounds, warm_up=1)
    check_agreement({name: turns[0][1] for name, turns in seen.items()}, within=1e-4)
    best = {name: min(seconds for seconds, _ in turns) for name, turns in seen.items()}
    rows = [{"contestant": name, "s": seconds} for name, seconds in best.items()]
    return Result(rows, {"low_rank.thin_vs_merged": best["merged weight"] / best["thin products"]})
