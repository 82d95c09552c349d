"""What a stranger relies on: the README's commands, cheap start-up, packages that stay apart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "transformers", "textual", "asyncssh"}


def _modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sorted(sys.modules)), file=sys.__stderr__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.partition(".")[0] for name in done.stderr.split()}


def test_the_readmes_first_commands_are_the_makefiles() -> None:
    readme = (ROOT / "README.md").read_text()
    first_block = re.search(r"```\n(.*?)```", readme, re.S)
    assert first_block is not None
    commands = [line.split("#")[0].strip() for line in first_block.group(1).strip().splitlines()]
    assert commands == ["make demo", "make test"]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "check"} <= targets


def test_the_readme_never_tells_anyone_to_install_the_unrelated_project() -> None:
    for path in ROOT.glob("*.md"):
        assert "pip install dflash-console" not in path.read_text()


@pytest.mark.parametrize("arguments", [["--help"], ["run-eval", "--help"], ["demo", "--help"], ["hosts", "--help"]])
def test_help_loads_no_torch_no_textual_and_no_ssh(arguments: list[str]) -> None:
    code = (
        "from dflash_console.cli import main\n"
        f"sys.argv = ['dflash-console', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    assert leave.code == 0, leave.code"
    )
    assert not _modules_after(code) & HEAVY


def test_what_both_sides_share_loads_no_torch() -> None:
    modules = (
        "events",
        "layout",
        "durable",
        "manifest",
        "fingerprint",
        "processes",
        "supervise",
        "probe",
        "transfer",
        "inspection",
        "evaluation.identity",
        "training.recipe",
    )
    code = "\n".join(f"import dflash_engine.{name}" for name in modules)
    assert not _modules_after(code) & {"torch", "transformers", "numpy", "safetensors", "msgspec"}


def test_the_core_loads_no_front_end_and_no_torch() -> None:
    names = sorted(path.stem for path in (ROOT / "dflash_console" / "core").glob("*.py") if path.stem != "__init__")
    code = "\n".join(f"import dflash_console.core.{name}" for name in names)
    assert not _modules_after(code) & {"torch", "transformers", "textual", "typer"}


def test_the_engine_loads_nothing_of_the_console() -> None:
    code = "import dflash_engine.training.trainer, dflash_engine.evaluation.steps, dflash_engine.cli"
    assert not _modules_after(code) & {"dflash_console", "textual", "asyncssh", "typer", "rich"}


def test_shipped_chats_stay_small_and_apart_from_the_held_out_prompts() -> None:
    data = ROOT / "profiles" / "data"
    assert sum(path.stat().st_size for path in data.iterdir()) < 1_500_000
    train, held_out = (
        {line.split('"role": "user"')[1] for line in (data / name).read_text().splitlines()}
        for name in ("smollm2-python-train.jsonl", "smollm2-python-heldout.jsonl")
    )
    assert not {text.partition('"}')[0] for text in train} & {text.partition('"}')[0] for text in held_out}


def test_every_error_class_stands_in_the_readmes_table() -> None:
    from dflash_console.core import errors

    table = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.M))
    codes = [getattr(errors, name).exit_code for name in errors.__all__ if name != "ConsoleError"]
    assert len(codes) == len(set(codes))
    assert {str(code) for code in codes} <= table.keys()
