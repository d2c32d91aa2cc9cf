"""Manifests are read whole by the schemas that their makers publish, and say what the job asks for."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from optimus import cli
from optimus.disk import read_json_lines
from optimus.errors import UserError

IMAGE = ["--directive", "image=registry/optimus:1"]
MORE = [*IMAGE, "--directive", "claim=runs:/runs", "--directive", "resource=nvidia.com/gpu"]


def written(config: dict[str, Any], folder: Path, scheduler: str, *words: str) -> str:
    config = config | {"train": config["train"] | {"micro_batch": 1}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    output = folder / f"{scheduler}.out"
    done = CliRunner().invoke(
        cli.app,
        ["launch", str(folder / "run.yaml"), "--scheduler", scheduler, "--output", str(output), *words],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert f"submit it with: {output.read_text().splitlines()[0].split('`')[3]}" in done.output.replace("\n", "")
    return output.read_text()


def whole(kind: str, content: dict[str, Any]) -> None:
    """Asserts that the published model of a kind reads all of the content, as it ignores what it does not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    read = getattr(models, kind).from_dict(content)
    assert json.loads(read.to_json()) == content


@pytest.mark.parametrize("words", [IMAGE, [*MORE, "--spares", "1"]], ids=["least", "all"])
def test_jobset(small_run: dict[str, Any], tmp_path: Path, words: list[str]) -> None:
    found = yaml.safe_load(written(small_run, tmp_path, "jobset", "--nodes", "2", "--ranks-per-node", "2", *words))
    spares = int("--spares" in words)
    whole("JobsetV1alpha2JobSet", found)
    store, nodes = found["spec"]["replicatedJobs"]
    assert nodes["template"]["spec"]["parallelism"] == nodes["template"]["spec"]["completions"] == 2 + spares
    assert nodes["template"]["spec"]["maxFailedIndexes"] == spares
    command = nodes["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    (where,) = [command[at + 1] for at, word in enumerate(command) if word == "--rendezvous"]
    host, subdomain = where.rpartition(":")[0].split(".")
    assert host == f"{found['metadata']['name']}-{store['name']}-0-0"  # the name that JobSet gives the pod
    assert subdomain == found["spec"]["network"]["subdomain"]
    if spares:
        container = nodes["template"]["spec"]["template"]["spec"]["containers"][0]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
        assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/runs"}]
        assert "resources" not in store["template"]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("words", [IMAGE, [*MORE, "--directive", "runtime=mine"]], ids=["least", "all"])
def test_trainjob(small_run: dict[str, Any], tmp_path: Path, words: list[str]) -> None:
    found = yaml.safe_load(written(small_run, tmp_path, "trainjob", "--nodes", "2", "--ranks-per-node", "2", *words))
    whole("TrainerV1alpha1TrainJob", found)
    trainer = found["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["command"][:4] == ["torchrun", "-m", "optimus", "train"]
    assert trainer["command"][-2:] == ["--resume", "auto"]
    assert found["spec"]["runtimeRef"]["name"] == ("mine" if len(words) > 2 else "torch-distributed")


def test_skypilot(small_run: dict[str, Any], tmp_path: Path) -> None:
    words = ["--directive", "accelerators=H100:8", "--directive", "infra=aws"]
    found = yaml.safe_load(written(small_run, tmp_path, "skypilot", "--nodes", "2", "--spares", "1", *words))
    assert found["num_nodes"] == 3
    assert found["resources"] == {"accelerators": "H100:8", "infra": "aws"}
    done = subprocess.run(["bash", "-n"], input=found["run"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    sky = pytest.importorskip("sky", reason="needs skypilot")
    task = sky.Task.from_yaml(str(tmp_path / "skypilot.out"))
    assert task.num_nodes == 3


@pytest.mark.in_turn(1, 3)
def test_ray_on_a_local_cluster(small_run: dict[str, Any], tmp_path: Path) -> None:
    """A run on two actors of a local cluster has the losses of two ranks."""
    text = written(small_run, tmp_path, "ray", "--ranks-per-node", "2")
    ast.parse(text)
    pytest.importorskip("ray", reason="needs the extra `ray`")
    local = text.replace('ray.init(address="auto"', "ray.init(num_cpus=2, include_dashboard=False")
    (tmp_path / "job.py").write_text(local)
    done = subprocess.run([sys.executable, str(tmp_path / "job.py")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "optimus-run: step 6, loss " in done.stdout
    ours = tmp_path / "ours"
    words = ["train", str(tmp_path / "run.yaml"), f"train.output={ours}", "--ranks", "2"]
    subprocess.run([sys.executable, "-m", "optimus", *words], check=True, capture_output=True)
    assert losses(tmp_path / "run") == losses(ours)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_json_lines(run / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jobset"], "--scheduler jobset needs --directive image=...: the image of the containers"),
        (["jobset", *IMAGE, "--directive", "imag=x"], "--directive imag=...: did you mean 'image'"),
        (["jobset", *IMAGE, "--directive", "claim"], "--directive 'claim': give NAME=VALUE"),
        (["jobset", *IMAGE, "--directive", "image=y"], "--directive image=y: image is given twice: give it once"),
        (["jobset", *IMAGE, "--directive", "claim=runs"], "--directive claim=runs: give CLAIM:/PATH"),
        (["trainjob", *IMAGE, "--spares", "1"], "--scheduler trainjob has no spares"),
        (["ray", "--spares", "1"], "--scheduler ray has no spares"),
        (["ray", "--time", "1:00:00"], "--time: a manifest for ray has no time limit"),
        (["ray", "--nodes", "3"], "train.global_batch"),
    ],
)
def test_refused(small_run: dict[str, Any], tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        written(small_run, tmp_path, *words)
    assert message in str(caught.value)
    assert not (tmp_path / f"{words[0]}.out").exists()


def test_nothing_is_overwritten(small_run: dict[str, Any], tmp_path: Path) -> None:
    written(small_run, tmp_path, "ray")
    with pytest.raises(UserError, match="exists already: give another name"):
        written(small_run, tmp_path, "ray")
