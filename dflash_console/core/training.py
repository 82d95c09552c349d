"""Launch a training on a host: recipe and data go there, torchrun starts the ranks, the job outlives us."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from dflash_console.core.deploy import DeployedEngine, probe
from dflash_console.core.errors import HostNotReadyError, IntegrityError, NotFoundError, ProfileError
from dflash_console.core.jobs import JobRef, JobRequest, launch
from dflash_console.core.ssh import HostConnection
from dflash_engine import layout
from dflash_engine.errors import RecipeError
from dflash_engine.training.recipe import Recipe, load_recipe

__all__ = ["launch_training", "require_target", "upload_by_content"]

_NEEDED = ("torch", "transformers", "safetensors", "numpy")
_GRACE_S = 120.0
_RECIPE_MAX_BYTES = 1 << 20


async def launch_training(
    conn: HostConnection,
    engine: DeployedEngine,
    *,
    recipe_path: Path,
    target: str,
    run: str,
    overrides: Sequence[str] = (),
) -> JobRef:
    """Start or resume a run; what can be checked cheaply is checked before anything is sent.

    `target` is a name of the host's profile; `overrides` are `table.key=value`. A run that exists is resumed,
    if its recipe is the same. Raises ProfileError (recipe), NotFoundError (target, data), HostNotReadyError
    (packages), IntegrityError (the run exists with another recipe).
    """
    if not layout.is_valid_name(run):
        raise ProfileError(f"{run!r} is not a name for a run: letters, digits, '.', '_' and '-' are.")
    try:
        recipe = load_recipe(recipe_path, overrides)
    except RecipeError as error:
        raise ProfileError(f"{error}.") from error
    target_folder = await require_target(conn, target)
    await _require_packages(conn, engine)
    data = [await _upload_chats(conn, recipe_path.parent / name) for name in recipe.data.files]
    run_folder = conn.state / layout.run_dir(run)
    await conn.make_dirs(run_folder)
    await _put_recipe(conn, run_folder / "recipe.toml", recipe_path)
    return await launch(conn, engine, _request(conn, engine, recipe, run, run_folder, target_folder, data, overrides))


async def require_target(conn: HostConnection, name: str) -> PurePosixPath:
    """The folder of a target that the profile names for this host. Raises NotFoundError with what to do."""
    folder = conn.profile.targets.get(name)
    if folder is None:
        known = ", ".join(sorted(conn.profile.targets)) or "none"
        raise NotFoundError(
            f"{conn.name}: the profile names no target {name!r} (known: {known}); "
            f"add it under [hosts.{conn.name}.targets]."
        )
    if await conn.stat(PurePosixPath(folder) / "config.json") is None:
        raise NotFoundError(
            f"{conn.name}: target {name!r} is not at {folder} (no config.json there); "
            "expected a Hugging Face model folder."
        )
    return PurePosixPath(folder)


async def upload_by_content(conn: HostConnection, content: bytes, folder: str, suffix: str) -> PurePosixPath:
    """Put content at `<state>/cache/<folder>/<sha256><suffix>` unless it is there already; returns the path."""
    path = conn.state / "cache" / folder / (hashlib.sha256(content).hexdigest() + suffix)
    there = await conn.stat(path)
    if there is None or there.size_bytes != len(content):
        await conn.make_dirs(path.parent)
        await conn.write_file(path, content)
    return path


async def _upload_chats(conn: HostConnection, path: Path) -> PurePosixPath:
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        raise NotFoundError(f"Chats {path} cannot be read: {error.strerror}; the recipe names them.") from error
    return await upload_by_content(conn, content, "data", ".jsonl")


async def _put_recipe(conn: HostConnection, there: PurePosixPath, path: Path) -> None:
    content = await asyncio.to_thread(path.read_bytes)
    if await conn.stat(there) is None:
        await conn.write_file(there, content)
    elif await conn.read_file(there, max_bytes=_RECIPE_MAX_BYTES) != content:
        raise IntegrityError(
            f"{conn.name}: run {there.parent.name!r} exists with another recipe ({there}); "
            "resume it with that one, or choose another name with --run."
        )


async def _require_packages(conn: HostConnection, engine: DeployedEngine) -> None:
    found = await probe(conn, engine)
    missing = [name for name in _NEEDED if found.packages.get(name) is None]
    if missing:
        raise HostNotReadyError(
            f"{conn.name}: {conn.profile.python} has no {', '.join(missing)}; "
            "install there: pip install 'dflash-ops[engine]'."
        )


def _request(
    conn: HostConnection,
    engine: DeployedEngine,
    recipe: Recipe,
    run: str,
    run_folder: PurePosixPath,
    target: PurePosixPath,
    data: list[PurePosixPath],
    overrides: Sequence[str],
) -> JobRequest:
    ranks = recipe.pipeline.target_ranks + recipe.pipeline.drafter_ranks
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    train = ["-m", "dflash_engine.cli", "train", str(run_folder / "recipe.toml")]
    train += ["--target", str(target), "--run-dir", str(run_folder), "--data", *map(str, data)]
    for override in overrides:
        train += ["--set", override]
    environment = {
        **conn.profile.env,
        "PYTHONPATH": str(engine.path),
        "DFLASH_ENGINE_HASH": engine.hash,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return JobRequest(
        kind="train",
        run=run,
        argv=[conn.profile.python, *torchrun, *train],
        env=environment,
        grace_s=_GRACE_S,
        request={"run": run, "target": str(target), "overrides": list(overrides)},
    )
