"""Adapted models have the numbers of one process for all pairs of options that they can have.

Runs are drawn at random. A covering array of them has every pair of values of `PAIRED` that any draw has; four are
always tested, the others in turns.
"""

import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import optimus
from helpers.adapted_drawing import STEPS, Case, base, drawn
from helpers.covering import covering
from helpers.sweep import in_turns
from optimus.config import load_config
from optimus.data.preparation import prepare
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics

POOL = range(1200)  # draws from which the covering array is chosen
FEW = range(60)  # draws whose refusals are counted
PAIRED = (
    "parallel.context_method",
    "parallel.executor",
    "parallel.schedule",
    "parallel.stages_per_rank",
    "state.shard",
    "state.shard_over",
    "state.reshard_after_forward",
    "state.offload",
    "state.resident_fraction",
    "state.accumulate_on",
    "state.gradient_dtype",
    "state.chunk",
    "recompute_collectives",
    "optimizer.name",
    "optimizer.clip_norm",
    "optimizer.reptile_every",
    "train.freeze",
    "train.loss",
    "train.precision",
    "data.documents",
    "checkpoint.asynchronous",
    "checkpoint.scattered",
)
# Relative bounds of losses, norms, all final weights together, and each tensor. Sums in another order differ by rounding
# of the type. Some gradients are all rounding, such as those of key biases. Lion moves these weights fully, at a rate of
# 2e-6, and in bfloat16 other rules do too.
EXACT = {"loss": 2e-5, "norm": 1e-4, "weights": 2e-5, "tensor": 1e-4}
ROUNDED = {"loss": 1e-3, "norm": 1e-2, "weights": 2e-2}


def factors(case: Case) -> dict[str, str]:
    """Returns the options and values that must occur in pairs; sizes are reduced to the distinctions that run other
    code."""
    said = case.values
    return {option: said[option] for option in PAIRED if option in said} | {
        "family": case.family,
        "ranks": str(case.ranks),
        "shard_ranks": "nested" if any("shard_ranks." in each for each in said) else str("state.shard_ranks" in said),
        "phases": said.get("phases", "none"),
        "pruning.at": said.get("pruning.at", "never"),
        "layers": said.get("parallel.layers", "none").partition("recompute: ")[2],
        "pruning.rewind": said.get("pruning.rewind", "never"),
        **{axis: said.get(f"parallel.{axis}", "1") for axis in ("tensor", "pipeline", "context", "expert")},
    }


def pairs(case: Case) -> set[tuple[object, ...]]:
    """Returns the pairs of factors that the case tests: with bfloat16, whose bounds are wide, only the pairs with it."""
    found = set(itertools.combinations(sorted(factors(case).items()), 2))
    return {pair for pair in found if any("bfloat16" in factor for factor in pair)} if in_bf16(case) else found


def in_bf16(case: Case) -> bool:
    """Returns whether the case computes or sums gradients in bfloat16."""
    return "bfloat16" in case.values.values()


@cache
def cases() -> list[int]:
    """Returns the draws of the covering array."""
    return [POOL[index] for index in covering([pairs(drawn(number)) for number in POOL])]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of prepared data with several documents in most sequences."""
    folder = tmp_path_factory.mktemp("documents")
    source = Path(optimus.__file__).parent / "config" / "tree.py"
    lines = [line.strip() for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines), encoding="utf-8")
    prepare([folder / "lines.jsonl"], folder / "data", train_tokenizer=300, context=32, workers=1)
    return folder / "data"


def run(case: Case, data: Path, output: Path, overrides: list[str], ranks: int, stop: int | None) -> list[Any]:
    """Returns the metrics of a run of the case."""
    tree = base(case.family)
    tree |= {"data": {"path": str(data)}, "train": tree["train"] | {"output": str(output)}}
    if stop is not None:
        optimus.train(tree, [*overrides, f"train.stop_at={stop}"], ranks=ranks)
    optimus.train(tree, overrides, ranks=ranks, resume=stop is not None)
    return [record for record in read_metrics(output) if "loss" in record]


def differences(case: Case, data: Path, folder: Path) -> dict[str, float]:
    """Returns the worst relative differences between the ranks' run and that of one process."""
    found = run(case, data, folder / "ranks", case.overrides, case.ranks, case.stop)
    right = run(case, data, folder / "alone", case.alone, 1, None)
    assert [record["step"] for record in found] == [record["step"] for record in right] == [*range(1, STEPS + 1)]

    def worst(name: str) -> float:
        return max(abs(a[name] - b[name]) / (abs(b[name]) or 1.0) for a, b in zip(found, right) if name in b)

    weights = [dict(optimus.load_model(folder / name).named_parameters()) for name in ("ranks", "alone")]
    moved, sizes, least = [], [], list[float]()
    for name, tensor in weights[1].items():
        moved.append(float((weights[0][name] - tensor).norm()))
        sizes.append(float(tensor.norm()))
        least.append(0.02 * math.sqrt(tensor.numel()))  # the size of fresh matrices, for biases near zero
    return {
        "loss": max(worst("loss"), worst("balance_loss")),
        "norm": worst("grad_norm"),
        "weights": math.hypot(*moved) / math.hypot(*sizes),
        "tensor": max(error / max(size, usual) for error, size, usual in zip(moved, sizes, least)),
    }


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("number", in_turns(cases(), 20, always=1))
def test_options(number: int, documents: Path, tmp_path: Path) -> None:
    case = drawn(number)
    bounds = bounds_of(case)
    found = differences(case, documents, tmp_path)
    assert all(found[kind] <= bound for kind, bound in bounds.items()), (found, case)


def bounds_of(case: Case) -> dict[str, float]:
    """Returns the bounds of the relative differences."""
    if in_bf16(case):
        return ROUNDED
    return EXACT | ({"tensor": 1e-3} if case.values["optimizer.name"] == "lion" else {})


def refusal(case: Case) -> str | None:
    """Returns why the configuration refuses a draw, or None."""
    tree = base(case.family)
    tree |= {"data": {"path": "data"}, "train": tree["train"] | {"output": "run"}}
    try:
        load_config(tree, case.overrides)
    except UserError as error:
        return str(error)
    return None


def test_few_draws_are_refused() -> None:
    refused = {number: why for number in FEW if (why := refusal(drawn(number))) is not None}
    assert len(refused) <= len(FEW) / 2, refused
