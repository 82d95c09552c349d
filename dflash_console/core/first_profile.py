"""The first profile: answers about a host, tried against that host, and written as the operator's TOML file.

What is tried is what is written: answers become a `HostProfile` only by being loaded from the text that would
go into the file, so the profile's own checks are the only ones there are.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import asyncssh
import msgspec

from dflash_console.core.errors import HostKeyError, ProfileError
from dflash_console.core.host_keys import HostKey, KeyWitness, fetch_host_key, trust_host, trusted_keys
from dflash_console.core.profiles import HostProfile, load_profile
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import HostConnection
from dflash_engine.durable import sync_folder, write_text
from dflash_engine.layout import is_valid_name

__all__ = [
    "ConnectionFacts",
    "HostAnswers",
    "check_answers",
    "check_profile_name",
    "host_key_of",
    "profile_text",
    "trust_key_of",
    "try_connection",
    "write_first_profile",
]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PYTHON_TIMEOUT_S = 15.0
_LEAST_PYTHON = (3, 11)


class HostAnswers(msgspec.Struct, frozen=True):
    """What was answered about one host; an empty text means that SSH's own configuration decides."""

    name: str
    address: str
    port: int | None = None
    user: str = ""
    identity: str = ""
    """Private key file, absolute or below `~/`; empty: the SSH agent and the default keys."""
    state: str = "~/dflash"
    python: str = "python3"
    roles: tuple[Literal["train", "evaluate"], ...] = ()


class ConnectionFacts(msgspec.Struct, frozen=True):
    """What a connection showed. `clock_offset_s` is the host's clock minus this machine's, in seconds."""

    home: str
    """The host user's home folder."""
    state: str
    """The state folder as an absolute path; it exists and can be written."""
    clock_offset_s: float
    python: str
    """Version of the host's Python, such as `3.12.4`; empty where it did not say one."""
    python_fault: str
    """Why that Python cannot be used; empty where it can."""


_BLAMELESS = HostAnswers(name="host", address="host.example")


def check_answers(answers: HostAnswers) -> dict[str, str]:
    """What is wrong with the answers: field -> one message. Empty where a profile with them would load."""
    faults = {}
    for field in HostAnswers.__struct_fields__:
        value = getattr(answers, field)
        if isinstance(value, str) and printable(value, len(value) + 1) != value:
            faults[field] = f"{field} is '{printable(value, 100)}', expected characters that can be shown."
        elif field == "identity" and value and not value.startswith(("/", "~/")):
            # In a profile a relative path is relative to the profile's folder: nobody who types one means that.
            faults[field] = f"identity is {value[:100]!r}, expected an absolute path or one that begins with ~/."
        elif fault := _fault(msgspec.structs.replace(_BLAMELESS, **{field: value})):
            faults[field] = fault
    return faults


def check_profile_name(name: str, folder: Path) -> str:
    """Why no profile can be written under this name; empty where one can."""
    if not is_valid_name(name):
        return (
            f"'{printable(name, 100)}' is no profile name; expected letters, digits, '.', '_' and '-', "
            "the first a letter or digit."
        )
    path = folder / f"{name}.toml"
    if os.path.lexists(path):
        return f"There is a profile {name!r} already, {path}; choose another name, or edit that file."
    return ""


async def host_key_of(answers: HostAnswers) -> tuple[HostKey, bool]:
    """The key that the host shows now, and whether known_hosts has it; nothing is stored.

    Raises ProfileError, UnreachableError, and HostKeyError where another key is known or this one is revoked.
    """
    host = await asyncio.to_thread(_host, answers)
    shown = await fetch_host_key(host)
    witness = _witness(shown)
    trusted, revoked = witness.matches(trusted_keys(host))
    path = host.known_hosts_path()
    if witness.key in revoked:
        raise HostKeyError(f"{host.name} ({witness.pattern}) shows the key {shown.fingerprint}, which {path} revokes.")
    if witness.key in trusted:
        return shown, True
    same_type = [key for key in trusted if witness.key and key.algorithm == witness.key.algorithm]
    if same_type:
        known = ", ".join(key.get_fingerprint() for key in same_type)
        raise HostKeyError(
            f"{host.name} ({witness.pattern}) shows another host key than before: found {shown.fingerprint}, {path} "
            f"has {known}. Someone may stand between you and the host. If its administrator confirms the new key, "
            f"take the old one out and test again: ssh-keygen -R '{witness.pattern}' -f {path}"
        )
    return shown, False


async def trust_key_of(answers: HostAnswers, fingerprint: str) -> None:
    """Add the host's key to known_hosts, if it still shows the one of this fingerprint.

    Raises HostKeyError where it shows another one, ProfileError, UnreachableError.
    """
    await trust_host(await asyncio.to_thread(_host, answers), fingerprint)


async def try_connection(answers: HostAnswers) -> ConnectionFacts:
    """Connect as the dashboard would, make the state folder, ask the host's Python for its version, close.

    A Python that cannot be used raises nothing: `python_fault` says why. Raises ProfileError, UnreachableError,
    HostKeyError, AuthenticationError, HostNotReadyError, RemoteCommandError.
    """
    host = await asyncio.to_thread(_host, answers)
    connection = await HostConnection.open(host, "NAME")
    try:
        home = await connection.run(["printenv", "HOME"])
        python = connection.profile.python
        result = await connection.run([python, "--version"], timeout_s=_PYTHON_TIMEOUT_S)
    finally:
        await connection.close()
    said = printable((result.stdout or result.stderr).decode(errors="replace").strip(), 200)
    version = re.match(r"Python (\d+)\.(\d+)\S*", said)
    fault = ""
    if result.code != 0 or version is None:
        fault = f"{python} --version ended with code {result.code} and said: {said or 'nothing'}"
    elif (int(version[1]), int(version[2])) < _LEAST_PYTHON:
        fault = f"{python} is {said}, the engine needs Python 3.11 or newer"
    return ConnectionFacts(
        home=printable(home.stdout.decode(errors="replace").strip(), 300),
        state=printable(str(connection.state), 300),
        clock_offset_s=connection.clock_offset_s,
        python=version[0].removeprefix("Python ") if version else "",
        python_fault=fault,
    )


def profile_text(hosts: Sequence[HostAnswers]) -> str:
    """A profile of these hosts as TOML, with comments that tell what else can be set."""
    lines = [
        "# Written by the first start of `dflash-console`; from here on it is yours to edit.",
        "# `~` of state, python and targets is the host user's home. A host may also have known_hosts,",
        "# connect_timeout_s, target_gpus, drafter_gpus and env.",
    ]
    for host in hosts:
        table = f"hosts.{_key(host.name)}"
        lines += ["", f"[{table}]", f"address = {_quoted(host.address)}"]
        lines += [f"port = {host.port}"] if host.port is not None else []
        lines += [f"user = {_quoted(host.user)}"] if host.user else []
        lines += [f"identity = {_quoted(host.identity)}"] if host.identity else []
        lines += [f"state = {_quoted(host.state)}", f"python = {_quoted(host.python)}"]
        lines += [f"roles = [{', '.join(_quoted(role) for role in host.roles)}]"] if host.roles else []
        lines += [
            "",
            "# Target models on this host: name = folder.",
            f"# [{table}.targets]",
            '# "qwen3.6-27b" = "/models/Qwen3.6-27B"',
        ]
    lines += [
        "",
        "# Prompts of evaluations and recipes of trainings: name = local file, relative to this one.",
        "# [prompts]",
        '# heldout = "data/heldout.jsonl"',
        "# [recipes]",
        '# first = "recipes/first.toml"',
        "",
        "# What an evaluation takes unless told otherwise.",
        "# [evaluate]",
        '# target = "qwen3.6-27b"',
        '# prompts = ["heldout"]',
    ]
    return "\n".join(lines) + "\n"


def write_first_profile(name: str, hosts: Sequence[HostAnswers], folder: Path) -> Path:
    """Write `NAME.toml` into `folder`, which is made if need be; returns its path.

    It appears whole or not at all, has been loaded once, and never replaces another. Raises ProfileError.
    """
    if fault := check_profile_name(name, folder):
        raise ProfileError(fault)
    names = [host.name for host in hosts]
    if twice := sorted({host for host in names if names.count(host) > 1}):
        raise ProfileError(f"Two hosts are called {printable(twice[0], 100)!r}; a profile has one of each name.")
    path = folder / f"{name}.toml"
    # No file that ends in .toml: in this folder that would be a profile.
    draft = folder / f".{name}.{secrets.token_hex(4)}.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_text(draft, profile_text(hosts))
            load_profile(str(draft), [])
            path.hardlink_to(draft)  # unlike a rename, this fails where the name is taken meanwhile
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(folder)
    except FileExistsError as error:
        raise ProfileError(check_profile_name(name, folder) or f"{path} cannot be written: it exists.") from error
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def _host(answers: HostAnswers) -> HostProfile:
    """The answers as the profile that they would be written to says them. Raises ProfileError."""
    with tempfile.TemporaryDirectory(prefix="dflash-console-") as folder:
        path = Path(folder) / "answers.toml"
        path.write_text(profile_text([answers]), encoding="utf-8")
        return load_profile(str(path), []).hosts[answers.name]


def _fault(answers: HostAnswers) -> str:
    """Why no profile with these answers loads, without the name of a file that nobody knows."""
    try:
        _host(answers)
    except ProfileError as error:
        _, _, fault = str(error).partition(f"[hosts.{printable(answers.name, 100)}] ")
        return fault if answers.name == _BLAMELESS.name else f"'{printable(answers.name, 100)}' {fault}"
    return ""


def _witness(key: HostKey) -> KeyWitness:
    """What saw this key, for asking known_hosts about it."""
    pattern, _, public = key.line.partition(" ")
    witness = KeyWitness()
    witness.key = asyncssh.import_public_key(public)
    witness.host = pattern
    if bracketed := re.fullmatch(r"\[(.*)\]:(\d+)", pattern):
        witness.host, witness.port = bracketed[1], int(bracketed[2])
    return witness


def _key(name: str) -> str:
    """A key of a TOML table, quoted where it must be."""
    return name if _BARE_KEY.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, which also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
