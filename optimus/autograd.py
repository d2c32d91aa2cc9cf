"""A decorator for backward passes that autograd must not differentiate again."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from optimus.errors import UserError

R = TypeVar("R")


def once_differentiable(backward: Callable[..., R]) -> Callable[..., R]:
    """Makes the function `backward` raise `UserError` when autograd calls it with `create_graph`.

    torch's decorator of the same name raises no error if the incoming gradient is a constant, as for a loss.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> R:
        if torch.is_grad_enabled():
            raise UserError(
                f"{backward.__qualname__} cannot be differentiated: compute gradients without create_graph, or use a "
                "reference implementation"
            )
        return backward(ctx, *grads)

    return wrapper
