"""A mixture that is annealed: the last tenth of a run has four times as much math (`phases`).

Published: OLMo 2 and Llama 3 gain most of what they have in mathematics from such a phase. Expected: the loss on math falls
by 0.1 nats, at 0.02 nats on the rest.
"""

from benchmarks.experiments.harness import Experiment, command, mean_rows
from benchmarks.harness import Result

_TOKENS = 400_000
_SHARES = {"same mixture": 0.1, "annealed": 0.4}  # of math, in the last tenth


def run(experiment: Experiment) -> Result:
    """Nine tenths of speeches and a tenth of math; then the same, or four tenths of math."""
    prepared = experiment.prepared(["speeches", "math"])
    steps = experiment.steps(_TOKENS)
    last = max(1, steps // 10)

    def sources(math: float) -> list[dict[str, object]]:
        return [
            {"path": str(prepared["speeches"].train), "name": "speeches", "weight": round(1 - math, 6)},
            {"path": str(prepared["math"].train), "name": "math", "weight": math},
        ]

    configs = {
        name: {
            "phases": [
                {"name": "main", "steps": steps - last, "data": sources(0.1)},
                {"name": "last", "steps": last, "data": sources(math)},
            ],
            "validation": experiment.validation(prepared),
        }
        for name, math in _SHARES.items()
    }
    rows = mean_rows(experiment.train_all(configs, steps), [*prepared])
    ratios = {f"annealing.{name}_change": rows[1][name] - rows[0][name] for name in prepared}
    return Result(rows, ratios, tables={"annealing": rows})


if __name__ == "__main__":
    command("experiments.annealing", run)
