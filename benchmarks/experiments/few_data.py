"""Many passes over few data: weight decay, ensembles, and students of the ensemble (`train.teacher`).

Published (Pre-training under infinite compute): with a decay of 30 times the usual one the loss goes on falling;
averaged logits of several models are better than the best single model; a student of text that the models write keeps
83 % of the gain of eight models. Expected: 0.05 nats or more from the decay, as much again from four models, and 60 %
of that in the student.
"""

import statistics
from collections.abc import Sequence

import torch

from benchmarks.experiments.harness import STEP_TOKENS, Experiment, Prepared, Trained, command, mean_and_deviation
from benchmarks.harness import Result, Row
from optimus.checkpoint.store import load_model
from optimus.data.shards import Shards
from optimus.data.tokenizer import load
from optimus.evaluation.text import bits_per_byte
from optimus.model import KVCache
from optimus.model.ensemble import Ensemble

_PIECES, _HELD_OUT = 20, 60  # pieces of 2,000 characters for training (some 11 k tokens) and for validation
_DECAYS, _EPOCHS, _MEMBERS = (0.1, 3.2), (16, 64), 3
_WRITTEN, _PASSES = 512, 10  # texts of the ensemble, and passes over these texts and the pieces


def run(experiment: Experiment) -> Result:
    """Train on a few pieces of wiki."""
    quick = experiment.quick
    decays, passes = _DECAYS[: 1 if quick else None], _EPOCHS[: 1 if quick else None]
    held_out, wanted = (4, 2) if quick else (_HELD_OUT, _MEMBERS)
    pieces = [
        text[start : start + 2000] for text in experiment.documents("wiki") for start in range(0, len(text), 2000)
    ]
    texts = {"wiki": (pieces[:_PIECES], pieces[_PIECES : _PIECES + held_out])}
    prepared = experiment.prepared_texts(texts)
    data = prepared["wiki"]
    shards = Shards(data.train)

    def train(
        decay: float, epochs: int, seed: int, name: str = "", teachers: Sequence[Trained] = (), read: Shards = shards
    ) -> Trained:
        teacher = {"checkpoints": [str(each.folder) for each in teachers], "weight": 3.0}
        config = {
            "data": {"path": str(read.folder)},
            "optimizer": {"weight_decay": decay},
            "validation": experiment.validation(prepared),
            "train": {"teacher": teacher} if teachers else {},
        }
        steps = 3 if quick else round(epochs * read.instances * read.context / STEP_TOKENS)
        return experiment.train(name or f"decay {decay}, {epochs} epochs", seed, config, steps)

    rows: list[Row] = []
    singles = {
        (decay, epochs): [train(decay, epochs, seed) for seed in experiment.seeds]
        for epochs in passes
        for decay in decays
    }
    losses = {key: mean_and_deviation([run.loss("wiki") for run in runs]) for key, runs in singles.items()}
    for (decay, epochs), found in losses.items():
        rows.append(_row(f"decay {decay}", epochs, found))
    usual = min(loss for (decay, _), (loss, _) in losses.items() if decay == _DECAYS[0])
    decay, epochs = min(losses, key=lambda key: losses[key][0])

    def together(first: Trained, seed: int) -> dict[str, float]:
        """Returns the losses of an ensemble with a given first member, of its members and of its students.

        These losses are measured document by document, those of single models on rows.
        """
        # All models start from different weights.
        *others, of_student = range(seed + 100, seed + 100 * wanted + 1, 100)
        members = [first, *(train(decay, epochs, other) for other in others)]
        found = {
            "one member": statistics.fmean(_loss([each], data) for each in members),
            "ensemble of 2": _loss(members[:2], data),
            f"ensemble of {_MEMBERS}": _loss(members, data),
        }
        # Teachers keep students from learning few data by heart, so students train longer; one also reads texts of the
        # teachers.
        written = _written(members, shards, 8 if quick else _WRITTEN)
        more = {"wiki": (texts["wiki"][0] + written, texts["wiki"][1])}
        both = Shards(experiment.prepared_texts(more, tokenizer=shards.tokenizer_path)["wiki"].train)
        student = train(decay, passes[-1], of_student, "student", members)
        reader = train(decay, _PASSES, of_student, "student of their text", members, both)
        return found | {"student": _loss([student], data), "student of their text": _loss([reader], data)}

    of_seeds = [together(first, seed) for first, seed in zip(singles[decay, epochs], experiment.seeds)]
    gains = [each["one member"] - each[f"ensemble of {_MEMBERS}"] for each in of_seeds]
    kept = [each["one member"] - each["student of their text"] for each in of_seeds]
    lengths = {"student": passes[-1], "student of their text": _PASSES}
    for name in of_seeds[0]:
        rows.append(_row(name, lengths.get(name, epochs), mean_and_deviation([each[name] for each in of_seeds])))
    ratios = {
        "few_data.decay_gain": usual - losses[decay, epochs][0],
        "few_data.ensemble_gain": statistics.fmean(gains),
        "few_data.student_keeps": sum(kept) / sum(gains) if sum(gains) > 0 else None,
    }
    return Result(rows, ratios, tables={"few data": rows})


def _row(configuration: str, epochs: int, found: tuple[float, float]) -> Row:
    return {"configuration": configuration, "epochs": epochs, "loss": found[0], "sd": found[1]}


@torch.no_grad()
def _written(members: Sequence[Trained], shards: Shards, number: int) -> list[str]:
    """Returns `number` texts, drawn from the mean logits of the models."""
    models, draws = [load_model(each.folder) for each in members], torch.Generator().manual_seed(0)
    caches, new_B1 = [KVCache(each.config.layers) for each in models], torch.full((number, 1), shards.eos_id)
    tokens = list[torch.Tensor]()
    for _ in range(shards.context - 1):
        mean_BV = torch.stack([model(new_B1, cache)[:, -1] for model, cache in zip(models, caches)]).mean(0)
        new_B1 = torch.multinomial(torch.softmax(mean_BV, -1), 1, generator=draws)
        tokens.append(new_B1)
    tokenizer = load(shards.tokenizer_path, parse_special=False)
    rows = torch.cat(tokens, 1).tolist()
    return [tokenizer.decode([token for token in row if token != shards.eos_id]) for row in rows]


def _loss(members: list[Trained], data: Prepared) -> float:
    """Returns the loss of the mean logits on the validation text."""
    shards = Shards(data.train)
    models = [load_model(each.folder) for each in members]
    model = Ensemble(models) if len(models) > 1 else models[0]
    encoder = load(shards.tokenizer_path, parse_special=False)
    found = bits_per_byte(model, encoder, data.text, eos_id=shards.eos_id, context=shards.context)
    return float(found["loss"])


if __name__ == "__main__":
    command("experiments.few-data", run)
