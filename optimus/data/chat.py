"""Renders conversations as text, and finds the spans that the model predicts.

The default template is from Tülu (Wang et al. 2023, "How Far Can Camels Go?", section 4.1). Templates run in Jinja's
sandbox.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from optimus.disk import parse_json
from optimus.errors import UserError

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges of the characters of a text."""

FILE = "chat_template.jinja"
OURS = (
    "{% for message in messages %}"
    "{% if loop.first or loop.previtem['role'] != 'assistant' %}{{ '<|' + message['role'] + '|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% if loop.last %}{{ eos_token }}{% else %}{{ '\\n<|' + loop.nextitem['role'] + '|>' }}{% endif %}"
    "{% endgeneration %}{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_FILES = ("special_tokens_map.json", "tokenizer_config.json", FILE)  # files of a tokenizer; later files take precedence
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of the assistant's reasoning; the first found wins
_MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters, which Unicode reserves for internal use
_DAY = datetime(2024, 7, 26)  # a fixed date, so that renderings are reproducible


class ChatTemplate(NamedTuple):
    """A template, and the special tokens that the template may name."""

    source: str = OURS
    tokens: tuple[tuple[str, str], ...] = ()

    @classmethod
    def beside(cls, tokenizer: Path, eos_token: str) -> "ChatTemplate":
        """Finds the chat template in the folder of a tokenizer.json, or returns the default template. The index of
        prepared data takes precedence over the tokenizer's own files. Raises `UserError` if one of the
        tokenizer's files is unreadable or has an invalid template."""
        folder, files = tokenizer.parent, dict[str, Any]()
        if tokenizer.name == "tokenizer.json":
            if (prepared := _prepared(folder / "index.json")) is not None:
                return prepared
            for name in _FILES:
                try:
                    text = (folder / name).read_text(encoding="utf-8")
                    files[name] = text if name == FILE else dict(parse_json(text))
                except FileNotFoundError:
                    continue
                except (OSError, ValueError, TypeError) as error:
                    what = "text" if name == FILE else "a JSON object"
                    raise UserError(f"{folder / name} cannot be read as {what}: {error}") from error
        return cls.from_files(files, eos_token, str(folder)) or cls(tokens=(("eos_token", eos_token),))

    @classmethod
    def from_files(cls, files: Mapping[str, Any], eos_token: str, where: str) -> "ChatTemplate | None":
        """Finds the template in the `files` of a published tokenizer: parsed JSON or, for `FILE`, text, by file name.
        Returns None if the files have no template. Raises `UserError` for an invalid template, and for a list of
        templates without one named default."""
        said = {name: value for file in _FILES[:2] for name, value in files.get(file, {}).items()}
        named = {f"{role}_token": said.get(f"{role}_token") for role in _ROLES}
        texts = {role: each.get("content") if isinstance(each, dict) else each for role, each in named.items()}
        tokens = {"eos_token": eos_token} | {role: each for role, each in texts.items() if isinstance(each, str)}
        source = files.get(FILE, said.get("chat_template"))
        if isinstance(source, list):
            by_name = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
            if "default" not in by_name:
                names = ", ".join(map(str, by_name))
                raise UserError(
                    f"{where}: none of its chat templates ({names}) is named default: name one of them default"
                )
            source = by_name["default"]
        if source is None:
            return None
        if not isinstance(source, str):
            raise UserError(f"{where}: its chat_template is a {type(source).__name__}: it must be a string")
        found = cls(source, tuple(sorted(tokens.items())))
        found.check(where)
        return found

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> "ChatTemplate":
        """Reads a template that `written` returned. Raises `KeyError` for a missing entry, and `TypeError` unless the
        tokens are an object."""
        tokens = said["tokens"]
        if not isinstance(tokens, Mapping):
            raise TypeError("the tokens of chat must be an object")
        return cls(str(said["template"]), tuple(sorted((str(role), str(text)) for role, text in tokens.items())))

    def written(self) -> dict[str, Any]:
        """Returns the template and its tokens as a dict for JSON."""
        return {"template": self.source, "tokens": dict(self.tokens)}

    @property
    def digest(self) -> str:
        """SHA-256 of the template and its tokens."""
        return hashlib.sha256(json.dumps(self.written(), sort_keys=True).encode()).hexdigest()

    def check(self, where: str) -> None:
        """Raises `UserError` unless the source is a valid Jinja template."""
        try:
            _compiled(self.source)
        except Exception as error:  # a template may raise anything
            raise UserError(
                f"{where}: its chat_template is not a valid Jinja template ({error}): correct or remove it"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        *,
        answer: bool = False,
        tools: Any = None,
        marks: tuple[str, str] = ("", ""),
        day: datetime = _DAY,
    ) -> str:
        """Renders a conversation as text, with the heading of the next answer if `answer` is True. Puts `marks` around
        the text in `{% generation %}` tags. Raises `UserError` for a conversation that the template cannot render."""
        try:
            text: str = _compiled(self.source).render(
                **dict(self.tokens),
                messages=[_plain(message, joined=self.source == OURS) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=answer,
                strftime_now=day.strftime,
                generation_marks=marks,
            )
            return text
        except Exception as error:  # a template may raise anything
            why = str(error) or type(error).__name__
            if any(isinstance(message.get("content"), list) for message in messages):
                why += ": it may need `content` as text, not as a list of parts"
            raise UserError(f"{where}: the chat template cannot render this conversation: {why}") from error

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        tools: Any = None,
        special: Sequence[str] = (),
        *,
        parse_special: bool = False,
    ) -> "Conversation":
        """Renders a conversation and finds the predicted spans. Without `parse_special`, the spelling of a `special`
        token in a message stays ordinary text, and a role must not contain a special token. Raises `UserError` for an
        invalid role, and if the template cannot render the conversation or drops the text of the messages. Also raises
        `UserError` if the spans are unknown, or if a template with `{% generation %}` tags gives no span."""
        begin, end, quote = marks = _unused(json.dumps([messages, tools], ensure_ascii=False, default=str), where)
        for number, message in enumerate(messages, 1):
            if not parse_special and any(token in message["role"] for token in special):
                raise UserError(
                    f"{where}: the role of message {number} contains a special token: {message['role']!r}: rename it"
                )
        given, tools = (
            ([*messages], tools)
            if parse_special
            else (_quoted([*messages], special, quote), _quoted(tools, special, quote))
        )
        self._check_rendered(given, where, tools)
        if _GENERATION.search(self.source):
            found = self.render(given, where, tools=tools, marks=(begin, end))
            rendered, predicted, stays = _unmarked(found, marks, special, where)
            if not predicted:
                raise UserError(
                    f"{where}: the conversation has no text of the assistant, so the model would predict nothing of it"
                )
            said = [text for text in map(_said, messages) if text]
            if said and not any(text in rendered for text in said):
                raise UserError(
                    f"{where}: the chat template drops the text of the messages: it may need `content` as a list of parts"
                )
            last = len(rendered.rstrip())
            ends_in_token = any(rendered.endswith(token, 0, last) for token in special) and all(
                stop != last for _, stop in stays
            )
            return Conversation(rendered, predicted, stays, predicted[-1][1] >= last and not ends_in_token)
        found, spans, is_open = self.render(given, where, tools=tools), list[tuple[int, int]](), False
        rendered, _, stays = _unmarked(found, marks, special, where)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                first, last, is_open = self._answer(given, number, found, where, tools, special, begin)
                spans.append(tuple(len(_unmarked(found[:to], marks, special, where)[0]) for to in (first, last)))  # type: ignore[arg-type]
        return Conversation(rendered, tuple(spans), stays, is_open)

    def _check_rendered(self, messages: Sequence[Mapping[str, Any]], where: str, tools: Any) -> None:
        """Raises `UserError` if the template drops all tool calls, or writes a list of parts as Python does: the model
        would learn to say nothing in place of a call, or to write Python."""
        parts = [str(message["content"]) for message in messages if isinstance(message.get("content"), list)]
        calls = any(message.get("tool_calls") for message in messages)
        if not parts and not calls:
            return
        rendered = self.render(messages, where, tools=tools)
        without: str | None = None
        if any(text in rendered for text in parts):
            raise UserError(f"{where}: the chat template needs `content` as text, not as a list of parts")
        with suppress(UserError):  # some templates raise for a message without content
            silent = [{name: each[name] for name in each if name != "tool_calls"} for each in messages]
            without = self.render(silent, where, tools=tools)
        if calls and without == rendered:
            raise UserError(
                f"{where}: the chat template drops the tool calls: use a template that writes `tool_calls` ({FILE} beside "
                "tokenizer.json), or write the calls in `content`"
            )

    def _answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        number: int,
        rendered: str,
        where: str,
        tools: Any,
        special: Sequence[str],
        mark: str,
    ) -> tuple[int, int, bool]:
        """Finds the span of the assistant's message `messages[number]` in the rendered conversation `rendered`. Returns
        (start, end, True if the message has text and only white space follows the message). Raises `UserError` if the
        span is unknown."""
        asked, message = messages[:number], messages[number]
        answered = self.render(messages[: number + 1], where, tools=tools)
        last, same = _reaches(rendered, answered, special)
        content = last, last  # the span of an empty message, for example a tool call
        if said := _said(message):
            marked = mark if isinstance(message["content"], str) else [{"type": "text", "text": mark}]
            changed = [*messages[:number], {**message, "content": marked}, *messages[number + 1 :]]
            before, _, behind = self.render(changed, where, tools=tools).partition(mark)
            content = len(before), len(rendered) - len(behind)
            same &= rendered.startswith(before) and rendered.endswith(behind) and said in rendered[slice(*content)]
        first = content[0]
        with suppress(UserError):  # some templates raise for a conversation without messages
            if asked:
                same &= _reaches(rendered, self.render(asked, where, tools=tools), special)[1]
            first = min(first, _common(rendered, self.render(asked, where, answer=True, tools=tools)))
        if not same or not first <= content[0] <= content[1] <= last:
            turn, ending = f"turn {number + 1} (assistant)", ""
            found = f"changes the text of {turn}"
            if answered != rendered:
                found = f"renders {turn} differently when the conversation continues"
                ending = ", or end the conversation there"
            raise UserError(
                f"{where}: the chat template {found}, so the tokens of this turn are not known: use a template with "
                f"{{% generation %}} around the assistant's text ({FILE} beside tokenizer.json){ending}"
            )
        if not said or rendered[content[1] : last].strip():
            return first, last, False
        ending = next((token for token in special if rendered.startswith(token, last)), "")
        return first, last + len(ending), not ending and not rendered[last:].strip()


def _said(message: Mapping[str, Any]) -> str:
    """Returns the text of a message, without white space around it."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str)).strip()


def _common(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _reaches(rendered: str, beginning: str, special: Sequence[str]) -> tuple[int, bool]:
    """Returns the length of the common prefix of `rendered` and `beginning`, without an incomplete special token at the
    end. Also returns True if the rest of `beginning` consists of special tokens and white space."""
    reached = _common(rendered, beginning)
    for token in special:  # the common prefix may end within two special tokens that begin alike
        for text in (rendered, beginning):
            at = text.find(token, max(0, reached - len(token) + 1), reached + len(token) - 1)
            reached = at if 0 <= at < reached else reached
    rest = beginning[reached:]
    for token in special:
        rest = rest.replace(token, "")
    return reached, not rest.strip()


class Conversation(NamedTuple):
    """A text, its predicted spans (None if the model predicts the whole text), and the spans that spell special tokens
    but stay text."""

    text: str
    predicted: Spans | None = None
    quoted: Spans = ()
    is_open: bool = False
    """True if the text ends with an answer, and the answer does not end with a special token."""

    def encoded(self, as_tokens: Any, as_text: Any) -> tuple[list[int], list[bool]]:
        """Returns the token ids, and for each token True if the model predicts any character of the token. The
        tokenizer `as_tokens` must parse special tokens, and `as_text` must not."""
        ids, offsets = list[int](), list[tuple[int, int]]()
        borders = [0, *(border for span in self.quoted for border in span), len(self.text)]
        for number, (start, stop) in enumerate(pairwise(borders)):
            if start < stop:
                found = (as_text if number % 2 else as_tokens).encode(self.text[start:stop], add_special_tokens=False)
                ids += found.ids
                offsets += [(start + first, start + last) for first, last in found.offsets]
        if self.predicted is None:
            return ids, [True] * len(ids)
        spans = self.predicted
        return ids, [any(first < stop and start < last for start, stop in spans) for first, last in offsets]


def _prepared(index: Path) -> ChatTemplate | None:
    """Reads the template from the index of prepared data, or returns None."""
    try:
        return ChatTemplate.read(parse_json(index.read_bytes())["chat"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` and `{% endgeneration %}`, the tags around the assistant's text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks = jinja2.nodes.Name("generation_marks", "load")
            call = self.call_method("_marked", [marks])
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, marks: tuple[str, str], caller: Callable[[], str]) -> str:
            begin, end = marks
            return f"{begin}{caller()}{end}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)  # Jinja's own filter `tojson` escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def _plain(message: Mapping[str, Any], *, joined: bool = False) -> dict[str, Any]:
    """Removes the null fields of a message, and adds the assistant's reasoning as `reasoning_content` and, if absent,
    as `thinking`. With `joined`, a list of parts that are all text becomes one text."""
    given = {name: value for name, value in message.items() if value is not None}
    parts = given.get("content")
    if joined and isinstance(parts, list) and all(isinstance(part.get("text"), str) for part in parts):
        given["content"] = "".join(part["text"] for part in parts)
    thought = next((given[name] for name in _THOUGHTS if name in given), None)
    return given if thought is None else {"thinking": thought, **given, "reasoning_content": thought}


def _unused(text: str, where: str) -> tuple[str, str, str]:
    """Returns three characters of `_MARKS` that do not occur in the text. Raises `UserError` if fewer are free."""
    free = [mark for mark in _MARKS if mark not in text]
    if len(free) < 3:
        raise UserError(f"{where}: the text contains too many noncharacters (U+FDD0 to U+FDEF): remove them")
    return free[0], free[1], free[2]


def _quoted(value: Any, special: Sequence[str], quote: str) -> Any:
    """Replaces each spelling of a special token, also in nested values, by the token's number between two `quote`
    characters."""
    if isinstance(value, str):  # in one pass, because a special token may be a digit
        tokens = "|".join(map(re.escape, filter(None, special)))
        return re.sub(tokens, lambda found: f"{quote}{special.index(found[0])}{quote}", value) if tokens else value
    if isinstance(value, Mapping):
        return {_quoted(name, special, quote): _quoted(each, special, quote) for name, each in value.items()}
    return [_quoted(each, special, quote) for each in value] if isinstance(value, list) else value


def _unmarked(text: str, marks: tuple[str, str, str], special: Sequence[str], where: str) -> tuple[str, Spans, Spans]:
    """Removes the marks from a text, and restores the quoted special tokens. Returns the text, the spans marked as
    generated, and the quoted spans. Raises `UserError` if a quoted token is incomplete or has an unknown number."""
    begin, end, quote = marks
    made, generated, quoted, began = "", list[tuple[int, int]](), list[tuple[int, int]](), 0
    for part in re.split(f"([{begin}{end}]|{quote}[0-9]+{quote})", text):
        if part == begin:
            began = len(made)
        elif part == end:
            if began < len(made):
                generated.append((began, len(made)))
        elif quote in part:
            matched = re.fullmatch(f"{quote}([0-9]+){quote}", part)
            if matched is None or (number := int(matched[1])) >= len(special):
                raise UserError(
                    f"{where}: the chat template splits a text that spells a special token: remove it from the text"
                )
            token = special[number]
            quoted.append((len(made), len(made) + len(token)))
            made += token
        else:
            made += part
    return made, tuple(generated), tuple(quoted)


def special_texts(tokenizer: Any) -> list[str]:
    """Lists the texts of the special tokens of a `tokenizers.Tokenizer`, the longest first."""
    added = tokenizer.get_added_tokens_decoder().values()
    return sorted((token.content for token in added if token.special), key=len, reverse=True)


class Answering(NamedTuple):
    """The prompt for an answer, and the tokens and the text that end the answer."""

    prompt: Conversation
    stops: tuple[int, ...]
    end_text: str  # text that ends the answer; may be empty

    @classmethod
    def to(cls, template: ChatTemplate, said: str, tokenizer: Any) -> "Answering":
        """Builds the prompt for an answer to the user's message `said`, with today's date. `tokenizer` must parse
        special tokens."""
        where, special, today = "the prompt", special_texts(tokenizer), datetime.now()
        begin, end, quote = _unused(said, where)
        asked = {"role": "user", "content": said}
        text = template.render([_quoted(asked, special, quote)], where, answer=True, day=today)
        rendered, _, quoted = _unmarked(text, (begin, end, quote), special, where)
        answer, end_text, stops = {"role": "assistant", "content": begin}, "", list[int]()
        for following in ([], [{"role": "user", "content": end}]):
            with suppress(UserError):  # a template may reject this conversation
                shown = template.render([asked, answer, *following], where, day=today)
                behind = shown.rpartition(begin)[2].partition(end)[0] if begin in shown else ""
                first = tokenizer.encode(behind, add_special_tokens=False).ids[:1] if behind.strip() else []
                if first and tokenizer.id_to_token(first[0]) in special:
                    stops += first
                elif following:
                    end_text = behind.rstrip()
        return cls(Conversation(rendered, None, quoted), tuple(dict.fromkeys(stops)), end_text)
