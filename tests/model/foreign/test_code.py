"""Models whose code is in their folder: `auto_map` in config.json and `model.trust_remote_code`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import optimus
from helpers.sweep import in_turns
from optimus import plugins
from optimus.errors import UserError
from optimus.model.foreign.twin import small

CONFIGURATION = """
from transformers import PretrainedConfig


class LabConfig(PretrainedConfig):
    model_type = "lab"

    def __init__(self, vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, initializer_range=0.02, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.initializer_range = initializer_range
        super().__init__(**kwargs)
"""

LAYERS = """
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(config.hidden_size, config.hidden_size, bias=False))

    def forward(self, x):
        split = [p(x).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
                 for p in (self.q_proj, self.k_proj, self.v_proj)]
        return self.o_proj(F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.attn = Attention(config)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))
"""

MODEL = """
import os
from pathlib import Path

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_lab import LabConfig
from .layers_lab import Block

if "LAB_MARK" in os.environ:
    Path(os.environ["LAB_MARK"]).touch()


class LabForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LabConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(x)))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the code of a model, named as in the Hub's cache."""
    monkeypatch.setattr(plugins, "_LOADED", {})
    made = tmp_path / "models--lab--lab" / "snapshots" / "1a2b"
    made.mkdir(parents=True)
    (made / "configuration_lab.py").write_text(CONFIGURATION, encoding="utf-8")
    (made / "layers_lab.py").write_text(LAYERS, encoding="utf-8")
    (made / "modeling_lab.py").write_text(MODEL, encoding="utf-8")
    raw = {
        "_name_or_path": "lab/lab",
        "architectures": ["LabForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_lab.LabConfig",
            "AutoModelForCausalLM": "modeling_lab.LabForCausalLM",
        },
        "model_type": "lab",
        "num_hidden_layers": 2,
        "torch_dtype": "float32",
    }
    (made / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return made


@pytest.fixture
def run(folder: Path, small_run: dict[str, Any]) -> dict[str, Any]:
    train = small_run["train"] | {"precision": "float32"}
    model = {"transformers": str(folder), "trust_remote_code": True}
    return small_run | {"model": model, "train": train, "checkpoint": {"every": 3}}


def change(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | keys), encoding="utf-8")


LAYOUTS = {
    "zero3": ["state.shard=parameters"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2", "recompute=block"],
}


def test_a_run_with_the_code_of_a_folder(run: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """A run trains, is resumed, evaluated and exported with its code; `from_pretrained` loads the same logits."""
    files = {*folder.iterdir()}
    optimus.train(run, ["train.stop_at=3"])
    optimus.train(run, resume=True)
    assert {*folder.iterdir()} == files, "the code's folder is as before"
    output = Path(run["train"]["output"])
    exported = tmp_path / "exported"
    optimus.export(output, exported)
    assert {each.name for each in exported.iterdir()} >= {"configuration_lab.py", "layers_lab.py", "modeling_lab.py"}
    author = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True).eval()
    tokens = torch.arange(24).view(2, 12)
    expected = optimus.load_model(output)(tokens)
    torch.testing.assert_close(author(tokens).logits, expected, rtol=0, atol=0)

    more = run | {"model": {"transformers": str(exported), "trust_remote_code": True}}
    optimus.train(more, [f"train.output={tmp_path / 'more'}", "lr_schedule={lr: 1.0e-12, min_lr: 1.0e-12}"])
    torch.testing.assert_close(optimus.load_model(tmp_path / "more")(tokens), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", in_turns(list(LAYOUTS), 3))
def test_code_of_a_folder_runs_on_every_rank(run: dict[str, Any], tmp_path: Path, layout: str) -> None:
    alone = optimus.train(run)["loss"]
    other = optimus.train(run, [f"train.output={tmp_path / layout}", *LAYOUTS[layout]], ranks=2)["loss"]
    assert other == pytest.approx(alone, abs=2e-6)


LOADS = """
import os, sys
import optimus
from optimus.errors import UserError
for names in (each.split() for each in sys.argv[2:]):
    try:
        optimus.load_model(sys.argv[1], plugins=names)
        print("loaded", os.path.exists(os.environ["LAB_MARK"]))
    except UserError as error:
        print(error, os.path.exists(os.environ["LAB_MARK"]))
"""


def test_code_runs_only_if_its_folder_is_named(run: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """A checkpoint names its code; reading the checkpoint elsewhere runs the code only where the user names the folder."""
    optimus.train(run)
    mark, moved = tmp_path / "mark", tmp_path / "elsewhere" / "1a2b"

    def load(*names: str) -> list[str]:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "LAB_MARK": str(mark)}
        command = [sys.executable, "-c", LOADS, run["train"]["output"], *names]
        return subprocess.run(
            command, env=env, stdout=subprocess.PIPE, text=True, timeout=600, check=True
        ).stdout.splitlines()

    unnamed, named = load("", str(folder))
    assert (
        f"configuration_lab.py in {folder}, runs only if you name its folder as a plugin: --plugin {folder}" in unnamed
    )
    assert unnamed.endswith("False")
    assert named == "loaded True"
    moved.parent.mkdir()
    folder.rename(moved)
    nothing, there = load(str(folder), str(moved))
    assert f"{folder} has no config.json: name a Hugging Face folder with code, or a module" in nothing
    assert there == "loaded True"


@pytest.mark.parametrize("trust", [None, False])
def test_untrusted_code_does_not_run(
    run: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool | None
) -> None:
    monkeypatch.setenv("LAB_MARK", str(tmp_path / "mark"))
    message = (
        "auto_map names code in the model's folder: set model.trust_remote_code to true, which runs the code, or to false"
        if trust is None
        else "model_type is 'lab', which `transformers` does not have"
    )
    with pytest.raises(UserError, match=message):
        optimus.train(run | {"model": run["model"] | {"trust_remote_code": trust}})
    assert not (tmp_path / "mark").exists()


def test_false_takes_the_modules_of_transformers(run: dict[str, Any], folder: Path) -> None:
    change(folder, model_type="llama", hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=320)
    model = run["model"] | {"trust_remote_code": False}
    optimus.train(run | {"model": model}, ["train.steps=1"])
    assert type(optimus.load_model(run["train"]["output"]).body).__name__ == "LlamaForCausalLM"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "code", "message"),
    [
        ({"auto_map": {"AutoConfig": "configuration_lab.LabConfig"}}, "", "names no AutoModelForCausalLM"),
        ({"auto_map": ["modeling_lab.LabForCausalLM"]}, "", "names no AutoModelForCausalLM"),
        (
            {"auto_map": {"AutoModelForCausalLM": "lab/lab--modeling_lab.LabForCausalLM"}, "model_type": "llama"},
            "",
            "which is no code in the model's folder: copy the code of lab/lab into the folder",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "LabForCausalLM"}, "model_type": "llama"},
            "",
            "write auto_map as MODULE.CLASS",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "no_module.Lab"}, "model_type": "llama"},
            "",
            "auto_map names no_module, but .* has no no_module.py: correct auto_map",
        ),
        (
            {},
            "import no_such_package",
            r"cannot be imported from .* \(.*no_such_package.*\): mend the code, install what",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "..modeling_lab.LabForCausalLM"}, "model_type": "llama"},
            "",
            "write auto_map as MODULE.CLASS",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": ["modeling_lab.LabForCausalLM"]}, "model_type": "llama"},
            "",
            "write auto_map as MODULE.CLASS",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_lab.nn"}, "model_type": "llama"},
            "",
            "is no class for it: name a subclass of PreTrainedModel",
        ),
        (
            {"auto_map": {"AutoConfig": "modeling_lab.Exits", "AutoModelForCausalLM": "modeling_lab.LabForCausalLM"}},
            "class Exits(LabConfig):\n    def __init__(self, **kwargs):\n        raise SystemExit(4)\n",
            "model.transformers: SystemExit: 4: change it",
        ),
        ({"auto_map": {}}, "", "model_type is 'lab', which `transformers` does not have"),
        ({}, "raise SystemExit(3)", "cannot be imported from"),
        ({}, "del LabForCausalLM", r"modeling_lab.LabForCausalLM cannot be imported from .*: mend the code"),
    ],
)
def test_code_that_cannot_run_is_one_message(
    run: dict[str, Any], folder: Path, keys: dict[str, Any], code: str, message: str
) -> None:
    change(folder, **keys)
    with (folder / "modeling_lab.py").open("a", encoding="utf-8") as file:
        file.write(code + "\n")
    with pytest.raises(UserError, match=message) as error:
        optimus.train(run)
    assert "\n" not in str(error.value)
    assert not Path(run["train"]["output"]).exists()


def test_a_folder_of_links_as_in_the_hubs_cache(run: dict[str, Any], folder: Path) -> None:
    """The Hub's cache has links to `blobs`, whose names have no suffix; other entries do not matter."""
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = file.rename(blobs / f"{number:040x}")
        file.symlink_to(os.path.relpath(blob, folder))
    (folder / "missing.py").symlink_to(blobs / "missing")
    (folder / "folder.py").mkdir()
    optimus.train(run, ["train.steps=1"])


def test_an_export_has_all_modules_of_the_code(run: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Packages keep their layout, and a module is copied however it is imported."""
    inner = folder / "parts" / "inner"
    inner.mkdir(parents=True)
    (folder / "layers_lab.py").rename(inner / "layers_lab.py")
    (folder / "parts" / "names.py").write_text("from .inner.layers_lab import Block\n", encoding="utf-8")
    model = folder / "modeling_lab.py"
    text = MODEL.replace("from .layers_lab import Block", "from .parts import names\n\nBlock = names.Block")
    model.write_text(text, encoding="utf-8")
    optimus.train(run, ["train.steps=1"])
    exported = tmp_path / "exported"
    files = optimus.export(run["train"]["output"], exported)["files"]
    assert {"parts/names.py", "parts/inner/layers_lab.py", "modeling_lab.py"} <= {*files}
    more = run | {"model": {"transformers": str(exported), "trust_remote_code": True}}
    optimus.train(more, [f"train.output={tmp_path / 'more'}", "train.steps=1"])


def test_classes_of_transformers_stay_as_they_are(run: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Code may name a class that it imports; other models of the class are exported without code."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 320}
    reference = {"AutoModelForCausalLM": "modeling_lab.LlamaForCausalLM"}
    change(folder, model_type="llama", auto_map=reference, **sizes)
    with (folder / "modeling_lab.py").open("a", encoding="utf-8") as file:
        file.write("from transformers import LlamaForCausalLM\n")
    optimus.train(run, ["train.steps=1"])
    assert LlamaForCausalLM._auto_class is None
    files = optimus.export(run["train"]["output"], tmp_path / "exported")["files"]
    assert "modeling_lab.py" in files
    assert "modeling_llama.py" not in files


def test_two_folders_of_one_name(run: dict[str, Any], folder: Path, tmp_path: Path, capfd: Any) -> None:
    """Each model has its own code, and only the code that has changed is noted."""
    other = tmp_path / "other" / folder.name
    shutil.copytree(folder, other)
    layers = other / "layers_lab.py"
    layers.write_text(layers.read_text(encoding="utf-8").replace("silu", "gelu"), encoding="utf-8")
    second = run | {"model": run["model"] | {"transformers": str(other)}}
    first, changed = optimus.train(run), optimus.train(second, [f"train.output={tmp_path / 'second'}"])
    assert first["loss"] != changed["loss"]
    capfd.readouterr()
    optimus.evaluate(run["train"]["output"], text=folder / "modeling_lab.py", plugins=[str(folder), str(other)])
    assert "has changed" not in capfd.readouterr().err

    (folder / "modeling_lab.py").unlink()
    with pytest.raises(UserError, match=r"auto_map names modeling_lab, but .*1a2b has no modeling_lab.py"):
        optimus.train(run)


@pytest.mark.parametrize("renamed", ["1a2b", "renamed"])
def test_other_code_than_the_recorded_is_noted(
    run: dict[str, Any], folder: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch, renamed: str
) -> None:
    """A checkpoint may run with code elsewhere, such as the code of a teacher's student; a line says if it differs."""
    optimus.train(run)
    moved = tmp_path / "elsewhere" / renamed
    moved.parent.mkdir()
    folder.rename(moved)
    for edited in (False, True):
        if edited:
            with (moved / "layers_lab.py").open("a", encoding="utf-8") as file:
                file.write("# edited\n")
        monkeypatch.setattr(plugins, "_LOADED", {})
        capfd.readouterr()
        optimus.evaluate(run["train"]["output"], text=moved / "modeling_lab.py", plugins=[str(moved)])
        assert (f"the plugin {moved} has changed" in capfd.readouterr().err) == edited
    student = run | {"model": run["model"] | {"transformers": str(moved)}}
    teacher = f"train.teacher={run['train']['output']}"
    optimus.train(student, [f"train.output={tmp_path / 'student'}", "train.steps=1", teacher])
    assert f"the plugin {moved} has changed" in capfd.readouterr().err


def test_a_plugin_named_like_a_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = folder.rename(tmp_path / "rows_of_lab")
    (tmp_path / "rows_of_lab.py").write_text("ROWS = []\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = plugins.load_plugins([str(named), "rows_of_lab"])
    assert [each.name for each in loaded] == [str(named), "rows_of_lab"]


def test_a_path_has_no_setting_of_layers(folder: Path) -> None:
    """A path with a letter per layer is no pattern of layers."""
    config = LlamaConfig(num_hidden_layers=8, hidden_size=64, num_attention_heads=4, name_or_path="/DATA/M1")
    assert small(config).name_or_path == "/DATA/M1"
    assert small(config).num_hidden_layers == 2
