"""Configurations of earlier versions: users' files are migrated; files written by runs are translated when read."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import optimus
from optimus import api
from optimus.checkpoint.folder import DESCRIPTION
from optimus.checkpoint.manifest import MANIFEST
from optimus.cli import app
from optimus.config import load_config
from optimus.config.renamed import NEW_VALUES, RENAMED, with_new_names
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics

# A user's file of 24 November 2026.
BEFORE = """\
# The first run.
model: mula-tiny   # a preset
data: {path: data, order: "shuffled"}
train:
  output: runs/first
  steps: 10        # few
  global_batch: 8
  micro_batch: 4
  sequence_length: 32
"lr_schedule":
  peak: 1e-3       # the peak of peaks

  'minimum': 1.0e-4
state: {residency: device, coarsening: 2}
moe:
  routing: "uniform"
observe:
    trace: 3
phases:
  - {name: peak, steps: 4, lr_schedule: {peak: 2e-3}}
  - name: more   # trace
    steps: 6
    lr_schedule:
      minimum: 0.0
"""
AFTER = """\
# The first run.
model: mula-tiny   # a preset
data: {path: data, order: "shuffled"}
train:
  output: runs/first
  steps: 10        # few
  global_batch: 8
  micro_batch: 4
  sequence_length: 32
"lr_schedule":
  lr: 1e-3       # the peak of peaks

  'min_lr': 1.0e-4
state: {offload: none, all_reduce_tiles: 2}
moe:
  force_balanced: true
observe:
    profile_step: 3
phases:
  - {name: peak, steps: 4, lr_schedule: {lr: 2e-3}}
  - name: more   # trace
    steps: 6
    lr_schedule:
      min_lr: 0.0
"""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_file_is_migrated(tmp_path: Path, ending: str) -> None:
    """A migration keeps comments, order, quotes and line endings of the file; a second migration changes nothing."""
    path = tmp_path / "first.yaml"
    path.write_bytes(BEFORE.replace("\n", ending).encode())
    path.chmod(0o640)
    found = api.migrate(path)
    assert path.read_bytes().decode() == AFTER.replace("\n", ending)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [(key.line, key.old, key.new) for key in found][:3] == [
        (11, "lr_schedule.peak", "lr_schedule.lr"),
        (13, "lr_schedule.minimum", "lr_schedule.min_lr"),
        (14, "state.residency", "state.offload"),
    ]
    assert api.migrate(path) == []
    assert [each.name for each in tmp_path.iterdir()] == ["first.yaml"]


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "first.yaml"
    path.write_text(BEFORE)
    done = CliRunner().invoke(app, ["config", "migrate", str(path)])
    assert done.output.splitlines()[0] == f"{path} line 11: lr_schedule.peak is now lr_schedule.lr"
    assert f"{path} line 14: state.residency: device is now none" in done.output
    again = CliRunner().invoke(app, ["config", "migrate", str(path)])
    assert again.output == f"{path}: all keys have their current names\n"
    assert json.loads(CliRunner().invoke(app, ["config", "migrate", str(path), "--json"]).output) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "state: {residency: all, offload: all}\n",
            "line 1: state.residency is now state.offload, which the file has too",
        ),
        ("\nevaluate: {text: a, every: 3}\n", "line 2: evaluate.text is now validation: .* move it there"),
        ("- 3\n", "is not a configuration"),
        ("", "is not a configuration"),
        ("a: [\n", "is not valid YAML"),
        ("a: 1\na: 2\n", "is given twice"),
    ],
)
def test_what_is_not_migrated_stays(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "first.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        api.migrate(path)
    assert path.read_text() == text
    with pytest.raises(UserError, match=r"none.yaml cannot be read"):
        api.migrate(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\ufefflr_schedule: {peak: 1}\n", "\ufefflr_schedule: {lr: 1}\n"),
        (
            '{"lr_schedule":{"peak":1e-3},"state":{"residency":"device"}}\n',
            '{"lr_schedule":{"lr":1e-3},"state":{"offload":"none"}}\n',
        ),
        (
            "lr_schedule: &s\n  peak: 1\nphases:\n- {name: a, steps: 3, lr_schedule: *s}\n",
            "lr_schedule: &s\n  lr: 1\nphases:\n- {name: a, steps: 3, lr_schedule: *s}\n",
        ),
        (
            "phases: [&q {steps: 4, lr_schedule: {peak: 1}}, *q]\n",
            "phases: [&q {steps: 4, lr_schedule: {lr: 1}}, *q]\n",
        ),
        ("# \U0001f600\n'lr_schedule': {peak: 1}\n", "# \U0001f600\n'lr_schedule': {lr: 1}\n"),
    ],
)
def test_forms_of_yaml(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "first.yaml"
    path.write_text(before)
    api.migrate(path)
    assert path.read_text() == after


@pytest.mark.parametrize(
    "text",
    [
        "lr_schedule: {<<: {peak: 1}}\n",
        "b: &b {peak: 1}\nlr_schedule: {<<: *b}\n",
        "x: &v device\nstate:\n  residency: *v\n",
        "lr_schedule: {&l peak: 1}\nx: *l\n",
        "data: {path: &l residency}\nstate: {*l : device}\n",
        "moe:\n  routing: >-\n    learned\n# c\n",
        "state:\n  residency: >-\n    device\nmoe: {}\n",
    ],
)
def test_keys_that_are_tied_to_other_text_are_renamed_by_hand(tmp_path: Path, text: str) -> None:
    path = tmp_path / "first.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"is unchanged: .* Rename these keys by hand: \w+\.\w+ \(now \w+\.\w+\)"):
        api.migrate(path)
    assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["first.yaml"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "first.yaml"
    path.write_text(BEFORE)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"No space left on device\. The file is unchanged"):
        api.migrate(path)
    assert path.read_text() == BEFORE
    assert [each.name for each in tmp_path.iterdir()] == ["first.yaml"]


def test_files_before_one_that_fails_are_told(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(BEFORE)
    bad.write_text("- 3\n")
    done = CliRunner().invoke(app, ["config", "migrate", str(good), str(bad)])
    assert done.exit_code
    assert "lr_schedule.peak is now lr_schedule.lr" in done.output


def test_keys_of_phases_are_told_their_new_names() -> None:
    base = {"model": "mula-tiny", "data": {"path": "d"}, "train": {"output": "x", "global_batch": 8}}
    for phase, said in (
        ({"lr_schedule": {"minimum": 1e-5}}, "lr_schedule.minimum': use lr_schedule.min_lr"),
        ({"schedule": {}}, "schedule': use lr_schedule"),
    ):
        with pytest.raises(UserError, match=said):
            load_config(base | {"phases": [{"steps": 10, **phase}]})


@pytest.mark.parametrize("old", sorted(set(RENAMED)))
def test_a_user_is_told_the_new_name(old: str) -> None:
    base = {"model": "mula-tiny", "data": {"path": "d"}, "train": {"output": "x", "steps": 10, "global_batch": 8}}
    with pytest.raises(UserError, match=rf"unknown key '{old}': use {RENAMED[old]}"):
        load_config(base, [f"{old}=1"])


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"lr_schedule": {"peak": 1.0, "lr": 2.0}}, "'lr_schedule.lr' is given twice, once as 'lr_schedule"),
        (
            {"schedule": {"peak": 1.0}, "lr_schedule": {"lr": 2.0}},
            "'lr_schedule' is given twice, once as 'lr_schedule'",
        ),
        ({"lr_schedule": {}, "schedule": {}}, "'lr_schedule' is given twice, once as 'schedule'"),
        (
            {"phases": [{"schedule": {"lr": 2.0, "peak": 1.0}}]},
            "'lr_schedule.lr' is given twice, once as 'schedule.peak'",
        ),
    ],
)
def test_a_key_under_both_names_is_refused(written: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"a.yaml: {named}.*: remove one of them"):
        with_new_names(written, "a.yaml")


@pytest.mark.parametrize("given", [3, {"text": "b"}, "b"])
def test_what_is_no_list_of_validations_stays(given: Any) -> None:
    """The check of the configuration names it."""
    assert with_new_names({"evaluate": {"text": "a", "every": 2}, "validation": given})["validation"] == given


def as_before(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with the earlier names."""
    old = {new: name for name, new in RENAMED.items() if "." in name}
    values = {(name, str(new)): value for (name, value), new in NEW_VALUES.items()}
    found = {}
    for section, content in config.items():
        if isinstance(content, dict):
            names = {key: old.get(f"{section}.{key}", f"{section}.{key}") for key in content}
            content = {
                name.partition(".")[2]: values.get((name, str(content[key])), content[key])
                for key, name in names.items()
            }
        found[section] = content
    return found


def rewrite_description(checkpoint: Path) -> None:
    """Writes the earlier names into a checkpoint's description, and updates the manifest's checksums."""
    content = json.loads((checkpoint / DESCRIPTION).read_text())
    before = {"config": as_before(content["config"]), **as_before({"model": content["model"]})}
    text = json.dumps(content | before).encode()
    (checkpoint / DESCRIPTION).write_bytes(text)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["crc"]
    manifest["files"][DESCRIPTION] = {"bytes": len(text), "crc": zlib.crc32(text)}
    sums = zlib.crc32((json.dumps(manifest, separators=(",", ":")) + "\n").encode())
    (checkpoint / MANIFEST).write_text(json.dumps(manifest | {"crc": sums}, separators=(",", ":")) + "\n")


def test_a_run_that_was_begun_before_resumes(small_run: dict[str, Any]) -> None:
    """A run whose folder and checkpoints have the earlier names resumes; its curve equals that of a run that never
    stopped."""
    whole = small_run | {"train": small_run["train"] | {"output": f"{small_run['train']['output']}-whole"}}
    optimus.train(whole)
    optimus.train(small_run, ["train.stop_at=3"])
    folder = Path(small_run["train"]["output"])
    written = yaml.safe_load((folder / "config.yaml").read_text())
    before = as_before(written)
    assert before["lr_schedule"]["peak"] == written["lr_schedule"]["lr"]
    assert before["state"]["residency"] == "device"
    assert before["moe"]["routing"] == "learned"
    assert before["model"]["score"] == "softmax"
    assert with_new_names(before) == written
    (folder / "config.yaml").write_text(yaml.safe_dump(before, sort_keys=False))
    (checkpoint,) = folder.glob("checkpoints/step-*")
    rewrite_description(checkpoint)
    assert load_config(folder / "config.yaml").lr_schedule.lr == written["lr_schedule"]["lr"]
    optimus.train(small_run, resume=True)
    earlier = folder / "config.until-step-3.yaml"  # the configuration at the run's start
    earlier.write_text(yaml.safe_dump(before, sort_keys=False))
    own = folder.parent / "own.yaml"
    own.write_text(f"include: {folder / 'config.yaml'}\n")
    assert load_config(earlier).lr_schedule == load_config(own).lr_schedule
    losses = [[record["loss"] for record in read_metrics(Path(run["train"]["output"]))] for run in (small_run, whole)]
    assert losses[0] == losses[1]
