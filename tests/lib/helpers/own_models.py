"""Models of a user's own, as a plugin describes them: right ones of several kinds, and one for each mistake."""

import math
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.extend import ModelRow, ModelSpec, Normal, Uniform
from optimus.model.batch import Batch

INITIAL: dict[str, Any] = {"*norm.weight": "ones", "*bias": "zeros", "*bias_??_l0": "zeros", "*": Normal(0.05)}


class Convolution(nn.Module):
    """Mixes the last positions of each channel, and gates them; `heads` numbers of channels share a filter."""

    def __init__(self, width: int, kernel: int = 3, heads: int | None = None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(2 * width, 2 * width, kernel, groups=heads or 2 * width, padding=kernel - 1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(self.up(self.norm(x)).mT)[..., : x.shape[1]].mT
        return x + self.down(F.silu(mixed))


class Scaled(Convolution):
    """A `Convolution` with a scalar for the inner columns, which tensor parallelism divides, and one for the result."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inner, self.outer = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(self.up(self.norm(x)).mT)[..., : x.shape[1]].mT
        return x + self.outer * self.down(F.silu(mixed) * self.inner)


class Recurrence(nn.Module):
    """A recurrent network, whose class keeps a list of its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.cell(self.norm(x))[0], None


class Attention(nn.Module):
    """Causal attention within documents, with one product for queries, keys and values, and a feed-forward layer."""

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)
        self.register_buffer("mask", torch.ones(positions, positions, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor, document_BS: Tensor | None = None) -> Tensor:
        mask = self.mask[: x.shape[1], : x.shape[1]]
        if document_BS is not None:
            mask = mask & (document_BS[:, None, :, None] == document_BS[:, None, None, :])
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def positions_of(tokens_BS: Tensor, document_BS: Tensor | None) -> Tensor:
    """Returns the positions, counted from 0 in each document."""
    position_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    if document_BS is None:
        return position_BS
    first_BS = F.pad(document_BS[:, 1:] != document_BS[:, :-1], (1, 0), value=True)
    return position_BS - (position_BS * first_BS).cummax(1).values


class Model(nn.Module):
    """An embedding, learned positions if asked for, blocks, a norm and an output layer, in a module of a module."""

    def __init__(self, vocab: int, width: int, blocks: list[nn.Module], positions: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(vocab, width)
        self.body.positions = nn.Embedding(positions, width) if positions else None
        self.body.layers = nn.ModuleList(blocks)
        self.body.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.body.embed.weight

    def forward(self, tokens: Tensor, document_BS: Tensor | None = None) -> Tensor:
        x = self.body.embed(tokens)
        if self.body.positions is not None:
            x = x + self.body.positions(positions_of(tokens, document_BS))
        for layer in self.body.layers:
            made = layer(x) if document_BS is None else layer(x, document_BS)
            x = made[0] if isinstance(made, tuple) else made
        return self.head(self.body.norm(x))


def described(module: nn.Module, **more: Any) -> ModelSpec:
    """Returns the description of a `Model`."""
    parts: dict[str, Any] = {"blocks": "body.layers", "embedding": "body.embed", "head": "head", "initial": INITIAL}
    return ModelSpec(module, **parts | more)


def convolutions(vocab: int, width: int = 32, depth: int = 4, kernel: int = 3) -> ModelSpec:
    splits = {"*.up": "colwise", "*.down": "rowwise"}
    return described(Model(vocab, width, [Convolution(width, kernel) for _ in range(depth)]), splits=splits)


def shared(vocab: int, width: int = 32, depth: int = 4) -> ModelSpec:
    blocks: list[nn.Module] = [Convolution(width, 3, heads=8) for _ in range(depth)]
    return described(
        Model(vocab, width, blocks, tied=True), forward=lambda module, batch: module(batch.tokens_BS) * 0.5
    )


def recurrent(vocab: int, width: int = 32, depth: int = 4) -> ModelSpec:
    return described(Model(vocab, width, [Recurrence(width) for _ in range(depth)]))


def attending(vocab: int, width: int = 32, depth: int = 4, heads: int = 4, positions: int = 64) -> ModelSpec:
    def forward(module: Any, batch: Batch) -> Tensor:
        documents = batch.document_BS
        return module(batch.tokens_BS, None if documents is None else documents.to(batch.tokens_BS.device))

    blocks: list[nn.Module] = [Attention(width, heads, positions) for _ in range(depth)]
    return described(Model(vocab, width, blocks, positions), forward=forward, documents=True)


def masked(vocab: int, width: int = 32, positions: int = 48) -> ModelSpec:
    """Returns a model with a mask of limited size and without learned positions."""
    return described(Model(vocab, width, [Attention(width, 4, positions) for _ in range(2)]))


def scaled(vocab: int, width: int = 32) -> ModelSpec:
    initial = {"*.inner": 0.8, "*.outer": 0.5, **INITIAL}
    return described(Model(vocab, width, [Scaled(width) for _ in range(4)]), initial=initial)


def buffered(vocab: int, width: int = 32) -> ModelSpec:
    model = Model(vocab, width, [Convolution(width) for _ in range(2)])
    model.register_buffer("codes", torch.tensor([300, 5, 70_000]))
    model.body.register_buffer("scale", torch.tensor([1.0009765625, 3.0]))
    model.body.norm.register_buffer("used", torch.tensor(True))
    return described(model)


def listed(kernels: tuple[int, ...], kind: Literal["conv"], scale: tuple[int, int] = (1, 2)) -> ModelSpec:
    assert isinstance(kernels, tuple)
    assert scale == (1, 2)
    return described(Model(320, 32, [Convolution(32, kernel) for kernel in kernels]))


# ---- One model for each mistake ----


class Changed(nn.Module):
    """A block that does something else with what a right one makes."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = Convolution(32), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


def _blocks(change: Callable[[Tensor], Tensor] = lambda x: x) -> list[nn.Module]:
    return [Changed(change), Changed(change)]


def _not_called(module: Any, batch: Batch) -> Tensor:
    x = F.embedding(batch.tokens_BS, module.body.embed.weight)
    for layer in module.body.layers:
        x = layer(x)
    return module.head(module.body.norm(x))


def _between(module: Any, batch: Batch) -> Tensor:
    x = module.body.embed(batch.tokens_BS)
    for layer in module.body.layers:
        x = layer(x) + 1
    return module.head(module.body.norm(x))


def _beside() -> ModelSpec:
    model = Model(320, 32, _blocks())
    model.scale = nn.Parameter(torch.ones(32))
    return described(model)


def _unused() -> ModelSpec:
    blocks = _blocks()
    blocks[1].extra = nn.Linear(32, 32)
    return described(Model(320, 32, blocks))


def _shared_block() -> ModelSpec:
    block = Convolution(32)
    return described(Model(320, 32, [block, block]))


def _frozen() -> ModelSpec:
    model = Model(320, 32, _blocks())
    model.body.norm.weight.requires_grad_(False)
    return described(model)


def _on_meta() -> ModelSpec:
    with torch.device("meta"):
        return _with()


def _with(change: Callable[[Tensor], Tensor] = lambda x: x, **more: Any) -> ModelSpec:
    return described(Model(320, 32, _blocks(change)), **more)


class Attribute(nn.Module):
    """A block with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Convolution(32), torch.ones(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Reserved(Convolution):
    """A block with an attribute that the adapter sets."""

    outputs = 2


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: {}["width"], "the function raises KeyError: 'width'"),
    "returns a module": (lambda: Model(320, 32, _blocks()), "the function returns Model: return a ModelSpec"),
    "blocks": (
        lambda: _with(blocks="layers"),
        "blocks 'layers' is no module, not a ModuleList: did you mean 'body.layers'?",
    ),
    "head": (lambda: _with(head="body.norm"), "head 'body.norm' is RMSNorm, not a Linear"),
    "empty": (lambda: described(Model(320, 32, [])), "blocks 'body.layers' is empty"),
    "beside": (_beside, "the parameter scale is beside the blocks: put it into a module that the model calls"),
    "shared": (_shared_block, "body.layers.0.norm.weight and body.layers.1.norm.weight are one parameter"),
    "frozen": (_frozen, "the parameter body.norm.weight has no gradient: make it a buffer, or use train.freeze"),
    "a name": (
        lambda: described(Model(320, 32, [Reserved(32)])),
        "the attribute body.layers.0.outputs has a name that the library uses itself: rename it",
    ),
    "initial": (lambda: _with(initial={"*bias": "zeros"}), "has no initial values: add a pattern to `initial`"),
    "a word": (lambda: _with(initial={"*": "one"}), "is 'one': give ones, zeros, normal, a number or Normal"),
    "a text": (lambda: described("model"), "module is str: give the model, an nn.Module"),  # type: ignore[arg-type]
    "a list": (lambda: _with(initial=[("*", 1)]), "initial is list: give a mapping from patterns of names to values"),
    "a number as pattern": (lambda: _with(initial={1: 0.0}), "initial has the pattern 1: give a text"),
    "a split of a number": (lambda: _with(splits={1: "colwise"}), "splits has the pattern 1: give a text"),
    "a list of blocks": (lambda: _with(blocks=["body"]), "blocks is ['body']: give the name of a module, a text"),
    "a list as head": (lambda: _with(head=["head"]), "head is ['head']: give the name of a module, a text"),
    "not a number": (lambda: _with(initial={"*": math.nan}), "is nan: give finite numbers"),
    "an infinity": (lambda: _with(initial={"*": math.inf}), "is inf: give finite numbers"),
    "a mean": (lambda: _with(initial={"*": Normal(0.1, math.nan)}), "mean=nan, low=-inf, high=inf): give finite"),
    "a range": (lambda: _with(initial={"*": Uniform(1.0, 0.0)}), "is Uniform(low=1.0, high=0.0): give finite numbers"),
    "an open range": (lambda: _with(initial={"*": Uniform(0.0, math.inf)}), "high=inf): give finite numbers"),
    "a cut": (lambda: _with(initial={"*": Normal(0.1, 0.0, 1.0, -1.0)}), "high=-1.0): give low not above high"),
    "two lists": (lambda: _with(splits=["*.up"]), "splits is list: give a mapping from patterns of names to values"),
    "no function": (lambda: _with(forward="forward"), "forward is str: give a function of the module and the batch"),
    "exits": (lambda: sys.exit("no width"), "the function raises SystemExit: no width"),
    "a cap": (lambda: _with(logit_cap=-1.0), "logit_cap is -1.0: give a number above 0, or None"),
    "a width": (lambda: _with(initial={"*": Normal(-0.1)}), "has the standard deviation -0.1: give a number from 0"),
    "on meta": (_on_meta, "body.embed.weight lies on the meta device: create the model with values"),
    "a style": (lambda: _with(splits={"*.up": "columns"}), "splits: *.up is 'columns': it must be colwise or rowwise"),
    "a pattern": (lambda: _with(splits={"*.gate": "colwise"}), "splits: no module has a name like *.gate"),
    "a convolution": (lambda: _with(splits={"*.conv": "colwise"}), "conv is no nn.Linear in the blocks"),
    "fails": (
        lambda: _with(lambda x: x @ x),
        "its forward pass on the meta device (without values; tensors must be parameters or buffers) on tokens [2, 24] ",
    ),
    "a tensor": (
        lambda: described(Model(320, 32, [Attribute()])),
        "tensors must be parameters or buffers) on tokens [2, 24]",
    ),
    "shape": (lambda: _with(forward=lambda m, b: m(b.tokens_BS)[0]), "forward returns [24, 320] for tokens [2, 24]"),
    "a tuple": (lambda: _with(forward=lambda m, b: (m(b.tokens_BS), None)), "forward returns tuple: it must return a"),
    "a number": (lambda: _with(forward=lambda m, b: 3), "forward returns int: it must return a tensor, the logits"),
    "not called": (lambda: _with(forward=_not_called), "its forward pass does not call body.embed, whose parameters"),
    "random": (lambda: _with(lambda x: F.dropout(x, 0.1)), "two passes give different logits: remove dropout"),
    "later tokens": (lambda: _with(lambda x: x + x.mean(1, keepdim=True)), "its logits depend on later tokens"),
    "unused": (_unused, "the parameter body.layers.1.extra.bias gets no gradient"),
    "documents": (
        lambda: _with(documents=True),
        "documents=True, but two documents in a sequence have other logits than each by itself",
    ),
    "logits": (
        lambda: _with(forward=lambda m, b: m(b.tokens_BS).log_softmax(-1)),
        "the output layer is followed by something",
    ),
}


def _large(width: int = 12_000) -> ModelSpec:
    return described(Model(320, width, [Convolution(width)]))


ROWS = [
    ModelRow("convolutions", convolutions, small={"width": 16, "depth": 1}),
    ModelRow("shared", shared),
    ModelRow("recurrent", recurrent),
    ModelRow("attending", attending, small={"width": 16, "heads": 2, "depth": 2}),
    ModelRow("scaled", scaled),
    ModelRow("factor", shared, small={"depth": 1}),
    ModelRow("masked", masked),
    ModelRow("buffered", buffered),
    ModelRow("listed", listed),
    ModelRow("large", _large),
    ModelRow("between", lambda: _with(forward=_between)),
    ModelRow("undivided", lambda: _with(lambda x: x, splits={"*.down": "colwise"})),
    *(ModelRow(f"wrong: {name}", make) for name, (make, _) in MISTAKES.items()),
]
