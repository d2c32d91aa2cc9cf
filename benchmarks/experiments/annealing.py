"""An annealed mixture: the last tenth of a run has three or four times as much math (`phases`).

Published: OLMo 2 and Llama 3 gain most of their mathematics in such a phase, in which the learning rate falls.
Expected: the loss on math falls by 0.1 nats, at a cost of 0.02 nats on other text. A cosine has lowered the rate before
that phase; a cooldown (`wsd`) lowers the rate in it.
"""

from benchmarks.experiments.harness import Experiment, command, mean_rows
from benchmarks.harness import Result

_TOKENS = 400_000
_SHARES = (0.1, 0.3, 0.4)  # of math in the last tenth; the first share also before


def run(experiment: Experiment) -> Result:
    """Train on nine tenths of speeches and a tenth of math, then on the same or on more math."""
    prepared = experiment.prepared(["speeches", "math"])
    steps = experiment.steps(_TOKENS)
    last = max(1, steps // 10)
    schedules = {
        "cosine": {"lr": 3e-3, "min_lr": 3e-4},
        "wsd": {"name": "wsd", "lr": 3e-3, "min_lr": 3e-4, "cooldown": "linear", "cooldown_steps": last},
    }

    def sources(math: float) -> list[dict[str, object]]:
        return [
            {"path": str(prepared["speeches"].train), "name": "speeches", "weight": round(1 - math, 6)},
            {"path": str(prepared["math"].train), "name": "math", "weight": math},
        ]

    configs = {
        f"{name}, {100 * math:.0f} % of math": {
            "phases": [
                {"name": "main", "steps": steps - last, "data": sources(_SHARES[0])},
                {"name": "last", "steps": last, "data": sources(math)},
            ],
            "validation": experiment.validation(prepared),
            "lr_schedule": schedule,
        }
        for name, schedule in schedules.items()
        for math in _SHARES
    }
    rows = mean_rows(experiment.train_all(configs, steps), [*prepared])
    ratios = {
        f"annealing.{name}_change.{row['configuration']}": row[name] - same[name]
        for same, *annealed in zip(*(rows[number :: len(_SHARES)] for number in range(len(_SHARES))))
        for row in annealed
        for name in prepared
    }
    return Result(rows, ratios, tables={"annealing": rows})


if __name__ == "__main__":
    command("experiments.annealing", run)
