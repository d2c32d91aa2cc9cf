"""Training in float16 with dynamic loss scaling: what is skipped and when, in every layout, and over a whole run."""

import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import optimus
from helpers.drawing import config_of
from helpers.equality import (
    AS_FLOAT32,
    Layout,
    Trained,
    compare,
    prune_as_configured,
    train_steps,
    without_loss_scaling,
)
from helpers.sweep import in_turns
from helpers.trained import trainer_of
from helpers.whole import whole_state
from optimus.checkpoint.folder import list_checkpoints, read_description
from optimus.checkpoint.inspect import show
from optimus.checkpoint.rollback import rollback
from optimus.checkpoint.store import load_model
from optimus.config import load_config
from optimus.config.tree import LossScaleConfig
from optimus.kernels.matmul import _adds_wide
from optimus.model import Batch, Transformer
from optimus.model.init import initialize
from optimus.observe.metrics import read_metrics
from optimus.resolve.microbatches import with_microbatches
from optimus.state.reduction import ChunkGradient
from optimus.testing import run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.training import step
from optimus.training.loss_scale import LossScale
from optimus.training.step import StepResult

LARGEST = 65520.0  # numbers from here on round to infinity in float16

# ---- The scale ----


@pytest.mark.parametrize(
    "options",
    [
        {"growth_interval": 4},
        {"initial": 2.0**10, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3},
        {"initial": 2.0**126, "growth_interval": 2},  # the next scale but one would be infinite in fp32
    ],
    ids=str,
)
def test_the_scale_of_gradscaler(options: dict[str, Any]) -> None:
    """The scale and the count of finite steps are those of `torch.amp.GradScaler` after random overflows."""
    config = LossScaleConfig(**options)
    names = {"init_scale": config.initial, "growth_factor": config.growth_factor}
    names |= {"backoff_factor": config.backoff_factor, "growth_interval": config.growth_interval}
    theirs, ours = torch.amp.GradScaler("cpu", **names), LossScale(config.initial)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 0.0)
    generator, seen = torch.Generator().manual_seed(1), set()
    for _ in range(300):
        assert (ours.value, ours.finite_steps) == (theirs.get_scale(), theirs._get_growth_tracker())
        overflowed = bool(torch.rand((), generator=generator) < 0.15)
        theirs.scale(torch.zeros(()))  # makes the tensor of the scale
        parameter.grad = torch.tensor([math.inf if overflowed else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours = ours.after(overflowed, config)
        seen.add(ours.value)
    assert len(seen) > 3


def test_the_scale_has_a_minimum() -> None:
    options, scale = LossScaleConfig(initial=8.0, minimum=3.0), LossScale(8.0, 5)
    assert [scale := scale.after(True, options) for _ in range(3)] == [LossScale(4.0), LossScale(3.0), LossScale(3.0)]


# ---- A definition ----


class Defined:
    """Training in float64 by definition, with AdamW, on one device.

    A step overflows if a scaled gradient of a microbatch is beyond the range of float16. `step` returns the loss before
    the step, the learning rate (0 if the step is skipped), whether the step overflowed, and the next scale.
    """

    def __init__(self, config: Any) -> None:
        self.config, self.scale, self.finite, self.applied = config, config.train.loss_scale.initial, 0, 0
        self.model = Transformer(config.model)
        initialize(self.model, config.train.seed, config.model.init_std)
        self.model.double()
        self.moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in self.model.named_parameters()}
        self.margin = math.inf  # smallest distance of a step's largest gradient from the range, as a factor
        self._largest = 0.0
        for module in self.model.modules():
            module.register_forward_hook(self._watch)

    def _watch(self, _module: Any, _inputs: Any, output: Any) -> None:
        for each in output if isinstance(output, tuple) else (output,):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        self._largest = max(self._largest, float(gradient.abs().max()))

    def step(self, tokens_BS: Tensor) -> tuple[float, float, bool, float]:
        train, total, self._largest = self.config.train, 0.0, 0.0
        sums = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for micro_BS in tokens_BS.split(train.micro_batch):
            self.model.zero_grad()
            logits_TV = self.model(micro_BS)[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits_TV, micro_BS[:, 1:].flatten(), reduction="sum") / tokens_BS[:, 1:].numel()
            loss.backward()
            total += float(loss.detach())
            for name, p in self.model.named_parameters():
                assert p.grad is not None
                if p.dim() > 1 and name != "embedding.weight" and not _adds_wide("cpu"):
                    self._note(p.grad)  # a product in float16; other gradients are sums in float32
                sums[name] += p.grad
        scaled = self._largest * self.scale / LARGEST
        self.margin = min(self.margin, max(scaled, 1 / scaled))
        if scaled >= 1:
            self.scale, self.finite = max(train.loss_scale.minimum, self.scale / 2), 0
            return total, 0.0, True, self.scale
        self.applied, self.finite = self.applied + 1, self.finite + 1
        if self.finite == train.loss_scale.growth_interval:
            self.scale, self.finite = 2 * self.scale, 0
        lr = self._lr(self.applied)
        self._update(sums, lr)
        return total, lr, False, self.scale

    def _lr(self, step: int) -> float:
        schedule, warmup = self.config.lr_schedule, self.config.warmup_steps
        if step <= warmup:
            return schedule.lr * step / warmup
        share = (step - warmup) / (self.config.train.steps - warmup)
        return schedule.min_lr + (schedule.lr - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * share))

    def _update(self, gradients: dict[str, Tensor], lr: float) -> None:
        """Applies AdamW (Loshchilov and Hutter 2019, algorithm 2) after clipping."""
        optimizer, step = self.config.optimizer, self.applied
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
        clip = 1.0 if step <= self.config.warmup_steps else min(1.0, optimizer.clip_norm / norm)
        beta1, beta2 = optimizer.betas
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                (m, v), g = self.moments[name], gradients[name] * clip
                m.mul_(beta1).add_((1 - beta1) * g)
                v.mul_(beta2).add_((1 - beta2) * g * g)
                p.mul_(1 - lr * optimizer.weight_decay)
                p.sub_(lr * m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + optimizer.eps))


def test_what_is_skipped_and_when(small_run: dict[str, Any]) -> None:
    """A run in float16 skips the steps, and has the rates, scales and losses, of a definition in float64.

    The first scale is far too large, and the scale grows after three finite steps, so that overflows return.
    """
    small_run["model"] = config_of("dense")["model"] | {"vocab": 320}
    small_run["train"] |= {
        "steps": 30,
        "precision": "float16",
        "loss_scale": {"initial": 2.0**24, "growth_interval": 3},
    }
    small_run["optimizer"] = {"clip_norm": 0.2, "eps": 1e-5}
    trainer = trainer_of(small_run)
    defined, found, right = Defined(trainer.config), [], []
    for number in range(1, 31):
        tokens_BS = random_batch(trainer.config, number)
        result = trainer.train_step(Batch(tokens_BS)).result
        assert result.skipped == result.overflow == (not math.isfinite(result.grad_norm))
        scale = trainer.progress.loss_scale
        assert scale is not None
        found.append((result.loss, 0.0 if result.skipped else result.lr, result.overflow, scale.value))
        right.append(defined.step(tokens_BS))
    # A gradient has the roundings of the logits, of their gradient and of the product, of 2^-11 each, and those of x.
    assert defined.margin > 1 + 2**-9, "rounding decides whether a gradient overflows: choose another seed"
    assert [each[2:] for each in found] == [each[2:] for each in right]
    assert [each[1] for each in found] == pytest.approx([each[1] for each in right], rel=1e-12)
    # A loss of about 5 is a mean over rows of logits with relative errors of 2^-11.
    assert [each[0] for each in found] == pytest.approx([each[0] for each in right], rel=2**-11)
    overflows = sum(each[2] for each in right)
    assert 5 < overflows < 20
    assert right[-1][0] < right[0][0] - 0.05, "the model has learnt nothing"
    progress = trainer.progress
    assert (progress.overflows, progress.schedule_lag, progress.skipped) == (overflows, overflows, 0)
    assert trainer.state.steps == 30 - overflows == defined.applied


# ---- Layouts ----

EP, PP = ["parallel.expert=2"], ["parallel.pipeline=2", "model.layers=4", "train.micro_batch=2"]
LAYOUTS: dict[str, Layout] = {
    "experts on two ranks": Layout(4, EP),
    "ZeRO-1": Layout(4, ["state.shard=optimizer", "state.shard_over=data", *EP]),
    "ZeRO-2": Layout(2, ["state.shard=gradients", *EP]),
    "ZeRO-3": Layout(4, ["state.shard=parameters", "state.shard_ranks=2", *EP], 2),
    "tensor": Layout(4, ["parallel.tensor=2", "parallel.expert_tensor=2", *EP]),
    "grid and context": Layout(4, ["parallel.tensor=[1,2]", "parallel.context=2", *EP]),
    "stages": Layout(4, [*PP, "parallel.schedule=zb-h1", *EP]),
    "stages by messages": Layout(2, [*PP, "parallel.executor=message-driven", "parallel.stages_per_rank=2"]),
    "stages with the vocabulary": Layout(4, [*PP, "parallel.vocabulary=true", "parallel.tensor=2"]),
    "on the host": Layout(2, ["state.offload=all", "state.accumulate_on=host", *EP]),
    "on a disk": Layout(2, ["state.offload=disk", "state.shard=optimizer", *EP]),
    "pruned": Layout(2, ["pruning.targets=[matrix,expert]", "pruning.sparsity=0.6", "pruning.at=0", *EP]),
    "muon": Layout(4, ["optimizer.name=muon", "parallel.tensor=2", "state.shard=optimizer", *EP]),
    "lion": Layout(2, ["optimizer.name=lion", "lr_schedule.lr=2e-6", "lr_schedule.min_lr=2e-6", *EP]),
    "schedule-free": Layout(2, ["optimizer.name=schedule-free", "state.shard=parameters", *EP]),
    "one process": Layout(1, ["moe.balance_scope=global", "recompute=[block]", "optimizer.clip_norm=null"]),
}


def train_planted(
    config: dict[str, Any], culprit: int, planted: set[int], count: int, per_node: int | None
) -> tuple[list[StepResult], Trained]:
    """Trains `count` steps; in the steps `planted`, the gradients of one expert on rank `culprit` overflow, and the next
    step has the same batch.

    Returns the results of all steps, and those without an overflow with the final state.
    """
    torch.compiler.set_stance("force_eager")
    with mock.patch.dict("optimus.resolve.precision.DTYPES", AS_FLOAT32):
        steps = Steps(config, per_node)
    prune_as_configured(steps)
    names = {
        parameter: slot.name
        for chunk in steps.state.trained
        for slot, parameter in zip(chunk.plan.slots, chunk.parameters)
    }
    experts = [parameter for parameter, name in names.items() if ".experts." in name]
    close, results = ChunkGradient.close, []

    def overflowing(buffer: ChunkGradient) -> None:
        if buffer._parameter is experts[0]:
            assert buffer._parameter.grad is not None
            buffer._parameter.grad[0] = math.inf
        close(buffer)

    for number in range(1, count + 1):
        chosen = number in planted and steps.groups.rank == culprit
        with mock.patch.object(ChunkGradient, "close", overflowing if chosen else close):
            results.append(steps.train())
        steps.done -= results[-1].overflow
    return results, Trained([each for each in results if not each.overflow], whole_state(steps.state, everywhere=False))


@pytest.mark.parametrize("name", in_turns([*LAYOUTS], 4, always=5))
def test_an_overflow_in_one_expert_of_one_rank(name: str, tmp_path: Path) -> None:
    """All ranks skip the step and halve the scale, and the other steps are those of one process without loss scaling.

    Computations are in float32, in which scales, powers of two, do not round: bounds are those of all layouts.
    """
    layout, planted = LAYOUTS[name], {1, 3, 4}
    config = config_of("moe")
    config["train"] |= {"precision": "float16", "loss_scale": {"growth_interval": 2}}
    overrides = (
        [*layout.overrides, f"state.disk={tmp_path}"] if "state.offload=disk" in layout.overrides else layout.overrides
    )
    tree = with_microbatches(load_config(config, overrides), layout.ranks)
    given = tree.model_dump(exclude_unset=True)
    found = run_ranks(train_planted, layout.ranks, given, layout.ranks - 1, planted, 7, layout.per_node)
    for results, _ in found:
        assert [each.overflow for each in results] == [number in planted for number in range(1, 8)]
        assert all(each.skipped == each.overflow and not each.unfit for each in results)
    alone = {key: value for key, value in given.items() if key not in ("parallel", "state", "recompute")}
    right = train_steps(without_loss_scaling(alone), 4)
    for rank, (_, trained) in enumerate(found):
        compare(trained, right, f"{name}, rank {rank}", 2e-5)


NARROW = ["train.precision=float16", "state.gradient_dtype=float16"]
IN_FLOAT16: list[tuple[str, Layout]] = [
    ("moe", Layout(1, ["train.precision=float16"])),
    ("moe", Layout(2, [*NARROW, "state.shard=gradients", "state.offload=all", *EP])),
    ("moe", Layout(4, ["train.precision=float16", "parallel.tensor=2", "state.shard=parameters", *EP])),
    ("tied dense", Layout(2, [*NARROW, "parallel.pipeline=2", "parallel.vocabulary=true", "optimizer.name=muon"])),
    ("moe", Layout(2, [*NARROW, "pruning.targets=[matrix,expert]", "pruning.sparsity=0.6", "pruning.at=0", *EP])),
]


def train_in_float16(config: dict[str, Any], per_node: int | None) -> list[StepResult]:
    torch.compiler.set_stance("force_eager")
    steps = Steps(config, per_node)
    prune_as_configured(steps)
    return [steps.train() for _ in range(10)]


@pytest.mark.parametrize(("model", "layout"), in_turns(IN_FLOAT16, 3, always=2), ids=str)
def test_layouts_in_float16(model: str, layout: Layout) -> None:
    """Losses and norms of ten steps in float16, on ranks and with gradients in float16, are those of float32 in one
    process.

    Logits have relative errors of some 2^-11 for each of about 16 roundings in a row from the embedding to the loss:
    in float16, losses of 4, whose logits are below 1, are within 4 * 2^-11. Norms have the errors of many gradients,
    which average out, and changes of weights by Adam, whose signs of tiny gradients are noise.
    """
    config = load_config(config_of(model), layout.overrides)
    tree = with_microbatches(config, layout.ranks)
    given = tree.model_dump(exclude_unset=True)
    found = run_ranks(train_in_float16, layout.ranks, given, layout.per_node)
    alone = {key: value for key, value in given.items() if key not in ("parallel", "state", "recompute")}
    right = train_steps(without_loss_scaling(alone), 10).steps
    for results in found:
        assert not any(each.skipped for each in results)
        assert [each.loss for each in results] == pytest.approx([each.loss for each in right], rel=2**-11)
        assert [each.grad_norm for each in results] == pytest.approx([each.grad_norm for each in right], rel=2**-6)


# ---- Runs ----


def in_float16(config: dict[str, Any], **scale: Any) -> dict[str, Any]:
    return config | {"train": config["train"] | {"precision": "float16", "loss_scale": scale}}


def test_a_resumed_run_has_the_scale_and_the_counts(small_run: dict[str, Any], tmp_path: Path) -> None:
    """A run that stops between two growths of its scale resumes bit for bit, also after a rollback to weights."""
    config = in_float16(small_run, initial=2.0**26, growth_interval=3)
    config["train"]["steps"], config["checkpoint"] = 20, {"weights_every": 7}
    optimus.train(config)
    parted = config | {"train": config["train"] | {"output": str(tmp_path / "parted")}}
    optimus.train(parted, ["train.stop_at=11"])
    optimus.train(parted, resume=True)
    keys = ("loss", "lr", "loss_scale", "overflow_steps", "skipped_steps")
    whole, resumed = (
        [tuple(record[key] for key in keys) for record in read_metrics(Path(each["train"]["output"]))]
        for each in (config, parted)
    )
    assert resumed == whole
    overflows = [record[3] for record in whole]
    assert overflows[0] == 1
    assert 0 < overflows[10] < overflows[-1], "no overflow after the restart"
    assert {record[4] for record in whole} == {0}
    progress = read_description(list_checkpoints(Path(config["train"]["output"]))[-1]).progress
    assert progress["updates"] == 20 - overflows[-1]
    assert {"loss_scale": whole[-1][2], "overflows": overflows[-1]}.items() <= progress.items()

    output = tmp_path / "parted"
    rollback(output, 14)
    trainer = trainer_of(parted, resume=True)
    scale = trainer.progress.loss_scale
    assert scale is not None
    assert (trainer.progress.step, scale.value, trainer.progress.overflows) == (14, whole[13][2], overflows[13])


def test_another_precision_goes_on_with_the_schedule(small_run: dict[str, Any], tmp_path: Path) -> None:
    """A run that leaves float16 after overflows has the same rates and losses however often it stops."""
    config = in_float16(small_run, initial=2.0**32)
    config["train"]["steps"] = 20
    optimus.train(config, ["train.stop_at=10"])
    shutil.copytree(config["train"]["output"], tmp_path / "parted")
    del config["train"]["loss_scale"]
    config["train"]["precision"] = "bfloat16"
    optimus.train(config, resume=True)
    parted = config | {"train": config["train"] | {"output": str(tmp_path / "parted")}}
    for stop in (13, 16, 20):
        optimus.train(parted, [f"train.stop_at={stop}"], resume=True)
    whole, resumed = (
        [(record["lr"], record["loss"]) for record in read_metrics(Path(each["train"]["output"]))]
        for each in (config, parted)
    )
    assert resumed == whole
    progress = read_description(list_checkpoints(tmp_path / "parted")[-1]).progress
    assert progress["updates"] == 20 - progress["overflows"] == 20 - progress["schedule_lag"] < 20


def test_overflows_trip_no_policy(small_run: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Overflows of the first steps are no bad steps and no spikes, and the learning rate begins after them."""
    # The data are this package's sources, which change: the last scale, 2^18, is far below those that overflow.
    config = in_float16(small_run, initial=2.0**34, backoff_factor=1 / 16)
    config["train"]["steps"] = 16
    config |= {"resilience": {"max_skipped": 0, "on_spike": "rollback"}}
    optimus.train(config)
    records = read_metrics(Path(config["train"]["output"]))
    overflows = int(records[-1]["overflow_steps"])
    assert 2 < overflows < 10
    assert [record["overflow_steps"] for record in records] == [min(step, overflows) for step in range(1, 17)]
    assert [record["lr"] for record in records] == pytest.approx(
        [1.5e-3] * (overflows + 1) + [3e-3] + [record["lr"] for record in records[overflows + 2 :]]
    )  # the warm-up of two steps, whose first is repeated until it is applied
    assert {record["skipped_steps"] for record in records} == {0}
    assert records[-1]["loss_scale"] == 2.0 ** (34 - 4 * overflows) == 2.0**18
    said = capfd.readouterr().err
    assert f"step {overflows}: the scaled gradients overflowed, so no update was applied; the loss scale is now" in said
    assert "was skipped" not in said


def test_gradients_that_overflow_at_the_smallest_scale_end_the_run(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three overflows lead from scale 8 to the smallest scale, 1; two bad steps end the run."""
    right = step.objective
    monkeypatch.setattr("optimus.launch.rank.dry_run", lambda run: "no dry run")
    monkeypatch.setattr(step, "objective", lambda *given: right(*given) * math.inf)
    config = in_float16(small_run, initial=8.0) | {"resilience": {"max_skipped": 1}}
    with pytest.raises(
        optimus.UserError,
        match=r"step 5: loss 5\.\S* or gradient norm \w+ is not finite at the smallest loss scale "
        r"\(train\.loss_scale\.minimum is 1: lower it, or choose another train\.precision\), for 2 steps in",
    ):
        optimus.train(config)
    records = read_metrics(Path(config["train"]["output"]))
    assert [(each["loss_scale"], each["overflow_steps"], each["skipped_steps"]) for each in records] == [
        (4.0, 1, 0),
        (2.0, 2, 0),
        (1.0, 3, 0),
        (1.0, 3, 1),
        (1.0, 3, 2),
    ]


def test_a_loss_that_is_not_finite_is_no_overflow(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale cannot mend a forward pass: the first such step counts as bad, and halves the scale as in GradScaler."""
    terms = step.terms
    monkeypatch.setattr("optimus.launch.rank.dry_run", lambda run: "no dry run")
    monkeypatch.setattr(step, "terms", lambda *given: terms(*given) * math.nan)
    config = in_float16(small_run) | {"resilience": {"max_skipped": 0}}
    with pytest.raises(optimus.UserError, match=r"step 1: loss nan or gradient norm nan is not finite"):
        optimus.train(config)
    (record,) = read_metrics(Path(config["train"]["output"]))
    assert (record["loss_scale"], record["overflow_steps"], record["skipped_steps"]) == (2.0**15, 0, 1)


def test_a_schedule_of_a_phase_begins_anew(small_run: dict[str, Any]) -> None:
    """Overflows delay the schedule in which they are, and not that of a later phase."""
    config = in_float16(small_run, initial=2.0**24)
    del config["train"]["steps"]
    own = {"lr": 1e-3, "warmup_steps": 2}
    config["phases"] = [{"steps": 8}, {"steps": 2}, {"steps": 4, "lr_schedule": own}]
    optimus.train(config)
    records = read_metrics(Path(config["train"]["output"]))
    before = [0, *(int(record["overflow_steps"]) for record in records)]  # overflows before each step
    assert 0 < before[8] <= before[10]

    def rate(number: int) -> float:
        own = number > 10
        of_schedule = number - 10 - (before[number - 1] - before[10]) if own else number - before[number - 1]
        peak, steps = (1e-3, 4) if own else (3e-3, 14)
        if of_schedule <= 2:
            return peak * of_schedule / 2
        return 3e-4 + (peak - 3e-4) * 0.5 * (1 + math.cos(math.pi * (of_schedule - 2) / (steps - 2)))

    assert [record["lr"] for record in records] == pytest.approx([rate(number) for number in range(1, 15)])


def test_a_run_in_float16_is_evaluated_and_exported(small_run: dict[str, Any], tmp_path: Path) -> None:
    config = in_float16(small_run) | {"checkpoint": {"weights_every": 6}}
    optimus.train(config)
    run = Path(config["train"]["output"])
    weights = dict(load_model(run / "checkpoints" / "weights-00000006", torch.float32).named_parameters())
    for name, parameter in load_model(run, torch.float32).named_parameters():
        torch.testing.assert_close(weights[name], parameter.half().float(), rtol=0, atol=0)
    result = optimus.export(run, tmp_path / "hf", dtype="float16")
    assert result["dtype"] == "float16"
    assert show(run / "checkpoints" / "weights-00000006")["precision"] == "float16"
