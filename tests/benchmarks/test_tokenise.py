"""The tokenisation benchmark counts the same tokens for both sides."""

import json
from pathlib import Path

from benchmarks.tokenise import run


def test_rows_and_ratio(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        for number in range(300):
            file.write(json.dumps({"text": f"document {number} has some words, some words. " * 10}) + "\n")
    found = run([str(tmp_path)], workers=1, rounds=1)
    rows, ratios = found.rows, found.ratios
    assert [row["name"] for row in rows] == ["encode_batch", "tokenise stage", "prepare"]
    assert len({row["tokens"] for row in rows}) == 1
    speed = {row["name"]: row["tokens"] / row["seconds"] for row in rows}
    ratio = ratios["tokenise.vs_tokenizers"]
    assert ratio is not None
    assert abs(ratio / (speed["tokenise stage"] / speed["encode_batch"]) - 1) < 0.2
