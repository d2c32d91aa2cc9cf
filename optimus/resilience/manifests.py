"""Formats manifests of a run for Kubernetes (JobSet, Kubeflow's TrainJob) and SkyPilot, and a script for Ray."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from optimus.errors import UserError, nearest

Platform = Literal["jobset", "trainjob", "skypilot", "ray"]

PORT = 29400  # port of the rendezvous


@dataclass(frozen=True)
class Manifest:
    """The parameters of a manifest. `config` is the path of the configuration on the nodes."""

    name: str
    config: str
    overrides: Sequence[str]
    nodes: int
    spares: int
    ranks_per_node: int
    options: Sequence[str]  # options of `optimus launch`, besides the numbers above
    directives: Mapping[str, str]

    @property
    def launch(self) -> list[str]:
        """The command of a node, without the rendezvous and the node's name."""
        numbers = {"--nodes": self.nodes, "--spares": self.spares, "--ranks-per-node": self.ranks_per_node}
        words = [word for name, number in numbers.items() for word in (name, str(number))]
        return ["optimus", "launch", self.config, *self.overrides, *words, *self.options]

    @property
    def train(self) -> list[str]:
        """The command of a rank under another launcher."""
        return ["optimus", "train", self.config, *self.overrides, "--resume", "auto"]


class _Platform(NamedTuple):
    """A row of the table of platforms. `directives` maps each directive to its meaning."""

    write: Callable[[Manifest], str]
    submit: str
    directives: Mapping[str, str]
    needed: tuple[str, ...] = ()
    launches: bool = True  # False if the platform starts the ranks, without `optimus launch`


def manifest(platform: Platform, job: Manifest, path: Path) -> tuple[str, str]:
    """Returns (text of a manifest, command that submits the file `path`). The caller must write the text to `path`.

    Raises `UserError` for an invalid or missing directive, and for spares on a platform without spares.
    """
    row = PLATFORMS[platform]
    check_names(platform, job.directives, row.directives, row.needed)
    if job.spares and not row.launches:
        raise UserError(
            f"--scheduler {platform} has no spares, because it starts the ranks by itself: leave --spares out"
        )
    submit = row.submit.format(shlex.quote(str(path)))
    return f"# Written by `optimus launch --scheduler {platform}`; submit it with `{submit}`.\n{row.write(job)}", submit


def check_names(platform: str, found: Iterable[str], valid: Mapping[str, str], needed: Sequence[str]) -> None:
    """Raises `UserError` for a directive that `valid`, names to meanings, does not have, and for one of `needed` that is
    not found."""
    found = list(found)
    for name in found:
        if name not in valid:
            raise UserError(f"--directive {name}=...: {nearest(name, valid)}")
    if missing := [name for name in needed if name not in found]:
        raise UserError(f"--scheduler {platform} needs --directive {missing[0]}=...: {valid[missing[0]]}")


def manifest_name(folder: Path) -> str:
    """Returns a name for the job about `folder` that platforms accept: lower-case letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "run"
    return f"optimus-{name}"[:40].rstrip("-")


def parse_directives(texts: Sequence[str]) -> dict[str, str]:
    """Parses directives NAME=VALUE. Raises `UserError` for other text, and for a NAME that is given twice."""
    found = dict[str, str]()
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise UserError(f"--directive {text!r}: give NAME=VALUE")
        if name in found:
            raise UserError(f"--directive {text}: {name} is given twice: give it once")
        found[name] = value
    return found


def _jobset(job: Manifest) -> str:
    store = [*("optimus", "rendezvous", "--port", str(PORT), "--address"), "$(POD_IP)"]
    node = [*job.launch, "--rendezvous", f"{job.name}-store-0-0.{job.name}:{PORT}", "--node", "$(POD_NAME)"]
    count = job.nodes + job.spares
    replicated = [
        {
            "name": "store",
            "replicas": 1,
            "template": {"spec": {"backoffLimit": 0, "template": _node_pod(job, store, {})}},
        },
        {
            "name": "node",
            "replicas": 1,
            "template": {
                "spec": {
                    "parallelism": count,
                    "completions": count,
                    "completionMode": "Indexed",
                    # The job fails if it loses more nodes than it has spares.
                    "backoffLimitPerIndex": 0,
                    "maxFailedIndexes": job.spares,
                    "template": _node_pod(job, node, _limits(job)),
                }
            },
        },
    ]
    return jobset_text(
        job.name,
        {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["node"]},
            "failurePolicy": {"maxRestarts": 10},
            "replicatedJobs": replicated,
        },
    )


def jobset_text(name: str, spec: Mapping[str, Any]) -> str:
    """Returns a JobSet as YAML."""
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return _yaml(kind | {"metadata": {"name": name}, "spec": dict(spec)})


def _node_pod(job: Manifest, command: Sequence[str], limits: Mapping[str, str]) -> dict[str, Any]:
    fields = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
    env = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}} for name, field in fields.items()]
    return pod_template(job.directives, command, limits, env=env)


def pod_template(
    directives: Mapping[str, str],
    command: Sequence[str],
    limits: Mapping[str, str],
    *,
    env: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the template of a pod with one container, named "optimus", that runs `command`.

    `directives` have the container's image and, as CLAIM:/PATH, the claim of its volume. `limits` are the container's
    limits of resources, `env` its environment variables. Raises `UserError` for a claim that is not CLAIM:/PATH.
    """
    container: dict[str, Any] = {"name": "optimus", "image": directives["image"], "command": list(command)}
    if env:
        container["env"] = list(env)
    if limits:
        container["resources"] = {"limits": dict(limits)}
    spec: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    if "claim" in directives:
        claim, path = parse_claim(directives)
        container["volumeMounts"] = [{"name": "shared", "mountPath": path}]
        spec["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}]
    return {"spec": spec}


def parse_claim(directives: Mapping[str, str]) -> tuple[str, str]:
    """Returns (name of the volume claim, path at which pods see the volume) of `directives`. Raises `UserError` for a
    claim that is not CLAIM:/PATH."""
    claim, _, path = directives["claim"].partition(":")
    if not claim or not path.startswith("/"):
        raise UserError(f"--directive claim={directives['claim']}: give CLAIM:/PATH")
    return claim, path


def _limits(job: Manifest) -> dict[str, str]:
    resource = job.directives.get("resource")
    return {} if resource is None else {resource: str(job.ranks_per_node)}


def _trainjob(job: Manifest) -> str:
    trainer: dict[str, Any] = {
        "image": job.directives["image"],
        "command": ["torchrun", "-m", *job.train],
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
    }
    if limits := _limits(job):
        trainer["resourcesPerNode"] = {"limits": limits}
    spec: dict[str, Any] = {
        "runtimeRef": {"name": job.directives.get("runtime", "torch-distributed")},
        "trainer": trainer,
    }
    if "claim" in job.directives:
        claim, path = parse_claim(job.directives)
        pod = {
            "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
            "containers": [{"name": "node", "volumeMounts": [{"name": "shared", "mountPath": path}]}],
        }
        patched = {"template": {"spec": {"template": {"spec": pod}}}, "name": "node"}
        runtime = {"template": {"spec": {"replicatedJobs": [patched]}}}
        spec["runtimePatches"] = [{"manager": "optimus.io/launch", "trainingRuntimeSpec": runtime}]
    return _yaml(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": spec,
        }
    )


def _skypilot(job: Manifest) -> str:
    resources = {name: job.directives[name] for name in ("accelerators", "infra", "image_id") if name in job.directives}
    run = f"""\
head=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
    optimus rendezvous --port {PORT} --address "$head" &
    trap 'kill $!' EXIT
fi
{shlex.join(job.launch)} --rendezvous "$head:{PORT}" --node "node-$SKYPILOT_NODE_RANK"
code=$?
[ "$SKYPILOT_NODE_RANK" != 0 ] || sleep 30   # the other nodes still read the store
exit $code
"""
    task: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes + job.spares, "workdir": "."}
    if resources:
        task["resources"] = resources
    return _yaml(task | {"setup": job.directives.get("setup", "pip install optimus-pretrain"), "run": run})


def _ray(job: Manifest) -> str:
    values = {"CONFIG": job.config, "OVERRIDES": list(job.overrides), "NODES": job.nodes, "RANKS": job.ranks_per_node}
    values |= {"DEVICE": job.directives.get("resource", ""), "NAME": job.name}
    settings = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return _RAY.replace("@SETTINGS@\n", settings)


def _yaml(content: Mapping[str, Any]) -> str:
    class Dumper(yaml.SafeDumper):
        """Puts quotes around texts that YAML 1.1 or 1.2 reads as numbers."""

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, block)
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
    return yaml.dump(content, Dumper=Dumper, sort_keys=False, width=1000)


# Finite numbers of YAML 1.2's core schema. PyYAML (YAML 1.1) reads some of these numbers as texts.
_NUMBER = re.compile(r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+)$")

_RAY = Path(__file__).with_name("ray_job.txt").read_text(encoding="utf-8")

_IMAGE = "the image of the containers, with Optimus and the files of the run, such as image=registry/optimus:1"
_CLAIM = "a volume claim that all nodes share and its path, such as claim=runs:/runs"
_RESOURCE = "the devices of a node, one for each rank, such as resource=nvidia.com/gpu"
PLATFORMS: dict[Platform, _Platform] = {
    "jobset": _Platform(
        _jobset,
        "kubectl apply -f {}",
        {"image": _IMAGE, "claim": _CLAIM, "resource": _RESOURCE},
        needed=("image",),
    ),
    "trainjob": _Platform(
        _trainjob,
        "kubectl apply -f {}",
        {"image": _IMAGE, "claim": _CLAIM, "resource": _RESOURCE, "runtime": "the name of the training runtime"},
        needed=("image",),
        launches=False,
    ),
    "skypilot": _Platform(
        _skypilot,
        "sky jobs launch {}",
        {
            "accelerators": "the devices of a node, such as accelerators=H100:8",
            "infra": "the cloud, such as infra=aws/us-east-1",
            "image_id": "the image of the machines",
            "setup": "the commands that install Optimus",
        },
    ),
    "ray": _Platform(
        _ray,
        "python {}",
        {"resource": "the devices of a node, one for each rank: resource=GPU or the name of another resource of Ray"},
        launches=False,
    ),
}
