"""Builds models from `transformers` configurations, in full size or small."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optimus.model.foreign.code import model_class

LENGTH, ROWS, VOCABULARY = 24, 2, 320
_WINDOW, _CHUNK, _LAYERS, _MOST_LAYERS = 5, 8, 2, 16
_HEAD_COUNT = re.compile(r"(^|_)(n|num)_?(\w+_)?heads?$|heads?$|key_value_heads|(^|_)n_groups$|num_query_groups$")
_HEAD_SIZE = re.compile(r"head_?(dim|size)|d_head|d_kv$|dim_head|rotary_dim|qk_\w*dim|v_\w*head_dim")
_STATE, _STATE_SIZE = re.compile(r"d_state$|state_size$"), 12
_LAYERS_TOO = ("num_layers", "n_layers", "n_layer")
_WHOLE_HEAD = re.compile(r"head_?(dim|size)$|d_head$|d_kv$|dim_head$")
_WIDTH = re.compile(r"(size|dim|width|rank|inner|ffn|d_ff|d_model|d_ssm|n_embd|channels|hidden\w*|d_inner)(_\w+)?$")
_COUNT = re.compile(r"(size|dim|kernel|conv|rank|block|patch|factor|width|type_vocab)")
_OF_THE_FOLDER = ("_name_or_path", "auto_map")
_OF_LAYERS = re.compile(r"(interval|pattern|step|period|frequency|every|freq)(_\w+)?$")


def small(config: Any, layers: int | None = None) -> Any:
    """Returns the configuration of a small model of the same class, without dropout.

    `layers` limits the number of layers; by default, `_Shrink` chooses the layers.
    """
    data = config.to_dict()
    shrunk = _Shrink(config, layers).of_mapping(data)
    shrunk |= {"use_cache": False} if "use_cache" in data else {}
    return type(config).from_dict(shrunk)


def build(config: Any, attention: str = "sdpa", device: str = "cpu") -> nn.Module:
    """Builds the model of a configuration in fp32 and evaluation mode. Runs remote code only by `model_class`."""
    from transformers import AutoModelForCausalLM

    fresh, written = type(config).from_dict(config.to_dict()), model_class(config)
    options: dict[str, Any] = {"dtype": torch.float32}
    if written is None:
        options["trust_remote_code"] = False
    make = AutoModelForCausalLM.from_config if written is None else written._from_config
    with torch.device(device):
        try:
            model = make(fresh, attn_implementation=attention, **options)
        except (ValueError, ImportError):
            if attention != "sdpa":
                raise
            model = make(fresh, attn_implementation="eager", **options)
    for each in configurations_of(model):
        vars(each)["_experts_implementation_internal"] = "eager"
    return with_embedding_first(model).eval()


def with_embedding_first(model: nn.Module) -> nn.Module:
    """Moves the child with the token embedding to the first place, so that a tied weight has the embedding's name."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    for name, child in list(model._modules.items()):
        if child is not None and any(each is embedding for each in child.modules()):
            rest = {key: each for key, each in model._modules.items() if key != name}
            model._modules.clear()
            model._modules.update({name: child, **rest})
    return model


def build_small(config: Any) -> nn.Module:
    """Builds a small model with the initial values of `transformers`.

    Tries other numbers of layers after a failure, and raises the first error if all fail.
    """
    problem: Exception | None = None
    for layers in (None, 2, 4, 8):
        try:
            return build(small(config, layers))
        except (ValueError, RuntimeError, TypeError, IndexError, KeyError, AttributeError) as error:
            problem = problem or error
    assert problem is not None
    raise problem


def layers_of(model: nn.Module, blocks: str) -> nn.ModuleList:
    """Returns the model's blocks, a module list with the name `blocks`."""
    found = model.get_submodule(blocks)
    assert isinstance(found, nn.ModuleList)
    return found


def general(name: str) -> str:
    """Replaces the indices of list elements in a module or parameter name by `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def configurations_of(model: nn.Module) -> list[Any]:
    """Returns the distinct configurations of a model's modules."""
    found = {id(each): each for each in (vars(module).get("config") for module in model.modules()) if each is not None}
    return [each for each in found.values() if hasattr(each, "to_dict")]


@torch.no_grad()
def enlarge(model: nn.Module) -> None:
    """Adds normally distributed values of standard deviation 0.2 to parameters with at most one dim above 1.

    Overwrites all other parameters with normally distributed values of standard deviation 1.5 / sqrt(last dim).
    """
    generator = torch.Generator().manual_seed(0)
    for _, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2 or parameter.numel() == max(parameter.shape):
            parameter.add_(noise.to(parameter.dtype).mul_(0.2))
        else:
            parameter.copy_(noise.mul_(1.5 * parameter.shape[-1] ** -0.5))


def tokens_of_twin(config: Any, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Returns token ids for a small model, [rows, length]. Each call with the same arguments returns the same ids."""
    generator = torch.Generator().manual_seed(1)
    vocab = vocabulary_of(config)
    return torch.randint(min(16, vocab // 2), vocab - 1, (rows, length), generator=generator)


def vocabulary_of(config: Any) -> int:
    """Returns the vocabulary size of a configuration, or `VOCABULARY` for a configuration without `vocab_size`."""
    return int(getattr(config.get_text_config(), "vocab_size", VOCABULARY))


def arguments_of(model: nn.Module, **more: Any) -> dict[str, Any]:
    """Returns `use_cache=False` and `more`, without the names that are not parameters of `model.forward`."""
    import inspect

    taken = inspect.signature(model.forward).parameters
    return {key: value for key, value in {"use_cache": False, **more}.items() if key in taken}


class _Shrink:
    """The rules by which sizes shrink. `heads` divides numbers of heads, and `columns` head sizes."""

    def __init__(self, config: Any, layers: int | None) -> None:
        text = config.get_text_config()
        data = {key: value for key, value in text.to_dict().items() if key not in _OF_THE_FOLDER}
        self.names = {stored: name for name, stored in getattr(text, "attribute_map", {}).items()}
        named = {self.names.get(key, key): value for key, value in data.items()}
        numbers = (named.get(key) for key in ("num_hidden_layers", *_LAYERS_TOO))
        self.depth = next((each for each in numbers if isinstance(each, int)), 0)
        self.chosen = self._layers(data, layers)
        heads = _integer(named, "num_attention_heads") or _integer(named, "num_heads") or 1
        hidden = self.hidden = _integer(named, "hidden_size") or 64
        grouped = _integer(named, "num_key_value_heads") or heads
        every = [*_integers(data)]
        counts = [grouped if grouped > 1 else heads, heads]
        counts += [v for key, v in every if _HEAD_COUNT.search(key) and not _HEAD_SIZE.search(key) and v >= 4]
        self.heads = max(each for each in range(1, counts[0] + 1) if _shrinks(each, counts))
        size = _integer(named, "head_dim") or max(1, hidden // heads)
        sizes = [value for key, value in every if _WHOLE_HEAD.search(key)]
        part = min([1.0, *_rotated(named)])
        self.columns = max(2**power for power in range(10) if _divides(2**power, size, sizes, part))
        self.windows: dict[int, int] = {}

    def _layers(self, data: Mapping[str, Any], layers: int | None) -> list[int]:
        """Returns the indices of the real model's layers that the small model keeps."""
        if layers is not None:
            return [*range(min(layers, self.depth))]
        lists = [value for value in data.values() if self._by_layer(value) and len({*map(str, value)}) <= 6]
        for value in data.values():
            if _of_single_layers(value):
                of_layer = {int(number): each for number, each in value.items()}
                lists.append([str(of_layer.get(layer)) for layer in range(self.depth)])
        if lists:
            rows = [tuple(map(str, row)) for row in zip(*lists)]
            chosen = {rows.index(row) for row in rows}
            chosen |= {*range(min(self.depth, max(2, _LAYERS - len(chosen))))}
            return sorted(chosen)[:_MOST_LAYERS]
        steps = [value for key, value in _integers(data) if _OF_LAYERS.search(key) and value < self.depth]
        return [*range(min(self.depth, max([_LAYERS, *(2 * step if step < 5 else step + 1 for step in steps)])))]

    def _by_layer(self, value: Any) -> bool:
        if isinstance(value, str) and value != value.upper():
            return False  # a word, not a pattern with one letter per layer
        return isinstance(value, list | tuple | str) and len(value) == self.depth > 1

    def of_mapping(self, data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        return {key: self.small_value(key, value, f"{prefix}{key}") for key, value in data.items()}

    def small_value(self, key: str, value: Any, path: str) -> Any:
        """Returns the small value of a field. `path` is the field's full key."""
        if key in _OF_THE_FOLDER:
            return value
        name = self.names.get(key, key)
        if _of_single_layers(value):
            return self._by_number(value, path)
        if isinstance(value, Mapping):
            return self._rotary(value) if "rope" in key else self.of_mapping(value, f"{path}.")
        if self._by_layer(value) and not self._indices(key, value):
            picked = [value[layer] for layer in self.chosen]
            return "".join(picked) if isinstance(value, str) else [self.small_value(key, each, path) for each in picked]
        if isinstance(value, list | tuple) and "token" not in key:
            return self._listed(key, value, path)
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        return self.of_integer(name, value, path)

    def of_integer(self, key: str, value: int, path: str) -> int:
        """Returns the small value of an integer setting, chosen by the setting's name."""
        if key.endswith(("token_id", "token_index", "_idx")) and "layer" not in key:
            return min(value, 15)
        if "vocab" in key:
            return min(value, VOCABULARY)
        if key in ("num_hidden_layers", *_LAYERS_TOO) and value == self.depth:
            return len(self.chosen)
        if key in _LAYERS_TOO and value and self.depth % value == 0:  # the setting counts groups of layers
            return max(1, len(self.chosen) * value // self.depth)
        if "layers_per" in key:
            return value
        if "layers" in key or key.startswith("first_k"):
            return min(value, 1) if value < self.depth else min(value, len(self.chosen))
        if "position" in key or "length" in key:
            return value
        if "window" in key and value > LENGTH // 2:
            return self.windows.setdefault(value, _WINDOW + len(self.windows))
        if "compress" in f"{path}.{key}" and value > LENGTH // 2:
            return _CHUNK
        if "chunk" in key or key == "block_size":
            return min(value, _CHUNK)
        if re.search(r"per_tok|top_?k|moe_k$", key) and value > 0:
            return min(value, 1 if "group" in key else 2 if value < LENGTH else 8)
        if "expert" in key and not _COUNT.search(key):
            return min(value, 2 if "shared" in key else 8)
        if re.fullmatch(r"n_group|num_expert_group", key):
            return min(value, 2)
        if _STATE.search(key) and value >= 16:
            return _STATE_SIZE
        if _HEAD_SIZE.search(key):
            return value // self.columns if value % self.columns == 0 and value // self.columns >= 4 else value
        if _HEAD_COUNT.search(key):
            return value // self.heads if value % self.heads == 0 else value
        if _WIDTH.search(key) and value > 32:
            factor = self.heads * self.columns
            made = value // factor if value % factor == 0 else -(-value // factor // 8) * 8
            return max(32 if value == self.hidden else 16, made)
        return value

    def _indices(self, key: str, value: Any) -> bool:
        """Returns True for an ascending list of layer numbers."""
        if not re.search(r"layer|idx|indices|ids", key) or not isinstance(value, list | tuple) or not value:
            return False
        integers = all(isinstance(each, int) and not isinstance(each, bool) for each in value)
        return integers and [*value] == sorted({*value}) and max(value) <= self.depth

    def _by_number(self, value: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        """Returns small settings of the chosen layers. The keys are the small model's layer numbers."""
        of_layer = {int(number): each for number, each in value.items()}
        chosen = {where: of_layer[layer] for where, layer in enumerate(self.chosen) if layer in of_layer}
        return {where: self.of_mapping(each, f"{path}.") for where, each in chosen.items()}

    def _listed(self, key: str, value: Any, path: str) -> Any:
        """Translates a list of layer numbers to layers of the small model. Returns other lists with small elements."""
        if self._indices(key, value):
            offset = 0 if max(value) < self.depth else 1
            return [where + offset for where, layer in enumerate(self.chosen) if layer + offset in value]
        return [self.small_value(key, each, path) for each in value]

    def _rotary(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Returns settings of rotary embeddings for small heads."""
        made: dict[str, Any] = {}
        for key, each in value.items():
            if isinstance(each, Mapping):
                made[key] = self._rotary(each)
            elif isinstance(each, list) and "section" in key:
                total = max(3, sum(each) // self.columns)
                made[key] = [total - 2 * (total // 3), total // 3, total // 3][: len(each)]
            elif isinstance(each, list) and key.endswith("factor"):
                made[key] = each[: max(1, len(each) // self.columns)]
            else:
                made[key] = each
        return made


def _divides(factor: int, size: int, sizes: list[int], part: float) -> bool:
    """Returns True if head sizes may shrink by `factor`."""
    if factor == 1:
        return True
    if any(each % factor or each // factor < 4 for each in sizes):
        return False
    return size % factor == 0 and size // factor >= 16 and int(size // factor * part) % 2 == 0


def _shrinks(factor: int, counts: list[int]) -> bool:
    first = counts[0]
    if factor > 1 and first // factor < 4:
        return False
    return all(count == 1 or (count % factor == 0 and (count // factor) % 2 == count % 2) for count in counts)


def _of_single_layers(value: Any) -> bool:
    """Returns True for a mapping from layer numbers to settings."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(str(key).isdecimal() and isinstance(each, Mapping) for key, each in value.items())


def _rotated(data: Mapping[str, Any]) -> Iterable[float]:
    """Yields the rotated fractions of a head's columns."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _rotated(value)
        elif key in ("partial_rotary_factor", "rotary_pct") and isinstance(value, float) and value > 0:
            yield value


def _integer(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
        return math.gcd(*value)
    return value if isinstance(value, int) and value > 0 else None


def _integers(data: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    for key, value in data.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield key, value
        elif isinstance(value, Mapping) and "rope" not in key and "config" in str(key):
            yield from _integers(value)


def factors_of(config: Any) -> tuple[int, int]:
    """Returns (divisor of the numbers of heads, divisor of the head sizes) for the small model."""
    shrink = _Shrink(config, None)
    return shrink.heads, shrink.columns
