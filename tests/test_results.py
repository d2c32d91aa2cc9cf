"""Names on the pages on features and results exist, and numbers that a test fixes equal those of the test.

A pattern on the page gives a number; a pattern in the test's text, or the test's module, gives the other. Each test
named on the page on results is in `FIXED`, or fixes no number of the page.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from benchmarks.commands import BENCHMARKS
from benchmarks.papers.dense import WEAK
from optimus.cli.bench import bench_app
from optimus.config.models import models

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("results", "features", "architecture")
}


class Fixed(NamedTuple):
    """Numbers on the page on results (the groups of the pattern `said`) that `test` fixes and `by` returns."""

    test: str
    said: str
    by: Callable[[], list[float]]


@cache
def module(test: str) -> ModuleType:
    """Returns the module of a test."""
    spec = spec_from_file_location(f"of_the_page_{Path(test).stem}_{len(test)}", ROOT / test)
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def number(text: str) -> float:
    """Returns a number as a page or program writes it."""
    return float(text.replace(",", "").replace("_", ""))


def text(test: str, *patterns: str) -> list[float]:
    """Returns the groups of the patterns in the text of a test."""
    whole, found = (ROOT / test).read_text(encoding="utf-8"), []
    for pattern in patterns:
        match = re.search(pattern, whole)
        assert match, f"{test} has no {pattern}: the number that a page says stands there no more"
        found += [number(group) for group in match.groups()]
    return found


def set_ups() -> list[float]:
    """Returns how many set-ups of masks there are, and their least and largest numbers of ranks."""
    marks = module(MASKS).test_the_bits_of_masks_on_dense_state.pytestmark
    (given,) = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    ranks = [each[1] for each in given]
    return [len(given), min(ranks), max(ranks)]


TRAINING, LONG, PREPARE = (
    "tests/training/test_training.py",
    "tests/training/test_long_context.py",
    "tests/data/test_prepare.py",
)
TORCH, ACTIVATIONS = "tests/pipeline/test_against_torch.py", "tests/parallel/test_activations.py"
PARITY, LAYOUTS = "tests/model/test_transformers_parity.py", "tests/training/test_layouts.py"
LOST, MASKS, KILLED = "tests/launch/test_lost_rank.py", "tests/state/test_masks.py", "tests/checkpoint/test_killed.py"
CHANGES, WATCH = "tests/checkpoint/test_layouts.py", "tests/comm/test_watch.py"
FACTS = "tests/model/foreign/facts.json"
OPTIONS, ADAPTED_KILLED = "tests/model/foreign/test_options.py", "tests/model/foreign/test_killed.py"
HANGS, SLOW, LAB = "tests/resilience/test_hangs.py", "tests/resilience/test_slow.py", "tests/testing/test_lab.py"
TIMES, SCALING = "tests/resolve/test_offload_times.py", "tests/plan/test_scaling.py"
PCCL, OFFLOADING = "tests/plan/test_pccl.py", "tests/plan/test_offloading.py"


def changes() -> int:
    """Returns the number of pairs of layouts between which checkpoints are moved."""
    of = module(CHANGES)
    return sum(len(each.pairs) for each in [*map(of.chain, of.CHAINS), *map(of.world_chain, of.WORLDS)])


def killed() -> list[float]:
    """Returns the kills of a full sweep and of its two parts, and the share of each part that a commit runs."""
    beside, eighth, at_once, fifth = text(
        KILLED, r"range\((\d+)\), (\d+)\)\), False: len\(part_of\(range\((\d+)\), (\d+)"
    )
    assert (eighth, fifth) == (8, 5)  # the page has these as words
    every = module(KILLED).EVERY
    return [beside + at_once, every, beside, 2 * every, at_once, every]


def architectures() -> list[float]:
    """Returns the number of architectures, and the tolerances of saved and of peak bytes in per cent."""
    of = module(ACTIVATIONS)
    limits = text(ACTIVATIONS, r"approx\(found.saved, rel=(\S+)\)", r"approx\(found.peak, rel=(\S+)\)")
    return [2 + len(of.GROUPED) + len(of.OTHERS), *(100 * limit for limit in limits)]


def layouts() -> list[float]:
    """Returns the numbers of draws, random layouts and steps, and the relative bound."""
    of = module(LAYOUTS)
    return [len(of.POOL), len(of.SWEEP), of.STEPS, *text(LAYOUTS, r"\[layout\], STEPS, rtol=(\S+)\)")]


def in_bf16() -> list[float]:
    """Returns ranks, expert-parallel ranks, steps, per cent."""
    found = text(
        LAYOUTS,
        r"run_ranks\(train_steps, (\d), spread, 50\)",
        r'"parallel": \{"expert": (\d)\}, "state": config',
        r"alone = train_steps\(config, (\d+)\)",
        r"approx\(alone\[-1\].loss, rel=(\S+)\)",
    )
    return [*found[:-1], 100 * found[-1]]


def measured(machine: str) -> list[float]:
    """Returns ranks and measured weak-scaling shares."""
    rows = WEAK[machine]
    return [*(ranks for ranks, _, _ in rows), *(share for _, _, share in rows)]


def shorter() -> list[float]:
    """Returns the published batch times with PCCL."""
    return [share for *_, share in module(PCCL).SHORTER]


RATIO = r"(\d\.\d+)"


def adapted_facts() -> list[float]:
    """Returns the version of transformers, classes that build, classes with a plan, and what is divided of the latter."""
    facts = json.loads((ROOT / FACTS).read_text(encoding="utf-8"))
    classes = facts["classes"].values()
    divided = [fact["divided"] for fact in classes if fact["plan"]]
    version = float(".".join(facts["transformers"].split(".")[:2]))
    least = 0.9
    return [
        version,
        len(classes),
        len(divided),
        sum(share >= least for share in divided),
        100 * least,
        round(100 * sum(divided) / len(divided), 1),
    ]


def adapted_options() -> list[float]:
    """Returns the numbers of draws, runs, options and steps, and the bounds of losses and norms."""
    of = module(OPTIONS)
    case = of.drawn(0)
    options = len(of.PAIRED) + len(of.factors(case).keys() - {*of.PAIRED})
    bounds = [bounds[kind] for bounds in (of.EXACT, of.ROUNDED) for kind in ("loss", "norm")]
    return [len(of.POOL), len(of.cases()), options, of.STEPS, *bounds]


FIXED = [
    Fixed(
        TRAINING,
        r"a run of (\d+) steps that was stopped after (\d+)",
        lambda: text(TRAINING, r"steps=(\d+), precision=precision", r"parted, stop_at=(\d+)\)"),
    ),
    Fixed(
        TORCH,
        r"within a relative (\S+) on (\d) and (\d) ranks for all (\d) schedules",
        lambda: [
            *text(TORCH, r"losses, expected_losses, rtol=(\S+),", r'"ranks", in_turns\(\[(\d), (\d)\]'),
            len(module(TORCH).TORCH),
        ],
    ),
    Fixed(LONG, r"A sequence of ([\d,]+) tokens, `mula-tiny`", lambda: [module(LONG).CONTEXT]),
    Fixed(
        LONG,
        r"trains (\d) steps on (\d) ranks and compares the first loss, within a relative (\S+)\)",
        lambda: [
            text(LONG, r"schedule\), (\d), timeout")[0],
            *text(LONG, r"run_ranks\(train_steps, (\d),", r"approx\(right, rel=(\S+)\)"),
        ],
    ),
    Fixed(
        ACTIVATIONS,
        r"has (\d+) architectures, which have turns, and allows (\d) % of what is kept and (\d) % of the peak",
        architectures,
    ),
    Fixed(
        PREPARE,
        r"output for (\d), (\d) and (\d) workers",
        lambda: text(PREPARE, r"workers, given in \(\((\d), \w+\), \((\d), \w+\), \((\d), "),
    ),
    Fixed(PREPARE, r"signal 9 at (\d+) random moments", lambda: text(PREPARE, r"while kills < (\d+):")),
    Fixed(
        PARITY,
        r"(\d+) configurations of all published families, .* each within (\S+)\n",
        lambda: [len(module(PARITY).CONFIGS), module(PARITY).TOLERANCE],
    ),
    Fixed(PARITY, r"greedy text, (\d+) tokens", lambda: text(PARITY, r'"max_new_tokens": (\d+)')),
    Fixed(
        LAYOUTS,
        r"chosen from ([\d,]+) random layouts, and (\d+) random ones.* (\d) steps, fp32 \| .* relative (\S+) \|",
        layouts,
    ),
    Fixed(LAYOUTS, r"(\d) ranks, ep = (\d), (\d+) steps \| every loss within (\d) %", in_bf16),
    Fixed(
        LOST,
        r"A rank of three killed .* named, within (\d+) s;",
        lambda: text(
            LOST, r"signal_rank\(process, 1, signal.SIGKILL\)\n    \(message,\) = end_of\(process, tmp_path, (\d+)\)"
        ),
    ),
    Fixed(
        MASKS,
        r"test_masks.py`: (\d+) set-ups of (\d) to (\d) ranks, (\d+) steps",
        lambda: [*set_ups(), *text(MASKS, r"trained, ranks, tree, (\d+), dense")],
    ),
    Fixed(
        KILLED,
        r"(\d+) times \(`kill -9`\).* every (\d) steps .* (\d+) times\n.* at most (\d) steps are lost, and (\d+) times with "
        r"checkpoints written at once, at most (\d)\.",
        killed,
    ),
    Fixed(
        CHANGES,
        r"(\d+) changes of layout over (\d) to (\d) ranks",
        lambda: [
            changes(),
            *text(CHANGES, r"== set\(range\((\d), 9\)\)"),
            text(CHANGES, r"== set\(range\(1, (\d)\)\)")[0] - 1,
        ],
    ),
    Fixed(CHANGES, r"losses of the next steps\nwithin (\S+) of one process", lambda: [module(CHANGES).RTOL[False]]),
    Fixed(
        WATCH,
        r"(\d+) random layouts and\n(\d+) named ones",
        lambda: [*text(WATCH, r"in_turns\(range\((\d+)\), always=1\)"), len(module(WATCH).LAYOUTS)],
    ),
    Fixed(
        HANGS,
        r"(\d) of (\d) ranks in each of (\d) layouts",
        lambda: [
            *text(HANGS, r"for _ in range\((\d)\)\]\n    found", r"run_ranks\(train_stopping, (\d),"),
            len(module(HANGS).LAYOUTS),
        ],
    ),
    Fixed(
        SLOW,
        r"test_slow.py`; (\d+) times as slow.*: (\d+)\ndraws",
        lambda: [module(SLOW).FACTOR, *text(SLOW, r"in_turns\(range\((\d+)\), 5, always=1\)")],
    ),
    Fixed(LAB, r"The lab's (five) cases", lambda: text(LAB, r'"silent": turn \+ (\d)')),
    Fixed(
        TIMES,
        r"on (\d+) random machines .*\n.* \(the test allows (\S+)\)",
        lambda: text(TIMES, r"for seed in range\((\d+)\)", r"<= (\S+) \* min\(seconds"),
    ),
    Fixed(
        TIMES,
        r"within (\d) % of the events, with disks within (\d+) %",
        lambda: [100 * share for share in reversed(text(TIMES, r"rel=(\S+) if given.offload == .disk. else (\S+)\n"))],
    ),
    Fixed(SCALING, r"\| Perlmutter \| (.*?) \| (.*?) \|", lambda: measured("perlmutter")),
    Fixed(SCALING, r"\| Frontier \| (.*?) \| (.*?) \|", lambda: measured("frontier")),
    Fixed(SCALING, r"\| Alps \| (.*?) \| (.*?) \|", lambda: measured("alps")),
    Fixed(
        PCCL,
        rf"\| ZeRO-3 Frontier 512: 7B, 13B; 1,024: 7B, 13B \| {RATIO}, {RATIO}; {RATIO}, {RATIO} \|",
        lambda: shorter()[:4],
    ),
    Fixed(PCCL, rf"\| ZeRO-3 Perlmutter 256, 512, 1,024 \(7B\) \| {RATIO}, {RATIO}, {RATIO} \|", lambda: shorter()[4:]),
    Fixed(
        OFFLOADING,
        rf"\| 1 A100-40GB \| {RATIO} \|",
        lambda: text(OFFLOADING, r"\[\(1, (\S+)\), \(2, 1.0\), \(4, 1.0\)\]"),
    ),
    Fixed(
        FACTS,
        r"of `transformers` (\S+), (\d+) build .*Of (\d+) with a published plan, (\d+) have at least (\d+) %"
        r".*\n.*, (\S+) % on average",
        adapted_facts,
    ),
    Fixed(
        OPTIONS,
        r"of ([\d,]+) random runs of eight families on 1, 2 and 4 ranks, (\d+) have all pairs of the values of (\d+)\n"
        r"options; each has (\d) steps .* Losses are within (\S+) of one process, norms within\n(\S+) "
        r"\(with bfloat16, (\S+) and (\S+)\)",
        adapted_options,
    ),
    Fixed(ADAPTED_KILLED, r"(\d+) runs of 2 ranks, each killed", lambda: [len(module(ADAPTED_KILLED).CASES)]),
]
WITHOUT_NUMBERS = {
    "tests/plan/test_layers.py": "the fastest of its plans only",
    "tests/parallel/test_context.py": "a quarter, of four ranks; formulas",
    "tests/parallel/dispatch/test_traffic.py": "bytes as computed",
    "tests/state/test_chunk.py": "one tile",
    "tests/state/test_communication.py": "formulas",
    "tests/state/test_update_on_arrival.py": "formulas",
    "tests/state/test_host_memory.py": "the way in which the benchmark's times are found",
    "tests/hub/": "equality",
    "tests/model/foreign/test_layouts.py": "bounds of its own, wider than what was measured",
}
WORDS = {"five": "5"}


def numbers(groups: tuple[str, ...]) -> list[float]:
    """Returns the numbers in groups; a group has one number, or several separated by commas and spaces."""
    return [number(WORDS.get(each, each)) for group in groups for each in group.split(", ")]


@pytest.mark.parametrize("fixed", FIXED, ids=lambda fixed: f"{Path(fixed.test).stem}: {fixed.said[:30]}")
def test_numbers_of_the_results_are_those_of_the_tests(fixed: Fixed) -> None:
    found = re.search(fixed.said, PAGES["results"])
    assert found, f"docs/results.md says no more what is compared with {fixed.test}: {fixed.said}"
    assert numbers(found.groups()) == pytest.approx(fixed.by()), fixed.test


def test_every_test_that_the_results_name_is_compared() -> None:
    named = set(re.findall(r"`(tests/[^`]*)`", PAGES["results"]))
    assert named == {fixed.test for fixed in FIXED} | WITHOUT_NUMBERS.keys()


def spans(page: str) -> Iterator[str]:
    """Returns the inline code of a page."""
    return iter(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_the_pages_name_exist(page: str) -> None:
    """Files on the pages exist: paths start at the root or at `optimus/`, links at `docs/`."""
    paths = {
        word
        for span in spans(page)
        for word in span.split()
        if re.fullmatch(r"[\w./-]+/|[\w./-]*\w\.(py|yaml|csv)", word)
    }
    links = set(re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGES[page]))
    assert len(paths) > 15
    places = {
        path: [ROOT, ROOT / "optimus", *([] if "/" in path[:-1] else (ROOT / "optimus").glob("*"))] for path in paths
    }
    assert not [path for path in paths if not any((place / path).exists() for place in places[path])]
    assert not [link for link in links if not (ROOT / "docs" / link).exists()]
    modules = {span.split()[2] for span in spans(page) if span.startswith("python -m ")}
    assert not [each for each in modules if not list(ROOT.glob(each.replace(".", "/").replace("NAME", "*") + ".py"))]


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_the_pages_name_exist(page: str) -> None:
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {span for span in spans(page) if re.fullmatch(r"test_\w+", span)} <= there


def test_benchmarks_and_their_figures_exist() -> None:
    known = {*BENCHMARKS, *(each.name for each in bench_app.registered_commands)}
    named = {match[1] for match in re.finditer(r"`optimus bench ([\w-]+)", PAGES["results"])}
    assert len(named) > 12
    assert named <= known
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "benchmarks").glob("*.py"))
    of = "|".join(FIGURES)
    figures = {span for span in spans("results") if re.fullmatch(rf"(?:{of})\.\w+|vs_\w+|share_of_\w+", span)}
    assert len(figures) > 20
    assert not [each for each in figures if each not in sources]
    presets = {row["name"] for row in models()}
    assert {span for span in spans("results") if re.fullmatch(r"mula-[\w-]+", span)} <= presets


# Prefixes of figures' names in the JSON of benchmarks.
FIGURES = (
    *(
        "async",
        "broadcast",
        "data",
        "ddp",
        "epso",
        "loader",
        "model_only",
        "offload",
        "samo",
        "save",
        "tokenise",
        "tp2",
        "low_rank",
        "generation",
    ),
    *("train", "zero1", "zero2", "zero3"),
)


@pytest.mark.parametrize(
    ("row", "defines"),
    [
        ("Optimizer step tile by tile", "def _update_tiles"),
        ("bf16 compute, fp32 master weights", "class TrainedChunk"),
        ("Data parallelism with sharded", "def _reduce_scatter_async"),
        ("Gradient reduction overlaps the backward pass", "def reduce_on_arrival"),
        ("Steps with non-finite gradients are skipped", "skipped = result.unfit"),
        ("Warm-up and cosine; clipping only after", "def clip_scale"),
        ("A lease keeps a second run out", "class LeaseCheck"),
        ("Metrics of the whole job; a profile", "class Trace"),
        ("Links between stages are connected", "def connect"),
        ("A cache of parameters by the order of their uses", "class ParameterPrefetcher"),
    ],
)
def test_code_is_in_the_files_that_its_row_names(row: str, defines: str) -> None:
    """The files named in a feature's row define its code; the listed rows have moved before, or may."""
    (line,) = [each for each in PAGES["features"].splitlines() if each.startswith(f"| {row}")]
    files = re.findall(r"`([\w/]+\.py)`", line.split(" | ")[2])
    assert any(re.search(defines, (ROOT / "optimus" / file).read_text(encoding="utf-8")) for file in files), files


def test_rounds_over_gloo_are_said() -> None:
    """PCCL's collectives are described as rounds over Gloo, because the paper's authors ran on GPUs."""
    (line,) = [each for each in PAGES["features"].splitlines() if each.startswith("| Collectives as data")]
    assert "over Gloo" in line


def test_a_pattern_that_finds_nothing_fails() -> None:
    with pytest.raises(AssertionError, match=r"has no seconds=\(x\): the number that a page says stands there no more"):
        text(LOST, r"seconds=(x)")
