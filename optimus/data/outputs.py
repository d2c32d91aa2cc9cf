"""The table of the forms in which `prepare` writes documents: shuffled shards, and token files of other trainers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimus.data import shards
from optimus.data import tokenizer as tokenizers
from optimus.data.fields import CHAT
from optimus.data.gather import DIGEST, SUMS, shard_writer
from optimus.data.joint import ENDS, PACKED, Joint, Output, OutputWork, ShardPlan
from optimus.data.token_writers import FLAT, MEGATRON, TokenFileForm, TokenFilePlan, block_writer
from optimus.data.units import WorkUnit
from optimus.disk import replacing, write_json
from optimus.errors import UserError


class ShardOutput:
    """Rows of `context` tokens in a shuffled order."""

    format = shards.FORMAT

    def check(self, text_field: str, changed: Sequence[str]) -> None:
        pass

    def least_tokens(self, joint: Joint) -> int:
        return joint.context

    def needs_ends(self, joint: Joint) -> bool:
        return joint.best_fit

    def plan(self, joint: Joint, plan: ShardPlan) -> None:
        plan.instances = plan.tokens // joint.context

    def work(self, joint: Joint, plan: ShardPlan) -> OutputWork:
        listed = _shards_of(joint, plan)
        units = [WorkUnit(joint.folder / f"{shard[0]}{DIGEST}", shard) for shard in listed]
        packed = joint.folder / PACKED if joint.best_fit else None
        setup = plan.instances, joint.context, joint.info.dtype, joint.info.eos_id, joint.seed, joint.memory
        return OutputWork(
            "shard",
            units,
            [stop - start for _, start, stop in listed],
            joint.context * joint.item,
            shard_writer,
            (joint.folder, plan.streams, packed, *setup),
        )

    def finish(self, joint: Joint, plan: ShardPlan) -> None:
        """Writes the checksums of all instances as one array."""
        with replacing(joint.folder / shards.SUMS) as file:
            header = {"descr": "<u4", "fortran_order": False, "shape": (plan.instances,)}
            np.lib.format.write_array_header_1_0(file, header)
            for name, _, _ in _shards_of(joint, plan):
                file.write((joint.folder / f"{name}{SUMS}").read_bytes())

    def sizes(self, joint: Joint, plan: ShardPlan) -> dict[str, Any]:
        used = plan.instances * joint.context
        return {
            "context": joint.context,
            "seed": joint.seed,
            "dtype": joint.info.dtype,
            "instances": plan.instances,
            "tokens": used,
            "dropped_tokens": max(0, plan.tokens - used),
            **plan.packed,
        }

    def parts(self, joint: Joint, plan: ShardPlan) -> dict[str, Any]:
        return {
            "shards": [
                {
                    "file": name,
                    "instances": stop - start,
                    "sha256": (joint.folder / f"{name}{DIGEST}").read_text(encoding="ascii"),
                }
                for name, start, stop in _shards_of(joint, plan)
            ],
            "sums": shards.SUMS,
        }


def _shards_of(joint: Joint, plan: ShardPlan) -> list[tuple[str, int, int]]:
    """Lists the shards as (name, first row, row after the last row)."""
    rows = max(1, joint.shard_size // (joint.context * joint.item))
    starts = range(0, plan.instances, rows)
    return [(f"shard-{k:05d}.npy", start, min(start + rows, plan.instances)) for k, start in enumerate(starts)]


@dataclass(frozen=True)
class TokenFileOutput:
    """Token files of another trainer, with the documents in their order. `without_effect` names options."""

    name: str
    form: TokenFileForm
    order: str
    without_effect: tuple[str, ...]
    format: str = shards.TOKEN_FILES

    def check(self, text_field: str, changed: Sequence[str]) -> None:
        if text_field.startswith(CHAT):
            raise UserError(
                f"`to` {self.name} has no room for what the model predicts in the conversations of {text_field}: leave out "
                "`to`, or name the fields with text, such as '{prompt}\\n{completion}' (`text_field`)"
            )
        if useless := [f"`{name}`" for name in changed if name in self.without_effect]:
            raise UserError(
                f"`to` {self.name} writes the documents in their order, {self.order}: leave out {', '.join(useless)}"
            )

    def least_tokens(self, joint: Joint) -> int:
        return 1

    def needs_ends(self, joint: Joint) -> bool:
        return True

    def plan(self, joint: Joint, plan: ShardPlan) -> None:
        most = max(1, joint.shard_size // np.dtype(self._file_type(joint)).itemsize)
        plan.borders = self.form.borders(plan.streams, [each / ENDS for each in joint.folders], most)

    def work(self, joint: Joint, plan: ShardPlan) -> OutputWork:
        files = self._files(joint, plan)
        blocks = files.blocks()
        units = [WorkUnit(block.digest(joint.folder), (block,)) for block in blocks]
        return OutputWork(
            "write", units, [block.stop - block.start for block in blocks], 1, block_writer, (joint.folder, files)
        )

    def finish(self, joint: Joint, plan: ShardPlan) -> None:
        """Writes the name of the end-of-text token, which the tokenizer.json alone does not always tell."""
        write_json(joint.folder / tokenizers.CONFIG, {"eos_token": joint.info.eos_token})

    def sizes(self, joint: Joint, plan: ShardPlan) -> dict[str, Any]:
        return {"to": self.name, "dtype": self._file_type(joint), "tokens": plan.tokens}

    def parts(self, joint: Joint, plan: ShardPlan) -> dict[str, Any]:
        return {
            "blocks": [
                {
                    "file": block.file,
                    "start": block.start,
                    "bytes": block.stop - block.start,
                    "sha256": block.digest(joint.folder).read_text(encoding="ascii"),
                }
                for block in self._files(joint, plan).blocks()
            ],
        }

    def _file_type(self, joint: Joint) -> str:
        return self.form.token_type(joint.info.vocab_size)

    def _files(self, joint: Joint, plan: ShardPlan) -> TokenFilePlan:
        ends = [each / ENDS for each in joint.folders]
        return TokenFilePlan(self.form, plan.streams, ends, plan.borders, joint.info.dtype, self._file_type(joint))


OUTPUTS: dict[str, Output] = {
    "optimus": ShardOutput(),
    "megatron": TokenFileOutput(
        "megatron", MEGATRON, "in one file, neither cut nor shuffled", ("context", "seed", "pack", "shard_size")
    ),
    "npy": TokenFileOutput("npy", FLAT, "neither cut nor shuffled", ("context", "seed", "pack")),
}
