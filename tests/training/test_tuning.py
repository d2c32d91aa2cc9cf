"""A run times its products in the first step and reports its choices; the next run reads them from the cache."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import optimus
from helpers.trained import trainer_of
from optimus.comm import Groups
from optimus.config import load_config
from optimus.kernels import matmul
from optimus.kernels.matmul import FORMS, FormTimings, MatmulShape
from optimus.measurements import Measurements, Timing
from optimus.mesh import Mesh
from optimus.observe.machine import measurements_of
from optimus.observe.metrics import read_metrics
from optimus.testing import run_ranks
from optimus.training.hooks.tuning import TuneMatmuls, describe, matmuls, named

ONE = MatmulShape("TN", 64, 32, 16, "float32")


def times(**seconds: float) -> FormTimings:
    return {form: Timing(seconds[form], seconds[form]) for form in FORMS}


def kept(folder: Path) -> Measurements:
    return measurements_of(torch.device("cpu"), str(folder))


@pytest.fixture
def tuned_run(small_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the small run with timing of small products."""
    monkeypatch.setattr(matmul, "_LEAST_WORK", 0)
    return small_run | {"tuning": {"cache": str(tmp_path / "cache")}}


def test_first_step_measures_and_the_next_run_does_not(
    tuned_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_run["train"]["stop_at"] = 3
    optimus.train(tuned_run, ["observe.verbose=true"])
    assert "timed in the forms NN, NT and TN" in capsys.readouterr().err
    known = matmuls(kept(tmp_path / "cache").timings())
    model = tuned_run["model"]
    rows = 4 * 32
    # Queries, keys and values
    assert MatmulShape("NT", rows, model["hidden"], 3 * model["hidden"], "bfloat16") in known
    # The gradient of their weights
    assert MatmulShape("TN", 3 * model["hidden"], rows, model["hidden"], "bfloat16") in known
    monkeypatch.setattr(matmul, "_seconds", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(matmul.MatmulForms, "form", only_known(matmul.MatmulForms.form))
    optimus.train(tuned_run, ["train.stop_at=6", "observe.verbose=true"], resume=True)
    assert len(read_metrics(Path(tuned_run["train"]["output"]))) == 6
    said = capsys.readouterr().err
    assert "matmuls: 0 timed in the forms NN, NT and TN, " in said
    assert "measured before" in said


def only_known(form: Any) -> Any:
    """Allows measurements only of known products; the rows of experts may give new products in any step."""

    def ask(self: matmul.MatmulForms, product: MatmulShape, a: torch.Tensor, b: torch.Tensor) -> Any:
        before, self.measuring = self.measuring, self.measuring and product in self.timings
        found = form(self, product, a, b)
        self.measuring = before
        return found

    return ask


def test_switched_off(tuned_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimus.train(tuned_run, ["tuning.matmul=false", "observe.verbose=true", "train.stop_at=1"])
    assert "NN" not in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_no_cache(tuned_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimus.train(tuned_run, ["tuning.cache=null", "observe.verbose=true", "train.stop_at=1"])
    assert "timed in the forms NN, NT and TN" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_damaged_cache_is_named_and_replaced(
    tuned_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kept(tmp_path / "cache").path
    assert path is not None
    path.parent.mkdir()
    path.write_text("{")
    optimus.train(tuned_run, ["train.stop_at=1"])
    assert f"{path} cannot be used" in capsys.readouterr().err
    assert matmuls(kept(tmp_path / "cache").timings())


def test_a_cache_that_cannot_be_written_is_said(
    tuned_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("")
    optimus.train(tuned_run, ["train.stop_at=1"])
    assert "see tuning.cache" in capsys.readouterr().err


def test_the_cache_is_of_this_chip_and_version(tmp_path: Path) -> None:
    path = kept(tmp_path).path
    assert path is not None
    assert re.fullmatch(r"measured-[a-z0-9-]+-\d+-threads-torch-.*\.json", path.name)
    assert torch.__version__ in path.name


def test_a_product_has_a_name_and_what_is_no_product_is_left_out() -> None:
    known = {named(ONE): times(NN=1.0, NT=3.0, TN=2.0), "offload": {"up": Timing(1.0, 1.0)}}
    assert matmuls(known) == {ONE: times(NN=1.0, NT=3.0, TN=2.0)}
    wrong = [
        "matmul",
        "matmul NN",
        "matmul TT 1 1 1 float32",
        "matmul NN 1 -1 1 float32",
        "matmul NN 1 1 1 float32 more",
    ]
    assert matmuls({name: times(NN=1.0, NT=1.0, TN=1.0) for name in wrong}) == {}
    assert matmuls({named(ONE): {"NN": Timing(1.0, 1.0)}}) == {}


def test_choices_are_named() -> None:
    other = MatmulShape("NT", 1, 1, 1, "float32")
    lines = describe({ONE: times(NN=1.0, NT=3.0, TN=2.0), other: times(NN=1.0, NT=1.0, TN=1.0)}, known=1)
    assert "1 timed in the forms NN, NT and TN, 1 measured before, 1 faster" in lines[0]
    assert lines[1].strip() == "[64, 32] @ [32, 16] float32: NN instead of TN, 2.00x as fast"


def test_all_runs_choose_the_same_however_noisy_the_first_was(
    tuned_run: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another form is by far the fastest in each run."""
    found = []
    for number in range(3):
        slow = {FORMS[(number + place) % 3]: seconds for place, seconds in enumerate((1.0, 2.0, 3.0))}
        monkeypatch.setattr(matmul, "_seconds", lambda form, a, b, out, slow=slow: slow[form])
        optimus.train(
            tuned_run,
            ["observe.verbose=true", "train.stop_at=1", f"train.output={tuned_run['train']['output']}-{number}"],
        )
        lines = capsys.readouterr().err.splitlines()
        assert any("matmuls: " in line for line in lines)
        found.append([line for line in lines if " instead of " in line and "[" in line])
    assert found[0]
    rows = "[128"  # products of tokens; experts have varying rows, so runs may differ in theirs
    assert [[line for line in lines if rows in line] for lines in found[1:]] == [
        [line for line in found[0] if rows in line]
    ] * 2


def choices_of(config: dict[str, Any]) -> list[Any]:
    """Returns the forms of a rank after the first step, with unlike measurements on the ranks."""
    trainer = trainer_of(config)
    hook = TuneMatmuls()
    trainer.hooks = [hook]

    def measure(form: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
        return 1.0 + (trainer.groups.rank + len(a) + FORMS.index(form)) % 3

    with mock.patch.object(matmul, "_LEAST_WORK", 0), mock.patch.object(matmul, "_seconds", measure):
        trainer.fit()
    trainer.state.finish()
    return sorted(hook._forms.timings.items())


def forms_of(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the forms of a rank's products in two steps, with unlike measurements and caches on the ranks."""
    group = Groups(Mesh(dp=2)).world
    tree = load_config(config, [f"tuning.cache={config['train']['output']}-cache-{group.rank}"])
    known = MatmulShape("NT", 2 * 32, 32, 3 * 32, "bfloat16")  # queries, keys and values of a microbatch of 2
    mine = [times(NN=1.0, NT=2.0, TN=3.0), times(NN=3.0, NT=2.0, TN=1.0)][group.rank]
    kept(Path(str(tree.tuning.cache))).add({named(known): mine})
    trainer = trainer_of(tree)
    trainer.hooks = [TuneMatmuls()]
    used: list[tuple[str, ...]] = []
    ask = matmul.MatmulForms.form

    def noting(self: matmul.MatmulForms, product: MatmulShape, a: torch.Tensor, b: torch.Tensor) -> Any:
        used.append((str(product), ask(self, product, a, b)))
        return used[-1][1]

    def measure(form: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
        return 1.0 + (group.rank + len(a) + FORMS.index(form)) % 3

    with (
        mock.patch.object(matmul, "_LEAST_WORK", 0),
        mock.patch.object(matmul, "_seconds", measure),
        mock.patch.object(matmul.MatmulForms, "form", noting),
    ):
        trainer.fit()
    trainer.state.finish()
    assert (str(known), "NN") in used  # the choice of the first rank's cache
    return used


def test_ranks_use_the_same_forms_from_the_first_product_on(small_run: dict[str, Any]) -> None:
    """Tensor-parallel ranks compute and route the same tokens, so their products must have the same form."""
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
