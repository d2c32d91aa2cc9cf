"""Describes data that a run can train on, also as an HTML page."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus.config.sizes import counted
from optimus.data.description import border_text, describe, fact_lines, length_line
from optimus.disk import printable, user_path
from optimus.errors import naming_disk_errors
from optimus.report.page import render

_SOURCES = 30  # maximum number of sources with a bar; one more bar has the others


def describe_data(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    context: int | None = None,
    seed: int | None = None,
    rows: int | None = None,
    html: str | Path | None = None,
    plugins: Sequence[str] = (),
) -> dict[str, Any]:
    """Describes a folder of prepared data or its URL, or token files such as `megatron:PREFIX`. `html` is a file to
    write: a page that needs no network.

    The result has the counts of `index.json`: `tokens`, `sequences`, `documents`, `text_bytes`, `bytes_per_token`,
    `left_out` (documents by reason) and `sources` with their `share` of tokens. None is a number that token files do
    not have. `lengths` has the lengths of documents in tokens, end-of-text token included, measured in at most `rows`
    rows: `count`, `mean`, `quantiles` and `histogram`, and `cut`, the number of documents longer than counted. By
    default, these are 4,096 rows, or fewer if rows are long. `rows` of the result are three rows as of
    `optimus.show_row`.

    Token files need a `tokenizer`; `context` (default: 2048) and `seed` (default: 0) are `train.sequence_length` and
    `train.seed` of the run whose rows are described. A prepared folder has its own; token files that `prepare` wrote,
    named by their folder, have a tokenizer. `plugins` names plugins with formats
    of token files. Raises `UserError` for damaged data, and if `html` cannot be written.

    Example:
        optimus.describe_data("data", html="data.html")["lengths"]["quantiles"]["50"]
    """
    page = None if html is None else user_path(html)
    found = describe(path, tokenizer=tokenizer, context=context, seed=seed, rows=rows, plugins=plugins)
    if page is not None:
        text = render(page_data(found), script="data.js", curves=False)
        with naming_disk_errors(page, "Make room, or choose another place for `html`"):
            page.write_text(text, encoding="utf-8")
    return found


def page_data(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the data of the page, ready for JSON, from the result of `describe`."""
    lengths = found["lengths"]
    quantiles = [("shortest", lengths["min"])]
    quantiles += [("median" if each == "50" else f"{each} %", value) for each, value in lengths["quantiles"].items()]
    quantiles += [("longest", lengths["max"]), ("mean", lengths["mean"])]
    return {
        "title": f"Data in {found['path']}",
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "numbers": _numbers(found),
        "facts": [list(each) for each in fact_lines(found)],
        "sources": _source_bars(found["sources"]),
        "sources_note": "share of the tokens of documents",
        "lengths_note": f"in tokens, end of text included; {length_line(lengths)}",
        "quantiles": [{"label": label, "value": value} for label, value in quantiles],
        "lengths": [
            {
                "label": f"{each['from']:,}" if each["from"] == each["to"] else f"{each['from']:,} to {each['to']:,}",
                "number": each["count"],
                "said": f"{each['count']:,}",
            }
            for each in lengths["histogram"]
        ],
        "rows": [_row(each) for each in found["rows"]],
    }


def _numbers(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns at most four numbers, each with a `label`, a `value` and a `note`."""
    known = [
        ("tokens", found["tokens"], f"{found['sequences']:,} sequences of {found['context']:,}"),
        ("documents", found["documents"], f"{sum(found['left_out'].values()):,} more are left out"),
        ("bytes a token", found["bytes_per_token"], "of the documents' text in UTF-8"),
        ("tokens a document", found["lengths"]["quantiles"].get("50"), "median"),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in known if value is not None]


def _source_bars(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted(sources, key=lambda each: -each["tokens"])
    shown = [(each["name"], each["tokens"], each["share"], each["documents"]) for each in ordered[:_SOURCES]]
    if rest := ordered[_SOURCES:]:
        totals = [sum(each[key] for each in rest) for key in ("tokens", "share", "documents")]
        shown.append((f"{len(rest):,} others", *totals))
    return [
        {
            "label": name,
            "number": tokens,
            "said": f"{100 * share:.3g} %: {tokens:,} tokens, {counted(documents, 'document')}",
        }
        for name, tokens, share, documents in shown
    ]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    predicted, real = row["predicted_tokens"], row["tokens"] - row["padding_tokens"]
    said = f"{row['file']}, byte {row['byte']:,}; {counted(len(row['documents']), 'document')} in {real:,} tokens"
    return {
        "row": row["row"],
        "said": said + (f", {predicted:,} predicted (underlined)" if predicted < real else ""),
        "padding": f"{row['padding_tokens']:,} tokens of padding" if row["padding_tokens"] else "",
        "documents": [
            {
                "said": f"document {number}, {border_text(each)}: {counted(each['tokens'], 'token')}",
                "begins": each["begins"],
                "ends": each["ends"],
                "parts": _parts(each["text"], each["predicted"]),
                "all_predicted": each["predicted"] == [[0, len(each["text"])]],
            }
            for number, each in enumerate(row["documents"], 1)
        ],
    }


def _parts(text: str, predicted: list[list[int]]) -> list[dict[str, Any]]:
    """Returns the parts of a text in order, each with its printable `text` and whether it is `predicted`."""
    parts, at = list[tuple[str, bool]](), 0
    for start, stop in predicted:
        parts += [(text[at:start], False), (text[start:stop], True)]
        at = stop
    parts.append((text[at:], False))
    return [{"text": printable(part, keep="\n\t"), "predicted": flag} for part, flag in parts if part]
