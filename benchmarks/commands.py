"""The commands `optimus bench ...` of a checkout: each is the function `run` of a module beside this one.

A module is imported when its command runs or its options are asked for, so that `optimus bench --help` stays fast.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from optimus.cli.bench import Report, bench
from optimus.disk import user_path

BENCHMARKS = {
    "train": "Training speed against the Hugging Face Trainer on the same model and data.",
    "any-model": "Models of `transformers` by our engine against a plain PyTorch loop and the Trainer; their experts.",
    "tokenise": "Tokenisation speed against `tokenizers.encode_batch` on the same cores.",
    "prepare": "`prepare` on one and two cores, as tasks, against Megatron-LM's preprocessing and others; its memory.",
    "data": "Padding of best-fit rows, attention within documents, and times of a mixture's batches and places.",
    "data-parallel": "Data-parallel training against torch DDP and FSDP2, and DeepSpeed where installed, on 2 and 4 ranks.",
    "tensor-parallel": "Tensor-parallel training on 2 ranks against torch's parallelize_module (DTensor).",
    "pipeline": "Message-driven pipelines against 1F1B, and schedules against torch.distributed.pipelining.",
    "moe": "The sparse block, forward and backward, against that of transformers and every installed kernel package.",
    "moe-training": "FSMOE and EPSO alone and together in training: published, planned and, at reduced size, measured.",
    "generation": "Generating 64 texts together: against one at a time, and `transformers` generating the same batch.",
    "optimizer": "Optimizer step with expert parallelism: the standard sharded optimizer against EPSO.",
    "update-on-arrival": "Updates of chunks as they are reduced, with links held back, against the plain order; the guards.",
    "low-rank": "A step with low-rank factors of frozen weights: two thin products against the merged weight.",
    "samo": "Pruned chunks against dense ones: bytes at rest and sent, and the time of an update with compression.",
    "offload": "Models of 0.5 to 8 times a simulated device: our choice and Elixir's rule; bytes moved against FSDP2's.",
    "time-to-target": "Tokens and seconds until update rules have AdamW's final loss, each at its best learning rate.",
    "dissect": "Every module, pass, collective and option of a configuration's step: measured beside planned.",
    "kernels": "Every operation of a training step: correctness, speed against plain PyTorch, and share of the step.",
    "collectives": "Two-level collectives against direct ones and rings, on simulated links; the choice among them.",
    "checkpoint": "Synchronous, asynchronous and DCP checkpoints; loading once or on every rank; bytes per node.",
    "resilience": "The cost of watching for faults, and seconds from a fault until the run continues.",
    "report": "Seconds and bytes of the page of a long run; the share of a step's time that the expert load takes.",
    "layouts": "The planner's ranking of layouts against the measured one, on this machine.",
}


def run_of(name: str) -> Callable[..., Report]:
    """Prints the result of a benchmark and returns its document; parameters that are no options keep their defaults."""
    import inspect
    from functools import wraps

    function = import_module(f"benchmarks.{name.replace('-', '_')}").run

    @wraps(function)
    def publish(**options: object) -> Report:
        result = function(**options)
        return None if result is None else result.publish(name)

    signature = inspect.signature(function)
    options = [each for each in signature.parameters.values() if hasattr(each.annotation, "__metadata__")]
    publish.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    publish.__annotations__ = {each.name: each.annotation for each in options}
    publish.__doc__ = BENCHMARKS[name]
    return publish


@bench("planner")
def bench_planner(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with rows.csv or the sources' own tables (CSV). Default: the rows of this checkout."),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Also fit each framework's constant to these rows, and to random halves of them."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")] = None,
) -> Report:
    """The planner's predictions against published throughput and memory."""
    from benchmarks import planner, planner_output
    from optimus.disk import check_plot

    if plot is not None:
        plot = check_plot(plot)
    found = planner.run(None if data is None else user_path(data))
    timed = [each.case for each in found.predicted if each.tokens_per_second is not None]
    if plot is not None:
        planner_output.draw(found, plot)
    return planner_output.show(found, constants=planner.constants(timed) if fit else ())


@bench("papers")
def bench_papers(
    figure: Annotated[
        list[str] | None,
        typer.Option(
            help="Only figures and tables whose names contain this text, such as 5.2; repeatable. Default: all."
        ),
    ] = None,
) -> Report:
    """The planner's predictions against the numbers that the Optimus and AxoNN papers state, figure by figure."""
    from benchmarks import papers

    return papers.show(figure or ())
