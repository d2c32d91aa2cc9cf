"""Plans of faults: reading and writing files, refused plans, and faults that occur once."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import yaml

from optimus.errors import UserError
from optimus.launch.nodes import NodeJob
from optimus.resilience.events import EventLog
from optimus.testing import faults
from optimus.testing.faults import Fault, FaultKind, FaultPlan, Inject, is_due, rank_program
from optimus.testing.lab import rehearse

EVERY = (
    FaultPlan()
    .kill(0, 1)
    .kill_agent(1, 2)
    .cut(2, 3)
    .nan(3, 4)
    .hang(4, 5)
    .slow(5, 2.5)
    .slow(5, 1.5, step=9)
    .tear_checkpoint(6, 7)
    .fill_disk(7, 8)
    .segfault(7, 9)
)


def test_a_plan_by_methods_leaves_what_it_began_with_alone() -> None:
    plan = FaultPlan()
    assert plan.kill(1, 2).nan(0, 3).faults == [Fault(kind="kill", rank=1, step=2), Fault(kind="nan", rank=0, step=3)]
    assert plan.faults == []
    assert {fault.kind for fault in EVERY.faults} == set(get_args(FaultKind))
    assert EVERY.faults_of(5) == [
        (5, Fault(kind="slow", rank=5, step=1, factor=2.5)),
        (6, Fault(kind="slow", rank=5, step=9, factor=1.5)),
    ]
    assert EVERY.faults_of(8) == []


def test_a_plan_by_way_of_its_file(tmp_path: Path) -> None:
    EVERY.write(tmp_path / "plan.yaml")
    assert FaultPlan.read(tmp_path / "plan.yaml") == EVERY
    (tmp_path / "plan.yaml").write_text(
        "- {kind: kill, rank: 1, step: 12}\n- {kind: slow, rank: 0, step: 1, factor: 3}"
    )
    assert FaultPlan.read(tmp_path / "plan.yaml") == FaultPlan().kill(1, 12).slow(0, 3.0)


GOOD = {"kind": "slow", "rank": 1, "step": 12, "factor": 2.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kind: kill", "is not a list of faults such as {kind: kill, rank: 1, step: 12}"),
        ("", "is not a list"),
        ("[", " is not valid YAML: "),
        (b"\xff\xfe\xff", "cannot be read: "),
        (None, "cannot be read: .*No such file"),
        (["kill"], ", entry 1 is not a fault"),
        ([GOOD, {**GOOD, "kind": "kil"}], ", entry 2: 'kind' is 'kil': it must be .*'kill'"),
        ([{"rank": 1, "step": 2}], ", entry 1: 'kind' is missing"),
        ([{**GOOD, "kind": ["kill"]}], ", entry 1: 'kind' is "),
        ([{**GOOD, "rnak": 1}], ", entry 1: unknown key 'rnak': .*rank"),
        ([{**GOOD, "rank": -1}], ", entry 1: 'rank' is -1: it must be greater than or equal to 0"),
        ([{**GOOD, "rank": "one"}], ", entry 1: 'rank' is 'one'"),
        ([{**GOOD, "rank": True}], ", entry 1: 'rank' is True"),
        ([{**GOOD, "step": 0}], ", entry 1: 'step' is 0: it must be greater than or equal to 1"),
        ([{"kind": "kill", "rank": 1}], ", entry 1: 'step' is missing"),
        ([{**GOOD, "step": 1.5}], ", entry 1: 'step' is 1.5"),
        ([{**GOOD, "factor": 0.5}], ", entry 1: 'factor' is 0.5: it must be greater than or equal to 1"),
        ([{**GOOD, "factor": "twice"}], ", entry 1: 'factor' is 'twice'"),
        ([{**GOOD, "factor": float("nan")}], ", entry 1: 'factor' is nan"),
        ([{**GOOD, "factor": float("inf")}], ", entry 1: 'factor' is inf"),
    ],
)
def test_a_plan_that_is_none(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "plan.yaml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(UserError) as caught:
        FaultPlan.read(path)
    assert re.match(f"fault plan {re.escape(str(path))}", str(caught.value))
    assert re.search(message.replace("{", r"\{"), str(caught.value)), caught.value


def test_a_fault_happens_once_in_the_life_of_a_run(tmp_path: Path) -> None:
    plan = FaultPlan().kill(0, 3).hang(1, 2)
    assert [is_due(tmp_path / "run", plan, 0) for _ in range(3)] == [True, False, False]
    assert is_due(tmp_path / "run", plan, 1)
    assert is_due(tmp_path / "another", plan, 0)
    told = [
        (event["kind"], event["rank"], event["step"], event["detail"]) for event in EventLog(tmp_path / "run").read()
    ]
    assert told == [
        ("injected", 0, 3, "kill on rank 0, by the fault plan"),
        ("injected", 1, 2, "hang on rank 1, by the fault plan"),
    ]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["events.jsonl"]
    assert EventLog(tmp_path / "run").unrecovered() == []


def test_what_happened_by_one_plan_keeps_nothing_of_another_from_happening(tmp_path: Path) -> None:
    assert is_due(tmp_path, FaultPlan().kill(0, 3), 0)
    another = FaultPlan().nan(1, 5).kill(0, 3).kill(0, 3)
    assert [is_due(tmp_path, another, number) for number in (0, 1, 2, 2)] == [True, False, True, False]


def test_a_factor_makes_no_other_event(tmp_path: Path) -> None:
    """The event log has no factors, so two faults that differ only there happen once each."""
    faults = [Fault(kind="kill", rank=0, step=3), Fault(kind="kill", rank=0, step=3, factor=2.0)]
    assert [is_due(tmp_path, FaultPlan(faults), number) for number in (0, 1, 0, 1)] == [True, True, False, False]


def test_a_slow_rank_takes_a_multiple_of_its_own_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause follows the step alone, not earlier pauses, and ends after a rollback to a step before the fault."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(faults, "time", SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    recorder = SimpleNamespace(seconds=0.0)
    trainer: Any = SimpleNamespace(groups=SimpleNamespace(rank=0, recorder=recorder), progress=SimpleNamespace(step=0))
    hook, seconds = Inject(FaultPlan().slow(0, 3.0, step=2).slow(0, 2.0, step=1)), list[float]()
    hook.before_training(trainer)
    for step in (0, 1, 2, 0, 1):
        trainer.progress.step, began = step, now
        hook.before_step(trainer)
        sleep(10.0)
        recorder.seconds += 4.0  # of which the rank waits for others
        hook._faults, due = [], hook._faults
        hook.after_step(trainer, None)  # type: ignore[arg-type]
        hook._faults = due
        seconds.append(now - began)
    assert seconds == [10.0, 22.0, 22.0, 16.0, 22.0]


@pytest.fixture
def config(small_run: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_run))
    return path


def test_a_plan_of_ranks_that_are_not_there(config: Path, tmp_path: Path) -> None:
    FaultPlan().kill(1, 2).kill(2, 2).write(tmp_path / "plan.yaml")
    message = "there is no rank 2: the run has ranks 0 to 1"
    with pytest.raises(UserError, match=message):
        rehearse(NodeJob(config, nodes=2), inject=tmp_path / "plan.yaml")
    with pytest.raises(UserError, match=message):  # the same message from `optimus launch`
        rank_program(tmp_path / "plan.yaml", 2)


def test_what_a_plain_lab_cannot_do(config: Path, tmp_path: Path) -> None:
    FaultPlan().cut(1, 2).write(tmp_path / "plan.yaml")
    with pytest.raises(UserError, match="links can be cut in network namespaces only"):
        rehearse(NodeJob(config, nodes=2), inject=tmp_path / "plan.yaml", plain=True)
    with pytest.raises(UserError, match="--bandwidth needs network namespaces"):
        rehearse(NodeJob(config, nodes=2), bandwidth="1Gbit", plain=True)
