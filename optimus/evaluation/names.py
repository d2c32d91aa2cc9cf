"""The tasks that are known."""

TASKS = (
    "arc_easy", "arc_challenge", "hellaswag", "piqa", "boolq", "sciq", "winogrande", "openbookqa", "mmlu",
    "mmlu_continuation",
)  # fmt: skip
