"""A fake accelerator in pure Python: real runs on a device whose tensors have shapes, types and memory, but no numbers.

Tensors of the device (`fake_device.py`) are FakeTensors of PyTorch's Python PrivateUse1 backend, those of the host are real;
ranks are those of the `fake` process group, so that this process is any one of any number. Kernels of Triton are not
launched. So a step of training takes a second, whatever the model, and shows

- a tensor of the host among the device's, which raises as it would there, and memory that is used after it was released;
- what makes the host wait (`Wait`): numbers that are read, copies that are not from or to pinned memory beside the rest;
- launches, by phase; bytes of the device, now and at most; collectives, process groups; which devices are touched.

Numbers, the order of streams and communication are not there to be wrong. Numbers that the host reads are 0 or 1.

A process that has it never loses it again: it is one of its own.
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

_NO_FLASH = {"PVC"}  # torch has no flash attention that gives log-sum-exps there


@cache
def _install() -> None:
    """Give this process the device and its ranks for the rest of its life."""
    install_device()
    _stub_groups()
    _stub_dispatch()
    _stub_messages()


def _stub_groups() -> None:
    """Objects that ranks tell each other are those of this one, and groups are of the `fake` backend."""
    dist.Backend.backend_capability["fake"] = ["cpu", NAME]
    dist.Backend.default_device_backend_map[NAME] = "fake"
    make = dist.new_group

    def new_group(ranks: Any = None, **options: Any) -> Any:
        machine().groups.append(dist.get_world_size() if ranks is None else len(ranks))
        return make(ranks, **(options | {"backend": "fake"}))

    begin = dist.init_process_group

    def init_process_group(backend: Any = None, rank: int | None = None, world_size: int = 0, **_: Any) -> None:
        """Whatever the backend; by default as a launcher says."""
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
    """Experts are chosen equally often."""
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
        """Every rank sends and gets as many rows, and experts are chosen equally often."""
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
    """They come in the order of a real run."""

    def choose(self: MessageDrivenExecutor) -> Any:
        """As the first rank of its team does."""
        while (action := self._ready.choose()) is None:
            self._take_in()
        return action

    execute = MessageDrivenExecutor.run

    def execute_in_order(self: MessageDrivenExecutor) -> Any:
        """No gradient comes for what has not been computed."""
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
    """Attention by the operators of flash attention, as torch makes of it on such a device."""

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
    """torch's choice of attention, which asks for devices that it knows; `of_blocks`, too, whose log-sum-exps are needed."""

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
    """Inside, this process has `devices` of this chip (of `PROPERTIES`), and is one of so many ranks. Where it `agrees`,
    whatever is compared on it is the same."""
    _install()
    chips._chip.cache_clear()
    made = FakeAccelerator(PROPERTIES[chip], devices, agrees)
    entered().append(made)
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        if ranks > 1:
            dist.init_process_group(rank=rank, world_size=ranks)
        plain = mock.patch.object(
            adamw, "_compiled", return_value=None
        )  # the host's update: a compiler has other modes
        with _with_flash(chip not in _NO_FLASH), plain, made, resizes(made.memory, made.memory.knows):
            yield made
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        entered().remove(made)
