"""Extracts the text of an HTML page, with line breaks between blocks and tabs between table cells.

Drops scripts, styles and templates.
"""

import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser

_HIDDEN = {"script", "style", "template"}
_PARAGRAPHS = {
    "address", "article", "aside", "blockquote", "dl", "fieldset", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5",
    "h6", "header", "hr", "main", "nav", "ol", "p", "pre", "section", "table", "title", "ul",
}  # fmt: skip
_LINES = {"body", "br", "caption", "dd", "div", "dt", "figcaption", "head", "html", "li", "option", "tr"}
_CELLS = {"td", "th"}
_SPACE = " \t\n\r\f"
_SPACES = re.compile(f"[{_SPACE}]+")


def page_text(chunks: Iterable[str]) -> Iterator[str]:
    """Yields, in chunks, the text of the page whose HTML is the concatenation of `chunks`."""
    parser = _Parser()
    for number, chunk in enumerate(chunks):
        parser.feed(chunk if number else chunk.removeprefix("\ufeff"))  # a byte order mark
        yield parser.take()
    parser.close()
    yield parser.take()


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._out: list[str] = []
        self._gap = ""  # white space to write before the next text
        self._begun = False
        self._hidden = 0
        self._preformatted = 0

    def take(self) -> str:
        text, self._out = "".join(self._out), []
        return text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in _HIDDEN
        self._preformatted += tag == "pre"
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in _HIDDEN))
        self._preformatted = max(0, self._preformatted - (tag == "pre"))
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden or not data:  # character references such as `&#1;` have no text
            return
        if self._preformatted:
            self._write(data)
            return
        text = _SPACES.sub(" ", data)
        if text[0] == " ":
            self._widen(" ")
        if words := text.strip(" "):
            self._write(words)
            if text[-1] == " ":
                self._widen(" ")

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Parses `<![...`, and treats unknown sections as comments."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def _break(self, tag: str) -> None:
        self._widen("\n\n" if tag in _PARAGRAPHS else "\n" if tag in _LINES else "\t" if tag in _CELLS else "")

    def _widen(self, gap: str) -> None:
        self._gap = max(self._gap, gap, key=("", " ", "\t", "\n", "\n\n").index)

    def _write(self, text: str) -> None:
        self._out.append(f"{self._gap}{text}" if self._begun else text)
        self._gap, self._begun = "", True
