"""Hooks in users' own files: their abilities, and the message for each that fails."""

import copy
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import optimus
from helpers.sweep import in_turns
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics
from optimus.training.record import OWN_BEGINNINGS, OWN_NAMES

HOOKS = '''
import math
import sys

import numpy as np
import torch

import optimus


class StopEarly(optimus.Hook):
    """Ends the run in the third step that it has seen, whatever the process."""

    def __init__(self):
        self.seen = 0

    def after_step(self, trainer, record):
        assert record.step == trainer.progress.step and record.result.loss > 0
        self.seen += 1
        record.values["seen"] = float(self.seen)
        if self.seen == 3 and trainer.groups.rank == trainer.groups.world.size - 1:
            trainer.stop("seen enough")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Fails(optimus.Hook):
    def after_step(self, trainer, record):
        if record.step == 3 and trainer.groups.rank == trainer.groups.world.size - 1:
            raise ValueError("it is too hot")


class Alone(optimus.Hook):
    """Calls a collective on one rank."""

    ranks = "first"

    def after_step(self, trainer, record):
        trainer.groups.world.any(True)


class Undeclared(optimus.Hook):
    """Calls one of torch's."""

    def after_step(self, trainer, record):
        if trainer.groups.rank == 0:
            torch.distributed.all_reduce(torch.ones(1))


class Functional(optimus.Hook):
    """Calls a functional one of torch's."""

    def after_step(self, trainer, record):
        if trainer.groups.rank == 0:
            from torch.distributed import _functional_collectives

            _functional_collectives.all_reduce(torch.ones(1), "sum", [0, 1])


class Together(optimus.Hook):
    """Calls one on all ranks."""

    ranks = "together"

    def after_step(self, trainer, record):
        record.values["ranks"] = float(len(trainer.groups.world.all_gather_object(0)))


class FailsTogether(optimus.Hook):
    """One of the ranks fails, where the others wait for it."""

    ranks = "together"

    def after_step(self, trainer, record):
        if record.step == 3 and trainer.groups.rank == 1:
            raise ValueError("it is too cold")


class UnlikeLimits(optimus.Hook):
    """On one of the ranks alone."""

    def __init__(self):
        self.before_all = "an attribute"

    def loss_limit(self, trainer):
        return 0.0 if trainer.progress.step == 1 and trainer.groups.rank == 1 else float("inf")


class FailsAlone(optimus.Hook):
    """One of the ranks fails, and the others wait for it in a collective."""

    ranks = "together"

    def after_step(self, trainer, record):
        if record.step == 3 and trainer.groups.rank == 1:
            raise ValueError("it is too cold")
        trainer.groups.world.any(True)


class FailsAtTheEnd(optimus.Hook):
    def after_training(self, trainer):
        if trainer.groups.rank == trainer.groups.world.size - 1:
            raise ValueError("it cannot be closed")


class FailsAtBothEnds(FailsAtTheEnd):
    def after_step(self, trainer, record):
        raise ValueError("it is too hot")


class FailsBefore(optimus.Hook):
    def before_step(self, trainer):
        if trainer.progress.step == 2:
            raise ValueError("`ranks` is too `steps`")


class Leaves(optimus.Hook):
    def after_step(self, trainer, record):
        sys.exit(0)


class Replaces(optimus.Hook):
    def after_step(self, trainer, record):
        record.result = None


class Measures(optimus.Hook):
    def after_step(self, trainer, record):
        record.values |= {"numpy": np.float32(0.5), "whole": 3, "no number": math.nan, "infinite": math.inf}


class OutOfStep(optimus.Hook):
    """Says that it does, and does not."""

    ranks = "together"

    def after_step(self, trainer, record):
        if trainer.groups.rank == 0 and record.step == 3:
            trainer.groups.world.any(True)


class Limit(optimus.Hook):
    def loss_limit(self, trainer):
        return 0.0 if trainer.progress.step == 1 else float("inf")


class Delayed(optimus.Hook):
    async def after_step(self, trainer, record):
        pass


class Generator(optimus.Hook):
    def before_step(self, trainer):
        yield


class NoMethod(optimus.Hook):
    after_training = None


class NamedByNumber(optimus.Hook):
    name = 5


class NamedByNothing(optimus.Hook):
    name = None


class Raises(optimus.Hook):
    @property
    def name(self):
        raise KeyError("nobody")


class RaisesElsewhere(optimus.Hook):
    """In an attribute that is none of ours."""

    @property
    def after_all(self):
        raise KeyError("nobody")


class Exits(optimus.Hook):
    def __init__(self):
        sys.exit(3)


class Misspelt(optimus.Hook):
    def after_steps(self, trainer, record):
        pass


class TooFew(optimus.Hook):
    def after_step(self, trainer):
        pass


class Asks(optimus.Hook):
    def __init__(self, bound):
        pass


class FirstLimit(optimus.Hook):
    ranks = "first"

    def loss_limit(self, trainer):
        return 1.0


class WhenHot(optimus.Hook):
    order = 5


class Somewhere(optimus.Hook):
    ranks = "some"


class Unkept(optimus.Hook):
    def state_dict(self):
        return {"what": {1, 2}}


class Named(optimus.Hook):
    name = "Metrics"


class Forgetful(optimus.Hook):
    def state_dict(self):
        return {"seen": 1}

    def load_state_dict(self, state):
        raise KeyError("taken")


NO_HOOK = 5
'''


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the name of a module in the current folder that no other test has loaded."""
    name = f"users_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / "of the user"
    folder.mkdir()
    (folder / f"{name}.py").write_text(HOOKS)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def with_hooks(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return config | {"train": config["train"] | {"hooks": [*names]}}


def steps_of(config: dict[str, Any]) -> list[int]:
    return [read_description(path).step for path in list_checkpoints(Path(config["train"]["output"]))]


@pytest.mark.parametrize("ranks", in_turns([2, 1], 3))
def test_a_hook_ends_the_run_early_and_keeps_a_number_over_a_resume(
    small_run: dict[str, Any], hooks: str, ranks: int, tmp_path: Path
) -> None:
    """Users start runs as programs."""
    config = with_hooks(small_run, f"{hooks}.StopEarly")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "optimus", "train", str(tmp_path / "run.yaml"), "--ranks", str(ranks)]
    environment = os.environ | {"PYTHONPATH": str(Path(optimus.__file__).parents[1])}

    def train(*more: str) -> str:
        done = subprocess.run([*words, *more], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stderr

    train("train.stop_at=2")
    said = train("--resume")
    assert "step 3: the run ends here: seen enough" in said
    assert steps_of(config)[-1] == 3
    assert [each["seen"] for each in read_metrics(Path(config["train"]["output"]))] == [1.0, 2.0, 3.0]
    train("--resume")  # the hook has seen enough
    assert steps_of(config)[-1] == 6


@pytest.mark.in_turn(2, 3)
def test_objects_are_hooks_where_ranks_are_programs(
    small_run: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    class Late(optimus.Hook):
        """A local class with a number of its own."""

        def __init__(self, at: int) -> None:
            self.at = at

        def after_step(self, trainer: optimus.Trainer, record: optimus.StepRecord) -> None:
            if record.step == self.at:
                trainer.stop(f"it is step {self.at}")

    found = optimus.train(small_run, ranks=2, hooks=[Late(4)])
    assert (found["step"], found["stopped_by"]) == (4, None)
    assert "step 4: the run ends here: it is step 4" in capfd.readouterr().err


def test_the_losses_are_those_of_a_run_without_hooks(small_run: dict[str, Any], tmp_path: Path, hooks: str) -> None:
    runs = [small_run, with_hooks(small_run, f"{hooks}.StopEarly")]
    runs[1]["train"]["output"] = str(tmp_path / "hooked")
    for run in runs:
        optimus.train(run)
    plain, hooked = ([each["loss"] for each in read_metrics(Path(run["train"]["output"]))] for run in runs)
    assert hooked == plain[:3]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_raises_loses_nothing(small_run: dict[str, Any], hooks: str, ranks: int) -> None:
    config = with_hooks(small_run, f"{hooks}.Fails")
    where = " on rank 1" if ranks > 1 else ""
    message = rf"step 3: the hook {hooks}.Fails failed in after_step{where}: ValueError: it is too hot"
    with pytest.raises(Exception, match=message):
        optimus.train(config, ranks=ranks)
    assert steps_of(config)[-1] == 3
    assert optimus.train(with_hooks(config), ranks=ranks, resume=True)["step"] == 6


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("name", "collective"), [("Alone", "allreduce"), ("Undeclared", "allreduce"), ("Functional", "all_reduce")]
)
def test_a_collective_on_one_rank_is_refused(small_run: dict[str, Any], hooks: str, name: str, collective: str) -> None:
    config = with_hooks(small_run, f"{hooks}.{name}")
    message = (
        rf"step 1: the hook {hooks}.{name} failed in after_step on rank 0: UserError: it calls the collective {collective}, "
        "but its ranks are not 'together'"
    )
    with pytest.raises(Exception, match=message):
        optimus.train(config, ranks=2)
    assert steps_of(config) == [1]


@pytest.mark.usefixtures("warm_ranks")
def test_collectives_of_all_ranks(small_run: dict[str, Any], hooks: str) -> None:
    optimus.train(with_hooks(small_run, f"{hooks}.Together"), ranks=2)
    assert [each["ranks"] for each in read_metrics(Path(small_run["train"]["output"]))] == [2.0] * 6


@pytest.mark.usefixtures("warm_ranks")
def test_one_that_fails_together_with_others_loses_nothing(small_run: dict[str, Any], hooks: str) -> None:
    config = with_hooks(small_run, f"{hooks}.FailsTogether")
    with pytest.raises(Exception, match=r"FailsTogether failed in after_step on rank 1: ValueError: it is too cold"):
        optimus.train(config, ranks=2)
    assert steps_of(config)[-1] == 3


@pytest.mark.usefixtures("warm_ranks")
def test_ranks_limit_the_loss_alike(small_run: dict[str, Any], hooks: str) -> None:
    optimus.train(with_hooks(small_run, f"{hooks}.UnlikeLimits"), ranks=2)
    assert [each["skipped_steps"] for each in read_metrics(Path(small_run["train"]["output"]))] == [0, 1, 1, 1, 1, 1]


@pytest.mark.in_turn(0, 1)
def test_ranks_that_are_out_of_step(small_run: dict[str, Any], hooks: str) -> None:
    """One rank is in a collective of the hook, which the other has left without meeting another collective."""
    config = with_hooks(small_run, f"{hooks}.OutOfStep") | {"resilience": {"timeout": 40}, "checkpoint": {"every": 1}}
    message = rf"step 3: hook {hooks}.OutOfStep, after_step: .*: a hook must call the same collectives on all ranks"
    with pytest.raises(UserError, match=message):
        optimus.train(config, ranks=2)
    assert steps_of(config) == [1, 2]


def test_one_limits_the_loss(small_run: dict[str, Any], hooks: str) -> None:
    optimus.train(with_hooks(small_run, f"{hooks}.Limit"))
    assert [each["skipped_steps"] for each in read_metrics(Path(small_run["train"]["output"]))] == [0, 1, 1, 1, 1, 1]


def test_the_state_of_one_that_is_not_there_any_more(
    small_run: dict[str, Any], hooks: str, capfd: pytest.CaptureFixture[str]
) -> None:
    optimus.train(with_hooks(small_run, f"{hooks}.StopEarly"))
    assert optimus.train(small_run, resume=True)["step"] == 6
    said = capfd.readouterr().err
    assert f"the checkpoint has the state of the hook {hooks}.StopEarly, which this run does not use" in said


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("StopEarly", "StopEarly names no module: give package.module.Class"),
        ("no_such_module.Hook", "cannot be imported .*No module named 'no_such_module'.*: give package.module.Class"),
        ("HOOKS.StopEerly", "has no StopEerly: did you mean 'StopEarly'"),
        ("HOOKS.NO_HOOK", "is not a hook: make it a subclass of `optimus.Hook`"),
        ("HOOKS.Misspelt", "after_steps is never called: did you mean 'after_step'"),
        ("HOOKS.TooFew", r"after_step is called as after_step\(trainer, record\): too many positional arguments"),
        ("HOOKS.Asks", "cannot be made without arguments .*bound"),
        ("HOOKS.FirstLimit", "limits the loss, which all ranks must limit alike"),
        ("HOOKS.WhenHot", "its order is 5: give an `optimus.Order`"),
        ("HOOKS.Somewhere", "its ranks are 'some': give 'all', 'first' or 'together'"),
        ("HOOKS.Named", "the name Metrics of a hook has no dot"),
        ("HOOKS.Delayed", "after_step is `async` or has a `yield`, so a call would not run it"),
        ("HOOKS.Generator", "before_step is `async` or has a `yield`, so a call would not run it"),
        ("HOOKS.NoMethod", r"after_training is None: make it a method, after_training\(trainer\)"),
        ("HOOKS.NamedByNumber", "its name is 5: give a text, or remove `name`"),
        ("HOOKS.NamedByNothing", "its name is None: give a text, or remove `name`"),
        ("HOOKS.Raises", r"one of its attributes cannot be read \(KeyError: 'nobody'\)"),
        ("HOOKS.Exits", r"cannot be made without arguments \(SystemExit: 3\)"),
    ],
)
def test_one_that_cannot_be(small_run: dict[str, Any], hooks: str, name: str, message: str, check: bool) -> None:
    """The error comes before anything is written, also with `--check`."""
    config = with_hooks(small_run, name.replace("HOOKS", hooks))
    with pytest.raises(UserError, match=rf"train\.hooks: .*{message}"):
        optimus.train(config, check=check)
    assert not Path(config["train"]["output"]).exists()


@pytest.mark.parametrize("given", [optimus.Hook, None, "package.Hook", 5])
def test_hooks_that_are_no_list(small_run: dict[str, Any], given: Any) -> None:
    with pytest.raises(UserError, match=r"hooks=.*: give a list of hooks"):
        optimus.train(small_run, hooks=given)


def test_attributes_of_its_own_are_its_own(small_run: dict[str, Any], hooks: str) -> None:
    assert optimus.train(with_hooks(small_run, f"{hooks}.RaisesElsewhere"), check=True)["ok"]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_fails_when_all_is_done_is_heard(small_run: dict[str, Any], hooks: str, ranks: int) -> None:
    config, where = with_hooks(small_run, f"{hooks}.FailsAtTheEnd"), " on rank 1" if ranks > 1 else ""
    message = rf"step 6: the hook .*FailsAtTheEnd failed in after_training{where}: ValueError: it cannot be closed"
    with pytest.raises(Exception, match=message):
        optimus.train(config, ranks=ranks)
    assert steps_of(config)[-1] == 6


def test_the_first_failure_is_the_runs_and_a_later_one_is_heard(
    small_run: dict[str, Any], hooks: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = with_hooks(small_run, f"{hooks}.FailsAtTheEnd", f"{hooks}.FailsAtBothEnds")
    with pytest.raises(UserError, match=r"step 1: the hook .*FailsAtBothEnds failed in after_step: .*it is too hot"):
        optimus.train(config)
    said = capfd.readouterr().err
    assert f"error: step 1: the hook {hooks}.FailsAtTheEnd failed in after_training: " in said


def test_the_step_of_a_failure_is_the_one_that_was_to_come(small_run: dict[str, Any], hooks: str) -> None:
    """The error names the step that was to come, and turns the backticks of a user's message into quotes."""
    with pytest.raises(
        UserError, match=r"step 3: the hook .* failed in before_step: ValueError: 'ranks' is too 'steps'"
    ):
        optimus.train(with_hooks(small_run, f"{hooks}.FailsBefore"))
    assert steps_of(small_run)[-1] == 3


def test_one_that_leaves_python_ends_the_run_as_one_that_raises(small_run: dict[str, Any], hooks: str) -> None:
    with pytest.raises(UserError, match=r"step 1: the hook .*Leaves failed in after_step: SystemExit: 0"):
        optimus.train(with_hooks(small_run, f"{hooks}.Leaves"))
    assert steps_of(small_run) == [1]


@pytest.mark.in_turn(0, 1)
def test_one_that_fails_while_others_wait_for_it(small_run: dict[str, Any], hooks: str) -> None:
    config = with_hooks(small_run, f"{hooks}.FailsAlone") | {"resilience": {"timeout": 40}, "checkpoint": {"every": 1}}
    with pytest.raises(UserError, match=r"step 3: the hook .*FailsAlone failed in after_step on rank 1: .*too cold"):
        optimus.train(config, ranks=2)
    assert steps_of(config) == [1, 2]


def test_numbers_for_the_metrics(small_run: dict[str, Any], hooks: str) -> None:
    """Numbers may be of Python or NumPy, and JSON has finite numbers only."""
    optimus.train(with_hooks(small_run, f"{hooks}.Measures"))
    text = (Path(small_run["train"]["output"]) / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for line in text.splitlines():
        found = json.loads(line, parse_constant=refuse)
        assert [found[name] for name in ("numpy", "whole", "no number", "infinite")] == [0.5, 3.0, None, None]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm": torch.ones(2)}, r"record\.values\['norm'\] is a Tensor: give a number, for example by float\(\)"),
        ({"norm": None}, "is a NoneType: give a number"),
        ({"norm": "big"}, "is a str: give a number"),
        ({"norm": 10**400}, r"record\.values\['norm'\] is beyond the largest float: give a smaller number"),
        ({5: 1.0}, r"record\.values\[5\]: give a name, as text"),
        ({"": 1.0}, r"record\.values\[''\]: give a name, as text"),
        ({"loss": 1.0}, r"record\.values\['loss'\] is a metric of the library: choose another name"),
        ({"step": 1}, "is a metric of the library"),
        ({"time/data": 1.0}, "is a metric of the library"),
        ({"of another": 2.0}, "does not belong to the hook: choose another name"),
    ],
)
def test_what_is_no_number_of_its_own(small_run: dict[str, Any], values: dict[Any, Any], message: str) -> None:
    """The step is saved with its own metrics unchanged."""

    class Another(optimus.Hook):
        def after_step(self, trainer: optimus.Trainer, record: optimus.StepRecord) -> None:
            record.values["of another"] = 1.0

    class Measures(optimus.Hook):
        def after_step(self, trainer: optimus.Trainer, record: optimus.StepRecord) -> None:
            record.values |= values

    with pytest.raises(UserError, match=rf"step 1: the hook .*Measures failed in after_step: UserError: .*{message}"):
        optimus.train(small_run, hooks=[Another(), Measures()])
    assert steps_of(small_run) == [1]
    (found,) = read_metrics(Path(small_run["train"]["output"]))
    assert found["of another"] == 1.0
    assert found["loss"] > 1.0
    assert found.keys() <= OWN_NAMES | {"of another"} | {name for name in found if name.startswith(OWN_BEGINNINGS)}


def test_what_a_step_has_given_stays(small_run: dict[str, Any], hooks: str) -> None:
    with pytest.raises(
        UserError, match=r"Replaces failed in after_step: UserError: record\.result does not belong to the hook"
    ):
        optimus.train(with_hooks(small_run, f"{hooks}.Replaces"))


def test_whatever_a_hook_raises_or_changes_is_said(small_run: dict[str, Any]) -> None:
    """The error has no text, ends a task, or is a change within the step's record."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("nothing")

    def raising(error: BaseException) -> Any:
        def hook(trainer: optimus.Trainer, record: optimus.StepRecord) -> None:
            raise error

        return hook

    def changing(trainer: optimus.Trainer, record: optimus.StepRecord) -> None:
        record.times.by_kind["x"] = "bad"

    def asking(trainer: optimus.Trainer, record: optimus.StepRecord) -> None:
        trainer.model(torch.zeros(1, 4, dtype=torch.long))

    for number, (what, said) in enumerate(
        [
            (raising(Mute()), "after_step: Mute"),
            (raising(GeneratorExit()), "after_step: GeneratorExit"),
            (changing, r"after_step: UserError: record\.times does not belong to the hook"),
            (asking, r"after_step: UserError: trainer\.model has this rank's stages and cannot be called"),
        ]
    ):

        class Fails(optimus.Hook):
            after_step = staticmethod(what)

        run = small_run | {"train": small_run["train"] | {"output": f"{small_run['train']['output']}-{number}"}}
        with pytest.raises(UserError, match=rf"step 1: the hook .*Fails failed in {said}"):
            optimus.train(run, hooks=[Fails()])
        assert steps_of(run) == [1]


@pytest.mark.parametrize("what", ["step", "progress", "phases", "folder"])
def test_what_a_hook_leaves_as_it_is(
    small_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Changes of a hook are undone, so that the step's record and checkpoint are right."""

    class Moves(optimus.Hook):
        def before_step(self, trainer: optimus.Trainer) -> None:
            if what == "step":
                trainer.progress.step += 3
            elif what == "progress":
                trainer.progress = copy.copy(trainer.progress)
            elif what == "phases":
                trainer.progress.phases.clear()
            else:
                os.chdir("/")

    monkeypatch.chdir(tmp_path)
    small_run["train"]["output"] = "run"
    changed = "working folder" if what == "folder" else r"trainer\.progress"
    with pytest.raises(
        UserError, match=rf"step 1: the hook .*Moves failed in before_step: UserError: it changes .*{changed}"
    ):
        optimus.train(small_run, hooks=[Moves()])
    assert Path.cwd() == tmp_path
    assert steps_of(small_run) == [1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("given", [None, "low", torch.ones(2), math.nan])
def test_what_is_no_limit(small_run: dict[str, Any], given: Any) -> None:
    class Limits(optimus.Hook):
        def loss_limit(self, trainer: optimus.Trainer) -> float:
            return given

    with pytest.raises(
        UserError, match=r"step 1: the hook .*Limits failed in loss_limit: UserError: it returns .*: return a number"
    ):
        optimus.train(small_run, hooks=[Limits()])
    assert steps_of(small_run) == [1]
    assert read_metrics(Path(small_run["train"]["output"]))[0]["skipped_steps"] == 0


def test_two_of_a_name(small_run: dict[str, Any], hooks: str) -> None:
    config = with_hooks(small_run, f"{hooks}.Limit", f"{hooks}.Limit")
    with pytest.raises(UserError, match=rf"two hooks have the name {hooks}\.Limit: leave one out"):
        optimus.train(config)


def test_a_state_that_is_no_json(small_run: dict[str, Any], hooks: str) -> None:
    with pytest.raises(UserError, match=r"Unkept failed in state_dict: TypeError: Object of type set is not JSON"):
        optimus.train(with_hooks(small_run, f"{hooks}.Unkept"))
    assert steps_of(small_run) == [1]


def test_a_state_that_is_not_taken(small_run: dict[str, Any], hooks: str) -> None:
    optimus.train(with_hooks(small_run, f"{hooks}.Forgetful"), ["train.stop_at=2"])
    with pytest.raises(UserError, match=r"Forgetful cannot load its state from the checkpoint \(KeyError: 'taken'\)"):
        optimus.train(with_hooks(small_run, f"{hooks}.Forgetful"), resume=True)


def test_an_object_that_cannot_be_sent(small_run: dict[str, Any]) -> None:
    class Locked(optimus.Hook):
        lock = threading.Lock()

    with pytest.raises(UserError, match=r"a hook of `hooks` cannot be pickled for another process .*lock"):
        optimus.train(small_run, ranks=2, hooks=[Locked()])


def test_the_example_of_the_documentation(
    small_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's code runs in a file of its own."""
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    code = textwrap.dedent(page.split("```python\n# my_hooks.py\n")[1].split("```")[0])
    (tmp_path / "my_hooks.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = [line.split("(")[0].removeprefix("class ") for line in code.splitlines() if line.startswith("class ")]
    optimus.train(with_hooks(small_run, *(f"my_hooks.{name}" for name in names)))
    assert (tmp_path / "losses.csv").read_text().splitlines()[0].startswith("1,")
