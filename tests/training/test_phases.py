"""A run with mixtures and phases finds its data from any step and in any layout, and reports the tokens of each source."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import optimus
from helpers.sweep import in_turns
from helpers.trained import train_here
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.config import load_config
from optimus.data.loader import TokenLoader
from optimus.data.mixture import Mixture
from optimus.data.preparation import prepare
from optimus.data.shards import Shards
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.observe.metrics import read_metrics
from optimus.testing import run_ranks
from optimus.training.reading import read_run

NAMES = ["model", "data", "comm", "training", "kernels"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Prepares five folders with one tokenizer and context 32. Every word names its source, so no sequence is in two
    sources; numbers between the words make the sequences of a source different."""
    place, root = tmp_path_factory.mktemp("sources"), Path(__file__).resolve().parents[2] / "optimus"
    for name, mark in zip(NAMES, "ABCDE"):
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((root / name).rglob("*.py")))
        words = [
            f"{mark}{word} {number}" if number % 8 == 0 else f"{mark}{word}" for number, word in enumerate(text.split())
        ]
        (place / f"{name}.txt").write_text(" ".join(words), encoding="utf-8")
    prepare([place / f"{NAMES[0]}.txt"], place / NAMES[0], train_tokenizer=300, context=32, workers=1)
    for name in NAMES[1:]:
        prepare([place / f"{name}.txt"], place / name, tokenizer=place / NAMES[0], context=32, workers=1)
    return {name: str(place / name) for name in NAMES}


@pytest.fixture
def phased(small_run: dict[str, Any], folders: dict[str, str]) -> dict[str, Any]:
    """Returns the configuration of three phases of five sources, with unlike mixtures, lengths, batches and learning
    rates."""
    run = copy.deepcopy(small_run)
    del run["data"], run["train"]["steps"]
    run["model"] = {k: v for k, v in run["model"].items() if "experts" not in k} | {"family": "olmo"}
    run["train"] |= {"global_batch": 8, "micro_batch": 2, "precision": "float32"}
    run["checkpoint"] = {"every": 1, "keep": None}

    def sources(*weights: float) -> list[dict[str, Any]]:
        return [{"path": folders[name], "weight": weight} for name, weight in zip(NAMES, weights)]

    anneal = [{"path": folders["comm"], "tokens": 330}, *sources(1, 2, 0, 2, 2.5)[:2], *sources(0, 0, 0, 2, 1)[3:]]
    run["phases"] = [
        {"name": "short", "steps": 3, "sequence_length": 16, "data": sources(0.4, 0.3, 0.1, 0.1, 0.1)},
        {"name": "main", "tokens": 4 * 12 * 32, "global_batch": 12, "data": sources(1, 1, 1, 1, 1)},
        {"name": "anneal", "steps": 4, "data": anneal, "lr_schedule": {"name": "linear", "lr": 1e-3, "min_lr": 0.0}},
    ]
    return run


def records(run: dict[str, Any]) -> list[dict[str, Any]]:
    timed = {
        "time",
        "tokens_per_second",
        "step_seconds",
        "data_seconds",
        "checkpoint_seconds",
        "model_flops_utilization",
    }
    return [
        {key: value for key, value in record.items() if key not in timed and not key.startswith(("time/", "memory/"))}
        for record in read_metrics(Path(run["train"]["output"]))
    ]


def changed(run: dict[str, Any], **train: Any) -> dict[str, Any]:
    run = copy.deepcopy(run)
    run["train"] |= train
    return run


@pytest.mark.in_turn(1, 2)
def test_counts_are_exact_and_no_sequence_is_read_twice(phased: dict[str, Any]) -> None:
    """One, two and four ranks read the same steps, and each source has the tokens of the metrics."""
    tree, data = read_run(phased)
    by_rank = [[TokenLoader(data.phases, rank=r, ranks=n) for r in range(n)] for n in (1, 2, 4)]
    seen: dict[str, list[bytes]] = {name: [] for name in NAMES}
    owners: dict[bytes, set[str]] = {}  # two folders may share half a row, such as a file's first lines
    for name, shards in zip(NAMES, data.folders.values()):
        for row in shards.rows(0, shards.instances).astype(np.int64):
            for part in (row, row[:16], row[16:]):
                owners.setdefault(bytes(part), set()).add(name)
    for step in range(1, 12):
        whole, *parts = [[next(loader) for loader in loaders] for loaders in by_rank]
        tokens_BS = whole[0].tokens_BS
        assert all(np.array_equal(np.concatenate([each.tokens_BS for each in part]), tokens_BS) for part in parts)
        names, source_B = data.phases[(step > 3) + (step > 7)].names, whole[0].source_B
        for number, sequence in enumerate(map(bytes, tokens_BS)):
            name = names[0 if source_B is None else source_B[number]]
            assert name in owners[sequence]
            seen[name].append(sequence)
        assert data.tokens_by_source(step) == {
            name: sum(map(len, seen[name])) // 8 for name in data.tokens_by_source(step)
        }
        assert sum(data.tokens_by_source(step).values()) == sum(
            (8 * 16, 12 * 32, 8 * 32)[(s > 3) + (s > 7)] for s in range(1, step + 1)
        )
    assert all(len(set(each)) == len(each) for each in seen.values())
    assert tree.train.total_steps == 11
    for loaders in by_rank:
        for loader in loaders:
            loader.close()


def test_a_folder_that_is_spelled_in_two_ways_is_one_source(
    small_run: dict[str, Any], folders: dict[str, str], tmp_path: Path
) -> None:
    """Phases continue a source where earlier phases left it, and a phase may have a source only once."""
    link = tmp_path / "link"
    link.symlink_to(folders["model"])
    spellings = [folders["model"], f"{folders['data']}/../model/", str(link)]
    phases = [{"steps": 2, "data": {"path": path}} for path in (*spellings, folders["model"])]
    del small_run["data"], small_run["train"]["steps"]
    _, data = read_run(small_run | {"phases": phases})
    assert len(data.folders) == 1
    assert [phase.sources[0].first for phase in data.phases] == [0, 16, 32, 48]
    for spelling in spellings[1:]:
        sources = [{"path": folders["model"], "weight": 1.0}, {"path": spelling, "name": "again", "weight": 1.0}]
        with pytest.raises(UserError, match=r"which is .*model, is listed twice"):
            load_config(small_run | {"phases": [{"steps": 2, "data": sources}]})


def test_a_loader_starts_at_any_step(phased: dict[str, Any]) -> None:
    _, data = read_run(phased)
    with TokenLoader(data.phases) as loader:
        whole = [next(loader).tokens_BS for _ in range(12)]
    for start in range(11):
        with TokenLoader(data.phases, start_step=start) as loader:
            assert np.array_equal(next(loader).tokens_BS, whole[start])


def part(config: dict[str, Any], resume: bool) -> None:
    """Runs one rank."""
    import torch.distributed as dist

    train_here(read_run(config)[0], resume)
    dist.barrier()


def test_a_run_resumes_at_every_step_bit_for_bit(phased: dict[str, Any], tmp_path: Path) -> None:
    """A run resumes at every step, also at the borders of phases, with the same bits; checkpoints name the phase."""
    optimus.train(phased)
    whole = records(phased)
    assert [record["phase"] for record in whole] == [0] * 3 + [1] * 4 + [2] * 4
    assert whole[-1]["tokens/comm"] + whole[-1]["tokens/data"] < whole[-1]["tokens"] == 3 * 128 + 4 * 384 + 4 * 256
    assert [record["lr"] for record in whole[7:]] == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0.0])
    described = [read_description(path) for path in list_checkpoints(Path(phased["train"]["output"]))]
    assert [each.progress["phase"] for each in described] == ["short"] * 3 + ["main"] * 4 + ["anneal"] * 4
    assert described[-1].progress["sequences"] == 3 * 8 + 4 * 12 + 4 * 8
    parted = changed(phased, output=str(tmp_path / "parted"))
    for stop in range(1, 12):
        optimus.train(changed(parted, stop_at=stop), resume=stop > 1)
    assert records(parted) == whole


def parts(configs: list[dict[str, Any]], resume: bool) -> None:
    """Runs one rank of each configuration, or of one run that continues with each of them."""
    for number, config in enumerate(configs):
        part(config, resume and number > 0)


LAYOUTS: list[dict[str, Any]] = [
    {"state": {"shard": "parameters"}},
    {"parallel": {"pipeline": 2}},
    {"parallel": {"tensor": 2}},
    {"parallel": {"context": 2}},
    {"parallel": {"pipeline": 2, "vocabulary": True}},
]


@pytest.mark.in_turn(0, 2)
def test_a_run_resumes_at_every_step_on_another_layout(phased: dict[str, Any], tmp_path: Path) -> None:
    optimus.train(phased)
    parted = changed(phased, output=str(tmp_path / "parted"))
    run_ranks(parts, 2, [changed(parted, stop_at=stop) | LAYOUTS[stop % len(LAYOUTS)] for stop in range(1, 12)], True)
    for one, two in zip(records(phased), records(parted), strict=True):
        assert {key: one[key] for key in one if key.startswith(("tokens", "phase", "lr"))}.items() <= two.items()
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_a_run_may_get_another_phase_but_not_other_past_ones(phased: dict[str, Any]) -> None:
    run = copy.deepcopy(phased)
    run["phases"] = run["phases"][:2]
    optimus.train(run)
    assert optimus.train(phased, resume=True)["step"] == 11
    other = copy.deepcopy(phased)
    other["phases"][0]["data"][0]["weight"] = 0.5
    paths = ", ".join(dict.fromkeys(source["path"] for phase in phased["phases"] for source in phase["data"]))
    with pytest.raises(UserError, match=f"belongs to another run: data is {paths} there, with other contents, shares"):
        optimus.train(other, resume=True)


def test_a_phase_that_gets_longer_keeps_its_warmup(phased: dict[str, Any]) -> None:
    """The first phase decides its open warm-up when the run starts: a twentieth of 40 steps."""
    phased["phases"][0] |= {"steps": 40, "lr_schedule": {"name": "inverse-sqrt", "lr": 1e-3}}
    optimus.train(changed(phased, stop_at=1))
    phased["phases"][0]["steps"] = 80
    optimus.train(changed(phased, stop_at=3), resume=True)
    assert [record["lr"] for record in records(phased)] == pytest.approx([5e-4, 1e-3, 1e-3 * math.sqrt(2 / 3)])
    file = Path(phased["train"]["output"]) / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    saved["phases"][0]["lr_schedule"]["warmup_steps"] = "two"
    file.write_text(yaml.safe_dump(saved))
    with pytest.raises(UserError, match=r"'phases.0.lr_schedule.warmup_steps' is 'two': it must be a whole number"):
        optimus.train(changed(phased, stop_at=4), resume=True)


def test_the_saved_configuration_is_the_same_run(phased: dict[str, Any], tmp_path: Path) -> None:
    optimus.train(phased)
    again = tmp_path / "again"
    optimus.train(Path(phased["train"]["output"]) / "config.yaml", [f"train.output={again}"])
    assert records(phased) == records({"train": {"output": str(again)}})


@pytest.mark.in_turn(0, 3)
def test_the_loss_of_each_source_is_that_of_its_sequences(phased: dict[str, Any], tmp_path: Path) -> None:
    """The loss of each source is that of its sequences, and the mean over the sources is the loss of the step.

    The first logged step is computed by hand; all layouts log the same steps and losses.
    """
    phased["observe"] |= {"log_every": 2}
    phased["checkpoint"] = {"every": 100}
    optimus.train(phased)
    tree, data = read_run(phased)
    with TokenLoader(data.phases) as loader:
        batches = [next(loader) for _ in range(11)]
    whole = [{k: v for k, v in each.items() if k.startswith("train_loss/")} for each in records(phased)]
    assert [bool(each) for each in whole] == [step % 2 == 0 for step in range(1, 12)]
    for losses, batch, record in zip(whole, batches, records(phased)):
        if losses:
            names = data.phases[record["phase"]].names
            assert batch.source_B is not None
            places = [int((batch.source_B == names.index(name.split("/")[1])).sum()) for name in losses]
            assert sum(n * loss for n, loss in zip(places, losses.values())) / sum(places) == pytest.approx(
                record["loss"]
            )
    still = changed(phased, output=str(tmp_path / "still"))
    for phase in still["phases"]:
        phase["lr_schedule"] = {"name": "constant", "lr": 1e-30, "warmup_steps": 0}
    optimus.train(still)
    model = Transformer(tree.model)
    initialize(model, 0, tree.model.init_std)
    chosen = batches[1].tokens_BS[batches[1].source_B == 0]  # the second step, which is logged
    expected = float(model.losses(torch.from_numpy(chosen)).cross_entropy.detach())
    assert records(still)[1]["train_loss/model"] == pytest.approx(expected, rel=1e-5)
    others = [changed(phased, output=str(tmp_path / f"{n}")) | sections for n, sections in enumerate(LAYOUTS)]
    run_ranks(parts, 2, others, False)
    for other in others:
        for one, record in zip(whole, records(other), strict=True):
            assert {k: v for k, v in record.items() if k.startswith("train_loss/")} == pytest.approx(one, rel=1e-5)


def test_the_order_of_a_mixture_is_in_the_fingerprint(phased: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_run(phased)[1].fingerprint(11, 0)
    assert read_run(phased)[1].fingerprint(11, 0) == before
    monkeypatch.setattr(Mixture, "locate", lambda self, places_N: (places_N % 5, places_N // 5))
    assert read_run(phased)[1].fingerprint(11, 0)["data"] != before["data"]


def test_tokens_and_epochs_are_read_exactly(small_run: dict[str, Any], folders: dict[str, str]) -> None:
    rows = {name: Shards(folder).instances for name, folder in folders.items()}
    small_run["data"] = [
        {"path": folders["model"], "epochs": 0.5},
        {"path": folders["data"], "tokens": "0.64 K", "name": "few"},
        {"path": folders["comm"], "weight": 3},
        {"path": folders["training"]},
    ]
    small_run["train"]["steps"] = 1000
    data = TrainingData(load_config(small_run))
    found = {name: tokens // 32 for name, tokens in data.tokens_by_source(1000).items()}
    assert (found["model"], found["few"]) == ((rows["model"] + 1) // 2, 20)
    left = 8000 - found["model"] - 20
    assert found["comm"] == pytest.approx(left * 3 / 4, abs=1)
    assert sum(found.values()) == 8000
    small_run["data"] = [{"path": folders["model"], "epochs": 2.0}]
    small_run["train"]["steps"] = 2 * rows["model"] // 8
    assert TrainingData(load_config(small_run)).tokens_by_source(1) == {"model": 256}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"data": [{"path": "model", "weight": 0}]}, "the weights sum to zero: give one of them a weight above 0"),
        ({"data": [{"path": "model"}, {"path": "model"}]}, "two sources are named model: give each a different name"),
        ({"data": [{"path": "model", "tokens": 5, "epochs": 1.0}]}, "tokens and epochs are given: keep one of them"),
        ({"data": [{"path": "model", "wieght": 1}]}, "unknown key 'data.sources.0.wieght'.* 'data.sources.0.weight'"),
        ({"data": []}, "path, sources and dataset are missing: give one of them"),
        (
            {"data": [{"path": "model"}], "steps": 9999},
            "source model has .* tokens, .* its share is .* replace the weight by `epochs`",
        ),
        (
            {"data": [{"path": "model", "epochs": 1.0}], "steps": 9},
            "add up to .* tokens, but the phase reads 2,304: set its length to",
        ),
        (
            {"data": [{"path": "model", "tokens": 5000}, {"path": "data"}], "steps": 9},
            "the phase reads 2,304: set its length to 19",
        ),
        ({"data": [{"path": "model"}], "epochs": 1.0}, "each source has its own number of epochs"),
        ({"data": [{"path": "model"}, {"path": "other"}]}, "prepared with another tokenizer than .*model"),
        (
            {"data": [{"path": "model"}], "vocab": 256},
            "the tokenizer of .*model has 300 tokens, .* vocabulary only 256",
        ),
        ({"phases": [{"tokens": 100}]}, r"phases.0.tokens 100 is not a multiple of a step of 8 x 32 tokens: give 256"),
        (
            {"phases": [{"steps": 2, "tokens": 256}]},
            r"phases.0: give the length of the phase as either steps or tokens",
        ),
        (
            {"phases": [{"steps": 2}], "steps": 3},
            r"train.steps: the length of the run is the 2 steps of its phases: remove it",
        ),
        ({"phases": [{"steps": 2, "sequence_length": 24}]}, "prepared with context 32, but the run needs 24"),
        (
            {"phases": [{"steps": 2, "global_batch": 6}]},
            "phases.0.global_batch 6 is not a multiple of train.micro_batch 4",
        ),
        (
            {"phases": [{"steps": 2, "lr_schedule": {"lr": 1e-5}}]},
            r"phases.0.lr_schedule: min_lr 0.0003 is above lr 1e-05",
        ),
        ({"phases": [{"steps": 2, "lenght": 1}]}, r"unknown key 'phases.0.lenght'"),
        ({"phases": [{"steps": 2}], "stop_at": 3}, r"train.stop_at 3 is beyond the 2 steps of the phases"),
    ],
    ids=str,
)
def test_bad_input_is_refused(
    small_run: dict[str, Any], folders: dict[str, str], tmp_path: Path, sections: dict[str, Any], expected: str
) -> None:
    del small_run["train"]["steps"]
    sections = copy.deepcopy(sections)
    train = {key: sections.pop(key) for key in ("steps", "epochs", "stop_at") if key in sections}
    if not train.keys() & {"steps", "epochs"} and "phases" not in sections:
        train["steps"] = 2
    small_run["train"] |= train
    small_run["model"]["vocab"] = sections.pop("vocab", 320)
    for source in sections.get("data", []):
        if source["path"] == "other":
            root = Path(__file__).resolve().parents[2] / "optimus" / "mesh"
            prepare([root], tmp_path / "other", train_tokenizer=290, context=32, workers=1)
        source["path"] = folders.get(source["path"], str(tmp_path / "other"))
    with pytest.raises(UserError, match=expected):
        read_run(small_run | sections)


def lined(tmp_path: Path, tokenizer: str, pack: str) -> str:
    """Prepares documents of one line each, so that a sequence has many."""
    text = (Path(__file__).resolve().parents[2] / "optimus" / "config" / "tree.py").read_text().splitlines()
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps({'text': line})}\n" for line in text))
    prepare([tmp_path / "lines.jsonl"], tmp_path / pack, tokenizer=tokenizer, context=32, workers=1, pack=pack)  # type: ignore[arg-type]
    return str(tmp_path / pack)


@pytest.mark.parametrize("pack", in_turns(["concatenate", "best-fit"], 2, always=1))
def test_documents_in_a_run_are_what_they_are_alone(
    small_run: dict[str, Any], folders: dict[str, str], tmp_path: Path, pack: str
) -> None:
    """The loss of the first step is that of each document alone, padding excluded, also in other layouts."""
    small_run["data"] = {"path": lined(tmp_path, folders["model"], pack), "documents": "mask"}
    small_run["model"] = {k: v for k, v in small_run["model"].items() if "experts" not in k} | {"family": "olmo"}
    small_run["train"] |= {"precision": "float32", "steps": 3}
    optimus.train(small_run)
    shards, tree = Shards(small_run["data"]["path"]), load_config(small_run)
    one, nats, predicted = Transformer(tree.model), 0.0, 0
    initialize(one, 0, tree.model.init_std)
    for row in shards.rows(0, 8).astype(np.int64):
        for document in np.split(row, np.flatnonzero(row == shards.eos_id) + 1):
            if len(document) > 1:
                nats += float(one.losses(torch.from_numpy(document)[None]).cross_entropy.detach()) * (len(document) - 1)
                predicted += len(document) - 1
    whole = records(small_run)
    assert whole[0]["loss"] == pytest.approx(nats / predicted, rel=1e-6)
    for number, sections in enumerate(({"state": {"shard": "parameters"}}, {"parallel": {"context": 2}})):
        other = changed(small_run, output=str(tmp_path / f"other-{number}")) | sections
        run_ranks(part, 2, other, False)
        assert [each["loss"] for each in records(other)] == pytest.approx([each["loss"] for each in whole], rel=1e-5)


def test_packed_rows_without_masks_train_on_all_but_padding(
    small_run: dict[str, Any], folders: dict[str, str], tmp_path: Path
) -> None:
    small_run["data"] = {"path": lined(tmp_path, folders["model"], "best-fit")}
    small_run["validation"] = [{"name": "rows", "path": small_run["data"]["path"], "tokens": 8 * 32}]
    small_run["model"] = {k: v for k, v in small_run["model"].items() if "experts" not in k} | {"family": "olmo"}
    small_run["train"] |= {"precision": "float32", "steps": 1}
    small_run["lr_schedule"] = {"lr": 1e-30, "min_lr": 0.0, "warmup_steps": 0}
    optimus.train(small_run)
    (record,) = records(small_run)
    assert record["loss/rows"] == pytest.approx(record["loss"], rel=1e-5)


def test_replay_reads_again_what_was_read(small_run: dict[str, Any], folders: dict[str, str]) -> None:
    """A quarter of a phase repeats tokens of earlier phases, from each source in proportion to its tokens read, and no
    others."""
    run = copy.deepcopy(small_run)
    del run["data"], run["train"]["steps"]
    first = [{"path": folders["model"], "weight": 3}, {"path": folders["data"], "weight": 1}]
    new = [{"path": folders["training"]}]
    run["phases"] = [{"steps": 8, "data": first}, {"steps": 16, "data": new, "replay": 0.25}]
    run["phases"].append({"steps": 16, "data": new, "replay": 0.5, "sequence_length": 16})
    _, data = read_run(run)
    with TokenLoader(data.phases) as loader:
        batches = [next(loader).tokens_BS for _ in range(40)]
    before = {bytes(row) for batch in batches[:8] for row in batch}
    assert len(before) == 64
    second = [bytes(row) for batch in batches[8:24] for row in batch]
    assert sum(row in before for row in second) == 32
    assert len(set(second)) == len(second)
    assert data.tokens_by_source(8) == {"model": 48 * 32, "data": 16 * 32}
    assert data.tokens_by_source(24) == {"model": (48 + 24) * 32, "data": (16 + 8) * 32, "training": 96 * 32}
    halves = {bytes(half) for batch in batches[:24] for row in batch for half in (row[:16], row[16:])}
    third = [bytes(row) for batch in batches[24:] for row in batch]
    assert sum(row in halves for row in third) == pytest.approx(64, abs=1)
    run["phases"][0]["replay"] = 0.1
    with pytest.raises(UserError, match=r"phases.0.replay: nothing has been read before"):
        read_run(run)


def test_no_two_passes_of_replays_have_one_order(small_run: dict[str, Any], folders: dict[str, str]) -> None:
    """Two phases that each replay a source more than once read it in another order each time."""
    run = copy.deepcopy(small_run)
    del run["data"], run["train"]["steps"]
    later = {"steps": 4, "data": {"path": folders["training"]}, "replay": 0.5}
    run["phases"] = [{"steps": 8, "data": {"path": folders["model"]}}, later, later]
    _, data = read_run(run)
    orders = []
    for phase in data.phases[1:]:
        replayed = next(source for source in phase.sources if source.name == "model")
        rows, _ = replayed.rows(np.arange(3 * 64), run["train"].get("seed", 0))
        orders += [tuple(rows[start : start + 64]) for start in range(0, 3 * 64, 64)]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert len(set(orders)) == 6
