"""A user's own module, described by a function of a plugin, trains on every layout like a plain PyTorch loop."""

import copy
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from typer.testing import CliRunner

import optimus
from helpers.equality import Layout, assert_same_as_one_process
from helpers.own_models import MISTAKES
from helpers.plugin_tables import tables_restored
from helpers.sweep import in_turns
from optimus import api
from optimus.cli import app
from optimus.config import load_config
from optimus.config.load import dump_config
from optimus.errors import UserError
from optimus.hub import export_model
from optimus.model.batch import Batch
from optimus.model.build import causal_model
from optimus.model.foreign.rows import MODELS
from optimus.model.init import initialize
from optimus.observe.metrics import read_metrics
from optimus.testing.ranks import run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.training.resolving import resolve_before_launch

ROOT = Path(__file__).resolve().parents[3]
STEPS, LENGTH, SEQUENCES = 4, 32, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero3": (4, {"state": {"shard": "parameters"}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "tensor of 4": (4, {"parallel": {"tensor": 4}}),
    "pipeline and zero3": (4, {"parallel": {"pipeline": 2}, "state": {"shard": "parameters"}, "recompute": "block"}),
    "tensor and pipeline": (4, {"parallel": {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}}),
    "interleaved": (2, {"parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved-1f1b"}}),
    "offload": (2, {"state": {"shard": "parameters", "offload": "all"}}),
}
CASES = [
    ("mixer", "one"),
    ("mixer", "tensor and pipeline"),
    ("recurrent", "one"),
    ("attending", "pipeline and zero3"),
    *(("mixer", layout) for layout in LAYOUTS if layout not in ("one", "tensor and pipeline")),
    *(("shared", layout) for layout in ("pipeline and zero3", "tensor and pipeline")),
    *(("scaled", layout) for layout in ("tensor", "tensor and pipeline")),
    ("recurrent", "pipeline and zero3"),
    *(("attending", layout) for layout in ("one", "tensor and pipeline")),
]


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the example on the search path, and removes what plugins have added."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_model")
    with tables_restored():
        yield
    sys.modules.pop("mixer", None)


def run_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Returns the configuration of a run of random tokens with the model `kind`."""
    model = {"plugin": kind, "vocab": 321} | ({"width": 32, "depth": 4} if kind == "mixer" else {})
    run: dict[str, Any] = {
        "plugins": ["mixer" if kind == "mixer" else "helpers.own_models"],
        "model": model,
        "data": {"path": "/nonexistent"},
        "train": {"steps": STEPS, "sequence_length": LENGTH, "global_batch": SEQUENCES, "micro_batch": 1}
        | {"output": "/nonexistent", "precision": "float32"},
        "lr_schedule": {"lr": 1e-3, "warmup_steps": 0, "name": "constant"},
        "optimizer": {"weight_decay": 0.1},
    }
    for key, value in changes.items():
        run[key] = run.get(key, {}) | value if isinstance(value, dict) else value
    return run


def document_BS() -> Tensor:
    """Returns documents that cross the ends of microbatches and begin inside sequences."""
    return (torch.arange(SEQUENCES * LENGTH) // 13).view(SEQUENCES, LENGTH)


def train(run: dict[str, Any], documents: bool) -> list[tuple[float, float]]:
    """Returns losses and gradient norms of the steps of `run` on this rank."""
    steps = Steps(run)
    results = [steps.train(document_BS=document_BS() if documents else None) for _ in range(STEPS)]
    return [(float(result.loss), float(result.grad_norm)) for result in results]


def plain_loop(run: dict[str, Any], documents: bool = False) -> list[tuple[float, float]]:
    """Trains the user's module in a plain loop; with `documents`, each document by itself."""
    config = load_config(run)
    model = causal_model(config.model)
    initialize(model, config.train.seed, config.model.init_std)
    row = MODELS[config.model.family]
    spec = row.make(**{name: value for name, value in run["model"].items() if name != "plugin"})
    spec.module.load_state_dict({**spec.module.state_dict(), **model.author_tensors()})
    chosen = config.optimizer
    adam = torch.optim.AdamW(spec.module.parameters(), 1e-3, tuple(chosen.betas), chosen.eps, 0.1)
    found = []
    for step in range(1, STEPS + 1):
        parts: list[Tensor] = []
        for tokens_S, document_S in zip(random_batch(config, step), document_BS() if documents else [None] * SEQUENCES):
            sizes = [LENGTH] if document_S is None else document_S.unique_consecutive(return_counts=True)[1].tolist()
            parts += tokens_S.split(sizes)
        count = sum(len(part) - 1 for part in parts)
        adam.zero_grad()
        total = 0.0
        for part in parts:
            logits = spec.forward(spec.module, Batch(part[None]))[0, :-1]
            loss = F.cross_entropy(logits, part[1:], reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        found.append((total, float(nn.utils.clip_grad_norm_(spec.module.parameters(), 1.0))))
        adam.step()
    return found


def assert_close(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=3e-6, atol=0)


@pytest.mark.parametrize(("kind", "layout"), in_turns(CASES, 4, always=4))
def test_every_layout_has_the_numbers_of_a_plain_loop(kind: str, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    run = run_of(kind, **changes)
    found = train(run, False) if ranks == 1 else run_ranks(train, ranks, run, False, pool="own models")[0]
    assert_close(found, plain_loop(run_of(kind)))


@pytest.mark.parametrize("layout", ["one", "tensor and pipeline"])
def test_documents_of_a_model_that_heeds_them(layout: str) -> None:
    """The loss is that of a loop over documents by themselves."""
    ranks, changes = LAYOUTS[layout]
    run = run_of("attending", data={"documents": "mask"}, **changes)
    found = train(run, True) if ranks == 1 else run_ranks(train, ranks, run, True, pool="own models")[0]
    assert_close(found, plain_loop(run_of("attending"), documents=True))


# ---- A run from start to end ----


def test_pruned_matrices_on_other_layouts() -> None:
    run = run_of("convolutions", pruning={"at": 2, "sparsity": 0.5, "targets": ["matrix"]})
    layouts = [Layout(2, ["state.shard=parameters"]), Layout(4, ["parallel.tensor=2", "parallel.pipeline=2"])]
    assert_same_as_one_process(run, layouts, STEPS)


def changed(run: dict[str, Any], output: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    run = copy.deepcopy(run)
    run["train"]["output"] = str(output)
    for name, section in sections.items():
        run[name] = run.get(name, {}) | section
    return run


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder)]


@pytest.fixture
def run(small_run: dict[str, Any]) -> dict[str, Any]:
    """The example's run on prepared text."""
    small_run["train"] |= {"precision": "float32", "micro_batch": 2}
    return small_run | {"plugins": ["mixer"], "model": {"plugin": "mixer", "vocab": 320, "width": 32, "depth": 2}}


@pytest.mark.usefixtures("warm_ranks")
def test_it_resumes_is_evaluated_exported_and_read_again(run: dict[str, Any], tmp_path: Path) -> None:
    one, parted, spread = tmp_path / "one", tmp_path / "parted", tmp_path / "spread"
    optimus.train(changed(run, one))
    optimus.train(changed(run, parted), ["train.stop_at=3"])
    optimus.train(changed(run, parted), resume=True)
    assert losses(parted) == losses(one)
    four = {"parallel": {"pipeline": 2}, "state": {"shard": "parameters"}}
    optimus.train(changed(run, spread, **four), ["train.stop_at=3"], ranks=4)
    optimus.train(changed(run, spread, parallel={"tensor": 2}), ranks=2, resume=True)
    assert losses(spread) == pytest.approx(losses(one), rel=1e-5)

    text = tmp_path / "text.txt"
    shutil.copy(Path(__file__).with_name("test_own_model.py"), text)
    bits = [optimus.evaluate(each, text=text, max_bytes=2000)["bits_per_byte"] for each in (one, spread)]
    assert bits[0] == pytest.approx(bits[1], rel=1e-5)
    assert 0 < bits[0] < 10

    exported = tmp_path / "exported"
    optimus.export(one, exported)
    raw = json.loads((exported / "config.json").read_text())
    assert raw["plugin"] == "mixer"
    assert raw["arguments"] == {"vocab": 320, "width": 32, "depth": 2, "kernel": 4}
    assert raw["plugins"] == ["mixer"]
    page = (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")
    assert list(raw) == list(json.loads(page.partition("```json\n")[2].partition("```")[0]))
    tokens_BS = torch.arange(64).view(2, 32)
    logits_BSV = optimus.load_model(one)(tokens_BS)
    module = MODELS["mixer"].make(**raw["arguments"]).module
    module.load_state_dict(load_file(exported / "model.safetensors"))
    torch.testing.assert_close(module(tokens_BS).detach(), logits_BSV)

    optimus.import_folder(exported, tmp_path / "imported")
    assert torch.equal(optimus.load_model(tmp_path / "imported")(tokens_BS), logits_BSV)
    further = changed(run, tmp_path / "further", checkpoint={"load_path": str(exported)})
    optimus.train(further)
    assert losses(tmp_path / "further")[0] < losses(one)[0] - 0.1
    by_folder = changed(run, tmp_path / "by_folder") | {"model": str(exported)}
    optimus.train(by_folder)
    assert losses(tmp_path / "by_folder") == losses(tmp_path / "further")
    with pytest.raises(UserError, match=r"exported.config\.json is of another model: width is 32 there and 48 here"):
        optimus.train(further, ["model.width=48", f"train.output={tmp_path / 'other'}"])
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    tokens = tokenizer.encode("def load").ids
    for _ in range(4):
        tokens.append(int(module(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokenizer.decode(tokens) == "def load" + optimus.generate(one, "def load", max_tokens=4)


def test_modules_that_list_their_parameters_are_evaluated(run: dict[str, Any], tmp_path: Path) -> None:
    """A recurrent network of PyTorch uses its list of parameters, which must be those that were loaded."""
    recurrent = changed(run, tmp_path / "run") | {"plugins": ["helpers.own_models"]}
    recurrent["model"] = {"plugin": "recurrent", "vocab": 320, "depth": 2}
    optimus.train(recurrent)
    said = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--output", str(tmp_path / "exported")])
    assert "AutoModelForCausalLM" not in said.output  # `transformers` has no class for it
    assert "load_state_dict" in said.output
    module = MODELS["recurrent"].make(320, depth=2).module
    module.load_state_dict(load_file(tmp_path / "exported" / "model.safetensors"))
    tokens_BS = torch.arange(64).view(2, 32)
    torch.testing.assert_close(optimus.load_model(tmp_path / "run")(tokens_BS), module(tokens_BS).detach())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_buffers_are_exported_exactly_and_imported_again(
    dtype: torch.dtype | None, tmp_path: Path, run: dict[str, Any]
) -> None:
    config = load_config(run | {"plugins": ["helpers.own_models"], "model": {"plugin": "buffered", "vocab": 320}})
    model = causal_model(config.model)
    initialize(model, 0, 0.02)
    export_model(model, tmp_path / "folder", context=32, tokenizer=None, eos_id=None, dtype=dtype)
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    assert stored["codes"].tolist() == [300, 5, 70_000]
    assert stored["body.scale"].tolist() == [1.0009765625, 3.0]
    assert stored["body.norm.used"].dtype == torch.bool
    assert stored["head.weight"].dtype == (dtype or torch.float32)
    optimus.import_folder(tmp_path / "folder", tmp_path / "imported")
    found = optimus.load_model(tmp_path / "imported").author_tensors()
    assert all(torch.equal(found[name].to(tensor), tensor) for name, tensor in stored.items())


def test_masks_of_weights_that_are_not_zero_are_refused(tmp_path: Path, run: dict[str, Any]) -> None:
    config = load_config(run | {"plugins": ["helpers.own_models"], "model": {"plugin": "buffered", "vocab": 320}})
    model = causal_model(config.model)
    initialize(model, 0, 0.02)
    export_model(model, tmp_path / "folder", context=32, tokenizer=None, eos_id=None)
    name, parameter = next(iter(model.named_parameters()))
    save_file(
        {f"mask.{name}": torch.zeros(parameter.shape, dtype=torch.uint8)}, tmp_path / "folder" / "masks.safetensors"
    )
    with pytest.raises(UserError, match=rf"mask\.{name} prunes weights that are not zero: it belongs to another model"):
        optimus.import_folder(tmp_path / "folder", tmp_path / "imported")


def test_wider_weights_than_the_model_are_refused(tmp_path: Path, run: dict[str, Any]) -> None:
    config = load_config(run | {"plugins": ["helpers.own_models"], "model": {"plugin": "buffered", "vocab": 320}})
    model = causal_model(config.model)
    initialize(model, 0, 0.02)
    export_model(model, tmp_path / "folder", context=32, tokenizer=None, eos_id=None, dtype=torch.float64)
    with pytest.raises(UserError, match=r"is torch.float64, which a model in torch.float32 would round: use a wider"):
        optimus.import_folder(tmp_path / "folder", tmp_path / "imported")


# ---- Refusals ----


def test_recomputation_is_chosen_for_a_model_whose_parts_have_no_matrices_of_attention() -> None:
    """The example's convolutions mix positions without two-dimensional weights."""
    config = resolve_before_launch(load_config(run_of("mixer") | {"recompute": "auto"}), 1).config
    assert config.recompute == []


@pytest.mark.parametrize("mistake", in_turns([*MISTAKES], 3, always=4))
def test_a_wrong_description_is_one_message(mistake: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(
            run_of("mixer", plugins=["helpers.own_models"], model={"plugin": f"wrong: {mistake}"})
            | {"model": {"plugin": f"wrong: {mistake}"}}
        )
    assert str(error.value).startswith(f"model.plugin: wrong: {mistake}: ")
    assert MISTAKES[mistake][1] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"widht": 3}}, "model: 'widht' is no argument of the plugin's mixer: did you mean 'width'?"),
        ({"model": {"width": "wide"}}, "model: 'width' is 'wide': it must be a whole number"),
        ({"model": {"plugin": "mixr"}}, "model: plugin: the model 'mixr' does not exist; did you mean 'mixer'?"),
        ({"model": {"width": 33}, "parallel": {"tensor": 4}}, " 66 is not a multiple of parallel.tensor 4"),
        (
            {"parallel": {"context": 2}},
            "parallel.context: mixer is a model of a plugin, whose modules need all positions",
        ),
        ({"data": {"documents": "mask"}}, "data.documents: mixer does not keep the documents of a sequence apart"),
        (
            {"parallel": {"sequence": True, "tensor": 2}},
            "parallel.sequence: the modules of a plugin take the number of",
        ),
        (
            {"parallel": {"tensor": [2, 2]}},
            "parallel.tensor: the residual stream of a model of a plugin cannot be split",
        ),
        (
            {"parallel": {"pipeline": 2, "vocabulary": True}},
            "parallel.vocabulary: a model of a plugin has its embedding",
        ),
        (
            {"recompute": ["moe"]},
            "recompute: the experts of a model of a plugin recompute with the rest of",
        ),
        ({"parallel": {"pipeline": 8}}, "makes 8 stages, but the model has 4 layers"),
    ],
)
def test_wrong_options_are_one_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(run_of("mixer", **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "length", "part"),
    [({"plugin": "attending"}, 64, "body.positions"), ({"plugin": "masked"}, 48, "layers.0.mask")],
)
def test_sequences_longer_than_the_positions(model: dict[str, Any], length: int, part: str) -> None:
    run = run_of("attending")
    run["model"] = model | {"vocab": 321}
    run["train"]["sequence_length"] = length
    load_config(run)
    run["train"]["sequence_length"] += 1
    message = rf"train.sequence_length {length + 1} is more than model.plugin \(.*{part}\) {length}: lower it"
    with pytest.raises(UserError, match=message):
        load_config(run)


@pytest.mark.parametrize(
    ("kind", "parallel", "message"),
    [
        (
            "between",
            "pipeline",
            "parallel.pipeline: between: the output of body.layers.0 is not the input of body.layers.1",
        ),
        ("undivided", "tensor", "parallel.tensor: undivided: splits: body.layers.0.inner.down cannot be colwise"),
        ("attending", "tensor", "parallel.tensor: the partition of body.layers is proved for 2 ranks only: choose"),
        ("recurrent", "tensor", "parallel.tensor: recurrent: no module in body.layers has parts that add up"),
    ],
)
def test_layouts_that_a_model_cannot_have(kind: str, parallel: str, message: str) -> None:
    run = run_of(kind)
    if kind not in ("recurrent", "attending"):
        run["model"] = {"plugin": kind}
    load_config(run)  # other layouts remain
    ranks = 4 if kind == "attending" else 2  # its small copy has two heads, so that nothing is proved for four ranks
    with pytest.raises(UserError, match=message):
        load_config(run | {"parallel": {parallel: ranks}})


def test_a_factor_of_the_logits_that_only_the_small_copy_shows_is_refused() -> None:
    with pytest.raises(UserError, match=r"factor: the small copy multiplies the head's result by 0\.5, and the model"):
        load_config(run_of("factor"))


def test_large_models_need_small_arguments() -> None:
    with pytest.raises(UserError, match=r"large: [\d,]+ parameters are too many for the checks.*small="):
        load_config(run_of("mixer", plugins=["helpers.own_models"]) | {"model": {"plugin": "large"}})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("ModelRow('', print)", "its name is ''"),
        ("ModelRow('a', 3)", "'a': its function is 3: give a function that returns a ModelSpec"),
        ("ModelRow('a', lambda plugin: 0)", "'a': its argument plugin cannot be a key of the section model: rename it"),
        ("ModelRow('a', lambda kind=print: 0)", "'a': the default of kind is <built-in function print>: give a value"),
        ("ModelRow('a', lambda *sizes: 0)", "'a': its argument sizes cannot be a key"),
        ("ModelRow('a', lambda width: 0, small={'widht': 3})", "small: widht is no argument: did you mean 'width'?"),
    ],
)
def test_wrong_rows(row: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_rows.py").write_text(f"from optimus.extend import ModelRow\nROWS = [{row}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        load_config(run_of("mixer", plugins=["wrong_rows"]))
    sys.modules.pop("wrong_rows", None)
    assert message in str(error.value)


def test_the_planner_counts_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of two ranks divide the example by data, by its layers and by its splits."""
    monkeypatch.chdir(ROOT / "examples" / "own_model")
    plans = api.plan("run.yaml", machine="laptop", ranks=2).plans
    meshes = [plan.job.mesh for plan in plans]
    assert sorted((mesh.dp, mesh.pp, mesh.tp) for mesh in meshes) == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert all(plan.tokens_per_second > 0 for plan in plans)


def test_a_checkpoint_asks_for_its_plugin(run: dict[str, Any], tmp_path: Path) -> None:
    optimus.train(changed(run, tmp_path / "run"), ["train.stop_at=1"])
    with tables_restored():
        MODELS._added.clear()
        from optimus import plugins

        plugins._LOADED.clear()
        with pytest.raises(UserError, match=r"the model 'mixer' does not exist; .*written with the plugin mixer"):
            optimus.load_model(tmp_path / "run")


def test_the_page_has_the_example() -> None:
    """The function on the page is that of the example, and its configuration is valid."""
    page = (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "own_model" / "mixer.py").read_text(encoding="utf-8")
    function = example[example.index("def mixer(") : example.index("ROWS = ")].strip()
    assert function in page
    assert len(function.splitlines()) <= 15
    raw = yaml.safe_load(page.partition("```yaml\nplugins: [mixer]")[2].partition("```")[0])
    assert load_config(run_of("mixer") | raw).model.layers == raw["model"]["depth"]
    load_config(ROOT / "examples" / "own_model" / "run.yaml")


def test_arguments_are_values_of_yaml_and_typed_for_the_function(tmp_path: Path) -> None:
    """The configuration has lists, the function gets tuples; the file of the configuration is read as it was."""
    run = run_of("mixer", plugins=["helpers.own_models"])
    run["model"] = {"plugin": "listed", "kernels": [2, 3], "kind": "conv"}
    config = load_config(run)
    assert config.model.model_dump() == {"plugin": "listed", "kernels": [2, 3], "kind": "conv", "scale": [1, 2]}
    assert config.model.layers == 2
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.yaml") == config
    assert hash(load_config(tmp_path / "run.yaml").model) == hash(config.model)
    with pytest.raises(UserError, match=r"model: 'kernels' is \[2, 'x'\]: it must be a whole number"):
        load_config(run | {"model": {"plugin": "listed", "kernels": [2, "x"], "kind": "conv"}})
    with pytest.raises(UserError, match=r"model: 'kind' is missing, an argument of the plugin's listed"):
        load_config(run | {"model": {"plugin": "listed", "kernels": [2]}})
