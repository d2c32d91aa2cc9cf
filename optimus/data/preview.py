"""Shows documents as the model reads them, before `prepare` writes anything."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from optimus.data import files
from optimus.data import tokenizer as tokenizers
from optimus.data.chat import Conversation
from optimus.data.documents import Position, parse_lines, read_batches
from optimus.data.fields import ChatField, TextField, chat_field, field_of
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.plugins import load_plugins

_EXAMPLES = 3
_LONGEST = 1 << 16  # characters of a text after which the rest of a document is left out


def preview(
    inputs: str | Path | Sequence[str | Path],
    *,
    tokenizer: str | Path | None = None,
    text_field: str = "text",
    parse_special: bool = False,
    encoding: str = "utf-8",
    split: str | None = None,
    plugins: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Returns up to three documents of `inputs`, from files far apart in their order. Writes nothing.

    A result has `source` (the file), `text` (the document as the model reads it) and `predicted` (the spans [start,
    end) of the text that the model predicts). `tokens` is the number of tokens without the end-of-text token; None
    without `tokenizer`, and for a document whose end is left out. The arguments are those of `prepare`.

    Raises `UserError` for bad input, and if the examined files have no document.

    Example:
        optimus.preview("chats.jsonl", tokenizer="tokenizer/", text_field="chat:messages")[0]["predicted"]
    """
    load_plugins(plugins)
    info = None if tokenizer is None else tokenizers.inspect(user_path(tokenizer))
    field = field_of(text_field)
    if isinstance(field, ChatField):
        field = chat_field(text_field, info, parse_special)
    inputs = [inputs] if isinstance(inputs, str | Path) else inputs
    sources = files.resolve(inputs, encoding=files.check_encoding(encoding), split=split)
    last = len(sources.files) - 1
    chosen = sorted({round(number * last / (_EXAMPLES - 1)) for number in range(_EXAMPLES)})
    found = [[*islice(_documents(sources, sources.files[number], field), _EXAMPLES)] for number in chosen]
    shown = [document for rank in range(_EXAMPLES) for each in found for document in each[rank : rank + 1]]
    if not shown:
        raise UserError(f"no document in {', '.join(str(sources.files[number].path) for number in chosen)}")
    encoders = (
        None if info is None else [tokenizers.load(info.path, parse_special=each) for each in (True, parse_special)]
    )
    return [_example(*each, encoders) for each in shown[:_EXAMPLES]]


def _documents(
    sources: files.Sources, source: files.Source, field: TextField
) -> Iterator[tuple[files.Source, Conversation, bool]]:
    """Yields (file, document, False if the end of the document is left out) of the documents of one file."""
    text = ""
    for batch in read_batches(files.Sources(sources.inputs, (source,)), Position(0), field, lambda text: []):
        if batch.lines:
            yield from ((source, each, True) for each in parse_lines(batch, field) if each.text)
        for piece, ends in zip(batch.texts, batch.ends_document):
            text += piece
            if text and (ends or len(text) > _LONGEST):
                yield source, Conversation(text), ends
            if not ends and len(text) > _LONGEST:
                return
            text = "" if ends else text


def _example(
    source: files.Source, document: Conversation, complete: bool, encoders: Sequence[Any] | None
) -> dict[str, Any]:
    predicted = [[0, len(document.text)]] if document.predicted is None else [list(each) for each in document.predicted]
    plain = document.predicted is None and not document.quoted
    tokens = None
    if encoders is not None and complete:
        as_tokens, as_text = (encoders[1], encoders[1]) if plain else encoders
        tokens = len(document.encoded(as_tokens, as_text)[0])
    return {"source": str(source.path), "text": document.text, "predicted": predicted, "tokens": tokens}
