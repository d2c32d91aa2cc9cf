"""The table of vLLM and SGLang in docs/serving.md agrees with the sources of these servers, which are read, not imported.

The tests of sources need OPTIMUS_VLLM and OPTIMUS_SGLANG: each names a folder with an unpacked wheel of the server.
"""

import ast
import importlib.util
import os
import re
from functools import cache
from pathlib import Path

import pytest

from optimus.config import ModelConfig
from optimus.model.families import Choice, Multiple, families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
SERVERS = {"vLLM": "OPTIMUS_VLLM", "SGLang": "OPTIMUS_SGLANG"}
EXPORTED = {name: family for name, family in families().items() if family.architecture}
# Our fields that a server does not read at all. It reads part of the others that the page names.
UNREAD: dict[tuple[str, str], set[str]] = {
    ("vLLM", "deepseek_v3"): {"tie_embeddings"},
    ("vLLM", "gemma2"): {"tie_embeddings"},
    ("vLLM", "gpt_oss"): {"attention_bias", "full_attention_every", "norm_eps", "tie_embeddings"},
    ("vLLM", "olmoe"): {"norm_eps", "renormalise", "tie_embeddings"},
    ("SGLang", "gemma2"): {"full_attention_every", "tie_embeddings"},
    ("SGLang", "gpt2"): {"tie_embeddings"},
    ("SGLang", "gpt_oss"): {"tie_embeddings"},
    ("SGLang", "llama"): {"mlp_bias"},
    ("SGLang", "mistral"): {"window"},
    ("SGLang", "mixtral"): {"head_size", "tie_embeddings", "window"},
    ("SGLang", "olmo"): {"kv_heads"},
    ("SGLang", "olmoe"): {"norm_eps", "renormalise", "tie_embeddings"},
    ("SGLang", "qwen3_moe"): {"dense_layers", "sparse_every", "tie_embeddings"},
}
WITHOUT_EFFECT = {"init_std"}
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
SPECIAL = {  # fields that `transformers` 5 reads under another name, or that are several
    **dict.fromkeys(("rope_theta", "rope_scaling", "window_rope_theta"), ("rope_parameters",)),
    "latent": LATENT,
}
RENAMED = {  # by the classes of `transformers` (`attribute_map`)
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
# Files beside the models' own that read a field for all models.
FURTHER = {
    ("vLLM", "sliding_window"): "vllm/config/model.py",
    ("SGLang", "final_logit_softcapping"): "sglang/srt/layers/logits_processor.py",
}
READERS = {"rope_parameters": "get_rope_config"}  # functions of SGLang that read a field for the model that calls them
MODELS = {"vLLM": "vllm/model_executor/models", "SGLang": "sglang/srt/models"}
OLMO3 = "sglang/srt/configs/olmo3.py"  # SGLang's own configuration class names OLMo 2's architecture


@cache
def rows() -> dict[str, list[str]]:
    """Returns the rows of the page's table by family, each as the cells after the first."""
    section = PAGE.read_text(encoding="utf-8").split("### Families of both servers")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {line[0].strip(" `"): [cell.strip() for cell in line[1:]] for line in lines}


def test_the_table_names_every_family_once() -> None:
    section = PAGE.read_text(encoding="utf-8").split("### Families of both servers")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)) == sorted(families())
    for name, (vllm, sglang, _) in rows().items():
        assert (vllm == "no") == (sglang == "no") == (name not in EXPORTED)


@pytest.mark.parametrize(("server", "name"), UNREAD)
def test_the_table_names_what_a_server_does_not_read(server: str, name: str) -> None:
    said, unread = rows()[name][2], UNREAD[server, name]
    if "tie_embeddings" in unread and families()[name].defaults.get("tie_embeddings") is None:
        assert families()[name].head_copy  # so that the server needs no tying
        unread = unread - {"tie_embeddings"}
    assert not unread or server in said or "both ignore" in said
    for ours in unread:
        assert ours in families()[name].varies
        assert re.search(rf"`{ours}\b", said), ours


def test_the_table_names_only_fields_of_the_family() -> None:
    scaling = {*ModelConfig.model_fields["rope_scaling"].annotation.__args__[0].model_fields}  # type: ignore[union-attr]
    kinds = {"yarn", "llama3", "linear"}
    for name, (*_, said) in rows().items():
        for word in re.findall(r"`(\w+)[^`]*`", said):
            assert word in {*families()[name].varies, *scaling, *kinds}, (name, word)


def unpacked(server: str) -> Path:
    """Returns the folder of the server's unpacked wheel. Skips the test without one."""
    if not (named := os.environ.get(SERVERS[server])):
        pytest.skip(f"{SERVERS[server]} names no folder with an unpacked wheel of {server}")
    return Path(named)


def model_file(server: str, folder: Path, architecture: str) -> Path:
    """Returns the file of the class for `architecture` in the server's registry."""
    models = folder / MODELS[server]
    if server == "vLLM":
        registry = (models / "registry.py").read_text(encoding="utf-8")
        found = re.findall(rf'"{architecture}": \(\s*"(\w+)",\s*"\w+"', registry)
        assert found, f"{architecture} is not in {models / 'registry.py'}"
        package = models / found[0] / "base.py"
        return package if package.is_file() else models / f"{found[0]}.py"
    for file in sorted(models.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        entries = re.findall(r"^EntryClass\s*=\s*(.*?)(?:\n\S|\Z)", text, re.MULTILINE | re.DOTALL)
        if entries and architecture in re.findall(r"\w+", entries[-1] if "[" in entries[-1] else entries[0]):
            return file
    raise AssertionError(f"{architecture} is in no EntryClass of {models}")


@cache
def mentioned(file: Path) -> frozenset[str]:
    """Returns the attributes of configurations, the strings and the imported names in a file of Python."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            found |= {node.attr} if owner.endswith("config") else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom):
            found |= {each.name for each in node.names}
    return frozenset(found)


def imported_models(file: Path, models: Path) -> set[Path]:
    """Returns the other model files that `file` imports from, base classes for example."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    modules = {
        (node.module or "").rpartition(".")[2] for node in nodes if node.level or ".models." in f"{node.module}."
    }
    return {path for module in modules if (path := models / f"{module}.py").is_file() and path != file}


def published_names(name: str) -> dict[str, tuple[str, ...]]:
    """Returns the names in config.json of our fields that change what the family computes."""
    family = families()[name]
    found = {}
    for ours, theirs in {**family.optional, **family.fields}.items():
        own = theirs.name if isinstance(theirs, Choice | Multiple) else theirs
        special = "layer_types" if ours == "full_attention_every" else own
        found[ours] = SPECIAL.get(ours, (RENAMED.get(special, special),))
    return {ours: names for ours, names in found.items() if ours not in WITHOUT_EFFECT}


def source_of_transformers(name: str) -> Path:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("transformers is not installed: vLLM runs its code for this family")
    return Path(spec.submodule_search_locations[0]) / "models" / name / f"modeling_{name}.py"


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("server", SERVERS)
def test_the_server_reads_what_the_table_does_not_name(server: str, name: str) -> None:
    folder = unpacked(server)
    architecture = str(EXPORTED[name].architecture)
    if (server, name) == ("SGLang", "olmo3"):
        assert {architecture, "Olmo2ForCausalLM"} <= mentioned(folder / OLMO3)
        architecture = "Olmo2ForCausalLM"
    file = model_file(server, folder, architecture)
    runs_transformers = server == "vLLM" and file.parent.name == "transformers"
    assert (rows()[name][("vLLM", "SGLang").index(server)] == "transformers") == runs_transformers
    files = {file, *imported_models(file, folder / MODELS[server])}
    if runs_transformers:  # the class of the output layer is vLLM's
        files = {source_of_transformers(name), file}
    unread = UNREAD.get((server, name), set())
    for ours, names in published_names(name).items():
        for theirs in names:
            beside = [folder / FURTHER[server, theirs]] if (server, theirs) in FURTHER else []
            if ours in unread:
                assert theirs not in mentioned(file), f"{file} reads {theirs} now: mend docs/serving.md"
            else:
                read = any({theirs, READERS.get(theirs)} & mentioned(each) for each in (*files, *beside))
                assert read, f"{file} does not read {theirs}: name model.{ours} in docs/serving.md"
