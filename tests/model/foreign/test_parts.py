"""Children of blocks that run as units: which are found, and what they recompute and gather."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.adapted import config_json, config_of
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model.build import causal_model
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.parts_of_blocks import parts_of_blocks
from optimus.model.foreign.probes import CUT
from optimus.model.units import units_of
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation

WIDTH, LENGTH = 8, 2 * CUT


class Mixer(nn.Linear):
    """Adds the mean of earlier positions."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x.cumsum(1)), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH)
        self.mixer = Mixer(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x=self.first_norm(x))[0]
        return x + self.mlp(x)


class Scaled(Block):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Looking(Block):
    """Uses a child's weight outside of the child."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.mlp.weight


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(super().forward(x))


class Tied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp.weight = self.mixer.weight


class Named(Block):
    """Calls a child with another argument first."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(x=self.first_norm(x))[0] + nn.functional.linear(x, **vars(self.mlp)["_parameters"])


def found(*kinds: type[Block]) -> dict[int, list[tuple[str, str, int]]]:
    torch.manual_seed(0)
    blocks = [kind() for kind in kinds]
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)

    def run() -> Tensor:
        y = x
        for block in blocks:
            y = block(y)
        return y

    parts = parts_of_blocks(blocks, CUT, run)
    return {number: [(part.name, part.kind, part.outputs) for part in each] for number, each in parts.items()}


PARTS = [("first_norm", "norm", 0), ("mixer", "attention", 2), ("mlp", "mlp", 0)]


def test_parts_are_found_in_the_order_of_their_calls() -> None:
    assert found(Block, Block) == {0: PARTS, 1: PARTS}


@pytest.mark.parametrize("kind", [Scaled, Twice, Tied])
def test_a_block_that_is_more_than_its_children_has_no_parts(kind: type[Block]) -> None:
    assert found(Block, kind) == {0: PARTS}


@pytest.mark.parametrize("kind", [Looking, Named])
def test_parameters_used_outside_of_their_module_are_noticed(kind: type[Block]) -> None:
    assert PARTS not in found(kind).values()


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", ["norm", "attention", "norm", "mlp"]),
        ("olmo2", ["attention", "norm", "mlp", "norm"]),
        ("granitemoe", ["norm", "attention", "norm", "mlp"]),
        ("falcon_h1", ["norm", "attention", "attention", "norm", "mlp"]),
        ("gpt2", ["norm", "attention", "norm", "mlp"]),
    ],
)
def test_families_have_parts(family: str, kinds: list[str]) -> None:
    with torch.device("meta"):
        model: Any = causal_model(config_of(family).model)
    for block in model.blocks:
        assert [kind for unit in units_of(block) for kind, _ in unit.steps] == kinds


@pytest.mark.in_turn(2, 3)
def test_a_block_with_parameters_of_its_own_recomputes_as_one() -> None:
    """DeepSeek-V4's blocks return streams whose connections have gradients between its children."""
    with pytest.raises(UserError, match="recomputes whole blocks only"):
        config_of("deepseek_v4", recompute=["attention"])
    with pytest.raises(UserError, match="recompute with the rest of the feed-forward layer: say mlp"):
        config_of("granitemoe", recompute=["moe"])
    with pytest.raises(UserError, match="recomputes block by block"):
        config_of("llama", recompute=["block"], recompute_every=2)
    assert config_of("llama", recompute=["mlp"], recompute_every=2).recompute_every == 2


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_more_parts_save_less(family: str) -> None:
    model = TransformersModel(transformers=config_json(family))

    def saved(*kinds: str) -> int:
        mesh = Mesh()
        return activation_bytes(model, Recomputation(kinds), micro_batch=2, context=64, itemsize=4, mesh=mesh).saved

    nothing, attention, mlp, both, block = (
        saved(),
        saved("attention"),
        saved("mlp"),
        saved("attention", "mlp"),
        saved("block"),
    )
    assert block < both < min(attention, mlp)
    assert max(attention, mlp) < nothing
    assert attention + mlp == both + nothing
