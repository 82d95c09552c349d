"""What a host does itself for a staging: hash prefixes of files, and publish a received checkpoint (JSON).

`transfer prefix BYTES FILE [BYTES FILE ...]` prints a list of SHA-256 values, null for a file that is missing
or shorter. `transfer publish PARTIAL FINAL` reads every byte of PARTIAL against its own manifest and, where
all holds, flushes it to disk and gives it its final name; it prints {"published", "exists", "faults"}. Both
in one process on the host, so that no console renames what was not verified. Importable without torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import sys
from pathlib import Path

from dflash_engine import durable
from dflash_engine.errors import CheckpointError, EngineError, RecipeError, RoomError
from dflash_engine.manifest import MANIFEST_NAME, ManifestError, parse_manifest, verify_files

__all__ = ["hash_prefix", "main", "publish"]

_USAGE = "usage: dflash-engine transfer prefix BYTES FILE [BYTES FILE ...] | transfer publish PARTIAL FINAL"


def hash_prefix(path: Path, size_bytes: int) -> str | None:
    """SHA-256 of the first `size_bytes` bytes of a file, or None where it has fewer or is not there."""
    digest = hashlib.sha256()
    remaining = size_bytes
    try:
        with path.open("rb") as file:
            while remaining and (piece := file.read(min(1 << 20, remaining))):
                digest.update(piece)
                remaining -= len(piece)
    except FileNotFoundError:
        return None
    return None if remaining else digest.hexdigest()


def publish(partial: Path, final: Path) -> dict[str, object]:
    """Verify `partial` by its manifest, flush it and rename it to `final`; one wrong file keeps it from that.

    `faults` maps file names to what is wrong with them. Raises CheckpointError without a readable manifest,
    RoomError where the disk refuses.
    """
    if final.exists():
        return {"published": False, "exists": True, "faults": {}}
    try:
        record = parse_manifest((partial / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, ManifestError) as error:
        raise CheckpointError(f"{partial} has no readable manifest.json: {error}") from error
    files = record.model | record.resume
    faults = {name: fault for name in files for fault in verify_files(partial, {name: files[name]})}
    if faults:
        return {"published": False, "exists": False, "faults": faults}
    for path in partial.rglob("*"):
        # An earlier try may have asked for more files; what the manifest does not name does not belong.
        if path.is_file() and str(path.relative_to(partial)) not in {*files, MANIFEST_NAME}:
            path.unlink()
    try:
        durable.publish_folder(partial, final)
    except OSError as error:
        # Another staging may have published the same checkpoint since the first look.
        if isinstance(error, FileExistsError) or error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return {"published": False, "exists": True, "faults": {}}
        raise RoomError(f"{final} could not be published: {error}") from error
    return {"published": True, "exists": False, "faults": {}}


def main(argv: list[str]) -> int:
    """Run one of the two questions; the answer is one JSON document on standard output."""
    try:
        match argv:
            case ["publish", partial, final]:
                answer: object = publish(Path(partial), Path(final))
            case ["prefix", *pairs] if pairs and len(pairs) % 2 == 0:
                answer = [
                    hash_prefix(Path(path), _size(size)) for size, path in zip(pairs[::2], pairs[1::2], strict=True)
                ]
            case _:
                sys.stderr.write(_USAGE + "\n")
                return 2
    except EngineError as error:
        sys.stderr.write(f"dflash-engine: error: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _size(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise RecipeError(f"{text!r} is not a number of bytes")
    return int(text)
