"""Errors that are found before the first step or in the middle of a run, each with its message."""

import contextlib
import copy
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

import optimus
from helpers.planned import resolved, state_bytes
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.config import load_config
from optimus.config.sizes import size_text
from optimus.observe.metrics import read_metrics
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.ranks import ranks_per_node
from optimus.resolve.run import ResolvedRun
from optimus.testing import run_ranks
from optimus.testing.memory import allocated
from optimus.training import checks
from optimus.training.build import build_run
from optimus.training.environment import record_start


def edited(config: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Returns `config` with keys of its sections replaced."""
    config = copy.deepcopy(config)
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return config


def message(config: dict[str, Any], **options: Any) -> str:
    with pytest.raises(optimus.UserError) as caught:
        optimus.train(config, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def own_data(tmp_path: Path) -> Path:
    """Prepares data in shards of 16 instances, always the same, for tests that damage them."""
    folder, text = tmp_path / "data", tmp_path / "text.txt"
    text.write_text("\n".join(f"{number} times {number + 3} is {number * (number + 3)}." for number in range(1, 600)))
    optimus.prepare([text], folder, train_tokenizer=300, context=32, workers=1, shard_size=1024)
    return folder


def shard(folder: Path, number: int) -> Path:
    return folder / json.loads((folder / "index.json").read_text())["shards"][number]["file"]


def corrupt(path: Path, place: int = -1) -> None:
    """Flips one bit of a byte, by default of the last byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"sequence_length": 64}}, r"with context 32, but the run needs 64\. Set train\.sequence_length to 32"),
        ({"model": {"vocab": 200}}, r"has 300 tokens, but the model's vocabulary only 200\. Enlarge the model's vocabulary"),
        ({"data": {"path": "/no/such/folder"}}, r"/no/such/folder is not a folder of prepared data: it has no index\.json"),
        ({"train": {"device": "turbo"}}, r"train\.device 'turbo' is not available: this machine has .*cpu"),
        ({"train": {"device": "cpu:x"}}, r"train\.device 'cpu:x' is not available"),
    ],
)  # fmt: skip
def test_settings_that_do_not_match(small_run: dict[str, Any], sections: dict[str, Any], expected: str) -> None:
    for check in (False, True):
        assert re.search(expected, message(edited(small_run, **sections), check=check))
    assert not Path(small_run["train"]["output"]).exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_an_accelerator_that_is_not_there(small_run: dict[str, Any]) -> None:
    for name in ("cuda", "cuda:1", "xpu"):
        found = message(edited(small_run, train={"device": name}))
        assert f"train.device '{name}' is not available: this machine has cpu alone" in found


@pytest.mark.parametrize(
    ("sections", "ranks", "expected"),
    [
        (
            {},
            3,
            "train.global_batch 8 is not a multiple of 3 data-parallel ranks times train.micro_batch 4: change one of them",
        ),
        (
            {},
            4,
            "train.global_batch 8 is not a multiple of 4 data-parallel ranks times train.micro_batch 4: change one of them",
        ),
        (
            {"parallel": {"data": 2}},
            1,
            "parallel.data 2 x parallel.context 1 x parallel.tensor 1 = 1 makes 2, but there are 1 ranks: use `ranks=2`, or "
            "leave parallel.data out",
        ),
        (
            {"parallel": {"tensor": 2}},
            3,
            "parallel.context 1 x parallel.tensor 2 = 2 does not divide 3 ranks: use `ranks=2` or change these sizes",
        ),
        (
            {"parallel": {"tensor": 2, "expert": 4}},
            2,
            "expert ranks do not fit: ep 4 x etp 1 = 4 does not divide dp 1 x cp 1 x tp 2 = 2; "
            "the nearest ep that fit: 1, 2",
        ),
    ],
)
def test_ranks_that_cannot_share_the_work(
    small_run: dict[str, Any], sections: dict[str, Any], ranks: int, expected: str
) -> None:
    assert message(edited(small_run, **sections), ranks=ranks).startswith(expected)


@pytest.mark.in_turn(2, 3)
def test_sequences_of_which_one_cannot_be_divided(small_run: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Three ranks divide the tokens of 3 sequences, although 32 tokens are no multiple of 3.

    The memory of a microbatch is measured, and the groups of ranks are printed before.
    """
    shape = {"family": "olmo", "hidden": 24, "layers": 1, "heads": 6, "intermediate": 24, "vocab": 321}
    config = edited(small_run, train={"global_batch": 3, "micro_batch": 3, "steps": 1}) | {"model": shape}
    assert optimus.train(config | {"parallel": {"tensor": 3}, "observe": {"verbose": True}})["step"] == 1
    said = capfd.readouterr().err
    assert "3 ranks on 1 node; the last axis varies fastest" in said
    assert re.search(r"tp_out +3 +1 +0 +0 1 2\n", said)
    assert re.search(r"memory per rank: .* activations of a microbatch [0-9.]+ [kM]B", said)


def test_the_tokenizer_changed(small_run: dict[str, Any], own_data: Path) -> None:
    with (own_data / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert "tokenizer changed since prepare" in message(edited(small_run, data={"path": str(own_data)}))


def test_a_truncated_shard(small_run: dict[str, Any], own_data: Path) -> None:
    path = shard(own_data, 2)
    os.truncate(path, path.stat().st_size - 64)
    assert re.search(rf"{path} is truncated or damaged", message(edited(small_run, data={"path": str(own_data)})))


def test_a_corrupted_shard_is_found_by_check(small_run: dict[str, Any], own_data: Path) -> None:
    config = edited(small_run, data={"path": str(own_data)})
    assert optimus.train(config, check=True)["ok"]
    corrupt(shard(own_data, -1))
    assert f"{shard(own_data, -1)} is corrupted: its checksum differs" in message(config, check=True)
    assert not Path(config["train"]["output"]).exists()


def test_a_corrupted_shard_in_the_middle_of_a_run(small_run: dict[str, Any], own_data: Path, tmp_path: Path) -> None:
    """A run on a damaged shard saves its steps, names the shard, and resumes once the shard is repaired.

    A step reads 8 sequences from shards of about 15.
    """
    config = edited(small_run, data={"path": str(own_data)})
    path = shard(own_data, 2)
    whole = path.read_bytes()
    corrupt(path)
    found = message(config)
    folder = Path(config["train"]["output"])
    step = read_description(list_checkpoints(folder)[-1]).step
    assert 0 < step < 6
    assert [record["step"] for record in read_metrics(folder)] == list(range(1, step + 1))
    assert f"{path} is corrupted: its checksum differs" in found
    assert found.count(f"(the run is saved up to step {step})") == 1
    path.write_bytes(whole)
    assert optimus.train(config, resume=True)["step"] == 6
    undisturbed = edited(config, train={"output": str(tmp_path / "undisturbed")})
    optimus.train(undisturbed)
    losses = [[r["loss"] for r in read_metrics(place)] for place in (folder, tmp_path / "undisturbed")]
    assert losses[0] == losses[1]


@pytest.mark.in_turn(1, 3)
@pytest.mark.slow
def test_the_error_of_a_rank_is_the_error_of_the_run(small_run: dict[str, Any], own_data: Path, tmp_path: Path) -> None:
    """The error of one rank is one line, without the launcher's report."""
    corrupt(shard(own_data, 2))
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(edited(small_run, data={"path": str(own_data)})))
    done = subprocess.run(
        [sys.executable, "-m", "optimus", "train", str(config), "--ranks", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2
    *before, error = done.stderr.splitlines()
    first = [line.startswith("memory per rank: ") for line in before].index(True)  # then come steps alone
    assert all(line.startswith(("training: ", "time: ")) for line in before[first + 1 :]), done.stderr
    assert re.fullmatch(
        rf"error: rank \d failed: {shard(own_data, 2)} is corrupted: .* \(the run is saved up to step \d\)", error
    )


def test_the_first_instance_corrupted(small_run: dict[str, Any], own_data: Path) -> None:
    corrupt(shard(own_data, 0), 128)  # after the header
    found = message(edited(small_run, data={"path": str(own_data)}))
    assert "is corrupted" in found
    assert "saved" not in found


def test_output_folders_that_are_not_free(small_run: dict[str, Any]) -> None:
    folder = Path(small_run["train"]["output"])
    folder.write_text("")
    assert message(small_run) == f"train.output: {folder} is a file; name a folder"
    folder.unlink()
    folder.mkdir()
    (folder / "thesis.tex").write_text("important")
    assert message(small_run).startswith(f"train.output: {folder} is not empty and holds no run: choose another")
    (folder / "thesis.tex").unlink()
    optimus.train(small_run)  # an empty folder is accepted
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    expected = f"train.output: {folder} already holds a run (saved at step 6): continue it with `resume=True` or"
    for options in ({}, {"check": True}):
        assert message(small_run, **options).startswith(expected)
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*")) == before
    shutil.rmtree(folder / "checkpoints")
    assert f"train.output: {folder} already holds a run: continue it" in message(small_run)


@pytest.mark.parametrize("how", ["saved", "not saved yet"])
def test_resuming_another_model(small_run: dict[str, Any], how: str) -> None:
    optimus.train(edited(small_run, train={"stop_at": 1}))
    folder = Path(small_run["train"]["output"])
    if how == "not saved yet":
        shutil.rmtree(folder / "checkpoints")
    found = message(edited(small_run, model={"hidden": 64, "experts": 8}), resume=True)
    if how == "saved":
        assert re.search(
            r"step-00000001 is of another model: hidden is 32 there and 64 here, experts is 4 there and 8", found
        )
    else:
        assert found.startswith(f"train.output: {folder} is the folder of a run of another model: choose another")
    assert optimus.train(small_run, resume=True)["step"] == 6


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"seed": 5}}, r"belongs to another run: seed is 0 there and 5 here\. Use those values or another"),
        ({"train": {"global_batch": 4}}, r"belongs to another run: global_batch is 8 there and 4 here"),
        (
            {"data": {"path": "OTHER"}},
            r"belongs to another run: data is /.*/data there, with other contents, shares or",
        ),
    ],
)
def test_resuming_another_run(
    small_run: dict[str, Any], own_data: Path, sections: dict[str, Any], expected: str
) -> None:
    optimus.train(edited(small_run, train={"stop_at": 1}))
    other = edited(small_run, **sections)
    if other["data"]["path"] == "OTHER":
        other["data"]["path"] = str(own_data)
    folder = Path(small_run["train"]["output"])
    before = (folder / "config.yaml").read_text(), (folder / "metrics.jsonl").read_text()
    assert re.search(expected, message(other, resume=True))
    assert ((folder / "config.yaml").read_text(), (folder / "metrics.jsonl").read_text()) == before


def with_free_memory(monkeypatch: pytest.MonkeyPatch, free: Callable[[], int]) -> None:
    monkeypatch.setattr(checks, "free_memory", lambda device: free())


@pytest.mark.parametrize(
    ("precision", "gradients", "per_parameter"),
    [
        ("bfloat16", "float32", 18),
        ("bfloat16", "bfloat16", 16),
        ("float16", "float32", 18),
        ("float16", "float16", 16),
        ("float32", "float32", 16),
        ("float32", "bfloat16", 14),
    ],
)
def test_a_state_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, prepared: Path, precision: str, gradients: str, per_parameter: int
) -> None:
    """A model of 6.9 B parameters is refused before allocation, at exactly one byte too little."""
    train = {
        "output": "x",
        "steps": 9,
        "global_batch": 8,
        "micro_batch": 1,
        "sequence_length": 32,
        "precision": precision,
    }
    config = load_config(
        {
            "model": "mula-7b-a1b",
            "data": {"path": str(prepared)},
            "train": train,
            "state": {"gradient_dtype": gradients},
        }
    )
    total = next(row for row in optimus.models() if row["name"] == "mula-7b-a1b")["total_parameters"]
    with_free_memory(monkeypatch, lambda: total * per_parameter)
    check_memory(config, torch.device("cpu"), 1)
    with_free_memory(monkeypatch, lambda: total * per_parameter - 1)
    with pytest.raises(optimus.UserError) as caught:
        check_memory(config, torch.device("cpu"), 1)
    needed = size_text(total * per_parameter)
    text = rf"the state of this model \(6\.92 B parameters, {per_parameter} bytes each\) needs {needed}, but cpu has .* free"
    assert re.match(text, str(caught.value))
    with pytest.raises(optimus.UserError, match=r"bytes each, 4 ranks\)"):  # 4 ranks share the memory of one machine
        check_memory(config, torch.device("cpu"), 4)


def test_the_state_needs_what_the_check_says(small_run: dict[str, Any]) -> None:
    """The check's bytes per parameter are those of the chunks, without the padding."""
    run = build_run(load_config(small_run), torch.device("cpu"), resume=False)
    total = sum(parameter.numel() for parameter in run.model.parameters())
    assert 18 * total <= sum(allocated(run.state.chunks).values()) < 18.2 * total


def direct_count(config: dict[str, Any]) -> int:
    """Returns the bytes that the forward pass of one sequence saves, from the autograd graph itself."""
    run = build_run(load_config(config), torch.device("cpu"), resume=False)
    state = {chunk.parameter.untyped_storage().data_ptr() for chunk in run.state.chunks}
    kept: list[torch.UntypedStorage] = []  # holds every storage, so no address is reused
    tokens = torch.arange(32)[None]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.untyped_storage()) or t, lambda t: t):
        losses = run.model.model.losses(tokens)
        _ = losses.cross_entropy + 0.01 * losses.balance + 0.001 * losses.z
    return sum({s.data_ptr(): s.nbytes() for s in kept if s.data_ptr() not in state}.values())


@pytest.mark.parametrize("recompute", [[], ["norm", "moe"]])
def test_the_dry_run_counts_the_activations(small_run: dict[str, Any], recompute: list[str]) -> None:
    small_run = {**edited(small_run, train={"micro_batch": 8}), "recompute": recompute}
    run = build_run(load_config(small_run), torch.device("cpu"), resume=False)
    report = checks.dry_run(run)
    one = direct_count(small_run)
    assert f"activations of a microbatch {size_text(8 * one)}; " in report
    assert one > 32 * 32 * 2 * 2  # at least the input of every block


def test_memory_that_is_used_again_counts_once(small_run: dict[str, Any]) -> None:
    """Microbatches one after the other save what one microbatch saves at a time."""
    run = build_run(load_config(small_run), torch.device("cpu"), resume=False)
    one, four = (checks._saved_bytes(run, torch.arange(32).expand(number, -1), 1) for number in (1, 4))
    assert one == four


def sequences_of_a_dry_run(config: dict[str, Any]) -> list[int]:
    """Returns the number of sequences of each microbatch."""
    run, right = build_run(load_config(config), torch.device("cpu"), resume=False), PipelineStages.train_microbatches
    found: list[int] = []

    def counted(self: PipelineStages, microbatches: Any, *rest: Any) -> Any:
        found.extend(len(each.tokens_BS) for each in microbatches)
        return right(self, microbatches, *rest)

    with mock.patch.object(PipelineStages, "train_microbatches", counted):
        checks.dry_run(run)
    return found


def test_the_dry_run_of_a_pipeline_is_of_few_sequences(small_run: dict[str, Any]) -> None:
    changed = edited(small_run, parallel={"pipeline": 2}, train={"global_batch": 16, "micro_batch": 8})
    assert run_ranks(sequences_of_a_dry_run, 2, changed) == [[1, 1]] * 2


def dry_run_of_a_stage(config: dict[str, Any]) -> str:
    return checks.dry_run(build_run(load_config(config), torch.device("cpu"), resume=False))


@pytest.mark.in_turn(1, 3)
def test_the_dry_run_of_a_pipeline_names_its_microbatches(small_run: dict[str, Any]) -> None:
    for said in run_ranks(dry_run_of_a_stage, 2, edited(small_run, parallel={"pipeline": 2})):
        assert re.search(r"activations of 2 microbatches [0-9.]+ [kM]B; ", said)


def test_activations_that_do_not_fit(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the largest microbatch that fits, and a run with that microbatch is accepted."""
    one = direct_count(small_run)
    free = 2 * one + one // 2
    monkeypatch.setattr(checks, "check_memory", lambda *_, **__: None)
    with_free_memory(monkeypatch, lambda: free)
    found = message(small_run)
    assert found.startswith("the activations of a microbatch of 4 sequences need ")
    assert (
        "set train.micro_batch to at most 2, or recompute some activations (recompute: [norm, attention, ...])" in found
    )
    assert not Path(small_run["train"]["output"]).exists()
    assert optimus.train(edited(small_run, train={"micro_batch": 2}))["step"] == 6
    with_free_memory(monkeypatch, lambda: one // 2)
    assert "free: shorten train.sequence_length, or recompute" in message(
        edited(small_run, train={"micro_batch": 1, "output": small_run["train"]["output"] + "-2"})
    )


def test_an_accelerator_that_runs_out_of_memory(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator runs the whole microbatch, and its allocator decides."""
    run = build_run(load_config(small_run), torch.device("cpu"), resume=False)
    right = checks.accumulate_gradients

    fits = 1

    def no_more_than_fits(model: Any, state: Any, tokens: torch.Tensor, config: Any, **more: Any) -> Any:
        if len(tokens) > fits:
            raise torch.OutOfMemoryError("out of memory")
        return right(model, state, tokens, config, **more)

    class Pretended:
        type = "xpu"

        def __str__(self) -> str:
            return "xpu:0"

    one, arange = direct_count(small_run), torch.arange
    monkeypatch.setattr(checks, "accumulate_gradients", no_more_than_fits)
    monkeypatch.setattr(torch, "arange", lambda *bounds, device, **rest: arange(*bounds, **rest))
    run = replace(run, device=Pretended())  # type: ignore[arg-type]
    for free, most in ((2 * one, 2), (100 * one, 3)):
        with_free_memory(monkeypatch, lambda free=free: free)
        with pytest.raises(
            optimus.UserError, match=rf"but xpu:0 has .* free: set train\.micro_batch to at most {most}"
        ):
            checks.dry_run(run)
    fits = 0
    with pytest.raises(optimus.UserError, match=r"of one sequence does not fit into the free .* of xpu:0: shorten"):
        checks.dry_run(run)
    fits = 4
    assert checks.dry_run(run).startswith("memory per rank: ")


def test_a_rank_without_state_names_its_activations_alone(
    small_run: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    state = {"offload": "all", "resident_fraction": 0.0}
    optimus.train(edited(small_run, train={"stop_at": 1}, state=state))
    assert "memory per rank: activations of a microbatch " in capfd.readouterr().err


def test_the_run_folder_keeps_an_earlier_configuration(small_run: dict[str, Any]) -> None:
    optimus.train(edited(small_run, train={"stop_at": 2}))
    optimus.train(edited(small_run, checkpoint={"every": 3}), resume=True)
    folder = Path(small_run["train"]["output"])
    assert load_config(folder / "config.yaml").checkpoint.every == 3
    assert yaml.safe_load((folder / "config.until-step-2.yaml").read_text())["train"]["stop_at"] == 2


def test_configurations_until_one_step(small_run: dict[str, Any]) -> None:
    """The run folder has each configuration of a run that resumes from the same step with several changes."""
    for every in (2, 3, 4, 5):
        run = build_run(load_config(edited(small_run, checkpoint={"every": every})), torch.device("cpu"), resume=False)
        record_start(run, 2)
    saved = Path(small_run["train"]["output"]).glob("config.until-step-2*.yaml")
    found = {path.name: yaml.safe_load(path.read_text())["checkpoint"]["every"] for path in saved}
    assert found == {f"config.until-step-2{more}.yaml": every for every, more in ((2, ""), (3, "-2"), (4, "-3"))}


def test_what_is_needed_later_is_looked_for_first(small_run: dict[str, Any], tmp_path: Path) -> None:
    missing, not_utf8, empty = tmp_path / "nowhere", tmp_path / "a.txt", tmp_path / "b.txt"
    line, cut, late = tmp_path / "c.jsonl", tmp_path / "d.jsonl.gz", tmp_path / "e.jsonl"
    good = [json.dumps({"text": f"words {number}"}) for number in range(11)]
    line.write_text("\n".join([*good[:5], '{"text": ', *good[6:]]))
    cut.write_bytes(gzip.compress("\n".join(good * 3).encode())[:-9])
    late.write_text("\n".join([*good, "bad"]))
    not_utf8.write_bytes(b"a\xff")
    empty.touch()
    assert message(edited(small_run, checkpoint={"load_path": str(missing)}), check=True) == (
        f"checkpoint {missing} does not exist"
    )
    for text, problem in (
        (missing, "input not found: "),
        (not_utf8, "not UTF-8 at byte 1"),
        (empty, "no text in"),
        (line, f"{line}:6: not valid JSON"),
        (cut, "damaged or truncated compressed file"),
    ):
        found = message(small_run | {"validation": [{"name": "a", "every": 2, "text": str(text)}]}, check=True)
        assert found.startswith("validation.0.text: ")
        assert problem in found
    assert not Path(small_run["train"]["output"]).exists()
    # The bad line lies beyond the first 20 bytes.
    optimus.train(small_run | {"validation": [{"text": str(late), "max_bytes": 20}]}, check=True)


def test_initial_weights_of_another_model_are_refused_by_the_check(small_run: dict[str, Any], tmp_path: Path) -> None:
    optimus.train(small_run)
    other = edited(
        small_run,
        model={"hidden": 64},
        train={"output": str(tmp_path / "other")},
        checkpoint={"load_path": small_run["train"]["output"]},
    )
    assert message(other, check=True).endswith("is of another model: hidden is 32 there and 64 here")


# ---- Stages and nodes ----


def staged_config(folder: Path, **sections: Any) -> Any:
    shape = {"family": "olmo", "hidden": 256, "layers": 8, "heads": 4, "intermediate": 1024, "vocab": 1024}
    train = {
        "output": "x",
        "steps": 9,
        "global_batch": 16,
        "micro_batch": 1,
        "sequence_length": 32,
        "precision": "bfloat16",
    }
    return load_config({"model": shape, "data": {"path": str(folder)}, "train": train, **sections})


def run_of(config: Any, device: torch.device, ranks: int, per_node: int | None = None) -> ResolvedRun:
    return resolved(config, ranks, per_node or ranks_per_node(ranks), device=device.type)


def check_memory(config: Any, device: torch.device, ranks: int) -> None:
    checks.check_memory(run_of(config, device, ranks), device)


def least_free(monkeypatch: pytest.MonkeyPatch, config: Any, device: torch.device, *ranks: int) -> int:
    """Returns the fewest free bytes with which the check passes."""
    run = run_of(config, device, *ranks)
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        with_free_memory(monkeypatch, lambda middle=middle: middle)
        try:
            checks.check_memory(run, device)
            high = middle
        except optimus.UserError:
            low = middle
    return high


ACCELERATOR = torch.device("meta")  # any device but a CPU


@pytest.mark.parametrize("schedule", [{}, {"schedule": "interleaved-1f1b", "stages_per_rank": 2}, {"schedule": "zbv"}])
def test_a_rank_of_a_pipeline_needs_room_for_its_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    """An accelerator needs memory for the fullest rank, and a node of CPUs for all of its ranks."""
    one = least_free(monkeypatch, staged_config(tmp_path), ACCELERATOR, 1)
    stages = {"stages_per_rank": 2} if schedule.get("schedule") == "zbv" else {}
    config = staged_config(tmp_path, parallel={"pipeline": 4, **schedule, **stages})
    held = [sum(state_bytes(config, 4, rank).values()) for rank in range(4)]
    assert least_free(monkeypatch, config, ACCELERATOR, 4) == max(held)
    assert max(held) < 0.4 * one
    cpu = torch.device("cpu")
    assert least_free(monkeypatch, config, cpu, 4) == sum(held) == pytest.approx(one, rel=0.01)
    assert least_free(monkeypatch, config, cpu, 4, 1) == max(held)
    assert least_free(monkeypatch, config, cpu, 4, 2) == max(held[0] + held[1], held[2] + held[3])


def test_a_node_needs_room_for_the_teachers_of_its_own_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ranks of the last stage hold the teacher, and they may all be on one node."""
    cpu = torch.device("cpu")
    for stride, nodes in ((None, (0, 2)), (1, (1, 1))):
        config = staged_config(tmp_path, parallel={"pipeline": 2, "pipeline_stride": stride})
        plain = run_of(config, cpu, 4, 2)
        taught = replace(plain, inputs=replace(plain.inputs, teachers=(config.model,)))
        teacher = taught.teacher_bytes(taught.stage_ranks[-1])
        stages = [sum(state_bytes(config, 4, rank).values()) for rank in plain.stage_ranks]
        of_nodes = [2 * stages[0], 2 * stages[1]] if stride is None else [sum(stages)] * 2
        least = max(state + teacher * number for state, number in zip(of_nodes, nodes))
        for free, fits in ((least, True), (least - 1, False)):
            with_free_memory(monkeypatch, lambda free=free: free)
            with contextlib.nullcontext() if fits else pytest.raises(optimus.UserError, match=r"for train\.teacher\)"):
                checks.check_memory(taught, cpu)


@pytest.mark.parametrize("scattered", [True, False])
def test_a_node_needs_room_for_its_own_ranks_and_their_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scattered: bool
) -> None:
    cpu, checkpoint = torch.device("cpu"), {"asynchronous": True, "scattered": scattered}
    plain, copying = staged_config(tmp_path), staged_config(tmp_path, checkpoint=checkpoint)
    one = least_free(monkeypatch, plain, cpu, 1)
    copied = 12 * one // 18
    assert least_free(monkeypatch, plain, cpu, 8) == 8 * one
    assert least_free(monkeypatch, plain, cpu, 8, 2) == 2 * one
    assert least_free(monkeypatch, copying, cpu, 8) == 8 * one + copied
    found = least_free(monkeypatch, copying, cpu, 8, 2) - 2 * one
    assert copied / 4 <= found <= (copied / 2 if scattered else copied)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # set by a launcher
    assert least_free(monkeypatch, plain, cpu, 8) == 4 * one


def test_a_run_that_is_pruned_first_needs_room_for_what_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, later = (
        least_free(monkeypatch, staged_config(tmp_path, pruning={"sparsity": 0.9, "at": at}), ACCELERATOR, 1)
        for at in (0, 1)
    )
    assert later == least_free(monkeypatch, staged_config(tmp_path), ACCELERATOR, 1)
    # 18 bytes an element, or 2 and another 20 with the index for each unpruned one.
    assert later - first == pytest.approx((18 - 2 - 0.1 * 20) * MATRICES, rel=0.01)


def test_device_and_host_need_room_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A parameter with offloaded optimizer state takes 2 bytes on the device and 12 on the host.

    Offloading everything takes 14 bytes on the host, or 2 with a disk. A processor needs the sum of device and host.
    Copies for checkpoints duplicate state on the device alone.
    """
    cpu, elements = torch.device("cpu"), MATRICES + REST
    found = dict[str, list[float]]()
    for residency in ("optimizer", "all", "disk"):
        for asynchronous in (False, True):
            config = staged_config(
                tmp_path,
                state={"offload": residency, "gradient_dtype": "bfloat16", "shard": "optimizer"},
                checkpoint={"asynchronous": asynchronous},
            )
            with monkeypatch.context() as patch:
                patch.setattr(checks, "free_memory", lambda device: 0 if device.type == "meta" else 1 << 40)
                there = message_of_check(config, ACCELERATOR, 2) if residency == "optimizer" else ""
                patch.setattr(checks, "free_memory", lambda device: 0 if device.type == "cpu" else 1 << 40)
                said = message_of_check(config, ACCELERATOR, 2)
            assert "bytes each on the host, 2 ranks) needs" in said
            assert ("set state.offload=disk" in said) == (residency != "disk")
            assert "set state.offload=all" in there or residency != "optimizer"
            together = least_free(monkeypatch, config, cpu, 2)
            found.setdefault(residency, []).append(together / elements)
    assert found["optimizer"] == pytest.approx([2 * (2 + 2) + 12] * 2, rel=0.01)
    assert found["all"] == pytest.approx([14] * 2, rel=0.01)
    assert found["disk"] == pytest.approx([2] * 2, rel=0.01)


def message_of_check(config: Any, device: torch.device, ranks: int) -> str:
    with pytest.raises(optimus.UserError) as caught:
        check_memory(config, device, ranks)
    return str(caught.value)


def test_only_what_the_device_has_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checkpoints copy the state of chunks on the device, and write other state from the host."""

    def copied(**state: Any) -> int:
        plain, copying = (staged_config(tmp_path, state=state, checkpoint={"asynchronous": on}) for on in (False, True))
        least = [least_free(monkeypatch, config, torch.device("cpu"), 1) for config in (plain, copying)]
        return least[1] - least[0]

    whole = copied()
    assert copied(offload="optimizer") == copied(offload="all") == copied(offload="disk") == 0
    assert 0.2 * whole < copied(offload="all", resident_fraction=0.5, chunk=1 << 20) <= 0.5 * whole


MATRICES, REST = 8 * (4 * 256 * 256 + 3 * 256 * 1024), 2 * 1024 * 256  # elements of the model


@pytest.mark.parametrize(
    ("name", "size"),
    [("muon", 8 * MATRICES + 12 * REST), ("lion", 8 * (MATRICES + REST)), ("schedule-free", 12 * (MATRICES + REST))],
)
def test_copies_are_of_what_the_update_rules_keep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, size: int
) -> None:
    plain, copying = (
        staged_config(tmp_path, optimizer={"name": name}, checkpoint={"asynchronous": on}) for on in (False, True)
    )
    least = [least_free(monkeypatch, config, torch.device("cpu"), 4) for config in (plain, copying)]
    assert least[1] - least[0] == size


def test_frozen_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train = {**staged_config(tmp_path).model_dump(exclude_unset=True)["train"], "freeze": ["embedding"]}
    plain, copying = (staged_config(tmp_path, train=train, checkpoint={"asynchronous": on}) for on in (False, True))
    least = [least_free(monkeypatch, config, torch.device("cpu"), 4) for config in (plain, copying)]
    assert least[1] - least[0] == 12 * (MATRICES + REST // 2)


NESTED = {"shard": "parameters", "shard_ranks": {"parameters": 2, "gradients": 4}}


@pytest.mark.parametrize("state", [{"shard": "optimizer"}, {"shard": "parameters"}, NESTED], ids=str)
def test_the_rank_with_most_matrices_needs_room_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: dict[str, Any]
) -> None:
    """An accelerator needs memory for the fullest rank, whichever rank that is; a node of CPUs for all of them."""
    config = staged_config(tmp_path, optimizer={"name": "muon"}, state=state)
    held = [sum(state_bytes(config, 8, rank).values()) for rank in range(8)]
    assert held[0] < max(held)
    assert least_free(monkeypatch, config, ACCELERATOR, 8) == max(held)
    assert least_free(monkeypatch, config, torch.device("cpu"), 8) == sum(held)


def bytes_of_a_stage(config: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    tree = load_config(config)
    run = build_run(tree, torch.device("cpu"), resume=False)
    return allocated(run.state.chunks), state_bytes(tree, run.groups.world.size, run.groups.rank)


@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_of_a_rank_need_what_the_check_says(small_run: dict[str, Any], tied: bool) -> None:
    parallel = {"pipeline": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}
    config = edited(small_run, model={"layers": 4, "tie_embeddings": tied}, parallel=parallel)
    for held, said in run_ranks(bytes_of_a_stage, 2, config):
        assert held == said
