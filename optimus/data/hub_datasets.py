"""Finds and reads data sets of the Hugging Face Hub, `hf:org/name[@revision][:config]`, and folders in their form.

The library `datasets` finds the files of a split and reads their rows. An input is one data file of the split, so that a
preparation resumes within the file where it stopped.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from optimus.disk import user_path
from optimus.errors import UserError, how_to_install, said

PREFIX = "hf:"
_ROWS = 64  # rows of a table that is read at once


@dataclass(frozen=True)
class HubShard:
    """A data file of the split of a data set, with some methods of `Path`."""

    dataset: str  # as the user names it, without the prefix
    split: str
    number: int
    file: str  # the path of the file in the data set
    revision: str | None
    size: int = field(compare=False)
    version: int = field(compare=False)
    """Hash of the revision, or of the modification times of a local folder's files."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.dataset}[{self.split}]/{self.file}"

    @property
    def name(self) -> str:
        return PurePosixPath(self.file).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.file).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.file).suffix

    def resolve(self) -> "HubShard":
        return self

    def is_relative_to(self, folder: Path) -> bool:
        """Returns False, because the files of a data set are no outputs of `prepare`."""
        return False

    def open(self, mode: str) -> AbstractContextManager[BinaryIO]:
        raise TypeError(f"{self} has rows, not bytes: read its tables")

    def tables(self, skip: int) -> Iterator[Any]:
        """Yields the rows from row `skip` on as tables of `pyarrow`. Raises `UserError` if the rows cannot be read."""
        with _naming(f"cannot read {self}"):
            rows = _streamed(self.dataset, self.split, self.revision, self.version)
            if rows.num_shards > 1:
                rows = rows.shard(num_shards=rows.num_shards, index=self.number)
            if skip:
                rows = rows.skip(skip)
            tables = rows.with_format("arrow").iter(batch_size=_ROWS)
        while True:
            # Only the reading is here: an error of the caller must pass unchanged.
            with _naming(f"cannot read {self}"):
                table = next(tables, None)
            if table is None:
                return
            yield table


@dataclass(frozen=True)
class _Dataset:
    """The name of a data set: a repository with a revision, or a folder; and a configuration."""

    path: str
    revision: str | None
    config: str | None

    @classmethod
    def parse(cls, named: str) -> "_Dataset":
        """Parses `org/name[@revision][:config]` or `folder[:config]`."""
        for text, config in [(named, None), tuple(named.rpartition(":")[::2])]:
            if text and (folder := user_path(text)).is_dir():
                return cls(str(folder.resolve()), None, config)
        text, _, config = named.partition(":")
        path, _, revision = text.partition("@")
        if path.count("/") > 1 or not path.strip("/") or text.startswith((".", "/", "~")):
            raise UserError(
                f"input not found: {PREFIX}{named} (no such folder, and no name of the form hf:org/name:config)"
            )
        return cls(path, revision or None, config or None)


def is_hub_dataset(named: str | Path) -> bool:
    return str(named).startswith(PREFIX) and "://" not in str(named)


def expand(named: str, split: str | None) -> Iterator[tuple[HubShard, str]]:
    """Yields the data files of the `split` of a data set, each with its path in the data set.

    Raises `UserError` for a data set, configuration or split that does not exist or cannot be read.
    """
    dataset = named.removeprefix(PREFIX)
    builder = _builder(dataset, None)  # not from a cache of this process: a folder may have changed
    files = getattr(builder.config, "data_files", None)
    infos = builder.info.splits or {}
    splits = [str(each) for each in files or infos]
    if split not in splits:
        given = "" if split is None else f", but not {split}"
        raise UserError(f"{named} has the splits {', '.join(splits)}{given}: choose one with `split`")
    revision = _revision(dataset, builder)
    with _naming(f"cannot read {named}"):
        count = builder.as_streaming_dataset(split=split).num_shards
    found = [str(file) for file in files[split]] if files else []
    origins: list[Any] = list(files[split].origin_metadata) if files else []
    if len(found) == len(origins) == count:
        sizes = [_size(named, file) for file in found]
        names = _relative(found)
    else:  # from a cache, or archives with several files
        total = infos[split].num_bytes if split in infos else sum(_size(named, file) for file in found)
        sizes = [(total or 0) // count] * count
        names = [f"{number:05d}" for number in range(count)]
        origins = [(builder.hash, str(builder.config.version), origins)] * count
    for number, (name, size, origin) in enumerate(zip(names, sizes, origins)):
        version = int.from_bytes(hashlib.sha256(repr((revision, origin)).encode()).digest()[:8], "big")
        yield HubShard(dataset, split, number, name, revision, size, version), f"{split}/{name}"


def _revision(dataset: str, builder: Any) -> str | None:
    """Returns the commit that `builder` reads, or None for a local folder and for a data set from a cache."""
    path = _Dataset.parse(dataset).path
    found = str(builder.hash)
    is_commit = (
        len(found) == 40 and not Path(path).is_dir() and "hf://" in str(getattr(builder.config, "data_files", ""))
    )
    return found if is_commit else None


def _relative(files: Sequence[str]) -> list[str]:
    """Returns the paths of files relative to their common folder, without an archive's or a repository's prefix."""
    folders = [PurePosixPath(file).parts[:-1] for file in files]
    shared = 0
    while all(len(each) > shared and each[shared] == folders[0][shared] for each in folders):
        shared += 1
    return [str(PurePosixPath(*PurePosixPath(file).parts[shared:])) for file in files]


def _size(named: str, file: str) -> int:
    from fsspec.core import url_to_fs

    with _naming(f"cannot read {named}"):
        system, path = url_to_fs(file)
        return int(system.info(path).get("size") or 0)


@lru_cache(maxsize=8)
def _streamed(dataset: str, split: str, revision: str | None, version: int) -> Any:
    """Returns the rows of a split as a `datasets.IterableDataset`. `version` tells states of a folder apart."""
    return _builder(dataset, revision).as_streaming_dataset(split=split)


def _builder(dataset: str, revision: str | None) -> Any:
    """Returns the `datasets.DatasetBuilder` of a data set: from the Hub, from its caches, or from a folder."""
    named = _Dataset.parse(dataset)
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{PREFIX}{dataset} needs the package datasets. {how_to_install('hf')}") from error
    revision = revision or named.revision
    with _naming(f"cannot read {PREFIX}{dataset}"):
        try:
            return _of_configuration(dataset, named.path, named.config, revision)
        except datasets.exceptions.DatasetNotFoundError as error:
            raise UserError(
                f"cannot read {PREFIX}{dataset}: {_sentence(error)}. Check the name. For a gated or private data set, ask "
                "for access on its page, and log in with `hf auth login`"
            ) from error
        except ConnectionError as error:
            folder = _downloaded(named.path, revision)
            if folder is None:
                raise UserError(
                    f"cannot read {PREFIX}{dataset}: it is not in the cache, and the Hugging Face Hub cannot be reached "
                    f"({_sentence(error)}). Check the name and the network"
                ) from error
            return _of_configuration(dataset, folder, named.config, None)


def _of_configuration(dataset: str, path: str, config: str | None, revision: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset_builder(path, config, revision=revision)
    except ValueError as error:
        try:
            configs = datasets.get_dataset_config_names(path, revision=revision)
        except Exception:
            configs = []
        if configs and config not in configs and (config is not None or len(configs) > 1):
            but = "" if config is None else f", but not {config}"
            raise UserError(
                f"{PREFIX}{dataset} has the configurations {', '.join(configs)}{but}: name one, as in "
                f"{PREFIX}{dataset.removesuffix(f':{config}')}:{configs[0]}"
            ) from error
        raise


def _downloaded(path: str, revision: str | None) -> str | None:
    """Returns the folder of a data set in the cache of the Hub, or None."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(path, repo_type="dataset", revision=revision, local_files_only=True)
    except Exception:  # not there, or no valid name
        return None


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turns an exception in the context into a `UserError` that begins with `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the readers of `datasets` and the network have many types of errors
        raise UserError(f"{what}: {said(error)}") from error


def _sentence(error: BaseException) -> str:
    return said(error).partition(": ")[2].rstrip(".")
