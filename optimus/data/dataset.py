"""Turns the items of a Python dataset into rows of tokens.

An item is a mapping with one-dimensional `input_ids`, and optionally `labels`, `document_ids` and `attention_mask`.
Labels are the tokens themselves, or -100. Each item becomes a row, with padding at the end.

Legend: N tokens of an item, S tokens of a row.
"""

import copy
import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.data import tokenizer as tokenizers
from optimus.data.permutation import Permutation
from optimus.data.rows import UnshardedRows
from optimus.data.shards import BEGINS, ENDLESS, INSIDE, NOT_PREDICTED
from optimus.disk import user_path
from optimus.errors import UserError, nearest, said
from optimus.plugins import imported

ARGUMENT = "argument"
"""The value of `data.dataset` in a run whose dataset is the argument `data` of `optimus.train`."""

_NOT_PREDICTED = -100  # the label of a token that the model does not predict, as in `transformers`
_FINGERPRINTED = 8  # number of first items that the fingerprint of a dataset hashes
# Maximum number of recent states that a stream keeps; it must exceed `AHEAD` in `loader.py`.
_STATES = 64
_INSTEAD = {"position_ids": "document_ids", "cu_seqlens": "document_ids", "seq_idx": "document_ids"}


def rows_of(
    dataset: str, argument: Any, *, tokenizer: str | None, context: int, seed: int
) -> "DatasetRows | StreamRows":
    """Returns the rows of `argument` if `dataset` is `ARGUMENT`, otherwise of the object that `dataset` names.

    Raises `UserError` for a missing dataset or tokenizer, and for an object that is neither a map-style dataset nor a
    resumable iterator.
    """
    if dataset == ARGUMENT and argument is None:
        raise UserError(
            f"data.dataset is {ARGUMENT}, so the dataset of this run is an object: pass it as "
            "`optimus.train(..., data=...)`, or name it here as package.module.name"
        )
    if tokenizer is None:
        raise UserError(
            "data.tokenizer is missing: a dataset has token ids alone, and checkpoints need their tokenizer. Give its "
            "tokenizer.json, or a folder that contains one"
        )
    where = "data" if dataset == ARGUMENT else f"data.dataset: {dataset}"
    found = argument if dataset == ARGUMENT else _named(dataset, where)
    info = tokenizers.inspect(user_path(tokenizer))
    if all(callable(getattr(found, each, None)) for each in ("__iter__", "state_dict", "load_state_dict")):
        return StreamRows(found, where, info, context)
    if all(hasattr(type(found), each) for each in ("__len__", "__getitem__")) and not isinstance(found, str | Mapping):
        return DatasetRows(found, where, info, context, seed)
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    raise UserError(
        f"{where} is a {kind}: give a map-style dataset, with `__len__` and `__getitem__`, or an iterator that can be "
        "resumed, with `__iter__`, `state_dict` and `load_state_dict`"
        + (": pass the dataset of the DataLoader" if type(found).__name__ == "DataLoader" else "")
    )


def _named(name: str, where: str) -> Any:
    """Returns the dataset `name` (package.module.name), or the result of the function or class `name`."""
    module, _, attribute = name.rpartition(".")
    if not module:
        raise UserError(f"{where} names no module: give package.module.name")
    home = imported(module, where, "give package.module.name")
    if not hasattr(home, attribute):
        raise UserError(f"{where}: {module} has no {attribute}: {nearest(attribute, vars(home))}")
    found = getattr(home, attribute)
    is_dataset = any(hasattr(type(found), each) for each in ("__getitem__", "__iter__"))
    return _asked(found, where) if callable(found) and not is_dataset else found


def _asked(function: Callable[..., Any], where: str, *arguments: Any) -> Any:
    """Calls a user's function. Turns `SystemExit`, and any `Exception` but `StopIteration`, into a `UserError`."""
    try:
        return function(*arguments)
    except StopIteration:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where} failed ({said(error)}): correct its code") from error


class _ItemRows(UnshardedRows):
    """Rows of items. Padding has the flag `NOT_PREDICTED`."""

    def row(self, item: Any, number: int) -> NDArray[np.uint32]:
        """Returns the row [context] of item `number`, with the flags of `shards.py`. Raises `UserError` for an invalid
        item."""
        where = f"{self.where}: item {number}"
        if not isinstance(item, Mapping) or "input_ids" not in item:
            had = (
                f"has the keys {', '.join(map(str, item))}"
                if isinstance(item, Mapping)
                else f"is {type(item).__name__}"
            )
            raise UserError(f"{where} {had}: give a mapping with input_ids, and optionally labels and document_ids")
        if wrong := [key for key in _INSTEAD if item.get(key) is not None]:
            raise UserError(f"{where} has {wrong[0]}: give {_INSTEAD[wrong[0]]}, one for each token, instead")
        ids_N = _integers(item["input_ids"], f"{where}: input_ids")
        if item.get("attention_mask") is not None:
            present_N = _as_long(item, "attention_mask", ids_N, where) != 0
            size = int(present_N.sum())
            if not present_N[:size].all():
                raise UserError(f"{where}: attention_mask is 0 before the end: put the padding at the end")
        else:
            size = len(ids_N)
        if not 0 < size <= self.context:
            raise UserError(
                f"{where} has {size} tokens, but a row has 1 to {self.context} (train.sequence_length): cut longer items, "
                "and leave out empty ones"
            )
        if not 0 <= ids_N[:size].min() <= ids_N[:size].max() < self.vocab_size:
            wrong_id = next(each for each in ids_N[:size].tolist() if not 0 <= each < self.vocab_size)
            raise UserError(
                f"{where} has the token {wrong_id}, but {self.tokenizer_path} has the tokens 0 to {self.vocab_size - 1}"
            )
        row_S = np.full(self.context, self.eos_id | NOT_PREDICTED, dtype=np.uint32)
        row_S[:size] = ids_N[:size]
        if item.get("labels") is not None:
            row_S[:size] |= self._flags_of_labels(_as_long(item, "labels", ids_N, where)[:size], ids_N[:size], where)
        if item.get("document_ids") is not None:
            row_S[:size] |= self._flags_of_documents(_as_long(item, "document_ids", ids_N, where)[:size], ids_N[:size])
        return row_S

    def _flags_of_labels(self, labels_N: NDArray[np.int64], ids_N: NDArray[np.int64], where: str) -> NDArray[np.uint32]:
        ignored_N = labels_N == _NOT_PREDICTED
        if (different := np.flatnonzero(~ignored_N & (labels_N != ids_N))).size:
            at = int(different[0])
            raise UserError(
                f"{where}: label {at} is {labels_N[at]} and token {at} is {ids_N[at]}: labels are the tokens themselves, "
                f"not shifted, or {_NOT_PREDICTED} for tokens that are not predicted"
            )
        return np.where(ignored_N, np.uint32(NOT_PREDICTED), np.uint32(0))

    def _flags_of_documents(self, document_N: NDArray[np.int64], ids_N: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the flags `BEGINS` and `INSIDE` [N]."""
        flags_N = np.zeros(len(ids_N), dtype=np.uint32)
        begins_N, ends_N = document_N[1:] != document_N[:-1], ids_N[:-1] == self.eos_id
        flags_N[1:][begins_N & ~ends_N] |= BEGINS
        flags_N[:-1][ends_N & ~begins_N] |= INSIDE
        return flags_N


class DatasetRows(_ItemRows):
    """Rows of a map-style dataset, in an order that `seed` determines."""

    def __init__(self, dataset: Any, where: str, info: tokenizers.TokenizerInfo, context: int, seed: int) -> None:
        size = _asked(len, f"{where}: its length", dataset)
        if not size:
            raise UserError(f"{where} has no items")
        super().__init__(where, info, context, size)
        self._dataset, self._order = dataset, Permutation(size, "dataset", seed)
        digest = hashlib.sha256()
        for number in range(min(size, _FINGERPRINTED)):
            digest.update(self._item(number).tobytes())
        self.index["items"] = digest.hexdigest()

    def stored_rows(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Returns rows `start` to `stop - 1` [stop - start, context] with their flags."""
        return np.stack([self._item(number) for number in self._order(np.arange(start, stop)).tolist()])

    def _item(self, number: int) -> NDArray[np.uint32]:
        try:
            found = _asked(self._dataset.__getitem__, f"{self.where}: item {number}", number)
        except StopIteration as error:
            raise UserError(f"{self.where}: item {number} failed (StopIteration): correct its code") from error
        return self.row(found, number)


class StreamRows(_ItemRows):
    """Rows of a resumable iterator. After the stream ends, a new pass begins in the stream's state before the run."""

    def __init__(self, stream: Any, where: str, info: tokenizers.TokenizerInfo, context: int) -> None:
        super().__init__(where, info, context, ENDLESS)
        self._stream, self._where = stream, where
        self._items: Iterator[Any] | None = None
        self._last_row: NDArray[np.uint32] | None = None  # the row before the row `_next`
        self._first: Any = None  # the stream's state before the run, in which every later pass begins
        self._loaded = False  # True after `load_state`
        self._next = 0  # number of the row that the iterator yields next
        self._states: deque[tuple[int, Any]] = deque(maxlen=_STATES)  # (row, the stream's state before this row)
        self._lock = threading.Lock()

    def stored_rows(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Returns rows `start` to `stop - 1` [stop - start, context] with their flags, and skips the rows before
        `start`. Only the last row can be read again; raises `UserError` for an earlier `start`."""
        if start == self._next - 1 and self._last_row is not None:  # an earlier step has read a part of this row
            rest = [self.stored_rows(start + 1, stop)] if stop > start + 1 else []
            return np.concatenate([self._last_row[None], *rest])
        if start < self._next:
            raise UserError(f"{self._where}: row {start} is past: a stream cannot be read again")
        state = self._state()
        _check_json(state, f"{self._where}: its state_dict")
        if self._first is None:
            self._first = state
        with self._lock:
            self._states.append((self._next, state))
        while self._next < start:
            self._item()
        rows = np.stack([self.row(self._item(), self._next - 1) for _ in range(stop - start)])
        self._last_row = rows[-1]
        return rows

    def state_before(self, row: int) -> dict[str, Any]:
        """Returns the newest stored state at or before `row`, or an empty dict."""
        with self._lock:
            return next(({"row": at, "state": state} for at, state in reversed(self._states) if at <= row), {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Loads a state that `state_before` returned. Callers must do so before the first call of `stored_rows`."""
        self._first, self._loaded = self._state(), True
        self._set(state["state"])
        self._next = state["row"]
        self._states.append((self._next, state["state"]))

    def restore(self) -> None:
        """Restores the state that the stream had before this run, for another pass or another run in this process."""
        if self._first is not None:
            self._set(copy.deepcopy(self._first))

    def _state(self) -> Any:
        return copy.deepcopy(_asked(self._stream.state_dict, f"{self._where}: its state_dict"))

    def _set(self, state: Any) -> None:
        _asked(self._stream.load_state_dict, f"{self._where}: its load_state_dict", state)

    def _item(self) -> Any:
        """Returns the next item, of a new pass if the stream has ended."""
        for items in (self._items, None):
            if items is None:
                if self._items is not None and (self._loaded or self._state() != self._first):
                    self.restore()  # some streams begin each pass at the last loaded state, and others at their beginning
                items = self._items = _asked(iter, f"{self._where}: its iterator", self._stream)
            try:
                item = _asked(next, f"{self._where}: item {self._next}", items)
            except StopIteration:
                continue
            self._next += 1
            return item
        raise UserError(f"{self._where} has no more items after {self._next}: shorten the run, or yield more")


def _check_json(state: Any, where: str) -> None:
    """Raises `UserError` unless `state` is a dict that JSON preserves."""
    cure = "return a mapping of texts to numbers, texts, lists and mappings"
    try:
        same = json.loads(json.dumps(state)) == state
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} is not JSON ({error}): {cure}") from error
    if not same or not isinstance(state, dict):
        raise UserError(f"{where} is another object after it was written as JSON: {cure}, no tuples and no other keys")


def _integers(values: Any, where: str) -> NDArray[np.int64]:
    """Returns `values` as int64 [N]. Raises `UserError` unless the values are one-dimensional integers or booleans."""
    try:
        found = np.asarray(values)
    except Exception as error:
        raise UserError(f"{where} is no array ({error}): give a list, an array or a tensor of integers") from error
    integers = np.issubdtype(found.dtype, np.integer) or found.dtype == bool
    if found.ndim != 1 or not (integers or not found.size):  # NumPy takes an empty list for numbers with a fraction
        cure = "yield items one by one, without batches" if found.ndim == 2 else "give a list of integers"
        raise UserError(f"{where} has the shape {[*found.shape]} and the type {found.dtype}: {cure}")
    return found.astype(np.int64)


def _as_long(item: Mapping[str, Any], key: str, ids_N: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    found = _integers(item[key], f"{where}: {key}")
    if len(found) != len(ids_N):
        raise UserError(f"{where} has {len(ids_N)} input_ids but {len(found)} {key}: give one for each token")
    return found
