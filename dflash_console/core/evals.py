"""An evaluation from request to stored result: whoever asks for the same one twice gets one job and one
result.

The evaluation's id is known before anything expensive runs; its job folder `jobs/eval-<first 16 of the id>`
is claimed under a lock on the host. A finished one is reused, a running one is joined, a dead one is moved
aside (`.lost-<n>`) and started anew. The job belongs to the host: a console that goes away costs nothing
but its view.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from dflash_console.core.checkpoints import (
    CheckpointView,
    list_checkpoints,
    newest_usable,
    one_checkpoint,
)
from dflash_console.core.deploy import DeployedEngine, deploy_engine
from dflash_console.core.errors import (
    IntegrityError,
    JobFailedError,
    NotFoundError,
    RemoteCommandError,
    UnreachableError,
)
from dflash_console.core.follow import follow_events
from dflash_console.core.history import EvaluationRow, History, HistoryError
from dflash_console.core.host_lock import host_lock
from dflash_console.core.jobs import (
    JobExistsError,
    JobRef,
    JobRequest,
    JobView,
    job_ref,
    launch,
    read_output,
    view_job,
)
from dflash_console.core.preflight import Preflight, preflight_evaluation
from dflash_console.core.quoting import printable
from dflash_console.core.ssh import Connections, HostConnection
from dflash_console.core.training import upload_by_content
from dflash_engine import layout
from dflash_engine.evaluation.identity import EvaluationSettings, evaluation_id
from dflash_engine.events import Event

__all__ = ["EvalOutcome", "resolve_checkpoint", "run_eval"]

_RESULT_MAX_BYTES = 64 << 20
_TAIL_BYTES = 4096

Claim = Literal["launched", "joined", "finished"]


class EvalOutcome(msgspec.Struct, frozen=True):
    """A finished evaluation. `joined`: another console had started it; `reused`: it had finished before."""

    evaluation_id: str
    host: str
    checkpoint: str
    target: str
    job: str
    path: PurePosixPath
    result: dict[str, Any]
    joined: bool
    reused: bool


class _Result(msgspec.Struct, frozen=True):
    """What of `result.json` must be there for it to count as one."""

    id: str
    tau: float
    tau_per_prompt: float
    acceptance_by_position: list[float]


class _Prompts(msgspec.Struct, frozen=True):
    """Prompt files: their bytes, the SHA-256 of all one after the other, and the number of rows."""

    contents: tuple[bytes, ...]
    sha256: str
    rows: int


async def run_eval(
    hosts: Connections,
    host: str,
    *,
    checkpoint: str | None,
    target: str | None,
    prompts: Sequence[Path],
    settings: EvaluationSettings,
    on_event: Callable[[Event], None],
    threads: int = 0,
) -> EvalOutcome:
    """Evaluate a checkpoint that lies on `host`, or join or reuse the same evaluation.

    `checkpoint` is `RUN:step_N`, `RUN:latest`, or None for the newest usable one of the host; `target` a
    name of the profile, or None where the host has just one; `threads` 0 leaves the number to torch.
    `on_event` hears of the job's events from its beginning, and of alerts of the console's own. Raises
    NotFoundError, IntegrityError or HostNotReadyError from the preflight, JobFailedError where the job
    ended badly, UnreachableError where the connection was lost (the job goes on).
    """
    sent = _read_prompts(prompts)
    conn = await hosts.get(host)
    view = await resolve_checkpoint(conn, checkpoint)
    target_name = _target_name(conn, target)
    engine = await deploy_engine(conn)
    preflight = await preflight_evaluation(conn, engine, view, target_name, settings=settings, prompt_rows=sent.rows)
    for warning in preflight.warnings:
        _alert(on_event, warning)
    identity = evaluation_id(
        checkpoint=preflight.manifest.model_fingerprint(),
        target=preflight.target_fingerprint,
        tokenizer=preflight.tokenizer_fingerprint,
        prompts=sent.sha256,
        settings=settings,
    )
    remote_prompts = [await upload_by_content(conn, content, "prompts", ".jsonl") for content in sent.contents]
    request = _request(conn, engine, view, preflight, identity, remote_prompts, settings, threads)
    claim, job, result = await _run_to_result(conn, engine, request, identity, on_event)
    outcome = EvalOutcome(
        evaluation_id=identity,
        host=conn.name,
        checkpoint=f"{view.run}:{view.name}",
        target=target_name,
        job=job.id,
        path=job.path,
        result=result,
        joined=claim == "joined",
        reused=claim == "finished",
    )
    _remember(outcome, view, on_event)
    return outcome


async def resolve_checkpoint(conn: HostConnection, wanted: str | None) -> CheckpointView:
    """The checkpoint that `RUN:step_N`, `RUN:latest` or None (newest of the host) means.

    Raises NotFoundError.
    """
    run: str | None = None
    if wanted is not None:
        run, _, name = wanted.partition(":")
        if name not in ("", "latest"):
            return await one_checkpoint(conn, run, name)
    views = await list_checkpoints(conn, run)
    # A foreign one has no manifest to hold an evaluation to; its staged copy has.
    newest = newest_usable([view for view in views if view.state != "foreign"], need="model")
    if newest is not None:
        return newest
    where = f"{conn.name} has no usable checkpoint" + (f" of run {printable(run, 100)}" if run else "")
    unusable = "; ".join(f"{v.run}:{v.name} is {v.state}: {v.reason}" for v in views[-3:])
    raise NotFoundError(f"{where}{f' ({unusable})' if unusable else ''}. Stage one there first.")


def _read_prompts(paths: Sequence[Path]) -> _Prompts:
    if not paths:
        raise NotFoundError("No prompt files were given; name one, or put some into the profile's [prompts].")
    contents = []
    for path in paths:
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise NotFoundError(f"The prompt file {path} cannot be read: {error.strerror}.") from error
    rows = sum(1 for content in contents for line in content.split(b"\n") if line.strip())
    if not rows:
        raise NotFoundError(f"The prompt files {', '.join(map(str, paths))} hold no prompt.")
    return _Prompts(tuple(contents), hashlib.sha256(b"".join(contents)).hexdigest(), rows)


def _target_name(conn: HostConnection, wanted: str | None) -> str:
    if wanted is not None:
        return wanted
    names = sorted(conn.profile.targets)
    if len(names) != 1:
        known = ", ".join(names) or "none"
        raise NotFoundError(f"{conn.name} has {len(names)} targets in the profile ({known}); name one.")
    return names[0]


def _request(
    conn: HostConnection,
    engine: DeployedEngine,
    view: CheckpointView,
    preflight: Preflight,
    identity: str,
    prompts: list[PurePosixPath],
    settings: EvaluationSettings,
    threads: int,
) -> JobRequest:
    job_id = _job_id(identity)
    argv = [conn.profile.python, "-P", "-m", "dflash_engine.cli", "evaluate"]
    argv += ["--target", str(preflight.target), "--drafter", str(view.path)]
    argv += ["--prompts", *map(str, prompts)]
    argv += ["--out", str(conn.state / layout.job_dir(job_id)), "--cache", str(conn.state / "cache")]
    argv += ["--id", identity, "--max-new-tokens", str(settings.max_new_tokens), "--dtype", settings.dtype]
    argv += [
        "--limit",
        str(settings.limit),
        "--block-size",
        str(settings.block_size),
        "--threads",
        str(threads),
    ]
    request = {
        "evaluation": identity,
        "checkpoint": f"{view.run}:{view.name}",
        "target": str(preflight.target),
        "settings": msgspec.to_builtins(settings),
    }
    environment = {
        **conn.profile.env,
        "PYTHONPATH": str(engine.path),
        "DFLASH_ENGINE_HASH": engine.hash,
        "PYTHONUNBUFFERED": "1",
    }
    return JobRequest(kind="evaluate", argv=argv, env=environment, request=request, job_id=job_id)


def _job_id(identity: str) -> str:
    return f"eval-{identity[:16]}"


async def _run_to_result(
    conn: HostConnection,
    engine: DeployedEngine,
    request: JobRequest,
    identity: str,
    on_event: Callable[[Event], None],
) -> tuple[Claim, JobRef, dict[str, Any]]:
    claim, job = await _claim(conn, engine, request, identity)
    try:
        async for event in follow_events(conn, job):
            on_event(event)
    except UnreachableError as error:
        raise UnreachableError(
            f"{error} The evaluation goes on at {conn.name} as job {job.id}; the same command joins it."
        ) from error
    except JobFailedError as error:
        raise JobFailedError(f"{error} {await _tail(conn, job)}".strip()) from error
    view = await view_job(conn, job.id)
    if view.state != "finished":
        raise JobFailedError(
            f"{conn.name}: job {job.id} is {view.state}: {printable(view.reason)}. {await _tail(conn, job)}".strip()
        )
    result = await _read_result(conn, job, identity)
    if result is None:
        raise IntegrityError(
            f"{conn.name}: job {job.id} finished, but {job.path / 'result.json'} is no result of it; run it again."
        )
    return claim, job, result


async def _claim(
    conn: HostConnection, engine: DeployedEngine, request: JobRequest, identity: str
) -> tuple[Claim, JobRef]:
    # All of it under one lock: without it, one console could move aside as dead what another just made.
    job = job_ref(conn, _job_id(identity))
    async with host_lock(conn, f"job-{job.id}"):
        view = await _view_or_none(conn, job)
        if view is not None:
            if view.state in ("running", "starting"):
                return "joined", job
            if view.state == "finished" and await _read_result(conn, job, identity) is not None:
                return "finished", job
            await _move_aside(conn, job)
        try:
            return "launched", await launch(conn, engine, request)
        except JobExistsError:
            return "joined", job


async def _view_or_none(conn: HostConnection, job: JobRef) -> JobView | None:
    if await conn.stat(job.path) is None:
        return None
    return await view_job(conn, job.id)


async def _move_aside(conn: HostConnection, job: JobRef) -> None:
    taken = {entry.name for entry in await conn.list_dir(job.path.parent)}
    n = 1
    while f"{job.id}.lost-{n}" in taken:
        n += 1
    await conn.rename(job.path, job.path.with_name(f"{job.id}.lost-{n}"))


async def _read_result(conn: HostConnection, job: JobRef, identity: str) -> dict[str, Any] | None:
    try:
        raw = await conn.read_file(job.path / "result.json", max_bytes=_RESULT_MAX_BYTES)
        known = msgspec.json.decode(raw, type=_Result)
        document = msgspec.json.decode(raw, type=dict[str, Any])
    except (NotFoundError, RemoteCommandError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return document if known.id == identity else None


async def _tail(conn: HostConnection, job: JobRef) -> str:
    """The engine's own error line, or the last lines of the job's output."""
    try:
        output = await read_output(conn, job.id, _TAIL_BYTES)
    except (NotFoundError, RemoteCommandError, UnreachableError):
        return ""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("dflash-engine: error:")]
    return printable(" / ".join(own[-1:] or lines[-3:]), 600)


def _alert(on_event: Callable[[Event], None], message: str) -> None:
    on_event(Event(time.time(), "alert", {"level": "warning", "message": message}))


def _remember(outcome: EvalOutcome, view: CheckpointView, on_event: Callable[[Event], None]) -> None:
    row = EvaluationRow(
        evaluation_id=outcome.evaluation_id,
        host=outcome.host,
        finished=time.time(),
        job=outcome.job,
        run=view.run,
        checkpoint=view.name,
        step=view.step,
        target=outcome.target,
        tau=float(outcome.result["tau"]),
        result=outcome.result,
    )
    try:
        with History() as history:
            history.add_evaluation(row)
    except HistoryError as error:
        _alert(on_event, f"The result is not in the history: {error}")
