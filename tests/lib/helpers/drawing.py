"""Random combinations of all options that divide work and state; a number decides each combination."""

import itertools
import math
import random
from typing import Any

from helpers.equality import Layout
from optimus.config.tree import StateConfig
from optimus.mesh import Mesh
from optimus.pipeline.schedules import ScheduleRow, schedules
from optimus.state.plan import shard_groups

SIZES = {"hidden": 16, "layers": 2, "heads": 4, "vocab": 59}  # number of tokens that no number of ranks divides evenly
SPARSE = {"family": "olmoe", "intermediate": 24, "experts": 8, "experts_per_token": 2}
MODELS: dict[str, dict[str, Any]] = {
    "moe": SIZES | SPARSE,
    "tied": SIZES | SPARSE | {"experts_per_token": 3, "tie_embeddings": True},
    "dense": SIZES | {"family": "qwen3", "intermediate": 48, "vocab": 56},  # four norms with weights per block
    "tied dense": SIZES | {"family": "olmo", "intermediate": 32, "layers": 3, "tie_embeddings": True},
    "thirds": SPARSE | {"hidden": 24, "layers": 2, "heads": 6, "vocab": 53, "experts": 6},
}
NESTED: dict[str, list[dict[str, int]]] = {  # for four ranks or more
    "gradients": [{"gradients": 2}, {"gradients": 1, "optimizer": 2}],
    "parameters": [{"parameters": 2}, {"parameters": 2, "gradients": 2}, {"parameters": 1, "gradients": 2}],
}
RANKS = {1: (1, 2, 4, 4, 8), 2: (1, 2, 2, 4), 4: (1, 1, 1, 2)}  # ranks that share a stage, by number of pipeline stages


def config_of(model: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a short run of one of `MODELS`; `sections` replace or add sections."""
    # The first update is lr g / (|g| + eps), so an error of 1e-9 in a g near 0 moves a weight by 1e-9 lr / eps. The
    # usual eps of 1e-8 would let rounding errors of tiny gradients become large updates.
    return short_run(MODELS[model], context=24, optimizer={"eps": 3e-5}) | sections


def short_run(model: dict[str, Any], *, context: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of ten steps of a model, in fp32 and with several chunks."""
    sizes = {"steps": 10, "global_batch": 16, "micro_batch": 2, "sequence_length": context}
    return {
        "model": dict(model),
        "data": {"path": ""},
        "train": {"output": "", "precision": "float32"} | sizes,
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 2},
        "state": {"chunk": 2000},
    } | sections


class Draw:
    """Choices that a number decides, and the configuration overrides of the choices."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(3_000 + number)  # a first seed for which few draws cover all options
        self.overrides: list[str] = []

    def of(self, *options: Any) -> Any:
        """Draws one of `options`, without an override."""
        return self._random.choice(options)

    def set(self, key: str, *options: Any) -> Any:
        """Draws one of `options` and sets `key` to the value."""
        chosen = self.of(*options)
        text = str(chosen).lower() if isinstance(chosen, bool) else str(chosen).replace(" ", "").replace("'", "")
        self.overrides.append(f"{key}={text}")
        return chosen


def drawn(number: int) -> tuple[str, Layout]:
    """Returns a model and a layout; the number decides everything."""
    draw = Draw(number)
    model = draw.of(*MODELS)
    shape = MODELS[model]
    pipeline = draw.of(1, 1, 2) if model == "thirds" else draw.of(1, 1, 2, 2, 4, 4)
    # Number of ranks that share a stage.
    here = draw.of(3, 6 // pipeline) if model == "thirds" else draw.of(*RANKS[pipeline])
    grids = [(m, n) for m in (1, 2, 3, 4) for n in (1, 2, 3) if here % (m * n) == 0 == shape["heads"] % m]
    outputs, inputs = draw.of((1, 1), *grids)
    tensor = outputs * inputs
    contexts = [n for n in (1, 2, 3, 4) if here // tensor % n == 0 == 16 * tensor * n % here]
    context = draw.of(contexts[0], *contexts)
    data = here // (tensor * context)
    _draw_parallel(draw, shape, (outputs, inputs), context)
    microbatches = [n for n in (1, 2, 4, 8) if 16 % (data * n) == 0 == 16 // (data * n) * 24 // context % tensor]
    if pipeline > 1:
        layers = _draw_pipeline(draw, pipeline, 16 // data, microbatches)
    else:
        layers = shape["layers"]
        draw.set("train.micro_batch", *(16 // (data * n) for n in microbatches if n < 8))
    draw_state(draw, data * context)
    if "experts" in shape:
        _draw_experts(draw, shape, (outputs, inputs), here)
        _limit_shard_ranks(draw, Mesh(dp=data, cp=context, tp=tensor, tp_in=inputs, **_experts(draw)))
    _draw_recomputation(draw, "moe" if "experts" in shape else "mlp", layers)
    if pipeline > 1:
        draw_blocks(draw, here, tensor * context)
    draw_rule(draw)
    _draw_frozen(draw)
    ranks = pipeline * here
    nodes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    per_node = ranks // draw.of(*nodes, *nodes[1:-1])
    draw_residency(draw)
    _draw_pruning(draw, shape)
    _draw_loss(draw)
    _draw_precision(draw)
    _draw_chunks(draw)
    draw_alike(draw)
    draw_layers(draw, layers, *combinations_of("norm", "attention", "moe" if "experts" in shape else "mlp"))
    if inputs == 1:
        _draw_degree(draw, outputs, layers)
    return model, Layout(ranks, draw.overrides, per_node)


def passes(model: str, layout: Layout) -> float:
    """Returns a rank's cost of a step: the number of its blocks times microbatches."""
    said = dict(override.split("=", 1) for override in layout.overrides)
    pipeline = int(said.get("parallel.pipeline", 1))
    outputs, _, inputs = said.get("parallel.tensor", "1").strip("[]").partition(",")
    together = pipeline * int(said.get("parallel.context", 1)) * int(outputs) * int(inputs or 1)
    sequences = 16 * together // layout.ranks  # sequences per data rank
    said_number = said.get("parallel.microbatches", sequences // int(said["train.micro_batch"]))
    microbatches = sequences if said_number == "auto" else int(said_number)
    layers = int(said.get("model.layers", MODELS[model]["layers"]))
    return layers / pipeline * microbatches


def _draw_pipeline(draw: Draw, ranks: int, sequences: int, microbatches: list[int]) -> int:
    """Draws all options of the pipeline; returns the number of layers. These ranks train `sequences` per step."""
    draw.set("parallel.pipeline", ranks)
    stages = ranks * draw_order(draw, ranks, max(microbatches))
    if "parallel.executor=scheduled" in draw.overrides:
        draw.set("parallel.vocabulary", True, False)
    layers: int = draw.set("model.layers", stages, stages + 1)
    if draw.of(True, False):
        blocks = [1] * stages
        blocks[draw.of(*range(stages))] += layers - stages
        draw.set("parallel.layers_per_stage", blocks)
    in_rounds = (f"parallel.schedule={row.name}" for row in schedules().values() if row.in_rounds)
    least = ranks if any(said in draw.overrides for said in in_rounds) else 1
    number = draw.of(*(n for n in microbatches if n >= least))
    if draw.of(True, False):
        draw.set("train.micro_batch", sequences // number)
    else:  # train.micro_batch is an upper limit here
        draw.set("train.micro_batch", sequences)
        draw.set("parallel.microbatches", number, number, "auto")
    return layers


def draw_order(draw: Draw, ranks: int, most: int) -> int:
    """Draws an executor and a schedule for at most `most` microbatches; returns the stages per rank."""
    if draw.set("parallel.executor", "scheduled", "scheduled", "message-driven") == "message-driven":
        per_rank: int = draw.set("parallel.stages_per_rank", 1, 2)
        cap = draw.of(None, "number", "list", "list")
        if cap == "number":
            draw.set("parallel.max_in_flight", 1, 2, 5)
        elif cap == "list":
            draw.set("parallel.max_in_flight", [draw.of(1, 2, 3) for _ in range(ranks * per_rank)])
        return per_rank
    free, rounds = ([row for row, *_ in alike() if row.in_rounds == yes] for yes in (False, True))
    twice = [row.name for row in free for _ in range(1 + row.deepens)]
    row = schedules()[draw.set("parallel.schedule", *twice, *(each.name for each in rounds if most >= ranks))]
    if row.deepens:
        draw.set("parallel.warmup_factor", 1, 2)
    return draw.set("parallel.stages_per_rank", row.stages) if row.stages > 1 else 1


def alike() -> list[list[ScheduleRow]]:
    """Returns the schedules, those with the same placement and kinds of passes in one list, the last one first."""
    found: dict[tuple[object, ...], list[ScheduleRow]] = {}
    for row in schedules().values():
        shape = row.placement, row.stages, row.any_stages, row.splits_backward, row.in_rounds, row.deepens
        found[shape] = [row, *found.pop(shape, [])]
    return list(found.values())


def draw_alike(draw: Draw) -> None:
    """Draws one of the schedules `alike` to the drawn one, and the algorithm of vocabulary parallelism."""
    for at, override in enumerate(draw.overrides):
        if override.startswith("parallel.schedule="):
            rows = next(rows for rows in alike() if override.endswith(f"={rows[0].name}"))
            draw.overrides[at] = f"parallel.schedule={draw.of(*rows).name}"
    if "parallel.vocabulary=true" in draw.overrides:
        draw.set("parallel.vocabulary_algorithm", 1, 2)


def _draw_parallel(draw: Draw, shape: dict[str, Any], grid: tuple[int, int], context: int) -> None:
    outputs, inputs = grid
    if outputs * inputs > 1:
        draw.set("parallel.tensor", outputs if inputs == 1 else list(grid))
        draw.set("parallel.sequence", True, False)
        draw.set("parallel.overlap", True, False)
    if context > 1:
        draw.set("parallel.context", context)
        fits = ["ring"] if 24 % (2 * context) == 0 else []
        fits += ["ulysses"] if shape["heads"] // outputs % context == 0 else []
        draw.set("parallel.context_method", *fits)


def draw_state(draw: Draw, replicas: int) -> None:
    shard = draw.set("state.shard", "none", "optimizer", "gradients", "parameters")
    draw.set("state.chunk", 500, 2000, 100_000)
    draw.set("state.tile", 64, 1000, 1 << 20)
    draw.set("state.overlap", True, True, False)
    if shard != "none":
        draw.set("state.shard_over", "replicas", "data")
        ranks = draw.of("all", "some", "nested" if replicas % 4 == 0 and shard in NESTED else "some")
        if ranks == "some":
            draw.set("state.shard_ranks", *(n for n in (1, 2, 4) if replicas % n == 0))
        elif ranks == "nested":
            for kind, width in draw.of(*NESTED[shard]).items():
                draw.set(f"state.shard_ranks.{kind}", width)
    elif draw.of(True, False):
        draw.set("state.all_reduce_tiles", 1, 3)
    if shard == "parameters":
        draw.set("state.reshard_after_forward", True, False)
        draw.set("state.prefetch", 0, 1, 3)


def _draw_experts(draw: Draw, shape: dict[str, Any], grid: tuple[int, int], ranks: int) -> None:
    outputs, inputs = grid
    split = draw.set(
        "parallel.expert_tensor", outputs * inputs, *(n for n in (1, 2, 3, 4) if outputs * inputs % n == 0)
    )
    fits = [n for n in (1, 2, 3, 4, 6, 8) if ranks % (n * split) == 0 and shape["experts"] % n == 0]
    draw.set("parallel.expert", max(fits), max(fits), *fits)
    dispatch = draw.set("moe.dispatch", "alltoall", "alltoall", "allgather", "auto")
    draw.set("moe.balance_scope", "microbatch", "global")
    if dispatch == "alltoall" and inputs == 1 and split == outputs > 1 and "parallel.sequence=false" in draw.overrides:
        draw.set("moe.drop_duplicates", True, False)


def _experts(draw: Draw) -> dict[str, int]:
    said = dict(override.split("=", 1) for override in draw.overrides)
    return {"ep": int(said["parallel.expert"]), "etp": int(said["parallel.expert_tensor"])}


def _limit_shard_ranks(draw: Draw, mesh: Mesh) -> None:
    """Replaces shard ranks that do not divide the experts' data axis, if state is sharded over that axis, by all its
    ranks."""
    if "state.shard_over=data" not in draw.overrides:
        return
    over_data = StateConfig(shard="optimizer", shard_over="data")
    most = max(len(shard_groups(mesh, mesh.group(0, axes), over_data)[0]) for axes in (("dp", "cp"), ("edp",)))
    for at, override in enumerate(draw.overrides):
        key, _, number = override.partition("=")
        if key.startswith("state.shard_ranks") and most % int(number):
            draw.overrides[at] = f"{key}={most}"


def draw_rule(draw: Draw) -> None:
    """Draws the update rule. Lion moves fully even if a gradient is all rounding error, so its learning rate is small."""
    if draw.set("optimizer.name", "adamw", "muon", "muon", "lion", "schedule-free") == "lion":
        draw.set("lr_schedule.lr", 2e-6)
        draw.set("lr_schedule.min_lr", 2e-6)


def _draw_frozen(draw: Draw) -> None:
    """Draws the frozen parameters: none, all before some block, a later block, or some of every block."""
    draw.set("train.freeze", [], [], ["embedding", "blocks.0.*"], ["blocks.1.*"], ["blocks.*.attention.*"])


def _draw_loss(draw: Draw) -> None:
    """Draws the loss, which needs whole logits on the last stage."""
    if "parallel.vocabulary=true" not in draw.overrides:
        draw.set("train.loss", "cross-entropy", "cross-entropy", "z-loss", "label-smoothing")


def _draw_precision(draw: Draw) -> None:
    """Draws the precision, float16 with a scale of the loss that grows in every step or in none."""
    if draw.set("train.precision", "float32", "float16") == "float16":
        draw.set("train.loss_scale.growth_interval", 1, 2000)


def _draw_chunks(draw: Draw) -> None:
    """Draws Elixir's other choices: a range of chunk sizes, small groups, the size of the cache, pinned memory."""
    sharded, offloaded = "state.shard=none" not in draw.overrides, "state.offload=none" not in draw.overrides
    if draw.of(True, False, False):
        at = next(at for at, override in enumerate(draw.overrides) if override.startswith("state.chunk="))
        draw.overrides[at : at + 1] = ["state.chunk=null", "state.chunk_sizes=[300,700]"]
    if sharded or offloaded:
        draw.set("state.unsharded_below", 0, 400, 4000)
    if "state.cache=40" in draw.overrides and draw.of(True, False):
        draw.overrides[draw.overrides.index("state.cache=40")] = "state.cache=2MB"
    if offloaded:
        draw.set("state.pin_memory", True, False)


def _draw_pruning(draw: Draw, shape: dict[str, Any]) -> None:
    """Draws targets and steps of pruning. Magnitude decides only before the first step, later masks are random.

    After training steps, rounding could decide between weights of nearly equal magnitude, differently on other ranks.
    """
    kind = draw.of(None, None, "first", "later", "twice")
    muon, frozen = (
        "optimizer.name=muon" in draw.overrides,
        next(each.removeprefix("train.freeze=") for each in draw.overrides if each.startswith("train.freeze=")),
    )
    targets = {  # trained parameters whose rules can continue on their unpruned part
        "[]": "[matrix,embedding]",
        "[embedding,blocks.0.*]": "[blocks.1.attention.out.weight]",
        "[blocks.1.*]": "[embedding,blocks.0.attention.*.weight]",
        "[blocks.*.attention.*]": "[embedding]",
    }[frozen]
    if muon:
        targets = "[head]" if "embedding" in frozen else "[embedding]"
    if kind is None or (targets == "[head]" and shape.get("tie_embeddings")):
        return
    draw.overrides += [f"pruning.targets={targets}", "pruning.sparsity=0.6"]
    draw.set("pruning.at", {"first": 0, "later": 1, "twice": [1, 2]}[kind])
    if kind != "first":
        draw.overrides.append("pruning.method=random")
        if draw.of(True, False):
            draw.overrides.append("pruning.rewind=0")
    draw.set("pruning.indices", "int32", "bits")


def draw_residency(draw: Draw) -> None:
    """Draws the offload of state, and the part that stays on the device."""
    residency = draw.set("state.offload", "none", "optimizer", "all", "disk")
    fetched = residency in ("all", "disk")
    if fetched and "state.reshard_after_forward=false" in draw.overrides:  # the cache decides which parameters stay
        draw.overrides.remove("state.reshard_after_forward=false")
    if fetched or (
        "state.shard=parameters" in draw.overrides and "state.reshard_after_forward=false" not in draw.overrides
    ):
        draw.set("state.cache", 40, "auto")  # a small cache: 500-element chunks fill up to 60, and a module uses 30
    if residency != "none":
        draw.set("state.resident_fraction", 0.0, 0.4, "auto")
        draw.set("state.update_on", "auto", "device", "host")
    if fetched:
        draw.set("state.accumulate_on", "auto", "device", "host")


def _draw_recomputation(draw: Draw, feed_forward: str, layers: int) -> None:
    kinds = draw.of([], ["block"], ["block"], *combinations_of("norm", "attention", feed_forward))
    if kinds:
        draw.set("recompute", kinds)
        draw.set("recompute_every", *range(1, layers + 1))
        draw.set("recompute_collectives", "keep", "repeat")


def draw_layers(draw: Draw, layers: int, *modules: list[str]) -> None:
    """Draws a range of layers that recomputes nothing, whole blocks or some of `modules`."""
    kinds = draw.of(None, None, [], ["block"], ["block"], *modules)
    if kinds is not None:
        first, last = sorted(draw.of(*range(layers)) for _ in range(2))
        draw.overrides.append(f"parallel.layers=[{{layers: {first}-{last}, recompute: [{', '.join(kinds)}]}}]")


def _draw_degree(draw: Draw, tensor: int, layers: int) -> None:
    """Draws fewer tensor-parallel ranks for the range of `draw_layers`, or for another range."""
    said = dict(override.split("=", 1) for override in draw.overrides)
    microbatches = said.get("parallel.microbatches", "1").replace("auto", "1")
    batch = int(said["train.micro_batch"]) // int(microbatches)
    fewer = [n for n in range(1, tensor) if tensor % n == 0 == batch % (tensor // n)]
    if not fewer or said.get("parallel.sequence") == "false":
        return
    degree, (first, last) = draw.of(None, None, *fewer), sorted(draw.of(*range(layers)) for _ in range(2))
    if degree is None:
        return
    if "parallel.layers" in said:
        draw.overrides.remove(before := f"parallel.layers={said['parallel.layers']}")
        draw.overrides.append(before.replace("}]", f", tensor: {degree}}}]"))
    else:
        draw.overrides.append(f"parallel.layers=[{{layers: {first}-{last}, tensor: {degree}}}]")


def draw_blocks(draw: Draw, ranks: int, together: int) -> None:
    """Draws the pipeline stride: the number of a stage's `ranks` that lie side by side."""
    said = dict(override.split("=", 1) for override in draw.overrides)
    experts = int(said.get("parallel.expert", 1)) * int(said.get("parallel.expert_tensor", 1))
    least = math.lcm(together, experts)
    blocks = [n for n in range(least, ranks + 1, least) if ranks % n == 0]
    if draw.of(True, False):
        draw.set("parallel.pipeline_stride", blocks[0], *blocks)


def combinations_of(*options: str) -> list[list[str]]:
    """Returns all subsets except the empty one."""
    return [list(chosen) for n in range(1, len(options) + 1) for chosen in itertools.combinations(options, n)]
