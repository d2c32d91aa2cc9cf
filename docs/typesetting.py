"""A hook of mkdocs: what Markdown cannot say about how a page looks; docs/typesetting.css uses its elements."""

import re
from pathlib import Path
from typing import Any

_FIGURES = Path(__file__).parent / "figures"
_BLOCK = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_TABLE = re.compile(r"<table>\s*<thead>((?:(?!</thead>).)*)</thead>.*?</table>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]*)</code>")
_OPTION = re.compile(r"(?<=[\s>(`])(--[a-z]\w*)[\w-]*(?![^<]*>)")  # in text, not in a tag
_LONG = 21  # characters of a name that may break within


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes away the backslash of `|` in code within tables, which GitHub needs and mkdocs would show. Adds to a
    picture the one for dark pages, where there is one; links a picture that is in no link to itself, in its full size.
    """
    lines = markdown.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("|"):
            lines[number] = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)
    return re.sub(r"(\[?)(!\[[^\]]*\]\(figures/([\w-]+))(\.png)\)", _picture, "\n".join(lines))


def on_page_content(html: str, **_: Any) -> str:
    """Lets long names in code break at their marks, and options nowhere; marks messages and tables of reference."""
    parts = _BLOCK.split(html)
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = _messages(part)
        else:
            part = _CELL.sub(lambda cell: _with_breaks(cell[0], 12), part)
            parts[number] = _OPTION.sub(_option, _with_breaks(part, 24))
    return _TABLE.sub(_reference, "".join(parts))


def _picture(found: re.Match[str]) -> str:
    linked, start, name, ending = found.groups()
    if (_FIGURES / f"{name}-dark.png").exists():
        return f"{linked}{start}{ending}#only-light){start}-dark{ending}#only-dark)"
    return found[0] if linked else f"[{start}{ending})](figures/{name}{ending})"


def _messages(block: str) -> str:
    """Returns a block of code whose lines wrap, if all of them are plain text without columns."""
    code = _CODE.search(block)
    if code is None or re.search(r"(?m)^ |  ", code[1]):
        return block
    lines = [f'<span class="message">{_OPTION.sub(_option, line)}</span>' for line in code[1].rstrip("\n").split("\n")]
    return block.replace(code[0], "<code>" + "\n".join(lines) + "</code>")


def _with_breaks(html: str, least: int) -> str:
    """Returns HTML with places at which words of code, of `least` characters or more, may break."""

    def broken(code: re.Match[str]) -> str:
        words = [_broken(word) if len(word) >= least else word for word in code[1].split(" ")]
        return f"<code>{' '.join(words)}</code>"

    return _CODE.sub(broken, html)


def _broken(word: str) -> str:
    """Returns a word with its places, of which a path has none before the ending of its file.

    A search marks what it found in the text between two such places, so a name that fits a column stays whole.
    """
    marks = "/=|:," if "/" in word else "/.=|:,"
    word = re.sub(rf"(?<=[^{marks}])[{marks}](?=[^{marks}\d])", r"\g<0><wbr>", word)
    return re.sub(
        rf"[^{marks}<>]{{{_LONG},}}", lambda part: re.sub("(?<=_)|(?<=[a-z])(?=[A-Z])", "<wbr>", part[0]), word
    )


def _option(option: re.Match[str]) -> str:
    """Returns an option that stays in one line; a long one may break, but not after its first hyphens."""
    whole = option[0] if len(option[0]) < _LONG else option[1]
    return f'<span class="option">{whole}</span>{option[0][len(whole) :]}'


def _reference(table: re.Match[str]) -> str:
    """Returns a table, marked if it has keys or options with their defaults: a telephone shows its cells as lines."""
    heads = re.findall(r"<th>(.*?)</th>", table[1])
    return f'<div class="reference">{table[0]}</div>' if heads[-2:] == ["Default", "Meaning"] else table[0]
