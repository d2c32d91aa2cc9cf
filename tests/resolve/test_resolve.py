"""A run is resolved once: every open value is decided, and equally so wherever the run is resolved."""

import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel, ValidationError

import optimus
from helpers.drawing import MODELS, config_of, drawn
from helpers.planned import resolved
from helpers.sweep import in_turns
from optimus.config import RunConfig, load_config, preset_names
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.plan.job import machine_facts
from optimus.plan.job_builder import asked, configured
from optimus.plan.machine import load_machine
from optimus.resolve.ranks import mesh_of
from optimus.resolve.resolve import resolve
from optimus.resolve.run import ResolvedRun, RunInputs
from optimus.training.resolving import resolve_run

MACHINES = ("laptop", "dgx-h100", "frontier")
# Keys for which null is a decision: nothing of the kind, or everything there is.
NULL_IS_AN_ANSWER = {
    "data.path": "there are sources",
    "data.dataset": "the data is prepared",
    "data.tokenizer": "prepared data has its tokenizer",
    "train.tokens": "the length is in steps",
    "train.epochs": "the length is in steps",
    "train.lora_rank": "no factors",
    "train.teacher": "none",
    "train.stop_at": "at the end",
    "optimizer.clip_norm": "no clipping",
    "optimizer.reptile_every": "never",
    "lr_schedule.branch_from": "no branch",
    "parallel.microbatches": "train.micro_batch says it",
    "state.shard_ranks": "all replicas",
    "state.all_reduce_tiles": "all tiles",
    "state.chunk": "by stage: a decision of its own",
    "state.chunk_sizes": "by the number of parameters",
    "pruning": "none",
    "recompute_budget": "recompute says it",
    "checkpoint.keep": "all",
    "checkpoint.copy_to": "no copies",
    "checkpoint.weights_every": "never",
    "checkpoint.load_path": "new weights",
    "collectives.machine": "none: they are estimated",
}
# Null means off, or a part that the model does not have
SECTIONS_OF_FILES = ("model.", "evaluate.", "observe.", "tuning.")


def fields(section: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{above}{name}.")
        else:
            yield f"{above}{name}", field


def may_be_open(field: Any) -> bool:
    def words(kind: Any) -> Iterator[Any]:
        yield kind
        for each in typing.get_args(kind):
            yield from words(each)

    return any(each in (None, type(None), "auto") for each in words(field.annotation)) or field.default == "auto"


def wide_open() -> list[RunConfig]:
    """Returns runs that together leave every key open that can be open."""
    moe = config_of("moe")
    train = {"steps": None, "epochs": 2, "precision": "auto", "micro_batch": 8}
    open_ = {"train": moe["train"] | train, "lr_schedule": {"name": "wsd"}, "moe": {"dispatch": "auto"}}
    pipeline = {"pipeline": 2, "executor": "message-driven", "microbatches": "auto"}
    away = {"offload": "disk", "resident_fraction": "auto"}
    return [
        load_config(moe | open_ | {"parallel": pipeline, "state": away, "recompute": ["auto"]}),
        load_config(moe | open_ | {"parallel": {"tensor": 2}, "state": {}}),
    ]


def of_ranks(config: RunConfig) -> ResolvedRun:
    return resolved(config, 4, sequences=400, device="accelerator", device_bytes=1 << 30)


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def test_everything_that_can_be_open_is_decided() -> None:
    runs = [of_ranks(config) for config in wide_open()]
    decided = {decision.key for run in runs for decision in run.decisions}
    possible = {
        key for key, field in fields(RunConfig) if may_be_open(field) and not key.startswith(SECTIONS_OF_FILES)
    } | {"recompute"}
    assert possible - decided - NULL_IS_AN_ANSWER.keys() == set()
    assert not {key for key in decided & possible for run in runs if "auto" in repr(value_of(run.config, key))}
    keys = {key for key in decided if any(d.key == key for d in runs[0].decisions)} - {"state.chunk"}
    assert not [key for key in keys if value_of(runs[0].config, key) is None]
    assert all(decision.why for run in runs for decision in run.decisions)


def test_nothing_is_changed_afterwards() -> None:
    given = load_config(config_of("moe"))
    run = resolved(given)
    for config in (run.config, run.record, run.phases[0].config):
        with pytest.raises(RuntimeError, match="the configuration of a resolved run is locked: cannot change train"):
            config.changed(train={"steps": 1})
        with pytest.raises(RuntimeError, match="cannot change train"):
            config.decided({"train.steps": 1})
        for section, key in ((config.train, "steps"), (config.model, "layers"), (config, "train")):
            with pytest.raises((RuntimeError, ValidationError), match=r"is locked: change|frozen"):
                setattr(section, key, getattr(section, key))
    assert run.config.train.model_copy() == run.config.train
    given.train.steps = 2
    given.optimizer.weight_decay = 0.5
    assert (run.config.train.steps, run.config.optimizer.weight_decay) == (run.record.train.steps, 0.1)
    assert given.changed(train={"steps": 1}).train.steps == 1  # the caller may change the given configuration


def twice(config: RunConfig, ranks: int, where: str) -> ResolvedRun:
    facts = machine_facts(load_machine(where), ranks)
    first, second = (resolve(load_config(config.model_dump(exclude_unset=True)), facts, RunInputs()) for _ in range(2))
    assert first == second
    assert first.config.model_dump() == second.config.model_dump()
    assert "'auto'" not in repr(first.config.model_dump(exclude={"observe", "evaluate"}))
    return first


@pytest.mark.parametrize("machine", in_turns([*MACHINES], 2, always=1))
def test_every_preset_resolves_alike_wherever_it_is_asked_for(machine: str) -> None:
    for preset in preset_names():
        twice(configured(preset, ["train.precision=auto"], 8), 8, machine)


@pytest.mark.parametrize("part", in_turns([*range(4)], 3, always=1))
def test_random_layouts_resolve_alike(part: int) -> None:
    """200 random layouts resolve equally on the facts of this machine, and on those of a machine file."""
    for number in range(50 * part, 50 * part + 50):
        model, layout = drawn(number)
        config = load_config(config_of(model), layout.overrides)
        draw = random.Random(number)
        twice(config, layout.ranks, draw.choice(MACHINES))
        mesh = mesh_of(config, layout.ranks, layout.ranks)
        first, second = (resolve_run(config, torch.device("cpu"), mesh) for _ in range(2))
        assert (first.config, first.decisions) == (second.config, second.decisions)


def test_what_was_decided_is_checked_again() -> None:
    """A decision is checked again: 255 tokens cannot be split over two ranks, and two sequences of 255 can."""
    sizes = {"sequence_length": 255, "global_batch": 32, "micro_batch": 32}
    run = config_of("dense")
    pipeline = {"tensor": 2, "pipeline": 2, "schedule": "1f1b", "microbatches": 32}
    config = load_config(run | {"train": run["train"] | sizes, "parallel": pipeline})
    with pytest.raises(UserError, match=r"255 tokens of a microbatch .* cannot be split evenly over the 2 ranks"):
        resolved(config, 4)


def test_run_and_plan_decide_the_same_microbatches(tmp_path: Path) -> None:
    """A run and its plan choose equal microbatches for phases with unlike batches, so that no phase has a long bubble."""
    run, phases = config_of("dense"), [{"steps": 5, "global_batch": 64}, {"steps": 5, "global_batch": 8}]
    train = {key: value for key, value in run["train"].items() if key != "steps"} | {
        "global_batch": 64,
        "micro_batch": 8,
    }
    shape = MODELS["dense"] | {"layers": 4}
    pipeline = {"pipeline": 4, "schedule": "1f1b", "microbatches": "auto"}
    raw = run | {"model": shape, "train": train, "phases": phases, "parallel": pipeline}
    found = resolved(load_config(raw), 4)
    assert found.config.train.micro_batch == 1  # eight microbatches of the smaller batch
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(raw))
    assert asked(configured(str(file), [], 4), "laptop", 4, []).train.micro_batch == 1


@pytest.mark.parametrize(
    ("batches", "micro_batch"), [((64, 64), 8), ((64, None), 8), ((32, 64), None), ((64, 128), None), ((32, 32), 4)]
)
def test_a_number_of_microbatches_is_that_of_every_phase(
    batches: tuple[int | None, int], micro_batch: int | None
) -> None:
    run = config_of("dense")
    phases = [{"steps": 2} if batch is None else {"steps": 2, "global_batch": batch} for batch in batches]
    train = {key: value for key, value in run["train"].items() if key != "steps"}
    train |= {"global_batch": 64, "micro_batch": 8}
    shape = MODELS["dense"] | {"layers": 4}
    pipeline = {"pipeline": 4, "schedule": "1f1b", "microbatches": 8}
    config = load_config(run | {"model": shape, "train": train, "phases": phases, "parallel": pipeline})
    if micro_batch is None:
        with pytest.raises(
            UserError, match=r"microbatches 8: the phases have steps of \d+, \d+ sequences .* choose auto"
        ):
            resolved(config, 4)
    else:
        assert resolved(config, 4).config.train.micro_batch == micro_batch


def test_a_resume_keeps_what_is_of_the_run_and_decides_anew_what_is_of_the_machine() -> None:
    config = wide_open()[0]
    first = of_ranks(config)
    kept = {decision.key: decision.value for decision in first.decisions if decision.persistent}
    assert kept.keys() == {"train.steps", "lr_schedule.warmup_steps", "train.micro_batch", "train.precision"}
    previous = {key: kept[key] for key in ("lr_schedule.warmup_steps", "train.precision", "train.micro_batch")}
    facts = first.facts.__class__(
        **{**vars(first.facts), "ranks": 2, "device_bytes": 1 << 34, "bfloat16": (True, "it has")}
    )
    again = resolve(config, facts, RunInputs(400, previous))
    assert {key: value_of(again.config, key) for key in kept} == kept
    assert again.config.parallel.data == 1
    assert first.config.parallel.data == 2
    for key in kept:
        assert value_of(first.record, key) == kept[key]
    assert first.record.parallel.data == "auto"
    assert first.record.recompute == ["auto"]


def test_a_run_writes_its_decisions(small_run: dict[str, Any]) -> None:
    run = small_run | {"train": small_run["train"] | {"precision": "auto"}}
    optimus.train(run)
    folder = Path(run["train"]["output"])
    written = yaml.safe_load((folder / "decisions.yaml").read_text())
    assert {each["key"] for each in written} >= {"train.precision", "parallel.data", "train.device"}
    assert all(each.keys() == {"key", "value", "why", "kept"} for each in written)
    (precision,) = (each for each in written if each["key"] == "train.precision")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["train"]["precision"] == precision["value"]
    assert saved["parallel"]["data"] == "auto"
    ready = optimus.train(run | {"train": run["train"] | {"output": str(folder / "next")}}, check=True)
    assert [text for text in ready["decisions"] if text.startswith("train.precision: ")]


def test_the_same_run_on_another_mesh_is_another_one() -> None:
    config = load_config(config_of("moe"))
    assert resolve_run(config, torch.device("cpu"), Mesh(dp=2)) != resolve_run(config, torch.device("cpu"), Mesh())
