"""The public functions and classes of `optimus`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optimus.errors import UserError
from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.checkpoint.inspect import convert as convert_checkpoint
    from optimus.checkpoint.inspect import list_run as list_checkpoints
    from optimus.checkpoint.inspect import show as show_checkpoint
    from optimus.checkpoint.inspect import verify_all as verify_checkpoints
    from optimus.checkpoint.merging import merge
    from optimus.checkpoint.rollback import rollback
    from optimus.checkpoint.store import load_model
    from optimus.config import RunConfig
    from optimus.config.migrate import migrate
    from optimus.config.models import models
    from optimus.data.description import show_row
    from optimus.data.preparation import prepare
    from optimus.data.preview import preview
    from optimus.data.sample import sample_text
    from optimus.data.tasks import prepare_status
    from optimus.evaluation.run import evaluate
    from optimus.evaluation.run import generate_text as generate
    from optimus.evaluation.watch import watch
    from optimus.hub import FastSparseMoEBlock, export_adapter, import_folder, register_experts
    from optimus.hub import convert_to_gguf as gguf
    from optimus.hub import export_checkpoint as export
    from optimus.observe.doctor import examine as doctor
    from optimus.plan.job_builder import plan
    from optimus.report.data_page import describe_data
    from optimus.report.listing import runs
    from optimus.report.page import write_report as report
    from optimus.training.record import StepRecord
    from optimus.training.trainer import Hook, Order, Trainer

__all__ = [
    "FastSparseMoEBlock",
    "Hook",
    "Order",
    "StepRecord",
    "Trainer",
    "UserError",
    "config",
    "convert_checkpoint",
    "describe_data",
    "doctor",
    "evaluate",
    "export",
    "export_adapter",
    "generate",
    "gguf",
    "import_folder",
    "list_checkpoints",
    "load_model",
    "merge",
    "migrate",
    "models",
    "plan",
    "prepare",
    "prepare_status",
    "preview",
    "register_experts",
    "report",
    "rollback",
    "runs",
    "sample_text",
    "show_checkpoint",
    "show_row",
    "train",
    "verify_checkpoints",
    "watch",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the module
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "FastSparseMoEBlock": "optimus.hub",
            "Hook": "optimus.training.trainer",
            "Order": "optimus.training.trainer",
            "StepRecord": "optimus.training.record",
            "Trainer": "optimus.training.trainer",
            "convert_checkpoint": "optimus.checkpoint.inspect:convert",
            "describe_data": "optimus.report.data_page",
            "doctor": "optimus.observe.doctor:examine",
            "evaluate": "optimus.evaluation.run",
            "export": "optimus.hub:export_checkpoint",
            "export_adapter": "optimus.hub",
            "generate": "optimus.evaluation.run:generate_text",
            "gguf": "optimus.hub:convert_to_gguf",
            "watch": "optimus.evaluation.watch:watch",
            "import_folder": "optimus.hub",
            "list_checkpoints": "optimus.checkpoint.inspect:list_run",
            "load_model": "optimus.checkpoint.store",
            "merge": "optimus.checkpoint.merging",
            "migrate": "optimus.config.migrate",
            "models": "optimus.config.models",
            "plan": "optimus.plan.job_builder",
            "prepare": "optimus.data.preparation",
            "prepare_status": "optimus.data.tasks",
            "preview": "optimus.data.preview",
            "register_experts": "optimus.hub",
            "report": "optimus.report.page:write_report",
            "rollback": "optimus.checkpoint.rollback",
            "runs": "optimus.report.listing",
            "sample_text": "optimus.data.sample",
            "show_checkpoint": "optimus.checkpoint.inspect:show",
            "show_row": "optimus.data.description",
            "verify_checkpoints": "optimus.checkpoint.inspect:verify_all",
        },
    )


def config(source: "str | Path | Mapping[str, Any] | RunConfig", overrides: Iterable[str] = ()) -> "RunConfig":
    """Returns the configuration of a YAML file, a mapping or a `RunConfig`.

    `overrides` are strings of the form `key.path=value`.

    Example:
        api.config("first.yaml", ["train.steps=500"]).lr_schedule.lr
    """
    from optimus.config import load_config
    from optimus.hub import read_model_folder

    return load_config(source, overrides, read_model_folder)


def train(
    config: "str | Path | Mapping[str, Any] | RunConfig",
    overrides: Iterable[str] = (),
    *,
    ranks: int | Literal["auto"] | None = None,
    resume: bool | Literal["auto"] = False,
    fresh_optimizer: bool = False,
    check: bool = False,
    hooks: Sequence[Any] = (),
    optimizer: Any = None,
    data: Any = None,
) -> dict[str, Any]:
    """Trains a model as configured by `config` (a YAML file, a mapping or a `RunConfig`); returns a summary of the run.

    `ranks` is the number of ranks. None, and "auto" on CPUs, stand for the fewest that `parallel` allows; "auto" on
    accelerators stands for one rank per accelerator. Under torchrun, `srun` or `mpiexec` with several tasks, the
    launcher sets the number, and this process is one rank. `resume` continues from the newest intact
    checkpoint in `train.output`; "auto" also starts a run that has not begun. `fresh_optimizer` resumes with fresh
    optimizer state. `check` validates the run, and trains nothing. `hooks` are subclasses or instances of
    `optimus.Hook`.

    `optimizer` is an `optimus.extend.UpdateRule`, a class or an instance, in place of `optimizer.name`. `data` is a
    dataset in place of `data.path`. The items of a dataset are mappings with `input_ids`, and optionally `labels`
    (-100: not predicted), `document_ids` and `attention_mask`. The run shuffles a map-style dataset.

    A process can train only once under a launcher of several tasks.

    Example:
        optimus.train("first.yaml", ["train.steps=500"], ranks=2)
        optimus.train("first.yaml", ["train.steps=500"], ranks=2, resume=True)["loss"]
    """
    from optimus.launch.launchers import join

    join()
    if ranks not in (None, "auto") and (not isinstance(ranks, int) or ranks < 1):
        raise UserError(f'`ranks` is {ranks!r}: give a number of at least 1, or "auto"')
    from optimus.training.objects import user_objects
    from optimus.training.reading import holds_run, read_run

    objects, chosen = user_objects(hooks, optimizer, data)
    if resume == "auto":
        resume = holds_run(config, [*overrides, *chosen])
    elif fresh_optimizer and not resume:
        raise UserError("`fresh_optimizer=True` applies only to a run that resumes: set `resume=True` too")
    tree, read = read_run(config, [*overrides, *chosen], data)
    from optimus.launch.here import train_or_check

    return train_or_check(
        tree, read, ranks, resume=resume, fresh_optimizer=fresh_optimizer, check=check, objects=objects
    )
