"""The summary of a run before its first step, with warnings."""

from collections.abc import Mapping
from typing import Any

from optimus.config import RunConfig
from optimus.config.phases import Phase, tokens_after
from optimus.config.sizes import count_text
from optimus.hub import no_export
from optimus.model.count import count_parameters
from optimus.resolve.run import ResolvedRun

_MOST_EPOCHS = 4  # more repetitions of the same data help less and less (Muennighoff et al., 2023)


def summarise(run: ResolvedRun, sequences: int | None) -> dict[str, Any]:
    """Returns facts about a run, by name. `sequences` is the number of sequences of the data, or None if
    unknown."""
    config, mesh, phases = run.config, run.mesh, run.phases
    train, counted = config.train, count_parameters(config.model)
    last = train.stop_at or train.total_steps
    return {
        "family": config.model.family,
        "parameters": counted.total,
        "active_parameters": counted.active,
        "steps": train.total_steps,
        "last_step": last,
        "tokens": tokens_after(phases, last),
        "data_tokens": sequences and sequences * train.sequence_length,
        "epochs": sequences and tokens_after(phases, last) / (sequences * train.sequence_length),
        "warmup_steps": config.warmup_steps,
        "global_batch": train.global_batch,
        "microbatches": train.microbatches(mesh.dp),
        "micro_batch": train.micro_batch,
        "context": train.sequence_length,
        "ranks": mesh.size,
        "data_ranks": mesh.dp,
        "phases": [phase_line(phase) for phase in phases if phase.name],
        "precision": train.precision,
        "decisions": [str(decision) for decision in run.decisions if decision.said],
        "warnings": warnings(config, sequences),
    }


def summary_lines(about: Mapping[str, Any]) -> list[str]:
    """Formats the results of `summarise` as labelled lines."""
    parameters, active = about["parameters"], about["active_parameters"]
    active_too = f", {count_text(active)} active" if active < parameters else ""
    steps, last, warmup, ranks = about["steps"], about["last_step"], about["warmup_steps"], about["ranks"]
    stops = f", stopping after step {last:,}" if last < steps else ""
    return [
        f"model: {about['family']}, {count_text(parameters)} parameters{active_too}",
        f"length: {steps:,} steps{stops}, {count_text(about['tokens'])} tokens"
        + (
            ""
            if about["epochs"] is None
            else f": {about['epochs']:.3g} epochs of the {count_text(about['data_tokens'])} in the data"
        ),
        *(f"phase {line}" for line in about["phases"]),
        f"warm-up: {warmup:,} steps, {100 * warmup / steps:.3g} % of the run",
        f"batch: {about['global_batch']:,} sequences of {about['context']:,} tokens, on each data-parallel rank "
        f"{about['microbatches']:,} x {about['micro_batch']:,}",
        "layout: " + ("1 rank" if ranks == 1 else f"{ranks:,} ranks, data-parallel size {about['data_ranks']:,}"),
        f"precision: {about['precision']}",
        *(f"decided: {text}" for text in about["decisions"]),
        *(f"warning: {text}" for text in about["warnings"]),
    ]


def phase_line(phase: Phase) -> str:
    """Describes a phase in a line for the user."""
    train = phase.config.train
    return (
        f"{phase.name}: steps {phase.first + 1:,} to {phase.last:,}, {train.global_batch:,} sequences of "
        f"{train.sequence_length:,} tokens of {', '.join(source.label for source in phase.config.data.mixed)}"
    )


def warnings(config: RunConfig, sequences: int | None) -> list[str]:
    """Returns warnings about valid settings that are probably unintended, and about a model without an export."""
    train, peak = config.train, config.lr_schedule.lr
    steps, warmup, found = train.total_steps, config.warmup_steps, []
    mixed = config.phases or config.data.sources
    epochs = 0.0 if mixed or sequences is None else (train.stop_at or steps) * train.global_batch / sequences
    if epochs > _MOST_EPOCHS:
        found.append(
            f"the run reads its data {epochs:.3g} times: after {_MOST_EPOCHS} times a model learns little more and begins "
            "to memorise the text. Prepare more text, or shorten the run (train.steps, train.tokens, train.epochs)"
        )
    if warmup > steps / 2:
        reached = peak * min(1.0, steps / warmup)
        found.append(
            f"the warm-up takes {warmup:,} of {steps:,} steps (lr_schedule.warmup_steps), so that the learning rate ends at "
            f"{reached:.2g} of lr_schedule.lr {peak:g}. Set the warm-up to {max(1, steps // 20)} steps, or lengthen the run"
            if warmup >= steps
            else f"the warm-up takes more than half of the run, {warmup:,} of {steps:,} steps. Set lr_schedule.warmup_steps "
            f"to {max(1, steps // 20)}, or lengthen the run"
        )
    if (why := no_export(config.model)) is not None:
        found.append(why)
    if sequences is not None and train.global_batch > sequences:
        found.append(
            f"a step reads {train.global_batch:,} sequences (train.global_batch), but the data has {sequences:,}: one step "
            "sees the same text more than once. Lower train.global_batch, or prepare more text"
        )
    return found
