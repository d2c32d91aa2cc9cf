"""The configuration section `model` for a model from the package `transformers`.

An import of this module does not import torch.
"""

import json
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, model_validator

from optimus.model.foreign.adapted import AdaptedModel
from optimus.model.foreign.code import CAUSAL

if TYPE_CHECKING:
    from optimus.model.foreign.records import ModelFacts


# Keys of a config.json that `compared` leaves out.
_SAYS_NOTHING = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
}
_SAYS_NOTHING |= {"return_dict", "torch_dtype", "transformers_version", "use_cache"}


def _telling(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in _SAYS_NOTHING}


def code_folder(model: Any) -> str | None:
    """Returns the folder `_name_or_path` of a raw section `model` with `trust_remote_code: true`.

    Returns None without this consent, without `auto_map` or without `_name_or_path`.
    """
    keys = model.get("transformers") if isinstance(model, Mapping) and model.get("trust_remote_code") is True else None
    named = isinstance(keys, Mapping) and keys.get("auto_map") and keys.get("_name_or_path")
    return str(named) if named else None


class TransformersModel(AdaptedModel):
    """A causal language model of the package `transformers`."""

    model_config = ConfigDict(frozen=True)
    source: ClassVar[str] = "transformers"
    origin: ClassVar[str] = "`transformers`"

    transformers: dict[str, Any]
    """Keys and values of the model's config.json."""

    trust_remote_code: bool | None = None
    """True runs the model's code in the folder, which `auto_map` of config.json names. False takes the modules of
    `transformers` instead."""

    __hash__ = AdaptedModel.__hash__

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, values: Any) -> Any:
        """Raises `ValueError` for an unknown key beside `transformers`."""
        if isinstance(values, Mapping) and (beside := [key for key in values if key not in cls.model_fields]):
            raise ValueError(
                f"'{beside[0]}' is beside transformers, which has no further keys: remove it, or set a key of config.json, "
                "such as model.transformers.num_hidden_layers"
            )
        return values

    @model_validator(mode="after")
    def _asked(self) -> "TransformersModel":
        """Removes `auto_map` unless `trust_remote_code` is true.

        Raises `ValueError` for an `auto_map` without `trust_remote_code`, and for an allowed `auto_map` that names no
        causal model.
        """
        named = self.transformers.get("auto_map")
        if named and self.trust_remote_code is None:
            raise ValueError(
                "transformers: auto_map names code in the model's folder: set model.trust_remote_code to true, which runs "
                "the code, or to false, which takes the modules of `transformers`"
            )
        if not named or not self.trust_remote_code:
            self.transformers.pop("auto_map", None)
        elif not isinstance(named, Mapping) or CAUSAL not in named:
            raise ValueError(
                f"transformers: auto_map names no {CAUSAL}: set model.trust_remote_code to false, or name the class"
            )
        return self

    @property
    def text(self) -> str:
        """The configuration as JSON, with sorted keys."""
        return json.dumps(self.transformers, sort_keys=True)

    def compared(self, unasked: Set[str]) -> dict[str, Any]:
        """Returns the configuration without the keys in `_SAYS_NOTHING`, also within sections such as `text_config`."""
        found: dict[str, Any] = json.loads(self.text, object_hook=_telling)
        return found

    @property
    def facts(self) -> "ModelFacts":
        """The facts that training needs. Raises `UserError` for an invalid configuration."""
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
        """The model's type in `transformers`, or "unknown" if the configuration names none."""
        return str(self.transformers.get("model_type") or "unknown")

    @property
    def heads(self) -> int:
        """The number of attention heads, or 1 if unknown."""
        return int(self._first("num_attention_heads", "n_head", "n_heads", "num_heads") or 1)

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads, or `heads` if unknown."""
        if self.transformers.get("multi_query") and not self.transformers.get("new_decoder_architecture"):
            return 1  # Falcon and GPT-BigCode
        return int(self._first("num_key_value_heads", "num_kv_heads") or self.heads)

    def _first(self, *names: str) -> Any:
        return next((self.transformers[name] for name in names if self.transformers.get(name)), None)
