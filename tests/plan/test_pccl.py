"""Predicted times of PCCL and of the vendors' libraries are near those that PCCL's authors published.

Sources: the AxoNN dissertation, sections 6.3.1 and 6.3.2; PCCL, arXiv 2504.18658 v2; the authors' logs of the vendors'
libraries (github.com/axonn-ai/sc2025-pccl-reproducer, data/). The files `machines/frontier.yaml`,
`machines/perlmutter.yaml` and `profiles.yaml` name the measurements to which each constant is fitted.
"""

from functools import cache
from statistics import median

import pytest

from benchmarks.published.jobs import job
from benchmarks.published.profiles import load_profile
from optimus.comm.algorithms import CollectiveKind
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.mesh.strided import StridedGroup
from optimus.plan.collectives import collective_seconds
from optimus.plan.machine import Library, Protocol, load_machine
from optimus.plan.step import step_time

approx = pytest.approx
MIB = 2**20


def seconds(name: str, ranks: int, megabytes: float, by: str, kind: CollectiveKind = "all_gather") -> float:
    return collective_seconds(kind, megabytes * MIB, StridedGroup(ranks), load_machine(name), by)  # type: ignore[arg-type]


# ---- The vendors' libraries ----

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # MiB of the whole tensor
LOGGED = {  # milliseconds of all-gathers (and reduce-scatters) of so many ranks
    "frontier": [
        (32, (0.715, 1.004, 1.005, 1.018, 1.123, 1.253, 1.863, 3.62, 7.194, 14.437)),
        (128, (1.759, 2.667, 2.669, 3.835, 3.835, 3.943, 4.408, 4.939, 7.445, 14.736)),
        (512, (5.362, 6.099, 7.047, 10.986, 15.232, 16.146, 15.259, 15.643, 17.5, 22.282)),
        (32, (0.605, 0.902, 0.901, 0.926, 1.044, 1.15, 1.848, 3.465, 6.666, 13.096)),
        (512, (3.043, 4.049, 5.365, 10.614, 15.041, 17.286, 13.768, 16.671, 15.787, 17.311)),
        (1024, (3.29, 4.824, 6.864, 9.708, 16.148, 27.202, 27.608, 27.507, 29.642, 31.625)),
    ],
    "perlmutter": [
        (32, (0.367, 0.509, 0.7, 0.79, 0.848, 1.342, 2.274, 4.365, 8.326, 16.52)),
        (128, (0.958, 1.347, 1.501, 1.815, 2.513, 2.885, 3.606, 4.846, 9.276, 18.02)),
        (512, (3.71, 3.904, 3.741, 5.273, 5.693, 6.667, 9.728, 11.08, 12.848, 20.074)),
        (1024, (7.037, 6.919, 7.054, 7.978, 10.05, 10.837, 13.054, 18.554, 20.846, 26.56)),
    ],
}


@pytest.mark.parametrize("name", LOGGED)
def test_the_ring_of_the_vendors_library(name: str) -> None:
    """A ring's latency grows with the ranks, until blocks are so large that the links hide the latency."""
    errors = {
        (ranks, size): abs(1e3 * seconds(name, ranks, size, "library") / measured - 1)
        for ranks, row in LOGGED[name]
        for size, measured in zip(SIZES, row, strict=True)
    }
    assert median(errors.values()) < 0.08
    large = sorted(error for (_, size), error in errors.items() if size >= 16)  # the sizes of training
    assert large[int(0.9 * len(large))] < 0.25
    plain = [abs(1e3 * seconds(name, r, s, "ring") / t - 1) for r, row in LOGGED[name] for s, t in zip(SIZES, row)]
    assert median(plain) > 3 * median(errors.values())  # a prediction from the machine's latency and bandwidth alone


def test_a_step_hides_latency_behind_what_it_sends_and_the_fastest_protocol_is_taken() -> None:
    machine = load_machine("perlmutter")
    library = Library(
        protocols=[Protocol(step=3.0, bandwidth=25.0), Protocol(step=30.0, bandwidth=1e3)],
        few_nodes=4,
        crowded=[Protocol(step=6.0, bandwidth=1e9)],
    )
    machine = machine.model_copy(update={"network": machine.network.model_copy(update={"library": library})})
    # 7 steps of 8 ranks on 2 nodes: of 100 bytes with 4 seconds on the links, or of 40,000 with 40
    assert collective_seconds("all_gather", 800.0, StridedGroup(8), machine, "library") == approx(7 * 5.0)
    assert collective_seconds("reduce_scatter", 320000.0, StridedGroup(8), machine, "library") == approx(7 * 50.0)
    # Two such rings share a node's adapters: each block of 100 bytes takes 8 seconds.
    assert collective_seconds("all_gather", 800.0, StridedGroup(8, 2), machine, "library") == approx(
        7 * (9 + 64) ** 0.5
    )
    # 32 ranks on 8 nodes
    assert collective_seconds("all_gather", 800.0, StridedGroup(32), machine, "library") == approx(31 * 6.0)
    # Groups on a node, and other kinds, have the times of the plain ring.
    for kind, place in (
        ("all_gather", StridedGroup(4)),
        ("all_reduce", StridedGroup(8)),
        ("all_to_all", StridedGroup(8)),
    ):
        both = (collective_seconds(kind, 1e6, place, machine, by) for by in ("library", "ring"))  # type: ignore[arg-type]
        assert len(set(both)) == 1


def test_pccl_goes_node_by_node_in_a_logarithm_of_rounds() -> None:
    machine = load_machine("perlmutter")
    doubling = Protocol(step=1.0, bandwidth=1e9)
    machine = machine.model_copy(update={"network": machine.network.model_copy(update={"doubling": doubling})})
    size = 32e9
    on_node = collective_seconds("all_gather", size, StridedGroup(4), machine)
    copied = machine.memory_seconds(2 * size)
    # 16 nodes: 4 rounds, in which a rank gets 15/16 of its quarter of 32 GB at a quarter of 1 GB/s
    expected = 4 * 1.0 + 30.0 + on_node + copied
    assert collective_seconds("all_gather", size, StridedGroup(64), machine, "pccl") == approx(expected)
    # four groups at once with one rank per node: nothing on a node, and no reordering
    assert collective_seconds("all_gather", size, StridedGroup(16, 4), machine, "pccl") == approx(4 * 1.0 + 120.0)
    # 12 nodes take as many rounds as 16.
    assert collective_seconds("all_gather", 0.1, StridedGroup(12, 4), machine, "pccl") == approx(4.0, rel=1e-6)


@pytest.mark.parametrize(("by", "needs"), [("library", r"network\.library"), ("pccl", r"network\.doubling")])
def test_a_machine_that_does_not_say_how_fast_they_are(by: str, needs: str) -> None:
    with pytest.raises(UserError, match=rf"profile\.collectives={by}: machine aurora has no {needs}"):
        seconds("aurora", 24, 1.0, by)


def test_crowded_protocols_go_with_the_nodes_from_which_on_they_count() -> None:
    protocol = Protocol(step=1.0, bandwidth=1.0)
    with pytest.raises(ValueError, match="few_nodes need each other"):
        Library(protocols=[protocol], crowded=[protocol])
    with pytest.raises(ValueError, match="few_nodes need each other"):
        Library(protocols=[protocol], few_nodes=2)


# ---- Speed-ups of PCCL over the vendors' libraries ----

SPEEDUPS = [  # machine, ranks, MiB, lowest and highest published speed-up
    ("frontier", 32, 1024, 0.52, 0.55),
    ("frontier", 2048, 16, 30, 33),  # more than 30; v2 has at most 33 for an all-gather
    ("frontier", 2048, 32, 30, 33),
    ("frontier", 2048, 64, 30, 33),
    ("frontier", 2048, 512, 11.4, 11.4),
    ("frontier", 2048, 1024, 6.2, 7.0),
    ("perlmutter", 32, 1024, 0.67, 0.67),  # NCCL is nearly 1.5 times faster
    ("perlmutter", 1024, 16, 3, 5),
    ("perlmutter", 1024, 32, 3, 5),
    ("perlmutter", 2048, 16, 3, 5.7),  # v2: up to 5.7
    ("perlmutter", 2048, 32, 3, 5),
    ("perlmutter", 1024, 64, 1.3, 4.6),
    ("perlmutter", 1024, 128, 1.3, 4.6),
    ("perlmutter", 2048, 64, 1.3, 4.6),
    ("perlmutter", 2048, 128, 2, 3),
    ("perlmutter", 2048, 256, 2, 3),
    ("perlmutter", 2048, 512, 2, 3),
]


@pytest.mark.parametrize(("name", "ranks", "megabytes", "low", "high"), SPEEDUPS)
def test_speedups_over_the_vendors_libraries(name: str, ranks: int, megabytes: int, low: float, high: float) -> None:
    """Speed-ups of all-gathers and reduce-scatters are within 25 % of the published ones."""
    kinds: list[CollectiveKind] = ["all_gather", "reduce_scatter"]
    for kind in kinds:
        times = [seconds(name, ranks, megabytes, by, kind) for by in ("library", "pccl")]
        found = times[0] / times[1]
        print(name, ranks, megabytes, kind, [round(1e3 * each, 2) for each in times], round(found, 2))
        assert low / 1.25 < found < high * 1.25


def test_the_largest_speedups() -> None:
    """Speed-ups reach 33 on 2,048 GCDs of Frontier and 5.7 on Perlmutter (version 2, all-gathers).

    The vendor's ring is faster where latency is low: large messages on few ranks.
    """
    for name, largest in (("frontier", 33), ("perlmutter", 5.7)):
        found = {
            (ranks, size): seconds(name, ranks, size, "library") / seconds(name, ranks, size, "pccl")
            for ranks in (32, 64, 128, 256, 512, 1024, 2048)
            for size in SIZES[3:]
        }
        assert max(found.values()) == approx(largest, rel=0.25)
        assert all(ranks == 2048 for ranks, size in found if found[ranks, size] > 0.9 * max(found.values()))
        assert all(found[ranks, 1024] < 1 for ranks in (32, 64, 128, 256))


# ---- ZeRO-3 of DeepSpeed with PCCL and with the vendors' libraries ----

SHAPES = {"7B": (32, 4096, 32), "13B": (40, 5120, 40)}  # layers, hidden, heads
CONTEXT, BATCH = 2048, 2048  # not published; assumed: a sequence for each of the most GCDs
SHORTER = [  # machine, model, ranks, ratio of the batch times with PCCL and with the vendor's library
    ("frontier", "7B", 512, 0.70),  # "reduces batch time by nearly 30 %"; the other rows are read likewise
    ("frontier", "13B", 512, 0.84),
    ("frontier", "7B", 1024, 0.40),
    ("frontier", "13B", 1024, 0.61),
    ("perlmutter", "7B", 256, 1.06),  # the source does not name the model on Perlmutter
    ("perlmutter", "7B", 512, 0.93),
    ("perlmutter", "7B", 1024, 0.80),
]


@cache
def batch_seconds(name: str, size: str, ranks: int, by: str) -> float:
    layers, hidden, heads = SHAPES[size]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": 4 * hidden, "vocab": 51200}
    model = ModelConfig.model_validate({"family": "gpt2", "learned_positions": CONTEXT} | sizes)
    machine = load_machine(name)
    profile = load_profile(f"deepspeed-{name}").model_copy(update={"collectives": by})
    mesh = Mesh(dp=ranks, ranks_per_node=machine.ranks_per_node)
    how = {"sequence": False, "shard": "parameters", "recompute": {"block"}}
    return step_time(job(model, machine, mesh, CONTEXT, BATCH // ranks, 1, profile, **how)).seconds


@pytest.mark.parametrize(("name", "size", "ranks", "published"), SHORTER)
def test_batch_times_of_zero_3(name: str, size: str, ranks: int, published: float) -> None:
    times = [batch_seconds(name, size, ranks, by) for by in ("library", "pccl")]
    print(name, size, ranks, [round(each, 2) for each in times], round(times[1] / times[0], 3))
    assert 1 / 1.25 < times[1] / times[0] / published < 1.25


def test_strong_scaling_of_zero_3_on_frontier() -> None:
    """Both libraries are as fast on 128 and 256 GCDs; RCCL is slower on 1,024 than on 512, while PCCL keeps scaling.

    PCCL saves 70 to 80 % of the batch time on 2,048. The prediction is more favourable.
    """
    every = (128, 256, 512, 1024, 2048)
    for size in SHAPES:
        library, pccl = ([batch_seconds("frontier", size, ranks, by) for ranks in every] for by in ("library", "pccl"))
        print(size, [[round(each, 2) for each in times] for times in (library, pccl)])
        assert pccl[:2] == approx(library[:2], rel=0.1)
        assert pccl == sorted(pccl, reverse=True)
        assert 0.7 < 1 - pccl[-1] / library[-1] < 0.95
    assert batch_seconds("frontier", "7B", 1024, "library") > batch_seconds("frontier", "7B", 512, "library")
