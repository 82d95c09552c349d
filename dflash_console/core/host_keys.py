"""Host keys: which key a host shows, which ones are trusted, and how one becomes trusted.

A connection is made only to a host whose key `known_hosts` has. There is no "accept the first one": a new
key is added by `trust_host`, by someone who names its fingerprint.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from pathlib import Path
from typing import Any

import asyncssh
import msgspec

from dflash_console.core.errors import ConsoleError, HostKeyError, ProfileError, UnreachableError
from dflash_console.core.profiles import HostProfile
from dflash_console.core.quoting import printable

__all__ = [
    "HostKey",
    "KeyWitness",
    "address_options",
    "connection_fault",
    "disconnection_fault",
    "fetch_host_key",
    "host_key_fault",
    "trust_host",
    "trusted_keys",
]

_DEFAULT_PORT = 22


class HostKey(msgspec.Struct, frozen=True):
    """A host's public key: `SHA256:...` and its line for known_hosts, without a newline."""

    fingerprint: str
    line: str


class KeyWitness(asyncssh.SSHClient):
    """Remembers the key that a host showed when it was not a trusted one, and under which name."""

    def __init__(self) -> None:
        self.key: asyncssh.SSHKey | None = None
        self.host = ""
        self.address = ""
        self.port = _DEFAULT_PORT

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Called by asyncssh for a key that is not in known_hosts: note it, refuse it."""
        self.host, self.address, self.port, self.key = host, addr, port, key
        return False

    def matches(self, trusted: asyncssh.SSHKnownHosts) -> tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey]]:
        """The keys that known_hosts has for this host: trusted ones, revoked ones."""
        port = None if self.port == _DEFAULT_PORT else self.port
        by_port = trusted.match(self.host, self.address, port)
        # asyncssh forgets what is revoked for a host with a port where nothing is trusted for it.
        by_name = trusted.match(self.pattern, "", None)
        return list({*by_port[0], *by_name[0]}), list({*by_port[2], *by_name[2]})

    @property
    def pattern(self) -> str:
        """How known_hosts names this host."""
        return self.host if self.port == _DEFAULT_PORT else f"[{self.host}]:{self.port}"


def address_options(host: HostProfile) -> dict[str, Any]:
    """What says where the host is, for asyncssh; what the profile does not give is left to ~/.ssh/config."""
    options: dict[str, Any] = {"host": host.address, "connect_timeout": host.connect_timeout_s}
    if host.port is not None:
        options["port"] = host.port
    if host.user is not None:
        options["username"] = host.user
    return options


def trusted_keys(host: HostProfile) -> asyncssh.SSHKnownHosts:
    """The content of the host's known_hosts file; a file that is not there trusts nobody.

    Always passed to asyncssh as this object: given an empty text it would look elsewhere, and given None it
    would not verify at all. Raises HostKeyError where the file cannot be read.
    """
    path = host.known_hosts_path()
    try:
        return asyncssh.import_known_hosts(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return asyncssh.import_known_hosts("")
    except (OSError, ValueError) as error:
        raise HostKeyError(f"{path} cannot be read as known_hosts: {printable(str(error), 200)}.") from error


def connection_fault(host: HostProfile, error: Exception) -> ConsoleError:
    """Why no connection came about, for everything but host keys and authentication."""
    where = f"{host.name} ({host.address}{f':{host.port}' if host.port else ''})"
    if isinstance(error, asyncssh.ConfigParseError):
        return ProfileError(f"{where}: ~/.ssh/config cannot be read: {printable(str(error), 300)}.")
    if isinstance(error, TimeoutError):
        reason = f"gave no answer within {host.connect_timeout_s:g} s; is it up, and is the address right?"
    elif isinstance(error, socket.gaierror):
        reason = "has an address that does not resolve; check `address` in the profile."
    elif isinstance(error, ConnectionRefusedError):
        reason = "refuses the connection: no SSH server listens there. Check the port, and that sshd runs."
    elif isinstance(error, asyncssh.DisconnectError):
        reason = f"ended the connection: {printable(error.reason, 300) or 'no reason given'}."
    elif isinstance(error, OSError):
        reason = f"cannot be reached: {printable(error.strerror or str(error), 300)}."
    else:
        reason = f"cannot be reached: {printable(str(error), 300)}."
    return UnreachableError(f"{where} {reason}")


async def fetch_host_key(host: HostProfile) -> HostKey:
    """The key that the host shows now; nothing is trusted, sent or stored. Raises UnreachableError."""
    witness = await _witness_key(host)
    return _host_key(witness)


async def trust_host(host: HostProfile, fingerprint: str) -> HostKey:
    """Add the host's key to its known_hosts, if its fingerprint is exactly `fingerprint`.

    Raises HostKeyError where it is another one, or where another key of its type is trusted already.
    """
    witness = await _witness_key(host)
    found = _host_key(witness)
    path = host.known_hosts_path()
    if found.fingerprint != fingerprint:
        raise HostKeyError(
            f"{host.name}: the host shows {found.fingerprint}, expected {printable(fingerprint, 200)}. "
            "Nothing was trusted; ask the host's administrator for the fingerprint."
        )
    trusted, revoked = witness.matches(trusted_keys(host))
    if witness.key in trusted:
        return found
    same_type = [key for key in trusted if witness.key and key.algorithm == witness.key.algorithm]
    if same_type or witness.key in revoked:
        raise HostKeyError(
            f"{host.name}: {path} has another key for {witness.pattern} ({_fingerprints(same_type)}) or revokes "
            f"this one. Remove that first: {_removal(witness.pattern, path)}"
        )
    await asyncio.to_thread(_append_line, path, found.line)
    return found


async def disconnection_fault(
    host: HostProfile, profile_name: str, trusted: asyncssh.SSHKnownHosts, error: Exception
) -> ConsoleError:
    """The error for a connection that ended while it was made.

    A host that has no key of a trusted type ends the key exchange like that, so it is asked which it has.
    """
    try:
        witness = await _witness_key(host)
    except ConsoleError:
        return connection_fault(host, error)
    known, _ = witness.matches(trusted)
    if known and witness.key is not None and witness.key.algorithm not in {key.algorithm for key in known}:
        return host_key_fault(host, profile_name, witness, trusted)
    return connection_fault(host, error)


def host_key_fault(
    host: HostProfile, profile_name: str, witness: KeyWitness, trusted: asyncssh.SSHKnownHosts
) -> ConsoleError:
    """The error for a key that was not accepted: unknown, changed or revoked, with what to do."""
    found = _host_key(witness)
    path = host.known_hosts_path()
    where = f"{host.name} ({witness.pattern})"
    trust = (
        f"dflash-console --profile {shlex.quote(profile_name)} hosts trust {shlex.quote(host.name)} "
        f"--fingerprint {found.fingerprint}"
    )
    known, revoked = witness.matches(trusted)
    if witness.key in revoked:
        return HostKeyError(f"{where} shows the host key {found.fingerprint}, which {path} revokes.")
    if known:
        return HostKeyError(
            f"{where} shows another host key than before: found {found.fingerprint}, {path} has "
            f"{_fingerprints(known)}. Someone may stand between you and the host. If its administrator confirms "
            f"the new key: {_removal(witness.pattern, path)} && {trust}"
        )
    return HostKeyError(
        f"{where} shows a host key that {path} does not have: {found.fingerprint}. If this is what the host's "
        f"administrator says: {trust}"
    )


async def _witness_key(host: HostProfile) -> KeyWitness:
    witness = KeyWitness()
    try:
        async with asyncio.timeout(host.connect_timeout_s):
            connection, _ = await asyncssh.create_connection(
                lambda: witness,
                known_hosts=asyncssh.import_known_hosts(""),
                client_keys=None,
                **address_options(host),
            )
    except asyncssh.HostKeyNotVerifiable as error:
        if witness.key is None:
            raise HostKeyError(f"{host.name}: {printable(error.reason, 300)}.") from error
        return witness
    except (asyncssh.Error, OSError, ValueError) as error:
        raise connection_fault(host, error) from error
    connection.abort()
    raise HostKeyError(f"{host.name} showed no host key; expected one in every key exchange.")


def _host_key(witness: KeyWitness) -> HostKey:
    if witness.key is None:
        raise HostKeyError("the host showed no key of its own.")
    algorithm, data = witness.key.export_public_key().decode("ascii").split()[:2]
    return HostKey(witness.key.get_fingerprint(), f"{witness.pattern} {algorithm} {data}")


def _fingerprints(keys: list[asyncssh.SSHKey]) -> str:
    return ", ".join(key.get_fingerprint() for key in keys) or "none"


def _removal(pattern: str, path: Path) -> str:
    return f"ssh-keygen -R {shlex.quote(pattern)} -f {shlex.quote(str(path))}"


def _append_line(path: Path, line: str) -> None:
    """One write on an append-only descriptor, so that two consoles that trust at once keep both lines."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, b"\n" * torn + line.encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise HostKeyError(f"{path} cannot be written: {error.strerror}.") from error
