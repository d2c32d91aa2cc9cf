"""Data sets of the Hugging Face Hub, offline: folders in their form, and the two caches."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import optimus
from optimus.data import documents, files, hub_datasets
from optimus.data.documents import Position, read_batches, read_texts
from optimus.errors import UserError

REVISION = "0123456789abcdef0123456789abcdef01234567"


def texts(split: str, file: int) -> list[str]:
    return [f"{split} {file} {row} " + "word " * (row % 7 + 1) for row in range(150)]


def write_files(folder: Path) -> list[str]:
    """Writes a data set of two splits as Parquet, and returns the texts of its split train."""
    folder.mkdir(parents=True)
    for split, count in (("train", 3), ("test", 1)):
        for file in range(count):
            rows = texts(split, file)
            table = pa.table({"text": rows, "id": range(len(rows)), "meta": [{"body": row.upper()} for row in rows]})
            pq.write_table(table, folder / f"{split}-{file:05d}-of-{count:05d}.parquet", row_group_size=40)
    return [text for file in range(3) for text in texts("train", file)]


def write_configurations(folder: Path) -> None:
    """Writes a data set with the configurations en and de, in JSON lines, named by its README as on the Hub."""
    (folder / "en").mkdir(parents=True)
    (folder / "de").mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files: en/*.jsonl.gz\n- config_name: de\n  data_files:\n"
        "  - split: train\n    path: de/train.jsonl\n  - split: test\n    path: de/test.jsonl\n---\n"
    )
    with gzip.open(folder / "en" / "0.jsonl.gz", "wt") as file:
        for text in texts("en", 0):
            chat = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"text": text, "messages": chat}) + "\n")
    for name in ("train", "test"):
        (folder / "de" / f"{name}.jsonl").write_text(f'{{"text": "eins {name}"}}\n{{"text": "zwei"}}\n')


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    import datasets
    from huggingface_hub import constants

    for library in (constants, datasets.config):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")


@pytest.fixture
def cached(tmp_path):
    """The data set org/languages in the cache of the Hub, as `hf download` leaves it."""
    folder = tmp_path / "home" / "hub" / "datasets--org--languages"
    write_configurations(folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)


def read(*inputs: str, split: str | None = "train", text_field: str = "text") -> list[str]:
    return [text for text, _ in read_texts(files.resolve(inputs, split=split), text_field)]


def test_a_folder(tmp_path, monkeypatch):
    expected = write_files(tmp_path / "ds")
    assert read(f"hf:{tmp_path / 'ds'}") == expected
    assert read(f"hf:{tmp_path / 'ds'}:default") == expected
    assert read(f"hf:{tmp_path / 'ds'}", split="test") == texts("test", 0)
    assert read(f"hf:{tmp_path / 'ds'}", text_field="{id}: {meta.body}".replace("{id}: ", "")) == [
        t.upper() for t in expected
    ]
    monkeypatch.chdir(tmp_path)
    assert read("hf:ds") == read("hf:./ds") == expected
    found = files.resolve(["hf:ds"], split="train").files
    assert [str(source.path) for source in found][1] == "hf:ds[train]/train-00001-of-00003.parquet"
    assert [source.size for source in found] == [path.stat().st_size for path in sorted(Path("ds").glob("train*"))]
    assert len({source.modified_ns for source in found}) == 3


def test_caches(tmp_path, cached):
    assert read("hf:org/languages:en") == texts("en", 0)
    assert read(f"hf:org/languages@{REVISION}:de", split="test") == ["eins test", "zwei"]


def test_the_cache_of_datasets(tmp_path, monkeypatch):
    """`load_dataset` finds in its own cache what it has loaded once."""
    import datasets

    write_files(tmp_path / "ds")
    builder = datasets.load_dataset_builder(str(tmp_path / "ds"))
    builder.download_and_prepare()
    built = Path(builder.cache_dir)
    theirs = tmp_path / "home" / "datasets" / "org___words" / "default" / "0.0.0" / REVISION
    theirs.parent.mkdir(parents=True)
    built.rename(theirs)
    for file in theirs.glob("*.arrow"):
        file.rename(file.with_name(file.name.replace("ds-", "words-")))
    info = json.loads((theirs / "dataset_info.json").read_text())
    for split in info["splits"].values():
        split["dataset_name"] = "words"
    (theirs / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "words"}))
    assert read("hf:org/words", split="test") == texts("test", 0)


def test_resume_at_every_batch(tmp_path, monkeypatch):
    """Reading from the position after any batch gives the rest."""
    expected = write_files(tmp_path / "ds")
    monkeypatch.setattr(documents, "BLOCK", 2000)
    sources = files.resolve([f"hf:{tmp_path / 'ds'}"], split="train")
    batches = list(read_batches(sources, Position(0), "text", lambda text: []))
    assert len(batches) > 6
    assert [text for batch in batches for text in batch.texts] == expected
    assert [batch.read for batch in batches] == sorted(batch.read for batch in batches)
    done = 0
    for batch in batches:
        done += len(batch.texts)
        rest = read_batches(sources, batch.after, "text", lambda text: [])
        assert [text for each in rest for text in each.texts] == expected[done:]


def rows(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(path) for path in sorted(folder.glob("shard-*.npy"))])


def test_prepare(tmp_path, tokenizer_file, monkeypatch):
    """The same bytes as from the files themselves, for any number of workers, also after an interruption."""
    write_files(tmp_path / "ds")
    common = {"tokenizer": tokenizer_file, "context": 32, "seed": 2}
    plain = optimus.prepare(f"{tmp_path}/ds/train*", tmp_path / "plain", workers=1, **common)
    named = f"hf:{tmp_path / 'ds'}"
    two = optimus.prepare(named, tmp_path / "two", split="train", workers=2, **common)
    assert two["shards"] == plain["shards"]
    assert two["documents"] == 450
    assert two["sources"][0]["files"] == 3

    class StopError(Exception):
        pass

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenise" and done and (tmp_path / "three.partial" / "tokens.bin").stat().st_size:
            raise StopError

    monkeypatch.setattr(documents, "BLOCK", 2000)
    monkeypatch.setattr("optimus.data.stream_writer.COMMIT_SECONDS", 0)
    with pytest.raises(StopError):
        optimus.prepare(named, tmp_path / "three", split="train", workers=1, progress=stop, **common)
    skipped = []
    tables = hub_datasets.HubShard.tables
    monkeypatch.setattr(hub_datasets.HubShard, "tables", lambda self, skip: skipped.append(skip) or tables(self, skip))
    three = optimus.prepare(named, tmp_path / "three", split="train", workers=1, **common)
    assert three["shards"] == plain["shards"]
    assert max(skipped) > 0, "reading went on within a file"


def test_changed_between_calls(tmp_path, tokenizer_file, monkeypatch):
    write_files(tmp_path / "ds")
    call = {"tokenizer": tokenizer_file, "context": 32, "split": "train", "workers": 1}

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "shard":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimus.prepare(f"hf:{tmp_path / 'ds'}", tmp_path / "data", progress=stop, **call)
    first = next(iter(sorted((tmp_path / "ds").glob("train*"))))
    pq.write_table(pa.table({"text": ["other text"] * 200}), first)
    with pytest.raises(UserError, match="unfinished run with other settings"):
        optimus.prepare(f"hf:{tmp_path / 'ds'}", tmp_path / "data", **call)


def test_a_trained_tokenizer_and_conversations(tmp_path, cached):
    index = optimus.prepare(
        "hf:org/languages:en", tmp_path / "data", train_tokenizer=300, context=16, split="train", workers=1
    )
    assert index["tokenizer"]["vocab_size"] == 300
    shown = optimus.preview("hf:org/languages:en", split="train", text_field="chat:messages")
    assert shown[0]["source"] == "hf:org/languages:en[train]/0.jsonl.gz"
    begin, end = shown[0]["predicted"][0]
    assert shown[0]["text"][begin:end].startswith("en 0 0")


@pytest.mark.parametrize(
    ("named", "split", "message"),
    [
        ("hf:{folder}", None, r"has the splits train, test: choose one with `split`"),
        ("hf:{folder}", "validation", r"has the splits train, test, but not validation"),
        ("hf:{folder}:fr", "train", r"has the configurations default, but not fr"),
        ("hf:org/languages", "train", r"has the configurations en, de: name one, as in hf:org/languages:en"),
        (
            "hf:org/languages:fr",
            "train",
            r"has the configurations en, de, but not fr: name one, as in hf:org/languages:en",
        ),
        (
            "hf:org/absent",
            "train",
            r"cannot read hf:org/absent: it is not in the cache, and the Hugging Face Hub cannot",
        ),
        ("hf:", "train", r"input not found: hf:"),
        ("hf:a/b/c", "train", r"input not found: hf:a/b/c \(no such folder"),
        ("hf:./absent", "train", r"input not found: hf:\./absent"),
    ],
)
def test_bad_names(tmp_path, cached, named, split, message):
    write_files(tmp_path / "ds")
    with pytest.raises(UserError, match=message):
        read(named.format(folder=tmp_path / "ds"), split=split)


def test_a_split_without_splits(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="no input has splits"):
        files.resolve([tmp_path / "a.txt"], split="train")


def test_gated_and_absent_repositories(monkeypatch):
    import datasets

    def refuse(*args: object, **options: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/x' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(UserError, match=r"cannot read hf:org/x: Dataset 'org/x' is a gated dataset on the Hub\. Check"):
        read("hf:org/x")


def test_without_datasets(tmp_path, monkeypatch):
    write_files(tmp_path / "ds")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the package datasets\. .*hf"):
        read(f"hf:{tmp_path / 'ds'}")


def test_bad_rows_and_files(tmp_path):
    write_files(tmp_path / "ds")
    with pytest.raises(UserError, match=r"train-00000-of-00003.parquet: no column 'words'"):
        read(f"hf:{tmp_path / 'ds'}", text_field="words")
    with pytest.raises(UserError, match=r"train-00000-of-00003.parquet: row 1: field 'id' is a number"):
        read(f"hf:{tmp_path / 'ds'}", text_field="id")
    broken = tmp_path / "ds" / "train-00001-of-00003.parquet"
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"cannot read hf:.*ds\[train\]/train-00001-of-00003.parquet: "):
        read(f"hf:{tmp_path / 'ds'}")
