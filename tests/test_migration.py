"""The pages for those who come from another trainer: both configurations of a page are read, and mean the same.

Our side is read by our loader and by `optimus train --check`. The other side is read as text here, and by the other
trainer's own parser where a Python has it: OPTIMUS_PEERS_PYTHON names a Python with torchtitan 0.3.0, OLMo-core 3.0.0,
DeepSpeed 0.19.8 or Megatron-LM; each test is skipped that finds its trainer missing.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from optimus import cli
from optimus.config import RunConfig
from optimus.config.load import keys_of_section, load_config, other_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["accelerate", "deepspeed", "megatron", "olmo-core", "torchtitan"]
RANKS = {"accelerate": 8, "deepspeed": 16, "megatron": 32, "olmo-core": 8, "torchtitan": 32}
SMALL_MODEL = "{family: llama, hidden: 64, layers: 8, heads: 8, kv_heads: 8, intermediate: 64, vocab: 400}"
Numbers = dict[str, Any]

# Words of the tables for which the same row names a command, or whose last part is a key of ours for something else.
NOT_TYPED = {"load_universal", "validator.steps"}


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"from-{page}.md").read_text(encoding="utf-8")


def block(page: str, side: str, name: str) -> str:
    """Returns the fenced block below `<!-- side: name -->`."""
    found = re.search(rf"<!-- {side}: {re.escape(name)} -->\n```\w+\n(.*?)\n```\n", text_of(page), re.DOTALL)
    assert found, (page, side, name)
    return found[1] + "\n"


def flags(command: str) -> dict[str, list[str]]:
    """Returns the words after each option of a command, by the option's name."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in shlex.split(command.replace("\\\n", " ")):
        if word.startswith("--"):
            name = word
            found[name] = []
        elif name:
            found[name].append(word)
    return found


def keywords(program: str) -> dict[str, Any]:
    """Returns the keyword arguments of all calls in a program, as far as they are numbers, texts, lists or mappings
    made from the program's own constants."""
    tree = ast.parse(program)
    constants: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            constants[node.targets[0].id] = node.value.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                names = {each.id for each in ast.walk(keyword.value) if isinstance(each, ast.Name)}
                calls = any(isinstance(each, ast.Call) for each in ast.walk(keyword.value))
                if keyword.arg is not None and not calls and names <= constants.keys():
                    code = compile(ast.Expression(keyword.value), "page", "eval")
                    found.setdefault(keyword.arg, eval(code, {}, dict(constants)))
    return found


def from_megatron() -> Numbers:
    said = flags(block("megatron", "peer", "pretrain.sh"))
    one = {name: words[0] for name, words in said.items() if words}
    ranks = int(one["--nproc_per_node"]) * int(one["--nnodes"])
    return {"ranks": ranks} | megatron_numbers({name.removeprefix("--").replace("-", "_"): one[name] for name in one})


def megatron_numbers(said: Mapping[str, Any]) -> Numbers:
    stages = int(said["num_layers"]) // int(said["pipeline_model_parallel_size"])
    return {
        "global_batch": int(said["global_batch_size"]),
        "micro_batch": int(said["micro_batch_size"]),
        "sequence_length": int(said["seq_length"]),
        "steps": int(said["train_iters"]),
        "seed": int(said["seed"]),
        "lr": float(said["lr"]),
        "min_lr": float(said["min_lr"]),
        "warmup_steps": int(said["lr_warmup_iters"]),
        "betas": [float(said["adam_beta1"]), float(said["adam_beta2"])],
        "weight_decay": float(said["weight_decay"]),
        "clip_norm": float(said["clip_grad"]),
        "tensor": int(said["tensor_model_parallel_size"]),
        "pipeline": int(said["pipeline_model_parallel_size"]),
        "stages_per_rank": stages // int(said["num_layers_per_virtual_pipeline_stage"]),
        "checkpoint_every": int(said["save_interval"]),
        "log_every": int(said["log_interval"]),
        "layers": int(said["num_layers"]),
        "hidden": int(said["hidden_size"]),
        "intermediate": int(said["ffn_hidden_size"]),
        "kv_heads": int(said["num_query_groups"]),
    }


def from_torchtitan() -> Numbers:
    said = keywords(block("torchtitan", "peer", "pretrain.py"))
    launch = re.search(r"```bash\n(torchrun .*?)\n```", text_of("torchtitan"), re.DOTALL)
    assert launch
    ranks = flags(launch[1])
    return {
        "ranks": int(ranks["--nnodes"][0]) * int(ranks["--nproc_per_node"][0]),
        "global_batch": said["global_batch_size"],
        "micro_batch": said["local_batch_size"],
        "sequence_length": said["seq_len"],
        "steps": said["steps"],
        "seed": said["seed"],
        "lr": said["lr"],
        "min_lr": said["lr"] * said["min_lr_factor"],
        "warmup_steps": said["warmup_steps"],
        "clip_norm": said["max_norm"],
        "tensor": said["tensor_parallel_degree"],
        "shard_ranks": said["data_parallel_shard_degree"],
        "data": said["data_parallel_shard_degree"] * said["data_parallel_replicate_degree"],
        "checkpoint_every": said["interval"],
        "checkpoint_keep": said["keep_latest_k"],
        "log_every": said["log_freq"],
    }


def from_deepspeed() -> Numbers:
    said = json.loads(block("deepspeed", "peer", "ds_config.json"))
    start = {name: words[0] for name, words in flags(block("deepspeed", "peer", "start.sh")).items() if words}
    rule, schedule, zero = said["optimizer"]["params"], said["scheduler"]["params"], said["zero_optimization"]
    ranks = int(start["--num_nodes"]) * int(start["--num_gpus"])
    return {
        "ranks": ranks,
        "global_batch": said["train_batch_size"],
        "micro_batch": said["train_micro_batch_size_per_gpu"],
        "accumulation": said["gradient_accumulation_steps"],
        "sequence_length": int(start["--seq_length"]),
        "steps": int(start["--max_steps"]),
        "schedule_steps": schedule["total_num_steps"],
        "seed": int(start["--seed"]),
        "lr": rule["lr"],
        "min_lr": rule["lr"] * schedule["cos_min_ratio"],
        "warmup_steps": schedule["warmup_num_steps"],
        "betas": rule["betas"],
        "eps": rule["eps"],
        "weight_decay": rule["weight_decay"],
        "clip_norm": said["gradient_clipping"],
        "shard": ["none", "optimizer", "gradients", "parameters"][zero["stage"]],
        "offload": "optimizer" if zero["offload_optimizer"]["device"] == "cpu" else "none",
        "checkpoint_every": int(start["--save_steps"]),
        "log_every": said["steps_per_print"],
    }


def from_olmo_core() -> Numbers:
    program = block("olmo-core", "peer", "train.py")
    said = keywords(program)
    ranks = re.search(r"torchrun --nproc-per-node=(\d+)", text_of("olmo-core"))
    steps = re.search(r"Duration\.steps\(([\d_]+)\)", program)
    assert ranks
    assert steps
    return {
        "ranks": int(ranks[1]),
        "global_batch": said["global_batch_size"] // said["sequence_length"],
        "micro_batch": said["rank_microbatch_size"] // said["sequence_length"],
        "sequence_length": said["sequence_length"],
        "steps": int(steps[1]),
        "seed": said["seed"],
        "lr": said["lr"],
        "min_lr": said["lr"] * said["alpha_f"],
        "warmup_steps": said["warmup"],
        "betas": list(said["betas"]),
        "weight_decay": said["weight_decay"],
        "clip_norm": said["max_grad_norm"],
        "checkpoint_every": said["save_interval"],
        "checkpoint_keep": said["max_checkpoints"],
        "log_every": said["metrics_collect_interval"],
    }


def from_accelerate() -> Numbers:
    return accelerate_numbers(
        yaml.safe_load(block("accelerate", "peer", "fsdp.yaml")), keywords(block("accelerate", "peer", "train.py"))
    )


def accelerate_numbers(launch: Mapping[str, Any], said: Mapping[str, Any]) -> Numbers:
    ranks = launch["num_processes"]
    return {
        "ranks": ranks,
        "global_batch": said["per_device_train_batch_size"] * said["gradient_accumulation_steps"] * ranks,
        "micro_batch": said["per_device_train_batch_size"],
        "accumulation": said["gradient_accumulation_steps"],
        "steps": said["max_steps"],
        "seed": said["seed"],
        "lr": said["learning_rate"],
        "min_lr": said["lr_scheduler_kwargs"]["min_lr"],
        "warmup_steps": said["warmup_steps"],
        "betas": [said["adam_beta1"], said["adam_beta2"]],
        "eps": said["adam_epsilon"],
        "weight_decay": said["weight_decay"],
        "clip_norm": said["max_grad_norm"],
        "reshard_after_forward": launch["fsdp_config"]["fsdp_reshard_after_forward"],
        "checkpoint_every": said["save_steps"],
        "checkpoint_keep": said["save_total_limit"],
        "log_every": said["logging_steps"],
    }


READ = {
    "accelerate": from_accelerate,
    "deepspeed": from_deepspeed,
    "megatron": from_megatron,
    "olmo-core": from_olmo_core,
    "torchtitan": from_torchtitan,
}


def ours(page: str) -> Numbers:
    config = load_config(yaml.safe_load(block(page, "ours", "run.yaml")))
    train, parallel, model = config.train, config.parallel, config.model
    assert isinstance(parallel.tensor, int)
    data = RANKS[page] // (parallel.tensor * parallel.pipeline * parallel.context)
    return {
        "ranks": RANKS[page],
        "global_batch": train.global_batch,
        "micro_batch": train.micro_batch,
        "accumulation": train.global_batch // (train.micro_batch * data),
        "sequence_length": train.sequence_length,
        "steps": train.steps,
        "schedule_steps": train.steps,
        "seed": train.seed,
        "lr": config.lr_schedule.lr,
        "min_lr": config.lr_schedule.min_lr,
        "warmup_steps": config.lr_schedule.warmup_steps,
        "betas": config.optimizer.betas,
        "eps": config.optimizer.eps,
        "weight_decay": config.optimizer.weight_decay,
        "clip_norm": config.optimizer.clip_norm,
        "data": data,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "stages_per_rank": parallel.stages_per_rank,
        "shard": config.state.shard,
        "shard_ranks": config.state.shard_ranks,
        "offload": config.state.offload,
        "reshard_after_forward": config.state.reshard_after_forward,
        "checkpoint_every": config.checkpoint.every,
        "checkpoint_keep": config.checkpoint.keep,
        "log_every": config.observe.log_every,
        "layers": getattr(model, "layers", None),
        "hidden": getattr(model, "hidden", None),
        "intermediate": getattr(model, "intermediate", None),
        "kv_heads": getattr(model, "kv_heads", None),
        "vocab": getattr(model, "vocab", None),
    }


def assert_same(page: str, theirs: Numbers) -> None:
    mine = ours(page)
    assert len(theirs) > 10
    for name, value in theirs.items():
        if isinstance(value, float):  # a product of two decimals, such as a rate times its smallest share
            assert mine[name] == pytest.approx(value, rel=2**-51), name
        else:
            assert mine[name] == value, name


@pytest.mark.parametrize("page", PAGES)
def test_both_configurations_of_a_page_mean_the_same(page: str) -> None:
    """Batches, lengths, rates, degrees and intervals of the two blocks are equal numbers."""
    theirs = READ[page]()
    assert_same(page, theirs)
    if "accumulation" not in theirs:
        mine = ours(page)
        assert mine["accumulation"] * mine["micro_batch"] * mine["data"] == mine["global_batch"]


@pytest.mark.parametrize("page", PAGES)
def test_what_the_other_trainer_does_by_itself_is_said(page: str) -> None:
    """The others clip from the first step, and none has our betas: our file sets both."""
    raw = yaml.safe_load(block(page, "ours", "run.yaml"))
    assert raw["optimizer"]["clip_during_warmup"] is True
    assert raw["optimizer"]["betas"] == [0.9, 0.95]
    assert raw["train"]["precision"] == "bfloat16"
    assert {"lr", "min_lr", "warmup_steps"} <= raw["lr_schedule"].keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small data in each form that the pages name."""
    made = tmp_path_factory.mktemp("migration")
    (made / "text").mkdir()
    (made / "text" / "some.py").write_text(Path(__file__).read_text(encoding="utf-8") * 40)
    call(["prepare", f"{made}/text", "--output", f"{made}/data", "--train-tokenizer", "400", "--context", "32"])
    tokenizer = f"{made}/data/tokenizer.json"
    for to in ("megatron", "npy"):
        call(["prepare", f"{made}/text", "--to", to, "--tokenizer", tokenizer, "--output", f"{made}/{to}"])
    (made / "corpus").mkdir()
    for name in ("web", "code", "valid"):
        for ending in ("bin", "idx"):
            shutil.copy(
                made / "megatron" / f"text_document.{ending}", made / "corpus" / f"{name}_text_document.{ending}"
            )
    shutil.copytree(made / "npy", made / "dolma")
    for path in ("tokenizers/llama-3.1-8b", "allenai/dolma2-tokenizer"):
        (made / path).mkdir(parents=True)
        shutil.copy(tokenizer, made / path)
    for name in ("web", "c4"):
        shutil.copytree(made / "data", made / "prepared" / name)
    return made


def call(words: list[str]) -> str:
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, (words, done.output)
    return done.output


@pytest.mark.parametrize("page", PAGES)
def test_our_file_passes_the_check(page: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run.yaml of a page, with a small model and short sequences, passes `--check` on the ranks of the page."""
    monkeypatch.chdir(tmp_path)
    for made in folder.iterdir():
        (tmp_path / made.name).symlink_to(made)
    (tmp_path / "data").unlink()
    (tmp_path / "data").symlink_to(folder / "prepared")
    text = re.sub(r"^model: .*$", f"model: {SMALL_MODEL}", block(page, "ours", "run.yaml"), flags=re.MULTILINE)
    text = text.replace("/data/dolma", f"{folder}/dolma").replace("/runs/", "runs/")
    (tmp_path / "run.yaml").write_text(text)
    smaller = ["train.sequence_length=32", "train.steps=2", "lr_schedule.warmup_steps=1", "train.precision=float32"]
    assert call(["train", "run.yaml", *smaller, "--ranks", str(RANKS[page]), "--check"])


@pytest.mark.parametrize("page", PAGES)
def test_our_commands_of_a_page_can_be_typed(page: str) -> None:
    """The parser takes every `optimus` command of a page."""
    found = [
        line
        for fence in re.findall(r"```bash\n(.*?)```", text_of(page), re.DOTALL)
        for line in fence.replace("\\\n", " ").splitlines()
        if re.match(r"(?:optimus|torchrun .* -m optimus) ", line)
    ]
    assert len(found) > 3
    for line in found:
        words = shlex.split(line[line.index("optimus ") :], comments=True)[1:]
        group: Any = typer.main.get_command(cli.app)
        while hasattr(group, "commands"):
            group = group.commands[words.pop(0)]
        group.make_context(group.name, words)


def rows(page: str) -> list[tuple[str, str]]:
    found = re.findall(r"^\| (.*) \| (.*) \|$", text_of(page), re.MULTILINE)
    return [row for row in found if "`" in row[0]]


@pytest.mark.parametrize("page", PAGES)
def test_our_keys_in_the_tables_exist(page: str) -> None:
    found = rows(page)
    assert len(found) >= 20
    for _, here in found:
        for path in re.findall(r"`([a-z_]+\.[a-z_.]+)\b[^`]*`", here):
            *section, key = path.split(".")
            if section[0] in RunConfig.model_fields:
                assert key in keys_of_section(section, RunConfig), path


@pytest.mark.parametrize("page", PAGES)
def test_their_words_in_the_tables_lead_to_our_keys(page: str) -> None:
    """Whoever types a word of a table into our file is told a key of the same row."""
    led = 0
    for theirs, here in rows(page):
        for quoted in re.findall(r"`([^`]+)`", theirs):
            word = quoted.split(".")[-1].strip("-").replace("-", "_")
            if not re.fullmatch(r"[a-z][a-z0-9_]+", word) or quoted in NOT_TYPED or word in here:
                continue
            name = other_names().get(re.sub("[^a-z0-9]", "", word))
            if name is None:  # a key of the same name in another section
                name = next((f"{s}.{word}" for s in RunConfig.model_fields if word in section_keys(s)), None)
            assert name is not None, (page, quoted)
            keys = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+|`[^`]+`|^[a-z]+", name)
            assert any(key.strip("`").split(" --")[0] in here for key in keys), (page, quoted, name, here)
            led += 1
    assert led > 10


@cache
def section_keys(section: str) -> list[str]:
    return [*keys_of_section([section], RunConfig)]


def read_by_peer(program: str, tmp_path: Path, module: str) -> Numbers:
    """Returns what a program prints as its last line in the Python that OPTIMUS_PEERS_PYTHON names."""
    if not (python := os.environ.get("OPTIMUS_PEERS_PYTHON")):
        pytest.skip(f"OPTIMUS_PEERS_PYTHON names no Python with {module}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [python, "-c", f"import importlib; importlib.import_module({module!r})"]
    there = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if there.returncode:
        pytest.skip(f"{python} cannot import {module}: {there.stderr.strip().splitlines()[-1]}")
    done = subprocess.run([python, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


TORCHTITAN = """
import json, sys
sys.path.insert(0, ".")
from torchtitan.config import ConfigManager
c = ConfigManager().parse_args(["--module", "pretrain", "--config", "llama3_8b_c4", "--training.steps", "20000"])
rule = c.optimizer.param_groups[0].optimizer_kwargs
t, p = c.training, c.parallelism
shard, replicate, model = p.data_parallel_shard_degree, p.data_parallel_replicate_degree, c.model_spec.model
print(json.dumps({
    "ranks": shard * replicate * p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree,
    "global_batch": t.global_batch_size, "micro_batch": t.local_batch_size, "sequence_length": t.seq_len,
    "steps": t.steps, "seed": c.debug.seed, "clip_norm": t.max_norm, "lr": rule["lr"], "betas": rule["betas"],
    "eps": rule["eps"], "weight_decay": rule["weight_decay"], "min_lr": rule["lr"] * c.lr_scheduler.min_lr_factor,
    "warmup_steps": c.lr_scheduler.warmup_steps, "tensor": p.tensor_parallel_degree, "shard_ranks": shard,
    "data": shard * replicate, "pipeline": p.pipeline_parallel_degree, "checkpoint_every": c.checkpoint.interval,
    "checkpoint_keep": c.checkpoint.keep_latest_k, "log_every": c.metrics.log_freq, "layers": len(model.layers),
    "hidden": model.dim,
}))
"""

DEEPSPEED = """
import json
import deepspeed.comm
from deepspeed.runtime.config import DeepSpeedConfig

deepspeed.comm.get_rank = lambda: 0  # without a process group the number of ranks would be 1

class Mpu:
    get_data_parallel_world_size = staticmethod(lambda: 16)

c = DeepSpeedConfig("ds_config.json", Mpu())
rule, schedule, zero = c.optimizer_params, c.scheduler_params, c.zero_config
print(json.dumps({
    "global_batch": c.train_batch_size, "micro_batch": c.train_micro_batch_size_per_gpu,
    "accumulation": c.gradient_accumulation_steps, "clip_norm": c.gradient_clipping, "log_every": c.steps_per_print,
    "lr": rule["lr"], "betas": rule["betas"], "eps": rule["eps"], "weight_decay": rule["weight_decay"],
    "schedule_steps": schedule["total_num_steps"], "warmup_steps": schedule["warmup_num_steps"],
    "min_lr": rule["lr"] * schedule["cos_min_ratio"],
    "shard": ["none", "optimizer", "gradients", "parameters"][int(zero.stage)],
    "offload": {"cpu": "optimizer", "none": "none", "nvme": "disk"}[zero.offload_optimizer.device],
}))
"""

OLMO_CORE = """
import json
names = {}
exec(open("train.py").read(), names)
t, c, model = names["train_module"], names["trainer"], names["model"]
length = names["dataset"].sequence_length
saving = c.callbacks["checkpointer"]
assert c.max_duration.unit == "steps" and t.max_sequence_length == length
print(json.dumps({
    "global_batch": names["data_loader"].global_batch_size / length, "micro_batch": t.rank_microbatch_size / length,
    "sequence_length": length, "steps": c.max_duration.value, "seed": names["data_loader"].seed, "lr": t.optim.lr,
    "betas": t.optim.betas, "eps": t.optim.eps, "weight_decay": t.optim.weight_decay, "clip_norm": t.max_grad_norm,
    "warmup_steps": t.scheduler.warmup, "min_lr": t.optim.lr * t.scheduler.alpha_f,
    "checkpoint_every": saving.save_interval, "checkpoint_keep": saving.max_checkpoints,
    "log_every": c.metrics_collect_interval, "layers": model.n_layers, "hidden": model.d_model,
    "vocab": model.vocab_size, "intermediate": model.block.feed_forward.hidden_size,
}))
"""

MEGATRON = """
import argparse, json, shlex
from megatron.training.arguments import add_megatron_arguments
words = shlex.split(open("pretrain.sh").read().replace("\\\\\\n", " "))
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
args = parser.parse_args(words[words.index("pretrain_gpt.py") + 1:])
print(json.dumps({name: value for name, value in vars(args).items() if isinstance(value, (int, float, str))}))
"""


def test_torchtitan_reads_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "pretrain.py").write_text(block("torchtitan", "peer", "pretrain.py"))
    assert_same("torchtitan", read_by_peer(TORCHTITAN, tmp_path, "torchtitan"))


def test_deepspeed_reads_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(block("deepspeed", "peer", "ds_config.json"))
    assert_same("deepspeed", read_by_peer(DEEPSPEED, tmp_path, "deepspeed"))


def test_olmo_core_reads_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("olmo-core", "peer", "train.py"))
    assert_same("olmo-core", read_by_peer(OLMO_CORE, tmp_path, "olmo_core"))


def test_megatron_reads_its_flags(tmp_path: Path) -> None:
    (tmp_path / "pretrain.sh").write_text(block("megatron", "peer", "pretrain.sh"))
    found = read_by_peer(MEGATRON, tmp_path, "megatron.training.arguments")
    assert_same("megatron", megatron_numbers(found))


ACCELERATE = """
import json, sys
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from transformers import TrainingArguments

launch = ClusterConfig.from_yaml_file("fsdp.yaml")
text = open("train.py").read()
names = {"TrainingArguments": TrainingArguments}
program = text[text.index("args = "):text.index("model = ")]
exec(program.replace("bf16=True", "bf16=True, use_cpu=True"), names)  # bf16 is refused without a GPU, but for this
args = names["args"]
own = {name: value for name, value in launch.fsdp_config.items()}
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=own["fsdp_version"], reshard_after_forward=own["fsdp_reshard_after_forward"],
    state_dict_type=own["fsdp_state_dict_type"], activation_checkpointing=own["fsdp_activation_checkpointing"],
)
said = {name: getattr(args, name) for name in (
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "seed", "learning_rate",
    "lr_scheduler_kwargs", "warmup_steps", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
    "max_grad_norm", "save_steps", "save_total_limit", "logging_steps",
)}
print(json.dumps([{"num_processes": launch.num_processes, "mixed_precision": str(launch.mixed_precision),
    "fsdp_config": {"fsdp_reshard_after_forward": plugin.reshard_after_forward}}, said]))
"""


def test_accelerate_and_the_trainer_read_their_configuration(tmp_path: Path) -> None:
    """ClusterConfig, the FSDP plugin and TrainingArguments take every key of the page; each refuses unknown ones."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    for name in ("fsdp.yaml", "train.py"):
        (tmp_path / name).write_text(block("accelerate", "peer", name))
    done = subprocess.run([sys.executable, "-c", ACCELERATE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    launch, said = json.loads(done.stdout.strip().splitlines()[-1])
    assert launch["mixed_precision"] == "bf16"
    assert_same("accelerate", accelerate_numbers(launch, said))
