"""Training, evaluation and whole runs on a fake accelerator, which finds errors and waits of a real one.

All tests run in one separate process, which keeps the fake accelerator to its end.
"""

import itertools
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers.covering import covering
from helpers.drawing import config_of, drawn, passes
from helpers.plugin_tables import tables_restored
from helpers.rules import ADAMW, LION, SCHEDULE_FREE, plan_chunks
from helpers.sweep import in_turns
from optimus.comm import Group, Groups, Handle, recorder
from optimus.comm.algorithms import KINDS, Measured
from optimus.comm.observer import Observer
from optimus.config import dump_config, load_config
from optimus.config.tree import StateConfig
from optimus.kernels import backend
from optimus.kernels.activation import Activation
from optimus.kernels.devices import CHIPS, chip_of
from optimus.kernels.square_sum import DEVICE_BLOCK
from optimus.launch import here
from optimus.launch import rank as program
from optimus.mesh import Layout, Mesh
from optimus.model.families import FAMILIES, families
from optimus.optim.reptile import Reptile
from optimus.optim.rule import OptimizerStep
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation
from optimus.resolve.groups import communicators
from optimus.resolve.parameters import full_model, layouts_of
from optimus.resolve.ranks import mesh_of
from optimus.resolve.shapes import activation_shapes
from optimus.state.chunk import TrainedChunk
from optimus.state.masks import packed_bits
from optimus.state.model_state import ModelState
from optimus.state.placement import ChunkContext
from optimus.state.plan import StateSpec, bytes_by_kind
from optimus.state.transfers import transfers
from optimus.state.unsharded import UnshardedParameters
from optimus.testing import RankError, run_ranks
from optimus.training import step
from optimus.training.checks import _saved_bytes
from optimus.training.trainer import Ending, Trainer

POOL = range(300)  # draws from which the covering sample is chosen
OFTEN = (
    "pruning.",  # steps are taken alone, without events after them
    "model.layers",
    "parallel.layers_per_stage",
    "parallel.max_in_flight",
    "train.micro_batch",
)  # their values run no other code
DENSE = {"model": "mula-1b"}
SPARSE = {"model": "mula-7b-a1b"}


def on_fake(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in the process of the fake accelerator."""
    return run_ranks(function, 1, *args, pool="fake accelerator")[0]


class Seen(NamedTuple):
    """The observations of the last step of a rank."""

    waits: list[Any]
    launches: Counter[tuple[str, str]]
    peak: int  # bytes
    at_rest: int
    chunks: int  # trained chunks

    def of(self, *phases: str) -> int:
        """Returns the launches in these phases."""
        return sum(count for (phase, _), count in self.launches.items() if phase in phases)

    def kernel(self, name: str) -> int:
        """Returns the launches of one kernel or operator."""
        return sum(count for (_, kernel), count in self.launches.items() if kernel == name)

    def waited(self, place: str) -> int:
        """Returns the number of waits of the host at a place."""
        return sum(wait.place.startswith(place) for wait in self.waits)


@contextmanager
def phases(machine: Any) -> Iterator[None]:
    """Names the phases of a step."""
    named = (
        (step, "accumulate_gradients", "microbatches"),
        (ModelState, "reduce_gradients", "norm"),
        (ModelState, "step", "update"),
    )
    with ExitStack() as stack:
        for owner, name, phase in named:
            stack.enter_context(mock.patch.object(owner, name, _during(machine, phase, getattr(owner, name))))
        yield


def _during(machine: Any, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with machine.during(phase):
            return function(*args, **options)

    return call


@contextmanager
def steps_of(
    config: dict[str, Any], overrides: Sequence[str] = (), ranks: int = 1, rank: int = 0, per_node: int | None = None,
    chip: str = "H200",
) -> Iterator[tuple[Any, Any]]:  # fmt: skip
    """Yields the machine, and a `Steps` of one of its ranks that has taken no step yet."""
    from helpers.fake_accelerator import fake_accelerator
    from helpers.fake_device import NAME
    from optimus.testing.steps import Steps

    tree = load_config(config, overrides)
    with fake_accelerator(chip, ranks=ranks, rank=rank) as machine, phases(machine), ExitStack() as stack:
        if tree.train.sequence_length > 100:  # random numbers of large models would take too long
            stack.enter_context(mock.patch.object(ModelState, "initialize"))
        yield machine, Steps(tree, per_node, torch.device(NAME, 0))


def one_step(config: dict[str, Any], overrides: Sequence[str] = (), *layout: Any) -> Seen:
    """Takes the first step on one rank."""
    return train(config, overrides, *layout, count=1)


def train(
    config: dict[str, Any], overrides: Sequence[str] = (), *layout: Any, chip: str = "H200", count: int = 2
) -> Seen:
    """Takes steps on one rank, and returns the observations of the last."""
    with steps_of(config, overrides, *layout, chip=chip) as (machine, steps):
        for _ in range(count):
            machine.forget()
            machine.memory.reset_peak()
            at_rest = machine.memory.current
            steps.train()
        return Seen(machine.waits, machine.launches, machine.memory.peak, at_rest, len(steps.state.trained))


def full_size(model: dict[str, Any], ranks: int = 1, **sections: Any) -> dict[str, Any]:
    """Returns the configuration of a full-size run, with 16,384 tokens of a rank in a microbatch."""
    sizes = {"steps": 9, "global_batch": 8 * ranks, "micro_batch": 8, "sequence_length": 2048}
    train = {"output": "", "precision": "bfloat16"} | sizes | sections.pop("train", {})
    return model | {"data": {"path": ""}, "train": train} | sections


# ---- Every layout, every family ----


@cache
def cases() -> list[int]:
    """Returns the draws that together have every value of every option, every model and every number of ranks."""

    def asked(number: int) -> set[object]:
        model, layout = drawn(number)
        return {model, layout.ranks, *(each for each in layout.overrides if not each.startswith(OFTEN))}

    costs = [32 + passes(*drawn(number)) for number in POOL]  # of one rank
    return [POOL[index] for index in covering([asked(number) for number in POOL], costs)]


@pytest.mark.parametrize("number", in_turns(cases(), 5, always=3))
def test_layouts(number: int) -> None:
    model, layout = drawn(number)
    rank = number % layout.ranks
    seen = on_fake(one_step, config_of(model), layout.overrides, layout.ranks, rank, layout.per_node)
    check_waits(seen)


def check_waits(seen: Seen) -> None:
    """A step waits once for the norm and once for the losses, and once whenever experts on several ranks run.

    Transfers of state and message-driven pipelines may wait too.
    """
    assert seen.waited("state/model_state.py") == 1, seen.waits
    assert seen.waited("training/step.py") == 1, seen.waits
    assert seen.waited("parallel/dispatch") <= seen.kernel("_count"), seen.waits
    known = (
        "state/model_state.py",
        "training/step.py",
        "parallel/dispatch",
        "state/transfers.py",
        "pipeline/message_driven.py",
        "pipeline/background.py",  # a thread of its own waits
    )
    assert sum(map(seen.waited, known)) == len(seen.waits), seen.waits


SIZES = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 24, "vocab": 59}
FAMILY: dict[str, dict[str, Any]] = {  # fields that a family requires
    "gpt2": {"learned_positions": 64, "kv_heads": 4},
    "opt": {"learned_positions": 64, "kv_heads": 4},
    "olmo3": {"window": 7, "full_attention_every": 2, "kv_heads": 4},
    "mistral": {"window": 5, "kv_heads": 4},
    "gemma2": {"head_size": 6, "query_scale": 10, "window": 5, "score_cap": 1.0, "logit_cap": 2.0},
    "gemma3_text": {"head_size": 6, "query_scale": 8, "window": 5, "full_attention_every": 2, "logit_cap": 2.0},
    "gpt_oss": {"head_size": 6, "window": 5},
    "pr_moe": {"experts_by_layer": [0, 2, 4], "layers": 3, "expert_intermediate": 16},
    "deepseek_v3": {
        "kv_heads": 4, "latent": {"queries": 12, "keys": 8, "rotary": 4, "value": 6}, "dense_layers": 1,
        "expert_intermediate": 16, "shared_experts": 1, "expert_groups": 2,
    },
}  # fmt: skip
LAYOUTS = [
    ["parallel.tensor=2", "parallel.pipeline=2", "parallel.vocabulary=true"],
    ["parallel.context=2", "parallel.context_method=ring", "state.shard=parameters"],
    ["parallel.pipeline=2", "parallel.schedule=zb-h1", "recompute=[block]"],
]


@pytest.mark.parametrize("number", in_turns(range(len(families())), 3, always=3), ids=sorted(families()))
def test_families(number: int) -> None:
    """Each family runs in one of the layouts, and with experts on two ranks."""
    name = sorted(families())[number]
    fields, overrides = families()[name].fields, [*LAYOUTS[number % len(LAYOUTS)]]
    model = SIZES | {"family": name} | FAMILY.get(name, {})
    if "experts" in fields and "experts_by_layer" not in model:
        model |= {"experts": 4, "experts_per_token": 2}
    overrides += ["train.global_batch=8", *(["parallel.expert=2"] if "experts" in fields else [])]
    check_waits(on_fake(one_step, config_of("dense") | {"model": model}, overrides, 4, number % 4))


def step_with_activation(kind: Activation) -> Seen:
    """Takes a step of OLMoE with experts of another activation, on one of two ranks that share the experts."""
    olmoe = families()["olmoe"]
    with tables_restored():
        FAMILIES.extend({"other": replace(olmoe, model_type="other", defaults={**olmoe.defaults, "activation": kind})})
        model = SIZES | {"family": "other", "experts": 4, "experts_per_token": 2}
        return one_step(config_of("dense") | {"model": model}, ["train.global_batch=8", "parallel.expert=2"], 2)


@pytest.mark.parametrize("kind", in_turns(["gelu", "gelu_tanh", "relu", "clamped_silu"], 4, always=1))
def test_experts_of_any_activation_add_no_wait(kind: Activation) -> None:
    seen = on_fake(step_with_activation, kind)
    check_waits(seen)
    assert seen.kernel("_expert_up") == seen.kernel("_expert_down_backward") > 0


GROUPED = {"hidden": 32, "heads": 4, "kv_heads": 2}  # heads of 8 columns, which flash attention needs


def heads_of_attention(model: dict[str, Any], overrides: Sequence[str]) -> tuple[Seen, Counter[tuple[int, int]]]:
    """Takes a step; returns the observations, and how often flash attention got which (query heads, key heads)."""
    from optimus.kernels import attention

    flash, given = attention._flash, Counter[tuple[int, int]]()

    def noted(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
        given[q.shape[1], k.shape[1]] += 1
        return flash(q, k, v, causal)

    with mock.patch.object(attention, "_flash", noted):
        seen = one_step(config_of("dense") | {"model": model}, ["train.micro_batch=8", *overrides])
    return seen, given


@pytest.mark.parametrize(
    ("family", "overrides", "forward"),
    [("llama", [], 2), ("qwen3", ["recompute=[block]"], 4), ("mistral", [], 2)],
)
def test_heads_that_share_keys_are_one_operator(family: str, overrides: list[str], forward: int) -> None:
    """Flash attention gets the shared keys and values without repetition, for each of two layers and two microbatches."""
    seen, given = on_fake(heads_of_attention, SIZES | GROUPED | {"family": family}, overrides)
    check_waits(seen)
    assert given == {(4, 2): 2 * forward}
    assert seen.kernel("aten._scaled_dot_product_flash_attention.default") == 2 * forward
    assert seen.kernel("aten._scaled_dot_product_flash_attention_backward.default") == 2 * 2


def products_under_way(overrides: list[str], ranks: int, per_node: int | None) -> list[int]:
    """Returns, for each all-to-all of a step, the matrix products launched between its start and its wait.

    The model has a shared expert.
    """
    model = SIZES | {"family": "deepseek_v3", "experts": 4, "experts_per_token": 2} | FAMILY["deepseek_v3"]
    found, begin = [], Observer.begin

    with steps_of(config_of("dense") | {"model": model}, overrides, ranks, 0, per_node) as (machine, steps):

        def products() -> int:
            return sum(count for (_, kernel), count in machine.launches.items() if "mm" in kernel)

        def start(self: Observer, name: str, *args: Any, **options: Any) -> Handle:
            begun, before, number = begin(self, name, *args, **options), products(), len(found)
            found.extend([-1] if name == "all_to_all" else [])

            def wait() -> None:
                if name == "all_to_all":
                    found[number] = products() - before
                begun.wait()

            return Handle(wait)

        with mock.patch.object(Observer, "begin", start):
            steps.train()
    return found


@pytest.mark.parametrize(("again", "recomputed"), [([], 0), (["recompute=[moe]"], 3)], ids=["saved", "recomputed"])
def test_tokens_are_under_way_beside_shared_experts(again: list[str], recomputed: int) -> None:
    """Shared experts are computed while tokens travel.

    The forward pass waits for counts, then sends tokens, weights and indices during the first projection and results
    during the second. The backward pass sends gradients of results during recomputation, and gradients of weights and
    tokens during two products of a projection each.
    """
    found = on_fake(products_under_way, ["parallel.expert=4", "train.micro_batch=2", *again], 4, None)
    microbatches = 16 // 4 // 2
    assert found == [0, 1, 1, 1, 1, recomputed + 2, 2, 2] * microbatches


def test_tokens_between_nodes_are_under_way_beside_shared_experts() -> None:
    """Tokens between nodes travel during the shared expert; the rank waits for those on the node."""
    found = on_fake(products_under_way, ["parallel.expert=4", "train.micro_batch=4"], 4, 2)
    assert found == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 2, 0, 0, 0, 2, 2]


# ---- Whole runs, evaluation, generation, checkpoints ----


def run(config: dict[str, Any], device: str) -> tuple[Counter[str], int, set[int]]:
    """Runs training with hooks, then evaluation and generation from the checkpoint on another device.

    Returns the places of waits of the run, its steps, and the devices that the evaluation touches.
    """
    from helpers.fake_accelerator import fake_accelerator
    from optimus.evaluation.run import evaluate, generate_text
    from optimus.training.reading import read_run

    tree, data = read_run(config)
    with fake_accelerator(devices=2) as machine:
        summary = here.train_or_check(tree, data, None, resume=False, fresh_optimizer=False, check=False)
        waits = Counter(wait.place.split(":")[0] for wait in machine.waits)
        machine.forget()
        generate_text(config["train"]["output"], "hello", max_tokens=3, device=device)
        evaluate(config["train"]["output"], text=__file__, max_bytes=500, device=device)
        return waits, summary["step"], machine.touched


@pytest.mark.in_turn(0, 2)
def test_a_whole_run(small_run: dict[str, Any], prepared: Path) -> None:
    """Hooks, validation and asynchronous checkpoints add no wait to a step's two; `device: auto` finds the accelerator."""
    small_run |= {"checkpoint": {"every": 3}, "validation": [{"name": "held", "path": str(prepared), "every": 3}]}
    waits, steps, touched = on_fake(run, small_run, "fakegpu:1")
    assert waits.pop("training/step.py") == waits.pop("state/model_state.py") == steps == 6
    assert touched == {1}  # evaluation launches kernels on the device of its option alone
    # The other waits belong to validation and to the checkpoint at the end.
    assert set(waits) <= {"evaluation/score.py", "checkpoint/format.py", "checkpoint/staging.py", "state/transfers.py"}


def uploads(config: dict[str, Any]) -> Counter[tuple[str, bool]]:
    """Returns the uploads of a run by file, and whether each was asynchronous."""
    from helpers.fake_accelerator import fake_accelerator
    from optimus.training.reading import read_run

    tree, data = read_run(config)
    with fake_accelerator() as machine, mock.patch.object(program, "dry_run", return_value=""):
        here.train_or_check(tree, data, None, resume=False, fresh_optimizer=False, check=False)
        return Counter((each.place.split(":")[0], each.beside) for each in machine.uploads)


def test_batches_come_from_pinned_memory(small_run: dict[str, Any], prepared: Path, tmp_path: Path) -> None:
    """Each of six steps uploads tokens and sources, and each of two microbatches uploads positions and ends of
    documents."""
    other = shutil.copytree(prepared, tmp_path / "other")
    sources = [{"path": str(path), "weight": 1} for path in (prepared, other)]
    small_run["data"] = {"sources": sources, "documents": "mask"}
    small_run["observe"] |= {"log_every": 1}
    found = on_fake(uploads, small_run)
    assert found["training/trainer.py", True] == 6 * 2
    assert found["model/batch.py", True] >= 6 * 2 * 2
    assert not [place for place, beside in found if place.startswith(("training/trainer", "model/")) and not beside], (
        found
    )


def staged() -> tuple[list[Any], list[int]]:
    """Stages a checkpoint; returns the waits of its beginning and the bytes of the buffers."""
    from optimus.checkpoint.staging import Staging

    with steps_of(config_of("dense")) as (machine, steps):
        steps.train()
        machine.forget()
        staging, buffers = Staging(), {chunk: [chunk.resident["model"]] for chunk in steps.state.chunks}
        staging.begin(buffers, {}, False, lambda wait: None)
        before = list(machine.waits)
        staging.run()
        return before, [staging.copy_of(each).nbytes for (each,) in buffers.values()]


def test_checkpoints_are_staged_beside_the_training() -> None:
    """The beginning of a checkpoint waits for nothing."""
    before, sizes = on_fake(staged)
    assert not before
    assert all(sizes)


# ---- Devices ----


def setup_of_rank(config: dict[str, Any]) -> list[set[int]]:
    """Returns the devices touched by a launcher's checks, and by a rank before its first step."""
    from helpers.fake_accelerator import fake_accelerator
    from optimus.training.reading import read_run

    tree, data = read_run(config)
    with fake_accelerator(devices=4) as machine:
        here.check_run(tree, data, mesh_of(tree, 4, 4), False)
        touched = [machine.touched]
        for key, value in {"WORLD_SIZE": 4, "RANK": 2, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}.items():
            os.environ[key] = str(value)
        machine.forget()
        # Autograd starts a thread for the first of these devices alone.
        with (
            mock.patch.object(program, "dry_run", return_value=""),
            mock.patch.object(Trainer, "fit", return_value=Ending()),
        ):
            here.check_run(tree, data, mesh_of(tree, 4, 4), False)
            program.run_rank(dump_config(tree), False)
        return [*touched, machine.touched]


def test_a_rank_touches_its_own_device_alone(small_run: dict[str, Any]) -> None:
    """A rank touches its own device, and its launcher none, because a query of free memory takes some memory."""
    small_run["train"] |= {"micro_batch": 2}
    assert on_fake(setup_of_rank, small_run) == [set(), {2}]


def test_kernels_are_launched_where_their_tensors_are() -> None:
    with pytest.raises(RankError, match=r"is launched on device 0, .* is on fakegpu:1"):
        on_fake(train_elsewhere)


def train_elsewhere() -> None:
    from helpers.fake_accelerator import fake_accelerator
    from helpers.fake_device import NAME
    from optimus.testing.steps import Steps

    with fake_accelerator(devices=2):
        Steps(config_of("dense"), None, torch.device(NAME, 1)).train()


# ---- Planted mistakes ----


def with_host_tensor() -> None:
    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        return x * torch.ones(len(x), 1)

    with mock.patch.object(backend, "scaled", scaled):
        train(config_of("dense"))


def without_memory() -> None:
    with mock.patch.object(UnshardedParameters, "gather"):
        train(config_of("dense"), ["state.shard=parameters"], 4)


def with_a_wait() -> Seen:
    terms = step.terms

    def read(*args: Any) -> Tensor:
        found = terms(*args)
        float(found[0])
        return found

    with mock.patch.object(step, "terms", read):
        return train(config_of("dense"))


def test_a_tensor_of_the_host_is_found() -> None:
    with pytest.raises(RankError, match=r"found (at least )?two (different )?devices,? .*cpu"):
        on_fake(with_host_tensor)


def test_use_of_released_memory_is_found() -> None:
    with pytest.raises(RankError, match=r"ReleasedMemoryError: .* has been released"):
        on_fake(without_memory)


def test_a_wait_too_many_is_found() -> None:
    seen = on_fake(with_a_wait)
    with pytest.raises(AssertionError, match="a number is read"):
        check_waits(seen)


# ---- Budgets ----


def test_waits_of_a_dense_step() -> None:
    seen = on_fake(train, full_size(DENSE))
    assert [wait.place.split(":")[0] for wait in seen.waits] == ["state/model_state.py", "training/step.py"]


def train_pruned(form: str, shard: str, ranks: int) -> Seen:
    """Takes steps of a model of whose matrices a tenth is left."""
    overrides = ["pruning.sparsity=0.9", "pruning.at=0", f"pruning.indices={form}", f"state.shard={shard}"]
    # The masks lie on the host and have as many elements as the model.
    small = ["model.layers=2", "model.vocab=4096"]
    with steps_of(full_size(DENSE, ranks), [*overrides, *small], ranks) as (machine, steps):
        slots = [slot for chunk in steps.state.trained for slot in chunk.plan.slots]
        left = {slot.name: packed_bits(torch.arange(slot.shape.numel()) % 10 == 0) for slot in slots}
        steps.state.prune({name: left[name] for name in steps.state.spec.unpruned})
        steps.train()
        machine.forget()
        steps.train()
        pruned = sum(chunk.elements.prunes for chunk in steps.state.trained)
        return Seen(machine.waits, machine.launches, machine.memory.peak, machine.memory.current, pruned)


@pytest.mark.parametrize(
    ("form", "shard", "ranks"),
    in_turns([("bits", "optimizer", 4), ("int32", "none", 1), ("int32", "parameters", 4)], 2, always=1),
)
def test_waits_of_pruned_chunks(form: str, shard: str, ranks: int) -> None:
    """Compression and expansion wait for nothing."""
    seen = on_fake(train_pruned, form, shard, ranks)
    assert seen.chunks > 0
    assert [wait.place.split(":")[0] for wait in seen.waits] == ["state/model_state.py", "training/step.py"]
    if form == "bits":
        assert seen.kernel("_compress") == seen.chunks
        assert seen.kernel("_expand") >= seen.chunks


PYRAMID = {"family": "pr_moe"} | FAMILY["pr_moe"] | {"experts_by_layer": [4, 0, 8]}
EXPERTS: dict[str, tuple[list[str], int | None]] = {
    "all-to-all": (["parallel.expert=4"], None),
    "all-gather": (["parallel.expert=4", "moe.dispatch=allgather"], None),
    "two levels": (["parallel.expert=4"], 2),
    "parts": (["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2"], None),
    "recomputed": (["parallel.expert=4", "recompute=[moe]"], None),
    "pyramid": (["parallel.expert=4"], None),
}


@pytest.mark.parametrize("name", in_turns([*EXPERTS], 3, always=2))
def test_waits_of_experts_on_several_ranks(name: str) -> None:
    """A step waits once for each sparse layer and microbatch, and recomputation reuses the cached counts.

    The dense layer beside each expert of PR-MoE adds no wait.
    """
    overrides, per_node = EXPERTS[name]
    config = config_of("moe") | ({"model": SIZES | PYRAMID} if name == "pyramid" else {})
    seen = on_fake(train, config, [*overrides, "train.micro_batch=2"], 4, 0, per_node)
    microbatches, layers = 16 // (2 if name == "parts" else 4) // 2, 2
    assert seen.waited("parallel/dispatch") == layers * microbatches
    assert len(seen.waits) == layers * microbatches + 2


@pytest.mark.parametrize("shard", in_turns(["none", "optimizer", "gradients", "parameters"], 2, always=1))
def test_launches_of_norm_and_update(shard: str) -> None:
    """A chunk needs a few launches, however long the chunk is; only CPUs use tiles."""
    seen = on_fake(train, full_size(SPARSE, 8), [f"state.shard={shard}", "model.layers=4"], 8)
    assert seen.chunks > 5
    assert seen.of("norm", "update") <= 8 * seen.chunks
    assert seen.kernel("_adamw") == seen.chunks


def test_weight_gradients_are_not_rounded() -> None:
    """Each product adds its weight gradient to the fp32 buffer itself.

    A layer has four such products: q, k and v; output; up; down. The output layer has one for each block of rows.
    """
    seen = on_fake(train, full_size(DENSE))
    blocks = -(-8 * 2048 // ((1 << 27) // 50304))
    assert seen.kernel("aten.addmm.dtype_out") == 4 * 16 + blocks


@pytest.mark.parametrize(
    ("overrides", "ranks", "products"),
    in_turns(
        [
            (["parallel.pipeline=2", "parallel.vocabulary=true", "parallel.microbatches=4"], 2, (4 * 2 + 1) * 4),
            (["parallel.tensor=2"], 2, 2 * (4 * 4 + 16)),  # of 1,024 rows
            (["parallel.tensor=2", "model.tie_embeddings=true"], 2, 2 * (4 * 4 + 16)),
            # Frozen matrices have none but those of their two factors each; the output layer is trained.
            (["train.freeze=[matrix]", "train.lora_rank=4", "train.micro_batch=8"], 1, 4 * 4 * 3 + 1),
        ],
        3,
        always=1,
    ),
    ids=["vocabulary over stages", "vocabulary over ranks", "tied", "low rank"],
)
def test_no_weight_gradient_is_rounded(overrides: list[str], ranks: int, products: int) -> None:
    """Weight gradients that do not pass through `linear` are not rounded either."""
    seen = on_fake(train, full_size(DENSE, ranks), ["model.layers=4", "model.vocab=4096", *overrides], ranks)
    assert seen.kernel("aten.addmm.dtype_out") == products


def saved(config: dict[str, Any], overrides: Sequence[str], ranks: int) -> int:
    """Returns the bytes that a forward pass saves for its backward pass."""
    from helpers.fake_device import NAME

    with steps_of(config, overrides, ranks) as (_, steps):
        steps.state.begin_step()
        run = SimpleNamespace(state=steps.state, model=steps.model, config=steps.config)
        tokens_BS = torch.zeros(8, 2048, dtype=torch.int64).to(torch.device(NAME, 0))
        return _saved_bytes(run, tokens_BS, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("dispatch", in_turns(["alltoall", "allgather", None], 2, always=1))
def test_saved_activations_of_experts(dispatch: str | None) -> None:
    """A 7B model saves the planned bytes on 8 ranks that share experts and on one, with balanced experts."""
    ranks = 8 if dispatch else 1
    overrides = [f"parallel.expert={ranks}", "model.layers=8", *([f"moe.dispatch={dispatch}"] if dispatch else [])]
    config = full_size(SPARSE, ranks)
    planned = planned_activations(config, overrides, ranks)
    assert on_fake(saved, config, overrides, ranks) == pytest.approx(planned.saved, rel=0.05)


PEAKS = {
    "experts on ranks": (SPARSE, 8, ["parallel.expert=8", "state.shard=optimizer"]),
    "experts gathered": (SPARSE, 8, ["parallel.expert=8", "moe.dispatch=allgather"]),
    "parameters sharded": (SPARSE, 8, ["state.shard=parameters"]),
    "dense": (DENSE, 1, []),
    "recomputed": (DENSE, 1, ["recompute=[block]"]),
    "some recomputed": (DENSE, 1, ["recompute=[norm,mlp]"]),
    "fp32": (DENSE, 1, ["train.precision=float32"]),
    "experts": (SPARSE, 1, []),
    "experts recomputed": (SPARSE, 1, ["recompute=[moe]"]),
    "optimizer sharded": (SPARSE, 8, ["state.shard=optimizer"]),
    "tensor": (DENSE, 2, ["parallel.tensor=2"]),
}
WHOLE_PEAKS = {
    "parameters sharded",
    "experts recomputed",
}  # fewer layers would make the workspace of one layer a larger share


@pytest.mark.parametrize("name", in_turns([*PEAKS], 3, always=2))
def test_peak_of_memory(name: str) -> None:
    """The peak of a step is within a tenth of the plan: state at rest and the peak of activations.

    Activations take less if the loss decides, because fewer logits are alive at once than on a CPU.
    """
    model, ranks, overrides = PEAKS[name]
    if name not in WHOLE_PEAKS:
        overrides = [*overrides, "model.layers=6"]
    config = full_size(model, ranks)
    seen = on_fake(train, config, overrides, ranks)
    planned = planned_activations(config, overrides, ranks)
    assert seen.peak == pytest.approx(seen.at_rest + planned.peak, rel=0.1)
    assert 0.8 * planned.peak < seen.peak - seen.at_rest < 1.1 * planned.peak


def planned_activations(config: dict[str, Any], overrides: Sequence[str], ranks: int) -> Any:
    """Returns the activations that `recompute: auto` and the planner predict."""
    tree = load_config(config, overrides)
    parallel = tree.parallel
    mesh = Mesh.from_sizes(
        ranks, pipeline=1, context=1, tensor=parallel.grid, expert=parallel.expert, expert_tensor=parallel.expert_tensor
    )
    shapes = activation_shapes(tree, mesh, ())
    return activation_bytes(tree.model, Recomputation(tuple(tree.recompute), tree.recompute_every), **shapes)


def built(shard: str) -> tuple[int, int, int]:
    """Returns bytes of a 7B model's state on one of 8 ranks: peak during creation, at rest, and the longest chunk's
    buffers."""
    with steps_of(full_size(SPARSE, 8), [f"state.shard={shard}", "model.layers=8"], 8) as (machine, steps):
        plans = [chunk.plan for chunk in steps.state.chunks]
        sizes = [sum(each.dtype.itemsize * plan.size for each in plan.buffers if each.depth == 0) for plan in plans]
        return machine.memory.peak, sum(bytes_by_kind(plans).values()), max(sizes)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_peak_while_the_state_is_made(shard: str) -> None:
    """Creation takes the bytes at rest and those of one chunk, because each chunk is sharded before the next is made."""
    peak, at_rest, chunk = on_fake(built, shard)
    assert at_rest <= peak <= at_rest + 1.01 * chunk


TILE, TILES = 1 << 16, 12
# Rules, and the fp32 numbers an element that an update takes: the scaled gradient (TED, section 7.2) and the rule's own.
TAKEN = {
    "adamw": (ADAMW, 1),
    "lion": (LION, 2),
    "schedule-free": (SCHEDULE_FREE, 2),
    "reptile": (Reptile(inner=ADAMW, every=2, share=0.1, weight_decay=0.0), 1),
}


def norm_and_update(rule: str, gradient: str, triton: bool) -> list[tuple[int, Counter[str]]]:
    """Returns, for the norm and for the update of a chunk, the bytes above those at rest, and the launches."""
    from helpers.fake_accelerator import fake_accelerator
    from helpers.fake_device import NAME

    with fake_accelerator() as machine, mock.patch.object(backend, "_has_kernels", return_value=triton):
        options = StateConfig.model_validate({"gradient_dtype": gradient})
        spec = StateSpec(torch.bfloat16, {"p": TAKEN[rule][0]})
        (plan,) = plan_chunks({"p": Layout((TILE * TILES,))}, Mesh(), 0, options, spec)
        device = torch.device(NAME, 0)
        chunk = TrainedChunk(plan, ChunkContext([], Group([0], 0), transfers(device), options=options))
        chunk.gradients.reduce()
        now, found = OptimizerStep(2, 1e-2, 0.5, {"weight_sum": 1.0}), []
        for part in (chunk.gradients.square_sum, partial(chunk.update.step, now)):
            machine.forget()
            machine.memory.reset_peak()
            at_rest = machine.memory.current
            part(TILE)
            launches = Counter({kernel: count for (_, kernel), count in machine.launches.items()})
            found.append((machine.memory.peak - at_rest, launches))
        return found


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "torch"])
@pytest.mark.parametrize(("rule", "gradient"), [*zip(TAKEN, itertools.cycle(["bfloat16", "float32"]))])
def test_an_update_takes_the_memory_of_a_tile(rule: str, gradient: str, triton: bool) -> None:
    """The memory is that of a tile, 4 bytes for each number (TED, section 7.2), or none where one kernel updates the
    chunk; the chunk is twelve times as long."""
    small = 2048  # bytes: sums of tiles, the step count
    (norm, _), (update, launches) = on_fake(norm_and_update, rule, gradient, triton)
    assert norm <= (0 if triton else 8 * min(DEVICE_BLOCK, TILE * TILES)) + small
    if rule == "adamw" and triton:
        assert update == 0
        assert launches == {"_adamw": 1}
    else:
        assert 4 * TILE <= update <= 4 * TILE * TAKEN[rule][1] + small
        assert max(launches.values()) >= TILES


def groups_of_rank(ranks: int) -> tuple[list[int], list[int]]:
    """Returns the sizes of the process groups that a rank makes, and of the communicators planned for the rank."""
    from helpers.fake_accelerator import fake_accelerator
    from optimus.resolve.groups import run_groups
    from optimus.resolve.ranks import mesh_of

    sizes = {"pipeline": 8, "tensor": 2, "expert": 8, "schedule": "1f1b"}
    tree = load_config(full_size(SPARSE, ranks // 16, parallel=sizes))
    mesh = mesh_of(tree, ranks, 8)
    with fake_accelerator(ranks=ranks) as machine:
        layouts = layouts_of(full_model(tree), tree)
        Groups(mesh, planned=run_groups(tree, mesh, layouts, tags=False))
        (planned,) = communicators(tree, mesh, layouts, [0])
        return machine.groups, [each.size for each in planned for _ in range(each.number)]


@pytest.mark.parametrize("ranks", [256, 4096])
def test_process_groups_of_a_large_run(ranks: int) -> None:
    """A rank makes the groups of which it is a member, for any number of ranks, and each is planned."""
    made, planned = on_fake(groups_of_rank, ranks)
    assert len(made) <= 32
    assert {size for size in made if size > 1} - {8} <= set(planned)  # groups of 8 carry the pipeline's messages


def links_of_rank(rank: int) -> tuple[list[tuple[Any, int]], set[tuple[Any, int]]]:
    """Returns the links that a rank connects before its first step, in order, and those that the step uses."""
    found: dict[str, list[tuple[Any, int]]] = {"connection": [], "other": []}

    def noted(begin: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Group, tensor: Tensor, peer: int, what: str) -> Any:
            found[what if what in found else "other"].append(
                (self.transport.process_group.group_name, self.ranks[peer])
            )
            return begin(self, tensor, peer, what)

        return call

    overrides = ["parallel.pipeline=4", "parallel.vocabulary=true", "model.layers=8"]
    overrides += ["parallel.stages_per_rank=2", "parallel.schedule=interleaved-1f1b"]
    with ExitStack() as stack:
        for name in ("send_async", "recv_async"):
            stack.enter_context(mock.patch.object(Group, name, noted(getattr(Group, name))))
        _, steps = stack.enter_context(steps_of(config_of("dense"), overrides, 4, rank))
        assert not found["other"]
        steps.train()
    return found["connection"], {*found["other"]}


@pytest.mark.in_turn(1, 3)
def test_links_are_connected_in_one_order() -> None:
    """Links are connected in one order before the first step.

    Ranks that create a communicator of two at its first message would wait for each other.
    """
    connected, used = zip(*[on_fake(links_of_rank, rank) for rank in range(4)], strict=True)
    for rank, links in enumerate(connected):
        assert used[rank] == {*links}
        for other in range(rank):
            shared = [stream for stream, peer in links if peer == other]
            assert shared == [stream for stream, peer in connected[other] if peer == rank]


def waiting_threads() -> set[tuple[bool, bool]]:
    """Returns, for each wait for a collective: whether the thread is the main one, and whether it runs beside the
    training."""
    found, beside = set(), recorder._beside

    def noted() -> bool:
        found.add((threading.current_thread() is threading.main_thread(), beside()))
        return beside()

    with (
        steps_of(config_of("moe"), ["parallel.expert=4"], 4) as (_, steps),
        mock.patch.object(recorder, "_beside", noted),
    ):
        steps.train()
    return found


def test_waits_of_the_backward_pass_are_of_the_training() -> None:
    """Autograd's own thread waits in the backward pass."""
    assert on_fake(waiting_threads) == {(True, False), (False, False)}


def test_too_little_memory_is_a_message() -> None:
    with pytest.raises(RankError, match=r"OutOfMemoryError: .* bytes on NVIDIA A100"):
        on_fake(train_7b_on_a100)


def train_7b_on_a100() -> None:
    train(full_size(SPARSE), chip="A100")


@pytest.mark.parametrize("chip", ["A100", "H200", "MI300X", "PVC"])
def test_chips(chip: str) -> None:
    """A step runs on each chip, whose peak rate and shared memory are known."""
    on_fake(train_on, chip)


def train_on(chip: str) -> None:
    from optimus.observe.machine import find_device, peak_flops

    with steps_of(full_size(DENSE), chip=chip) as (machine, steps):
        device = find_device("auto", "")
        assert peak_flops(device) is not None
        assert chip_of(device).architecture in CHIPS
        steps.train()
        assert machine.memory.peak < machine.properties.total_memory


def collectives_by_rounds(algorithm: str) -> tuple[list[Any], Counter[str], Counter[str]]:
    """Returns (waits, launches by kernel, messages) of two collectives of 2 x 2 ranks in flight together."""
    from helpers.fake_accelerator import fake_accelerator

    curve = {"2x2": {algorithm: {"sizes": [1.0], "seconds": [1.0]}}}
    measured = Measured.model_validate({kind: curve for kind in KINDS if kind != "all_to_all"})
    with fake_accelerator(ranks=4, rank=1) as machine:
        group = Groups(Mesh(dp=4, ranks_per_node=2), measured=measured).world
        x, part = (torch.ones(size, device="fakegpu", dtype=torch.bfloat16) for size in (4096, 1024))
        group.all_reduce(x)  # connects the ranks
        machine.forget()
        for handle in [group.all_reduce_async(x), group.reduce_scatter_async(x, part)]:
            handle.wait()
        return machine.waits, Counter(name for _, name in machine.launches.elements()), machine.collectives


@pytest.mark.parametrize(
    ("algorithm", "sums", "sends"), [("direct", 1, 3), ("doubling", 2, 2), ("doubling+ring", 2, 2)]
)
def test_the_host_does_not_wait_between_rounds(algorithm: str, sums: int, sends: int) -> None:
    """A round's sums are one launch. An all-reduce sends as often again to gather."""
    waits, launches, messages = on_fake(collectives_by_rounds, algorithm)
    assert not waits
    assert launches["_add_rows"] == 2 * sums
    assert messages["send"] == 3 * sends
