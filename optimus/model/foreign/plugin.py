"""The section `model` of a configuration for a model that a plugin describes.

An import of this module does not import torch.
"""

import json
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, model_validator

from optimus.errors import nearest
from optimus.model.foreign.adapted import AdaptedModel
from optimus.model.foreign.rows import MODELS

if TYPE_CHECKING:
    from optimus.model.foreign.records import ModelFacts


class PluginModel(AdaptedModel):
    """A causal language model that a function of a plugin describes."""

    model_config = ConfigDict(frozen=True, extra="allow")
    source: ClassVar[str] = "plugin"
    origin: ClassVar[str] = "a plugin"

    plugin: str
    """Name of a model of a plugin (a `ModelRow`). All other keys of the section are arguments of the plugin's function."""

    __hash__ = AdaptedModel.__hash__

    @model_validator(mode="after")
    def _complete(self) -> "PluginModel":
        if self.plugin not in MODELS:
            known = nearest(self.plugin, MODELS) if MODELS else "name the plugin that has it in plugins"
            raise ValueError(f"plugin: the model '{self.plugin}' does not exist; {known}")
        arguments = MODELS[self.plugin].complete(self.arguments)
        assert self.__pydantic_extra__ is not None
        self.__pydantic_extra__.clear()
        self.__pydantic_extra__.update(arguments)
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the plugin's function."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def text(self) -> str:
        """The plugin's model name and the arguments as JSON, with sorted keys."""
        return json.dumps([self.plugin, self.arguments], sort_keys=True)

    @property
    def facts(self) -> "ModelFacts":
        """The facts that training needs. Raises `UserError` if the plugin's model fails a check."""
        from optimus.model.foreign.plugin_facts import facts_of_row

        return facts_of_row(MODELS[self.plugin], json.dumps(self.arguments, sort_keys=True))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by their names in the plugin's module."""
        from optimus.model.foreign.plugin_facts import shapes_of_row

        return shapes_of_row(MODELS[self.plugin], json.dumps(self.arguments, sort_keys=True))

    @property
    def family(self) -> str:
        """The name of the plugin's model."""
        return self.plugin
