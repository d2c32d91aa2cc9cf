"""Tokens and seconds in which update rules reach AdamW's final validation loss, on tiny models.

A rule is judged by what it needs to reach a target that a tuned baseline sets, as in AlgoPerf (Dahl et al. 2023;
Kasimbeg et al. 2025). A workload is a model and a seed. Its target is the final validation loss of AdamW with a cosine,
at the best of five learning rates, a factor of two apart. A contestant counts with the rate at which it needs the
fewest tokens. All have the same batches in the same order, initial weights, length, warm-up, clipping, weight decay and
betas.

Tokens are interpolated linearly between two measurements of the validation loss. Seconds are CPU seconds of one thread:
tokens times the time of a step without measurements. The time of a step is the least of the medians of a contestant's
runs on the model, as other programs disturb some runs. All 150 runs take about 20 minutes of one core.

Legend: N sequences, B of a batch, S bytes of a sequence.
"""

import hashlib
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from typer import Option

from benchmarks.harness import Result, Row, cpu_threads
from benchmarks.training import tree
from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.data.documents import read_texts
from optimus.data.files import resolve
from optimus.disk import read_json_lines, user_path
from optimus.errors import UserError
from optimus.evaluation.score import evaluating
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.ranks import mesh_of
from optimus.state.model_state import ModelState
from optimus.testing.steps import build
from optimus.training.step import training_step

CONTEXT, BATCH = 128, 8
_FACTORS = (0.25, 0.5, 1, 2, 4)  # of the middle rate
_BASELINE = "adamw"
_BLOCK, _HELD_OUT = 16, 20  # adjacent sequences; the last of so many such blocks is for validation
_TAUS = (1.0, 1.1, 1.25, 1.5, 2.0)  # of the printed profile
_LARGEST_TAU = 4.0  # the limit of the area under the profile, as in AlgoPerf

MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense": {"family": "olmo", "intermediate": 256},
    "moe": {"family": "olmoe", "intermediate": 64, "experts": 8, "experts_per_token": 2},
}
_SHAPE = {"hidden": 64, "layers": 2, "heads": 2, "vocab": 256}  # for bytes


At = tuple[str, str, float, int]  # model, contestant, learning rate, seed


class Contestant(NamedTuple):
    """A rule, its schedule, and the middle of its five learning rates on each model."""

    rule: str
    schedule: str
    rate: Mapping[str, float]


CONTESTANTS = {
    _BASELINE: Contestant("adamw", "cosine", {"dense": 4e-3, "moe": 2e-3}),
    "muon": Contestant("muon", "cosine", {"dense": 16e-3, "moe": 16e-3}),
    "lion": Contestant("lion", "cosine", {"dense": 1e-3, "moe": 2e-3}),
    "schedule_free": Contestant("schedule-free", "constant", {"dense": 4e-3, "moe": 4e-3}),
    "wsd": Contestant("adamw", "wsd", {"dense": 4e-3, "moe": 2e-3}),
}


class Length(NamedTuple):
    """The length of the comparison: steps of a run, steps between two measurements, seeds, and validation sequences."""

    steps: int = 240
    every: int = 10
    seeds: int = 3
    held_out: int = 32


FULL = Length()
QUICK = Length(steps=2, every=1, seeds=1, held_out=8)


class Text(NamedTuple):
    """Bytes for training and for validation [N, S], uint8."""

    train_NS: Tensor
    held_out_NS: Tensor


class Curve(NamedTuple):
    """The validation loss (nats per byte) after so many tokens, from 0 on, and the median CPU seconds of a step."""

    tokens: list[int]
    losses: list[float]
    step_seconds: float

    def reaches(self, target: float) -> float:
        """Returns the tokens at which the loss reaches `target`, or infinity."""
        for (before, high), (after, low) in pairwise(zip(self.tokens, self.losses)):
            if low <= target:
                return before + (after - before) * (high - target) / (high - low)
        return math.inf


class Found(NamedTuple):
    """The results of a contestant on a model at its best rate: for each seed, tokens to the target and final losses."""

    rate: float
    place: int  # of the rate among the five, from 1
    tokens: list[float]
    final: list[float]
    step_seconds: float


def run(
    text: Annotated[
        Path | None,
        Option(help="File or folder of text, as for `optimus prepare`. Default: a part of Python's library."),
    ] = None,
    runs: Annotated[
        Path | None,
        Option(help="File (JSON lines) of finished runs: its runs are not repeated, and others are added."),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Take only a few steps with one seed, as a trial.")] = False,
) -> Result:
    """Returns rows (a contestant on a model), ratios, and two profiles (`tokens`, `seconds`), whose rows are
    contestants.

    Ratios are medians over the seeds of tokens, and of seconds, relative to AdamW: `muon.dense.tokens_vs_adamw`,
    `muon.dense.seconds_vs_adamw` and so on; None if most seeds do not reach the target. For `runs` see `Sweep`. Raises
    `UserError` for text that is unreadable or too short.
    """
    length = QUICK if quick else FULL
    with cpu_threads(1):
        given = read_text(text and user_path(text), length.held_out)
        curves = Sweep(given, length, runs and user_path(runs)).curves()
    found: dict[tuple[str, str], Found] = {}
    for model in MODELS:
        targets = found_of(curves, model, _BASELINE, None).final
        found |= {(model, name): found_of(curves, model, name, targets) for name in CONTESTANTS}
    needed = {
        "tokens": {at: each.tokens for at, each in found.items()},
        "seconds": {at: [n * each.step_seconds for n in each.tokens] for at, each in found.items()},
    }
    ratios = {kind: versus(by) for kind, by in needed.items()}
    rows = [_row(model, name, each, ratios) for (model, name), each in found.items()]
    flat = {
        f"{name}.{model}.{kind}_vs_{_BASELINE}": _finite(statistics.median(values))
        for kind, by in ratios.items()
        for (model, name), values in by.items()
        if name != _BASELINE
    }
    profiles = {kind: profile(by) for kind, by in needed.items()}
    tables = {f"share of the workloads solved within tau times the least {kind}": by for kind, by in profiles.items()}
    tables["optimus bench time-to-target"] = rows
    return Result(rows, flat, {"length": length._asdict(), "profiles": profiles}, tables)


def read_text(path: Path | None, held_out: int) -> Text:
    """Returns the bytes of the documents, one after the other.

    The last of each twenty blocks of sequences is for validation, which takes `held_out` of these sequences from all
    over the text.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    inputs = [library / "email", library / "asyncio", library / "json"] if path is None else [path]
    whole = "".join(piece for piece, _ in read_texts(resolve(inputs), "text")).encode()
    blocks = len(whole) // (CONTEXT * _BLOCK)
    if blocks // _HELD_OUT * _BLOCK < held_out:
        least = -(-held_out // _BLOCK) * _HELD_OUT * _BLOCK * CONTEXT
        raise UserError(f"{path}: {len(whole):,} bytes of text are too few: give at least {least:,}")
    used = bytearray(whole[: blocks * CONTEXT * _BLOCK])
    rows_NBS = torch.frombuffer(used, dtype=torch.uint8).view(blocks, _BLOCK, CONTEXT)
    last = torch.arange(blocks) % _HELD_OUT == _HELD_OUT - 1
    held_out_NS = rows_NBS[last].flatten(0, 1)
    return Text(rows_NBS[~last].flatten(0, 1), held_out_NS[:: len(held_out_NS) // held_out][:held_out])


class Sweep:
    """Runs of one length on one text. The file `path` keeps finished runs, which are not repeated."""

    def __init__(self, text: Text, length: Length, path: Path | None = None) -> None:
        self._text, self._length, self._path = text, length, path
        self._digest = hashlib.sha256(text.train_NS.numpy().tobytes()).hexdigest()
        lines = read_json_lines(path) if path is not None and path.exists() else []
        self._known = {line["key"]: Curve(*(line[field] for field in Curve._fields)) for line in lines}

    def curves(self) -> dict[At, Curve]:
        """Returns the curves of all runs."""
        named = [(model, name) for model in MODELS for name in CONTESTANTS]
        return {
            (model, name, rate, seed): self.curve(model, name, rate, seed)
            for seed in range(self._length.seeds)
            for model, name in named
            for rate in rates(CONTESTANTS[name], model)
        }

    def curve(self, model: str, name: str, rate: float, seed: int) -> Curve:
        """Returns the curve of one run."""
        settings = settings_of(model, CONTESTANTS[name], rate, seed, self._length)
        key = hashlib.sha256(json.dumps([settings, self._length, self._digest]).encode()).hexdigest()
        if key not in self._known:
            self._known[key] = curve = train(load_config(settings), self._text, self._length.every)
            print(f"{model}, {name}, learning rate {rate:g}, seed {seed}: {curve.losses[-1]:.4f}", flush=True)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    said = {"model": model, "contestant": name, "rate": rate, "seed": seed}
                    file.write(json.dumps({**said, **curve._asdict(), "key": key}) + "\n")
        return self._known[key]


def rates(contestant: Contestant, model: str) -> list[float]:
    """Returns the five learning rates, the lowest first."""
    return [contestant.rate[model] * factor for factor in _FACTORS]


def settings_of(model: str, contestant: Contestant, rate: float, seed: int, length: Length) -> dict[str, Any]:
    """Returns the configuration of one run, as a user writes it."""
    return tree(
        {**_SHAPE, **MODELS[model]},
        BATCH,
        CONTEXT,
        precision="float32",
        steps=length.steps,
        seed=seed,
        optimizer={"name": contestant.rule},
        lr_schedule={"name": contestant.schedule, "lr": rate, "min_lr": rate / 10},
    )


def train(config: RunConfig, text: Text, every: int) -> Curve:
    """Trains a model on batches in the seed's order; measures every so many steps, and at the last."""
    device = torch.device("cpu")
    model, state = build(config, Groups(mesh_of(config, 1)), device)
    state.initialize(config.train.seed, config.model.init_std)
    order = torch.Generator().manual_seed(config.train.seed)
    order_N = torch.cat([torch.randperm(len(text.train_NS), generator=order) for _ in range(_epochs(config, text))])
    steps, losses, seconds = [0], [_held_out_loss(model, state, text)], []
    for step in range(1, config.train.total_steps + 1):
        tokens_BS = text.train_NS[order_N[(step - 1) * BATCH : step * BATCH]].long()
        began = time.process_time()
        training_step(model, state, tokens_BS, config, step)
        seconds.append(time.process_time() - began)
        if step % every == 0 or step == config.train.total_steps:
            steps.append(step)
            losses.append(_held_out_loss(model, state, text))
    return Curve([step * BATCH * CONTEXT for step in steps], losses, statistics.median(seconds))


def _epochs(config: RunConfig, text: Text) -> int:
    return -(-config.train.total_steps * BATCH // len(text.train_NS))


def _held_out_loss(model: PipelineStages, state: ModelState, text: Text) -> float:
    with state.evaluating(), evaluating(model):
        return float(model.model.losses(text.held_out_NS.long()).cross_entropy)


def found_of(curves: Mapping[At, Curve], model: str, name: str, targets: Sequence[float] | None) -> Found:
    """Returns the results of a contestant for the targets, by seed, at its best rate.

    The best rate needs the fewest tokens (the median over seeds) and, among equals, has the lowest final loss (the
    mean). Without targets the final loss decides alone.
    """
    tried = []
    for place, rate in enumerate(rates(CONTESTANTS[name], model), 1):
        by_seed = [curve for (*at, _), curve in curves.items() if at == [model, name, rate]]
        final = [curve.losses[-1] for curve in by_seed]
        tokens = [curve.reaches(target) for curve, target in zip(by_seed, final if targets is None else targets)]
        tried.append(Found(rate, place, tokens, final, min(curve.step_seconds for curve in by_seed)))
    seconds = min(each.step_seconds for each in tried)
    if targets is None:
        best = min(tried, key=lambda each: statistics.mean(each.final))
    else:
        best = min(tried, key=lambda each: (statistics.median(each.tokens), statistics.mean(each.final)))
    return best._replace(step_seconds=seconds)


def versus(needed: Mapping[tuple[str, str], Sequence[float]]) -> dict[tuple[str, str], list[float]]:
    """Returns the ratios of every contestant to the baseline on the same model, by seed."""
    return {
        (model, name): [own / base for own, base in zip(values, needed[model, _BASELINE])]
        for (model, name), values in needed.items()
    }


def profile(needed: Mapping[tuple[str, str], Sequence[float]]) -> list[Row]:
    """Returns the performance profile of the contestants.

    The profile is the share of the workloads that a contestant solves within tau times the best contestant's need. The
    area under the profile counts for tau from 1 to 4, with a maximum of 1.
    """
    slower: dict[str, list[float]] = {}
    for model in dict.fromkeys(model for model, _ in needed):
        here = {name: values for (of, name), values in needed.items() if of == model}
        best = [min(values) for values in zip(*here.values())]
        for name, values in here.items():
            slower.setdefault(name, []).extend(own / least for own, least in zip(values, best))
    return [
        {
            "contestant": name,
            **{f"within_{tau:g}": sum(each <= tau for each in by) / len(by) for tau in _TAUS},
            "area": statistics.mean(max(0.0, _LARGEST_TAU - each) for each in by) / (_LARGEST_TAU - 1),
        }
        for name, by in slower.items()
    ]


def _row(model: str, name: str, found: Found, ratios: Mapping[str, Mapping[tuple[str, str], Sequence[float]]]) -> Row:
    tokens, seconds = (ratios[kind][model, name] for kind in ("tokens", "seconds"))
    return {
        "model": model,
        "contestant": name,
        "schedule": CONTESTANTS[name].schedule,
        "learning_rate": found.rate,
        "of_five": found.place,
        "final_loss": statistics.mean(found.final),
        "reached": sum(math.isfinite(each) for each in found.tokens),
        "tokens": _finite(statistics.median(found.tokens)),
        f"tokens_vs_{_BASELINE}": _finite(statistics.median(tokens)),
        "lowest_ratio": _finite(min(tokens)),
        "highest_ratio": _finite(max(tokens)),
        "step_ms": 1000 * found.step_seconds,
        "seconds": _finite(statistics.median(found.tokens) / (BATCH * CONTEXT) * found.step_seconds),
        f"seconds_vs_{_BASELINE}": _finite(statistics.median(seconds)),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
