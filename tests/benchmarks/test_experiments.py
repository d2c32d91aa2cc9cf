"""Every experiment runs completely with a few steps; the harness trains no run twice."""

import json
import random
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.experiments import harness
from benchmarks.experiments.harness import Experiment, mean_rows
from helpers.sweep import in_turns
from optimus.errors import UserError

CORPORA = ("books", "wiki", "math", "speeches", "multilingual", "reviews")
EXPERIMENTS = {
    "ablation": {f"ablation.pearson.{name}" for name in ("books", "math", "all")},
    "annealing": {
        f"annealing.{name}_change.{schedule}, {share} % of math"
        for name in ("speeches", "math")
        for schedule in ("cosine", "wsd")
        for share in (30, 40)
    },
    "documents": {"documents.mask_minus_ignore"},
    "few_data": {f"few_data.{name}" for name in ("decay_gain", "ensemble_gain", "student_keeps")},
    "packing": {"packing.best_fit_minus_concatenate"},
    "pruning": {
        f"pruning.{sparsity}{how}_minus_{other}"
        for sparsity in (50, 80, 90)
        for how in ("", "_at_random")
        for other in ("dense", "dense_of_its_bytes")
    },
    "replay": {f"replay.forgotten.{name}" for name in ("no replay", "25 % replay", "25 % replay, Reptile 0.5")},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of corpora, each with a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    folder.mkdir()
    for name in CORPORA:
        draws = random.Random(name)
        texts = [" ".join(f"{name[:3]}{draws.randrange(60)}" for _ in range(320)) for _ in range(200)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.mark.parametrize("name", in_turns([*EXPERIMENTS], 4))
def test_an_experiment(
    corpus: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = Experiment(corpus, tmp_path, range(1), quick=True)
    run = import_module(f"benchmarks.experiments.{name}").run
    found = run(experiment)
    assert found.ratios.keys() == EXPERIMENTS[name]
    assert found.rows
    capsys.readouterr()
    assert found.publish(f"experiments.{name}")["ratios"] == found.ratios
    monkeypatch.setattr(harness, "train", None)
    assert run(experiment) == found


@pytest.mark.in_turn(3, 4)
def test_early_signal(shared_data: Path, tmp_path: Path) -> None:
    found = import_module("benchmarks.experiments.early_signal").run(
        Experiment(shared_data / "corpus", tmp_path, range(1), quick=True)
    )
    assert {(row["task"], row["metric"]) for row in found.rows} >= {("sciq", "acc"), ("arc_easy", "bits_per_byte")}
    assert found.ratios.keys() == {f"early_signal.spearman.{m}" for m in ("acc", "acc_norm", "bits_per_byte", "margin")}


def test_the_harness(corpus: Path, tmp_path: Path) -> None:
    """The harness trains with different seeds, averages over seeds, keeps validation documents out of training and
    refuses a missing corpus."""
    experiment = Experiment(corpus, tmp_path, range(2))
    prepared = experiment.prepared(["math"])
    trained, held_out = ([json.loads(line)["text"] for line in path.open()] for path in
                         (prepared["math"].train.with_suffix(".jsonl"), prepared["math"].text))  # fmt: skip
    assert len(trained) == 9 * len(held_out)
    assert not {*trained} & {*held_out}
    config = {"data": {"path": str(prepared["math"].train)}, "validation": experiment.validation(prepared, 1 << 10)}
    runs = experiment.train_all({"one": config}, 2)
    one, two = (run.loss("math") for run in runs["one"])
    (row,) = mean_rows(runs, ["math"])
    assert one != two
    assert row["math"] == pytest.approx((one + two) / 2)
    assert row["math sd"] == pytest.approx(abs(one - two) / 2**0.5)
    with pytest.raises(UserError, match=r"has no corpus web.jsonl.gz: give --corpus a folder"):
        experiment.documents("web")
