"""The commands `optimus bench ...` of a checkout: thin calls of functions beside it. Heavy imports wait until one runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from optimus.disk import user_path
from optimus.errors import UserError
from optimus.plan.measure.commands import Report, bench


@bench("train")
def bench_train(
    model: Annotated[str, typer.Option(help="Preset.")] = "mula-tiny-moe",
    steps: Annotated[int, typer.Option(help="Timed steps per contestant and round.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds, the contestants taking turns.")] = 3,
) -> Report:
    """Training speed against the Hugging Face Trainer on the same model and data."""
    from benchmarks import kernels
    from benchmarks.train import run
    from optimus.observe import report

    document = report.publish("train", *run(model=model, steps=steps, rounds=rounds))
    rows, _ = kernels.run(model=model, tokens=2048, context=256)
    report.print_table(kernels.shares(rows), "each kernel's share of the step, with plain PyTorch and with ours")
    return document


@bench("tokenise")
def bench_tokenise(
    inputs: Annotated[list[str] | None, typer.Argument(metavar="[INPUT]...", help="Default: Python's library.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Default: one trained on the input.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one per core.")] = None,
) -> Report:
    """Tokenisation speed against `tokenizers.encode_batch` on the same cores."""
    from benchmarks.tokenise import run
    from optimus.observe import report

    return report.publish("tokenise", *run(inputs or (), tokenizer and user_path(tokenizer), workers))


@bench("data-parallel")
def bench_data_parallel(
    model: Annotated[str, typer.Option(help="Preset.")] = "mula-tiny-moe",
    steps: Annotated[int, typer.Option(help="Timed steps per contestant and round.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds, the contestants taking turns.")] = 3,
    gradients: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type in which all reduce their gradients.")
    ] = "float32",
) -> Report:
    """Data-parallel training against torch DDP and FSDP2, and DeepSpeed where installed, on 2 and 4 ranks."""
    from benchmarks.data_parallel import run
    from benchmarks.data_parallel_rivals import DEEPSPEED
    from optimus.observe import report

    result = run(model=model, steps=steps, rounds=rounds, gradients=gradients)
    if DEEPSPEED is None:
        print("DeepSpeed is not installed: its rows are left out")
    return report.publish("data-parallel", *result)


@bench("tensor-parallel")
def bench_tensor_parallel(
    model: Annotated[str, typer.Option(help="Dense preset.")] = "mula-tiny",
    steps: Annotated[int, typer.Option(help="Timed steps per contestant and round.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds, the contestants taking turns.")] = 3,
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the computation.")] = "float32",
) -> Report:
    """Tensor-parallel training on 2 ranks against torch's parallelize_module (DTensor)."""
    from benchmarks.tensor_parallel import run
    from optimus.observe import report

    result = run(model=model, steps=steps, rounds=rounds, precision=precision)
    return report.publish("tensor-parallel", *result)


@bench("pipeline")
def bench_pipeline(
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step of timed waits.")] = 64,
    forward_ms: Annotated[float, typer.Option(help="Timed wait that stands for a forward pass.")] = 10.0,
    seeds: Annotated[int, typer.Option(help="Draws of the jitter that are measured.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of each, the contestants taking turns; the best counts.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed training steps of us and of torch.")] = 10,
) -> Report:
    """Message-driven pipelines against 1F1B, and schedules against torch.distributed.pipelining."""
    from benchmarks import pipeline

    found = pipeline.run(microbatches=microbatches, forward_ms=forward_ms, seeds=seeds, rounds=rounds, steps=steps)
    return pipeline.publish(found)


@bench("moe")
def bench_moe(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="olmoe, small, a preset with experts, or H/I/E/K. Repeat for more. Default: olmoe and small."
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Tokens per pass. Repeat for more. Default: 1024; accelerator: 8192, 16384."),
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(help="learned, uniform, zipf or one-hot: how tokens spread. Repeat for more. Default: learned."),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16 or fp32. Repeat for more. Default: bf16.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu, ...")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; with one, times are those of the process.")] = 1,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds, the contestants taking turns. Default: 3; accelerator: 30.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")] = None,
) -> Report:
    """The sparse block, forward and backward, against transformers' and every kernel package that is installed."""
    from benchmarks import moe, moe_output
    from optimus.disk import check_plot

    if plot is not None:
        plot = check_plot(plot)
    rows, ratios = moe.run(
        shapes=shape or ("olmoe", "small"),
        tokens=tokens or (),
        loads=load or ("learned",),
        dtypes=dtype or ("bf16",),
        device=device,
        threads=threads,
        rounds=rounds,
        done=moe_output.print_case,
    )
    if plot is not None:
        moe_output.draw(rows, plot)
    return moe_output.publish(rows, ratios)


@bench("optimizer")
def bench_optimizer(
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks at most; a power of two up to 8.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed steps of either way of sharding.")] = 15,
) -> Report:
    """Optimizer step with expert parallelism: the standard sharded optimizer against EPSO."""
    from benchmarks.optimizer import run
    from optimus.observe import report

    return report.publish("optimizer", *run(ranks=ranks, steps=steps))


@bench("time-to-target")
def bench_time_to_target(
    text: Annotated[
        Path | None, typer.Option(help="Text, a file or folder as for prepare. Default: some of Python's library.")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(help="Add each finished run to this file (JSON lines), and take from it those that it has."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps and one seed, to see that it works.")] = False,
) -> Report:
    """Tokens and seconds until update rules have AdamW's final held-out loss, each at its best learning rate."""
    from benchmarks import time_to_target
    from optimus.observe import report

    length = time_to_target.QUICK if quick else time_to_target.FULL
    rows, ratios, profiles = time_to_target.run(text and user_path(text), runs and user_path(runs), length)
    for kind, profile in profiles.items():
        report.print_table(profile, f"share of the workloads solved within tau times the least {kind}")
    return report.publish("time-to-target", rows, ratios, more={"length": length._asdict(), "profiles": profiles})


@bench("kernels")
def bench_kernels(
    model: Annotated[str, typer.Option(help="Preset whose layers' sizes are used.")] = "mula-7b-a1b",
    tokens: Annotated[int, typer.Option(help="Tokens of a microbatch.")] = 1024,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a training step.")] = 4,
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Type of activations and weights.")] = "bf16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu, ...")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds, the contestants taking turns.")] = 5,
    tune: Annotated[
        bool, typer.Option("--tune", help="Instead: find the fastest tiles of the experts' products on an accelerator.")
    ] = False,
) -> Report:
    """Every operation of a training step: correct, how fast against plain PyTorch, and its share of the step."""
    import torch

    from benchmarks import kernels, tiles
    from optimus.observe import report

    precision = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    if tune:
        found = tiles.run(model=model, tokens=tokens, dtype=precision, device=device)
        return report.publish("kernels --tune", found, {})
    rows, ratios = kernels.run(
        model=model,
        tokens=tokens,
        context=context,
        microbatches=microbatches,
        dtype=precision,
        device=device,
        rounds=rounds,
    )
    return report.publish("kernels", rows, ratios)


@bench("collectives")
def bench_collectives(
    write: Annotated[
        Path | None,
        typer.Option(help="Instead: measure every algorithm here, and write the table into this machine file."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="With --write: ranks of a node, as for `optimus bench machine`.")] = 4,
) -> Report:
    """Exchanges on two levels against direct ones and rings, on links that are stood in for, and the choice among them."""
    from optimus.observe import report

    if write is not None:
        from optimus.plan.measure.collectives import measure

        rows = measure(ranks, user_path(write))
        return None if rows is None else report.publish("collectives", rows, {})
    from benchmarks import collectives

    cases, ratios, choices = collectives.run()
    report.print_table(choices, "seconds lost by choosing after measurements at 6 sizes, as a share of the best")
    return report.publish("collectives", cases, ratios, more={"choices": choices})


@bench("checkpoint")
def bench_checkpoint(
    ranks: Annotated[int, typer.Option(help="Ranks that load a model which all of them hold.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds, the contestants taking turns.")] = 2,
) -> Report:
    """Checkpoints at once, beside the training and by DCP; loading once or on every rank; bytes per node."""
    from benchmarks.checkpoint import run
    from optimus.observe import report

    saving, loading, nodes, ratios = run(ranks=ranks, rounds=rounds)
    report.print_table(loading, "loading")
    report.print_table(nodes, "who writes, on paper: 4 nodes of 12 ranks")
    return report.publish("checkpoint", saving, ratios, more={"loading": loading, "nodes": nodes})


@bench("resilience")
def bench_resilience(
    model: Annotated[str, typer.Option(help="Preset that is trained while it is watched.")] = "mula-tiny-moe",
    steps: Annotated[int, typer.Option(help="Steps that are counted.")] = 6,
    faults: Annotated[bool, typer.Option(help="Whether to lose nodes in the lab, too.")] = True,
) -> Report:
    """What watching for faults costs, and seconds from a fault until the run goes on."""
    from benchmarks.resilience import run
    from optimus.observe import report

    costs, recoveries, ratios = run(model=model, steps=steps, faults=faults)
    if recoveries:
        report.print_table(recoveries, "from a fault to the end of the next step, 3 nodes and 2 spares, keep-alive 1x3")
    return report.publish("resilience", costs, ratios, more={"recoveries": recoveries})


@bench("layouts")
def bench_layouts(
    model: Annotated[str, typer.Option(help="Preset that is trained.")] = "mula-tiny",
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks; by default 4 and 8.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds, the layouts taking turns.")] = 1,
) -> Report:
    """The planner's ranking of layouts against the clock's, on this machine, which is measured first."""
    from benchmarks.layouts import run
    from optimus.observe import report

    rows, ratios, machines = run(model=model, rank_counts=ranks or (4, 8), rounds=rounds)
    return report.publish("layouts", rows, ratios, more=machines)


@bench("planner")
def bench_planner(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with tables of published measurements (CSV), named as their readers are."),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Also fit each program's constant to these rows, and to random halves of them."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")] = None,
) -> Report:
    """The planner's predictions against published throughput and memory."""
    from benchmarks import planner, planner_output
    from optimus.disk import check_plot

    if data is None:
        raise UserError(
            "optimus bench planner needs the folder of published measurements: --data DIR, with one CSV file per source, "
            "such as mpt_llm_foundry.csv"
        )
    if plot is not None:
        plot = check_plot(plot)
    found = planner.run(user_path(data))
    timed = [each.case for each in found.predicted if each.tokens_per_second is not None]
    if plot is not None:
        planner_output.draw(found, plot)
    return planner_output.show(found, constants=planner.constants(timed) if fit else ())
