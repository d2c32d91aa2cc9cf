"""Objects that `optimus.train` takes: a dataset and an update rule."""

import abc
import dataclasses
import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml

import optimus
from helpers.items import LENGTH, SIZE, Items, Late, Stream, item
from helpers.launched import launched
from helpers.plugin_tables import tables_restored
from helpers.sweep import in_turns, part_of
from optimus import api, functions
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.config import load_config
from optimus.data.dataset import DatasetRows, StreamRows, rows_of
from optimus.data.loader import TokenLoader
from optimus.data.shards import Shards
from optimus.data.training import TrainingData, open_sources
from optimus.extend import OptimizerStep, Tile, UpdateRule
from optimus.launch import here
from optimus.observe.metrics import read_metrics
from optimus.optim.rules import RULES
from optimus.training.objects import UserObjects

MODEL = {"family": "olmo", "hidden": 16, "layers": 2, "heads": 2, "intermediate": 32, "vocab": 320}
LAYOUTS: list[tuple[int, list[str]]] = [
    (2, []),
    (2, ["parallel.context=2"]),
    (2, ["parallel.pipeline=2"]),
    (4, ["parallel.tensor=2", "state.shard=parameters"]),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(UpdateRule):
    """SGD with momentum."""

    kinds = ("momentum.sum",)
    momentum: float = 0.9

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        (total,) = tile.moments
        total.mul_(self.momentum).add_(tile.gradient)
        tile.weight.mul_(1 - self.rate(now) * self.weight_decay).add_(total, alpha=-self.rate(now))


def config_of(tokenizer: Path, output: Path, /, **data: Any) -> dict[str, Any]:
    sizes = {"steps": 6, "global_batch": 8, "micro_batch": 1, "sequence_length": LENGTH, "precision": "float32"}
    return {
        "model": MODEL,
        "data": {"tokenizer": str(tokenizer), "documents": "mask", **data},
        "train": {"output": str(output), **sizes},
        "lr_schedule": {"lr": 1e-2, "warmup_steps": 2},
        "checkpoint": {"every": 2, "keep": None},
        "observe": {"tensorboard": False, "report": False},
    }


def losses(output: Path) -> list[float]:
    return [each["loss"] for each in read_metrics(output)]


# ---- Rows ----


def rows(item: Any, tokenizer: Path, context: int = 6) -> np.ndarray[Any, Any]:
    return rows_of("argument", [item], tokenizer=str(tokenizer), context=context, seed=0).stored_rows(0, 1)


def batch(item: Any, tokenizer: Path, tmp_path: Path) -> tuple[Any, ...]:
    """Returns tokens, mask and documents of the item, as a loader yields them."""
    changes = ["train.global_batch=1", "train.sequence_length=6"]
    config = load_config(config_of(tokenizer, tmp_path, dataset="argument"), changes)
    data = TrainingData(config, open_sources(config, [item]))
    with TokenLoader(data.phases) as loader:
        found = next(loader)
    assert found.target_mask_BS is not None
    assert found.document_BS is not None
    return found.tokens_BS[0].tolist(), found.target_mask_BS[0].tolist(), found.document_BS[0].tolist()


def test_flags_of_an_item(prepared: Path, tmp_path: Path) -> None:
    eos = Shards(prepared).eos_id
    tokens, mask, documents = batch({"input_ids": [5, 6, 7, 8, 9, 10]}, prepared, tmp_path)
    assert (tokens, mask, documents) == ([5, 6, 7, 8, 9, 10], [True] * 6, [0] * 6)
    tokens, mask, documents = batch(
        {"input_ids": torch.tensor([5, 6, 7, eos]), "labels": np.array([-100, 6, -100, eos])}, prepared, tmp_path
    )
    assert tokens == [5, 6, 7, eos, eos, eos]
    assert mask == [False, True, False, True, False, False]
    tokens, mask, documents = batch(
        {"input_ids": [5, 6, eos, 7, eos, 8], "document_ids": [3, 1, 1, 1, 1, 2]}, prepared, tmp_path
    )
    assert (tokens, mask, documents) == ([5, 6, eos, 7, eos, 8], [True] * 6, [0, 1, 1, 1, 1, 2])
    tokens, mask, _ = batch(
        {"input_ids": [5, 6, 7, 7, 7, 7, 7, 7], "attention_mask": [1] * 3 + [0] * 5}, prepared, tmp_path
    )
    assert (tokens[:3], mask) == ([5, 6, 7], [True] * 3 + [False] * 3)


def test_a_run_without_a_label_says_so_once(prepared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, predicted in (("some", True), ("none", False)):
        items = [
            each if predicted else each | {"labels": [-100] * len(each["input_ids"])} for each in map(item, range(8))
        ]
        config = config_of(prepared / "tokenizer.json", tmp_path / name)
        optimus.train(config, data=items)
        said = re.findall(r"step (\d): no token of the global batch is predicted", capfd.readouterr().err)
        assert said == ([] if predicted else ["1"])
        assert [each is None for each in losses(tmp_path / name)] == [not predicted] * 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 2], "item 0 is list: give a mapping with input_ids"),
        ({"tokens": [1]}, "item 0 has the keys tokens: give a mapping with input_ids"),
        ({"input_ids": [[1, 2]]}, r"has the shape \[1, 2\] and the type int64: yield items one by one"),
        ({"input_ids": [1.5]}, "the type float64: give a list of integers"),
        ({"input_ids": []}, r"has 0 tokens, but a row has 1 to 6 .* leave out empty ones"),
        ({"input_ids": [1] * 7}, r"item 0 has 7 tokens, but a row has 1 to 6 \(train.sequence_length\)"),
        ({"input_ids": [1, 320]}, "has the token 320, but .* has the tokens 0 to"),
        ({"input_ids": [1, -1]}, "has the token -1"),
        (
            {"input_ids": [1, 2], "labels": [2, 3]},
            "label 0 is 2 and token 0 is 1: labels are the tokens themselves, not shifted",
        ),
        ({"input_ids": [1, 2], "labels": [1]}, "has 2 input_ids but 1 labels"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "attention_mask is 0 before the end"),
        ({"input_ids": [1, 2], "position_ids": [0, 1]}, "has position_ids: give document_ids"),
    ],
)
def test_wrong_items_are_named(wrong: Any, message: str, prepared: Path) -> None:
    with pytest.raises(optimus.UserError, match=message):
        rows(wrong, prepared)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (iter([1]), "is a builtins.list_iterator: give a map-style dataset.*or an iterator that can be resumed"),
        ({"input_ids": [1]}, "is a builtins.dict"),
        (torch.utils.data.DataLoader(Items()), "pass the dataset of the DataLoader"),  # type: ignore[arg-type]
        ([], "data has no items"),
    ],
    ids=["iterator", "mapping", "loader", "empty"],
)
def test_what_is_no_dataset_is_named(wrong: Any, message: str, prepared: Path) -> None:
    with pytest.raises(optimus.UserError, match=message):
        rows_of("argument", wrong, tokenizer=str(prepared), context=8, seed=0)


def test_errors_of_the_dataset_are_named(prepared: Path) -> None:
    class Broken(Items):
        def __getitem__(self, number: int) -> dict[str, Any]:
            if number == 13:
                raise OSError("the disk is gone")
            return item(number)

    found = rows_of("argument", Broken(), tokenizer=str(prepared), context=LENGTH, seed=0)
    with pytest.raises(
        optimus.UserError, match=r"data: item 13 failed \(OSError: the disk is gone\): correct its code"
    ):
        found.stored_rows(0, SIZE)


def test_items_that_end_the_iteration_and_datasets_that_are_streams(prepared: Path) -> None:
    class Ends(Items):
        def __getitem__(self, number: int) -> dict[str, Any]:
            raise StopIteration

    with pytest.raises(optimus.UserError, match=r"data: item 0 failed \(StopIteration\)"):
        rows_of("argument", Ends(), tokenizer=str(prepared), context=LENGTH, seed=0)

    class Torch(Stream, torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return SIZE

    found = rows_of("argument", Torch(), tokenizer=str(prepared), context=LENGTH, seed=0)
    assert isinstance(found, StreamRows)


def test_a_pass_reads_each_item_once_in_a_seeded_order(prepared: Path) -> None:
    first, again, other = (
        rows_of("argument", Items(), tokenizer=str(prepared), context=LENGTH, seed=seed) for seed in (1, 1, 2)
    )
    assert isinstance(first, DatasetRows)
    own = [first.row(item(number), number).tobytes() for number in range(SIZE)]
    found = [row.tobytes() for row in first.stored_rows(0, SIZE)]
    assert sorted(found) == sorted(own)
    assert found != own
    assert found == [row.tobytes() for row in again.stored_rows(0, SIZE)]
    assert found != [row.tobytes() for row in other.stored_rows(0, SIZE)]


def test_a_stream_begins_anew_at_its_end_and_continues_from_a_state(prepared: Path) -> None:
    def opened() -> StreamRows:
        found = rows_of("argument", Stream(), tokenizer=str(prepared), context=LENGTH, seed=0)
        assert isinstance(found, StreamRows)
        return found

    stream, other, late = opened(), opened(), opened()
    rows = np.concatenate([stream.stored_rows(first, first + 8) for first in range(0, 2 * SIZE, 8)])
    assert np.array_equal(rows[:SIZE], rows[SIZE:])
    assert np.array_equal(other.stored_rows(SIZE + 3, SIZE + 5), rows[SIZE + 3 : SIZE + 5])  # a rank that skips rows
    state = json.loads(json.dumps(stream.state_before(50)))
    assert state == {"row": 48, "state": {"next": 8}}
    late.load_state(state)
    assert np.array_equal(late.stored_rows(50, 60), rows[50:60])
    with pytest.raises(optimus.UserError, match="row 40 is past: a stream cannot be read again"):
        late.stored_rows(40, 48)


def test_a_stream_that_its_user_has_advanced_has_the_same_passes_after_a_resume(prepared: Path) -> None:
    def opened() -> StreamRows:
        advanced = Stream()
        advanced.load_state_dict({"next": 10})
        found = rows_of("argument", advanced, tokenizer=str(prepared), context=LENGTH, seed=0)
        assert isinstance(found, StreamRows)
        return found

    stream, late = opened(), opened()
    rows = np.concatenate([stream.stored_rows(first, first + 6) for first in range(0, 3 * SIZE, 6)])
    assert np.array_equal(rows[: SIZE - 10], rows[SIZE - 10 : 2 * (SIZE - 10)])
    late.load_state(json.loads(json.dumps(stream.state_before(12))))
    assert np.array_equal(late.stored_rows(12, 3 * SIZE), rows[12:])


def test_a_stream_without_more_items_is_named(prepared: Path) -> None:
    class Once(Stream):
        def __iter__(self) -> Any:
            yield from (item(number) for number in range(3) if not self.asked)
            self.asked = [3]

    found = rows_of("argument", Once(), tokenizer=str(prepared), context=LENGTH, seed=0)
    with pytest.raises(optimus.UserError, match="data has no more items after 3: shorten the run, or yield more"):
        found.stored_rows(0, 4)


def test_a_state_that_is_not_json_is_named(prepared: Path) -> None:
    class Odd(Stream):
        state: ClassVar[Any] = None

        def state_dict(self) -> dict[str, Any]:
            return self.state

    for Odd.state, message in (
        ({"generator": object()}, r"data: its state_dict is not JSON \(Object of type object"),
        ({"next": (1, 2)}, "its state_dict is another object after it was written as JSON: .*no tuples"),
        ({1: 2}, "no tuples and no other keys"),
    ):
        found = rows_of("argument", Odd(), tokenizer=str(prepared), context=LENGTH, seed=0)
        with pytest.raises(optimus.UserError, match=message):
            found.stored_rows(0, 4)


# ---- Runs ----


@pytest.mark.parametrize("kind", in_turns([Items, Stream], 2))
def test_every_layout_has_the_numbers_of_one_process(
    kind: type, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that stop and resume on another layout have these numbers, too."""
    monkeypatch.setattr(here, "start_ranks", launched)
    rule = Momentum(weight_decay=0.05, momentum=0.8)
    optimus.train(config_of(prepared, tmp_path / "one"), data=kind(), optimizer=rule)
    expected = losses(tmp_path / "one")
    assert len(expected) == 6
    for number, (ranks, overrides) in enumerate([LAYOUTS[0], *part_of(LAYOUTS[1:], 3)]):
        config = config_of(prepared, tmp_path / str(number))
        other = {"ranks": 1} if number else {"ranks": 4, "overrides": ["parallel.expert=1"]}
        optimus.train(config, [*overrides, "train.stop_at=3"], ranks=ranks, data=kind(), optimizer=rule)
        optimus.train(config, other.pop("overrides", []), **other, resume=True, data=kind(), optimizer=rule)  # type: ignore[arg-type]
        assert losses(tmp_path / str(number)) == pytest.approx(expected, rel=2e-5)
    saved = read_description(list_checkpoints(tmp_path / "one")[-1]).progress
    assert saved.get("streams") == ({"argument": {"row": 40, "state": {"next": 40}}} if kind is Stream else None)


def test_the_program_of_the_page(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of docs/data.md trains on a dataset of the library `datasets`."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(here, "start_ranks", launched)
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_list([item(number) for number in range(SIZE)]).save_to_disk("tokenized")
    shutil.copy(prepared / "tokenizer.json", tmp_path)
    config = config_of(Path("tokenizer.json"), tmp_path / "run")
    del config["data"]
    Path("run.yaml").write_text(yaml.safe_dump(config))
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    programs = [text.partition("```")[0] for text in page.split("```python\n")[1:]]
    (program,) = (text for text in programs if "optimus.train(" in text)
    exec(program, {})
    assert len(losses(tmp_path / "run")) == 6


def test_a_stream_of_the_library_datasets_is_resumed(prepared: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def stream() -> Any:
        return datasets.Dataset.from_list([item(number) for number in range(SIZE)]).to_iterable_dataset(num_shards=3)

    optimus.train(config_of(prepared, tmp_path / "whole"), data=stream())
    optimus.train(config_of(prepared, tmp_path / "parts"), ["train.stop_at=4"], data=stream())
    optimus.train(config_of(prepared, tmp_path / "parts"), data=stream(), resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_resumed_stream_is_not_read_from_its_beginning(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, tmp_path / "run")
    optimus.train(config, ["train.stop_at=4"], data=Stream())
    optimus.train(config, resume=True, data=(stream := Stream()))
    assert stream.asked[0] == 3 * 8


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_is_after_a_run_as_it_was_before(
    ranks: int, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second new run with the object, and a resumed one, have the rows of runs with new objects."""
    monkeypatch.setattr(here, "start_ranks", launched)
    one = Late()
    optimus.train(config_of(prepared, tmp_path / "expected"), ["train.steps=4"], ranks=1, data=Late())
    for name in ("first", "second"):
        for stop in (2, None):
            overrides = ["train.steps=4", *([] if stop is None else [f"train.stop_at={stop}"])]
            optimus.train(config_of(prepared, tmp_path / name), overrides, ranks=ranks, resume=stop is None, data=one)
            assert one.state_dict() == {"next": 7}
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "expected"), rel=2e-5)


def test_a_stream_that_cannot_go_back_does_not_fail_the_run(
    prepared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Forward(Stream):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    assert optimus.train(config_of(prepared, tmp_path / "run"), ranks=1, data=Forward())["step"] == 6
    assert (
        "data: its load_state_dict failed (NotImplementedError): correct its code; another run"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("batch", [3, 5])
def test_a_step_may_end_inside_a_row(batch: int, prepared: Path, tmp_path: Path) -> None:
    """The sequences of the first phase are halves of rows, of which its steps read an odd number."""
    config = config_of(prepared, tmp_path / "whole")
    del config["train"]["steps"]
    config["phases"] = [
        {"steps": 3, "sequence_length": LENGTH // 2, "global_batch": batch},
        {"steps": 3},
    ]
    optimus.train(config, data=Stream())
    config["train"]["output"] = str(tmp_path / "parts")
    for stop in (2, 4, None):
        optimus.train(config, [] if stop is None else [f"train.stop_at={stop}"], resume=stop != 2, data=Stream())
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_phases_have_streams_of_their_own(prepared: Path, tmp_path: Path) -> None:
    """A phase reads A, B or A again; a resumed run continues each where it was."""
    config = config_of(prepared, tmp_path / "whole")
    del config["train"]["steps"]
    one, other = ({"dataset": f"helpers.items.{name}", "tokenizer": str(prepared)} for name in ("Stream", "Late"))
    config["data"] = one
    config["phases"] = [{"steps": 2}, {"steps": 2, "data": other}, {"steps": 2, "data": one}]
    optimus.train(config)
    config["train"]["output"] = str(tmp_path / "parts")
    for stop in (1, 3, 5, None):
        optimus.train(config, [] if stop is None else [f"train.stop_at={stop}"], resume=stop != 1)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_another_dataset_is_noted(prepared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = config_of(prepared, tmp_path / "run", dataset="helpers.items.Stream")
    optimus.train(config, ["train.stop_at=2"])
    optimus.train(config, ["data.dataset=helpers.items.Late"], resume=True)
    assert "continuing with another configuration: data.dataset" in capfd.readouterr().err


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(Momentum):
    """Fails on the last of two ranks, in its second step."""

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        if now.step == 2 and os.environ.get("RANK", "1") == "1":
            raise ValueError("odd")
        super().apply(now, tile)


@pytest.mark.parametrize(("ranks", "offload"), [(1, "none"), (2, "none"), (2, "optimizer")])
def test_a_rule_that_fails_is_one_message(
    prepared: Path, tmp_path: Path, ranks: int, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # ranks are programs, which import `helpers`
    config = config_of(prepared, tmp_path / "run", dataset="helpers.items.items")
    with pytest.raises(optimus.UserError) as caught:
        optimus.train(config, [f"state.offload={offload}"], ranks=ranks, optimizer=Failing(weight_decay=0.1))
    message = f"rank {ranks - 1}: the update rule Failing failed (ValueError: odd): correct its method apply"
    assert re.search(rf"step [23]: {re.escape(message)}", str(caught.value)), caught.value
    assert "Traceback" not in str(caught.value)


ODD_RATES = """
from optimus.extend import LrRow

def rate(schedule, step):
    if step == schedule.options["at"]:
        ODD
    return schedule.peak

ROWS = [LrRow("odd", rate, {"at": 3})]
"""


@pytest.mark.parametrize(
    ("ranks", "at", "odd", "message"),
    [
        (1, 1, "raise ValueError('a\\nb')", "failed (ValueError: a b): correct its function rate"),
        (1, 4, "return 'fast'", "returns 'fast': return a finite number of at least 0"),
        (2, 1, "return float('nan')", "returns nan: return a finite number of at least 0"),
        (2, 3, "raise SystemExit(3)", "failed (SystemExit: 3): correct its function rate"),
    ],
)
def test_a_learning_rate_that_fails_is_one_message(
    ranks: int, at: int, odd: str, message: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # ranks are programs, which import `helpers`
    (tmp_path / "odd_rates.py").write_text(ODD_RATES.replace("ODD", odd))
    config = config_of(prepared, tmp_path / "run", dataset="helpers.items.items") | {"plugins": ["odd_rates"]}
    config["lr_schedule"] = {"name": "odd", "warmup_steps": 0, "options": {"at": at}}
    try:
        with tables_restored(), pytest.raises(optimus.UserError) as caught:
            optimus.train(config, ranks=ranks)
    finally:
        sys.modules.pop("odd_rates", None)
    assert re.search(rf"step {at}: rank [01]: the learning-rate schedule odd {re.escape(message)}", str(caught.value))
    assert "Traceback" not in str(caught.value)
    assert caught.value.code == 2


def test_an_instance_has_its_own_hyperparameters(prepared: Path, tmp_path: Path) -> None:
    """They may have any type; the factor of the learning rate counts, and so do the options of the configuration."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Odd(Momentum):
        shape: tuple[int, ...] = (1,)
        name: str = "a"
        steps: int = 0

        def apply(self, now: OptimizerStep, tile: Tile) -> None:
            assert (self.shape, self.name) == ((2, 3), "b")
            for _ in range(self.steps):
                super().apply(now, tile)

    rule = Odd(weight_decay=0.1, shape=(2, 3), name="b", steps=1, momentum=0.7, lr_scale=2.0)
    optimus.train(config_of(prepared, tmp_path / "odd", dataset="helpers.items.items"), optimizer=rule)
    plain = config_of(prepared, tmp_path / "plain", dataset="helpers.items.items")
    plain["lr_schedule"] |= {"lr": 2e-2, "min_lr": 8e-5}
    optimus.train(plain, ["optimizer.options={momentum: 0.7}"], optimizer=Momentum(weight_decay=0.1))
    assert losses(tmp_path / "odd") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)


def test_the_object_is_the_plugin(prepared: Path, tmp_path: Path) -> None:
    """A rule as an instance, as a class and as a row of the table have the same bits."""
    found = []
    for name, rule, more in (
        ("instance", Momentum(weight_decay=0.1, momentum=0.7), []),
        ("class", Momentum, ["optimizer.options={momentum: 0.7}"]),
    ):
        optimus.train(config_of(prepared, tmp_path / name, dataset="helpers.items.items"), more, optimizer=rule)
        found.append(losses(tmp_path / name))
    assert found[0] == found[1]
    optimus.train(config_of(prepared, tmp_path / "adamw", dataset="helpers.items.items"))
    assert losses(tmp_path / "adamw") != found[0]


def test_what_was_trained_is_evaluated_without_the_objects(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    optimus.train(config_of(prepared, run), data=Items(), optimizer=Momentum(weight_decay=0.1))
    monkeypatch.setattr(RULES, "_added", {})  # as in another process
    assert isinstance(optimus.generate(run, "the", max_tokens=2), str)
    optimus.export(run, tmp_path / "folder")
    assert api.runs(run)[0]["step"] == 6
    for missing, message in (
        (
            {"data": Items()},
            "'optimizer.name' is '.*Momentum': it must be .*, or the rule that is the argument `optimizer`",
        ),
        ({"optimizer": Momentum}, "data.dataset is argument, so the dataset of this run is an object"),
    ):
        with pytest.raises(optimus.UserError, match=message):
            optimus.train(run / "config.yaml", resume=True, **missing)


def test_named_datasets_and_the_check(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, tmp_path / "run", dataset="helpers.items.items")
    report = optimus.train(config, check=True)
    assert report["data_tokens"] == SIZE * LENGTH
    report = optimus.train(config | {"data": config["data"] | {"dataset": "helpers.items.Stream"}}, check=True)
    assert report["data_tokens"] is None
    for name, message in (
        ("items", "names no module: give package.module.name"),
        ("helpers.items.itms", "helpers.items has no itms: did you mean 'items'"),
        ("helpers.no_such", "cannot be imported|has no no_such"),
    ):
        with pytest.raises(optimus.UserError, match=message):
            optimus.train(config | {"data": config["data"] | {"dataset": name}}, check=True)


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        ({"path": "data"}, Items, "path and dataset are given: give one of them"),
        ({"tokenizer": None}, Items, "data.tokenizer is missing"),
        ({}, None, "path, sources and dataset are missing"),
        ({"tokenizer": "nowhere"}, Items, "tokenizer not found: nowhere"),
    ],
)
def test_sections_that_do_not_fit(
    data: dict[str, Any], given: Any, message: str, prepared: Path, tmp_path: Path
) -> None:
    with pytest.raises(optimus.UserError, match=message):
        optimus.train(config_of(prepared, tmp_path / "run", **data), data=given and given(), check=True)


def test_a_stream_has_no_epochs_and_is_not_replayed(prepared: Path, tmp_path: Path) -> None:
    config = config_of(prepared, tmp_path / "run")
    del config["train"]["steps"]
    with pytest.raises(optimus.UserError, match=r"train\.epochs: a stream has no number of items"):
        optimus.train(config, ["train.epochs=2"], data=Stream(), check=True)
    assert optimus.train(config, ["train.epochs=2"], data=Items(), check=True)["steps"] == 2 * SIZE // 8
    config["phases"] = [{"steps": 2}, {"steps": 2, "replay": 0.5}]
    with pytest.raises(optimus.UserError, match="argument is a stream, which cannot be read again: remove replay"):
        optimus.train(config, data=Stream(), check=True)


@pytest.mark.parametrize("wrong", [torch.optim.SGD([torch.zeros(1)]), torch.optim.AdamW, UpdateRule, "adamw"], ids=str)
def test_what_is_no_rule_is_named(wrong: Any, prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(
        optimus.UserError, match=re.escape("give an `optimus.extend.UpdateRule`, a dataclass whose method")
    ):
        optimus.train(config_of(prepared, tmp_path / "run"), data=Items(), optimizer=wrong)


def test_what_cannot_be_sent_says_how_to_name_it() -> None:
    with pytest.raises(optimus.UserError, match=r"`data` cannot be pickled .*in data.dataset"):
        UserObjects(data=[threading.Lock()]).dumps()


def test_classes_with_a_base_that_python_contains_frozen() -> None:
    class Own(UpdateRule):
        """Has the metaclass of `abc`."""

        def apply(self, now: OptimizerStep, tile: Tile) -> None: ...

    assert type(functions.loads(functions.dumps(Own))) is abc.ABCMeta
