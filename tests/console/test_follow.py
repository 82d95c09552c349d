"""Following a file that grows on a real host, and cutting its bytes into events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_console.core import follow as module
from dflash_console.core.errors import IntegrityError, JobFailedError, UnreachableError
from dflash_console.core.follow import Follower, follow_events
from dflash_console.core.jobs import JobRef, view_job
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection
from dflash_engine.events import Event, EventReader
from tests.hosts import OpenSSHHost
from tests.tcp_relay import Relay

FINISHED = b'{"v":1,"t":9.0,"type":"job.finished","reason":"finished"}\n'


def line(n: int) -> bytes:
    return json.dumps({"v": 1, "t": float(n), "type": "train.step", "step": n}).encode() + b"\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSSHHost]:
    host = OpenSSHHost(tmp_path_factory.mktemp("follow"), "ct200")
    yield host
    host.close()


@pytest.fixture
async def conn(server: OpenSSHHost) -> AsyncIterator[HostConnection]:
    async with Connections(_profile(server)) as hosts:
        yield await hosts.get("ct200")


def _profile(server: OpenSSHHost) -> Profile:
    return Profile(name="test", path=server.root / "test.toml", hosts={"ct200": server.profile})


class Job:
    """A job folder whose records the test writes itself: no process is behind it."""

    def __init__(self, conn: HostConnection, name: str) -> None:
        self.ref = JobRef(conn.name, name, conn.state / "jobs" / name)
        self.path = Path(self.ref.path)
        self.path.mkdir(parents=True)
        self.events = self.path / "events.jsonl"
        record = {"v": 1, "id": name, "kind": "train", "created": time.time(), "run": None}
        (self.path / "job.json").write_text(json.dumps(record))

    def append(self, data: bytes) -> None:
        with self.events.open("ab") as file:
            file.write(data)

    def end(self, reason: str) -> None:
        (self.path / "exit.json").write_text(json.dumps({"v": 1, "reason": reason, "message": ""}))


@pytest.fixture
def job(conn: HostConnection, request: pytest.FixtureRequest) -> Job:
    return Job(conn, request.node.name.replace("[", "-").replace("]", "")[:90])


async def test_a_file_that_is_not_there_yet_has_nothing_new(conn: HostConnection, job: Job) -> None:
    follower = Follower(conn, job.ref.path / "events.jsonl")
    assert await follower.poll() == b""
    job.append(b"one")
    assert await follower.poll() == b"one"
    assert await follower.poll() == b""
    job.append(b"two")
    assert await follower.poll() == b"two"


async def test_following_goes_on_from_an_offset(conn: HostConnection, job: Job) -> None:
    job.append(b"onetwo")
    assert await Follower(conn, job.ref.path / "events.jsonl", offset=3).poll() == b"two"


async def test_a_poll_is_bounded_and_the_next_one_goes_on(conn: HostConnection, job: Job) -> None:
    data = bytes(range(256)) * 2500
    job.append(data)
    follower = Follower(conn, job.ref.path / "events.jsonl")
    pieces = [await follower.poll() for _ in range(3)]
    assert max(map(len, pieces)) == 256 << 10
    assert b"".join(pieces) == data


@pytest.mark.parametrize("change", ["truncate", "remove", "replace"])
async def test_a_file_that_is_another_one_now_is_said(conn: HostConnection, job: Job, change: str) -> None:
    job.append(line(1) + line(2))
    follower = Follower(conn, job.ref.path / "events.jsonl")
    await follower.poll()
    job.events.unlink() if change == "remove" else job.events.write_bytes(line(1) if change == "replace" else b"")
    with pytest.raises(IntegrityError, match=r"ct200: .*events\.jsonl is gone or shorter"):
        await follower.poll()


async def _next(events: AsyncIterator[Event]) -> Event:
    return await asyncio.wait_for(anext(events), 20)


async def test_a_line_in_two_polls_is_one_event_and_a_torn_last_line_is_none(conn: HostConnection, job: Job) -> None:
    job.append(line(1) + line(2)[:7])
    events = follow_events(conn, job.ref)
    assert (await _next(events)).data == {"step": 1}
    waiting = asyncio.create_task(_next(events))
    done, _ = await asyncio.wait([waiting], timeout=0.5)  # several polls; only time can show it
    assert not done
    job.append(line(2)[7:])
    assert (await waiting).data == {"step": 2}


async def test_following_begins_before_the_file_is_there_and_ends_with_the_last_event(
    conn: HostConnection, job: Job
) -> None:
    found: list[Event] = []

    async def follow() -> None:
        found.extend([event async for event in follow_events(conn, job.ref)])

    following = asyncio.create_task(follow())
    await asyncio.wait([following], timeout=0.3)
    job.append(line(1) + FINISHED + line(2))
    await asyncio.wait_for(following, 20)
    assert [event.type for event in found] == ["train.step", "job.finished"]


async def test_what_is_there_can_be_read_without_waiting_for_more(conn: HostConnection, job: Job) -> None:
    job.append(line(1) + line(2))
    found = [event.data["step"] async for event in follow_events(conn, job.ref, until_finished=False)]
    assert found == [1, 2]


async def test_lines_that_cannot_be_read_are_told_and_the_others_delivered(conn: HostConnection, job: Job) -> None:
    job.append(line(1) + b"garbage\n[]\n" + line(2) + FINISHED)
    found = [event async for event in follow_events(conn, job.ref)]
    (alert,) = (event for event in found if event.type == "alert")
    assert alert.data["message"].startswith("2 line(s)")
    assert [event.data.get("step") for event in found if event.type == "train.step"] == [1, 2]


async def test_a_dead_job_without_a_last_event_is_an_error_after_all_its_events(
    conn: HostConnection, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.1)
    (job.path / "process.json").write_text(json.dumps({"pid": 1, "start_ticks": 1, "boot_id": "of another time"}))
    job.append(line(1) + line(2)[:5])
    found: list[int] = []

    async def follow() -> None:
        async for event in follow_events(conn, job.ref):
            found.append(event.data["step"])

    with pytest.raises(JobFailedError, match="is lost: its supervisor is gone"):
        await follow()
    assert found == [1]


async def test_an_event_right_after_the_verdict_is_not_missed(
    conn: HostConnection, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.1)
    look = view_job

    async def look_then_finish(conn: HostConnection, job_id: str) -> object:
        view = await look(conn, job_id)
        job.append(FINISHED)  # the supervisor writes its last event after the verdict
        return view

    monkeypatch.setattr(module, "view_job", look_then_finish)
    job.end("failed")
    assert [event.type async for event in follow_events(conn, job.ref)] == ["job.finished"]


async def test_a_verdict_of_success_is_enough_where_the_last_event_could_not_be_written(
    conn: HostConnection, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.1)
    job.append(line(1))
    job.end("finished")
    assert [event.type async for event in follow_events(conn, job.ref)] == ["train.step"]


async def test_a_lost_connection_is_no_verdict_and_comes_after_what_was_read(server: OpenSSHHost) -> None:
    async with Relay.to(server.profile) as relay:
        profile = msgspec.structs.replace(_profile(server), hosts={"ct200": relay.host})
        async with Connections(profile) as hosts:
            conn = await hosts.get("ct200")
            job = Job(conn, "lost-connection")
            job.append(line(1) + line(2))
            found: list[int] = []

            async def follow() -> None:
                async for event in follow_events(conn, job.ref):
                    found.append(event.data["step"])
                    if len(found) == 1:
                        relay.cut()

            with pytest.raises(UnreachableError):
                await follow()
            assert found == [1, 2]


LINES = st.lists(
    st.one_of(
        st.integers(0, 99).map(line),
        st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"") + b"\n"),
        st.just(b'{"v":1,"t":1.0,"type":"alert","message":"' + b"x" * 80 + b'"}\n'),
        st.just('{"v":1,"t":1.0,"type":"eval.prompt","prompt":"é→𝄞"}\n'.encode()),
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(lines=LINES, torn=st.binary(max_size=90).map(lambda data: data.replace(b"\n", b"")), data=st.data())
def test_events_do_not_depend_on_where_the_bytes_are_cut(lines: list[bytes], torn: bytes, data: st.DataObject) -> None:
    stream = b"".join(lines) + torn
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    whole, cut = EventReader(max_line_bytes=100), EventReader(max_line_bytes=100)
    expected = whole.feed(stream)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += cut.feed(stream[start:end])
    assert found == expected
    assert cut.unreadable == whole.unreadable
    steps = [json.loads(text)["step"] for text in lines if text.startswith(b'{"v": 1, "t"')]
    assert [event.data["step"] for event in found if event.type == "train.step"] == steps
