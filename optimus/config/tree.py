"""The typed tree of a run. Defaults are the recipe of the Optimus paper (section 2.1).

Every field has its description beside its default or, where that is longer, below it; `docs/config.md` is made of them.
Combinations that cannot work are refused here, by validators that name the fields, so that nothing starts before the whole
tree is known to make sense.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from optimus.config.combinations import check_combinations
from optimus.config.parallel import ParallelConfig
from optimus.config.sizes import parse_count, parse_size
from optimus.model.architecture import ModelConfig
from optimus.section import PathText, Section, reported_as_value

_WARMUP_SHARE, _LONGEST_WARMUP = 20, 2500  # of the run, and in steps (the paper)
_COOLDOWN_SHARE = 5  # of the run (Hägele et al. 2024, section 3)


class DataConfig(Section):
    """Where the training tokens are."""

    path: PathText = Field(description="Folder written by `optimus prepare`.")


class ShardRanks(Section):
    """Over how many neighbouring ranks each kind of state is sharded; default: all."""

    model_config = ConfigDict(frozen=True)

    parameters: int | None = Field(None, gt=0)
    """Of a whole parameter, each rank keeps one part in so many; as a card or a node has ranks."""
    gradients: int | None = Field(None, gt=0)
    """The same of gradients: a multiple of that of parameters."""
    optimizer: int | None = Field(None, gt=0)
    """The same of master weights and what the update rule keeps: a multiple of that of gradients."""

    def __str__(self) -> str:
        return ", ".join(str(width or "all") for _, width in self)


class StateConfig(Section):
    """How the model state is held."""

    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """What each rank keeps a part of only: nothing; master weights and moments (ZeRO-1); gradients as well (ZeRO-2);
    parameters as well (ZeRO-3, FSDP)."""
    shard_over: Literal["replicas", "data"] = "replicas"
    """Ranks over which it is sharded: all that hold the same parameters (EPSO), or only those along the data axis of
    the experts, so that what is not expert is held `parallel.expert` times."""
    shard_ranks: Annotated[int, Field(gt=0)] | ShardRanks | None = None
    """Shard over this many neighbouring ranks only and repeat it in the others (HSDP); at most as many as hold the
    same parameters. Those that fewer ranks hold, as experts may be, are sharded over all of these. A number for each
    of parameters, gradients and optimizer nests them: parameters over the ranks of a card, gradients over those of a node,
    the rest over all, so that only what the optimizer shares crosses nodes. Default: all."""
    reshard_after_forward: bool = True
    """With shard: parameters, whether whole parameters are freed after the forward pass and gathered again in the
    backward pass, or kept until the optimizer step."""
    prefetch: int = Field(1, ge=0)
    """With shard: parameters, chunks gathered ahead of their use, in the order of the first step."""
    chunk: int | None = Field(None, gt=0)
    """Elements of a chunk at most. Default: the size that wastes least (Elixir's search)."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients accumulate over microbatches and are reduced over ranks."""
    tile: int = Field(1 << 20, gt=0)
    """Elements that the optimizer updates at a time; fp32 copies exist for one tile only."""
    overlap: bool = True
    """Reduce each chunk's gradients while the backward pass goes on (AxoNN's ORS), not after it. Gathering ahead (OAG)
    is prefetch."""
    coarsening: int | None = Field(None, gt=0)
    """Tiles per all-reduce of a chunk's gradients, several being under way at once (AxoNN). Default: all."""

    @model_validator(mode="after")
    def _sharding(self) -> "StateConfig":
        if self.shard == "none" and (self.shard_ranks is not None or self.shard_over != "replicas"):
            raise ValueError(
                "shard_ranks and shard_over say how the state is shared out, but shard is none: choose a shard"
            )
        if isinstance(self.shard_ranks, ShardRanks):
            _check_nesting(self.shard, self.shard_ranks)
        if self.shard != "parameters" and not self.reshard_after_forward:
            raise ValueError(
                f"reshard_after_forward is about whole parameters, which are always kept with shard {self.shard}: remove it"
            )
        return self


def shard_widths(shard: str, ranks: int | ShardRanks | None) -> tuple[int | None, ...]:
    """Over how many ranks parameters, gradients and the optimizer's state are sharded; None: all that have the same
    parameters."""
    widths = [width for _, width in ranks] if isinstance(ranks, ShardRanks) else [ranks] * 3
    whole = {"none": 3, "optimizer": 2, "gradients": 1, "parameters": 0}[shard]
    return *[1] * whole, *widths[whole:]


def _check_nesting(shard: str, ranks: ShardRanks) -> None:
    for (kind, width), only in zip(ranks, shard_widths(shard, None)):
        if only == 1 and width is not None:
            raise ValueError(f"shard_ranks.{kind}: with shard {shard} every rank keeps all {kind}: remove it")


RuleName = Literal["adamw", "muon", "lion", "schedule-free"]


class OptimizerGroup(Section):
    """Parameters that are updated otherwise than the rest."""

    match: str | list[str]
    """Which: a role (matrix, vector, embedding, head, router or expert), a shell pattern of names as checkpoints have
    them (blocks.0.*), or a list of these."""
    name: RuleName | None = Field(None, description="Their update rule.")
    lr_scale: float | None = Field(None, gt=0, description="What the learning rate is multiplied by; by default 1.")
    weight_decay: float | None = Field(None, ge=0, description="Their weight decay.")

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
    """The update rule."""

    name: RuleName = "adamw"
    """adamw; lion; schedule-free (AdamW of an average of the weights, for a constant learning rate); or muon for matrices
    and experts, the others by adamw."""
    betas: list[float] = Field([0.9, 0.99], min_length=2, max_length=2)
    """Decay of the two moments. Of lion: of its update and of its momentum. Of schedule-free: share of the average in the
    weights that are trained, and decay of the second moment."""
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of muon's momentum.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, times the learning rate.")
    groups: list[OptimizerGroup] = Field([])
    """What is otherwise for some parameters. Of the groups that match a parameter, the last one that gives a key
    decides it."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Largest global gradient norm after the warm-up; null: no limit."""
    clip_during_warmup: bool = Field(False, description="Clip in the warm-up as well (the paper clips only after it).")

    @model_validator(mode="after")
    def _betas(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        return self

    @model_validator(mode="after")
    def _momentum(self) -> "OptimizerConfig":
        default = type(self).model_fields["momentum"].default
        if self.momentum != default and "muon" not in {self.name, *(group.name for group in self.groups)}:
            raise ValueError("momentum is muon's, which updates nothing: remove it, or set name: muon")
        return self


class LrScheduleConfig(Section):
    """The learning rate over the steps."""

    name: Literal["cosine", "constant", "linear", "inverse-sqrt", "wsd"] = "cosine"
    """After a linear warm-up: cosine or linear to the minimum at the last step, constant at the peak, with the inverse
    square root of the step, or wsd (warm-up, stable, decay): constant, then a cooldown to the minimum."""
    peak: float = Field(4e-4, gt=0, description="Learning rate at the end of the warm-up.")
    minimum: float = Field(4e-5, ge=0, description="Learning rate at the last step, and the least of inverse-sqrt.")
    cooldown: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """Shape of the cooldown of wsd; sqrt: 1 - sqrt(share of it that is done)."""
    cooldown_steps: int | None = Field(None, gt=0)
    """Steps of the cooldown of wsd. Default: a fifth of the run."""
    branch_from: PathText | None = None
    """Go on from this full checkpoint of another run of the same data, batch and seed, as a run of its own: one trunk,
    several cooldowns."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of linear increase from zero. Default: a twentieth of the run, at most the paper's 2,500."""

    @model_validator(mode="after")
    def _order(self) -> "LrScheduleConfig":
        if self.name != "constant" and self.minimum > self.peak:
            raise ValueError(f"minimum {self.minimum} is above peak {self.peak}")
        own = sorted({"cooldown", "cooldown_steps"} & self.model_fields_set) if self.name != "wsd" else []
        fields = type(self).model_fields
        if given := [name for name in own if getattr(self, name) != fields[name].default]:
            raise ValueError(f"{given[0]}: a {self.name} schedule has no cooldown: remove it, or set name: wsd")
        return self


class MoeConfig(Section):
    """Losses and routing of the experts, where the model has any."""

    balance_coefficient: float = Field(0.01, ge=0, description="Weight of the load-balancing loss.")
    z_coefficient: float = Field(0.001, ge=0, description="Weight of the router z-loss.")
    bias_rate: float = Field(1e-3, ge=0)
    """What is added after each step to the bias of an expert that was chosen less often than the mean, or taken from it
    where more often. For models with router_bias."""
    routing: Literal["learned", "uniform"] = "learned"
    """uniform: forced uniform routing by the position in the sequence, every expert receives the same number of tokens
    of each sequence (or one more, where the experts do not divide them)."""
    dispatch: Literal["auto", "alltoall", "allgather"] = "alltoall"
    """How tokens reach the experts of other ranks: each once to every rank that holds one of its experts, or all to all
    ranks (the paper's way); auto takes what the collectives of these sizes let expect to be faster."""
    drop_duplicates: bool = True
    """With tensor: each token is sent to its experts by one of the ranks that have it (TED). False, the baseline, sends
    them all: alltoall, expert_tensor equal to tensor and no sequence parallelism only."""
    balance_scope: Literal["microbatch", "global"] = "microbatch"
    """Tokens over which the share of each expert is counted in the balance loss: those of a microbatch on one rank, or
    of the global batch. The latter costs one more forward pass where there are several microbatches."""


class TrainConfig(Section):
    """The run: its length, batches and numbers."""

    output: PathText = Field(description="Run folder; made by this run.")
    steps: int | None = Field(None, gt=0)
    """Length of the run in optimizer steps, which the schedule spans; or give tokens or epochs."""
    tokens: int | None = Field(None, gt=0)
    """Length of the run in tokens, also as 2e9 or 300B: as many steps as it takes to read them."""
    epochs: float | None = Field(None, gt=0)
    """Length of the run in passes over the data: the whole steps that it is enough for."""
    global_batch: int = Field(gt=0, description="Sequences per step, over all ranks and microbatches.")
    micro_batch: int = Field(gt=0, description="Sequences per forward pass on one rank.")
    sequence_length: int = Field(gt=1, description="Tokens per sequence; must equal the prepared data's.")
    seed: int = Field(0, ge=0)
    """Seed of the initial weights and of the order of the data after its first pass."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the computation; master weights and moments are always fp32. auto: bfloat16 on accelerators that have it;
    on CPUs what a few matrix products of the model's sizes find faster when the run starts. A resumed run keeps its
    own."""
    freeze: list[str] = Field([])
    """Parameters that are not trained, as a group's match names them: roles (embedding) or shell patterns of names
    (blocks.0.*). They have no gradient and no state of an optimizer, are written once per run, and keep the initial
    values, rounded to the type of the computation."""
    stop_at: int | None = Field(None, gt=0, description="End after this step; the schedule still spans the whole run.")
    device: str = Field("auto", description="auto, or the name of a torch device such as cpu, cuda, xpu.")

    @model_validator(mode="after")
    def _batches(self) -> "TrainConfig":
        if self.global_batch % self.micro_batch:
            raise ValueError(f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch}")
        given = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "it is missing"
            raise ValueError(f"the length of the run is one of steps, tokens and epochs, but {found}: keep one of them")
        if self.epochs is None and self.stop_at is not None and self.stop_at > self.total_steps:
            raise ValueError(f"stop_at {self.stop_at} is beyond steps {self.total_steps}")
        return self

    @field_validator("tokens", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        whole = isinstance(value, float) and value.is_integer()  # 2e9
        return int(value) if whole else reported_as_value(parse_count, value)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run. Its length must not be given in epochs: `train.reading` knows the data."""
        if self.steps is not None:
            return self.steps
        if self.tokens is None:
            raise ValueError("the steps of a run in epochs depend on the data")
        return -(-self.tokens // (self.global_batch * self.sequence_length))


class CheckpointConfig(Section):
    """When the state is saved, and how."""

    every: int = Field(1000, gt=0, description="Steps between full checkpoints; one more is written at the end.")
    keep: int | None = Field(2, gt=0)
    """Full checkpoints kept, the one being written included (2: dual); null keeps all."""
    weights_every: int | None = Field(None, gt=0)
    """Steps between checkpoints of the weights alone, which are kept for ever."""
    weights_keep: int = Field(1, gt=0)
    """Keep every k-th of those for ever, the others until the next one is written."""
    asynchronous: bool = False
    """Write beside the training, from copies in host memory: of what a rank writes, 4 bytes per parameter and 4 for each
    buffer that its update rule keeps (12 with adamw)."""
    scattered: bool = True
    """Let the ranks that hold the same take turns in writing, so that the nodes share it (DP-scattered). False: the
    first of them writes."""
    initial: PathText | None = None
    """Start from the weights of this checkpoint or Hugging Face folder, with a fresh optimizer."""
    broadcast: Literal["broadcast", "allreduce", "none"] = "broadcast"
    """How the one rank that reads a parameter sends it to the others that hold it. none: each of them reads."""


class EvaluateConfig(Section):
    """Evaluation while training."""

    every: int | None = Field(None, gt=0, description="Steps between measurements of held-out bits per byte.")
    text: PathText | None = Field(None, description="Folder or file of held-out text.")
    max_bytes: int = Field(262_144, gt=0, description="Bytes of that text that are used.")

    @model_validator(mode="after")
    def _text(self) -> "EvaluateConfig":
        if self.every is not None and self.text is None:
            raise ValueError("every is set but text is not: name a file or folder of held-out text")
        return self


class ResilienceConfig(Section):
    """What to do when numbers go wrong."""

    max_skipped: int = Field(3, ge=0)
    """Steps in a row with a non-finite gradient norm that are skipped before the run ends."""
    on_spike: Literal["nothing", "skip", "rollback"] = "nothing"
    """When a step's loss is far above those before: leave its update out, or go back to weights that are kept
    (checkpoint.weights_every)."""
    spike: float = Field(8.0, gt=0)
    """Standard deviations of the last 64 losses above their mean that are a spike."""
    max_rollbacks: int = Field(2, ge=0)
    """How often a run goes back to weights that it has kept, each time further, before it ends; under `optimus launch`
    also when gradients are not finite on several nodes."""
    hang: float = Field(300.0, gt=0)
    """Under `optimus launch`: seconds without a completed step (a checkpoint written at once included) after which the
    rank that keeps the others waiting is sought and its node replaced."""
    slow: float = Field(50.0, gt=0)
    """Per cent by which a rank's own part of a step must persistently exceed that of its peers to be named."""
    exclude_slow: bool = Field(False, description="Under `optimus launch`: replace the node of such a rank.")
    timeout: float = Field(600.0, gt=0)
    """Seconds after which a rank that waits for the others in a collective gives up. Ranks wait like this while another
    one writes a checkpoint, too."""


class CollectivesConfig(Section):
    """How ranks exchange tensors."""

    machine: PathText | None = None
    """Machine file whose measured collectives say which algorithm each uses (`optimus bench collectives --write`); kept with
    the run, as the order of additions depends on it. Default: by rules, from how a group's ranks lie on nodes."""
    partial_sums: Literal["float32", "bfloat16"] = "float32"
    """As what sums over a node's ranks go to other nodes. bfloat16 is half of that, and rounds them once more."""


class ObserveConfig(Section):
    """What is reported, besides metrics.jsonl."""

    log_every: int = Field(10, gt=0, description="Steps between the lines printed where there is no terminal.")
    tensorboard: bool = Field(True, description="Write TensorBoard events.")
    wandb: str | None = Field(None, description="Weights & Biases project; null: off.")
    wandb_entity: str | None = Field(None, description="Its user or team. Default: the one of the key.")
    wandb_name: str | None = Field(None, description="Name of the run there. Default: the name of the run folder.")
    wandb_group: str | None = Field(None, description="Group of runs there to which it belongs.")
    wandb_tags: list[str] = Field([], description="Its tags there.")
    trace: int | None = Field(None, gt=0)
    """Profile this step: each rank writes trace-rank-N.json, for chrome://tracing or Perfetto."""
    timeline: int | None = Field(None, gt=0)
    """Write to timeline.json what the pipeline did when in this step, for `optimus schedule --measured`."""


class TuningConfig(Section):
    """What is measured on this machine before it is chosen."""

    matmul: bool = True
    """Time every larger matrix product in the first step with its operands as they come and transposed, and keep the
    fastest (AxoNN)."""
    cache: PathText | None = Field("~/.cache/optimus", validate_default=True)
    """Folder where what was measured is kept, per chip; null: measure in every run."""


Recomputable = Literal["norm", "attention", "mlp", "moe", "block", "auto"]


class RunConfig(Section):
    """Everything about a run."""

    model: ModelConfig = Field(description="A preset's name, a Hugging Face folder, or the mapping below.")
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    moe: MoeConfig = MoeConfig()
    parallel: ParallelConfig = ParallelConfig()
    state: StateConfig = StateConfig()
    recompute: list[Recomputable] = Field([])
    """Modules whose activations are recomputed in the backward pass: any of norm, attention, mlp or moe; or block,
    whole blocks; or auto, whatever fits recompute_budget with the least recomputation."""
    recompute_every: int = Field(1, gt=0)
    """Recompute those modules of every n-th block only; with block, keep the input of every n-th block only (AxoNN's
    ac)."""
    recompute_collectives: Literal["keep", "repeat"] = "keep"
    """What recomputation does about collectives: keep their results from the first time (CAC), or repeat them, which
    takes less memory."""
    recompute_budget: int | None = Field(None, gt=0)
    """With auto: bytes of activations at most, of one microbatch on one rank, also as 512MB or 40GiB. Default: nine
    tenths of what the device has free after the state."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    collectives: CollectivesConfig = CollectivesConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    observe: ObserveConfig = ObserveConfig()
    tuning: TuningConfig = Field(default_factory=TuningConfig)  # asks for the home of the user: not at import

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up, by default a share of the run."""
        given = self.lr_schedule.warmup_steps
        return min(_LONGEST_WARMUP, self.train.total_steps // _WARMUP_SHARE) if given is None else given

    @property
    def cooldown_steps(self) -> int:
        """Steps of the cooldown, by default a share of the run; none where the schedule has none."""
        if self.lr_schedule.name != "wsd":
            return 0
        return self.lr_schedule.cooldown_steps or max(1, self.train.total_steps // _COOLDOWN_SHARE)

    @model_validator(mode="after")
    def _combinations(self) -> "RunConfig":
        check_combinations(self)
        return self

    @field_validator("recompute", mode="before")
    @classmethod
    def _one_word(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("recompute_budget", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return reported_as_value(parse_size, value)
