"""The files of tensors, in the format of torch.distributed.checkpoint (DCP).

A file `__RANK_0.distcp` consists of slices, each an archive of `torch.save`. `.metadata` locates the slices.
"""

import io
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from optimus.checkpoint.slices import TensorSlice


class StoredSlice(NamedTuple):
    """A slice in a file, with its region of a global tensor and its byte range in the file."""

    key: str
    dtype: str  # torch's name of the dtype, without the prefix "torch."
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    crc: int


AnySlice = TypeVar("AnySlice", StoredSlice, TensorSlice)


class _Summing(io.RawIOBase):
    """Writes to a file, and computes the CRC-32 and the length of the bytes written through this object."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = self.length = 0
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        try:
            self._file.write(view)
        except OSError as error:
            self.failure = error
            raise
        self.length += len(view)
        return len(view)

    def writable(self) -> bool:
        return True


def file_of(rank: int) -> str:
    """Returns the name of the file that `rank` writes, in DCP's convention."""
    return f"__{rank}_0.distcp"


def write_slices(file: BinaryIO, name: str, slices: Iterable[TensorSlice]) -> list[StoredSlice]:
    """Writes `slices` to `file`, syncs the file, and returns the stored slices.

    `file` must be empty. `name` becomes `StoredSlice.file`.
    """
    stored, start = [], 0
    with ThreadPoolExecutor(1) as pool:
        flushing: Future[None] | None = None
        for slice_ in slices:
            summing = _Summing(file)
            try:
                torch.save(_with_own_storage(slice_.tensor), summing)  # type: ignore[arg-type]
            except RuntimeError as error:  # on a full disk, torch only reports an unfinished archive
                raise summing.failure or error from None
            dtype = str(slice_.tensor.dtype).removeprefix("torch.")
            at = tuple(slice_.tensor.shape), name, start, summing.length, summing.crc
            stored.append(StoredSlice(slice_.key, dtype, slice_.shape, slice_.offsets, *at))
            start += summing.length
            if flushing is None or flushing.done():
                file.flush()
                flushing = pool.submit(os.fsync, file.fileno())
        file.flush()
        os.fsync(file.fileno())
        if flushing is not None:
            flushing.result()
    return stored


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Returns the tensor on the host, with a storage that has only the tensor's bytes.

    `torch.save` would write the whole storage of a view.
    """
    here = tensor.detach().cpu().contiguous()
    start = here.storage_offset() * here.itemsize
    own = here.untyped_storage()[start : start + here.nbytes]
    return here.new_empty(0).set_(own, 0, here.shape, here.stride())


def read_slice(content: bytes) -> Tensor:
    """Returns the tensor in the bytes of a slice. May raise any exception if the bytes are not a tensor."""
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a {type(tensor).__name__} where a tensor should be")
    return tensor


def by_key(slices: Iterable[AnySlice]) -> dict[str, list[AnySlice]]:
    """Groups stored slices, or slices in memory, by the keys of their tensors."""
    found: dict[str, list[AnySlice]] = {}
    for each in slices:
        found.setdefault(each.key, []).append(each)
    return found


def pack_metadata(stored: Iterable[StoredSlice]) -> bytes:
    """Returns the content of `.metadata` for the slices `stored`."""
    # The import takes about a second.
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

    tensors: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for key, slices in by_key(stored).items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(slice_.offsets), torch.Size(slice_.sizes)) for slice_ in slices]
        properties = dcp.TensorProperties(getattr(torch, slices[0].dtype))
        tensors[key] = dcp.TensorStorageMetadata(properties, torch.Size(slices[0].shape), chunks)
        for index, slice_ in enumerate(slices):
            storage[dcp.MetadataIndex(key, slice_.offsets, index)] = _StorageInfo(
                slice_.file, slice_.start, slice_.length
            )
    data = {"planner_data": {key: (key,) for key in tensors}, "storage_data": storage}
    return pickle.dumps(dcp.Metadata(tensors, **data, storage_meta=dcp.StorageMeta(), version=CURRENT_DCP_VERSION))


def unpack_metadata(content: bytes) -> Iterator[StoredSlice]:
    """Yields the slices in `.metadata`, with checksums of zero. May raise any exception for damaged content."""
    metadata = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, _Plain) or metadata.name != "Metadata":
        raise pickle.UnpicklingError(f"a {type(metadata).__name__} is not metadata")
    indices = ((index.state, info.state) for index, info in metadata.state["storage_data"].items())
    storage = {(index["fqn"], tuple(index["offset"])): info for index, info in indices if "offset" in index}
    for key, tensor in metadata.state["state_dict_metadata"].items():
        if tensor.name != "TensorStorageMetadata":
            raise pickle.UnpicklingError(f"{key} is not a tensor")
        dtype = str(tensor.state["properties"].state[0]).removeprefix("torch.")
        for chunk in tensor.state["chunks"]:
            offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
            info = storage[key, offsets]
            at = info["relative_path"], info["offset"], info["length"]
            yield StoredSlice(key, dtype, tuple(tensor.state["size"]), offsets, sizes, *at, 0)


class _Plain:
    """A stand-in for an instance of a DCP class, with the class's name and the pickled state."""

    name = ""

    def __init__(self, *_: object) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Admits only globals that the metadata of tensors needs, and replaces DCP's classes by stand-ins."""

    _METADATA = (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )  # fmt: skip
    _PLAIN: ClassVar = {
        (f"torch.distributed.checkpoint.{module}", name): type(name, (_Plain,), {"name": name})
        for module, names in (("metadata", _METADATA), ("filesystem", ("_StorageInfo",)))
        for name in names
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        if (plain := self._PLAIN.get((module, name))) is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not a class of checkpoint metadata")
        return plain
