"""Which checkpoints a host has, and which of them may be used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_console.core.checkpoints import (
    CheckpointView,
    header_fault,
    list_checkpoints,
    list_runs,
    newest_usable,
    one_checkpoint,
)
from dflash_console.core.errors import NotFoundError
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection
from dflash_engine.manifest import CheckpointState
from tests.checkpoint_folders import make_checkpoint, make_foreign, make_model_files, safetensors_bytes


@pytest.fixture
async def host(ssh_host: Profile) -> AsyncIterator[HostConnection]:
    async with Connections(ssh_host) as hosts:
        yield await hosts.get("ct200")


@pytest.fixture
def state(host: HostConnection) -> Path:
    return Path(host.state)


async def _only(host: HostConnection) -> CheckpointView:
    (view,) = await list_checkpoints(host)
    return view


def _view(step: int | None, state: CheckpointState, *, created: float = 0.0, run: str = "r") -> CheckpointView:
    path = PurePosixPath("/x")
    return CheckpointView("h", run, f"step_{step}", step, state, "", 1, created, path)


async def test_a_host_without_runs_has_no_checkpoints(host: HostConnection) -> None:
    assert await list_runs(host) == []
    assert await list_checkpoints(host) == []
    assert await list_checkpoints(host, "run1") == []


async def test_checkpoints_are_listed_by_step_with_state_and_size(host: HostConnection, state: Path) -> None:
    make_checkpoint(state, "run1", 10)
    make_checkpoint(state, "run1", 9, resume=False)
    views = await list_checkpoints(host, "run1")
    assert [(v.name, v.step, v.state) for v in views] == [
        ("step_9", 9, "model only"),
        ("step_10", 10, "whole"),
    ]
    folder = state / "runs/run1/checkpoints/step_10"
    assert views[1].size_bytes == sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert views[1].manifest is not None
    assert views[1].manifest.tokens_seen == 1000


async def test_a_run_tells_what_its_record_says_and_a_folder_of_copies_says_less(
    host: HostConnection, state: Path
) -> None:
    make_checkpoint(state, "copies", 1)
    make_checkpoint(state, "trained", 1)
    document = {"v": 1, "id": "trained", "created": 5.0, "target": "t\x1b[2J", "jobs": ["j1", "../j2"]}
    (state / "runs/trained/run.json").write_text(json.dumps(document))
    copies, trained = await list_runs(host)
    assert (copies.id, copies.created, copies.checkpoints) == ("copies", None, 1)
    assert (trained.created, trained.jobs, trained.checkpoints) == (5.0, ("j1",), 1)
    assert "\x1b" not in trained.target


async def test_an_unfinished_name_is_incomplete_even_where_everything_is_in_it(
    host: HostConnection, state: Path
) -> None:
    folder = make_checkpoint(state, "run1", 7)
    folder.rename(folder.with_name("step_7.partial-123-abc"))
    view = await _only(host)
    assert (view.state, view.step) == ("incomplete", None)
    assert newest_usable([view], need="model") is None


@pytest.mark.parametrize(
    ("damage", "expected", "reason"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "incomplete", "model.safetensors is missing"),
        (lambda f: os.truncate(f / "model.safetensors", 50), "incomplete", "model.safetensors has 50 of"),
        (lambda f: shutil.rmtree(f / "trainer"), "model only", "cannot be resumed"),
        (lambda f: (f / "manifest.json").write_text("{"), "incomplete", "not JSON"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "incomplete", "not JSON"),
        (lambda f: os.truncate(f / "manifest.json", 5 << 20), "incomplete", "manifest.json"),
        (lambda f: f.rename(f.with_name("step_8")), "incomplete", "its name says step 8"),
    ],
)
async def test_a_manifest_that_does_not_hold_is_said(
    host: HostConnection, state: Path, damage: object, expected: str, reason: str
) -> None:
    folder = make_checkpoint(state, "run1", 7)
    assert callable(damage)
    damage(folder)
    view = await _only(host)
    assert view.state == expected
    assert reason in view.reason


@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", "a/../../b", "\x1b]0;t\x07"])
async def test_a_manifest_with_a_hostile_file_name_is_incomplete_and_its_reason_is_printable(
    host: HostConnection, state: Path, name: str
) -> None:
    folder = make_checkpoint(state, "run1", 7)
    document = json.loads((folder / "manifest.json").read_text())
    document["model"][name] = {"size_bytes": 1, "sha256": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(document))
    view = await _only(host)
    assert view.state == "incomplete"
    assert view.reason.isprintable()


async def test_hostile_folder_names_are_skipped_and_counted(host: HostConnection, state: Path) -> None:
    make_checkpoint(state, "run1", 7)
    checkpoints = state / "runs/run1/checkpoints"
    for name in (b"step_8\x1b[31m", b"x..y", b"step 9", b"$(touch pwned)", b"-rf", b"\xff\xfe", b"n\nl"):
        (Path(os.fsdecode(bytes(checkpoints) + b"/" + name))).mkdir()
    (state / "runs" / "bad\nrun").mkdir()
    skipped: list[str] = []
    views = await list_checkpoints(host, on_skip=skipped.append)
    assert [view.name for view in views] == ["step_7"]
    assert len(skipped) == 8
    assert all(line.isprintable() for line in skipped)


async def test_a_link_in_a_checkpoint_is_not_a_file_of_it(host: HostConnection, state: Path) -> None:
    folder = make_checkpoint(state, "run1", 7)
    weights = folder / "model.safetensors"
    outside = state / "elsewhere"
    weights.rename(outside)
    weights.symlink_to(outside)
    assert (await _only(host)).state == "incomplete"


async def test_a_foreign_checkpoint_is_whole_by_its_header_and_quiet(host: HostConnection, state: Path) -> None:
    make_foreign(state, "run1", "step_3")
    view = await _only(host)
    assert (view.state, view.manifest) == ("foreign", None)
    assert newest_usable([view], need="model") == view
    assert newest_usable([view], need="resume") is None


async def test_a_foreign_checkpoint_that_changed_just_now_is_incomplete(host: HostConnection, state: Path) -> None:
    make_foreign(state, "run1", "step_3", age_s=2.0)
    view = await _only(host)
    assert view.state == "incomplete"
    assert "less than 10 s ago" in view.reason


@pytest.mark.parametrize("size", [0, 5, 9, 60, 1000])
async def test_a_foreign_checkpoint_that_is_cut_short_is_incomplete(
    host: HostConnection, state: Path, size: int
) -> None:
    folder = make_foreign(state, "run1", "step_3")
    os.truncate(folder / "model.safetensors", size)
    os.utime(folder / "model.safetensors", (0, 0))
    assert (await _only(host)).state == "incomplete"


async def test_weights_without_a_config_are_incomplete(host: HostConnection, state: Path) -> None:
    make_model_files(state / "runs/run1/checkpoints/step_1")
    (state / "runs/run1/checkpoints/step_1/config.json").unlink()
    view = await _only(host)
    assert view.state == "incomplete"
    assert "config.json" in view.reason


async def test_a_checkpoint_that_is_not_there_is_named_with_where_it_was_looked_for(
    host: HostConnection, state: Path
) -> None:
    make_checkpoint(state, "run1", 1)
    with pytest.raises(NotFoundError, match=r"run1:step_2 in .*/runs/run1/checkpoints"):
        await one_checkpoint(host, "run1", "step_2")
    with pytest.raises(NotFoundError, match=r"expected RUN:step_N"):
        await one_checkpoint(host, "..", "step_2")


def test_the_newest_usable_is_the_highest_step_that_has_what_is_needed() -> None:
    views = [_view(3, "whole"), _view(9, "incomplete"), _view(7, "model only"), _view(5, "foreign")]
    for need, step in (("model", 7), ("resume", 3)):
        newest = newest_usable(views, need=need)  # type: ignore[arg-type] # the loop's type is str
        assert newest is not None
        assert newest.step == step


def test_of_two_runs_at_the_same_step_the_later_checkpoint_is_newest() -> None:
    views = [_view(3, "whole", created=5.0, run="b"), _view(3, "whole", created=4.0, run="a")]
    assert newest_usable(views, need="model") == views[0]


@given(size=st.integers(2, 500), cut=st.integers(-50, 50))
def test_a_header_accounts_for_exactly_one_file_size(size: int, cut: int) -> None:
    data = safetensors_bytes(size)
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    assert (header_fault(header, len(data) + cut) == "") == (cut == 0)


@given(header=st.one_of(st.binary(max_size=200), st.text().map(str.encode)))
def test_any_bytes_for_a_header_give_a_verdict(header: bytes) -> None:
    assert header_fault(header, 8 + len(header)) != ""


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_any_json_for_a_header_gives_a_verdict(document: object) -> None:
    assert isinstance(header_fault(json.dumps(document).encode(), 10), str)


def test_tensors_that_overlap_or_leave_a_gap_are_a_fault() -> None:
    for spans in ([[0, 4], [2, 6]], [[0, 4], [5, 9]]):
        header = json.dumps({str(i): {"data_offsets": span} for i, span in enumerate(spans)}).encode()
        assert "gap or overlap" in header_fault(header, 8 + len(header) + spans[-1][1])
