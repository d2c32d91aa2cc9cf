"""Trains a model on text that every machine has: Python's own standard library.

Prepares data with a trained tokenizer, trains `mula-tiny-moe` for about three minutes, and measures bits per byte on
held-out files, against the untrained model. Then samples some Python code and exports to Hugging Face format.
Everything goes to `demo/`; nothing is downloaded. `make demo` runs the script.
"""

import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path("demo")
TRAINING_SECONDS = 170
CONTEXT, GLOBAL_BATCH, MICRO_BATCH = 256, 16, 8


def main() -> None:
    began = time.monotonic()
    if ROOT.exists():
        shutil.rmtree(ROOT)  # this script's own folder, which every run makes anew
    say("1. Text, of Python's standard library, to training data, with a tokenizer of 4,096 entries trained on it")
    run("sample-text", "--output", ROOT / "text")
    run("prepare", ROOT / "text" / "train", "--output", ROOT / "data", "--train-tokenizer", 4096, "--context", CONTEXT)

    steps = steps_in(TRAINING_SECONDS)
    say(f"2. Train mula-tiny-moe for {steps} steps, about {TRAINING_SECONDS / 60:.0f} minutes on this machine")
    config = write_config(ROOT / "demo.yaml", ROOT / "run", steps)
    run("train", config)

    say("3. Bits per byte on held-out files: the untrained model, then the trained one")
    run(
        "train",
        config,
        f"train.output={ROOT / 'untrained'}",
        "train.stop_at=1",
        "lr_schedule.warmup_steps=1000000",
        quiet=True,
    )
    scores = {}
    for name, folder in (("untrained", ROOT / "untrained"), ("trained", ROOT / "run")):
        output = ROOT / f"{name}.json"
        run("evaluate", folder, "--text", ROOT / "text" / "held-out", "--output", output)
        scores[name] = json.loads(output.read_text())["bits_per_byte"]

    say("4. A sample")
    run("generate", ROOT / "run", "--prompt", "def __init__(self", "--max-tokens", 100, "--temperature", 0.7)

    say("5. Hugging Face format")
    run("export", ROOT / "run", "--output", ROOT / "huggingface")
    summary(scores, time.monotonic() - began)


def steps_in(seconds: float) -> int:
    """Returns the number of steps that this machine takes in `seconds`, estimated from a short trial run."""
    trial = ROOT / "trial"
    run("train", write_config(ROOT / "trial.yaml", trial, steps=12), quiet=True)
    times = sorted(json.loads(line)["step_seconds"] for line in (trial / "metrics.jsonl").read_text().splitlines())
    shutil.rmtree(trial)
    return max(50, min(2000, round(seconds / times[len(times) // 2])))


def write_config(path: Path, output: Path, steps: int) -> Path:
    """Writes the run's configuration; the preset sets the learning rate."""
    path.write_text(
        f"""model: mula-tiny-moe
data: {{path: {ROOT / "data"}}}
train: {{output: {output}, steps: {steps}, global_batch: {GLOBAL_BATCH}, micro_batch: {MICRO_BATCH},
  sequence_length: {CONTEXT}}}
checkpoint: {{every: 200}}
observe: {{log_every: 50, tensorboard: false}}
"""
    )
    return path


def run(*words: object, quiet: bool = False) -> None:
    """Runs an `optimus` command and shows the command line; `quiet` hides the line and the output."""
    command = ["optimus", *map(str, words)]
    if not quiet:
        print(f"\n$ {shlex.join(command)}", flush=True)
    program = Path(sys.executable).with_name("optimus")
    done = subprocess.run([program, *command[1:]], capture_output=quiet, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed\n{done.stderr or ''}")


def unigram_entropy() -> float:
    """Returns the entropy of the training tokens' frequencies, in nats: the loss of a model without context."""
    import numpy as np

    counts = sum(
        np.bincount(np.load(shard, mmap_mode="r").ravel(), minlength=4096)
        for shard in (ROOT / "data").glob("shard-*.npy")
    )
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def summary(scores: dict[str, float], seconds: float) -> None:
    records = [json.loads(line) for line in (ROOT / "run" / "metrics.jsonl").read_text().splitlines()]
    last = records[-20:]
    loss = sum(record["loss"] for record in last) / len(last)
    speed = sorted(record["tokens_per_second"] for record in records)[len(records) // 2]
    entropy = unigram_entropy()
    say(f"Done in {seconds / 60:.1f} minutes")
    print(f"""
  loss             {loss:.3f} nats per token (mean of the last {len(last)} steps), at {speed:,.0f} tokens/s
  without context  {entropy:.3f} (unigram entropy of the data); a uniform guess {math.log(4096):.3f}
  bits per byte    {scores["trained"]:.3f} on held-out files; untrained {scores["untrained"]:.3f}

  {ROOT}/data         tokens, shuffled and sharded      {ROOT}/run          metrics.jsonl, TensorBoard, checkpoints
  {ROOT}/huggingface  AutoModelForCausalLM loads it     {ROOT}/demo.yaml    the configuration of the run

Next, with .venv/bin on your PATH (source .venv/bin/activate):
  optimus generate {ROOT}/run --prompt "import "
  optimus train {ROOT}/demo.yaml train.output={ROOT}/dense model=mula-tiny     the dense model on the same data
  optimus report {ROOT}/run     curves, time, memory and the load of experts, on one page
  docs/tutorial.md goes through each step.""")


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
