"""`dflash-engine`: one subcommand a job; each is imported only when it is asked for, so that the torch-free
ones answer at once and work on a host whose packages are not there yet."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

__all__ = ["main"]

_COMMANDS = {
    "train": ("dflash_engine.training.trainer", "train a drafter (started by torchrun)"),
    "evaluate": ("dflash_engine.evaluation.steps", "acceptance length of a drafter, in five steps"),
    "inspect": ("dflash_engine.inspection", "what a checkpoint is and what is wrong with it"),
    "selfcheck": ("dflash_engine.selfcheck.command", "this machine against the public packages' outputs"),
    "convert": ("dflash_engine.convert", "a drafter into a served layout; a GGUF target into a folder"),
    "fingerprint": ("dflash_engine.fingerprint", "fingerprints of a target folder (JSON)"),
    "transfer": ("dflash_engine.transfer", "this host's part of a staging (JSON)"),
    "probe": ("dflash_engine.probe", "Python, packages, memory, disk of this host (JSON)"),
    "supervise": ("dflash_engine.supervise", "run the job of a job folder"),
}


def main(argv: list[str] | None = None) -> int:
    """Dispatch to a subcommand's `main(argv) -> exit code`; 2 for usage errors."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: dflash-engine COMMAND ...\n")
        for name, (_, purpose) in _COMMANDS.items():
            print(f"  {name:<12} {purpose}")
        return 0 if arguments else 2
    if arguments[0] not in _COMMANDS:
        print(
            f"dflash-engine: error: unknown command {arguments[0]!r}; see dflash-engine --help",
            file=sys.stderr,
        )
        return 2
    # Read once, when torch loads its thread pool: idle threads sleep instead of spinning, because the ranks of a
    # pipeline and an evaluation share the cores of a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        module = importlib.import_module(_COMMANDS[arguments[0]][0])
    except ModuleNotFoundError as error:
        print(
            f"dflash-engine: error: the Python package {error.name!r} is missing in {sys.executable}; "
            "install the extra: pip install 'dflash-ops[engine]'",
            file=sys.stderr,
        )
        return 4
    command: Callable[[list[str]], int] = module.main
    return command(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
