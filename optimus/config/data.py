"""The section `data`: the sources of the training tokens."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from optimus.config.sizes import parse_count
from optimus.section import PathOrUrl, Section, reported_as_value


def _count(value: Any) -> Any:
    is_integer = isinstance(value, float) and value.is_integer()  # such as 2e9
    return int(value) if is_integer else reported_as_value(parse_count, value)


Count = Annotated[int, Field(gt=0), BeforeValidator(_count)]  # number of tokens or steps, also written as 2e9 or 300B


class SourceConfig(Section):
    """A source of training tokens. One of `weight`, `tokens` and `epochs` sets the source's share of the data; the
    default is weight 1."""

    path: PathOrUrl = Field(description="Folder written by `optimus prepare`, or its URL if fsspec can read it.")
    name: str | None = Field(None, description="Name in metrics and messages. Default: the name of the folder.")
    weight: float | None = Field(None, ge=0)
    """Weight of the source. The sources with `tokens` or `epochs` get their tokens first; the other sources divide the
    remaining tokens in proportion to their weights. A run reads a source with a weight at most once, apart from
    replay."""
    tokens: Count | None = Field(None, description="Number of tokens to read, also as 2e9 or 300B.")
    epochs: float | None = Field(None, gt=0, description="Number of passes over the source.")

    @model_validator(mode="after")
    def _share(self) -> "SourceConfig":
        if len(given := self.non_default("weight", "tokens", "epochs")) > 1:
            raise ValueError(f"{' and '.join(given)} are given: keep one of them")
        return self

    @property
    def label(self) -> str:
        """The configured name or, by default, the name of the folder."""
        return self.name or Path(self.path).name

    @property
    def folder(self) -> str:
        """The real path of the folder, or the URL without trailing slashes."""
        return self.path.rstrip("/") if "://" in self.path else os.path.realpath(self.path)

    @property
    def share(self) -> float | None:
        """The weight, by default 1; None if `tokens` or `epochs` gives the amount."""
        return None if self.tokens or self.epochs else 1.0 if self.weight is None else self.weight


class DataConfig(Section):
    """The training data: a folder, a dataset or several sources. A list of sources may replace the section."""

    path: PathOrUrl | None = Field(
        None, description="Folder written by `optimus prepare`, or its URL; the short form of a single source."
    )
    sources: list[SourceConfig] = Field([], description="Sources to mix.")
    dataset: str | None = None
    """A dataset in place of a prepared folder, as package.module.name: a map-style dataset, a resumable iterator, or a
    function that returns such a dataset. The value `argument` means the dataset that `optimus.train` gets as its
    argument `data`."""
    tokenizer: str | None = None
    """The tokenizer of the `dataset`: a tokenizer.json, or a folder that contains one."""
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
        if self.tokenizer is not None and self.dataset is None:
            raise ValueError("tokenizer applies to dataset only; a prepared folder has its tokenizer: remove it")
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
        """The list of sources; `path` and `dataset` count as a single source."""
        if self.dataset is not None:
            return [SourceConfig(path=f"{self.dataset} (dataset)", name=self.dataset)]
        return self.sources or [SourceConfig(path=str(self.path))]
