"""The benchmark of models larger than the device: a model that fits keeps its speed; a larger one stays within memory
and makes the fewest fetches."""

import pytest

from benchmarks import offload
from benchmarks.offload import Choice, Machine
from optimus.errors import UserError


@pytest.mark.in_turn(4, 5)
def test_rows_and_ratios() -> None:
    found = offload.run(layers=8)
    assert [(row["size"], row["contestant"]) for row in found.rows] == [
        (size, name) for size in offload.SIZES for name in ("ours", "Elixir's rule")
    ]
    for row in found.rows:
        assert row["layers"] == 8 * row["size"]
        assert row["device_gb"] <= 8 * 64e6 * 16 / 1e9 * (1 + 1e-9)
        assert row["host_gb"] == pytest.approx(14 * 64e6 * (row["layers"] - row["states"]) / 1e9)
        assert row["loads"] == row["fewest"]
        if row["size"] <= 1:
            assert (row["share"], row["up_gb"]) == (pytest.approx(1), 0)
    best = {row["size"]: row["share"] for row in found.rows[::2]}
    assert found.ratios["offload.share_at_3x"] == best[3] >= 0.9
    assert found.ratios["offload.loads_vs_optimal"] == 1
    assert all(row["share"] <= best[row["size"]] * 1.001 for row in found.rows)
    assert found.ratios["offload.vs_elixir_rule"] > 1
    ours, fsdp2, *_ = found.more["traffic"]
    # FSDP2 uploads fp32 weights twice per microbatch and offloads fp32 gradients once.
    assert (fsdp2["up"], fsdp2["down"]) == (8, 4)
    assert (ours["up"], ours["down"]) == (2 * (2 - 4 / 12), 2)
    assert found.ratios["offload.fsdp2_bytes_vs_ours"] == pytest.approx(12 / (ours["up"] + 2))


def test_device_bytes_of_several_microbatches_by_depth() -> None:
    """Gradients accumulated on the host take device memory that is independent of depth; each microbatch then sends 2
    bytes per element."""
    for layers in (6, 12):
        there = offload._our_traffic(4, layers, offload._ON_HOST)
        assert (there["device"], there["down"]) == (14, 8)
        here = offload._our_traffic(4, layers)
        assert (here["device"], here["down"]) == (8 + 2 * layers, 2)
        assert here["up"] == there["up"]


def test_elixir_chooses_as_its_code() -> None:
    """Elixir's rule prefers the cache on one rank; for a host with slow updates it prefers resident states."""
    machine = Machine(16 * 24, 0.02, 25e9, 2.2e9)
    assert offload.elixir(machine, 192) == Choice((16 * 24 - 6) // 2, 0)
    assert offload.elixir(machine, 48) == Choice(28, 20)
    slow = machine._replace(updates=1e9)
    assert offload.elixir(slow, 48) == offload.ours(slow, 48) == Choice(5, 23)


def test_a_device_that_is_too_small() -> None:
    with pytest.raises(UserError, match="--layers 3: a device that holds fewer than 4"):
        offload.run(layers=3)
