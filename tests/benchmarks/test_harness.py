"""The harness of the benchmarks: alternation of contestants, the check before timing, printed tables, and options of
commands."""

import json
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.harness import Result, check_agreement, relative_error, take_turns


def test_contestants_take_turns() -> None:
    order: list[str] = []

    def turn(name: str) -> int:
        order.append(name)
        return len(order)

    seen = take_turns({"a": lambda: turn("a"), "b": lambda: turn("b")}, rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert seen == {"a": [3, 5], "b": [4, 6]}


def test_who_does_other_work_is_named() -> None:
    check_agreement({"ours": 2.0, "rival": 2.001}, within=1e-3)
    for wrong in (2.01, float("nan")):
        with pytest.raises(RuntimeError, match=r"rival gives .*, ours 2: they do not do the same work"):
            check_agreement({"ours": 2.0, "rival": wrong}, within=1e-3)


def test_relative_error_is_the_largest() -> None:
    ones = torch.ones(4)
    assert relative_error([ones, 1.5 * ones], [ones, ones]) == pytest.approx(0.5)


def test_a_result_is_printed_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    result = Result([{"contestant": "ours", "seconds": 1.5}], {"a.vs_b": 2.0, "a.vs_c": None}, {"more": [1]})
    document = result.publish("example")
    assert list(document) == ["bench", "machine", "versions", "rows", "ratios", "more"]
    assert (document["bench"], document["rows"], document["more"]) == ("example", result.rows, [1])
    assert json.dumps(document)
    shown = capsys.readouterr().out
    assert "contestant" in shown
    assert "a.vs_b: 2.000\na.vs_c: -\n" in shown
    Result(result.rows, tables={"else": [{"x": 1}]}).publish("example")
    shown = capsys.readouterr().out
    assert "else" in shown
    assert "contestant" not in shown


@pytest.mark.in_turn(0, 3)
def test_listing_the_benchmarks_imports_none() -> None:
    """`bench --help` imports no benchmark: options come from the signature of the benchmark's function."""
    code = (
        "import sys; from optimus.cli import app; import typer; group = typer.main.get_command(app).commands['bench'];"
        "context = typer._click.core.Context(group) if hasattr(typer, '_click') else __import__('click').Context(group);"
        "print(group.get_help(context)); print('torch' in sys.modules);"
        "print([each.name for each in group.commands['tensor-parallel'].params])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, imported, options = done.stdout.rstrip().rsplit("\n", 2)
    assert re.search(r"tensor-parallel +Tensor-parallel training on 2 ranks", shown)
    assert imported == "False"
    assert options == "['model', 'steps', 'rounds', 'precision', 'output', 'as_json']"
