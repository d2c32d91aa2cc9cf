"""Features of a run, drawn together, with kills.

A draw combines pruning, rewinding, offloaded state, asynchronous checkpoints, kinds of start, phases, teachers,
low-rank factors, frozen parameters, users' hooks, validation text, prompts, and prepared data or a user's dataset. It
also has loss scaling and ranges of layers that recompute.

A killed run resumes with the losses and the state, bit for bit, of a run that kept its state on the device, waited for
its checkpoints, recomputed nothing and was never killed. A covering array of the draws is always tested, with every
pair of values that any draw has; other draws are tested in turns.
"""

import copy
import itertools
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import Tensor

import optimus
from helpers.covering import covering
from helpers.items import SIZE
from helpers.sweep import in_turns
from optimus.checkpoint.folder import step_folder
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.slices import full_slices
from optimus.observe.metrics import read_metrics
from optimus.training.trainer import Trainer

POOL = range(1500)  # draws from which the covering array is chosen
STEPS = 6
SIZES = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 32, "vocab": 320}
MODELS: dict[str, dict[str, Any]] = {
    "sparse": SIZES  # with router biases, which a rule of their own updates
    | {
        "family": "deepseek_v3",
        "latent": {"keys": 16, "rotary": 8, "value": 16},
        "head_size": 16,
        "experts": 4,
        "experts_per_token": 2,
        "expert_intermediate": 16,
    },
    "tied": SIZES | {"family": "olmo", "tie_embeddings": True},
}
PRUNING: dict[str, dict[str, Any]] = {
    "never": {},
    "first": {"at": 0},
    "twice": {"at": [2, 4], "indices": "bits"},
    "early-bird": {"at": 0, "method": "early-bird", "every": 1, "distance": 0.9},  # step 5 has five distances
    "back to 0": {"at": 3, "method": "random", "rewind": 0},
    "back to 1": {"at": [2, 3], "scope": "layer", "rewind": 1},
}


class Draw(NamedTuple):
    """The features of a run; `kills` are the steps in which the run is killed."""

    model: str
    pruning: str
    start: str
    freeze: tuple[str, ...]
    lora: bool
    rule: str
    phases: bool
    teacher: bool
    precision: str
    shard: str
    offload: str
    update_on: str
    beside: bool  # checkpoints are asynchronous
    every: int
    kills: tuple[int, ...]
    hook: bool  # a user's hook with a state
    measured: bool  # validation text, prompts and verbose decisions
    data: str  # kind of data
    layers: str | None  # modules that the last layer recomputes, unlike the first one

    def plain(self) -> "Draw":
        """Returns the draw with the same numbers, without kills and without features that must not change the numbers."""
        return self._replace(offload="none", beside=False, kills=(), measured=False, layers=None)


def drawn(number: int) -> Draw:
    """Returns the draw of a number."""
    of = random.Random(number).choice
    lora = of((False, False, True))
    # Frozen embeddings and low-rank factors restrict the other choices.
    draw = Draw(
        model=of([*MODELS]),
        pruning="never" if lora else of([*PRUNING]),
        start=of(("new", "pruned", "folder", "branch")),
        freeze=("matrix", "embedding") if lora else of(((), (), ("embedding",), ("blocks.0.*",))),
        lora=lora,
        rule=of(("adamw", "schedule-free", "lion", "muon")),
        phases=of((False, True)),
        teacher=of((False, True)),
        precision=of(("float32", "bfloat16")),
        shard=of(("none", "optimizer", "parameters")),
        offload=of(("none", "optimizer", "all", "disk")),
        update_on=of(("device", "host")),
        beside=of((False, True)),
        every=of((1, 2)),
        kills=of(((), (2,), (3,), (4, 5), (6,))),
        hook=of((False, True)),
        measured=of((False, True)),
        data=of(("folder", "items", "Stream")),
        layers=of((None, "[]", "[block]", "[norm, attention]")),
    )
    if of((False, False, True)):  # the last draw, so that the others stay
        draw = draw._replace(precision="float16")
    if draw.offload == "none":
        draw = draw._replace(update_on="device")
    if draw.rule == "muon" and draw.start in ("pruned", "folder"):  # Muon needs whole matrices
        draw = draw._replace(rule="adamw")
    # No other parameter could be pruned
    if draw.rule == "muon" and draw.model == "tied" and draw.freeze == ("embedding",):
        draw = draw._replace(freeze=())
    # The branch begins at step 2 and has no weights of step 1
    if draw.pruning == "back to 1" and draw.start == "branch":
        draw = draw._replace(start="new")
    return draw


def values(draw: Draw) -> list[tuple[str, object]]:
    """Returns the values that must occur in pairs."""
    killed = ("never", "once", "twice")[len(draw.kills)]
    return [*draw._replace(kills=killed)._asdict().items()]  # type: ignore[arg-type]


@cache
def cases() -> list[int]:
    """Returns the draws of the covering array."""
    asked = [[*itertools.combinations(values(drawn(number)), 2)] for number in POOL]
    return [POOL[index] for index in covering(asked, [2.0 + (drawn(number).start == "branch") for number in POOL])]


class Killed(BaseException):
    """Raised in the middle of a step that is killed."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """Makes a pruned checkpoint and an exported folder of each model, and a teacher; returns their folder."""
    folder = tmp_path_factory.mktemp("beginnings")
    for model in MODELS:
        pruning = {"sparsity": 0.4, "at": 0, "targets": ["matrix"]}
        optimus.train(of_model(model, prepared, folder / model, steps=1) | {"pruning": pruning})
        optimus.export(folder / model, folder / f"{model} folder")
    optimus.train(of_model("tied", prepared, folder / "teacher", steps=1, seed=5))
    return folder


def of_model(model: str, data: Path, output: Path, **train: Any) -> dict[str, Any]:
    sizes = {"global_batch": 8, "micro_batch": 4, "sequence_length": 32, "precision": "float32", "steps": STEPS}
    return {
        "model": MODELS[model],
        "data": {"path": str(data)},
        "train": {"output": str(output), **sizes, **train},
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 2},
        "observe": {"tensorboard": False, "report": False},
    }


def config_of(draw: Draw, data: Path, place: Path, output: Path) -> dict[str, Any]:
    config = of_model(draw.model, data, output, precision=draw.precision, freeze=[*draw.freeze])
    if draw.data != "folder":
        config["data"] = {"dataset": f"helpers.items.{draw.data}", "tokenizer": str(data)}
    config["optimizer"] = {"name": draw.rule}
    config["checkpoint"] = {"every": draw.every, "keep": None, "weights_every": 1, "asynchronous": draw.beside}
    config["state"] = {"shard": draw.shard, "offload": draw.offload, "chunk": 3000, "tile": 500}
    if draw.offload != "none":
        config["state"] |= {"resident_fraction": 0.0, "update_on": draw.update_on}
    if draw.offload == "disk":
        config["state"]["disk"] = str(output.with_name(f"{output.name} disk"))
    if draw.lora:
        config["train"]["lora_rank"] = 2
    if draw.precision == "float16":  # the scale changes between the checkpoints
        config["train"]["loss_scale"] = {"growth_interval": 2}
    if draw.layers is not None:
        config["recompute"] = ["block"] if draw.layers == "[]" else []
        config["parallel"] = {"layers": [{"layers": 1, "recompute": yaml.safe_load(draw.layers)}]}
    if draw.hook:
        config["train"]["hooks"] = ["helpers.counting.Counting"]
    if draw.measured:
        config["validation"] = [{"text": __file__, "every": 2, "max_bytes": 300}]
        config["evaluate"] = {"prompts": ["def", ""]}
        config["observe"]["verbose"] = True
    if draw.teacher:
        config["train"]["teacher"] = {"checkpoints": [str(place / "teacher")], "weight": 0.5}
    if draw.phases:
        del config["train"]["steps"]
        own = {"steps": 3, "global_batch": 12, "lr_schedule": {"lr": 1e-3}}
        config["phases"] = [{"steps": 3, "sequence_length": 16}, own]
    if PRUNING[draw.pruning]:
        config["pruning"] = {"sparsity": 0.6, "targets": targets(draw), **PRUNING[draw.pruning]}
    if draw.start in ("pruned", "folder"):
        config["checkpoint"]["load_path"] = str(place / f"{draw.model}{' folder' * (draw.start == 'folder')}")
    return config


def targets(draw: Draw) -> list[str]:
    """Returns parameters that the draw trains, by rules that can update pruned parameters."""
    if draw.rule == "muon":
        return ["vector"] if draw.freeze == ("embedding",) else ["embedding"]
    return ["blocks.1.attention.*.weight"] if draw.freeze == ("blocks.0.*",) else ["matrix"]


def train(config: dict[str, Any], kills: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains to the end through kills in these steps.

    A kill comes before the step does anything, or after everything but the hooks that follow a step.
    """
    whole, left = Trainer._step, [*kills]

    def step(trainer: Trainer, loader: Any) -> None:
        if [trainer.progress.step + 1] == left[:1]:
            del left[0]
            if trainer.progress.step % 2 == 0:
                trainer.hooks = []
                whole(trainer, loader)
            raise Killed
        whole(trainer, loader)

    monkeypatch.setattr(Trainer, "_step", step)
    while True:
        try:
            optimus.train(config, resume="auto")
            break
        except Killed:
            pass
    monkeypatch.setattr(Trainer, "_step", whole)
    assert not left


def last(output: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the whole state at the end, with masks, and the counters."""
    reader = Reader.open(step_folder(output, STEPS))
    found = {
        key: torch.zeros(shape, dtype=torch.uint8 if key.startswith(("mask.", "drawn.")) else torch.float32)
        for key, shape in reader.shapes.items()
    }
    reader.fill(full_slices(found.items(), prefix=""), apart=True)
    return found, reader.description.progress


def check(draw: Draw, data: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [tmp_path / "plain", tmp_path / "run"]
    for each, output in zip((draw.plain(), draw), outputs):
        config = config_of(each, data, place, output)
        if draw.start == "branch":
            trunk = copy.deepcopy(config)
            trunk["train"] |= {"output": f"{output} trunk", "stop_at": 2}
            optimus.train(trunk)
            config["lr_schedule"]["branch_from"] = f"{output} trunk"
        begins = 2 if draw.start == "branch" else 0
        train(config, [step for step in each.kills if step > begins], monkeypatch)
    plain, run = ([(each["step"], each["loss"]) for each in read_metrics(output)] for output in outputs)
    assert run == plain
    if draw.measured:
        lines = map(json.loads, (outputs[1] / "samples.jsonl").read_text().splitlines())
        sampled = {line["step"]: [each["prompt"] for each in line["samples"]] for line in lines}
        assert sampled == {step: ["def", ""] for step in (2, 4, 6) if step > begins}
    (there, counters), (here, own) = map(last, outputs)
    streams = [each.pop("streams", {}) for each in (own, counters)]
    assert own == counters
    for stream in (each for found in streams for each in found.values()):  # any state before the next row will do
        assert stream["row"] > 0
        assert (stream["state"]["next"] - stream["row"]) % SIZE == 0
    assert [bool(found) for found in streams] == [draw.data == "Stream"] * 2
    assert own.get("hooks") == ({"helpers.counting.Counting": {"steps": STEPS}} if draw.hook else None)
    assert here.keys() == there.keys()
    assert [key for key in there if not torch.equal(here[key], there[key])] == []
    assert any(key.startswith("mask.") for key in there) == (
        draw.pruning != "never" or draw.start in ("pruned", "folder")
    )


# The array is greedy: its first 9 cases have 70 % of the pairs.
@pytest.mark.parametrize("number", in_turns(cases(), 4, always=9))
def test_pairs(number: int, prepared: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(drawn(number), prepared, place, tmp_path, monkeypatch)


@pytest.mark.parametrize("number", in_turns(range(POOL.stop, POOL.stop + 200), 50))
def test_more(number: int, prepared: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(drawn(number), prepared, place, tmp_path, monkeypatch)


def test_the_cases_meet_everything() -> None:
    met = {pair for number in cases() for pair in itertools.combinations(values(drawn(number)), 2)}
    others = {
        pair for number in range(POOL.stop, 2 * POOL.stop) for pair in itertools.combinations(values(drawn(number)), 2)
    }
    assert others <= met
    assert len(cases()) <= 50
