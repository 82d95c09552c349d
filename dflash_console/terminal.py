"""What every command shares: the chosen profile, running core work, printing, and ending with the right code.

Standard output carries results only, progress and errors go to standard error. An error is one line and the
exit code of its class; an unexpected one leaves its traceback in a log file that the line names.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from dflash_console.core.profiles import Profile
    from dflash_console.core.ssh import HostConnection

__all__ = [
    "Chosen",
    "ask_hosts",
    "data_folder",
    "demo_root",
    "fail",
    "guarded",
    "load_chosen_profile",
    "print_json",
    "report_fault",
    "run",
    "say",
]

_T = TypeVar("_T")


class Chosen:
    """What the options before the command chose."""

    profile: str | None = None


def guarded(app: Callable[[], None]) -> None:
    """Run the command line; no traceback reaches a user."""
    from dflash_console.core.errors import ConsoleError

    try:
        app()  # ends with SystemExit; usage errors are its own
    except ConsoleError as error:
        sys.exit(fail(error))
    except Exception as error:  # noqa: BLE001 # the last line of defence
        sys.exit(report_fault(error))


def report_fault(error: BaseException) -> int:
    """A fault of this program: its traceback goes to a log file, one line names that; returns the exit code."""
    from dflash_console.core.errors import UnexpectedError

    folder = data_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "errors.log"
    with log.open("a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return fail(UnexpectedError(f"internal error ({type(error).__name__}: {error}); details are in {log}."))


def fail(error: Any) -> int:
    """Print an error's line; returns its exit code."""
    from dflash_console.core.quoting import printable

    print(f"dflash-console: error: {printable(str(error), 4000)}", file=sys.stderr)
    code: int = error.exit_code
    return code


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run core work; of several errors at once, the first of ours is the one to report."""
    from dflash_console.core.errors import ConsoleError

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        say("interrupted; what runs on the hosts goes on")
        raise typer.Exit(130) from None
    except BaseExceptionGroup as group:
        ours = group.subgroup(ConsoleError)
        if ours is None:
            raise
        error: BaseException = ours
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


def ask_hosts(names: Sequence[str], ask: Callable[[HostConnection], Awaitable[_T]]) -> tuple[list[_T], int]:
    """Ask each host of the chosen profile; errors are printed, and the first one's exit code is returned (or 0)."""
    from dflash_console.core.each_host import ask_each_host
    from dflash_console.core.errors import ConsoleError

    answers = run(ask_each_host(load_chosen_profile(), names, ask))
    codes = [fail(answer) for answer in answers if isinstance(answer, ConsoleError)]
    return [answer for answer in answers if not isinstance(answer, ConsoleError)], codes[0] if codes else 0


def load_chosen_profile() -> Profile:
    """The profile of `--profile` or `DFLASH_PROFILE`; without either, the only one that the user has.

    Raises ProfileError.
    """
    from dflash_console.core.errors import ProfileError
    from dflash_console.core.profiles import load_profile, profile_search

    search = profile_search()
    name = Chosen.profile
    if name is None:
        own = sorted(path.stem for path in search[0].glob("*.toml"))
        if len(own) != 1:
            found = f"you have {', '.join(own)}" if own else f"there is none in {search[0]}"
            raise ProfileError(f"No profile was chosen, and {found}; name one with --profile NAME or DFLASH_PROFILE.")
        (name,) = own
    return load_profile(name, (*search, demo_root()))


def data_folder() -> Path:
    """Where this operator's own records lie; `DFLASH_DATA_DIR` moves them."""
    import platformdirs

    return Path(os.environ.get("DFLASH_DATA_DIR") or platformdirs.user_data_dir("dflash-ops"))


def demo_root() -> Path:
    """Where the demo's hosts live."""
    return data_folder() / "demo"


def say(text: str) -> None:
    """One line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    import msgspec

    typer.echo(msgspec.json.encode(value, enc_hook=str).decode())
