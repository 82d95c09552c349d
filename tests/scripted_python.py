"""A Python for a host's profile whose `dflash-engine evaluate` is scripted; all else is real.

It stands for the real evaluator where a test must hold, fail or kill an evaluation at a chosen moment.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import sys
from pathlib import Path

_EVALUATE = """
import json, os, sys, time
from pathlib import Path
from dflash_engine.events import EvalPrompt, EventWriter, JobStarted

here = Path(sys.argv[1])
arguments = sys.argv[2:]
identity = arguments[arguments.index("--id") + 1]
job = Path(os.environ["DFLASH_JOB_DIR"])
with (here / "runs").open("a") as runs:
    runs.write(json.dumps(arguments) + chr(10))
writer = EventWriter(job / "events.jsonl")
writer.write(JobStarted(job=job.name, kind="evaluate"))
if (here / "gate").exists():
    (here / "gate").open().read()
if (here / "fail").exists():
    print("dflash-engine: error: no room for the hidden states", file=sys.stderr)
    sys.exit(8)
for n in range(3):
    writer.write(EvalPrompt(prompt=f"p{n}", tau=1.5, steps=2, tokens=3, accepted=[1, 2]))
result = {"v": 1, "id": identity, "tau": 1.5, "tau_per_prompt": 1.5, "acceptance_by_position": [0.5], "steps": 6}
(job / "result.json").write_text(json.dumps(result))
"""

_WRAPPER = """#!/bin/sh
case " $* " in
*" dflash_engine.cli evaluate "*) exec {python} {here}/evaluate.py {here} "$@" ;;
esac
exec {python} "$@"
"""


class ScriptedPython:
    """The wrapper at `path`, and what its evaluations did."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.path = folder / "python"
        self.path.write_text(_WRAPPER.format(python=shlex.quote(sys.executable), here=shlex.quote(str(folder))))
        self.path.chmod(0o755)
        (folder / "evaluate.py").write_text(_EVALUATE)

    def hold(self) -> None:
        """Evaluations stop in the middle until `release`."""
        os.mkfifo(self._folder / "gate")

    async def release(self) -> None:
        """Let the evaluation that waits go on; waits for one to get there, 30 s at most."""
        gate = self._folder / "gate"
        async with asyncio.timeout(30.0):
            while True:
                try:
                    # A blocking open would keep its thread, and so the test run, where no evaluation ever comes.
                    writer = os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        raise
                    await asyncio.sleep(0.02)
                else:
                    break
        gate.unlink()
        os.close(writer)

    def fail(self, *, now: bool) -> None:
        """Whether evaluations fail from now on."""
        mark = self._folder / "fail"
        mark.touch() if now else mark.unlink()

    def runs(self) -> list[list[str]]:
        """The arguments of each evaluation that was really started."""
        path = self._folder / "runs"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
