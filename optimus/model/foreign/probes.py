"""Observes the forward passes and the gradients of small models.

Legend: B batch, S positions, N query heads, M heads of keys and values, D columns of a head (values may have another
number than queries and keys).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimus.kernels.attention import Scoring
from optimus.kernels.documents import Documents
from optimus.model.foreign.calls import first_of
from optimus.model.foreign.twin import arguments_of, configurations_of, layers_of, tokens_of_twin
from optimus.model.sequence import SequenceSplit

_NAME = "optimus_twin"  # name of the attention function that probes register
CUT = 11  # position at which probes divide a row in two
_TOLERANCE = 1e-4


def find_blocks(module: nn.Module) -> str:
    """Returns the name of the `nn.ModuleList` with the most parameters, among lists that are in no other list.

    Raises `ValueError` if `module` has no `nn.ModuleList` with modules.
    """
    found: dict[str, int] = {}
    for name, child in module.named_modules():
        outer = any(name.startswith(f"{other}.") for other in found)
        if isinstance(child, nn.ModuleList) and len(child) and not outer:
            found[name] = sum(parameter.numel() for parameter in child.parameters())
    if not found:
        raise ValueError(f"{type(module).__name__} has no list of blocks (`nn.ModuleList`)")
    return max(found, key=lambda name: found[name])


@dataclass
class Pass:
    """One forward pass of a small model."""

    # Names of called modules with parameters of their own, in order. A called block has the name of the block list.
    order: list[str] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)  # numbers of blocks, in the order of their calls
    streams: list[Any] = field(default_factory=list)  # first argument of each block
    made: list[Any] = field(default_factory=list)  # outputs of blocks
    beside: set[str] = field(default_factory=set)  # names of further block arguments with gradients
    product: list[Tensor] = field(default_factory=list)  # outputs of the output layer
    logits: Tensor | None = None
    tokens: tuple[int, ...] = ()  # shape of the tokens, (B, S)

    @property
    def outputs(self) -> int:
        """Length of the first block's output; 0 if the output is a tensor or no block runs."""
        return 0 if not self.made or isinstance(self.made[0], Tensor) else len(self.made[0])

    def width(self) -> int:
        """Returns the number of columns of the residual stream; 0 if not known."""
        return next((each.shape[-1] for each in self.streams if isinstance(each, Tensor)), 0)

    def stream_shape(self) -> tuple[int, ...] | None:
        """Returns the residual stream's dims after [B, S]; None if the stream is not a tensor [B, S, ...]."""
        first = self.streams[0] if self.streams else None
        if not isinstance(first, Tensor) or first.ndim < 3 or first.shape[:2] != self.tokens:
            return None
        return tuple(first.shape[2:])


def observe(twin: nn.Module, blocks: str, head: str, tokens_BS: Tensor) -> Pass:
    """Runs a small model's forward pass, and records the calls of modules, the residual stream and the logits."""
    seen = Pass(tokens=tuple(tokens_BS.shape))
    layers = layers_of(twin, blocks)
    with ExitStack() as stack:
        for name, each in twin.named_modules():
            if each._parameters and not name.startswith(f"{blocks}."):
                stack.callback(each.register_forward_pre_hook(_noting(seen.order, name)).remove)
        for number, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(_entering(seen, blocks, number), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(lambda m, a, out: seen.made.append(out)).remove)
        product = twin.get_submodule(head)
        stack.callback(product.register_forward_hook(lambda m, a, out: seen.product.append(out)).remove)
        logits = logits_of(twin, tokens_BS)
    return replace(seen, logits=logits)


def _noting(order: list[str], name: str) -> Callable[..., None]:
    return lambda module, args: order.append(name)


def _entering(seen: Pass, blocks: str, number: int) -> Callable[..., None]:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.order.append(blocks)
        seen.entered.append(number)
        first = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        seen.streams.append(first)
        for where, each in pytree.tree_flatten_with_path((args, kwargs))[0]:
            if isinstance(each, Tensor) and each.requires_grad and each is not first:
                seen.beside.add(_leaf_name(where))

    return enter


def _leaf_name(path: Any) -> str:
    keys = [getattr(each, "key", getattr(each, "idx", None)) for each in path[1:]]
    named = [each for each in keys if isinstance(each, str)]
    return named[0] if named else f"argument {keys[0] if keys else 0}"


def logits_of(twin: nn.Module, tokens_BS: Tensor, **more: Any) -> Tensor:
    """Returns the logits of a forward pass without a KV cache. Ignores arguments in `more` that the model lacks."""
    out = twin(input_ids=tokens_BS, **arguments_of(twin, **more))
    logits = out.logits if hasattr(out, "logits") else first_of(tuple(out.values()))
    assert isinstance(logits, Tensor)
    return logits


def broken_chain(seen: Pass, blocks: str, layers: int) -> str | None:
    """Returns why the blocks cannot be partitioned into pipeline stages, or None."""
    if not seen.entered:
        return f"{blocks} do not run"
    if seen.entered != [*range(layers)]:
        return f"{blocks} run in the order {seen.entered[:6]}, not once each from the first to the last"
    for number, (stream, made) in enumerate(zip(seen.streams[1:], seen.made)):
        if stream is not first_of(made):
            return f"the output of {blocks}.{number} is not the input of {blocks}.{number + 1}"
    if seen.beside:
        names = ", ".join(sorted(seen.beside))
        return f"blocks of {blocks} take further tensors with gradients ({names}), which no stage receives"
    if seen.stream_shape() is None:
        return f"the residual stream of {blocks} does not begin with dims of batch and sequence"
    return None


def head_facts(seen: Pass, cap: float | None) -> tuple[float, float | None, str | None]:
    """Returns (factor of the logits, cap of the logits or None, None).

    Returns (1.0, None, reason) if neither a factor nor `cap` turns the output layer's product into the logits.
    """
    assert seen.logits is not None
    if len(seen.product) != 1 or seen.product[0].shape != seen.logits.shape:
        return 1.0, None, "logits are not the output layer's product"
    z, y = seen.product[0].detach(), seen.logits.detach()
    if cap and torch.allclose((z / cap).tanh() * cap, y.to(z), rtol=1e-4, atol=1e-5):
        return 1.0, float(cap), None
    large = z.abs() > z.abs().max() / 2
    scale = float((y.double()[large] / z.double()[large]).mean())
    if torch.allclose(z * scale, y.to(z), rtol=1e-4, atol=1e-5 * float(y.abs().max())):
        return float(f"{scale:.7g}"), None, None
    return 1.0, None, "the output layer is followed by something else than a factor or a cap"


# ---- Attention and documents ----


@dataclass
class _Calls:
    documents: Documents | None = None
    seen: list[tuple[Any, ...]] = field(default_factory=list)  # (module, heads, query columns, value columns, window)


_calls: ContextVar[_Calls | None] = ContextVar("_calls", default=None)


def _attend(
    module: nn.Module,
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    v_BMSD: Tensor,
    attention_mask: Any = None,
    scaling: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes the library's causal attention, ignores `attention_mask`, and records the call."""
    calls = _calls.get()
    assert calls is not None
    size = q_BNSD.shape[-1]
    factor = (scaling if scaling is not None else size**-0.5) * size**0.5
    window = options.get("sliding_window")
    calls.seen.append((module, q_BNSD.shape[1], size, v_BMSD.shape[-1], window))
    columns = v_BMSD.shape[-1]
    if columns != size:  # the kernels take one head size; `factor` corrects the scale for the padded size
        most = max(size, columns)
        factor *= (most / size) ** 0.5
        q_BNSD, k_BMSD, v_BMSD = (F.pad(each, (0, most - each.shape[-1])) for each in (q_BNSD, k_BMSD, v_BMSD))
    scoring = Scoring(window, options.get("softcap"), options.get("s_aux"))
    q, k, v = (each.transpose(1, 2) for each in (q_BNSD * factor, k_BMSD, v_BMSD))
    return SequenceSplit(calls.documents).attend(q, k, v, scoring)[..., :columns], None


@contextmanager
def our_attention(twin: nn.Module, documents: Documents | None = None) -> Iterator[_Calls]:
    """Makes a small model use the library's attention inside the `with` block."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    before = [(each, each._attn_implementation) for each in configurations_of(twin)]
    calls = _Calls(documents)
    token = _calls.set(calls)
    try:
        for each, _ in before:
            vars(each)["_attn_implementation_internal"] = _NAME
        yield calls
    finally:
        for each, was in before:
            vars(each)["_attn_implementation_internal"] = was
        _calls.reset(token)


@dataclass(frozen=True)
class AttentionFacts:
    """Results of a small model's runs with the library's attention."""

    used: bool  # True if the model calls the attention interface of `transformers`, or the run fails
    equal: bool  # True if the library's attention gives the same logits as the model's own
    documents: bool  # True if two documents in one row do not influence each other
    why: str  # the reason if `documents` is False
    scored: Mapping[int, tuple[int, int, int, int | None]]  # by layer: (heads, query columns, value columns, window)


@torch.no_grad()
def attention_facts(
    twin: nn.Module, blocks: str, tokens_BS: Tensor, expected: Tensor, position_ids: bool
) -> AttentionFacts:
    """Compares the small model's logits `expected` with its logits from the library's attention.

    If the logits are equal, compares two documents in one row with each document alone. `position_ids` is True if the
    model takes an argument of this name.
    """
    try:
        with our_attention(twin) as calls:
            ours = logits_of(twin, tokens_BS)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError) as error:
        return AttentionFacts(True, False, False, f"our attention fails: {_short(error)}", {})
    names = {id(each): name for name, each in twin.named_modules()}
    scored = {}
    for module, *rest in calls.seen:
        found = re.match(rf"{re.escape(blocks)}\.(\d+)(\.|$)", names.get(id(module), ""))
        if found:
            scored[int(found[1])] = tuple(rest)
    same = _close(ours, expected)
    documents, why = _documents(twin, blocks, tokens_BS[:1], position_ids) if same else (False, "attention differs")
    return AttentionFacts(bool(calls.seen), same, documents, why, scored)


def _documents(twin: nn.Module, blocks: str, tokens_1S: Tensor, position_ids: bool) -> tuple[bool, str]:
    """Returns (True, "") if two documents in one row do not influence each other; otherwise (False, reason)."""
    length = tokens_1S.shape[1]
    documents = Documents([CUT, length - CUT], 1)
    more = {"position_ids": documents.positions()[None]} if position_ids else {}
    embedding: list[Tensor] = []

    def keep(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        embedding.append(out.detach().requires_grad_())
        return embedding[-1]

    children = _mixers(twin, blocks)
    leaks: list[str] = []
    try:
        with torch.enable_grad(), ExitStack() as stack:
            table: Any = twin.get_input_embeddings()  # type: ignore[operator]
            stack.callback(table.register_forward_hook(keep).remove)
            seen = _watch(stack, children)
            with our_attention(twin, documents):
                both = logits_of(twin, tokens_1S, **more)
            (gradient,) = torch.autograd.grad(both[:, CUT:].square().sum(), embedding[-1], retain_graph=True)
            leaks = _leaking(seen)
        with our_attention(twin):
            alone = torch.cat([logits_of(twin, each) for each in (tokens_1S[:, :CUT], tokens_1S[:, CUT:])], 1)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        return False, f"a forward pass with documents fails: {_short(error)}"
    if gradient[:, :CUT].abs().max() > 0 or not _close(both[:, CUT:], alone[:, CUT:]):
        where = f" in {', '.join(sorted({*leaks}))}" if leaks else ""
        return False, f"states of one document reach the next one{where}"
    return _close(both, alone), "" if _close(both, alone) else "logits differ from those of documents by themselves"


def _mixers(twin: nn.Module, blocks: str) -> dict[str, nn.Module]:
    """Maps `name (class)` to the first child with this name and class in any block."""
    found: dict[str, nn.Module] = {}
    for layer in layers_of(twin, blocks):
        for name, child in layer.named_children():
            found.setdefault(f"{name} ({type(child).__name__})", child)
    return found


def _watch(stack: ExitStack, children: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, Tensor]]:
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def behind(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            x = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
            y = first_of(out)
            if x is not None and x.requires_grad and isinstance(y, Tensor) and x.ndim == y.ndim == 3:
                seen.setdefault(name, (x, y))

        return hook

    for name, child in children.items():
        stack.callback(child.register_forward_hook(behind(name), with_kwargs=True).remove)
    return seen


def _leaking(seen: Mapping[str, tuple[Tensor, Tensor]]) -> list[str]:
    found = []
    for name, (x, y) in seen.items():
        if y.requires_grad and y.shape[1] == x.shape[1] > CUT:
            (gradient,) = torch.autograd.grad(y[:, CUT:].square().sum(), x, retain_graph=True, allow_unused=True)
            if gradient is not None and bool((gradient[:, :CUT] != 0).any()):
                found.append(name)
    return found


# ---- Causality, gradients and outputs ----


def is_causal(twin: nn.Module, tokens_BS: Tensor) -> bool:
    """Returns True if changed tokens from `CUT` on leave the earlier logits equal."""
    with torch.no_grad():
        first = logits_of(twin, tokens_BS)
        changed = tokens_BS.clone()
        changed[:, CUT:] = tokens_BS.flip(0, 1)[:, : tokens_BS.shape[1] - CUT]  # other tokens, all in the vocabulary
        second = logits_of(twin, changed)
    return _close(first[:, :CUT], second[:, :CUT])


def untrained(twin: nn.Module, tokens_BS: Tensor) -> set[str]:
    """Returns the names of the trainable parameters that get no gradient from the cross-entropy loss."""
    logits = logits_of(twin, tokens_BS)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens_BS[:, 1:].flatten())
    named = [(name, each) for name, each in twin.named_parameters() if each.requires_grad]
    found = torch.autograd.grad(loss, [each for _, each in named], allow_unused=True)
    return {name for (name, _), each in zip(named, found) if each is None}


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= _TOLERANCE * b.abs().max().clamp(min=1e-6))


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def twin_tokens(twin: nn.Module) -> Tensor:
    """Returns token ids for a small model, [`ROWS`, `LENGTH`]."""
    return tokens_of_twin(twin.config)


@contextmanager
def outputs_of_modules(model: nn.Module) -> Iterator[dict[int, str]]:
    """Yields a mapping from the id of a tensor to the name of the first module that returned the tensor.

    Forward passes inside the `with` block fill the mapping.
    """
    found: dict[int, str] = {}
    alive: list[Any] = []

    def record(name: str, made: Any) -> None:
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor):
                found.setdefault(id(each), name)
                alive.append(each)

    handles = [
        each.register_forward_hook(lambda _module, _args, made, name=name: record(name, made))
        for name, each in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
