"""The table of published runs equals the sources' tables; a wrong cell is refused by line and column."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import Case, excluded, read_cases
from benchmarks.published.rows import ROWS, read_rows, write_rows
from optimus.errors import UserError


def facts(case: Case) -> tuple[Case, dict[str, object], int]:
    """Returns a case without its model, the model's fields, and its shared width. Models of presets have another type."""
    return replace(case, model=None), case.model.model_dump(), case.model.shared_intermediate  # type: ignore[arg-type]


def test_rows_are_those_of_the_sources(shared_data: Path) -> None:
    folder = shared_data / "published"
    if not folder.is_dir():
        pytest.skip(f"published measurements not found at {folder}")
    for ours, theirs in zip(read_rows(), read_cases(folder), strict=True):
        left, right = facts(ours), facts(theirs)
        assert left[0] == right[0]
        assert {name: value for name, value in left[1].items() if name != "shared_width"} == {
            name: value for name, value in right[1].items() if name != "shared_width"
        }
        assert left[2] == right[2]


def test_rows_are_written_as_they_are_read(tmp_path: Path) -> None:
    write_rows(read_rows(), tmp_path / ROWS.name)
    assert (tmp_path / ROWS.name).read_bytes() == ROWS.read_bytes()
    assert len(read_cases(tmp_path)) == len(read_rows())
    assert excluded(tmp_path) == {}


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("context", "", "column 'context': nothing is there"),
        ("dp", "many", "column 'dp': 'many' is no number above 0"),
        ("tokens_per_second", "-3", "column 'tokens_per_second': '-3' is no number above 0"),
        ("model.hidden", "wide", "column 'model.hidden': Input should be a valid integer"),
        ("ep", "7", "expert ranks do not fit"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, column: str, cell: str, message: str) -> None:
    head, line, *_ = ROWS.read_text(encoding="utf-8").splitlines()
    cells = line.split(",")
    cells[head.split(",").index(column)] = cell
    path = tmp_path / ROWS.name
    path.write_text("\n".join([head, ",".join(cells)]), encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_cases(tmp_path)
    assert str(error.value).startswith(f"{path}, line 2")
    assert message in str(error.value)


def test_a_table_of_other_columns_is_refused(tmp_path: Path) -> None:
    text = ROWS.read_text(encoding="utf-8")
    (tmp_path / ROWS.name).write_text(text.replace("microbatches", "accumulation"), encoding="utf-8")
    with pytest.raises(UserError, match="line 1: column 'accumulation' is missing, or not one of this table's columns"):
        read_cases(tmp_path)
    (tmp_path / ROWS.name).write_text(text.splitlines()[0] + "\none,two\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2: it has 2 cells, and the first line"):
        read_cases(tmp_path)
