"""Training speed against the Hugging Face `Trainer`, as a user would run either.

The same architecture, data, batch, microbatch and precision; AdamW fused on both sides; every experts implementation of
`transformers` that runs here is a rival. Contestants take turns, round after round, so that a machine that slows down or
speeds up does so for all; a contestant's figure is the median step of its best round.
"""

import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import optimus
from optimus.config import RunConfig, load_config
from optimus.data.shards import Shards
from optimus.hub.config_json import write_config
from optimus.observe.metrics import read_metrics

_WARM_UP = 2  # steps of each run that are not counted
_EXPERTS = ("grouped_mm", "eager")  # batched_mm copies a weight matrix per routed row: 50 s a step here

Contestant = Callable[[RunConfig, Path, int], list[float]]


def run(
    *, model: str = "mula-tiny-moe", steps: int = 8, rounds: int = 3
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows (one per contestant) and ratios: `train.vs_best_rival` is ours over the fastest rival in tokens per second,
    `loader.share_of_step` the part of our step spent waiting for data."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(model, Path(folder))
        contestants: dict[str, Contestant] = {"optimus": _optimus}
        for precision in ("bf16 autocast", "bf16 weights"):
            for experts in _EXPERTS if config.model.experts else ("grouped_mm",):
                contestants[f"transformers Trainer, {experts}, {precision}"] = _trainer(experts, precision)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        losses: dict[str, float] = {}
        shares = []
        for number in range(rounds):
            for name, contestant in contestants.items():
                output = Path(folder) / f"{number}-{name.replace(' ', '-')}"
                times = contestant(config, output, _WARM_UP + steps)
                seconds[name].append(statistics.median(times[_WARM_UP:]))
                losses[name] = _last_loss(output)
            shares.append(_loader_share(Path(folder) / f"{number}-optimus"))
    tokens = config.train.global_batch * config.train.sequence_length
    rows: list[dict[str, Any]] = [
        {"contestant": name, "tokens_per_second": tokens / min(times), "step_seconds": min(times), "loss": losses[name]}
        for name, times in seconds.items()
    ]
    ours, rivals = rows[0]["tokens_per_second"], [row["tokens_per_second"] for row in rows[1:]]
    return rows, {"train.vs_best_rival": ours / max(rivals), "loader.share_of_step": min(shares)}


def _config(model: str, folder: Path) -> RunConfig:
    """A run on Python's own sources, prepared with a tokenizer trained on them."""
    sources = Path(sysconfig.get_paths()["stdlib"])
    probe = {
        "model": model,
        "data": {"path": ""},
        "train": {
            "output": "",
            "steps": 1,
            "global_batch": 1,
            "micro_batch": 1,
            "sequence_length": 2,
            "precision": "bfloat16",
        },
    }
    vocab = load_config(probe).model.vocab
    optimus.prepare(
        [sources / "email", sources / "asyncio", sources / "json"],
        folder / "data",
        train_tokenizer=min(vocab, 4096),
        context=256,
    )
    overrides = [
        f"data.path={folder / 'data'}",
        "train.steps=1000",
        "train.global_batch=32",
        "train.micro_batch=8",
        "train.sequence_length=256",
        "checkpoint.every=1000000",
        "observe.tensorboard=false",
    ]
    return load_config(probe, overrides)


def _optimus(config: RunConfig, output: Path, steps: int) -> list[float]:
    optimus.train(config, [f"train.output={output}", f"train.stop_at={steps}"])
    return [record["step_seconds"] for record in read_metrics(output)]


def _trainer(experts: str, precision: str) -> Contestant:
    def train(config: RunConfig, output: Path, steps: int) -> list[float]:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

        times: list[float] = []

        class Clock(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.began = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                now = time.perf_counter()
                times.append(now - self.began)
                self.began = now

        output.mkdir(parents=True)
        write_config(
            config.model, output, context=config.train.sequence_length, eos_id=None, pad_id=None, dtype="float32"
        )
        settings: dict[str, Any] = {"experts_implementation": experts} if config.model.experts else {}
        if config.model.experts:
            settings |= {"output_router_logits": True, "router_aux_loss_coef": config.moe.balance_coefficient}
        hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output, **settings), dtype=torch.float32)
        if precision == "bf16 weights":
            hf = hf.bfloat16()
        arguments = TrainingArguments(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=config.train.micro_batch,
            gradient_accumulation_steps=config.train.global_batch // config.train.micro_batch,
            bf16=precision == "bf16 autocast",
            optim="adamw_torch_fused",
            learning_rate=config.lr_schedule.peak,
            warmup_steps=config.warmup_steps,
            lr_scheduler_type="cosine",
            max_grad_norm=config.optimizer.clip_norm or 0.0,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
            seed=0,
            data_seed=0,
        )
        trainer = Trainer(
            model=hf, args=arguments, train_dataset=_Dataset(Shards(config.data.path)), callbacks=[Clock()]
        )
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (output / "loss.txt").write_text(str(logged[-1]))
        return times

    return train


class _Dataset:
    """The prepared rows as the `Trainer` wants them."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return self._shards.instances

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = self._shards.row(i).astype(np.int64)
        return {"input_ids": row, "labels": row}


def _last_loss(output: Path) -> float:
    text = output / "loss.txt"
    return float(text.read_text()) if text.exists() else read_metrics(output)[-1]["loss"]


def _loader_share(output: Path) -> float:
    records = read_metrics(output)[_WARM_UP:]
    return sum(record["data_seconds"] for record in records) / sum(record["step_seconds"] for record in records)
