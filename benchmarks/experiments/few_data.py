"""Many passes over few data: weight decay, ensembles, and students of the ensemble (`train.teacher`).

Published (Pre-training under infinite compute): with a decay 30 times the usual the loss goes on falling; averaged logits of
several models go below the best single one; a student, which reads what these write, keeps 83 % of what eight models gain.
Expected: 0.05 nats or more from the decay, as much again from four models, of which the student keeps 60 %.
"""

from collections.abc import Sequence

import torch

from benchmarks.experiments.harness import STEP_TOKENS, Experiment, Prepared, Trained, command
from benchmarks.harness import Result, Row
from optimus.checkpoint.store import load_model
from optimus.data.shards import Shards
from optimus.data.tokenizer import load
from optimus.evaluate.text import bits_per_byte
from optimus.model import KVCache
from optimus.model.ensemble import Ensemble

_PIECES, _HELD_OUT = 20, 60  # of 2,000 characters, some 11 k tokens to train on
_DECAYS, _EPOCHS, _MEMBERS = (0.1, 3.2), (16, 64), 3
_WRITTEN, _PASSES = 512, 10  # texts of the ensemble, and passes over them and the pieces


def run(experiment: Experiment) -> Result:
    """Wiki, a few pieces of it."""
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
    singles = {(decay, epochs): train(decay, epochs, 0) for epochs in passes for decay in decays}
    for (decay, epochs), each in singles.items():
        rows.append({"configuration": f"decay {decay}", "epochs": epochs, "loss": each.loss("wiki")})
    usual = min(each.loss("wiki") for (decay, _), each in singles.items() if decay == _DECAYS[0])
    (decay, epochs), best = min(singles.items(), key=lambda item: item[1].loss("wiki"))
    members = [best, *(train(decay, epochs, seed) for seed in range(1, wanted))]
    alone = sum(each.loss("wiki") for each in members) / wanted
    together = {count: _together(members[:count], data) for count in (1, 2, wanted)}
    # The measures differ a little: rows of the data there, documents by themselves here.
    for count, loss in together.items():
        rows.append({"configuration": f"ensemble of {count}", "epochs": epochs, "loss": loss})
    # Of the pieces alone, longer than they: teachers keep it from learning few data by heart. And of what they write, too.
    more = {"wiki": (texts["wiki"][0] + _written(members, shards, 8 if quick else _WRITTEN), texts["wiki"][1])}
    both = Shards(experiment.prepared_texts(more, tokenizer=shards.tokenizer_path)["wiki"].train)
    students = {
        "student": (passes[-1], train(decay, passes[-1], wanted, "student", members)),
        "student of their text": (_PASSES, train(decay, _PASSES, wanted, "student of their text", members, both)),
    }
    for name, (epochs, student) in students.items():
        of_student = _together([student], data)
        rows.append({"configuration": name, "epochs": epochs, "loss": of_student})
    singly = sum(_together([each], data) for each in members) / wanted
    gain = singly - together[wanted]
    ratios = {
        "few_data.decay_gain": usual - best.loss("wiki"),
        "few_data.ensemble_gain": gain,
        "few_data.student_keeps": (singly - of_student) / gain if gain > 0 else None,
        "few_data.mean_of_members": alone,
    }
    return Result(rows, ratios, tables={"few data": rows})


@torch.no_grad()
def _written(members: Sequence[Trained], shards: Shards, number: int) -> list[str]:
    """So many texts, drawn from the mean logits of the models."""
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


def _together(members: list[Trained], data: Prepared) -> float:
    """Loss of the mean logits on the text that is held out."""
    shards = Shards(data.train)
    models = [load_model(each.folder) for each in members]
    model = Ensemble(models) if len(models) > 1 else models[0]
    encoder = load(shards.tokenizer_path, parse_special=False)
    found = bits_per_byte(model, encoder, data.text, eos_id=shards.eos_id, context=shards.context)
    return float(found["loss"])


if __name__ == "__main__":
    command("experiments.few-data", run)
