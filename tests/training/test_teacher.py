"""A frozen teacher's divergence is part of the loss and of the metrics, in every layout with whole logits."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from helpers.trained import train_here
from optimus.checkpoint.store import load_model
from optimus.config import load_config
from optimus.data.loader import TokenLoader
from optimus.errors import UserError
from optimus.kernels.linear_divergence import linear_divergence_reference
from optimus.model import Batch, Transformer
from optimus.model.init import initialize
from optimus.observe.metrics import read_metrics
from optimus.testing import run_ranks
from optimus.training.reading import read_run


def changed(run: dict[str, Any], output: Path, **train: Any) -> dict[str, Any]:
    run = copy.deepcopy(run)
    run["train"] |= {"output": str(output), **train}
    return run


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> list[str]:
    """Returns the paths of two trained models of other sizes than the student."""
    paths = []
    for seed, hidden in enumerate((16, 32)):
        model = {"family": "olmo", "hidden": hidden, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 320}
        train = {"steps": 3, "global_batch": 8, "micro_batch": 8, "sequence_length": 32, "precision": "float32"}
        paths.append(str(tmp_path_factory.mktemp("teacher") / "run"))
        optimus.train(
            {
                "model": model,
                "data": {"path": str(prepared)},
                "train": train | {"seed": seed, "output": paths[-1]},
                "observe": {"tensorboard": False, "report": False},
            }
        )
    return paths


@pytest.fixture
def student(small_run: dict[str, Any], teachers: list[str]) -> dict[str, Any]:
    small_run["model"] = {k: v for k, v in small_run["model"].items() if "experts" not in k} | {"family": "olmo"}
    teacher = {"checkpoints": teachers, "weight": 0.5, "temperature": 2.0}
    small_run["train"] |= {"precision": "float32", "steps": 3, "teacher": teacher}
    return small_run


def losses(run: dict[str, Any]) -> list[tuple[float, float]]:
    records = read_metrics(Path(run["train"]["output"]))
    return [(record["loss"], record["teacher_divergence"]) for record in records]


def part(config: dict[str, Any]) -> None:
    """Runs one rank."""
    import torch.distributed as dist

    train_here(read_run(config)[0])
    dist.barrier()


def test_the_first_step_has_the_divergence_from_the_mean_logits(student: dict[str, Any]) -> None:
    """The divergence equals its definition, computed from separately loaded models.

    Each token's divergence is a difference of two logarithms of softmaxes, times temperature^2. Logarithms up to log(V)
    are rounded by at most half an ulp of fp32 each.
    """
    optimus.train(student)
    tree, data = read_run(student)
    with TokenLoader(data.phases) as loader:
        tokens_BS = torch.from_numpy(next(loader).tokens_BS)
    model = Transformer(tree.model)
    initialize(model, 0, tree.model.init_std)
    teacher = tree.train.teacher
    assert teacher is not None
    mean_BSV = torch.stack([load_model(path)(tokens_BS) for path in teacher.checkpoints]).mean(0)
    target_T = Batch(tokens_BS).target_BS.flatten()
    hidden_TH = model.hidden_states(tokens_BS).flatten(0, 1)
    total = linear_divergence_reference(hidden_TH, model.head.weight, mean_BSV.flatten(0, 1), 2.0, target_T)
    bound = 2 * 2.0**2 * 2**-24 * math.log(tree.model.vocab)
    assert losses(student)[0][1] == pytest.approx(float(total.detach()) / (8 * 31), abs=bound)


def test_the_model_comes_nearer_to_its_teacher(student: dict[str, Any], tmp_path: Path) -> None:
    long = changed(student, tmp_path / "with", steps=30)
    long["train"]["teacher"]["weight"] = 20.0
    slight = copy.deepcopy(changed(long, tmp_path / "without"))
    slight["train"]["teacher"]["weight"] = 1e-6
    for run in (long, slight):
        optimus.train(run)
    assert losses(long)[0] == losses(slight)[0]
    assert losses(long)[-1][1] < 0.7 * losses(slight)[-1][1]


@pytest.mark.parametrize(
    "sections",
    [
        {"state": {"shard": "parameters"}},
        {"parallel": {"context": 2}},
        {"parallel": {"pipeline": 2}},
    ],
    ids=str,
)
def test_every_layout_with_whole_logits_gives_the_same_numbers(
    student: dict[str, Any], tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Documents are separate for the teacher too."""
    student["data"]["documents"] = "mask"
    optimus.train(student)
    other = changed(student, tmp_path / "other") | sections
    run_ranks(part, 2, other)
    for one, two in zip(losses(student), losses(other), strict=True):
        assert two == pytest.approx(one, rel=1e-5)


def test_a_resumed_run_has_its_teacher(student: dict[str, Any], tmp_path: Path) -> None:
    student["train"]["teacher"] = student["train"]["teacher"]["checkpoints"][0]  # the short form
    optimus.train(student)
    parted = changed(student, tmp_path / "parted")
    optimus.train(changed(parted, tmp_path / "parted", stop_at=2))
    optimus.train(parted, resume=True)
    assert losses(parted) == losses(student)


def test_what_cannot_teach_is_refused(student: dict[str, Any], tmp_path: Path) -> None:
    def refused(expected: str, teacher: Any = None, **sections: Any) -> None:
        run = copy.deepcopy(student) | sections
        run["train"]["teacher"] = teacher or run["train"]["teacher"]
        with pytest.raises(UserError, match=expected):
            optimus.train(run)

    refused("train.teacher: checkpoint .*nowhere does not exist", str(tmp_path / "nowhere"))
    refused("train.teacher needs whole logits, but parallel.tensor shards the vocabulary", parallel={"tensor": 2})
    divided = {"pipeline": 2, "vocabulary": True}
    refused("parallel.vocabulary shards the vocabulary", parallel=divided)
    refused("has a vocabulary of 320, but the model has 400", model=student["model"] | {"vocab": 400})
    refused("unknown key 'train.teacher.wieght'", {"checkpoints": ["a"], "wieght": 1})
    with pytest.raises(UserError, match=r"train.teacher.*at least 1 item"):
        load_config(student | {"train": student["train"] | {"teacher": []}})
