"""Finds tensor-parallel splits of a module's parameters from gradients, and checks that the ranks' outputs add up."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optimus.model.foreign.calls import ModuleCall, ModuleRun, has_gradient, run_module
from optimus.model.foreign.dependencies import Dependencies, find_dependencies
from optimus.model.foreign.full_norms import ConstantNorm, epsilon_of, offset_of, rms_gain
from optimus.model.foreign.records import Split, Style
from optimus.model.foreign.slicing import owner_of, rank_part

_TOLERANCE = 2e-5  # maximum error of a sum over ranks, relative to the largest expected magnitude
_COUNTS = re.compile(r"(num|n)_\w*heads?$|^\w*heads$|^n_?heads?$|n_groups$|num_groups$|n_head$")
_NO_WIDTH = re.compile(r"head_?(dim|size)|kernel|layer|top_?k|experts|rank|state|eps|_id$|idx|groups")
_GROUPED = re.compile(r"groups$|n_rep$")


@dataclass(frozen=True)
class ProvedUnit:
    """A checked tensor-parallel division of the module `name`."""

    name: str
    splits: Mapping[str, Split]
    styles: Mapping[str, Style]
    divided: Mapping[str, tuple[str, ...]]
    atoms: int  # number of equal groups of columns; each group stays on one rank
    columns: int  # input columns of the last product
    ways: tuple[int, ...]


def prove_units(model: nn.Module, block: str, calls: Mapping[str, ModuleCall], width: int) -> list[ProvedUnit]:
    """Returns the proved units of one block. `width` is the number of columns of the residual stream."""
    units: list[ProvedUnit] = []
    taken: set[str] = set()
    for name in sorted(_containers(model, block), key=lambda each: (each == block, each.count("."))):
        if name not in calls:
            continue
        while (unit := _prove_unit(model.get_submodule(name), name, calls[name], taken, width)) is not None:
            units.append(unit)
            taken |= {each for each, split in unit.splits.items() if split.dim is not None or split.partial}
    return units


def _containers(model: nn.Module, block: str) -> Iterator[str]:
    for inner, module in model.get_submodule(block).named_modules():
        if sum(each.ndim >= 2 for each in module.parameters()) >= 2 and not isinstance(module, nn.ModuleList):
            yield f"{block}.{inner}" if inner else block


# ---- One unit ----


@dataclass
class _Attempt:
    """A candidate for a unit: a module, its call, and the weight of its last product."""

    module: nn.Module
    call: ModuleCall
    names: list[str]  # trainable parameters that no earlier unit has taken
    leaves: list[str]
    last: str  # leaf with the last product; "" for a parameter of the module itself
    weight: str
    dim: int
    norms: tuple[str, ...] = ()


def _prove_unit(module: nn.Module, name: str, call: ModuleCall, taken: set[str], width: int) -> ProvedUnit | None:
    """Returns a proved unit of parameters that are not in `taken`, or None."""
    prefix = f"{name}." if name else ""
    named = module.named_parameters()
    names = [each for each, parameter in named if parameter.requires_grad and prefix + each not in taken]
    if sum(module.get_parameter(each).ndim >= 2 for each in names) < 2:
        return None
    leaves = sorted({each.rpartition(".")[0] for each in names} - {""})
    try:
        trace = run_module(module, call, leaves)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    for attempt in _attempts(module, call, names, leaves, trace):
        if attempt.last and trace.outputs[attempt.last].shape[-1] != width:
            continue
        unit = _prove(attempt, trace, alone=not any(each.startswith(prefix) for each in taken))
        if unit is not None:
            return _absolute(unit, name)
    return None


def _attempts(
    module: nn.Module, call: ModuleCall, names: list[str], leaves: list[str], trace: ModuleRun
) -> Iterator[_Attempt]:
    """Yields candidates for the last product."""
    own = [each for each in names if "." not in each and module.get_parameter(each).ndim >= 3]
    if len(own) >= 2:
        for weight in reversed(own):
            for dim in range(module.get_parameter(weight).ndim - 1, 0, -1):
                yield _Attempt(module, call, names, leaves, "", weight, dim)
    for leaf in reversed(trace.order):
        if trace.order.count(leaf) > 1 or leaf not in trace.outputs or leaf not in trace.inputs:
            continue
        for weight in (each for each in names if each.rpartition(".")[0] == leaf):
            inputs = _input_dim(module, leaf, weight, trace)
            if inputs is not None:
                yield _Attempt(module, call, names, leaves, leaf, weight, inputs)


def _input_dim(module: nn.Module, leaf: str, weight: str, trace: ModuleRun) -> int | None:
    """Returns the input dim of a leaf's weight: the product sums over this dim. Returns None if no dim qualifies."""
    parameter, columns = module.get_parameter(weight), trace.inputs[leaf].shape[-1]
    output = trace.outputs[leaf]
    if parameter.ndim < 2 or columns not in parameter.shape or not output.requires_grad:
        return None
    if isinstance(module.get_submodule(leaf), nn.Linear):
        return 1
    (gradient,) = torch.autograd.grad(output[..., 0].sum(), parameter, retain_graph=True, allow_unused=True)
    if gradient is None:
        return None
    for dim in range(parameter.ndim - 1, max(-1, parameter.ndim - 3), -1):
        used = (gradient != 0).any(dim=[each for each in range(parameter.ndim) if each != dim])
        if parameter.shape[dim] == columns and int(used.sum()) > 1:
            return dim
    return None


def _prove(attempt: _Attempt, trace: ModuleRun, alone: bool) -> ProvedUnit | None:
    if not attempt.last:
        return _prove_experts(attempt) if alone else None
    inner = trace.inputs[attempt.last]
    if inner.shape[-1] % 2 or not inner.requires_grad:
        return None
    found = find_dependencies(inner.chunk(2, -1), attempt.module, _others(attempt))
    norms = _full_norms(attempt, trace, found)
    if norms:
        attempt, trace, found = _without_statistics(attempt, trace, found, norms)
    matrices = [each for each in found.splits if attempt.module.get_parameter(each).ndim >= 2]
    if not matrices:
        return None
    splits = found.splits | {attempt.weight: Split(attempt.dim)}
    expected = trace.outputs[attempt.last].detach()
    proof = _Proof(attempt, trace, splits, found.unsplit, expected)
    return proof.unit(alone)


def _without_statistics(
    attempt: _Attempt, trace: ModuleRun, found: Dependencies, norms: tuple[str, ...]
) -> tuple[_Attempt, ModuleRun, Dependencies]:
    """Holds the statistics of divided `norms` constant, if ranks can then divide more elements."""

    def again(norms: tuple[str, ...]) -> tuple[_Attempt, ModuleRun, Dependencies]:
        constant = _with_constant_norms(attempt, norms)
        seen = run_module(constant.module, constant.call, constant.leaves)
        columns = seen.inputs[constant.last].chunk(2, -1)
        return constant, seen, find_dependencies(columns, constant.module, _others(constant))

    more = again(norms)[2]
    if more.elements(attempt.module) <= found.elements(attempt.module):
        return attempt, trace, found
    return again(tuple(each for each in norms if f"{each}.weight" in more.splits))


def _others(attempt: _Attempt) -> list[str]:
    return [each for each in attempt.names if not attempt.last or each.rpartition(".")[0] != attempt.last]


# ---- Norms over the columns of all ranks ----


def _full_norms(attempt: _Attempt, trace: ModuleRun, found: Dependencies) -> tuple[str, ...]:
    """Returns the leaves that are RMS norms over all columns of their input; empty if `found.unsplit` has no matrix."""
    norms: list[str] = []
    if not any(attempt.module.get_parameter(name).ndim >= 2 for name in found.unsplit):
        return ()
    for name in (*found.unsplit, *found.splits):
        leaf = name.removesuffix(".weight")
        if leaf == name or attempt.module.get_parameter(name).ndim != 1 or leaf not in trace.outputs:
            continue
        x, weight = trace.inputs[leaf].detach(), attempt.module.get_parameter(name).detach()
        norm = attempt.module.get_submodule(leaf)
        alone = len([*norm.parameters()]) == 1 and x.shape[-1] == len(weight)
        if alone and rms_gain(norm, weight, x, trace.outputs[leaf]) is not None:
            norms.append(leaf)
    return tuple(norms)


def _with_constant_norms(attempt: _Attempt, norms: tuple[str, ...]) -> _Attempt:
    """Returns the attempt with a copy of the module. In the copy, these norms have constant statistics."""
    module = rank_part(attempt.module, {}, {}, 0, 1)
    assert module is not None
    for name in norms:
        norm, (owner, leaf) = attempt.module.get_submodule(name), owner_of(module, name)
        weight = nn.Parameter(norm.get_parameter("weight").detach().clone())
        owner._modules[leaf] = ConstantNorm(weight, epsilon_of(norm), offset_of(norm))
    return replace(attempt, module=module, norms=norms)


# ---- The proof ----


@dataclass
class _Proof:
    attempt: _Attempt
    trace: ModuleRun
    splits: dict[str, Split]
    unsplit: tuple[str, ...]
    expected: Tensor  # required sum of the ranks' outputs

    def unit(self, alone: bool) -> ProvedUnit | None:
        """Returns the unit, with names relative to the module, or None."""
        attempt = self.attempt
        shared = [each for each in attempt.names if each.rpartition(".")[0] == attempt.last and each != attempt.weight]
        self.splits |= {each: Split(share=True) for each in shared}
        divided = next((each for each in self._trials() if self.adds_up(2, each)), None)
        if divided is None:
            return None
        divided = self._fewest(divided)
        ways = (2, 4) if self.adds_up(4, divided) else (2,)
        styles = self._leaf_styles(divided)
        if styles is not None:
            splits = {name: replace(each, share=False) for name, each in self.splits.items()}
            splits |= {name: Split(partial=name in styles.partial) for name in self.unsplit if name in styles.partial}
            return ProvedUnit("", splits, styles.styles, divided, self._atoms(), self.columns, ways)
        if alone and not attempt.norms and self.results_add_up(divided):
            splits = self.splits | {name: Split(partial=True) for name in self.unsplit}
            splits |= {name: replace(each, partial=True) for name, each in splits.items() if each.share}
            return ProvedUnit("", splits, {"": "sums"}, divided, self._atoms(), self.columns, ways)
        return None

    @property
    def columns(self) -> int:
        """The number of columns of the last product's input."""
        return self.attempt.module.get_parameter(self.attempt.weight).shape[self.attempt.dim]

    def part(self, rank: int, ways: int, divided: Mapping[str, tuple[str, ...]]) -> nn.Module | None:
        """Returns a rank's part of the module; None if `ways` does not divide a size or attribute."""
        own = rank_part(self.attempt.module, self.splits, divided, rank, ways)
        if own is not None:
            for name in self.attempt.norms:
                norm, (owner, leaf) = self.attempt.module.get_submodule(name), owner_of(own, name)
                assert isinstance(norm, ConstantNorm)
                weight = nn.Parameter(own.get_parameter(f"{name}.weight").detach())
                owner._modules[leaf] = ConstantNorm(weight, norm.eps, norm.plus, norm.seen)
        return own

    def runs(self, ways: int, divided: Mapping[str, tuple[str, ...]]) -> Iterator[ModuleRun]:
        """Yields the run of each rank's module. Raises `ValueError` if `part` returns None."""
        for rank in range(ways):
            own = self.part(rank, ways, divided)
            if own is None:
                raise ValueError("a part does not divide")
            yield run_module(own, self.attempt.call, self.attempt.leaves)

    def adds_up(self, ways: int, divided: Mapping[str, tuple[str, ...]]) -> bool:
        """Returns True if the ranks' outputs of the last product add up to `expected`."""
        try:
            parts = [each.outputs[self.attempt.last].detach() for each in self.runs(ways, divided)]
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, AssertionError):
            return False
        return equal(parts, self.expected)

    def results_add_up(self, divided: Mapping[str, tuple[str, ...]]) -> bool:
        """Returns True if the results of two ranks' modules add up to the result of the whole module."""
        if not isinstance(self.trace.result, Tensor):
            return False
        return equal([each.result.detach() for each in self.runs(2, divided)], self.trace.result.detach())

    # ---- Attributes that a rank divides, and groups of columns ----

    def _trials(self) -> Iterator[dict[str, tuple[str, ...]]]:
        """Yields candidates for the attributes to divide, by module."""
        owned, counts, widths, grouped = self._attributes()
        options = [[], counts, counts + widths, widths, grouped, counts + grouped, counts + widths + grouped]
        options = [[], *([*owned, *each] for each in options)]
        configured = self._configured()
        tried = set()
        for extra in ([], configured[0], configured[0] + configured[1]):
            for chosen in options:
                key = frozenset([*chosen, *extra])
                if key not in tried:
                    tried.add(key)
                    yield self._by_module([*chosen, *extra])

    def _by_module(self, pairs: Sequence[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
        made: dict[str, tuple[str, ...]] = {}
        for name, attribute in [*self._groups(), *pairs]:
            made[name] = (*made.get(name, ()), attribute)
        return made

    def _groups(self) -> list[tuple[str, str]]:
        """Returns the attribute `groups` of grouped `nn.Conv1d`s whose weights are divided."""
        owners = {name.rpartition(".")[0] for name, each in self.splits.items() if each.dim is not None}
        found = ((name, self.attempt.module.get_submodule(name)) for name in owners)
        return [(name, "groups") for name, each in found if isinstance(each, nn.Conv1d) and each.groups > 1]

    def _attributes(self) -> tuple[list[tuple[str, str]], ...]:
        """Returns attributes that a rank may divide: sizes in divided leaves, numbers of heads, widths, group sizes."""
        sizes = self._sizes()
        owned, counts, widths, grouped = [], [], [], []
        leaves = self._divided_leaves()
        for name, module in self.attempt.module.named_modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding) or (name and name == self.attempt.last):
                continue
            if name in leaves:
                own = self._sizes(name)
                owned += [(name, key) for key, value in vars(module).items() if type(value) is int and value in own]
                continue
            for key, value in vars(module).items():
                if type(value) is not int or value < 2 or value % 2 or key.startswith("_"):
                    continue
                if _GROUPED.search(key) and not _COUNTS.search(key):
                    grouped.append((name, key))
                elif _COUNTS.search(key):
                    counts.append((name, key))
                elif value in sizes and not _NO_WIDTH.search(key):
                    widths.append((name, key))
        return owned, counts, widths, grouped

    def _sizes(self, leaf: str | None = None) -> set[int]:
        """Returns the sizes of divided dims, of pieces, and of adjacent pieces together."""
        sizes = set()
        for name, split in self.splits.items():
            if split.dim is None or (leaf is not None and name.rpartition(".")[0] != leaf):
                continue
            total = self.attempt.module.get_parameter(name).shape[split.dim]
            pieces = split.pieces or (total,)
            sizes |= {sum(pieces[a:b]) for a in range(len(pieces)) for b in range(a + 1, len(pieces) + 1)}
        return sizes

    def _configured(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Returns settings of modules' configurations in two lists: numbers of heads, and widths."""
        counts, widths, sizes = [], [], self._sizes()
        for name, module in self.attempt.module.named_modules():
            config = vars(module).get("config")
            if config is None or not hasattr(config, "to_dict"):
                continue
            for key, value in config.to_dict().items():
                if type(value) is not int or value < 2 or value % 2:
                    continue
                if _COUNTS.search(key):
                    counts.append((name, f"config.{key}"))
                elif value in sizes and not _NO_WIDTH.search(key):
                    widths.append((name, f"config.{key}"))
        return counts, widths

    def _fewest(self, divided: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Returns `divided` without attributes that `adds_up` does not need; keeps all attributes of `_groups`."""
        fixed = {*self._groups()}
        for name, key in [(name, key) for name, keys in divided.items() for key in keys]:
            if (name, key) in fixed:
                continue
            fewer = {n: tuple(k for k in keys if (n, k) != (name, key)) for n, keys in divided.items()}
            fewer = {n: keys for n, keys in fewer.items() if keys}
            if self.adds_up(2, fewer):
                divided = fewer
        return divided

    def _atoms(self) -> int:
        """Returns a number of equal column groups. The first group shares no parameter rows with the others."""
        inner = self.trace.inputs[self.attempt.last]
        columns = inner.shape[-1]
        values = {columns, *_numbers(self.attempt.module)}
        for count in sorted((each for each in values if each > 2 and columns % each == 0), reverse=True)[:12]:
            step = columns // count
            names = [
                each for each, split in self.splits.items() if split.dim is not None and each != self.attempt.weight
            ]
            if self._apart(inner, step, names):
                return count
        return 2

    def _apart(self, inner: Tensor, step: int, names: Sequence[str]) -> bool:
        parameters = [self.attempt.module.get_parameter(each) for each in names]
        used = []
        for columns in (inner[..., :step], inner[..., step:]):
            weights = torch.rand(columns.shape).to(columns) + 0.5
            used.append(torch.autograd.grad(columns, parameters, weights, retain_graph=True, allow_unused=True))
        for name, first, rest in zip(names, *used):
            if first is None or rest is None:
                continue
            dim = self.splits[name].dim
            others = [each for each in range(first.ndim) if each != dim]
            a, b = ((each != 0).any(dim=others) if others else each != 0 for each in (first, rest))
            if bool((a & b).any()):
                return False
        return True

    # ---- Collectives ----

    def _leaf_styles(self, divided: Mapping[str, tuple[str, ...]]) -> "_LeafStyles | None":
        """Returns the styles of leaves, and the parameters with partial gradients; None if collectives at leaves do not
        suffice."""
        own = self.part(0, 2, divided)
        assert own is not None
        first = run_module(own, self.attempt.call, self.attempt.leaves)
        inner = {leaf for leaf in self._divided_leaves() if not _has_parameters_inside(own.get_submodule(leaf))}
        columns = sorted(leaf for leaf in inner if self._unsplit_input(leaf, first))
        direct = run_module(own, self.attempt.call, self.attempt.leaves, detached=columns)
        undivided = [each for each in self.unsplit if each in dict(own.named_parameters())]
        parameters = [own.get_parameter(each) for each in undivided]
        full = _gradients(first.outputs[self.attempt.last], parameters)
        inputs = direct.call.trained()
        beside = _gradients(direct.outputs[self.attempt.last], [*parameters, *inputs])
        if any(bool((each != 0).any()) for each in beside[len(parameters) :]):
            return None
        partial = set()
        for name, some, every in zip(undivided, beside, full):
            if bool((some != 0).any()):
                if not torch.allclose(some, every, rtol=1e-4, atol=1e-6 * float(every.abs().max())):
                    return None
                partial.add(name)
        styles: dict[str, Style] = dict.fromkeys(columns, "column")
        styles |= dict.fromkeys(self.attempt.norms, "norm_all")
        return _LeafStyles(styles | {self.attempt.last: "row"}, partial)

    def _divided_leaves(self) -> list[str]:
        found = {name.rpartition(".")[0] for name, each in self.splits.items() if each.dim is not None}
        return sorted(found - {"", self.attempt.last})

    def _unsplit_input(self, leaf: str, trace: ModuleRun) -> bool:
        """Returns True if a leaf's input has the same shape on a rank as in the whole module."""
        if leaf not in trace.inputs or leaf not in self.trace.inputs:
            return False
        return trace.inputs[leaf].shape == self.trace.inputs[leaf].shape


def _has_parameters_inside(module: nn.Module) -> bool:
    return any(True for child in module.children() for _ in child.parameters())


class _LeafStyles(NamedTuple):
    styles: dict[str, Style]
    partial: set[str]


def _gradients(output: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    if not tensors or not output.requires_grad:
        return [torch.zeros_like(each) for each in tensors]
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(output.shape, generator=generator).to(output)
    found = torch.autograd.grad(output, tensors, weights, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(each) if made is None else made for each, made in zip(tensors, found)]


def equal(parts: Sequence[Tensor], expected: Tensor) -> bool:
    """Returns True if `parts` add up to `expected` within `_TOLERANCE`, and `expected` is not zero."""
    if any(each.shape != expected.shape for each in parts):
        return False
    total = torch.stack([*parts]).sum(0)
    largest = expected.abs().max()
    return bool((total - expected).abs().max() <= _TOLERANCE * largest) and bool(largest > 0)


def _numbers(module: nn.Module) -> set[int]:
    """Returns the integers among attributes and settings of modules."""
    found = set()
    for each in module.modules():
        found |= {value for value in vars(each).values() if type(value) is int}
        if hasattr(vars(each).get("config"), "to_dict"):
            found |= {value for value in each.config.to_dict().values() if type(value) is int}  # type: ignore[union-attr, operator]
    return found


# ---- Fused experts: parameters of the module itself with at least 3 dims ----


def _prove_experts(attempt: _Attempt) -> ProvedUnit | None:
    module, weight = attempt.module, attempt.module.get_parameter(attempt.weight)
    size = weight.shape[attempt.dim]
    if size % 2:
        return None
    columns, values = [], weight.detach().clone()
    try:
        for part in range(2):
            mask = torch.zeros_like(values)
            mask.narrow(attempt.dim, part * size // 2, size // 2).fill_(1)
            module._parameters[attempt.weight] = nn.Parameter(values * mask)
            columns.append(run_module(module, attempt.call, []).result)
    finally:
        module._parameters[attempt.weight] = weight
    if not all(has_gradient(each) for each in columns):
        return None
    found = find_dependencies(columns, module, [each for each in attempt.names if each != attempt.weight])
    if not any(module.get_parameter(each).ndim >= 3 for each in found.splits):
        return None
    return _experts_unit(attempt, found)


def _experts_unit(attempt: _Attempt, found: Dependencies) -> ProvedUnit | None:
    module, expected = attempt.module, run_module(attempt.module, attempt.call, []).result.detach()
    last = attempt.module.get_parameter(attempt.weight)
    biases = [each for each in found.unsplit if module.get_parameter(each).ndim < last.ndim]
    identities = tuple(name for name, each in module.named_modules() if isinstance(each, nn.Identity))
    for shared, passed in itertools.product(([], biases), ((), identities)):
        splits = found.splits | {attempt.weight: Split(attempt.dim)}
        splits |= {each: Split(partial=True, share=each in shared) for each in found.unsplit}
        proof = _ExpertsProof(
            replace(attempt, leaves=[]), ModuleRun(result=expected), splits, found.unsplit, expected, passed
        )
        divided = next((each for each in proof._trials() if proof.adds_up(2, each)), None)
        if divided is not None:
            divided = proof._fewest(divided)
            ways = (2, 4) if proof.adds_up(4, divided) else (2,)
            styles: dict[str, Style] = {"": "experts", **dict.fromkeys(passed, "share")}
            return ProvedUnit("", splits, styles, divided, proof.columns, proof.columns, ways)
    return None


class _Shared(nn.Module):
    """Divides a replicated input by the number of ranks."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        self.ways = ways

    def forward(self, x: Tensor) -> Tensor:
        return x / self.ways


@dataclass
class _ExpertsProof(_Proof):
    identities: tuple[str, ...] = ()  # names of `nn.Identity` modules

    def part(self, rank: int, ways: int, divided: Mapping[str, tuple[str, ...]]) -> nn.Module | None:
        part = super().part(rank, ways, divided)
        if part is not None:
            for name in self.identities:
                owner, leaf = owner_of(part, name)
                owner._modules[leaf] = _Shared(ways)
        return part

    def adds_up(self, ways: int, divided: Mapping[str, tuple[str, ...]]) -> bool:
        """Returns True if the ranks' results add up to `expected`."""
        try:
            parts = [each.result.detach() for each in self.runs(ways, divided)]
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, AssertionError):
            return False
        return equal(parts, self.expected)


def _absolute(unit: ProvedUnit, name: str) -> ProvedUnit:
    def absolute(inner: str) -> str:
        return ".".join(filter(None, (name, inner)))

    return replace(
        unit,
        name=name,
        splits={absolute(each): split for each, split in unit.splits.items()},
        styles={absolute(each): style for each, style in unit.styles.items()},
        divided={absolute(each): names for each, names in unit.divided.items()},
    )
