"""The commands for several nodes."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from optimus.cli.common import Json, Overrides, Settings, Verbose, app, show, show_ready
from optimus.errors import UserError


@app.command()
def launch(
    context: typer.Context,
    config: Annotated[Path, Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Overrides = None,
    settings: Settings = None,
    nodes: Annotated[int, Option(help="Number of nodes that train.")] = 1,
    spares: Annotated[int, Option(help="Number of spare nodes, which replace failed nodes.")] = 0,
    ranks_per_node: Annotated[int, Option(help="Number of ranks on each node.")] = 1,
    rendezvous: Annotated[str, Option(help="HOST:PORT of `optimus rendezvous`.")] = "127.0.0.1:29400",
    node: Annotated[str | None, Option(help="Name of this node. Default: the host name.")] = None,
    name: Annotated[str, Option(help="Name of the launch, if several launches share a store.")] = "optimus",
    keep_alive: Annotated[str, Option(help="Seconds between heartbeats x missing heartbeats of a dead node.")] = "5x3",
    wait: Annotated[float, Option(help="Seconds to wait until enough nodes have joined.")] = 600.0,
    rejoin_wait: Annotated[
        float | None,
        Option(help="Seconds to wait for nodes after a failure. Default: as --wait; with --scheduler 35."),
    ] = None,
    max_restarts: Annotated[int, Option(help="Maximum number of restarts in a row without a new checkpoint.")] = 5,
    inject: Annotated[Path | None, Option(help="YAML file with a list of faults to inject.")] = None,
    scheduler: Annotated[
        Literal["slurm", "pbs", "jobset", "trainjob", "skypilot", "ray"] | None,
        Option(help="Start nothing; write a batch script, manifest or script for this system."),
    ] = None,
    output: Annotated[Path | None, Option(help="With --scheduler: file to write.")] = None,
    time: Annotated[str, Option(help="Time limit in the batch script, HOURS:MINUTES:SECONDS.")] = "12:00:00",
    directive: Annotated[
        list[str] | None,
        Option(help="Batch directive ('--account=physics') or, for a manifest, NAME=VALUE (image=...); repeatable."),
    ] = None,
    check: Annotated[bool, Option("--check", help="Validate without starting or contacting anything.")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Run one node of a training job with spares; start the command on every node and every spare."""
    from optimus.launch.launchers import check_alone
    from optimus.training.reading import read_run

    check_alone("optimus launch")
    overrides = [*(overrides or []), *(settings or []), *(["observe.verbose=true"] if verbose else [])]

    read_run(config, overrides)  # before the slow import of torch
    from optimus.launch import nodes as launcher

    other = ("node", "name", "rendezvous") if scheduler is not None else ("output", "time", "directive")
    if given := _explicit(context, *other):
        why = "leave it out with --scheduler: the written file chooses it" if scheduler else "it needs --scheduler"
        raise UserError(f"--{given[0]}: {why}")
    alive = launcher.parse_keep_alive(keep_alive)
    job = launcher.NodeJob(config, overrides, nodes, spares, ranks_per_node, alive, wait, max_restarts, rejoin_wait)
    program = []
    if inject is not None:
        from optimus.testing.faults import rank_program

        program = rank_program(inject, job.ranks)
    if check:
        if scheduler is not None:
            raise UserError("--check: leave it out with --scheduler, which starts nothing either")
        show_ready(config, launcher.check_launch(job, rendezvous, node), as_json, verbose=verbose)
        return
    if scheduler is not None:
        if output is None:
            raise UserError("--scheduler needs --output PATH for the file to write")
        if scheduler == "slurm" or scheduler == "pbs":
            submit = launcher.write_batch_script(
                job, scheduler=scheduler, path=output, time=time, directives=directive or [], inject=inject
            )
        else:
            if _explicit(context, "time"):
                raise UserError(f"--time: a manifest for {scheduler} has no time limit: leave it out")
            unused = _explicit(context, "keep_alive", "wait", "rejoin_wait", "max_restarts", "inject")
            if unused and not launcher.runs_launch(scheduler):
                raise UserError(
                    f"--{unused[0].replace('_', '-')}: --scheduler {scheduler} starts the ranks without `optimus launch`, "
                    "which this option is for: leave it out"
                )
            submit = launcher.write_manifest(
                job, platform=scheduler, path=output, directives=directive or [], inject=inject
            )
        result = {"output": str(output), "submit": submit, "nodes": nodes, "spares": spares}
        show(result, as_json, f"{output}: {nodes} nodes and {spares} spares; submit it with: {submit}")
        return
    outcome = launcher.launch(job, rendezvous, node, name=name, program=program)
    show({"outcome": "finished" if outcome is None else outcome.value}, as_json, "")
    if outcome is not None:
        raise typer.Exit(launcher.exit_code(outcome))


def _explicit(context: typer.Context, *names: str) -> list[str]:
    """Returns those of the parameters `names` that the user has given."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


@app.command()
def rendezvous(
    port: Annotated[int, Option(help="Port to listen on.")] = 29400,
    address: Annotated[
        str, Option(help="Address of this machine to listen on, which the nodes connect to.")
    ] = "127.0.0.1",
    as_json: Json = False,
) -> None:
    """Serve the rendezvous store of a launch, on a machine that is not one of its nodes."""
    from optimus.launch.store import serve_until_ended

    serve_until_ended(port, address, as_json)


@app.command()
def lab(
    config: Annotated[Path, Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Overrides = None,
    settings: Settings = None,
    nodes: Annotated[int, Option(help="Number of nodes that train.")] = 3,
    spares: Annotated[int, Option(help="Number of spare nodes, which replace failed nodes.")] = 2,
    ranks_per_node: Annotated[int, Option(help="Number of ranks on each node.")] = 1,
    bandwidth: Annotated[str | None, Option(help="Bandwidth of each node, such as 1Gbit.")] = None,
    inject: Annotated[Path | None, Option(help="YAML file with a list of faults to inject.")] = None,
    keep_alive: Annotated[str, Option(help="Seconds between heartbeats x missing heartbeats of a dead node.")] = "1x3",
    wait: Annotated[float, Option(help="Seconds to wait until enough nodes have joined.")] = 30.0,
    limit: Annotated[float, Option(help="Seconds after which the rehearsal ends.")] = 600.0,
    plain: Annotated[
        bool, Option("--plain", help="Use processes on one network as nodes, not network namespaces (no root).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Rehearse node failures on this machine, with network namespaces (or processes) as nodes."""
    from optimus.launch.nodes import NodeJob, parse_keep_alive
    from optimus.testing.lab import rehearse

    alive = parse_keep_alive(keep_alive)
    job = NodeJob(
        str(config), [*(overrides or []), *(settings or [])], nodes, spares, ranks_per_node, keep_alive=alive, wait=wait
    )

    def say(event: dict[str, Any]) -> None:  # prints at once; with --json, standard output is for the result
        line = f"{event['kind']:10} {event['node'] or '-':8} {event['detail']}"
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    result = rehearse(job, bandwidth=bandwidth, inject=inject, limit=limit, plain=plain, say=say)
    codes = ", ".join(f"{host} {'no answer' if code is None else code}" for host, code in result["exit_codes"].items())
    ended = "finished" if result["finished"] else "did not finish"
    show(result, as_json, f"exit codes: {codes}\nthe run {ended} in {result['output']}")
    if not result["finished"]:
        raise typer.Exit(1)
