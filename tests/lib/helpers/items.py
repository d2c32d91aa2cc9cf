"""Datasets of a user, which tests name in `data.dataset`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

SIZE, LENGTH, VOCAB = 40, 32, 300


def item(number: int) -> dict[str, Any]:
    """Returns an item of at most `LENGTH` tokens. Some items are shorter, and some tokens are not predicted."""
    ids = np.random.default_rng(number).integers(1, VOCAB, LENGTH - number % 3)
    labels = np.where(np.arange(len(ids)) < number % 5, -100, ids)
    return {"input_ids": ids.tolist(), "labels": labels.tolist(), "document_ids": [0, 1] + [2] * (len(ids) - 2)}


class Items:
    """A map-style dataset of `SIZE` items."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> dict[str, Any]:
        return item(number)


class Stream:
    """The same items in their order, as a stream that can be resumed. `asked` lists the items that it has yielded."""

    def __init__(self) -> None:
        self.next, self.asked = 0, list[int]()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.next < SIZE:
            self.next += 1
            self.asked.append(self.next - 1)
            yield item(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Late(Stream):
    """A stream that begins with its item 7."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 7


def items() -> Items:
    return Items()
