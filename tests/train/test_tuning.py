"""A run times its products in the first step, says what it has chosen, and the next run need not measure."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import optimus
from optimus.comm import Groups
from optimus.config import load_config
from optimus.kernels import matmul
from optimus.kernels.matmul import MatmulShape
from optimus.mesh import Mesh
from optimus.observe.metrics import read_metrics
from optimus.testing import run_ranks
from optimus.train.checkpoints import build_run
from optimus.train.loop import train_loop
from optimus.train.tuning import TuneMatmuls, cache_file, describe, read_seconds, write_seconds

FORMS = ("NN", "NT", "TN")
ONE = MatmulShape("TN", 64, 32, 16, "float32")
TIMES = {ONE: {"NN": 1.0, "NT": 3.0, "TN": 2.0}}


@pytest.fixture
def tuned_run(small_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The small run, whose small products are timed."""
    monkeypatch.setattr(matmul, "_LEAST_WORK", 0)
    return small_run | {"tuning": {"cache": str(tmp_path / "cache")}}


def test_first_step_measures_and_the_next_run_does_not(
    tuned_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_run["train"]["stop_at"] = 3
    optimus.train(tuned_run)
    assert "timed as NN, NT and TN" in capsys.readouterr().err
    known, note = read_seconds(cache_file(tmp_path / "cache", torch.device("cpu")))
    assert note is None
    model = tuned_run["model"]
    rows = 4 * 32
    assert MatmulShape("NT", rows, model["hidden"], 3 * model["hidden"], "bfloat16") in known  # q, k and v
    assert (
        MatmulShape("TN", 3 * model["hidden"], rows, model["hidden"], "bfloat16") in known
    )  # the gradient of their weights
    monkeypatch.setattr(matmul, "_seconds", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(matmul.MatmulForms, "form", only_known(matmul.MatmulForms.form))
    optimus.train(tuned_run, ["train.stop_at=6"], resume=True)
    assert len(read_metrics(Path(tuned_run["train"]["output"]))) == 6


def only_known(form: Any) -> Any:
    """Products of experts with another number of rows may be new in any step."""

    def ask(self: matmul.MatmulForms, product: MatmulShape, a: torch.Tensor, b: torch.Tensor) -> Any:
        self.measuring = self.measuring and product in self.seconds
        return form(self, product, a, b)

    return ask


def test_switched_off(tuned_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimus.train(tuned_run, ["tuning.matmul=false", "train.stop_at=1"])
    assert "NN" not in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_no_cache(tuned_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimus.train(tuned_run, ["tuning.cache=null", "train.stop_at=1"])
    assert "timed as NN, NT and TN" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["", "[1]", '[{"form": "NN"}]', '{"a": 1}'])
def test_a_damaged_cache_is_named_and_replaced(
    tuned_run: dict[str, Any], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cache_file(tmp_path / "cache", torch.device("cpu"))
    path.parent.mkdir()
    path.write_text(text)
    optimus.train(tuned_run, ["train.stop_at=1"])
    assert f"{path} cannot be used" in capsys.readouterr().err
    assert read_seconds(path)[0]


def test_the_cache_is_of_this_chip_and_version(tmp_path: Path) -> None:
    assert re.fullmatch(r"matmul-[a-z0-9-]+-\d+-threads-torch-.*\.json", cache_file(tmp_path, torch.device("cpu")).name)
    assert torch.__version__ in cache_file(tmp_path, torch.device("cpu")).name


def test_what_other_runs_have_written_stays(tmp_path: Path) -> None:
    other = MatmulShape("NN", 1, 2, 3, "float32")
    path = tmp_path / "new" / "file.json"
    assert write_seconds(path, TIMES) is None
    assert write_seconds(path, {other: {"NN": 1.0, "NT": 1.0, "TN": 1.0}}) is None
    assert set(read_seconds(path)[0]) == {ONE, other}
    assert json.loads(path.read_text())
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    note = write_seconds(tmp_path / "file" / "cache.json", TIMES)
    assert note is not None
    assert "cannot be written" in note


def test_choices_are_named() -> None:
    lines = describe(TIMES | {MatmulShape("NT", 1, 1, 1, "float32"): {"NN": 1.0, "NT": 1.0, "TN": 1.0}})
    assert "2 timed" in lines[0]
    assert "1 faster" in lines[0]
    assert lines[1].strip() == "[64, 32] @ [32, 16] float32: NN instead of TN, 2.00x as fast"


def choices_of(config: dict[str, Any]) -> list[Any]:
    """What a rank uses after the first step, when ranks measure different times."""
    run = build_run(load_config(config), torch.device("cpu"), resume=False)
    hook = TuneMatmuls()

    def measure(form: str, a: torch.Tensor, b: torch.Tensor) -> float:
        return 1.0 + (run.groups.rank + len(a) + FORMS.index(form)) % 3

    with mock.patch.object(matmul, "_LEAST_WORK", 0), mock.patch.object(matmul, "_seconds", measure):
        train_loop(run, [hook])
    run.state.finish()
    return sorted(hook._forms.seconds.items())


def forms_of(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """The forms of a rank's products in two steps, when ranks measure different times and have different caches."""
    group = Groups(Mesh(dp=2)).world
    tree = load_config(config, [f"tuning.cache={config['train']['output']}-cache-{group.rank}"])
    path = cache_file(Path(str(tree.tuning.cache)), torch.device("cpu"))
    known = MatmulShape("NT", 2 * 32, 32, 3 * 32, "bfloat16")  # q, k and v of a microbatch of 2
    times = [{"NN": 1.0, "NT": 2.0, "TN": 3.0}, {"NN": 3.0, "NT": 2.0, "TN": 1.0}][group.rank]
    assert write_seconds(path, {known: times}) is None
    run = build_run(tree, torch.device("cpu"), resume=False)
    used: list[tuple[str, ...]] = []
    ask = matmul.MatmulForms.form

    def noting(self: matmul.MatmulForms, product: MatmulShape, a: torch.Tensor, b: torch.Tensor) -> Any:
        used.append((str(product), ask(self, product, a, b)))
        return used[-1][1]

    def measure(form: str, a: torch.Tensor, b: torch.Tensor) -> float:
        return 1.0 + (group.rank + len(a) + FORMS.index(form)) % 3

    with (
        mock.patch.object(matmul, "_LEAST_WORK", 0),
        mock.patch.object(matmul, "_seconds", measure),
        mock.patch.object(matmul.MatmulForms, "form", noting),
    ):
        train_loop(run, [TuneMatmuls()])
    run.state.finish()
    assert (str(known), "NN") in used  # as the first rank's cache says
    return used


def test_ranks_use_the_same_forms_from_the_first_product_on(small_run: dict[str, Any]) -> None:
    """Those of tensor parallelism compute the same from the same tokens, and route them."""
    small_run["train"] |= {"stop_at": 2, "micro_batch": 2}
    small_run["parallel"] = {"data": 2}
    first, second = (set(forms) for forms in run_ranks(forms_of, 2, small_run))
    same = {product for product, _ in first} & {product for product, _ in second}
    assert len(same) > 10
    assert {product for product, _ in first ^ second} & same == set()


def test_ranks_agree(small_run: dict[str, Any]) -> None:
    small_run["tuning"] = {"cache": None}
    small_run["train"] |= {"stop_at": 1, "micro_batch": 2}
    first, second = run_ranks(choices_of, 2, small_run)
    assert first
    assert first == second
