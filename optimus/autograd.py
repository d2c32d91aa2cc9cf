"""What every autograd function of the package has in common: its backward pass is no function to be differentiated."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from optimus.errors import UserError

R = TypeVar("R")


def once_differentiable(backward: Callable[..., R]) -> Callable[..., R]:
    """Refuses the backward pass where a second derivative is prepared (`create_graph`).

    torch's decorator of this name raises later, and not always: where the incoming gradient is a constant, as that of a
    loss is, what a gradient owes to the saved tensors is left out of the second derivative without a word.
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
