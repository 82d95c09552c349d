"""Files and folders that are the old ones or the new ones after a crash, never a mixture.

Importable without torch: the supervisor, the trainer and the console's own state use it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any

__all__ = ["publish_folder", "sync_folder", "sync_tree", "write_json", "write_text"]


def sync_folder(folder: Path) -> None:
    """Make a folder's entries (created, renamed, removed names) survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Flush every regular file below `folder`, then every folder, deepest first, then `folder` itself."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fd = os.open(Path(parent) / name, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_folder(Path(parent))


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace `path` by `text` in one step: temporary file in the same folder, flush, rename, flush the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """`write_text` of a JSON document with sorted keys and no NaN."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", mode=mode)


def publish_folder(partial: Path, final: Path) -> None:
    """Give a finished folder its final name: flush all below it, rename it, flush the parent.

    Raises FileExistsError where `final` exists: a finished folder is never replaced.
    """
    sync_tree(partial)
    exists = f"{final} exists; a finished folder is never replaced"
    if final.exists():
        raise FileExistsError(exists)
    try:
        partial.rename(final)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # another process published it between the two lines above
            raise FileExistsError(exists) from error
        raise
    sync_folder(final.parent)
