"""Weights & Biases shows one run, however often the run is resumed; missing requirements are reported before anything
is created.

A stand-in has the calls that are used, with the answers of version 0.31; the module is not installed for tests.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import optimus
from optimus.errors import UserError


class Run:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.id = options["id"] or "a1b2c3"
        self.url = f"https://wandb.example/{self.id}"
        self.records: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str]] = []
        self.finished = False

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, record: dict[str, Any]) -> None:
        self.records.append(dict(record))

    def finish(self) -> None:
        self.finished = True


class Wandb(ModuleType):
    """A stand-in with or without a key, which records its runs."""

    Error = type("Error", (Exception,), {})

    def __init__(self, key: bool, mode: str = "online") -> None:
        super().__init__("wandb")
        self.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # marks the module as importable
        self.key, self.mode = key, mode
        self.runs: list[Run] = []

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, *, verify: bool, prompt: bool = True) -> bool:
        assert (verify, prompt) == (False, False)
        return self.key and self.mode == "online"

    def init(self, **options: Any) -> Run:
        self.runs.append(Run(**options))
        return self.runs[-1]


class OldWandb(Wandb):
    """A stand-in for version 0.17, whose `login` raises an error if no prompt is possible."""

    def login(self, *, verify: bool) -> bool:  # type: ignore[override]
        raise self.Error("api_key not configured (no-tty)")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb(key=True)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def asking(run: dict[str, Any], **keys: object) -> dict[str, Any]:
    return run | {"observe": {"tensorboard": False, "wandb": "project", **keys}}


def test_a_resume_goes_on_in_the_same_run(wandb: Wandb, small_run: dict[str, Any]) -> None:
    optimus.train(asking(small_run), ["train.stop_at=2"])
    optimus.train(asking(small_run), resume=True)
    first, second = wandb.runs
    assert (first.options["id"], first.options["resume"]) == (None, "allow")
    assert (second.options["id"], second.options["resume"]) == (first.id, "allow")
    assert [[record["step"] for record in run.records] for run in wandb.runs] == [[1, 2], [3, 4, 5, 6]]
    assert first.metrics == [("*", "step")]  # a step may come twice, after a rollback
    assert first.finished
    assert second.finished


def test_what_is_configured(wandb: Wandb, small_run: dict[str, Any]) -> None:
    keys = {"wandb_entity": "team", "wandb_group": "sizes", "wandb_tags": ["tiny", "moe"]}
    optimus.train(asking(small_run, **keys), ["train.stop_at=1"])
    options = wandb.runs[0].options
    assert {key: options[key] for key in ("project", "entity", "group", "tags", "name")} == {
        "project": "project", "entity": "team", "group": "sizes", "tags": ["tiny", "moe"], "name": "run",
    }  # fmt: skip
    assert options["config"]["train"]["steps"] == 6
    optimus.train(asking(small_run, **keys, wandb_name="first"), ["train.stop_at=2"], resume=True)
    assert wandb.runs[1].options["name"] == "first"


@pytest.mark.parametrize("module", [Wandb(key=False), OldWandb(key=False)])
@pytest.mark.parametrize("check", [True, False])
def test_a_missing_key_is_one_message_before_the_folder_is_made(
    module: Wandb, check: bool, small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(UserError, match=r"has no key here: run `wandb login` or set WANDB_API_KEY"):
        optimus.train(asking(small_run), check=check)
    assert not Path(small_run["train"]["output"]).exists()


def test_a_server_that_does_not_answer(
    wandb: Wandb, small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> Run:
        raise wandb.Error("no answer")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UserError, match=r"observe\.wandb: no answer\nWANDB_MODE=offline keeps the records"):
        optimus.train(asking(small_run))


def test_no_key_is_needed_offline(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb(key=False, mode="offline"))
    assert optimus.train(asking(small_run), check=True)["ok"]


def test_it_is_not_installed(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    with pytest.raises(UserError, match=r"observe\.wandb is set but Weights & Biases is not installed: .*wandb"):
        optimus.train(asking(small_run), check=True)


def test_names_without_a_project(small_run: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"observe\.wandb_group is set, but observe\.wandb names no project"):
        optimus.train(asking(small_run, wandb=None, wandb_group="sizes"), check=True)
