"""Sizes and counts as people write them."""

import pytest

from optimus.config.sizes import count_text, parse_count, parse_size, size_text
from optimus.errors import UserError


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1500, "1.5 K"), (999_499, "999 K"), (999_885_952, "1 B"), (1e15, "1,000 T")],
)
def test_three_digits_and_a_unit(number: float, text: str) -> None:
    assert count_text(number) == text


@pytest.mark.parametrize(
    ("size", "digits", "text"),
    [(0, 3, "0 B"), (10, 3, "10 B"), (999_700, 3, "1 MB"), (999_700, 4, "999.7 kB"), (1.5e9, 3, "1.5 GB")],
)
def test_a_size_in_so_many_digits(size: float, digits: int, text: str) -> None:
    assert size_text(size, digits) == text


def test_counts_are_exact_and_whole() -> None:
    for text, number in (
        ("2.50", None),
        ("2.5K", 2500),
        ("1.001K", 1001),
        ("2.0", 2),
        ("0.0001 K", None),
        ("2e9", 2 * 10**9),
    ):
        if number is not None:
            assert parse_count(text) == number
            continue
        with pytest.raises(UserError, match=f"not a whole number: '{text}'. Write a number, or one with a unit"):
            parse_count(text)
    assert (parse_count("9007199254740993"), parse_count("1e30")) == (2**53 + 1, 10**30)
    assert (parse_size("1.001KB"), parse_size("1.5"), parse_size("0.3KiB")) == (1001, 1, 307)


@pytest.mark.parametrize("text", ["1e400", "1e300 T", "9" * 400])
def test_a_number_without_bound_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"not a size: '{text}'. Write a number and a unit"):
        parse_size(text)
    with pytest.raises(UserError, match=f"not a number: '{text}'. Write a number, or one with a unit"):
        parse_count(text)
