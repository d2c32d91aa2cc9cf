"""The typed configuration tree of a run. The defaults of training follow the recipe of the Optimus paper (section
2.1)."""

import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from optimus.config.data import Count, DataConfig, TokensPath
from optimus.config.parallel import ParallelConfig
from optimus.config.pruning import PruningConfig
from optimus.config.sizes import parse_size
from optimus.errors import UserError, nearest
from optimus.model.architecture import Architecture
from optimus.optim.losses import LOSSES
from optimus.optim.rules import RULES
from optimus.optim.schedule import SCHEDULES
from optimus.plugins import NameIn
from optimus.section import PathOrUrl, PathText, Section, reported_as_value

_WARMUP_SHARE, _LONGEST_WARMUP = 20, 2500  # divisor of the run's steps, and maximum number of steps (the paper)
_COOLDOWN_SHARE = 5  # divisor of the run's steps (Hägele et al. 2024, section 3)


def _size_text(text: str) -> str:
    try:
        size = parse_size(text)
    except UserError:
        size = 0
    if not size or not text.strip()[-1].isalpha():
        raise ValueError(f"{text!r} is no size: write auto, a number of chunks, or a size and its unit, such as 2GiB")
    return text


SizeText = Annotated[str, AfterValidator(_size_text)]


class ShardRanks(Section):
    """Numbers of neighbouring ranks over which parameters, gradients and optimizer state are sharded; default: all."""

    model_config = ConfigDict(frozen=True)

    parameters: int | None = Field(None, gt=0)
    """Ranks over which parameters are sharded."""
    gradients: int | None = Field(None, gt=0)
    """Ranks over which gradients are sharded: a multiple of `parameters`."""
    optimizer: int | None = Field(None, gt=0)
    """Ranks over which master weights and the update rule's buffers are sharded: a multiple of `gradients`."""

    def __str__(self) -> str:
        return ", ".join(str(width or "all") for _, width in self)


class StateConfig(Section):
    """The sharding, storage and communication of the model state."""

    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """Sharded state. none: nothing (DDP); optimizer: master weights and moments (ZeRO-1); gradients: gradients as well
    (ZeRO-2); parameters: parameters as well (ZeRO-3, FSDP)."""
    shard_over: Literal["replicas", "data"] = "replicas"
    """Ranks over which state is sharded. replicas: all ranks with the same parameters (EPSO). data: the replicas
    with the same experts."""
    shard_ranks: Annotated[int, Field(gt=0)] | ShardRanks | None = None
    """Shard within groups of this many neighbouring ranks, and replicate between the groups (HSDP). Numbers for
    `parameters`, `gradients` and `optimizer` nest the groups. Default: all ranks."""
    reshard_after_forward: bool = True
    """With `shard: parameters`. true: free gathered parameters after the forward pass; false: keep gathered parameters
    until the optimizer step."""
    prefetch: int = Field(1, ge=0)
    """With `shard: parameters`, `offload: all` or `offload: disk`. Number of chunks that are all-gathered or fetched
    ahead of their use."""
    chunk: int | None = Field(None, gt=0)
    """Largest size of a chunk (bucket) of several parameters, in elements. A larger parameter has its own chunk.
    Default: the size that leaves the fewest elements empty (Elixir's search)."""
    gradient_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of gradient accumulation over microbatches and of gradient reduction over ranks. float16 needs
    train.precision: float16, whose loss scaling also skips steps in which these sums overflow."""
    chunk_sizes: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """Smallest and largest chunk size of Elixir's search, in elements, also as 4e6 or 4M. The search finds the best of
    all sizes. Default: 240 sizes from 4,194,304 to an eighth of the rank's parameters, at most 67,108,864."""
    unsharded_below: int = Field(0, ge=0)
    """With sharded or offloaded state. Parameters of the same ranks that have fewer elements in all are one chunk, which
    is neither sharded nor offloaded (Elixir). 0: none."""
    tile: int = Field(1 << 20, gt=0)
    """Elements that the optimizer updates at a time, which limit its temporary memory (TED). AdamW in Triton takes no
    such memory, and updates a chunk at once."""
    overlap: bool = True
    """Overlap gradient reduction with the backward pass (AxoNN's ORS) and, where nothing is clipped, with the update."""
    all_reduce_tiles: int | None = Field(None, gt=0)
    """Number of tiles in each all-reduce of a chunk's gradients (AxoNN). Default: all tiles of the chunk. Where nothing
    is clipped (`optimizer.clip_norm`), these tiles are updated as soon as they are reduced."""
    offload: Literal["none", "optimizer", "all", "disk"] = "none"
    """Storage of the state. optimizer: master weights and moments on the host (ZeRO-Offload); all: parameters and
    gradients too, with parameters fetched on use (Elixir); disk: master weights and moments on a disk, parameters and
    gradients on the host (ZeRO-Infinity). none: everything on the device."""
    cache: Annotated[int, Field(gt=0)] | Literal["auto"] | SizeText | None = None
    """Number of unsharded chunks of parameters on the device at a time, for parameters that are gathered or fetched on
    use (Belady's rule), or their memory, such as 2GiB. auto: by the free device memory. Default: auto with
    `offload: all` or `offload: disk`, otherwise no cache."""
    resident_fraction: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 0.0
    """With `offload`: fraction of the elements whose state stays on the device. auto: by the free device memory."""
    update_on: Literal["auto", "device", "host"] = "auto"
    """Location of the update of offloaded state. device: tile by tile through the device (AxoNN); host: on the CPU;
    auto: the faster one in a short measurement, which is cached (tuning.cache)."""
    accumulate_on: Literal["auto", "device", "host"] = "auto"
    """With `offload: all` or `offload: disk`: location of gradient accumulation over microbatches. host: each
    microbatch reduces its gradients and sends the gradients to the host; auto: device, if the gradients fit."""
    pin_memory: bool = True
    """With `offload`, on accelerators. Pin the host memory of the state: copies to and from the device are faster and
    overlap, but the memory is not for other programs."""
    disk: PathText | None = None
    """With `offload: disk`: folder for the file of the state. Default: train.output."""

    @model_validator(mode="after")
    def _sharding(self) -> "StateConfig":
        if self.shard == "none" and (self.shard_ranks is not None or self.shard_over != "replicas"):
            raise ValueError(
                "shard_ranks and shard_over apply to sharded state, but shard is none: set shard, or remove them"
            )
        if isinstance(self.shard_ranks, ShardRanks):
            _check_nesting(self.shard, self.shard_ranks)
        if self.shard != "parameters" and not self.reshard_after_forward:
            raise ValueError(
                f"reshard_after_forward applies to shard: parameters only, but shard is {self.shard}: remove it"
            )
        self._check_chunks()
        self._check_residency()
        return self

    def _check_chunks(self) -> None:
        if self.chunk_sizes is not None:
            smallest, largest = self.chunk_sizes
            if self.chunk is not None:
                raise ValueError(
                    "chunk_sizes is the range of the search for a chunk size, but chunk is given: remove one of them"
                )
            if smallest > largest:
                raise ValueError(
                    f"chunk_sizes: the smallest size {smallest:,} is larger than the largest {largest:,}: swap them"
                )
        if self.unsharded_below and self.shard == "none" and self.offload == "none":
            raise ValueError(
                "unsharded_below applies to sharded or offloaded state, but shard and offload are none: remove it"
            )

    def _check_residency(self) -> None:
        on_use = self.shard == "parameters" or self.offload in ("all", "disk")
        if self.cache is not None and not on_use:
            raise ValueError(
                "cache applies to parameters that are gathered or fetched on use: choose shard: parameters or offload: all"
            )
        if not self.reshard_after_forward and (self.cache is not None or self.offload in ("all", "disk")):
            raise ValueError(
                "reshard_after_forward: false excludes a cache of parameters (cache, or offload: all or disk): remove it"
            )
        # Resolved runs have the value "device" for state that is on the device.
        wrong = self.non_default("resident_fraction", "update_on", "pin_memory") if self.offload == "none" else []
        wrong += self.non_default("accumulate_on") if self.offload in ("none", "optimizer") else []
        wrong = [key for key in wrong if getattr(self, key) != "device"]
        wrong += ["disk"] if self.disk is not None and self.offload != "disk" else []
        if wrong:
            raise ValueError(
                f"{wrong[0]} does not apply to offload: {self.offload}: change offload, or remove {wrong[0]}"
            )


def shard_widths(shard: str, ranks: int | ShardRanks | None) -> tuple[int | None, ...]:
    """Returns the numbers of ranks that shard parameters, gradients and optimizer state; 1: unsharded; None: all."""
    widths = [width for _, width in ranks] if isinstance(ranks, ShardRanks) else [ranks] * 3
    unsharded = {"none": 3, "optimizer": 2, "gradients": 1, "parameters": 0}[shard]
    return *[1] * unsharded, *widths[unsharded:]


def _check_nesting(shard: str, ranks: ShardRanks) -> None:
    for (kind, width), only in zip(ranks, shard_widths(shard, None)):
        if only == 1 and width is not None:
            raise ValueError(
                f"shard_ranks.{kind} does not apply to shard: {shard}, which replicates the {kind}: remove it"
            )


RuleName = Annotated[str, NameIn(RULES, object_of="optimizer")]


class OptimizerGroup(Section):
    """Parameters with separate update settings."""

    match: str | list[str]
    """Parameters of the group: a role (matrix, vector, embedding, head, router, expert or factor), a shell pattern of
    names in checkpoints (blocks.0.*), or a list of roles and patterns."""
    name: RuleName | None = Field(None, description="Update rule of the group.")
    lr_scale: float | None = Field(None, gt=0, description="Factor of the learning rate. Default: 1.")
    weight_decay: float | None = Field(None, ge=0, description="Weight decay of the group.")

    @property
    def matches(self) -> list[str]:
        """`match` as a list."""
        return [self.match] if isinstance(self.match, str) else self.match

    @model_validator(mode="after")
    def _says_something(self) -> "OptimizerGroup":
        if not self.matches:
            raise ValueError("match is empty: name a role or a pattern, or remove the group")
        if self.name is None and self.lr_scale is None and self.weight_decay is None:
            raise ValueError("the group changes nothing: give name, lr_scale or weight_decay, or remove it")
        return self


class OptimizerConfig(Section):
    """The update rule and its hyperparameters, for all parameters or for groups of parameters."""

    name: RuleName = "adamw"
    """adamw; lion; schedule-free (AdamW with averaged weights, for a constant learning rate); muon for matrices and
    experts, adamw for all other parameters."""
    betas: list[float] = Field([0.9, 0.99], min_length=2, max_length=2)
    """Decay of the two moments. lion: weight of the momentum in the update, and decay of the momentum. schedule-free:
    weight of the average in the training weights, and decay of the second moment."""
    eps: float = Field(1e-8, gt=0, description="Term added to the square root of the second moment.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of muon's momentum.")
    options: dict[str, float] = Field({}, description="Hyperparameters of an update rule from a plugin, by name.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, multiplied by the learning rate.")
    groups: list[OptimizerGroup] = Field([])
    """Other settings for some parameters. Later groups take precedence."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Maximum global gradient norm, enforced after the warm-up; null disables clipping."""
    clip_during_warmup: bool = Field(False, description="Clip in the warm-up as well (the paper clips only after it).")

    reptile_every: int | None = Field(None, gt=0)
    """Steps between the outer updates of Reptile, which keep the fraction reptile_step of the parameters' change since
    the previous outer update. Default: never."""
    reptile_step: float = Field(0.1, gt=0, le=1, description="With reptile_every: fraction of the change that is kept.")

    @property
    def rules(self) -> list[str]:
        """The configured update rules, without repetitions: `name` first, then the rules of the groups."""
        return [*dict.fromkeys([self.name, *(group.name for group in self.groups if group.name is not None)])]

    @model_validator(mode="after")
    def _check_rules(self) -> "OptimizerConfig":
        rules = self.rules
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        if self.reptile_every is None and self.non_default("reptile_step"):
            raise ValueError("reptile_step needs reptile_every: set reptile_every, or remove reptile_step")
        if self.reptile_every is not None and "schedule-free" in rules:
            raise ValueError("reptile_every: schedule-free averages its weights already: choose another rule")
        if self.non_default("momentum") and "muon" not in rules:
            raise ValueError("momentum applies to muon only, which updates no parameters: remove it, or set name: muon")
        return self


def _check_options(options: Mapping[str, float], known: Mapping[str, float], row: str) -> None:
    if unknown := [name for name in options if name not in known]:
        cure = nearest(unknown[0], known) if known else "remove it"
        raise ValueError(f"options.{unknown[0]}: {row} has no such parameter: {cure}")


class LrScheduleConfig(Section):
    """The learning rate over the steps."""

    name: Annotated[str, NameIn(SCHEDULES)] = "cosine"
    """Decay after a linear warm-up: cosine or linear to the minimum at the last step; constant; inverse-sqrt of the
    step; wsd (warm-up, stable, decay): constant, then a cooldown to the minimum."""
    lr: float = Field(4e-4, gt=0, description="Learning rate at the end of the warm-up.")
    min_lr: float = Field(4e-5, ge=0, description="Learning rate at the last step; the lower bound of inverse-sqrt.")
    cooldown: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """Shape of the wsd cooldown; sqrt: 1 - sqrt(completed share)."""
    cooldown_steps: int | None = Field(None, gt=0)
    """Steps of the wsd cooldown. Default: a fifth of the run."""
    branch_from: PathText | None = None
    """Continue from this full checkpoint of another run with the same data, batch and seed, as a separate run."""
    options: dict[str, float] = Field({}, description="Parameters of a schedule from a plugin, by name.")
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of the linear warm-up from zero. Default: a twentieth of the run, at most 2,500 as in the paper."""

    @model_validator(mode="after")
    def _order(self) -> "LrScheduleConfig":
        if self.name != "constant" and self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}: lower it")
        if self.name != "wsd" and (given := self.non_default("cooldown", "cooldown_steps")):
            raise ValueError(f"{given[0]}: a {self.name} schedule has no cooldown: remove it, or set name: wsd")
        _check_options(self.options, SCHEDULES[self.name].options, f"the {self.name} schedule")
        return self


class MoeConfig(Section):
    """Losses and routing of experts."""

    balance_coefficient: float = Field(0.01, ge=0, description="Weight of the load-balancing loss.")
    z_coefficient: float = Field(0.001, ge=0, description="Weight of the router z-loss.")
    bias_rate: float = Field(1e-3, ge=0)
    """For models with router_bias: change of an expert's bias after each step, up if underloaded, down if
    overloaded."""
    force_balanced: bool = False
    """Forced uniform routing by position in the sequence; with data.documents: mask, by position in the document."""
    dispatch: Literal["auto", "alltoall", "allgather"] = "alltoall"
    """Token dispatcher. alltoall: each token is sent to the ranks that hold its experts. allgather: all tokens are sent
    to all ranks of the expert-parallel group (as in the paper). auto: the faster dispatcher by prediction or, with
    collectives.machine, by measurement."""
    drop_duplicates: bool = True
    """With tensor parallelism: only one of the ranks that hold a token sends the token to its experts (TED). false: all
    ranks send the token; needs alltoall, parallel.expert_tensor equal to parallel.tensor and no sequence
    parallelism."""
    balance_scope: Literal["microbatch", "global"] = "microbatch"
    """Tokens over which the balance loss counts the load of each expert: a microbatch of one data-parallel rank, or the
    global batch. With several microbatches, `global` costs one more forward pass of each microbatch."""


class TeacherConfig(Section):
    """Frozen teacher models for distillation. A checkpoint or a list of checkpoints may replace the section."""

    checkpoints: list[PathText] = Field(min_length=1)
    """Checkpoints or runs with the tokenizer and vocabulary of this run. Several teachers form an ensemble, with
    averaged logits."""
    weight: float = Field(1.0, gt=0)
    """Weight of the distillation loss: the divergence KL(teacher || model) per predicted token, times the squared
    temperature, is added to the loss."""
    temperature: float = Field(1.0, gt=0, description="Divisor of the logits of teacher and model.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        named = [value] if isinstance(value, str) else value
        return {"checkpoints": named} if isinstance(named, list) else named


class LossConfig(Section):
    """The loss of predicted tokens. A name may replace the section. Validation measures the cross-entropy."""

    name: Annotated[str, NameIn(LOSSES)] = "cross-entropy"
    """cross-entropy; label-smoothing: cross-entropy against a mix of the token and the uniform distribution; z-loss:
    cross-entropy plus coefficient times the squared logarithm of the softmax's normaliser; or a loss of a plugin."""
    options: dict[str, float] = Field({}, description="Parameters: smoothing (0.1), coefficient (1e-4), or a plugin's.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "LossConfig":
        _check_options(self.options, LOSSES[self.name].options, f"the loss {self.name}")
        return self


class LossScaleConfig(Section):
    """The scale of the loss for train.precision: float16, by the rules of torch.amp.GradScaler. The loss is multiplied
    by the scale before the backward pass, and the gradients are divided by it before the update. A step whose gradients
    overflow applies no update and lowers the scale."""

    initial: float = Field(65536.0, gt=0, allow_inf_nan=False, description="Scale of the first step.")
    growth_factor: float = Field(2.0, gt=1, allow_inf_nan=False)
    """Factor of the scale after growth_interval consecutive steps without an overflow."""
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="Factor of the scale after an overflow.")
    growth_interval: int = Field(
        2000, gt=0, description="Consecutive steps without an overflow before the scale grows."
    )
    minimum: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Smallest scale. A step that overflows at this scale counts as a step with gradients that are not finite
    (resilience.max_skipped)."""

    @model_validator(mode="after")
    def _order(self) -> "LossScaleConfig":
        if self.minimum > self.initial:
            raise ValueError(f"minimum {self.minimum:g} is above initial {self.initial:g}: lower it")
        # The loss, the scale and the scale's inverse are numbers of fp32.
        if self.initial > 2.0**127 or self.minimum < 2.0**-126:
            beyond = f"initial {self.initial:g}" if self.initial > 2.0**127 else f"minimum {self.minimum:g}"
            raise ValueError(
                f"{beyond} is beyond the range of float32: give scales from 2^-126 (1.2e-38) to 2^127 (1.7e38)"
            )
        return self


class TrainConfig(Section):
    """The run: its length, batches and precision."""

    output: PathText = Field(description="Run folder; the run creates it.")
    steps: Count | None = None
    """Length of the run in optimizer steps, also as 1e4 or 10K; or give `tokens` or `epochs`."""
    tokens: Count | None = None
    """Length of the run in tokens, also as 2e9 or 300B; rounded up to whole steps."""
    epochs: float | None = Field(None, gt=0)
    """Length of the run in passes over the data; rounded down to whole steps."""
    global_batch: int = Field(gt=0, description="Sequences per step, over all ranks and microbatches.")
    micro_batch: int = Field(gt=0, description="Sequences per forward pass on one rank.")
    sequence_length: int = Field(gt=1, description="Tokens per sequence: those of the prepared data, or a divisor.")
    seed: int = Field(0, ge=0)
    """Seed of the initial weights, of random pruning, and of the data order after the first pass. Also the seed of the
    order of token files, map-style datasets and replayed data."""
    precision: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the computation. auto: bfloat16 on devices that compute in bfloat16, including CPUs with AVX512-BF16,
    AMX-BF16 or SVE BF16, otherwise float32; a resumed run keeps its precision. float16: with dynamic loss scaling, for
    devices without bfloat16 (V100)."""
    loss_scale: LossScaleConfig = Field(
        default_factory=LossScaleConfig, description="With precision: float16: the scale of the loss."
    )
    freeze: list[str] = Field([])
    """Parameters that are not trained: roles (embedding) or shell patterns of names (blocks.0.*), as in
    optimizer.groups. Frozen parameters keep their initial values, rounded to the type of the computation."""
    lora_rank: int | None = Field(None, gt=0)
    """Rank of low-rank factors (LoRA) for the projections that train.freeze matches. The run trains the factors in
    place of the projections. Pruned weights stay pruned."""
    loss: LossConfig = Field(default_factory=LossConfig, description="Loss of predicted tokens, or its name.")
    teacher: TeacherConfig | None = None
    """Teacher models, whose probabilities the model also learns (distillation). Ranks with the last stage hold the
    whole teachers."""
    hooks: list[str] = Field([])
    """Hooks that the run calls around its steps: each as package.module.Class, or by the name of a plugin's hook."""
    data_cache: PathText = Field("~/.cache/optimus/data", validate_default=True)
    """Folder for local copies of data at URLs, and for decompressed MDS shards."""
    stop_at: Count | None = Field(
        None, description="Stop after this step; the learning-rate schedule still spans the whole run."
    )
    device: str = Field(
        "auto",
        description="auto, or a torch device: cpu, cuda, xpu. With an index (cuda:0), all ranks of a node share it.",
    )

    @model_validator(mode="after")
    def _batches(self) -> "TrainConfig":
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch}: change one of them"
            )
        if self.precision != "float16" and self.loss_scale.non_default(*LossScaleConfig.model_fields):
            raise ValueError(
                f"loss_scale applies to precision: float16 only, but precision is {self.precision}: remove it"
            )
        if len(given := self.non_default("steps", "tokens", "epochs")) > 1:
            raise ValueError(_length(f"{' and '.join(given)} are given: keep one of them"))
        if given and self.epochs is None and self.stop_at is not None and self.stop_at > self.total_steps:
            raise ValueError(f"stop_at {self.stop_at} is beyond the run's {self.total_steps} steps: lower it")
        return self

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run. Raises `ValueError` without `steps` and `tokens`."""
        if self.steps is not None:
            return self.steps
        if self.tokens is None:
            raise ValueError("the number of steps of a run in epochs depends on the data")
        return -(-self.tokens // (self.global_batch * self.sequence_length))

    def microbatches(self, data_ranks: int) -> int:
        """Returns the number of microbatches of a step on each of `data_ranks` data-parallel ranks."""
        return max(1, self.global_batch // (data_ranks * self.micro_batch))


def _length(found: str) -> str:
    return f"the length of the run is one of steps, tokens and epochs, but {found}"


class PhaseConfig(Section):
    """A stretch of steps of a run. Default of data, sequence length, batch and schedule: the value of the run."""

    name: str | None = Field(None, description="Name in messages and checkpoints. Default: phase-N.")
    steps: Count | None = Field(None, description="Length of the phase in steps; or give tokens.")
    tokens: Count | None = Field(
        None, description="Length of the phase in tokens, also as 2e9 or 300B; a multiple of a step's tokens."
    )
    data: DataConfig | None = Field(None, description="Data of the phase, in the form of `data`.")
    replay: float | None = Field(None, gt=0, lt=1)
    """Share of the phase that repeats data of the earlier phases."""
    sequence_length: int | None = Field(None, gt=1, description="Tokens per sequence.")
    global_batch: int | None = Field(None, gt=0, description="Sequences per step.")
    lr_schedule: LrScheduleConfig | None = None
    """A separate schedule over the phase's steps. After the first phase, warmup_steps is 0 by default; the defaults of
    the other keys are the values of the run's schedule. Default: the run's schedule continues."""


def _resolved(phase: PhaseConfig, number: int, run: "RunConfig") -> PhaseConfig:
    where, train = f"phases.{number}", run.train
    if (phase.steps is None) == (phase.tokens is None):
        raise ValueError(f"{where}: give the length of the phase as either steps or tokens")
    length, batch = phase.sequence_length or train.sequence_length, phase.global_batch or train.global_batch
    if batch % train.micro_batch:
        raise ValueError(
            f"{where}.global_batch {batch} is not a multiple of train.micro_batch {train.micro_batch}: change one of them"
        )
    steps, remainder = (phase.steps, 0) if phase.tokens is None else divmod(phase.tokens, batch * length)
    if remainder or not steps:
        raise ValueError(
            f"{where}.tokens {phase.tokens} is not a multiple of a step of {batch} x {length} tokens: give "
            f"{max(1, steps or 0) * batch * length}, or steps"
        )
    if phase.replay is not None and not number:
        raise ValueError(f"{where}.replay: nothing has been read before the first phase: remove it")
    if phase.lr_schedule is not None and phase.lr_schedule.branch_from:
        raise ValueError(f"{where}.lr_schedule.branch_from: a run branches at its start: remove it")
    data = phase.data or run.data
    if "documents" not in data.model_fields_set:
        data = data.model_copy(update={"documents": run.data.documents})
    values = {"sequence_length": length, "global_batch": batch, "steps": steps, "tokens": None, "data": data}
    return phase.model_copy(update=values)


def _completed(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Completes schedules of phases from the run's schedule, and missing data of the run from the first phase."""
    phases = raw.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return raw
    run = {key: value for key, value in (raw.get("lr_schedule") or {}).items() if key != "branch_from"}
    completed = [
        phase | {"lr_schedule": run | ({"warmup_steps": 0} if number else {}) | phase["lr_schedule"]}
        if isinstance(phase.get("lr_schedule"), dict)
        else phase
        for number, phase in enumerate(phases)
    ]
    data = [phase["data"] for phase in phases[:1] if "data" in phase and "data" not in raw]
    return {**raw, "phases": completed, **({"data": data[0]} if data else {})}


class CheckpointConfig(Section):
    """The saving and loading of checkpoints."""

    every: int = Field(1000, gt=0, description="Steps between full checkpoints; one more is written at the end.")
    keep: int | None = Field(2, gt=0)
    """Number of full checkpoints to keep, including the one being written; null keeps all."""
    weights_every: int | None = Field(None, gt=0)
    """Steps between checkpoints of the weights alone."""
    weights_keep: int = Field(1, gt=0)
    """Keep every k-th weights checkpoint for ever, and the latest one."""
    asynchronous: bool = False
    """Write in the background, from copies in host memory (with adamw, 12 bytes per parameter that the rank writes)."""
    scattered: bool = True
    """Spread writing over the replicas of a shard (DP-scattered). false: the first rank of each replica group
    writes."""
    load_path: PathText | None = None
    """Start from the weights of this checkpoint or Hugging Face folder, with a fresh optimizer."""
    copy_to: PathOrUrl | None = None
    """URL, such as s3://bucket/run, or folder for copies of complete checkpoints. A run whose folder is empty or lost
    resumes from the copies with --resume."""
    broadcast: Literal["broadcast", "allreduce", "none"] = "broadcast"
    """Collective that sends a parameter from the rank that reads it to its replicas. none: every rank reads for
    itself."""

    @property
    def weights_interval(self) -> int:
        """The number of steps between the weights checkpoints that stay for ever, if `weights_every` is set."""
        return (self.weights_every or 1) * self.weights_keep


class EvaluateConfig(Section):
    """Prompts and tasks during training."""

    prompts: list[str] = Field([])
    """Prompts that the model continues by at most 64 tokens, when a `validation` set is measured and after the last
    step. samples.jsonl in the run folder and the report show the continuations. An empty prompt begins a document."""
    tasks: list[str] = Field([], description="Tasks to evaluate during training, as with `optimus evaluate --tasks`.")
    task_data: PathText | None = Field(None, description="Folder of the tasks' data.")
    tasks_every: int | None = Field(
        None, gt=0, description="Steps between evaluations of the tasks; the last step has one too."
    )
    tasks_limit: int = Field(200, gt=0, description="Maximum number of documents per task.")

    @model_validator(mode="after")
    def _together(self) -> "EvaluateConfig":
        if len({bool(self.tasks), self.task_data is not None, self.tasks_every is not None}) > 1:
            raise ValueError("tasks, task_data and tasks_every go together: set all of them or none")
        return self


class ValidationConfig(Section):
    """A set of validation text. The metrics of a set are its bits per byte and, if the set has a name, its loss."""

    name: str | None = None
    """Name in the metrics bits_per_byte/NAME and loss/NAME. One set may have no name."""
    path: TokensPath | None = None
    """Folder written by `optimus prepare`, or token files of another trainer as in `data.sources`, cut into rows of
    `train.sequence_length` tokens in random order; read with the `data.documents` of the training. Or give text."""
    text: PathOrUrl | None = Field(None, description="File, folder or glob of text.")
    every: int | None = Field(None, gt=0, description="Steps between validations. Default: after the last step only.")
    tokens: Count = Field(1 << 17)
    """Number of tokens to use, also as 2e6 or 1M. Default with `max_bytes`: the tokens of these bytes."""
    max_bytes: int | None = Field(None, gt=0, description="With text: maximum number of bytes to use.")

    @model_validator(mode="after")
    def _text(self) -> "ValidationConfig":
        if (self.path is None) == (self.text is None):
            raise ValueError(
                f"{self.name or 'a set'}: give one of path (prepared data or token files) and text (files)"
            )
        if self.max_bytes is not None:
            if self.text is None:
                raise ValueError(
                    f"{self.name or 'a set'}: max_bytes applies to text only: give tokens for prepared data"
                )
            if "tokens" not in self.model_fields_set:  # at most a token per byte, and one for the end of each document
                self.tokens = 2 * self.max_bytes
        return self


def _exit_codes(table: Any) -> Any:
    if not isinstance(table, Mapping):
        return table
    for key in map(str, table):
        if not (1 <= int(key) <= 255 if key.isdecimal() else key in signal.Signals.__members__):
            named = nearest(key, signal.Signals.__members__) if key.startswith("SIG") else "give 1 to 255, or SIGKILL"
            raise ValueError(f"{key} is no exit code and no name of a signal: {named}")
    return {str(key): value for key, value in table.items()}


class ResilienceConfig(Section):
    """Handling of non-finite numbers, loss spikes, and hanging or slow ranks."""

    max_skipped: int = Field(3, ge=0)
    """Maximum number of consecutive steps whose loss, or squared gradient norm after clipping, is not finite in fp32.
    One more ends the run. Also the maximum number of consecutive spikes; after one more, the run accepts any loss until
    it has 16 new ones."""
    on_spike: Literal["nothing", "skip", "rollback"] = "nothing"
    """Action on a loss above the spike threshold: nothing, skip the step's update, or roll back to saved weights
    (checkpoint.weights_every)."""
    spike: float = Field(8.0, gt=0)
    """Spike threshold, in standard deviations above the mean of at most 64 previous losses without a spike."""
    max_rollbacks: int = Field(2, ge=0)
    """Maximum number of rollbacks to saved weights after loss spikes or, under `optimus launch`, non-finite
    gradients."""
    hang: float = Field(300.0, gt=0)
    """Under `optimus launch`: seconds without a completed step after which the run restarts, if possible with a spare
    in place of the culprit rank's node."""
    slow: float = Field(50.0, gt=0)
    """Report a rank whose step time, without waiting, stays longer than normal by more than this percentage."""
    exclude_slow: bool = Field(False, description="Under `optimus launch`: replace the node of a slow rank.")
    timeout: float = Field(600.0, gt=0)
    """Seconds after which a rank that waits in a collective gives up."""
    exit_codes: Annotated[dict[str, Literal["hardware", "software"]], BeforeValidator(_exit_codes)] = Field({})
    """Under `optimus launch`: further exit codes of ranks, or names of signals, and what has crashed, such as
    {SIGKILL: hardware, 42: hardware}. A spare replaces a node at the first crash of its hardware and at the second of its
    software. Hardware by default: SIGSEGV, SIGBUS, SIGILL, 71, 74, 78."""


class CollectivesConfig(Section):
    """Algorithms of collectives, and the type of partial sums between nodes."""

    machine: PathText | None = None
    """Machine file with measured collectives (`optimus bench collectives --write`), which determine the algorithms.
    Default: fixed rules."""
    partial_sums: Literal["float32", "bfloat16"] = "float32"
    """Type of a node's partial sums when sent to other nodes."""


class ObserveConfig(Section):
    """Reports in addition to metrics.jsonl."""

    log_every: int = Field(
        10,
        gt=0,
        description="Steps between measurements of times and memory, and between printed lines without a terminal.",
    )
    verbose: bool = Field(
        False, description="Also print the placement of ranks and the form (NN, NT or TN) of each matmul."
    )
    tensorboard: bool = Field(True, description="Write TensorBoard events.")
    sinks: list[str] = Field([], description="Metric sinks of plugins, by name.")
    report: bool = Field(True, description="Write report.html, as `optimus report` does, when the run ends.")
    notify: str | None = None
    """Receiver of messages about the run's end, failure and restarts: a webhook (an http or https URL) gets JSON; a
    command gets the same JSON on its standard input."""
    mlflow: str | None = Field(None, description="MLflow experiment, on the server in MLFLOW_TRACKING_URI; null: off.")
    wandb: str | None = Field(None, description="Weights & Biases project; null: off.")
    wandb_entity: str | None = Field(None, description="Weights & Biases user or team. Default: that of the API key.")
    wandb_name: str | None = Field(
        None, description="Name of the run in Weights & Biases. Default: the name of the run folder."
    )
    wandb_group: str | None = Field(None, description="Group of the run in Weights & Biases.")
    wandb_tags: list[str] = Field([], description="Tags of the run in Weights & Biases.")
    profile_step: int | None = Field(None, gt=0)
    """Profile this step: trace.json.gz contains the operations of the ranks, for Perfetto, and trace-rank-N.json the
    operations of rank N."""
    timeline: int | None = Field(None, gt=0)
    """Write the pipeline's timeline of this step to timeline.json, for `optimus schedule --measured`."""


class TuningConfig(Section):
    """Choice of implementations by measurements on this machine."""

    matmul: bool = True
    """Time large matmuls of the first step in the forms NN, NT and TN, and use a clearly faster form than the default
    (AxoNN)."""
    cache: PathText | None = Field("~/.cache/optimus", validate_default=True)
    """Folder for the measurements of each chip; null: measure in every run. Delete a chip's file to repeat its
    measurements."""


Recomputable = Literal["norm", "attention", "mlp", "moe", "block", "auto"]


def _placed(node: Any, path: Sequence[str], value: Any) -> Any:
    if not path:
        return value
    if isinstance(node, list):
        number = int(path[0])
        return [*node[:number], _placed(node[number], path[1:], value), *node[number + 1 :]]
    return node.model_copy(update={path[0]: _placed(getattr(node, path[0]), path[1:], value)})


class RunConfig(Section):
    """The configuration of a run."""

    model: Architecture = Field(description="A preset, a Hugging Face folder, or the mapping below.")
    data: DataConfig = Field(description="Default: the data of the first phase.")
    train: TrainConfig
    phases: list[PhaseConfig] = Field([])
    """Stretches of the run with other data, sequence lengths, batches or learning rates. The length of the run is the
    sum of the phases' lengths."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    moe: MoeConfig = MoeConfig()
    parallel: ParallelConfig = ParallelConfig()
    state: StateConfig = StateConfig()
    pruning: PruningConfig | None = None
    """Prune parameters during the run; null: none."""
    recompute: Annotated[list[Recomputable], BeforeValidator(lambda x: [x] if isinstance(x, str) else x)] = Field([])
    """Activation recomputation (checkpointing) in the backward pass: any of `norm`, `attention`, `mlp` and `moe`; or
    `block`, whole blocks; or `auto`, the least that fits `recompute_budget`."""
    recompute_every: int = Field(1, gt=0)
    """Recompute the modules of every n-th block only; with `recompute: block`, save the input of every n-th block only
    (AxoNN's ac)."""
    recompute_collectives: Literal["keep", "repeat"] = "keep"
    """Collectives in recomputation. keep: cache the results (CAC); repeat: run the collectives again."""
    recompute_budget: Annotated[int, Field(gt=0), BeforeValidator(partial(reported_as_value, parse_size))] | None = None
    """With `recompute: auto`. Maximum peak bytes of the activations of one microbatch on one rank, also as 512MB or
    40GiB. Default: by the free device memory."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    validation: list[ValidationConfig] = Field([], description="Validation sets, which are measured during training.")
    collectives: CollectivesConfig = CollectivesConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    observe: ObserveConfig = ObserveConfig()
    tuning: TuningConfig = Field(default_factory=TuningConfig)  # the default needs the user's home folder
    plugins: list[str] = Field([])
    """Modules or entry points (group optimus.plugins) that add update rules, schedules, model families and so on."""

    def changed(self, **sections: Mapping[str, Any]) -> "RunConfig":
        """Returns a copy with other values in sections, unchecked: `config.changed(train={"steps": 5})`."""
        update = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=update)

    def decided(self, values: Mapping[str, Any]) -> "RunConfig":
        """Returns a copy with new values, by dotted keys, unchecked: `config.decided({"train.steps": 5})`."""
        config = self
        for key, value in values.items():
            config = _placed(config, key.split("."), value)
        return config

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "RunConfig":
        """Copies the configuration. Raises `RuntimeError` when the configuration is locked."""
        if self.locked:
            raise RuntimeError(
                f"the configuration of a resolved run is locked: cannot change {', '.join(update or ())}"
            )
        return super().model_copy(update=update, deep=deep)

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up; see `LrScheduleConfig.warmup_steps`."""
        given = self.lr_schedule.warmup_steps
        return min(_LONGEST_WARMUP, self.train.total_steps // _WARMUP_SHARE) if given is None else given

    @property
    def cooldown_steps(self) -> int:
        """Steps of the cooldown; 0 unless the schedule is wsd."""
        if self.lr_schedule.name != "wsd":
            return 0
        return self.lr_schedule.cooldown_steps or max(1, self.train.total_steps // _COOLDOWN_SHARE)

    @model_validator(mode="before")
    @classmethod
    def _phases(cls, raw: Any) -> Any:
        return _completed(raw) if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _checked_together(self) -> "RunConfig":
        train = self.train
        if self.phases:
            self.phases = [_resolved(phase, number, self) for number, phase in enumerate(self.phases)]
            steps = sum(phase.steps or 0 for phase in self.phases)
            said = train.non_default("tokens", "epochs", "steps")
            if said and train.steps != steps:
                raise ValueError(
                    f"train.{said[0]}: the length of the run is the {steps} steps of its phases: remove it"
                )
            if train.stop_at is not None and train.stop_at > steps:
                raise ValueError(f"train.stop_at {train.stop_at} is beyond the {steps} steps of the phases: lower it")
            self.train = train.model_copy(update={"steps": steps})
        elif not train.non_default("steps", "tokens", "epochs"):
            raise ValueError(f"train: {_length('it is missing: give one of them')}")
        if self.parallel.sequence is None and "sequence" in self.model.limits:
            self.parallel = self.parallel.model_copy(update={"sequence": False})
        names = [each.name for each in self.validation]
        if twice := [name for name in names if names.count(name) > 1]:
            which = "have no name" if twice[0] is None else f"are named {twice[0]}"
            raise ValueError(f"validation: two sets {which}: give each a different name")
        return self
