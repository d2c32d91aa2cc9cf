"""The commands `optimus plan` and `optimus schedule`."""

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from optimus.cli.common import Json, Overrides, Plugins, Settings, app, but, show
from optimus.config.completion import complete_preset
from optimus.disk import check_plot
from optimus.errors import UserError

_WIDTH = 100  # characters
_DOUBLINGS = 3  # of the ranks of a scaling study without numbers


def _print_template(asked: bool) -> None:
    if asked:
        from optimus.plan.machine_template import machine_template

        print(machine_template(), end="")
        raise typer.Exit


@app.command()
def plan(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="Preset, Hugging Face folder, or YAML file of a run.",
            autocompletion=complete_preset,
        ),
    ],
    overrides: Overrides = None,
    settings: Settings = None,
    machine: Annotated[
        str, Option(help="Name of a machine, or a machine file (`optimus bench machine` writes one).")
    ] = "",
    ranks: Annotated[int | None, Option(help="Number of ranks of the job.")] = None,
    best: Annotated[int, Option(min=1, help="Number of plans to list.")] = 10,
    as_is: Annotated[bool, Option("--as-is", help="Predict the layout as configured, without a search.")] = False,
    imbalance: Annotated[float, Option(min=1, help="Load imbalance of the experts (max/mean) over the ranks.")] = 1.0,
    what_if: Annotated[
        list[str] | None,
        Option(
            help="Change a value of the machine, or of this library's profile: network.bandwidth=x2, profile.speed=0.8; "
            "repeatable."
        ),
    ] = None,
    links: Annotated[
        Path | None,
        Option(
            help="CSV file with the bandwidth in bytes/s between each pair of nodes, if the pairs differ: a line per node "
            "with its bandwidth to every node, and 0 to itself; no header."
        ),
    ] = None,
    explain: Annotated[int | None, Option(min=1, help="Explain the plan in this row of the table.")] = None,
    output: Annotated[Path | None, Option(help="Write the first plan's configuration to this YAML file.")] = None,
    scale: Annotated[
        str | None,
        Option(
            help="Study scaling over numbers of ranks: weak:384,768,... (the batch grows with the ranks; also without the "
            "word), or strong:384,768,... (the batch stays). The word alone: --ranks, doubled three times."
        ),
    ] = None,
    until: Annotated[
        str | None,
        Option(help="Predict the time until the run has trained tokens=N, such as tokens=2e12, or reaches loss=X."),
    ] = None,
    loss_curve: Annotated[
        str | None,
        Option(
            help="With --until loss=X: loss by tokens. A metrics.jsonl, a CSV file with the columns tokens and loss, or the "
            "law E + B / tokens^beta as E=1.7,B=500,beta=0.3."
        ),
    ] = None,
    plot: Annotated[Path | None, Option(help="With --scale: plot the study to this PNG file.")] = None,
    page: Annotated[
        Path | None,
        Option("--report", help="Write the plans, their time and memory, and the ranks on nodes to this HTML file."),
    ] = None,
    wide: Annotated[bool, Option("--wide", help="Print all columns, in a table wider than 100 characters.")] = False,
    dry_run: Annotated[int | None, Option(help="Count the bytes that this rank would hold.")] = None,
    machine_template: Annotated[
        bool,
        Option(
            "--machine-template",
            help="Print a template of a machine file with the meaning of each value, and exit.",
            callback=_print_template,
            is_eager=True,
        ),
    ] = False,
    layers: Annotated[
        bool,
        Option(
            "--layers", help="Also search for other recomputation and tensor parallelism by layer (parallel.layers)."
        ),
    ] = False,
    largest: Annotated[
        bool,
        Option("--largest", help="Find the largest number of layers that fits, for each offloading of the state."),
    ] = False,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Choose the layout of a model on a machine, and predict its speed and memory."""
    overrides = [*(overrides or []), *(settings or [])]
    kind, numbers = _study(scale, ranks)
    rows = len({*numbers}) or (1 if as_is else best)
    if explain is not None and not largest and explain > rows:
        raise UserError(f"--explain {explain}: there are at most {rows} rows")
    if dry_run is not None:
        others = {
            "output": output,
            "scale": scale,
            "largest": largest,
            "explain": explain,
            "plot": plot,
            "report": page,
            "until": until,
        }
        if given := [f"--{name}" for name, value in others.items() if value]:
            raise UserError(f"--dry-run counts the bytes of one rank only: leave out {' and '.join(given)}")
    from optimus import api

    if Path(model).suffix in (".yaml", ".yml"):  # reports errors before the slow import of torch
        api.config(model, overrides)
    if plot is not None:
        if not numbers:
            raise UserError("--plot plots a study of scaling: add --scale 384,768,...")
        plot = check_plot(plot)
    import torch

    torch.set_num_threads(1)  # the planner computes only shapes
    question: dict[str, Any] = {
        "machine": machine,
        "ranks": ranks,
        "imbalance": imbalance,
        "what_if": what_if or [],
        "links": links,
        "plugins": plugins or (),
    }
    if dry_run is not None:
        (best_plan,) = api.plan(model, overrides, best=1, as_is=as_is, layers=layers, **question).plans
        if not _dry_run(best_plan.job, dry_run, as_json):
            raise typer.Exit(1)
        return
    found = api.plan(
        model,
        overrides,
        best=best,
        as_is=as_is,
        layers=layers,
        largest=largest,
        scale=numbers,
        scaling=kind,
        until=until,
        loss_curve=loss_curve,
        **question,
    )
    if output is not None:
        found.write_config(output)
    if plot is not None:
        from optimus.plan.scaling import draw

        draw(found.points, plot, found.scaling)
    if page is not None:
        from optimus.plan.page import write_page

        searched = found.points and not as_is
        drawn = api.plan(model, overrides, best=best, **question).plans if searched else found.plans
        write_page(drawn, found.points, page)
    if as_json:
        show(found.as_json(), True, "")
    else:
        _print(found, page, explain, wide=wide)
    if as_is and not found.fits:
        raise typer.Exit(1)


def _print(found: Any, page: Path | None, explain: int | None, *, wide: bool) -> None:
    from optimus.observe.table import print_table

    print_table(found.rows(wide=wide), found.title(), None if wide else _WIDTH)
    columns = shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _WIDTH
    for line in found.notes():
        print(textwrap.fill(line, min(_WIDTH, columns)))
    if page is not None:
        print(f"{page}: open it in a browser; it needs no network")
    if explain is not None:
        print(found.explained(explain))


def _study(text: str | None, ranks: int | None) -> tuple[Literal["weak", "strong"], list[int]]:
    if text is None:
        return "weak", []
    word, colon, listed = text.partition(":")
    if word not in ("weak", "strong"):
        word, colon, listed = "weak", ":", text
    kind: Literal["weak", "strong"] = "strong" if word == "strong" else "weak"
    if not colon:
        return kind, [(ranks or 0) << doublings for doublings in range(_DOUBLINGS + 1)]
    try:
        return kind, [int(part) for part in listed.split(",")]
    except ValueError:
        raise UserError(
            f"--scale {text}: give numbers of ranks separated by commas, such as 384,768,1536 or strong:384,768,1536"
        ) from None


def _dry_run(job: Any, rank: int, as_json: bool) -> bool:
    """Prints the bytes of a rank; returns whether they fit."""
    from optimus.config.sizes import size_text
    from optimus.plan.prediction import dry_run
    from optimus.plan.report import verdict

    found = dry_run(job, rank)
    total = sum(found.values())
    fits, said = verdict(total, job)
    if as_json:
        told = {"rank": rank, "bytes": {"total": total, **found}, "memory": job.machine.memory, "fits": fits}
        print(json.dumps(told, indent=2))
        return bool(fits)
    print(f"rank {rank} of {job.mesh.size} would hold {size_text(total, 4)}:")
    for name, value in found.items():
        print(f"  {name:<14}{size_text(value, 4):>13}")
    print(said)
    return bool(fits)


@app.command()
def schedule(
    name: Annotated[
        str,
        Argument(metavar="NAME", help="Name of a schedule, as in parallel.schedule; an unknown name prints all names."),
    ],
    stages: Annotated[int, Option(help="Pipeline-parallel ranks; a rank may have several stages.")] = 4,
    microbatches: Annotated[int, Option(help="Microbatches of a step.")] = 8,
    stages_per_rank: Annotated[
        int | None, Option(help="Stages on each rank. Default: the fewest that the schedule supports.")
    ] = None,
    warmup_factor: Annotated[
        float, Option(help="Factor of the usual live activations, if the schedule supports one.")
    ] = 1.0,
    vocabulary: Annotated[
        bool, Option("--vocabulary", help="Vocabulary parallelism over all stages (passes S and T).")
    ] = False,
    vocabulary_algorithm: Annotated[
        int, Option(min=1, max=2, help="With --vocabulary: the algorithm, as in parallel.vocabulary_algorithm.")
    ] = 1,
    output_layer: Annotated[
        float,
        Option(help="Time of the output layer's forward pass, on the last stage or, with --vocabulary, over all."),
    ] = 0.0,
    jitter: Annotated[float, Option(help="Lognormal standard deviation of computation times.")] = 0.0,
    link: Annotated[float, Option(help="Time of a message between ranks; a stage's forward pass takes 1.")] = 0.0,
    blocking: Annotated[bool, Option("--blocking", help="Let sends and receives block computation.")] = False,
    seed: Annotated[int, Option(help="Seed of the jitter.")] = 0,
    measured: Annotated[Path | None, Option(help="timeline.json of a run to compare with the simulation.")] = None,
    plot: Annotated[Path | None, Option(help="Plot the timeline to this PNG file.")] = None,
    output: Annotated[
        Path | None, Option(help="Write the bubble, the memory and all actions to this JSON file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check, simulate and draw a pipeline schedule."""
    given = but(
        locals(), "stages", "vocabulary", "vocabulary_algorithm", "jitter", "link", "blocking", "seed", "as_json"
    )
    from optimus.disk import check_plot
    from optimus.pipeline import Costs
    from optimus.pipeline.report import run

    if vocabulary_algorithm != 1 and not vocabulary:
        raise UserError(f"--vocabulary-algorithm {vocabulary_algorithm} needs --vocabulary: add it, or leave both out")
    if plot is not None:
        check_plot(plot)
    costs = Costs(jitter=jitter, link=link, blocking=blocking, seed=seed)
    summary, text = run(**given, ranks=stages, costs=costs, vocabulary=vocabulary_algorithm if vocabulary else 0)
    show(summary, as_json, text)
