"""The commands. Each is a thin call of a function below; heavy imports wait until a command runs."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from optimus.errors import UserError

app = typer.Typer(
    name="optimus",
    help="Pretrain dense and Mixture-of-Experts language models, from raw text to an evaluated checkpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(help="Measure Optimus and its rivals in one run.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report to this JSON file.")]


@app.command()
def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, folders or globs of text.")],
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, or a folder that holds one.")] = None,
    train_tokenizer: Annotated[int | None, typer.Option(help="Train a tokenizer of this many entries.")] = None,
    context: Annotated[int, typer.Option(help="Tokens per training sequence.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one per core.")] = None,
    shard_size: Annotated[str, typer.Option(help="Largest shard.")] = "512MB",
    text_field: Annotated[str, typer.Option(help="Field of JSON lines and Parquet that holds the text.")] = "text",
    as_json: Json = False,
) -> None:
    """Tokenise, shuffle and shard text into training data."""
    from optimus.data import parse_size
    from optimus.data import prepare as run
    from optimus.observe.progress import Progress

    with Progress() as progress:
        index = run(
            inputs,
            output,
            tokenizer=tokenizer,
            train_tokenizer=train_tokenizer,
            context=context,
            seed=seed,
            workers=workers,
            shard_size=parse_size(shard_size),
            text_field=text_field,
            progress=progress.update,
        )
    _show(
        index,
        as_json,
        f"{output}: {index['tokens']:,} tokens of {index['documents']:,} documents in {index['instances']:,} sequences "
        f"of {context}, {len(index['shards'])} shard(s); the last {index['dropped_tokens']} tokens fill no sequence "
        "and are left out",
    )


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes on this machine that share each global batch.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint of the run.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Validate everything, run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model."""
    from optimus.train import train as run

    summary = run(config, overrides or [], ranks=ranks, resume=resume, check=check)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun, rank 0 speaks for all
    if check:
        where = f"\n{summary['placement']}" if summary["ranks"] > 1 else ""
        ready = f"{config} is ready to run: {summary['steps']} steps on {summary['ranks']} rank(s)"
        _show(summary, as_json, f"{ready}{where}")
        return
    text = f"step {summary['step']}: loss {summary['loss']:.4f}, checkpoint {summary['checkpoint']}"
    if summary["step"] < summary["steps"]:
        again = [text for text in overrides or [] if not text.startswith("train.stop_at=")]
        words = shlex.join(["optimus", "train", str(config), *again, *(["--ranks", str(ranks)] if ranks else [])])
        text += f"\nstopped before step {summary['steps']}; continue with: {words} --resume"
    _show(summary, as_json, text)


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint or run folder.")],
    tasks: Annotated[list[str] | None, typer.Option(help="Tasks, repeated or separated by commas.")] = None,
    task_data: Annotated[Path | None, typer.Option(help="Folder of local task data.")] = None,
    text: Annotated[Path | None, typer.Option(help="File or folder of text for bits per byte.")] = None,
    limit: Annotated[int | None, typer.Option(help="Documents per task.")] = None,
    fewshot: Annotated[int | None, typer.Option(help="Examples in each prompt.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu, ...")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Score a checkpoint on tasks (lm-eval) and on bits per byte of text."""
    from optimus.evaluate import evaluate as run

    names = [name for group in tasks or [] for name in group.split(",") if name]
    results = run(
        checkpoint,
        tasks=names,
        task_data=task_data,
        text=text,
        output=output,
        limit=limit,
        fewshot=fewshot,
        device=device,
    )
    rows = [{"task": name, **scores} for name, scores in results["tasks"].items()]
    if rows and not as_json:
        from optimus.bench.report import print_table

        print_table(rows, str(checkpoint))
    bits = results["bits_per_byte"]
    _show(results, as_json, f"bits per byte: {bits:.4f}" if bits is not None else "")


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint or run folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu, ...")] = "auto",
    as_json: Json = False,
) -> None:
    """Continue a text."""
    from optimus.evaluate import generate_text

    text = generate_text(
        checkpoint,
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        device=device,
    )
    _show({"prompt": prompt, "text": text}, as_json, text)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint or run folder.")],
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: Json = False,
) -> None:
    """Write a checkpoint in Hugging Face format."""
    from optimus.hub import export_checkpoint

    _show(export_checkpoint(checkpoint, output, dtype=dtype), as_json, f"{output}: load it with AutoModelForCausalLM")


@app.command(name="import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Hugging Face folder of an OLMo or OLMoE model.")],
    output: Annotated[Path, typer.Option(help="Checkpoint folder to make.")],
    as_json: Json = False,
) -> None:
    """Turn a Hugging Face folder into a checkpoint."""
    from optimus.hub import import_folder

    _show(import_folder(folder, output), as_json, f"{output}: a checkpoint of weights (checkpoint.initial={output})")


@app.command()
def models(as_json: Json = False) -> None:
    """List the presets with their total and active parameters."""
    from optimus.model.count import models as run

    rows = run()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        total, active = (_billions(row[f"{kind}_parameters"]) for kind in ("total", "active"))
        print(f"{row['name']:16} {total:>8} total  {active:>8} active   {row['layers']} layers, hidden {row['hidden']}")


@app.command()
def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="gpipe, 1f1b, interleaved-1f1b, zb-h1 or zbv.")],
    stages: Annotated[int, typer.Option(help="Ranks of the pipeline, each with --stages-per-rank stages.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    stages_per_rank: Annotated[
        int | None, typer.Option(help="Default: 2 for interleaved-1f1b and zbv, else 1.")
    ] = None,
    warm_up: Annotated[float, typer.Option(help="1f1b: times its usual activations that a stage may keep.")] = 1.0,
    vocabulary: Annotated[
        bool, typer.Option("--vocabulary", help="Every rank has a part of embedding and output layer (S and T).")
    ] = False,
    output_layer: Annotated[
        float, typer.Option(help="Time of its forward pass: the last stage's, or shared out with --vocabulary.")
    ] = 0.0,
    jitter: Annotated[float, typer.Option(help="Lognormal deviation of every computation's time.")] = 0.0,
    link: Annotated[float, typer.Option(help="Time of a message between ranks; a stage's forward pass takes 1.")] = 0.0,
    blocking: Annotated[bool, typer.Option("--blocking", help="Ranks wait for their sends and receives.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the jitter.")] = 0,
    measured: Annotated[
        Path | None, typer.Option(help="Timeline of a real run to show beside the simulated one.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline into this PNG file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write bubble, memory and all actions here.")] = None,
) -> None:
    """Check, simulate and draw a pipeline schedule."""
    from optimus.disk import check_plot
    from optimus.pipeline import Costs
    from optimus.pipeline.report import run

    if plot is not None:
        check_plot(plot)
    print(
        run(
            name,
            stages,
            microbatches,
            stages_per_rank=stages_per_rank,
            warm_up=warm_up,
            vocabulary=vocabulary,
            output_layer=output_layer,
            costs=Costs(jitter=jitter, link=link, blocking=blocking, seed=seed),
            measured=measured,
            plot=plot,
            json_file=json_file,
        )
    )


@bench_app.command(name="train")
def bench_train(
    model: Annotated[str, typer.Option(help="Preset.")] = "mula-tiny-moe",
    steps: Annotated[int, typer.Option(help="Timed steps per contestant and round.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds, the contestants taking turns.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Training speed against the Hugging Face Trainer on the same model and data."""
    from optimus.bench import kernels, report
    from optimus.bench.train import run

    report.publish("train", *run(model=model, steps=steps, rounds=rounds), path=json_file)
    rows, _ = kernels.run(model=model, tokens=2048, context=256)
    report.print_table(kernels.shares(rows), "each kernel's share of the step, with plain PyTorch and with ours")


@bench_app.command(name="tokenise")
def bench_tokenise(
    inputs: Annotated[list[str] | None, typer.Argument(metavar="[INPUT]...", help="Default: Python's library.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Default: one trained on the input.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one per core.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Tokenisation speed against `tokenizers.encode_batch` on the same cores."""
    from optimus.bench import report
    from optimus.bench.tokenise import run

    report.publish("tokenise", *run(inputs or (), tokenizer, workers), path=json_file)


@bench_app.command(name="data-parallel")
def bench_data_parallel(
    model: Annotated[str, typer.Option(help="Preset.")] = "mula-tiny-moe",
    steps: Annotated[int, typer.Option(help="Timed steps per contestant and round.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds, the contestants taking turns.")] = 3,
    gradients: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type in which all reduce their gradients.")
    ] = "float32",
    json_file: JsonFile = None,
) -> None:
    """Data-parallel training against torch DDP and FSDP2, and DeepSpeed where installed, on 2 and 4 ranks."""
    from optimus.bench import report
    from optimus.bench.data_parallel import run
    from optimus.bench.data_parallel_rivals import DEEPSPEED

    result = run(model=model, steps=steps, rounds=rounds, gradients=gradients)
    report.publish("data-parallel", *result, path=json_file)
    if DEEPSPEED is None:
        print("DeepSpeed is not installed: its rows are left out")


@bench_app.command(name="tensor-parallel")
def bench_tensor_parallel(
    model: Annotated[str, typer.Option(help="Dense preset.")] = "mula-tiny",
    steps: Annotated[int, typer.Option(help="Timed steps per contestant and round.")] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds, the contestants taking turns.")] = 3,
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the computation.")] = "float32",
    json_file: JsonFile = None,
) -> None:
    """Tensor-parallel training on 2 ranks against torch's parallelize_module (DTensor)."""
    from optimus.bench import report
    from optimus.bench.tensor_parallel import run

    result = run(model=model, steps=steps, rounds=rounds, precision=precision)
    report.publish("tensor-parallel", *result, path=json_file)


@bench_app.command(name="pipeline")
def bench_pipeline(
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step of timed waits.")] = 64,
    forward_ms: Annotated[float, typer.Option(help="Timed wait that stands for a forward pass.")] = 10.0,
    seeds: Annotated[int, typer.Option(help="Draws of the jitter that are measured.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of each, the contestants taking turns; the best counts.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed training steps of us and of torch.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """Message-driven pipelines against 1F1B, and schedules against torch.distributed.pipelining."""
    from optimus.bench import pipeline

    found = pipeline.run(microbatches=microbatches, forward_ms=forward_ms, seeds=seeds, rounds=rounds, steps=steps)
    pipeline.publish(found, path=json_file)


@bench_app.command(name="moe")
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
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")] = None,
) -> None:
    """The sparse block, forward and backward, against transformers' and every kernel package that is installed."""
    from optimus.bench import moe, moe_output
    from optimus.disk import check_plot

    if plot is not None:
        check_plot(plot)
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
    moe_output.publish(rows, ratios, path=json_file)
    if plot is not None:
        moe_output.draw(rows, plot)


@bench_app.command(name="optimizer")
def bench_optimizer(
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks at most; a power of two up to 8.")] = 4,
    steps: Annotated[int, typer.Option(help="Timed steps of either way of sharding.")] = 15,
    json_file: JsonFile = None,
) -> None:
    """Optimizer step with expert parallelism: the standard sharded optimizer against EPSO."""
    from optimus.bench import report
    from optimus.bench.optimizer import run

    report.publish("optimizer", *run(ranks=ranks, steps=steps), path=json_file)


@bench_app.command(name="kernels")
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
    json_file: JsonFile = None,
) -> None:
    """Every operation of a training step: correct, how fast against plain PyTorch, and its share of the step."""
    import torch

    from optimus.bench import kernels, report, tiles

    precision = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    if tune:
        found = tiles.run(model=model, tokens=tokens, dtype=precision, device=device)
        report.publish("kernels --tune", found, {}, path=json_file)
        return
    rows, ratios = kernels.run(
        model=model,
        tokens=tokens,
        context=context,
        microbatches=microbatches,
        dtype=precision,
        device=device,
        rounds=rounds,
    )
    report.publish("kernels", rows, ratios, path=json_file)


def _show(result: Any, as_json: bool, text: str) -> None:
    print(json.dumps(result, indent=2, default=str) if as_json else text)


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def main() -> None:
    """Entry point: a `UserError` is one line and exit code 2, never a traceback."""
    try:
        app()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")  # at once: other ranks write there too
        sys.exit(2)


if __name__ == "__main__":
    main()
