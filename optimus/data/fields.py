"""Reads the text of a record from a field, a nested field (`meta.body`), a template of fields, or a conversation."""

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from optimus.data import tokenizer as tokenizers
from optimus.data.chat import ChatTemplate, Conversation, special_texts
from optimus.errors import UserError, nearest

CHAT = "chat:"

# Roles of the messages of ShareGPT, by the names that its data sets use.
_SHARE_GPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_SHARE_GPT |= {"model": "assistant", "function_call": "assistant", "observation": "tool", "function_response": "tool"}


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
        """Returns the columns in `known` that this field needs. Raises `UserError` for a missing column. `first`
        returns a row, for the error's message."""
        found = dict.fromkeys(name if name in known else name.split(".")[0] for name in self.names)
        for name in found:
            if name not in known:
                others = nearest(name, known) if known else "the file has no columns"
                raise UserError(f"{where}: no column '{name}' ({others}). {_how_to_name(first(), name)}")
        return list(found)

    def text(self, record: Mapping[str, Any], where: str) -> str:
        """Returns the text of a record. Raises `UserError` for a field that is missing or is not valid text."""
        if not self._is_template:
            return _value(record, self.said, where)
        return "".join(before + ("" if name is None else _value(record, name, where)) for before, name in self._parts)

    def conversation(self, record: Mapping[str, Any], where: str) -> Conversation:
        """Returns the text of the record as a conversation. The model predicts the whole text."""
        return Conversation(self.text(record, where))


class ChatField(TextField):
    """A field with a list of messages, or two fields with a prompt and a completion. The record may have `tools`.

    A message is an object with `role` and `content`, or with `from` and `value` as in ShareGPT. A prompt or completion
    is a text or a list of messages. Without `parse_special`, the spelling of a `special` token in a message stays
    ordinary text.
    """

    def __init__(
        self, said: str, template: ChatTemplate, special: Sequence[str] = (), *, parse_special: bool = False
    ) -> None:
        super().__init__(said.removeprefix(CHAT))
        self.names = self.said.split("+")
        if len(self.names) > 2 or not all(self.names):
            raise UserError(f"`text_field` {said}: give one field of messages, or two, as in chat:prompt+completion")
        self.template, self._special, self._parse_special = template, special, parse_special

    def columns(self, known: Sequence[str], where: str, first: Callable[[], Mapping[str, Any]]) -> list[str]:
        """Returns the columns in `known` with the conversation and its tools. Raises `UserError` for a missing column."""
        return [*super().columns(known, where, first), *(["tools"] if "tools" in known else [])]

    def text(self, record: Mapping[str, Any], where: str) -> str:
        """Returns the whole conversation as text."""
        return self.conversation(record, where).text

    def conversation(self, record: Mapping[str, Any], where: str) -> Conversation:
        """Returns the rendered conversation with its predicted spans. Raises `UserError` for a field that is no
        conversation, and for a conversation without a message of the assistant."""
        messages = self._messages(record, where)
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

    def _messages(self, record: Mapping[str, Any], where: str) -> list[Any]:
        """Returns the messages of a record, unchecked, with the keys and roles of ShareGPT renamed."""
        if len(self.names) == 2:
            texts = zip(("user", "assistant"), self.names)
            parts = [(role, _found(record, name, where)) for role, name in texts]
            found = [part if isinstance(part, list) else [{"role": role, "content": part}] for role, part in parts]
            return [_renamed(message) for part in found for message in part]
        messages = _found(record, self.said, where)
        if not isinstance(messages, list):
            raise UserError(
                f"{where}: field '{self.said}' is not a conversation: give a list of objects with `role` and `content`"
            )
        return [_renamed(message) for message in messages]


def _renamed(message: Any) -> Any:
    """Renames the keys and roles of a message of ShareGPT."""
    if not isinstance(message, Mapping) or "role" in message or not {"from", "value"} <= {*message}:
        return message
    further = {name: value for name, value in message.items() if name not in ("from", "value")}
    role = message["from"]
    return {
        "role": _SHARE_GPT.get(role, role) if isinstance(role, str) else role,
        "content": message["value"],
        **further,
    }


def _problem(message: Any) -> str:
    """Describes why a value is no message, or returns "" for a message."""
    if not isinstance(message, Mapping):
        return f"is {kind_of(message)}"
    if not isinstance(message.get("role"), str):
        return "has `from` without `value`" if "from" in message else "has no `role`"
    content = message.get("content")
    if isinstance(content, list):
        parts = all(isinstance(each, Mapping) and isinstance(each.get("type"), str) for each in content)
        return "" if parts else "has a `content` list with parts that lack a `type`"
    if content is None and isinstance(message.get("tool_calls"), list):
        return ""
    return "" if isinstance(content, str) else f"has {'no' if content is None else kind_of(content) + ' as'} `content`"


def kind_of(value: Any) -> str:
    """Describes the type of a value, for example "a list" or "null"."""
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
    if not isinstance(found, Mapping):
        return f"the parent of '{part}' is {kind_of(found)}"
    return nearest(part, found) if found else "the object is empty"


def _texts(record: Mapping[str, Any], above: str = "", deep: int = 4) -> Iterator[tuple[str, str]]:
    """Yields (`text_field`, text) for the texts of a record and of objects at most `deep` levels below the record.

    Leaves out blank texts, and nested texts that no `text_field` can name.
    """
    for name, value in record.items():
        if above and "." in name:
            continue  # no `text_field` can name this field
        if isinstance(value, str) and value.strip():
            yield above + name, value
        elif isinstance(value, Mapping) and deep and "." not in name:
            yield from _texts(value, f"{above}{name}.", deep - 1)


def _how_to_name(record: Mapping[str, Any], missing: str) -> str:
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


def chat_field(text_field: str, info: tokenizers.TokenizerInfo | None, parse_special: bool) -> ChatField:
    """Returns the field of conversations, with the tokenizer's chat template or the default template."""
    if info is None:
        eos = tokenizers.TRAINED_EOS
        template, special = ChatTemplate(tokens=(("eos_token", eos),)), [eos]
    else:
        template, special = ChatTemplate.beside(info.path, info.eos_token), special_texts(tokenizers.load(info.path))
    return ChatField(text_field, template, special, parse_special=parse_special)
