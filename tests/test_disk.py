"""Paths as users write them are expanded as a shell would, also without a shell."""

from pathlib import Path

import pytest

from optimus.disk import plain_name, user_path
from optimus.errors import UserError


def test_homes_and_variables_are_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNS", "/scratch/runs")
    assert user_path("~/run") == tmp_path / "run"
    assert user_path(Path("~")) == tmp_path
    assert user_path("$HOME/run") == tmp_path / "run"
    assert user_path("${RUNS}/a$RUNS") == Path("/scratch/runs/a/scratch/runs")
    assert user_path("a~/b") == Path("a~/b")
    monkeypatch.setenv("PRICE", "/shop/$USD_of_nobody")
    assert user_path("$PRICE/run") == Path("/shop/$USD_of_nobody/run")
    assert user_path(f"/{255 * 'a'}/\udcff") == Path(f"/{255 * 'a'}/\udcff")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("$NOT_SET_HERE/run", r"the environment variable NOT_SET_HERE is not set"),
        ("runs/${NOT_SET_HERE}", r"the environment variable NOT_SET_HERE is not set"),
        ("~nobody-of-this-name/run", r"~nobody-of-this-name is not the home of a user"),
        ("a\0b", "cannot be the path of a file"),
        ("\ud800", "cannot be the path of a file"),
        (f"runs/{256 * 'a'}", "cannot be the path of a file"),
        (2048 * "a/", "cannot be the path of a file"),
    ],
)
def test_what_stands_for_nothing_is_refused(given: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(UserError, match=expected):
        user_path(given)


def test_a_name_with_a_dollar_that_exists_is_taken_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "price$USD_of_nobody.txt"
    file.touch()
    assert user_path(file) == file


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/etc/passwd", "../a", "a/b", "a/", "..\\a", "a\0", "a\n", "\ud800", 201 * "a", None, 1, ["a"]],
)
def test_a_name_that_leads_out_of_its_folder_is_none(name: object) -> None:
    with pytest.raises(ValueError, match="is not a plain file name"):
        plain_name(name)


def test_plain_names_are_taken_as_they_are() -> None:
    names = ["shard-00001.npy", ".metadata", "a b", "..a", "ä$"]
    assert list(map(plain_name, names)) == names
