"""Parses numbers with units, and formats numbers."""

import math
import re
from decimal import Decimal, localcontext

from optimus.errors import UserError


def parse_size(text: str) -> int:
    """Parses a number of bytes such as "1.5 GB", "64MiB" or "4096". Raises `UserError` for other text."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {letter: 1000**power, f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    return int(_parsed(text, units, "a size", "Write a number and a unit, such as 512MB, 1.5GB or 64MiB."))


def parse_count(text: str) -> int:
    """Parses a whole number such as "300B", "1.5 M" or "4096". Raises `UserError` for other text."""
    units = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    cure = "Write a number, or one with a unit, such as 2e9, 2B or 1.5T."
    number = _parsed(text, units, "a number", cure)
    if number != number.to_integral_value():
        raise UserError(f"not a whole number: {text!r}. {cure}")
    return int(number)


def _parsed(text: str, units: dict[str, int], what: str, cure: str) -> Decimal:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\+?\d+)?)\s*([A-Z]*)", text.strip().upper())
    if not match or match[2] not in units or float(match[1]) * units[match[2]] == math.inf:
        raise UserError(f"not {what}: {text!r}. {cure}")
    with localcontext() as context:
        context.prec = 400  # more than the 309 digits of the largest float
        return Decimal(match[1]) * units[match[2]]


def size_text(size: float, digits: int = 3) -> str:
    """Formats a number of bytes, rounded to `digits` significant digits, such as "1.5 GB"."""
    rounded = float(f"{size:.{digits}g}")  # rounding may reach the next unit
    unit = max((power for power in range(7) if rounded >= 1000**power), default=0)
    return f"{size / 1000**unit:.{digits}g} {['B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB'][unit]}"


def counted(number: int, noun: str) -> str:
    """Formats a number of things, such as "1 file" or "1,000 batches"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def rounded(number: float) -> str:
    """Formats a number, rounded to three significant digits, such as "48,000" or "0.125"."""
    short = float(f"{number:.3g}")  # rounding may reach 1,000
    return f"{short:,.0f}" if short >= 1000 else f"{short:.3g}"


def count_text(number: float) -> str:
    """Formats a number, such as "1.5 B"; rounds numbers above 999 to three significant digits."""
    rounded = float(f"{number:.3g}")  # rounding may reach the next unit
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if rounded >= size:
            short = float(f"{number / size:.3g}")
            return f"{short:,.0f} {unit}" if short >= 1000 else f"{short:.3g} {unit}"
    return str(number)


def seconds_text(seconds: float) -> str:
    """Formats seconds, such as "45 s", "9 min", "1.5 h" or "2.1 days"."""
    for most, unit, name in ((90, 1, "s"), (5400, 60, "min")):
        if seconds < most:
            return f"{seconds / unit:.2g} {name}" if seconds < 10 else f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
