"""Parses pages of the documentation into steps of a reader: commands with their output, programs, files to write.

The language of a fenced block gives its kind:

- `sh`: commands, a line each; a backslash at the end continues a line, and a here-document extends to its end;
- `console`: commands after `$ ` with their output; output before the first `$ ` belongs to the step before;
- `python`: a program;
- below `<!-- file: NAME -->`: a file to write, in any language;
- any other: text to read.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_FILE = re.compile(r"<!-- file: (\S+) -->")
_HERE = re.compile(r"<<'?(\w+)'?")
_NUMBERS = re.compile(r"(?:-?\d[\d.,]*(?:e[-+]?\d+)?[\s,]*)+")
# Appears if the remaining time is long.
_TIME_LEFT = re.compile(r"\s+about [\d.,]+ (?:s|min|h|d) left, until [\d:-]+(?: \d\d:\d\d)?$")
_UNITS = re.compile(r"\b[KMG]i?B\b|(?<= 0 )(?:[KMBT]|ms|s|min|h|d)\b")


@dataclass
class Step:
    """A step of a reader at `line` of a page; `shown` is the output on the page."""

    kind: Literal["command", "python", "file"]
    text: str
    line: int
    name: str = ""  # the file's name
    shown: list[str] = field(default_factory=list)


def steps(page: Path) -> list[Step]:
    """Returns all steps of a page in order. A block without a language is an error, because its kind is unknown."""
    found: list[Step] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number, name = 0, ""
    while number < len(lines):
        if match := _FILE.fullmatch(lines[number]):
            name = match[1]
        if not lines[number].startswith("```"):
            number += 1
            continue
        language, begin = lines[number].removeprefix("```"), number + 1
        number = lines.index("```", begin)
        block = lines[begin:number]
        assert language, f"{page}:{begin}: a block without a language"
        if name:
            found.append(Step("file", "\n".join(block) + "\n", begin, name))
        elif language == "python":
            found.append(Step("python", "\n".join(block), begin))
        elif language == "sh":
            found += [Step("command", text, begin) for text in commands(block)]
        elif language == "console":
            add_transcript(found, block, begin)
        number, name = number + 1, ""
    return found


def commands(block: list[str]) -> list[str]:
    """Returns the commands, each with all its lines."""
    found: list[str] = []
    rest = iter(block)
    for line in rest:
        text = line
        while text.endswith("\\"):
            text += "\n" + next(rest)
        if here := _HERE.search(line):
            while not text.endswith("\n" + here[1]):
                text += "\n" + next(rest)
        found.append(text)
    return found


def add_transcript(found: list[Step], block: list[str], line: int) -> None:
    going_on = False
    for text in block:
        if going_on:
            found[-1].text += "\n" + text
        elif text.startswith("$ "):
            found.append(Step("command", text.removeprefix("$ "), line))
        elif text:
            found[-1].shown.append(text)
        going_on = text.endswith("\\") and (going_on or text.startswith("$ "))


def masked(text: str) -> str:
    """Returns the text without variable parts: numbers, units of memory and time, time left, and column widths."""
    return " ".join(_UNITS.sub("", _NUMBERS.sub(" 0 ", _TIME_LEFT.sub("", text))).split())


def missing(shown: list[str], printed: str) -> str | None:
    """Returns the first line shown on the page that is not printed in order; `...` stands for any lines."""
    lines = iter(map(masked, printed.splitlines()))
    for text in shown:
        if text.strip() != "..." and masked(text) not in lines:
            return text
    return None
