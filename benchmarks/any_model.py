"""Training steps of models of `transformers` with their own modules: by our engine, a plain PyTorch loop and the Trainer.

All contestants begin with the same folder of weights, and have the same batches, AdamW (fused, with our hyperparameters),
clipping and learning rate in fp32 on one core. Their losses are compared before the timing. The plain loop calls the
model with `labels`, so it has the loss of `transformers`. Each contestant's time is its least processor time of a step.

Four tasks: a Llama with a vocabulary of 8k and of 32k, beside our own modules of the same model; a Granite-MoE and a
Qwen3-MoE, with experts by our kernels, `eager` and `grouped_mm`. With `--families`, a small model of each family that
has modules of both kinds, by our engine with either.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from typer import Option

from benchmarks.harness import Result, Rounds, Row, check_agreement, cpu_threads, take_turns
from benchmarks.training import BY_HEART, configuration
from optimus.checkpoint.loading import load_slices
from optimus.config import RunConfig
from optimus.errors import UserError, nearest
from optimus.hub import FolderReader
from optimus.hub.config_json import read_model
from optimus.testing.steps import Steps, random_batch
from optimus.training.malloc_trim import keep_freed_memory

_STEPS = 2  # of a turn; the first step of a new Trainer sets it up
_WITHIN = 1e-5  # relative difference of losses
_OURS, _LOOP, _TRAINER, _OWN = "optimus", "plain loop", "Trainer", "optimus, own modules"
_RIVALS = ("eager", "grouped_mm")  # implementations of experts


class Task(NamedTuple):
    """A model and its batch. `config` maps a name of a class of configurations of `transformers` to its arguments."""

    config: tuple[str, Mapping[str, Any]]
    batch: tuple[int, int] = (4, 256)
    microbatches: int = 1
    by_us_only: bool = False  # by our engine, with the modules of `transformers` and with our own

    @property
    def sparse(self) -> bool:
        """True for a model with experts."""
        return "Moe" in self.config[0]


class Turn(NamedTuple):
    """The processor seconds of a contestant's best step in a turn, and the loss of its last step."""

    seconds: float
    loss: float


def _llama(vocab: int, hidden: int, layers: int) -> Task:
    heads = hidden // 64
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 8 // 3 // 32 * 32, "num_hidden_layers": layers}
    more = {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocab}
    return Task(("LlamaConfig", {**sizes, **more, "tie_word_embeddings": False}))


_MOE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "num_experts_per_tok": 8,
}

TASKS: dict[str, Task] = {
    "llama-8k": _llama(8192, 512, 8),
    "llama-32k": _llama(32768, 256, 4),
    "granite-moe": Task(
        ("GraniteMoeConfig", {**_MOE, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 32}),
        microbatches=2,
    ),
    "qwen3-moe": Task(
        (
            "Qwen3MoeConfig",
            {**_MOE, "moe_intermediate_size": 192, "num_hidden_layers": 1, "num_experts": 128}
            | {"head_dim": 64, "intermediate_size": 512, "output_router_logits": False, "norm_topk_prob": True},
        ),
        microbatches=2,
    ),
}
"""Models of 20 to 50 M parameters. Those with experts have as many as Granite 3.0 1B-A400M and Qwen3 30B-A3B, a quarter
to a half as wide."""

_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
_WINDOW = {"head_dim": 64, "sliding_window": 128}
_SPARSE = {"num_experts_per_tok": 4, "output_router_logits": False}
_OF_FAMILIES: dict[str, Mapping[str, Any]] = {
    "Olmo": _SMALL,
    "Olmoe": {**_SMALL, **_SPARSE, "num_experts": 16},
    "Olmo2": _SMALL,
    "Olmo3": {**_SMALL, "sliding_window": 128},
    "Llama": _SMALL,
    "Mistral": {**_SMALL, "sliding_window": 128},
    "Mixtral": {**_SMALL, **_SPARSE, "num_local_experts": 16},
    "Gemma2": {**_SMALL, **_WINDOW, "query_pre_attn_scalar": 64},
    "Gemma3Text": {**_SMALL, **_WINDOW, "query_pre_attn_scalar": 64},
    "GPT2": {
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 4096,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    "OPT": {
        "hidden_size": 256,
        "ffn_dim": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "word_embed_proj_dim": 256,
        "dropout": 0.0,
    },
    "Qwen2": _SMALL,
    "Qwen3": {**_SMALL, "head_dim": 64},
    "Qwen3Moe": {**_SMALL, **_SPARSE, "head_dim": 64, "num_experts": 16, "moe_intermediate_size": 256},
    "GptOss": {**_SMALL, **_WINDOW, **_SPARSE, "num_local_experts": 16},
    "DeepseekV3": {
        **_SMALL,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 4,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
}
FAMILIES = {name.lower(): Task((f"{name}Config", sizes), by_us_only=True) for name, sizes in _OF_FAMILIES.items()}
"""Models of 4 to 20 M parameters."""


def run(
    rounds: Rounds = 6,
    task: Annotated[list[str] | None, Option(help=f"{', '.join(TASKS)}. Repeat for more. Default: all.")] = None,
    families: Annotated[bool, Option(help="Measures the families with modules of both kinds.")] = False,
    tasks: Mapping[str, Task] = TASKS,
) -> Result:
    """Returns rows (processor seconds of the best step, and tokens per second) and ratios of speeds, ours over a
    rival's, named `<task>.vs_<rival>`.

    Raises `UserError` for an unknown task.
    """
    tasks = FAMILIES if families else tasks
    for name in task or ():
        if name not in tasks:
            raise UserError(f"--task {name}: {nearest(name, tasks)}")
    keep_freed_memory()
    rows: list[Row] = []
    ratios: dict[str, float | None] = {}
    with cpu_threads(1):
        for name in task or tasks:
            found = _measure(tasks[name], rounds)
            gc.collect()  # a Trainer refers to itself, and so to its model
            print(f"{name}: {', '.join(f'{who} {seconds:.3f} s' for who, seconds in found.items())}", flush=True)
            tokens = tasks[name].batch[0] * tasks[name].batch[1]
            rows += [
                {"task": name, "contestant": who, "step_s": seconds, "tokens_per_second": tokens / seconds}
                for who, seconds in found.items()
            ]
            ratios |= {f"{name}.vs_{_short(who)}": seconds / found[_OURS] for who, seconds in found.items()}
            del ratios[f"{name}.vs_{_OURS}"]
    return Result(rows, ratios)


def _short(contestant: str) -> str:
    return contestant.removeprefix(f"{_OURS}, ").replace(", ", ".").replace(" ", "_").lower()


def _measure(task: Task, rounds: int) -> dict[str, float]:
    """Returns the best seconds of each contestant, ours first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        config = _exported(task, path)
        contestants = _contestants(task, config, path)
        checked = {name: turn().loss for name, turn in contestants.items()}
        check_agreement(checked, _WITHIN)
        seen = take_turns(contestants, rounds)
    return {name: min(turn.seconds for turn in turns) for name, turns in seen.items()}


def _exported(task: Task, path: Path) -> RunConfig:
    """Writes the weights and returns the run of our engine with them."""
    import transformers

    name, sizes = task.config
    given = getattr(transformers, name)(**sizes, pad_token_id=None)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(given, dtype=torch.float32).save_pretrained(path)
    rows, length = task.batch
    return configuration(
        {"transformers": given.to_dict()},
        rows,
        length,
        micro_batch=rows // task.microbatches,
        precision="float32",
        output=path.parent,
        **BY_HEART,
    )


def _contestants(task: Task, config: RunConfig, path: Path) -> dict[str, Callable[[], Turn]]:
    if task.by_us_only:
        return {_OURS: _engine(config, path), _OWN: _engine(_with_own_modules(config, path), path)}
    if not task.sparse:
        return {
            _OURS: _engine(config, path),
            _LOOP: _loop(config, path),
            _TRAINER: _trainer(config, path),
            _OWN: _engine(_with_own_modules(config, path), path),
        }
    return {
        _OURS: _engine(config, path),
        **{f"{_OURS}, {each}": _engine(config, path, each) for each in _RIVALS},
        **{f"{_LOOP}, {each}": _loop(config, path, each) for each in _RIVALS},
    }


def _with_own_modules(config: RunConfig, path: Path) -> RunConfig:
    """Returns the run with our modules, without losses and steps of routers, which the models of the tasks do not
    have."""
    model, changed = read_model(path), dict[str, Any]()
    if model.experts is not None:
        bias = ["bias_rate"] if model.router_bias else []
        changed["moe"] = config.moe.model_copy(
            update=dict.fromkeys(["balance_coefficient", "z_coefficient", *bias], 0.0)
        )
    return config.model_copy(update={"model": model, **changed})


def _timed(step: Callable[[], float]) -> Turn:
    best = float("inf")
    for _ in range(_STEPS):
        began = time.process_time()
        loss = step()
        best = min(best, time.process_time() - began)
    return Turn(best, loss)


def _engine(config: RunConfig, path: Path, experts: str | None = None) -> Callable[[], Turn]:
    """Returns turns of our engine; with `experts`, by this implementation of `transformers` instead of our kernels."""

    def chosen(body: nn.Module) -> tuple[list[nn.Module], tuple[str, ...]]:
        body.config._experts_implementation = experts  # type: ignore[union-attr]
        return [], ()

    if experts is None:
        steps = Steps(config)
    else:
        with mock.patch("optimus.model.foreign.model.choose_experts", chosen):
            steps = Steps(config)
    load_slices(steps.state, FolderReader(path, steps.config.model).fill, full=False)
    return partial(_timed, lambda: steps.train().loss)


def _read(path: Path, experts: str | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    more = {} if experts is None else {"experts_implementation": experts}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more).train()


def _adamw(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    given = config.optimizer
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr_schedule.lr,
        betas=(given.betas[0], given.betas[1]),
        eps=given.eps,
        weight_decay=given.weight_decay,
        fused=True,
    )


def _loop(config: RunConfig, path: Path, experts: str | None = None) -> Callable[[], Turn]:
    """Returns turns of a plain PyTorch loop."""
    model = _read(path, experts)
    optimizer, clip, done = _adamw(config, model), config.optimizer.clip_norm or float("inf"), 0

    def step() -> float:
        nonlocal done
        done += 1
        batch, total = random_batch(config, done), 0.0
        parts = batch.split(config.train.micro_batch)
        for tokens_BS in parts:
            loss = model(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss / len(parts)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return partial(_timed, step)


def _trainer(config: RunConfig, path: Path) -> Callable[[], Turn]:
    """Returns turns of the Trainer: a new one each time, with the same model and optimizer. Its first step, which sets it
    up, is not timed."""
    import transformers

    model = _read(path)
    optimizer, done = _adamw(config, model), 0
    rows, length = config.train.global_batch, config.train.sequence_length

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.process_time())

    class InOrder(transformers.Trainer):
        """A Trainer that reads rows in order and keeps the loss of the last batch."""

        last: Tensor

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=rows * (length - 1))
            self.last = (found[0] if return_outputs else found).detach()
            return found

    def turn() -> Turn:
        nonlocal done
        batches = [random_batch(config, done + number) for number in range(1, _STEPS + 1)]
        data = [{"input_ids": row, "labels": row} for batch in batches for row in batch]
        done += _STEPS
        clock = Clock()
        mine = InOrder(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(path.parent / "trainer"),
                max_steps=_STEPS,
                per_device_train_batch_size=rows,
                max_grad_norm=config.optimizer.clip_norm or 0.0,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=data,
            callbacks=[clock],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        )
        mine.remove_callback(transformers.trainer_callback.PrinterCallback)
        mine.train()
        return Turn(clock.ends[-1] - clock.ends[-2], float(mine.last))

    return turn
