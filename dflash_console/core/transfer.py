"""One file from host to host through this machine, in bounded memory, with both directions kept full.

Pieces are read ahead from the source and written behind to the destination, `OUTSTANDING` requests each
way, so memory stays below `2 * OUTSTANDING * PIECE_BYTES` however large the file. SHA-256 is computed here
while the bytes pass. Writes may finish out of order: after a break everything below `size -
UNSETTLED_BYTES` is contiguous.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

import asyncssh

from dflash_console.core.errors import IntegrityError
from dflash_console.core.ssh import HostConnection

__all__ = ["OUTSTANDING", "PIECE_BYTES", "UNSETTLED_BYTES", "copy_range"]

PIECE_BYTES = 255 * 1024
"""What OpenSSH answers in one read; a larger piece would be cut in two requests."""
OUTSTANDING = 16
"""Requests on their way, each direction: 4 MiB, enough for 40 MB/s at 100 ms."""
UNSETTLED_BYTES = OUTSTANDING * PIECE_BYTES
"""The most that a break can leave unwritten below the highest byte written."""

_PIECE_TIMEOUT_S = 60.0


async def copy_range(
    source: HostConnection,
    source_path: PurePosixPath,
    destination: HostConnection,
    destination_path: PurePosixPath,
    *,
    begin: int,
    end: int,
    on_bytes: Callable[[int], None],
) -> str:
    """Copy bytes `begin` to `end` (exclusive) of a file into the same place of another; returns their
    SHA-256.

    The destination file is made where it is missing and cut to `begin` first. `on_bytes` hears of each
    piece that the destination confirmed. Raises IntegrityError where the source is shorter than `end` or
    longer.
    """
    reader = await source.open_file(source_path, "rb")
    try:
        writer = await destination.open_file(destination_path, "r+b" if begin else "wb")
        try:
            if begin:
                async with destination.translated(str(destination_path)):
                    await writer.truncate(begin)
            ends = _Ends(source, source_path, reader, destination, destination_path, writer)
            return await _pump(ends, begin, end, on_bytes)
        finally:
            await writer.close()
    finally:
        await reader.close()


@dataclass(frozen=True)
class _Ends:
    source: HostConnection
    source_path: PurePosixPath
    reader: asyncssh.SFTPClientFile
    destination: HostConnection
    destination_path: PurePosixPath
    writer: asyncssh.SFTPClientFile

    async def read(self, offset: int, size: int) -> bytes:
        async with self.source.translated(str(self.source_path), _PIECE_TIMEOUT_S):
            data: bytes = await self.reader.read(size, offset)
        return data

    async def write(self, offset: int, data: bytes, on_bytes: Callable[[int], None]) -> None:
        async with self.destination.translated(str(self.destination_path), _PIECE_TIMEOUT_S):
            await self.writer.write(data, offset)
        on_bytes(len(data))


async def _pump(ends: _Ends, begin: int, end: int, on_bytes: Callable[[int], None]) -> str:
    what = f"{ends.source.name}: {ends.source_path}"
    digest = hashlib.sha256()
    reads: deque[asyncio.Task[bytes]] = deque()
    writes: deque[asyncio.Task[None]] = deque()
    next_read = position = begin
    try:
        while position < end:
            while next_read < end and len(reads) < OUTSTANDING:
                size = min(PIECE_BYTES, end - next_read)
                reads.append(asyncio.create_task(ends.read(next_read, size)))
                next_read += size
            data = await reads.popleft()
            if len(data) < min(PIECE_BYTES, end - position):
                raise IntegrityError(
                    f"{what} ends at byte {position + len(data)}, expected {end}: it changed while it was "
                    "copied. Stage again once it is whole."
                )
            digest.update(data)
            if len(writes) >= OUTSTANDING:
                await writes.popleft()
            writes.append(asyncio.create_task(ends.write(position, data, on_bytes)))
            position += len(data)
        while writes:
            await writes.popleft()
        if await ends.read(end, 1):
            raise IntegrityError(
                f"{what} is longer than the {end} bytes that its manifest says: it changed. Stage again once "
                "it is whole."
            )
    finally:
        for task in (*reads, *writes):
            task.cancel()
        await asyncio.gather(*reads, *writes, return_exceptions=True)
    return digest.hexdigest()
