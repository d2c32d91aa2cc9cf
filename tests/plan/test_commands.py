"""Output, files and refusals of `optimus plan`; the predicted memory is the memory of a run."""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner

import optimus
from helpers.sweep import in_turns
from optimus.cli import app
from optimus.config import load_config
from optimus.config.sizes import counted, size_text
from optimus.plan import largest
from optimus.plan.job_builder import as_configured, asked, best_layout, configured
from optimus.plan.machine import load_machine
from optimus.plan.machine_template import machine_template
from optimus.plan.prediction import dry_run, predict
from optimus.plan.profile import Profile
from optimus.plan.what_if import changed

MODEL = {"family": "olmoe", "hidden": 256, "layers": 8, "heads": 4, "intermediate": 256, "vocab": 1024}
EXPERTS = {"experts": 8, "experts_per_token": 2}


@pytest.fixture
def plan(tmp_path: Path, prepared: Path) -> Callable[..., Any]:
    """Returns a function that runs the command on a small run's file and returns its JSON or its text."""
    run = {
        "model": MODEL | EXPERTS,
        "data": {"path": str(prepared)},
        "train": {
            "output": str(tmp_path / "run"),
            "steps": 4,
            "global_batch": 16,
            "micro_batch": 1,
            "sequence_length": 32,
            "precision": "bfloat16",
        },
        "lr_schedule": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2},
    }
    written = tmp_path / "run.yaml"
    written.write_text(yaml.safe_dump(run))

    def call(
        *words: str, text: bool = False, ranks: int = 4, machine: str = "laptop", file: Path = written, code: int = 0
    ) -> Any:
        arguments = ["plan", str(file), *words, "--ranks", str(ranks), "--machine", machine]
        result = CliRunner().invoke(app, [*arguments, *([] if text else ["--json"])], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output if text else json.loads(result.output)

    return call


def refused(*words: str) -> str:
    with pytest.raises(optimus.UserError) as error:
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    return str(error.value)


def test_json(plan: Callable[..., Any]) -> None:
    plans = plan("--best", "3")["plans"]
    assert len(plans) == 3
    first = plans[0]
    assert {
        "parallel",
        "state",
        "recompute",
        "step_seconds",
        "tokens_per_second",
        "model_flops_utilization",
    } <= first.keys()
    assert first["memory_bytes"]["total"] == pytest.approx(
        sum(size for kind, size in first["memory_bytes"].items() if kind != "total")
    )
    assert first["tokens_per_second"] == pytest.approx(16 * 32 / first["step_seconds"])
    assert sum(first["time"].values()) == pytest.approx(first["step_seconds"], rel=1e-6)
    assert sum(each["number"] for each in first["communicators"]["groups"]) == first["communicators"]["total"] > 0
    assert [each["step_seconds"] for each in plans] == sorted(each["step_seconds"] for each in plans)


def test_a_table_and_what_one_row_is_made_of(plan: Callable[..., Any]) -> None:
    text = plan("--best", "2", "--explain", "2", text=True)
    assert "4 ranks of laptop, 16 sequences of 32 tokens, bf16" in text
    assert "a step of 512 tokens takes " in text
    # Gloo's communicators have no such buffers
    assert re.search(r"a rank has up to [1-9] communicators:\n  .* of 4 ranks\n", text)
    assert "4 ranks on 1 node" in text
    text = plan("--explain", "1", machine="dgx-h100", text=True)
    assert re.search(r"a rank has up to [1-9] communicators?, whose buffers take [\d.]+ [kMG]B:\n", text)


def test_below_a_table_stands_what_it_does_not_say(plan: Callable[..., Any], tmp_path: Path) -> None:
    """Notes below the table give the run's hours, the meaning of a batch, the memory left and the source of the
    figures."""
    found, text = plan("--best", "1"), plan("--best", "1", text=True)
    first, machine = found["plans"][0], load_machine("laptop")
    hours = 4 * first["step_seconds"] / 3600
    said = " ".join(text.split())
    number, size = first["microbatches"], first["micro_batch"]
    said_batch = f"{counted(number, 'microbatch')} of {counted(size, 'sequence')}"
    assert f"batch {number}x{size}: a step of each data-parallel rank has {said_batch}." in said
    assert (
        f"The run, 4 steps or 2.05 K tokens, takes {hours:.3g} hours with plan 1: {4 * hours:.3g} device hours." in said
    )
    assert found["machine"] == {"name": "laptop", "memory_bytes": 4e9, "source": " ".join(machine.source.split())}
    assert first["run"]["steps"] == 4
    assert first["run"]["tokens"] == 2048
    assert first["run"]["device_hours"] == pytest.approx(4 * hours)
    left = machine.memory - first["memory_bytes"]["total"]
    assert f"Plan 1 leaves {size_text(left)} of the 4 GB of a rank free, besides state and activations." in said
    assert "Predicted, not measured. Source of the figures of laptop: A plain machine of eight cores" in said
    far = " ".join(plan("--best", "1", text=True, machine="dgx-h100", ranks=8).split())
    assert re.search(
        r"Plan 1 leaves [\d.]+ GB of the 85 GB of a rank free, besides state and activations and [\d.]+ [GM]B of "
        r"communicators' buffers\.",
        far,
    )


def test_what_explains_a_row_says_which_algorithm_each_kind_of_group_uses(plan: Callable[..., Any]) -> None:
    """Explanations name two-level algorithms between nodes of processors, and follow `--what-if`."""
    words = ["--as-is", "--explain", "1"]
    for ranks, change, expected in (
        (4, "host.link=x1", r"  4 ranks on 1 node +all-reduce \(.* MB\): direct\n"),
        (
            16,
            "host.link=x1",
            r"  16 ranks on 4 nodes +all-reduce \(.* MB\): direct\+direct\n",
        ),
        (16, "profile.collectives=ring", r"  16 ranks on 4 nodes .*: the backend's own, a ring\n"),
    ):
        text = plan(*words, "--what-if", change, text=True, ranks=ranks)
        assert re.search(
            "collectives of a rank, with the size of the largest of each kind and the algorithm:\n" + expected, text
        ), text


def test_the_buffers_of_communicators_are_the_machines(plan: Callable[..., Any]) -> None:
    usual, changed = (
        plan("--as-is", *words)["plans"][0]["communicators"]
        for words in ([], ["--what-if", "communicator.channels=x2"])
    )
    assert changed == usual | {"buffer_bytes": 2 * usual["buffer_bytes"]}


@pytest.mark.parametrize("scaled", [False, True])
def test_the_table_fits_a_terminal(scaled: bool) -> None:
    """The table has at most 100 columns, however long its entries; `--wide` prints all columns."""
    parallel = ["data=96", "tensor=[4,2]", "expert=48", "pipeline=4", "schedule=interleaved-1f1b", "stages_per_rank=4"]
    overrides = [*(f"parallel.{each}" for each in parallel), "parallel.pipeline_stride=384", "state.shard=parameters"]
    overrides += ["state.shard_ranks=8", "recompute=[norm,attention,moe]"]
    words = ["plan", "mula-100b-a7b", *overrides, "--machine", "aurora", "--ranks", "3072", "--as-is"]
    words += ["--scale", "3072,12288"] if scaled else []
    short, wide = (CliRunner().invoke(app, [*words, *more], catch_exceptions=False).output for more in ([], ["--wide"]))
    assert max(map(len, short.splitlines())) <= 100
    assert "…" not in short
    assert all(word in short for word in ("interleaved", "/384", "tp4x2", "ep48", "dp96", "GB"))
    columns = ["pipeline", "tensor", "context", "expert", "data", "batch", "shard", "recompute", "step s", "tokens/s"]
    assert all(column in wide for column in [*columns, "utilisation", "memory", "most time"])


@pytest.mark.parametrize(
    ("memory", "fits", "verdict"),
    [
        ("4e9", True, r" MB of 4 GB: fits"),
        ("1e8", False, r" MB of 100 MB: does not fit"),
        ("TOTAL", False, r" MB of .* MB \(.* MB are usable: fragmentation wastes the rest\): does not fit"),
    ],
)
def test_a_dry_run_ends_with_a_verdict(plan: Callable[..., Any], memory: str, fits: bool, verdict: str) -> None:
    words = ["--as-is", "--dry-run", "0", "state.shard=parameters", "checkpoint.asynchronous=true"]
    held = plan(*words)["bytes"]
    assert held["gathered"] > 0
    assert held["copies"] > 0
    words += ["--what-if", f"memory={1.02 * held['total'] if memory == 'TOTAL' else memory}"]
    code = 0 if fits else 1
    assert plan(*words, code=code)["fits"] is fits
    assert re.search(verdict, plan(*words, text=True, code=code).splitlines()[-1])


def test_a_dry_run_is_of_one_rank_and_a_layout_that_does_not_fit_says_so(plan: Callable[..., Any]) -> None:
    with pytest.raises(
        optimus.UserError, match="--dry-run counts the bytes of one rank only: leave out --output and --explain"
    ):
        plan("--dry-run", "0", "--output", "plan.yaml", "--explain", "1")
    with pytest.raises(optimus.UserError, match="--explain 3: there are at most 2 rows"):
        plan("--scale", "8,16", "--explain", "3")
    held = plan("--as-is")["plans"][0]["memory_bytes"]["total"]
    words = ["--as-is", "--what-if", f"memory={held / 2}"]
    assert re.search(r"Plan 1 does not\s+fit: its fullest rank takes", plan(*words, text=True, code=1))
    assert plan(*words, code=1)["plans"][0]["memory_bytes"]["total"] == held
    said = plan(*words, "--scale", "4,8", text=True, code=1)
    assert re.findall(r"On (\d+) ranks: does not\s+fit: its fullest rank takes", said) == ["4", "8"]
    assert "does not" not in plan("--as-is", "--scale", "4,8", text=True)
    sharded = ["--as-is", "state.shard=optimizer", "--scale", "4,32"]
    fewer, more = (each["memory_bytes"]["total"] for each in plan(*sharded)["plans"])
    assert more < fewer
    said = plan(*sharded, "--what-if", f"memory={1.02 * fewer}", text=True)  # on 32 ranks it fits
    assert re.findall(r"On (\d+) ranks: does not\s+fit", said) == ["4"]


def test_a_layout_whose_state_is_not_on_the_device_says_so(plan: Callable[..., Any]) -> None:
    said = plan("--as-is", "state.offload=disk", text=True)
    assert re.search(r"\boffload\b.*\n.*\n.* disk ", said)
    assert re.search(r"Plan 1 has state.offload disk: the state of .* of a node's host", " ".join(said.split()))
    assert "offload" not in plan("--as-is", text=True)
    assert "offload" in plan("--as-is", "state.offload=disk", "--wide", text=True)


def test_a_dry_run_is_of_the_plan_by_layer(plan: Callable[..., Any]) -> None:
    words = ["--what-if", "memory=1.8e9", "train.sequence_length=2048", "train.global_batch=64", "train.micro_batch=2"]
    words += ["model.layers=6", "model.hidden=512", "model.intermediate=1408", "model.vocab=32000"]
    (best,) = plan(*words, "--layers", "--best", "1", ranks=8, machine="dgx-a100")["plans"]
    assert best["parallel"]["layers"]
    held = [plan(*words, *more, "--dry-run", "0", ranks=8, machine="dgx-a100")["bytes"] for more in (["--layers"], [])]
    assert held[0]["activations"] == pytest.approx(best["memory_bytes"]["activations"])
    assert held[1]["activations"] < held[0]["activations"]


def test_a_length_in_passes_over_the_data(plan: Callable[..., Any], tmp_path: Path) -> None:
    """Epochs become the steps that the data has; the written file still says epochs."""
    words = ["train.steps=null", "train.epochs=0.5"]
    file = tmp_path / "planned.yaml"
    found, usual = plan(*words, "--output", str(file))["plans"], plan()["plans"]
    assert [each.pop("run")["steps"] for each in usual] == [4] * len(usual)
    assert len({each.pop("run")["steps"] for each in found} - {4}) == 1
    assert found == usual
    assert load_config(file).train.epochs == 0.5
    with pytest.raises(optimus.UserError, match="nowhere"):
        plan(*words, "data.path=/nowhere")


@pytest.mark.parametrize(("most", "layers", "found"), [(32, 8, 32), (40, 12, 24), (4, 8, 8)])
def test_the_deepest_of_small_models_may_be_deeper(
    plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, most: int, layers: int, found: int
) -> None:
    """The search stops at a number of layers, no less than the model's own, and says that more would fit."""
    monkeypatch.setattr(largest, "MOST_LAYERS", most)
    text = plan("--largest", "--wide", "--what-if", "memory=1e12", f"model.layers={layers}", text=True)
    assert f" {found} or more" in text


def test_the_deepest_model_that_fits_is_no_lower_bound(
    plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that memory ends does not say that more layers would fit, even at the limit of the search."""
    monkeypatch.setattr(largest, "MOST_LAYERS", 12)
    monkeypatch.setattr(largest, "fits", lambda job: job.model.layers <= 10)
    assert "or more" not in plan("--largest", "--what-if", "memory=1e12", "model.layers=6", text=True)


def test_rows_of_largest_say_where_gradients_accumulate(
    plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows with the same offloading differ in `state.accumulate_on`."""
    monkeypatch.setattr(largest, "MOST_LAYERS", 8)
    text = plan("--largest", "--wide", text=True, machine="dgx-h100")
    for offload in ("all", "disk"):
        found = [len(re.findall(rf"│ {offload}{where} +│", text)) for where in ("", ", sums on host")]
        assert found == [1, 1]
    assert "offload" not in text.partition("batch ")[0]  # the column `state on` says more


def test_what_is_written_can_be_trained(plan: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "planned.yaml"
    first = plan("--output", str(file))["plans"][0]
    written = load_config(file)
    assert written.parallel.model_dump().items() >= first["parallel"].items()
    assert written.state.model_dump().items() >= first["state"].items()
    assert optimus.train(file, ranks=4, check=True)["ok"]
    with pytest.raises(optimus.UserError, match=r"--output: .*planned\.yaml exists already"):
        plan("--output", str(file))


@pytest.mark.parametrize(
    "rest",
    in_turns(
        [
            [],
            ["state.gradient_dtype=bfloat16", "state.overlap=false", "state.tile=4096", "optimizer.clip_norm=2"],
            ["moe.dispatch=allgather", "recompute_collectives=repeat", "parallel.overlap=false"],
            ["recompute=auto", "recompute_budget=1GB", "train.precision=float32"],
            [
                "recompute=[norm]",
                "recompute_every=2",
                "state.shard=parameters",
                "state.reshard_after_forward=false",
                "state.chunk=65536",
            ],
        ],
        3,
        always=2,
    ),
    ids=" ".join,
)
def test_what_is_written_is_the_run_that_was_planned(plan: Callable[..., Any], tmp_path: Path, rest: list[str]) -> None:
    """The written file keeps the sections that the search does not decide, and predicts the time of the plan."""
    file = tmp_path / "planned.yaml"
    first = plan(*rest, "--output", str(file))["plans"][0]
    before, written = load_config(tmp_path / "run.yaml", rest), load_config(file)
    decided = {"shard", "shard_over", "shard_ranks", "reshard_after_forward"}
    assert written.state.model_dump(exclude=decided) == before.state.model_dump(exclude=decided)
    assert written.train == before.train.model_copy(update={"micro_batch": first["micro_batch"]})
    for name in ("model", "data", "optimizer", "lr_schedule", "moe", "checkpoint", "recompute_collectives"):
        assert getattr(written, name) == getattr(before, name)
    assert written.parallel.overlap == before.parallel.overlap
    assert plan("--as-is", file=file)["plans"][0] == first


def test_a_layout_that_the_rest_of_a_run_forbids(plan: Callable[..., Any], tmp_path: Path) -> None:
    layout = ["parallel.tensor=2", "parallel.expert_tensor=2", "parallel.sequence=false", "moe.drop_duplicates=false"]
    with pytest.raises(optimus.UserError, match=r"^the planned layout conflicts with .*drop_duplicates: false"):
        plan(*layout, "--output", str(tmp_path / "planned.yaml"))
    assert not (tmp_path / "planned.yaml").exists()


def test_automatic_recomputation_is_that_which_the_run_would_choose(plan: Callable[..., Any]) -> None:
    words = ["train.sequence_length=4096", "train.micro_batch=4", "parallel.data=4", "recompute=auto", "--as-is"]
    roomy, tight = (plan(*words, *more)["plans"][0] for more in ([], ["recompute_budget=400MB"]))
    assert roomy["recompute"] == []
    assert tight["recompute"] != []
    assert tight["memory_bytes"]["activations"] < roomy["memory_bytes"]["activations"]
    held = plan(*words, "recompute_budget=400MB", "--dry-run", "0")["bytes"]
    assert held["activations"] == pytest.approx(tight["memory_bytes"]["activations"], rel=0.1)


def test_a_run_divides_its_ranks_by_itself(
    plan: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = plan("--best", "1")["plans"][0]
    words = ["train", str(tmp_path / "run.yaml"), "--auto-plan", "laptop", "--check"]
    result = CliRunner().invoke(app, [*words, "--ranks", "4"], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"planned for laptop: data {best['parallel']['data']}" in result.output
    assert "is ready to run: 4 steps on 4 rank(s)" in result.output
    with pytest.raises(optimus.UserError, match=r"^--auto-plan needs the number of ranks: give --ranks, or"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    summary = {
        "step": 2,
        "steps": 4,
        "loss": 1.0,
        "bits_per_byte": None,
        "checkpoint": None,
        "tokens": 1,
        "seconds": 1.0,
    }
    summary |= {"report": None, "stopped_by": None}
    monkeypatch.setattr("optimus.api.train", lambda *_, **__: summary)
    result = CliRunner().invoke(app, [*words[:-1], "--ranks", "4"], catch_exceptions=False)
    assert (
        f"continue with: optimus train {tmp_path / 'run.yaml'} --ranks 4 --auto-plan laptop --resume" in result.output
    )


@pytest.mark.parametrize(
    ("launched", "message"),
    [
        ("2", "--ranks is 4, but a launcher has started 2 ranks (WORLD_SIZE): leave --ranks out"),
        ("two", "WORLD_SIZE is 'two', but must be a number of at least 1"),
    ],
)
def test_a_launcher_of_other_ranks(monkeypatch: pytest.MonkeyPatch, launched: str, message: str) -> None:
    """The number is refused before a layout is searched, so also without a run's file."""
    told = {"RANK": "0", "WORLD_SIZE": launched, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (told | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(optimus.UserError, match=f"^{re.escape(message)}"):
        best_layout("none.yaml", [], "laptop", 4)


def test_as_it_is_and_scaled(plan: Callable[..., Any]) -> None:
    result = plan("parallel.expert=4", "--as-is", "--scale", "4,8,16")
    assert [point["ranks"] for point in result["scaling"]] == [4, 8, 16]
    assert result["scaling"][0]["efficiency"] == 1.0
    assert all(0 < point["efficiency"] <= 1 for point in result["scaling"])
    assert [each["parallel"]["data"] for each in result["plans"]] == [4, 8, 16]
    assert {each["parallel"]["expert"] for each in result["plans"]} == {4}
    assert plan("parallel.expert=4", "--as-is", "--scale", "weak:16,4,8,4,16") == result
    with pytest.raises(optimus.UserError, match="--explain 3: there are at most 2 rows"):
        plan("--scale", "8,16,16", "--explain", "3")


def test_strong_scaling_keeps_the_batch_and_searches_each_layout(plan: Callable[..., Any]) -> None:
    """Each number of ranks has its own best layout; the efficiency is the speed of a rank relative to the fewest."""
    result = plan("--scale", "strong:4,8")
    assert result["scaling_kind"] == "strong"
    assert [point["ranks"] for point in result["scaling"]] == [4, 8]
    speeds = [each["tokens_per_second"] / point["ranks"] for each, point in zip(result["plans"], result["scaling"])]
    assert [point["efficiency"] for point in result["scaling"]] == pytest.approx([each / speeds[0] for each in speeds])
    tokens = [each["tokens_per_second"] * each["step_seconds"] for each in result["plans"]]
    assert tokens[0] == pytest.approx(tokens[1])
    alone = plan("--best", "1", ranks=8)["plans"][0]
    assert result["plans"][1]["step_seconds"] == pytest.approx(alone["step_seconds"])


def test_strong_scaling_of_a_layout_divides_its_batch(plan: Callable[..., Any]) -> None:
    result = plan("parallel.tensor=2", "--as-is", "--scale", "strong", "--until", "tokens=1e9")
    assert [point["ranks"] for point in result["scaling"]] == [4, 8, 16, 32]
    assert [each["parallel"]["data"] for each in result["plans"]] == [2, 4, 8, 16]
    batches = [each["micro_batch"] * each["microbatches"] * each["parallel"]["data"] for each in result["plans"]]
    assert len(set(batches)) == 1
    assert result["until"]["tokens"] == 1e9
    for each in result["plans"]:
        assert each["until"]["seconds"] == pytest.approx(each["until"]["steps"] * each["step_seconds"])
    with pytest.raises(optimus.UserError, match=r"--scale: \d+ ranks: a global batch of \d+ sequences does not divide"):
        plan("--as-is", "--scale", f"strong:4,{4 * 3**9}")


def test_another_machine(plan: Callable[..., Any]) -> None:
    now, faster = (
        plan("parallel.tensor=4", "--as-is", *more)["plans"][0] for more in ([], ["--what-if", "node.bandwidth=x2"])
    )
    assert faster["time"]["tensor_parallel"] < now["time"]["tensor_parallel"]
    assert faster["time"]["matmul"] == pytest.approx(now["time"]["matmul"])
    laptop = load_machine("laptop")
    assert changed(laptop, Profile(), ["memory=128e9", "network.bandwidth=x2"])[0].memory == 128e9
    assert changed(laptop, Profile(), ["name=xeon"])[0].name == "xeon"
    assert changed(laptop, Profile(), ["network.bandwidth=x2"])[0].network.bandwidth == 2 * laptop.network.bandwidth


def test_other_software(plan: Callable[..., Any]) -> None:
    now, slower = (plan("--as-is", *more)["plans"][0] for more in ([], ["--what-if", "profile.speed=0.5"]))
    assert slower["time"]["matmul"] == pytest.approx(2 * now["time"]["matmul"] * Profile().speed)
    with pytest.raises(optimus.UserError, match=r"--what-if: .*collectives"):
        plan("--what-if", "profile.collectives=rings")


def test_gradients_of_two_bytes_take_half_as_long_to_reduce(plan: Callable[..., Any]) -> None:
    wide, half = (plan("--as-is", *more, ranks=8)["plans"][0] for more in ([], ["state.gradient_dtype=bfloat16"]))
    assert half["memory_bytes"]["gradients"] == wide["memory_bytes"]["gradients"] / 2
    assert half["time"]["data_parallel"] < 0.8 * wide["time"]["data_parallel"]


@pytest.mark.in_turn(1, 3)
def test_nodes_that_are_not_equally_near(plan: Callable[..., Any], tmp_path: Path) -> None:
    """The links join two clusters of two nodes, whose nodes alternate."""
    file = tmp_path / "links.csv"
    file.write_text("0,1e8,9e9,1e8\n1e8,0,1e8,9e9\n9e9,1e8,0,1e8\n1e8,9e9,1e8,0\n")
    words = ["--links", str(file), "--best", "2"]
    ranks = 4 * load_machine("laptop").ranks_per_node
    first = plan(*words, ranks=ranks)["plans"][0]
    assert {frozenset(first["nodes"][:2]), frozenset(first["nodes"][2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    text = plan(*words, "--explain", "1", text=True, ranks=ranks)
    assert f"order of the nodes, as indices from 0 into network.links: {' '.join(map(str, first['nodes']))}" in text
    file.write_text("0,1e8\n1e8,fast\n")
    with pytest.raises(
        optimus.UserError, match=r"--links .*links\.csv, line 2: could not convert string to float: 'fast'"
    ):
        plan(*words)
    file.write_text("0,1e8\n1e8\n")
    with pytest.raises(optimus.UserError, match=r"links\.csv: .*row 2: give as many columns as rows"):
        plan(*words)
    file.write_text("\n")
    with pytest.raises(optimus.UserError, match=r"--links .*links\.csv is empty: write a line for each node"):
        plan(*words)
    with pytest.raises(optimus.UserError, match=r"--links .*none\.csv cannot be read"):
        plan("--links", str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("memory", "is not of the form key.path=value"),
        ("wires.bandwidth=x2", "there is no key 'wires.bandwidth'; did you mean '[a-z]+.bandwidth'"),
        ("network.bandwith=3", "there is no key 'network.bandwith'; did you mean 'network.bandwidth'"),
        ("network.bandwith=x3", "there is no key 'network.bandwith'; did you mean 'network.bandwidth'"),
        ("memory_bandwdth=x2", "there is no key 'memory_bandwdth'; did you mean 'memory_bandwidth'"),
        ("zzz=2", "there is no key 'zzz'; valid: alone, arithmetic.bf16.achieved, "),
        ("memory=much", "much is neither a number nor a factor such as x2"),
        ("memory=-1", "'memory' is -1.0"),
    ],
)
def test_changes_that_make_no_sense(change: str, message: str) -> None:
    with pytest.raises(optimus.UserError, match=message):
        changed(load_machine("laptop"), Profile(), [change])


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"best": 0}, "`best` is 0: ask for at least one plan"),
        ({"imbalance": 0.5}, r"`imbalance` is 0\.5: give 1, which means"),
        ({"imbalance": math.nan}, "`imbalance` is nan: give 1, which means"),
        ({"imbalance": math.inf}, "`imbalance` is inf: give 1, which means"),
        ({"largest": True, "as_is": True}, "`largest` changes the model, which `as_is` and `scale` keep"),
    ],
    ids=str,
)
def test_questions_that_make_no_sense(question: dict[str, Any], message: str) -> None:
    with pytest.raises(optimus.UserError, match=message):
        optimus.api.plan("mula-tiny", machine="laptop", ranks=1, **question)


def test_a_row_that_is_not_asked_for_cannot_be_explained(plan: Callable[..., Any]) -> None:
    """A row beyond the table is refused before the search."""
    with (
        mock.patch("optimus.api.plan", side_effect=AssertionError),
        pytest.raises(optimus.UserError, match="--explain 9: there are at most 2 rows"),
    ):
        plan("--best", "2", "--explain", "9")


@pytest.mark.parametrize("row", [0, -1, 2])
def test_only_rows_of_the_table_can_be_explained(row: int) -> None:
    answer = optimus.api.plan("mula-tiny", machine="dgx-a100", ranks=1, best=1)
    with pytest.raises(optimus.UserError, match=rf"--explain {row}: the table has 1 row"):
        answer.explained(row)


def test_fp32_for_want_of_a_rate_is_said(plan: Callable[..., Any], tmp_path: Path) -> None:
    tree = yaml.safe_load(machine_template())
    tree["arithmetic"] = {"fp32": {"peak": 60e12, "achieved": 50e12}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    text = plan("train.precision=auto", "--best", "1", machine=str(path), ranks=1, text=True)
    assert "1 rank of my-machine" in text
    assert "The precision is fp32, because the file of my-machine has no rate for bf16 (arithmetic.bf16)." in " ".join(
        text.split()
    )


def test_changes_of_texts_and_booleans() -> None:
    """A key that is null or a boolean now takes what the file of a machine or profile takes."""
    changes = ["profile.products=fp8", "profile.blocking=true", "host.shared=true"]
    machine, profile = changed(load_machine("frontier"), Profile(), changes)
    assert (profile.products, profile.blocking) == ("fp8", True)
    assert machine.host.shared
    for change, message in (
        ("profile.products=fp9", r"--what-if: .*products"),
        ("profile.blocking=x2", "a factor needs a number to multiply, but the present value is False"),
        ("profile.speed=fast", "fast is neither a number nor a factor such as x2"),
    ):
        with pytest.raises(optimus.UserError, match=message):
            changed(machine, Profile(), [change])


def test_changes_of_the_software_that_make_no_sense(plan: Callable[..., Any]) -> None:
    for change, right in (("profile.sped=x2", "profile.speed"), ("speed=2", "profile.speed")):
        with pytest.raises(
            optimus.UserError, match=rf"there is no key '{change[:-2].strip('=')}'; did you mean '{right}'"
        ):
            plan("--as-is", "--what-if", change)


def test_bad_input(tmp_path: Path) -> None:
    preset = ["mula-tiny", "--ranks", "4"]
    assert refused("mula-tiny").startswith("--ranks is missing")
    assert refused("mula-tiny", "--ranks", "0").startswith("--ranks 0: say how many ranks the job has")
    assert refused(*preset).startswith("--machine is missing: name one of a100-40gb-roce, ")
    assert "did you mean 'frontier'?" in refused(*preset, "--machine", "frontir")
    assert "did you mean 'mula-tiny'?" in refused("mula-tny", "--ranks", "4", "--machine", "laptop")
    assert refused(*preset, "--machine", "laptop", "--scale", "a,b").startswith("--scale a,b: give numbers of ranks")
    assert "--scale: 0 ranks: give positive numbers" in refused(*preset, "--machine", "laptop", "--scale", "0,8")
    wrong = refused(*preset, "--machine", "laptop", "--scale", "strong:a")
    assert wrong.startswith("--scale strong:a: give numbers of ranks")
    assert refused(*preset, "--machine", "laptop", "--until", "tokens=few").startswith(
        "--until tokens=few: give tokens=N"
    )
    assert "add --scale" in refused(*preset, "--machine", "laptop", "--plot", str(tmp_path / "x.png"))
    assert refused(*preset, "--machine", "laptop", "--dry-run", "4") == "--dry-run 4: the ranks are 0 to 3"
    assert "not a multiple of the layout's 4 ranks: use 4" in refused(*preset, "--machine", "laptop", "--scale", "4,6")


# ---- Predicted memory, and the memory of the parts of a run ----

STATES = ["none", "optimizer", "gradients", "parameters"]
LAYOUTS: list[list[str]] = [
    [],
    ["parallel.tensor=2", "parallel.expert=4"],
    ["parallel.tensor=[2,2]", "parallel.sequence=true", "parallel.expert_tensor=2"],
    ["parallel.context=2", "parallel.expert=2"],
    ["parallel.pipeline=4", "parallel.expert=2"],
    ["parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.tensor=2"],
    ["parallel.pipeline=2", "parallel.schedule=zbv", "parallel.stages_per_rank=2"],
    ["parallel.pipeline=2", "parallel.schedule=interleaved-1f1b", "parallel.stages_per_rank=4"],
    ["parallel.pipeline=4", "parallel.layers_per_stage=[1,3,3,1]", "parallel.schedule=gpipe"],
    ["parallel.pipeline=2", "parallel.vocabulary=true"],
]
RECOMPUTED = ["[]", "[norm]", "[attention,moe]", "[block]"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
@pytest.mark.parametrize("shard", STATES)
def test_memory_is_what_the_parts_of_a_run_hold(layout: list[str], shard: str) -> None:
    """State is within 3 % and the total within 10 %, on the fullest rank of the pipeline."""
    draw = random.Random(f"{layout}{shard}")
    more = [
        f"state.shard={shard}",
        f"recompute={draw.choice(RECOMPUTED)}",
        "train.global_batch=64",
        "train.micro_batch=2",
    ]
    shape = [
        f"model.{name}={value}"
        for name, value in {"hidden": 1024, "layers": 8, "intermediate": 1024, "vocab": 32768}.items()
    ]
    model = [*shape, "train.sequence_length=512", "train.precision=bfloat16", *layout, *more]
    config = configured("mula-tiny-moe", model, 8)
    job = as_configured(asked(config, "dgx-a100", 8, []))
    predicted = predict(job).memory
    found = dry_run(job, predicted.rank * (8 // job.mesh.pp))
    at_rest = sum(predicted.parts[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert at_rest == pytest.approx(
        sum(found[kind] for kind in ("parameters", "gradients", "master", "moments")), rel=0.03
    )
    assert predicted.total - predicted.parts["gathered"] == pytest.approx(
        sum(found.values()) - found.get("gathered", 0), rel=0.10
    )


SHAPE = {"hidden": 256, "layers": 8, "heads": 4, "intermediate": 1024, "vocab": 4096}
GROUPED_EXPERTS = {
    "experts": 8,
    "experts_per_token": 2,
    "expert_intermediate": 128,
    "expert_groups": 2,
    "groups_per_token": 1,
}
PYRAMID = {"family": "pr_moe", "experts": 8, "experts_per_token": 1, "experts_by_layer": "[0,4,0,4,0,8,8,8]"}
OWN: dict[str, tuple[str, dict[str, Any]]] = {  # a preset, and the changes to it
    "gpt2": ("gpt2", {}),
    "opt": ("opt-125m", {"tie_embeddings": "false"}),
    "gemma": ("gemma-2-2b", {"kv_heads": 2, "head_size": 64}),
    "grouped heads": ("llama-3.2-1b", {"kv_heads": 2}),
    "experts": ("qwen3-30b-a3b", {"kv_heads": 2, "experts": 8, "experts_per_token": 2, "sparse_every": 2}),
    "latent": ("deepseek-v3", GROUPED_EXPERTS),
    "queries": ("deepseek-v3", GROUPED_EXPERTS | {"latent.queries": "null", "latent.value": 48}),
    "pyramid": ("mula-tiny-moe", PYRAMID),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("shard", ["none", "parameters"])
@pytest.mark.parametrize(
    "layout", [["parallel.tensor=2"], ["parallel.pipeline=2", "parallel.vocabulary=true"]], ids=str
)
def test_state_of_families_is_exact(name: str, layout: list[str], shard: str) -> None:
    preset, own = OWN[name]
    shape = [f"model.{field}={value}" for field, value in (SHAPE | own).items()]
    more = [
        "train.sequence_length=512",
        "train.precision=bfloat16",
        "train.global_batch=64",
        f"state.shard={shard}",
        *layout,
    ]
    config = configured(preset, shape + more, 8)
    job = as_configured(asked(config, "dgx-a100", 8, []))
    predicted = predict(job).memory
    found = dry_run(job, predicted.rank * (8 // job.mesh.pp))
    planned = sum(predicted.parts[kind] for kind in ("parameters", "gradients", "optimizer"))
    held = sum(found[kind] for kind in ("parameters", "gradients", "master", "moments"))
    assert planned == pytest.approx(held, rel=1e-4)  # chunks are padded to whole shards


def test_sequences_as_long_as_the_model_has_learned_positions() -> None:
    assert [configured(name, [], 8).train.sequence_length for name in ("gpt2", "opt-125m", "gemma-2-2b")] == [
        1024,
        2048,
        4096,
    ]
