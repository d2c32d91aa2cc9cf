"""All kernels compile for every chip within its shared memory and registers, on a machine that has none.

What is compiled is kept by a hash of the sources (`helpers.compiled`). Another Triton than the installed one is that of the
folder OPTIMUS_TRITON, as `pip install --target` makes it.
"""

import os
from typing import Any

import pytest

from helpers.compiled import TARGETS, compiled
from helpers.sweep import in_turns
from optimus.kernels.devices import CHIPS

PRODUCTS = {"_expert_up", "_expert_down_backward", "_grouped_product", "_weight_gradient"}
OTHERS = {
    "_count", "_index", "_row_tiles", "_reduce", "_sum_parts", "_route", "_route_backward", "_rms_norm",
    "_rms_norm_backward", "_rotate", "_sum_rows", "_swiglu", "_swiglu_backward", "_softmax_gradient", "_adamw",
    "_compress", "_expand", "_square_sum",
}  # fmt: skip
# What lies in order is read and written many bytes at a time, not element by element, which a mask that may end anywhere
# makes of it. The narrowest access of kernels that do nothing else; others read at least something so.
STREAMS = {"_adamw": 8, "_swiglu": 8, "_swiglu_backward": 8}
READ_WIDE = {
    "_compress",
    "_route",
    "_route_backward",
    "_rms_norm",
    "_rms_norm_backward",
    "_softmax_gradient",
    "_rotate",
    "_square_sum",
}
MATRIX = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx90a": "mfma", "gfx942": "mfma"}


def check(target: str, triton: str | None) -> None:
    rows, chip = compiled(target, triton), CHIPS[target]
    assert {row["name"] for row in rows} == PRODUCTS | OTHERS
    for row in rows:
        product = row["name"] in PRODUCTS and row["type"] == "bfloat16"
        assert row["shared"] <= chip.shared_memory, row
        assert row["registers"] <= chip.registers, row
        # The assembler of some versions puts a single register aside where many are free.
        assert row["spilled"] <= (0 if row["name"] in PRODUCTS else 4), f"registers do not suffice: {row}"
        assert not product or row[MATRIX[target]], f"no matrix instructions: {row}"
        assert not product or bool(row["tma"]) == chip.tma, f"tiles by the copying unit, or not: {row}"
        check_widths(row)
        if row["name"] == "_weight_gradient":
            by_memory = row["constants"]["ACCUMULATE"] and row["constants"]["IN_MEMORY"]
            assert bool(row["added"]) == by_memory, f"fp32 gradients are added by the memory: {row}"


def check_widths(row: dict[str, Any]) -> None:
    loads, stores = ({int(size): count for size, count in row[what].items()} for what in ("loads", "stores"))
    if (least := STREAMS.get(row["name"])) is not None:
        assert min(*loads, *stores) >= least, f"scalar: {row}"
    if (
        row["name"] == "_adamw"
    ):  # weight, m and v in 16 bytes, once or twice a thread; the gradient and the copy are narrower
        assert loads == stores, row
        assert loads[16] >= 3, row
        assert sum(loads.values()) <= 7, row
    if row["name"] in READ_WIDE:
        assert max(loads) >= 8, f"scalar: {row}"
    if row["name"] == "_sum_parts":  # all results of a thread at once
        assert sum(stores.values()) == 1, f"scalar: {row}"


@pytest.mark.slow
@pytest.mark.parametrize("target", in_turns(TARGETS, len(TARGETS)))
def test_kernels_compile(target: str) -> None:
    pytest.importorskip("triton.backends.amd" if target.startswith("gfx") else "triton.backends.nvidia")
    check(target, None)


@pytest.mark.slow
@pytest.mark.parametrize("target", in_turns(TARGETS, len(TARGETS)))
def test_kernels_compile_with_another_triton(target: str) -> None:
    folder = os.environ.get("OPTIMUS_TRITON")
    if not folder:
        pytest.skip("OPTIMUS_TRITON names no folder with another Triton")
    check(target, folder)
