"""The connection against both kinds of server: commands, files, clocks, and every way in which it fails."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath

import pytest

from dflash_console.core.deploy import deploy_engine, engine_json
from dflash_console.core.errors import (
    AuthenticationError,
    ConsoleError,
    HostKeyError,
    HostNotReadyError,
    NotFoundError,
    ProfileError,
    RemoteCommandError,
    UnknownHostError,
    UnreachableError,
)
from dflash_console.core.profiles import HostProfile, Profile, load_profile
from dflash_console.core.ssh import Connections, fetch_host_key, trust_host
from tests.hosts import OpenSSHHost, free_port, login_shell, serving

AWKWARD = 'it\'s a "name" with $HOME; `ls` & \\ü\n*'


def profile_of(server: OpenSSHHost, **changes: object) -> Profile:
    """A profile of one host, `server` with some fields changed."""
    fields = {name: getattr(server.profile, name) for name in HostProfile.__struct_fields__} | changes
    return Profile(name="lab", path=server.root / "lab.toml", hosts={"ct200": HostProfile(**fields)})


async def connect(profile: Profile, name: str = "ct200") -> None:
    async with Connections(profile) as hosts:
        await hosts.get(name)


# ---- every trouble: class, exit code, one clear line


async def _unknown_host(server: OpenSSHHost) -> None:
    await connect(profile_of(server), "ct100")


async def _unknown_key(server: OpenSSHHost) -> None:
    path = server.root / "lab.toml"
    path.write_text('[hosts.ct200]\naddress = "127.0.0.1"\nidentitiy = "x"\n')
    load_profile(str(path), [])


async def _unknown_host_key(server: OpenSSHHost) -> None:
    server.known_hosts.unlink()
    await connect(profile_of(server))


async def _changed_host_key(server: OpenSSHHost) -> None:
    server.trust(server.new_key("other"))
    await connect(profile_of(server))


async def _changed_host_key_type(server: OpenSSHHost) -> None:
    server.trust(server.new_key("other", "ecdsa-sha2-nistp256"))
    await connect(profile_of(server))


async def _revoked_host_key(server: OpenSSHHost) -> None:
    server.known_hosts.write_text(f"@revoked {server.known_hosts.read_text()}")
    await connect(profile_of(server))


async def _revoked_beside_a_trusted_one(server: OpenSSHHost) -> None:
    trusted = server.known_hosts.read_text()
    server.known_hosts.write_text(f"{trusted}@revoked {trusted}")
    await connect(profile_of(server))


async def _closed_port(server: OpenSSHHost) -> None:
    await connect(profile_of(server, port=free_port()))


async def _silent_port(server: OpenSSHHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await connect(profile_of(server, port=silent.getsockname()[1], connect_timeout_s=0.5))


async def _no_such_name(server: OpenSSHHost) -> None:
    await connect(profile_of(server, address="no-such-host.invalid"))


async def _refused_key(server: OpenSSHHost) -> None:
    await connect(profile_of(server, identity=str(server.new_key("stranger"))))


async def _no_identity_file(server: OpenSSHHost) -> None:
    await connect(profile_of(server, identity=str(server.root / "gone")))


async def _no_key_at_all(server: OpenSSHHost) -> None:
    await connect(profile_of(server, identity=None))


async def _state_not_writable(server: OpenSSHHost) -> None:
    await connect(profile_of(server, state="/proc/dflash"))


async def _no_python(server: OpenSSHHost) -> None:
    async with Connections(profile_of(server, python="/opt/no/python3")) as hosts:
        await deploy_engine(await hosts.get("ct200"))


async def _no_engine_packages(server: OpenSSHHost) -> None:
    bare = server.root / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {server.profile.python} -S "$@"\n')
    bare.chmod(0o755)
    async with Connections(profile_of(server, python=str(bare))) as hosts:
        conn = await hosts.get("ct200")
        await engine_json(conn, await deploy_engine(conn), ["train"])


TROUBLES: list[tuple[Callable[[OpenSSHHost], Awaitable[None]], type[ConsoleError], int, str]] = [
    (_unknown_host, UnknownHostError, 4, r"has no host 'ct100'; it has: ct200\."),
    (_unknown_key, ProfileError, 3, r"lab\.toml: \[hosts\.ct200\] has an unknown key 'identitiy'; did you mean 'id"),
    (
        _unknown_host_key,
        HostKeyError,
        6,
        r"known_hosts does not have: SHA256:\S+\. If this .* says: "
        r"dflash-console --profile lab hosts trust ct200 --fingerprint SHA256:\S+$",
    ),
    (
        _changed_host_key,
        HostKeyError,
        6,
        r"another host key than before: found SHA256:\S+, \S+known_hosts has SHA256:\S+\. .* "
        r"ssh-keygen -R '\[127\.0\.0\.1\]:\d+' -f \S+ && dflash-console --profile lab hosts trust ct200",
    ),
    (_changed_host_key_type, HostKeyError, 6, r"another host key than before: found SHA256:\S+, \S+ has SHA256:"),
    (_revoked_host_key, HostKeyError, 6, r"SHA256:\S+, which \S+known_hosts revokes"),
    (_revoked_beside_a_trusted_one, HostKeyError, 6, r"Host key is revoked .*; see \S+known_hosts\."),
    (_closed_port, UnreachableError, 5, r"ct200 \(127\.0\.0\.1:\d+\) refuses the connection: no SSH server listens"),
    (_silent_port, UnreachableError, 5, r"gave no answer within 0\.5 s"),
    (_no_such_name, UnreachableError, 5, r"no-such-host\.invalid:\d+\) has an address that does not resolve"),
    (_refused_key, AuthenticationError, 7, r"refused user '.+'; tried \S+/stranger_key\."),
    (_no_identity_file, AuthenticationError, 7, r"identity \S+/gone cannot be read: No such file"),
    (_no_key_at_all, AuthenticationError, 7, r"tried the SSH agent's keys and the default keys in ~/\.ssh"),
    (_state_not_writable, HostNotReadyError, 8, r"state folder /proc/dflash cannot be used: mkdir: .*proc/dflash"),
    (_no_python, HostNotReadyError, 8, r"no Python at '/opt/no/python3' .* Set `python` in the profile"),
    (_no_engine_packages, HostNotReadyError, 8, r"ct200: the Python package '\w+' is missing in .*'dflash-ops\[eng"),
]


@pytest.mark.parametrize(("trouble", "kind", "code", "text"), TROUBLES, ids=[t[0].__name__[1:] for t in TROUBLES])
async def test_every_trouble_is_one_clear_line_with_its_exit_code(
    openssh: OpenSSHHost,
    trouble: Callable[[OpenSSHHost], Awaitable[None]],
    kind: type[ConsoleError],
    code: int,
    text: str,
) -> None:
    with pytest.raises(ConsoleError) as caught:
        await trouble(openssh)
    assert (type(caught.value), caught.value.exit_code) == (kind, code)
    assert re.search(text, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


# ---- host keys


async def test_a_key_is_trusted_by_its_exact_fingerprint_only(openssh: OpenSSHHost) -> None:
    openssh.known_hosts.write_text("# no newline at the end")
    host = profile_of(openssh).hosts["ct200"]
    listed = subprocess.run(["ssh-keygen", "-lf", openssh.host_key], capture_output=True, text=True, check=True)
    key = await fetch_host_key(host)
    assert key.fingerprint == listed.stdout.split()[1]
    with pytest.raises(HostKeyError, match="Nothing was trusted"):
        await trust_host(host, key.fingerprint[:-1] + "x")
    assert openssh.known_hosts.read_text() == "# no newline at the end"
    await trust_host(host, key.fingerprint)
    await trust_host(host, key.fingerprint)
    assert openssh.known_hosts.read_text() == f"# no newline at the end\n{key.line}\n"
    await connect(profile_of(openssh))


async def test_a_changed_key_is_not_trusted_beside_the_old_one(openssh: OpenSSHHost) -> None:
    openssh.trust(openssh.new_key("old"))
    before = openssh.known_hosts.read_text()
    host = profile_of(openssh).hosts["ct200"]
    with pytest.raises(HostKeyError, match="Remove that first: ssh-keygen -R"):
        await trust_host(host, (await fetch_host_key(host)).fingerprint)
    assert openssh.known_hosts.read_text() == before


async def test_the_ssh_configuration_gives_addresses_but_never_switches_verification_off(
    openssh: OpenSSHHost, operator_home: Path
) -> None:
    (operator_home / ".ssh").mkdir()
    (operator_home / ".ssh/config").write_text(
        f"Host lab\n HostName 127.0.0.1\n Port {openssh.port}\n User {openssh.profile.user}\n"
        f" IdentityFile {openssh.client_key}\n StrictHostKeyChecking no\n UserKnownHostsFile none\n"
    )
    alias = profile_of(openssh, address="lab", port=None, user=None, identity=None)
    await connect(alias)
    with pytest.raises(HostKeyError, match=re.escape(str(operator_home / ".ssh/known_hosts"))):
        await connect(profile_of(openssh, address="lab", port=None, user=None, identity=None, known_hosts=None))
    with pytest.raises(UnreachableError, match="refuses"):
        await connect(profile_of(openssh, address="lab", port=free_port()))


# ---- commands


async def test_a_command_runs_with_its_streams_and_exit_code(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        result = await conn.run(["sh", "-c", "cat; echo oops >&2; exit 3"], stdin=b"\x00\xffdata")
        assert (result.code, result.stdout, result.stderr) == (3, b"\x00\xffdata", b"oops\n")
        assert (await conn.run(["no-such-command"])).code == 127
        assert (await conn.run(["sh", "-c", "kill -9 $$"])).code == 137
        big = os.urandom(3 << 20)
        assert (await conn.run(["cat"], stdin=big)).stdout == big


async def test_arguments_and_variables_arrive_unchanged(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        result = await conn.run(["sh", "-c", 'printf "%s|" "$@" "$NAMED"', "sh", AWKWARD, ""], env={"NAMED": AWKWARD})
    assert result.stdout.decode() == f"{AWKWARD}||{AWKWARD}|"


async def test_more_commands_at_once_than_a_connection_has_sessions(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        results = await asyncio.gather(*(conn.run(["echo", str(n)]) for n in range(25)))
    assert [result.stdout for result in results] == [f"{n}\n".encode() for n in range(25)]


async def test_output_beyond_the_limit_is_an_error_and_not_memory(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        with pytest.raises(RemoteCommandError, match="printed more than"):
            await conn.run(["yes"], max_output_bytes=1000)
        assert (await conn.run(["echo", "still here"])).stdout == b"still here\n"


async def test_a_command_that_never_ends_is_given_up(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        with pytest.raises(UnreachableError, match=r"ct200: sleep: no answer within 0\.3 s"):
            await conn.run(["sleep", "20"], timeout_s=0.3)
        assert (await conn.run(["echo", "still here"])).stdout == b"still here\n"


@pytest.mark.skipif("bash" not in login_shell(), reason="only bash reads .bashrc for commands over SSH")
async def test_what_start_up_files_print_is_not_a_commands_output(openssh: OpenSSHHost) -> None:
    (openssh.home / ".bashrc").write_text(
        'touch "$HOME/was-read"\nprintf "no newline"; echo noise >&2\ntrap "echo bye; exit 99" EXIT\nset -x\n'
    )
    async with Connections(profile_of(openssh)) as hosts:
        conn = await hosts.get("ct200")
        result = await conn.run(["sh", "-c", "echo out; echo err >&2; exit 4"])
        assert (result.code, result.stdout, result.stderr) == (4, b"out\n", b"err\n")
        assert (await deploy_engine(conn)).uploaded
    assert (openssh.home / "was-read").exists()


# ---- connections


async def test_one_connection_a_host_however_often_it_is_asked_for(two_hosts: Profile) -> None:
    async with Connections(two_hosts) as hosts:
        first, again, other = await asyncio.gather(hosts.get("ct200"), hosts.get("ct200"), hosts.get("ct129"))
        assert first is again
        assert other is not first
    assert first.is_closed


async def test_a_lost_connection_is_said_and_the_next_request_opens_a_new_one(openssh: OpenSSHHost) -> None:
    async with Connections(profile_of(openssh)) as hosts:
        conn = await hosts.get("ct200")
        started = openssh.home / "started"
        running = asyncio.create_task(conn.run(["sh", "-c", f"mkfifo {started}; echo > {started}; sleep 30"]))
        while not started.exists():
            await asyncio.wait([running], timeout=0.02)
        await asyncio.to_thread(started.read_bytes)
        openssh.signal_connections(signal.SIGKILL)
        with pytest.raises(UnreachableError, match="connection was lost"):
            await running
        with pytest.raises(UnreachableError):
            await conn.read_file("/etc/hostname", max_bytes=1000)
        assert (await (await hosts.get("ct200")).run(["echo", "back"])).stdout == b"back\n"


async def test_a_dead_peer_is_noticed_in_under_ten_seconds(openssh: OpenSSHHost) -> None:
    async with Connections(profile_of(openssh)) as hosts:
        conn = await hosts.get("ct200")
        openssh.signal_connections(signal.SIGSTOP)
        before = time.monotonic()
        with pytest.raises(UnreachableError, match="connection was lost"):
            await conn.run(["true"], timeout_s=60)
        assert time.monotonic() - before < 10


def test_the_hosts_clock_is_compared_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    date = tmp_path / "bin/date"
    date.write_text(f'#!/bin/sh\nexec {shutil.which("date")} -d "now + 100 seconds" "$@"\n')
    date.chmod(0o755)
    monkeypatch.setenv("PATH", f"{date.parent}:{os.environ['PATH']}")

    async def measured(profile: Profile) -> float:
        async with Connections(profile) as hosts:
            return (await hosts.get("ct200")).clock_offset_s

    with serving("asyncssh", tmp_path, ["ct200"]) as profile:
        assert asyncio.run(measured(profile)) == pytest.approx(100, abs=5)


async def test_a_tilde_is_the_hosts_home_and_the_state_folder_is_made(openssh: OpenSSHHost) -> None:
    profile = profile_of(openssh, state="~/deep/down", python="~/bin/python", targets={"q": "~/q", "r": "/r"})
    async with Connections(profile) as hosts:
        conn = await hosts.get("ct200")
    assert conn.state == PurePosixPath(openssh.home / "deep/down")
    assert (openssh.home / "deep/down").is_dir()
    assert conn.profile.python == f"{openssh.home}/bin/python"
    assert conn.profile.targets == {"q": f"{openssh.home}/q", "r": "/r"}
    assert conn.clock_offset_s == pytest.approx(0, abs=5)


# ---- files


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an awkward name that host and test both see."""
    folder = tmp_path / AWKWARD
    folder.mkdir()
    return folder


async def test_a_file_is_written_in_one_step_and_read_in_part_or_whole(ssh_host: Profile, place: Path) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        path = place / AWKWARD
        await conn.write_file(str(path), b"old")
        data = os.urandom(700_001)
        await conn.write_file(str(path), data, mode=0o600)
        assert path.read_bytes() == data
        assert path.stat().st_mode & 0o777 == 0o600
        assert [p.name for p in place.iterdir()] == [AWKWARD]
        assert await conn.read_file(str(path), max_bytes=len(data)) == data
        assert await conn.read_range(str(path), 700_000, 100) == data[-1:]
        assert await conn.read_range(str(path), 800_000, 100) == b""
        with pytest.raises(RemoteCommandError, match="larger than the 700000 bytes"):
            await conn.read_file(str(path), max_bytes=700_000)
        assert (await conn.read_file("/proc/self/stat", max_bytes=4096)).count(b" ") > 40


async def test_what_is_missing_is_none_empty_or_an_error(ssh_host: Profile, place: Path) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        missing = str(place / "missing")
        assert await conn.stat(missing) is None
        assert await conn.list_dir(missing) == []
        await conn.remove_tree(conn.state / "missing")
        for attempt in (
            conn.read_file(missing, max_bytes=10),
            conn.read_range(missing, 0, 10),
            conn.open_file(missing, "rb"),
            conn.write_file(f"{missing}/file", b""),
            conn.make_dir(f"{missing}/folder"),
            conn.rename(missing, f"{missing}2"),
        ):
            with pytest.raises(NotFoundError, match=r"ct200: .*missing.* does not exist") as caught:
                await attempt
            assert "\n" not in str(caught.value)


async def test_a_listing_has_names_sizes_times_and_kinds(ssh_host: Profile, place: Path) -> None:
    (place / "b file").write_bytes(b"12345")
    os.utime(place / "b file", (1_700_000_000, 1_700_000_000))
    (place / "a folder").mkdir()
    (place / "c link").symlink_to(place / "b file")
    (place / "d broken").symlink_to(place / "nothing")
    os.mkfifo(place / "e pipe")
    Path(os.fsdecode(os.fsencode(place) + b"/f \xff")).touch()
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        entries = await conn.list_dir(str(place))
        followed = await conn.stat(str(place / "c link"))
        assert await conn.stat(str(place / "d broken")) is None
    assert [(e.name, e.kind) for e in entries] == [
        ("a folder", "dir"),
        ("b file", "file"),
        ("c link", "link"),
        ("d broken", "link"),
        ("e pipe", "other"),
        ("f \udcff", "file"),
    ]
    assert (entries[1].size_bytes, entries[1].mtime) == (5, 1_700_000_000)
    assert followed is not None
    assert (followed.name, followed.kind, followed.size_bytes) == ("c link", "file", 5)


async def test_of_many_who_make_a_folder_one_has_made_it(ssh_host: Profile, place: Path) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        made = await asyncio.gather(*(conn.make_dir(str(place / "lock")) for _ in range(10)))
        assert sorted(made) == [False] * 9 + [True]
        await conn.make_dirs(str(place / "x/y z/w"))
        await conn.make_dirs(str(place / "x/y z/w"))
    assert (place / "x/y z/w").is_dir()


async def test_a_rename_never_replaces(ssh_host: Profile, place: Path) -> None:
    for name in ("one", "two"):
        (place / name).mkdir()
        (place / name / "file").write_text(name)
        (place / f"{name}.txt").write_text(name)
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        for suffix in ("", ".txt"):
            with pytest.raises(RemoteCommandError):
                await conn.rename(str(place / f"one{suffix}"), str(place / f"two{suffix}"))
        await conn.rename(str(place / "one"), str(place / "three"))
    assert (place / "three/file").read_text() == "one"
    assert (place / "two/file").read_text() == (place / "two.txt").read_text() == "two"


async def test_only_what_is_below_the_state_folder_is_removed(ssh_host: Profile, place: Path) -> None:
    (place / "kept").write_text("kept")
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        folder = conn.state / "runs" / "it's gone"
        await conn.make_dirs(folder / "deep er")
        await conn.write_file(folder / "deep er" / "file", b"x")
        await conn.sftp.symlink(str(place), str(folder / "link"))
        await conn.remove_tree(folder)
        assert await conn.stat(folder) is None
        for refused in (conn.state, conn.state / "..", conn.state / "runs/../..", place, PurePosixPath("/")):
            with pytest.raises(RemoteCommandError, match="is not below the state folder"):
                await conn.remove_tree(str(refused))
        assert await conn.stat(conn.state / "runs") is not None
    assert (place / "kept").read_text() == "kept"


async def test_a_write_that_the_host_refuses_is_said_and_leaves_nothing(ssh_host: Profile, place: Path) -> None:
    (place / "folder").mkdir()
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        with pytest.raises(RemoteCommandError, match=r"^ct200: .*folder: refused by the host: "):
            await conn.write_file(str(place / "folder"), b"data")
    assert [path.name for path in place.iterdir()] == ["folder"]
