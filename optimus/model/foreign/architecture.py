"""The section `model` of a configuration for a model of the package `transformers`.

An import of this module does not import torch. Properties such as `facts` import torch on first use.
"""

import json
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, model_validator

from optimus.model.foreign.adapted import AdaptedModel

if TYPE_CHECKING:
    from optimus.model.foreign.records import ModelFacts


# Keys of a config.json that do not change the model's forward pass.
_SAYS_NOTHING = {"_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range"}
_SAYS_NOTHING |= {"return_dict", "torch_dtype", "transformers_version", "use_cache"}


class TransformersModel(AdaptedModel):
    """A causal language model of the package `transformers`."""

    model_config = ConfigDict(frozen=True)
    source: ClassVar[str] = "transformers"
    origin: ClassVar[str] = "`transformers`"

    transformers: dict[str, Any]
    """Keys and values of the model's config.json."""

    __hash__ = AdaptedModel.__hash__

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, values: Any) -> Any:
        """Raises `ValueError` for a key beside `transformers`."""
        if isinstance(values, Mapping) and (beside := [key for key in values if key != "transformers"]):
            raise ValueError(
                f"'{beside[0]}' is beside transformers, which has no further keys: remove it, or set a key of config.json, "
                "such as model.transformers.num_hidden_layers"
            )
        return values

    @property
    def text(self) -> str:
        """The configuration as JSON, with sorted keys."""
        return json.dumps(self.transformers, sort_keys=True)

    def compared(self, unasked: Set[str]) -> dict[str, Any]:
        """Returns the keys and values of the config.json that can change the forward pass, as JSON has them: keys of
        mappings are text."""
        return {key: value for key, value in json.loads(self.text).items() if key not in _SAYS_NOTHING}

    @property
    def facts(self) -> "ModelFacts":
        """Facts about the model, found by runs of a small copy."""
        from optimus.model.foreign.configuration import facts_of_text

        return facts_of_text(self.text)

    @property
    def limits(self) -> dict[str, str]:
        """The model's unsupported features, each with the reason."""
        chain = self.facts.chain
        broken = {} if chain is None else {"model": f"{chain}: such a model cannot train yet; choose another"}
        return super().limits | broken

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by their names in `transformers`."""
        from optimus.model.foreign.configuration import shapes_of_text

        return shapes_of_text(self.text)

    @property
    def family(self) -> str:
        """The model's type in `transformers`."""
        return str(self.transformers["model_type"])

    @property
    def heads(self) -> int:
        """The number of attention heads; 1 if the configuration names no number."""
        return int(self._first("num_attention_heads", "n_head", "num_heads") or 1)

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads; by default `heads`."""
        return int(self._first("num_key_value_heads", "num_kv_heads") or self.heads)

    def _first(self, *names: str) -> Any:
        return next((self.transformers[name] for name in names if self.transformers.get(name)), None)
