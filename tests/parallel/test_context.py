"""Ring and Ulysses attention give one device's numbers, and send and save the bytes that the theory predicts.

Legend: n ranks, B batch, L positions of a sequence, S = L / n of a rank, N heads, D head size.
"""

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus.comm import Group, Groups
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.kernels.attention import Scoring, attention_reference
from optimus.kernels.documents import Documents
from optimus.kernels.rotary import rotary_table
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.model.attention import Attention, AttentionPositions
from optimus.model.init import initialize
from optimus.model.sequence import SequenceSplit
from optimus.parallel.context import RingSequence, UlyssesSequence, _seen
from optimus.parallel.recompute import Recomputation, Recompute
from optimus.step_context import CollectiveCache
from optimus.testing import run_ranks
from optimus.testing.traffic import Traffic, counting

Shape = tuple[int, int, int, int]  # B, L, N, D
METHODS = {"ring": RingSequence, "ulysses": UlyssesSequence}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative, in the Frobenius norm
CPU = torch.device("cpu")


def sequence_of(method: str, ranks: int) -> SequenceSplit:
    return METHODS[method](Groups(Mesh(dp=ranks)).world)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k, v and the gradient of the output, of the whole sequence."""
    return [normal(i, *shape).to(dtype) for i in range(4)]


# ---- Positions ----


@pytest.mark.parametrize(
    ("method", "expected"), [("ring", [[0, 1, 6, 7], [2, 3, 4, 5]]), ("ulysses", [[0, 1, 2, 3], [4, 5, 6, 7]])]
)
def test_positions(method: str, expected: list[list[int]]) -> None:
    assert [METHODS[method](Group([5, 6], rank)).positions(8, CPU).tolist() for rank in range(2)] == expected


@pytest.mark.parametrize(
    ("method", "length", "cure"),
    [("ring", 12, "multiple of 8, such as 16"), ("ulysses", 13, "multiple of 4, such as 16")],
)
def test_a_length_that_cannot_be_divided(method: str, length: int, cure: str) -> None:
    with pytest.raises(UserError, match=f"{method} cannot divide sequences of {length} tokens: .*{cure}"):
        METHODS[method](Group([0, 1, 2, 3], 0)).positions(length, CPU)


# ---- Attention ----


def attended(
    method: str,
    ranks: int,
    shapes: list[Shape],
    dtype: torch.dtype,
    windows: tuple[int | None, ...] = (None,),
    cap: float | None = None,
) -> list[list[Tensor]]:
    """Returns this rank's positions, output and gradients of q, k and v, for each shape and window."""
    sequence, results = sequence_of(method, ranks), []
    for shape, window in itertools.product(shapes, windows):
        at = sequence.positions(shape[1], CPU)
        *given, out_grad = (t[:, at] for t in inputs(shape, dtype))
        given = [t.requires_grad_() for t in given]
        out = sequence.attend(*given, Scoring(window, cap))
        results.append([at, out.detach(), *torch.autograd.grad(out, given, out_grad)])
    return results


def attended_with_sinks(method: str, ranks: int, documents: bool) -> list[list[Tensor]]:
    """Returns this rank's positions, output, gradients of q, k and v, and part of the sinks' gradients, for each
    window."""
    sequence, results = sequence_of(method, ranks), []
    at = sequence.positions(32, CPU)
    for window in (None, 5):
        *given, out_grad = (t[:, at] for t in grouped_inputs((4, 4)))
        if documents:
            sequence = sequence.for_documents(Documents(LENGTHS[1], 2))
            *given, out_grad = (t.flatten(0, 1)[None] for t in (*given, out_grad))
        given = [*(t.requires_grad_() for t in given), normal(9, 4).requires_grad_()]
        out = sequence.attend(*given[:3], Scoring(window, None, given[3]))
        *found, sink_grad = torch.autograd.grad(out, given, out_grad)
        results.append([at, *(t.detach().view(2, -1, 4, 8) for t in (out, *found)), sink_grad])
    return results


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("method", "ranks"), [("ring", 2), ("ring", 4), ("ulysses", 2)])
def test_sinks(method: str, ranks: int, documents: bool) -> None:
    results = run_ranks(attended_with_sinks, ranks, method, ranks, documents)
    lengths = LENGTHS[1] if documents else [32, 32]
    for i, window in enumerate((None, 5)):
        sink, alone = normal(9, 4), []
        for parts in zip(*(t.flatten(0, 1)[None].split(lengths, 1) for t in grouped_inputs((4, 4))), strict=True):
            *given, out_grad = parts
            given = [t.detach().requires_grad_() for t in (*given, sink)]
            out, _ = attention_reference(*given[:3], True, window, None, given[3])
            alone.append([out.detach(), *torch.autograd.grad(out, given, out_grad)])
        *whole, sink_grads = zip(*alone, strict=True)
        order = torch.cat([result[i][0] for result in results])
        for at, parts in enumerate(whole, 1):
            expected = torch.cat(parts, 1)[0].unflatten(0, (2, -1))[:, order]
            found = torch.cat([result[i][at] for result in results], 1)
            assert (found - expected).norm() <= 1e-12 * expected.norm(), window
        torch.testing.assert_close(sum(result[i][5] for result in results), sum(sink_grads), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("method", "ranks", "shapes"),
    [
        ("ring", 1, [(2, 8, 2, 8)]),
        ("ring", 2, [(1, 8, 1, 8), (2, 8, 3, 6), (1, 32, 4, 8), (2, 64, 2, 16)]),
        ("ring", 3, [(2, 12, 2, 8), (1, 48, 1, 8)]),
        ("ring", 4, [(1, 8, 1, 8), (2, 24, 3, 8), (1, 32, 2, 6), (2, 64, 4, 16)]),
        ("ulysses", 2, [(1, 8, 2, 8), (2, 10, 4, 6), (2, 64, 2, 16)]),
        ("ulysses", 4, [(1, 8, 4, 8), (2, 12, 8, 6), (2, 64, 4, 16)]),
    ],
)
def test_the_same_as_on_one_device(method: str, ranks: int, shapes: list[Shape], dtype: torch.dtype) -> None:
    results = run_ranks(attended, ranks, method, ranks, shapes, dtype)
    for i, shape in enumerate(shapes):
        *given, out_grad = (t.double() for t in inputs(shape, dtype))
        given = [t.requires_grad_() for t in given]
        out, _ = attention_reference(*given, causal=True)
        expected = [out.detach(), *torch.autograd.grad(out, given, out_grad)]
        order = torch.cat([result[i][0] for result in results])
        assert order.sort().values.equal(torch.arange(shape[1]))
        for parts, whole in zip(zip(*(result[i][1:] for result in results)), expected, strict=True):
            found = torch.cat(parts, 1)
            assert found.dtype == dtype
            assert (found.double() - whole[:, order]).norm() <= TOLERANCE[dtype] * whole.norm(), shape


WINDOWS = (1, 3, 4, 5, 8, 11, 16, 21, 31, 32)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize(("method", "ranks"), [("ring", 1), ("ring", 2), ("ring", 4), ("ulysses", 2)])
def test_windows(method: str, ranks: int, cap: float | None) -> None:
    """Windows are shorter than a piece of 4 positions, as long as a piece, and span pieces of the same and of other
    ranks."""
    shape, windows = (2, 32, 2, 8), WINDOWS if cap is None else (None, 5)
    results = run_ranks(attended, ranks, method, ranks, [shape], torch.float64, windows, cap)
    for i, window in enumerate(windows):
        *given, out_grad = inputs(shape, torch.float64)
        given = [t.requires_grad_() for t in given]
        out, _ = attention_reference(*given, True, window, cap)
        expected = [out.detach(), *torch.autograd.grad(out, given, out_grad)]
        order = torch.cat([result[i][0] for result in results])
        for parts, whole in zip(zip(*(result[i][1:] for result in results)), expected, strict=True):
            found = torch.cat(parts, 1)
            assert (found - whole[:, order]).norm() <= 1e-12 * max(1, whole.norm()), window


# Lengths of the documents in two sequences of 32: one document a sequence; uneven ones, some of length 1, that begin
# and end inside pieces; one a piece; one of 31 after 33 of length 1; eight documents of 8.
LENGTHS = [[32, 32], [5, 1, 1, 22, 3, 17, 15], [4] * 16, [1] * 32 + [31, 1], [8] * 8]
DOCUMENT_WINDOWS = (None, 1, 3, 4, 7, 16)


def attended_within(method: str, ranks: int, heads: tuple[int, int]) -> list[list[Tensor]]:
    """Returns this rank's positions, output and gradients of q, k and v, for each of `LENGTHS` and each window."""
    whole, results = sequence_of(method, ranks), []
    at = whole.positions(32, CPU)
    for lengths, window in itertools.product(LENGTHS, DOCUMENT_WINDOWS):
        sequence = whole.for_documents(Documents(lengths, 2))
        *given, out_grad = (t[:, at].flatten(0, 1)[None] for t in grouped_inputs(heads))
        given = [t.requires_grad_() for t in given]
        out = sequence.attend(*given, Scoring(window))
        found = [out.detach(), *torch.autograd.grad(out, given, out_grad)]
        results.append([at, *(t[0].unflatten(0, (2, -1)) for t in found)])
    return results


def grouped_inputs(heads: tuple[int, int]) -> list[Tensor]:
    """Returns q, k, v and the gradient of the output, of two whole sequences of 32."""
    return [normal(i, 2, 32, number, 8) for i, number in enumerate((heads[0], heads[1], heads[1], heads[0]))]


@pytest.mark.parametrize(
    ("method", "ranks", "heads"),
    [("ring", 2, (2, 2)), ("ring", 4, (4, 1)), ("ulysses", 2, (4, 2)), ("ulysses", 4, (4, 4))],
)
def test_documents(method: str, ranks: int, heads: tuple[int, int]) -> None:
    """Each document attends to itself alone."""
    results = run_ranks(attended_within, ranks, method, ranks, heads)
    for i, (lengths, window) in enumerate(itertools.product(LENGTHS, DOCUMENT_WINDOWS)):
        alone = []
        for parts in zip(*(t.flatten(0, 1)[None].split(lengths, 1) for t in grouped_inputs(heads)), strict=True):
            *given, out_grad = parts
            given = [t.detach().requires_grad_() for t in given]
            out, _ = attention_reference(*given, True, window)
            alone.append([out.detach(), *torch.autograd.grad(out, given, out_grad)])
        order = torch.cat([result[i][0] for result in results])
        expected = [torch.cat(parts, 1)[0].unflatten(0, (2, -1)) for parts in zip(*alone, strict=True)]
        for parts, whole in zip(zip(*(result[i][1:] for result in results)), expected, strict=True):
            found = torch.cat(parts, 1)
            assert (found - whole[:, order]).norm() <= 1e-12 * max(1, whole.norm()), (lengths, window)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_ring_computes_no_score_across_a_border(lengths: list[int], window: int | None) -> None:
    """All ranks together compute each score of a document's pairs once, and no other score."""
    found: Counter[tuple[int, int]] = Counter()
    for rank, source in itertools.product(range(4), repeat=2):
        here, there = (
            torch.arange(64).view(2, 32)[:, RingSequence(Group([0, 1, 2, 3], each)).positions(32, CPU)].flatten()
            for each in (rank, source)
        )
        for block in _seen(rank, 4, Documents(lengths, 2), 16, window, None, source):
            for i, query in enumerate(here[block.queries].tolist()):
                for j, key in enumerate(there[block.keys].tolist()):
                    if block.mask == "none" or (j <= i if block.mask == "causal" else j >= i):
                        found[query, key] += 1
    pairs = {
        (query, key)
        for start, end in Documents(lengths, 2).spans
        for query in range(start, end)
        for key in range(start if window is None else max(start, query - window + 1), query + 1)
    }
    assert found == dict.fromkeys(pairs, 1)


def attended_again(method: str) -> tuple[bool, bool, int]:
    """Repeats a forward pass with cached results: (same output, same gradients, collectives issued by the second pass)."""
    group = Groups(Mesh(dp=2)).world
    sequence = METHODS[method](group)
    at = sequence.positions(16, CPU)
    *given, out_grad = (t[:, at] for t in inputs((2, 16, 2, 8), torch.float32))
    given, cache = [t.requires_grad_() for t in given], CollectiveCache()
    with group.step.recording(cache):
        first = sequence.attend(*given)
    with group.step.repeating(cache), counting() as traffic:
        second = sequence.attend(*given)
    grads = [torch.autograd.grad(out, given, out_grad) for out in (first, second)]
    return first.equal(second), all(a.equal(b) for a, b in zip(*grads, strict=True)), traffic.calls.total()


@pytest.mark.parametrize("method", METHODS)
def test_a_pass_that_is_run_again_sends_nothing(method: str) -> None:
    assert run_ranks(attended_again, 2, method) == [(True, True, 0)] * 2


# ---- Traffic ----


def sent(method: str, ranks: int, shape: Shape, dtype: torch.dtype) -> list[dict[str, tuple[int, int]]]:
    """Returns (calls, bytes) of each collective, in the forward pass and in the backward pass."""
    sequence = sequence_of(method, ranks)
    at = sequence.positions(shape[1], CPU)
    *given, out_grad = (t[:, at] for t in inputs(shape, dtype))
    given = [t.requires_grad_() for t in given]
    with counting() as forward:
        out = sequence.attend(*given)
    with counting() as backward:
        torch.autograd.grad(out, given, out_grad)

    def counted(traffic: Traffic) -> dict[str, tuple[int, int]]:
        return {name: (calls, traffic.bytes[name]) for name, calls in traffic.calls.items()}

    return [counted(forward), counted(backward)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_traffic_of_the_ring(ranks: int, dtype: torch.dtype) -> None:
    """The ring sends keys and values n - 1 times, and their fp32 gradients n times."""
    shape = 2, 32, 3, 8
    kv = 2 * 2 * (32 // ranks) * 3 * 8  # elements
    there, back = (ranks - 1) * kv * dtype.itemsize, ranks * kv * 4
    for forward, backward in run_ranks(sent, ranks, "ring", ranks, shape, dtype):
        assert forward == dict.fromkeys(("send", "recv"), (ranks - 1, there))
        assert backward == dict.fromkeys(("send", "recv"), (2 * ranks - 1, there + back))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_traffic_of_ulysses(ranks: int, dtype: torch.dtype) -> None:
    """Ulysses sends a rank's q, k, v and output. The counter adds bytes sent and bytes received."""
    q = 2 * (32 // ranks) * 4 * 8 * dtype.itemsize
    for forward, backward in run_ranks(sent, ranks, "ulysses", ranks, (2, 32, 4, 8), dtype):
        assert forward == backward == {"all_to_all_single": (2, 2 * 4 * q)}


# ---- Memory ----


def saved(make: Callable[[], SequenceSplit], length: int) -> int:
    """Returns the bytes that an attention layer saves for the backward pass besides its weights."""
    torch.manual_seed(0)
    layer, sequence = Attention(ATTENTION), make()
    initialize(layer, 0, 0.2)
    at = sequence.positions(length, CPU)
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x_TH = normal(0, len(at), 32).float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        table = rotary_table(at, 8, 10_000.0)
        layer(x_TH, AttentionPositions(table, table, sequence, at)).sum()
    return sum(size for where, size in kept.items() if where not in weights)


ATTENTION = ModelConfig(family="olmo2", hidden=32, layers=1, heads=4, intermediate=8, vocab=50)


def saved_on_a_rank(method: str, ranks: int, length: int) -> int:
    return saved(lambda: sequence_of(method, ranks), length)


def test_a_rank_of_four_holds_a_quarter_of_the_activations() -> None:
    assert run_ranks(saved_on_a_rank, 4, "ring", 4, 256) == [saved(SequenceSplit, 256) / 4] * 4


# ---- The model ----

DENSE = ModelConfig(family="olmo", hidden=32, layers=2, heads=4, intermediate=48, vocab=50)
WINDOWED = ModelConfig(
    family="olmo3", hidden=32, layers=2, heads=4, intermediate=48, vocab=50, window=6, full_attention_every=2
)
GROUPED = ModelConfig(family="qwen3", hidden=32, layers=2, heads=8, kv_heads=4, intermediate=48, vocab=50, head_size=6)
EXPERTS = ModelConfig(
    family="olmoe", hidden=32, layers=2, heads=4, intermediate=24, vocab=50, experts=4, experts_per_token=2
)
TOKENS_BL = torch.randint(50, (2, 32), generator=torch.Generator().manual_seed(0))


def trained(config: ModelConfig, method: str | None, ranks: int, recomputed: bool) -> tuple[list[Tensor], int]:
    """Returns the loss and the gradients, averaged over the ranks, and the number of collectives before the averaging."""
    group = Groups(Mesh(dp=ranks)).world
    sequence = SequenceSplit() if method is None else METHODS[method](group)
    chosen = Recomputation(("attention",) if recomputed else ())
    model = Transformer(config)
    model.sequence = sequence
    Recompute(chosen, group.step).arrange([model.blocks], [])
    initialize(model, 0, 0.2)
    with counting() as traffic:
        loss = model.losses(TOKENS_BL).cross_entropy
        loss.backward()
        calls = traffic.calls.total()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
    for tensor in found:
        group.all_reduce(tensor)
    return [tensor / ranks for tensor in found], calls


@pytest.mark.swept
@pytest.mark.parametrize("config", [DENSE, EXPERTS, WINDOWED, GROUPED], ids=["dense", "experts", "windows", "groups"])
@pytest.mark.parametrize(("method", "ranks"), [("ring", 2), ("ring", 4), ("ulysses", 2), ("ulysses", 4)])
def test_a_model_has_the_same_loss_and_gradients(config: ModelConfig, method: str, ranks: int) -> None:
    expected, none = trained(config, None, 1, False)
    assert none == 0
    plain, again = (run_ranks(trained, ranks, config, method, ranks, recomputed) for recomputed in (False, True))
    for found, _ in plain:
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()
    for (found, calls), (found_again, calls_again) in zip(plain, again, strict=True):
        assert all(a.equal(b) for a, b in zip(found, found_again, strict=True))
        assert calls_again == calls > 0
