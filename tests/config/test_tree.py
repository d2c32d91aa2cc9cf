"""Combinations that cannot work are refused with the names of the fields; every field is described."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from optimus.config import RunConfig, load_config
from optimus.errors import UserError

DENSE = {"family": "olmo", "hidden": 64, "layers": 2, "heads": 4, "intermediate": 96, "vocab": 100}
EXPERTS = {**DENSE, "family": "olmoe", "experts": 4, "experts_per_token": 2}
TRAIN = {"output": "x", "steps": 10, "global_batch": 8, "micro_batch": 4, "context": 32}


def tree(model: dict[str, Any], **sections: Any) -> RunConfig:
    return load_config({"model": model, "data": {"path": "x"}, "train": TRAIN, **sections})


@pytest.mark.parametrize(
    ("model", "sections", "expected"),
    [
        ({**DENSE, "heads": 5}, {}, r"model: hidden 64 over 5 heads must give an even head size"),
        ({**DENSE, "heads": 64}, {}, r"model: hidden 64 over 64 heads must give an even head size"),
        ({**DENSE, "family": "olmoe"}, {}, r"model: family olmoe needs experts and experts_per_token"),
        ({**EXPERTS, "experts_per_token": 5}, {}, r"model: experts_per_token 5 is more than experts 4"),
        (
            {**EXPERTS, "family": "olmo"},
            {},
            r"model: family olmo is dense: remove experts, experts_per_token and renormalise",
        ),
        (DENSE, {"optimizer": {"betas": [0.9, 1.0]}}, r"optimizer: betas \[0\.9, 1\.0\] must lie in \[0, 1\)"),
        (DENSE, {"schedule": {"peak": 1e-5}}, r"schedule: minimum 4e-05 is above peak 1e-05"),
        (DENSE, {"train": {**TRAIN, "micro_batch": 3}}, r"train: global_batch 8 is not a multiple of micro_batch 3"),
        (DENSE, {"train": {**TRAIN, "stop_at": 11}}, r"train: stop_at 11 is beyond steps 10"),
        (DENSE, {"evaluate": {"every": 5}}, r"evaluate: every is set but text is not"),
        (DENSE, {"moe": {}}, r"moe: the model is dense: remove the section moe"),
        (DENSE, {"recompute": ["moe"]}, r"recompute: a dense model has no module 'moe'"),
        (EXPERTS, {"recompute": ["mlp"]}, r"recompute: a model whose blocks all have experts has no module 'mlp'"),
        (EXPERTS, {"recompute": ["auto", "moe"]}, r"recompute: auto is about all modules, remove the others"),
        (DENSE, {"recompute_every": 2}, r"recompute_every 2: nothing is recomputed: set recompute"),
        (DENSE, {"recompute": "auto", "recompute_every": 2}, r"recompute_every 2: auto chooses it: remove it"),
        (
            DENSE,
            {"recompute": ["norm"], "recompute_every": 99},
            r"recompute_every 99 is more than model\.layers \d+: lower",
        ),
        (
            DENSE,
            {"recompute": ["norm"], "recompute_budget": "1GB"},
            r"recompute_budget is what recompute: auto may use",
        ),
        (DENSE, {"recompute": "auto", "recompute_budget": "some"}, r"recompute_budget: not a size: 'some'"),
        (
            DENSE,
            {"parallel": {"data": 4}},
            r"train\.global_batch 8 is not a multiple of parallel\.data 4 times train\.micro_batch 4",
        ),
    ],
)
def test_impossible_combinations(model: dict[str, Any], sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=r"^config: ") as caught:
        tree(model, **sections)
    assert re.search(expected, str(caught.value))
    assert "\n" not in str(caught.value)


def test_possible_neighbours_of_the_impossible() -> None:
    found = tree({**EXPERTS, "experts_per_token": 4}, recompute=["norm", "attention", "moe"], parallel={"data": 2})
    assert (found.model.experts_per_token, found.parallel.data) == (4, 2)
    found = tree(DENSE, schedule={"name": "constant", "peak": 1e-5}, recompute=["mlp"])
    assert (found.schedule.peak, found.recompute) == (1e-5, ["mlp"])
    found = tree(DENSE, recompute="auto", recompute_budget="2KiB")
    assert (found.recompute, found.recompute_budget) == (["auto"], 2048)
    found = tree(DENSE, train={**TRAIN, "stop_at": 10}, optimizer={"betas": [0.0, 0.0]})
    assert (found.train.stop_at, found.optimizer.betas) == (10, [0.0, 0.0])


def sections(node: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in node.model_fields.items():
        yield f"{path}{name}", field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, f"{path}{name}.")


def test_every_field_is_described() -> None:
    for path, field in sections(RunConfig):
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        text = field.annotation.__doc__ if is_section else field.description
        assert text, path
        assert text.rstrip().endswith("."), path
