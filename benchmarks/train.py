"""Training speed against the Hugging Face Trainer on the same model and data, both as users run them.

All start from the same exported weights, and read the same rows in the same order and microbatches. All have our betas,
decay, clipping, learning rate of every step and weight of the balance loss, and fused AdamW. There is no z-loss,
because `transformers` has none. So their cross-entropies agree, which is checked before the timing. Every experts
implementation of `transformers` that runs here is a rival. The median step of a contestant's best round counts.
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

import torch
from torch import Tensor
from typer import Option

import optimus
from benchmarks import kernels
from benchmarks.harness import Result, Rounds, Row, check_agreement, preset, take_turns
from benchmarks.training import SHORT, Precision, Type, configuration, decided
from optimus.config import RunConfig
from optimus.data.loader import TokenLoader
from optimus.hub.exporting import export_model
from optimus.model import Transformer
from optimus.model.architecture import own_model
from optimus.model.init import initialize
from optimus.observe.metrics import read_metrics
from optimus.optim.adamw import AdamW
from optimus.resolve.rules import rules_of
from optimus.training.reading import read_run
from optimus.training.step import step_learning_rate

_WARM_UP = 2  # steps of each run before the timed ones
_CHECKED = 5  # steps whose cross-entropies must agree
SAME_LOSS = {"float32": 1e-4, "bfloat16": 2e-2}  # relative
_EXPERTS = ("grouped_mm", "eager")  # batched_mm copies a weight matrix for each routed row: 50 s a step here


class Trained(NamedTuple):
    """The seconds, cross-entropy and gradient norm of each step of a contestant."""

    seconds: list[float]
    cross_entropies: list[float]
    norms: list[float]  # before clipping


Contestant = Callable[[RunConfig, Path, int], Trained]


def run(
    model: Annotated[str, Option(help="Preset.")] = "mula-tiny-moe",
    steps: Annotated[int, Option(help="Timed steps of a contestant in a round.")] = 8,
    rounds: Rounds = 3,
    precision: Precision = "auto",
    share: bool = True,
    batch: int = 32,
) -> Result:
    """Returns a row for each contestant, and ratios.

    `train.vs_best_rival` is our speed over the fastest rival's in tokens per second, and `loader.share_of_step` the
    part of our step that waits for data. With `share` each kernel's share is printed too.
    """
    chosen = decided(precision, "auto")
    with tempfile.TemporaryDirectory() as folder:
        config = prepared(model, Path(folder), batch, chosen)
        who, left_out = contestants(config)
        if left_out:
            print(f"left out, because they cannot compute in {chosen}: {', '.join(left_out)}")
        outputs = (Path(folder) / f"run-{number}" for number in count())
        checked = {name: train(config, next(outputs), _CHECKED).cross_entropies for name, train in who.items()}
        for number in range(_CHECKED):
            check_agreement(
                {f"step {number + 1}: {name}": of[number] for name, of in checked.items()}, SAME_LOSS[chosen]
            )
        turns = {name: partial(_turn, train, config, outputs, steps) for name, train in who.items()}
        seen = take_turns(turns, rounds)
    tokens = config.train.global_batch * config.train.sequence_length
    rows: list[Row] = []
    for name, runs in seen.items():
        seconds = min(run.step_seconds for run in runs)
        speed = {"tokens_per_second": tokens / seconds, "step_seconds": seconds}
        rows.append({"contestant": name, "precision": chosen, **speed, "cross_entropy": runs[-1].cross_entropy})
    ratios = {
        "train.vs_best_rival": rows[0]["tokens_per_second"] / max(row["tokens_per_second"] for row in rows[1:]),
        "loader.share_of_step": min(run.loader_share for run in seen["optimus"]),
    }
    tables = {"optimus bench train": rows}
    if share:
        timed = kernels.run(model=model, tokens=2048, context=256, dtype=SHORT[chosen]).rows
        tables["each kernel's share of the step, with plain PyTorch and with our kernels"] = kernels.shares(timed)
    return Result(rows, ratios, {"precision": chosen, "left_out": left_out}, tables=tables)


def contestants(config: RunConfig) -> tuple[dict[str, Contestant], list[str]]:
    """Returns the contestants, ours first, and the names of those that compute in another type alone."""
    known: dict[str, tuple[Contestant, Type]] = {"optimus": (_optimus, config.train.precision)}  # type: ignore[dict-item]
    for experts in _EXPERTS if config.model.experts else ("grouped_mm",):
        for how, only in (("fp32", "float32"), ("bf16 autocast", "bfloat16"), ("bf16 weights", "bfloat16")):
            known[f"transformers Trainer, {experts}, {how}"] = trainer(experts, how), only  # type: ignore[assignment]
    who = {name: train for name, (train, only) in known.items() if only == config.train.precision}
    # The Trainer in fp32 is the form of others in this type, so it does not count as left out.
    return who, [name for name in known if name not in who and not name.endswith("fp32")]


class _Run(NamedTuple):
    step_seconds: float  # of the median step
    cross_entropy: float  # of the last step
    loader_share: float  # of our steps


def _turn(train: Contestant, config: RunConfig, outputs: Iterator[Path], steps: int) -> _Run:
    output = next(outputs)
    found = train(config, output, _WARM_UP + steps)
    share = _loader_share(output) if train is _optimus else 0.0
    return _Run(statistics.median(found.seconds[_WARM_UP:]), found.cross_entropies[-1], share)


def prepared(model: str, folder: Path, batch: int, precision: Type) -> RunConfig:
    """Returns a run on Python's own sources, from weights exported to `checkpoint.load_path`.

    The tokenizer is trained on these sources. The learning rate is high enough to show differences within a few steps.
    """
    sources, data, weights = Path(sysconfig.get_paths()["stdlib"]), folder / "data", folder / "weights"
    vocab = min(preset(model).vocab, 4096)
    texts = [sources / name for name in ("email", "asyncio", "json")]
    optimus.prepare(texts, data, train_tokenizer=vocab, context=256)
    sections: dict[str, Any] = {
        "checkpoint": {"every": 1_000_000, "load_path": str(weights)},
        "observe": {"tensorboard": False},
        "optimizer": {"clip_during_warmup": True},
        "lr_schedule": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2},
    }
    if preset(model).experts:
        sections["moe"] = {"z_coefficient": 0.0}
    shape: dict[str, Any] = {"micro_batch": min(batch, 8), "data": data, "steps": 1000, "precision": precision}
    config = configuration(model, batch, 256, output=folder, **shape, **sections)
    whole = Transformer(own_model(config.model, "bench"))
    initialize(whole, config.train.seed, config.model.init_std)
    export_model(whole, weights, context=256, tokenizer=None, eos_id=None)
    return config


def _optimus(config: RunConfig, output: Path, steps: int) -> Trained:
    optimus.train(config, [f"train.output={output}", f"train.stop_at={steps}"])
    records = read_metrics(output)
    return Trained(*([record[name] for record in records] for name in ("step_seconds", "loss", "grad_norm")))


def trainer(experts: str, how: str) -> Contestant:
    """Returns the Trainer with this implementation of experts; `how` is fp32, bf16 autocast, or bf16 weights."""

    def train(config: RunConfig, output: Path, steps: int) -> Trained:
        from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
        from transformers.utils import is_torch_bf16_gpu_available

        times: list[float] = []
        # Summed over the microbatches of a step, as the Trainer sums their gradients.
        microbatches = config.train.global_batch // config.train.micro_batch
        balance = config.moe.balance_coefficient / microbatches
        predicted = config.train.global_batch * (config.train.sequence_length - 1)
        entropies: list[Tensor] = []

        class Clock(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.began = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                now = time.perf_counter()
                times.append(now - self.began)
                self.began = now

        class InOrder(Trainer):
            """A Trainer that reads rows in order, and records the cross-entropy of each microbatch as its part of the
            step's."""

            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                return torch.utils.data.SequentialSampler(self.train_dataset)

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=predicted)
                beside = balance * outputs.aux_loss.detach() if config.model.experts else 0.0
                entropies.append(loss.detach() - beside)
                return (loss, outputs) if return_outputs else loss

        settings: dict[str, Any] = {"experts_implementation": experts} if config.model.experts else {}
        if config.model.experts:
            settings |= {"output_router_logits": True, "router_aux_loss_coef": balance}
        dtype = torch.bfloat16 if how == "bf16 weights" else torch.float32
        hf = AutoModelForCausalLM.from_pretrained(config.checkpoint.load_path, dtype=dtype, **settings)
        arguments = TrainingArguments(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=config.train.micro_batch,
            gradient_accumulation_steps=microbatches,
            bf16=how == "bf16 autocast",
            max_grad_norm=config.optimizer.clip_norm or 0.0,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not is_torch_bf16_gpu_available(),  # the Trainer does not know every device either
        )
        rates = _optimizer(hf, config)
        mine = InOrder(
            model=hf, args=arguments, train_dataset=_Rows(config, steps), callbacks=[Clock()], optimizers=rates
        )
        assert mine.model_accepts_loss_kwargs, "the losses of its microbatches are means, not parts of the step's loss"
        mine.train()
        by_step = torch.stack(entropies).view(steps, microbatches).sum(1).tolist()
        norms = [entry["grad_norm"] for entry in mine.state.log_history if "grad_norm" in entry]
        return Trained(times, by_step, norms)

    return train


def _optimizer(hf: torch.nn.Module, config: RunConfig) -> tuple[torch.optim.Optimizer, Any]:
    """Returns AdamW with our hyperparameters, equal for all parameters, and our learning rate of every step."""
    with torch.device("meta"):
        (rule,) = {*rules_of(config.optimizer, Transformer(own_model(config.model, "bench"))).values()}
    assert isinstance(rule, AdamW)
    given, peak = config.optimizer, config.lr_schedule.lr
    optimizer = torch.optim.AdamW(
        hf.parameters(), lr=peak, betas=(given.betas[0], given.betas[1]), eps=given.eps, weight_decay=rule.weight_decay,
        fused=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: step_learning_rate(config, done + 1) / peak)
    return optimizer, schedule


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of our steps, in the form that the `Trainer` reads."""

    def __init__(self, config: RunConfig, steps: int) -> None:
        _, data = read_run(config)
        with TokenLoader(data.phases, seed=config.train.seed) as loader:
            self._rows = [torch.from_numpy(row) for _ in range(steps) for row in next(loader).tokens_BS]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[i], "labels": self._rows[i]}


def _loader_share(output: Path) -> float:
    records = read_metrics(output)[_WARM_UP:]
    return sum(record["data_seconds"] for record in records) / sum(record["step_seconds"] for record in records)
