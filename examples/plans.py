"""Writes what `optimus plan` says of the examples into README.md beside this file: `python examples/plans.py`."""

import io
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from optimus import api
from optimus.observe.table import print_table

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- Written by examples/plans.py. -->", "<!-- End of what it writes. -->"
_BEST, _WIDTH = 4, 100


class Example(NamedTuple):
    """A configuration, and the machine for which it is meant."""

    name: str
    machine: str
    ranks: int
    overrides: Sequence[str] = ()  # a preset of the model's sizes in place of a folder that is not here

    def command(self, *, as_is: bool) -> str:
        """Returns the command that plans the example: its own layout (`as_is`), or the best ones."""
        options = "--as-is" if as_is else f"--best {_BEST}"
        words = [self.name, *self.overrides, "--machine", self.machine, "--ranks", str(self.ranks), options]
        return f"optimus plan {' '.join(words)}"

    def printed(self, *, as_is: bool) -> str:
        """Returns what the command prints before it names the source of the machine's figures."""
        how: dict[str, Any] = {"machine": self.machine, "ranks": self.ranks, "as_is": as_is, "best": _BEST}
        found = api.plan(FOLDER / self.name, self.overrides, **how)
        with redirect_stdout(io.StringIO()) as text:
            print_table(found.rows(wide=False), found.title(), _WIDTH)
            for line in found.notes():
                if not line.startswith("Predicted"):
                    print(textwrap.fill(line, _WIDTH))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


EXAMPLES = [
    Example("laptop.yaml", "laptop", 4),
    Example("one-node.yaml", "dgx-h100", 8),
    Example("moe-four-nodes.yaml", "dgx-h100", 32),
    Example("continued-pretraining.yaml", "dgx-h100", 8, ["model=llama-3.1-8b"]),
    Example("chat.yaml", "dgx-h100", 1, ["model=olmo-2-1b"]),
]


def plans() -> str:
    """Returns a heading for each example, with what is printed of its own layout and of the best ones."""
    parts = []
    for example in EXAMPLES:
        of_both = [f"$ {example.command(as_is=own)}\n{example.printed(as_is=own)}\n..." for own in (True, False)]
        parts.append(f"### `{example.name}`\n\n```console\n" + "\n\n".join(of_both) + "\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Writes the page's part."""
    page = FOLDER / "README.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{plans()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
