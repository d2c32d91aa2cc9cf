"""Reads the text of a record: a field, a nested field (`meta.body`), several fields in a template, or a conversation.

In a conversation (`chat:messages`) the model predicts only the assistant's text (`chat.py`).
"""

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from optimus.data.chat import ChatTemplate, Conversation
from optimus.errors import UserError, nearest

CHAT = "chat:"


class TextField:
    """A parsed `text_field`: a name, a path of names `a.b`, or a template such as `{question}\\n{answer.text}`."""

    def __init__(self, said: str) -> None:
        self.said = said
        try:
            parsed = list(string.Formatter().parse(said))
        except ValueError as error:
            raise UserError(
                f"`text_field` {said!r} is not a valid template ({error}): write a literal brace as {{{{ or }}}}"
            ) from None
        if any(form or conversion for _, _, form, conversion in parsed):
            raise UserError(
                f"`text_field` {said!r}: braces in a template must contain only the name of a field, as in {{question}}"
            )
        self._parts = [(before, name) for before, name, _, _ in parsed]
        names = [name for _, name in self._parts if name is not None]
        if "" in names:
            raise UserError(f"`text_field` {said!r}: a brace pair has no name: name a field, as in {{question}}")
        self.names: Sequence[str] = names or [said]
        self._is_template = bool(names)

    def columns(self, known: Sequence[str], where: str, first: Callable[[], Mapping[str, Any]]) -> list[str]:
        """Returns the names in `known` of the columns that this field needs. Raises `UserError` for a missing column.
        The message may suggest a nested field of the missing name, or the column with the longest text in the row that
        `first` returns."""
        found = dict.fromkeys(name if name in known else name.split(".")[0] for name in self.names)
        for name in found:
            if name not in known:
                others = nearest(name, known) if known else "the file has no columns"
                raise UserError(f"{where}: no column '{name}' ({others}). {_how_to_name(first(), name)}")
        return list(found)

    def text(self, record: Mapping[str, Any], where: str) -> str:
        """Returns the text of a record. Raises a `UserError` that begins with `where` for a field that is missing or is
        not valid text."""
        if not self._is_template:
            return _value(record, self.said, where)
        return "".join(before + ("" if name is None else _value(record, name, where)) for before, name in self._parts)

    def conversation(self, record: Mapping[str, Any], where: str) -> Conversation:
        """Returns the text of the record as a conversation. The model predicts the whole text."""
        return Conversation(self.text(record, where))


class ChatField(TextField):
    """A field with a list of messages, each with a role, and with content or tool calls. The record may have `tools`.

    `template` renders the messages. The spelling of one of the tokenizer's `special` tokens in a message stays ordinary
    text, unless `parse_special` is True.
    """

    def __init__(
        self, said: str, template: ChatTemplate, special: Sequence[str] = (), *, parse_special: bool = False
    ) -> None:
        super().__init__(said.removeprefix(CHAT))
        self.template, self._special, self._parse_special = template, special, parse_special

    def columns(self, known: Sequence[str], where: str, first: Callable[[], Mapping[str, Any]]) -> list[str]:
        """Raises `UserError`, because `prepare` reads no conversations from tables."""
        raise UserError(
            f"{where}: conversations (`text_field` {CHAT}...) are read from JSON lines only: convert the file"
        )

    def text(self, record: Mapping[str, Any], where: str) -> str:
        """Returns the whole conversation as text."""
        return self.conversation(record, where).text

    def conversation(self, record: Mapping[str, Any], where: str) -> Conversation:
        """Returns the rendered conversation with its predicted spans. Raises `UserError` for a field that is no
        conversation, for a conversation without an answer, and for a conversation that the template cannot render."""
        messages = _found(record, self.said, where)
        if not isinstance(messages, list):
            raise UserError(
                f"{where}: field '{self.said}' is not a conversation: give a list of objects with `role` and `content`"
            )
        for number, message in enumerate(messages, 1):
            if problem := _problem(message):
                raise UserError(
                    f"{where}: field '{self.said}' is not a conversation: message {number} {problem}: give a list of "
                    "objects with `role` and `content`"
                )
        roles = {message["role"]: None for message in messages}
        if "assistant" not in roles:
            raise UserError(
                f"{where}: no message has the role 'assistant' (roles: {', '.join(roles) or 'none'}), so the model would "
                "predict nothing of the conversation"
            )
        tools = record.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(each, Mapping) for each in tools)):
            raise UserError(f"{where}: field 'tools' is not a list of objects: remove it, or list the tools as objects")
        found = self.template.conversation(messages, where, tools, self._special, parse_special=self._parse_special)
        _checked(found.text, self.said, where)
        return found


def _problem(message: Any) -> str:
    """Describes why a value is no message. Returns "" for a message with a role, and with content or tool calls."""
    if not isinstance(message, Mapping):
        return f"is {kind_of(message)}"
    if not isinstance(message.get("role"), str):
        return "has `from` in place of `role`" if "from" in message else "has no `role`"
    content = message.get("content")
    if isinstance(content, list):
        parts = all(isinstance(each, Mapping) and isinstance(each.get("type"), str) for each in content)
        return "" if parts else "has a `content` list with parts that lack a `type`"
    if content is None and isinstance(message.get("tool_calls"), list):
        return ""
    return "" if isinstance(content, str) else f"has {'no' if content is None else kind_of(content) + ' as'} `content`"


def kind_of(value: Any) -> str:
    """Describes the type of a value for a message, for example "a list" or "null"."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", bytes: "binary data"}
    if value is None:
        return "null"
    return "an object" if isinstance(value, Mapping) else kinds.get(type(value), f"a {type(value).__name__}")


def _value(record: Mapping[str, Any], name: str, where: str) -> str:
    found = _found(record, name, where)
    if not isinstance(found, str):
        raise UserError(
            f"{where}: field '{name}' is {kind_of(found)}, not text. Correct it, or name another field with `text_field`."
        )
    return _checked(found, name, where)


def _found(record: Mapping[str, Any], name: str, where: str) -> Any:
    found: Any = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise UserError(f"{where}: no field '{name}' ({_there(found, part)}). {_how_to_name(record, name)}")
        found = found[part]
    return found


def _there(found: Any, part: str) -> str:
    """Explains why the field `part` is missing, or suggests fields that exist."""
    if not isinstance(found, Mapping):
        return f"the parent of '{part}' is {kind_of(found)}"
    return nearest(part, found) if found else "the object is empty"


def _texts(record: Mapping[str, Any], above: str = "", deep: int = 4) -> Iterator[tuple[str, str]]:
    """Yields (`text_field`, text) for the texts of a record and of the objects in it, nested up to `deep` times. Leaves
    out blank texts."""
    for name, value in record.items():
        if above and "." in name:
            continue  # no `text_field` can name this field
        if isinstance(value, str) and value.strip():
            yield above + name, value
        elif isinstance(value, Mapping) and deep and "." not in name:
            yield from _texts(value, f"{above}{name}.", deep - 1)


def _how_to_name(record: Mapping[str, Any], missing: str) -> str:
    """Suggests a `text_field` for a record without the field `missing`: a nested field of this name, or the field with
    the longest text."""
    texts = dict(_texts(record))
    within = next((name for name in texts if name.endswith(f".{missing}")), None)
    if within and not {"{", "}"} & set(within) and not within.startswith(CHAT):
        return f"The field is at '{within}': use `text_field={within!r}`."
    if not texts:
        return "Name the field that contains the text with `text_field`."
    longest = max(texts, key=lambda name: len(texts[name]))
    if "{" in longest or "}" in longest or longest.startswith(CHAT):
        return f"The longest text is in {longest!r}: rename that field."
    return f"The longest text is in '{longest}': use `text_field={longest!r}`."


def _checked(found: str, name: str, where: str) -> str:
    if not found.isascii():
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: field '{name}' is not valid Unicode ({error.reason}). Correct it.") from error
    return found


def field_of(said: str | TextField) -> TextField:
    """Parses `said` into a field, unless `said` is a field. Conversations get the default chat template."""
    return said if isinstance(said, TextField) else _named(said)


@cache
def _named(said: str) -> TextField:
    return ChatField(said, ChatTemplate()) if said.startswith(CHAT) else TextField(said)
