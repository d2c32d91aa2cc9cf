"""A folder's further content (chat template, special tokens, generation settings) survives import, training, merging
and export."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import optimus
from optimus.checkpoint.folder import find_checkpoint, read_description
from optimus.config import ModelConfig
from optimus.data.preparation import prepare
from optimus.errors import UserError
from optimus.hub import export_checkpoint, export_model, import_folder, read_published
from optimus.hub.published import published_again
from optimus.model import Transformer
from optimus.model.init import initialize

transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 4, "eos_token_id": [256, 7, 9]}
CONFIG = {
    "bos_token_id": 4,
    "eos_token_id": [256, 7],
    "pad_token_id": 5,
    "use_cache": True,
    "max_position_embeddings": 96,
}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 16}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture
def folder(tokenizer: Path, tmp_path: Path) -> Path:
    """A folder as published: 96 positions, a chat template, a padding token, three tokens that end a text."""
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 24, "vocab": 264}
    scaling = {"kind": "llama3", "factor": 2.0, "original_context": 48}
    model = Transformer(ModelConfig.model_validate({"family": "llama", "rope_scaling": scaling, **sizes}))
    initialize(model, seed=0, std=0.1)
    path = tmp_path / "theirs"
    export_model(model, path, context=96, tokenizer=tokenizer, eos_id=256)
    (path / "config.json").write_text(json.dumps(read(path / "config.json") | CONFIG))
    generation = GENERATION | {"transformers_version": "4.1.0", "_from_model_config": True}
    (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER | {"add_bos_token": True}))
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def trained(model: Path, run: Path, tokenizer: Path, small_run: dict[str, Any], ranks: int = 1) -> Path:
    """Trains two steps of 32 tokens, on data of this tokenizer, from a folder or a checkpoint; returns the run."""
    data = run.with_name("data")
    if not data.exists():
        sources = [Path(__file__).resolve().parents[2] / "optimus" / "config"]
        prepare(sources, data, tokenizer=tokenizer, context=32, workers=1)
    train = small_run["train"] | {"steps": 2, "precision": "float32", "output": str(run)}
    config = small_run | {"model": str(model), "data": {"path": str(data)}, "train": train}
    if (model / "checkpoint.json").exists():
        config |= {"model": read(model / "checkpoint.json")["model"], "checkpoint": {"load_path": str(model)}}
    optimus.train(config, ranks=ranks)
    return run


@pytest.mark.in_turn(2, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_what_a_server_reads_is_the_same(
    folder: Path, tokenizer: Path, small_run: dict[str, Any], tmp_path: Path
) -> None:
    first = trained(folder, tmp_path / "run", tokenizer, small_run, ranks=2)
    import_folder(folder, tmp_path / "imported")
    second = trained(tmp_path / "imported", tmp_path / "second", tokenizer, small_run)
    averaged = tmp_path / "averaged"
    optimus.merge([str(first), str(second)], averaged)
    for number, checkpoint in enumerate((tmp_path / "imported", first, second, averaged)):
        ours = tmp_path / f"ours-{number}"
        export_checkpoint(checkpoint, ours)
        before, after = (
            {field: value for field, value in read(path / "config.json").items() if field != "torch_dtype"}
            for path in (folder, ours)
        )
        assert after == before
        assert after.items() >= CONFIG.items()
        assert (ours / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
        tokens = read(ours / "tokenizer_config.json")
        assert tokens == TOKENIZER | {"add_bos_token": True, "model_max_length": 96}  # the larger of both
        assert read(ours / "special_tokens_map.json") == {"eos_token": "<|endoftext|>"}
    encoder = transformers.AutoTokenizer.from_pretrained(ours)
    assert encoder.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert transformers.AutoModelForCausalLM.from_pretrained(ours).generation_config.eos_token_id == [256, 7, 9]


@pytest.mark.parametrize("longest", ["long", None, [16], math.nan])
def test_a_longest_text_that_is_no_number_is_said_again(folder: Path, tmp_path: Path, longest: object) -> None:
    """A maximum length that is no number is exported unchanged: only numbers can be compared with the trained length."""
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER | {"model_max_length": longest}))
    import_folder(folder, tmp_path / "imported")
    export_checkpoint(tmp_path / "imported", tmp_path / "ours")
    assert str(read(tmp_path / "ours" / "tokenizer_config.json")["model_max_length"]) == str(longest)


def test_files_that_nothing_has_changed_are_byte_equal(folder: Path, tmp_path: Path) -> None:
    """The tokenizer's files of a folder, in all their forms, and its generation settings, with line ends and spaces."""
    odd = {
        "tokenizer_config.json": json.dumps(
            TOKENIZER | {"model_max_length": 1 << 100, "add_bos_token": True}, indent=3
        ),
        "chat_template.jinja": TEMPLATE + "\r\n{# é #}",
        "added_tokens.json": '{"<|im_end|>":7,\n "<|im_start|>": 8}',
        "vocab.json": '{"a": 0}',
        "merges.txt": "#version: 0.2\nt h\n",
    }
    for name, text in odd.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    import_folder(folder, tmp_path / "imported")
    export_checkpoint(tmp_path / "imported", tmp_path / "ours")
    names = [*odd, "tokenizer.json", "tokenizer.model", "special_tokens_map.json", "generation_config.json"]
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / "vocab.json").write_text("{}")
    right = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return right(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=f"/{name} cannot be read: Permission denied$"):
        read_published(folder)


def context(run: Path) -> int:
    return read_description(find_checkpoint(run)).context


def test_the_context_is_the_longest_of_all_trainings(
    folder: Path, tokenizer: Path, small_run: dict[str, Any], tmp_path: Path
) -> None:
    assert context(trained(folder, tmp_path / "run", tokenizer, small_run)) == 96
    (folder / "config.json").write_text(json.dumps(read(folder / "config.json") | {"max_position_embeddings": 8}))
    assert context(trained(folder, tmp_path / "longer", tokenizer, small_run)) == 32


def test_a_later_phase_and_a_resumed_run_do_not_lower_it(small_run: dict[str, Any], tmp_path: Path) -> None:
    phases = [{"steps": 1}, {"steps": 1, "sequence_length": 16}]
    train = {key: value for key, value in small_run["train"].items() if key != "steps"} | {"precision": "float32"}
    optimus.train(small_run | {"train": train, "phases": phases})
    assert context(tmp_path / "run") == 32
    short = small_run["train"] | {"steps": 4, "sequence_length": 16, "precision": "float32"}
    before = {"load_path": str(tmp_path / "run")}
    first = small_run | {"train": short | {"stop_at": 2, "output": str(tmp_path / "next")}, "checkpoint": before}
    optimus.train(first)
    assert context(tmp_path / "next") == 32
    optimus.train(first | {"train": short | {"output": str(tmp_path / "next")}}, resume=True)
    assert (context(tmp_path / "next"), read_description(find_checkpoint(tmp_path / "next")).step) == (32, 4)


def test_another_tokenizer_has_other_tokens(folder: Path, prepared: Path) -> None:
    """Another tokenizer makes an export leave out everything about tokens; the rest is kept."""
    other = prepared / "tokenizer.json"
    again = published_again(read_published(folder), vocab=264, tokenizer=other, eos_id=0, pad_id=0, context=32)
    assert again.config == {"use_cache": True, "eos_token_id": 0}
    assert again.generation == {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}
    assert again.files == {}


@pytest.mark.parametrize(
    ("eos_id", "said", "expected"),
    [
        (256, {}, 256),
        (None, {"eos_token_id": 7}, 7),
        (7, {"eos_token_id": 7}, 7),
        (256, {"eos_token_id": 7}, [256, 7]),
        (256, {"eos_token_id": [7, 256]}, [7, 256]),
        (256, {"eos_token_id": [7, 900]}, [256, 7]),
        (256, {"eos_token_id": 900}, 256),
        (256, {"eos_token_id": None}, 256),
    ],
)
def test_what_ends_a_text(eos_id: int | None, said: dict[str, Any], expected: Any) -> None:
    about: dict[str, Any] = {"config.json": said, "sha256": None}
    again = published_again(about, vocab=264, tokenizer=None, eos_id=eos_id, pad_id=None, context=32)
    assert again.config["eos_token_id"] == again.generation["eos_token_id"] == expected


def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    for text, reason in (("{", "cannot be read"), ("[]", "must hold a JSON object")):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match=f"generation_config.json {reason}"):
            import_folder(folder, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
