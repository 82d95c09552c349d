"""Runs on a host: checks a deployed engine, or unpacks one. Its source text is sent to the host's Python.

Standard library only, and nothing of this project, because nothing of it is there yet. Standard input is one
line of JSON, {engines, name, partial, files: {path: sha256}}, followed by a gzipped tar of the files where
they are to be unpacked (`partial` is null otherwise). Standard output is one line of JSON:
{"state": "absent" | "whole" | "unpacked", "faults": [...]}.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

STALE_S = 24 * 3600  # an unfinished deployment older than this has no living writer
OLDEST_PYTHON = (3, 11)


def main() -> None:
    """Answer one request; see the module."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"Python {sys.version.split()[0]} found, 3.11 or newer expected")
    request = json.loads(sys.stdin.buffer.readline())
    engines, files = Path(request["engines"]), request["files"]
    final = engines / request["name"]
    if final.is_dir():
        answer("whole", faults_of(final, files))
    elif request["partial"] is None:
        answer("absent", [])
    else:
        engines.mkdir(parents=True, exist_ok=True)
        remove_stale(engines)
        unpack(engines / request["partial"], final, files)


def unpack(partial: Path, final: Path, files: dict[str, str]) -> None:
    """Fill the partial folder, verify it, and give it its final name; a concurrent winner is as good."""
    partial.mkdir()
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None and member.name in files:
                    path = partial / member.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())
        faults = faults_of(partial, files)
        if faults:
            answer("absent", faults)
            return
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():
                raise
            answer("whole", faults_of(final, files))
            return
        sync(final.parent)
        answer("unpacked", [])
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def faults_of(folder: Path, files: dict[str, str]) -> list[str]:
    """What in `folder` is not as it should be, one phrase each; compiled files are Python's own."""
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not path.is_dir() and path.parent.name != "__pycache__"
    }
    faults = [f"{path} is not part of it" for path in sorted(found - set(files))]
    for path, expected in sorted(files.items()):
        if path not in found:
            faults.append(f"{path} is missing")
        elif hashlib.sha256((folder / path).read_bytes()).hexdigest() != expected:
            faults.append(f"{path} was modified")
    return faults


def remove_stale(engines: Path) -> None:
    """Remove what interrupted deployments left behind."""
    for path in engines.glob("*.partial-*"):
        with suppress(FileNotFoundError):  # its writer is alive and has just renamed it
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def answer(state: str, faults: list[str]) -> None:
    """Print the answer."""
    sys.stdout.write(json.dumps({"state": state, "faults": faults}) + "\n")


if __name__ == "__main__":
    main()
