"""Help: every key with what it does, what the marks and the words mean."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_console.widgets.looks import (
    DIM,
    DRAFTER,
    EVALUATION,
    GOOD,
    STRONG,
    TARGET,
    TITLE,
    TRANSFER,
    TROUBLE,
    WARN,
    glyph,
)

__all__ = ["HelpScreen", "help_text"]

_KEYS = (
    ("Go", (
        ("1 to 5", "Overview, Run, Checkpoints, Evaluations, Logs"),
        ("↑ ↓", "move; also k j, PgUp PgDn, Home End"),
        ("enter", "open what is under the cursor"),
        ("esc", "back: out of a text, a filter, then to the view before"),
        ("tab", "the next list of a view (Evaluations: list, prompts)"),
        ("← →", "Run: another run; Overview at 80 columns: another section"),
    )),
    ("Do", (
        ("s", "stage the selected checkpoint to the evaluating host, verified on both ends"),
        ("S", "stage it to a host that you choose"),
        ("e", "evaluate it there; it is staged first where it is not there yet"),
        ("l", "Run: loss on a logarithmic scale, or back"),
        ("o", "the output of the selected run's or evaluation's job"),
    )),
    ("Always", (
        ("/", "filter the list; esc clears it"),
        ("?", "this help"),
        ("ctrl+p", "palette: everything by name"),
        ("q", "quit at once; what runs goes on, here and on the hosts"),
    )),
)  # fmt: skip
_WORDS = (
    ("tau", "acceptance length: tokens that one verification step of the target yields; 1 where no draft is accepted"),
    ("tau eval", "of a finished evaluation, with half the width of its 95 % interval over prompts"),
    ("whole", "a checkpoint whose every file has the size in its manifest; it can be evaluated and resumed"),
    ("model only", "whole without the optimizer, as staged copies are: it can be evaluated and served"),
    ("incomplete", "being written, or cut off: never used for anything"),
    ("wait", "share of a step in which the drafter waited for hidden states: near 0 is healthy"),
    ("ring", "hidden states ready for the drafter: 0 full means that the target is the slower one"),
)


def help_text(width: int) -> Text:
    """The whole help for a width; long explanations go on below their own column."""
    text = Text()
    for title, keys in _KEYS:
        text.append(f"{title}\n", TITLE)
        for key, words in keys:
            _entry(text, key, words, 12, width)
    text.append("Marks\n", TITLE)
    for name, style, words in (
        ("running", GOOD, "runs"),
        ("done", GOOD, "ended well"),
        ("failed", TROUBLE, "failed, was killed, or needs somebody"),
        ("attention", WARN, "worth a look"),
        ("up", GOOD, "host up; checkpoint whole"),
        ("connecting", WARN, "connecting, starting"),
        ("unreachable", TROUBLE, "host unreachable: says nothing about its jobs"),
        ("star", GOOD, "the newest checkpoint that can be used"),
    ):
        text.append(f"  {glyph(name):<11} ", style)
        text.append(f"{words}\n")
    text.append("  hues        ")
    for words, style in (("target", TARGET), ("drafter", DRAFTER), ("evaluation", EVALUATION), ("transfer", TRANSFER)):
        text.append(f"{words}  ", style)
    text.append("\n")
    text.append("Words\n", TITLE)
    for word, words in _WORDS:
        _entry(text, word, words, 12, width)
    text.append("\n  esc closes this", DIM)
    return text


def _entry(text: Text, key: str, words: str, column: int, width: int) -> None:
    text.append(f"  {key:<{column}}", STRONG)
    lines = Text(words).wrap(Console(width=200), max(20, width - column - 2))
    for index, part in enumerate(lines):
        text.append(("" if index == 0 else " " * (column + 2)) + part.plain.rstrip() + "\n")


class HelpScreen(ModalScreen[None]):
    """Over whatever was shown; any of esc, ?, q closes it."""

    CSS_PATH = "help.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss(None)", show=False),
        Binding("down,j", "scroll(2)", show=False),
        Binding("up,k", "scroll(-2)", show=False),
        Binding("pagedown", "scroll(12)", show=False),
        Binding("pageup", "scroll(-12)", show=False),
    ]

    def compose(self) -> ComposeResult:
        width = min(self.app.size.width - 6, 100)
        with VerticalScroll(id="help-box", can_focus=False) as box:
            box.border_title = "help"
            yield Static(help_text(width - 4), markup=False)

    def action_scroll(self, by: int) -> None:
        """Move the text."""
        self.query_one("#help-box").scroll_relative(y=by, animate=False)
