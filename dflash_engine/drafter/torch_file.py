"""What a `torch.save` file holds, without torch and without running anything in it.

Such a file is a zip of stored (never compressed) entries: a pickle that names tensors, and one entry of raw bytes a
storage. The pickle is read by an unpickler that knows tensors and plain values and refuses every other name, so
that nothing of the file's choosing is ever called; the tensors' bytes are read by their place in the file.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_engine.drafter.stored import DTYPE_BYTES, DamagedFileError, StoredTensor, damaged

__all__ = ["read_torch_file"]

_PICKLE_MAX_BYTES = 64 << 20

_STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def read_torch_file(path: Path) -> dict[str, Any]:
    """The object of the file, with a `StoredTensor` for each tensor. Raises DamagedFileError with the fault.

    Memory and time go with the pickle (names and shapes), not with the tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            root = next((name[: -len("data.pkl")] for name in entries if name.endswith("/data.pkl")), None)
            if root is None:
                raise damaged("file_damaged", f"{path.name} holds no data.pkl", path.name)
            if entries[f"{root}data.pkl"].file_size > _PICKLE_MAX_BYTES:
                raise damaged("file_damaged", f"{path.name}: data.pkl is larger than 64 MiB", path.name)
            order = archive.read(f"{root}byteorder") if f"{root}byteorder" in entries else b"little"
            if order.strip() != b"little":
                raise damaged("file_damaged", f"{path.name} was written big-endian", path.name)
            plain = _Unpickler(io.BytesIO(archive.read(f"{root}data.pkl")), path.name).load()
    except DamagedFileError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        message = f"{path.name} is no torch.save file of torch 1.6 or newer: {error}"
        raise damaged("file_damaged", message, path.name) from error
    except RecursionError as error:
        raise damaged("file_damaged", f"{path.name} nests too deeply", path.name) from error
    except Exception as error:  # a pickle can end in any exception that its values can raise
        message = f"{path.name}: its pickle cannot be read ({type(error).__name__}: {error})"
        raise damaged("file_damaged", message, path.name) from error
    if not isinstance(plain, dict):
        message = f"{path.name} holds a {type(plain).__name__}, expected a dictionary of tensors"
        raise damaged("layout_unknown", message, path.name)
    with path.open("rb") as file:
        placed: dict[str, Any] = _placed(plain, _Places(path, file, root, entries), 0)
    return placed


class _Places:
    """Where the storages' bytes begin in the file."""

    def __init__(self, path: Path, file: io.BufferedReader, root: str, entries: dict[str, zipfile.ZipInfo]) -> None:
        self.path, self._file, self._root, self._entries = path, file, root, entries
        self._starts: dict[str, int] = {}

    def range_of(self, key: str) -> tuple[int, int]:
        """(first byte, bytes) of a storage."""
        entry = self._entries.get(f"{self._root}data/{key}")
        if entry is None:
            raise self.error(f"storage {key} is not in it")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise self.error(f"storage {key} is compressed")
        if key not in self._starts:
            self._file.seek(entry.header_offset)
            header = self._file.read(30)
            if len(header) < 30 or header[:4] != b"PK\x03\x04":
                raise self.error(f"storage {key} has no zip header")
            # The local header's own lengths: its padding, which aligns the data, is not in the directory.
            name, extra = struct.unpack("<HH", header[26:30])
            self._starts[key] = entry.header_offset + 30 + name + extra
        return self._starts[key], entry.file_size

    def error(self, what: str) -> DamagedFileError:
        """That error."""
        return damaged("file_damaged", f"{self.path.name}: {what}", self.path.name)


def _placed(value: Any, places: _Places, depth: int) -> Any:
    if isinstance(value, dict) and depth < 8:
        return {key: _placed(inner, places, depth + 1) for key, inner in value.items()}
    if not isinstance(value, _Tensor):
        return value
    size = DTYPE_BYTES[value.storage.dtype]
    start, held = places.range_of(value.storage.key)
    count, contiguous = 1, True
    for length, step in zip(reversed(value.shape), reversed(value.stride), strict=True):
        contiguous = contiguous and (length == 1 or step == count)
        count *= length
    if not contiguous:
        raise places.error(f"a tensor of shape {list(value.shape)} has strides {list(value.stride)}; "
                             "save it contiguous")  # fmt: skip
    if min(value.shape, default=0) < 0 or value.offset < 0 or (value.offset + count) * size > held:
        raise places.error(f"a tensor of shape {list(value.shape)} is longer than its storage of {held} bytes")
    begin = start + value.offset * size
    return StoredTensor(value.storage.dtype, value.shape, places.path, begin, begin + count * size)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, name: str) -> None:
        super().__init__(file)
        self._name = name

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == "storage" and isinstance(pid[1], str)):
            raise damaged("pickle_unsafe", f"{self._name} refers to {pid!r}", self._name)
        return _Storage(pid[1], str(pid[2]))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch":
            # dtypes, as values of a saved configuration or an optimizer's state
            if name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool", "uint8"):
                return name
            if name in ("Size", "device"):
                return _tuple
        known = _CALLABLES.get((module, name))
        if known is None:
            raise damaged(
                "pickle_unsafe",
                f"{self._name} holds {module}.{name}: expected tensors and plain values alone; "
                "save the state dict by itself",
                self._name,
            )
        return known


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _tensor(storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or not all(type(n) is int for n in (offset, *shape, *stride)):
        raise ValueError("a tensor's parts are not what they should be")
    return _Tensor(storage, offset, tuple(shape), tuple(stride))


def _parameter(data: Any, *_: Any) -> Any:
    return data


_CALLABLES: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
