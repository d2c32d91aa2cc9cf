"""Draws the two pictures of docs/architecture.md, a start and a step, as SVG; docs/generate.py runs the script.

The rows are in the order in which the code calls the functions first, each below its caller.
`tests/test_architecture_page.py` compares them with a traced run.
"""

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "figures"


class Row(NamedTuple):
    """A call: how many rows of the picture call it, from outside to inside; its module and function; what it does."""

    depth: int
    module: str  # below `optimus`
    function: str
    does: str
    main: bool = False  # drawn with the accent
    several: bool = False  # called where a run has several ranks on this machine


START = [
    Row(0, "api", "train", "what `optimus train run.yaml` calls"),
    Row(1, "training.reading", "read_run", "configuration and data, before torch"),
    Row(1, "launch.here", "train_or_check", "in this process, or on ranks of it"),
    Row(2, "launch.here", "check_run", "files, output folder, memory", main=True),
    Row(2, "launch.local", "start_ranks", "several ranks: a process each", several=True),
    Row(2, "launch.rank", "run_rank", "from here on, on every rank", main=True),
    Row(3, "training.build", "build_trainer", "all that a run needs"),
    Row(4, "training.build", "build_run", "resolves the run; groups, data"),
    Row(5, "training.build", "build_model", "this rank's stages and state"),
    Row(6, "parallel.parallelize", "parallelize", "modules by layout"),
    Row(4, "training.start", "start_run", "first weights, or a checkpoint's"),
    Row(3, "training.checks", "dry_run", "a microbatch: does it fit?"),
    Row(3, "training.trainer", "Trainer.fit", "to the last step", main=True),
    Row(4, "training.trainer", "Trainer.train_step", "a batch of this rank"),
    Row(5, "training.step", "training_step", "the first step"),
]

STEP = [
    Row(0, "training.step", "training_step", "on each rank, with its part of a batch"),
    Row(1, "state.model_state", "ModelState.begin_step", "clears the gradients"),
    Row(1, "training.step", "accumulate_gradients", "forward and backward passes", main=True),
    Row(2, "pipeline.staged", "PipelineStages.train_microbatches", "in the order of the schedule"),
    Row(3, "state.unsharded", "UnshardedParameters.gather", "before a module runs its part"),
    Row(3, "pipeline.staged", "_Training.backward", "from the loss to gradient buffers"),
    Row(4, "state.reduction", "GradientReduction.after_gradient", "the last one of a chunk begins"),
    Row(5, "state.reduction", "GradientReduction._reduce_scatter_async", "beside the rest of the pass"),
    Row(1, "state.model_state", "ModelState.reduce_gradients", "waits for the reductions", main=True),
    Row(2, "state.model_state", "ModelState._norm", "over all ranks; finite?"),
    Row(1, "training.step", "clip_scale", "a factor of at most 1"),
    Row(1, "state.model_state", "ModelState.step", "chunks in the next pass's order", main=True),
    Row(2, "state.update", "Update.step", "a chunk, tile by tile"),
    Row(3, "optim.adamw", "AdamW.update", "or another update rule"),
    Row(3, "state.unsharded", "UnshardedParameters.invalidate", "after an update, begins"),
    Row(4, "state.unsharded", "UnshardedParameters._all_gather_async", "for the next step"),
]

PICTURES = {
    "start.svg": ("From the command to the first step: each function with those that it calls below it", START),
    "step.svg": ("A step with ZeRO-1: each function with those that it calls below it", STEP),
}

# A telephone of 390 pixels shows 358 of them without margins.
_WIDTH, _ROW, _INDENT, _EDGE = 358, 46, 12, 8
_STYLE = """
    .page { fill: #ffffff } .box { fill: #eef3fb; stroke: #c3d3ea } .main { fill: #dbe8fb; stroke: #3b6fb5 }
    .name { fill: #16233a; font: 600 11.5px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
    .said { fill: #44505f; font: 11px system-ui, Helvetica, Arial, sans-serif } .line { stroke: #8a97a8; fill: none }
    .several { stroke-dasharray: 4 3 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #1b2027 } .box { fill: #252c37; stroke: #3d4859 } .main { fill: #22395a; stroke: #6ea3ea }
      .name { fill: #eaf0f8 } .said { fill: #b9c4d2 } .line { stroke: #76859a }
    }
"""


def picture(title: str, rows: list[Row]) -> str:
    """Returns the SVG of the rows, one below the other."""
    drawn = []
    for number, row in enumerate(rows):
        x, y = _EDGE + _INDENT * row.depth, _EDGE + _ROW * number
        parent = next((above for above in range(number - 1, -1, -1) if rows[above].depth < row.depth), None)
        if parent is not None:
            left, top = _EDGE + _INDENT * rows[parent].depth + 5, _EDGE + _ROW * parent + _ROW - 6
            drawn.append(f'<path class="line" d="M{left} {top} V{y + 20} H{x}"/>')
        kind = ("main" if row.main else "box") + (" several" if row.several else "")
        where = f"{row.module.replace('.', '/')}.py"
        drawn += [
            f'<rect class="{kind}" x="{x}" y="{y}" width="{_WIDTH - _EDGE - x}" height="{_ROW - 6}" rx="5"/>',
            f'<text class="name" x="{x + 7}" y="{y + 16}">{escape(row.function)}</text>',
            f'<text class="said" x="{x + 7}" y="{y + 32}">{escape(where)}: {escape(row.does)}</text>',
        ]
    height = 2 * _EDGE + _ROW * len(rows) - 6
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    body = "\n  ".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n  <title>{escape(title)}</title>\n  <style>{_STYLE}  </style>\n'
        f'  <rect class="page" width="{_WIDTH}" height="{height}" rx="6"/>\n  {body}\n</svg>\n'
    )


def main() -> None:
    """Writes the pictures."""
    for name, (title, rows) in PICTURES.items():
        (FOLDER / name).write_text(picture(title, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
