"""Record a demo for `dflash-console demo --replay`: `python -m tools.record_demo [OUT]`.

Runs the whole demo (about 6 minutes), with the watch that a dashboard has, and writes down every observation.
The default OUT is the recording that ships.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import tempfile
import time
from pathlib import Path

from dflash_console.core.demo_hosts import stop_demo_hosts
from dflash_console.core.live import DemoSource, Recorder
from dflash_console.core.operations import DemoRequest, Operations
from dflash_console.core.replay import recorded_demo

_AFTER_S = 4.0
_MOST_BYTES = 300_000


async def record(raw: Path, root: Path) -> None:
    """Run a demo below `root`; its observations go to `raw`."""
    recorder = Recorder(raw)
    source = DemoSource(DemoRequest(str(root / "demo")), Operations(root / "operations"), recorder.observe)
    roles = {"ct200": ["train"], "ct129": ["evaluate"]}
    recorder.write({"v": 1, "title": "demo", "began": time.time(), "hosts": roles})
    watching = asyncio.create_task(source.run())
    while not source.is_over and not watching.done():
        await asyncio.wait([watching], timeout=0.5)
    await asyncio.sleep(_AFTER_S)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await stop_demo_hosts(root / "demo")
    if source.failure is not None or source.summary is None:
        raise SystemExit(f"the demo failed: {source.failure}")


def main(arguments: list[str]) -> int:
    """Record, compress, check the size."""
    out = Path(arguments[0]) if arguments else recorded_demo()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dflash-record-") as folder:
        raw = Path(folder, "raw.jsonl")
        asyncio.run(record(raw, Path(folder)))
        content = gzip.compress(raw.read_bytes(), 9, mtime=0)
    if len(content) > _MOST_BYTES:
        raise SystemExit(f"the recording has {len(content)} bytes, at most {_MOST_BYTES} are shipped")
    out.write_bytes(content)
    print(f"{out}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
