"""Profiles: which hosts there are, what they are called and what lies where. TOML in, typed records out.

A profile is one file, `NAME.toml`. Unknown keys are refused with the nearest known one, because a misspelt
key that is silently ignored is a wrong default. Local paths in it are relative to the file; `~` is the
operator's home in them, and the host user's home in `state`, `python` and `targets`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import msgspec
import platformdirs

from dflash_console.core.errors import ProfileError, UnknownHostError
from dflash_console.core.quoting import printable
from dflash_engine.layout import is_valid_name

__all__ = [
    "EvaluateDefaults",
    "HostProfile",
    "Profile",
    "host_of",
    "load_profile",
    "profile_search",
    "shipped_profiles_dir",
]

_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:%-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@\\+$-]*")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_Record = TypeVar("_Record", bound=msgspec.Struct)


class HostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One host as the profile describes it.

    Where `port`, `user`, `identity` or `known_hosts` is not given, `~/.ssh/config` and then SSH's own
    defaults decide; what is given here wins.
    """

    name: str
    address: str
    """Host name, IP address, or an alias of `~/.ssh/config`."""
    port: int | None = None
    user: str | None = None
    identity: str | None = None
    """Private key file; without it the agent and SSH's default keys are tried."""
    known_hosts: str | None = None
    state: str = "~/dflash"
    """State folder on the host: engines, runs, jobs, cache."""
    python: str = "python3"
    """Python 3.11 or newer on the host, with the engine's packages."""
    roles: tuple[Literal["train", "evaluate"], ...] = ()
    target_gpus: tuple[int, ...] = ()
    """GPUs for the frozen target's ranks when the host trains; none: no preference."""
    drafter_gpus: tuple[int, ...] = ()
    targets: dict[str, str] = {}
    """Name of a target model -> its folder on the host."""
    env: dict[str, str] = {}
    """Added to the environment of everything that runs there. No place for secrets: jobs record it."""
    connect_timeout_s: float = 10.0

    def known_hosts_path(self) -> Path:
        """The file that says which host keys are trusted, and to which `hosts trust` appends."""
        return Path(self.known_hosts or "~/.ssh/known_hosts").expanduser()


class EvaluateDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `run-eval` takes where its options say nothing."""

    target: str = ""
    prompts: tuple[str, ...] = ()
    """Names from `[prompts]`; none: all of them."""
    max_new_tokens: int = 128
    block_size: int = 0
    """0: the checkpoint's own."""
    limit: int = 0
    """Only the first so many prompts; 0: all."""
    reference: Literal["local"] = "local"
    """Where greedy references come from: the evaluating host's own copy of the target."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 0
    """CPU threads; 0: as many as the host has cores."""


class Profile(msgspec.Struct, frozen=True):
    """A profile as loaded. `name` is what was asked for: the word after `--profile`."""

    name: str
    path: Path
    hosts: dict[str, HostProfile]
    prompts: dict[str, Path] = {}
    """Name -> local JSON Lines file."""
    recipes: dict[str, Path] = {}
    """Name -> local recipe."""
    evaluate: EvaluateDefaults = EvaluateDefaults()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: dict[str, dict[str, Any]]
    prompts: dict[str, str] = {}
    recipes: dict[str, str] = {}
    evaluate: dict[str, Any] = {}


def shipped_profiles_dir() -> Path:
    """The folder of the profiles that ship: inside an installed wheel, or beside the packages in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "shipped_profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def profile_search() -> tuple[Path, ...]:
    """Where a profile's name is looked up, in order: the user's own folder, then what ships."""
    return (Path(platformdirs.user_config_dir("dflash-ops")) / "profiles", shipped_profiles_dir())


def host_of(profile: Profile, name: str) -> HostProfile:
    """The host of that name. Raises UnknownHostError, which lists the names that there are."""
    host = profile.hosts.get(name)
    if host is None:
        known = ", ".join(profile.hosts) or "none"
        raise UnknownHostError(
            f"Profile {profile.name} has no host {printable(name, 100)!r}; it has: {known}. "
            f"Choose one of these, or add [hosts.NAME] to {profile.path}."
        )
    return host


def load_profile(name_or_path: str, search: Sequence[Path]) -> Profile:
    """Load `NAME.toml` from the first folder of `search` that has it, or a TOML file by its path.

    What holds a separator or ends in `.toml` is a path. Raises ProfileError for an unknown profile, for what
    is not TOML, and for unknown keys or unusable values, naming file, table and key.
    """
    path = _find(name_or_path, search)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"Profile {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} is not TOML: {error}.") from error
    file = _record(_File, document, path, "the top level")
    if not file.hosts:
        raise ProfileError(f"{path}: [hosts] names no host; expected at least one table [hosts.NAME].")
    hosts = {name: _host(name, table, path) for name, table in file.hosts.items()}
    prompts = {name: _local(text, path) for name, text in file.prompts.items()}
    recipes = {name: _local(text, path) for name, text in file.recipes.items()}
    evaluate = _record(EvaluateDefaults, file.evaluate, path, "[evaluate]")
    for name in evaluate.prompts:
        if name not in prompts:
            known = ", ".join(prompts) or "none"
            raise ProfileError(
                f"{path}: [evaluate] prompts names {printable(name, 100)!r}, which [prompts] does not have; "
                f"it has: {known}."
            )
    for key, least in (("max_new_tokens", 2), ("block_size", 0), ("limit", 0), ("threads", 0)):
        if getattr(evaluate, key) < least:
            raise ProfileError(f"{path}: [evaluate] {key} is {getattr(evaluate, key)}, expected at least {least}.")
    return Profile(name_or_path, path, hosts, prompts, recipes, evaluate)


def _find(name_or_path: str, search: Sequence[Path]) -> Path:
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        path = Path(name_or_path).expanduser().absolute()
        if not path.is_file():
            raise ProfileError(f"There is no profile file {path}; expected the path of a TOML file.")
        return path
    if is_valid_name(name_or_path):
        for folder in search:
            path = (folder / f"{name_or_path}.toml").absolute()
            if path.is_file():
                return path
    known = sorted({path.stem for folder in search for path in folder.glob("*.toml")})
    raise ProfileError(
        f"There is no profile {printable(name_or_path, 100)!r}; known: {', '.join(known) or 'none'}. "
        f"Looked in {', '.join(str(folder) for folder in search) or 'no folder'}."
    )


def _record(kind: type[_Record], table: dict[str, Any], path: Path, where: str) -> _Record:
    """`table` as `kind`; a ProfileError names the file, the table, the key and the nearest known key."""
    known = [field for field in kind.__struct_encode_fields__ if field != "name"]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
            raise ProfileError(f"{path}: {where} has an unknown key {printable(key, 100)!r}; {advice}")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        key = place.rstrip("`").lstrip(".")
        raise ProfileError(f"{path}: {where}{f' {key}' if key else ''}: {problem}.") from error


def _host(name: str, table: dict[str, Any], path: Path) -> HostProfile:
    where = f"[hosts.{printable(name, 100)}]"
    if not is_valid_name(name):
        raise ProfileError(
            f"{path}: {where} is no host name; expected letters, digits, '.', '_' and '-', the first a letter or digit."
        )
    _record(_Unnamed, table, path, where)
    host = msgspec.convert({**table, "name": name}, HostProfile)
    fault = _host_fault(host)
    if fault:
        raise ProfileError(f"{path}: {where} {fault}.")
    return msgspec.structs.replace(
        host,
        identity=None if host.identity is None else str(_local(host.identity, path)),
        known_hosts=None if host.known_hosts is None else str(_local(host.known_hosts, path)),
    )


class _Unnamed(HostProfile, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A host's table as it stands in the file, where the table's own name is the host's."""

    name: str = ""


def _host_fault(host: HostProfile) -> str:
    if not _ADDRESS.fullmatch(host.address):
        return f"address is {printable(host.address, 100)!r}, expected a host name, IP address or SSH alias"
    if host.port is not None and not 0 < host.port < 65536:
        return f"port is {host.port}, expected 1 to 65535"
    if host.user is not None and not _USER.fullmatch(host.user):
        return f"user is {printable(host.user, 100)!r}, expected a user name"
    if host.connect_timeout_s <= 0:
        return f"connect_timeout_s is {host.connect_timeout_s}, expected more than 0"
    if not host.python or "\x00" in host.python:
        return "python is empty or holds a NUL, expected a command or a path"
    folders = {"state": host.state, **{f"target {key!r}": value for key, value in host.targets.items()}}
    for what, folder in folders.items():
        if not _is_remote_folder(folder):
            return f"{what} is {printable(folder, 200)!r}, expected an absolute path or one that begins with ~/"
    for key, value in host.env.items():
        if not _ENVIRONMENT_NAME.fullmatch(key) or "\x00" in value:
            return f"env has {printable(key, 100)!r}, expected a variable name and a text without NUL"
    gpus = host.target_gpus + host.drafter_gpus
    if len(set(gpus)) != len(gpus) or min(gpus, default=0) < 0:
        return "target_gpus and drafter_gpus name a GPU twice or below 0, expected distinct indices"
    return ""


def _is_remote_folder(folder: str) -> bool:
    path = PurePosixPath(folder.removeprefix("~/") if folder.startswith("~/") else folder)
    rooted = folder.startswith("~/") or path.is_absolute()
    return rooted and ".." not in path.parts and not any(c in folder for c in "\x00\n")


def _local(text: str, profile: Path) -> Path:
    return profile.parent / Path(text).expanduser()
