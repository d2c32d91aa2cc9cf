"""The planner against published measurements: the accuracy that the documentation states, and the form of the report."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import planner
from benchmarks.planner import Comparison, Response, constants, timed
from benchmarks.published import Case, read_cases
from benchmarks.published.profiles import load_profile
from benchmarks.published.program import job_of, model_of, offload_of, profile_of
from benchmarks.statistics import rank_correlation
from optimus.errors import UserError

SOURCE = {"rows", "median_absolute_error", "p90_absolute_error", "one_mfu_error", "spearman_mfu"}


@pytest.fixture(scope="module")
def tables(shared_data: Path) -> Path:
    path = shared_data / "published"
    if not path.is_dir():
        pytest.skip(f"published measurements not found at {path}")
    return path


@pytest.fixture(scope="module")
def found() -> Comparison:
    return planner.run()


# ---- Accuracy ----


@pytest.mark.in_turn(2, 3)
@pytest.mark.parametrize(
    ("source", "median", "correlation"),
    [
        ("mpt_llm_foundry", 0.06, 0.90),
        ("internevo_7b", 0.05, 0.85),
        ("bigscience_a100_3d", 0.06, 0.80),
        ("megatron_gpt", 0.06, 0.65),
        ("libai_megatron", 0.08, 0.90),
        ("nemo_megatron_bridge.dense", 0.09, 0.65),
        ("nemo_megatron_bridge.moe", 0.18, 0.65),
        ("torchtitan_llama3", 0.09, 0.85),
        ("qwen3_moe_megatron", 0.08, 0.65),
    ],
)
def test_throughput(found: Comparison, source: str, median: float, correlation: float) -> None:
    errors = found.sources()[source]
    assert errors["median_absolute_error"] <= median
    assert errors["p90_absolute_error"] <= 3 * median
    assert errors["spearman_mfu"] >= correlation


@pytest.mark.in_turn(1, 3)
def test_every_source_with_rows_enough_is_told_better_than_by_one_utilisation(found: Comparison) -> None:
    for source, errors in found.sources().items():
        if errors["rows"] >= 4:
            assert errors["median_absolute_error"] < errors["one_mfu_error"], source


@pytest.mark.parametrize(
    ("name", "median"),
    [
        ("bigscience_a100_3d", 0.06),
        ("megatron_ci.gpt.allocated", 0.06),
        ("megatron_ci.gpt.peak", 0.15),
        ("megatron_ci.moe.peak", 0.25),
        ("torchtitan_llama3", 0.08),
    ],
)
def test_memory(found: Comparison, name: str, median: float) -> None:
    assert found.memory()[name]["median_absolute_error"] <= median


def test_what_fits_fits(found: Comparison) -> None:
    fitting = found.out_of_memory()
    assert fitting == {"right": len(found.predicted), "wrong": 0}
    assert sum(each.case.oom for each in found.predicted) == 3


def test_constants_are_those_that_the_rows_give() -> None:
    cases = [case for case in read_cases() if timed(case) and case.source in ("internevo_7b", "fms_fsdp_llama2")]
    rows = {row["program"]: row for row in constants(cases, seeds=3)}
    assert rows.keys() == {"internevo", "fms-fsdp"}
    assert rows["internevo"]["rows"] == sum(case.software == "internevo" for case in cases)
    for row in rows.values():
        assert row["fitted"] == pytest.approx(row["speed"], rel=0.01)
    assert rows["internevo"]["other_half"] < 0.05


# ---- Fitting ----


def test_fitting_gives_back_the_constant_that_made_the_rows() -> None:
    cases = read_cases()
    own = [case for case in cases if case.source == "fms_fsdp_llama2"]
    program = load_profile("fms-fsdp")
    made = [_measured(case, 0.9 * program.speed) for case in own]
    response = Response(made, program)
    assert response.fitted(range(len(made))) == pytest.approx(0.9 * program.speed, rel=0.01)
    assert max(map(abs, response.errors(0.9 * program.speed, range(len(made))))) < 0.01


def _measured(case: Case, speed: float) -> Case:
    from dataclasses import replace

    program = load_profile(case.software).model_copy(update={"speed": speed})
    return replace(case, tokens_per_second=planner.throughput(case, program))


# ---- Statistics ----


def test_statistics() -> None:
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]) == pytest.approx(0.5)
    assert rank_correlation([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(0.75**0.5)
    assert rank_correlation([1.0], [2.0]) is None
    assert planner._percentile([3.0, 1.0, 2.0], 0.9) == pytest.approx(2.8)
    assert planner._percentile([7.0], 0.9) == 7.0


# ---- Rows as their programs ran them ----


def changed(cases: Sequence[Case], row: str) -> dict[str, object]:
    case = next(case for case in cases if case.row == row)
    program = load_profile(case.software)
    run = profile_of(case, program)
    return {name: value for name, value in run if value != getattr(program, name)}


def test_traits_change_the_program() -> None:
    cases = read_cases()
    assert changed(cases, "torchtitan_llama3-0001") == {"passes": load_profile("torchtitan").passes_eager}
    assert changed(cases, "torchtitan_llama3-0002") == {}
    assert changed(cases, "torchtitan_llama3-0020") == {"overlap_tensor": 0.6}
    assert changed(cases, "torchtitan_llama3-0023") == {"cast": 9.0}
    assert changed(cases, "mpt_llm_foundry-0079") == {"reduced": 2.0}
    assert changed(cases, "nemo_megatron_bridge-0034")["cast"] == 6.0
    assert changed(cases, "nemo_megatron_bridge-0048") == {}
    assert changed(cases, "nemo_megatron_bridge-0225") == {"passes_experts": 3.0, "host": 6.0e-3}


def test_traits_change_setting_and_model() -> None:
    cases = {case.row: case for case in read_cases()}
    assert all(job_of(case).parallel.layers_per_stage for case in cases.values())
    assert job_of(cases["qwen3_moe_megatron-0008"]).imbalance > job_of(cases["qwen3_moe_megatron-0009"]).imbalance == 1
    assert offload_of(cases["bigscience_v100-0075"]) == {"optimizer", "parameters"}
    assert job_of(cases["bigscience_a100_3d-0119"]).parallel.layers_per_stage == (8, *[9] * 10, 8)
    ahead = cases["nemo_megatron_bridge-0041"]
    assert model_of(ahead).layers == ahead.model.layers + 1 == 62


# ---- The command ----


def command(*arguments: str) -> None:
    from optimus.cli import app

    app(["bench", "planner", *arguments], standalone_mode=False)


def test_other_folders_and_the_form_of_the_report(tables: Path, tmp_path: Path) -> None:
    data, report, plot = tmp_path / "data", tmp_path / "report.json", tmp_path / "plot.png"
    data.mkdir()
    shutil.copy(tables / "internevo_7b.csv", data)
    lines = (tables / "nemo_megatron_bridge.csv").read_text(encoding="utf-8").splitlines()
    (data / "nemo_megatron_bridge.csv").write_text("\n".join(lines[:40]), encoding="utf-8")
    (data / "unknown.csv").write_text("row_id,model,gpu\nunknown-1,GPT,a100\n", encoding="utf-8")
    command("--data", str(data), "--output", str(report), "--plot", str(plot))
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["bench"] == "planner"
    assert found["sources"].keys() == {"internevo_7b", "nemo_megatron_bridge.dense", "nemo_megatron_bridge.moe"}
    assert all(errors.keys() == SOURCE for errors in found["sources"].values())
    assert found["memory"].keys() == {"internevo_7b"}
    assert found["memory"]["internevo_7b"].keys() == {"rows", "median_absolute_error"}
    assert found["out_of_memory"].keys() == {"right", "wrong"}
    assert "nothing reads tables named unknown" in found["left_out"]["unknown-1"]
    assert plot.stat().st_size > 1000


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tables \(\*\.csv\) there"):
        command("--data", str(tmp_path))
    with pytest.raises(UserError, match="absent"):
        command("--data", str(tmp_path / "absent"))


def test_a_wrong_cell_is_named(tables: Path, tmp_path: Path) -> None:
    text = (tables / "internevo_7b.csv").read_text(encoding="utf-8").splitlines()
    cells = text[1].split(",")
    cells[text[0].split(",").index("seq_len")] = "long"
    (tmp_path / "internevo_7b.csv").write_text("\n".join([text[0], ",".join(cells)]), encoding="utf-8")
    with pytest.raises(UserError, match=r"row internevo_7b-0002, column seq_len: 'long' is no number"):
        command("--data", str(tmp_path))
