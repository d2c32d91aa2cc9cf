"""Replay and Reptile steps against forgetting: English, then other languages (`replay`, `optimizer.reptile_every`).

Published: 25 to 50 % of replay prevents forgetting over 3 to 5 languages, and more so with Reptile steps (Abbes et al.
2025). Expected: the loss on English rises by 0.3 nats or more without replay, and by at most 0.1 with 25 %.
"""

from benchmarks.experiments.harness import STEP_TOKENS, Experiment, command, mean_rows
from benchmarks.harness import Result

_TOKENS = 200_000  # tokens of each phase


def run(experiment: Experiment) -> Result:
    """Train on speeches, then on declarations in 344 languages."""
    prepared = experiment.prepared(["speeches", "multilingual"])
    steps = experiment.steps(_TOKENS)
    first = {"name": "first", "steps": steps, "data": {"path": str(prepared["speeches"].train)}}
    second = {"name": "second", "steps": steps, "data": {"path": str(prepared["multilingual"].train)}}
    rising = {"lr_schedule": {"warmup_steps": 1}}  # the rate rises to its peak again
    every = max(1, steps // 4)
    cases = {
        "before": ([first], {}),
        "no replay": ([first, second | rising], {}),
        "25 % replay": ([first, second | rising | {"replay": 0.25}], {}),
        "25 % replay, Reptile 0.5": (
            [first, second | rising | {"replay": 0.25}],
            {"reptile_every": every, "reptile_step": 0.5},
        ),
    }
    configs = {
        name: {"phases": phases, "optimizer": optimizer, "validation": experiment.validation(prepared)}
        for name, (phases, optimizer) in cases.items()
    }
    rows = mean_rows(experiment.train_all(configs, steps), [*prepared])
    before = rows[0]["speeches"]
    ratios = {f"replay.forgotten.{row['configuration']}": row["speeches"] - before for row in rows[1:]}
    return Result(rows, ratios, {"step_tokens": STEP_TOKENS}, {"replay": rows})


if __name__ == "__main__":
    command("experiments.replay", run)
