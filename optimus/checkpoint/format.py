"""The files of tensors, in the format of torch.distributed.checkpoint (DCP): any of its tools reads them.

Each writing rank has one file, `__RANK_0.distcp`, of slices end to end, each an archive as `torch.save` makes it.
`.metadata` says where every slice of every global tensor lies. We write and read the format ourselves, because DCP's own
writer neither sums what it writes nor lets each rank offer slices of one global tensor without a collective, and its reader
checks neither sums nor whether everything wanted was there.
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
    """A slice in a file: which part of which global tensor, and the bytes that it takes."""

    key: str
    dtype: str  # of torch, without its name in front
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    crc: int


AnySlice = TypeVar("AnySlice", StoredSlice, TensorSlice)


class _Summing(io.RawIOBase):
    """A file that sums what is written to it (CRC-32, which sees every flipped bit and costs a tenth of the writing)."""

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
    """The name of the file that `rank` writes, as DCP names it."""
    return f"__{rank}_0.distcp"


def write_slices(file: BinaryIO, name: str, slices: Iterable[TensorSlice]) -> list[StoredSlice]:
    """Append `slices` to a new file of that name, and bring them onto the disk; returns where each one lies.

    While a slice is copied and summed, those before it are already on their way to the disk.
    """
    stored, start = [], 0
    with ThreadPoolExecutor(1) as pool:
        flushing: Future[None] | None = None
        for slice_ in slices:
            summing = _Summing(file)
            own = slice_.tensor.detach().to("cpu", copy=True)  # a view would be saved with all that it is a view of
            try:
                torch.save(own, summing)  # type: ignore[arg-type]
            except RuntimeError as error:  # its archive cannot be ended, it says, and not that the disk is full
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


def read_slice(content: bytes) -> Tensor:
    """The tensor of a slice's bytes. Nothing but a tensor is admitted."""
    tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a {type(tensor).__name__} where a tensor should be")
    return tensor


def by_key(slices: Iterable[AnySlice]) -> dict[str, list[AnySlice]]:
    """Slices, in a file or not, by the tensor that they are of."""
    found: dict[str, list[AnySlice]] = {}
    for each in slices:
        found.setdefault(each.key, []).append(each)
    return found


# ---- `.metadata`: a pickle of DCP's own classes ----
#
# To import them takes longer than to import torch. So an instance is put together from its class's name and the pickles of
# its attributes, and read as a `_Plain` of that name.

_CHECKPOINT = "torch.distributed.checkpoint"
_CLASSES = {
    **dict.fromkeys(("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"), "metadata"),
    **dict.fromkeys(("ChunkStorageMetadata", "MetadataIndex", "StorageMeta"), "metadata"),
    "_StorageInfo": "filesystem",
}
_MEMO = {name: bytes([200 + number]) for number, name in enumerate(_CLASSES)}  # places that no attribute comes up to
_FORMAT_VERSION = "1.0.0"


def pack_metadata(stored: Iterable[StoredSlice]) -> bytes:
    """What `.metadata` holds."""
    contiguous = b"h" + _MEMO["_MEM_FORMAT_ENCODING"] + b"K\x00\x85R"
    tensors: dict[str, bytes] = {}
    places: dict[bytes, bytes] = {}
    for key, slices in by_key(stored).items():
        dtype = _pickled(getattr(torch, slices[0].dtype))
        properties = b"(" + dtype + _pickled(torch.strided) + b"\x89" + contiguous + b"\x89t"  # no gradient; not pinned
        chunks = b"".join(
            _instance("ChunkStorageMetadata", offsets=torch.Size(slice_.offsets), sizes=torch.Size(slice_.sizes))
            for slice_ in slices
        )
        tensors[key] = _instance(
            "TensorStorageMetadata",
            properties=b"h" + _MEMO["TensorProperties"] + b")\x81" + properties + b"b",
            size=torch.Size(slices[0].shape),
            chunks=b"](" + chunks + b"e",
        )
        for number, slice_ in enumerate(slices):
            index = _instance("MetadataIndex", fqn=key, index=number, offset=torch.Size(slice_.offsets))
            places[index] = _instance(
                "_StorageInfo", relative_path=slice_.file, offset=slice_.start, length=slice_.length
            )
    whole = _instance(
        "Metadata",
        state_dict_metadata=_mapping((_pickled(key), tensor) for key, tensor in tensors.items()),
        planner_data=_mapping((_pickled(key), _pickled((key,))) for key in tensors),
        storage_data=_mapping(places.items()),
        storage_meta=_instance("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version=_FORMAT_VERSION,
    )
    named = (f"c{_CHECKPOINT}.{_CLASSES[name]}\n{name}\nq".encode() + at + b"0" for name, at in _MEMO.items())
    return b"\x80\x02" + b"".join(named) + whole + b"."


def _instance(name: str, **attributes: Any) -> bytes:
    """The opcodes that make an instance of a class of DCP's. Attributes that are bytes are opcodes already."""
    items = ((_pickled(key), x if isinstance(x, bytes) else _pickled(x)) for key, x in attributes.items())
    return b"h" + _MEMO[name] + b")\x81" + _mapping(items) + b"b"


def _mapping(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def _pickled(value: Any) -> bytes:
    """Without what begins and ends a pickle."""
    return pickle.dumps(value, 2)[2:-1]


def unpack_metadata(content: bytes) -> Iterator[StoredSlice]:
    """The slices that `.metadata` tells of, sums still zero. Raises `pickle.UnpicklingError` at whatever is not DCP's."""
    metadata = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, _Plain) or metadata.name != "Metadata":
        raise pickle.UnpicklingError(f"a {type(metadata).__name__} is no metadata")
    indices = ((index.state, place.state) for index, place in metadata.state["storage_data"].items())
    places = {(index["fqn"], tuple(index["offset"])): place for index, place in indices if "offset" in index}
    for key, tensor in metadata.state["state_dict_metadata"].items():
        if tensor.name != "TensorStorageMetadata":
            raise pickle.UnpicklingError(f"{key} is no tensor")
        dtype = str(tensor.state["properties"].state[0]).removeprefix("torch.")
        for chunk in tensor.state["chunks"]:
            offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
            place = places[key, offsets]
            at = place["relative_path"], place["offset"], place["length"]
            yield StoredSlice(key, dtype, tuple(tensor.state["size"]), offsets, sizes, *at, 0)


class _Plain:
    """An instance of a class of DCP's, by the class's name: its attributes, or what it has in their place."""

    name = ""

    def __init__(self, *_: object) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Admits the classes that `.metadata` is made of, none of which does anything when it is made."""

    _PLAIN: ClassVar = {
        (f"{_CHECKPOINT}.{module}", name): type(name, (_Plain,), {"name": name}) for name, module in _CLASSES.items()
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        if (plain := self._PLAIN.get((module, name))) is None:
            raise pickle.UnpicklingError(f"{module}.{name} has no business in it")
        return plain
