"""Impossible combinations are refused with the names of the fields; every field has a description."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from optimus.config import RunConfig, load_config, preset_names
from optimus.config.data import SourceConfig
from optimus.errors import UserError

DENSE = {"family": "olmo", "hidden": 64, "layers": 2, "heads": 4, "intermediate": 96, "vocab": 100}
EXPERTS = {**DENSE, "family": "olmoe", "experts": 4, "experts_per_token": 2}
TRAIN = {"output": "x", "steps": 10, "global_batch": 8, "micro_batch": 4, "sequence_length": 32}


def tree(model: dict[str, Any], **sections: Any) -> RunConfig:
    return load_config({"model": model, "data": {"path": "x"}, "train": TRAIN, **sections})


@pytest.mark.parametrize(
    ("model", "sections", "expected"),
    [
        ({**DENSE, "heads": 5}, {}, r"model: hidden 64 over 5 heads must give an even head size"),
        ({**DENSE, "heads": 64}, {}, r"model: hidden 64 over 64 heads must give an even head size"),
        ({**DENSE, "family": "llama", "head_size": 15}, {}, r"model: head_size 15 is odd: choose an even one"),
        ({**DENSE, "head_size": 15}, {}, r"model: head_size is 15, but 16 in all models of family olmo: remove it"),
        ({**DENSE, "hidden": 66, "head_size": 16}, {}, r"model: hidden 66 over 4 heads must give an even head size"),
        ({**DENSE, "family": "olmoe"}, {}, r"model: family olmoe needs experts and experts_per_token"),
        ({**EXPERTS, "experts_per_token": 5}, {}, r"model: experts_per_token 5 is more than experts 4"),
        (
            {**EXPERTS, "family": "olmo"},
            {},
            r"model: family olmo is dense: remove experts, experts_per_token and renormalise",
        ),
        (DENSE, {"optimizer": {"betas": [0.9, 1.0]}}, r"optimizer: betas \[0\.9, 1\.0\] must lie in \[0, 1\)"),
        (DENSE, {"optimizer": {"name": "adam"}}, r"'optimizer\.name' is 'adam': it must be 'adamw', 'muon', 'lion' or"),
        (DENSE, {"optimizer": {"name": "muon", "momentum": 1.0}}, r"'optimizer\.momentum' is 1\.0: .* less than 1"),
        (
            DENSE,
            {"optimizer": {"momentum": 0.9}},
            r"optimizer: momentum applies to muon only, which updates no parameters: remove it",
        ),
        (
            DENSE,
            {"optimizer": {"groups": [{"match": "*"}]}},
            r"optimizer\.groups\.0: the group changes nothing: give name, lr_scale or weight_decay, or remove it",
        ),
        (
            DENSE,
            {"optimizer": {"groups": [{"match": [], "lr_scale": 2.0}]}},
            r"optimizer\.groups\.0: match is empty: name a role or a pattern",
        ),
        (
            DENSE,
            {"optimizer": {"groups": [{"match": "*", "lr_scale": 0.0}]}},
            r"'optimizer\.groups\.0\.lr_scale' is 0\.0",
        ),
        (
            DENSE,
            {"optimizer": {"groups": [{"match": "*", "lr_scal": 2.0}]}},
            r"unknown key 'optimizer\.groups\.0\.lr_scal': did you mean 'optimizer\.groups\.0\.lr_scale'\?",
        ),
        (
            DENSE,
            {"state": {"shard": "optimizer", "shard_ranks": {"gradients": 2}}},
            r"state: shard_ranks\.gradients does not apply to shard: optimizer, which replicates the gradients: remove it",
        ),
        (
            DENSE,
            {"state": {"shard": "parameters", "shard_ranks": {"gradient": 2}}},
            r"unknown key 'state\.shard_ranks\.gradient': did you mean 'state\.shard_ranks\.gradients'\?",
        ),
        (
            DENSE,
            {"state": {"shard_ranks": "all"}},
            r"'state\.shard_ranks' is 'all': it must be a whole number or a mapping",
        ),
        (DENSE, {"lr_schedule": {"lr": 1e-5}}, r"schedule: min_lr 4e-05 is above lr 1e-05"),
        (DENSE, {"lr_schedule": {"cooldown_steps": 5}}, r"schedule: cooldown_steps: a cosine schedule has no cooldown"),
        (
            DENSE,
            {"lr_schedule": {"name": "wsd", "cooldown_steps": 99}},
            r"lr_schedule\.cooldown_steps 99 and the 0 steps of the warm-up exceed the run's 10 steps: lower one of them",
        ),
        (
            DENSE,
            {"lr_schedule": {"branch_from": "a"}, "checkpoint": {"load_path": "b"}},
            r"lr_schedule\.branch_from and checkpoint\.load_path exclude each other: remove one of them",
        ),
        (DENSE, {"train": {**TRAIN, "micro_batch": 3}}, r"train: global_batch 8 is not a multiple of micro_batch 3"),
        (DENSE, {"train": {**TRAIN, "stop_at": 11}}, r"train: stop_at 11 is beyond the run's 10 steps: lower it"),
        (
            DENSE,
            {"train": TRAIN | {"tokens": 999}},
            r"train: the length of the run .* but steps and tokens are given: keep one of them",
        ),
        (
            DENSE,
            {"train": TRAIN | {"epochs": 2.0}},
            r"train: the length of the run .* but steps and epochs are given",
        ),
        (
            DENSE,
            {"train": TRAIN | {"steps": None}},
            r"train: the length of the run is one of .* but it is missing: give one of them",
        ),
        (
            DENSE,
            {"train": TRAIN | {"steps": None, "tokens": 256, "stop_at": 2}},
            r"train: stop_at 2 is beyond the run's 1 steps: lower it",
        ),
        (DENSE, {"train": TRAIN | {"steps": None, "tokens": "2X"}}, r"train\.tokens: not a number: '2X'"),
        (DENSE, {"train": TRAIN | {"steps": None, "tokens": 0.5}}, r"'train\.tokens' is 0\.5"),
        (
            DENSE,
            {"evaluate": {"every": 5}},
            r"unknown key 'evaluate\.every': use validation: \[\{every: \.\.\.\}\]",
        ),
        (DENSE, {"validation": 2 * [{"text": "a"}]}, r"validation: two sets have no name: give each a different name"),
        (DENSE, {"moe": {}}, r"moe: the model is dense: remove the section moe"),
        (DENSE, {"recompute": ["moe"]}, r"recompute: a dense model has no module 'moe'"),
        (EXPERTS, {"recompute": ["mlp"]}, r"recompute: a model whose blocks all have experts has no module 'mlp'"),
        (EXPERTS, {"recompute": ["auto", "moe"]}, r"recompute: auto includes all modules: remove the others"),
        (DENSE, {"recompute_every": 2}, r"recompute_every 2: nothing is recomputed: set recompute"),
        (
            DENSE,
            {"parallel": {"layers": [{"layers": "1-0", "recompute": ["norm"]}]}},
            r"layers 1-0: give a layer, such as 3, or the first and the last one",
        ),
        (
            DENSE,
            {"parallel": {"layers": [{"layers": 1.5, "recompute": ["norm"]}]}},
            r"layers 1.5: give a layer, such as 3, or the first and the last one",
        ),
        (
            DENSE,
            {"parallel": {"layers": [{"layers": "0-1", "recompute": []}, {"layers": 1, "recompute": ["norm"]}]}},
            r"layers 0-1 and layers 1 overlap: give each layer once",
        ),
        (
            DENSE,
            {"parallel": {"layers": [{"layers": "999", "recompute": ["norm"]}]}},
            r"parallel\.layers\.0: there is no layer 999: the layers are 0 to \d+",
        ),
        (
            DENSE,
            {"parallel": {"layers": [{"layers": "0", "recompute": ["moe"]}]}},
            r"parallel\.layers\.0\.recompute: there is no module 'moe' in layers 0: remove it",
        ),
        (
            DENSE,
            {"parallel": {"layers": [{"layers": "0"}]}},
            r"layers 0: set recompute, tensor or both, or remove the range",
        ),
        (
            DENSE,
            {"parallel": {"tensor": 2, "layers": [{"layers": "0", "tensor": 0}]}},
            r"'parallel\.layers\.0\.tensor' is 0",
        ),
        (
            DENSE,
            {"parallel": {"tensor": 4, "layers": [{"layers": "0", "tensor": 3}]}},
            r"parallel\.layers\.0\.tensor 3 does not divide parallel\.tensor 4: choose a divisor",
        ),
        (
            DENSE,
            {"parallel": {"tensor": [2, 2], "layers": [{"layers": "0", "tensor": 1}]}},
            r"parallel\.layers\.0\.tensor 1: parallel\.tensor \[2, 2\] also shards the columns between layers",
        ),
        (
            DENSE,
            {"parallel": {"tensor": 2, "sequence": False, "layers": [{"layers": "0", "tensor": 1}]}},
            r"parallel\.layers\.0\.tensor 1 needs sequence parallelism: set parallel\.sequence to true",
        ),
        (
            DENSE,
            {"parallel": {"tensor": 2, "layers": [{"layers": "0", "tensor": 1}]}, "train": TRAIN | {"micro_batch": 1}},
            r"divides the sequences of a microbatch among 2 groups of tensor-parallel ranks, but train\.micro_batch is 1",
        ),
        (
            DENSE,
            {"parallel": {"layers": [{"layers": "0", "recompute": ["block", "norm"]}]}},
            r"parallel\.layers\.0\.recompute: block includes all modules: remove the others",
        ),
        (
            DENSE,
            {"recompute": "auto", "parallel": {"layers": [{"layers": "0", "recompute": ["norm"]}]}},
            r"recompute: auto chooses for all layers: remove the recompute of parallel\.layers",
        ),
        (
            DENSE,
            {"recompute": "auto", "recompute_every": 2},
            r"recompute_every 2: recompute auto chooses the value: remove it",
        ),
        (
            DENSE,
            {"recompute": ["norm"], "recompute_every": 99},
            r"recompute_every 99 is more than model\.layers \d+: lower",
        ),
        (
            DENSE,
            {"recompute": ["norm"], "recompute_budget": "1GB"},
            r"recompute_budget needs recompute: auto",
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
    found = tree({**DENSE, "family": "llama", "hidden": 66, "head_size": 16})
    assert found.model.head_size == 66 // 4
    found = tree(DENSE, lr_schedule={"name": "constant", "lr": 1e-5}, recompute=["mlp"])
    assert (found.lr_schedule.lr, found.recompute) == (1e-5, ["mlp"])
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


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [(256, 1), (257, 2), (2560, 10), ("2.56K", 10), ("1M", 3907), (2.56e3, 10), ("2B", 7812500), ("0.001T", 3906250)],
)
def test_a_length_in_tokens_is_as_many_steps_as_reach_them(tokens: Any, steps: int) -> None:
    assert tree(DENSE, train=TRAIN | {"steps": None, "tokens": tokens}).train.total_steps == steps


@pytest.mark.parametrize("steps", [1000, "1e3", 1e3, "1K"])
def test_steps_are_written_as_tokens_are(steps: Any) -> None:
    found = tree(DENSE, train=TRAIN | {"steps": steps, "stop_at": "1e2"}).train
    assert (found.total_steps, found.stop_at) == (1000, 100)


def test_the_cooldown_is_a_share_of_the_run() -> None:
    def cooldown(steps: int, **schedule: Any) -> int:
        return tree(DENSE, train=TRAIN | {"steps": steps}, lr_schedule=schedule).cooldown_steps

    assert [cooldown(steps, name="wsd") for steps in (3, 10, 1000)] == [1, 2, 200]
    assert cooldown(10, name="wsd", cooldown_steps=7) == 7
    assert cooldown(10) == 0


def test_the_warm_up_is_a_share_of_the_run_and_the_papers_presets_keep_theirs() -> None:
    def warmup(steps: int, model: Any = DENSE, **sections: Any) -> int:
        return tree(model, train=TRAIN | {"steps": steps}, **sections).warmup_steps

    assert [warmup(steps) for steps in (1, 19, 20, 300, 50_000, 1_000_000)] == [0, 0, 1, 15, 2500, 2500]
    assert warmup(300, lr_schedule={"warmup_steps": 0}) == 0
    assert warmup(300, lr_schedule={"warmup_steps": 299}) == 299
    for name in preset_names():
        paper = name.startswith("mula-") and "tiny" not in name
        assert warmup(300, name) == (2500 if paper else 15), name


def test_written_tokens_of_a_validation_set_stay() -> None:
    text = {"text": "x", "max_bytes": 1000}
    asked = [{"name": "a", **text}, {"name": "b", **text, "tokens": 131072}, {"name": "c", **text, "tokens": 7}]
    found = tree(DENSE, validation=asked)
    assert [each.tokens for each in found.validation] == [2000, 131072, 7]
    assert load_config(found).validation == found.validation


def test_a_source_is_named_after_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "web" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "web")
    spelled = [".", "..", "inner/", "inner/..", "/", "s3://bucket/books/"]
    labels = [SourceConfig(path=path).label for path in spelled]
    assert labels == ["web", tmp_path.name, "inner", "web", "/", "books"]
