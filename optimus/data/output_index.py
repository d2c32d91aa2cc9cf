"""The `index.json` of an output of `prepare`."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from optimus.data import shards
from optimus.data import tokenizer as tokenizers
from optimus.data.contamination import Contamination, NgramIndex
from optimus.data.fields import ChatField
from optimus.data.joint import Joint, ShardPlan
from optimus.data.journal import EXCLUSIONS, Journal
from optimus.data.prepare_run import PrepareRun
from optimus.data.tasks import OF_TASKS


def make_index(run: PrepareRun, states: Sequence[Journal], joint: Joint, plan: ShardPlan) -> dict[str, Any]:
    """Returns the content of the index, where `states` are the journals of all tasks."""
    counts, info = plan.counts, joint.info
    good = run.inputs.without((bad.input, bad.name) for bad in run.bad)
    settings = {name: value for name, value in states[0].settings.items() if name not in OF_TASKS}
    return {
        "format": joint.output.format,
        "version": shards.VERSION,
        "settings": settings | {"inputs": good.content_digest()},
        "tokenizer": {
            "file": tokenizers.FILE,
            "sha256": info.sha256,
            "vocab_size": info.vocab_size,
            "eos_id": info.eos_id,
            "eos_token": info.eos_token,
        },
        **joint.output.sizes(joint, plan),
        **({"masked": True} if run.masked else {}),
        **({"chat": run.fields.template.written()} if isinstance(run.fields, ChatField) else {}),
        "documents": sum(c.documents for c in counts),
        "empty_documents": sum(c.empty_documents for c in counts),
        **{name: sum(getattr(c, name) for c in counts) for name in EXCLUSIONS},
        **({} if run.excluded is None else {"excluded_sets": _excluded_entries(run, run.excluded, states)}),
        "text_bytes": sum(c.text_bytes for c in counts),
        "skipped_files": sum(run.sources.skipped.values()),
        "skipped_by_ending": run.sources.skipped,
        "bad_files": [bad.entry() for bad in sorted(run.bad, key=lambda bad: (bad.input, bad.name))],
        "sources": [
            {"name": name, "files": sum(source.input == k for source in good.files), **asdict(counts[k])}
            for k, name in enumerate(run.sources.inputs)
        ],
        **joint.output.parts(joint, plan),
    }


def _excluded_entries(run: PrepareRun, excluded: NgramIndex, states: Sequence[Journal]) -> list[dict[str, Any]]:
    """Returns for each evaluation set its size, the number of documents that were left out for it, and examples.

    Documents are counted from the beginning of their input, also where another task reads the beginning.
    """
    found, before = Contamination(), [0] * len(run.inputs.inputs)
    for mark in (state.mark for state in states):
        numbered = [
            {**each, "document": before[each["input"]] + each["document"]} for each in mark.contamination.examples
        ]
        found.merge(replace(mark.contamination, examples=numbered))
        before = [count + counts.documents_read for count, counts in zip(before, mark.counts)]
    return [
        {
            **asdict(each),
            "contaminated": found.counts.get(each.name, 0),
            "examples": [
                {"ngram": one["ngram"], "source": run.inputs.inputs[one["input"]], "document": one["document"]}
                for one in found.examples
                if one["set"] == each.name
            ],
        }
        for each in excluded.sets
    ]
