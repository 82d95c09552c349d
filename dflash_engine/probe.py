"""What a host is and has, as one JSON document; answers before any package is installed."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path

from dflash_engine.errors import RoomError

__all__ = ["main", "memory_bytes"]

_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "gguf", "accelerate")


def main(argv: list[str]) -> int:
    """Print {python, packages, memory_total_bytes, memory_available_bytes, disk_free_bytes, cpu_count, time}.

    `argv` is one folder whose file system is measured, by default the current one.
    """
    folder = Path(argv[0]) if argv else Path.cwd()
    memory = memory_bytes()
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        sys.stderr.write(f"dflash-engine: error: {folder}: {error.strerror}; expected a folder whose disk to measure\n")
        return RoomError.exit_code
    answer = {
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in _PACKAGES},
        "memory_total_bytes": memory.get("MemTotal", 0),
        "memory_available_bytes": memory.get("MemAvailable", 0),
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "cpu_count": len(os.sched_getaffinity(0)),
        "time": time.time(),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def memory_bytes() -> dict[str, int]:
    """/proc/meminfo in bytes: MemTotal, MemAvailable, ..."""
    found = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) * 1024
    return found
