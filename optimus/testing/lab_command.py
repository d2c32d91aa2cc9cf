"""The command `optimus lab`."""

import json
from pathlib import Path
from typing import Annotated

import typer


def lab(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes that train.")] = 3,
    spares: Annotated[int, typer.Option(help="Nodes beyond them that wait to take a place.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on each node.")] = 1,
    bandwidth: Annotated[str | None, typer.Option(help="What each node may send, such as 1Gbit.")] = None,
    inject: Annotated[Path | None, typer.Option(help="YAML list of faults to rehearse.")] = None,
    keep_alive: Annotated[str, typer.Option(help="Seconds between heartbeats x how many may be missing.")] = "1x3",
    wait: Annotated[float, typer.Option(help="Seconds for enough nodes to come together.")] = 30.0,
    limit: Annotated[float, typer.Option(help="Seconds after which everything is taken down.")] = 600.0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Processes on one network instead of network namespaces (no root).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Rehearse failures of nodes on this machine, with network namespaces for nodes."""
    from optimus.testing.lab import rehearse
    from optimus.train.nodes import Job, parse_keep_alive

    alive = parse_keep_alive(keep_alive)
    job = Job(str(config), overrides or [], nodes, spares, ranks_per_node, keep_alive=alive, wait=wait)
    result = rehearse(job, bandwidth=bandwidth, inject=inject, limit=limit, plain=plain)
    lines = [f"{event['kind']:10} {event['node'] or '-':8} {event['detail']}" for event in result["events"]]
    codes = ", ".join(f"{host} {'no answer' if code is None else code}" for host, code in result["exit_codes"].items())
    ended = "finished" if result["finished"] else "did not finish"
    text = "\n".join([*lines, f"exit codes: {codes}", f"the run {ended} in {result['output']}"])
    print(json.dumps(result, indent=2) if as_json else text)
    if not result["finished"]:
        raise typer.Exit(1)
