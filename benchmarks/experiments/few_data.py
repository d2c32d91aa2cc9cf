"""Many passes over few data: weight decay, ensembles, and a student of the ensemble (`train.teacher`).

Published (Pre-training under infinite compute): with a decay 30 times the usual the loss goes on falling; averaged logits of
several models go below the best single one; a student keeps 83 % of what eight models gain. Expected: 0.05 nats or more from
the decay, as much again from four models, of which the student keeps 60 %.
"""

from benchmarks.experiments.harness import STEP_TOKENS, Experiment, Prepared, Trained, command
from benchmarks.harness import Result, Row
from optimus.checkpoint.store import load_model
from optimus.data.shards import Shards
from optimus.data.tokenizer import load
from optimus.evaluate.text import bits_per_byte
from optimus.model.ensemble import Ensemble

_PIECES, _HELD_OUT = 20, 60  # of 2,000 characters, some 11 k tokens to train on
_DECAYS, _EPOCHS, _MEMBERS = (0.1, 3.2), (16, 64), 3


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
    per_pass = shards.instances * shards.context / STEP_TOKENS

    def train(decay: float, epochs: int, seed: int, name: str = "", teacher: list[str] | None = None) -> Trained:
        config = {
            "data": {"path": str(data.train)},
            "optimizer": {"weight_decay": decay},
            "validation": experiment.validation(prepared),
            "train": {} if teacher is None else {"teacher": {"checkpoints": teacher, "weight": 3.0}},
        }
        steps = 3 if quick else round(epochs * per_pass)
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
    # Longer than they: a teacher keeps it from learning few data by heart.
    student = train(decay, passes[-1], wanted, "student", [str(each.folder) for each in members])
    of_student = _together([student], data)
    rows.append({"configuration": "student", "epochs": passes[-1], "loss": of_student})
    singly = sum(_together([each], data) for each in members) / wanted
    gain = singly - together[wanted]
    ratios = {
        "few_data.decay_gain": usual - best.loss("wiki"),
        "few_data.ensemble_gain": gain,
        "few_data.student_keeps": (singly - of_student) / gain if gain > 0 else None,
        "few_data.mean_of_members": alone,
    }
    return Result(rows, ratios, tables={"few data": rows})


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
