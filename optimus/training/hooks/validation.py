"""A hook that measures validation sets and tasks, and continues prompts, during a run."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from optimus.comm import CollectiveError
from optimus.config.tree import ValidationConfig
from optimus.data import tokenizer
from optimus.data.token_files import TokenFileRows
from optimus.data.training import open_validation
from optimus.errors import UserError, naming_key
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

_SAMPLE_TOKENS = 64  # maximum number of tokens of a prompt's continuation


class Validation(Hook):
    """Measures validation sets and tasks, and continues prompts, at configured intervals and at the last step.

    Rank 0 reads the validation sets and the tasks. A read error on rank 0 ends the run on all ranks.
    """

    order = Order.MEASURE

    def __init__(self) -> None:
        self._token_files: dict[str, TokenFileRows] = {}  # open, so that all measurements read the same files

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        try:
            found = self._found(trainer, record.step)
            if self._is_sampled(trainer, record.step):
                record.samples += self._samples(trainer)
        except CollectiveError:
            raise
        except UserError as error:
            trainer.fail(error)
            return
        record.values |= found
        for name, value in found.items():
            trainer.say(f"step {record.step}: validation {name} {value:.4f}")

    def _found(self, trainer: Trainer, step: int) -> dict[str, float]:
        section, found, due = trainer.config.evaluate, dict[str, float](), partial(_is_due, trainer, step)
        for number, each in enumerate(trainer.config.validation):
            if due(each.every):
                key, read = ("path", self._rows) if each.text is None else ("text", self._text)
                measured = self._measure(trainer, _naming(f"validation.{number}.{key}", read(trainer, each)))
                if each.name is None:
                    found["bits_per_byte"] = measured["bits_per_byte"]
                else:
                    found |= {f"{name}/{each.name}": measured[name] for name in ("loss", "bits_per_byte")}
        if section.tasks_every is not None and due(section.tasks_every):
            found |= self._tasks(trainer)
        return found

    def _is_sampled(self, trainer: Trainer, step: int) -> bool:
        every = (None, *(each.every for each in trainer.config.validation))
        return bool(trainer.config.evaluate.prompts) and any(_is_due(trainer, step, each) for each in every)

    def _samples(self, trainer: Trainer) -> list[dict[str, str]]:
        """Returns each `prompt` with the continuation `text`.

        Continues a long prompt from its last tokens, so that prompt and continuation fit the sequence length.
        """
        from optimus.evaluation.generation import continuations, decode

        prompts, world = trainer.config.evaluate.prompts, trainer.groups.world
        data, context = trainer.run.data.first_folder, trainer.progress.phase.config.train.sequence_length
        tokens = min(_SAMPLE_TOKENS, context // 2)

        def encoded() -> list[list[int]]:
            encode = tokenizer.encoder(self._encoder(trainer))
            return [encode(prompt)[-(context - tokens) :] or [data.eos_id] for prompt in prompts]

        def decoded() -> list[dict[str, str]]:
            encoder = self._encoder(trainer)
            return [
                {"prompt": prompt, "text": decode(encoder, ids, new)}
                for prompt, ids, new in zip(prompts, asked, found, strict=True)
            ]

        asked = world.on_first(encoded)
        continue_all = partial(continuations, trainer.model, asked, max_tokens=tokens, eos_id=data.eos_id)
        with trainer.state.evaluating():
            together = trainer.run.forward_is_collective
            found = continue_all(group=world) if together else world.on_first(continue_all)
        return world.on_first(decoded)

    def _measure(self, trainer: Trainer, parts: Iterator[Any]) -> dict[str, Any]:
        from optimus.evaluation.text import measure

        world = trainer.groups.world
        with trainer.state.evaluating():
            if trainer.run.forward_is_collective:
                return measure(trainer.model, parts, group=world)
            return world.on_first(lambda: measure(trainer.model, parts))

    def _tasks(self, trainer: Trainer) -> dict[str, float]:
        """Returns the scores of all tasks, as `tasks/NAME/METRIC`."""
        from optimus.evaluation.score import score

        model, world = trainer.model, trainer.groups.world
        with trainer.state.evaluating():
            if not trainer.run.forward_is_collective:
                return world.on_first(lambda: self._ask(trainer, partial(score, model)))
            if world.rank > 0:
                batch: Any
                while (batch := world.broadcast_object(None)) is not None:
                    score(model, *batch)
                return world.on_first(dict)

            def together(*batch: Any) -> Any:  # windows, tokens per batch
                return score(model, *world.broadcast_object(batch))

            def asked() -> dict[str, float]:
                try:
                    return self._ask(trainer, together)
                finally:
                    world.broadcast_object(None)

            return world.on_first(asked)

    def _ask(self, trainer: Trainer, score: Any) -> dict[str, float]:
        from optimus.evaluation.harness import HarnessModel
        from optimus.evaluation.tasks import load_tasks, run_tasks

        section, data = trainer.config.evaluate, trainer.run.data.first_folder
        context = trainer.progress.phase.config.train.sequence_length
        asking = HarnessModel(trainer.model, self._encoder(trainer), eos_id=data.eos_id, context=context, score=score)
        tasks = load_tasks(section.tasks, Path(str(section.task_data)))
        found = run_tasks(tasks, asking, limit=section.tasks_limit)
        return {
            f"tasks/{name}/{metric}": value
            for name, scores in found.items()
            for metric, value in scores.items()
            if metric != "n"
        }

    def _text(self, trainer: Trainer, config: ValidationConfig) -> Iterator[Any]:
        from optimus.evaluation.text import read_parts

        data = trainer.run.data.first_folder
        context = trainer.progress.phase.config.train.sequence_length
        yield from read_parts(
            self._encoder(trainer), str(config.text), eos_id=data.eos_id, context=context, max_bytes=config.max_bytes,
            max_tokens=config.tokens,
        )  # fmt: skip

    def _encoder(self, trainer: Trainer) -> Any:
        data = trainer.run.data.first_folder
        return tokenizer.load(data.tokenizer_path, parse_special=data.parse_special)

    def _rows(self, trainer: Trainer, config: ValidationConfig) -> Iterator[Any]:
        from optimus.evaluation.text import read_rows

        path = str(config.path)
        rows = self._token_files.get(path) or open_validation(path, trainer.config, trainer.run.data.first_folder)
        if isinstance(rows, TokenFileRows):
            self._token_files[path] = rows
        documents = trainer.progress.phase.config.data.documents == "mask"
        yield from read_rows(rows, config.tokens, documents=documents)


def _naming(key: str, parts: Iterator[Any]) -> Iterator[Any]:
    """Yields the parts. Errors of reading them name `key`."""
    with naming_key(key):
        yield from parts


def _is_due(trainer: Trainer, step: int, every: int | None) -> bool:
    return step == trainer.run.last_step or (every is not None and step % every == 0)
