"""The commands. Each is a thin call of a function below; heavy imports wait until a command runs."""

import io
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from optimus import __version__
from optimus.config.completion import complete_key
from optimus.errors import UserError
from optimus.plan.commands import plan
from optimus.plan.measure.commands import add_benchmarks, bench_app

app = typer.Typer(
    name="optimus",
    help="Pretrain dense and Mixture-of-Experts language models, from raw text to an evaluated checkpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_benchmarks()
app.add_typer(bench_app, name="bench")
config_app = typer.Typer(help="Show and compare configurations.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
checkpoint_app = typer.Typer(
    help="List, verify, show and convert checkpoints.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(checkpoint_app, name="checkpoint")
app.command()(plan)

Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="[KEY.PATH=VALUE]...", autocompletion=complete_key),
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set", metavar="KEY.PATH=VALUE", help="The same as KEY.PATH=VALUE; repeated.", autocompletion=complete_key
    ),
]
ParseSpecial = Annotated[
    bool,
    Option("--parse-special", help="Parse special tokens in the text; by default they are plain text."),
]


def _version(asked: bool) -> None:
    if asked:
        print(f"optimus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Options of `optimus` itself."""


@app.command()
def prepare(
    inputs: Annotated[list[str], Argument(metavar="INPUT...", help="Files, folders or globs of text, or their URLs.")],
    output: Annotated[Path, Option(help="Folder to make.")],
    tokenizer: Annotated[Path | None, Option(help="tokenizer.json, or a folder that holds one.")] = None,
    train_tokenizer: Annotated[int | None, Option(help="Train a tokenizer of this many entries.")] = None,
    context: Annotated[int, Option(help="Tokens per training sequence.")] = 2048,
    seed: Annotated[int, Option(help="Seed of the shuffle.")] = 0,
    workers: Annotated[int | None, Option(help="Processes. Default: one per core.")] = None,
    shard_size: Annotated[str, Option(help="Largest shard.")] = "512MB",
    text_field: Annotated[
        str,
        Option(
            help="Field or column that holds the text: text, meta.body, a template such as '{question} {answer}', or "
            "chat:messages for conversations of which the answers are predicted."
        ),
    ] = "text",
    parse_special: ParseSpecial = False,
    pack: Annotated[
        Literal["concatenate", "best-fit"], Option(help="best-fit: no document shorter than the context is cut.")
    ] = "concatenate",
    min_characters: Annotated[int, Option(help="Leave out shorter documents.")] = 0,
    max_characters: Annotated[int | None, Option(help="Leave out longer documents.")] = None,
    min_tokens: Annotated[int, Option(help="Leave out documents of fewer tokens, with the end of text.")] = 0,
    max_tokens: Annotated[int | None, Option(help="Leave out documents of more tokens, with the end of text.")] = None,
    dedup: Annotated[
        Literal["none", "exact", "minhash"],
        Option(help="Keep the first of documents that are the same (exact) or nearly so (minhash)."),
    ] = "none",
    as_json: Json = False,
) -> None:
    """Tokenise, shuffle and shard text into training data."""
    given = _but(locals(), "shard_size", "as_json")
    from optimus.config.sizes import parse_size
    from optimus.data.preparation import prepare as run
    from optimus.observe.progress import Progress
    from optimus.observe.signals import ended_by_signals

    say = "stopping; progress is saved, and the same command continues"
    with ended_by_signals(say), Progress() as progress:
        index = run(**given, shard_size=parse_size(shard_size), progress=progress.update)
    rest = f"the last {index['dropped_tokens']} tokens do not fill a sequence and are dropped"
    if pack == "best-fit":
        padding = index["padding_tokens"]
        rest = f"{padding:,} of them padding ({100 * padding / index['tokens']:.2g} %)"
        rest += f"; {index['cut_documents']:,} documents are longer than a sequence and cut"
    _show(
        index,
        as_json,
        f"{output}: {index['tokens']:,} tokens of {index['documents']:,} documents in {index['instances']:,} sequences "
        f"of {context}, {len(index['shards'])} shard(s); {rest}{_left_alone(index)}",
    )


def _left_alone(index: dict[str, Any]) -> str:
    """Lines about documents that were left out, and about files that were skipped because of their endings."""
    reasons = ("too_short", "too_long", "duplicates")
    left_out = ", ".join(f"{index[why]:,} {why.replace('_', ' ')}" for why in reasons if index.get(why))
    said = f"\nleft out: documents {left_out}" if left_out else ""
    by_ending = index.get("skipped_by_ending", {})
    if not by_ending:
        return said
    counts = ", ".join(f"{count:,} {ending}" for ending, count in sorted(by_ending.items(), key=lambda one: -one[1]))
    return f"{said}\nskipped: {index['skipped_files']:,} file(s) of other kinds ({counts})"


@app.command()
def train(
    config: Annotated[Path, Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Overrides = None,
    settings: Settings = None,
    ranks: Annotated[int | None, Option(help="Ranks to start on this machine.")] = None,
    resume: Annotated[
        bool,
        Option(
            "--resume", help="Continue from the newest checkpoint of the run. `--resume auto`: if there is something."
        ),
    ] = False,
    fresh_optimizer: Annotated[
        bool, Option("--fresh-optimizer", help="With --resume: from the weights alone, as for a new update rule.")
    ] = False,
    check: Annotated[bool, Option("--check", help="Validate the configuration without running it.")] = False,
    auto_plan: Annotated[
        str | None,
        Option(metavar="MACHINE", help="Choose the layout that `optimus plan` finds best on this machine."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model."""
    from optimus.api import train as run
    from optimus.observe.progress import seconds_text

    overrides, automatic = [*(overrides or []), *(settings or [])], resume and "auto" in (overrides or [])
    overrides = [text for text in overrides if text != "auto"] if automatic else overrides
    how: dict[str, Any] = {
        "ranks": ranks,
        "resume": "auto" if automatic else resume,
        "fresh_optimizer": fresh_optimizer,
        "check": check,
    }
    if auto_plan is not None:
        from optimus.plan.asking import best_layout

        summary = run(best_layout(config, overrides, auto_plan, ranks), **how)
    else:
        summary = run(config, overrides, **how)
    signalled = None if check else summary["stopped_by"]
    ended = typer.Exit(0 if signalled is None else 128 + signal.Signals[signalled])
    if os.environ.get("RANK", "0") != "0":
        raise ended  # under torchrun, rank 0 speaks for all
    if check:
        _show_ready(config, summary, as_json)
        return
    bits = "" if summary["bits_per_byte"] is None else f"{summary['bits_per_byte']:.4f} bits per byte, "
    loss = "" if summary["loss"] is None else f"loss {summary['loss']:.4f}, {bits}"
    text = f"step {summary['step']}: {loss}checkpoint {summary['checkpoint'] or 'none yet'}"
    text += f"\n{summary['tokens']:,} tokens in all, {seconds_text(summary['seconds'])} this time"
    text += f"; report: {summary['report']}" if summary["report"] else ""
    if summary["step"] < summary["steps"]:
        again = [text for text in overrides if not text.startswith("train.stop_at=")]
        words = shlex.join(["optimus", "train", str(config), *again, *(["--ranks", str(ranks)] if ranks else [])])
        why = "" if signalled is None else f" by {signalled}"
        text += f"\nstopped{why} before step {summary['steps']}; continue with: {words} --resume"
    _show(summary, as_json, text)
    raise ended


@app.command()
def evaluate(
    checkpoint: Annotated[list[Path], Argument(metavar="CHECKPOINT...", help="Checkpoint or run folder.")],
    tasks: Annotated[list[str] | None, Option(help="Tasks, repeated or separated by commas.")] = None,
    task_data: Annotated[Path | None, Option(help="Folder of local task data.")] = None,
    text: Annotated[Path | None, Option(help="File or folder of text for bits per byte.")] = None,
    limit: Annotated[int | None, Option(help="Most documents per task.")] = None,
    fewshot: Annotated[int | None, Option(help="Examples in each prompt.")] = None,
    parse_special: ParseSpecial = False,
    ensemble: Annotated[bool, Option("--ensemble", help="Score the mean logits of several checkpoints.")] = False,
    signal: Annotated[
        bool, Option("--signal", help="How surely the tasks that runs measured while they trained tell them apart.")
    ] = False,
    plot: Annotated[Path | None, Option(help="Draw the tasks of --signal into this PNG file.")] = None,
    device: Annotated[str, Option(help="auto, cpu, cuda, xpu, ...")] = "auto",
    output: Annotated[Path | None, Option(help="Write the results to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Score a checkpoint on tasks (lm-eval) and on bits per byte of text."""
    given = _but(locals(), "tasks", "ensemble", "signal", "plot", "as_json")
    from optimus.api import evaluate as run

    if signal:
        if tasks or text or ensemble or output or limit or fewshot:
            raise UserError("--signal reads runs and evaluates nothing: give it with --plot and --json alone")
        _signals(checkpoint, plot, as_json)
        return
    if plot is not None:
        raise UserError("--plot draws what --signal reads of runs: give --signal too")
    if ensemble != (len(checkpoint) > 1):
        cure = "name several checkpoints" if ensemble else "evaluate them one by one, or together with --ensemble"
        raise UserError(f"{len(checkpoint)} checkpoint(s){' with --ensemble' if ensemble else ''}: {cure}")
    names = [name for group in tasks or [] for name in group.split(",") if name]
    results = run(**given, tasks=names)
    rows = [{"task": name, **scores} for name, scores in results["tasks"].items()]
    if rows and not as_json:
        from optimus.observe.table import print_table

        print_table(rows, ", ".join(map(str, checkpoint)))
    bits = results["bits_per_byte"]
    _show(results, as_json, f"bits per byte: {bits:.4f}" if bits is not None else "")


def _signals(runs: list[Path], plot: Path | None, as_json: bool) -> None:
    from optimus.disk import check_plot
    from optimus.evaluation.signals import draw, read_curves, signals
    from optimus.observe.table import print_table

    target = check_plot(plot) if plot is not None else None
    curves = read_curves(runs)
    rows = signals(curves)
    if target is not None:
        draw(curves, runs, target)
    if not as_json:
        print_table(rows, ", ".join(map(str, runs)))
    _show({"signals": rows}, as_json, "")


@app.command()
def generate(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="Checkpoint or run folder.")],
    prompt: Annotated[str, Option(help="Text to continue.")],
    max_tokens: Annotated[int, Option(help="Tokens to add at most.")] = 128,
    temperature: Annotated[float, Option(help="Sampling temperature; 0: greedy.")] = 0.0,
    top_p: Annotated[float, Option(help="Sample from the most likely tokens of this total probability.")] = 1.0,
    seed: Annotated[int, Option(help="Sampling seed.")] = 0,
    parse_special: ParseSpecial = False,
    device: Annotated[str, Option(help="auto, cpu, cuda, xpu, ...")] = "auto",
    as_json: Json = False,
) -> None:
    """Continue a text."""
    given = _but(locals(), "as_json")
    from optimus.evaluation import generate_text

    text = generate_text(**given)
    _show({"prompt": prompt, "text": text}, as_json, text)


@app.command()
def export(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="Checkpoint or run folder.")],
    output: Annotated[Path, Option(help="Folder to make.")],
    dtype: Annotated[str, Option(help="float32 or bfloat16.")] = "float32",
    as_json: Json = False,
) -> None:
    """Write a checkpoint in Hugging Face format."""
    from optimus.hub import export_checkpoint

    _show(export_checkpoint(checkpoint, output, dtype=dtype), as_json, f"{output}: load it with AutoModelForCausalLM")


@app.command(name="import")
def import_(
    folder: Annotated[Path, Argument(metavar="HF_DIR", help="Hugging Face folder of a model of a known family.")],
    output: Annotated[Path, Option(help="Checkpoint folder to make.")],
    as_json: Json = False,
) -> None:
    """Turn a Hugging Face folder into a checkpoint."""
    from optimus.hub import import_folder

    made = import_folder(folder, output)
    note = f"\n{made['left_out']}" if made["left_out"] else ""
    _show(made, as_json, f"{output}: a checkpoint of weights (checkpoint.initial={output}){note}")


@app.command()
def merge(
    checkpoints: Annotated[
        list[str], Argument(metavar="CHECKPOINT[=WEIGHT]...", help="Checkpoints or run folders, each with its weight.")
    ],
    output: Annotated[Path, Option(help="Checkpoint folder to make.")],
    last: Annotated[int | None, Option(help="Average this many of the last checkpoints of the one run.")] = None,
    as_json: Json = False,
) -> None:
    """Average the weights of checkpoints."""
    from optimus.checkpoint.merging import merge as run

    weighed = [text.rpartition("=") if "=" in text else (text, "=", "1") for text in checkpoints]
    try:
        given = {path: float(weight) for path, _, weight in weighed}
    except ValueError:
        raise UserError(f"{' '.join(checkpoints)}: give each as CHECKPOINT=WEIGHT, such as runs/web=0.3") from None
    if len(given) < len(weighed):
        raise UserError(f"{' '.join(checkpoints)}: name each checkpoint once, with its whole weight")
    made = run(given, output, last=last)
    _show(made, as_json, f"{output}: the average of {len(made['weights'])} checkpoints")


@app.command()
def launch(
    context: typer.Context,
    config: Annotated[Path, Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Overrides = None,
    settings: Settings = None,
    nodes: Annotated[int, Option(help="Nodes that train.")] = 1,
    spares: Annotated[int, Option(help="Spare nodes, which replace failed ones.")] = 0,
    ranks_per_node: Annotated[int, Option(help="Ranks on each node.")] = 1,
    rendezvous: Annotated[str, Option(help="HOST:PORT of `optimus rendezvous`.")] = "127.0.0.1:29400",
    node: Annotated[str | None, Option(help="Name of this node. Default: that of the machine.")] = None,
    name: Annotated[str, Option(help="Name of the launch, where several use one store.")] = "optimus",
    keep_alive: Annotated[str, Option(help="Seconds between heartbeats x number that may be missing.")] = "5x3",
    wait: Annotated[float, Option(help="Seconds to wait until enough nodes have joined.")] = 600.0,
    max_restarts: Annotated[int, Option(help="Restarts in a row without a new checkpoint.")] = 5,
    inject: Annotated[Path | None, Option(help="YAML list of faults to rehearse.")] = None,
    scheduler: Annotated[
        Literal["slurm", "pbs"] | None, Option(help="Start nothing; write a batch script for this system.")
    ] = None,
    output: Annotated[Path | None, Option(help="With --scheduler: batch script to write.")] = None,
    time: Annotated[str, Option(help="Time limit in the batch script, HOURS:MINUTES:SECONDS.")] = "12:00:00",
    directive: Annotated[
        list[str] | None, Option(help="Line for the batch system, such as '--account=physics'; repeated.")
    ] = None,
    check: Annotated[bool, Option("--check", help="Validate without starting or contacting anything.")] = False,
    as_json: Json = False,
) -> None:
    """Run one node of a training with spares; start it on every node and every spare."""
    from optimus.training.reading import read_run

    overrides = [*(overrides or []), *(settings or [])]

    read_run(config, overrides)  # before torch is imported: a mistake costs no waiting
    from optimus.training import nodes as run

    other = ("node", "name", "rendezvous") if scheduler is not None else ("output", "time", "directive")
    sources = {name: context.get_parameter_source(name) for name in other}
    if given := [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]:
        why = "leave it out with --scheduler: the batch script chooses it" if scheduler else "it needs --scheduler"
        raise UserError(f"--{given[0]}: {why}")
    alive = run.parse_keep_alive(keep_alive)
    job = run.NodeJob(config, overrides, nodes, spares, ranks_per_node, alive, wait, max_restarts)
    program = []
    if inject is not None:
        from optimus.testing.faults import rank_program

        program = rank_program(inject, job.ranks)
    if check:
        if scheduler is not None:
            raise UserError("--check: leave it out with --scheduler, which starts nothing either")
        _show_ready(config, run.check_launch(job, rendezvous, node), as_json)
        return
    if scheduler is not None:
        if output is None:
            raise UserError("--scheduler needs --output PATH, where the batch script goes")
        submit = run.write_batch_script(
            job, scheduler=scheduler, path=output, time=time, directives=directive or [], inject=inject
        )
        result = {"output": str(output), "submit": submit, "nodes": nodes, "spares": spares}
        _show(result, as_json, f"{output}: {nodes} nodes and {spares} spares; submit it with: {submit}")
        return
    outcome = run.launch(job, rendezvous, node, name=name, program=program)
    _show({"outcome": "finished" if outcome is None else outcome.value}, as_json, "")
    if outcome is not None:
        raise typer.Exit(run.exit_code(outcome))


@app.command()
def rendezvous(
    port: Annotated[int, Option(help="Port to listen on.")] = 29400,
    address: Annotated[
        str, Option(help="Address of this machine to listen on, which the nodes connect to.")
    ] = "127.0.0.1",
    as_json: Json = False,
) -> None:
    """Serve the rendezvous store of a launch, on a machine that is none of its nodes."""
    from optimus.resilience.store import serve_until_ended

    serve_until_ended(port, address, as_json)


@app.command()
def rollback(
    run: Annotated[Path, Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int, Option(help="Step of the checkpoint to go back to.")],
    as_json: Json = False,
) -> None:
    """Roll a run back to the weights of an earlier checkpoint, with a fresh optimizer."""
    from optimus.checkpoint.rollback import rollback as run_it

    result = run_it(run, step)
    moved = f"moved to {result['to']}: {', '.join(result['moved'])}\n" if result["moved"] else ""
    again = shlex.join(["optimus", "train", str(run / "config.yaml"), "--resume"])
    _show(result, as_json, f"{moved}{run} goes on from the weights of step {step}: {again}")


@config_app.command(name="show")
def config_show(
    config: Annotated[Path, Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Overrides = None,
    settings: Settings = None,
    resolved: Annotated[
        bool, Option("--resolved", help="Decide what is left open, as a run on this machine would, and say why.")
    ] = False,
    ranks: Annotated[int | None, Option(help="With --resolved: ranks of the run.")] = None,
    as_json: Json = False,
) -> None:
    """Show a configuration with its includes, preset, overrides and defaults: every key, as a run saves it."""
    from optimus.config import dump_config, load_config
    from optimus.hub import read_model_folder

    tree = load_config(config, [*(overrides or []), *(settings or [])], read_model_folder)
    if not resolved:
        _show(tree.model_dump(), as_json, dump_config(tree).rstrip())
        return
    from optimus.training.resolving import resolve_before_launch

    run = resolve_before_launch(tree, ranks or tree.parallel.least_ranks)
    lines = [f"# {decision}" for decision in run.decisions]
    told = {"config": run.config.model_dump(), "decisions": [decision.written for decision in run.decisions]}
    _show(told, as_json, "\n".join([*lines, dump_config(run.config).rstrip()]))


@config_app.command(name="diff")
def config_diff(
    configs: Annotated[list[Path], Argument(metavar="CONFIG...", help="YAML files or run folders, two or more.")],
    as_json: Json = False,
) -> None:
    """Show the keys whose values are not the same in all of these configurations, defaults included."""
    from optimus.config.flat import differing, value_text
    from optimus.config.load import load_config
    from optimus.hub import read_model_folder
    from optimus.observe.table import print_table

    if len(configs) < 2:
        raise UserError(f"config diff: there is only {configs[0]}: name two configurations or more")
    files = [path / "config.yaml" if path.is_dir() else path for path in configs]
    found = differing([load_config(file, (), read_model_folder).model_dump() for file in files], None)
    if as_json or not found:
        _show(found, as_json, "no key differs")
        return
    text = [
        {"key": key, **{str(path): value_text(value) for path, value in zip(configs, row)}}
        for key, row in found.items()
    ]
    print_table(text, f"{len(found)} keys differ")


@checkpoint_app.command(name="list")
def checkpoint_list(
    run: Annotated[Path, Argument(metavar="RUN", help="Run folder.")],
    as_json: Json = False,
) -> None:
    """List a run's checkpoints, and the one that --resume loads."""
    from optimus.checkpoint.inspect import list_run
    from optimus.config.sizes import size_text

    rows = list_run(run)
    lines = [
        f"step {row['step']:>8}  {row['kind']:7}  {size_text(row['bytes']):>10}  {row['path']}"
        f"{'  <- --resume' if row['resumes'] else ''}{'  ' + row['problem'] if row['problem'] else ''}"
        for row in rows
    ]
    _show(rows, as_json, "\n".join(lines) or f"{run} has no checkpoints")


@checkpoint_app.command(name="verify")
def checkpoint_verify(
    path: Annotated[Path, Argument(metavar="PATH", help="Checkpoint, or run folder for all of its checkpoints.")],
    as_json: Json = False,
) -> None:
    """Compare all files with the manifest; exit code 1 if anything is damaged."""
    from optimus.checkpoint.inspect import verify_all

    found = verify_all(path)
    lines = [line for each, problems in found.items() for line in problems or [f"{each} is whole"]]
    _show(found, as_json, "\n".join(lines))
    if any(found.values()):
        raise typer.Exit(1)


@checkpoint_app.command(name="show")
def checkpoint_show(
    path: Annotated[Path, Argument(metavar="PATH", help="Checkpoint, or run folder for its newest one.")],
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds, and how many ranks of which nodes wrote it."""
    from optimus.checkpoint.inspect import show
    from optimus.config.sizes import size_text

    about = show(path)
    nodes = ", ".join(f"node {node} {size_text(size)}" for node, size in about["bytes_by_node"].items())
    _show(
        about,
        as_json,
        f"{about['path']}: step {about['step']}, {about['kind']}, {size_text(about['bytes'])}\n"
        f"{about['parameters']:,} parameters ({about['model']['family']}, {about['precision']}), {about['tensors']} tensors "
        f"in {about['slices']} slices\n"
        f"written by {about['writers']} of {about['written'].get('ranks', 1)} ranks: {nodes}",
    )


@checkpoint_app.command(name="convert")
def checkpoint_convert(
    path: Annotated[Path, Argument(metavar="PATH", help="Checkpoint, or run folder for its newest one.")],
    output: Annotated[Path, Option(help="Folder or file to make.")],
    to: Annotated[
        Literal["weights", "torch", "safetensors"],
        Option(help="weights: a weights-only checkpoint; torch or safetensors: one file of all tensors."),
    ] = "weights",
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(help="Type of the weights. Default: the type of the run, or of the file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to a weights-only one, or to one file for other tools (Hugging Face: optimus export)."""
    from optimus.checkpoint.inspect import convert
    from optimus.config.sizes import size_text

    result = convert(path, output, to, dtype)
    _show(result, as_json, f"{output}: {result['tensors']} tensors, {size_text(result['bytes'])}")


@app.command()
def models(
    families: Annotated[bool, Option("--families", help="List the model families and their presets.")] = False,
    as_json: Json = False,
) -> None:
    """List the presets with their total and active parameters."""
    from optimus.config.models import families_known
    from optimus.config.models import models as run
    from optimus.config.sizes import count_text

    if families:
        known = families_known()
        _show(known, as_json, "\n".join(f"{row['name']:16} {', '.join(row['presets'])}".rstrip() for row in known))
        return
    rows = run()
    lines = []
    for row in rows:
        total, active = (count_text(row[f"{kind}_parameters"]) for kind in ("total", "active"))
        lines.append(
            f"{row['name']:16} {total:>8} total  {active:>8} active   {row['layers']} layers, hidden {row['hidden']}"
        )
    _show(rows, as_json, "\n".join(lines))


@app.command()
def lab(
    config: Annotated[Path, Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Overrides = None,
    settings: Settings = None,
    nodes: Annotated[int, Option(help="Nodes that train.")] = 3,
    spares: Annotated[int, Option(help="Spare nodes, which replace failed ones.")] = 2,
    ranks_per_node: Annotated[int, Option(help="Ranks on each node.")] = 1,
    bandwidth: Annotated[str | None, Option(help="Bandwidth of each node, such as 1Gbit.")] = None,
    inject: Annotated[Path | None, Option(help="YAML list of faults to rehearse.")] = None,
    keep_alive: Annotated[str, Option(help="Seconds between heartbeats x number that may be missing.")] = "1x3",
    wait: Annotated[float, Option(help="Seconds to wait until enough nodes have joined.")] = 30.0,
    limit: Annotated[float, Option(help="Seconds after which everything is taken down.")] = 600.0,
    plain: Annotated[
        bool, Option("--plain", help="Processes on one network instead of network namespaces (no root).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Rehearse node failures on this machine, with network namespaces as nodes."""
    from optimus.testing.lab import rehearse
    from optimus.training.nodes import NodeJob, parse_keep_alive

    alive = parse_keep_alive(keep_alive)
    job = NodeJob(
        str(config), [*(overrides or []), *(settings or [])], nodes, spares, ranks_per_node, keep_alive=alive, wait=wait
    )

    def say(
        event: dict[str, Any],
    ) -> None:  # when it happens, whoever reads; standard output is for the result, if JSON
        line = f"{event['kind']:10} {event['node'] or '-':8} {event['detail']}"
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    result = rehearse(job, bandwidth=bandwidth, inject=inject, limit=limit, plain=plain, say=say)
    codes = ", ".join(f"{host} {'no answer' if code is None else code}" for host, code in result["exit_codes"].items())
    ended = "finished" if result["finished"] else "did not finish"
    _show(result, as_json, f"exit codes: {codes}\nthe run {ended} in {result['output']}")
    if not result["finished"]:
        raise typer.Exit(1)


@app.command()
def schedule(
    name: Annotated[
        str, Argument(metavar="NAME", help="Schedule, as in parallel.schedule; an unknown name lists all.")
    ],
    stages: Annotated[int, Option(help="Ranks of the pipeline, each with --stages-per-rank stages.")] = 4,
    microbatches: Annotated[int, Option(help="Microbatches of a step.")] = 8,
    stages_per_rank: Annotated[int | None, Option(help="Default: the fewest that the schedule takes.")] = None,
    warm_up: Annotated[float, Option(help="Factor of the usual live activations, if the schedule takes one.")] = 1.0,
    vocabulary: Annotated[
        bool, Option("--vocabulary", help="Vocabulary parallelism over all stages (passes S and T).")
    ] = False,
    output_layer: Annotated[
        float,
        Option(help="Time of the output layer's forward pass, on the last stage or, with --vocabulary, over all."),
    ] = 0.0,
    jitter: Annotated[float, Option(help="Lognormal standard deviation of computation times.")] = 0.0,
    link: Annotated[float, Option(help="Time of a message between ranks; a stage's forward pass takes 1.")] = 0.0,
    blocking: Annotated[bool, Option("--blocking", help="Sends and receives block computation.")] = False,
    seed: Annotated[int, Option(help="Seed of the jitter.")] = 0,
    measured: Annotated[Path | None, Option(help="Timeline of a real run to compare with the simulation.")] = None,
    plot: Annotated[Path | None, Option(help="Draw the timeline into this PNG file.")] = None,
    output: Annotated[Path | None, Option(help="Write bubble, memory and all actions to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Check, simulate and draw a pipeline schedule."""
    given = _but(locals(), "stages", "jitter", "link", "blocking", "seed", "as_json")
    from optimus.disk import check_plot
    from optimus.pipeline import Costs
    from optimus.pipeline.report import run

    if plot is not None:
        check_plot(plot)
    costs = Costs(jitter=jitter, link=link, blocking=blocking, seed=seed)
    summary, text = run(**given, ranks=stages, costs=costs)
    _show(summary, as_json, text)


@app.command()
def doctor(
    folder: Annotated[Path, Argument(metavar="[FOLDER]", help="Where runs would be written.")] = Path("."),
    as_json: Json = False,
) -> None:
    """Look at this machine and say what to mend: devices, memory, network, disk, clock; exit code 1 for a problem."""
    from optimus.observe.doctor import examine

    found = examine(folder)
    lines = [
        f"{each.status:8} {each.what:22} {each.found}" + (f"\n{'':9}-> {each.mend}" if each.mend else "")
        for each in found
    ]
    _show([each._asdict() for each in found], as_json, "\n".join(lines))
    if any(each.status == "problem" for each in found):
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folder, or several to compare.")],
    output: Annotated[Path, Option(help="HTML file to write.")] = Path("report.html"),
    serve: Annotated[
        str | None,
        Option(
            metavar="[ADDRESS:]PORT", help="Serve the report, refreshed while the run goes on, on this machine alone."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a run as a page: curves, time and memory, experts, events; or compare several."""
    from optimus.observe.signals import ended_by_signals
    from optimus.report import page
    from optimus.report.serve import parse_address, report_server

    if serve is None:
        result = page.write_report(runs, output)
        said = "".join(f"warning: {text}\n" for text in result["warnings"])
        _show(result, as_json, f"{said}{output}: open it in a browser; it needs no network")
        return
    server = report_server(runs, *parse_address(serve))
    host, port = server.server_address[:2]
    result = {"url": f"http://{host!s}:{port}/"}
    _show(result, as_json, f"{result['url']}: the report, read anew while it is open; Ctrl-C ends")
    sys.stdout.flush()
    with server, ended_by_signals("ending"):
        server.serve_forever()


@app.command()
def runs(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder in which, or below which, run folders are.")],
    state: Annotated[
        Literal["running", "finished", "stopped", "failed"] | None, Option(help="List only runs in this state.")
    ] = None,
    match: Annotated[str | None, Option(help="List only runs whose path or model has this text in it.")] = None,
    sort: Annotated[str, Option(help="Column to sort by, such as loss or bits_per_byte.")] = "name",
    reverse: Annotated[bool, Option("--reverse", help="Sort from the largest to the smallest.")] = False,
    as_json: Json = False,
) -> None:
    """List runs: how far each is, its loss and speed, whether it runs, and why not."""
    from optimus.observe.table import print_table
    from optimus.report import listing

    rows = listing.runs(folder, state=state, match=match, sort=sort, reverse=reverse)
    if as_json or not rows:
        _show(rows, as_json, f"{folder}: no such runs")
        return
    print_table(listing.table_rows(rows), f"runs in {folder}")


def _show_ready(config: Path, ready: dict[str, Any], as_json: bool) -> None:
    """What `--check` says of a run that could begin."""
    where = f"\n{ready['placement']}" if ready["ranks"] > 1 else ""
    nodes = f" of {ready['nodes']} node(s), with {ready['spares']} spare(s)" if "nodes" in ready else ""
    text = f"{config} is ready to run: {ready['steps']} steps on {ready['ranks']} rank(s){nodes}"
    held = f"\n{ready['held']}" if ready["held"] else ""
    about = "\n".join(ready.pop("summary"))
    _show(ready, as_json, f"{text}\n{about}{where}{held}")


def _but(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """The arguments of a command that the function below takes under the same names: all but these."""
    return {name: value for name, value in given.items() if name not in names}


def _show(result: Any, as_json: bool, text: str) -> None:
    if as_json or text:
        print(json.dumps(result, indent=2, default=str) if as_json else text)


def main() -> None:
    """Entry point: a `UserError` is one line and exit code 2, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # a folder's name need not be Unicode; stderr does so by itself
    try:
        app()
    except UserError as error:
        sys.stderr.write(f"error: {_with_options(str(error))}\n")  # at once: other ranks write there too
        sys.exit(error.code)


def _with_options(message: str) -> str:
    """A message of a function, which names its arguments as `resume=True` or `workers`, with the options for them."""
    group = typer.main.get_command(app)
    commands = [each for each in group.commands.values() if not hasattr(each, "commands")]  # type: ignore[attr-defined]
    options = {param.name: param.opts[0] for command in commands for param in command.params}

    def option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if not options.get(name, "").startswith("--"):
            return match[0]
        return options[name] if value in (None, "True") else f"{options[name]} {value}"

    return re.sub(r"`(\w+)(?:=([^`]*))?`", option, message)


if __name__ == "__main__":
    main()
