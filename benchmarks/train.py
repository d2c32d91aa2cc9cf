"""Training speed against the Hugging Face Trainer on the same model and data, as a user would run either.

The same architecture, data, batch, microbatch and precision; AdamW fused on both sides; every experts implementation of
`transformers` that runs here is a rival. A contestant's figure is the median step of its best round.
"""

import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from typer import Option

import optimus
from benchmarks import kernels
from benchmarks.harness import Result, Rounds, Row, preset, take_turns
from benchmarks.training import configuration
from optimus.config import RunConfig
from optimus.data.shards import Shards
from optimus.hub.config_json import write_config
from optimus.observe.metrics import read_metrics

_WARM_UP = 2  # steps of each run that are not counted
_EXPERTS = ("grouped_mm", "eager")  # batched_mm copies a weight matrix per routed row: 50 s a step here

Contestant = Callable[[RunConfig, Path, int], tuple[list[float], float]]  # seconds of steps, and the last loss


def run(
    model: Annotated[str, Option(help="Preset.")] = "mula-tiny-moe",
    steps: Annotated[int, Option(help="Timed steps per contestant and round.")] = 8,
    rounds: Rounds = 3,
    share: bool = True,
    batch: int = 32,
) -> Result:
    """Rows (one per contestant) and ratios: `train.vs_best_rival` is ours over the fastest rival in tokens per second,
    `loader.share_of_step` the part of our step spent waiting for data. With `share` each kernel's share is printed too."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(model, Path(folder), batch)
        contestants: dict[str, Contestant] = {"optimus": _optimus}
        for precision in ("bf16 autocast", "bf16 weights"):
            for experts in _EXPERTS if config.model.experts else ("grouped_mm",):
                contestants[f"transformers Trainer, {experts}, {precision}"] = _trainer(experts, precision)
        outputs = (Path(folder) / f"run-{number}" for number in count())
        turns = {name: partial(_turn, train, config, outputs, steps) for name, train in contestants.items()}
        seen = take_turns(turns, rounds)
    tokens = config.train.global_batch * config.train.sequence_length
    rows: list[Row] = []
    for name, runs in seen.items():
        seconds = min(run.step_seconds for run in runs)
        speed = {"tokens_per_second": tokens / seconds, "step_seconds": seconds}
        rows.append({"contestant": name, **speed, "loss": runs[-1].loss})
    ratios = {
        "train.vs_best_rival": rows[0]["tokens_per_second"] / max(row["tokens_per_second"] for row in rows[1:]),
        "loader.share_of_step": min(run.loader_share for run in seen["optimus"]),
    }
    tables = {"optimus bench train": rows}
    if share:
        timed = kernels.run(model=model, tokens=2048, context=256).rows
        tables["each kernel's share of the step, with plain PyTorch and with ours"] = kernels.shares(timed)
    return Result(rows, ratios, tables=tables)


class _Run(NamedTuple):
    step_seconds: float  # of the median step
    loss: float  # of the last step
    loader_share: float  # of our steps


def _turn(train: Contestant, config: RunConfig, outputs: Iterator[Path], steps: int) -> _Run:
    output = next(outputs)
    times, loss = train(config, output, _WARM_UP + steps)
    share = _loader_share(output) if train is _optimus else 0.0
    return _Run(statistics.median(times[_WARM_UP:]), loss, share)


def _config(model: str, folder: Path, batch: int) -> RunConfig:
    """A run on Python's own sources, prepared with a tokenizer trained on them."""
    sources, data = Path(sysconfig.get_paths()["stdlib"]), folder / "data"
    vocab = min(preset(model).vocab, 4096)
    texts = [sources / name for name in ("email", "asyncio", "json")]
    optimus.prepare(texts, data, train_tokenizer=vocab, context=256)
    quiet: dict[str, Any] = {"checkpoint": {"every": 1_000_000}, "observe": {"tensorboard": False}}
    return configuration(model, batch, 256, micro_batch=min(batch, 8), data=data, steps=1000, **quiet)


def _optimus(config: RunConfig, output: Path, steps: int) -> tuple[list[float], float]:
    optimus.train(config, [f"train.output={output}", f"train.stop_at={steps}"])
    records = read_metrics(output)
    return [record["step_seconds"] for record in records], records[-1]["loss"]


def _trainer(experts: str, precision: str) -> Contestant:
    def train(config: RunConfig, output: Path, steps: int) -> tuple[list[float], float]:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
        from transformers.utils import is_torch_bf16_gpu_available

        times: list[float] = []

        class Clock(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.began = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                now = time.perf_counter()
                times.append(now - self.began)
                self.began = now

        output.mkdir(parents=True)
        write_config(config.model, output, context=config.train.sequence_length, dtype="float32")
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
            use_cpu=not is_torch_bf16_gpu_available(),  # nor does it know every device
            seed=0,
            data_seed=0,
        )
        trainer = Trainer(
            model=hf, args=arguments, train_dataset=_Dataset(Shards(config.data.mixed[0].path)), callbacks=[Clock()]
        )
        trainer.train()
        return times, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]

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


def _loader_share(output: Path) -> float:
    records = read_metrics(output)[_WARM_UP:]
    return sum(record["data_seconds"] for record in records) / sum(record["step_seconds"] for record in records)
