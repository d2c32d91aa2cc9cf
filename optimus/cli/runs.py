"""The commands for looking at runs and at this machine."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from optimus.cli.common import Json, app, folded, show


@app.command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Run folder, or several to compare.")],
    output: Annotated[
        Path | None,
        Option(
            help="HTML file to write. Default: report.html in the run folder; for several runs, ./comparison.html.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[
        str | None,
        Option(
            metavar="[ADDRESS:]PORT", help="Serve the report and refresh it. Default: only to this machine (127.0.0.1)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run's report as an HTML page (curves, time, memory, experts, events), or compare several runs."""
    from optimus.api import report as write_report
    from optimus.observe.signals import ended_by_signals
    from optimus.report.serve import parse_address, report_server

    if serve is None:
        result = write_report(runs, output)
        said = "".join(f"warning: {text}\n" for text in result["warnings"])
        show(result, as_json, f"{said}{result['output']}: open it in a browser; it needs no network")
        return
    server = report_server(runs, *parse_address(serve))
    host, port = server.server_address[:2]
    result = {"url": f"http://{host!s}:{port}/"}
    show(result, as_json, f"{result['url']}: the report, which refreshes while it is open; Ctrl-C ends the server")
    sys.stdout.flush()
    with server, ended_by_signals("ending"):
        server.serve_forever()


@app.command()
def runs(
    folder: Annotated[
        Path, Argument(metavar="FOLDER", help="Folder that contains run folders, directly or in subfolders.")
    ],
    state: Annotated[
        Literal["running", "finished", "stopped", "failed", "unreadable"] | None,
        Option(help="List only runs in this state."),
    ] = None,
    match: Annotated[str | None, Option(help="List only runs whose path or model contains this text.")] = None,
    sort: Annotated[str, Option(help="Column to sort by, such as loss or bits_per_byte.")] = "name",
    reverse: Annotated[bool, Option("--reverse", help="Sort from the largest to the smallest.")] = False,
    as_json: Json = False,
) -> None:
    """List runs with their progress, loss, speed and state, and the reason for the state."""
    from optimus.api import runs as run
    from optimus.observe.table import print_table
    from optimus.report import listing

    rows = run(folder, state=state, match=match, sort=sort, reverse=reverse)
    if as_json or not rows:
        show(rows, as_json, f"{folder}: no matching runs")
        return
    print_table(listing.table_rows(rows), f"runs in {folder}")


@app.command()
def doctor(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder for future runs, which the checks use.")] = Path(
        "."
    ),
    as_json: Json = False,
) -> None:
    """Check this machine and suggest fixes: devices, memory, network, disk, clock; exit code 1 for a problem."""
    from optimus.api import doctor as examine

    found = examine(folder)
    lines = []
    for each in found:
        lines.append(folded(f"{each.status:8} {each.what:22} {each.found}", 32))
        if each.mend:
            lines.append(folded(f"{'':9}-> {each.mend}", 12))
    show([each._asdict() for each in found], as_json, "\n".join(lines))
    if any(each.status == "problem" for each in found):
        raise typer.Exit(1)
