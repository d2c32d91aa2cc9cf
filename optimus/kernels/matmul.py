"""Matrix products in the layout that is fastest on this chip.

A product is called NN, NT or TN after its operands: N lies row by row, T column by column. Libraries of matrix products are
not equally good at the three: on one chip a TN product was found eight times slower than the same one as NN (AxoNN, section
5.1.3). So while a `MatmulForms` measures, every product is timed in all three forms, the transposing of operands included;
once the ranks have agreed (`choose`) a clearly faster one is used, for the same sizes and type. Until then, and without one,
products are made as they come: forms differ in their last bits, and ranks that compute the same must find the same, or a
token may go to other experts on one of them.

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
_LEAST_WORK = 1 << 26  # floating point operations; what is shorter cannot be timed, and does not matter


class MatmulShape(NamedTuple):
    """What a choice of form holds for. `form` is as the operands come; `type` their torch dtype's name."""

    form: Form
    m: int
    l: int
    n: int
    type: str


FormTimings = dict[Form, Timing]


class MatmulForms:
    """The forms in which products are made: `timings` by product and form, as far as they have been measured.

    What is measured here changes no form before it is chosen.
    """

    def __init__(self) -> None:
        self.timings: dict[MatmulShape, FormTimings] = {}
        self.measuring = False
        self.made: set[MatmulShape] = set()  # while measuring, and large enough
        self._chosen: dict[MatmulShape, Form] = {}

    def choose(self, timings: dict[MatmulShape, FormTimings]) -> None:
        """Use these measurements, in place of own ones of the same products; they must be the same on all ranks."""
        self.timings.update(timings)
        self._chosen |= {product: clear_choice(product.form, each) for product, each in timings.items()}

    def form(self, shape: MatmulShape, a_ML: Tensor, b_LN: Tensor) -> Form:
        """The form in which to make a product, which is timed now if it is to be and has not been."""
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
    """A @ B, [M, N], of two matrices of one type, each contiguous or the transpose of a contiguous one.

    With `out` it is written there, or with `add` added; `out` may then be of another type. `rows_vary`: the size that tokens
    give (M, or L where A comes transposed) is another one in every batch; one choice holds up to the next power of two.
    `forms` says in which form to make it.
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
    """A @ B of `matmul`, to be added to an fp32 matrix later: in fp32 where the device does not round it first, else in
    their type."""
    if a_ML.dtype.itemsize > 2 or not _adds_wide(a_ML.device.type):
        return matmul(a_ML, b_LN, forms=forms)
    out_MN = a_ML.new_zeros(len(a_ML), b_LN.shape[1], dtype=torch.float32)
    return matmul(a_ML, b_LN, out=out_MN, add=True, forms=forms)


@cache
def _adds_wide(device: str) -> bool:
    """Whether a device adds a product to an fp32 matrix as it finds it, without rounding it to the operands' type first."""
    key = torch._C._dispatch_key_for_device(device)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", key)


def form_of(a_ML: Tensor, b_LN: Tensor) -> Form:
    """The form in which two operands come."""
    if not a_ML.is_contiguous():
        return "TN"
    return "NN" if b_LN.is_contiguous() else "NT"


def in_form(form: Form, a_ML: Tensor, b_LN: Tensor) -> tuple[Tensor, Tensor]:
    """The same operands in another form, copied where they are not in it."""
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
    """Of one product in this form, transposing included; on an accelerator all before it is done."""
    began = time.perf_counter()
    torch.mm(*in_form(form, a_ML, b_LN), out=out_MN)
    if out_MN.device.type != "cpu":
        torch.accelerator.synchronize(out_MN.device)
    return time.perf_counter() - began
