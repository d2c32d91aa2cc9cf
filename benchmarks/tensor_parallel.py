"""Tensor-parallel training on 2 ranks against torch's parallelize_module (DTensor).

Both start from the same weights and learn the same batch by heart with fused AdamW and clipping, so their losses must
agree, which is checked first. Each competes with and without sequence parallelism, ours also without overlap. Each turn
runs in fresh processes, and the median step of a contestant's best round counts.
"""

from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from typer import Option

from benchmarks.data_parallel_rivals import ours, settings, torch_step
from benchmarks.harness import Result, Rounds, Row, check_agreement, take_turns
from benchmarks.tensor_parallel_rival import parallelize, same_weights
from benchmarks.training import BY_HEART, Make, Precision, Step, Type, configuration, decided, speed_row, trial, turn
from optimus.config import RunConfig
from optimus.model import Transformer
from optimus.model.architecture import own_model
from optimus.model.init import initialize
from optimus.plan.measure.ranks import run_fresh

WARM_UP = 3  # steps of each turn before the timed ones
SAME_LOSS = {"float32": 1e-4, "bfloat16": 2e-3}
RANKS = 2


class Contestant(NamedTuple):
    """A contestant; `overrides` are those of the configuration."""

    side: Literal["optimus", "torch"]
    name: str
    overrides: tuple[str, ...]
    make: Make


def run(
    model: Annotated[str, Option(help="Dense preset.")] = "mula-tiny",
    steps: Annotated[int, Option(help="Timed steps of a contestant in a round.")] = 10,
    rounds: Rounds = 3,
    precision: Precision = "auto",
    sequences: int = 8,
    context: int = 256,
) -> Result:
    """Returns a row for each contestant, and ratios of steps per second.

    `tp2.vs_dtensor` is our best over torch's best, and `tp2.overlap` ours with overlap over ours without, both with
    sequence parallelism.
    """
    chosen = decided(precision)
    configs = {who: config_of(model, chosen, sequences, context, who.overrides) for who in contestants()}
    trials = {who: run_fresh(trial, RANKS, who.make, config, WARM_UP + 1)[0] for who, config in configs.items()}
    check_agreement({who.name: seen.loss for who, seen in trials.items()}, SAME_LOSS[chosen])
    turns = {who: partial(run_fresh, turn, RANKS, who.make, config, steps, WARM_UP) for who, config in configs.items()}
    rows: list[Row] = []
    for who, rounds_of in take_turns(turns, rounds).items():
        first = [each[0] for each in rounds_of]
        rows.append({"contestant": who.name, "precision": chosen, **speed_row(sequences * context, first)})
        rows[-1]["loss"] = first[-1].loss
    speed = {who: row["tokens_per_second"] for who, row in zip(configs, rows)}
    best = {side: max(value for who, value in speed.items() if who.side == side) for side in ("optimus", "torch")}
    by_name = {who.name: value for who, value in speed.items()}
    ratios = {
        "tp2.vs_dtensor": best["optimus"] / best["torch"],
        "tp2.overlap": by_name["optimus, sequence"] / by_name["optimus, sequence, no overlap"],
    }
    return Result(rows, ratios, {"precision": chosen})


def contestants() -> list[Contestant]:
    """Returns the contestants."""
    return [
        Contestant("optimus", "optimus", ("parallel.sequence=false",), ours),
        Contestant("optimus", "optimus, sequence", (), ours),
        Contestant("optimus", "optimus, sequence, no overlap", ("parallel.overlap=false",), ours),
        Contestant("torch", "torch parallelize_module", (), partial(dtensor, sequence=False)),
        Contestant("torch", "torch parallelize_module, sequence", (), partial(dtensor, sequence=True)),
    ]


def config_of(model: str, precision: Type, sequences: int, context: int, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Returns the configuration, with one microbatch per step."""
    parallel = {"data": 1, "tensor": RANKS}
    return configuration(model, sequences, context, overrides, precision=precision, parallel=parallel, **BY_HEART)


def dtensor(config: RunConfig, *, sequence: bool) -> Step:
    """Returns torch's training step. A bf16 step has bf16 weights, and fp32 master weights that AdamW updates."""
    whole = Transformer(own_model(config.model, "bench"))
    initialize(whole, config.train.seed, config.model.init_std)
    model = parallelize(same_weights(whole), init_device_mesh("cpu", (RANKS,)), sequence=sequence)
    weights, masters = list(model.parameters()), None
    if config.train.precision == "bfloat16":
        masters = [parameter.detach().clone() for parameter in weights]
        model.bfloat16()
    optimizer = torch.optim.AdamW(masters or weights, fused=True, **settings(config))

    def backward(tokens_BS: Tensor) -> float:
        with loss_parallel():
            logits_BSV = model(tokens_BS)[:, :-1]
            loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())
            loss.backward()
        loss = loss.detach()
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    return torch_step(backward, list(model.parameters()), optimizer, config, masters)
