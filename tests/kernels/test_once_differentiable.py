"""Every autograd function of the package refuses a second derivative, which would be silently wrong."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

import optimus
from optimus.autograd import once_differentiable
from optimus.errors import UserError
from optimus.kernels.linear_cross_entropy import linear_cross_entropy

PACKAGE = Path(optimus.__file__).parent
MARK = once_differentiable(lambda ctx: None).__code__


def functions() -> list[str]:
    """Returns `module:class` for every subclass of autograd's Function in the sources."""
    return [
        f"{'.'.join(path.relative_to(PACKAGE.parent).with_suffix('').parts)}:{node.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if "autograd" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Function") for base in node.bases)
    ]


def test_all_are_found() -> None:
    """The functions that exist after importing all modules are those found in the sources."""
    named = functions()
    for name in named:
        module = name.partition(":")[0]
        if ".triton." in module:
            pytest.importorskip("triton")
        importlib.import_module(module)
    made = {f"{each.__module__}:{each.__qualname__}" for each in descendants(torch.autograd.Function)}
    assert {name for name in made if name.startswith("optimus.")} == set(named)
    assert len(named) >= 15


def descendants(of: type) -> list[type]:
    return [each for child in of.__subclasses__() for each in (child, *descendants(child))]


@pytest.mark.parametrize("name", functions())
def test_is_marked(name: str) -> None:
    module, _, function = name.partition(":")
    if ".triton." in module:
        pytest.importorskip("triton")
    backward = getattr(importlib.import_module(module), function).backward
    assert backward.__code__ is MARK, f"{name}.backward is not once_differentiable"


def test_a_second_derivative_is_refused() -> None:
    """A loss with a gradient penalty is refused: autograd would treat the gradient as a constant."""
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss = linear_cross_entropy(x, w, torch.arange(4))
    with pytest.raises(UserError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(linear_cross_entropy(x, w, torch.arange(4)), (x, w))
