"""Matrix products in the operand layout that is fastest on the chip.

A product is called NN, NT or TN after its operands: N is row-major, T is column-major. Libraries are not equally fast at
the three: on one chip a TN product was eight times slower than the same product as NN (AxoNN, section 5.1.3). While a
`MatmulForms` measures, every product is timed in all three forms, including the transposition of operands. Once the ranks
have agreed (`choose`), a clearly faster form is used for the same sizes and dtype. Before that, and without a
`MatmulForms`, products use their operands as given. Forms differ in their last bits, and ranks with the same computation
must get the same result, or a token could go to other experts on one of the ranks.

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
_LEAST_WORK = 1 << 26  # floating point operations; shorter products cannot be timed and do not matter


class MatmulShape(NamedTuple):
    """The key of a choice of form. `form` is the form of the given operands; `type` is the name of their torch dtype."""

    form: Form
    m: int
    l: int
    n: int
    type: str


FormTimings = dict[Form, Timing]


class MatmulForms:
    """Chooses the forms of products. `timings` are the measurements so far, by product and form.

    A measurement changes no form until `choose` is called.
    """

    def __init__(self) -> None:
        self.timings: dict[MatmulShape, FormTimings] = {}
        self.measuring = False
        self.made: set[MatmulShape] = set()  # large enough products seen while measuring
        self._chosen: dict[MatmulShape, Form] = {}

    def choose(self, timings: dict[MatmulShape, FormTimings]) -> None:
        """Uses these measurements, which must be the same on all ranks, in place of this rank's own."""
        self.timings.update(timings)
        self._chosen |= {product: clear_choice(product.form, each) for product, each in timings.items()}

    def form(self, shape: MatmulShape, a_ML: Tensor, b_LN: Tensor) -> Form:
        """Returns the form for a product; while measuring, first times a product that has not been timed."""
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
    """Computes A @ B, [M, N], of two matrices of one dtype, each contiguous or the transpose of a contiguous one.

    With `out`, the product is written there, or added with `add`; `out` may then have another dtype. `rows_vary`: the size
    given by tokens (M, or L if A is transposed) differs between batches, and one choice of form holds up to the next power
    of two. `forms` chooses the form.
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
    """Computes A @ B, to be added to an fp32 matrix later: in fp32 if the device adds unrounded, else in their dtype."""
    if a_ML.dtype.itemsize > 2 or not _adds_wide(a_ML.device.type):
        return matmul(a_ML, b_LN, forms=forms)
    out_MN = a_ML.new_zeros(len(a_ML), b_LN.shape[1], dtype=torch.float32)
    return matmul(a_ML, b_LN, out=out_MN, add=True, forms=forms)


@cache
def _adds_wide(device: str) -> bool:
    """Returns True if a device adds a product to an fp32 matrix without first rounding to the operands' dtype."""
    key = torch._C._dispatch_key_for_device(device)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", key)


def form_of(a_ML: Tensor, b_LN: Tensor) -> Form:
    """Returns the form of two given operands."""
    if not a_ML.is_contiguous():
        return "TN"
    return "NN" if b_LN.is_contiguous() else "NT"


def in_form(form: Form, a_ML: Tensor, b_LN: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the operands in another form; copies those that are not in that form."""
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
    """Returns the seconds of one product in this form, including transposition.

    Waits for all earlier work of an accelerator.
    """
    began = time.perf_counter()
    torch.mm(*in_form(form, a_ML, b_LN), out=out_MN)
    if out_MN.device.type != "cpu":
        torch.accelerator.synchronize(out_MN.device)
    return time.perf_counter() - began
