"""Staging between two real SSH hosts: what arrives, what is refused, and what a break leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from dflash_console.core import host_lock, transfer
from dflash_console.core.checkpoints import CheckpointView, list_checkpoints, newest_usable, one_checkpoint
from dflash_console.core.errors import (
    ConsoleError,
    HostNotReadyError,
    IntegrityError,
    NotFoundError,
    UnreachableError,
)
from dflash_console.core.history import History, default_path
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection
from dflash_console.core.staging import StageProgress, StageResult, stage
from dflash_engine.layout import is_partial_name
from dflash_engine.manifest import parse_manifest
from tests.checkpoint_folders import make_checkpoint, make_foreign
from tests.tcp_relay import Relay

LARGE = 12 << 20
Pair = tuple[HostConnection, HostConnection]

# What one kind of server proves, where nothing depends on the server.
one_kind = pytest.mark.parametrize("two_hosts", ["openssh"], indirect=True)


@pytest.fixture
async def pair(two_hosts: Profile) -> AsyncIterator[Pair]:
    source, destination = two_hosts.hosts
    async with Connections(two_hosts) as hosts:
        yield await hosts.get(source), await hosts.get(destination)


def _checkpoints(conn: HostConnection) -> Path:
    return Path(conn.state, "runs", "run1", "checkpoints")


def _names(conn: HostConnection) -> list[str]:
    folder = _checkpoints(conn)
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


async def _made(conn: HostConnection, *, data_bytes: int = 4096, resume: bool = True) -> CheckpointView:
    make_checkpoint(Path(conn.state), "run1", 5, data_bytes=data_bytes, resume=resume)
    return await one_checkpoint(conn, "run1", "step_5")


def _weights(of: CheckpointView | StageResult) -> bytes:
    return Path(of.path, "model.safetensors").read_bytes()


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def _once_at(share: float, act: Callable[[], None]) -> Callable[[StageProgress], None]:
    """A progress callback that acts once, as soon as this share of all bytes is there."""
    done = False

    def progress(now: StageProgress) -> None:
        nonlocal done
        if not done and now.phase == "copying" and now.bytes_done >= share * now.bytes_total:
            done = True
            act()

    return progress


async def test_a_copy_without_the_optimizer_is_model_only_usable_and_names_its_origin(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source)
    result = await stage(source, destination, view)
    (copy,) = await list_checkpoints(destination)
    assert (copy.state, copy.name, copy.path) == ("model only", "step_5", result.path)
    assert newest_usable([copy], need="model") == copy
    assert newest_usable([copy], need="resume") is None
    assert copy.manifest is not None
    assert view.manifest is not None
    assert copy.manifest.origin == f"{source.name}:{view.path}"
    assert copy.manifest.model_fingerprint() == view.manifest.model_fingerprint()
    assert result.files == ("config.json", "model.safetensors")
    assert (result.bytes_sent, result.bytes_reused) == (view.manifest.size_bytes(with_resume=False), 0)
    for name in result.files:
        assert Path(result.path, name).read_bytes() == Path(view.path, name).read_bytes()
    assert _names(destination) == ["step_5"]


async def test_a_copy_with_the_optimizer_is_whole(pair: Pair) -> None:
    source, destination = pair
    result = await stage(source, destination, await _made(source), with_resume=True)
    (copy,) = await list_checkpoints(destination)
    assert copy.state == "whole"
    assert "trainer/optimizer.safetensors" in result.files


@one_kind
async def test_progress_ends_with_every_byte_and_the_verification(pair: Pair) -> None:
    source, destination = pair
    seen: list[StageProgress] = []
    await stage(source, destination, await _made(source, data_bytes=LARGE), progress=seen.append)
    copied = [now.bytes_done for now in seen if now.phase == "copying"]
    assert copied == sorted(copied)
    assert seen[-1].phase == "verifying"
    assert seen[-1].bytes_done == seen[-1].bytes_total


async def test_a_verified_copy_is_not_sent_again(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source)
    first = await stage(source, destination, view)
    again = await stage(source, destination, view)
    assert again.reused
    assert (again.bytes_sent, again.bytes_reused) == (0, first.bytes_sent)


@one_kind
async def test_a_damaged_copy_is_refused_and_left_alone(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source)
    result = await stage(source, destination, view)
    _flip(Path(result.path, "model.safetensors"), 300)
    with pytest.raises(IntegrityError, match=r"damaged: model.safetensors has SHA-256 .* the manifest says"):
        await stage(source, destination, view)


@one_kind
async def test_another_checkpoint_of_the_same_name_is_never_replaced(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source)
    theirs = make_checkpoint(Path(destination.state), "run1", 5, seed=9)
    before = (theirs / "model.safetensors").read_bytes()
    with pytest.raises(IntegrityError, match="another checkpoint of that name"):
        await stage(source, destination, view)
    assert (theirs / "model.safetensors").read_bytes() == before
    assert _names(destination) == ["step_5"]


@one_kind
async def test_a_foreign_checkpoint_gets_a_manifest_that_names_its_origin(pair: Pair) -> None:
    source, destination = pair
    make_foreign(Path(source.state), "run1", "step_3")
    view = await one_checkpoint(source, "run1", "step_3")
    result = await stage(source, destination, view)
    record = parse_manifest(Path(result.path, "manifest.json").read_bytes())
    assert record.origin == f"{source.name}:{view.path}"
    assert record.target_fingerprint == ""
    assert (await one_checkpoint(destination, "run1", "step_3")).state == "model only"


async def test_a_lost_connection_leaves_a_partial_that_the_next_staging_completes(
    two_hosts: Profile, pair: Pair
) -> None:
    source, direct = pair
    view = await _made(source, data_bytes=LARGE)
    async with Relay.to(two_hosts.hosts[direct.name]) as relay:
        profile = msgspec.structs.replace(two_hosts, hosts=two_hosts.hosts | {direct.name: relay.host})
        async with Connections(profile) as hosts:
            destination = await hosts.get(direct.name)
            with pytest.raises(UnreachableError):
                await stage(source, destination, view, progress=_once_at(0.6, relay.cut))
        (left,) = _names(direct)
        assert is_partial_name(left)
        assert newest_usable(await list_checkpoints(direct), need="model") is None
        await _release_stale_lock(direct)
        sent_before = relay.bytes_up
        async with Connections(profile) as hosts:
            result = await stage(source, await hosts.get(direct.name), view)
        sent = relay.bytes_up - sent_before
    total = view.manifest.size_bytes(with_resume=False) if view.manifest is not None else 0
    assert result.bytes_sent + result.bytes_reused == total
    assert result.bytes_reused >= 0.6 * LARGE - transfer.UNSETTLED_BYTES - transfer.PIECE_BYTES
    assert sent < result.bytes_sent + (1 << 20)
    assert _names(direct) == ["step_5"]
    assert Path(result.path, "model.safetensors").read_bytes() == Path(view.path, "model.safetensors").read_bytes()


@one_kind
async def test_a_corrupt_prefix_of_an_earlier_try_is_sent_again(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source, data_bytes=LARGE)
    partial = await _interrupted(source, destination, view, share=0.7)
    _flip(partial / "model.safetensors", 1000)
    result = await stage(source, destination, view)
    assert result.bytes_sent >= LARGE
    assert result.bytes_reused < 1000
    assert Path(result.path, "model.safetensors").read_bytes() == Path(view.path, "model.safetensors").read_bytes()


@one_kind
async def test_a_hole_near_the_end_of_an_earlier_try_is_sent_again(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source, data_bytes=LARGE)
    partial = await _interrupted(source, destination, view, share=0.7)
    weights = Path(view.path, "model.safetensors").read_bytes()
    hole = len(weights) - transfer.PIECE_BYTES
    (partial / "model.safetensors").write_bytes(weights[:hole] + bytes(transfer.PIECE_BYTES))
    result = await stage(source, destination, view)
    assert transfer.PIECE_BYTES < result.bytes_sent < transfer.UNSETTLED_BYTES + 2 * transfer.PIECE_BYTES
    assert Path(result.path, "model.safetensors").read_bytes() == weights


@one_kind
async def test_files_of_an_earlier_try_that_are_not_asked_for_now_are_not_published(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source)
    partial = await _interrupted(source, destination, view, share=0.99, with_resume=True)
    assert (partial / "trainer").is_dir()
    result = await stage(source, destination, view)
    assert not list(Path(result.path).rglob("*.json.tmp"))
    assert not Path(result.path, "trainer", "optimizer.safetensors").exists()


@one_kind
@pytest.mark.parametrize("resumed", [False, True])
async def test_a_corrupt_source_is_refused_and_named(pair: Pair, resumed: bool) -> None:
    source, destination = pair
    view = await _made(source, data_bytes=LARGE)
    if resumed:
        await _interrupted(source, destination, view, share=0.6)
    weights = Path(view.path, "model.safetensors")
    _flip(weights, LARGE - 10)
    with pytest.raises(IntegrityError, match=rf"^{source.name}: .*SHA-256"):
        await stage(source, destination, view)
    assert all(is_partial_name(name) for name in _names(destination))
    _flip(weights, LARGE - 10)
    await stage(source, destination, view)
    assert _names(destination) == ["step_5"]


@one_kind
async def test_a_corrupt_source_file_is_noticed_as_it_passes_and_nothing_more_is_sent(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source)
    _flip(Path(view.path, "config.json"), 5)
    phases: list[str] = []
    with pytest.raises(IntegrityError, match=r"config\.json has SHA-256"):
        await stage(source, destination, view, progress=lambda now: phases.append(now.phase))
    assert "verifying" not in phases
    (partial,) = _checkpoints(destination).iterdir()
    assert not (partial / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda f: os.truncate(f / "model.safetensors", LARGE // 2), IntegrityError),
        (lambda f: _flip(f / "model.safetensors", LARGE), IntegrityError),
        (lambda f: (f / "model.safetensors").open("ab").write(b"more"), IntegrityError),
        (shutil.rmtree, NotFoundError),
    ],
    ids=["shrinks", "changes", "grows", "vanishes"],
)
async def test_a_source_that_changes_under_the_copy_is_refused(
    pair: Pair, change: Callable[[Path], None], error: type[ConsoleError]
) -> None:
    source, destination = pair
    view = await _made(source, data_bytes=LARGE)
    with pytest.raises(error):
        await stage(source, destination, view, progress=_once_at(0.0, lambda: change(Path(view.path))))
    assert all(is_partial_name(name) for name in _names(destination))


@one_kind
async def test_a_source_that_is_incomplete_or_replaced_since_it_was_listed_is_refused(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source)
    shutil.rmtree(view.path)
    with pytest.raises(NotFoundError):
        await stage(source, destination, view)
    make_checkpoint(Path(source.state), "run1", 5, seed=3)
    with pytest.raises(IntegrityError, match="changed since it was listed"):
        await stage(source, destination, view)
    os.truncate(Path(view.path, "model.safetensors"), 100)
    with pytest.raises(IntegrityError, match=r"is incomplete: model.safetensors has 100 of"):
        await stage(source, destination, view)
    assert _names(destination) == []


@one_kind
async def test_the_optimizer_of_a_model_only_checkpoint_cannot_be_asked_for(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source, resume=False)
    with pytest.raises(IntegrityError, match="is model only"):
        await stage(source, destination, view, with_resume=True)


async def test_two_stagings_at_once_send_the_bytes_once(two_hosts: Profile, pair: Pair) -> None:
    source, destination = pair
    view = await _made(source, data_bytes=LARGE)
    async with Connections(two_hosts) as other:
        results: list[StageResult] = await asyncio.gather(
            stage(source, destination, view),
            stage(await other.get(source.name), await other.get(destination.name), view),
        )
    assert sorted(result.reused for result in results) == [False, True]
    assert view.manifest is not None
    assert sum(result.bytes_sent for result in results) == view.manifest.size_bytes(with_resume=False)


def test_kill_9_of_the_staging_process_leaves_only_a_partial_that_is_completed_later(
    two_hosts: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def staged(progress: Callable[[StageProgress], None] | None) -> StageResult:
        source, destination = two_hosts.hosts
        async with Connections(two_hosts) as hosts:
            view = await one_checkpoint(await hosts.get(source), "run1", "step_5")
            return await stage(await hosts.get(source), await hosts.get(destination), view, progress=progress)

    async def states() -> list[Path]:
        async with Connections(two_hosts) as hosts:
            return [Path((await hosts.get(name)).state) for name in two_hosts.hosts]

    source_state, destination_state = asyncio.run(states())
    make_checkpoint(source_state, "run1", 5, data_bytes=LARGE)
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(staged(_once_at(0.6, lambda: os.kill(os.getpid(), signal.SIGKILL))))
        finally:
            os._exit(1)  # never back into pytest, whatever went wrong
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    (left,) = (destination_state / "runs/run1/checkpoints").iterdir()
    assert is_partial_name(left.name)
    monkeypatch.setattr(host_lock, "STALE_AFTER_S", 1.5)
    phases: list[str] = []
    result = asyncio.run(staged(lambda now: phases.append(now.phase)))
    assert phases[0] == "waiting"
    assert result.bytes_reused > 0
    assert [path.name for path in left.parent.iterdir()] == ["step_5"]


@pytest.fixture
def small_disk(pair: Pair) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("a small file system of its own needs root to mount it")
    runs = Path(pair[1].state, "runs")
    runs.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(runs)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield runs
    subprocess.run(["umount", "-l", str(runs)], check=True)


async def test_too_little_room_is_said_in_bytes_before_anything_is_sent(pair: Pair, small_disk: Path) -> None:
    source, destination = pair
    view = await _made(source, data_bytes=30 << 20)
    with pytest.raises(HostNotReadyError, match=r"needs \d+ bytes for this checkpoint, \d+ are free"):
        await stage(source, destination, view)
    assert sum(path.stat().st_size for path in small_disk.rglob("*") if path.is_file()) == 0


async def test_a_disk_that_fills_up_under_the_copy_is_said_and_the_partial_kept(pair: Pair, small_disk: Path) -> None:
    source, destination = pair
    view = await _made(source, data_bytes=LARGE)

    def fill() -> None:
        (small_disk / "filler").write_bytes(bytes(32 << 20))

    with pytest.raises(HostNotReadyError, match=r"are free. Make room"):
        await stage(source, destination, view, progress=_once_at(0.1, fill))
    assert all(is_partial_name(name) for name in _names(destination))
    (small_disk / "filler").unlink()
    await stage(source, destination, view)
    assert _names(destination) == ["step_5"]


@one_kind
async def test_a_staging_is_in_the_history_and_a_broken_history_is_a_warning(pair: Pair) -> None:
    source, destination = pair
    view = await _made(source)
    result = await stage(source, destination, view)
    with History() as history:
        (row,) = history.stagings()
    assert (row.run, row.checkpoint, row.bytes_sent) == ("run1", "step_5", result.bytes_sent)
    default_path().write_bytes(b"broken" * 1000)
    again = await stage(source, destination, view)
    assert "cannot be used" in again.warnings[0]


@one_kind
async def test_a_hostile_file_name_in_a_manifest_never_leaves_the_folder(pair: Pair, tmp_path: Path) -> None:
    source, destination = pair
    view = await _made(source)
    path = Path(view.path, "manifest.json")
    document = json.loads(path.read_text())
    document["model"]["../../../../outside"] = document["model"]["config.json"]
    path.write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match="is incomplete"):
        await stage(source, destination, view)
    assert not list(tmp_path.rglob("outside"))


async def _interrupted(
    source: HostConnection,
    destination: HostConnection,
    view: CheckpointView,
    *,
    share: float,
    with_resume: bool = False,
) -> Path:
    """A partial folder as a staging leaves it that was cancelled when this share had arrived."""
    task: asyncio.Task[StageResult] | None = None

    def cancel() -> None:
        assert task is not None
        task.cancel()

    progress = _once_at(share, cancel)
    task = asyncio.create_task(stage(source, destination, view, progress=progress, with_resume=with_resume))
    with pytest.raises(asyncio.CancelledError):
        await task
    (partial,) = _checkpoints(destination).iterdir()
    return partial


async def _release_stale_lock(conn: HostConnection) -> None:
    """What waiting for `STALE_AFTER_S` would do: the dead console's lock goes."""
    shutil.rmtree(Path(conn.state, "cache", "locks"))
