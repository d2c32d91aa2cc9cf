"""The benchmark of models of `transformers` compares the same work and reports all promised rows."""

from typing import Any

import pytest

from benchmarks import any_model
from benchmarks.any_model import Task
from optimus.errors import UserError
from optimus.model.families import families

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
_SPARSE = {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.in_turn(0, 3)
def test_rows_and_ratios() -> None:
    tasks = {
        "llama": Task(("LlamaConfig", _SIZES), (2, 16)),
        "granite": Task(("GraniteMoeConfig", _SPARSE), (2, 16), microbatches=2),
    }
    found = any_model.run(rounds=1, tasks=tasks)
    assert [(row["task"], row["contestant"]) for row in found.rows] == [
        *(("llama", who) for who in ("optimus", "plain loop", "Trainer", "optimus, own modules")),
        ("granite", "optimus"),
        *(("granite", f"optimus, {kind}") for kind in ("eager", "grouped_mm")),
        *(("granite", f"plain loop, {kind}") for kind in ("eager", "grouped_mm")),
    ]
    assert [*found.ratios] == [
        "llama.vs_plain_loop", "llama.vs_trainer", "llama.vs_own_modules", "granite.vs_eager", "granite.vs_grouped_mm",
        "granite.vs_plain_loop.eager", "granite.vs_plain_loop.grouped_mm",
    ]  # fmt: skip
    seconds = [row["step_s"] for row in found.rows[:2]]
    assert found.ratios["llama.vs_plain_loop"] == pytest.approx(seconds[1] / seconds[0])
    assert found.rows[0]["tokens_per_second"] == pytest.approx(32 / seconds[0])


@pytest.mark.in_turn(1, 3)
def test_modules_of_both_kinds_do_the_same_work() -> None:
    tasks = {"qwen3moe": any_model.FAMILIES["qwen3moe"]._replace(batch=(2, 16))}
    found = any_model.run(rounds=1, tasks=tasks)
    assert [row["contestant"] for row in found.rows] == ["optimus", "optimus, own modules"]
    assert [*found.ratios] == ["qwen3moe.vs_own_modules"]
    assert {*any_model.FAMILIES} == {name.replace("_", "") for name in families()} - {"prmoe"}  # not in `transformers`


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(UserError, match="--task llama-9k"):
        any_model.run(task=["llama-9k"])
