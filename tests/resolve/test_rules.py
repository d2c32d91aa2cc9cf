"""The update rule of each parameter, and the refusal of impossible groups."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.rules import ADAMW, LION, MUON
from optimus.config import ModelConfig
from optimus.config.tree import OptimizerConfig
from optimus.errors import UserError
from optimus.model import Transformer
from optimus.optim.adamw import AdamW
from optimus.optim.lion import Lion
from optimus.optim.muon import Muon
from optimus.optim.rule import Rule
from optimus.optim.rules import BETAS, RULES, RuleRow
from optimus.optim.schedule_free import ScheduleFree
from optimus.resolve.rules import rules_of

MODEL = {"family": "olmoe", "hidden": 32, "layers": 2, "heads": 2, "intermediate": 24, "vocab": 48}
EXPERTS = {"experts": 8, "experts_per_token": 2}


def rules(model: dict[str, Any], **optimizer: Any) -> dict[str, Rule]:
    with torch.device("meta"):
        whole = Transformer(ModelConfig.model_validate(MODEL | EXPERTS | model))
    return rules_of(OptimizerConfig.model_validate(optimizer), whole)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", AdamW(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.2)),
        ("lion", Lion(beta1=0.8, beta2=0.95, weight_decay=0.2)),
        ("schedule-free", ScheduleFree(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.2)),
    ],
)
def test_one_rule_for_all(name: str, expected: Rule) -> None:
    found = rules({}, name=name, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.2)
    assert set(found.values()) == {expected}


def test_muon_is_for_matrices_and_experts() -> None:
    found = rules({}, name="muon", momentum=0.9, eps=1e-6)
    assert set(found.values()) == {replace(MUON, momentum=0.9), replace(ADAMW, eps=1e-6)}
    of_muon = {name.split(".", 2)[-1] for name, rule in found.items() if isinstance(rule, Muon)}
    assert of_muon == {"attention.qkv.weight", "attention.out.weight", "moe.experts.gate_up", "moe.experts.down"}


def test_the_last_group_that_says_it_decides() -> None:
    groups = [
        {"match": "*", "lr_scale": 0.5, "weight_decay": 0.3},
        {"match": ["router", "blocks.1.*norm.weight"], "name": "lion"},
        {"match": "blocks.*", "lr_scale": 2.0},
        {"match": "vector", "weight_decay": 0.0},
    ]
    found = rules({}, groups=groups)
    assert found["embedding.weight"] == replace(ADAMW, lr_scale=0.5, weight_decay=0.3)
    assert found["blocks.0.attention_norm.weight"] == replace(ADAMW, lr_scale=2.0, weight_decay=0.0)
    assert found["blocks.1.attention_norm.weight"] == replace(LION, lr_scale=2.0, weight_decay=0.0)
    assert found["blocks.0.moe.router.weight"] == replace(LION, lr_scale=2.0, weight_decay=0.3)
    assert found["final_norm.weight"] == replace(ADAMW, lr_scale=0.5, weight_decay=0.0)


def test_a_group_gives_muon_to_what_else_is_a_matrix() -> None:
    found = rules({}, groups=[{"match": "router", "name": "muon"}], momentum=0.9)
    of_muon = {name for name, rule in found.items() if rule == replace(MUON, momentum=0.9)}
    assert of_muon == {"blocks.0.moe.router.weight", "blocks.1.moe.router.weight"}


@pytest.mark.parametrize(
    ("model", "groups", "expected"),
    [
        (
            {},
            [{"match": "expert", "lr_scale": 0.5}, {"match": "blocks.0.*", "name": "muon"}],
            r"optimizer\.groups\.1: muon cannot update blocks\.0\.\S*norm\.weight, whose role is vector: match",
        ),
        (
            {},
            [{"match": ["head", "blocks.*.atention.qkv.weight"], "lr_scale": 0.5}],
            r"optimizer\.groups\.0\.match: the model has no parameter 'blocks\.\*\.atention\.qkv\.weight': "
            r"did you mean 'blocks\.\*\.attention\.qkv\.weight'\?",
        ),
        ({}, [{"match": "rooter", "lr_scale": 0.5}], r"no parameter 'rooter': did you mean 'router'\?"),
        ({"tie_embeddings": True}, [{"match": "head", "lr_scale": 0.5}], r"no parameter 'head': "),
    ],
)
def test_groups_that_cannot_work(model: dict[str, Any], groups: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        rules(model, groups=groups)


def test_a_later_group_takes_vectors_out_again() -> None:
    found = rules({}, groups=[{"match": "blocks.0.*", "name": "muon"}, {"match": "vector", "name": "lion"}])
    assert found["blocks.0.attention_norm.weight"] == LION
    assert found["blocks.0.moe.router.weight"] == MUON


def test_a_rule_that_cannot_update_what_it_gets_by_default_names_the_key_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RULES, "_added", {})
    RULES.extend({"picky": RuleRow("picky", Lion, BETAS, never=("vector",))})
    with pytest.raises(
        UserError, match=r"^optimizer\.name: picky cannot update \S*norm\.weight, whose role is vector: "
    ):
        rules({}, name="picky")
