"""Finds facts about a plugin's model, and checks the model.

Legend: B batch, S sequence.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from math import gcd
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.model.batch import Batch
from optimus.model.foreign import probes
from optimus.model.foreign.calls import record_calls
from optimus.model.foreign.described import built, said, wrong
from optimus.model.foreign.facts import kind_of, signature
from optimus.model.foreign.parts_of_blocks import parts_of_blocks
from optimus.model.foreign.probes import CUT, Pass
from optimus.model.foreign.records import BlockPart, ModelFacts, Split, Style
from optimus.model.foreign.rows import ModelRow, ModelSpec
from optimus.model.foreign.splits import ProvedUnit, prove_units
from optimus.model.foreign.twin import LENGTH, ROWS, enlarge
from optimus.model.init import initialize_parameter

_LARGEST = 100_000_000  # maximum number of parameters of a model without `small` arguments
_LONGEST = 1 << 14  # largest buffer size that `_positions` tries as a sequence length
_TOLERANCE = 1e-4


class Copy(nn.Module):
    """Wraps a plugin's model: takes `input_ids`, and returns an object with `logits` as `transformers` does."""

    def __init__(self, row: ModelRow, spec: ModelSpec) -> None:
        super().__init__()
        self._modules.update(spec.module._modules)
        self._described = row, spec

    def forward(self, input_ids: Tensor, document_BS: Tensor | None = None) -> Any:
        row, spec = self._described
        logits: Any = spec.forward(spec.module, Batch(input_ids, document_BS=document_BS))
        if not isinstance(logits, Tensor):
            raise wrong(row, f"forward returns {type(logits).__name__}: it must return a tensor, the logits")
        return SimpleNamespace(logits=logits)


@lru_cache(maxsize=16)
def facts_of_row(row: ModelRow, text: str) -> ModelFacts:
    """Returns the facts of the model of `row` with the JSON arguments `text`. Raises `UserError` for a model that fails
    a check."""
    arguments = json.loads(text)
    shapes = built(row, arguments)
    shapes.spec.module.to("meta")
    count = sum(each.numel() for each in shapes.spec.module.parameters())
    if not row.small and count > _LARGEST:
        raise wrong(
            row,
            f"{count:,} parameters are too many for the checks, which run the model: name small arguments in the row, such "
            "as ModelRow(name, make, small={'width': 64, 'depth': 2})",
        )
    copy = built(row, {**arguments, **row.small}, values=True)
    with torch.no_grad():
        for name, parameter in copy.spec.module.named_parameters():
            initialize_parameter(name, parameter.data, copy.initial[name], 0, 0.02)
    enlarge(copy.spec.module)
    with torch.enable_grad(), torch.device("cpu"):
        return _Facts(row, arguments, shapes.spec, copy.spec).found()


@lru_cache(maxsize=16)
def shapes_of_row(row: ModelRow, text: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters by name. `text` has the arguments as JSON."""
    module = built(row, json.loads(text)).spec.module
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


@dataclass
class _Facts:
    row: ModelRow
    arguments: Mapping[str, Any]
    real: ModelSpec  # on the meta device
    small: ModelSpec

    def found(self) -> ModelFacts:
        spec, module = self.real, self.real.module
        self.refusals: dict[str, str] = {}
        vocab, hidden = self._embedding(spec).shape
        self.copy = Copy(self.row, self.small).train()
        seen = self._observe(spec, torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta"), vocab)
        self._check_calls(seen)
        self.tokens_BS = self._tokens(ROWS)
        self._check_values()
        scale, cap = self._logits()
        chain = probes.broken_chain(seen, spec.blocks, len(self._layers(spec)))
        if chain is not None:
            self.refusals["pipeline"] = f"{self.row.name}: {chain}: choose parallel.pipeline: 1"
        splits, styles, divided, heads, ways = self._tensor()
        positions, positions_key = self._positions()
        layers = self._layers(spec)
        first: dict[Any, int] = {}
        stream = seen.stream_shape() or ()
        self.refusals["context"] = (
            f"{self.row.name} is a model of a plugin, whose modules need all positions of a sequence: choose "
            "parallel.context: 1"
        )
        if not spec.documents:
            self.refusals["documents"] = (
                f"{self.row.name} does not keep the documents of a sequence apart: choose data.documents: ignore, or declare"
                " documents=True in its ModelSpec if it heeds batch.document_BS"
            )
        return ModelFacts(
            blocks=spec.blocks,
            layers=len(layers),
            outputs=seen.outputs,
            kinds=tuple(first.setdefault(kind_of(layer), number) for number, layer in enumerate(layers)),
            embedding=spec.embedding,
            head=spec.head,
            tied=module.get_submodule(spec.head).weight is self._embedding(spec),
            hidden=stream[-1] if stream else hidden,
            vocab=vocab,
            before=frozenset(seen.order[: seen.order.index(spec.blocks)]),
            logit_scale=scale,
            logit_cap=cap,
            splits=splits,
            styles=styles,
            divided=divided,
            heads=heads,
            ways=ways,
            documents=spec.documents,
            position_ids=False,
            attention=False,
            scored=dict.fromkeys(range(len(layers))),
            router=None,
            chain=chain,
            dropout={},
            untrained=(),
            no_initial=(),
            refusals=dict(self.refusals),
            stream=stream,
            block_parts=self._block_parts(),
            positions=positions,
            positions_key=positions_key,
        )

    def _block_parts(self) -> dict[int, tuple[BlockPart, ...]]:
        """Returns the parts of the real model's blocks, by block number."""
        run = partial(probes.logits_of, self.copy, self.tokens_BS)
        try:
            with torch.enable_grad():
                found = parts_of_blocks(self._layers(self.small), CUT, run)
        except Exception:  # the user's code may refuse NaN, which `parts_of_blocks` writes into parameters
            return {}
        return {number: found.get(like, ()) for number, like in self._pairs()}

    def _layers(self, spec: ModelSpec) -> list[nn.Module]:
        return list(cast(nn.ModuleList, spec.module.get_submodule(spec.blocks)))

    def _embedding(self, spec: ModelSpec) -> Tensor:
        weight: Any = spec.module.get_submodule(spec.embedding).weight
        return weight

    def _tokens(self, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self._embedding(self.small).shape[0], (rows, LENGTH), generator=generator)

    def _wrong(self, what: str) -> UserError:
        return wrong(self.row, what)

    # ---- Calls of modules ----

    def _observe(self, spec: ModelSpec, tokens_BS: Tensor, vocab: int) -> Pass:
        shape = list(tokens_BS.shape)
        where = (
            "on the meta device (without values; tensors must be parameters or buffers) " if tokens_BS.is_meta else ""
        )
        try:
            seen = probes.observe(Copy(self.row, spec), spec.blocks, spec.head, tokens_BS)
        except UserError:
            raise
        except Exception as error:  # the user's code
            raise self._wrong(f"its forward pass {where}on tokens {shape} raises {said(error)}") from error
        if seen.logits is None or [*seen.logits.shape] != [*shape, vocab]:
            found = None if seen.logits is None else [*seen.logits.shape]
            raise self._wrong(
                f"forward returns {found} for tokens {shape}: it must return logits {[*shape, vocab]}, of the rows of the "
                "embedding"
            )
        return seen

    def _check_calls(self, seen: Pass) -> None:
        """Raises `UserError` if no block runs, a module with parameters outside the blocks does not run exactly once,
        or a block or such a module runs after the output layer."""
        spec = self.real
        if spec.blocks not in seen.order:
            raise self._wrong(f"its forward pass does not call the blocks of '{spec.blocks}': call each of them")
        for name, module in spec.module.named_modules():
            if any(each is not None for each in module._parameters.values()) and not name.startswith(f"{spec.blocks}."):
                if name not in seen.order:
                    raise self._wrong(
                        f"its forward pass does not call {name}, whose parameters would be missing where they are sharded: "
                        "call the module instead of using its weight"
                    )
                if seen.order.count(name) > 1:
                    raise self._wrong(f"its forward pass calls {name} {seen.order.count(name)} times: call it once")
        if seen.order[-1] != spec.head:
            raise self._wrong(f"{seen.order[-1]} runs after the output layer '{spec.head}': it must run before it")

    # ---- Logits and positions ----

    def _check_values(self) -> None:
        """Raises `UserError` for a model that is random or not causal, has a parameter without a gradient, or mixes
        documents despite `documents=True`."""
        first, second = self._run(self.tokens_BS), self._run(self.tokens_BS)
        if not torch.equal(first, second):
            dropout = [name for name, each in self.small.module.named_modules() if "Dropout" in type(each).__name__]
            named = f" ({dropout[0]})" if dropout else ""
            raise self._wrong(f"two passes give different logits: remove dropout{named} and other random numbers")
        changed = self.tokens_BS.clone()
        changed[:, CUT:] = changed[:, CUT:].flip(1)
        if not _close(first[:, :CUT], self._run(changed)[:, :CUT]):
            raise self._wrong(
                "its logits depend on later tokens, so it would see what it must predict: make its layers causal (a "
                "convolution pads on the left)"
            )
        with torch.enable_grad():
            missing = probes.untrained(self.copy, self.tokens_BS)
        if missing:
            raise self._wrong(
                f"the parameter {min(missing)} gets no gradient: use it in the forward pass, or remove it"
            )
        if self.real.documents:
            document_BS = (torch.arange(LENGTH) >= CUT).long().expand(1, -1)
            row_1S = self.tokens_BS[:1]
            both = self._run(row_1S, document_BS)
            parts = (slice(0, CUT), slice(CUT, None))
            alone = torch.cat([self._run(row_1S[:, part], torch.zeros_like(row_1S[:, part])) for part in parts], 1)
            if not _close(both, alone):
                raise self._wrong(
                    "documents=True, but two documents in a sequence have other logits than each by itself: reset states "
                    "and positions where batch.document_BS changes"
                )

    def _positions(self) -> tuple[int | None, str]:
        """Returns (maximum sequence length, text for messages that names the limiting module or buffer).

        Without a known limit, returns (None, "").
        """
        found: dict[str, int] = {}
        counted = torch.arange(LENGTH)

        def look(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if args and isinstance(args[0], Tensor) and torch.equal(args[0].unique(), counted):
                    found[name] = self.real.module.get_submodule(name).num_embeddings  # type: ignore[assignment]

            return hook

        tables = {name: each for name, each in self.real.module.named_modules() if isinstance(each, nn.Embedding)}
        with ExitStack() as stack:
            for name, each in self.small.module.named_modules():
                if name in tables and name != self.real.embedding:
                    stack.callback(each.register_forward_pre_hook(look(name)).remove)
            self._run(torch.zeros_like(self.tokens_BS))
        sizes = {
            size: name
            for name, each in reversed([*self.real.module.named_buffers()])  # the first buffer of a size counts
            for size in each.shape
            if LENGTH < size <= _LONGEST
        }
        limit = next((size for size in sorted(sizes)[:8] if self._fits(size) and not self._fits(size + 1)), None)
        if limit is not None:
            found[sizes[limit]] = limit
        shortest = min(found, key=lambda name: found[name], default=None)
        return (None, "") if shortest is None else (found[shortest], f" ({shortest})")

    @torch.no_grad()
    def _fits(self, length: int) -> bool:
        """Returns True if the real model runs a sequence of `length` tokens on the meta device."""
        try:
            Copy(self.row, self.real)(torch.zeros(1, length, dtype=torch.int64, device="meta"))
        except Exception:  # the user's code
            return False
        return True

    @torch.no_grad()
    def _run(self, tokens_BS: Tensor, document_BS: Tensor | None = None) -> Tensor:
        try:
            logits: Tensor = self.copy(tokens_BS, document_BS).logits
        except UserError:
            raise
        except Exception as error:  # the user's code
            raise self._wrong(f"its forward pass on tokens {list(tokens_BS.shape)} raises {said(error)}") from error
        return logits

    def _logits(self) -> tuple[float, float | None]:
        """Returns (factor of the logits, cap of the logits or None)."""
        seen = self._observe(self.small, self.tokens_BS, self._embedding(self.small).shape[0])
        scale, cap, why = probes.head_facts(seen, self.real.logit_cap)
        if why is not None:
            raise self._wrong(f"{why}: return the head's result, with a factor or a cap (`logit_cap`) at most")
        if scale != 1 and self.row.small:
            raise self._wrong(
                f"the small copy multiplies the head's result by {scale:g}, and the model itself may have another factor: "
                "leave `small` out of the ModelRow, or apply the factor before the head"
            )
        return scale, cap

    # ---- Tensor parallelism ----

    def _tensor(
        self,
    ) -> tuple[dict[str, Split], dict[str, Style], dict[str, tuple[str, ...]], dict[str, int], tuple[int, ...]]:
        """Returns `splits`, `styles`, `divided`, `heads` and `ways` of `ModelFacts`, and may add to `refusals`."""
        units = [unit for unit in self._units() if self._supported(unit)]
        splits: dict[str, Split] = {}
        styles: dict[str, Style] = {}
        divided: dict[str, tuple[str, ...]] = {}
        heads: dict[str, int] = {}
        wanted, shapes = self._wanted(), {name: each.shape for name, each in self.real.module.named_parameters()}
        chosen: list[ProvedUnit] = []
        for number, like in self._pairs():
            for unit in units:
                if not _inside(unit.name, f"{self.real.blocks}.{like}"):
                    continue
                names = _Renamed(f"{self.real.blocks}.{like}", f"{self.real.blocks}.{number}")
                parts = {names(name): split for name, split in unit.splits.items()}
                if self.real.splits is not None and not any(name.rpartition(".")[0] in wanted for name in parts):
                    continue
                scaled = {name: _scaled(split, shapes[name]) for name, split in parts.items()}
                known = {name: split for name, split in scaled.items() if split is not None}
                if len(known) < len(scaled):
                    continue
                chosen.append(unit)
                splits |= known
                styles |= {names(name): style for name, style in unit.styles.items()}
                for name, keys in unit.divided.items():
                    divided[names(name)] = keys
                    heads |= {f"{names(name)}.{key}": self._attribute(names(name), key) for key in keys}
                if unit.atoms != unit.columns and not unit.divided:
                    heads[names(unit.name)] = self._atoms(unit, known, shapes, names)
        for name, style in wanted.items():
            split = splits.get(f"{name}.weight")
            if split is None or split.dim != (0 if style == "colwise" else 1):
                self.refusals["tensor"] = (
                    f"{self.row.name}: splits: {name} cannot be {style}, because parts of the block that are divided so do "
                    "not add up: change the table, or choose parallel.tensor: 1"
                )
                break
        if not chosen:
            self.refusals.setdefault(
                "tensor",
                f"{self.row.name}: no module in {self.real.blocks} has parts that add up, so its parameters would stay "
                "whole: choose parallel.tensor: 1",
            )
        ends = {f"{self.real.embedding}.weight": Split(0), f"{self.real.head}.weight": Split(0)}
        ways = set.intersection({2, 4}, *({*unit.ways} for unit in chosen))
        splits |= {name: split for name, split in ends.items() if name in shapes}
        return splits, styles, divided, heads, tuple(sorted(ways))

    def _wanted(self) -> dict[str, str]:
        """Returns the styles of `ModelSpec.splits` by module name. Raises `UserError` if a pattern matches a module
        that is no `nn.Linear` in the blocks."""
        found: dict[str, str] = {}
        for pattern, style in (self.real.splits or {}).items():
            for name, module in self.real.module.named_modules():
                if fnmatchcase(name, pattern):
                    if type(module) is not nn.Linear or not name.startswith(f"{self.real.blocks}."):
                        raise self._wrong(f"splits: {name} is no nn.Linear in the blocks: only these have a division")
                    found.setdefault(name, style)
        return found

    def _pairs(self) -> list[tuple[int, int]]:
        """Returns pairs (number of a real block, number of the copy's first block with the same `signature`)."""
        first: dict[Any, int] = {}
        for number, layer in enumerate(self._layers(self.small)):
            first.setdefault(signature(layer), number)
        found = [(number, first.get(signature(layer))) for number, layer in enumerate(self._layers(self.real))]
        return [(number, like) for number, like in found if like is not None]

    def _units(self) -> list[ProvedUnit]:
        """Returns the proved units of the copy's blocks in `_pairs`."""
        blocks = [f"{self.small.blocks}.{like}" for like in dict.fromkeys(like for _, like in self._pairs())]
        names = [name for block in blocks for name, _ in self.copy.get_submodule(block).named_modules(prefix=block)]
        arguments, width = {"input_ids": self._tokens(ROWS + 1)}, self._embedding(self.small).shape[1]
        try:
            calls = record_calls(self.copy.double(), names, arguments)
        except Exception:  # the user's code may make tensors in single precision
            calls = record_calls(self.copy.float(), names, arguments)
        return [unit for block in blocks for unit in prove_units(self.copy, block, calls, width)]

    def _supported(self, unit: ProvedUnit) -> bool:
        """Returns True if the modules of a unit have the classes and attributes that the unit's collectives need."""
        for name, style in unit.styles.items():
            module = self.copy.get_submodule(name)
            if style in ("column", "row") and type(module) is not nn.Linear:
                return False
            if style == "norm_all" and not isinstance(getattr(module, "eps", None), float):
                return False
        return True

    def _attribute(self, name: str, key: str) -> int:
        owner: Any = self.real.module.get_submodule(name)
        value: int = getattr(owner.config if key.startswith("config.") else owner, key.removeprefix("config."))
        return value

    def _atoms(
        self, unit: ProvedUnit, splits: Mapping[str, Split], shapes: Mapping[str, Sequence[int]], names: "_Renamed"
    ) -> int:
        """Returns a number, such as the number of heads, that the number of ranks must divide."""
        arguments = {**self.arguments, **self.row.small}
        real = {self.arguments[name] for name, value in arguments.items() if value == unit.atoms}
        if len(real) == 1:
            return int(real.pop())
        small = {names(name): each.shape for name, each in self.small.module.named_parameters()}
        name, dim = next((name, split.dim) for name, split in splits.items() if split.dim is not None)
        return gcd(unit.atoms, unit.atoms * shapes[name][dim] // small[name][dim])


class _Renamed(NamedTuple):
    """Changes names of modules and parameters in the block `before` to names in the block `after`."""

    before: str
    after: str

    def __call__(self, name: str) -> str:
        return self.after + name.removeprefix(self.before)


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")


def _scaled(split: Split, shape: Sequence[int]) -> Split | None:
    """Scales the pieces of a split to a parameter of `shape`. Returns None if a piece would not be an integer."""
    if split.dim is None or not split.pieces:
        return split
    total, size = sum(split.pieces), shape[split.dim]
    if any(piece * size % total for piece in split.pieces):
        return None
    return replace(split, pieces=tuple(piece * size // total for piece in split.pieces))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= _TOLERANCE * b.abs().max().clamp(min=1e-6))
