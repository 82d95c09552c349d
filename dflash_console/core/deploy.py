"""The engine that this console carries, on a host: content-addressed, verified before every use.

An engine is `<state>/engines/<hash>/dflash_engine/...`; the hash covers every file, so a name that is there
is the right engine or a damaged one, never another. It takes one round trip to find it in place, two to
send it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import secrets
import shlex
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

import dflash_engine
from dflash_console.core.errors import (
    ConsoleError,
    HostNotReadyError,
    IntegrityError,
    NotFoundError,
    ProfileError,
    RemoteCommandError,
)
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import CommandResult, HostConnection
from dflash_engine import layout

__all__ = [
    "DeployedEngine",
    "EngineBundle",
    "HostProbe",
    "archive",
    "bundled_engine",
    "deploy_engine",
    "engine_hash",
    "engine_json",
    "probe",
    "receiver_command",
    "upload_request",
]

_UPLOAD_TIMEOUT_S = 300.0
_PROBE_TIMEOUT_S = 30.0
_SHELL_CANNOT_START = (126, 127)
_ERROR_MARK = "dflash-engine: error: "
# What the engine's exit codes (dflash_engine.errors) are here; any other code is a failure of the command.
_ENGINE_ERRORS: dict[int, type[ConsoleError]] = {
    3: ProfileError,
    4: HostNotReadyError,
    5: NotFoundError,
    6: IntegrityError,
    7: NotFoundError,
    8: HostNotReadyError,
}


class EngineBundle(msgspec.Struct, frozen=True):
    """The engine's files by POSIX path below its folder, and the hash that names them all together."""

    hash: str
    files: dict[str, bytes]


class DeployedEngine(msgspec.Struct, frozen=True):
    """An engine on a host. `path` goes into PYTHONPATH; `uploaded`: it was not there before."""

    hash: str
    path: PurePosixPath
    uploaded: bool


class HostProbe(msgspec.Struct, frozen=True):
    """What a host is and has; `packages` maps the engine's needs to versions, None where missing."""

    python: str
    packages: dict[str, str | None]
    memory_total_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int
    cpu_count: int


class _Receipt(msgspec.Struct, frozen=True):
    state: Literal["absent", "whole", "unpacked"]
    faults: list[str]


@lru_cache(maxsize=1)
def bundled_engine() -> EngineBundle:
    """Every module of the installed `dflash_engine`; the hash is SHA-256 over sorted paths and contents' hashes."""
    root = Path(dflash_engine.__file__).resolve().parent
    found = [path for path in root.rglob("*") if path.suffix == ".py" or path.name == "py.typed"]
    files = {path.relative_to(root.parent).as_posix(): path.read_bytes() for path in sorted(found)}
    return EngineBundle(engine_hash(files), files)


def engine_hash(files: dict[str, bytes]) -> str:
    """The name of an engine of these files, 64 hexadecimal digits."""
    lines = [f"{path} {sha256}\n" for path, sha256 in sorted(_hashes(files).items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def upload_request(path: PurePosixPath, bundle: EngineBundle) -> bytes:
    """What the receiver reads to unpack the engine to `path`."""
    return _request(path, bundle, f"{path.name}{layout.PARTIAL_MARK}{secrets.token_hex(6)}") + archive(bundle.files)


def receiver_command(conn: HostConnection) -> list[str]:
    """The host's Python with the receiver's source, isolated from whatever lies there."""
    return [conn.profile.python, "-I", "-c", _receiver_source()]


async def deploy_engine(conn: HostConnection) -> DeployedEngine:
    """Have the bundled engine on the host, every file verified there by its hash.

    Two consoles at once are fine: the second finds the first one's. Raises HostNotReadyError (no Python, an
    old one, no room) and IntegrityError where the deployed engine is not what its name says.
    """
    bundle = await asyncio.to_thread(bundled_engine)
    path = conn.state / layout.engine_dir(bundle.hash)
    receipt = await _receive(conn, _request(path, bundle, None))
    uploaded = False
    if receipt.state == "absent":
        receipt = await _receive(conn, await asyncio.to_thread(upload_request, path, bundle))
        uploaded = receipt.state == "unpacked"
    if receipt.faults:
        what = printable("; ".join(receipt.faults), 400)
        if receipt.state == "absent":
            raise IntegrityError(f"{conn.name}: the engine did not arrive whole: {what}. Try again.")
        raise IntegrityError(
            f"{conn.name}: the engine in {path} is not the one that was deployed: {what}. Remove it on the host "
            f"and it is deployed again: rm -r {shlex.quote(str(path))}"
        )
    return DeployedEngine(bundle.hash, path, uploaded)


async def engine_json(
    conn: HostConnection,
    engine: DeployedEngine,
    arguments: Sequence[str],
    *,
    timeout_s: float = 60.0,
    codes: tuple[int, ...] = (0,),
) -> Any:
    """Run one engine command on the host and return the JSON that it prints with one of these exit codes.

    Raises HostNotReadyError (no Python, a package or module is missing, no room), NotFoundError (target,
    prompts), IntegrityError (checkpoint refused), ProfileError (an argument's value), each with the engine's
    own words; RemoteCommandError for any other failure and for an answer that is not JSON.
    """
    command = [conn.profile.python, "-P", "-m", "dflash_engine.cli", *arguments]
    environment = {**conn.profile.env, "PYTHONPATH": str(engine.path)}
    result = await conn.run(command, env=environment, timeout_s=timeout_s)
    if result.code not in codes or (result.code and not result.stdout.strip()):
        raise _engine_fault(conn, result, printable(arguments[0], 60))
    try:
        return json.loads(result.stdout)
    except (ValueError, RecursionError) as error:
        said = printable(result.stdout.decode(errors="replace"), 200)
        raise RemoteCommandError(
            f"{conn.name}: the engine's {printable(arguments[0], 60)} answered '{said}', expected JSON."
        ) from error


async def probe(conn: HostConnection, engine: DeployedEngine) -> HostProbe:
    """What the host is and has, measured in the state folder's file system."""
    answer = await engine_json(conn, engine, ["probe", str(conn.state)], timeout_s=_PROBE_TIMEOUT_S)
    try:
        found = msgspec.convert(answer, HostProbe)
    except msgspec.ValidationError as error:
        raise RemoteCommandError(f"{conn.name}: the engine's probe cannot be read: {error}.") from error
    versions = {name: None if v is None else printable(v, 60) for name, v in found.packages.items()}
    return msgspec.structs.replace(found, python=printable(found.python, 60), packages=versions)


def _hashes(files: dict[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}


@lru_cache(maxsize=1)
def _receiver_source() -> str:
    return Path(__file__).with_name("engine_receiver.py").read_text(encoding="utf-8")


async def _receive(conn: HostConnection, stdin: bytes) -> _Receipt:
    result = await conn.run(receiver_command(conn), stdin=stdin, timeout_s=_UPLOAD_TIMEOUT_S)
    if result.code != 0:
        raise _python_fault(conn, result)
    try:
        return msgspec.json.decode(result.stdout, type=_Receipt)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        said = printable(result.stdout.decode(errors="replace"), 200)
        raise RemoteCommandError(f"{conn.name}: deploying answered '{said}', expected JSON.") from error


def _request(path: PurePosixPath, bundle: EngineBundle, partial: str | None) -> bytes:
    request = {"engines": str(path.parent), "name": path.name, "partial": partial, "files": _hashes(bundle.files)}
    return json.dumps(request).encode() + b"\n"


def archive(files: dict[str, bytes]) -> bytes:
    """A gzipped tar of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _python_fault(conn: HostConnection, result: CommandResult) -> HostNotReadyError:
    """Why the host's Python did not do what a working one does."""
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    said = printable(lines[-1], 300) if lines else f"exit code {result.code}"
    if result.code in _SHELL_CANNOT_START:
        return HostNotReadyError(
            f"{conn.name}: there is no Python at {conn.profile.python!r} ({said}). Set `python` in the profile to a "
            "Python 3.11 or newer."
        )
    return HostNotReadyError(f"{conn.name}: {conn.profile.python} cannot take the engine: {said}.")


def _engine_fault(conn: HostConnection, result: CommandResult, command: str) -> ConsoleError:
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    for line in reversed(lines):
        if line.startswith(_ERROR_MARK):
            kind = _ENGINE_ERRORS.get(result.code, RemoteCommandError)
            return kind(f"{conn.name}: {printable(line.removeprefix(_ERROR_MARK), 1000)}")
    if result.code in _SHELL_CANNOT_START:
        return _python_fault(conn, result)
    said = printable(lines[-1], 300) if lines else "nothing"
    if "No module named" in said:
        return HostNotReadyError(
            f"{conn.name}: {conn.profile.python} cannot run the engine ({said}). Install its packages there: "
            "pip install 'dflash-ops[engine]'"
        )
    return RemoteCommandError(f"{conn.name}: the engine's {command} ended with code {result.code} and said: {said}.")
