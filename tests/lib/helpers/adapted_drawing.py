"""Random combinations of options for adapted models; a number decides each combination."""

from typing import Any, NamedTuple

from helpers.adapted import config_json
from helpers.drawing import (
    Draw,
    draw_alike,
    draw_blocks,
    draw_layers,
    draw_order,
    draw_residency,
    draw_rule,
    draw_state,
)

FAMILIES = ("llama", "phi3", "gpt2", "gpt_neox", "olmo2", "gemma3_text", "granitemoe", "stablelm")
LAYERS, STEPS, BATCH, LENGTH = 4, 3, 8, 32
_LAYOUT = ("parallel.", "state.", "recompute", "checkpoint.")
PHASES = (  # Lion needs the small rate of the run
    "[{steps: 1}, {steps: 2, sequence_length: 16}]",
    "[{steps: 2, sequence_length: 16, global_batch: 16}, {steps: 1, lr_schedule: {name: constant}}]",
)


class Case(NamedTuple):
    """A family, a number of ranks, overrides of the configuration, and the step at which the run stops and resumes."""

    family: str
    ranks: int
    overrides: list[str]
    stop: int | None

    @property
    def alone(self) -> list[str]:
        """The overrides that change the numbers: one process needs no others."""
        return [override for override in self.overrides if not override.startswith(_LAYOUT)]

    @property
    def values(self) -> dict[str, str]:
        """The values of the overridden options."""
        return dict(override.split("=", 1) for override in self.overrides)


def base(family: str) -> dict[str, Any]:
    """Returns the configuration of a run of three steps, without data and folder."""
    sizes = {"steps": STEPS, "global_batch": BATCH, "sequence_length": LENGTH, "precision": "float32"}
    return {
        "model": {"transformers": config_json(family)},
        "train": sizes,
        # As in `helpers.drawing`, a larger eps keeps rounding errors of tiny gradients small.
        "optimizer": {"eps": 3e-5},
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 1},
        "observe": {"tensorboard": False, "report": False},
        "tuning": {"matmul": False},
    }


def drawn(number: int) -> Case:
    """Returns a family with options that it can have together; the number decides everything."""
    draw = Draw(number)
    family = draw.of(*FAMILIES)
    pipeline, tensor, context = draw.of(1, 1, 2), draw.of(1, 1, 2), draw.of(1, 1, 2)
    if pipeline * tensor * context > 4:
        context = 1
    together = pipeline * tensor * context
    data = draw.of(*(n for n in (1, 2, 4) if n * together <= 4))
    if tensor > 1:
        draw.set("parallel.tensor", tensor)
        draw.set("parallel.overlap", True, False)
    if context > 1:
        draw.set("parallel.context", context)
        heads = 4 if family in ("gpt2", "gpt_neox") else 2
        draw.set("parallel.context_method", "ring", *["ulysses"] * (heads // tensor % context == 0))
    number_here = draw.of(*(n for n in (1, 2, 4) if BATCH // data % n == 0))
    draw.set("train.micro_batch", BATCH // data // number_here)
    if pipeline > 1:
        _draw_pipeline(draw, pipeline, number_here)
        draw_blocks(draw, together // pipeline * data, tensor * context)
    draw_state(draw, data * context)
    draw.set("state.gradient_dtype", "float32", "float32", "float32", "bfloat16")
    if draw.of(True, False):
        draw.set("recompute", ["block"])
        draw.set("recompute_collectives", "keep", "repeat")
    draw_rule(draw)
    draw.set("optimizer.clip_norm", "null", 0.3, 1.0)
    if draw.of(True, False, False) and "optimizer.name=schedule-free" not in draw.overrides:
        draw.set("optimizer.reptile_every", 1, 2)
    draw.set("train.freeze", "[]", "[]", "[embedding]", "[vector]", '["*.0.*"]')
    draw.set("train.loss", "cross-entropy", "cross-entropy", "z-loss", "label-smoothing")
    draw.set("train.precision", "float32", "float32", "float32", "bfloat16")
    draw.set("data.documents", "ignore", "mask")
    if (phases := draw.of(None, None, *PHASES)) is not None:
        draw.overrides.append(f"phases={phases}")
    draw_residency(draw)
    _draw_pruning(draw)
    stop = draw.of(None, 1, 2)
    if stop is not None:
        draw.set("checkpoint.asynchronous", True, False)
        draw.set("checkpoint.scattered", True, False)
        draw.set("checkpoint.keep", 1, 2)
        draw.set("checkpoint.every", 1, 2)
    if family == "granitemoe" and data * context % 2 == 0:
        draw.set("parallel.expert", 1, 2)
    draw_alike(draw)
    draw_layers(draw, LAYERS, ["norm", "attention"], ["mlp"])
    return Case(family, together * data, draw.overrides, stop)


def _draw_pipeline(draw: Draw, ranks: int, microbatches: int) -> None:
    draw.set("parallel.pipeline", ranks)
    per_rank = draw_order(draw, ranks, microbatches)
    stages = ranks * per_rank
    if stages < LAYERS and draw.of(True, False):
        blocks = [1] * stages
        for _ in range(LAYERS - stages):
            blocks[draw.of(*range(stages))] += 1
        draw.set("parallel.layers_per_stage", blocks)


def _draw_pruning(draw: Draw) -> None:
    """Draws targets and steps of pruning. As in `helpers.drawing`, magnitude decides only before the first step."""
    kind = draw.of(None, None, "first", "later", "twice")
    if kind is None:
        return
    frozen = next(each.removeprefix("train.freeze=") for each in draw.overrides if each.startswith("train.freeze="))
    if "optimizer.name=muon" in draw.overrides or "0" in frozen:
        if frozen == "[embedding]":
            return
        draw.overrides.append("pruning.targets=[embedding]")
    elif draw.of(True, False):
        draw.overrides.append(f"pruning.targets=[matrix{',embedding' * (frozen != '[embedding]')}]")
    draw.overrides.append("pruning.sparsity=0.6")
    draw.set("pruning.at", {"first": 0, "later": 1, "twice": [1, 2]}[kind])
    draw.set("pruning.scope", "global", "layer")
    if kind != "first":
        draw.overrides.append("pruning.method=random")
        if draw.of(True, False):
            draw.overrides.append("pruning.rewind=0")
    draw.set("pruning.indices", "int32", "bits")
