"""The dispatcher's interface: the layer uses the dispatcher it is given, and local indices name this rank's experts
only."""

import torch
from torch import Tensor, nn

from optimus.model.architecture import ModelConfig
from optimus.model.moe.choices import local_indices
from optimus.model.moe.dispatch import NOTHING, OverlappedWork, TokenDispatcher, local_dispatch
from optimus.model.moe.layer import MoeLayer

CONFIG = ModelConfig(
    family="olmoe", hidden=8, layers=1, heads=1, intermediate=4, vocab=8, experts=6, experts_per_token=2
)


def layer(dispatch: TokenDispatcher = local_dispatch) -> MoeLayer:
    torch.manual_seed(0)
    made = MoeLayer(CONFIG)
    made.dispatch = dispatch
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def test_the_layer_calls_its_dispatch_with_its_experts() -> None:
    x = torch.randn(2, 3, 8)
    before, _ = layer()(x)
    seen = []

    def doubling(
        x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: nn.Module, overlapped: OverlappedWork = NOTHING
    ) -> Tensor:
        seen.append((x_TH.shape, weights_TK.shape, indices_TK.shape, experts))
        return 2 * local_dispatch(x_TH, weights_TK, indices_TK, experts)

    moe = layer(doubling)
    after, _ = moe(x)
    assert seen == [((6, 8), (6, 2), (6, 2), moe.experts)]
    assert after.equal(2 * before)


def test_the_experts_are_called_as_a_module() -> None:
    """The experts are called as a module, so that hooks on them run."""
    moe, calls = layer(), []
    moe.experts.register_forward_pre_hook(lambda *_: calls.append("before"))
    moe(torch.randn(1, 3, 8))
    assert calls == ["before"]


def test_local_indices() -> None:
    indices = torch.arange(8).view(4, 2)
    assert local_indices(indices, 0, 8).equal(indices)
    assert local_indices(indices, 2, 3).flatten().tolist() == [-1, -1, 0, 1, 2, -1, -1, -1]
    assert local_indices(indices.int(), 6, 2).dtype == torch.int32
