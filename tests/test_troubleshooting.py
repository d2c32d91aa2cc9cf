"""Each symptom of docs/troubleshooting.md is produced by a test, and each message is one that the library prints."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from optimus.config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
# Text of torch or of the operating system, which no source of this library contains.
OF_OTHERS = {"Address already in use", "Too many open files", "Bus error", "No space left on device"}
WITHOUT_A_SYMPTOM = {"Look here first"}


def sections() -> dict[str, str]:
    """Returns the sections of the page by heading, without the part before the first heading."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def messages(text: str) -> list[str]:
    """Returns the quoted messages: the lines of blocks of text, and the first column of tables of messages."""
    found = [line for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    for table in re.findall(r"^\| Message.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            found += re.findall(r"`([^`]+)`", row.split(" | ")[0]) if row.startswith("| `") else []
    return [each for each in found if each not in OF_OTHERS]


@cache
def printed() -> list[str]:
    """Returns all texts in the library, with "..." for each value in them."""
    found = []
    for file in (ROOT / "optimus").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [each.value if isinstance(each, ast.Constant) else "..." for each in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def occurs(message: str, texts: list[str]) -> bool:
    """Returns whether one text has all words of `message` in order; "..." stands for any characters."""
    words = [part for part in message.split("...") if part.strip(" .:,()")]
    pattern = re.compile(".*".join(map(re.escape, words)), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_each_symptom_is_produced_by_a_test_that_exists() -> None:
    for heading, text in sections().items():
        named = re.findall(r"<!-- shown by (\S+?)::(test_\w+) -->", text)
        assert bool(named) != (heading in WITHOUT_A_SYMPTOM), heading
        for path, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (path, name)


def test_quoted_messages_are_in_the_sources() -> None:
    found = {heading: messages(text) for heading, text in sections().items()}
    assert sum(map(len, found.values())) > 50
    assert [(heading, each) for heading, all_ in found.items() for each in all_ if not occurs(each, printed())] == []
    texts = PAGE.read_text(encoding="utf-8")
    assert all(each in texts for each in OF_OTHERS)


def test_a_message_that_is_not_printed_is_found() -> None:
    """The comparison of messages allows other values, and no other words."""
    assert occurs("rank ... was lost (...)", ["rank ... was lost (...)"])
    assert occurs("... is of another model: ...", ["... is of another model: ..."])
    assert not occurs("rank ... was lost (...)", ["rank ... failed: ...", "was lost rank"])


def keys_of(section: Any, before: str = "") -> set[str]:
    """Returns every key of the configuration with its path, including sections."""
    found = set()
    for name, field in section.model_fields.items():
        found.add(before + name)
        pending = [field.annotation]
        while pending:
            each = pending.pop()
            if get_origin(each) is not None:
                pending += get_args(each)
            elif isinstance(each, type) and issubclass(each, BaseModel):
                found |= keys_of(each, f"{before}{name}.")
    return found


def test_keys_on_the_guides_exist() -> None:
    """Keys of the configuration on the pages without steps are keys, with and without a value."""
    known, sections_ = keys_of(RunConfig), set(RunConfig.model_fields)
    names = "|".join(map(re.escape, sorted(sections_)))
    for page in ("troubleshooting", "performance", "data-at-scale", "comparison"):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        named = set(re.findall(rf"(?<![\w./-])((?:{names})(?:\.[a-z_]+)+)(?![\w/])", text))
        named = {each for each in named if not each.endswith((".md", ".jsonl", ".yaml", ".py", ".json", ".partial"))}
        assert named or page in ("data-at-scale", "comparison"), page
        assert named <= known, (page, named - known)
