"""Programs that tokenise one file of JSON lines, for `bench prepare`: `prepare` and what others do instead.

The first argument is a JSON object: `program`, `cores` (the number that the process may use) and the program's
arguments. The program imports what it needs, writes a line, waits for a line, works, and answers with a JSON object.
Imports of the first process are before the clock starts. Those of its helpers count.

This file runs beside the library of any commit, so it imports nothing from this package.
"""

import json
import multiprocessing
import os
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

CHUNK = 32  # lines that a worker of Megatron-LM's pool gets at once
SMALL_VOCABULARY = 65_500  # Megatron-LM stores ids of a smaller vocabulary in 16 bits


def optimus(text: str, output: str, tokenizer: str, end_of_text: int, **arguments: Any) -> Callable[[], Answer]:
    """Returns a call of `optimus.prepare`. A task whose output is not complete answers without `tokens`."""
    from optimus.data import preparation

    def work() -> Answer:
        first: dict[str, float] = {}

        def note(stage: str, done: int, total: int | None) -> None:
            first.setdefault(stage, time.perf_counter())

        index = preparation.prepare(text, output, tokenizer=tokenizer, progress=note, **arguments)
        if "states" in index:  # the status of tasks
            return {}
        stages = {"stage_seconds": first["shard"] - first["tokenise"]} if {"shard", "tokenise"} <= first.keys() else {}
        return {
            "tokens": index["tokens"] + index["dropped_tokens"],
            "documents": index["documents"],
            "digests": [shard["sha256"] for shard in index["shards"]],
            "library": str(Path(preparation.__file__).parents[2]),
            **stages,
        }

    return work


def second_stage(
    streams: list[str], output: str, tokenizer: str, end_of_text: int, dedup: Any, memory: int
) -> Callable[[], Answer]:
    """Returns the second stage of `prepare` alone, of folders with a stream, records and a journal's `counts.json`."""
    from optimus.data.helpers import Helpers
    from optimus.data.joining import make_plan, write_output
    from optimus.data.joint import Joint
    from optimus.data.journal import Counts
    from optimus.data.outputs import OUTPUTS
    from optimus.data.tokenizer import inspect

    folders = [Path(each) for each in streams]
    counts = [[Counts(**json.loads((each / "counts.json").read_text(encoding="ascii")))] for each in folders]

    def nothing(stage: str, done: int, total: int | None) -> None:
        pass

    def work() -> Answer:
        with Helpers(1) as helpers:
            joint = Joint(
                folders[0].parent,
                folders,
                counts,
                inspect(Path(tokenizer)),
                context=1024,
                seed=0,
                shard_size=256 << 20,
                best_fit=False,
                dedup=dedup,
                memory=memory,
                first=0,
                is_finished=lambda: False,
                output=OUTPUTS["optimus"],
                helpers=helpers,
            )
            plan = make_plan(joint, nothing)
            write_output(joint, plan, joint.output.work(joint, plan), nothing)
        return {"tokens": plan.tokens, "documents": sum(each.documents for each in plan.counts)}

    return work


class _Encoder:
    """The worker of Megatron-LM's pool, with its tokenizer in the class."""

    tokenizer: Any = None

    def __init__(self, path: str, end_of_text: int) -> None:
        self._path = path
        self._end_of_text = end_of_text

    def initializer(self) -> None:
        _Encoder.tokenizer = _load(self._path)

    def encode(self, line: str) -> tuple[list[int], int]:
        """Returns the document's tokens, and the length of the line."""
        ids = _Encoder.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        return ([*ids, self._end_of_text] if ids else []), len(line)


def _load(path: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = True
    return tokenizer


def megatron(text: str, output: str, tokenizer: str, end_of_text: int, workers: int) -> Callable[[], Answer]:
    """Returns what Megatron-LM's `tools/preprocess_data.py --append-eod` does: a pool's `imap` over the lines, whose
    workers parse and encode, while the first process appends to `.bin` and collects the index."""
    import numpy as np
    import tokenizers  # noqa: F401 (its import does not count)

    def work() -> Answer:
        encoder = _Encoder(tokenizer, end_of_text)
        kind = np.dtype(np.uint16 if _load(tokenizer).get_vocab_size() < SMALL_VOCABULARY else np.int32)
        lengths, documents = list[int](), [0]
        with open(text, encoding="utf-8") as lines, open(f"{output}.bin", "wb") as tokens:
            pool = multiprocessing.get_context("fork").Pool(workers, initializer=encoder.initializer)
            for ids, _ in pool.imap(encoder.encode, lines, CHUNK):
                tokens.write(np.array(ids, dtype=kind).tobytes(order="C"))
                lengths.append(len(ids))
                documents.append(len(lengths))
        with open(f"{output}.idx", "wb") as index:
            index.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 8 if kind == np.uint16 else 4))
            index.write(struct.pack("<QQ", len(lengths), len(documents)))
            index.write(np.array(lengths, dtype=np.int32).tobytes())
            pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * kind.itemsize
            index.write(pointers.astype(np.int64).tobytes())
            index.write(np.array(documents, dtype=np.int64).tobytes())
        pool.close()
        pool.join()
        return {"tokens": sum(lengths), "documents": len(lengths)}

    return work


def datasets_map(text: str, output: str, tokenizer: str, end_of_text: int, workers: int) -> Callable[[], Answer]:
    """Returns `datasets.map(batched=True)` with the fast tokenizer of `transformers`, from JSON lines to Arrow.

    It appends no end-of-text token, which is counted all the same. `stage_seconds` are those of `map` alone.
    """
    import datasets
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=tokenizer, split_special_tokens=True)
    datasets.disable_progress_bars()

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        return {"input_ids": fast(batch["text"], **options)["input_ids"]}

    def work() -> Answer:
        lines = datasets.load_dataset("json", data_files=text, split="train", cache_dir=output)
        began = time.perf_counter()
        mapped = lines.map(encode, batched=True, num_proc=workers, remove_columns=lines.column_names)
        stage_seconds = time.perf_counter() - began
        tokens = sum(chunk.flatten().__len__() for chunk in mapped.data.column("input_ids").chunks)
        return {"tokens": tokens + len(mapped), "documents": len(mapped), "stage_seconds": stage_seconds}

    return work


def datatrove(text: str, output: str, tokenizer: str, end_of_text: int, workers: int) -> Callable[[], Answer]:
    """Returns `datatrove`'s `DocumentTokenizer` with a task for each worker, which reads a file of its lines.

    Like `prepare`, it shuffles; the default is documents. Written from its source; where this was written it was not
    installed.
    """
    reader, writer, local = (
        import_module(f"datatrove.{name}") for name in ("pipeline.readers", "pipeline.tokens", "executor")
    )
    loaded = _load(tokenizer)
    folder = Path(f"{output}-lines")
    folder.mkdir()
    with open(text, encoding="utf-8") as lines:
        files = [(folder / f"{number}.jsonl").open("w", encoding="utf-8") for number in range(workers)]
        for number, line in enumerate(lines):
            files[number % workers].write(line)
        for file in files:
            file.close()

    def work() -> Answer:
        tokens = writer.DocumentTokenizer(output, None, None, tokenizer, loaded.id_to_token(end_of_text))
        steps = [reader.JsonlReader(str(folder)), tokens]
        local.LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=f"{output}-log").run()
        item = 2 if loaded.get_vocab_size() <= 1 << 16 else 4
        return {"tokens": sum(path.stat().st_size for path in Path(output).glob("*.ds")) // item}

    return work


PROGRAMS: dict[str, Callable[..., Callable[[], Answer]]] = {
    "optimus": optimus,
    "second-stage": second_stage,
    "megatron": megatron,
    "datasets": datasets_map,
    "datatrove": datatrove,
}


def main() -> None:
    """Runs the program of the first argument, and answers with `seconds`, `cpu_seconds` and what the program says."""
    request = json.loads(sys.argv[1])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request.pop("cores")])
    work = PROGRAMS[request.pop("program")](**request)
    print("ready", flush=True)
    sys.stdin.readline()
    before, began = os.times(), time.perf_counter()
    found = work()
    seconds, after = time.perf_counter() - began, os.times()
    cpu = sum(after[:4]) - sum(before[:4])  # also of processes that have ended
    print(json.dumps({**found, "seconds": seconds, "cpu_seconds": cpu}), flush=True)


if __name__ == "__main__":
    main()
