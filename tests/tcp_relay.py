"""A TCP relay in front of a host, so that a test can cut a connection and count what went through it."""

from __future__ import annotations

import asyncio
from types import TracebackType

import msgspec

from dflash_console.core.profiles import HostProfile


class Relay:
    """Forwards every connection to one host. `bytes_up` counts what went towards the host."""

    def __init__(self, behind: HostProfile) -> None:
        self._behind = behind
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes_up = 0
        self.host = behind

    @classmethod
    def to(cls, behind: HostProfile) -> Relay:
        """A relay to the host of this profile; enter it to start it."""
        return cls(behind)

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        known = self._behind.known_hosts_path()
        copy = known.with_name(f"{known.name}.relay")
        copy.write_text(known.read_text().replace(f":{self._behind.port} ", f":{port} "))
        self.host = msgspec.structs.replace(self._behind, port=port, known_hosts=str(copy))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection at once, as a network does that goes away."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._behind.address, self._behind.port)
        self._writers += [writer, up_writer]
        for task in (self._pump(reader, up_writer, up=True), self._pump(up_reader, writer, up=False)):
            running = asyncio.create_task(task)
            self._tasks.add(running)
            running.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        try:
            while data := await reader.read(1 << 16):
                if up:
                    self.bytes_up += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
