"""The commands `sample-text`, `prepare` and `data`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from optimus.cli.common import Json, ParseSpecial, Plugins, app, but, show, with_options
from optimus.errors import UserError

_OPEN, _CLOSE = "\N{LEFT DOUBLE ANGLE BRACKET}", "\N{RIGHT DOUBLE ANGLE BRACKET}"  # around what the model predicts
_SHOWN = 1600  # characters of a document that `--preview` prints


@app.command(name="sample-text")
def sample_text(
    output: Annotated[Path, Option(help="Folder to create.")],
    as_json: Json = False,
) -> None:
    """Write sample text for a first model: the sources of Python's standard library."""
    from optimus.api import sample_text as run
    from optimus.config.sizes import size_text

    made = run(output)
    text = f"{made['output']}/train: {made['files']:,} files; {made['output']}/held-out: {made['held_out']:,} for validation"
    show(made, as_json, f"{text}; {size_text(made['bytes'])}")


@app.command()
def prepare(
    inputs: Annotated[
        list[str], Argument(metavar="INPUT", help="Files, folders or globs of text, their URLs, or hf:org/name:config.")
    ],
    output: Annotated[Path | None, Option(help="Folder to create. Not needed with --preview and --status.")] = None,
    tokenizer: Annotated[
        Path | None,
        Option(
            help="tokenizer.json, sentencepiece model, tiktoken vocabulary, a folder with one, or org/name on the Hub."
        ),
    ] = None,
    train_tokenizer: Annotated[int | None, Option(help="Train a tokenizer with this vocabulary size.")] = None,
    context: Annotated[int, Option(help="Tokens per training sequence.")] = 2048,
    seed: Annotated[int, Option(help="Seed of the shuffle.")] = 0,
    workers: Annotated[int | None, Option(help="Number of worker processes. Default: one per core.")] = None,
    shard_size: Annotated[str, Option(help="Maximum size of a shard.")] = "512MB",
    text_field: Annotated[
        str,
        Option(
            help="Field or column that contains the text: text, meta.body, a template such as '{question} {answer}', or "
            "chat:messages or chat:prompt+completion for conversations, of which only the answers are predicted."
        ),
    ] = "text",
    parse_special: ParseSpecial = False,
    pack: Annotated[
        Literal["concatenate", "best-fit"], Option(help="best-fit: cut only documents longer than the context.")
    ] = "concatenate",
    min_characters: Annotated[int, Option(help="Leave out documents with fewer characters.")] = 0,
    max_characters: Annotated[int | None, Option(help="Leave out documents with more characters.")] = None,
    min_tokens: Annotated[int, Option(help="Leave out documents with fewer tokens, end of text included.")] = 0,
    max_tokens: Annotated[
        int | None, Option(help="Leave out documents with more tokens, end of text included.")
    ] = None,
    dedup: Annotated[
        Literal["none", "exact", "minhash"],
        Option(help="Keep only the first of equal (exact) or nearly equal (minhash) documents."),
    ] = "none",
    exclude: Annotated[
        list[str] | None,
        Option(
            metavar="PATH", help="Leave out documents with text of this evaluation set, or folder of sets; repeated."
        ),
    ] = None,
    exclude_words: Annotated[int, Option(help="Number of words in a row that are text of an evaluation set.")] = 13,
    encoding: Annotated[str, Option(help="Encoding of files that are not UTF-8, such as cp1252 or utf-16.")] = "utf-8",
    split: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Split of an hf: data set, or of a folder that DatasetDict.save_to_disk wrote, such as train.",
        ),
    ] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip files that cannot be read, and list them.")] = False,
    to: Annotated[
        Literal["optimus", "megatron", "npy"],
        Option(
            help="Write the documents in order for another trainer: Megatron-LM's .bin and .idx, or OLMo-core's .npy."
        ),
    ] = "optimus",
    plugins: Plugins = None,
    tasks: Annotated[
        str | None,
        Option(
            metavar="N",
            help="Number of processes, on any machines, that prepare this output together; array: from the job.",
        ),
    ] = None,
    task: Annotated[
        int | None, Option(metavar="I", help="Number of this task, from 0. Default: from the array job that runs it.")
    ] = None,
    stage: Annotated[
        Literal["all", "streams", "shards"],
        Option(help="Tasks only tokenise (streams), or only write shards (shards). Default: what can be done."),
    ] = "all",
    memory: Annotated[
        str | None,
        Option(metavar="SIZE", help="Memory for duplicates and the shuffle. Default: a quarter of the machine's."),
    ] = None,
    status: Annotated[
        bool, Option("--status", help="Print the progress of the tasks whose output is the folder INPUT.")
    ] = False,
    preview: Annotated[
        bool, Option("--preview", help="Print three documents as the model reads them, and write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tokenise, shuffle and shard text into training data."""
    given = but(locals(), "shard_size", "as_json", "preview", "status", "tasks", "memory") | {"exclude": exclude or ()}
    if status:
        _status(inputs, as_json)
        return
    if preview:
        _preview(given, as_json)
        return
    if output is None:
        raise UserError("no output: give the folder to create (--output FOLDER)")
    from optimus.api import prepare as run
    from optimus.config.sizes import counted, parse_size
    from optimus.copies import url_text
    from optimus.observe.progress import ProgressBar
    from optimus.observe.signals import ended_by_signals

    say = "stopping; the progress is saved, and the same command continues it"
    with ended_by_signals(say), ProgressBar() as progress:
        index = run(
            **given,
            shard_size=parse_size(shard_size),
            memory=None if memory is None else parse_size(memory),
            tasks=_number_of_tasks(tasks),
            progress=progress.update,
        )
    if "states" in index:
        _show_status(index, as_json)
        return
    if to != "optimus":
        show(index, as_json, f"{_token_files(url_text(output), index)}{_omissions(index)}")
        return
    rest = f"the last {index['dropped_tokens']} tokens do not fill a sequence and are dropped"
    if pack == "best-fit":
        padding = index["padding_tokens"]
        rest = f"{padding:,} of the tokens are padding ({100 * padding / index['tokens']:.2g} %)"
        rest += f"; {index['cut_documents']:,} documents are longer than a sequence and are cut"
    show(
        index,
        as_json,
        f"{url_text(output)}: {index['tokens']:,} tokens of {counted(index['documents'], 'document')} in "
        f"{counted(index['instances'], 'sequence')} of {context}, {counted(len(index['shards']), 'shard')}; "
        f"{rest}{_template(index)}{_omissions(index)}",
    )


def _token_files(output: str, index: dict[str, Any]) -> str:
    """Returns lines about the token files of another trainer in `output`."""
    from optimus.config.sizes import counted
    from optimus.data.shards import token_files_name

    files = {each["file"] for each in index["blocks"]}
    counts = f"{index['tokens']:,} tokens of {counted(index['documents'], 'document')} in {counted(len(files), 'file')}"
    path = token_files_name(output, index)
    return f"{output}: {counts}; train on them with data.path={path} data.tokenizer={output}"


def _number_of_tasks(text: str | None) -> int | Literal["array"] | None:
    if text is None or text == "array":
        return None if text is None else "array"
    if not text.isdecimal():
        raise UserError(f"--tasks is {text}: give a number, or array to take it from the array job")
    return int(text)


def _status(folders: list[str], as_json: bool) -> None:
    from optimus.api import prepare_status

    if len(folders) != 1:
        raise UserError(f"--status takes one folder, not {len(folders)}: give the output of the tasks")
    _show_status(prepare_status(folders[0]), as_json)


def _show_status(status: dict[str, Any], as_json: bool) -> None:
    from optimus.config.sizes import counted
    from optimus.data.tasks import status_text

    done = status["tasks"] - len(status["missing"])
    text = f"{done} of {counted(status['tasks'], 'task')} done"
    if status["complete"]:
        text = f"complete: {counted(status['shards'], 'shard')}"
    elif status["missing"]:
        text += f"\n{status_text(status)}"
    else:
        text += f"; {counted(status['shards'], 'shard')} written: any task writes the rest (--stage shards)"
    show(status, as_json, text)


def _preview(arguments: dict[str, Any], as_json: bool) -> None:
    from optimus.api import preview as run

    names = ("inputs", "tokenizer", "text_field", "parse_special", "encoding", "split", "plugins")
    found = run(**{name: arguments[name] for name in names if arguments[name] is not None})
    show(found, as_json, "\n\n".join(_shown(each) for each in found))


def _shown(example: dict[str, Any]) -> str:
    """Returns an example of `preview` as text, with the predicted spans in brackets unless all of it is predicted."""
    from optimus.disk import printable

    text, spans = example["text"], example["predicted"]
    size = f"{len(text):,} characters" if example["tokens"] is None else f"{example['tokens']:,} tokens"
    share = sum(end - start for start, end in spans) / max(1, len(text))
    is_all = spans == [[0, len(text)]]
    said = "all predicted" if is_all else f"predicted: {100 * share:.0f} %, in {_OPEN} {_CLOSE}"
    lines = _bracketed(text, [] if is_all else spans, _SHOWN)
    return f"{printable(example['source'])}: {size}, {said}\n{lines}"


def _bracketed(text: str, spans: list[list[int]], most: int | None) -> str:
    """Returns indented lines of a text with the spans in brackets, and at most about `most` characters."""
    from optimus.disk import printable

    for start, end in reversed(spans):
        text = f"{text[:start]}{_OPEN}{text[start:end]}{_CLOSE}{text[end:]}"
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]}\n... {len(text) - most:,} characters ...\n{text[-most // 2 :]}"
    return "\n".join(f"  {printable(line, keep=chr(9))}" for line in text.splitlines())


def _template(index: dict[str, Any]) -> str:
    """Returns a line about the chat template of the prepared conversations, or an empty string."""
    from optimus.data.chat import OURS

    if "chat" not in index:
        return ""
    ours = "the default (`<|user|>`, a line for each turn), because the tokenizer has none"
    return f"\nchat template: {ours if index['chat']['template'] == OURS else 'from the tokenizer'}"


def _omissions(index: dict[str, Any]) -> str:
    """Returns lines about omitted documents and skipped files."""
    from optimus.config.sizes import counted
    from optimus.data.journal import EXCLUSIONS
    from optimus.disk import printable

    omitted = ", ".join(f"{index[why]:,} {why.replace('_', ' ')}" for why in EXCLUSIONS if index.get(why))
    said = f"\nleft out: documents {omitted}" if omitted else ""
    for each in index.get("excluded_sets", []):
        if each["examples"]:
            first = each["examples"][0]
            where = f"document {first['document']:,} of {printable(first['source'])}"
            said += f"\n  {each['name']}: {each['contaminated']:,} contaminated, such as {where}: "
            said += f'"{printable(first["ngram"])}"'
    if bad := index.get("bad_files", []):
        said += f"\nskipped: {counted(len(bad), 'file')} that cannot be read"
        said += "".join(f"\n  {each['name']}: {printable(with_options(each['what']))}" for each in bad)
    by_ending = index.get("skipped_by_ending", {})
    if not by_ending:
        return said
    counts = ", ".join(
        f"{count:,} {printable(ending)}" for ending, count in sorted(by_ending.items(), key=lambda one: -one[1])
    )
    return f"{said}\nskipped: {index['skipped_files']:,} file(s) of other kinds ({counts})"


_BAR = 40  # characters of the longest bar
_SOURCES = 20  # sources that `data` prints
_DOCUMENTS = 4  # documents of a sample row that `data` prints


@app.command(name="data")
def describe_data(
    folder: Annotated[
        str,
        Argument(
            metavar="FOLDER",
            help="Folder that `prepare` wrote, or its URL; or token files: megatron:PREFIX, npy:GLOB, mds:FOLDER.",
        ),
    ],
    row: Annotated[int | None, Option(help="Print only this row (from 0), in full.")] = None,
    rows: Annotated[
        int | None,
        Option(
            help="Rows in which lengths are measured. Default: 4,096, or fewer if rows are long.", show_default=False
        ),
    ] = None,
    html: Annotated[Path | None, Option(help="Also write an HTML page, which needs no network.")] = None,
    tokenizer: Annotated[Path | None, Option(help="Tokenizer of token files: tokenizer.json, or its folder.")] = None,
    context: Annotated[
        int | None, Option(help="Tokens per row of token files. Default: 2048.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, Option(help="Seed of the order of token files. Default: 0.", show_default=False)
    ] = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show what prepared data consists of: counts, sources, lengths of documents, and rows as text."""
    from optimus.api import describe_data as run
    from optimus.api import show_row
    from optimus.errors import UserError

    opened: dict[str, Any] = {"tokenizer": tokenizer, "context": context, "seed": seed, "plugins": plugins or ()}
    if row is not None:
        if html is not None or rows is not None:
            raise UserError("`row` prints one row alone: leave out `html` and `rows`")
        shown = show_row(folder, row, **opened)
        show(shown, as_json, _row_text(shown, None))
        return
    found = run(folder, rows=rows, html=html, **opened)
    written = "" if html is None else f"\n\n{html}: open it in a browser; it needs no network"
    show(found, as_json, "" if as_json else f"{_description(found)}{written}")


def _description(found: dict[str, Any]) -> str:
    """Returns the result of `describe_data` as lines."""
    from optimus.data.description import fact_lines, length_line

    facts = [f"{label:<12}{text}" for label, text in fact_lines(found)]
    lengths = found["lengths"]
    parts = ["\n".join([found["path"], *facts])]
    if sources := _source_lines(found["sources"]):
        parts.append("\n".join(["tokens by source", *sources]))
    about = [f"tokens of a document, end of text included ({length_line(lengths)})"]
    if lengths["count"]:
        quantiles = [
            f"{'median' if each == '50' else f'{each} %'} {value:,}" for each, value in lengths["quantiles"].items()
        ]
        ends = f"{lengths['min']:,} to {lengths['max']:,}, mean {lengths['mean']:,.1f}"
        about.append(f"  {ends}; {', '.join(quantiles)}")
        about += _histogram(lengths["histogram"])
    parts.append("\n".join(about))
    return "\n\n".join([*parts, *(_row_text(each, _DOCUMENTS) for each in found["rows"])])


def _source_lines(sources: list[dict[str, Any]]) -> list[str]:
    from optimus.config.sizes import counted, size_text

    shown = sorted(sources, key=lambda each: -each["tokens"])[:_SOURCES]
    lines = [
        f"  {100 * each['share']:5.1f} %  {each['name']}: {each['tokens']:,} tokens, "
        f"{counted(each['documents'], 'document')}, {counted(each['files'], 'file')}, {size_text(each['text_bytes'])}"
        for each in shown
    ]
    more = len(sources) - len(shown)
    return [*lines, f"  and {counted(more, 'more source')}"] if more else lines


def _histogram(bins: list[dict[str, int]]) -> list[str]:
    labels = [
        f"{each['from']:,}" if each["from"] == each["to"] else f"{each['from']:,}-{each['to']:,}" for each in bins
    ]
    most, width = max(each["count"] for each in bins), max(map(len, labels))
    digits = len(f"{most:,}")
    return [
        f"  {label:>{width}}  {each['count']:>{digits},}  {chr(0x2588) * -(-_BAR * each['count'] // most)}".rstrip()
        for label, each in zip(labels, bins)
    ]


def _row_text(row: dict[str, Any], most: int | None) -> str:
    """Returns a row of `show_row` as text with borders, in full if `most` (documents) is None."""
    from optimus.config.sizes import counted
    from optimus.data.description import border_text

    predicted, real = row["predicted_tokens"], row["tokens"] - row["padding_tokens"]
    said = f", predicted: {predicted:,} of them, in {_OPEN} {_CLOSE}" if predicted < real else ""
    lines = [f"row {row['row']:,}: {row['file']}, byte {row['byte']:,}; {counted(real, 'token')}{said}"]
    for number, each in enumerate(row["documents"][:most], 1):
        text, spans = each["text"], each["predicted"]
        begin = f"--- document {number} of {len(row['documents']):,}: {counted(each['tokens'], 'token')}, "
        lines.append(f"{begin}{border_text(each)} ---")
        shown = _bracketed(text, [] if spans == [[0, len(text)]] else spans, None if most is None else _SHOWN // 4)
        lines += [shown] if shown else []
    if most is not None and len(row["documents"]) > most:
        lines.append(f"--- and {len(row['documents']) - most:,} more: --row {row['row']} prints all ---")
    if row["padding_tokens"]:
        lines.append(f"--- padding: {counted(row['padding_tokens'], 'token')} ---")
    return "\n".join(lines)
