"""Fits a machine's figures to timings, by least squares of log(predicted / measured)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.plan.collectives import reduce_scatter_seconds
from optimus.plan.machine import Arithmetic, Host, Machine, Matmul, Network, Node, Pace
from optimus.plan.measure.timing import Observations, Observed, Talked

Floats = NDArray[np.float64]

# Largest factor between a fitted rate and the best measured rate.
_BEST = 1.25
# Relative difference from the node's bandwidth, or from the predicted times of collectives, above which figures of a
# group or of a collective are kept.
_DIFFERS = 0.05
_DIGITS = 4


class FitPoint(NamedTuple):
    """A measured time and its prediction, in seconds."""

    what: str
    shape: str
    seconds: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error, without its sign."""
        return abs(self.predicted / self.seconds - 1)


def fit(seen: Observations, *, name: str, source: str, peaks: Mapping[str, float] | None = None) -> Machine:
    """Returns the machine that fits the observations. `peaks` are the vendor's FLOP/s by precision."""
    moved = fmean(math.log(each.bytes / each.seconds) for each in seen.moved)
    machine = _fit_products(_start(seen, name, source, math.exp(moved)), seen)
    return _fit_network(_fit_node(_fit_attention(machine, seen, peaks or {}), seen), seen)


def points(machine: Machine, seen: Observations) -> list[FitPoint]:
    """Returns a point for each measured kernel and collective, with the prediction of `machine`."""
    every = [*seen.kernels, *seen.moved, *seen.attended, *seen.talked]
    return [FitPoint(*each.what, each.seconds, each.predicted(machine)) for each in every]


def _start(seen: Observations, name: str, source: str, memory_bandwidth: float) -> Machine:
    best: dict[str, float] = {}
    for each in seen.products:
        rate = 2 * each.rows * each.columns * each.inner / each.seconds
        best[each.precision] = max(best.get(each.precision, 0.0), rate)
    bandwidth = _round(memory_bandwidth)
    return Machine(
        name=name,
        source=source,
        ranks_per_node=seen.ranks_per_node,
        memory=_round(seen.memory),
        memory_bandwidth=bandwidth,
        cores=seen.cores,
        arithmetic={precision: Arithmetic(peak=2 * rate, achieved=rate) for precision, rate in best.items()},
        matmul=Matmul(tile=64, depth=32),
        attention=1.0,
        kernel_latency=seen.tiny,
        alone=_round(seen.alone),
        overlap=_round(seen.overlap),
        node=Node(bandwidth=bandwidth, latency=_round(seen.tiny)),
        network=Network(bandwidth=bandwidth, latency=_round(seen.tiny)),
        host=Host(
            memory=_round(seen.host_memory),
            shared=bool(seen.threads),
            link=_round(seen.link or bandwidth),
            bandwidth=seen.host_bandwidth and _round(seen.host_bandwidth),
            read=seen.read and _round(seen.read),
            write=seen.write and _round(seen.write),
        ),
    )


# ---- Matmuls ----


def _fit_products(machine: Machine, seen: Observations) -> Machine:
    """Fits the rates, tile and depth of matmuls, the kernel latency and, on an accelerator, the cores.

    The best of several fits, each from another start, avoids local minima.
    """
    precisions = list(machine.arithmetic)
    best = [machine.arithmetic[precision].achieved for precision in precisions]

    def made(tile: float, depth: float, latency: float, cores: float, *rates: float) -> Machine:
        arithmetic = {
            name: Arithmetic.model_construct(peak=rate, achieved=rate) for name, rate in zip(precisions, rates)
        }
        matmul = machine.matmul.model_copy(update={"tile": tile, "depth": depth})  # not whole numbers yet
        update = {"matmul": matmul, "kernel_latency": latency, "cores": cores, "arithmetic": arithmetic}
        return machine.model_copy(update=update)

    def residuals(x: list[float]) -> list[float]:
        return _off(made(*x), seen.kernels)

    def fitted(cores: Sequence[float], low: float, high: float) -> list[float]:
        fits = [
            least_squares(
                residuals,
                [tile, 32.0, seen.tiny, begin, *best],
                [1.0, 0.5, seen.tiny / 10, low, *(rate / _BEST for rate in best)],
                [2048.0, 8192.0, seen.tiny * 100, high, *(_BEST * rate for rate in best)],
            )
            for tile, begin in product((16.0, 64.0, 256.0), cores)
        ]
        return min(fits, key=lambda x: sum(r * r for r in residuals(x)))

    cores = seen.cores
    if seen.threads is None:
        cores = max(1, round(fitted([cores, cores * 8], 1, cores * 64)[3]))
    tile, depth, latency, _, *rates = fitted([cores], cores, cores)
    return made(max(1, round(tile)), round(depth), _round(latency), cores, *(_round(rate) for rate in rates))


# ---- Attention ----


def _fit_attention(machine: Machine, seen: Observations, stated: Mapping[str, float]) -> Machine:
    """Sets the peaks, and fits `Machine.attention` and `Machine.attention_half`.

    If attention is faster than the bf16 peak, raises this peak to the fitted rate of attention.
    """
    best = {name: max(rates.achieved, stated.get(name, 0.0)) for name, rates in machine.arithmetic.items()}

    def made(share: float, half: float) -> Machine:
        reached = {**best, "bf16": best["bf16"] * max(1.0, share)}
        peaks = {name: rates.model_copy(update={"peak": reached[name]}) for name, rates in machine.arithmetic.items()}
        return machine.model_copy(update={"arithmetic": peaks, "attention": min(1.0, share), "attention_half": half})

    found = made(*least_squares(lambda x: _off(made(*x), seen.attended), [0.5, 64.0], [1e-4, 1.0], [1e4, 65536.0]))
    peaks = {
        name: Arithmetic(peak=_round(rates.peak), achieved=rates.achieved) for name, rates in found.arithmetic.items()
    }
    rounded = {"attention": _round(found.attention), "attention_half": _round(found.attention_half)}
    return found.model_copy(update={"arithmetic": peaks, **rounded})


# ---- Collectives ----


def _fit_node(machine: Machine, seen: Observations) -> Machine:
    """Fits the node's bandwidth and latency. Groups (by size and stride) and collectives that differ by more than
    `_DIFFERS` get fitted figures of their own."""
    inside = [talk for talk in seen.talked if talk.group.nodes(machine.ranks_per_node) == 1]
    if not inside:
        return machine
    largest = max(inside, key=lambda talk: talk.nbytes)
    start = [reduce_scatter_seconds(largest.group.size, largest.nbytes, 1.0) / largest.seconds]
    start.append(min(talk.seconds for talk in inside))
    names = list(dict.fromkeys(f"{talk.group.stride}x{talk.group.size}" for talk in inside))

    def fitted(start: Sequence[float], names: Sequence[str], paces: dict[Any, Pace]) -> Node:
        def made(x: Sequence[float]) -> Node:
            groups = dict(zip(names, x[2:]))
            return Node.model_construct(bandwidth=x[0], latency=x[1], groups=groups, paces=paces)

        found = least_squares(
            lambda x: _off(_with_node(machine, made(x)), inside),
            start,
            [x / 1e3 for x in start],
            [x * 1e3 for x in start],
        )
        return made([*map(_round, found)])

    plain = fitted(start, [], {})
    start = [plain.bandwidth, plain.latency, *[plain.bandwidth] * len(names)]
    node = fitted(start, names, {})
    kinds = dict.fromkeys(talk.kind for talk in inside)
    paces = {kind: _pace(machine, node, [talk for talk in inside if talk.kind == kind]) for kind in kinds}
    if any(paces.values()):
        node = fitted(start, names, {kind: pace for kind, pace in paces.items() if pace})
    differing = {name: own for name, own in node.groups.items() if abs(own / node.bandwidth - 1) > _DIFFERS}
    return _with_node(machine, Node(bandwidth=node.bandwidth, latency=node.latency, groups=differing, paces=node.paces))


def _with_node(machine: Machine, node: Node) -> Machine:
    return machine.model_copy(update={"node": node})


def _pace(machine: Machine, node: Node, talked: Sequence[Talked]) -> Pace | None:
    kind, latency = talked[0].kind, node.latency

    def off(x: Sequence[float]) -> list[float]:
        pace = Pace.model_construct(share=x[0], start=x[1], step=x[2])
        return _off(_with_node(machine, node.model_copy(update={"paces": {kind: pace}})), talked)

    least, most = latency / 1e3, latency * 1e2
    found = least_squares(off, [1.0, latency / 2, latency / 2], [0.01, least, least], [100.0, most, most])
    share, begin, step = map(_round, found)
    before, after = _off(_with_node(machine, node), talked), off(found)
    differs = max(abs(a - b) for a, b in zip(before, after)) > _DIFFERS
    return Pace(share=share, start=begin, step=step) if differs else None


def _fit_network(machine: Machine, seen: Observations) -> Machine:
    node = machine.node
    across = [talk for talk in seen.talked if talk.group.nodes(machine.ranks_per_node) > 1]
    if not across:
        network = Network(bandwidth=node.bandwidth, latency=node.latency)
        return machine.model_copy(update={"network": network})

    def made(x: Sequence[float]) -> Machine:
        return machine.model_copy(update={"network": Network.model_construct(bandwidth=x[0], latency=x[1])})

    # The fit begins with a slow network, because far too fast networks have flat residuals.
    start = [node.bandwidth / 4, 2 * node.latency]
    low, high = [start[0] / 1e4, start[1] / 1e3], [start[0] * 1e4, start[1] * 1e3]
    bandwidth, latency = least_squares(lambda x: _off(made(x), across), start, low, high)
    return made([_round(bandwidth), _round(latency)])


# ---- Least squares ----


def least_squares(
    residuals: Callable[[list[float]], list[float]],
    start: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    steps: int = 60,
) -> list[float]:
    """Searches near `start` for positive numbers between `low` and `high` that minimise the sum of squared residuals.

    The method is Levenberg-Marquardt on the logarithms. A number whose bounds are equal stays fixed.
    """
    lower, upper = np.log(low), np.log(high)
    x = np.clip(np.log(start), lower, upper)

    def at(x: Floats) -> Floats:
        return np.array(residuals(np.exp(x).tolist()))

    r, damping = at(x), 1e-2
    for _ in range(steps):
        h = np.where(x + 1e-4 > upper, -1e-4, 1e-4)  # a step back at the upper bound
        slopes = np.stack([(at(x + h[i] * np.eye(len(x))[i]) - r) / h[i] for i in range(len(x))], axis=1)
        slopes[:, lower == upper] = 0
        square, downhill = slopes.T @ slopes, -slopes.T @ r
        before = float(r @ r)
        while damping < 1e8:
            scale = np.diag(damping * np.diag(square) + 1e-9)
            tried = np.clip(x + np.linalg.solve(square + scale, downhill), lower, upper)
            new = at(tried)
            if new @ new < before:
                x, r, damping = tried, new, max(1e-7, damping / 5)
                break
            damping *= 4
        if damping >= 1e8 or before - float(r @ r) < 1e-10 * before:
            break
    return np.exp(x).tolist()


def _off(machine: Machine, seen: Iterable[Observed]) -> list[float]:
    return [math.log(each.predicted(machine) / each.seconds) for each in seen]


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
