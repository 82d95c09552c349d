"""What runs and checkpoints a host has, and whether each checkpoint is whole.

Everything comes from SFTP listings, bounded reads of `manifest.json` and, where a checkpoint has none, the
header of `model.safetensors`. Sizes are compared here; staging and preflight compare hashes as well. Names
come from the host: one that `dflash_engine.layout` does not allow is skipped and reported, never used.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar

import msgspec

from dflash_console.core.errors import NotFoundError, RemoteCommandError
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import Entry, HostConnection
from dflash_engine import layout
from dflash_engine.manifest import (
    MANIFEST_MAX_BYTES,
    MANIFEST_NAME,
    CheckpointState,
    Manifest,
    ManifestError,
    judge,
    parse_manifest,
)

__all__ = [
    "FOREIGN_FILES",
    "CheckpointView",
    "RunView",
    "header_fault",
    "list_checkpoints",
    "list_runs",
    "newest_usable",
    "one_checkpoint",
]

FOREIGN_FILES = ("config.json", "model.safetensors")
"""What a checkpoint that is not ours must hold to be usable; nothing else of it is staged."""

_QUIET_S = 10.0  # a foreign checkpoint that changed more recently than this may still be written
_HEADER_MAX_BYTES = 16 << 20
_RUN_MAX_BYTES = 1 << 20
_MAX_DEPTH = 3
_MAX_ENTRIES = 10_000
_PARALLEL_FOLDERS = 8

_T = TypeVar("_T")


class RunView(msgspec.Struct, frozen=True):
    """One run folder of a host. `created` is None where it holds copies only (no readable run.json)."""

    host: str
    id: str
    created: float | None
    target: str
    jobs: tuple[str, ...]
    checkpoints: int
    path: PurePosixPath


class CheckpointView(msgspec.Struct, frozen=True):
    """One checkpoint folder as its listing shows it. `step` is None where the name does not say it."""

    host: str
    run: str
    name: str
    step: int | None
    state: CheckpointState
    reason: str
    size_bytes: int
    created: float
    path: PurePosixPath
    manifest: Manifest | None = None


class _RunDocument(msgspec.Struct, frozen=True):
    id: str
    created: float
    target: str = ""
    jobs: tuple[str, ...] = ()


async def list_runs(conn: HostConnection, *, on_skip: Callable[[str], None] | None = None) -> list[RunView]:
    """The runs of a host by id. `on_skip` hears of each name that is not allowed, made printable."""
    runs = conn.state / "runs"
    names = _valid_folders(await conn.list_dir(runs), on_skip, f"{conn.name}: runs")
    return await _bounded(_view_run(conn, name) for name in names)


async def list_checkpoints(
    conn: HostConnection, run_id: str | None = None, *, on_skip: Callable[[str], None] | None = None
) -> list[CheckpointView]:
    """The checkpoints of one run or of all, by run and step, unfinished ones included.

    `on_skip` hears of each name that is not allowed, made printable. Raises NotFoundError for a `run_id` that
    cannot be one.
    """
    if run_id is not None and not layout.is_valid_name(run_id):
        raise NotFoundError(f"{printable(run_id)} is no run's name; `dflash-console checkpoints` lists them.")
    runs = [run_id] if run_id is not None else [run.id for run in await list_runs(conn, on_skip=on_skip)]
    views: list[CheckpointView] = []
    for run in runs:
        folder = conn.state / layout.checkpoints_dir(run)
        entries = {entry.name: entry for entry in await conn.list_dir(folder)}
        names = _valid_folders(entries.values(), on_skip, f"{conn.name}: run {run}")
        found = await _bounded(_view_checkpoint(conn, run, entries[name]) for name in names)
        views += sorted(found, key=lambda view: (-1 if view.step is None else view.step, view.name))
    return views


async def one_checkpoint(conn: HostConnection, run_id: str, name: str) -> CheckpointView:
    """One checkpoint by name. Raises NotFoundError where the host has none of that name."""
    if not (layout.is_valid_name(run_id) and layout.is_valid_name(name)):
        found = printable(f"{run_id}:{name}", 200)
        raise NotFoundError(f"{found} is no checkpoint's name; expected RUN:step_N.")
    for entry in await conn.list_dir(conn.state / layout.checkpoints_dir(run_id)):
        if entry.name == name and entry.kind == "dir":
            return await _view_checkpoint(conn, run_id, entry)
    raise NotFoundError(
        f"{conn.name} has no checkpoint {run_id}:{name} in {conn.state / layout.checkpoints_dir(run_id)}; "
        "`dflash-console checkpoints` lists what there is."
    )


def newest_usable(views: Sequence[CheckpointView], *, need: Literal["model", "resume"]) -> CheckpointView | None:
    """The checkpoint of the highest step that can be evaluated (`model`) or continued (`resume`), or None.

    Of two with the same step the one created later. Unfinished names and broken manifests never count.
    """
    states = ("whole",) if need == "resume" else ("whole", "model only", "foreign")
    usable = [(view.step, view.created, view) for view in views if view.state in states and view.step is not None]
    return max(usable, key=lambda item: item[:2])[2] if usable else None


def header_fault(header: bytes, file_bytes: int) -> str:
    """Why a safetensors header does not account for every byte of its file; empty where it does.

    `header` is the JSON after the 8 length bytes, `file_bytes` the size of the whole file. Format:
    safetensors, README "Format": the tensors' `data_offsets` cover the data without holes.
    """
    try:
        document = json.loads(header)
        spans = sorted(_span(entry) for name, entry in document.items() if name != "__metadata__")
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return "the header of model.safetensors cannot be read"
    position = 0
    for begin, end in spans:
        if begin != position or end < begin:
            return f"the tensors of model.safetensors leave a gap or overlap at byte {position}"
        position = end
    expected = 8 + len(header) + position
    if not spans or expected != file_bytes:
        return f"model.safetensors has {file_bytes} bytes, its header accounts for {expected}"
    return ""


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        raise TypeError("data_offsets")
    return begin, end


def _valid_folders(entries: Iterable[Entry], on_skip: Callable[[str], None] | None, where: str) -> list[str]:
    names = []
    for entry in entries:
        if entry.kind != "dir" or entry.name.startswith("."):
            continue
        if layout.is_valid_name(entry.name):
            names.append(entry.name)
        elif on_skip is not None:
            on_skip(f"{where}: {printable(entry.name, 120)}")
    return sorted(names)


async def _bounded(work: Iterable[Awaitable[_T]]) -> list[_T]:
    gate = asyncio.Semaphore(_PARALLEL_FOLDERS)

    async def one(item: Awaitable[_T]) -> _T:
        async with gate:
            return await item

    return list(await asyncio.gather(*(one(item) for item in work)))


async def _view_run(conn: HostConnection, run_id: str) -> RunView:
    path = conn.state / layout.run_dir(run_id)
    entries = await conn.list_dir(conn.state / layout.checkpoints_dir(run_id))
    finished = [e for e in entries if e.kind == "dir" and layout.checkpoint_step(e.name) is not None]
    document: _RunDocument | None
    try:
        raw = await conn.read_file(path / "run.json", max_bytes=_RUN_MAX_BYTES)
        document = msgspec.json.decode(raw, type=_RunDocument)
    except (NotFoundError, RemoteCommandError, msgspec.DecodeError, UnicodeDecodeError):
        document = None
    if document is None or document.id != run_id or not math.isfinite(document.created):
        return RunView(conn.name, run_id, None, "", (), len(finished), path)
    jobs = tuple(job for job in document.jobs if layout.is_valid_name(job))
    return RunView(conn.name, run_id, document.created, printable(document.target), jobs, len(finished), path)


async def _view_checkpoint(conn: HostConnection, run: str, entry: Entry) -> CheckpointView:
    path = conn.state / layout.checkpoints_dir(run) / entry.name
    files = await _files_below(conn, path)
    sizes = {name: file.size_bytes for name, file in files.items()}
    manifest: Manifest | None = None
    if layout.is_partial_name(entry.name):
        state, reason = _incomplete("its name says that its writer had not finished")
    else:
        try:
            manifest = await _read_manifest(conn, path)
        except ManifestError as error:
            state, reason = _incomplete(printable(str(error), 300))
        else:
            state, reason = (
                await _judge_foreign(conn, path, files)
                if manifest is None
                else _judge_ours(manifest, sizes, layout.checkpoint_step(entry.name))
            )
    return CheckpointView(
        host=conn.name,
        run=run,
        name=entry.name,
        step=None if layout.is_partial_name(entry.name) else layout.checkpoint_step(entry.name),
        state=state,
        reason=reason,
        size_bytes=sum(sizes.values()),
        created=manifest.created if manifest is not None else entry.mtime,
        path=path,
        manifest=manifest,
    )


def _incomplete(reason: str) -> tuple[CheckpointState, str]:
    return "incomplete", reason


async def _read_manifest(conn: HostConnection, path: PurePosixPath) -> Manifest | None:
    try:
        manifest = parse_manifest(await conn.read_file(path / MANIFEST_NAME, max_bytes=MANIFEST_MAX_BYTES))
    except NotFoundError:
        return None
    except RemoteCommandError as error:
        raise ManifestError(str(error)) from error
    if not math.isfinite(manifest.created):
        raise ManifestError("manifest.json: 'created' is not a time")
    return manifest


def _judge_ours(manifest: Manifest, sizes: dict[str, int], named_step: int | None) -> tuple[CheckpointState, str]:
    if named_step is not None and named_step != manifest.step:
        return _incomplete(f"its name says step {named_step}, its manifest step {manifest.step}")
    state, reason = judge(manifest, sizes)
    return state, printable(reason, 300)


async def _judge_foreign(
    conn: HostConnection, path: PurePosixPath, files: dict[str, Entry]
) -> tuple[CheckpointState, str]:
    missing = [name for name in FOREIGN_FILES if name not in files]
    if missing:
        return _incomplete(f"it has no manifest.json and no {' and no '.join(missing)}")
    weights = files["model.safetensors"]
    age_s = time.time() + conn.clock_offset_s - max(file.mtime for file in files.values())
    if age_s < _QUIET_S:
        return _incomplete(f"it has no manifest.json and changed less than {_QUIET_S:.0f} s ago")
    try:
        length = int.from_bytes(await conn.read_range(path / "model.safetensors", 0, 8), "little")
        if length > min(_HEADER_MAX_BYTES, weights.size_bytes):
            return _incomplete("the header of model.safetensors cannot be read")
        header = await conn.read_range(path / "model.safetensors", 8, length)
    except NotFoundError:
        return _incomplete("it went away while it was looked at")
    fault = header_fault(header, weights.size_bytes)
    return _incomplete(fault) if fault else ("foreign", "no manifest.json; every byte of its tensors is there")


async def _files_below(conn: HostConnection, folder: PurePosixPath) -> dict[str, Entry]:
    """Regular files by path relative to `folder`; links are left out, so nothing outside is ever read."""
    files: dict[str, Entry] = {}
    pending = [(PurePosixPath(), 0)]
    while pending:
        below, depth = pending.pop()
        for entry in await conn.list_dir(folder / below):
            if len(files) >= _MAX_ENTRIES:
                return files
            if entry.name in ("", ".", "..") or "/" in entry.name:
                continue
            if entry.kind == "file":
                files[str(below / entry.name)] = entry
            elif entry.kind == "dir" and depth < _MAX_DEPTH:
                pending.append((below / entry.name, depth + 1))
    return files
