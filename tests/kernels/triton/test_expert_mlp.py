"""All stages as one function: output and all gradients equal the definition, in edge cases."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, get_args
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.kernels import expert_mlp as operation
from optimus.kernels.activation import Activation, activation_reference
from optimus.kernels.expert_mlp import expert_mlp, expert_mlp_reference
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.step_context import StepContext

pytest.importorskip("triton")

from helpers.rounding import bound, error
from optimus.kernels.triton.tuning import Tiles
from optimus.testing.trial import trial

Random = Callable[..., Tensor]


class Case(NamedTuple):
    T: int
    E: int
    K: int
    H: int
    I: int
    first: int = 0  # the first local expert, of E + first + after experts
    after: int = 0
    candidates: int | None = None  # number of experts that tokens may choose, from the first on


CASES = {
    "plain": Case(T=70, E=4, K=2, H=32, I=16),
    "sizes that no tile divides, K = 3": Case(T=45, E=3, K=3, H=41, I=19),
    "one expert receives everything": Case(T=150, E=5, K=1, H=32, I=16, candidates=1),
    "most experts empty": Case(T=9, E=40, K=2, H=32, I=16),
    "all experts chosen by all": Case(T=20, E=5, K=5, H=32, I=16),
    "one expert": Case(T=33, E=1, K=1, H=32, I=16),
    "one token": Case(T=1, E=4, K=3, H=32, I=16),
    "no tokens": Case(T=0, E=4, K=2, H=32, I=16),
    "the middle of three ranks": Case(T=60, E=3, K=4, H=32, I=16, first=3, after=3),
    "nothing for this rank": Case(T=30, E=3, K=2, H=32, I=16, first=3, candidates=3),
}


@pytest.fixture(params=["preferred tiles", "small tiles by descriptors"])
def tile_sizes(
    request: pytest.FixtureRequest, by_descriptors: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    with ExitStack() as stack:
        if request.param != "preferred tiles":
            small = Tiles(rows=16, columns=32, inner=16, warps=4, stages=2)
            for kernel in ("up", "down", "down_backward", "up_backward", "weight_gradient"):
                stack.enter_context(trial(kernel, small))
            stack.enter_context(by_descriptors())
        yield


def inputs_of(case: Case, random: Random, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Returns (local indices, [x, weights, gate_up, down])."""
    experts = case.first + case.E + case.after
    scores = random(case.T, experts, dtype=torch.float32)[:, : case.candidates]
    indices = scores.topk(case.K).indices - case.first
    indices = indices.masked_fill((indices < 0) | (indices >= case.E), -1)
    shapes = [(case.T, case.H), (case.T, case.K), (case.E, 2 * case.I, case.H), (case.E, case.H, case.I)]
    return indices, [random(*shape, dtype=dtype) for shape in shapes]


def results(
    inputs: list[Tensor], indices: Tensor, choices: int | None = None, kind: Activation = "silu"
) -> list[Tensor]:
    """Returns the output and the gradients of x, weights, gate_up and down."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = expert_mlp(leaves[0], leaves[1], indices, *leaves[2:], choices=choices, kind=kind)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


@pytest.mark.swept("name", "dtype", "tile_sizes")
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(
    name: str, dtype: torch.dtype, tile_sizes: None, random: Random, same_function: Callable[..., None]
) -> None:
    indices, inputs = inputs_of(CASES[name], random, dtype)

    def ours(x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        return expert_mlp(x, weights, indices.int(), *parameters)

    def reference(x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        return expert_mlp_reference(x, weights, indices, *parameters)

    same_function(ours, reference, inputs)


@pytest.mark.swept
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "without bias"])
@pytest.mark.parametrize("kind", get_args(Activation))
@pytest.mark.parametrize("name", ["plain", "sizes that no tile divides, K = 3", "the middle of three ranks"])
def test_activations_and_biases(
    name: str, kind: Activation, biased: bool, dtype: torch.dtype, tile_sizes: None, random: Random,
    same_function: Callable[..., None],
) -> None:  # fmt: skip
    """Every activation is right with and without biases; a third of the values of `clamped_silu` are clamped.

    The reference also takes the stored, rounded pre-activation: one value in a thousand is rounded across a limit,
    where the gradient jumps.
    """
    indices, inputs = inputs_of(CASES[name], random, dtype)
    biases = [random(len(inputs[2]), inputs[2].shape[1], dtype=dtype)] if biased else []

    def ours(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
        return expert_mlp(x, weights, indices, gate_up, down, kind=kind, bias_EJ=bias)

    def reference(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
        with mock.patch.object(operation, "activation_reference", of_stored):
            return expert_mlp_reference(x, weights, indices, gate_up, down, bias, kind)

    def of_stored(z: Tensor, *rest: Any, **named: Any) -> Tensor:
        return activation_reference(z + (z.to(dtype) - z).detach(), *rest, **named)

    same_function(ours, reference, [*inputs, *biases])


def test_twice_the_same_bits(random: Random, dtype: torch.dtype, reading: str) -> None:
    indices, inputs = inputs_of(CASES["sizes that no tile divides, K = 3"], random, dtype)
    assert all(a.equal(b) for a, b in zip(results(inputs, indices), results(inputs, indices)))


@pytest.mark.swept("dtype")
@pytest.mark.parametrize("name", CASES)
def test_as_many_rows_as_there_are_choices_here(
    name: str, dtype: torch.dtype, tile_sizes: None, random: Random
) -> None:
    """A known number of local choices limits the memory; results differ by the order of additions only.

    Other tiles give other products in NumPy, whose order depends on the processor. A weight's gradient sums over its
    expert's rows, after two forward and two backward products.
    """
    case = CASES[name]
    indices, inputs = inputs_of(case, random, dtype)
    known = results(inputs, indices, int((indices >= 0).sum()))
    allowed = bound(dtype, case.H, case.I, case.H, case.I, max(case.T, 1) * case.K, roundings=4)
    for ours, theirs in zip(known, results(inputs, indices), strict=True):
        assert error(ours, theirs) <= allowed


def test_weights_may_be_gone_when_their_last_gradient_is_added(random: Random, dtype: torch.dtype) -> None:
    """Weights may be freed before their last gradient is added, as sharded parameters are."""
    indices, inputs = inputs_of(CASES["plain"], random, dtype)
    x, weights, *parameters = (value.requires_grad_() for value in inputs)
    _, x_grad, *_ = results(inputs, indices)
    added: list[Tensor] = []

    class Releasing(RecordingBuffer):
        def close(self) -> None:
            added.append(self.buffer)
            for parameter in parameters if len(added) == 2 else ():
                parameter.data.fill_(torch.nan)

    up, down = (Releasing(torch.zeros_like(p, dtype=torch.float32)) for p in parameters)
    up.buffer = up.buffer.unflatten(1, (2, -1))
    expert_mlp(x, weights, indices, *parameters, (up, down)).backward(torch.ones_like(x))
    assert x.grad is not None
    assert x.grad.equal(x_grad)


class RecordingBuffer(GradientBuffer):
    """A buffer with initial contents that records its calls."""

    def __init__(self, buffer: Tensor, step: StepContext | None = None) -> None:
        super().__init__(step)
        self.buffer, self.asked = buffer, list[str]()

    def open(self) -> Tensor:
        self.asked.append("open")
        return self.buffer

    def close(self) -> None:
        self.asked.append("close")

    def found(self) -> None:
        self.asked.append("found")


@pytest.mark.swept
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("wide", [True, False], ids=["fp32 buffer", "buffer of its type"])
def test_gradients_are_added_to_buffers(
    random: Random, close: Callable[..., None], dtype: torch.dtype, wide: bool, which: tuple[bool, bool]
) -> None:
    indices, inputs = inputs_of(CASES["plain"], random, dtype)
    x, weights, *parameters = (value.requires_grad_() for value in inputs)
    _, x_grad, weights_grad, *expected = results(inputs, indices)
    before = [random(*p.shape, dtype=torch.float32 if wide else dtype) for p in parameters]
    buffers = [RecordingBuffer(b.clone().unflatten(1, (2, -1))) if use else None for b, use in zip(before, which)]
    y = expert_mlp(x, weights, indices, *parameters, (buffers[0], buffers[1]))
    torch.autograd.backward(y, torch.ones_like(y))
    assert x.grad is not None
    assert x.grad.equal(x_grad)
    assert weights.grad is not None
    assert weights.grad.equal(weights_grad)
    for parameter, buffer, b, gradient in zip(parameters, buffers, before, expected):
        if buffer is None:
            assert parameter.grad is not None
            assert parameter.grad.equal(gradient)
        else:
            assert parameter.grad is None
            assert buffer.asked == ["found", "open", "close"]
            close(buffer.buffer.flatten(1, 2).to(dtype), b.double() + gradient.double())


def test_gradients_that_are_deferred(random: Random, dtype: torch.dtype) -> None:
    """Deferred gradients have the same bits; before their addition, the buffers are only told that gradients will
    follow."""
    indices, inputs = inputs_of(CASES["sizes that no tile divides, K = 3"], random, dtype)
    found, step = [], StepContext()
    for later in (False, True):
        x, weights, *parameters = (value.detach().clone().requires_grad_() for value in inputs)
        buffers = [RecordingBuffer(torch.ones_like(p).unflatten(1, (1, -1)), step) for p in parameters]
        y = expert_mlp(x, weights, indices, *parameters, (buffers[0], buffers[1]))
        if later:
            with step.deferring() as deferred:
                torch.autograd.backward(y, torch.ones_like(y))
            assert all(buffer.asked == ["found"] and bool((buffer.buffer == 1).all()) for buffer in buffers)
            for add in deferred:
                add()
        else:
            torch.autograd.backward(y, torch.ones_like(y))
        found.append([x.grad, weights.grad, *(buffer.buffer for buffer in buffers)])
    assert all(a is not None and a.equal(b) for a, b in zip(*found))


@pytest.mark.swept
@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", get_args(Activation))
def test_nothing_leaks_from_what_is_skipped(
    poison: float, kind: Activation, dtype: torch.dtype, reading: str, random: Random, device: torch.device
) -> None:
    """Non-finite values of skipped choices change no bit: tokens 0 and 5 choose no local expert, token 1 one of two."""
    indices = torch.tensor([[-1, -1], [0, -1], [1, 0], [3, 1], [-1, 3], [-1, -1]], device=device)
    shapes = [(6, 16), (6, 2), (4, 32, 16), (4, 16, 16)]
    inputs = [random(*shape, dtype=dtype) for shape in shapes]
    inputs[2][2] = inputs[3][2] = poison  # an expert that no token chose
    clean = results(inputs, indices, kind=kind)
    inputs[0][[0, 5]] = poison
    inputs[1][indices < 0] = poison
    assert all(a.equal(b) and a.isfinite().all() for a, b in zip(results(inputs, indices, kind=kind), clean))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_token_that_is_not_finite_reaches_its_own_experts_only(
    dtype: torch.dtype, reading: str, random: Random, device: torch.device
) -> None:
    indices = torch.tensor([[0, 1], [1, 2], [2, 3]], device=device)
    inputs = [random(*shape, dtype=dtype) for shape in [(3, 16), (3, 2), (4, 32, 16), (4, 16, 16)]]
    inputs[0][0] = torch.inf
    y, x_grad, weight_grad, *parameter_grads = results(inputs, indices)
    assert not y[0].isfinite().any()
    for of_tokens in (y, x_grad, weight_grad):
        assert of_tokens[1:].isfinite().all()
    for grad in parameter_grads:
        assert grad[2:].isfinite().all()


def test_saved_for_backward_are_x_z_weights_and_the_index(random: Random) -> None:
    case = Case(T=70, E=4, K=2, H=32, I=16)
    indices, inputs = inputs_of(case, random, torch.float32)
    x, weights, *parameters = (value.requires_grad_() for value in inputs)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        expert_mlp(x, weights, indices, *parameters)
    of_tokens = sum(saved.values()) - sum(p.nbytes for p in parameters)
    index = 2 * case.K * 4  # bytes of a token's choices and positions
    table = 4 * (case.E + 1) + 8 * case.T * case.K  # at most one tile per row
    assert of_tokens <= case.T * (4 * (case.H + case.K * 2 * case.I + case.K) + index) + table


class NoWaiting(TorchDispatchMode):
    """Refuses operators that make the host wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "_unique2", "equal", "is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", get_args(Activation))
def test_the_host_never_waits_for_the_device(kind: Activation, random: Random) -> None:
    indices, inputs = inputs_of(CASES["plain"], random, torch.float32)
    with pytest.raises(AssertionError), NoWaiting():
        indices.sum().item()
    with NoWaiting():
        results(inputs, indices, kind=kind)
