"""Run folders of any length, with the files that a run writes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


def _make(path: Path, steps: int = 40, *, vocab: int = 256, tokenizer: str = "abc", **changed: Any) -> Path:
    """Makes a run folder; `changed` replaces metrics of all steps in the second half of the run."""
    path.mkdir(parents=True)
    with (path / "metrics.jsonl").open("w") as metrics, (path / "experts.jsonl").open("w") as experts:
        for step in range(1, steps + 1):
            record = {
                "step": step, "tokens": 512 * step, "time": 1e9 + 2 * step, "loss": 5 - step / steps, "lr": 1e-3,
                "grad_norm": 1.0, "tokens_per_second": 256.0, "step_seconds": 2.0, "checkpoint_seconds": 0.0,
                "model_flops_utilization": None,
            } | (changed if step > steps // 2 else {})  # fmt: skip
            if step % 10 == 0:
                record |= {"bits_per_byte": 2.0, "time/computation": 1.5, "time/data": 0.5, "memory/parameters": 1024}
                experts.write(json.dumps({"step": step, "load": {"1": [0.5, 1.5], "3": [1.0, 1.0]}}) + "\n")
            metrics.write(json.dumps(record) + "\n")
    config = {"model": {"family": "olmoe", "layers": 2, "hidden": 8, "vocab": vocab}, "train": {"steps": steps}}
    (path / "config.yaml").write_text(yaml.dump(config))
    environment = {"step": 0, "parameters": 1000, "active_parameters": 500, "tokenizer": tokenizer, "ranks": 2}
    (path / "environment.jsonl").write_text(json.dumps(environment) + "\n")
    event = {"node": None, "rank": None, "step": None, "seconds": None, "detail": "lost </script>"}
    events = [
        event | {"time": 1e9 + 21, "kind": "failure", "node": "b", "rank": 1},
        event | {"time": 1e9 + 30, "kind": "recovered", "step": 11, "seconds": 9.0},
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """Returns the function that makes a run folder at a path."""
    return _make


def embedded(page: str) -> Any:
    """Returns the data embedded in a page. The JSON must be standard, without NaN."""
    text = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def number(value: Any) -> float:
    return math.nan if value is None else float(value)
