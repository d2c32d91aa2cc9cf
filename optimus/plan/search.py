"""All settings that a model, a machine and a number of ranks allow, and the fastest of those that fit.

A block's time depends on how it is divided (tensor, context and expert ranks, microbatch), not on the pipeline or on how the
state is held. So every such division is timed once, and a step in any pipeline is bounded from below by arithmetic: the
slowest stage, as often as there are microbatches, and what the schedule leaves idle. Settings are then taken in the order
of that bound, and for each the least recomputation and the sharding that fit are found, until no bound is below the best
found: what is left out could not be among them.

Left out beforehand:
- tensor-parallel groups that reach over a node, expert-parallel ones that share nodes unevenly;
- GPipe (1F1B takes as long and keeps less), and microbatches that are no power of two;
- context-parallel parts of fewer than 512 tokens;
- sharding over other ranks than all replicas, or those of a node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import NamedTuple

from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.plan.architecture import Architecture
from optimus.plan.machine import Machine, load_machine, machine_names
from optimus.plan.memory import Memory, Rank, activations_of, memory_of, ranks_of, room_of, state_of
from optimus.plan.own import OwnActivations, blocks_of, kinds_of
from optimus.plan.setting import Schedule, Setting
from optimus.plan.software import Software, load_software
from optimus.plan.step import StepTime, step_time
from optimus.plan.work import Passes, Work

_SMALLEST_PART = 512  # tokens of a sequence on a context-parallel rank
_LARGEST_MICROBATCH = 16
_MOST_STAGES_PER_RANK = 4


@dataclass(frozen=True)
class Question:
    """What is to be trained on what."""

    model: ModelConfig
    machine: Machine
    ranks: int
    global_batch: int
    context: int
    precision: str = "bf16"
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        """Raises `UserError` for numbers that cannot be."""
        node = self.machine.ranks_per_node
        if self.ranks > node and self.ranks % node:
            low = self.ranks // node * node
            raise UserError(
                f"{self.ranks} ranks do not fill nodes of {node} ({self.machine.name}): take {low} or {low + node}"
            )
        self.machine.rates(self.precision)

    @cached_property
    def architecture(self) -> Architecture:
        """The model by its shapes."""
        return Architecture.of(self.model)

    def blocks(self, stages: int) -> tuple[int, ...]:
        """Of each stage, as a run would cut them."""
        if stages not in self._cuts:
            self._cuts[stages] = blocks_of(self.model, stages)
        return self._cuts[stages]

    @cached_property
    def _cuts(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def software(self) -> Software:
        """This library."""
        return load_software("optimus")


@dataclass(frozen=True)
class Plan:
    """A setting, and what it would take."""

    question: Question
    setting: Setting
    step: StepTime
    memory: Memory

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.setting.tokens / self.step.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs to those that the ranks could do at their peak."""
        flops = self.question.architecture.flops_per_token(self.setting.context)
        peak = self.question.machine.rates(self.setting.precision).peak
        return flops * self.tokens_per_second / self.setting.mesh.size / peak


class _Division(NamedTuple):
    """How a block is divided, and the seconds of a microbatch in its parts."""

    tp_out: int
    tp_in: int
    cp: int
    ep: int
    etp: int
    micro_batch: int
    block: float  # forward and backward
    forward: tuple[float, float, float]  # of that, the forward passes of norms, attention and the feed-forward part
    head: float
    embedding: float
    work: Work


class _Base(NamedTuple):
    """A division in a pipeline. A step takes `bound` seconds at least."""

    bound: float
    division: _Division
    pp: int
    dp: int
    microbatches: int
    schedule: Schedule
    stages_per_rank: int

    def setting(self, question: Question) -> Setting:
        """As the rest of the planner knows it."""
        division = self.division
        mesh = Mesh(
            pp=self.pp,
            dp=self.dp,
            cp=division.cp,
            tp=division.tp_out * division.tp_in,
            ep=division.ep,
            etp=division.etp,
            tp_in=division.tp_in,
            ranks_per_node=question.machine.ranks_per_node,
        )
        return Setting(
            mesh,
            context=question.context,
            micro_batch=division.micro_batch,
            microbatches=self.microbatches,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            sequence=mesh.tp > 1,
            precision=question.precision,
            imbalance=question.imbalance,
            blocks=question.blocks(self.pp * self.stages_per_rank),
        )


def predict(question: Question, setting: Setting, work: Work | None = None) -> Plan:
    """What a step in `setting` takes, and its memory. `work` knows another setting that divides a block likewise."""
    return Plan(question, setting, _step(question, setting, work), memory_in(question, setting))


def _step(question: Question, setting: Setting, work: Work | None = None, *, simulated: bool = True) -> StepTime:
    kinds = kinds_of(question.model, setting)
    return step_time(
        question.architecture,
        setting,
        question.machine,
        question.software,
        kinds,
        simulated=simulated,
        work=work,
    )


def memory_in(question: Question, setting: Setting) -> Memory:
    """Of the fullest rank of the pipeline."""
    kinds, kept = kinds_of(question.model, setting), OwnActivations(question.model, setting)
    return memory_of(question.architecture, setting, question.software, kinds, kept)


def search(question: Question, best: int = 10) -> list[Plan]:
    """The `best` divisions of the ranks, the fastest first, each with the fastest schedule, microbatch, sharding and
    recomputation that fit.

    Raises `UserError` when nothing divides the batch, or fits: it then says what the smallest machine would be.
    """
    bases = sorted(_bases(question), key=lambda base: base.bound)
    if not bases:
        raise _no_division(question)
    found: dict[tuple[int, ...], Plan] = {}
    fitting = _Fitting(question)
    limit = float("inf")  # what a plan must be faster than to be among the best
    for base in bases:
        if base.bound >= limit:
            break
        key = (base.pp, *base.division[:5])
        most = min(limit, found[key].step.seconds) if key in found else limit
        plan = fitting.fastest(base, most) if base.bound < most else None
        if plan is not None:
            found[key] = plan
            times = sorted(plan.step.seconds for plan in found.values())
            limit = times[best - 1] if len(times) >= best else limit
    if not found:
        raise _too_large(question, [base.setting(question) for base in bases])
    return sorted(found.values(), key=lambda plan: plan.step.seconds)[:best]


# ---- What there is to try ----


def _bases(question: Question) -> Iterator[_Base]:
    divisions = list(_divisions(question))
    for pp in (n for n in _divisors(question.ranks) if n <= question.model.layers):
        ranks = question.ranks // pp
        for division in divisions:
            data, left = divmod(ranks, division.tp_out * division.tp_in * division.cp)
            if left or not data or ranks % (division.ep * division.etp):
                continue
            microbatches, left = divmod(question.global_batch, data * division.micro_batch)
            if left or not microbatches:
                continue
            for schedule, per_rank in _schedules(question.model.layers, pp, microbatches):
                bound = _bound(question, division, pp, microbatches, schedule, per_rank)
                yield _Base(bound, division, pp, data, microbatches, schedule, per_rank)


def _divisions(question: Question) -> Iterator[_Division]:
    """Ways to divide a block that the model and the node allow, timed."""
    model, node = question.model, min(question.ranks, question.machine.ranks_per_node)
    within = [size for size in _divisors(node) if question.ranks % size == 0]
    for out in (n for n in within if not model.heads % n and not model.vocab % n and _columns(model, n)):
        for inner in (n for n in within if not node % (out * n) and not model.hidden % n):
            for cp in _divisors(question.ranks):
                if question.context % (2 * cp) or (cp > 1 and question.context // cp < _SMALLEST_PART):
                    continue
                for ep, etp in _expert_groups(question, out * inner):
                    for micro_batch in _microbatches(question):
                        if micro_batch * question.context // cp % (out * inner) == 0:
                            yield _timed(question, out, inner, cp, ep, etp, micro_batch)


def _columns(model: ModelConfig, parts: int) -> bool:
    return model.experts is not None or model.intermediate % parts == 0


def _expert_groups(question: Question, tp: int) -> list[tuple[int, int]]:
    """Expert-parallel ranks and those that divide an expert, all on some of a node's ranks, or on whole nodes."""
    model, node = question.model, min(question.ranks, question.machine.ranks_per_node)
    if model.experts is None:
        return [(1, 1)]
    return [
        (ep, etp)
        for ep in _divisors(model.experts)
        for etp in _divisors(tp)
        if question.ranks % (ep * etp) == 0
        and (node % (ep * etp) == 0 or ep * etp % node == 0)
        and model.intermediate % etp == 0
    ]


def _microbatches(question: Question) -> list[int]:
    sizes = [1 << power for power in range(_LARGEST_MICROBATCH.bit_length())]
    return [size for size in sizes if question.global_batch % size == 0 and size <= _LARGEST_MICROBATCH]


def _schedules(layers: int, pp: int, microbatches: int) -> Iterator[tuple[Schedule, int]]:
    yield "1f1b", 1
    if pp == 1:
        return
    yield "zb-h1", 1
    if 2 * pp <= layers:
        yield "zbv", 2
    for per_rank in range(2, _MOST_STAGES_PER_RANK + 1):
        if per_rank * pp <= layers and microbatches % pp == 0:
            yield "interleaved-1f1b", per_rank


def _timed(question: Question, out: int, inner: int, cp: int, ep: int, etp: int, micro_batch: int) -> _Division:
    tp = out * inner
    data = max(1, ep * etp // tp // cp + (ep * etp) % (tp * cp))  # any with which the mesh can be
    while data * cp * tp % (ep * etp):
        data += 1
    mesh = Mesh(dp=data, cp=cp, tp=tp, ep=ep, etp=etp, tp_in=inner, ranks_per_node=question.machine.ranks_per_node)
    setting = Setting(
        mesh,
        question.context,
        micro_batch,
        1,
        sequence=tp > 1,
        precision=question.precision,
        imbalance=question.imbalance,
    )
    work = Work(question.architecture, setting, question.machine, question.software)
    feed_forward = work.moe if question.model.experts else work.mlp
    parts = [work.norm, work.norm, work.attention, feed_forward]
    return _Division(
        out, inner, cp, ep, etp, micro_batch,
        block=sum(map(_seconds, parts)),
        forward=(2 * work.norm.forward.compute, work.attention.forward.compute, feed_forward.forward.compute),
        head=_seconds(work.head),
        embedding=_seconds(work.embedding),
        work=work,
    )  # fmt: skip


def _seconds(passes: Passes) -> float:
    return sum(terms.seconds for terms in passes)


def _bound(question: Question, division: _Division, pp: int, m: int, schedule: Schedule, per_rank: int) -> float:
    """A step takes no less: the busiest rank's microbatches, and what a pipeline leaves idle at its ends."""
    layers = question.model.layers
    if pp == 1:
        return m * (layers * division.block + division.head + division.embedding)
    last = question.blocks(pp * per_rank)[-1]
    busiest = max(-(-layers // pp) * division.block, last * division.block + division.head)
    passing = sum(division.forward) if schedule == "zb-h1" else division.block  # it fills the end of a step
    before = 0 if schedule == "zbv" else sum(question.blocks(pp * per_rank)[: pp - 1])
    return max(m * busiest, m * (last * division.block + division.head) + before * passing)


# ---- What fits ----


class _Fitting:
    """Finds what fits, and remembers what settings have in common."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._ranks: dict[tuple[int | str, ...], list[Rank]] = {}
        self._kept: dict[tuple[_Division, frozenset[str]], OwnActivations] = {}
        self._modules = ("norm", "attention", "moe" if question.model.experts else "mlp")
        self._recomputations = _recomputations(question.model)

    def fastest(self, base: _Base, limit: float) -> Plan | None:
        """The fastest way to hold the state and to recompute with which `base` fits, if it takes less than `limit`."""
        question, best = self._question, None
        setting = base.setting(question)
        room = room_of(question.machine) - question.software.fixed
        taken: dict[frozenset[str], list[float]] = {}
        for held in _sharded(question, setting):
            states = state_of(self._ranks_of(setting), kinds_of(question.model, held), held, question.software)
            recompute = self._least(base, setting, [room - sum(parts.values()) for parts in states], taken)
            if recompute is None or base.bound + self._again(base, setting, recompute) >= limit:
                continue
            held = replace(held, recompute=recompute)
            if _step(question, held, base.division.work, simulated=False).seconds < limit:
                plan = predict(question, held, base.division.work)
                if plan.step.seconds < limit:
                    best, limit = plan, plan.step.seconds
        return best

    def _ranks_of(self, setting: Setting) -> list[Rank]:
        key = setting.schedule, setting.mesh.pp, setting.stages_per_rank, setting.microbatches
        if key not in self._ranks:
            self._ranks[key] = ranks_of(self._question.architecture, setting)
        return self._ranks[key]

    def _again(self, base: _Base, setting: Setting, recompute: frozenset[str]) -> float:
        """What recomputation adds to the bound, as no rank has fewer blocks than that."""
        modules = self._modules if "block" in recompute else recompute
        seconds = sum(base.division.forward[self._modules.index(kind)] for kind in modules)
        fewest = min(rank.counts["dense"] + rank.counts["sparse"] for rank in self._ranks_of(setting))
        return base.microbatches * fewest * seconds

    def _least(
        self, base: _Base, setting: Setting, room: Sequence[float], taken: dict[frozenset[str], list[float]]
    ) -> frozenset[str] | None:
        """What to recompute, the cheapest, so that activations take no more than `room` of each rank; None if too little."""

        def fits(recompute: frozenset[str]) -> bool:
            if recompute not in taken:
                parts = activations_of(
                    self._ranks_of(setting), self._activations(base, setting, recompute), self._question.software
                )
                taken[recompute] = [sum(each.values()) for each in parts]
            return all(size <= free for size, free in zip(taken[recompute], room))

        if min(room) <= 0 or not any(map(fits, self._recomputations[-2:])):  # those that leave least
            return None
        return next(filter(fits, self._recomputations))

    def _activations(self, base: _Base, setting: Setting, recompute: frozenset[str]) -> OwnActivations:
        key = base.division, recompute
        if key not in self._kept:
            self._kept[key] = OwnActivations(self._question.model, replace(setting, recompute=recompute))
        return self._kept[key]


def _sharded(question: Question, setting: Setting) -> Iterator[Setting]:
    """All ways to hold the state: the levels, over all replicas and, of whole parameters, over those of a node."""
    if setting.mesh.size // setting.mesh.pp // setting.mesh.tp == 1:
        yield setting
        return
    yield replace(setting, shard="none")
    yield replace(setting, shard="optimizer")
    if setting.microbatches > 1:
        yield replace(setting, shard="gradients")
    yield replace(setting, shard="parameters")
    node = question.machine.ranks_per_node // setting.mesh.tp
    if 1 < node < setting.mesh.dp and setting.mesh.dp % node == 0:
        yield replace(setting, shard="parameters", shard_ranks=node)


def _recomputations(model: ModelConfig) -> Sequence[frozenset[str]]:
    """Sets of modules, those that cost least first."""
    modules = ("norm", "attention", "moe" if model.experts else "mlp")
    cost = {"norm": 1, "attention": 4, "mlp": 6, "moe": 6}
    sets = [frozenset(kinds) for kinds in chain(*(combinations(modules, count) for count in range(4)))]
    return [*sorted(sets, key=lambda kinds: sum(cost[kind] for kind in kinds)), frozenset({"block"})]


# ---- When there is nothing ----


def _no_division(question: Question) -> UserError:
    return UserError(
        f"no layout divides a global batch of {question.global_batch} sequences over {question.ranks} ranks: with a batch "
        f"that is a multiple of {question.ranks}, all do"
    )


def _too_large(question: Question, settings: Sequence[Setting]) -> UserError:
    """Names the least memory, and the smallest machine of those that are known."""
    tightest = [replace(setting, recompute=frozenset({"block"}), shard="parameters") for setting in settings]
    least = min((memory_in(question, setting) for setting in tightest), key=lambda memory: memory.total)
    rooms = sorted({(load_machine(name).memory, name) for name in machine_names()})
    enough = [f"{name} ({size / 1e9:.0f} GB)" for size, name in rooms if least.total <= size * 0.92]
    cure = f"the smallest machine that has it is {enough[0]}" if enough else "no known machine has it"
    return UserError(
        f"nothing fits: a rank of {question.machine.name} has {question.machine.memory / 1e9:.1f} GB, and the least that "
        f"any layout of {question.ranks} ranks takes is {least.total / 1e9:.1f} GB: {cure}; or take more ranks"
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
