"""A run from start to end: interrupted, resumed, spread over ranks; and details of the recipe."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import optimus
from helpers.sweep import in_turns
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.config import load_config
from optimus.model import vocabulary
from optimus.observe.metrics import read_metrics
from optimus.training import step
from optimus.training.hooks.huge_gradients import HugeGradients
from optimus.training.step import clip_scale, step_learning_rate


def losses(folder: str | Path) -> list[float]:
    return [record["loss"] for record in read_metrics(Path(folder))]


def changed(config: dict[str, Any], **train: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config["train"].update(train)
    return config


def test_a_run_leaves_what_it_promises(small_run: dict[str, Any]) -> None:
    small_run["observe"] = {"tensorboard": True}
    summary = optimus.train(small_run)
    folder = Path(small_run["train"]["output"])
    records = read_metrics(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert {
        "step", "tokens", "loss", "balance_loss", "z_loss", "lr", "grad_norm",
        "tokens_per_second", "step_seconds", "model_flops_utilization",
    } <= set(records[0])  # fmt: skip
    assert records[-1]["tokens"] == 6 * 8 * 32
    assert records[-1]["loss"] < records[0]["loss"]
    assert list((folder / "tensorboard").iterdir())
    assert load_config(folder / "config.yaml") == load_config(small_run)
    assert summary["checkpoint"] == str(folder / "checkpoints" / "step-00000006")
    model = optimus.load_model(folder)
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 320)


def test_the_saved_config_runs_again_to_the_same_losses(small_run: dict[str, Any], tmp_path: Path) -> None:
    optimus.train(small_run)
    folder = Path(small_run["train"]["output"])
    optimus.train(folder / "config.yaml", [f"train.output={tmp_path / 'again'}"])
    assert losses(folder) == losses(tmp_path / "again")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["olmo", "olmoe"])
def test_resume_is_bit_exact(small_run: dict[str, Any], tmp_path: Path, precision: str, family: str) -> None:
    """Twenty steps after the restart, and the final weights and moments, equal those of an uninterrupted run."""
    if family == "olmo":
        small_run["model"] = {k: v for k, v in small_run["model"].items() if "experts" not in k} | {"family": "olmo"}
    small_run = changed(small_run, steps=25, precision=precision)
    optimus.train(small_run)
    parted = changed(small_run, output=str(tmp_path / "parted"))
    assert optimus.train(changed(parted, stop_at=5))["step"] == 5
    assert optimus.train(parted, resume=True)["step"] == 25
    assert losses(small_run["train"]["output"]) == losses(tmp_path / "parted")
    ends = [load_everything(Path(run["train"]["output"])) for run in (small_run, parted)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def load_everything(run: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of the newest checkpoint, read by plain DCP tools."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out = run / "plain.pt"
    dcp_to_torch_save(list_checkpoints(run)[-1], out)
    return torch.load(out, weights_only=True)


def test_metrics_after_the_last_checkpoint_are_written_once(small_run: dict[str, Any]) -> None:
    """A run killed between two checkpoints repeats the steps in between; their records are equal and appear once."""
    small_run["checkpoint"] = {"every": 2}
    optimus.train(changed(small_run, stop_at=2))
    folder = Path(small_run["train"]["output"])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "loss": -1.0}) + '\n{"step": 4, "lo')
    optimus.train(small_run, resume=True)
    assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert min(losses(folder)) > 0


def test_microbatches_do_not_change_the_numbers(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Microbatches change no number if the balance loss, a function of each microbatch, is off."""
    small_run["moe"] = {"balance_coefficient": 0.0}
    runs = [
        changed(small_run, precision="float32", micro_batch=micro, output=str(tmp_path / f"m{micro}"))
        for micro in (1, 8)
    ]
    for run in runs:
        optimus.train(run)
    a, b = (losses(run["train"]["output"]) for run in runs)
    assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "expert", "send"),
    in_turns(
        [
            ("none", 1, "broadcast"),
            ("optimizer", 2, "allreduce"),
            ("gradients", 1, "broadcast"),
            ("parameters", 2, "broadcast"),
        ],
        2,
        always=2,
    ),
)
def test_two_ranks_equal_one(
    request: pytest.FixtureRequest, small_run: dict[str, Any], tmp_path: Path, shard: str, expert: int, send: str
) -> None:
    """One rank continues a run of two, and two ranks a run of one, with any sharding.

    The data are the project's own sources. AdamW's first update of an element is the learning rate for any gradient far
    above `eps`, so no gradient may be zero but for rounding.
    """
    if shard != "none":  # one case runs the launcher, the others use running ranks
        request.getfixturevalue("warm_ranks")
    text = {"every": 3, "text": str(Path(__file__).with_name("test_checks.py")), "max_bytes": 2000}
    one = changed(small_run, precision="float32", micro_batch=4) | {
        "validation": [text],
        "checkpoint": {"broadcast": send},
    }
    one["optimizer"] = {"eps": 3e-5}
    two = changed(one, output=str(tmp_path / "two")) | {"state": {"shard": shard}, "parallel": {"expert": expert}}
    alone = {"parallel": {"expert": 1}}
    optimus.train(one)
    optimus.train(changed(two, stop_at=2), ranks=2)
    optimus.train(changed(two, stop_at=4) | alone, resume=True)
    optimus.train(two, resume=True, ranks=2)
    lines = (Path(two["train"]["output"]) / "environment.jsonl").read_text(encoding="utf-8").splitlines()
    commands = [json.loads(line)["command"] for line in lines]
    if shard == "none":  # ranks record the user's command, not their own
        assert commands == [psutil.Process().cmdline()] * 3
    records = [read_metrics(Path(run["train"]["output"])) for run in (one, two)]
    for key in ("loss", "balance_loss", "z_loss", "grad_norm"):
        assert [r[key] for r in records[0]] == pytest.approx([r[key] for r in records[1]], rel=1e-5), key
    measured = [{r["step"]: r["bits_per_byte"] for r in its if "bits_per_byte" in r} for its in records]
    assert set(measured[0]) == {3, 6}
    assert {step: measured[1][step] for step in (3, 6)} == pytest.approx(measured[0], rel=1e-5)
    ends = [load_everything(Path(run["train"]["output"])) for run in (one, two)]
    for key, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][key], rtol=1e-4, atol=1e-5)  # updates are 3e-3


def test_recomputation_changes_no_number(small_run: dict[str, Any], tmp_path: Path) -> None:
    optimus.train(small_run)
    again = changed(small_run, output=str(tmp_path / "recomputed"))
    again["recompute"] = ["norm", "attention", "moe"]
    optimus.train(again)
    assert losses(small_run["train"]["output"]) == losses(tmp_path / "recomputed")


def test_uniform_routing_trains(small_run: dict[str, Any]) -> None:
    small_run["moe"] = {"force_balanced": True}
    optimus.train(small_run)
    records = read_metrics(Path(small_run["train"]["output"]))
    assert records[-1]["loss"] < records[0]["loss"]
    # Every expert has the share K / E, so the loss is K for any router.
    assert all(record["balance_loss"] == pytest.approx(2.0, rel=1e-5) for record in records)


def test_old_checkpoints_are_removed(small_run: dict[str, Any]) -> None:
    small_run["checkpoint"] = {"every": 1, "keep": 2}
    optimus.train(small_run)
    kept = list_checkpoints(Path(small_run["train"]["output"]))
    assert [read_description(path).step for path in kept] == [5, 6]


def test_starting_from_the_weights_of_another_run(small_run: dict[str, Any], tmp_path: Path) -> None:
    optimus.train(small_run)
    second = changed(small_run, output=str(tmp_path / "second"))
    second["checkpoint"] = {"load_path": small_run["train"]["output"]}
    optimus.train(second)
    assert losses(tmp_path / "second")[0] < losses(small_run["train"]["output"])[0] - 0.1


def test_held_out_text_is_measured(small_run: dict[str, Any]) -> None:
    text = Path(__file__).with_name("test_training.py")
    small_run["validation"] = [{"every": 3, "text": str(text), "max_bytes": 2000}]
    optimus.train(small_run)
    found = [record.get("bits_per_byte") for record in read_metrics(Path(small_run["train"]["output"]))]
    assert [value is not None for value in found] == [False, False, True, False, False, True]
    assert 0 < found[5] < found[2] < 10


def test_learning_rate_and_clipping_follow_the_paper() -> None:
    train = {"output": "x", "steps": 10_000, "global_batch": 1, "micro_batch": 1, "sequence_length": 2}
    config = load_config({"model": "mula-7b-a1b", "data": {"path": "x"}, "train": train})
    assert step_learning_rate(config, 1) == pytest.approx(4e-4 / 2500)
    assert step_learning_rate(config, 2500) == pytest.approx(4e-4)
    assert step_learning_rate(config, 6250) == pytest.approx((4e-4 + 4e-5) / 2)
    assert step_learning_rate(config, 10_000) == pytest.approx(4e-5)
    assert clip_scale(config, 2500, 5.0) == 1.0
    assert clip_scale(config, 2501, 5.0) == pytest.approx(0.2)
    assert clip_scale(config, 2501, 0.5) == 1.0


def test_steps_with_infinite_gradients_are_skipped_then_end_the_run(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = vocabulary.linear_cross_entropy
    monkeypatch.setattr(vocabulary, "linear_cross_entropy", lambda *of, **how: right(*of, **how) * float("inf"))
    small_run["resilience"] = {"max_skipped": 2}
    with pytest.raises(
        optimus.UserError, match=r"not finite, for 3 steps in a row.*the first weights, so .* look at checkpoint"
    ):
        optimus.train(small_run)
    records = read_metrics(Path(small_run["train"]["output"]))
    assert [record["skipped_steps"] for record in records] == [1, 2, 3]
    description = read_description(list_checkpoints(Path(small_run["train"]["output"]))[-1])
    assert description.step == 3
    assert description.progress == {"updates": 0, "skipped": 3, "sequences": 24}


def test_after_an_update_the_learning_rate_may_be_at_fault(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, factors = step.objective, iter([1.0] * 2 + [float("inf")] * 4)  # two microbatches a step
    monkeypatch.setattr("optimus.launch.rank.dry_run", lambda run: "no dry run")
    monkeypatch.setattr(step, "objective", lambda *given: right(*given) * next(factors))
    small_run["resilience"] = {"max_skipped": 1}
    with pytest.raises(
        optimus.UserError, match=r"step 3: .* for 2 steps in a row.*Lower lr_schedule\.lr.*`resume=True`"
    ):
        optimus.train(small_run)


def test_huge_gradients_are_noted_and_too_large_ones_end_the_run(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Steps 2, 4, 5 and 6 have huge gradients, of which only the first can be applied."""
    right, factors = step.objective, iter([1.0] * 2 + [1e17] * 2 + [1.0] * 2 + [1e22] * 6)  # two microbatches a step
    monkeypatch.setattr("optimus.launch.rank.dry_run", lambda run: "no dry run")
    monkeypatch.setattr(step, "objective", lambda *given: right(*given) * next(factors))
    small_run["resilience"], small_run["lr_schedule"]["warmup_steps"] = {"max_skipped": 2}, 6
    small_run["train"]["precision"] = "float32"
    with pytest.raises(optimus.UserError, match=r"has no finite square in fp32, for 3 steps in a row.*`resume=True`"):
        optimus.train(small_run)
    said = capfd.readouterr().err
    assert re.findall(r"step (\d): gradients with a norm of \d\S*e\+\d\d (were applied|have squares)", said) == [
        ("2", "were applied"),
        *[(str(number), "have squares") for number in (4, 5, 6)],
    ]
    records = read_metrics(Path(small_run["train"]["output"]))
    assert [record["skipped_steps"] for record in records] == [0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("norm", "loss", "skipped", "what"),
    [
        (1e17, 1.0, False, "were applied: large second moments"),
        (1e17, 1.0, True, "were not applied, because the loss was too high"),  # above a `loss_limit`
        (1e17, float("nan"), True, "were not applied, because the loss was too high or not finite"),
        (1e22, 1.0, True, "have squares beyond the range of fp32: the update was skipped"),
    ],
)
def test_what_is_said_of_huge_gradients(norm: float, loss: float, skipped: bool, what: str) -> None:
    said: list[str] = []
    result = step.StepResult(loss, 0.0, 0.0, norm, 1e-3, skipped, clipped_norm=norm)
    trainer = SimpleNamespace(say=said.append, progress=SimpleNamespace(step=3))
    HugeGradients().after_step(trainer, SimpleNamespace(result=result))  # type: ignore[arg-type]
    assert [what in each for each in said] == [True]


@pytest.mark.slow
def test_bad_data_on_one_rank_ends_all_and_saves(prepared: Path, small_run: dict[str, Any], tmp_path: Path) -> None:
    """Rank 1 alone reads the damaged row: shards have 12 rows, and the second step has rows 8 to 15."""
    sources = Path(__file__).resolve().parents[2] / "optimus" / "config"
    data = tmp_path / "data"
    optimus.prepare([sources], data, tokenizer=prepared, context=32, workers=1, shard_size=12 * 32 * 2)
    damaged = bytearray((data / "shard-00001.npy").read_bytes())
    damaged[128] ^= 1  # in the first row of the shard
    (data / "shard-00001.npy").write_bytes(damaged)
    small_run |= {"data": {"path": str(data)}, "state": {"shard": "optimizer"}}
    with pytest.raises(optimus.UserError, match=r"rank [01] failed: .*\(the run is saved up to step 1\)"):
        optimus.train(small_run, ranks=2)
    assert read_description(list_checkpoints(Path(small_run["train"]["output"]))[-1]).step == 1


@pytest.mark.in_turn(0, 3)
@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("shard", "collective"), [("none", "allreduce_"), ("gradients", "send")])
def test_a_trace_shows_that_gradients_are_sent_during_the_backward_pass(
    small_run: dict[str, Any], shard: str, collective: str
) -> None:
    """Calls that begin transfers lie between operations of the backward pass; their length is up to the machine."""
    small_run["observe"] |= {"profile_step": 3}
    small_run["state"] = {"shard": shard, "chunk": 2000}
    optimus.train(small_run, ranks=2)
    folder = Path(small_run["train"]["output"])
    assert (folder / "trace-rank-1.json").exists()
    events = json.loads((folder / "trace-rank-0.json").read_text())["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("ph") == "X"]
    backward = [span for span in spans if "Backward0" in span[2]]
    sent = [span for span in spans if span[2] == f"c10d::{collective}"]
    assert len(sent) > 5  # one for each chunk
    first, last = min(start for start, _, _ in backward), max(start for start, _, _ in backward)
    assert sum(first < start and end < last for start, end, _ in sent) >= 2


@pytest.mark.in_turn(1, 3)
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("overlap", "sequence"), [(True, True), (True, False), (False, True)])
def test_a_trace_shows_input_gradients_on_their_way_beside_the_weights_product(
    small_run: dict[str, Any], sequence: bool, overlap: bool
) -> None:
    """A projection computes its second product while the result of the first one travels (OAR)."""
    small_run["observe"] |= {"profile_step": 2}
    small_run["train"]["stop_at"] = 2
    small_run["parallel"] = {"tensor": 2, "sequence": sequence, "overlap": overlap}
    optimus.train(small_run)
    folder = Path(small_run["train"]["output"])
    events = json.loads((folder / "trace-rank-0.json").read_text())["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("ph") == "X"]
    projections = [span for span in spans if span[2] == "_SplitProductBackward"]
    sent = [span for span in spans if span[2].startswith("gloo:")]
    products = [span for span in spans if span[2] in ("aten::mm", "aten::addmm")]
    beside = [
        product
        for start, end, _ in projections
        for product in products
        if start < product[0] < end
        and any(start < sending[0] < product[0] and product[1] < sending[1] for sending in sent)
    ]
    assert len(projections) >= 2 * 2 * 2  # attention projections, layers, microbatches
    assert bool(beside) == overlap


@pytest.mark.parametrize(
    "pipeline",
    in_turns([{}, {"schedule": "interleaved-1f1b", "stages_per_rank": 2}], 2),
    ids=lambda fields: fields.get("schedule", "1f1b"),
)
def test_a_pipelined_run_equals_one_process(
    small_run: dict[str, Any], tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    """A run with a pipeline does its dry run, steps and checkpoint, and continues in another layout."""
    small_run["model"]["layers"] = 4
    small_run["train"] |= {"precision": "float32", "micro_batch": 2}
    alone = copy.deepcopy(small_run)
    alone["train"]["output"] = str(tmp_path / "alone")
    optimus.train(alone)
    small_run["parallel"] = {"pipeline": 2} | pipeline
    optimus.train(small_run, ["train.stop_at=3"])
    del small_run["parallel"]
    optimus.train(small_run, resume=True)
    losses = [[record["loss"] for record in read_metrics(Path(run["train"]["output"]))] for run in (small_run, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
