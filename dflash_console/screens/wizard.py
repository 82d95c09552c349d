"""The first start: a few questions about a host, tried against it, and a profile written from the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Button, Checkbox, Input, Label, Static

from dflash_console.core.errors import ConsoleError
from dflash_console.core.first_profile import (
    ConnectionFacts,
    HostAnswers,
    check_answers,
    check_profile_name,
    host_key_of,
    trust_key_of,
    try_connection,
    write_first_profile,
)
from dflash_console.core.profiles import profile_search
from dflash_console.core.quoting import printable
from dflash_console.widgets.looks import DIM, GOOD, STRONG, TROUBLE, WARN, plain

__all__ = ["WizardScreen"]

_FIELDS = (
    ("profile", "Profile", "lab", "name of the file"),
    ("name", "Host", "ct200", "what the console calls it"),
    ("address", "Address", "", "host name, IP, or an alias of ~/.ssh/config"),
    ("user", "User", "", "empty: as SSH is configured"),
    ("port", "Port", "", "empty: as SSH is configured"),
    ("identity", "Private key", "", "empty: the SSH agent and the default keys"),
    ("state", "State folder", "~/dflash", "on the host; made if need be"),
    ("python", "Python", "python3", "on the host, 3.11 or newer"),
)


class WizardScreen(Screen[Path | None]):
    """Dismissed with the written profile, or with None by esc, when nothing was written."""

    CSS_PATH = "wizard.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", show=False),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    @dataclass
    class KeySeen(Message):
        """The host showed a key."""

        fingerprint: str
        trusted: bool

    @dataclass
    class Connected(Message):
        """The connection works."""

        facts: ConnectionFacts

    @dataclass
    class Failed(Message):
        """It does not, and why."""

        why: str

    def __init__(self) -> None:
        super().__init__()
        self._hosts: list[HostAnswers] = []
        self._tried: HostAnswers | None = None
        self._fingerprint = ""
        self._work: asyncio.Task[None] | None = None
        self._folder = profile_search()[0]

    def compose(self) -> ComposeResult:
        yield Static(plain(" dflash-console   first start: which host shall it watch?", STRONG), id="wizard-title")
        with VerticalScroll(id="wizard-form", can_focus=False):
            for name, label, value, hint in _FIELDS:
                with Horizontal(classes="wizard-line"):
                    yield Label(label, classes="wizard-label")
                    yield Input(value, placeholder=hint, id=f"wizard-{name}", compact=True)
            with Horizontal(classes="wizard-line"):
                yield Label("It", classes="wizard-label")
                yield Checkbox("trains", True, id="wizard-train", compact=True)
                yield Checkbox("evaluates", True, id="wizard-evaluate", compact=True)
            yield Static("", id="wizard-said", markup=False)
            with Horizontal(id="wizard-buttons"):
                yield Button("Test the connection", id="wizard-test", compact=True)
                yield Button("Not mine", id="wizard-refuse", compact=True)
                yield Button("Trust this key", id="wizard-trust", compact=True)
                yield Button("Save and open the dashboard", id="wizard-save", compact=True)
                yield Button("Add another host", id="wizard-more", compact=True)
        yield Static(plain(" tab next   enter press   esc leave, nothing is written", DIM), id="wizard-keys")

    def on_mount(self) -> None:
        self._offer("test")
        self.query_one("#wizard-address").focus()

    # What the operator does

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Enter in a field goes to the next one."""
        message.stop()
        self.focus_next()

    def on_input_changed(self, message: Input.Changed) -> None:
        """Other answers than the tried ones have to be tried again."""
        if self._tried is not None and message.input.id != "wizard-profile":
            self._forget()

    def on_checkbox_changed(self) -> None:
        """Roles are not tried, but saved."""
        if self._tried is not None:
            self._forget()

    def on_button_pressed(self, message: Button.Pressed) -> None:
        message.stop()
        match message.button.id:
            case "wizard-test":
                self._test()
            case "wizard-refuse":
                self._say("Nothing was trusted, nothing was sent. Check the address, or ask the administrator.", WARN)
                self._offer("test")
            case "wizard-trust":
                self._trust()
            case "wizard-save":
                self._save()
            case "wizard-more":
                self._add_another()

    def action_leave(self) -> None:
        """Write nothing."""
        self.dismiss(None)

    def on_unmount(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def _test(self) -> None:
        if self._work is not None and not self._work.done():
            self._say("The test is still running; esc leaves.", WARN)
            return
        answers = self._answers()
        if answers is None:
            return
        self._tried = answers
        self._say(f"asking {answers.address} for its host key ...", DIM)
        self._start(self._ask_key(answers))

    def _trust(self) -> None:
        answers = self._tried
        if answers is not None:
            self._say("connecting ...", DIM)
            self._offer("test")
            self._start(self._connect(answers, self._fingerprint))

    def _save(self) -> None:
        assert self._tried is not None  # noqa: S101 # offered only then
        try:
            path = write_first_profile(self._value("profile"), [*self._hosts, self._tried], self._folder)
        except ConsoleError as error:
            self._say(str(error), TROUBLE)
            return
        self.dismiss(path)

    def _add_another(self) -> None:
        assert self._tried is not None  # noqa: S101 # offered only then
        self._hosts.append(self._tried)
        self._tried = None
        names = ", ".join(host.name for host in self._hosts)
        for name in ("name", "address"):
            self.query_one(f"#wizard-{name}", Input).value = ""
        self._say(f"{names} kept; now the next host.", GOOD)
        self._offer("test")
        self.query_one("#wizard-name").focus()

    # What the core does, on this loop; it tells by messages

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.create_task(work)

    async def _ask_key(self, answers: HostAnswers) -> None:
        try:
            key, trusted = await host_key_of(answers)
            if trusted:
                self.post_message(self.Connected(await try_connection(answers)))
            else:
                self.post_message(self.KeySeen(key.fingerprint, trusted))
        except ConsoleError as error:
            self.post_message(self.Failed(str(error)))

    async def _connect(self, answers: HostAnswers, fingerprint: str) -> None:
        try:
            await trust_key_of(answers, fingerprint)
            self.post_message(self.Connected(await try_connection(answers)))
        except ConsoleError as error:
            self.post_message(self.Failed(str(error)))

    def on_wizard_screen_key_seen(self, message: KeySeen) -> None:
        if self._tried is None:
            return  # the answers changed meanwhile
        self._fingerprint = message.fingerprint
        text = Text.assemble(("The host shows the key ", ""), (message.fingerprint, STRONG))
        text.append(", which is not known here. Compare it with what its administrator says.")
        self.query_one("#wizard-said", Static).update(text)
        self._offer("refuse", "trust")

    def on_wizard_screen_connected(self, message: Connected) -> None:
        if self._tried is None:
            return
        facts = message.facts
        text = Text.assemble(("connected", GOOD), f", home {facts.home}, state folder {facts.state}, clock ")
        text.append(f"{facts.clock_offset_s:+.1f} s, ")
        if facts.python_fault:
            text.append(f"but {facts.python_fault}", WARN)
        else:
            text.append(f"Python {facts.python}")
        self.query_one("#wizard-said", Static).update(text)
        self._offer("save", "more")

    def on_wizard_screen_failed(self, message: Failed) -> None:
        self._tried = None
        self._say(message.why, TROUBLE)
        self._offer("test")

    # Small parts

    def _answers(self) -> HostAnswers | None:
        """The form as answers; None where something in it cannot be, which is said."""
        port = self._value("port")
        if port and not port.isdigit():
            self._say(f"port is {port!r}, expected a number from 1 to 65535, or nothing.", TROUBLE)
            return None
        roles: list[Literal["train", "evaluate"]] = []
        if self.query_one("#wizard-train", Checkbox).value:
            roles.append("train")
        if self.query_one("#wizard-evaluate", Checkbox).value:
            roles.append("evaluate")
        answers = HostAnswers(
            name=self._value("name"),
            address=self._value("address"),
            port=int(port) if port else None,
            user=self._value("user"),
            identity=self._value("identity"),
            state=self._value("state"),
            python=self._value("python"),
            roles=tuple(roles),
        )
        faults = list(check_answers(answers).values())
        if fault := check_profile_name(self._value("profile"), self._folder):
            faults.insert(0, fault)
        if any(host.name == answers.name for host in self._hosts):
            faults.append(f"There is a host {answers.name!r} already; choose another name.")
        if faults:
            self._say(" ".join(faults), TROUBLE)
            return None
        return answers

    def _value(self, field: str) -> str:
        return self.query_one(f"#wizard-{field}", Input).value.strip()

    def _forget(self) -> None:
        if self._work is not None:
            self._work.cancel()
        self._tried = None
        self._say("", "")
        self._offer("test", focus=False)

    def _say(self, words: str, style: str) -> None:
        self.query_one("#wizard-said", Static).update(Text(printable(words, 1500), style=style))

    def _offer(self, *names: str, focus: bool = True) -> None:
        """Show these buttons; the first, which is the safe one, gets the keyboard."""
        for button in self.query(Button):
            button.display = (button.id or "").removeprefix("wizard-") in names
        if focus:
            self.query_one(f"#wizard-{names[0]}").focus()
