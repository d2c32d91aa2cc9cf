"""Adapts causal language models of `transformers` and of plugins to `CausalModel`.

Every stage runs the whole forward pass of the author's code, in `transformers` or in a plugin. Blocks of other stages
pass their input on.

Legend: B batch, S sequence, H hidden, T tokens (in `router_stats`, once per layer), E experts.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.kernels.backend import compute_dtype
from optimus.kernels.expert_mlp import expert_mlp
from optimus.model.batch import Batch, moved
from optimus.model.causal import BlockRow, CausalModel
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.columns import WHOLE, Columns
from optimus.model.foreign.experts import FusedExperts, activation_of, choose_experts, on_this_rank
from optimus.model.foreign.modules import (
    LOCAL,
    AuthorsLinear,
    BlockOfParts,
    Calls,
    ColumnLeaf,
    HeadModule,
    Lookup,
    NormOverAll,
    RowLeaf,
    SharedOut,
    StagedBlock,
    StagedModule,
    StagedPart,
    Storage,
    Summed,
    become,
    computed,
)
from optimus.model.foreign.passing import Passing
from optimus.model.foreign.plugin import PluginModel
from optimus.model.foreign.records import ModelFacts, Split, Style
from optimus.model.moe.statistics import RouterStats
from optimus.model.moe.tokens import TokenSplit
from optimus.model.parameters import Declaration, Dim, Initial, Role, Values, stored_buffers
from optimus.model.sequence import SequenceSplit
from optimus.model.units import Unit
from optimus.model.vocabulary import Vocabulary


@dataclass(frozen=True)
class ForeignPositions:
    """The positions of a batch. `documents` is True if the batch has documents."""

    sequence: SequenceSplit
    documents: bool
    position_BS: Tensor | None  # None: every sequence has the positions from 0


class Stored(NamedTuple):
    """The stored parameters that hold one parameter of the author's code."""

    names: tuple[str, ...]  # names of the stored parameters, end to end along `dim`
    dim: int | None
    shape: tuple[int, ...]  # shape of the parameter in the author's code


class ForeignRow(list[nn.Module]):
    """Blocks of a foreign model, in order."""

    def __init__(self, blocks: Sequence[nn.Module], layers: Sequence[int]) -> None:
        super().__init__(blocks[i] for i in layers)
        self.layers = layers

    def run_in(self, segments: Sequence[tuple[range, Callable[..., Any]]]) -> None:
        """Sets the runner of each block whose children are units."""
        for positions, run in segments:
            for block in self[positions.start : positions.stop]:
                if isinstance(block, BlockOfParts):
                    block.__dict__["again"] = run


class ForeignStage:
    """The `ModelStage` of a `ForeignModel`."""

    def __init__(self, model: "ForeignModel", blocks: range, *, first: bool, last: bool) -> None:
        self.row = ForeignRow(model.blocks, blocks)
        self._model, self._blocks, self._first, self._last = model, blocks, first, last
        router = model.facts.router
        self._routes = router is not None and router.on and any(layer in blocks for layer in router.layers)

    def __call__(
        self,
        batch: Batch,
        positions_S: Tensor,
        positions: ForeignPositions,
        x_TH: Tensor | None,
        stats: RouterStats | None,
    ) -> tuple[Tensor, RouterStats | None]:
        tokens_BS = batch.tokens_BS[:, positions_S]
        received_BSH = None if x_TH is None else x_TH.view(*tokens_BS.shape, *(self._model.facts.stream or (-1,)))
        passing = Passing(self._blocks, self._first, self._last, positions.sequence, positions.documents, received_BSH)
        with self._model.running(passing):
            made = self._model.call(
                self._model.body, batch._replace(tokens_BS=tokens_BS), positions.position_BS, self._routes
            )
        own = self._model.router_stats(made) if self._routes else None
        made_BSH = passing.hidden_BSH if self._last else passing.stream_BSH
        assert made_BSH is not None
        passing.stream_BSH = passing.hidden_BSH = None
        if own is not None:
            own = self._model.tokens.sum(own)
            stats = own if stats is None else stats + own
        return made_BSH.reshape(tokens_BS.numel(), -1), stats


class ForeignModel(Storage, CausalModel):
    """A causal language model with its author's modules.

    `body` is the author's module, with parameters on the meta device. `initial` maps the author's parameter
    names to initialisations, and `stored` maps these names to stored parameters. `call(body, batch, position_BS,
    routes)` runs the author's forward pass, with router logits if `routes` is True. `caches` is True if the body
    accepts `past_key_values`.
    """

    replaceable = ("sequence", "step", "columns", "tokens")
    config: TransformersModel | PluginModel

    def __init__(
        self,
        config: TransformersModel | PluginModel,
        body: nn.Module,
        initial: Mapping[str, Initial],
        call: Callable[[nn.Module, Batch, Tensor | None, bool], Any],
        *,
        caches: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.facts, self.call, self.caches = config, config.facts, call, caches
        facts = self.facts
        self._modules.update(body._modules)
        self.__dict__["_buffers"] = body._buffers  # one dictionary, so that model and body have the same buffers
        self.__dict__["_non_persistent_buffers_set"] = body._non_persistent_buffers_set
        self.__dict__["_body"] = body
        self._columns: Columns = WHOLE
        self._entered: tuple[Tensor, int, Tensor] | None = None
        self.tokens = TokenSplit()
        self.passing: Passing | None = None
        for module in body.modules():
            module.__dict__["host"] = self
        self.__dict__["blocks"] = list(cast(nn.ModuleList, body.get_submodule(facts.blocks)))
        self._units: list[Unit] = []
        self.stored: dict[str, Stored] = {}
        frozen = [(name, each) for name, each in body.named_parameters() if not each.requires_grad]
        for _, each in frozen:
            each.requires_grad_()  # the run freezes the parameters in `untrained`
        fused, self.notes = choose_experts(body)
        _compose(self, facts, initial, fused)
        self.untrained = frozenset(
            part
            for name in (*facts.untrained, *(name for name, _ in frozen))
            if name in self.stored
            for part in self.stored[name].names
        )
        if self.untrained:
            names = ", ".join(sorted(self.untrained)[:3])
            self.notes += (f"model: {len(self.untrained)} parameters get no gradient and stay frozen ({names})",)

    # ---- Modules, stages and parameters ----

    @property
    def body(self) -> Any:
        """The author's module."""
        return self.__dict__["_body"]

    @property
    def columns(self) -> Columns:
        """The collectives on sharded activations."""
        return self._columns

    @columns.setter
    def columns(self, columns: Columns) -> None:
        """Sets the collectives, and divides the attributes in `facts.divided` by the number of ranks."""
        for name, attributes in self.facts.divided.items():
            module: Any = self.body.get_submodule(name)
            if any(attribute.startswith("config.") for attribute in attributes):
                module.__dict__["config"] = copy(module.config)
            for attribute in attributes:
                owner = module.config if attribute.startswith("config.") else module
                leaf = attribute.removeprefix("config.")
                setattr(owner, leaf, getattr(owner, leaf) * self._columns.size // columns.size)
        self._columns = columns

    @property
    def current(self) -> Passing:
        """The state of the running forward pass."""
        assert self.passing is not None, "the modules of a foreign model run in a stage only"
        return self.passing

    def get_submodule(self, target: str) -> nn.Module:
        """Returns the author's module `target`; for an empty name, this model."""
        found: nn.Module = self.body.get_submodule(target) if target else self
        return found

    def rows(self) -> list[BlockRow]:
        return [ForeignRow(self.blocks, range(len(self.blocks)))]

    def units(self) -> Iterable[Unit]:
        return self._units

    def stage(self, blocks: range, *, first: bool, last: bool) -> ForeignStage:
        return ForeignStage(self, blocks, first=first, last=last)

    def all_blocks(self) -> ForeignStage:
        return self.stage(range(len(self.blocks)), first=True, last=True)

    def keep(self, blocks: Collection[int], *, first: bool, last: bool, embedding: bool, head: bool) -> None:
        names, facts = self.parts, self.facts
        flags = {"embedding": embedding, "head": head, "before": first, "behind": last}
        for owner_name, owner in self.named_modules():
            for leaf in owner._parameters:
                name = f"{owner_name}.{leaf}" if owner_name else leaf
                block = names.block_of(name)
                here = block in blocks if block is not None else flags[_part(name, facts)]
                if not here:
                    owner._parameters[leaf] = None
            number, part = names.block_of(owner_name), _part(f"{owner_name}.", facts)
            stores = number in blocks if number is not None else first if part == "embedding" else flags[part]
            if not stores:  # a checkpoint gets each buffer from one stage
                owner._non_persistent_buffers_set = {*owner._buffers}
        if not head:  # some models read the dtype of the output layer's weight on every stage
            del self.head._parameters["weight"]
            self.head.__dict__["weight"] = torch.empty(0)

    def train(self, mode: bool = True) -> "ForeignModel":
        self.body.training = mode
        return super().train(mode)

    def author_tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and the persistent buffers with the author's names and shapes."""
        found: dict[str, Tensor] = {}
        for name, (names, dim, shape) in self.stored.items():
            parts = [self.get_parameter(each).detach() for each in names]
            found[name] = (parts[0] if len(parts) == 1 else torch.cat(parts, dim or 0)).view(shape)
        return found | {name: buffer.detach() for name, buffer in stored_buffers(self)}

    @torch.no_grad()
    def fill_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies `tensors`, by the author's names, to the parameters and the persistent buffers.

        `tensors` must have every parameter, and may lack buffers.
        """
        for name, buffer in stored_buffers(self):
            if name in tensors:
                buffer.copy_(tensors[name])
        for name, (names, dim, _) in self.stored.items():
            parts = [self.get_parameter(each) for each in names]
            if len(parts) == 1:
                parts[0].copy_(tensors[name].view(parts[0].shape))
                continue
            pieces = tensors[name].split([each.shape[dim or 0] for each in parts], dim or 0)
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece)

    # ---- Passes ----

    def entered(self, x: Tensor) -> Tensor:
        """Returns `columns.enter(x)`, cached for consecutive calls with the same `x`."""
        if self._columns.size == 1 or x.is_inference():
            return self._columns.enter(x)
        last = self._entered
        if last is None or last[0] is not x or last[1] != x._version:
            last = self._entered = x, x._version, self._columns.enter(x)
        return last[2]

    @contextmanager
    def running(self, passing: Passing | None) -> Iterator[None]:
        """Makes the modules read and write `passing` inside the `with` block."""
        before, self.passing = self.passing, passing
        try:
            yield
        finally:
            self.passing, self._entered = before, None

    def continued(self, tokens_BS: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Returns (input of the output layer [B, S, H], cache with `tokens_BS` added).

        A `cache` of None is empty. If the body returns no `past_key_values`, the cache is the tensor of all tokens so
        far, and S is the number of these tokens.
        """
        passing = Passing(range(len(self.blocks)), True, True, SequenceSplit(), False, None)
        with self.running(passing):
            made = None
            if self.caches and not isinstance(cache, Tensor):
                made = self.body(input_ids=tokens_BS, past_key_values=cache, use_cache=True).get("past_key_values")
            if made is not None:
                cache = made
            else:
                cache = tokens_BS if cache is None else torch.cat([cache, tokens_BS], 1)
                self.call(self.body, Batch(cache), None, False)
        assert passing.hidden_BSH is not None
        return passing.hidden_BSH, cache

    def router_stats(self, made: Any) -> RouterStats | None:
        """Returns statistics of the router logits in the author's outputs, or None."""
        router = self.facts.router
        if router is None or not router.on or not made[router.output]:
            return None
        z_TE = torch.cat([each.flatten(0, -2) for each in made[router.output]])
        z_TE = z_TE.to(compute_dtype(z_TE.dtype))
        p_TE = z_TE.softmax(-1) if router.score == "softmax" else z_TE.sigmoid()
        chosen = p_TE.detach().topk(router.top_k, -1).indices.flatten()
        counts_E = torch.bincount(chosen, minlength=router.experts).to(p_TE.dtype)
        return RouterStats(counts_E, p_TE.sum(0), p_TE.new_zeros(()), len(z_TE))

    def local_positions(self, batch: Batch) -> tuple[Tensor, ForeignPositions]:
        tokens_BS, documents = batch.tokens_BS, batch.documents()
        self.check_length(tokens_BS.shape[1])
        positions_S = self.sequence.positions(tokens_BS.shape[1], tokens_BS.device)
        if documents is not None:
            position_BS = moved(documents.positions().view_as(tokens_BS), tokens_BS.device)[:, positions_S]
            return positions_S, ForeignPositions(self.sequence.for_documents(documents), True, position_BS)
        parted = positions_S.expand(len(tokens_BS), -1) if self.sequence.parts > 1 else None
        return positions_S, ForeignPositions(self.sequence, False, parted)

    def full_positions(self, tokens_BS: Tensor) -> tuple[Tensor, ForeignPositions]:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        return positions_S, ForeignPositions(SequenceSplit(), False, None)


def _part(name: str, facts: ModelFacts) -> str:
    """Returns the model part of a name outside the blocks: embedding, before, behind or head."""
    for part, module in (("embedding", facts.embedding), ("head", facts.head)):
        if name.startswith(f"{module}."):
            return part
    return "before" if any(name.startswith(f"{module}.") for module in facts.before) else "behind"


# ---- Composition ----


def _compose(
    model: ForeignModel, facts: ModelFacts, initial: Mapping[str, Initial], fused: Iterable[nn.Module]
) -> None:
    """Changes the classes of the body's modules, and declares their parameters."""
    body: nn.Module = model.body
    embedding, head = body.get_submodule(facts.embedding), body.get_submodule(facts.head)
    model.stored |= _declare_all(body, facts, initial)
    for module in fused:
        experts: Any = module
        count = len(experts.down_proj)
        parts = {"gradients": {}, "step": model.step, "kernel": expert_mlp}
        parts |= {"expert_count": count, "expert_dispatch": on_this_rank, "kind": activation_of(experts)}
        become(module, FusedExperts, **parts)
    for name, module in list(body.named_modules()):
        inside = name.startswith(f"{facts.blocks}.")
        if inside and (type(module) is nn.Linear or _is_conv1d(module)):
            pieces, biases = (
                tuple(leaf for leaf, each in module._parameters.items() if leaf.startswith(kind) and each is not None)
                for kind in ("weight", "bias")
            )
            parts = {"product": LOCAL, "gradients": {}, "style": facts.styles.get(name, "whole")}
            transposed = _is_conv1d(module)
            become(module, AuthorsLinear, **parts, pieces=pieces, biases=biases, transposed=transposed)
        elif (style := facts.styles.get(name)) in _SHARDED:
            become(module, _SHARDED[style])
        elif style is not None:
            raise UserError(
                f"model: {name} is a {type(module).__name__}, whose output every rank would have to gather: such a model "
                "cannot train yet"
            )
        elif module._parameters and not inside and module is not head:
            before = _part(f"{name}.", facts) in ("embedding", "before")
            unit = _unit("embedding" if module is embedding else "norm", module)
            model._units.append(unit)
            authors = type(module)
            become(module, StagedModule, unit=unit, before=before)
            if module is embedding:
                _look_up(module, authors)
    _share_inputs(body)
    for number, block in enumerate(model.blocks):
        options: dict[str, Any] = {"number": number, "outputs": facts.outputs}
        children = facts.block_parts.get(number, ())
        if not children:
            become(block, StagedBlock, unit=_unit("block", block), **options)
            continue
        become(block, BlockOfParts, again=_at_once, **options)
        for part in children:
            child = block.get_submodule(part.name)
            unit = _unit(part.kind, child)
            become(child, StagedPart, unit=unit, outputs=part.outputs)
            block.__dict__[f"{part.name}_unit"] = unit  # read by `units_of`
    become(head, HeadModule, vocabulary=Vocabulary(), factor=facts.logit_scale, cap=facts.logit_cap)
    model.__dict__["embedding"], model.__dict__["head"] = embedding, head
    model.predict = Unit("head", head)
    model._units.append(model.predict)


def _at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _share_inputs(body: nn.Module) -> None:
    """Marks column-parallel layers that may share their input with other products."""
    siblings: dict[tuple[str, int], list[Any]] = {}
    for name, module in body.named_modules():
        layer: Any = module
        if isinstance(module, AuthorsLinear) and module.style in ("column", "gather"):
            inputs = layer._parameters[layer.pieces[0]].shape[0 if layer.transposed else -1]
            siblings.setdefault((name.rpartition(".")[0], inputs), []).extend([layer] * len(layer.pieces))
    for modules in siblings.values():
        for module in modules:
            module.__dict__["shares"] = len(modules) > 1


_SHARDED: dict[Style, type] = {
    "experts": Summed,
    "sums": Summed,
    "norm_all": NormOverAll,
    "share": SharedOut,
    "column": ColumnLeaf,
    "row": RowLeaf,
}


def _is_conv1d(module: nn.Module) -> bool:
    """Returns True for `Conv1D` of `transformers`, whose weight is [inputs, outputs]."""
    return any(kind.__module__ == "transformers.pytorch_utils" for kind in type(module).__mro__)


def _unit(kind: str, module: nn.Module) -> Unit:
    return Unit(kind, Calls(module))


def _look_up(module: nn.Module, authors: type[nn.Module]) -> None:
    """Inserts `Lookup` before `nn.Embedding` among the base classes of an embedding."""
    bases = (StagedModule, Lookup) if authors is nn.Embedding else (StagedModule, authors, Lookup)
    module.__class__ = type(f"{StagedModule.__name__}{authors.__name__}", bases, {})
    module.__dict__["vocabulary"] = Vocabulary()


def _declare_all(body: nn.Module, facts: ModelFacts, initial: Mapping[str, Initial]) -> dict[str, Stored]:
    """Stores and declares every parameter. Returns `Stored` records by the author's parameter names."""
    named = {name for name, _ in body.named_parameters()}
    of_head = {id(each) for each in body.get_submodule(facts.head)._parameters.values()}
    stored: dict[str, Stored] = {}
    for owner_name, owner in list(body.named_modules()):
        for leaf, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            name = f"{owner_name}.{leaf}" if owner_name else leaf
            at_end = owner_name in (facts.embedding, facts.head) or id(parameter) in of_head
            split = Split(0) if at_end else facts.splits.get(name, Split(None))
            first = initial.get(name, "normal")
            tied = id(parameter) in of_head and owner_name != facts.embedding  # such as BERT's `cls.predictions.bias`
            role = "head" if tied else _role(name, owner, parameter, facts)
            projects = isinstance(owner, nn.Linear) or _is_conv1d(owner)
            dims = _dims(role, parameter.ndim, split, spread=owner_name in facts.experts)
            leaves = _store(owner, leaf, parameter, split, role, dims, first, projects=projects)
            if name in named:  # a tied parameter is listed once
                names = tuple(name.removesuffix(leaf) + each for each in leaves)
                stored[name] = Stored(names, split.dim, tuple(parameter.shape))
    return stored


def _role(name: str, owner: nn.Module, parameter: Tensor, facts: ModelFacts) -> Role:
    if not name.startswith(f"{facts.blocks}."):
        if isinstance(owner, nn.Embedding):
            return "embedding"
        return "head" if _part(name, facts) == "head" else "vector"
    module = name.rpartition(".")[0]
    if parameter.ndim == 3 and (module in facts.experts or facts.styles.get(module) == "experts"):
        return "expert"
    return "matrix" if parameter.ndim == 2 else "vector"


def _store(
    owner: nn.Module,
    leaf: str,
    parameter: nn.Parameter,
    split: Split,
    role: Role,
    dims: tuple[Dim, ...],
    initial: Initial,
    *,
    projects: bool,
) -> list[str]:
    """Stores and declares a parameter: whole, as a stack of equal pieces, or as one parameter per piece. Returns the
    names of the stored parameters in `owner`."""
    declared: dict[str, Declaration] = owner.__dict__.setdefault("declared", {})
    dim = split.dim

    def store(name: str, tensor: Tensor, dims: tuple[Dim, ...], initial: Initial) -> str:
        owner._parameters[name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        # A scalar has no dims, so `scales` says if the scalar acts on sharded activations.
        scales: tuple[Dim, ...] = () if dims else ("head" if split.partial or split.share else "latent",)
        declared[name] = Declaration(dims, role, initial, scales)
        return name

    if dim is None or not split.pieces:
        if not split.share:
            return [store(leaf, parameter, dims, initial)]
        del owner._parameters[leaf]
        computed(owner, leaf, lambda self: self._parameters[f"{leaf}_sum"] / self.host.columns.size)
        return [store(f"{leaf}_sum", parameter, dims, initial)]
    if len({*split.pieces}) == 1 and not (projects and dim != 0):
        stacked, dims = parameter.detach().unflatten(dim, (len(split.pieces), -1)), (*dims[:dim], "stack", *dims[dim:])
        if projects:
            return [store(leaf, stacked, dims, initial)]
        del owner._parameters[leaf]
        computed(owner, leaf, lambda self: self._parameters[f"{leaf}_stack"].flatten(dim, dim + 1))
        return [store(f"{leaf}_stack", stacked, dims, initial)]
    del owner._parameters[leaf]
    names = [f"{leaf}_{number}" for number in range(len(split.pieces))]
    if projects:
        setattr(owner, leaf, None)
    else:
        computed(owner, leaf, lambda self: torch.cat([self._parameters[name] for name in names], dim))
    cut = initial.tensor.split(split.pieces, dim) if isinstance(initial, Values) else ()
    return [
        store(name, piece, dims, Values(cut[number]) if cut else initial)
        for number, (name, piece) in enumerate(zip(names, parameter.detach().split(split.pieces, dim), strict=True))
    ]


def _dims(role: Role, ndim: int, split: Split, *, spread: bool) -> tuple[Dim, ...]:
    """Returns the parameter's logical dims. `spread` is True for experts that expert parallelism can shard."""
    if spread:
        return "experts", *("expert_ffn" if dim == split.dim else "latent" for dim in range(1, ndim))
    if role in ("embedding", "head"):
        rows: Dim = "vocab" if split.dim == 0 else "positions"
        return (rows, "residual")[:ndim]
    if split.dim is None:
        return ("head" if split.partial or split.share else "latent",) * ndim
    if ndim == 1:
        return ("ffn",)
    other: Dim = "residual" if ndim == 2 else "latent"
    return tuple("ffn" if dim == split.dim else other for dim in range(ndim))


# ---- Storage ----


def materialised(model: ForeignModel, device: torch.device) -> ForeignModel:
    """Allocates the parameters of `model` on `device`, and moves its buffers there."""
    made: dict[int, nn.Parameter] = {}
    for owner in model.modules():
        for leaf, old in owner._parameters.items():
            if old is not None:
                owner._parameters[leaf] = made.setdefault(id(old), nn.Parameter(torch.empty_like(old, device=device)))
        owner._buffers.update({leaf: old.to(device) for leaf, old in owner._buffers.items() if old is not None})
    return model
