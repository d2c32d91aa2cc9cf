"""What is asked of the planner, and what it answers for one setting."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.model.count import flops_per_token
from optimus.plan.links import chained, in_order
from optimus.plan.machine import Machine
from optimus.plan.memory import Memory, memory_of, memory_of_ranks
from optimus.plan.own import OwnActivations
from optimus.plan.profile import Profile
from optimus.plan.setting import Given, Setting
from optimus.plan.step import StepTime, least_time, step_time
from optimus.plan.work import Work


@dataclass(frozen=True)
class Question:
    """What is to be trained on what. `nodes` are those of the machine's links that are used, in the order of the ranks."""

    model: ModelConfig
    machine: Machine
    ranks: int
    global_batch: int
    context: int
    given: Given = field(default_factory=Given)
    profile: Profile = field(default_factory=Profile)
    nodes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises `UserError` for numbers that cannot be."""
        node, links = self.machine.ranks_per_node, self.machine.network.links
        if self.ranks > node and self.ranks % node:
            low = self.ranks // node * node
            raise UserError(
                f"{self.ranks} ranks do not fill nodes of {node} ({self.machine.name}): take {low} or {low + node}"
            )
        if links is not None and len(links) < self.node_count:
            raise UserError(
                f"{self.ranks} ranks need {self.node_count} nodes of {node} ({self.machine.name}), but its links are those "
                f"of {len(links)}: add the others, or take {len(links) * node} ranks"
            )
        self.machine.rates(self.given.precision)

    @property
    def node_count(self) -> int:
        """Nodes of the job."""
        return -(-self.ranks // self.machine.ranks_per_node)

    @cached_property
    def placed(self) -> Machine:
        """The machine as the ranks see it: its nodes in their order, by default that in which they are given."""
        if self.machine.network.links is None:
            return self.machine
        return in_order(self.machine, self.nodes or range(self.node_count))

    def with_neighbours(self) -> "Question":
        """Its nodes in a chain of such as are near to each other, where they are not alike."""
        if self.machine.network.links is None:
            return self
        return replace(self, nodes=tuple(chained(self.machine, self.node_count)))


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
        flops = flops_per_token(self.question.model, self.setting.context)
        peak = self.question.machine.rates(self.setting.precision).peak
        return flops * self.tokens_per_second / self.setting.mesh.size / peak


def predict(question: Question, setting: Setting, work: Work | None = None) -> Plan:
    """What a step in `setting` takes, and its memory. `work` knows another setting that divides a block likewise."""
    return Plan(question, setting, time_of(question, setting, work), memory_in(question, setting))


def time_of(question: Question, setting: Setting, work: Work | None = None) -> StepTime:
    """What a step in `setting` takes."""
    return step_time(question.model, setting, question.placed, question.profile, work)


def least_time_of(question: Question, setting: Setting, work: Work | None = None) -> float:
    """Seconds that it takes at least, found sooner."""
    return least_time(setting, work or Work(question.model, setting, question.placed, question.profile))


def besides(question: Question, setting: Setting, rank: int) -> dict[str, int]:
    """Bytes of `rank` beside its own chunks and activations: whole parameters in use, and copies for checkpoints."""
    kept = OwnActivations(question.model, setting, question.machine.collectives)
    ranks = memory_of_ranks(question.model, setting, question.profile, kept)
    parts = ranks[setting.mesh.coordinate(rank, "pp")].parts
    return {kind: int(parts[kind]) for kind in ("gathered", "copies") if parts[kind]}


def memory_in(question: Question, setting: Setting) -> Memory:
    """Of the fullest rank of the pipeline."""
    kept = OwnActivations(question.model, setting, question.machine.collectives)
    return memory_of(question.model, setting, question.profile, kept)
