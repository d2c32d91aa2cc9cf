"""The decorator of all autograd functions of the package, whose backward passes cannot be differentiated."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from optimus.errors import UserError

R = TypeVar("R")


def once_differentiable(backward: Callable[..., R]) -> Callable[..., R]:
    """Makes a backward pass raise `UserError` when a second derivative is prepared (`create_graph`).

    torch's decorator of this name raises later, and not always: if the incoming gradient is a constant, like that of a loss,
    the dependence of a gradient on the saved tensors is silently left out of the second derivative.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> R:
        if torch.is_grad_enabled():
            raise UserError(
                f"{backward.__qualname__} has no derivative itself: take gradients without create_graph, or of a reference "
                "implementation"
            )
        return backward(ctx, *grads)

    return wrapper
