"""Hooks of users: what they can do, in files outside of the project, and the one message about each that cannot."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

import optimus
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics

HOOKS = '''
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


class OutOfStep(optimus.Hook):
    """Says that it does, and does not."""

    ranks = "together"

    def after_step(self, trainer, record):
        if trainer.groups.rank == 0 and record.step == 3:
            trainer.groups.world.any(True)


class Limit(optimus.Hook):
    def loss_limit(self, trainer):
        return 0.0 if trainer.progress.step == 1 else float("inf")


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
    """The name of a module in the current folder, that no other test has loaded."""
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_ends_the_run_early_and_keeps_a_number_over_a_resume(
    small_run: dict[str, Any], hooks: str, ranks: int, tmp_path: Path
) -> None:
    """In programs, as users start them."""
    config = with_hooks(small_run, f"{hooks}.StopEarly")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "optimus.cli", "train", str(tmp_path / "run.yaml"), "--ranks", str(ranks)]
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
    train("--resume")  # it has seen more than enough
    assert steps_of(config)[-1] == 6


def test_objects_are_hooks_where_ranks_are_programs(
    small_run: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    class Late(optimus.Hook):
        """Of no module, and with a number of its own."""

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
@pytest.mark.parametrize("name", ["Alone", "Undeclared"])
def test_a_collective_on_one_rank_is_refused(small_run: dict[str, Any], hooks: str, name: str) -> None:
    config = with_hooks(small_run, f"{hooks}.{name}")
    message = (
        rf"step 1: the hook {hooks}.{name} failed in after_step on rank 0: UserError: it calls the collective allreduce, "
        "but its `ranks` are not 'together'"
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
    """One is in a collective of the hook, and the other one has left it: it meets no other collective."""
    config = with_hooks(small_run, f"{hooks}.OutOfStep") | {"resilience": {"timeout": 40}, "checkpoint": {"every": 1}}
    message = rf"step 3: hook {hooks}.OutOfStep, after_step: .*: what calls collectives must do so on all ranks alike"
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
    assert f"the checkpoint has the state of {hooks}.StopEarly, a hook that this run has not: it is left out" in said


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("StopEarly", "StopEarly names no module: give package.module.Class"),
        ("no_such_module.Hook", "cannot be imported .*No module named 'no_such_module'.*: give package.module.Class"),
        ("HOOKS.StopEerly", "has no StopEerly: did you mean 'StopEarly'"),
        ("HOOKS.NO_HOOK", "is no hook: make it a subclass of `optimus.Hook`"),
        ("HOOKS.Misspelt", "after_steps is never called: did you mean 'after_step'"),
        ("HOOKS.TooFew", r"after_step is called as after_step\(trainer, record\): too many positional arguments"),
        ("HOOKS.Asks", "could not be made without arguments .*bound"),
        ("HOOKS.FirstLimit", "limits the loss, which all ranks must do alike"),
        ("HOOKS.WhenHot", "its order is 5: give an `optimus.Order`"),
        ("HOOKS.Somewhere", "its ranks are 'some': give 'all', 'first' or 'together'"),
        ("HOOKS.Named", "a hook is called Metrics, as the library's own are"),
    ],
)
def test_one_that_cannot_be(small_run: dict[str, Any], hooks: str, name: str, message: str, check: bool) -> None:
    """Before anything is written, by `--check` too."""
    config = with_hooks(small_run, name.replace("HOOKS", hooks))
    with pytest.raises(UserError, match=rf"train\.hooks: .*{message}"):
        optimus.train(config, check=check)
    assert not Path(config["train"]["output"]).exists()


def test_two_of_a_name(small_run: dict[str, Any], hooks: str) -> None:
    config = with_hooks(small_run, f"{hooks}.Limit", f"{hooks}.Limit")
    with pytest.raises(UserError, match=rf"two hooks are called {hooks}\.Limit: leave one out"):
        optimus.train(config)


def test_a_state_that_is_no_json(small_run: dict[str, Any], hooks: str) -> None:
    with pytest.raises(UserError, match=r"Unkept failed in state_dict: TypeError: Object of type set is not JSON"):
        optimus.train(with_hooks(small_run, f"{hooks}.Unkept"))
    assert steps_of(small_run) == [1]


def test_a_state_that_is_not_taken(small_run: dict[str, Any], hooks: str) -> None:
    optimus.train(with_hooks(small_run, f"{hooks}.Forgetful"), ["train.stop_at=2"])
    with pytest.raises(
        UserError, match=r"Forgetful cannot go on with its state of the checkpoint \(KeyError: 'taken'\)"
    ):
        optimus.train(with_hooks(small_run, f"{hooks}.Forgetful"), resume=True)


def test_an_object_that_cannot_be_sent(small_run: dict[str, Any]) -> None:
    class Locked(optimus.Hook):
        lock = threading.Lock()

    with pytest.raises(UserError, match=r"a hook of `hooks` cannot be sent to another process .*lock"):
        optimus.train(small_run, ranks=2, hooks=[Locked()])


def test_the_example_of_the_documentation(
    small_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page has it, in a file of its own."""
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    code = textwrap.dedent(page.split("```python\n# my_hooks.py\n")[1].split("```")[0])
    (tmp_path / "my_hooks.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = [line.split("(")[0].removeprefix("class ") for line in code.splitlines() if line.startswith("class ")]
    optimus.train(with_hooks(small_run, *(f"my_hooks.{name}" for name in names)))
    assert (tmp_path / "losses.csv").read_text().splitlines()[0].startswith("1,")
