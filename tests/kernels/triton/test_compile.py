"""All kernels compile for every chip within its shared memory and registers, on a machine without any of the chips.

Results are cached by a hash of the sources (`helpers.compiled`). The folder in OPTIMUS_TRITON, made by `pip install
--target`, may hold another Triton version.
"""

import ast
import os
from typing import Any

import pytest

from helpers.compiled import ROOT, TARGETS, compiled
from helpers.sweep import in_turns
from optimus.kernels.devices import CHIPS

PRODUCTS = {"_expert_up", "_expert_down_backward", "_grouped_product", "_weight_gradient"}
OTHERS = {
    "_count", "_index", "_row_tiles", "_reduce", "_sum_parts", "_route", "_route_backward", "_rms_norm",
    "_rms_norm_backward", "_rotate", "_sum_rows", "_swiglu", "_swiglu_backward", "_softmax_gradient", "_adamw",
    "_compress", "_expand", "_square_sum", "_add_rows",
}  # fmt: skip
# STREAMS has the narrowest access, in bytes, of kernels that only stream contiguous memory. Masks with arbitrary ends
# would cause access element by element. Kernels of READ_WIDE have at least one wide read.
STREAMS = {"_adamw": 8, "_add_rows": 8, "_swiglu": 8, "_swiglu_backward": 8}
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
# Names of arguments that change from batch to batch.
OF_A_BATCH = {"T", "S", "blocks", "programs", "choices"}
MATRIX = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx90a": "mfma", "gfx942": "mfma"}


def check(target: str, triton: str | None) -> None:
    rows, chip = compiled(target, triton), CHIPS[target]
    assert {row["name"] for row in rows} == PRODUCTS | OTHERS
    for row in rows:
        product = row["name"] in PRODUCTS and row["type"] == "bfloat16"
        assert row["shared"] <= chip.shared_memory, row
        assert row["registers"] <= chip.registers, row
        # Assemblers of some versions spill a single register although many are free.
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
    if row["name"] == "_adamw":  # 16 bytes of weight, m and v once or twice per thread; gradient and copy are narrower
        assert loads == stores, row
        assert loads[16] >= 3, row
        assert sum(loads.values()) <= 7, row
    if row["name"] in READ_WIDE:
        assert max(loads) >= 8, f"scalar: {row}"
    if row["name"] == "_sum_parts":  # stores all results of a thread at once
        assert sum(stores.values()) == 1, f"scalar: {row}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("target", in_turns(TARGETS, len(TARGETS)))
def test_kernels_compile(target: str) -> None:
    pytest.importorskip("triton.backends.amd" if target.startswith("gfx") else "triton.backends.nvidia")
    check(target, None)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("target", in_turns(TARGETS, len(TARGETS)))
def test_kernels_compile_with_another_triton(target: str) -> None:
    folder = os.environ.get("OPTIMUS_TRITON")
    if not folder:
        pytest.skip("OPTIMUS_TRITON names no folder with another Triton")
    check(target, folder)


def test_another_number_of_tokens_compiles_nothing() -> None:
    """No kernel is specialised on numbers that change from batch to batch; `name[grid]` launches a kernel."""
    for file in (ROOT / "optimus" / "kernels" / "triton").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef) and f" {function.name}[" in text:
                changing = OF_A_BATCH & {each.arg for each in function.args.args if each.annotation is None}
                decorators = "".join(map(ast.unparse, function.decorator_list))
                assert all(f"'{name}'" in decorators for name in changing), f"{file.name}: {function.name}"
