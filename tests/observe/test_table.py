"""Tables in files and on terminals of any width never cut content."""

import re
import sys
from typing import Any

import pytest

from optimus.observe.table import print_table

ROWS = [
    {"run": "first", "tokens_per_second": 123456, "loss": 2.5, "state": "stopped: SIGINT in step 12", "device": "cpu"},
    {"run": "the-second-of-them", "tokens_per_second": 9, "loss": 2.25, "state": "finished", "device": "cpu"},
]
CELLS = ["first", "the-second-of-them", "123,456", "9", "2.5", "2.25", "SIGINT", "in step", "finished", "cpu"]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def show(
        rows: list[dict[str, Any]], columns: int | None = None, title: str = "runs", width: int | None = None
    ) -> str:
        """Returns the table as printed into a file, or on a terminal of so many columns, without escape sequences."""
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        print_table(rows, title, width)
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)

    return show


@pytest.mark.parametrize(
    ("columns", "form"), [(120, "┃ run "), (80, " run "), (60, " run "), (40, "  tokens per second  123,456"), (20, "")]
)
def test_nothing_is_cut_on_a_narrow_terminal(shown: Any, columns: int, form: str) -> None:
    """A table has lines between its columns, then no lines, then rows of keys and values, as the terminal narrows."""
    out = shown(ROWS, columns)
    assert "…" not in out
    assert all(cell in out for cell in CELLS)
    assert any(line.startswith(form) for line in out.splitlines()), out
    assert ("in all rows: device cpu" in out) == (columns < 120)
    if columns >= 60:  # the terminal itself wraps long values
        assert max(map(len, out.splitlines())) <= columns


def test_numbers_and_short_texts_stay_on_one_line(shown: Any) -> None:
    rows = [{"layout": "pipeline of four stages", "memory": "64.9 GB", "tokens": 1234567, "share": "46.1 %"}]
    for columns in range(34, 60):
        out = shown(rows, columns)
        assert all(text in out for text in ("64.9 GB", "1,234,567", "46.1 %")), out


def test_texts_are_on_the_left_whatever_the_first_row_has(shown: Any) -> None:
    lines = shown([{"run": "a", "state": None}, {"run": "b", "state": "stopped"}]).splitlines()
    assert "│ a   │ -       │" in lines


def test_a_row_is_one_line_of_a_file(shown: Any) -> None:
    """A row is one line in a file, of any length, so that searches find the whole row."""
    long = "words " * 100 + "end"
    assert f"│ one │ {long} │" in shown([{"key": "one", "text": long}])
    assert "\x1b" not in shown(ROWS)


def test_truth_values_are_words(shown: Any) -> None:
    assert "│ one │ True │" in shown([{"key": "one", "exact": True}]).replace("  ", " ")


def test_rows_that_are_alike(shown: Any) -> None:
    assert "in all rows: text words" in shown([{"name": "one", "text": "words " * 20}] * 2, 40)


def test_what_looks_like_markup_is_text(shown: Any) -> None:
    out = shown([{"key": "tasks", "[a]": "[sciq]", "b": "[/b] :smile:"}], title="[x] and [y]")
    assert all(text in out for text in ("[a]", "[sciq]", "[/b] :smile:", "[x] and [y]"))


def test_a_title_is_as_long_as_it_is(shown: Any) -> None:
    title = "some/folder/" * 20
    assert shown([{"a": 1}], title=title).splitlines()[0] == title
    assert shown([{"a": 1}], 80, title=title).splitlines()[0] == title  # the terminal wraps the title
