"""Declarations that modules make about their parameters."""

import pytest
import torch
from torch import nn

from optimus.config import ModelConfig
from optimus.model import Transformer
from optimus.model.parameters import Size, declarations, declare

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 24, "vocab": 48}
EXPERTS = {"family": "olmoe", "experts": 8, "experts_per_token": 2}
OF_DIM = {
    "vocab": 48,
    "residual": 32,
    "heads": 32,
    "hidden": 32,
    "ffn": 24,
    "expert_ffn": 24,
    "experts": 8,
    "choices": 8,
}
ROLES = {
    "embedding.weight": "embedding",  # also a tied head
    "head.weight": "head",
    "router.weight": "router",
    "experts.gate_up": "expert",
    "experts.down": "expert",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [{"family": "olmo"}, EXPERTS])
def test_dims_name_what_the_sizes_are(family: dict[str, object], tied: bool) -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig.model_validate(SIZES | family | {"tie_embeddings": tied}))
    declared = dict(declarations(model))
    parameters = dict(model.named_parameters())
    assert declared.keys() == parameters.keys()
    roles = {name: role for end, role in ROLES.items() for name in parameters if name.endswith(end)}
    for name, parameter in parameters.items():
        sizes = [OF_DIM.get(dim, size) for dim, size in zip(declared[name].dims, parameter.shape, strict=True)]
        assert sizes == list(parameter.shape), name
        assert declared[name].role == (roles.get(name) or ("vector" if parameter.dim() == 1 else "matrix")), name


def test_one_number_says_what_it_scales() -> None:
    """A parameter of one number must declare the dims that it scales, or none: its gradient may be a partial sum."""
    layer = nn.Module()
    with pytest.raises(
        ValueError, match=r"parameter alpha of Module is a scalar: name the dims that it scales in factor_of"
    ):
        declare(layer, "alpha", role="vector", initial=0.5)
    assert declare(layer, "alpha", role="vector", initial=0.5, factor_of=()).shape == ()


def test_a_parameter_made_otherwise_is_refused() -> None:
    layer = nn.Module()
    layer.weight = declare(layer, "weight", Size("residual", 2))
    layer.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(LookupError, match="parameter bias of Module has no declared dims"):
        list(declarations(layer))
