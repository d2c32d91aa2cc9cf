"""The names of a causal model's parts. This module does not import torch."""

from typing import NamedTuple


class PartNames(NamedTuple):
    """The names of the modules that divide a causal model into parts.

    The embedding and the modules `before` run before the blocks. The head and all unnamed modules run after the blocks.
    """

    blocks: str = "blocks"
    embedding: str = "embedding"
    head: str = "head"
    before: tuple[str, ...] = ("positions",)

    def block_of(self, name: str) -> int | None:
        """Returns the number of the block that contains the parameter `name`, or None for another parameter."""
        rest = name.removeprefix(f"{self.blocks}.")
        return int(rest.partition(".")[0]) if rest != name else None

    def in_embedding(self, name: str) -> bool:
        """Returns True if the parameter `name` belongs to the token embedding."""
        return name.startswith(f"{self.embedding}.")

    def in_vocabulary(self, name: str) -> bool:
        """Returns True if the parameter `name` belongs to the token embedding or to the output layer."""
        return self.in_embedding(name) or self.in_head(name)

    def in_head(self, name: str) -> bool:
        """Returns True if the parameter `name` belongs to the output layer."""
        return name.startswith(f"{self.head}.")

    def is_before(self, name: str) -> bool:
        """Returns True if the parameter `name` belongs to a module that runs before the blocks."""
        return self.in_embedding(name) or any(name.startswith(f"{module}.") for module in self.before)
