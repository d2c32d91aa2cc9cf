"""Whoever reads state on an accelerator, the phantom, does so behind what its streams and the host's worker do to it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from helpers.phantom import on_phantom
from optimus.state.transfers import StreamTransfers


def tiles_of_two_threads() -> None:
    """An update here while the worker has one: each has its own tile, with its memory and its stream."""
    device = torch.device("phantom")
    moves, inside, go = StreamTransfers(device), threading.Event(), threading.Event()

    def update(number: int, value: float) -> bool:
        part = torch.full((1 << 16,), value, device=device)
        moves.synchronize()
        with moves.tile(number):
            if number:
                inside.set()
                assert go.wait(60)
            scratch = moves.staged("weights", part, "host", filled=True)
            return bool((scratch == value).all())  # which is there

    with ThreadPoolExecutor(1) as worker:
        other = worker.submit(update, 1, 1.0)
        assert inside.wait(60)
        assert update(0, 2.0)
        go.set()
        assert other.result()
    assert len(moves._scratch) == 2


def test_an_update_beside_the_workers() -> None:
    on_phantom(tiles_of_two_threads, 1)
