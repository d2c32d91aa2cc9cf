"""The command `optimus train`."""

import os
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from optimus.cli.common import Json, Overrides, Settings, Verbose, app, show, show_ready
from optimus.errors import UserError


def _ranks(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise UserError(f"--ranks {text}: give a number or auto") from None


@app.command()
def train(
    config: Annotated[Path, Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Overrides = None,
    settings: Settings = None,
    ranks: Annotated[
        Any,
        Option(parser=_ranks, metavar="N|auto", help="Ranks to start on this machine; auto: one for each accelerator."),
    ] = None,
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help="Continue from the newest checkpoint of the run. `--resume auto`: if the folder holds a run.",
        ),
    ] = False,
    fresh_optimizer: Annotated[
        bool,
        Option("--fresh-optimizer", help="With --resume: load the weights only, for example for a new update rule."),
    ] = False,
    check: Annotated[
        bool, Option("--check", help="Validate the configuration, the machine and the data; train nothing.")
    ] = False,
    auto_plan: Annotated[
        str | None,
        Option(metavar="MACHINE", help="Use the best layout that `optimus plan` finds on this machine."),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Train a model."""
    from optimus.api import train as run
    from optimus.config.sizes import seconds_text
    from optimus.launch.launchers import first_rank_speaks

    overrides, automatic = [*(overrides or []), *(settings or [])], resume and "auto" in (overrides or [])
    overrides = [text for text in overrides if text != "auto"] if automatic else overrides
    asked = ["observe.verbose=true"] if verbose else []
    how: dict[str, Any] = {
        "ranks": ranks,
        "resume": "auto" if automatic else resume,
        "fresh_optimizer": fresh_optimizer,
        "check": check,
    }
    with first_rank_speaks():
        if auto_plan is not None:
            from optimus.plan.job_builder import best_layout

            summary = run(best_layout(config, [*overrides, *asked], auto_plan, ranks), **how)
        else:
            summary = run(config, [*overrides, *asked], **how)
    signalled = None if check else summary["stopped_by"]
    ended = typer.Exit(0 if signalled is None else 128 + signal.Signals[signalled])
    if os.environ.get("RANK", "0") != "0":
        raise ended  # only rank 0 prints the result
    if check:
        show_ready(config, summary, as_json, verbose=verbose)
        return
    bits = "" if summary["bits_per_byte"] is None else f"{summary['bits_per_byte']:.4f} bits per byte, "
    loss = "" if summary["loss"] is None else f"loss {summary['loss']:.4f}, {bits}"
    text = f"step {summary['step']}: {loss}checkpoint {summary['checkpoint'] or 'none yet'}"
    text += f"\n{summary['tokens']:,} tokens in all, {seconds_text(summary['seconds'])} this time"
    text += f"; report: {summary['report']}" if summary["report"] else ""
    if summary["step"] < summary["steps"]:
        again = [text for text in overrides if not text.startswith("train.stop_at=")]
        launch = {"--ranks": ranks, "--auto-plan": auto_plan}
        options = [word for name, value in launch.items() if value for word in (name, str(value))]
        words = shlex.join(["optimus", "train", str(config), *again, *options])
        why = "" if signalled is None else f" by {signalled}"
        text += f"\nstopped{why} before step {summary['steps']}; continue with: {words} --resume"
    show(summary, as_json, text)
    raise ended
