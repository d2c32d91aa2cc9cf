"""Checkpoints written synchronously, asynchronously and by DCP; loading by one rank or by all; bytes of each node.

Saving: one process trains a dense model of some 300 million parameters, whose state takes 12 bytes per parameter on
disk. Steps without a checkpoint, a synchronous checkpoint, an asynchronous one, and the same tensors by DCP's `save`
and `async_save` take turns. The stall is the time for which training waits, in calls and for the copies of the state.
The slowdown of the steps is a column of its own, as the writing thread takes a part of the cores, the memory and the
disk.

Loading: ranks that all hold the whole model load it. Either one rank reads and sends, or all ranks read. Files lie on a
disk without cache, or on a file server with a fixed rate for all ranks together, as the file system of a cluster has.

Nodes: the bytes that each of 4 nodes would write of a model that is 12-way model-parallel in each node (the Optimus
paper, section 4).
"""

import fcntl
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from typer import Option

from benchmarks.harness import Result, Row, take_turns
from benchmarks.training import Precision, configuration, decided
from optimus.checkpoint.folder import Description
from optimus.checkpoint.format import StoredSlice
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.store import load_state
from optimus.checkpoint.writers import saved_bytes, writers
from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.model.architecture import own_model
from optimus.plan.measure.ranks import run_fresh
from optimus.resolve.parameters import layouts_of, state_spec_of
from optimus.resolve.ranks import mesh_of
from optimus.resolve.run import RunInputs
from optimus.state.model_state import ModelState
from optimus.state.plan import divide_chunks, place_chunks
from optimus.testing.steps import build
from optimus.training.step import training_step

LARGE = {"family": "olmo", "hidden": 1024, "layers": 12, "heads": 16, "intermediate": 4096, "vocab": 50304}
SMALL = {"family": "olmo", "hidden": 512, "layers": 8, "heads": 8, "intermediate": 2048, "vocab": 16384}
_SERVER = 500e6  # bytes per second of the file server, for all ranks together
# Saves to a folder, given the seconds of a plain step; returns the seconds of stall, of slower steps, and of all
Way = Callable[[Path, float], tuple[float, float, float]]


def run(
    ranks: Annotated[int, Option(help="Ranks that load a model; every rank holds the whole model.")] = 4,
    rounds: Annotated[int, Option(help="Rounds in which the contestants take turns.")] = 2,
    precision: Precision = "auto",
    model: Mapping[str, Any] = LARGE,
    loaded: Mapping[str, Any] = SMALL,
) -> Result:
    """Returns rows of saving `model`, tables of loading `loaded` and of nodes, and ratios.

    - `async.stall_vs_sync`: the stall of an asynchronous checkpoint over the time of a synchronous one.
    - `async.steps_vs_sync`: the slowdown of steps during an asynchronous checkpoint, over the same.
    - `save.vs_dcp`: DCP's time over ours, both synchronous.
    - `model_only.bytes`: the bytes of a checkpoint of weights over those of a full one.
    - `broadcast.vs_all_read`: the time to load from the file server if every rank reads, over that if one reads.
    - `broadcast.vs_all_read_disk`: the same ratio for the disk of this machine.
    - `nodes.largest_share`: the most bytes that a node writes, scattered, over the mean.
    """
    chosen = f"train.precision={decided(precision)}"
    with tempfile.TemporaryDirectory(prefix="optimus-bench-") as folder:
        (saving, bytes_) = run_fresh(_saving, 1, model, chosen, rounds, folder)[0]
    with tempfile.TemporaryDirectory(prefix="optimus-bench-") as folder:
        loading = run_fresh(_loading, ranks, loaded, chosen, rounds, folder)[0]
    nodes = _nodes()
    at_once, beside, plain, _ = saving
    seconds = {(row["from"], row["way"]): row["seconds"] for row in loading}
    ratios = {
        "async.stall_vs_sync": beside["stall_s"] / at_once["stall_s"],
        "async.steps_vs_sync": beside["steps_longer_s"] / at_once["stall_s"],
        "save.vs_dcp": plain["stall_s"] / at_once["stall_s"],
        "model_only.bytes": bytes_["weights"] / bytes_["full"],
        "broadcast.vs_all_read": seconds["server", "none"] / seconds["server", "broadcast"],
        "broadcast.vs_all_read_disk": seconds["disk", "none"] / seconds["disk", "broadcast"],
        "nodes.largest_share": max(row["largest_share"] for row in nodes if row["writers_chosen"] == "scattered"),
    }
    tables = {
        "loading": loading,
        "computed bytes of each node: 4 nodes of 12 ranks": nodes,
        "optimus bench checkpoint": saving,
    }
    return Result(saving, ratios, {"loading": loading, "nodes": nodes}, tables)


# ---- Saving ----


def _saving(model: Mapping[str, Any], precision: str, rounds: int, folder: str) -> tuple[list[Row], dict[str, int]]:
    config = _config(model, 1, precision)
    groups = Groups(mesh_of(config, 1))
    module, state = build(config, groups)
    state.initialize(0, 0.02)
    tokens_BS = torch.randint(config.model.vocab, (1, config.train.sequence_length))
    numbers = iter(range(1, 1 << 30))

    def step() -> float:
        began = time.perf_counter()
        training_step(module, state, tokens_BS, config, next(numbers))
        return time.perf_counter() - began

    for _ in range(2):
        step()
    savers = {beside: Saver(state, beside=beside) for beside in (False, True)}
    description = _description(config, full=True)
    ways: dict[str, Way] = {
        "at once": partial(_whole, lambda place: savers[False].save(Target(place, description))),
        "beside the training": partial(_beside, savers[True], config, step),
        "DCP save": partial(
            _whole, lambda place: dcp.save(_tensors(state), storage_writer=dcp.FileSystemWriter(place))
        ),
        "DCP async_save": partial(_dcp_async, state, step),
    }
    place = Path(folder) / "checkpoints" / "step-1"
    undisturbed = 0.0

    def turn(save: Way) -> tuple[float, float, float]:
        nonlocal undisturbed
        undisturbed = statistics.median(step() for _ in range(3))
        found = save(place, undisturbed)
        shutil.rmtree(place)
        return found

    turns = {way: partial(turn, save) for way, save in ways.items()}
    seen = take_turns(turns, rounds, warm_up=1)  # the first turn allocates host memory
    parameters = sum(slot.end - slot.start for chunk in state.chunks for slot in chunk.plan.slots)
    rows = []
    for way, times in seen.items():
        stall, longer, total = (statistics.median(column) for column in zip(*times))
        rows.append(
            {
                "way": way,
                "precision": config.train.precision,
                "parameters": parameters,
                "gb": sum(saved_bytes(chunk.plan) for chunk in state.chunks) / 1e9,
                "stall_s": stall,
                "steps_longer_s": longer,
                "until_complete_s": total,
                "undisturbed_step_s": undisturbed,
            }
        )
    return rows, _bytes(state, config, Path(folder))


def _whole(save: Callable[[Path], object], place: Path, undisturbed: float) -> tuple[float, float, float]:
    """Saves while training waits; returns stall, slowdown of steps, and seconds in all."""
    began = time.perf_counter()
    save(place)
    seconds = time.perf_counter() - began
    return seconds, 0.0, seconds


def _beside(
    saver: Saver, config: RunConfig, step: Callable[[], float], place: Path, undisturbed: float
) -> tuple[float, float, float]:
    began, before = time.perf_counter(), saver.seconds
    saver.save(Target(place, _description(config, full=True)))
    longer = 0.0
    done: list[Path] = []
    while not done:
        waited = saver.seconds
        longer += step() - undisturbed - (saver.seconds - waited)
        done = saver.poll()
    return saver.seconds - before, longer, time.perf_counter() - began


def _tensors(state: ModelState) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for chunk in state.chunks:
        with chunk.states() as buffers:
            found |= {
                f"{kind}.{name}": view for kind, each in buffers.items() for name, view in chunk.views(each).items()
            }
    return found


def _dcp_async(
    state: ModelState, step: Callable[[], float], place: Path, undisturbed: float
) -> tuple[float, float, float]:
    began = time.perf_counter()
    future: Any = dcp.async_save(_tensors(state), storage_writer=dcp.FileSystemWriter(place))
    stall = time.perf_counter() - began
    longer = 0.0
    while not future.done():
        longer += step() - undisturbed
    future.result()
    return stall, longer, time.perf_counter() - began


def _bytes(state: ModelState, config: RunConfig, folder: Path) -> dict[str, int]:
    """Returns the bytes of a full checkpoint's folder and of one with weights alone."""
    found = {}
    for kind in ("full", "weights"):
        place = folder / "checkpoints" / kind
        Saver(state).save(Target(place, _description(config, full=kind == "full")))
        found[kind] = sum(file.stat().st_size for file in place.iterdir())
    return found


# ---- Loading ----


def _loading(model: Mapping[str, Any], precision: str, rounds: int, folder: str) -> list[Row]:
    ranks = dist.get_world_size()
    config = _config(model, ranks, precision)
    groups = Groups(mesh_of(config, ranks))
    _, state = build(config, groups)
    state.initialize(0, 0.02)
    place = Path(folder) / "checkpoints" / "step-1"
    Saver(state).save(Target(place, _description(config, full=True)))
    rows = []
    for source in ("disk", "server"):
        for way in ("none", "broadcast", "allreduce"):
            found = [_load(state, config, place, way, served=source == "server") for _ in range(rounds)]
            rows.append(
                {
                    "from": source,
                    "way": way,
                    "ranks": ranks,
                    "seconds": statistics.median(seconds for seconds, _, _ in found),
                    "ranks_that_read": found[0][2],
                    "gb_read": sum(groups.world.all_gather_object(found[0][1])) / 1e9,
                    "gb_in_files": sum(file.stat().st_size for file in place.iterdir()) / 1e9,
                }
            )
    return rows


def _load(state: ModelState, config: RunConfig, place: Path, way: Any, *, served: bool) -> tuple[float, int, int]:
    """Returns the seconds until all ranks have loaded, the bytes that this rank read, and the number of reading ranks."""
    _drop_cache(place)
    dist.barrier()
    _CountingReader.lengths, _CountingReader.lock = [], place.parent / "server.lock" if served else None
    began = time.perf_counter()
    _, readers = load_state(state, place, model=config.model, send=way, reader_type=_CountingReader)
    dist.barrier()
    return time.perf_counter() - began, sum(_CountingReader.lengths), readers


class _CountingReader(Reader):
    """A reader that counts the bytes of tensors. A lock lets one rank read at a time, at the server's rate."""

    lengths: ClassVar[list[int]] = []
    lock: ClassVar[Path | None] = None

    def read(self, stored: StoredSlice) -> torch.Tensor:
        self.lengths.append(stored.length)
        if self.lock is not None:
            with self.lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                time.sleep(stored.length / _SERVER)
        return super().read(stored)


def _drop_cache(place: Path) -> None:
    for file in place.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- Nodes ----


def _nodes() -> list[Row]:
    """Returns the computed bytes of each node for a full, unsharded checkpoint of two models on 48 ranks of 4 nodes."""
    rows = []
    cases: list[tuple[str, Any, str]] = [
        ("dense", LARGE | {"hidden": 3072, "heads": 24, "intermediate": 9216}, "parallel.tensor=12"),
        ("mula-20b-a2b", "mula-20b-a2b", "parallel.expert=12"),
    ]
    for name, model, layout in cases:
        config = _config(model, 4, layout)
        mesh = mesh_of(config, 48, 12)
        for scattered in (True, False):
            rows.append({"model": name, "layout": layout} | _spread(config, mesh, scattered))
    return rows


def _spread(config: RunConfig, mesh: Mesh, scattered: bool) -> Row:
    with torch.device("meta"):
        model = Transformer(own_model(config.model, "bench"))
    layouts, state_spec = layouts_of(model, config), state_spec_of(config, model, RunInputs())
    nodes = dict.fromkeys(range(mesh.node(mesh.size - 1) + 1), 0)
    writing = set()
    for rank in range(mesh.size):
        plans = place_chunks(divide_chunks(layouts, mesh, rank, config.state, state_spec), config.state, state_spec)
        for plan, writer in zip(plans, writers(plans, mesh, rank, config.state, scattered=scattered)):
            if writer == rank:
                nodes[mesh.node(rank)] += saved_bytes(plan)
                writing.add(rank)
    total = sum(nodes.values())
    return {
        "writers_chosen": "scattered" if scattered else "first",
        "ranks": mesh.size,
        "writers": len(writing),
        "gb_by_node": " ".join(f"{size / 1e9:.2f}" for size in nodes.values()),
        "largest_share": max(nodes.values()) * len(nodes) / total,
    }


def _config(model: Any, ranks: int, *overrides: str) -> RunConfig:
    return configuration(model, ranks, 516, overrides, micro_batch=1)


def _description(config: RunConfig, *, full: bool) -> Description:
    return Description(config.model, config.train.sequence_length, 1, full, config.train.precision)
