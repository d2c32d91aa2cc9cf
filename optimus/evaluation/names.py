"""Names of the known tasks."""

TASKS = (
    "arc_easy", "arc_challenge", "hellaswag", "piqa", "boolq", "sciq", "winogrande", "openbookqa", "mmlu",
    "mmlu_continuation",
)  # fmt: skip
