"""The commands that use a trained model."""

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from optimus.cli.common import Json, ParseSpecial, Plugins, app, but, show
from optimus.errors import UserError
from optimus.observe.evaluations import as_metrics


@app.command()
def evaluate(
    checkpoint: Annotated[list[Path], Argument(metavar="CHECKPOINT", help="Checkpoint or run folder.")],
    tasks: Annotated[list[str] | None, Option(help="Tasks, repeated or separated by commas.")] = None,
    task_data: Annotated[Path | None, Option(help="Folder of local task data.")] = None,
    hub: Annotated[
        bool, Option("--hub", help="Any task of lm-eval, on its own data: downloaded, or from the cache of datasets.")
    ] = False,
    text: Annotated[Path | None, Option(help="File or folder of text for bits per byte.")] = None,
    limit: Annotated[int | None, Option(help="Maximum number of documents per task.")] = None,
    fewshot: Annotated[int | None, Option(help="Few-shot examples in each prompt.")] = None,
    parse_special: ParseSpecial = False,
    ensemble: Annotated[bool, Option("--ensemble", help="Score the mean logits of several checkpoints.")] = False,
    signal: Annotated[
        bool, Option("--signal", help="Report how reliably tasks measured during training distinguish runs.")
    ] = False,
    plot: Annotated[Path | None, Option(help="With --signal: plot the tasks to this PNG file.")] = None,
    watch: Annotated[
        bool, Option("--watch", help="Score each checkpoint of a run once, while it trains, until it has finished.")
    ] = False,
    name: Annotated[str | None, Option(help="With --watch: name of the series of scores. Default: watch.")] = None,
    device: Annotated[str, Option(help="auto, cpu, cuda, xpu, ...")] = "auto",
    output: Annotated[Path | None, Option(help="Write the results to this JSON file.")] = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Score a checkpoint on tasks (lm-eval) and on bits per byte of text."""
    given = but(locals(), "tasks", "ensemble", "signal", "plot", "watch", "name", "as_json")
    from optimus.api import evaluate as run

    if signal:
        if tasks or text or ensemble or output or limit or fewshot:
            raise UserError("--signal only reads the metrics of runs: combine it with --plot and --json only")
        _signals(checkpoint, plot, as_json)
        return
    if plot is not None:
        raise UserError("--plot needs --signal: add --signal")
    if ensemble != (len(checkpoint) > 1):
        cure = "name several checkpoints" if ensemble else "evaluate them one by one, or together with --ensemble"
        raise UserError(f"{len(checkpoint)} checkpoint(s){' with --ensemble' if ensemble else ''}: {cure}")
    names = [name for group in tasks or [] for name in group.split(",") if name]
    if watch:
        if ensemble or output:
            raise UserError(
                "--watch scores each checkpoint of one run, into its folder: leave --output and --ensemble out"
            )
        series = {} if name is None else {"name": name}
        _watch(**but(given, "checkpoint", "output"), **series, run=checkpoint[0], tasks=names, as_json=as_json)
        return
    if name is not None:
        raise UserError("--name needs --watch: add --watch")
    results = run(**given, tasks=names)
    rows = [{"task": name, **scores} for name, scores in results["tasks"].items()]
    if rows and not as_json:
        from optimus.observe.table import print_table

        print_table(rows, ", ".join(map(str, checkpoint)))
    bits = results["bits_per_byte"]
    show(results, as_json, f"bits per byte: {bits:.4f}" if bits is not None else "")


def _watch(*, run: Path, as_json: bool, **options: Any) -> None:
    from optimus.api import watch

    scored = 0
    for step, found in watch(run, **options):
        scored += 1
        scores = as_metrics(found)
        line = ", ".join(f"{name.removeprefix('evaluated/')} {value:.4f}" for name, value in scores.items())
        print(json.dumps({"step": step, **scores}) if as_json else f"step {step}: {line}", flush=True)
    if not scored and not as_json:
        print(f"{run}: its checkpoints have scores in evaluations/; --name starts another series")


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
    show({"signals": rows}, as_json, "")


@app.command()
def generate(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="Checkpoint or run folder.")],
    prompt: Annotated[list[str] | None, Option(help="Text to continue; repeat for several.")] = None,
    prompts: Annotated[Path | None, Option(help="File of prompts: JSON Lines with the field prompt.")] = None,
    max_tokens: Annotated[
        int | None,
        Option(
            help="Maximum number of tokens to generate. Default: 128, or half of a context that is shorter than 256."
        ),
    ] = None,
    temperature: Annotated[float, Option(help="Sampling temperature; 0: greedy.")] = 0.0,
    top_p: Annotated[float, Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    seed: Annotated[int, Option(help="Sampling seed.")] = 0,
    parse_special: ParseSpecial = False,
    chat: Annotated[
        bool, Option("--chat", help="Answer the prompt in the format of the model's chat template.")
    ] = False,
    device: Annotated[str, Option(help="auto, cpu, cuda, xpu, ...")] = "auto",
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Continue texts, or answer prompts."""
    given = but(locals(), "prompt", "prompts", "as_json")
    from optimus.api import generate as run
    from optimus.evaluation.task_data import read_prompts

    asked = [*(prompt or []), *(read_prompts(prompts) if prompts is not None else [])]
    if not asked:
        raise UserError("nothing to continue: give --prompt TEXT, or --prompts FILE")
    if len(asked) == 1 and not as_json:  # shows the text during generation
        before = [] if chat else [asked[0]]  # the prompt waits for the first piece, so an early error comes alone

        def show_piece(_: int, piece: str) -> None:
            print(*before, piece, sep="", end="", flush=True)
            before.clear()

        run(**given, prompt=asked, on_text=show_piece)
        print(*before, sep="")
        return
    found = [{"prompt": each, "text": text} for each, text in zip(asked, run(**given, prompt=asked), strict=True)]
    told = "\n\n".join(each["text"] if chat else each["prompt"] + each["text"] for each in found)
    show(found[0] if len(found) == 1 else found, as_json, told)
