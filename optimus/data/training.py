"""Describes the training data of a run.

A position is the index of a sequence in its phase. Except in replay, a source continues after the tokens that earlier
phases have read.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.config import RunConfig
from optimus.config.data import DataConfig, SourceConfig, split_format
from optimus.config.phases import Phase, phase_at, phases_of
from optimus.data.dataset import StreamRows, rows_of
from optimus.data.mixture import Mixture, integer_weights
from optimus.data.permutation import Permutation
from optimus.data.shards import ENDLESS, Rows, Shards
from optimus.data.token_files import TokenFileRows, check_tokenizer, open_token_files
from optimus.errors import UserError

_DESCRIBED = 4096  # the fingerprint hashes the sources of this many positions at the start of a phase


class MixedSource(NamedTuple):
    """A source in a phase. Earlier phases have read the sequences before `first`. A row of the shards has `parts`
    sequences.

    For a replayed source, the phase reads only the first `seen` rows, and `replay` is the number of the phase.
    """

    name: str
    shards: Rows
    parts: int = 1
    first: int = 0
    seen: int | None = None
    replay: int | None = None

    @property
    def instances(self) -> int:
        """The number of rows that one pass reads."""
        return self.seen or self.shards.instances

    def rows(self, index_N: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Locates N sequences of this source. `index_N` numbers the source's sequences in the phase, from 0.

        Returns the row [N] of each sequence, and the part [N] of the row.

        Pass 0 reads the rows in the stored order. Later passes, and every pass of a replay, permute the rows.
        """
        passed_N, part_N = np.divmod(self.first + index_N, self.parts)
        pass_N, row_N = np.divmod(passed_N, self.instances)
        key = ("epoch", seed) if self.replay is None else ("replay", seed, self.replay)
        for number in np.unique(pass_N).tolist():
            if number > 0 or self.replay is not None:
                chosen = pass_N == number
                row_N[chosen] = Permutation(self.instances, *key, number)(row_N[chosen])
        return row_N, part_N


class DataPhase(NamedTuple):
    """The data of a phase that begins at step `first`, counted from 0."""

    first: int
    global_batch: int  # sequences of a step
    sources: Sequence[MixedSource]
    mixture: Mixture
    documents: bool = False  # True if attention stays within each document

    @property
    def names(self) -> list[str]:
        """The distinct names of the sources, in order."""
        return list(dict.fromkeys(source.name for source in self.sources))

    @property
    def padded(self) -> bool:
        """True if sequences may have padding without the flag `NOT_PREDICTED`."""
        return any(source.shards.padded for source in self.sources)

    @property
    def masked(self) -> bool:
        """True if tokens may have the flags of `shards.py`."""
        return any(source.shards.masked for source in self.sources)

    @classmethod
    def from_shards(cls, shards: Shards, global_batch: int) -> "DataPhase":
        """Makes a phase that reads one source from the start."""
        return cls(0, global_batch, [MixedSource(shards.folder.name, shards)], Mixture([1]))

    @property
    def sequence_length(self) -> int:
        """The number of tokens in each sequence of the phase."""
        return self.sources[0].shards.context // self.sources[0].parts

    def counts(self, step: int) -> list[int]:
        """Returns the number of sequences that the phase reads from each source before `step` (from 0)."""
        return self.mixture.counts((step - self.first) * self.global_batch)


def open_sources(config: RunConfig, dataset: Any = None) -> dict[str, Rows]:
    """Opens the prepared folders, token files and datasets of all phases, by `SourceConfig.folder`.

    `dataset` is the argument `data` of `optimus.train`. Raises `UserError` for sources with different tokenizers or
    chat templates.
    """
    folders: dict[str, Rows] = {}
    for data in _sections(config):
        for source in data.mixed:
            if source.folder in folders:
                if source.format is not None and data.tokenizer is not None:
                    check_tokenizer(folders[source.folder], data.tokenizer)
                continue
            lengths = [phase.sequence_length or config.train.sequence_length for phase in config.phases]
            made: dict[str, Any] = {"tokenizer": data.tokenizer, "seed": config.train.seed}
            made["context"] = max(lengths or [config.train.sequence_length])
            if data.dataset is not None:
                folders[source.folder] = rows_of(data.dataset, dataset, **made)
            elif source.format is not None:
                folders[source.folder] = open_token_files(source.path, **made, cache=config.train.data_cache)
            else:
                folders[source.folder] = Shards(source.path, config.train.data_cache)
    one, *others = folders.values()
    for other in others:
        check_same_tokenizer(one, other)
    first, *more = [shards for shards in folders.values() if "chat" in shards.index] or [one]
    for other in more:
        if other.index["chat"] != first.index["chat"]:
            raise UserError(
                f"{other.folder} uses another chat template than {first.folder}, but a run needs the same in all sources. "
                f"Prepare it again with `tokenizer={first.folder}`"
            )
    return folders


def open_validation(path: str, config: RunConfig, data: Rows) -> Rows:
    """Opens a validation set: prepared data, or token files of another trainer (`open_token_files`).

    The rows do not depend on the run's seed, so that runs with different seeds measure the same tokens.

    Raises `UserError` unless the tokens have the tokenizer of `data`, which the run trains on.
    """
    if split_format(path)[0] is None:
        rows: Rows = Shards(path, config.train.data_cache)
        check_same_tokenizer(data, rows)
        return rows
    tokenizer, train = str(data.tokenizer_path), config.train
    return open_token_files(path, tokenizer=tokenizer, context=train.sequence_length, seed=0, cache=train.data_cache)


def sequences_in(sources: Mapping[str, Rows], length: int) -> int | None:
    """Returns the number of sequences of `length` tokens in all sources together; None if a source is a stream."""
    if any(rows.instances == ENDLESS for rows in sources.values()):
        return None
    # A row that is too short is refused later, by `Rows.check_model`.
    return sum(rows.instances * max(1, rows.context // length) for rows in sources.values())


def check_same_tokenizer(one: Rows, other: Rows) -> None:
    """Raises `UserError` unless both sources have the same tokenizer."""
    if other.index["tokenizer"]["sha256"] != one.index["tokenizer"]["sha256"]:
        raise UserError(
            f"{other.folder} was prepared with another tokenizer than {one.folder}, so their token ids differ in meaning. "
            f"Prepare it again with `tokenizer={one.folder}`"
        )


def _sections(config: RunConfig) -> list[DataConfig]:
    return [phase.data or config.data for phase in config.phases] or [config.data]


class TrainingData:
    """The training data of a run.

    `folders` are the opened sources; None opens the sources of `config`. `sequences` is the number of sequences of
    `train.sequence_length` tokens in the sources; None if a source is a stream. Raises `UserError` for a source that is
    too short for its share.
    """

    def __init__(
        self, config: RunConfig, folders: Mapping[str, Rows] | None = None, phases: Sequence[Phase] | None = None
    ) -> None:
        self.folders = open_sources(config) if folders is None else folders
        self.sequences = sequences_in(self.folders, config.train.sequence_length)
        self.first_folder = next(iter(self.folders.values()))
        self.phases: list[DataPhase] = []
        self._described = [*(phases or phases_of(config))]
        self._passed: list[dict[str, int]] = [{}]  # for each phase: the tokens that earlier phases read, by source
        read: dict[str, int] = {}
        for phase in self._described:
            phase_data = self._phase(phase, read)
            self.phases.append(phase_data)
            passed = dict(self._passed[-1])
            counts = phase_data.counts(phase.last)
            for source, mixed, number in zip(phase.config.data.mixed, phase_data.sources, counts):
                self._check_passes(phase, source, mixed, number)
                read[source.folder] = (mixed.first + number) * phase_data.sequence_length
            for mixed, number in zip(phase_data.sources, counts):
                passed[mixed.name] = passed.get(mixed.name, 0) + number * phase_data.sequence_length
            self._passed.append(passed)

    def _phase(self, phase: Phase, read: Mapping[str, int]) -> DataPhase:
        train, sources = phase.config.train, phase.config.data.mixed
        length, mixed = train.sequence_length, []
        for source in sources:
            shards = self.folders[source.folder]
            shards.check_model(length, phase.config.model.vocab)
            first = -(-read.get(source.folder, 0) // length)
            mixed.append(MixedSource(source.label, shards, shards.context // length, first))
        weights = _weights(phase, sources, [source.shards for source in mixed])
        if phase.replay:
            weights = _with_replay(weights, Fraction(str(phase.replay)), list(read.values()))
            names = {source.folder: source.label for each in self._described for source in each.config.data.mixed}
            mixed += [self._replayed(phase, folder, names[folder], tokens) for folder, tokens in read.items()]
        mixture = Mixture(weights)
        return DataPhase(phase.first, train.global_batch, mixed, mixture, phase.config.data.documents == "mask")

    def _replayed(self, phase: Phase, folder: str, name: str, tokens: int) -> MixedSource:
        """Returns a source that replays the first rows of `folder`, about as many as earlier phases have read."""
        shards = self.folders[folder]
        if shards.instances == ENDLESS:
            raise UserError(
                f"phases.{phase.number}.replay: {name} is a stream, which cannot be read again: remove replay"
            )
        parts = shards.context // phase.config.train.sequence_length
        seen = min(shards.instances, max(1, tokens // shards.context))
        return MixedSource(name, shards, parts, seen=seen, replay=phase.number)

    def _check_passes(self, phase: Phase, source: SourceConfig, mixed: MixedSource, number: int) -> None:
        """Raises `UserError` if the run would read a weighted source of `data.sources` more than once."""
        available = mixed.shards.instances * mixed.parts
        if phase.config.data.sources and source.share is not None and mixed.first + number > available:
            length = phase.step_tokens // phase.config.train.global_batch
            raise UserError(
                f"{_where(phase)}source {mixed.name} has {available * length:,} tokens, of which earlier phases read "
                f"{mixed.first * length:,}, but its share is {number * length:,}: lower its weight, shorten the run, or "
                f"replace the weight by `epochs` (here {number / available:.3g})"
            )

    def stream_states(self, steps: int) -> dict[str, Any]:
        """Returns states by source name. The streams of the phase can continue from the states after `steps` steps."""
        last = max(0, steps - 1)
        phase, found = self.phases[phase_at(self._described, last).number], {}
        for source, number in zip(phase.sources, phase.counts(last)):
            if isinstance(source.shards, StreamRows):
                found[source.name] = source.shards.state_before((source.first + number) // source.parts)
        return {name: state for name, state in found.items() if state}

    def load_streams(self, states: Mapping[str, Any]) -> None:
        """Loads the states that `stream_states` has returned."""
        streams = {source.name: source.shards for phase in self.phases for source in phase.sources}
        for name, rows in streams.items():
            if isinstance(rows, StreamRows) and name in states:
                rows.load_state(states[name])

    def restore_streams(self) -> None:
        """Restores the states that the streams had before the run, so that another run in this process has the same
        rows. Prints errors of the streams."""
        for rows in self.folders.values():
            if isinstance(rows, StreamRows):
                try:
                    rows.restore()
                except UserError as error:
                    print(f"{error}; another run with this object would begin at a later item", file=sys.stderr)

    @contextmanager
    def keeping_checksums(self, folder: Path) -> Iterator[None]:
        """Stores checksums in `folder` of the rows of token files that are read in the context."""
        with ExitStack() as stack:
            for rows in self.folders.values():
                if isinstance(rows, TokenFileRows):
                    stack.enter_context(rows.keeping_checksums(folder))
            yield

    def verify(self) -> None:
        """Raises `UserError` at the first prepared shard that differs from its checksum."""
        for shards in self.folders.values():
            shards.verify()

    def tokens_by_source(self, steps: int) -> dict[str, int]:
        """Returns the number of tokens that the first `steps` steps read from each source."""
        phase = phase_at(self._described, steps)
        data, found = self.phases[phase.number], dict(self._passed[phase.number])
        for source, number in zip(data.sources, data.counts(steps)):
            found[source.name] = found.get(source.name, 0) + number * data.sequence_length
        return found

    @property
    def chat(self) -> dict[str, Any]:
        """The result of `ChatTemplate.written` for the run's conversations; empty without conversations."""
        return next((dict(shards.index["chat"]) for shards in self.folders.values() if "chat" in shards.index), {})

    def fingerprint(self, steps: int, seed: int) -> dict[str, Any]:
        """Fingerprints the data of the phases up to the phase of step `steps`."""
        number = phase_at(self._described, steps).number
        begun = [self._digests(phase) for phase in self.phases[: number + 1]]
        one = len(begun) == 1 and len(begun[0]["sources"]) == 1
        digest = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()
        data = self.phases[number]
        return {
            "data": begun[0]["sources"][0] if one else digest,
            "context": data.sequence_length,
            "global_batch": data.global_batch,
            "seed": seed,
        }

    def _digests(self, phase: DataPhase) -> dict[str, Any]:
        indices = [json.dumps(source.shards.index, sort_keys=True).encode() for source in phase.sources]
        return {
            "first": phase.first,
            "sources": [hashlib.sha256(index).hexdigest() for index in indices],
            "weights": phase.mixture.weights,
            "order": hashlib.sha256(phase.mixture.locate(np.arange(_DESCRIBED))[0].tobytes()).hexdigest(),
            "global_batch": phase.global_batch,
            "sequence_length": phase.sequence_length,
        }


def _where(phase: Phase) -> str:
    return f"phase {phase.name}: " if phase.name else ""


def _with_replay(weights: Sequence[int], share: Fraction, read: Sequence[int]) -> list[int]:
    """Scales `weights` to the share 1 - `share`, and appends weights of the replayed sources in proportion to the
    tokens `read`."""
    own = [weight * (1 - share) / sum(weights) for weight in weights]
    return integer_weights([*own, *(share * tokens / sum(read) for tokens in read)])


def _weights(phase: Phase, sources: Sequence[SourceConfig], shards: Sequence[Rows]) -> list[int]:
    """Returns the integer weights of the sources. Raises `UserError` if the `tokens` and `epochs` of the sources do not
    fit the phase's length."""
    shares = [source.share for source in sources]
    if all(share is not None for share in shares):
        return integer_weights([share or 0.0 for share in shares])
    length, positions = (
        phase.config.train.sequence_length,
        round(phase.steps * phase.config.train.global_batch * (1 - phase.replay)),
    )
    asked = [
        0 if share is not None else _sequences_of(source, each, length)
        for source, each, share in zip(sources, shards, shares)
    ]
    remaining, batch = positions - sum(asked), phase.config.train.global_batch
    fixed = all(share is None for share in shares)
    if (fixed and abs(remaining) >= batch) or (not fixed and remaining < 0):
        needed = sum(asked) * length
        raise UserError(
            f"{_where(phase)}tokens and epochs of the sources add up to {needed:,} tokens, but the phase reads "
            f"{positions * length:,}: set its length to {max(1, sum(asked) // batch)} steps"
            + ("" if remaining < 0 else ", or give a source a weight, so that it fills the rest")
        )
    if fixed:
        return asked
    given = integer_weights([share or 0.0 for share in shares])
    total = sum(given) or 1
    return integer_weights([number + Fraction(remaining * weight, total) for number, weight in zip(asked, given)])


def _sequences_of(source: SourceConfig, shards: Rows, length: int) -> int:
    tokens = (
        source.tokens if source.tokens is not None else round((source.epochs or 0) * shards.instances * shards.context)
    )
    return -(-tokens // length)
