"""The process behind one operation: `python -m dflash_console.core.operation_worker FOLDER`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec

from dflash_console.core.checkpoints import CheckpointView, one_checkpoint
from dflash_console.core.demo import DemoOptions, DemoReport, run_demo
from dflash_console.core.errors import ConsoleError
from dflash_console.core.evals import run_eval
from dflash_console.core.operations import (
    DemoRequest,
    EvaluateRequest,
    OperationFinished,
    OperationRequest,
    ProfileReady,
    StageRequest,
    Summary,
    Told,
    TransferProgress,
)
from dflash_console.core.profiles import Profile, load_profile
from dflash_console.core.ssh import Connections
from dflash_console.core.staging import StageProgress, stage
from dflash_engine.durable import write_text
from dflash_engine.evaluation.identity import EvaluationSettings
from dflash_engine.events import Event, EventWriter
from dflash_engine.processes import process_identity

__all__ = ["main"]

_PROGRESS_S = 0.2


def main(argv: list[str]) -> int:
    """Do what FOLDER's request asks; the last record says how it ended. Returns the exit code."""
    folder = Path(argv[0])
    identity = process_identity(os.getpid())
    assert identity is not None  # noqa: S101 # this process
    write_text(folder / "process.json", json.dumps(asdict(identity)) + "\n")
    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=OperationRequest)
    writer = EventWriter(folder / "events.jsonl")
    end = OperationFinished(0)
    try:
        asyncio.run(_work(request, writer))
    except Exception as error:  # noqa: BLE001 # whatever happens, the last record says so
        found: BaseException = error
        while isinstance(found, BaseExceptionGroup):
            ours = found.subgroup(ConsoleError)
            found = (ours or found).exceptions[0]
        if isinstance(found, ConsoleError):
            end = OperationFinished(found.exit_code, str(found))
        else:
            traceback.print_exception(error)
            end = OperationFinished(1, f"internal error ({found!r}); details are in {folder / 'output.log'}")
    writer.write(end)
    return end.code


async def _work(request: OperationRequest, writer: EventWriter) -> None:
    match request:
        case StageRequest():
            profile = load_profile(request.profile, ())
            async with Connections(profile) as hosts:
                await _stage(hosts, request.run, request.checkpoint, request.source, request.destination, writer)
        case EvaluateRequest():
            profile = load_profile(request.profile, ())
            async with Connections(profile) as hosts:
                if request.source:
                    await _stage(hosts, request.run, request.checkpoint, request.source, request.host, writer)
                await _evaluate(hosts, profile, request, writer)
        case DemoRequest():
            await _demo(request, writer)


async def _stage(
    hosts: Connections, run: str, checkpoint: str, source: str, destination: str, writer: EventWriter
) -> None:
    tell = _teller(writer, run, checkpoint, source, destination)
    tell(StageProgress("checking", 0, 0, 0.0))
    have, want = await asyncio.gather(hosts.get(source), hosts.get(destination))
    view = await one_checkpoint(have, run, checkpoint)
    result = await stage(have, want, view, progress=tell)
    size = result.bytes_sent + result.bytes_reused
    writer.write(TransferProgress(source, destination, run, checkpoint, "done", size, size, round(result.seconds, 3)))
    for warning in result.warnings:
        writer.write(Told(warning, "warning"))


def _teller(
    writer: EventWriter, run: str, checkpoint: str, source: str, destination: str
) -> Callable[[StageProgress], None]:
    """Writes progress a few times a second, and each change of phase at once."""
    last_phase, last_s = "", -1.0

    def tell(progress: StageProgress) -> None:
        nonlocal last_phase, last_s
        if progress.phase == last_phase and progress.seconds - last_s < _PROGRESS_S:
            return
        last_phase, last_s = progress.phase, progress.seconds
        writer.write(
            TransferProgress(
                source,
                destination,
                run,
                checkpoint,
                progress.phase,
                progress.bytes_done,
                progress.bytes_total,
                round(progress.seconds, 3),
            )
        )

    return tell


async def _evaluate(hosts: Connections, profile: Profile, request: EvaluateRequest, writer: EventWriter) -> None:
    defaults = profile.evaluate
    name = f"{request.run}:{request.checkpoint}"

    def alert(event: Event) -> None:
        # The job's own events are read from its host by whoever watches; a preflight's warning is only here.
        if event.type == "alert" and event.data.get("level") == "warning":
            writer.write(Told(f"{request.host}: {event.data.get('message')}", "warning"))

    writer.write(Told(f"{request.host}: preflight of {name}"))
    outcome = await run_eval(
        hosts,
        request.host,
        checkpoint=name,
        target=defaults.target or None,
        prompts=[profile.prompts[key] for key in (defaults.prompts or sorted(profile.prompts))],
        settings=EvaluationSettings(
            max_new_tokens=defaults.max_new_tokens,
            limit=defaults.limit,
            block_size=defaults.block_size,
            dtype=defaults.dtype,
        ),
        on_event=alert,
        threads=defaults.threads,
    )
    how = ", found ready" if outcome.reused else ", joined" if outcome.joined else ""
    writer.write(Told(f"{request.host}: {name} evaluated{how}: tau {outcome.result['tau']:.3f}"))


async def _demo(request: DemoRequest, writer: EventWriter) -> None:
    def transfer(view: CheckpointView, source: str, destination: str) -> Callable[[StageProgress], None]:
        return _teller(writer, view.run, view.name, source, destination)

    def staged(view: CheckpointView, source: str, destination: str, size: int, seconds: float) -> None:
        writer.write(TransferProgress(source, destination, view.run, view.name, "done", size, size, round(seconds, 3)))

    report = DemoReport(
        say=lambda text: writer.write(Told(text)),
        event=lambda host, event: None,
        profile=lambda path: writer.write(ProfileReady(str(path))),
        transfer=transfer,
        staged=staged,
    )
    options = DemoOptions(
        root=Path(request.root),
        seed=request.seed,
        steps=request.steps,
        prompts_limit=request.prompts_limit,
        target=Path(request.target) if request.target else None,
        recipe=Path(request.recipe) if request.recipe else None,
        prompts=Path(request.prompts) if request.prompts else None,
    )
    summary = await run_demo(options, report)
    writer.write(Summary(summary.to_builtins()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
