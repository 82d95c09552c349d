"""A checkpoint's manifest: what it holds, in two sets, with the SHA-256 and size of every file.

`model` is what a server or an evaluation needs (`config.json`, `model.safetensors`); `resume` is what a
continued training needs besides (`trainer/`). Importable without torch: the console judges checkpoints by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

__all__ = [
    "MANIFEST_NAME",
    "CheckpointState",
    "FileRecord",
    "Manifest",
    "ManifestError",
    "hash_file",
    "judge",
    "parse_manifest",
    "record_files",
    "verify_files",
]

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
MANIFEST_MAX_BYTES = 4 << 20
"""A larger manifest is refused: it is read whole, also over SFTP from hosts that are not trusted."""

CheckpointState = Literal["whole", "model only", "incomplete", "foreign"]


class ManifestError(ValueError):
    """A manifest that cannot be read; the message says what was found and what was expected."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its size and content hash."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. File keys are POSIX paths relative to the checkpoint's folder."""

    run: str
    step: int
    tokens_seen: int
    created: float
    engine_hash: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    model: dict[str, FileRecord]
    resume: dict[str, FileRecord]
    recipe: dict[str, Any] = field(default_factory=dict)
    origin: str | None = None
    v: int = MANIFEST_VERSION

    def to_json(self) -> dict[str, Any]:
        """The document as it is stored."""
        return asdict(self)

    def model_fingerprint(self) -> str:
        """SHA-256 over the sorted names and hashes of the `model` set: the checkpoint's identity."""
        lines = [f"{name} {record.sha256}\n" for name, record in sorted(self.model.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def size_bytes(self, *, with_resume: bool) -> int:
        """Bytes of the `model` set, or of both sets."""
        records = list(self.model.values()) + (list(self.resume.values()) if with_resume else [])
        return sum(record.size_bytes for record in records)


def parse_manifest(text: str | bytes) -> Manifest:
    """Read a manifest's text. Raises ManifestError for anything that is not a manifest of this version.

    Names inside are data from a host: absolute ones and ones that climb out of the folder are refused.
    """
    if len(text) > MANIFEST_MAX_BYTES:
        raise ManifestError(f"manifest.json is {len(text)} bytes, more than {MANIFEST_MAX_BYTES}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"manifest.json is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ManifestError("manifest.json does not hold an object")
    if document.get("v") != MANIFEST_VERSION:
        raise ManifestError(f"manifest.json has version {document.get('v')!r}, expected {MANIFEST_VERSION}")
    try:
        return Manifest(
            run=_typed(document, "run", str),
            step=_count(document, "step"),
            tokens_seen=_count(document, "tokens_seen"),
            created=float(_typed(document, "created", (int, float))),
            engine_hash=_typed(document, "engine_hash", str),
            target_fingerprint=_typed(document, "target_fingerprint", str),
            tokenizer_fingerprint=_typed(document, "tokenizer_fingerprint", str),
            model=_records(document, "model"),
            resume=_records(document, "resume"),
            recipe=_typed(document, "recipe", dict),
            origin=document.get("origin") if isinstance(document.get("origin"), str) else None,
        )
    except KeyError as error:
        raise ManifestError(f"manifest.json has no key {error.args[0]!r}") from error


def judge(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[CheckpointState, str]:
    """The state of a checkpoint whose folder holds files of these sizes, and the reason in words.

    `sizes` maps relative POSIX paths to bytes. Sizes only: staging and preflight compare hashes as well.
    """
    fault = _first_size_fault(manifest.model, sizes)
    if fault:
        return "incomplete", fault
    if not manifest.model:
        return "incomplete", "the manifest names no model file"
    if not manifest.resume:
        return "model only", "the manifest has no resume set"
    fault = _first_size_fault(manifest.resume, sizes)
    if fault:
        return "model only", f"cannot be resumed: {fault}"
    return "whole", "both sets hold"


def hash_file(path: Path) -> FileRecord:
    """Size and SHA-256 of one file, read once in 1 MiB pieces."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return FileRecord(size, digest.hexdigest())


def record_files(folder: Path, names: list[str]) -> dict[str, FileRecord]:
    """`hash_file` of each relative name."""
    return {name: hash_file(folder / name) for name in sorted(names)}


def verify_files(folder: Path, records: Mapping[str, FileRecord]) -> list[str]:
    """What does not hold, one sentence a file, after reading every byte; empty when all is well."""
    faults = []
    for name, expected in sorted(records.items()):
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
            continue
        found = hash_file(path)
        if found.size_bytes != expected.size_bytes:
            faults.append(f"{name} has {found.size_bytes} bytes, the manifest says {expected.size_bytes}")
        elif found.sha256 != expected.sha256:
            faults.append(f"{name} has SHA-256 {found.sha256[:12]}, the manifest says {expected.sha256[:12]}")
    return faults


def _first_size_fault(records: Mapping[str, FileRecord], sizes: Mapping[str, int]) -> str:
    for name, record in sorted(records.items()):
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != record.size_bytes:
            return f"{name} has {sizes[name]} of {record.size_bytes} bytes"
    return ""


def _typed(document: dict[str, Any], key: str, kind: Any) -> Any:
    value = document[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ManifestError(f"manifest.json: {key!r} is a {type(value).__name__}")
    return value


def _count(document: dict[str, Any], key: str) -> int:
    value = _typed(document, key, int)
    if value < 0:
        raise ManifestError(f"manifest.json: {key!r} is negative")
    return int(value)


def _records(document: dict[str, Any], key: str) -> dict[str, FileRecord]:
    records = {}
    for name, raw in _typed(document, key, dict).items():
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or str(path) != name or "\x00" in name:
            raise ManifestError(f"manifest.json: {name!r} is not a path inside the checkpoint")
        if not isinstance(raw, dict):
            raise ManifestError(f"manifest.json: {key!r}/{name!r} is not an object")
        sha256 = _typed(raw, "sha256", str)
        if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
            raise ManifestError(f"manifest.json: {name!r} has no SHA-256 in lower-case hexadecimal")
        records[name] = FileRecord(_count(raw, "size_bytes"), sha256)
    return records
