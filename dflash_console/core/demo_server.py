"""The process behind the demo hosts: several SSH servers on loopback, each with a home folder and a host key.

Started by `demo_hosts.start_demo_hosts` as `python -m dflash_console.core.demo_server`. It detaches itself,
so it outlives whoever started it. Only public keys authenticate. A command runs in a session of its own and
is killed when its channel closes; what it put into another session (`setsid`) stays, also after the server.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import posixpath
import signal
import sys
from functools import partial
from pathlib import Path

import asyncssh

from dflash_console.core.demo_hosts import (
    USER,
    DemoHost,
    DemoHosts,
    hosts_path,
    identity_path,
    known_hosts_path,
    lock_path,
    write_hosts,
)
from dflash_engine.durable import write_text
from dflash_engine.processes import boot_id, process_identity

__all__ = ["main"]

_PIECE_BYTES = 64 << 10
_ADDRESS = "127.0.0.1"


def main() -> int:
    """Serve until SIGTERM. Writes to `--ready-fd`: `ready`, or `busy` where another server has the root."""
    parser = argparse.ArgumentParser(prog="python -m dflash_console.core.demo_server")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--name", action="append", required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args()
    if os.fork():  # the starter waits for this process only, and never has the server as its child
        return 0
    with lock_path(arguments.root).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.write(arguments.ready_fd, b"busy")
            return 1
        asyncio.run(_serve(arguments.root, arguments.name, arguments.ready_fd))
    return 0


async def _serve(root: Path, names: list[str], ready_fd: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    client_key = _key(identity_path(root))
    commands = _Commands()
    acceptors, hosts, lines = [], {}, []
    for name in names:
        home = root / name / "home"
        home.mkdir(parents=True, exist_ok=True)
        host_key = _key(root / name / "host_ed25519")
        acceptor = await asyncssh.listen(
            _ADDRESS,
            0,
            server_host_keys=[host_key],
            authorized_client_keys=asyncssh.import_authorized_keys(client_key.export_public_key().decode()),
            public_key_auth=True,
            password_auth=False,
            kbdint_auth=False,
            host_based_auth=False,
            agent_forwarding=False,
            allow_pty=False,
            process_factory=partial(commands.run, home),
            sftp_factory=partial(_HomeSFTPServer, home),
            encoding=None,
            keepalive_interval=15,
        )
        acceptors.append(acceptor)
        hosts[name] = DemoHost(port=acceptor.get_port(), home=str(home))
        algorithm, data = host_key.export_public_key().decode().split()[:2]
        lines.append(f"[{_ADDRESS}]:{acceptor.get_port()} {algorithm} {data}\n")
    write_text(known_hosts_path(root), "".join(lines))
    identity = process_identity(os.getpid())
    start_ticks = identity.start_ticks if identity else 0
    write_hosts(root, DemoHosts(pid=os.getpid(), start_ticks=start_ticks, boot_id=boot_id(), hosts=hosts))
    os.write(ready_fd, b"ready")
    os.close(ready_fd)
    await stop.wait()
    hosts_path(root).unlink(missing_ok=True)
    for acceptor in acceptors:
        acceptor.close()
    commands.kill_all()


def _key(path: Path) -> asyncssh.SSHKey:
    """The ed25519 key in `path`, made and kept there at first use."""
    if not path.exists():
        key = asyncssh.generate_private_key("ssh-ed25519")
        write_text(path, key.export_private_key().decode(), mode=0o600)
        write_text(Path(f"{path}.pub"), key.export_public_key().decode())
    return asyncssh.read_private_key(path)


class _Commands:
    """The commands that are running; all sessions of all hosts."""

    def __init__(self) -> None:
        self._groups: set[int] = set()

    async def run(self, home: Path, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """One session's command from start to exit status."""
        if process.command is None:
            process.stderr.write(b"This host runs commands; it has no interactive shell.\n")
            process.exit(1)
            return
        child = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            process.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=home,
            env=_environment(home),
            start_new_session=True,
        )
        self._groups.add(child.pid)
        if child.stdin is None or child.stdout is None or child.stderr is None:
            raise RuntimeError("a child that was started with pipes has none")
        feeding = asyncio.create_task(_feed(process.stdin, child.stdin))
        output = asyncio.create_task(_forward(child.stdout, child.stderr, process))
        closed = asyncio.create_task(process.channel.wait_closed())
        try:
            await asyncio.wait([output, closed], return_when=asyncio.FIRST_COMPLETED)
            if closed.done() or output.exception() is not None:
                _kill_group(child.pid)
            code = await child.wait()
            if not closed.done():
                if code < 0:
                    process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
                else:
                    process.exit(code)
        finally:
            self._groups.discard(child.pid)
            for task in (feeding, output, closed):
                task.cancel()
            await asyncio.gather(feeding, output, closed, return_exceptions=True)

    def kill_all(self) -> None:
        """Kill what has not detached itself."""
        for group in self._groups:
            _kill_group(group)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


async def _feed(source: asyncssh.SSHReader[bytes], sink: asyncio.StreamWriter) -> None:
    try:
        while piece := await source.read(_PIECE_BYTES):
            sink.write(piece)
            await sink.drain()
    except (ConnectionError, asyncssh.Error):
        return  # the command reads no more, or the client has gone; the output's end decides
    finally:
        sink.close()


async def _forward(
    stdout: asyncio.StreamReader, stderr: asyncio.StreamReader, process: asyncssh.SSHServerProcess[bytes]
) -> None:
    await asyncio.gather(_drain(stdout, process.stdout), _drain(stderr, process.stderr))


async def _drain(source: asyncio.StreamReader, sink: asyncssh.SSHWriter[bytes]) -> None:
    while piece := await source.read(_PIECE_BYTES):
        sink.write(piece)
        await sink.drain()


def _environment(home: Path) -> dict[str, str]:
    """What a login gives, and nothing of the environment that the server was started in."""
    return {
        "HOME": str(home),
        "USER": USER,
        "LOGNAME": USER,
        "SHELL": "/bin/sh",
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
    }


class _HomeSFTPServer(asyncssh.SFTPServer):
    """SFTP over the whole file system, as a real host's; relative paths begin in the home."""

    def __init__(self, home: Path, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        super().__init__(chan)
        self._home = os.fsencode(home)

    def map_path(self, path: bytes) -> bytes:
        return posixpath.join(self._home, path)


if __name__ == "__main__":
    sys.exit(main())
