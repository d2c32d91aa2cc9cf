"""Computes metrics for every `observe.log_every`-th step: times and memory by kind, and the load of the experts."""

from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from optimus.model.moe.router import Router
from optimus.state.plan import bytes_by_kind
from optimus.training.record import StepTimes
from optimus.training.run import Run


def expert_load(run: Run, choices: Mapping[Any, Tensor]) -> dict[int, list[float]]:
    """Returns, for each layer with experts, each expert's number of choices relative to the layer's mean, rounded to
    three digits after the point. All ranks must call this function.

    `choices` maps routers of this rank to the experts' numbers of choices [experts].
    """
    model = run.config.model
    layers = {layer: model.experts_of(layer) for layer in range(model.layers) if model.experts_of(layer)}
    here = {
        int(name.partition("blocks.")[2].partition(".")[0]): choices[module]
        for name, module in run.model.named_modules()
        if isinstance(module, Router) and module in choices
    }
    counts = torch.cat(
        [
            here[layer].float() if layer in here else torch.zeros(experts, device=run.device)
            for layer, experts in layers.items()
        ]
    )
    run.groups.world.all_reduce(counts)
    by_layer = counts.split(list(layers.values()))
    return {
        layer: [round(load, 3) for load in (counts_E / counts_E.mean().clamp(min=1e-9)).tolist()]
        for layer, counts_E in zip(layers, by_layer)
    }


def imbalance(load: Mapping[int, list[float]]) -> dict[str, float]:
    """Returns the mean and the maximum of the layers' load imbalances. The load imbalance of a layer is the layer's
    largest relative load."""
    of_layers = [max(loads) for loads in load.values()]
    return {"experts/imbalance": sum(of_layers) / len(of_layers), "experts/worst_imbalance": max(of_layers)}


def seconds_by_kind(times: StepTimes, saving: float) -> dict[str, float]:
    """Returns the seconds of a step on this rank by kind: computation, exposed communication by kind of collective,
    waiting for data, and waiting for checkpoints. Computation is the total minus the waits for data and collectives.
    Exposed communication includes the wait for other ranks, but not for their data.

    `saving` is the number of seconds that this rank has waited for checkpoints since the previous record.
    """
    exposed = {f"time/exposed_{kind.replace(' ', '_')}": seconds for kind, seconds in times.by_kind.items()}
    return {
        "time/computation": max(0.0, times.total - times.data - sum(times.by_kind.values())),
        **exposed,
        "time/data": times.data,
        "time/checkpoint": saving,
    }


def memory_by_kind(run: Run) -> dict[str, int]:
    """Returns the bytes of this rank: the state that always has memory on the device, by kind, and the remainder as
    `activations_and_other`.

    The remainder, at least 0, is the total minus the state. On an accelerator, the total is the peak of allocated
    memory since the previous call. On a CPU, the total is the resident memory of the process, and the state includes
    the state on the host.
    """
    plans = [chunk.plan for chunk in run.state.chunks]
    state = bytes_by_kind(plans)
    if run.device.type == "cpu":
        on_host = bytes_by_kind(plans, "host")
        state = {kind: size + on_host[kind] for kind, size in state.items()}
        taken = psutil.Process().memory_info().rss
    else:
        taken = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
    found = {**state, "activations_and_other": max(0, taken - sum(state.values()))}
    return {f"memory/{kind}": size for kind, size in found.items() if size}
