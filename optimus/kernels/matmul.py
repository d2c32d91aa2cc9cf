"""Computes matmuls in the operand forms that measurements on the chip choose (AxoNN, section 5.1.3).

The form of a matmul (NN, NT or TN) gives the layouts of its two operands: N is row-major, T is column-major. Results of
different forms may differ in their last bits.

Legend: A [M, L] @ B [L, N] -> [M, N].
"""

import time
from functools import cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus.measurements import Timing, clear_choice, in_turn
from optimus.step_context import Forms

Form = Literal["NN", "NT", "TN"]

FORMS: tuple[Form, ...] = ("NN", "NT", "TN")
_LEAST_WORK = 1 << 26  # minimum number of floating-point operations of a matmul that `MatmulForms` times


class MatmulShape(NamedTuple):
    """The properties of a matmul by which `MatmulForms` chooses a form.

    `form` is the form of the given operands. `type` is the name of the operands' torch dtype.
    """

    form: Form
    m: int
    l: int
    n: int
    type: str


FormTimings = dict[Form, Timing]


class MatmulForms:
    """Chooses the operand forms of matmuls. `timings` are the measurements, by matmul and form."""

    def __init__(self) -> None:
        self.timings: dict[MatmulShape, FormTimings] = {}
        self.measuring = False
        self.made: set[MatmulShape] = set()  # shapes of the large matmuls that ran while `measuring` was True
        self._chosen: dict[MatmulShape, Form] = {}

    def choose(self, timings: dict[MatmulShape, FormTimings]) -> None:
        """Chooses forms by `timings`, which must be equal on all ranks."""
        self.timings.update(timings)
        self._chosen |= {product: clear_choice(product.form, each) for product, each in timings.items()}

    def form(self, shape: MatmulShape, a_ML: Tensor, b_LN: Tensor) -> Form:
        """Returns the form chosen by `choose`, or else the operands' form.

        While `measuring` is True, also times a large matmul that has no timings yet.
        """
        if self.measuring and 2 * shape.m * shape.l * shape.n >= _LEAST_WORK:
            self.made.add(shape)
            if shape not in self.timings:
                out = a_ML.new_empty(len(a_ML), b_LN.shape[1])
                self.timings[shape] = in_turn({form: partial(_seconds, form, a_ML, b_LN, out) for form in FORMS})
        return self._chosen.get(shape, shape.form)


def matmul(
    a_ML: Tensor,
    b_LN: Tensor,
    *,
    out: Tensor | None = None,
    add: bool = False,
    rows_vary: bool = False,
    forms: Forms | None = None,
) -> Tensor:
    """Computes A @ B, [M, N]. Both matrices must have the same dtype.

    With `out`, writes the result to `out`. With `out` and `add`, adds the result to `out`, which may have another
    dtype. With `rows_vary`, the choice of a form rounds the number of rows (M, or L in form TN) up to a power of two.
    """
    if forms is not None:
        form = form_of(a_ML, b_LN)
        chosen = forms.form(_shape(form, a_ML, b_LN, rows_vary), a_ML, b_LN)
        if chosen != form:
            a_ML, b_LN = in_form(chosen, a_ML, b_LN)
    if out is None:
        return torch.mm(a_ML, b_LN)
    if not add:
        return torch.mm(a_ML, b_LN, out=out)
    if out.dtype == a_ML.dtype:
        return torch.addmm(out, a_ML, b_LN, out=out)
    if out.dtype == torch.float32 and _adds_wide(a_ML.device.type):
        return torch.ops.aten.addmm.dtype_out(out, a_ML, b_LN, out.dtype, out=out)
    return out.add_(torch.mm(a_ML, b_LN))


def wide_matmul(a_ML: Tensor, b_LN: Tensor, forms: Forms | None = None) -> Tensor:
    """Computes A @ B in the operands' dtype, or in fp32 for 16-bit operands if the device supports an fp32 result."""
    if a_ML.dtype.itemsize > 2 or not _adds_wide(a_ML.device.type):
        return matmul(a_ML, b_LN, forms=forms)
    out_MN = a_ML.new_zeros(len(a_ML), b_LN.shape[1], dtype=torch.float32)
    return matmul(a_ML, b_LN, out=out_MN, add=True, forms=forms)


@cache
def _adds_wide(device: str) -> bool:
    """Returns True if a device can add a matmul of 16-bit operands to an fp32 matrix without rounding the product."""
    key = torch._C._dispatch_key_for_device(device)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", key)


def form_of(a_ML: Tensor, b_LN: Tensor) -> Form:
    """Returns the form of two operands; TN for any A that is not contiguous."""
    if not a_ML.is_contiguous():
        return "TN"
    return "NN" if b_LN.is_contiguous() else "NT"


def in_form(form: Form, a_ML: Tensor, b_LN: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both operands, and copies an operand whose memory layout differs from `form`."""
    a_ML = a_ML.T.contiguous().T if form == "TN" else a_ML.contiguous()
    b_LN = b_LN.T.contiguous().T if form == "NT" else b_LN.contiguous()
    return a_ML, b_LN


def _shape(form: Form, a_ML: Tensor, b_LN: Tensor, rows_vary: bool) -> MatmulShape:
    (m, l), n = a_ML.shape, b_LN.shape[1]
    if rows_vary and form == "TN":
        l = 1 << (l - 1).bit_length()
    elif rows_vary:
        m = 1 << (m - 1).bit_length()
    return MatmulShape(form, m, l, n, str(a_ML.dtype).removeprefix("torch."))


def _seconds(form: Form, a_ML: Tensor, b_LN: Tensor, out_MN: Tensor) -> float:
    began = time.perf_counter()
    torch.mm(*in_form(form, a_ML, b_LN), out=out_MN)
    if out_MN.device.type != "cpu":
        torch.accelerator.synchronize(out_MN.device)
    return time.perf_counter() - began
