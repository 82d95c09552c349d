"""Real SSH hosts for tests, on loopback: OpenSSH's own sshd, and the asyncssh servers of the demo."""

from __future__ import annotations

import asyncio
import getpass
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import asyncssh
import pytest

from dflash_console.core import demo_hosts
from dflash_console.core.profiles import HostProfile, Profile

Kind = Literal["openssh", "asyncssh"]
KINDS: tuple[Kind, ...] = ("openssh", "asyncssh")

_SSHD = Path("/usr/sbin/sshd")
_START_TIMEOUT_S = 20.0


def require_sshd() -> None:
    """Skip without sshd, or fail where `DFLASH_REQUIRE_SSHD=1` says that nothing may be skipped."""
    if _SSHD.exists():
        return
    reason = f"no {_SSHD}: install openssh-server to run the tests against OpenSSH"
    if os.environ.get("DFLASH_REQUIRE_SSHD") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def user() -> str:
    """The user whom sshd logs in: the one who runs the tests."""
    return getpass.getuser()


def login_shell() -> str:
    """The shell that sshd starts commands with."""
    return pwd.getpwuid(os.getuid()).pw_shell


class OpenSSHHost:
    """One sshd below `root`, with a home folder, host key and client key of its own; stop it with `close`."""

    def __init__(self, root: Path, name: str) -> None:
        require_sshd()
        self.root = root / f"sshd-{name}"
        self.home = self.root / "home"
        self.home.mkdir(parents=True)
        self.log: deque[str] = deque(maxlen=500)
        self.host_key = self.new_key("host")
        self.client_key = self.new_key("client")
        self.known_hosts = self.root / "known_hosts"
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        for _ in range(5):  # a free port may be taken before sshd binds it
            self.port = free_port()
            if self._start():
                break
        else:
            raise RuntimeError("sshd does not start:\n" + "\n".join(self.log))
        self.trust(self.host_key)
        self.profile = HostProfile(
            name=name,
            address="127.0.0.1",
            port=self.port,
            user=user(),
            identity=str(self.client_key),
            known_hosts=str(self.known_hosts),
            state=str(self.home / "dflash"),
            python=sys.executable,
        )

    def new_key(self, name: str, algorithm: str = "ssh-ed25519") -> Path:
        """A fresh private key below `root`, its public half beside it."""
        path = self.root / f"{name}_key"
        key = asyncssh.generate_private_key(algorithm)
        key.write_private_key(path)
        path.chmod(0o600)
        key.write_public_key(f"{path}.pub")
        return path

    def trust(self, private_key: Path) -> None:
        """Have known_hosts name this key, and no other, as the host's."""
        public = Path(f"{private_key}.pub").read_text().strip()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public}\n")

    def _start(self) -> bool:
        config = self.root / "sshd_config"
        config.write_text(
            f"""\
ListenAddress 127.0.0.1
Port {self.port}
HostKey {self.host_key}
AuthorizedKeysFile {self.client_key}.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
Subsystem sftp internal-sftp
SetEnv HOME={self.home}
"""
        )
        self._process = subprocess.Popen(
            [_SSHD, "-D", "-e", "-f", config],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, args=(ready,), daemon=True)
        self._reader.start()
        if not ready.wait(_START_TIMEOUT_S) or self._process.poll() is not None:
            self.close()
            return False
        return any("Server listening" in line for line in self.log)

    def _read_log(self, ready: threading.Event) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line.rstrip())
            if "Server listening" in line:
                ready.set()
        ready.set()

    def signal_connections(self, number: int) -> None:
        """Send a signal to every process that serves a connection, and to no other."""
        pending = [self._process.pid]
        while pending:
            parent = pending.pop()
            with suppress(OSError):  # it may end while it is looked at
                for pid in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
                    if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                        pending.append(pid)
                        os.kill(pid, number)

    def close(self) -> None:
        """End the server and its connections."""
        self.signal_connections(signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._reader.join(5)


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(kind: Kind, root: Path, names: Sequence[str]) -> Iterator[Profile]:
    """Hosts of these names, up while the block runs, and the profile that reaches them."""
    if kind == "openssh":
        servers: list[OpenSSHHost] = []
        try:
            for name in names:
                servers.append(OpenSSHHost(root, name))
            hosts = {server.profile.name: server.profile for server in servers}
            yield Profile(name="test", path=root / "test.toml", hosts=hosts)
        finally:
            for server in servers:
                server.close()
        return
    demo_root = root / "demo"
    running = asyncio.run(demo_hosts.start_demo_hosts(demo_root, names))
    try:
        yield Profile(
            name="test",
            path=root / "test.toml",
            hosts={
                name: HostProfile(
                    name=name,
                    address="127.0.0.1",
                    port=host.port,
                    user=demo_hosts.USER,
                    identity=str(demo_hosts.identity_path(demo_root)),
                    known_hosts=str(demo_hosts.known_hosts_path(demo_root)),
                    python=sys.executable,
                )
                for name, host in running.hosts.items()
            },
        )
    finally:
        asyncio.run(demo_hosts.stop_demo_hosts(demo_root))
