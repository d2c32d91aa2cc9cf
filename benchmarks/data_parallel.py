"""Data-parallel training against torch DDP and FSDP2, and DeepSpeed where installed, on 2 and 4 ranks.

Contestants compete by their sharding: of nothing (ddp), optimizer state (zero1), gradients too (zero2), parameters too
(zero3). `data_parallel_rivals` describes them. All start from the same weights and learn the same batch by heart, so
their losses must agree, which is checked first. Each turn runs in fresh processes.

A row has the tokens per second of the median step of the best round, the bytes that a rank sends in a step over the
loopback interface, and the peak memory. The bytes are the least of the rounds, as other programs may send there too.
The peak is the largest growth of a rank's resident set, in a turn of its own.

All contestants compute in one precision. A contestant that has bf16 alone is left out of a comparison in fp32, and
named.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from typer import Option

from benchmarks import data_parallel_rivals as rivals
from benchmarks.harness import Result, Rounds, Row, check_agreement, take_turns
from benchmarks.training import (
    BY_HEART,
    Make,
    Precision,
    Trial,
    Turn,
    Type,
    configuration,
    decided,
    speed_row,
    trial,
    turn,
)
from optimus.plan.measure.ranks import run_fresh

WARM_UP = 2  # steps of each turn before the timed ones
SAME_LOSS = {"float32": 1e-4, "bfloat16": 1e-3}  # relative
_SHARD = {"ddp": "none", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}  # what each mode shards

GradientDtype = Literal["float32", "bfloat16"]


class Contestant(NamedTuple):
    """A contestant. Ratios call it `side`; it computes in the type `only`, or in any type."""

    mode: str
    side: str
    name: str
    make: Make
    only: Type | None = None


def run(
    model: Annotated[str, Option(help="Preset.")] = "mula-tiny-moe",
    steps: Annotated[int, Option(help="Timed steps of a contestant in a round.")] = 8,
    rounds: Rounds = 2,
    gradients: Annotated[GradientDtype, Option(help="Type in which all contestants reduce gradients.")] = "float32",
    precision: Precision = "auto",
    rank_counts: Sequence[int] = (2, 4),
    sequences: int = 8,
    context: int = 256,
) -> Result:
    """Returns a row for each number of ranks and contestant, and ratios of speed.

    A ratio divides our tokens per second by those of a rival's best contestant in the same mode, at the worst number of
    ranks: `ddp.vs_torch`, `zero1.vs_torch` (fp32 gradients only), `zero2.vs_fsdp2`, `zero3.vs_fsdp2`, and
    `zero*.vs_deepspeed` where DeepSpeed is installed. Each rank's batch is one microbatch of `sequences` of `context`
    tokens.
    """
    if rivals.DEEPSPEED is None:
        print("DeepSpeed is not installed: its rows are left out")
    rows: list[Row] = []
    chosen = decided(precision)
    who, left_out = competing(gradients, chosen)
    if left_out:
        print(f"left out, because they cannot compute in {chosen}: {', '.join(left_out)}")
    for ranks in rank_counts:
        shape: dict[str, Any] = {"micro_batch": sequences, "precision": chosen}
        configs = {
            mode: configuration(model, ranks * sequences, context, **shape, **sections(mode, ranks, gradients))
            for mode in _SHARD
        }
        trials = {each: run_fresh(trial, ranks, each.make, configs[each.mode], WARM_UP + 1) for each in who}
        check_agreement({f"{each.mode}, {each.name}": _loss(seen) for each, seen in trials.items()}, SAME_LOSS[chosen])
        turns = {each: partial(run_fresh, turn, ranks, each.make, configs[each.mode], steps, WARM_UP) for each in who}
        seen = take_turns(turns, rounds)
        tokens = ranks * sequences * context
        rows += compare([_row(each, ranks, chosen, tokens, seen[each], trials[each]) for each in who])
    shown = [{key: value for key, value in row.items() if key != "side"} for row in rows]
    return Result(shown, ratios(rows), {"precision": chosen, "left_out": left_out})


def competing(gradients: GradientDtype, precision: Type) -> tuple[list[Contestant], list[str]]:
    """Returns the contestants that have this precision, and the names of the others."""
    known = contestants(gradients)
    who = [each for each in known if each.only in (None, precision)]
    return who, [each.name for each in known if each not in who]


def contestants(gradients: GradientDtype) -> list[Contestant]:
    """Returns the contestants that reduce gradients in this type, without DeepSpeed where it is not installed."""
    found = [Contestant(mode, "optimus", "optimus", rivals.ours) for mode in _SHARD]
    if gradients == "float32":
        found.append(Contestant("ddp", "torch", "torch DDP, fp32 weights", rivals.ddp_cast))
        found.append(Contestant("zero1", "torch", "torch ZeroRedundancyOptimizer", rivals.zero_redundancy))
    else:
        found.append(Contestant("ddp", "torch", "torch DDP, bf16 weights", rivals.ddp_masters, "bfloat16"))
    for mode, name, reshard in (("zero2", "torch FSDP2, kept", False), ("zero3", "torch FSDP2", True)):
        found.append(Contestant(mode, "fsdp2", name, partial(rivals.fsdp2, reshard_after_forward=reshard)))
    if rivals.DEEPSPEED is not None:
        for stage in (1, 2, 3):
            make = partial(rivals.deepspeed, stage=stage)
            found.append(Contestant(f"zero{stage}", "deepspeed", f"DeepSpeed ZeRO-{stage}", make))
    return sorted(found, key=lambda contestant: contestant.mode)


def sections(mode: str, ranks: int, gradients: GradientDtype) -> dict[str, Any]:
    """Returns the sections of the configuration."""
    state = {"shard": _SHARD[mode], "gradient_dtype": gradients}
    return {**BY_HEART, "parallel": {"data": ranks}, "state": state}


def _loss(seen: Sequence[Turn] | Sequence[Trial]) -> float:
    return statistics.mean(each.loss for each in seen)


def _row(
    who: Contestant, ranks: int, precision: Type, tokens: int, rounds: list[list[Turn]], trials: list[Trial]
) -> Row:
    """Returns the row of a contestant. `rounds` hold the turn of every rank."""
    return {
        "mode": who.mode,
        "ranks": ranks,
        "precision": precision,
        "contestant": who.name,
        "side": who.side,
        **speed_row(tokens, [turns[0] for turns in rounds]),
        "peak_mib": max(each.peak for each in trials) / 2**20,
        "sent_mib": min(turns[0].sent for turns in rounds) / 2**20,
        "loss": _loss(rounds[-1]),
    }


def compare(rows: list[Row]) -> list[Row]:
    """Adds `optimus_over_it` to the rows of one number of ranks: our tokens per second over each contestant's."""
    ours = {row["mode"]: row["tokens_per_second"] for row in rows if row["side"] == "optimus"}
    return [{**row, "optimus_over_it": ours[row["mode"]] / row["tokens_per_second"]} for row in rows]


def ratios(rows: list[Row]) -> dict[str, float]:
    """Returns the least `optimus_over_it` by mode and rival: against its best contestant, at its best number of ranks."""
    found: dict[str, float] = {}
    for row in rows:
        if row["side"] != "optimus":
            name = f"{row['mode']}.vs_{row['side']}"
            found[name] = min(row["optimus_over_it"], found.get(name, float("inf")))
    return found
