"""A fake accelerator in pure Python: real runs on a device whose tensors have shapes, types and memory, but no numbers.

The device's tensors (`fake_device.py`) are FakeTensors of PyTorch's Python PrivateUse1 backend; host tensors are real.
Ranks belong to the `fake` process group, so this process can be any rank of any number. Triton kernels are not
launched. A training step of any model takes about a second and shows

- host tensors among device tensors, which raise an error as on a real device, and use of released memory;
- reasons for which the host waits (`Wait`): numbers read, copies that are not asynchronous from or to pinned memory;
- launches by phase; bytes on the device, current and peak; collectives; process groups; devices touched.

Numbers, the order of streams and communication are not simulated. Numbers that the host reads are 0 or 1.

A process never loses the device again, so tests run it in processes of their own.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg

from helpers.fake_device import (
    NAME,
    PROPERTIES,
    FakeAccelerator,
    entered,
    install_device,
    is_here,
    machine,
    put,
)
from optimus.autograd import once_differentiable
from optimus.comm import Group, Result
from optimus.kernels import adamw, attention
from optimus.kernels import devices as chips
from optimus.parallel.dispatch.allgather import AllGatherDispatch
from optimus.parallel.dispatch.alltoall import AllToAllDispatch, ExchangeCounts
from optimus.parallel.dispatch.choice import copies
from optimus.pipeline.executor import Message
from optimus.pipeline.message_driven import MessageDrivenExecutor
from optimus.pipeline.schedule import Action, Kind
from optimus.testing.memory import resizes

# Chips for which torch has no flash attention with log-sum-exps.
_NO_FLASH = {"PVC"}


@cache
def _install() -> None:
    """Gives this process the device and its ranks for the rest of its life."""
    install_device()
    _stub_groups()
    _stub_dispatch()
    _stub_messages()


def _stub_groups() -> None:
    """Replaces object collectives by this rank's own object, and makes all groups of the `fake` backend."""
    dist.Backend.backend_capability["fake"] = ["cpu", NAME]
    dist.Backend.default_device_backend_map[NAME] = "fake"
    make = dist.new_group

    def new_group(ranks: Any = None, **options: Any) -> Any:
        machine().groups.append(dist.get_world_size() if ranks is None else len(ranks))
        return make(ranks, **(options | {"backend": "fake"}))

    begin = dist.init_process_group

    def init_process_group(backend: Any = None, rank: int | None = None, world_size: int = 0, **_: Any) -> None:
        """Starts the `fake` backend in place of any other; rank and size default to a launcher's environment."""
        if rank is None:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        begin("fake", rank=rank, world_size=world_size, store=fake_pg.FakeStore())

    put(dist, new_group=new_group, init_process_group=init_process_group)
    put(
        Group,
        all_gather_object=lambda self, value: [value] * self.size,
        gather_object=lambda self, value: [value] * self.size if self.rank == 0 else None,
        broadcast_object=lambda self, value: value,
        on_first=lambda self, call: call(),
    )


def _stub_dispatch() -> None:
    """Makes the dispatcher choose all experts equally often."""
    exchange = AllToAllDispatch.exchange

    def exchange_evenly(
        self: AllToAllDispatch,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        experts: Any,
        counts: ExchangeCounts,
        *overlapped: Any,
    ) -> Tensor:
        """Makes every rank send and receive equally many rows, with equally many for every expert."""
        if is_here(x_TH):
            (tokens, chosen), ranks = weights_TK.shape, self.group.size
            rows = round(tokens * copies(self.experts_per_rank * ranks, ranks, chosen) / ranks)
            all_parts = 1 if self.duplicates else self.parts.size
            counts = ExchangeCounts(
                [rows] * ranks, [rows] * ranks, [rows * ranks] * all_parts, tokens * chosen * all_parts
            )
        return exchange(self, x_TH, weights_TK, indices_TK, experts, counts, *overlapped)

    put(AllToAllDispatch, exchange=exchange_evenly)
    count_local_choices = AllGatherDispatch.count_local_choices

    def even_choices(self: AllGatherDispatch, local_AK: Tensor) -> int:
        read = count_local_choices(self, local_AK)
        return local_AK.numel() // self.group.size if is_here(local_AK) else read

    put(AllGatherDispatch, count_local_choices=even_choices)


def _stub_messages() -> None:
    """Makes messages arrive in the order of a real run."""

    def choose(self: MessageDrivenExecutor) -> Any:
        """Chooses actions as the first rank of its team."""
        while (action := self._ready.choose()) is None:
            self._take_in()
        return action

    execute = MessageDrivenExecutor.run

    def execute_in_order(self: MessageDrivenExecutor) -> Any:
        """Delays each gradient until its forward pass has run."""
        links, trace = self._links, self._computing.trace
        start = links.start_receive

        def start_receive(receive: Action, room: Message) -> Result[Message]:
            coming, needed = start(receive, room), (Kind.FORWARD, *receive[1:])

            def wait() -> Message:
                while receive.kind is Kind.RECEIVE_BACKWARD and not any(each[:3] == needed for each in trace):
                    time.sleep(1e-3)
                return coming.wait()

            return Result(wait)

        put(links, start_receive=start_receive)
        return execute(self)

    put(MessageDrivenExecutor, run=execute_in_order, _as_chosen=choose)


class _Flash(torch.autograd.Function):
    """Attention by the flash attention operators, as torch runs on such a device."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse_BNS = attention._flash(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse_BNS)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_BNS = ctx.saved_tensors
        return *attention._flash_backward(grads[0], q, k, v, out, lse_BNS, ctx.causal), None


@contextmanager
def _with_flash(of_blocks: bool) -> Iterator[None]:
    """Replaces torch's choice of attention, which only knows real devices; `of_blocks` covers attention blocks, which
    need log-sum-exps."""

    def fits(q: Tensor, *_: Any) -> bool:
        return of_blocks and q.device.type == NAME and q.shape[-1] % 8 == 0

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
        if not enable_gqa and q.shape[1] != k.shape[1]:
            raise RuntimeError(f"attention of {q.shape[1]} heads with keys of {k.shape[1]}, without enable_gqa")
        made: Tensor = _Flash.apply(q, k, v, is_causal)
        return made

    plain = nn.functional.scaled_dot_product_attention
    with (
        mock.patch.object(attention, "flash_fits", fits),
        mock.patch.object(
            nn.functional,
            "scaled_dot_product_attention",
            lambda q, k, v, **options: (attend if is_here(q) else plain)(q, k, v, **options),
        ),
    ):
        yield


@contextmanager
def fake_accelerator(
    chip: str = "H200", *, devices: int = 1, ranks: int = 1, rank: int = 0, agrees: bool = False
) -> Iterator[FakeAccelerator]:
    """Gives this process, within the context, `devices` devices of a chip (of `PROPERTIES`), as one of `ranks` ranks.
    Comparisons of device numbers are true if it `agrees`."""
    _install()
    chips._chip.cache_clear()
    made = FakeAccelerator(PROPERTIES[chip], devices, agrees)
    entered().append(made)
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        if ranks > 1:
            dist.init_process_group(rank=rank, world_size=ranks)
        # The host's update is not compiled: torch.compile would run under modes of its own.
        plain = mock.patch.object(adamw, "_compiled", return_value=None)
        with _with_flash(chip not in _NO_FLASH), plain, made, resizes(made.memory, made.memory.knows):
            yield made
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        entered().remove(made)
