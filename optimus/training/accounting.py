"""Computes times and memory by kind, and the load imbalance of experts, for the metrics."""

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
    """Returns each expert's number of tokens over all ranks, relative to the layer's mean, by layer; rounds to three
    decimals. All ranks must call this function.

    `choices` maps this rank's routers to the number of tokens of each expert on this rank, [experts].
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
    """Returns metrics with the mean and the maximum of the layers' load imbalances (max/mean). `load` is the result of
    `expert_load`, for at least one layer."""
    of_layers = [max(loads) for loads in load.values()]
    return {"experts/imbalance": sum(of_layers) / len(of_layers), "experts/worst_imbalance": max(of_layers)}


def seconds_by_kind(times: StepTimes, saving: float) -> dict[str, float]:
    """Returns this rank's seconds by kind: computation, exposed communication by kind of collective, waiting for the
    step's data, and waiting for checkpoints.

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
    """Returns this rank's bytes by kind, without kinds of 0 bytes. The remainder is `memory/activations_and_other`.

    The other kinds are the state buffers that always have memory on the device; on a CPU, also the host's buffers.
    The total is the peak of allocated device memory since the previous call; on a CPU, the process's resident memory.
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
