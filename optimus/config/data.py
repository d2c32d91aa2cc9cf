"""The section `data`: the sources of the training tokens."""

import os
import re
from glob import has_magic
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, model_validator

from optimus.config.sizes import parse_count
from optimus.copies import is_protocol
from optimus.section import PathOrUrl, Section, reported_as_value


def _count(value: Any) -> Any:
    is_integer = isinstance(value, float) and value.is_integer()
    return int(value) if is_integer else reported_as_value(parse_count, value)


def split_format(path: str) -> tuple[str | None, str]:
    """Returns the format and the rest of a path such as megatron:PREFIX; (None, path) for a plain path and for a URL."""
    found = re.fullmatch("([a-z][a-z0-9_]*):(?!//)(.+)", path)
    if found is None or (found[2].startswith("/") and is_protocol(found[1])):  # a URL may have one slash, as in s3:/b
        return None, path
    return found[1], found[2]


def _with_format(path: str) -> str:
    name, rest = split_format(path)
    expanded: str = TypeAdapter(PathOrUrl).validate_python(rest)
    if name is None:  # `Path` drops ./ from the name of a folder with a colon
        return expanded if split_format(expanded)[0] is None else f"./{expanded}"
    return f"{name}:{expanded}"


TokensPath = Annotated[str, AfterValidator(_with_format)]  # a path or URL, or FORMAT:PATH
Count = Annotated[int, Field(gt=0), BeforeValidator(_count)]  # number of tokens or steps, also written as 2e9 or 300B


class SourceConfig(Section):
    """A source of training tokens. One of `weight`, `tokens` and `epochs` sets the source's share of the data; default:
    weight 1."""

    path: TokensPath = Field(
        description="Folder written by `optimus prepare`, or its URL if fsspec can read it. Or token files of another "
        "trainer: megatron:PREFIX (PREFIX.bin, PREFIX.idx), npy:GLOB (flat files of OLMo-core), mds:FOLDER (MosaicML)."
    )
    name: str | None = Field(None, description="Name in metrics and messages. Default: the name of the folder.")
    weight: float | None = Field(None, ge=0)
    """Weight of the source. The sources with weights divide the tokens that sources with `tokens` or `epochs` leave, in
    proportion to the weights."""
    tokens: Count | None = Field(None, description="Number of tokens to read, also as 2e9 or 300B.")
    epochs: float | None = Field(None, gt=0, description="Number of passes over the source.")

    @model_validator(mode="after")
    def _share(self) -> "SourceConfig":
        if len(given := self.non_default("weight", "tokens", "epochs")) > 1:
            raise ValueError(f"{' and '.join(given)} are given: keep one of them")
        return self

    @property
    def label(self) -> str:
        """The configured name, or the last part of the path without wildcards."""
        parts = [part for part in Path(os.path.abspath(split_format(self.path)[1])).parts if not has_magic(part)]
        return self.name or parts[-1].strip("/") or self.path

    @property
    def format(self) -> str | None:
        """The format of token files of another trainer; None for a folder of `optimus prepare`."""
        return split_format(self.path)[0]

    @property
    def folder(self) -> str:
        """The real path of the folder or files, with their format, or the URL without trailing slashes."""
        name, path = split_format(self.path)
        real = path.rstrip("/") if "://" in path else os.path.realpath(path)
        return real if name is None else f"{name}:{real}"

    @property
    def share(self) -> float | None:
        """The weight, by default 1; None with `tokens` or `epochs`."""
        return None if self.tokens or self.epochs else 1.0 if self.weight is None else self.weight


class DataConfig(Section):
    """The training data: a folder, a dataset, or sources. A list of sources may replace the section."""

    path: TokensPath | None = Field(
        None,
        description="Folder written by `optimus prepare`, its URL, or token files; the short form of a single source.",
    )
    sources: list[SourceConfig] = Field([], description="Sources to mix.")
    dataset: str | None = None
    """A dataset in place of a prepared folder, as package.module.name: a map-style dataset, a resumable iterator, or a
    function that returns a dataset. `argument`: the argument `data` of `optimus.train`."""
    tokenizer: str | None = None
    """The tokenizer of the `dataset` or of token files of another trainer: a tokenizer.json, or a folder that contains
    one."""
    documents: Literal["ignore", "mask"] = "ignore"
    """Boundaries of documents within a sequence. ignore: tokens attend to earlier documents; mask: attention and
    positions stay within each document, and the first token of a document is not predicted. Default in a phase: the
    value of `data.documents`."""

    @model_validator(mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return {"sources": value} if isinstance(value, list) else value

    @model_validator(mode="after")
    def _sources(self) -> "DataConfig":
        given = [key for key in ("path", "sources", "dataset") if getattr(self, key)]
        if len(given) != 1:
            which = f"{' and '.join(given)} are given" if given else "path, sources and dataset are missing"
            raise ValueError(f"{which}: give one of them")
        own = self.dataset is not None or any(split_format(each.path)[0] for each in self.mixed)
        if self.tokenizer is not None and not own:
            raise ValueError(
                "tokenizer applies to a dataset or to token files; a prepared folder has its tokenizer: remove it"
            )
        labels = [source.label for source in self.sources]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"sources: two sources are named {min(twice)}: give each a different name")
        spelled: dict[str, str] = {}
        for source in self.sources:
            if (other := spelled.get(source.folder)) is not None:
                both = source.path if other == source.path else f"{source.path}, which is {other},"
                raise ValueError(
                    f"sources: {both} is listed twice, and both entries would read the same rows: list it once"
                )
            spelled[source.folder] = source.path
        shares = [source.share for source in self.sources if source.share is not None]
        if shares and not sum(shares):
            raise ValueError("sources: the weights sum to zero: give one of them a weight above 0")
        return self

    @property
    def mixed(self) -> list[SourceConfig]:
        """The sources; `path` and `dataset` count as a single source."""
        if self.dataset is not None:
            return [SourceConfig(path=f"{self.dataset} (dataset)", name=self.dataset)]
        return self.sources or [SourceConfig(path=str(self.path))]
