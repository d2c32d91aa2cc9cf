"""Finds the differences between runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from optimus.config.flat import differing, value_text
from optimus.report.folder import RunFolder, mapping

_MISSING = "-"


def differences(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Returns a row for each key whose value differs between the runs."""
    if len(folders) < 2:
        return []
    found = differing([{**folder.config, **dict(_surroundings(folder))} for folder in folders], _MISSING)
    return [{"key": key, "values": list(map(value_text, values))} for key, values in found.items()]


def has_other_tokenizer(folders: Sequence[RunFolder]) -> bool:
    """Returns True if the runs use different tokenizers.

    If a run does not record its tokenizer, compares the vocabulary sizes instead.
    """
    sums = {value_text(folder.described("tokenizer")) for folder in folders}
    if value_text(None) not in sums:
        return len(sums) > 1
    return len({value_text(folder.setting("model.vocab")) for folder in folders}) > 1


def _surroundings(folder: RunFolder) -> Iterator[tuple[str, Any]]:
    for section in ("versions", "machine"):
        for key, value in mapping(folder.described(section)).items():
            yield f"{section}: {key}", value
    git = mapping(mapping(folder.described("git")).get("optimus"))
    yield "git: commit", git.get("commit", _MISSING)
    yield "ranks", folder.described("ranks")
