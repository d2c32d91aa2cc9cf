"""Loading files, presets and overrides into the configuration tree: precedence, and a message for every error."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.sweep import in_turns
from optimus.config import RunConfig, dump_config, load_config, preset_names, resolve_model
from optimus.config.load import keys_of_section, other_names, read_section
from optimus.config.yaml_text import parse_yaml
from optimus.errors import UserError


def base(**sections: Any) -> dict[str, Any]:
    """Returns the smallest valid configuration, with `sections` added."""
    train = {"output": "runs/a", "steps": 10, "global_batch": 8, "micro_batch": 4, "sequence_length": 32}
    return {"model": "mula-tiny-moe", "data": {"path": "data"}, "train": train, **sections}


def message(source: Any, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def test_defaults_then_preset_then_file_then_overrides() -> None:
    assert load_config(base(model="mula-1b")).lr_schedule.lr == 4e-4  # the tree's default
    config = load_config(base())
    assert (config.lr_schedule.lr, config.lr_schedule.min_lr) == (2e-3, 2e-4)  # the preset's value
    assert config.optimizer.weight_decay == 0.1
    config = load_config(base(lr_schedule={"lr": 1e-3}))
    assert (config.lr_schedule.lr, config.lr_schedule.min_lr) == (1e-3, 2e-4)  # the file, key by key
    config = load_config(base(lr_schedule={"lr": 1e-3}), ["lr_schedule.lr=5e-3"])
    assert (config.lr_schedule.lr, config.lr_schedule.min_lr) == (5e-3, 2e-4)


def test_overrides_are_yaml() -> None:
    config = load_config(
        base(),
        [
            "lr_schedule.lr=4e-4", "lr_schedule.min_lr=4.0E-5", "optimizer.clip_norm=null", "optimizer.betas=[0.8, 0.9]",
            "recompute=[norm, moe]", "observe.tensorboard=false", "train.seed=7", "train.output=a=b", "checkpoint.keep=",
            "optimizer.weight_decay=0",
        ],
    )  # fmt: skip
    assert (config.lr_schedule.lr, config.lr_schedule.min_lr) == (4e-4, 4e-5)
    assert config.optimizer.clip_norm is None
    assert config.checkpoint.keep is None
    assert config.optimizer.betas == [0.8, 0.9]
    assert config.recompute == ["norm", "moe"]
    assert config.observe.tensorboard is False
    assert (config.train.seed, config.train.output, config.optimizer.weight_decay) == (7, "a=b", 0.0)


def test_a_key_of_a_preset_is_overridden_and_its_recipe_stays() -> None:
    config = load_config(base(), ["model.hidden=64", "model.layers=2"])
    assert (config.model.hidden, config.model.layers, config.model.experts) == (64, 2, 8)
    assert config.lr_schedule.lr == 2e-3
    assert load_config(base(), ["model=mula-tiny", "model.hidden=64"]).model.family == "olmo"


def test_loading_does_not_change_the_mapping_that_was_given() -> None:
    source = base(lr_schedule={"lr": 1e-3})
    load_config(source, ["lr_schedule.lr=5e-3", "model.hidden=64", "train.seed=3"])
    assert source == base(lr_schedule={"lr": 1e-3})


def test_a_tree_is_a_source_too() -> None:
    tree = load_config(base())
    assert load_config(tree) == tree
    assert load_config(tree, ["train.steps=3"]).train.steps == 3
    assert load_config(tree, ["train.steps=3"]).lr_schedule == tree.lr_schedule
    assert load_config(load_config(base(model="mula-tiny")), ["train.steps=3"]).model.family == "olmo"


@pytest.mark.parametrize("name", in_turns(preset_names(), 4, always=8))
def test_the_saved_tree_is_read_back_unchanged(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    # Texts that YAML could read as another type.
    for text in (
        "runs/a",
        "1e5",
        "12:30:45",
        "no",
        "null",
        "0x10",
        "a: b",
        "2024-01-01",
        "- x",
        "ümlaut",
        "%",
        "1_000",
    ):
        config = load_config(base(model=name), [f"train.output='{text}'", "data.path='4e-4'"])
        file.write_text(dump_config(config), encoding="utf-8")
        assert load_config(file) == config
        assert load_config(file).train.output == text
        assert dump_config(load_config(file)) == dump_config(config)


def test_a_model_folder_brings_its_sections(tmp_path: Path) -> None:
    def read(path: Path) -> dict[str, Any]:
        return {**resolve_model("mula-tiny"), "lr_schedule": {"warmup_steps": 9}}

    config = load_config(base(model=str(tmp_path)), ["lr_schedule.lr=0.1"], read)
    assert (config.model.family, config.lr_schedule.warmup_steps, config.lr_schedule.lr) == ("olmo", 9, 0.1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["modle=x"], r"unknown key 'modle': did you mean 'model'\?"),
        (["train.sed=1"], r"unknown key 'train\.sed': did you mean 'train\.seed'\?"),
        (["model.hiden=64"], r"unknown key 'model\.hiden': did you mean 'model\.hidden'\?"),
        (["train.warmup_steps=5"], r"unknown key 'train\.warmup_steps': did you mean 'lr_schedule\.warmup_steps'\?"),
        (["lr=5"], r"unknown key 'lr': did you mean 'lr_schedule\.lr'\?"),
        (["optimizer.zzz=1"], r"unknown key 'optimizer\.zzz': valid: betas, clip_during_warmup, clip_norm, eps, groups"),
        (["train.steps=ten"], r"train\.steps: not a number: 'ten'"),
        (["train.seed=ten"], r"'train\.seed' is 'ten': it must be a whole number"),
        (["train.steps=1.5"], r"'train\.steps' is 1\.5: it must be a whole number"),
        (["train.output=7"], r"'train\.output' is 7: it must be text"),
        (["observe.tensorboard=1"], r"'observe\.tensorboard' is 1: it must be true or false"),
        (["train.precision=float8"], r"precision' is 'float8': it must be 'auto', 'bfloat16', 'float16' or 'float32'"),
        (["train.loss_scale.initial=8"], r"train: loss_scale applies to precision: float16 only, but precision is \w+: "),
        (
            ["train.precision=float16", "train.loss_scale.minimum=1e6"],
            r"train\.loss_scale: minimum 1e\+06 is above initial 65536: lower it",
        ),
        (
            ["train.precision=float16", "train.loss_scale.initial=1e39"],
            r"train\.loss_scale: initial 1e\+39 is beyond the range of float32: give scales from 2\^-126",
        ),
        (
            ["train.precision=float16", "train.loss_scale.minimum=1e-60"],
            r"train\.loss_scale: minimum 1e-60 is beyond the range of float32",
        ),
        (["train.precision=float16", "train.loss_scale.growth_factor=1"], r"growth_factor' is 1: it must be greater than 1"),
        (["train.precision=float16", "train.loss_scale.backoff_factor=1"], r"backoff_factor' is 1: it must be less than 1"),
        (
            ["train.precision=bfloat16", "state.gradient_dtype=float16"],
            r"gradient_dtype: float16 needs the loss scaling of train\.precision: float16, but train\.precision is bfloat16",
        ),
        (["train.steps=0"], r"'train\.steps' is 0: it must be greater than 0"),
        (["recompute=[norm, atention]"], r"'recompute\.1' is 'atention': it must be 'norm', 'attention'"),
        (["optimizer.betas=[0.9]"], r"'optimizer\.betas' is \[0\.9\]: it must be a list of at least 2 items"),
        (["train=5"], r"'train' is 5: it must be a mapping"),
        (["model="], r"'model' is None: it must be a mapping"),
        (["model=mula-tny"], r"model: 'mula-tny' is neither a preset nor a Hugging Face folder; did you mean 'mula-tiny'\?"),
        (["train.seed=[1"], r"override 'train\.seed=\[1' is not valid YAML"),
        (["train.seed"], r"override 'train\.seed' is not of the form key\.path=value"),
        (["=3"], r"override '=3' is not of the form key\.path=value"),
        (["data.path.deep=3"], r"override 'data\.path\.deep=3': data\.path is not a section"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(overrides: list[str], expected: str) -> None:
    assert re.search(expected, message(base(), *overrides))


def test_one_text_is_no_list_of_overrides() -> None:
    with pytest.raises(UserError, match=r"overrides must be a list of strings: give \['train\.steps=5'\]"):
        load_config(base(), "train.steps=5")


def test_what_is_missing_is_named() -> None:
    text = message({"model": "mula-tiny", "train": {"output": "x", "steps": 1}})
    for path in ("data", "train.global_batch", "train.micro_batch", "train.sequence_length"):
        assert f"'{path}' is missing" in text
    # The text would come from keys whose defaults follow from others.
    assert "PydanticUndefined" not in text


def test_several_problems_are_reported_at_once() -> None:
    text = message(base(), "train.sed=1", "train.steps=ten", "lr_schedule.name=triangle", "modl=3")
    for part in (
        "'train.sed'",
        "train.steps: not a number: 'ten'",
        "'lr_schedule.name' is 'triangle'",
        "did you mean 'model'?",
    ):
        assert part in text
    assert text.startswith("config: ")


def test_a_file_is_named_in_its_messages(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert message(file) == f"config file {file} does not exist"
    file.write_text("model: mula-tiny\ndata: {path: x}\ntrain: {steps: 4\nlr_schedule: 3: 4\n")
    assert re.match(rf"config file {re.escape(str(file))} line \d is not valid YAML: ", message(file))
    file.write_text("model: mula-tiny\n\ttrain: 3\n")
    assert f"{file} line 2 is not valid YAML" in message(file)
    file.write_text("- a list\n")
    assert f"config file {file} must contain a mapping with the keys model, data, train" in message(file)
    file.write_text("")
    assert "must contain a mapping" in message(file)
    file.write_bytes(b"model: \xff\xfe\n")
    assert f"config file {file} cannot be read" in message(file)
    assert f"config file {tmp_path} cannot be read" in message(tmp_path)
    file.write_text("model: mula-tiny\ntran: {}\n")
    assert message(file).startswith(f"{file}: ")
    assert "unknown key 'tran': did you mean 'train'?" in message(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: a\ndata: {path: x}\ntrain: {}\n\nmodel: b\n", r"the key 'model' is given twice \(lines 1 and 5\)"),
        ("train:\n  steps: 4\n  seed: 1\n  'steps': 5\n", r"the key 'train\.steps' is given twice \(lines 2 and 4\)"),
        ("train: {seed: 1, steps: 4, seed: 2}\n", r"the key 'train\.seed' is given twice \(line 1\)"),
        ("a: [{b: 1}, {c: 1, c: 1}]\n", r"the key 'a\.1\.c' is given twice \(line 1\)"),
        ("a: {1: b, 0x1: c}\n", r"the key 'a\.0x1' is given twice \(line 1\)"),
        ("a: {yes: b, true: c}\n", r"the key 'a\.true' is given twice \(line 1\)"),
    ],
)
def test_a_key_that_stands_twice_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert re.match(f"config file {re.escape(str(file))}: {expected}: remove one of them", message(file))


def test_a_key_that_stands_twice_is_refused_in_overrides_and_other_files(tmp_path: Path) -> None:
    assert message(base(), "optimizer={eps: 1, eps: 2}").startswith(
        "override 'optimizer={eps: 1, eps: 2}': the key 'eps'"
    )
    file = tmp_path / "machine.yaml"
    file.write_text("name: a\nname: b\n")
    with pytest.raises(UserError, match=r"the key 'name' is given twice \(lines 1 and 2\)"):
        read_section(file, RunConfig, "machine file")


def test_yaml_that_repeats_by_reference_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: mula-tiny\ndata: {path: x}\n"
        "train: &t {steps: 4, global_batch: 8, micro_batch: 4, sequence_length: 32, output: a}\n"
    )
    assert load_config(file).train.steps == 4
    file.write_text(file.read_text().replace("&t {", "{<<: {seed: 3}, <<: {seed: 3}, "))
    assert load_config(file).train.seed == 3


@pytest.mark.parametrize("repeat", ["[*x{0}, *x{0}]", "{{a: *x{0}, b: *x{0}}}", "{{<<: [*x{0}, *x{0}]}}"])
def test_aliases_of_aliases_are_one_message(repeat: str, tmp_path: Path) -> None:
    """A 40-line file whose nested aliases stand for exponentially many values is refused with one message."""
    lines = ["x0: &x0 {c: 1}", *(f"x{n}: &x{n} {repeat.format(n - 1)}" for n in range(1, 40))]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(lines))
    assert "expands to more than 1,000,000 values by nested aliases" in message(file)


def test_a_number_of_many_digits_is_refused_as_a_key_too() -> None:
    for text in (f"a: {{0x{1000 * 'f'}: 1}}", f"a: 0x{1000 * 'f'}"):
        with pytest.raises(UserError, match="'a' has a number of more than 1000 digits: shorten it"):
            parse_yaml(text, "a file")


@pytest.mark.parametrize(
    "text",
    [
        "a: 2024-13-45\n",
        "a: &b [*b]\n",
        "{[1]: 2}\n",
        "a: \0\n",
        "a: !!timestamp x\n",
        "a: !!bool x\n",
        "a: 0x" + 5000 * "f",
        "a: {0x" + 5000 * "f" + ": 1}",
        "{2024-13-45: 1}",
        "a: " + 200 * "[" + 200 * "]",
        "a: " + 20_000 * "{a: ",
    ],
)
def test_odd_yaml_is_one_message(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert str(file) in message(file)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("peak_lr=1e-3", "unknown key 'peak_lr': use lr_schedule.lr"),
        ("schedule.peak=1e-3", "unknown key 'schedule': use lr_schedule"),  # as it was before
        ("train.context=64", "unknown key 'train.context': use train.sequence_length"),
        ("train.batch_size=8", "use train.global_batch"),
        ("model.max-seq-length=8", "use train.sequence_length"),
        ("bf16=true", "use train.precision: bfloat16"),
        ("fp16=true", "use train.precision: float16"),
        ("train.initial_loss_scale=65536", "use train.loss_scale.initial"),
        ("loss_scale_window=1000", "use train.loss_scale.growth_interval"),
        ("zero_stage=2", "use state.shard: none, optimizer"),
        ("state.release=false", "unknown key 'state.release': use state.reshard_after_forward"),
        ("state.fsdp=true", "use state.shard: parameters"),
        ("gradient_checkpointing=true", "use recompute: block"),
        ("parallel.tensorModelParallelSize=2", "use parallel.tensor"),
    ],
)
def test_keys_of_other_trainers_name_ours(override: str, expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        load_config(base(), [override])


def test_what_is_named_is_there() -> None:
    named = {name for ours in other_names().values() for name in re.findall(r"\b[a-z]+\.[a-z_]+\b", ours)}
    assert len(named) > 30
    for section, key in (name.split(".") for name in named):
        assert key in keys_of_section([section], RunConfig), f"{section}.{key}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [("parallel.data=x", "a whole number or 'auto'"), ("parallel.tensor=x", "a whole number or a list")],
)
def test_a_key_of_several_types_is_one_problem(override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(base(), [override])
    assert str(caught.value) == f"config: '{override[:-2]}' is 'x': it must be {expected}"


@pytest.mark.parametrize(
    "key", ["train.output", "train.data_cache", "data.path", "checkpoint.load_path", "tuning.cache", "model"]
)
@pytest.mark.parametrize("name", ["a\0b", 300 * "a", 3000 * "a/"])
def test_what_no_file_can_be_called_is_one_message(key: str, name: str) -> None:
    section, _, field = key.partition(".")
    config = base()
    config[section] = config.get(section, {}) | {field: name} if field else name
    assert "cannot be the path of a file" in message(config)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model.layers", 1 << 39, "'model.layers' is 549755813888: it must be less than or equal to 10000"),
        ("model.vocab", 10**30, "model.vocab: 1000000000000000000000000000000 is larger than any model's"),
        ("model.hidden", 1 << 30, "model: hidden 1073741824 gives a matrix of"),
        ("model.experts", 1 << 30, "model: hidden 1048576 gives a matrix of"),
        ("model.rope_theta", float("inf"), "'model.rope_theta' is inf: it must be a finite number"),
        ("lr_schedule.lr", float("nan"), "'lr_schedule.lr' is nan: it must be"),
    ],
)
def test_what_no_machine_could_hold_is_refused_at_once(key: str, value: float, expected: str) -> None:
    """Impossible sizes are refused before any loop over layers and any 64-bit multiplication."""
    sizes = ["model.hidden=1048576", "model.intermediate=1048576"]
    assert expected in message(base(model="mula-tiny-moe"), *sizes, f"{key}={yaml.safe_dump(value).split()[0]}")
