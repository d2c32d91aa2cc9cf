"""The harness of experiments: trains configurations with several seeds, and publishes a table and JSON.

An experiment is a module with a function that takes an `Experiment` and returns a `Result`; `command` makes it a
program. Corpora are files NAME.jsonl or NAME.jsonl.gz of one folder, with a field `text`. Another folder keeps data and
runs under digests of their inputs, so that an experiment that runs again, or continues after a kill, trains only what
is missing.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.harness import Result, Row
from optimus.api import train
from optimus.data.documents import read_texts
from optimus.data.files import resolve
from optimus.data.preparation import prepare
from optimus.disk import read_json_lines, user_path, write_json
from optimus.errors import UserError

VOCAB, CONTEXT, BATCH = 1024, 128, 16
STEP_TOKENS = BATCH * CONTEXT
MODEL: Mapping[str, Any] = {
    "family": "olmo",
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "intermediate": 192,
    "vocab": VOCAB,
}
_PIECE, _HELD_OUT = 2000, 10  # characters of a piece of text; every tenth piece is for validation
_QUICK = 3  # steps


class Trained(NamedTuple):
    """A finished run: its folder, and the last record of its metrics."""

    folder: Path
    record: dict[str, Any]

    def loss(self, name: str) -> float:
        """Returns the final loss of a validation set."""
        return float(self.record[f"loss/{name}"])


class Prepared(NamedTuple):
    """A corpus: folders of prepared data, and the file of the validation text."""

    train: Path
    held_out: Path
    text: Path


@dataclass(frozen=True)
class Experiment:
    """The folders of an experiment; `quick` takes a few steps of everything as a trial."""

    corpus: Path
    folder: Path
    seeds: Sequence[int] = range(2)
    quick: bool = False

    def steps(self, tokens: float) -> int:
        """Returns the steps of so many tokens."""
        return _QUICK if self.quick else round(tokens / STEP_TOKENS)

    def documents(self, name: str) -> list[str]:
        """Returns the texts of a corpus. Raises `UserError` if it does not exist."""
        for suffix in (".jsonl.gz", ".jsonl", ".txt"):
            if (path := self.corpus / f"{name}{suffix}").is_file():
                pieces, found = list[str](), list[str]()
                for text, ends in read_texts(resolve([path]), "text"):
                    pieces.append(text)
                    if ends:
                        found.append("".join(pieces))
                        pieces.clear()
                return found
        raise UserError(f"{self.corpus} has no corpus {name}.jsonl.gz: give --corpus a folder that has it")

    def prepared(self, names: Sequence[str], tokenizer: Path | None = None, **settings: Any) -> dict[str, Prepared]:
        """Prepares corpora with one tokenizer, each with a validation part. `settings` are those of `prepare`.

        Long documents are cut into pieces; whole pieces go to the validation part. By default the tokenizer is trained
        on all.
        """
        texts = {name: [piece for text in self.documents(name) for piece in _pieces(text)] for name in names}
        return self.prepared_texts({name: _divided(pieces) for name, pieces in texts.items()}, tokenizer, **settings)

    def prepared_texts(
        self,
        texts: Mapping[str, tuple[list[str], list[str]]],
        tokenizer: Path | None = None,
        vocabulary: int = VOCAB,
        **settings: Any,
    ) -> dict[str, Prepared]:
        """Prepares documents for training and for validation. A new tokenizer has `vocabulary` entries."""
        settings = {"context": CONTEXT, "workers": 1} | settings
        place = self.folder / "data" / digest([texts, str(tokenizer), vocabulary, settings])
        place.mkdir(parents=True, exist_ok=True)
        if tokenizer is None:
            every = (text for trained, _ in texts.values() for text in trained)
            tokenizer = place / "tokenizer"
            given = [_written(place / "all.jsonl", every)]
            prepare(given, tokenizer, train_tokenizer=vocabulary, context=settings["context"], workers=1)
        found = {}
        for name, parts in texts.items():
            files = [_written(place / f"{name}-{kind}.jsonl", part) for kind, part in zip(("train", "held-out"), parts)]
            for file in files:
                prepare([file], file.with_suffix(""), tokenizer=tokenizer, **settings)
            found[name] = Prepared(files[0].with_suffix(""), files[1].with_suffix(""), files[1])
        return found

    def validation(self, held_out: Mapping[str, Prepared], tokens: int = 1 << 15) -> list[dict[str, Any]]:
        """Returns the section `validation` for the validation parts of corpora."""
        tokens = 1 << 10 if self.quick else tokens
        return [{"name": name, "path": str(each.held_out), "tokens": tokens} for name, each in held_out.items()]

    def train(self, name: str, seed: int, config: Mapping[str, Any], steps: int, **train_keys: Any) -> Trained:
        """Trains a run of `steps` with these sections of a configuration and those that all runs share."""
        section = {"steps": steps} | {**_TRAIN, "seed": seed} | train_keys | dict(config.get("train", {}))
        if config.get("phases"):
            del section["steps"]
        tree = {**_SECTIONS, "model": MODEL, **config, "train": section}
        folder = self.folder / "runs" / f"{name}-{seed}-{digest(tree)}"
        path = folder / "metrics.jsonl"
        records = read_json_lines(path) if path.exists() else []
        if not records or records[-1]["step"] < steps:
            train({**tree, "train": section | {"output": str(folder)}}, resume="auto")
            records = read_json_lines(path)
            if records[-1]["step"] < steps:
                raise UserError(f"{name} was stopped after step {records[-1]['step']}: run the experiment again")
            losses = "  ".join(f"{k} {v:.4f}" for k, v in records[-1].items() if k.startswith("loss/"))
            print(f"{name}, seed {seed}: {losses or format(records[-1]['loss'], '.4f')}", flush=True)
        return Trained(folder, records[-1])

    def train_all(self, configs: Mapping[str, Mapping[str, Any]], steps: int) -> dict[str, list[Trained]]:
        """Trains all configurations with every seed; returns the runs by name."""
        found: dict[str, list[Trained]] = {name: [] for name in configs}
        for seed in self.seeds:
            for name, config in configs.items():
                found[name].append(self.train(name, seed, config, steps))
        return found


_TRAIN = {
    "global_batch": BATCH,
    "micro_batch": BATCH,
    "sequence_length": CONTEXT,
    "precision": "float32",
    "device": "cpu",
}
_SECTIONS: Mapping[str, Any] = {
    "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4},
    "checkpoint": {"every": 1_000_000, "keep": 1},
    "observe": {"tensorboard": False, "report": False, "log_every": 1_000_000},
    "tuning": {"matmul": False},
}


def mean_rows(found: Mapping[str, Sequence[Trained]], names: Sequence[str]) -> list[Row]:
    """Returns a row per configuration: for each validation loss, the mean over the seeds and the standard deviation."""
    rows = []
    for config, runs in found.items():
        row: Row = {"configuration": config, "seeds": len(runs)}
        for name in names:
            row[name], row[f"{name} sd"] = mean_and_deviation([run.loss(name) for run in runs])
        rows.append(row)
    return rows


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and the standard deviation, which is 0 for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def command(name: str, function: Callable[[Experiment], Result]) -> None:
    """Runs an experiment with the arguments of this program."""

    def main(
        corpus: Annotated[Path, typer.Option(help="Folder of corpora, NAME.jsonl.gz or NAME.jsonl.")],
        folder: Annotated[Path, typer.Option(help="Folder of data and runs.")] = Path("experiments"),
        seeds: Annotated[int, typer.Option(help="Number of seeds of every configuration.")] = 2,
        quick: Annotated[bool, typer.Option("--quick", help="Take only a few steps, as a trial.")] = False,
        output: Annotated[Path | None, typer.Option(help="Also write the result to this JSON file.")] = None,
    ) -> None:
        try:
            experiment = Experiment(user_path(corpus), user_path(folder), range(1 if quick else seeds), quick)
            document = function(experiment).publish(name)
        except UserError as error:
            raise SystemExit(f"error: {error}") from error
        if output is not None:
            write_json(user_path(output), document)

    main.__doc__ = function.__doc__
    typer.run(main)


def digest(value: Any) -> str:
    """Returns a short digest of the value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:10]


def _pieces(text: str) -> Iterable[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def _divided(pieces: Sequence[str]) -> tuple[list[str], list[str]]:
    held_out = [number % _HELD_OUT == _HELD_OUT - 1 for number in range(len(pieces))]
    return [p for p, held in zip(pieces, held_out) if not held], [p for p, held in zip(pieces, held_out) if held]


def _written(path: Path, texts: Iterable[str]) -> Path:
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        partial.replace(path)
    return path
