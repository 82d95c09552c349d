"""The first start: what is asked, tried, trusted and written, against a real sshd."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Button, Input, Static

from dflash_console.core.errors import ProfileError
from dflash_console.core.first_profile import HostAnswers, check_answers, profile_text, write_first_profile
from dflash_console.core.profiles import load_profile, profile_search
from dflash_console.screens.wizard import WizardScreen
from tests.hosts import OpenSSHHost, user


class Wizard(App[Path | None]):
    """Nothing but the wizard."""

    def on_mount(self) -> None:
        self.push_screen(WizardScreen(), self.exit)


def said(app: Wizard) -> str:
    return str(app.screen.query_one("#wizard-said", Static).content)


def offered(app: Wizard) -> list[str]:
    return [button.id.removeprefix("wizard-") for button in app.screen.query(Button) if button.display and button.id]


async def fill(pilot: Pilot[Path | None], host: OpenSSHHost, **changes: str) -> None:
    values = {
        "address": "127.0.0.1",
        "port": str(host.port),
        "user": user(),
        "identity": str(host.client_key),
        "state": str(host.home / "dflash"),
    }
    for name, value in (values | changes).items():
        pilot.app.screen.query_one(f"#wizard-{name}", Input).value = value
    await pilot.pause()


async def press(pilot: Pilot[Path | None], name: str) -> None:
    button = pilot.app.screen.query_one(f"#wizard-{name}", Button)
    assert button.display
    button.press()
    await pilot.pause()


async def until_offered(pilot: Pilot[Path | None], app: Wizard, name: str) -> None:
    async with asyncio.timeout(20):
        while name not in offered(app) or said(app).endswith("..."):
            await pilot.pause(0.05)


def known_hosts() -> Path:
    return Path.home() / ".ssh" / "known_hosts"


async def test_a_host_is_tried_trusted_by_its_fingerprint_and_written(openssh: OpenSSHHost) -> None:
    app = Wizard()
    async with app.run_test(size=(80, 24)) as pilot:
        await fill(pilot, openssh)
        await press(pilot, "test")
        await until_offered(pilot, app, "trust")
        assert "SHA256:" in said(app)
        assert app.focused is not None
        assert app.focused.id == "wizard-refuse"  # the safe answer
        assert not known_hosts().exists()
        await press(pilot, "trust")
        await until_offered(pilot, app, "save")
        assert "connected" in said(app)
        await press(pilot, "save")
    path = app.return_value
    assert path is not None
    assert path.parent == profile_search()[0]
    host = load_profile("lab", profile_search()).hosts["ct200"]
    assert (host.address, host.port, host.roles) == ("127.0.0.1", openssh.port, ("train", "evaluate"))
    assert str(openssh.port) in known_hosts().read_text()


async def test_a_key_that_is_not_ours_is_refused_and_nothing_written(openssh: OpenSSHHost) -> None:
    app = Wizard()
    async with app.run_test() as pilot:
        await fill(pilot, openssh)
        await press(pilot, "test")
        await until_offered(pilot, app, "trust")
        await press(pilot, "refuse")
        assert offered(app) == ["test"]
        await pilot.press("escape")
    assert app.return_value is None
    assert not known_hosts().exists()
    assert not list(profile_search()[0].glob("*"))


async def test_a_wrong_port_is_said_and_the_answers_stay(openssh: OpenSSHHost) -> None:
    with socket.socket() as taken:  # bound, never listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        app = Wizard()
        async with app.run_test() as pilot:
            await fill(pilot, openssh, port=str(taken.getsockname()[1]))
            await press(pilot, "test")
            async with asyncio.timeout(20):
                while "refuses the connection" not in said(app):
                    await pilot.pause(0.05)
            assert offered(app) == ["test"]
            assert app.screen.query_one("#wizard-user", Input).value == user()


async def test_esc_leaves_at_once_while_a_host_hangs(openssh: OpenSSHHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app = Wizard()
        async with app.run_test() as pilot:
            await fill(pilot, openssh, port=str(silent.getsockname()[1]))
            await press(pilot, "test")
            await press(pilot, "test")
            assert "still running" in said(app)
            async with asyncio.timeout(3):
                await pilot.press("escape")
                while app.is_running and len(app.screen_stack) > 1:
                    await pilot.pause(0.02)
    assert app.return_value is None


async def test_a_changed_answer_has_to_be_tried_again(openssh: OpenSSHHost) -> None:
    app = Wizard()
    async with app.run_test() as pilot:
        await fill(pilot, openssh)
        await press(pilot, "test")
        await until_offered(pilot, app, "trust")
        app.screen.query_one("#wizard-address", Input).value = "localhost"
        await pilot.pause()
        assert offered(app) == ["test"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "[red]x"),
        ("address", "a b"),
        ("port", "ssh"),
        ("state", "relative"),
        ("identity", "id"),
        ("profile", "../x"),
    ],
)
async def test_an_answer_that_cannot_be_is_named_and_nothing_is_asked(
    openssh: OpenSSHHost, field: str, value: str
) -> None:
    app = Wizard()
    async with app.run_test() as pilot:
        await fill(pilot, openssh, **{field: value})
        await press(pilot, "test")
        assert value in said(app)
        assert offered(app) == ["test"]
    assert not any("Connection from" in line for line in openssh.log)


def test_a_profile_of_that_name_is_never_overwritten(tmp_path: Path) -> None:
    path = write_first_profile("lab", [HostAnswers("a", "a.example")], tmp_path)
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="already"):
        write_first_profile("lab", [HostAnswers("b", "b.example")], tmp_path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["lab.toml"]


def test_what_is_written_is_what_was_answered(tmp_path: Path) -> None:
    odd = HostAnswers("c", "c.example", 22, "u", '/k/"q"\\ü', "~/d x", "/opt/py thon", ("train",))
    assert check_answers(odd) == {}
    path = tmp_path / "p.toml"
    path.write_text(profile_text([odd]))
    host = load_profile(str(path), []).hosts["c"]
    assert (host.identity, host.state, host.python, host.roles) == ('/k/"q"\\ü', "~/d x", "/opt/py thon", ("train",))
