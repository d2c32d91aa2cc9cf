"""Every impossible division of a model over ranks is refused when the configuration is read; the message names a cure."""

import re
from typing import Any

import pytest

from optimus.config import RunConfig, load_config
from optimus.errors import UserError
from optimus.resolve.ranks import least_ranks

DENSE = {"family": "olmo", "hidden": 48, "layers": 2, "heads": 12, "intermediate": 96, "vocab": 100}
EXPERTS = {**DENSE, "family": "olmoe", "experts": 4, "experts_per_token": 2}
TRAIN = {"output": "x", "steps": 10, "global_batch": 8, "micro_batch": 2, "sequence_length": 32}


def tree(model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> RunConfig:
    return load_config({"model": model, "data": {"path": "x"}, "train": TRAIN, "parallel": parallel, **sections})


def refused(expected: str, model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> None:
    with pytest.raises(UserError, match=r"^config: ") as caught:
        tree(model, parallel, **sections)
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"tensor": [2, 2, 2]}, r"parallel: tensor \[2, 2, 2\] must be a number, or a list of .* \[outputs, inputs\]"),
        ({"tensor": [2]}, r"parallel: tensor \[2\] must be a number, or a list of two numbers"),
        ({"tensor": [0, 2]}, r"parallel: tensor \[0, 2\] must be a number, or a list of two numbers"),
        ({"sequence": True}, r"parallel: sequence splits tokens over the tensor-parallel ranks, but tensor is 1: remove it"),
        ({"sequence": True, "tensor": [1, 1]}, r"parallel: sequence splits tokens .* tensor is 1: remove it"),
        ({"tensor": 8}, r"model\.heads 12 is not a multiple of parallel\.tensor 8: set parallel\.tensor to a divisor of 12"),
        ({"tensor": [1, 5]}, r"model\.hidden 48 is not a multiple of the inputs of parallel\.tensor 5: set the inputs"),
        ({"context": 3}, r"train\.sequence_length 32 is not a multiple of 6, .* 3 needs \(ring\): set it to 30, "),
        ({"context": 32}, r"is not a multiple of 64, which parallel\.context 32 needs \(ring\): set it to 64"),
        (
            {"context": 3, "context_method": "ulysses"},
            r"train\.sequence_length 32 is not a multiple of 3, .* needs \(ulysses\): set it to 30",
        ),
        (
            {"context": 8, "context_method": "ulysses"},
            r"parallel\.context 8 with .* ulysses shards heads, but a rank has 12 of them: set .* to a divisor",
        ),
        (
            {"context": 4, "context_method": "ulysses", "tensor": 2},
            r"parallel\.context 4 with .* ulysses shards heads, but a rank has 6 of them",
        ),
        ({"expert": 2}, r"parallel\.expert 2: the model is dense: remove it"),
        ({"expert_tensor": 2, "tensor": 2}, r"parallel\.expert_tensor 2: the model is dense: remove it"),
    ],
)  # fmt: skip
def test_a_dense_model_that_cannot_be_divided(parallel: dict[str, Any], expected: str) -> None:
    refused(expected, DENSE, parallel)


def test_sequences_longer_than_the_learned_positions() -> None:
    model = {**DENSE, "family": "gpt2", "learned_positions": 31}
    refused(r"train\.sequence_length 32 is more than model\.learned_positions 31: lower it", model, {})
    tree({**model, "learned_positions": 32}, {})


def test_a_feed_forward_layer_that_cannot_be_divided() -> None:
    expected = r"model\.intermediate 90 is not a multiple of parallel\.tensor 4: set parallel\.tensor to a divisor"
    refused(expected, {**DENSE, "intermediate": 90}, {"tensor": 4})
    assert tree({**EXPERTS, "intermediate": 90}, {"tensor": 4}).parallel.grid == (
        4,
        1,
    )  # `parallel.expert_tensor` divides the experts


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"expert": 3}, r"model\.experts 4 is not a multiple of parallel\.expert 3"),
        (
            {"tensor": 2, "expert_tensor": 4},
            r"parallel: expert_tensor 4 is larger than tensor 2: set it to at most 2, and use expert for the rest",
        ),
        ({"expert_tensor": 2}, r"parallel: expert_tensor 2 is larger than tensor 1: set it to at most 1"),
        ({"tensor": 4, "expert_tensor": 3}, r"parallel: expert_tensor 3 does not divide tensor 4: choose a divisor"),
    ],
)
def test_experts_that_cannot_be_divided(parallel: dict[str, Any], expected: str) -> None:
    refused(expected, EXPERTS, parallel)


def test_parts_of_an_expert_that_cannot_be_divided() -> None:
    expected = r"model\.intermediate 90 is not a multiple of parallel\.expert_tensor 4: set .* to a divisor"
    refused(expected, {**EXPERTS, "intermediate": 90}, {"tensor": 4, "expert_tensor": 4})


def test_tokens_that_cannot_be_divided() -> None:
    """Sequence parallelism and experts divide the tokens of a microbatch; a dense model without it keeps all tokens on
    every rank."""
    train = {"train": {**TRAIN, "micro_batch": 1, "sequence_length": 30}}
    expected = (
        r"the 30 tokens of a microbatch \(train\.micro_batch 1 x train\.sequence_length 30 / parallel\.context 1\) cannot "
        r"be split evenly over the 4 ranks of parallel\.tensor: change one of them"
    )
    refused(expected, DENSE, {"tensor": 4}, **train)
    refused(expected, EXPERTS, {"tensor": [2, 2], "sequence": False}, **train)
    assert tree(DENSE, {"tensor": 4, "sequence": False}, **train).parallel.grid == (4, 1)
    train["train"] |= {"sequence_length": 24}
    refused(r"the 6 tokens .* parallel\.context 4\)", DENSE, {"tensor": 4, "context": 4}, **train)


BASELINE = {"tensor": 4, "expert_tensor": 4, "sequence": False}


@pytest.mark.parametrize(
    ("parallel", "dispatch"),
    [
        ({}, "alltoall"),
        (BASELINE, "allgather"),
        (BASELINE | {"sequence": True}, "alltoall"),
        (BASELINE | {"expert_tensor": 2}, "alltoall"),
        (BASELINE | {"tensor": [2, 2]}, "alltoall"),
    ],
)
def test_duplicates_that_cannot_be_kept(parallel: dict[str, Any], dispatch: str) -> None:
    moe = {"drop_duplicates": False, "dispatch": dispatch}
    expected = r"moe\.drop_duplicates: false needs moe\.dispatch: alltoall, parallel\.sequence: false, "
    refused(expected, EXPERTS, parallel, moe=moe)
    assert tree(EXPERTS, BASELINE, moe=moe | {"dispatch": "alltoall"}).moe.drop_duplicates is False


@pytest.mark.parametrize(
    ("parallel", "least"),
    [
        ({}, 1),
        ({"tensor": 2, "context": 2}, 4),
        ({"tensor": [2, 2], "expert": 2}, 4),
        ({"tensor": 2, "expert": 4}, 4),
        ({"tensor": 2, "expert": 4, "expert_tensor": 2}, 8),
        ({"tensor": 4, "expert": 2, "data": 2}, 8),
        ({"tensor": 2, "pipeline": 2}, 4),
        ({"tensor": 2, "pipeline": 2, "pipeline_stride": 8}, 16),
        ({"tensor": 2, "pipeline": 2, "pipeline_stride": 4, "data": 4}, 16),
    ],
)
def test_possible_neighbours(parallel: dict[str, Any], least: int) -> None:
    assert least_ranks(tree(EXPERTS, parallel)) == least


def test_sequence_parallelism_is_on_with_tensor_parallelism() -> None:
    on = [tree(DENSE, parallel).parallel.splits_sequence for parallel in ({}, {"tensor": 2}, {"tensor": [1, 2]})]
    assert on == [False, True, True]
    assert not tree(DENSE, {"tensor": 2, "sequence": False}).parallel.splits_sequence
