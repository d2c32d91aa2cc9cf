"""Checks values of the configuration against each other."""

import math

from optimus.config.phases import phases_of
from optimus.config.tree import RunConfig
from optimus.optim.losses import CROSS_ENTROPY


def check_combinations(config: RunConfig) -> None:
    """Raises `ValueError` for values that contradict each other in the run or in a phase."""
    _check_sections(config)
    if config.phases:
        check_phases(config)


def check_phases(config: RunConfig) -> None:
    """Raises `ValueError` for values that contradict each other in a phase, or in a run without phases."""
    for phase in phases_of(config):
        try:
            _check_sections(phase.config)
        except ValueError as error:
            raise ValueError(f"phases.{phase.number}: {error}" if config.phases else str(error)) from None


def _check_sections(config: RunConfig) -> None:
    if config.model.experts is None and "moe" in config.model_fields_set:
        why = "the model has its author's experts and router" if config.model.has_own_experts else "the model is dense"
        raise ValueError(f"moe: {why}: remove the section moe")
    if not config.model.router_bias and config.moe.non_default("bias_rate"):
        raise ValueError("moe.bias_rate: the routers of the model have no bias: remove it")
    for check in (
        _check_limits,
        _check_gradients,
        _check_teacher,
        _check_loss,
        _check_schedule,
        _check_pruning,
        _check_recomputation,
        _check_layers,
        _check_experts,
        _check_shapes,
        _check_pipeline,
    ):
        check(config)
    data, train = config.parallel.data, config.train
    if data != "auto" and train.global_batch % (data * train.micro_batch):
        raise ValueError(
            f"train.global_batch {train.global_batch} is not a multiple of parallel.data {data} times train.micro_batch "
            f"{train.micro_batch}: change one of them"
        )


def _check_multiple(name: str, size: int, axis: str, parts: int, cure: str | None = None) -> None:
    if size % parts:
        cure = f": set {axis} to a divisor of {size}" if cure is None else cure
        raise ValueError(f"{name} {size} is not a multiple of {axis} {parts}{cure}")


def _check_limits(config: RunConfig) -> None:
    limits = config.model.limits
    parallel, documents = config.parallel, config.data.documents
    outputs, inputs = parallel.grid
    chosen = {"recompute": {*config.recompute}}
    chosen |= {f"parallel.layers.{at}.recompute": {*(each.recompute or ())} for at, each in enumerate(parallel.layers)}

    def recomputed(modules: set[str]) -> tuple[str, bool]:
        return next(((key, True) for key, kinds in chosen.items() if kinds & modules), ("recompute", False))

    used = {
        "sequence": ("parallel.sequence", parallel.sequence),
        "inputs": ("parallel.tensor", inputs > 1),
        "tensor": ("parallel.tensor", outputs * inputs > 1),
        "pipeline": ("parallel.pipeline", parallel.pipeline > 1),
        "context": ("parallel.context", parallel.context > 1),
        "vocabulary": ("parallel.vocabulary", parallel.vocabulary),
        "documents": ("data.documents", documents == "mask"),
        "modules": recomputed({"norm", "attention", "mlp", "moe"}),
        "moe": recomputed({"moe"}),
        "segments": ("recompute_every", config.recompute_every > 1 and "block" in config.recompute),
        "initial values": ("checkpoint.load_path", config.checkpoint.load_path is None),
    }
    for option, reason in limits.items():
        key, is_used = used.get(option, (f"model.{getattr(config.model, 'source', 'family')}", True))
        if is_used:
            raise ValueError(f"{key}: {reason}")


def _check_gradients(config: RunConfig) -> None:
    if config.state.gradient_dtype == "float16" != config.train.precision:
        raise ValueError(
            f"state.gradient_dtype: float16 needs the loss scaling of train.precision: float16, but train.precision is "
            f"{config.train.precision}: set state.gradient_dtype to float32 or bfloat16"
        )


def _check_teacher(config: RunConfig) -> None:
    outputs, inputs = config.parallel.grid
    key = "tensor" if outputs * inputs > 1 else "vocabulary" if config.parallel.vocabulary else None
    if config.train.teacher is not None and key is not None:
        raise ValueError(
            f"train.teacher needs whole logits, but parallel.{key} shards the vocabulary: remove one of them"
        )


def _check_loss(config: RunConfig) -> None:
    if config.train.loss.name != CROSS_ENTROPY and config.parallel.vocabulary:
        raise ValueError(
            f"train.loss {config.train.loss.name} needs whole logits on the last stage, but parallel.vocabulary shards the "
            "vocabulary over the stages: set it to false"
        )


def _check_schedule(config: RunConfig) -> None:
    lr_schedule, train = config.lr_schedule, config.train
    known = train.epochs is None
    if lr_schedule.cooldown_steps and known and lr_schedule.cooldown_steps + config.warmup_steps > train.total_steps:
        raise ValueError(
            f"lr_schedule.cooldown_steps {lr_schedule.cooldown_steps} and the {config.warmup_steps} steps of the warm-up "
            f"exceed the run's {train.total_steps} steps: lower one of them"
        )
    if lr_schedule.branch_from and config.checkpoint.load_path:
        raise ValueError("lr_schedule.branch_from and checkpoint.load_path exclude each other: remove one of them")


def _check_pruning(config: RunConfig) -> None:
    pruning = config.pruning
    if pruning is None:
        return
    if config.train.lora_rank is not None:
        raise ValueError(
            "train.lora_rank: a run that prunes cannot train low-rank factors, which depend on the masks: prune first, then "
            "train the factors in a new run from the pruned checkpoint (checkpoint.load_path)"
        )
    if config.train.epochs is None:
        # In a phase with its own `lr_schedule`, `total_steps` is the length of the phase.
        steps = sum(phase.steps or 0 for phase in config.phases) or config.train.total_steps
        if pruning.at[-1] >= steps:
            raise ValueError(f"pruning.at {pruning.at[-1]} is not before the end of the run, step {steps}: lower it")
    every, keep = config.checkpoint.weights_every, config.checkpoint.weights_keep
    if pruning.rewind and (every is None or pruning.rewind % (every * keep)):
        raise ValueError(
            f"pruning.rewind {pruning.rewind}: no checkpoint keeps the weights of this step: set checkpoint.weights_every x "
            f"weights_keep to a divisor of {pruning.rewind}, or pruning.rewind to 0"
        )


def _check_recomputation(config: RunConfig) -> None:
    sparse = config.model.sparse_layers()
    absent = {"moe": not sparse, "mlp": not config.model.has_dense_layers}
    for kind in config.recompute:
        if absent.get(kind):
            model = "model whose blocks all have experts" if sparse else "dense model"
            raise ValueError(f"recompute: a {model} has no module '{kind}': remove it")
    alone = next((kind for kind in config.recompute if kind in ("block", "auto")), None)
    if alone is not None and len(config.recompute) > 1:
        raise ValueError(f"recompute: {alone} includes all modules: remove the others")
    if alone == "auto" and any(each.recompute is not None for each in config.parallel.layers):
        raise ValueError(
            "recompute: auto chooses for all layers: remove the recompute of parallel.layers, or set recompute"
        )
    if config.recompute_every > 1 and (not config.recompute or alone == "auto"):
        cure = "recompute auto chooses the value: remove it" if alone else "nothing is recomputed: set recompute"
        raise ValueError(f"recompute_every {config.recompute_every}: {cure}")
    if config.recompute_every > config.model.layers:
        raise ValueError(
            f"recompute_every {config.recompute_every} is more than model.layers {config.model.layers}: lower it"
        )
    if config.recompute_budget is not None and alone != "auto":
        raise ValueError("recompute_budget needs recompute: auto: set recompute, or remove recompute_budget")


def _check_layers(config: RunConfig) -> None:
    model = config.model
    for at, each in enumerate(config.parallel.layers):
        key = f"parallel.layers.{at}"
        if each.range.stop > model.layers:
            raise ValueError(f"{key}: there is no layer {each.range.stop - 1}: the layers are 0 to {model.layers - 1}")
        if each.tensor is not None:
            _check_tensor(config, f"{key}.tensor {each.tensor}", each.tensor)
        recompute = each.recompute or ()
        if "block" in recompute and len(recompute) > 1:
            raise ValueError(f"{key}.recompute: block includes all modules: remove the others")
        sparse = sum(model.experts_of(layer) > 0 for layer in each.range)
        for kind, absent in (("moe", not sparse), ("mlp", sparse == len(each.range))):
            if absent and kind in recompute:
                raise ValueError(f"{key}.recompute: there is no module '{kind}' in layers {each.layers}: remove it")


def _check_tensor(config: RunConfig, key: str, ranks: int) -> None:
    """Raises `ValueError` if layers cannot have `ranks` tensor-parallel ranks."""
    parallel, batch = config.parallel, config.train.micro_batch
    outputs, inputs = parallel.grid
    if outputs % ranks:
        raise ValueError(f"{key} does not divide parallel.tensor {outputs}: choose a divisor")
    if inputs > 1:
        raise ValueError(
            f"{key}: parallel.tensor {parallel.tensor} also shards the columns between layers: set parallel.tensor to a "
            f"number, such as {outputs * inputs}"
        )
    if ranks < outputs and not parallel.splits_sequence:
        cure = config.model.limits.get("sequence", "set parallel.sequence to true")
        raise ValueError(f"{key} needs sequence parallelism: {cure}")
    if batch % (outputs // ranks):
        raise ValueError(
            f"{key} divides the sequences of a microbatch among {outputs // ranks} groups of tensor-parallel ranks, but "
            f"train.micro_batch is {batch}: set it to a multiple of {outputs // ranks}"
        )


def _check_experts(config: RunConfig) -> None:
    model, parallel = config.model, config.parallel
    if model.experts is None:
        if parallel.expert > 1 and (why := model.refuse_expert_ranks(parallel.expert)) is not None:
            raise ValueError(f"parallel.expert {parallel.expert}: {why}")
        if parallel.expert_tensor not in (1, model.expert_tensor(1, math.prod(parallel.grid))):
            why = "parallel.tensor divides each expert" if model.has_own_experts else "the model is dense"
            raise ValueError(f"parallel.expert_tensor {parallel.expert_tensor}: {why}: remove it")
        return
    for experts in model.expert_counts:
        _check_multiple("model.experts", experts, "parallel.expert", parallel.expert, cure="")
    name = "intermediate" if "expert_intermediate" in model.derived else "expert_intermediate"
    _check_multiple(f"model.{name}", model.expert_intermediate, "parallel.expert_tensor", parallel.expert_tensor)
    outputs, inputs = parallel.grid
    baseline = config.moe.dispatch == "alltoall" and inputs == 1 and not parallel.splits_sequence
    if not config.moe.drop_duplicates and not (baseline and parallel.expert_tensor == outputs > 1):
        raise ValueError(
            "moe.drop_duplicates: false needs moe.dispatch: alltoall, parallel.sequence: false, a number above 1 as "
            "parallel.tensor, and parallel.expert_tensor equal to parallel.tensor"
        )


_ABOUT_PIPELINES = (
    "stages_per_rank",
    "layers_per_stage",
    "schedule",
    "warmup_factor",
    "microbatches",
    "executor",
    "max_in_flight",
    "vocabulary",
    "vocabulary_algorithm",
    "pipeline_stride",
)


def _check_pipeline(config: RunConfig) -> None:
    parallel, layers = config.parallel, config.model.layers
    if parallel.pipeline == 1:
        for name in parallel.non_default(*_ABOUT_PIPELINES):
            raise ValueError(f"parallel.{name} applies to a pipeline only, but parallel.pipeline is 1: remove it")
        if config.observe.timeline is not None:
            raise ValueError(
                "observe.timeline applies to a pipeline only, but parallel.pipeline is 1: remove it (or use profile_step)"
            )
        return
    stages = parallel.stages
    if parallel.executor == "message-driven":
        caps = parallel.max_in_flight
        if isinstance(caps, list) and (len(caps) != stages or min(caps) < 1):
            raise ValueError(
                f"parallel.max_in_flight {caps} must be a number, or a list of {stages} numbers above 0, one per stage"
            )
        for name in parallel.non_default("schedule", "warmup_factor"):
            raise ValueError(
                f"parallel.{name} applies to executor: scheduled only, but executor is message-driven: "
                "remove it (max_in_flight limits the live activations)"
            )
        if parallel.vocabulary:
            raise ValueError(
                "parallel.vocabulary applies to executor: scheduled only, but executor is message-driven: "
                "remove one of them"
            )
    elif parallel.max_in_flight is not None:
        raise ValueError("parallel.max_in_flight needs executor: message-driven: set executor, or remove max_in_flight")
    if not parallel.vocabulary:
        for name in parallel.non_default("vocabulary_algorithm"):
            raise ValueError(f"parallel.{name} needs parallel.vocabulary: true: set vocabulary, or remove {name}")
    if stages > layers:
        raise ValueError(
            f"parallel.pipeline {parallel.pipeline} x stages_per_rank {parallel.stages_per_rank} makes {stages} stages, "
            f"but the model has {layers} layers: use at most one stage per layer"
        )
    blocks = parallel.layers_per_stage
    if blocks is not None and (len(blocks) != stages or sum(blocks) != layers or min(blocks) < 1):
        raise ValueError(
            f"parallel.layers_per_stage {blocks} must be {stages} numbers above 0, one per stage, that add up to "
            f"model.layers {layers}"
        )


def _check_shapes(config: RunConfig) -> None:
    model, parallel = config.model, config.parallel
    outputs, inputs = parallel.grid
    for name, size, side in model.sharded_sizes():
        _check_multiple(name, size, ("parallel.tensor", "the inputs of parallel.tensor")[side], (outputs, inputs)[side])
    aligned = 4 if config.train.precision == "float32" else 8  # elements in 16 bytes
    if (reason := model.refuse_ways(outputs, aligned)) is not None:
        raise ValueError(f"parallel.tensor: {reason}")
    divided = parallel.vocabulary and parallel.pipeline > 1
    parts, by = outputs * (parallel.pipeline if divided else 1), "parallel.tensor" + " x pipeline" * divided
    if model.vocab < parts:
        raise ValueError(
            f"model.vocab {model.vocab} is less than {by} {parts}: every rank needs a token of the vocabulary"
        )
    context, cp = config.train.sequence_length, parallel.context
    if context > (model.learned_positions or context):
        raise ValueError(
            f"train.sequence_length {context} is more than {model.positions_key} {model.learned_positions}: lower it"
        )
    pieces = 2 * cp if parallel.context_method == "ring" and cp > 1 else cp
    if context % pieces:
        raise ValueError(
            f"train.sequence_length {context} is not a multiple of {pieces}, which parallel.context {cp} needs "
            f"({parallel.context_method}): set it to {max(1, context // pieces) * pieces}, for example"
        )
    if parallel.context_method == "ulysses" and (model.kv_heads // outputs) % cp:
        heads = "heads" if model.kv_heads == model.heads else "kv_heads"
        raise ValueError(
            f"parallel.context {cp} with context_method: ulysses shards {heads}, but a rank has {model.kv_heads // outputs} "
            "of them: set parallel.context to a divisor, or context_method to ring"
        )
    rows, ranks = config.train.micro_batch * context // cp, outputs * inputs
    if rows % ranks and (parallel.splits_sequence or model.experts is not None):
        raise ValueError(
            f"the {rows} tokens of a microbatch (train.micro_batch {config.train.micro_batch} x train.sequence_length "
            f"{context} / parallel.context {cp}) cannot be split evenly over the {ranks} ranks of parallel.tensor: "
            "change one of them"
        )
