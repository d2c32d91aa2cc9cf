"""The commands for checkpoints and weights."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from optimus.cli.common import CommandGroup, Json, Plugins, app, show
from optimus.copies import url_text
from optimus.errors import UserError

checkpoint_app = typer.Typer(
    help="List, verify, show and convert checkpoints.", no_args_is_help=True, rich_markup_mode=None, cls=CommandGroup
)
app.add_typer(checkpoint_app, name="checkpoint")


@checkpoint_app.command(name="list")
def checkpoint_list(
    run: Annotated[Path, Argument(metavar="RUN", help="Run folder.")],
    as_json: Json = False,
) -> None:
    """List a run's checkpoints and mark the one that --resume loads."""
    from optimus.api import list_checkpoints
    from optimus.config.sizes import size_text

    rows = list_checkpoints(run)
    lines = [
        f"step {row['step']:>8}  {row['kind']:7}  {size_text(row['bytes']):>10}  {row['path']}"
        f"{'  <- --resume' if row['resumes'] else ''}{'  ' + row['problem'] if row['problem'] else ''}"
        for row in rows
    ]
    show(rows, as_json, "\n".join(lines) or f"{run} has no checkpoints")


@checkpoint_app.command(name="verify")
def checkpoint_verify(
    path: Annotated[Path, Argument(metavar="PATH", help="Checkpoint, or run folder for all of its checkpoints.")],
    as_json: Json = False,
) -> None:
    """Compare all files with the manifest; exit code 1 if anything is damaged."""
    from optimus.api import verify_checkpoints

    found = verify_checkpoints(path)
    lines = [line for each, problems in found.items() for line in problems or [f"{each} is intact"]]
    show(found, as_json, "\n".join(lines))
    if any(found.values()):
        raise typer.Exit(1)


@checkpoint_app.command(name="show")
def checkpointshow(
    path: Annotated[Path, Argument(metavar="PATH", help="Checkpoint, or run folder for its newest checkpoint.")],
    as_json: Json = False,
) -> None:
    """Show the contents of a checkpoint, and the nodes and number of ranks that wrote it."""
    from optimus.api import show_checkpoint
    from optimus.config.sizes import size_text

    about = show_checkpoint(path)
    nodes = ", ".join(f"node {node} {size_text(size)}" for node, size in about["bytes_by_node"].items())
    show(
        about,
        as_json,
        f"{about['path']}: step {about['step']}, {about['kind']}, {size_text(about['bytes'])}\n"
        f"{about['parameters']:,} parameters ({about['family']}, {about['precision']}), {about['tensors']} tensors "
        f"in {about['slices']} slices\n"
        f"written by {about['writers']} of {about['written'].get('ranks', 1)} ranks: {nodes}",
    )


@checkpoint_app.command(name="convert")
def checkpoint_convert(
    path: Annotated[Path, Argument(metavar="PATH", help="Checkpoint, or run folder for its newest checkpoint.")],
    output: Annotated[Path, Option(help="Folder or file to create.")],
    to: Annotated[
        Literal["weights", "torch", "safetensors"],
        Option(help="weights: a weights-only checkpoint; torch or safetensors: one file of all tensors."),
    ] = "weights",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(
            help="Type of the weights. Default: the run's precision for weights, the stored types for torch and safetensors."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to a weights-only checkpoint, or to one file for other tools (Hugging Face: optimus export)."""
    from optimus.api import convert_checkpoint
    from optimus.config.sizes import size_text

    result = convert_checkpoint(path, output, to, dtype)
    show(result, as_json, f"{output}: {result['tensors']} tensors, {size_text(result['bytes'])}")


@app.command()
def rollback(
    run: Annotated[Path, Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int, Option(help="Step of the checkpoint to roll back to.")],
    as_json: Json = False,
) -> None:
    """Roll a run back to the weights of an earlier checkpoint, with a fresh optimizer."""
    from optimus.api import rollback as run_it

    result = run_it(run, step)
    moved = f"moved to {result['to']}: {', '.join(result['moved'])}\n" if result["moved"] else ""
    again = shlex.join(["optimus", "train", str(run / "config.yaml"), "--resume"])
    show(result, as_json, f"{moved}{run} continues from the weights of step {step} with: {again}")


@app.command()
def merge(
    checkpoints: Annotated[
        list[str],
        Argument(metavar="CHECKPOINT[=WEIGHT]", help="Checkpoints or run folders, each with a weight (1 if absent)."),
    ],
    output: Annotated[Path, Option(help="Checkpoint folder to create.")],
    last: Annotated[int | None, Option(help="Average this many of the last checkpoints of a single run.")] = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Average the weights of checkpoints."""
    from optimus.api import merge as run

    weighed = [text.rpartition("=") if "=" in text else (text, "=", "1") for text in checkpoints]
    try:
        given = {path: float(weight) for path, _, weight in weighed}
    except ValueError:
        raise UserError(f"{' '.join(checkpoints)}: write each as CHECKPOINT=WEIGHT, such as runs/web=0.3") from None
    if len(given) < len(weighed):
        raise UserError(f"{' '.join(checkpoints)}: name each checkpoint once, with its total weight")
    made = run(given, output, last=last, plugins=plugins or ())
    show(made, as_json, f"{output}: the average of {len(made['weights'])} checkpoints")


@app.command()
def export(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="Checkpoint or run folder.")],
    output: Annotated[Path, Option(help="Folder to create.")],
    dtype: Annotated[str, Option(help="Type of the weights: float32, bfloat16 or float16.")] = "float32",
    adapter: Annotated[
        bool, Option("--adapter", help="Write the low-rank factors alone (train.lora_rank), as an adapter for PEFT.")
    ] = False,
    base: Annotated[
        str | None, Option(help="With --adapter: folder or name of the published model; default: checkpoint.load_path.")
    ] = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in Hugging Face format."""
    if base is not None and not adapter:
        raise UserError("--base applies to --adapter only: add --adapter, or leave --base out")
    if adapter:
        if dtype != "float32":
            raise UserError("--dtype: an adapter has the type of its factors: leave --dtype out")
        from optimus.api import export_adapter

        show(
            export_adapter(checkpoint, output, base, plugins=plugins or ()),
            as_json,
            f"{url_text(output)}: load it with peft.PeftModel.from_pretrained(model, {url_text(output)!r})",
        )
        return
    from optimus.api import export as run

    made = run(checkpoint, output, dtype=dtype, plugins=plugins or ())
    loads = "load it with AutoModelForCausalLM"
    others = "load model.safetensors with the module's `load_state_dict`, or set checkpoint.load_path to this folder"
    show(
        made,
        as_json,
        f"{url_text(output)}: {loads if made['transformers'] else others}",
    )


@app.command()
def gguf(
    folder: Annotated[Path, Argument(metavar="HF_DIR", help="Folder that optimus export wrote.")],
    converter: Annotated[Path, Option(help="llama.cpp checkout, whose converter runs.")],
    output: Annotated[Path, Option(help="GGUF file to create.")],
    outtype: Annotated[str, Option(help="Type of the weights: auto (16 bits), f32, f16, bf16 or q8_0.")] = "auto",
    python: Annotated[
        str | None, Option(help="Python with the converter's packages. Default: the one of this command.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert an exported folder to a GGUF file for llama.cpp."""
    from optimus.api import gguf as run

    made = run(folder, converter, output, outtype, python=python)
    show(made, as_json, f"{output}: load it with llama.cpp")


@app.command(name="import")
def import_(
    folder: Annotated[Path, Argument(metavar="HF_DIR", help="Hugging Face folder of a model of a supported family.")],
    output: Annotated[Path, Option(help="Checkpoint folder to create.")],
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face folder to a checkpoint."""
    from optimus.api import import_folder

    made = import_folder(folder, output, plugins=plugins or ())
    note = f"\n{made['left_out']}" if made["left_out"] else ""
    show(
        made, as_json, f"{output}: a weights-only checkpoint; to train from it, set checkpoint.load_path={output}{note}"
    )
