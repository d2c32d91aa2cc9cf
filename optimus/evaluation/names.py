"""The table of evaluation tasks."""

from dataclasses import dataclass

from optimus.plugins import Table


@dataclass(frozen=True)
class TaskRow:
    """A task of lm-eval that runs on local documents.

    `definition` is the folder with the task's YAML files, absolute or relative to lm-eval's folder `tasks`. A run uses
    the first available split of `splits`. `subjects` is the pattern of the subjects' names in lm-eval. `data` is the
    name of the data set; None stands for `name`.
    """

    name: str
    definition: str
    splits: tuple[str, ...] = ("test", "validation")
    subjects: str | None = None
    data: str | None = None


_VALIDATION = ("validation",)  # the test labels are unpublished

_OWN = (
    TaskRow("arc_easy", "arc"),
    TaskRow("arc_challenge", "arc"),
    TaskRow("hellaswag", "hellaswag", _VALIDATION),
    TaskRow("piqa", "piqa", _VALIDATION),
    TaskRow("boolq", "super_glue/boolq", _VALIDATION),
    TaskRow("sciq", "sciq"),
    TaskRow("winogrande", "winogrande", _VALIDATION),
    TaskRow("openbookqa", "openbookqa"),
    TaskRow("mmlu", "mmlu/default", subjects="mmlu_{}"),
    TaskRow("mmlu_continuation", "mmlu/continuation", subjects="mmlu_{}_continuation", data="mmlu"),
)

TASKS = Table("task", TaskRow, lambda: {row.name: row for row in _OWN})
