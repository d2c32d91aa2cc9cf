"""Finds facts about a causal `transformers` model by running a small model of the same class.

Legend: B sequences, S positions, T tokens, E experts.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.model.foreign import probes
from optimus.model.foreign.calls import record_calls
from optimus.model.foreign.described import said
from optimus.model.foreign.experts import differences, is_experts
from optimus.model.foreign.initial import Initial, initial_values, without_initial
from optimus.model.foreign.parts_of_blocks import parts_of_blocks
from optimus.model.foreign.plan import gathered_by_plan, published_plan, published_splits
from optimus.model.foreign.probes import AttentionFacts, Pass, find_blocks, twin_tokens
from optimus.model.foreign.ranks import TensorPartition, largest_difference
from optimus.model.foreign.records import STYLES, BlockPart, ModelFacts, RouterFacts, ScoredColumns, Split, Style
from optimus.model.foreign.sizes import RealSizes
from optimus.model.foreign.splits import ProvedUnit, prove_units
from optimus.model.foreign.twin import (
    arguments_of,
    build,
    enlarge,
    factors_of,
    general,
    layers_of,
    small,
    tokens_of_twin,
)

__all__ = ["STYLES", "ModelFacts", "RouterFacts", "ScoredColumns", "Split", "Style", "facts_of"]

_LAYER = re.compile(r"layer_?(idx|id|number|index|num)$|^idx$|^index$")
_RANDOM = re.compile(r"drop|jitter")  # settings that make training random
_POSITIONS = re.compile(r"position|(^|_)seq\w*_len|n_ctx$|max_length$")  # settings that may limit the sequence length
_SHORT = 32  # value at which `_positions` tests a setting
_GRADIENTS = 3e-4  # relative tolerance for loss and gradients between ranks and one process
_FAILURES = (
    RuntimeError,
    ValueError,
    ArithmeticError,
    AssertionError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    NotImplementedError,
    ImportError,
)


def facts_of(config: Any, module: nn.Module | None = None, initial: Mapping[str, Initial] | None = None) -> ModelFacts:
    """Finds the blocks, splits, attention and routers of a model.

    Raises `UserError` if the model lacks a list of blocks or an output layer, or if no small model runs.

    `config` has the real sizes. `module` is the model on the meta device; by default, this function builds the model.
    """
    real = _real_model(config) if module is None else module
    _require_parts(real)
    initial = initial_values(real) if initial is None else initial
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        analysis = _Analysis(config, real, *_twin_of(config, real))
        return analysis.facts(without_initial(real, initial))


def _real_model(config: Any) -> nn.Module:
    """Builds the model on the meta device. Raises `UserError` if the build fails."""
    try:
        return build(config, "sdpa", "meta")
    except Exception as error:  # the model's own code can raise any exception
        settings = config.get_text_config().to_dict()
        pad, vocab = settings.get("pad_token_id"), settings.get("vocab_size")
        cure = "check the sizes in its configuration"
        if isinstance(error, AssertionError) and type(pad) is int and type(vocab) is int and pad >= vocab:
            cure = f"pad_token_id is {pad}, which must be below vocab_size {vocab}"
        elif isinstance(error, KeyError):
            named = [name for name, value in settings.items() if isinstance(value, str) and value == error.args[0]]
            cure = f"check {', '.join(named)}" if named else cure
        raise UserError(
            f"model.transformers: {type(config).__name__}: no model can be built ({said(error)}): {cure}"
        ) from error


def _require_parts(real: nn.Module) -> None:
    """Raises `UserError` for a model without a list of blocks."""
    try:
        find_blocks(real)
    except ValueError as error:
        raise UserError(
            f"model.transformers: {error}: choose another model, or describe it as a model of a plugin"
        ) from None


def _twin_of(config: Any, real: nn.Module) -> tuple[Any, nn.Module]:
    """Returns (configuration, model) of a small model. Raises `UserError` if no small model runs."""
    blocks = find_blocks(real)
    kinds = {signature(layer) for layer in layers_of(real, blocks)}
    made: tuple[Any, nn.Module, int] | None = None
    problem: Exception | None = None
    for layers in (None, 2, 4, 8, 16):
        try:
            shrunk = small(config, layers)
            twin = build(shrunk)
            present = {signature(layer) for layer in layers_of(twin, blocks)}
            enlarge(twin)
            with torch.no_grad():
                probes.logits_of(twin, twin_tokens(twin))
        except Exception as error:  # the model's own code can raise any exception
            problem = problem or error
            continue
        if made is None or len(kinds - present) < made[2]:
            made = shrunk, twin, len(kinds - present)
        if not made[2]:
            break
    if made is None:
        assert problem is not None
        raise UserError(
            f"model.transformers: {type(real).__name__} does not run with small sizes ({said(problem)}), so nothing can be "
            "proved about it: check the sizes in its configuration, choose another model, or describe it as a model of a "
            "plugin"
        ) from problem
    return made[0], made[1]


def signature(layer: nn.Module) -> Any:
    """Returns a key of a layer's classes, settings and parameter names, without sizes.

    Layers with equal keys are of one kind, even if one layer is in the small model and the other in the real model.
    """
    found = set()
    for name, each in layer.named_modules():
        settings = (
            (key, value if isinstance(value, bool | str) else None if value is None else value == 0)
            for key, value in vars(each).items()
            if (value is None or isinstance(value, bool | str | int | float)) and _setting(key)
        )
        parameters = tuple(sorted(key for key, value in each._parameters.items() if value is not None))
        found.add((general(name), type(each).__qualname__, tuple(sorted(settings, key=str)), parameters))
    return frozenset(found)


def _setting(key: str) -> bool:
    return not (key.startswith("_") or key in ("training", "p") or _RANDOM.search(key) or _LAYER.search(key))


def kind_of(layer: nn.Module) -> Any:
    """Returns a key of a layer's classes, settings and parameter shapes, without layer numbers."""
    settings = [
        (name, type(each).__qualname__, key, value)
        for name, each in layer.named_modules()
        for key, value in sorted(vars(each).items())
        if isinstance(value, bool | int | float | str | None) and not key.startswith("_") and not _LAYER.search(key)
    ]
    return tuple(settings), tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())


class _Tensor(NamedTuple):
    """Facts about tensor parallelism, as in `ModelFacts`."""

    splits: dict[str, Split]
    styles: dict[str, Style]
    divided: dict[str, tuple[str, ...]]
    heads: dict[str, int]
    ways: tuple[int, ...]
    shares: dict[str, float]


@dataclass
class _Analysis:
    config: Any
    real: nn.Module
    twin_config: Any
    twin: nn.Module

    def facts(self, no_initial: tuple[str, ...]) -> ModelFacts:
        self.names = {id(each): name for name, each in self.real.named_modules()}
        self.blocks = find_blocks(self.real)
        self.layers = layers_of(self.real, self.blocks)
        self.sizes = RealSizes(self.config, self.twin_config)
        self.refusals: dict[str, str] = {}
        self.tokens_BS = twin_tokens(self.twin)
        embedding = self.names[id(self.real.get_input_embeddings())]  # type: ignore[operator]
        head = self._head()
        seen = probes.observe(self.twin, self.blocks, head, self.tokens_BS)
        chain = self._chain(seen)
        scale, cap = self._logits(seen)
        position_ids = bool(arguments_of(self.twin, position_ids=0).get("position_ids") == 0)
        attention = self._attention(seen, position_ids)
        causal = self._causal()
        tensor = self._tensor(embedding, head, seen.width())
        weight = self.real.get_parameter(f"{embedding}.weight")
        stream = self._stream(seen, weight)
        dropout = self._dropout()
        positions, positions_key = self._positions()
        self._unknown_layers()
        if no_initial:
            self.refusals["initial values"] = (
                f"{', '.join(no_initial[:3])} have no initial values that are known: begin with a folder of weights"
            )
        first: dict[Any, int] = {}
        return ModelFacts(
            blocks=self.blocks,
            layers=len(self.layers),
            outputs=seen.outputs,
            kinds=tuple(first.setdefault(kind_of(layer), number) for number, layer in enumerate(self.layers)),
            embedding=embedding,
            head=head,
            tied=self.real.get_submodule(head).weight is weight,
            hidden=stream[-1] if stream else weight.shape[1],
            vocab=weight.shape[0],
            before=frozenset(itertools.takewhile(lambda name: name != self.blocks, seen.order)),
            logit_scale=scale,
            logit_cap=cap,
            splits=tensor.splits,
            styles=tensor.styles,
            divided=tensor.divided,
            heads=tensor.heads,
            ways=tensor.ways,
            documents=attention.documents,
            position_ids=position_ids,
            attention=attention.used and attention.equal,
            scored=self._scored(attention),
            router=self._router(),
            chain=chain,
            dropout=dropout,
            untrained=self._untrained(),
            no_initial=no_initial,
            refusals=dict(self.refusals),
            stream=stream,
            causal=causal,
            block_parts=self._block_parts(),
            positions=positions,
            positions_key=positions_key,
            shares=tensor.shares,
            experts_per_token=self._experts_per_token()[1],
            experts=self._experts(),
            grouped=self._grouped(tensor.splits),
        )

    # ---- Output layer, blocks, logits, residual stream and causal mask ----

    def _head(self) -> str:
        head = self.real.get_output_embeddings()  # type: ignore[operator]
        if head is None or id(head) not in self.names:
            raise UserError(
                f"{type(self.real).__name__} names no output layer (`get_output_embeddings`): it cannot train"
            )
        return self.names[id(head)]

    def _chain(self, seen: Pass) -> str | None:
        why = probes.broken_chain(seen, self.blocks, len(layers_of(self.twin, self.blocks)))
        if why is not None:
            self.refusals["pipeline"] = f"{why}: choose `parallel.pipeline: 1`, and divide by tensors or data instead"
        return why

    def _logits(self, seen: Pass) -> tuple[float, float | None]:
        scale, cap, why = probes.head_facts(
            seen, getattr(self.config.get_text_config(), "final_logit_softcapping", None)
        )
        if why is not None:
            self.refusals["logits"] = f"{why}: whole logits are computed, and the vocabulary is not divided"
        return scale, cap

    def _stream(self, seen: Pass, weight: Tensor) -> tuple[int, ...]:
        """Returns the real dims of the residual stream after [B, S]; empty if unknown."""
        shape = seen.stream_shape()
        if not shape:
            return ()
        text = self.config.get_text_config()
        small_text = self.twin_config.get_text_config()
        width = getattr(text, "hidden_size", None)
        if shape[-1] != getattr(small_text, "hidden_size", None):
            embedding: Any = self.twin.get_input_embeddings()  # type: ignore[operator]
            same = shape[-1] == embedding.weight.shape[1]
            width = weight.shape[1] if same else self.sizes.one(shape[-1], "size", "dim", "width")
        rest = [self.sizes.one(each, "mult") or self.sizes.one(each, "num", "n_") for each in shape[:-1]]
        known = [each for each in rest if each is not None]
        if len(known) < len(rest):
            self.refusals["pipeline"] = (
                f"{type(self.real).__name__}: the sizes of its residual stream are not known: choose `parallel.pipeline: 1`"
            )
            return ()
        return (*known, int(width)) if isinstance(width, int) else ()

    def _block_parts(self) -> dict[int, tuple[BlockPart, ...]]:
        """Returns the parts of each block of the real model; an empty tuple for unknown parts."""
        layers = layers_of(self.twin, self.blocks)
        try:
            found = parts_of_blocks([*layers], probes.CUT, lambda: probes.logits_of(self.twin, self.tokens_BS))
        except _FAILURES:
            found = {}
        return {n: found.get(twin, ()) if twin is not None else () for n, twin in enumerate(self._twin_layers)}

    def _causal(self) -> bool:
        causal = probes.is_causal(self.twin, self.tokens_BS)
        if not causal:
            self.refusals["causal"] = (
                f"logits of {type(self.real).__name__} depend on later tokens: choose a configuration with a causal mask, "
                "such as is_decoder: true"
            )
        return causal

    # ---- Attention ----

    def _attention(self, seen: Pass, position_ids: bool) -> AttentionFacts:
        assert seen.logits is not None
        found = probes.attention_facts(self.twin, self.blocks, self.tokens_BS, seen.logits.detach(), position_ids)
        name = type(self.real).__name__
        if not found.documents:
            self.refusals["documents"] = f"{name}: {found.why}: choose `data.documents: ignore`"
        if not (found.used and found.equal):
            why = (
                "our attention does not give its logits" if found.used else "its attention is not behind the interface"
            )
            self.refusals["context"] = f"{name}: {why} of `transformers`: choose `parallel.context: 1`"
        elif not found.documents:
            self.refusals["context"] = (
                f"{name}: {found.why}, so sequences cannot be divided: choose `parallel.context: 1`"
            )
        return found

    def _scored(self, attention: AttentionFacts) -> dict[int, ScoredColumns | None]:
        """Returns each layer's attention with real sizes; None if a layer's attention is unknown."""
        twins = self._twin_layers
        found: dict[int, ScoredColumns | None] = {}
        for number, twin in enumerate(twins):
            made = attention.scored.get(twin) if twin is not None else None
            found[number] = self._real_scored(*made) if made is not None else None
        return found

    def _real_scored(self, heads: int, query: int, value: int, window: int | None) -> ScoredColumns:
        factor = factors_of(self.config)
        real_window = (
            None if window is None else self.sizes.one(window, "window") or self.sizes.common(window, "window")
        )
        return ScoredColumns(
            self.sizes.one(heads, "heads", "n_head") or heads * factor[0],
            self.sizes.one(query, "head_dim", "d_kv") or query * factor[1],
            self.sizes.one(value, "v_head_dim", "head_dim") or value * factor[1],
            real_window if window is not None else None,
        )

    # ---- Layers and parameters of the small model and of the real model ----

    @cached_property
    def _twin_layers(self) -> list[int | None]:
        """For each layer of the real model, the number of the small model's first layer of the same kind, or None."""
        first: dict[Any, int] = {}
        for number, layer in enumerate(layers_of(self.twin, self.blocks)):
            first.setdefault(signature(layer), number)
        return [first.get(signature(layer)) for layer in self.layers]

    def _unknown_layers(self) -> None:
        """Adds a refusal if the small model lacks a kind of the real model's layers."""
        missing = [str(number) for number, twin in enumerate(self._twin_layers) if twin is None]
        if missing:
            self.refusals["layers"] = (
                f"no small model has the kind of {self.blocks}.{missing[0]} (in all {len(missing)} layers): their "
                "parameters stay whole, and their operations are not known"
            )

    def _names_by_layer(self, found: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Groups the entries of `found` in the blocks by layer of the small model, then by `_known_as` inside the layer.

        A name that stands for differing entries gets None.
        """
        made: dict[int, dict[str, Any]] = {}
        for name, value in found.items():
            if match := self._inside(name):
                inner, layer = self._known_as(match[2] or ""), made.setdefault(int(match[1]), {})
                layer[inner] = value if layer.get(inner, value) == value else None
        return made

    def _inside(self, name: str) -> re.Match[str] | None:
        """Returns a match (number of the layer, name inside the layer) for a name in the blocks, otherwise None."""
        return re.fullmatch(rf"{re.escape(self.blocks)}\.(\d+)(?:\.(.*))?", name)

    def _known_as(self, inner: str) -> str:
        """Replaces list numbers in a name by stars, unless the starred name is in `_unlike`."""
        return inner if general(inner) in self._unlike else general(inner)

    @cached_property
    def _unlike(self) -> set[str]:
        """The starred names that stand for several classes or shapes inside one layer of the small model."""
        shapes: dict[tuple[str, str], set[Any]] = {}
        named: list[tuple[str, Any]] = [(name, tuple(each.shape)) for name, each in self.twin.named_parameters()]
        for name, module in self.twin.named_modules():
            own = tuple(tuple(each.shape) for each in module.parameters(recurse=False))
            named.append((name, (type(module), own)))
        for name, shape in named:
            if match := self._inside(name):
                shapes.setdefault((match[1], general(match[2] or "")), set()).add(shape)
        return {inner for (_, inner), found in shapes.items() if len(found) > 1}

    def _real_names(self, found: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Returns the small model's entries `found` by the real model's `names`. Leaves out names without an entry."""
        return self._names_of_layers(found, names, self._twin_layers)

    def _names_of_layers(
        self, found: Mapping[str, Any], names: Iterable[str], twins: Sequence[int | None]
    ) -> dict[str, Any]:
        """Returns the entries of `found` for `names`, without names that have no entry.

        `twins` maps layers of `names` to layers of `found`.
        """
        by_layer, made = self._names_by_layer(found), {}
        for name in names:
            match = self._inside(name)
            twin = twins[int(match[1])] if match else None
            if match and twin is not None:
                value = by_layer.get(twin, {}).get(self._known_as(match[2] or ""))
                if value is not None:
                    made[name] = value
        return made

    def _untrained(self) -> tuple[str, ...]:
        missing = probes.untrained(self.twin, self.tokens_BS)
        by_layer = self._names_by_layer({name: name in missing for name, _ in self.twin.named_parameters()})
        if not missing:
            return ()
        twins = self._twin_layers
        found = []
        for name, _ in self.real.named_parameters():
            match = self._inside(name)
            if match is None:
                found += [name] if name in missing else []
            elif (twin := twins[int(match[1])]) is not None and by_layer[twin].get(self._known_as(match[2])):
                found.append(name)
        return tuple(found)

    # ---- Tensor parallelism ----

    def _tensor(self, embedding: str, head: str, width: int) -> "_Tensor":
        """Returns the real model's partition, which shards the rows of the embedding and of the head."""
        plan, parameters = published_plan(self.real), dict(self.real.named_parameters())
        modules = [name for name, _ in self.real.named_modules()]
        units, of_twin, ways = self._proved_partition(plan, width)
        real = self._real_splits(of_twin.splits, parameters)
        ends = {id(each) for name in (embedding, head) for each in self.real.get_submodule(name).parameters()}
        real |= {name: Split(0) for name, each in parameters.items() if id(each) in ends}
        by_units = {name: split for unit in units for name, split in unit.splits.items()}
        proved = {name for name in self._real_names(by_units, parameters) if real[name].dim is not None}
        return _Tensor(
            real,
            self._real_names(of_twin.styles, modules),
            self._real_names(of_twin.divided, modules),
            self._heads(units, modules),
            ways,
            self._shares(parameters, real, proved, published_splits(plan, parameters)),
        )

    def _proved_partition(
        self, plan: Mapping[str, str], width: int
    ) -> tuple[list[ProvedUnit], TensorPartition, tuple[int, ...]]:
        """Returns (units, partition, proved numbers of ranks) of the small model.

        Adds a refusal and returns empty values if the partition is not proved for 2 ranks.
        """
        twin, tokens_BS = self._in_double()
        units = self._units(twin, tokens_BS, width)
        partition = self._twin_partition(units, plan)
        ways: tuple[int, ...] = ()
        why = f"no module in {self.blocks} has parts that add up"
        if partition.styles:
            common = set.intersection({2, 4}, *({*unit.ways} for unit in units))
            worst = {number: self._difference(partition, tokens_BS[:1], number) for number in sorted(common)}
            ways = tuple(number for number, (difference, _) in worst.items() if difference <= _GRADIENTS)
            difference, where = worst.get(2, (math.inf, "all"))
            why = f"a divided twin differs from one process by {difference:.0e} in {where}"
        twin.float()
        if ways[:1] == (2,):
            return units, partition, ways
        self.refusals["tensor"] = (
            f"{type(self.real).__name__}: {why}: its parameters stay whole; choose `parallel.tensor: 1`"
        )
        return [], TensorPartition({}, {}, {}), ()

    def _in_double(self) -> tuple[nn.Module, Tensor]:
        """Converts the small model to double precision if its code allows. Returns (small model, tokens)."""
        tokens_BS = tokens_of_twin(self.twin_config, 3)
        try:
            with torch.no_grad():
                probes.logits_of(self.twin.double(), tokens_BS)
        except _FAILURES:
            self.twin.float()
        return self.twin, tokens_BS

    def _difference(self, partition: TensorPartition, tokens_BS: Tensor, ways: int) -> tuple[float, str]:
        try:
            return largest_difference(self.twin, partition, tokens_BS, ways)
        except _FAILURES as error:
            return math.inf, str(error)

    def _first_layers(self) -> list[int]:
        """Returns, for each layer of the small model, the number of the first layer of the same kind."""
        first: dict[Any, int] = {}
        return [first.setdefault(signature(each), n) for n, each in enumerate(layers_of(self.twin, self.blocks))]

    def _units(self, twin: nn.Module, tokens_BS: Tensor, width: int) -> list[ProvedUnit]:
        """Returns the small model's proved units, only for the first layer of each kind."""
        blocks = [f"{self.blocks}.{number}" for number in sorted({*self._first_layers()})]
        names = [name for block in blocks for name, _ in twin.get_submodule(block).named_modules(prefix=block)]
        calls = record_calls(twin, names, {"input_ids": tokens_BS, **arguments_of(twin)})
        return [unit for block in blocks for unit in prove_units(twin, block, calls, width)]

    def _twin_partition(self, units: Iterable[ProvedUnit], plan: Mapping[str, str]) -> TensorPartition:
        """Returns the units' partition, repeated in all layers of the same kind and extended by `gathered_by_plan`."""
        first = self._first_layers()
        parameters = [name for name, _ in self.twin.named_parameters()]
        modules = [name for name, _ in self.twin.named_modules()]
        split = {name: each for unit in units for name, each in unit.splits.items()}
        style = {name: each for unit in units for name, each in unit.styles.items()}
        divided = {name: each for unit in units for name, each in unit.divided.items()}
        splits = self._names_of_layers(split, parameters, first)
        styles = self._names_of_layers(style, modules, first)
        gathered, gather_styles = gathered_by_plan(plan, self.twin, splits, styles)
        return TensorPartition(
            splits | gathered, styles | gather_styles, self._names_of_layers(divided, modules, first)
        )

    def _experts(self) -> dict[str, int]:
        """Returns, by module, the number of experts that the library's kernels compute."""
        named: Iterable[tuple[str, Any]] = self.real.named_modules()
        return {name: len(each.down_proj) for name, each in named if is_experts(each) and not differences(each)}

    def _grouped(self, splits: Mapping[str, Split]) -> tuple[tuple[str, int, bool], ...]:
        """Returns (parameter, columns, divided) for both matrix dims of expert weights that `transformers` multiplies.

        `columns` is the size of the dim, and `divided` is True if tensor parallelism divides the dim.
        """
        experts = [each for each in self.real.named_modules() if is_experts(each[1]) and differences(each[1])]
        return tuple(
            (f"{name}.{leaf}", parameter.shape[dim], splits[f"{name}.{leaf}"].dim == dim)
            for name, module in experts
            for leaf, parameter in module.named_parameters(recurse=False)
            for dim in (1, 2)
            if parameter.ndim == 3
        )

    def _real_splits(self, splits: Mapping[str, Split], parameters: Mapping[str, Tensor]) -> dict[str, Split]:
        found, made = self._real_names(splits, parameters), {}
        for name, parameter in parameters.items():
            split = found.get(name, Split())
            if split.dim is not None and split.pieces:
                pieces = self.sizes.of_pieces(split.pieces, parameter.shape[split.dim])
                split = Split(split.dim, pieces) if pieces is not None else Split()
                if pieces is None:
                    self.refusals.setdefault(
                        "tensor", f"the pieces of {name} are not known, so it stays whole: choose `parallel.tensor: 1`"
                    )
            made[name] = split
        return made

    def _heads(self, units: Iterable[ProvedUnit], names: Iterable[str]) -> dict[str, int]:
        """Returns, by module, a number that the number of ranks must divide."""
        found = {}
        for unit in units:
            if unit.atoms != unit.columns:
                found[unit.name] = self.sizes.common(unit.atoms, "heads", "n_head", "groups") or unit.atoms
        return self._real_names(found, names)

    def _shares(
        self,
        parameters: Mapping[str, Tensor],
        real: Mapping[str, Split],
        proved: set[str],
        planned: Iterable[str],
    ) -> dict[str, float]:
        """Returns the shares of the blocks' elements that the plan, the proof and the final partition divide."""
        total, planned = Counter[str](), {*planned}
        for name, parameter in parameters.items():
            if name.startswith(f"{self.blocks}."):
                count = parameter.numel()
                total["all"] += count
                total["plan"] += count if name in planned else 0
                total["proof"] += count if name in proved else 0
                total["both"] += count if real[name].dim is not None else 0
        return {key: round(total[key] / max(1, total["all"]), 4) for key in ("plan", "proof", "both")}

    # ---- Settings and routers ----

    def _dropout(self) -> dict[str, float]:
        """Returns the dropout and jitter settings above 0, except those of classifiers and summaries."""
        found = {}
        for key, value in self.config.get_text_config().to_dict().items():
            unused = key.startswith(("classifier", "summary"))
            if isinstance(value, float) and value > 0 and _RANDOM.search(key) and not unused:
                found[key] = value
        if found:
            named = ", ".join(f"{key}: {value}" for key, value in found.items())
            self.refusals["dropout"] = f"the model draws random numbers ({named}): set it to 0 in its configuration"
        return found

    def _positions(self) -> tuple[int | None, str]:
        """Returns (length of the longest sequence, text that names the limiting setting); (None, "") if unknown."""
        text = self.twin_config.get_text_config()
        for key, value in text.to_dict().items():
            if not (_POSITIONS.search(key) and type(value) is int and value > 0):
                continue
            if type(real := getattr(self.config.get_text_config(), key, None)) is not int:
                continue
            lengths = range(_SHORT + 1, _SHORT - 5, -1)
            longest = next((each for each in lengths if self._runs_with(key, _SHORT, each)), 0)
            if 0 < longest <= _SHORT and self._runs_with(key, 2 * _SHORT, _SHORT + 1):
                unused = _SHORT - longest
                return real - unused, f".{key} - {unused} =" if unused else f".{key}"
        return None, ""

    def _runs_with(self, key: str, value: int, length: int) -> bool:
        """Returns True if a small model whose setting `key` is `value` runs on sequences of `length` tokens."""
        config = type(self.twin_config).from_dict(self.twin_config.to_dict())
        try:
            setattr(config.get_text_config(), key, value)
            with torch.no_grad():
                probes.logits_of(build(config), tokens_of_twin(config, 1, length))
        except _FAILURES:
            return False
        return True

    def _experts_per_token(self) -> tuple[str, int | None]:
        """Returns (name, value) of the setting for the number of experts per token; ("", None) if unknown."""
        text = self.config.get_text_config()
        for key in ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k"):
            if type(value := getattr(text, key, None)) is int:
                return key, value
        return "", None

    def _router(self) -> RouterFacts | None:
        arguments = arguments_of(self.twin, output_router_logits=True)
        if "output_router_logits" not in arguments:
            return None
        try:
            with torch.no_grad(), probes.outputs_of_modules(self.twin) as made:
                out = self.twin(input_ids=self.tokens_BS, **arguments)
        except _FAILURES:
            return None
        logits = getattr(out, "router_logits", None)
        if not isinstance(logits, tuple | list) or not logits or not isinstance(logits[0], Tensor):
            return None
        text, of_twin = self.config.get_text_config(), self.twin_config.get_text_config()
        experts, (key, top) = self.sizes.one(logits[0].shape[-1], "experts"), self._experts_per_token()
        if experts is None or top is None:
            return None
        score = self._score(out, logits, getattr(of_twin, key))
        if score is None:
            return None
        coefficient = float(getattr(text, "router_aux_loss_coef", 0.0) or 0.0)
        on = bool(getattr(text, "output_router_logits", False)) and coefficient > 0
        layers = self._layers_of([made.get(id(each), "") for each in logits])
        return RouterFacts(experts, top, score, "router_logits", coefficient, on and bool(layers), layers)

    def _layers_of(self, names: Iterable[str]) -> tuple[int, ...]:
        """Returns the real layers of the same kinds as the small model's layers that contain the modules `names`.

        Returns no layers if one of `names` is outside the blocks.
        """
        found = [re.match(rf"{re.escape(self.blocks)}\.(\d+)\.", name) for name in names]
        if not all(found):
            return ()
        numbers = {int(match[1]) for match in found if match is not None}
        return tuple(layer for layer, twin in enumerate(self._twin_layers) if twin in self._first_alike(numbers))

    def _first_alike(self, numbers: set[int]) -> set[int | None]:
        """Maps the small model's layers `numbers` to the first layers of their kinds."""
        first: dict[Any, int] = {}
        layers = layers_of(self.twin, self.blocks)
        for number, layer in enumerate(layers):
            first.setdefault(signature(layer), number)
        return {first[signature(layers[number])] for number in numbers}

    def _score(self, out: Any, logits: Any, top_k: int) -> Any:
        """Returns the name of the score function that reproduces the model's own balance loss, or None."""
        loss = getattr(out, "aux_loss", None)
        if not isinstance(loss, Tensor):
            return None
        z_TE = torch.cat([each.flatten(0, -2) for each in logits]).float()
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "softmax": lambda z: z.softmax(-1),
            "sigmoid": torch.sigmoid,
        }
        for name, function in functions.items():
            p_TE = function(z_TE)
            chosen = p_TE.topk(top_k, -1).indices
            counts_E = torch.bincount(chosen.flatten(), minlength=z_TE.shape[-1]) / len(z_TE)
            if torch.allclose((counts_E * p_TE.mean(0)).sum() * z_TE.shape[-1], loss.float(), rtol=1e-4):
                return name
        return None
