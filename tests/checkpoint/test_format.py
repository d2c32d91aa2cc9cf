"""The files of tensors: their contents, and the memory that writing takes."""

from pathlib import Path

import pytest
import torch

from optimus.checkpoint.format import StoredSlice, read_slice, write_slices
from optimus.checkpoint.slices import TensorSlice
from optimus.testing.memory import tracking


def written(path: Path, *tensors: torch.Tensor) -> list[StoredSlice]:
    """Writes the tensors into one file and returns where each is stored."""
    with path.open("wb") as file:
        return write_slices(
            file, path.name, [TensorSlice(f"w{i}", (*x.shape,), (0,) * x.dim(), x) for i, x in enumerate(tensors)]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 4)])
def test_a_view_is_written_alone(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A view is stored with the same bytes as a copy of the view, without the rest of its base tensor."""
    base = torch.arange(1000).to(dtype)
    view = base[5 : 5 + torch.Size(shape).numel()].view(shape)
    stored = written(tmp_path / "file", view, view.clone())
    content = (tmp_path / "file").read_bytes()
    here, there = (content[each.start : each.start + each.length] for each in stored)
    assert here == there
    assert torch.equal(read_slice(here), view)


def test_columns_are_written_in_their_order(tmp_path: Path) -> None:
    columns = torch.arange(12.0).view(3, 4).T
    written(tmp_path / "file", columns)
    assert torch.equal(read_slice((tmp_path / "file").read_bytes()), columns)


def test_nothing_is_copied(tmp_path: Path) -> None:
    flat = torch.zeros(1 << 22)
    with tracking() as memory:
        written(tmp_path / "file", *flat.split(1 << 20))
    assert memory.peak < 1 << 16
