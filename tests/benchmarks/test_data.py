"""The data benchmark reports the documents and padding that `prepare` finds; its ratios follow from the rows."""

import json
from pathlib import Path

import pytest

from benchmarks import data
from optimus.data.preparation import prepare
from optimus.data.shards import Shards


@pytest.mark.in_turn(3, 5)
def test_rows_and_ratios(tmp_path: Path, prepared: Path) -> None:
    files = [tmp_path / "short.jsonl", tmp_path / "long.jsonl"]
    for file, words in zip(files, (30, 500)):
        texts = [" ".join(f"word{n * k % 89}" for k in range(words)) for n in range(600 // words + 2)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Shards(prepared).tokenizer_path
    found = data.run(files, tokenizer, context=512, rounds=1)
    index = prepare([files[0]], tmp_path / "short", tokenizer=tokenizer, context=512, pack="best-fit", workers=1)
    short, long = found.rows
    assert (short["corpus"], short["documents"], short["longer_than_a_row"]) == ("short", 22, 0)
    assert long["longer_than_a_row"] == long["documents"] == 3
    assert short["padding"] == index["padding_tokens"] / index["tokens"]
    assert found.ratios["data.most_padding"] == max(short["padding"], long["padding"])
    for row in found.rows:
        assert row["attention"] == pytest.approx(row["within_s"] / row["whole_s"])
    assert found.ratios["data.least_attention"] == min(short["attention"], long["attention"])
    assert min(found.ratios["data.batch_ms"] or 0, found.ratios["data.seek_ms"] or 0) > 0
