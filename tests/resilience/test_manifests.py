"""Manifests are read whole by the schemas that their makers publish, and say what the job asks for."""

import ast
import json
import os
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
from optimus.resilience.manifests import _yaml

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


NUMBERS = ["1e3", "12e4", ".5e3", "1.5e3", "-1E+2", "089", "0o17", "0x1F", "1e+06", "12", "1.", "+.5", ".inf", "1_000"]


def test_texts_that_are_numbers_have_quotes(small_run: dict[str, Any], tmp_path: Path) -> None:
    """Readers of YAML 1.2 and of YAML 1.1 have other numbers; numbers of the options are exact."""
    words = [*("--wait", "1000000", "--rejoin-wait", "1234567"), "--directive", "image=1e3"]
    words += ["--directive", "claim=12e4:/x"]
    text = written(small_run, tmp_path, "jobset", *words)
    assert "image: '1e3'\n" in text
    assert "claimName: '12e4'\n" in text
    node = yaml.safe_load(text)["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    command = node["containers"][0]["command"]
    assert command[command.index("--wait") + 1] == "1000000"
    assert command[command.index("--rejoin-wait") + 1] == "1234567"
    lines = _yaml({"texts": NUMBERS, "others": ["e3", "1e3x", "0x", "1-2"], "number": 12}).splitlines()
    assert lines[1:] == [
        *(f"- '{text}'" for text in NUMBERS), "others:", "- e3", "- 1e3x", "- 0x", "- 1-2", "number: 12",
    ]  # fmt: skip


@pytest.mark.parametrize("scheduler", ["jobset", "ray", "slurm"])
def test_a_name_that_ends_a_comment_is_refused(
    small_run: dict[str, Any], tmp_path: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small_run))
    words = ["launch", "run.yaml", "--scheduler", scheduler, *(IMAGE if scheduler == "jobset" else [])]
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(cli.app, [*words, "--output", "x\ntouch PWNED\n.sh"], catch_exceptions=False)
    assert (
        str(caught.value)
        == r"--output x\ntouch PWNED\n.sh: the name has characters that cannot be printed: give another name"
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("x")] == []


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


SKY = """
import json, sys
import sky
from sky.skylet.log_lib import make_task_bash_script

task = sky.Task.from_yaml(sys.argv[1])
task.validate_run()
print(json.dumps({"task": task.to_yaml_config(), "script": make_task_bash_script(task.run)}))
"""


@pytest.fixture
def sky_python() -> str:
    if not (named := os.environ.get("OPTIMUS_SKYPILOT_PYTHON")):
        pytest.skip("OPTIMUS_SKYPILOT_PYTHON names no Python with skypilot")
    return named


@pytest.mark.parametrize("infra", ["", "aws/us-east-1", "kubernetes"])
def test_skypilot_reads_its_task(small_run: dict[str, Any], tmp_path: Path, infra: str, sky_python: str) -> None:
    words = ["--directive", f"infra={infra}", "--directive", "accelerators=H100:8"] if infra else []
    words += ["--directive", "image_id=docker:registry/optimus:1"] if infra else []
    found = yaml.safe_load(written(small_run, tmp_path, "skypilot", "--nodes", "2", "--spares", "1", *words))
    task = read_by_sky(sky_python, tmp_path)["task"]
    assert {name: task[name] for name in ("name", "num_nodes", "setup", "run")} == {
        name: found[name] for name in ("name", "num_nodes", "setup", "run")
    }
    if infra:
        assert task["resources"]["infra"] == infra
        assert task["resources"]["accelerators"] == {"H100": 8}
        assert "docker:registry/optimus:1" in str(task["resources"]["image_id"])


def read_by_sky(python: str, folder: Path) -> dict[str, Any]:
    environment = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment.pop("PYTHONPATH", None)
    words = [python, "-c", SKY, str(folder / "skypilot.out")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.in_turn(0, 3)
@pytest.mark.parametrize("sky", [False, pytest.param(True, id="as SkyPilot runs it")])
def test_the_commands_of_skypilot_on_two_machines(
    small_run: dict[str, Any], tmp_path: Path, sky: bool, request: pytest.FixtureRequest
) -> None:
    """The commands run twice here, with the variables that two machines have, and train."""
    script = yaml.safe_load(written(small_run, tmp_path, "skypilot", "--nodes", "2"))["run"]
    if sky:
        script = read_by_sky(request.getfixturevalue("sky_python"), tmp_path)["script"]
    (tmp_path / "job.sh").write_text(script.replace("sleep 30", "sleep 5"))
    (tmp_path / "sky_workdir").mkdir()
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
    }
    machines = [
        subprocess.Popen(
            ["bash", str(tmp_path / "job.sh")],
            env=environment | {"SKYPILOT_NODE_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    said = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert len(losses(tmp_path / "run")) == 6


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
        (["ray", "--node", "n1"], "--node: leave it out with --scheduler: the written file chooses it"),
        (["ray", "--nodes", "3"], "train.global_batch"),
        (["ray", "--keep-alive", "1x3"], "--keep-alive: --scheduler ray starts the ranks without `optimus launch`"),
        (["ray", "--max-restarts", "3"], "--max-restarts: --scheduler ray starts the ranks"),
        (["trainjob", *IMAGE, "--wait", "9"], "--wait: --scheduler trainjob starts the ranks"),
        (["trainjob", *IMAGE, "--rejoin-wait", "9"], "--rejoin-wait: --scheduler trainjob starts the ranks"),
        (["jobset", *IMAGE, "--wait", "nan"], "--wait nan: give a finite number of seconds, at least 0"),
        (["jobset", *IMAGE, "--wait", "-5"], "--wait -5: give a finite number of seconds, at least 0"),
        (["skypilot", "--rejoin-wait", "inf"], "--rejoin-wait inf: give a finite number of seconds, at least 0"),
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
