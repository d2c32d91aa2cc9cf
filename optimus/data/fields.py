"""The text of a record: a field, a field inside of others (`meta.body`), or several fields in a template."""

import string
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from optimus.errors import UserError, nearest


class TextField:
    """What `text_field` says: a name, a path of names `a.b`, or a template such as `{question}\\n{answer.text}`."""

    def __init__(self, said: str) -> None:
        self.said = said
        try:
            parsed = list(string.Formatter().parse(said))
        except ValueError as error:
            raise UserError(
                f"`text_field` {said!r} is no template ({error}): write a brace of the text as {{{{"
            ) from None
        if any(form or conversion for _, _, form, conversion in parsed):
            raise UserError(
                f"`text_field` {said!r}: a template has names in braces and nothing else there, as {{question}}"
            )
        self._parts = [(before, name) for before, name, _, _ in parsed]
        names = [name for _, name in self._parts if name is not None]
        if "" in names:
            raise UserError(f"`text_field` {said!r}: a brace pair has no name: name a field, as in {{question}}")
        self.names: Sequence[str] = names or [said]
        self._is_template = bool(names)

    def columns(self, known: Sequence[str], place: str) -> list[str]:
        """Those of the columns `known` that it needs. Raises `UserError` when one is not there."""
        found = dict.fromkeys(name if name in known else name.split(".")[0] for name in self.names)
        for name in found:
            if name not in known:
                raise UserError(
                    f"{place}: no column '{name}' ({nearest(name, known)}). Name the column of the text, `text_field`."
                )
        return list(found)

    def of(self, record: Mapping[str, Any], place: str) -> str:
        """The text of a record read at `place`. Raises `UserError` for a field that is not there, or is no text."""
        if not self._is_template:
            return _value(record, self.said, place)
        return "".join(before + ("" if name is None else _value(record, name, place)) for before, name in self._parts)


def _value(record: Mapping[str, Any], name: str, place: str) -> str:
    found: Any = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            known = found if isinstance(found, Mapping) else {}
            raise UserError(
                f"{place}: no field '{name}' ({nearest(part, known)}). Name the field that holds the text, `text_field`."
            )
        found = found[part]
    if not isinstance(found, str):
        raise UserError(f"{place}: field '{name}' is {type(found).__name__}, not text")
    if not found.isascii():
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: field '{name}' is not valid Unicode ({error.reason})") from error
    return found


@cache
def field_of(said: str) -> TextField:
    """The field that `said` names, read once."""
    return TextField(said)
