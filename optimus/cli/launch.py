"""The commands for several nodes."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from optimus.cli.common import Json, Overrides, Settings, Verbose, app, show, show_ready
from optimus.config.sizes import counted
from optimus.errors import UserError


@app.command()
def launch(
    context: typer.Context,
    config_or_input: Annotated[
        str, Argument(metavar="CONFIG", help="YAML file; with --prepare, arguments of `prepare` after --.")
    ],
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
    as_prepare: Annotated[
        bool,
        Option(
            "--prepare", help="With --scheduler: write array jobs of `optimus prepare` with the arguments after --."
        ),
    ] = False,
    tasks: Annotated[int | None, Option(help="With --prepare: number of tasks that tokenise.")] = None,
    shard_tasks: Annotated[
        int | None, Option(help="With --prepare: number of tasks that write the shards. Default: as --tasks.")
    ] = None,
    cpus_per_task: Annotated[
        int | None, Option(help="With --prepare: cores of a task. Default: all of a node.")
    ] = None,
    check: Annotated[bool, Option("--check", help="Validate without starting or contacting anything.")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Run one node of a training job with spares; start the command on every node and every spare."""
    if as_prepare:
        _write_prepare(context, as_json)
        return
    from optimus.launch.launchers import check_alone
    from optimus.training.reading import read_run

    check_alone("optimus launch")
    overrides = [*(overrides or []), *(settings or []), *(["observe.verbose=true"] if verbose else [])]

    if given := _explicit(context, "tasks", "shard_tasks", "cpus_per_task"):
        raise UserError(f"--{given[0].replace('_', '-')}: it needs --prepare")
    config = Path(config_or_input)
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
        show(
            result,
            as_json,
            f"{output}: {counted(nodes, 'node')} and {counted(spares, 'spare')}; submit it with: {submit}",
        )
        return
    outcome = launcher.launch(job, rendezvous, node, name=name, program=program)
    show({"outcome": "finished" if outcome is None else outcome.value}, as_json, "")
    if outcome is not None:
        raise typer.Exit(launcher.exit_code(outcome))


# Parameters of `launch` with --prepare.
_WITH_PREPARE = {
    *("config_or_input", "overrides", "as_prepare", "scheduler", "output", "time", "directive", "as_json"),
    *("tasks", "shard_tasks", "cpus_per_task"),
}
# Options of `prepare` that the jobs choose, or have no use for.
_NOT_OF_TASKS = ("--tasks", "--task", "--stage", "--status", "--preview", "--json")


def _write_prepare(context: typer.Context, as_json: bool) -> None:
    """Writes the array jobs of `optimus prepare`. The parameters of `launch` are in `context`."""
    from optimus.resilience.arrays import ArrayJob, write_array_job

    options = context.params
    for param in context.command.params:
        if param.name not in _WITH_PREPARE and _explicit(context, str(param.name)):
            raise UserError(f"{param.opts[0]}: leave it out with --prepare, which trains nothing")
    scheduler, path, tasks = options["scheduler"], options["output"], options["tasks"]
    if scheduler not in ("slurm", "pbs", "jobset"):
        raise UserError("--prepare needs --scheduler slurm, pbs or jobset")
    if path is None:
        raise UserError("--prepare needs --output PATH before --, for the file to write")
    if tasks is None:
        raise UserError("--prepare needs --tasks N: the number of tasks that tokenise")
    if scheduler == "jobset" and _explicit(context, "time"):
        raise UserError("--time: a manifest for jobset has no time limit: leave it out")
    shard_tasks = tasks if options["shard_tasks"] is None else options["shard_tasks"]
    cores = options["cpus_per_task"]
    words = [options["config_or_input"], *(options["overrides"] or [])]
    parsed = _parse_prepare(words)
    if cores is not None and parsed["workers"] is None:
        # Not every batch system confines a job to its cores, and a worker for each core of the node would be too many.
        words = ["--workers", str(cores), *words]
    job = ArrayJob(
        words,
        str(parsed["output"]),
        tasks,
        shard_tasks,
        folder=Path.cwd(),
        programs=Path(sys.executable).parent,
        cores=cores,
        time=options["time"],
        directives=options["directive"] or [],
    )
    submit = write_array_job(job, scheduler, path)
    result = {"output": str(path), "submit": submit, "tasks": tasks, "shard_tasks": shard_tasks}
    counts = f"tasks that tokenise: {tasks}, that write the shards: {shard_tasks}"
    show(result, as_json, f"{path}: {counts}; submit it with: {submit}")


def _parse_prepare(words: list[str]) -> dict[str, Any]:
    """Parses arguments of `optimus prepare`, and returns the values of its parameters."""
    from optimus.config.sizes import parse_size

    for word in words:
        if (option := word.split("=")[0]) in _NOT_OF_TASKS:
            raise UserError(f"{option} after --: leave it out, the written file chooses what each task does")
    group = typer.main.get_command(app)
    command = group.commands["prepare"]  # type: ignore[attr-defined]
    parsed: dict[str, Any] = command.make_context("optimus prepare", [*words]).params  # says what is wrong, and exits
    if (parsed["tokenizer"] is None) == (parsed["train_tokenizer"] is None):
        raise UserError("give either --tokenizer or --train-tokenizer after --")
    if parsed["output"] is None:
        raise UserError("give --output FOLDER after --, too: the folder that `prepare` creates")
    for size in ("shard_size", "memory"):
        if parsed.get(size) is not None:
            parse_size(parsed[size])
    return parsed


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
