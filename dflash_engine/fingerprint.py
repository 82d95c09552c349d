"""Fingerprints of models and tokenizers, from headers and sampled bytes: fast on 54 GB, and torch-free.

A model's fingerprint is SHA-256 over its tensors sorted by name, each with dtype, shape and up to three
windows of 256 bytes at fixed places (start, middle, end). It does not depend on sharding or file names.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_engine.errors import EngineError, TargetError

__all__ = ["TensorInfo", "main", "model_fingerprint", "read_header", "tokenizer_fingerprint"]

_WINDOW = 256
_HEADER_MAX_BYTES = 100 << 20
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file; `begin` and `end` are byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file. Raises TargetError where header and file do not account for every byte."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_HEADER_MAX_BYTES, size - 8):
                raise TargetError(f"{path} is no safetensors file: header of {length} bytes in a file of {size}")
            document = json.loads(file.read(length))
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TargetError(f"{path} is no safetensors file: its header is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise TargetError(f"{path} is no safetensors file: its header is not an object")
    document.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor_info(path, name, raw, start, size) for name, raw in document.items()}
    at = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != at:
            raise TargetError(f"{path}: tensor {name} begins at byte {info.begin}, the one before it ends at {at}")
        at = info.end
    if at != size:
        raise TargetError(f"{path} has {size} bytes, its header accounts for {at}")
    return tensors


def model_fingerprint(folder: Path) -> str:
    """Fingerprint of all tensors in a folder's safetensors files, 64 hexadecimal digits. Raises TargetError."""
    places: dict[str, tuple[Path, TensorInfo]] = {}
    for path in _weight_files(folder):
        for name, info in read_header(path).items():
            if name in places:
                raise TargetError(f"{folder}: tensor {name} stands in {places[name][0].name} and in {path.name}")
            places[name] = (path, info)
    digest = hashlib.sha256()
    for name, (path, info) in sorted(places.items()):
        digest.update(f"{name}\0{info.dtype}\0{list(info.shape)}\0".encode())
        digest.update(_sample(path, info))
    return digest.hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 over tokenizer.json in canonical form and the chat template, wherever it is stored."""
    tokenizer = _json_object(folder / "tokenizer.json")
    # Set by every load that pads or truncates; they say nothing about how text becomes ids.
    for key in ("padding", "truncation"):
        tokenizer.pop(key, None)
    canonical = json.dumps(tokenizer, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(f"{canonical}\0{_chat_template(folder)}".encode("utf-8", "surrogatepass")).hexdigest()


def main(argv: list[str]) -> int:
    """`fingerprint DIR`: print {"model", "tokenizer"} as JSON."""
    if len(argv) != 1:
        sys.stderr.write("usage: dflash-engine fingerprint DIR\n")
        return 2
    folder = Path(argv[0])
    try:
        answer = {"model": model_fingerprint(folder), "tokenizer": tokenizer_fingerprint(folder)}
    except EngineError as error:
        sys.stderr.write(f"dflash-engine: error: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise TargetError(f"{index} cannot be read: {error}") from error
        return sorted(folder / Path(name).name for name in names)
    single = folder / "model.safetensors"
    if not single.is_file():
        raise TargetError(f"{folder} has no model.safetensors; expected a folder with safetensors weights")
    return [single]


def _tensor_info(path: Path, name: str, raw: Any, start: int, size: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        bits = _DTYPE_BITS[dtype]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise TargetError(f"{path}: the header's entry for {name!r} cannot be read") from error
    if not sound or not begin <= end <= size - start or (end - begin) * 8 != math.prod(shape) * bits:
        raise TargetError(f"{path}: tensor {name!r} of {dtype} {list(shape)} does not fit its bytes {begin}..{end}")
    return TensorInfo(dtype, shape, start + begin, start + end)


def _sample(path: Path, info: TensorInfo) -> bytes:
    size = info.end - info.begin
    with path.open("rb") as file:
        if size <= 3 * _WINDOW:
            file.seek(info.begin)
            return file.read(size)
        pieces = []
        for place in (0, (size - _WINDOW) // 2, size - _WINDOW):
            file.seek(info.begin + place)
            pieces.append(file.read(_WINDOW))
        return b"".join(pieces)


def _chat_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TargetError(f"{path} cannot be read: {error}") from error
    config = folder / "tokenizer_config.json"
    template = _json_object(config).get("chat_template", "") if config.is_file() else ""
    # Older folders hold a list of named templates.
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise TargetError(
            f"{path.parent} has no {path.name}; expected a Hugging Face folder with a fast tokenizer"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise TargetError(f"{path} does not hold a JSON object")
    return document
