"""The text of a record: a field, a field inside of others (`meta.body`), several fields in a template, or a conversation.

Of a conversation (`chat:messages`) only the answers are predicted. It is written as by Tülu (Wang et al. 2023, "How Far Can
Camels Go?", section 4.1): `<|user|>`, a line break, what is said, a line break. What is predicted is what the assistant says
and what ends it: the heading of the next turn, or the end of text.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from optimus.errors import UserError, nearest

CHAT = "chat:"


class Segment(NamedTuple):
    """A stretch of a document, and whether its tokens are predicted."""

    text: str
    predicted: bool = True


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

    def columns(self, known: Sequence[str], place: str, first: Callable[[], Mapping[str, Any]]) -> list[str]:
        """Those of the columns `known` that it needs. Raises `UserError` when one is not there; by the `first` row it says
        which other one may be meant."""
        found = dict.fromkeys(name if name in known else name.split(".")[0] for name in self.names)
        for name in found:
            if name not in known:
                raise UserError(f"{place}: no column '{name}' ({nearest(name, known)}). {_how_to_name(first())}")
        return list(found)

    def of(self, record: Mapping[str, Any], place: str) -> str:
        """The text of a record read at `place`. Raises `UserError` for a field that is not there, or is no text."""
        if not self._is_template:
            return _value(record, self.said, place)
        return "".join(before + ("" if name is None else _value(record, name, place)) for before, name in self._parts)

    def segments(self, record: Mapping[str, Any], place: str) -> list[Segment]:
        """The text as `of` gives it, in stretches that are predicted or not."""
        return [Segment(self.of(record, place))]


class ChatField(TextField):
    """A list of messages, each with a role and its content, as chats are published."""

    def __init__(self, said: str) -> None:
        super().__init__(said.removeprefix(CHAT))

    def columns(self, known: Sequence[str], place: str, first: Callable[[], Mapping[str, Any]]) -> list[str]:
        """Tables hold texts only."""
        raise UserError(f"{place}: conversations (`text_field` {CHAT}...) are read from JSON lines: convert it")

    def of(self, record: Mapping[str, Any], place: str) -> str:
        """The whole conversation as text."""
        return "".join(segment.text for segment in self.segments(record, place))

    def segments(self, record: Mapping[str, Any], place: str) -> list[Segment]:
        """Prompts and answers in turn. Raises `UserError` where it is no conversation, or has no answer."""
        messages = _found(record, self.said, place)
        good = isinstance(messages, list) and all(
            isinstance(message, Mapping) and all(isinstance(message.get(name), str) for name in ("role", "content"))
            for message in messages
        )
        if not good:
            raise UserError(
                f"{place}: field '{self.said}' is no conversation: give a list of objects with `role` and `content`"
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise UserError(f"{place}: no message has the role 'assistant', so nothing of it would be predicted")
        found, prompt = list[Segment](), ""
        for number, message in enumerate(messages):
            heading = f"<|{message['role']}|>"
            prompt += f"{'' if number and messages[number - 1]['role'] == 'assistant' else heading}\n"
            if message["role"] == "assistant":
                ends = f"\n<|{messages[number + 1]['role']}|>" if number + 1 < len(messages) else ""
                found += [Segment(prompt, False), Segment(_checked(message["content"] + ends, self.said, place))]
                prompt = ""
            else:
                prompt += f"{_checked(message['content'], self.said, place)}\n"
        return [*found, Segment(prompt, False)] if prompt else found


def _value(record: Mapping[str, Any], name: str, place: str) -> str:
    found = _found(record, name, place)
    if not isinstance(found, str):
        raise UserError(
            f"{place}: field '{name}' is {type(found).__name__}, not text. Mend it, or name another, `text_field`."
        )
    return _checked(found, name, place)


def _found(record: Mapping[str, Any], name: str, place: str) -> Any:
    found: Any = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            known = found if isinstance(found, Mapping) else {}
            raise UserError(f"{place}: no field '{name}' ({nearest(part, known)}). {_how_to_name(record)}")
        found = found[part]
    return found


def _how_to_name(record: Mapping[str, Any]) -> str:
    """The cure for a record whose text is elsewhere: most often in the field that holds the longest one."""
    texts = {name: value for name, value in record.items() if isinstance(value, str) and value.strip()}
    if not texts:
        return "Name the one that holds the text, `text_field`."
    longest = max(texts, key=lambda name: len(texts[name]))
    if "{" in longest or "}" in longest or longest.startswith(CHAT):
        return f"Its longest text is in {longest!r}: give that field another name."
    return f"Its longest text is in '{longest}': `text_field={longest!r}` reads that."


def _checked(found: str, name: str, place: str) -> str:
    if not found.isascii():
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: field '{name}' is not valid Unicode ({error.reason})") from error
    return found


@cache
def field_of(said: str) -> TextField:
    """The field that `said` names, read once."""
    return ChatField(said) if said.startswith(CHAT) else TextField(said)
