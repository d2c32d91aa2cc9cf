"""Collectives of device tensors over Gloo give the results of the same collectives of host tensors, on the device."""

import torch
from torch import Tensor

from helpers.phantom import on_phantom
from optimus.comm import Group, Groups
from optimus.comm.host_staging import HostStagedGroup
from optimus.mesh import Mesh


def numbers(group: Group, device: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(group.rank)
    return torch.randn(shape, generator=generator).to(device)


def collectives(group: Group, device: str) -> list[Tensor]:
    """Returns the results of every kind of collective on this rank."""
    n, found = group.size, []

    def like(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    summed, alone = numbers(group, device, 3, 8 * n), like(8)
    group.all_reduce(summed)
    group.reduce_scatter(numbers(group, device, 8 * n), alone)
    found += [summed, alone]
    flat = numbers(group, device, 8 * n)
    handle = group.reduce_scatter_async(flat, flat[8 * group.rank :][:8])  # in place
    handle.wait()
    whole = like(8 * n)
    whole[8 * group.rank :][:8] = flat[8 * group.rank :][:8]
    group.all_gather_async(whole, whole[8 * group.rank :][:8]).wait()
    found.append(whole)
    lengths = [5, 0, 7][:n]
    uneven = like(sum(lengths))
    group.all_gather(uneven, numbers(group, device, lengths[group.rank]), lengths)
    mine = like(lengths[group.rank])
    group.reduce_scatter(numbers(group, device, sum(lengths)), mine, lengths)
    found += [uneven, mine]
    found.append(group.all_to_all(numbers(group, device, n, 4).T.contiguous().T))
    sent = [group.rank + to for to in range(n)]
    found.append(group.all_to_all(numbers(group, device, sum(sent), 2), sent, sent))
    passed, spread, total = like(6), numbers(group, device, 4), numbers(group, device, 4)
    group.shift_async(numbers(group, device, 6), passed).wait()
    group.broadcast(spread, 1)
    group.reduce_async(total, 1).wait()
    found += [passed, spread, *([total] if group.rank == 1 else [])]
    if group.rank == 0:
        group.send_async(numbers(group, device, 5), 1).wait()
    if group.rank == 1:
        came = like(5)
        group.recv_async(came, 0).wait()
        found.append(came)
    assert {each.device.type for each in found} == {device}
    assert group.any(group.rank == 1)
    return [each.cpu() for each in found]


def both() -> None:
    group = Groups(Mesh(dp=3)).world
    assert isinstance(group.unwatched, HostStagedGroup)
    torch.testing.assert_close(collectives(group, "phantom"), collectives(group, "cpu"), rtol=0.0, atol=0.0)


def test_as_on_the_host() -> None:
    on_phantom(both, 3)
