"""Pages of the documentation as lists of what a reader does: commands with what they print, programs, files to write.

The language of a fenced block says what it is:

- `sh`: commands, a line each; one that ends with a backslash goes on in the next, a here-document to its end;
- `console`: commands after `$ `, and what they print; before the first `$ `, more of what the step before it has printed;
- `python`: a program;
- under `<!-- file: NAME -->`: a file to write, whatever the language;
- anything else: to be read.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_FILE = re.compile(r"<!-- file: (\S+) -->")
_HERE = re.compile(r"<<'?(\w+)'?")
_NUMBERS = re.compile(r"(?:-?\d[\d.,]*(?:e[-+]?\d+)?[\s,]*)+")
_TIME_LEFT = re.compile(r"\s+about [\d.,]+ (?:s|min|h|d) left, until [\d:-]+(?: \d\d:\d\d)?$")  # said where it is long
_UNITS = re.compile(r"\b[KMG]i?B\b|(?<= 0 )(?:[KMBT]|ms|s|min|h|d)\b")


@dataclass
class Step:
    """Something that a reader does at `line` of a page; `shown` is what it says will be printed."""

    kind: Literal["command", "python", "file"]
    text: str
    line: int
    name: str = ""  # of a file
    shown: list[str] = field(default_factory=list)


def steps(page: Path) -> list[Step]:
    """All that the page tells a reader to do, in order. A block without a language is an error: is it a command, or not?"""
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
    """Each with all of its lines."""
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
    """Without what may differ: numbers, thousands and millions, units of memory and time, how long progress says that it
    will still take, the width of columns."""
    return " ".join(_UNITS.sub("", _NUMBERS.sub(" 0 ", _TIME_LEFT.sub("", text))).split())


def missing(shown: list[str], printed: str) -> str | None:
    """The first line that is shown but was not printed after those before it; `...` stands for any others."""
    lines = iter(map(masked, printed.splitlines()))
    for text in shown:
        if text.strip() != "..." and masked(text) not in lines:
            return text
    return None
