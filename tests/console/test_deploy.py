"""The engine on a host: sent once, verified always, never half there."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from msgspec.structs import replace

from dflash_console.core import deploy
from dflash_console.core.deploy import DeployedEngine, bundled_engine, deploy_engine, engine_json, probe
from dflash_console.core.errors import (
    ConsoleError,
    HostNotReadyError,
    IntegrityError,
    NotFoundError,
    ProfileError,
    RemoteCommandError,
)
from dflash_console.core.profiles import Profile
from dflash_console.core.ssh import Connections, HostConnection
from tests.hosts import OpenSSHHost


async def engine_folders(conn: HostConnection) -> list[str]:
    return [entry.name for entry in await conn.list_dir(conn.state / "engines")]


def test_the_bundle_is_every_module_of_the_engine_and_its_hash_depends_on_all_of_them() -> None:
    bundle = bundled_engine()
    assert {"dflash_engine/__init__.py", "dflash_engine/py.typed", "dflash_engine/drafter/model.py"} <= set(
        bundle.files
    )
    assert all(path.endswith((".py", "py.typed")) for path in bundle.files)
    assert len(bundle.hash) == 64
    changed = deploy.engine_hash({**bundle.files, "dflash_engine/cli.py": b"# another"})
    assert changed != bundle.hash == deploy.engine_hash(dict(reversed(bundle.files.items())))


async def test_the_engine_is_sent_once_and_found_in_place_after_that(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        first, second = await deploy_engine(conn), await deploy_engine(conn)
        assert (first.uploaded, second.uploaded) == (True, False)
        assert first.path == second.path == conn.state / "engines" / bundled_engine().hash
        assert await engine_folders(conn) == [first.hash]
        for path, content in bundled_engine().files.items():
            assert await conn.read_file(first.path / path, max_bytes=1 << 20) == content
        found = await probe(conn, second)
    assert found.python == sys.version.split()[0]
    assert found.packages["torch"] is not None
    assert 0 < found.memory_available_bytes <= found.memory_total_bytes
    assert found.disk_free_bytes > 0
    assert found.cpu_count > 0


async def test_two_consoles_that_deploy_at_once_get_the_same_engine(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as one, Connections(ssh_host) as other:
        both = [await one.get("ct200"), await other.get("ct200")]
        engines = await asyncio.gather(*(deploy_engine(conn) for conn in both * 2))
        assert len({engine.path for engine in engines}) == 1
        assert sum(engine.uploaded for engine in engines) == 1
        assert await engine_folders(both[0]) == [engines[0].hash]


async def test_an_interrupted_deployment_leaves_no_half_engine(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        bundle = bundled_engine()
        whole = deploy.upload_request(conn.state / "engines" / bundle.hash, bundle)
        cut = await conn.run(deploy.receiver_command(conn), stdin=whole[: len(whole) * 2 // 3])
        assert cut.code != 0
        assert await engine_folders(conn) == []
        assert (await deploy_engine(conn)).uploaded


async def test_a_file_that_arrives_damaged_is_not_published(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        bundle = bundled_engine()
        path = conn.state / "engines" / bundle.hash
        line, _, _ = deploy.upload_request(path, bundle).partition(b"\n")
        wrong = {**bundle.files, "dflash_engine/cli.py": b"# something else"}
        answer = await conn.run(deploy.receiver_command(conn), stdin=line + b"\n" + deploy.archive(wrong))
        assert json.loads(answer.stdout) == {"state": "absent", "faults": ["dflash_engine/cli.py was modified"]}
        assert await engine_folders(conn) == []


@pytest.mark.parametrize(
    ("tampering", "fault"),
    [
        ("echo '# x' >> dflash_engine/cli.py", "dflash_engine/cli.py was modified"),
        ("rm dflash_engine/events.py", "dflash_engine/events.py is missing"),
        ("echo 'evil = 1' > torch.py", "torch.py is not part of it"),
        ("rm dflash_engine/cli.py && mkdir dflash_engine/cli.py", "dflash_engine/cli.py is missing"),
    ],
)
async def test_a_tampered_engine_is_noticed_and_the_message_says_how_to_mend_it(
    ssh_host: Profile, tampering: str, fault: str
) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        engine = await deploy_engine(conn)
        assert (await conn.run(["sh", "-c", f"cd {engine.path} && {tampering}"])).code == 0
        with pytest.raises(IntegrityError, match=fault) as caught:
            await deploy_engine(conn)
        remedy = str(caught.value).rpartition("deployed again: ")[2]
        assert (await conn.run(shlex.split(remedy))).code == 0
        assert (await deploy_engine(conn)).uploaded


async def test_compiled_files_of_a_used_engine_are_no_fault(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        engine = await deploy_engine(conn)
        await probe(conn, engine)
        compiled = await conn.list_dir(engine.path / "dflash_engine/__pycache__")
        assert compiled
        assert not (await deploy_engine(conn)).uploaded


async def test_an_engine_works_below_a_state_folder_with_an_awkward_name(ssh_host: Profile, tmp_path: Path) -> None:
    state = tmp_path / 'it\'s "here" $HOME; x'
    host = replace(ssh_host.hosts["ct200"], state=str(state))
    async with Connections(replace(ssh_host, hosts={"ct200": host})) as hosts:
        conn = await hosts.get("ct200")
        assert (await probe(conn, await deploy_engine(conn))).cpu_count > 0


async def test_files_in_the_hosts_home_do_not_shadow_the_engines_modules(ssh_host: Profile) -> None:
    async with Connections(ssh_host) as hosts:
        conn = await hosts.get("ct200")
        await conn.write_file(conn.state.parent / "json.py", b"raise SystemExit('shadowed')")
        assert (await probe(conn, await deploy_engine(conn))).cpu_count > 0


async def test_an_old_python_is_named_with_what_is_expected(ssh_host: Profile, tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'import sys; sys.version_info = (3, 9, 2); sys.version = "3.9.2 (x)"; '
        'exec(sys.argv[3], {"__name__": "__main__"})\' "$@"\n'
    )
    old.chmod(0o755)
    host = replace(ssh_host.hosts["ct200"], python=str(old))
    async with Connections(replace(ssh_host, hosts={"ct200": host})) as hosts:
        with pytest.raises(HostNotReadyError, match=r"old-python .*: Python 3\.9\.2 found, 3\.11 or newer expected"):
            await deploy_engine(await hosts.get("ct200"))


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("fail(3, 'bad recipe')", ProfileError, r"^ct200: bad recipe$"),
        ("fail(4, 'no torch')", HostNotReadyError, r"^ct200: no torch$"),
        ("fail(5, 'no target')", NotFoundError, r"^ct200: no target$"),
        ("fail(6, 'bad checkpoint')", IntegrityError, r"^ct200: bad checkpoint$"),
        ("fail(7, 'no prompts')", NotFoundError, r"^ct200: no prompts$"),
        ("fail(8, 'no room')", HostNotReadyError, r"^ct200: no room$"),
        ("fail(9, 'held')", RemoteCommandError, r"^ct200: held$"),
        ("fail(5, '\\x1b[2Jgone')", NotFoundError, r"^ct200: \\x1b\[2Jgone$"),
        ("import no_such_thing", HostNotReadyError, r"No module named 'no_such_thing'.*dflash-ops\[engine\]"),
        ("raise ValueError('odd')", RemoteCommandError, r"ask ended with code 1 and said: ValueError: odd"),
        ("print('not json')", RemoteCommandError, r"ask answered 'not json\\n', expected JSON"),
    ],
)
async def test_an_engines_failure_keeps_its_words_and_gets_its_class(
    openssh: OpenSSHHost, tmp_path: Path, body: str, kind: type[ConsoleError], text: str
) -> None:
    package = tmp_path / "engine/dflash_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(
        "import sys\ndef fail(code, text):\n    print('dflash-engine: error: ' + text, file=sys.stderr)\n"
        f"    sys.exit(code)\n{body}\n"
    )
    engine = DeployedEngine("x" * 64, PurePosixPath(tmp_path / "engine"), uploaded=False)
    profile = Profile(name="test", path=tmp_path / "test.toml", hosts={"ct200": openssh.profile})
    async with Connections(profile) as hosts:
        with pytest.raises(ConsoleError, match=text) as caught:
            await engine_json(await hosts.get("ct200"), engine, ["ask"])
    assert type(caught.value) is kind


def test_the_receiver_needs_nothing_of_this_project() -> None:
    source = Path(deploy.__file__).with_name("engine_receiver.py").read_text()
    request = json.dumps({"engines": "/nonexistent", "name": "x", "partial": None, "files": {}})
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source], input=request, capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout) == {"state": "absent", "faults": []}
