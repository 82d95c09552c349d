"""SHA-256 of files on a host, computed by the host's own Python: no byte of them crosses the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from dflash_console.core.checkpoints import FOREIGN_FILES, CheckpointView
from dflash_console.core.deploy import DeployedEngine, engine_json
from dflash_console.core.errors import IntegrityError, RemoteCommandError
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import HostConnection
from dflash_engine.manifest import FileRecord, Manifest

__all__ = ["checkpoint_faults", "foreign_manifest", "hash_prefixes", "hashing_timeout_s"]

_SLOWEST_BYTES_PER_S = 20e6


def hashing_timeout_s(size_bytes: int) -> float:
    """How long a host may take to read and hash so many bytes."""
    return 60.0 + size_bytes / _SLOWEST_BYTES_PER_S


async def hash_prefixes(
    conn: HostConnection, engine: DeployedEngine, prefixes: Sequence[tuple[PurePosixPath, int]]
) -> list[str | None]:
    """SHA-256 of the first bytes of files, as (path, bytes); None where a file is missing or shorter."""
    if not prefixes:
        return []
    arguments = ["transfer", "prefix"]
    for path, size_bytes in prefixes:
        arguments += [str(size_bytes), str(path)]
    timeout_s = hashing_timeout_s(sum(size for _, size in prefixes))
    answer = await engine_json(conn, engine, arguments, timeout_s=timeout_s)
    try:
        hashes = msgspec.convert(answer, list[str | None])
    except msgspec.ValidationError as error:
        raise RemoteCommandError(f"{conn.name}: the engine's hashes cannot be read: {error}.") from error
    if len(hashes) != len(prefixes):
        raise RemoteCommandError(f"{conn.name}: asked for {len(prefixes)} hashes, got {len(hashes)}.")
    return hashes


async def checkpoint_faults(
    conn: HostConnection,
    engine: DeployedEngine,
    folder: PurePosixPath,
    records: dict[str, FileRecord],
) -> list[str]:
    """What of a checkpoint folder does not hold against its manifest's records, one phrase a file."""
    names = sorted(records)
    hashes = await hash_prefixes(conn, engine, [(folder / name, records[name].size_bytes) for name in names])
    faults = []
    for name, found in zip(names, hashes, strict=True):
        expected = records[name].sha256
        shown = printable(name, 120)
        if found is None:
            faults.append(f"{shown} is missing or short")
        elif found != expected:
            faults.append(f"{shown} has SHA-256 {printable(found[:12])}, the manifest says {expected[:12]}")
    return faults


async def foreign_manifest(conn: HostConnection, engine: DeployedEngine, view: CheckpointView) -> Manifest:
    """A manifest for a checkpoint that has none: hashes of its two files, its origin, no fingerprints."""
    sizes = {}
    for name in FOREIGN_FILES:
        entry = await conn.stat(view.path / name)
        if entry is None or entry.kind != "file":
            raise IntegrityError(f"{conn.name}: {view.path / name} went away; list the checkpoints again.")
        sizes[name] = entry.size_bytes
    hashes = await hash_prefixes(conn, engine, [(view.path / name, size) for name, size in sizes.items()])
    model = {}
    for (name, size_bytes), sha256 in zip(sizes.items(), hashes, strict=True):
        if sha256 is None or len(sha256) != 64:
            raise IntegrityError(f"{conn.name}: {view.path / name} changed while it was hashed; try again.")
        model[name] = FileRecord(size_bytes, sha256)
    return Manifest(
        run=view.run,
        step=view.step or 0,
        tokens_seen=0,
        created=view.created,
        engine_hash="",
        target_fingerprint="",
        tokenizer_fingerprint="",
        model=model,
        resume={},
        origin=f"{conn.name}:{view.path}",
    )
