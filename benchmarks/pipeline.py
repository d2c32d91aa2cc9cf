"""Message-driven pipelines against 1F1B, and our executor of schedules against torch.distributed.pipelining.

Message-driven pipelines run on real ranks with timed waits for computations and links (`pipeline_waits`), beside a
simulation of the same draws. Contestants at one point take turns, and have the same draws. The best round of a seed
counts, because other programs can only make a wait longer.

Executors of schedules run training steps without an optimizer in fp32, with one thread per rank, on the same stages
(`pipeline_rival`). Both take turns step by step in the same processes, and the median step of the best round counts.
"""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
from typer import Option

from benchmarks.harness import Result, Row, check_agreement
from benchmarks.pipeline_rival import TORCH, make_stages, ours, torchs
from benchmarks.pipeline_waits import Contestant, Job, run_jobs, simulated, timelines
from benchmarks.training import configuration
from optimus.config import RunConfig
from optimus.pipeline.costs import Costs
from optimus.pipeline.ready import message_driven
from optimus.pipeline.schedules import make_schedule
from optimus.plan.measure.ranks import run_fresh

_DRAWS = 20  # averaged simulations
_WARM_UP = 2  # training steps before the timed ones
SAME_LOSS = 1e-6
_BASE, _DEEP, _DRIVEN = "1F1B", "1F1B, deeper warm-up", "message-driven"

_CURVES = {"jitter": (0.0, 0.1, 0.2, 0.5), "live": (1.0, 1.5, 2.0, 3.0)}
_CURVE_DRAWS = 10


def falling_caps(stages: int, factor: float = 1.0) -> list[int]:
    """Returns the most live activations for each stage: `factor` times those of 1F1B, stages - s for stage s, rounded
    down."""
    return [int(factor * (stages - stage)) for stage in range(stages)]


class Point(NamedTuple):
    """A setting in which message-driven execution is compared. Times are in forward passes; a backward pass takes two."""

    stages: int = 4
    link: float = 0.1
    jitter: float = 0.2
    live: float = 2.0
    """The most live activations of message-driven execution and of the deeper warm-up, as a multiple of 1F1B's."""
    imbalance: float = 1.0
    """A factor on the times of stage 1."""

    def costs(self, seed: int) -> Costs:
        times = tuple(self.imbalance if stage == 1 else 1.0 for stage in range(self.stages))
        return Costs(times, times, times, link=self.link, jitter=self.jitter, seed=seed)

    def contestants(self, microbatches: int) -> list[Contestant]:
        shallow, deep = (
            make_schedule("1f1b", self.stages, microbatches, warmup_factor=live) for live in (1.0, self.live)
        )
        driven = message_driven(self.stages, microbatches)
        found = [Contestant(_BASE, shallow)]
        if self.live > 1:
            found.append(Contestant(_DEEP, deep))
        return [*found, Contestant(_DRIVEN, driven, tuple(falling_caps(self.stages, self.live)))]


POINTS = {
    "stages4.link10": Point(),
    "stages8.link10": Point(stages=8),
    "stages4.link30": Point(link=0.3),
    "stages4.imbalance": Point(imbalance=1.3),
    "stages4.equal_memory": Point(live=1.0),
    "stages4.live1.5": Point(live=1.5),
    "stages4.live3": Point(live=3.0),
    "stages4.jitter0": Point(jitter=0.0),
    "stages4.jitter10": Point(jitter=0.1),
    "stages4.jitter50": Point(jitter=0.5),
}


def run(
    microbatches: Annotated[int, Option(help="Microbatches of a step of timed waits.")] = 64,
    forward_ms: Annotated[float, Option(help="Milliseconds of the wait that stands for a forward pass.")] = 10.0,
    seeds: Annotated[int, Option(help="Number of measured draws of the jitter.")] = 3,
    rounds: Annotated[int, Option(help="Rounds in which the contestants take turns; the best round counts.")] = 2,
    steps: Annotated[int, Option(help="Timed training steps of Optimus and of torch.")] = 10,
    points: Mapping[str, Point] = POINTS,
    ranks: Sequence[int] = (2, 4),
) -> Result:
    """Measures timed waits, simulates curves over cap and jitter, and measures training.

    Ratios above one mean that the first name is faster: `message_driven.vs_1f1b.POINT`, and `vs_deep_1f1b` with the
    same cap, for every point; `scheduled.vs_torch.` for each schedule and number of `ranks`, and the smallest of these.
    """
    waits = [
        row
        for stages in sorted({point.stages for point in points.values()})
        for row in _measure_waits(_of_size(points, stages), microbatches, forward_ms / 1e3, range(seeds), rounds)
    ]
    training = [row for number in ranks for row in _measure_training(number, steps, rounds)]
    curves = [row for stages in (4, 8) for row in simulate_curves(stages, microbatches, _CURVE_DRAWS)]
    tables = {
        "optimus bench pipeline: timed waits; speed relative to 1F1B": waits,
        "optimus bench pipeline: simulated speed relative to 1F1B": curves,
        "optimus bench pipeline: training steps": training,
    }
    return Result([*waits, *curves, *training], _ratios(list(points), waits, training), tables=tables)


def simulate_curves(stages: int, microbatches: int, draws: int) -> list[Row]:
    """Returns a row for each jitter and cap: the mean speed relative to 1F1B over `draws`, with links of 0.1 forward
    passes."""
    rows: list[Row] = []
    for jitter, live in itertools.product(*_CURVES.values()):
        point = Point(stages=stages, jitter=jitter, live=live)
        who = point.contestants(microbatches)
        seconds = [[simulated(Job(each, point.costs(seed), 1.0)).makespan for each in who] for seed in range(draws)]
        faster = {
            each.name: statistics.fmean(draw[0] / draw[place] for draw in seconds) for place, each in enumerate(who)
        }
        rows.append(
            {"stages": stages, "jitter": jitter, "live": live, **{name: faster.get(name) for name in (_DEEP, _DRIVEN)}}
        )
    return rows


def _of_size(points: Mapping[str, Point], stages: int) -> dict[str, Point]:
    return {name: point for name, point in points.items() if point.stages == stages}


def _measure_waits(
    points: Mapping[str, Point], microbatches: int, unit: float, seeds: Sequence[int], rounds: int
) -> list[Row]:
    """Returns a row for each point and contestant; all points have the same number of stages."""
    (stages,) = {point.stages for point in points.values()}
    keys = [
        (name, who, seed)
        for seed in seeds
        for name, point in points.items()
        for _ in range(rounds)
        for who in point.contestants(microbatches)
    ]
    jobs = [Job(who, points[name].costs(seed), unit) for name, who, seed in keys]
    measured: dict[tuple[str, str, int], float] = {}
    for (name, who, seed), found in zip(keys, timelines(run_fresh(run_jobs, stages, jobs))):
        key = name, who.name, seed
        measured[key] = min(found.makespan, measured.get(key, found.makespan))
    rows: list[Row] = []
    for name, point in points.items():
        contestants = point.contestants(microbatches)
        expected = {
            (who.name, seed): simulated(Job(who, point.costs(seed), unit)).makespan
            for who in contestants
            for seed in {*seeds, *range(_DRAWS)}
        }
        for who in contestants:
            faster = [measured[name, _BASE, seed] / measured[name, who.name, seed] for seed in seeds]
            simulations = [expected[_BASE, seed] / expected[who.name, seed] for seed in range(_DRAWS)]
            rows.append(
                {"point": name, **point._asdict(), "contestant": who.name}
                | {"step_seconds": statistics.median(measured[name, who.name, seed] for seed in seeds)}
                | {"simulated_seconds": unit * statistics.median(expected[who.name, seed] for seed in seeds)}
                | {"speed": statistics.median(faster)}
                | {"simulated_speed": statistics.median(expected[_BASE, s] / expected[who.name, s] for s in seeds)}
                | {"simulated_20_draws": statistics.fmean(simulations)}
            )
    return rows


def training_config(schedule: str, ranks: int, *, layers: int = 8, sequences: int = 16, context: int = 64) -> RunConfig:
    """Returns the configuration of `mula-tiny` with `layers` layers, in microbatches of two sequences."""
    parallel = {
        "pipeline": ranks,
        "schedule": schedule,
        "stages_per_rank": 2 if schedule in ("interleaved-1f1b", "zbv") else 1,
    }
    overrides = [f"model.layers={layers}"]
    return configuration(
        "mula-tiny", sequences, context, overrides, micro_batch=2, precision="float32", parallel=parallel
    )


def _measure_training(ranks: int, steps: int, rounds: int) -> list[Row]:
    """Returns a row for each schedule."""
    by_rank = run_fresh(_turns_of_all, ranks, [training_config(name, ranks) for name in TORCH], steps * rounds)
    rows: list[Row] = []
    for name, turns in zip(TORCH, zip(*by_rank)):
        # A step lasts until the last rank has finished; ranks without the last stage report a loss of zero.
        lasting = [[max(each) for each in zip(*(turn[who][0] for turn in turns))] for who in (0, 1)]
        starts = range(0, steps * rounds, steps)
        seconds = [min(statistics.median(each[start : start + steps]) for start in starts) for each in lasting]
        losses = [max(turn[who][1] for turn in turns) for who in (0, 1)]
        check_agreement({f"optimus, {name}": losses[0], f"torch, {name}": losses[1]}, SAME_LOSS)
        rows.append(
            {"schedule": name, "ranks": ranks}
            | {"optimus_step_seconds": seconds[0], "torch_step_seconds": seconds[1], "speed": seconds[1] / seconds[0]}
            | {"optimus_loss": losses[0], "torch_loss": losses[1]}
        )
    return rows


def _turns_of_all(configs: Sequence[RunConfig], steps: int) -> list[list[tuple[list[float], float]]]:
    return [_turns(config, steps) for config in configs]


def _turns(config: RunConfig, steps: int) -> list[tuple[list[float], float]]:
    """Returns the seconds of each timed step and the loss, for ours and for torch, on a rank."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    shape = config.train.global_batch, config.train.sequence_length
    tokens_BS = torch.randint(config.model.vocab, shape, generator=draws)
    staged = make_stages(config)
    sides = [ours(staged, config), torchs(staged, config)]
    seconds: list[list[float]] = [[], []]
    losses = [0.0, 0.0]
    for number in range(_WARM_UP + steps):
        for who in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            found = sides[who](tokens_BS)
            if number >= _WARM_UP:
                seconds[who].append(time.perf_counter() - start)
            losses[who] = float(found.mean()) if len(found) else 0.0
    return list(zip(seconds, losses))


def _ratios(points: Sequence[str], waits: list[Row], training: list[Row]) -> dict[str, float]:
    speeds = {(row["point"], row["contestant"]): row["speed"] for row in waits}
    ratios = {f"message_driven.vs_1f1b.{point}": speeds[point, _DRIVEN] for point in points}
    for point in points:
        if (point, _DEEP) in speeds:
            ratios[f"message_driven.vs_deep_1f1b.{point}"] = speeds[point, _DRIVEN] / speeds[point, _DEEP]
    by_schedule = {f"scheduled.vs_torch.{row['schedule']}.ranks{row['ranks']}": row["speed"] for row in training}
    return ratios | by_schedule | {"scheduled.vs_torch": min(by_schedule.values())}
