"""Deferred weight gradients have the same bits as immediate ones, and nothing is added before their turn."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from helpers.rules import plan_chunks, state_spec
from optimus.comm import Group, Groups
from optimus.config.tree import StateConfig
from optimus.kernels.expert_mlp import expert_mlp
from optimus.kernels.gradient_buffer import TensorBuffer
from optimus.kernels.linear import MatrixProduct, linear
from optimus.kernels.rms_norm import rms_norm
from optimus.mesh import Layout, Mesh
from optimus.parallel.tensor import SplitProduct
from optimus.state.chunk import TrainedChunk
from optimus.state.placement import ChunkContext
from optimus.state.transfers import transfers
from optimus.step_context import StepContext
from optimus.testing import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
TYPES = [(FP32, FP32), (BF16, BF16), (BF16, FP32)]  # (weights, gradients)
Function = Callable[..., Tensor]


def normal(seed: int, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def at_once_and_later(
    function: Function, inputs: Sequence[Sequence[Tensor]], weights: Sequence[Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns all gradients after one pass for each of `inputs`: with immediate, and with deferred weight gradients.

    `function` takes the inputs of a pass, the weights and their buffers.
    """
    found = []
    for later in (False, True):
        step = StepContext()
        buffers = [TensorBuffer(torch.ones(w.shape, dtype=dtype), step) for w in weights]
        put_off: list[Callable[[], None]] = []
        gradients = []
        for seed, given in enumerate(inputs):
            leaves = [x.clone().requires_grad_() for x in given]
            parameters = [w.clone().requires_grad_() for w in weights]
            y = function(*leaves, *parameters, buffers)
            if later:
                with step.deferring() as deferred:
                    y.backward(normal(seed, *y.shape, dtype=y.dtype))
                put_off += deferred
                assert all(bool((buffer.grad == 1).all()) and buffer.added == 0 for buffer in buffers)
            else:
                y.backward(normal(seed, *y.shape, dtype=y.dtype))
            assert all(w.grad is None for w in parameters)
            gradients += [x.grad for x in leaves if x.grad is not None]
        assert len(put_off) == (len(weights) * len(inputs) if later else 0)
        for add in put_off:
            add()
        assert [buffer.added for buffer in buffers] == [len(inputs)] * len(buffers)
        assert all(bool((buffer.grad != 1).any()) for buffer in buffers)
        found.append([*gradients, *(buffer.grad for buffer in buffers)])
    return found[0], found[1]


def same_bits(found: tuple[list[Tensor], list[Tensor]]) -> bool:
    return all(a.equal(b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("weight", "gradient"), TYPES)
def test_linear(weight: torch.dtype, gradient: torch.dtype) -> None:
    inputs = [[normal(seed, 3, 7, 24, dtype=weight)] for seed in (1, 2)]

    def function(x: Tensor, w: Tensor, buffers: list[TensorBuffer]) -> Tensor:
        return linear(x, w, buffers[0])

    assert same_bits(at_once_and_later(function, inputs, [normal(3, 40, 24, dtype=weight)], gradient))


@pytest.mark.parametrize(("weight", "gradient"), TYPES)
@pytest.mark.parametrize("candidates", [8, 2, 1])
def test_expert_mlp(weight: torch.dtype, gradient: torch.dtype, candidates: int) -> None:
    """Deferred expert gradients have the same bits, also with unchosen experts and skipped choices. Experts share the
    workspace, which each overwrites."""
    experts, hidden, inner, tokens = 8, 24, 16, 50
    inputs = [[normal(seed, tokens, hidden, dtype=weight), normal(seed + 9, tokens, 2).to(weight)] for seed in (1, 2)]
    chosen_TK = torch.randint(-1, candidates, (tokens, 2), generator=torch.Generator().manual_seed(0))
    weights = [normal(3, experts, 2 * inner, hidden, dtype=weight), normal(4, experts, hidden, inner, dtype=weight)]

    def function(x: Tensor, share: Tensor, up: Tensor, down: Tensor, buffers: list[TensorBuffer]) -> Tensor:
        return expert_mlp(x, share, chosen_TK, up, down, (buffers[0], buffers[1]))

    assert same_bits(at_once_and_later(function, inputs, weights, gradient))


def split_products(inputs: int) -> list[bool]:
    """Returns, for each way to split tokens and overlap, whether deferred gradients have the same bits."""
    groups = Groups(Mesh(tp=2, tp_in=inputs))
    outer, inner = groups.along("tp_out"), groups.along("tp_in")
    found = []
    for sequence, overlap in ((False, True), (True, True), (True, False)):
        split = SplitProduct(
            MatrixProduct(), inner, outer, gathers=sequence and inputs == 1, scatters=False, overlap=overlap
        )

        def function(x: Tensor, w: Tensor, buffers: list[TensorBuffer], split: SplitProduct = split) -> Tensor:
            return split(x, nn.Parameter(w.detach()), buffers[0])

        given = [[normal(10 * groups.rank + seed, 12, 36)] for seed in (1, 2)]
        found.append(same_bits(at_once_and_later(function, given, [normal(groups.rank, 20, 36)], FP32)))
    return found


@pytest.mark.parametrize("inputs", [1, 2])
def test_a_product_split_over_ranks(inputs: int) -> None:
    assert run_ranks(split_products, 2, inputs) == [[True] * 3] * 2


def test_only_what_is_inside_is_deferred() -> None:
    step = StepContext()
    buffer = TensorBuffer(torch.zeros(2), step)

    def add(value: float) -> None:
        buffer.add(lambda grad: grad.add_(value))

    add(1.0)
    with step.deferring() as outer:
        add(10.0)
        with step.deferring() as inner:
            add(100.0)
        add(1000.0)
    with pytest.raises(ZeroDivisionError), step.deferring():
        raise ZeroDivisionError
    add(2.0)
    assert buffer.grad.tolist() == [3.0, 3.0]
    assert (len(outer), len(inner)) == (2, 1)
    for each in (*inner, *outer):
        each()
    assert buffer.grad.tolist() == [1113.0, 1113.0]
    assert buffer.added == 5


def test_without_a_buffer_nothing_is_deferred() -> None:
    step, w = StepContext(), normal(0, 5, 4).requires_grad_()
    with step.deferring() as deferred:
        linear(normal(1, 3, 4), w, product=MatrixProduct(step)).sum().backward()
    assert not deferred
    assert w.grad is not None


def test_models_do_not_defer_for_each_other() -> None:
    one, other = StepContext(), StepContext()
    buffer = TensorBuffer(torch.zeros(2), other)
    with one.deferring() as deferred:
        buffer.add(lambda grad: grad.add_(1.0))
    assert not deferred
    assert buffer.added == 1


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_chunk_waits_for_the_gradients_that_are_deferred(later: bool, microbatches: int) -> None:
    """A chunk does not count a weight as arrived when autograd calls its hooks before the deferred gradient is added."""
    layouts = {"norm": Layout((4,)), "w": Layout((5, 4))}
    (plan,) = plan_chunks(layouts, Mesh(), 0, StateConfig(), state_spec())
    one, reduced = Group([0], 0), []
    step = StepContext()
    chunk = TrainedChunk(plan, ChunkContext([], one, transfers(torch.device("cpu")), step, started=reduced.append))
    parameters = dict(chunk.make_parameters())
    chunk.initialize({"norm": 1.0, "w": "normal"}, 0, 0.5)
    chunk.gradients.clear()
    for last in (False, True)[-microbatches:]:
        if last:
            chunk.gradients.reduce_on_arrival()
        w = parameters["w"]
        y = linear(rms_norm(normal(1, 3, 4), parameters["norm"], 1e-5), w, chunk.gradient_buffers[w])
        if later:
            with step.deferring() as deferred:
                y.square().sum().backward()
            assert not reduced
            assert w.grad is not None
            for add in deferred:
                add()
        else:
            y.square().sum().backward()
        assert len(reduced) == last
    expected = [parameter.detach().clone().requires_grad_() for parameter in parameters.values()]
    found = dict(zip(parameters, expected, strict=True))
    y = rms_norm(normal(1, 3, 4), found["norm"], 1e-5) @ found["w"].T
    (microbatches * y.square().sum()).backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, found[name].grad)


class Sharded:
    """A chunk [first, norm, second] sharded over two ranks. Records reductions, and whether parameters are present when
    a backward pass reaches the first matrix."""

    def __init__(self) -> None:
        layouts = {"first": Layout((4, 4)), "norm": Layout((4,)), "second": Layout((5, 4))}
        (plan,) = plan_chunks(layouts, Mesh(dp=2), 0, StateConfig(shard="parameters"), state_spec())
        one, self.step = Group([0], 0), StepContext()
        self.chunk = TrainedChunk(plan, ChunkContext([one], one, transfers(torch.device("cpu")), self.step))
        self.parameters = dict(self.chunk.make_parameters())
        self.chunk.gradients.clear()
        self.reduced, self.here = list[str](), list[bool]()
        self.chunk.gradients._start = lambda: self.reduced.append("all")  # type: ignore[method-assign]

    def backward(self, microbatch: int, *names: str) -> list[Callable[[], None]]:
        """Runs the immediate part of a backward pass to these parameters; returns the deferred part."""
        full, (first, norm, second) = self.chunk.unsharded, self.parameters.values()
        buffers = self.chunk.gradient_buffers
        if full.status == "absent":
            full.transition("gather")
            full.transition("arrive")
        x = normal(1, 3, 4).requires_grad_()
        if "first" in names:
            x = linear(x, first, buffers[first])
            x.register_hook(lambda gradient: self.here.append(self.chunk.unsharded.is_present))
        x = rms_norm(x, norm, 1e-5) if "norm" in names else x
        x = linear(x, second, buffers[second]) if "second" in names else x
        with self.step.in_backward(0, microbatch), self.step.deferring() as deferred:
            x.sum().backward()
            self.chunk.gradients.end_backward()
        return deferred

    def add(self, microbatch: int, deferred: list[Callable[[], None]]) -> None:
        """Runs the deferred part."""
        with self.step.in_backward(0, microbatch):
            for each in deferred:
                each()
            self.chunk.gradients.end_backward()


def test_backward_passes_are_counted_apart() -> None:
    """Gradients are counted per backward pass: three norm gradients of different passes do not complete one. Each pass
    reduces after its own additions, and frees the parameters once its immediate part ends."""
    sharded = Sharded()
    passes = []
    for microbatch in range(3):
        passes.append(sharded.backward(microbatch, "first", "norm", "second"))
        assert not sharded.chunk.unsharded.is_present
    assert (sharded.here, sharded.reduced) == ([True] * 3, [])
    for microbatch, deferred in enumerate(passes):
        sharded.add(microbatch, deferred)
        assert len(sharded.reduced) == microbatch + 1


@pytest.mark.parametrize("lacking", ["first", "norm", "second"])
def test_a_pass_without_all_gradients_does_not_end_another(lacking: str) -> None:
    sharded = Sharded()
    names = ["first", "norm", "second"]
    sharded.add(0, sharded.backward(0, *(name for name in names if name != lacking)))
    assert not sharded.chunk.unsharded.is_present
    sharded.here.clear()
    sharded.add(1, sharded.backward(1, *names))
    assert (sharded.here, sharded.reduced) == ([True], ["all"])
