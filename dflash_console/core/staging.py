"""Copy a checkpoint from one host to another: resumable, verified on both ends, published by one rename.

The bytes pass through this machine (`transfer.copy_range`) into `<name>.partial-<first 12 of the model
fingerprint>` beside the final name. SHA-256 is taken while they pass, and again by the destination, which
alone publishes: it reads the whole partial against the manifest, flushes it and renames it. A break at any
point leaves the partial folder; the next staging keeps of each file what both hosts hash alike. The copy's
manifest has an `origin`, and an empty resume set unless the optimizer was asked for. Two stagings of one
thing: the second waits by `host_lock` and then finds the first one's copy, verifies it and sends nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

import asyncssh
import msgspec

from dflash_console.core.checkpoints import CheckpointView, one_checkpoint
from dflash_console.core.deploy import DeployedEngine, deploy_engine, engine_json
from dflash_console.core.errors import (
    HostNotReadyError,
    IntegrityError,
    NotFoundError,
    RemoteCommandError,
)
from dflash_console.core.hashing import (
    checkpoint_faults,
    foreign_manifest,
    hash_prefixes,
    hashing_timeout_s,
)
from dflash_console.core.history import History, HistoryError, StagingRow
from dflash_console.core.host_lock import host_lock
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import HostConnection
from dflash_console.core.transfer import PIECE_BYTES, UNSETTLED_BYTES, copy_range
from dflash_engine import layout
from dflash_engine.manifest import MANIFEST_NAME, FileRecord, Manifest

__all__ = ["StageProgress", "StageResult", "stage"]

_SPARE_BYTES = 16 << 20


class StageProgress(msgspec.Struct, frozen=True):
    """How far a staging is.

    `bytes_done` counts what the destination holds, kept bytes of an earlier try included.
    """

    phase: Literal["waiting", "checking", "copying", "verifying"]
    bytes_done: int
    bytes_total: int
    seconds: float
    file: str = ""


class StageResult(msgspec.Struct, frozen=True):
    """A checkpoint that the destination holds whole and verified.

    `reused`: it was there before, nothing was sent.
    """

    path: PurePosixPath
    bytes_sent: int
    bytes_reused: int
    seconds: float
    files: tuple[str, ...]
    reused: bool = False
    warnings: tuple[str, ...] = ()


class _Published(msgspec.Struct, frozen=True):
    published: bool
    exists: bool
    faults: dict[str, str]


async def stage(
    source: HostConnection,
    destination: HostConnection,
    checkpoint: CheckpointView,
    *,
    with_resume: bool = False,
    progress: Callable[[StageProgress], None] | None = None,
) -> StageResult:
    """Copy the model set, or both sets, of a source's checkpoint to the same place on the destination.

    Raises IntegrityError where the source is incomplete, changes or does not hold its manifest's hashes, or
    where the destination has something else of that name; NotFoundError where the source has it no more;
    HostNotReadyError where the destination lacks room. Bytes already sent stay for the next try.
    """
    view = await one_checkpoint(source, checkpoint.run, checkpoint.name)
    _require_usable(view, checkpoint, with_resume=with_resume)
    if view.manifest is None:
        manifest = await foreign_manifest(source, await deploy_engine(source), view)
    else:
        resume = view.manifest.resume if with_resume else {}
        origin = view.manifest.origin or f"{source.name}:{view.path}"
        manifest = replace(view.manifest, resume=resume, origin=origin)
    final = destination.state / layout.checkpoints_dir(view.run) / view.name
    fingerprint = manifest.model_fingerprint()
    staging = _Staging(
        source=source,
        destination=destination,
        engine=await deploy_engine(destination),
        manifest=manifest,
        source_folder=view.path,
        final=final,
        partial=final.with_name(f"{final.name}{layout.PARTIAL_MARK}{fingerprint[:12]}"),
        report=progress or (lambda _: None),
        started=time.monotonic(),
    )
    async with host_lock(destination, f"stage-{view.run}-{view.name}", on_wait=lambda: staging.tell("waiting")):
        reused = await staging.already_there()
        if not reused:
            await staging.send()
    return staging.result(reused=reused)


def _require_usable(view: CheckpointView, asked: CheckpointView, *, with_resume: bool) -> None:
    where = f"{view.host}: checkpoint {view.run}:{view.name}"
    if view.state == "incomplete":
        raise IntegrityError(f"{where} is incomplete: {view.reason}. Stage another one.")
    if with_resume and view.state != "whole":
        raise IntegrityError(
            f"{where} is {view.state} ({view.reason}), expected a whole one to copy the optimizer from."
        )
    if (asked.manifest is None) != (view.manifest is None) or (
        asked.manifest is not None
        and view.manifest is not None
        and asked.manifest.model_fingerprint() != view.manifest.model_fingerprint()
    ):
        raise IntegrityError(f"{where} changed since it was listed; list the checkpoints again.")


@dataclass
class _Staging:
    """One staging's state: what is to be sent, where to, and how much has been."""

    source: HostConnection
    destination: HostConnection
    engine: DeployedEngine
    manifest: Manifest
    source_folder: PurePosixPath
    final: PurePosixPath
    partial: PurePosixPath
    report: Callable[[StageProgress], None]
    started: float
    sent: int = 0
    kept: int = 0
    sent_before_file: int = 0

    @property
    def records(self) -> dict[str, FileRecord]:
        return self.manifest.model | self.manifest.resume

    @property
    def total(self) -> int:
        return self.manifest.size_bytes(with_resume=True)

    def tell(self, phase: Literal["waiting", "checking", "copying", "verifying"], file: str = "") -> None:
        seconds = time.monotonic() - self.started
        self.report(StageProgress(phase, self.sent + self.kept, self.total, seconds, printable(file, 120)))

    def result(self, *, reused: bool) -> StageResult:
        seconds = time.monotonic() - self.started
        kept = self.total if reused else self.kept
        row = StagingRow(
            finished=time.time(),
            source=self.source.name,
            destination=self.destination.name,
            run=self.final.parent.parent.name,
            checkpoint=self.final.name,
            fingerprint=self.manifest.model_fingerprint(),
            bytes_sent=self.sent,
            bytes_reused=kept,
            seconds=seconds,
        )
        warnings: tuple[str, ...] = ()
        try:
            with History() as history:
                history.add_staging(row)
        except HistoryError as error:
            warnings = (str(error),)
        files = tuple(sorted(self.records))
        return StageResult(self.final, self.sent, kept, seconds, files, reused, warnings)

    async def already_there(self) -> bool:
        """Whether the destination has this checkpoint, every byte verified; IntegrityError for anything
        else there.
        """
        try:
            found = await one_checkpoint(self.destination, self.final.parent.parent.name, self.final.name)
        except NotFoundError:
            return False
        where = f"{self.destination.name}: {self.final}"
        if found.manifest is None or found.state == "incomplete":
            raise IntegrityError(f"{where} is there and {found.state} ({found.reason}); remove it first.")
        if found.manifest.model_fingerprint() != self.manifest.model_fingerprint():
            raise IntegrityError(
                f"{where} holds another checkpoint of that name (model "
                f"{found.manifest.model_fingerprint()[:12]}, expected "
                f"{self.manifest.model_fingerprint()[:12]}); remove it first."
            )
        if self.manifest.resume and found.state != "whole":
            raise IntegrityError(f"{where} is there without the optimizer; remove it to copy both.")
        self.tell("checking")
        faults = await checkpoint_faults(self.destination, self.engine, self.final, self.records)
        if faults:
            raise IntegrityError(f"{where} is there and damaged: {'; '.join(faults)}. Remove it first.")
        return True

    async def send(self) -> None:
        """Fill the partial folder and have the destination publish it."""
        await self.destination.make_dirs(self.partial)
        await self._require_room()
        for name, record in self.records.items():
            await self._send_file(name, record)
        text = json.dumps(self.manifest.to_json(), indent=1, sort_keys=True) + "\n"
        await self.destination.write_file(self.partial / MANIFEST_NAME, text.encode())
        self.tell("verifying")
        answer = await engine_json(
            self.destination,
            self.engine,
            ["transfer", "publish", str(self.partial), str(self.final)],
            timeout_s=hashing_timeout_s(self.total),
        )
        try:
            published = msgspec.convert(answer, _Published)
        except msgspec.ValidationError as error:
            raise RemoteCommandError(
                f"{self.destination.name}: the engine's answer cannot be read: {error}."
            ) from error
        if published.faults:
            await self._refuse(published.faults)
        if not published.published and not await self.already_there():
            raise RemoteCommandError(f"{self.destination.name}: {self.final} was not published; try again.")

    async def _require_room(self) -> None:
        present = 0
        for name, record in self.records.items():
            entry = await self.destination.stat(self.partial / name)
            present += min(entry.size_bytes, record.size_bytes) if entry is not None else 0
        needed = self.total - present + _SPARE_BYTES
        free = await self._free_bytes()
        if free is not None and free < needed:
            raise self._no_room(needed, free)

    def _no_room(self, needed: int, free: int) -> HostNotReadyError:
        return HostNotReadyError(
            f"{self.destination.name}: {self.partial.parent} needs {needed} bytes for this checkpoint, "
            f"{free} are free. Make room there and stage again; what was sent is kept."
        )

    async def _free_bytes(self) -> int | None:
        async with self.destination.translated(str(self.partial)):
            try:
                room = await self.destination.sftp.statvfs(str(self.partial))
            except asyncssh.SFTPOpUnsupported:
                return None  # a server without the extension: a full disk shows when it is written to
        return int(room.bavail) * int(room.frsize)

    async def _send_file(self, name: str, record: FileRecord) -> None:
        path = self.partial / name
        await self.destination.make_dirs(path.parent)
        self.tell("checking", name)
        begin = await self._verified_prefix(name, record)
        self.kept += begin
        if begin == record.size_bytes > 0:
            return

        def on_bytes(size: int) -> None:
            self.sent += size
            self.tell("copying", name)

        try:
            sha256 = await copy_range(
                self.source,
                self.source_folder / name,
                self.destination,
                path,
                begin=begin,
                end=record.size_bytes,
                on_bytes=on_bytes,
            )
        except RemoteCommandError:
            free = await self._free_bytes()
            if free is not None and free < UNSETTLED_BYTES:
                raise self._no_room(record.size_bytes, free) from None
            raise
        if begin == 0 and sha256 != record.sha256:
            await self._empty(path)
            raise IntegrityError(
                f"{self.source.name}: {self.source_folder / name} has SHA-256 {sha256[:12]}, its manifest "
                f"says {record.sha256[:12]}: it is damaged or it changed. Nothing was published; "
                "stage another one."
            )

    async def _verified_prefix(self, name: str, record: FileRecord) -> int:
        """Bytes of an earlier try that both hosts hash alike; the rest of the file is sent again."""
        path = self.partial / name
        entry = await self.destination.stat(path)
        if entry is None or entry.size_bytes == 0 or entry.size_bytes > record.size_bytes:
            return 0
        settled = max(0, entry.size_bytes - UNSETTLED_BYTES) // PIECE_BYTES * PIECE_BYTES
        whole, prefix = await hash_prefixes(self.destination, self.engine, [(path, record.size_bytes), (path, settled)])
        if whole == record.sha256:
            return record.size_bytes
        if settled == 0:
            return 0
        source_engine = await deploy_engine(self.source)
        (expected,) = await hash_prefixes(self.source, source_engine, [(self.source_folder / name, settled)])
        return settled if prefix is not None and prefix == expected else 0

    async def _refuse(self, faults: dict[str, str]) -> None:
        """Drop what does not hold, so that the next try sends it again, and say which side is at fault."""
        for name in faults:
            if name in self.records:
                await self._empty(self.partial / name)
        suspects = {name: record for name, record in self.records.items() if name in faults}
        source_engine = await deploy_engine(self.source)
        at_source = await checkpoint_faults(self.source, source_engine, self.source_folder, suspects)
        if at_source:
            raise IntegrityError(
                f"{self.source.name}: {self.source_folder} is damaged or it changed: {'; '.join(at_source)}. "
                "Nothing was published; stage another one."
            )
        found = printable("; ".join(faults.values()), 500)
        raise IntegrityError(
            f"{self.destination.name}: {self.partial} does not hold what was sent: {found}. Nothing was "
            "published; stage again."
        )

    async def _empty(self, path: PurePosixPath) -> None:
        file = await self.destination.open_file(path, "wb")
        await file.close()
