"""The demo from start to table: two real SSH hosts on loopback, a real target, a real training, real numbers.

Nothing here is a short cut: hosts are reached, the engine deployed, jobs launched, checkpoints staged and
evaluations run by the same functions as on anybody's machines. The hosts are processes of their own and
outlive this one, so a console that dies in the middle loses nothing: the next one finds the run and goes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dflash_console.core import demo_hosts
from dflash_console.core.checkpoints import CheckpointView, list_checkpoints, newest_usable
from dflash_console.core.demo_target import TARGET_NAME, ensure_target
from dflash_console.core.deploy import DeployedEngine, deploy_engine
from dflash_console.core.errors import HostNotReadyError, JobFailedError, NotFoundError
from dflash_console.core.evals import EvalOutcome, run_eval
from dflash_console.core.follow import follow_events
from dflash_console.core.jobs import JobRef, job_ref, list_jobs, view_job
from dflash_console.core.profiles import Profile, load_profile, shipped_profiles_dir
from dflash_console.core.ssh import Connections, HostConnection
from dflash_console.core.staging import StageProgress, StageResult, stage
from dflash_console.core.training import launch_training
from dflash_engine.evaluation.identity import EvaluationSettings
from dflash_engine.events import Event, TrainStep, number

__all__ = [
    "EXPECTED_GAIN",
    "DemoOptions",
    "DemoReport",
    "DemoSummary",
    "Measured",
    "run_demo",
    "train_stage_evaluate",
]

TRAINER, EVALUATOR = "ct200", "ct129"
EXPECTED_GAIN = 0.4
"""What the shipped recipe reaches at least on held-out prompts, for any seed."""
_RUN_PREFIX = "demo-"


class DemoOptions(msgspec.Struct, frozen=True):
    """What a demo run may differ in. The defaults are `make demo`."""

    root: Path
    """Where the two hosts live: homes, keys, profile."""
    seed: int = 0
    steps: int = 0
    """Training steps; 0: the recipe's."""
    prompts_limit: int = 0
    """Only so many of the held-out prompts; 0: all."""
    target: Path | None = None
    """A target of one's own instead of SmolLM2 (the tests use a tiny one), with its recipe and prompts."""
    recipe: Path | None = None
    prompts: Path | None = None


class DemoReport(msgspec.Struct, frozen=True):
    """How the demo tells what happens: a sentence, or an event of a job on a host.

    `profile` hears of the profile's file once the hosts are up. `transfer` is asked, with checkpoint, source and
    destination, for what hears of a staging's progress; `staged` hears of its bytes and seconds at its end.
    """

    say: Callable[[str], None]
    event: Callable[[str, Event], None]
    profile: Callable[[Path], None] = lambda path: None
    transfer: Callable[[CheckpointView, str, str], Callable[[StageProgress], None] | None] = lambda *what: None
    staged: Callable[[CheckpointView, str, str, int, float], None] = lambda *what: None


class Measured(msgspec.Struct, frozen=True):
    """One evaluation's numbers."""

    checkpoint: str
    tau: float
    tau_per_prompt: float
    acceptance_by_position: list[float]
    prompts: int
    steps: int
    path: str


class DemoSummary(msgspec.Struct, frozen=True):
    """The table at the end. Times in seconds; `tokens_per_s` over the whole training, waits included."""

    run: str
    steps: int
    tokens: int
    tokens_per_s: float
    train_s: float
    loss_first: float
    loss_last: float
    untrained: Measured
    trained: Measured
    gain: float
    expected_gain: float
    bytes_staged: int
    seconds: float
    profile: Path
    checkpoint: str
    staged: str

    def to_builtins(self) -> dict[str, object]:
        """As a record's plain values, paths as text."""
        values: dict[str, object] = msgspec.to_builtins(self, enc_hook=str)
        return values

    @staticmethod
    def from_builtins(values: dict[str, object]) -> DemoSummary:
        """What `to_builtins` gave."""
        return msgspec.convert(values, DemoSummary, strict=False, dec_hook=lambda kind, value: kind(value))


async def run_demo(options: DemoOptions, report: DemoReport) -> DemoSummary:
    """Start or find the hosts, train or join the training, stage, evaluate before and after; all numbers true.

    Raises ConsoleError subclasses as every command does. The hosts stay up; `stop_demo_hosts` ends them.
    """
    began = time.monotonic()
    profile = await _prepare_hosts(options, report)
    report.profile(profile.path)
    return await train_stage_evaluate(profile, options, report, began=began)


async def train_stage_evaluate(
    profile: Profile, options: DemoOptions, report: DemoReport, *, began: float
) -> DemoSummary:
    """The demo's work on any two hosts `ct200` and `ct129` of a profile; `began` is `time.monotonic()`'s."""
    prompts = _prompts(options)
    settings = EvaluationSettings(max_new_tokens=64, limit=options.prompts_limit)
    async with Connections(profile) as hosts:
        trainer, evaluator = await hosts.get(TRAINER), await hosts.get(EVALUATOR)
        engine = await _deploy(trainer, report)
        await _deploy(evaluator, report)
        job, run = await _launch_or_join(trainer, engine, options, report)
        training = _Training()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(_follow(trainer, job, training, report))
            first = await _first_checkpoint(trainer, run, training, following)
            await _stage(trainer, evaluator, first, report)
            before = await _evaluate(hosts, first, prompts, settings, report)
            await following
        view = await view_job(trainer, job.id)
        if view.state not in ("finished", "stopped"):
            raise JobFailedError(f"{TRAINER}: training {job.id} is {view.state}: {view.reason}.")
        newest = newest_usable(await list_checkpoints(trainer, run), need="resume")
        if newest is None:
            raise NotFoundError(f"{TRAINER}: run {run} ended without a whole checkpoint.")
        report.say(f"newest whole checkpoint: {run}:{newest.name} ({newest.size_bytes / 1e6:.1f} MB)")
        staged = await _stage(trainer, evaluator, newest, report)
        after = await _evaluate(hosts, newest, prompts, settings, report)
    untrained, trained = _measured(before), _measured(after)
    return DemoSummary(
        run=run,
        steps=training.step,
        tokens=training.tokens,
        tokens_per_s=training.tokens / training.seconds if training.seconds else 0.0,
        train_s=training.seconds,
        loss_first=training.loss_first,
        loss_last=training.loss_last,
        untrained=untrained,
        trained=trained,
        gain=trained.tau - untrained.tau,
        expected_gain=EXPECTED_GAIN,
        bytes_staged=staged.bytes_sent + staged.bytes_reused,
        seconds=time.monotonic() - began,
        profile=profile.path,
        checkpoint=str(newest.path),
        staged=str(staged.path),
    )


class _Training:
    """What the event stream has told about the training so far."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.loss_first = math.nan
        self.loss_last = math.nan
        self.checkpoint = asyncio.Event()
        self._recent: list[float] = []

    def take(self, event: Event) -> None:
        if event.type == "train.checkpoint":
            self.checkpoint.set()
        if event.type != TrainStep.TYPE:
            return
        # A host's numbers are data: whatever else stands there must not end the demo.
        self.step = int(_finite(event.data.get("step")))
        self.tokens += int(_finite(event.data.get("tokens")))
        self.seconds += _finite(event.data.get("step_s"))
        loss = number(event.data.get("loss"))
        if math.isnan(self.loss_first):
            self.loss_first = loss
        # One step's loss is noisy; the last ten together are what the table calls the last loss.
        self._recent = [*self._recent[-9:], loss]
        self.loss_last = sum(self._recent) / len(self._recent)


def _finite(value: Any) -> float:
    found = number(value)
    return found if math.isfinite(found) else 0.0


async def _prepare_hosts(options: DemoOptions, report: DemoReport) -> Profile:
    target = options.target or await ensure_target(report.say)
    running = await demo_hosts.running_demo_hosts(options.root)
    if running is None:
        try:
            running = await demo_hosts.start_demo_hosts(options.root, [TRAINER, EVALUATOR])
        except OSError as error:
            raise HostNotReadyError(
                f"The demo's hosts cannot live in {options.root}: {error.strerror}; name a folder with --root."
            ) from error
        report.say("two SSH hosts started on loopback")
    else:
        report.say("two SSH hosts found running on loopback")
    ports = ", ".join(f"{name} 127.0.0.1:{host.port}" for name, host in sorted(running.hosts.items()))
    report.say(f"hosts: {ports} (key authentication, host keys of their own)")
    prompts = options.prompts or shipped_profiles_dir() / "data" / "smollm2-python-heldout.jsonl"
    demo_hosts.write_demo_profile(
        options.root,
        running,
        targets={TARGET_NAME: target},
        prompts={"heldout": prompts},
        roles={TRAINER: "train", EVALUATOR: "evaluate"},
    )
    return load_profile(str(demo_hosts.profile_path(options.root)), ())


def _prompts(options: DemoOptions) -> Path:
    return options.prompts or shipped_profiles_dir() / "data" / "smollm2-python-heldout.jsonl"


async def _deploy(conn: HostConnection, report: DemoReport) -> DeployedEngine:
    engine = await deploy_engine(conn)
    report.say(f"{conn.name}: engine {engine.hash[:12]} {'deployed' if engine.uploaded else 'in place'}")
    return engine


async def _launch_or_join(
    conn: HostConnection, engine: DeployedEngine, options: DemoOptions, report: DemoReport
) -> tuple[JobRef, str]:
    for job in await list_jobs(conn):
        if job.kind == "train" and job.state in ("running", "starting") and (job.run or "").startswith(_RUN_PREFIX):
            run = job.run or ""
            report.say(f"{conn.name}: training {run} is running already (job {job.id}); joining it")
            return job_ref(conn, job.id), run
    overrides = [f"train.seed={options.seed}"]
    if options.steps:
        overrides.append(f"train.steps={options.steps}")
    run = f"{_RUN_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-seed{options.seed}"
    started = await launch_training(
        conn,
        engine,
        recipe_path=options.recipe or shipped_profiles_dir() / "recipes" / "demo.toml",
        target=TARGET_NAME,
        run=run,
        overrides=overrides,
    )
    report.say(f"{conn.name}: training {run} launched (job {started.id}); it goes on without this console")
    return started, run


async def _follow(conn: HostConnection, job: JobRef, training: _Training, report: DemoReport) -> None:
    async for event in follow_events(conn, job):
        training.take(event)
        report.event(conn.name, event)


async def _first_checkpoint(
    conn: HostConnection, run: str, training: _Training, following: asyncio.Task[None]
) -> CheckpointView:
    waiting = asyncio.create_task(training.checkpoint.wait())
    await asyncio.wait([waiting, following], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    views = [view for view in await list_checkpoints(conn, run) if view.step == 0]
    if not views:
        if following.done():
            await following
            view = next(iter([job for job in await list_jobs(conn) if job.run == run]), None)
            raise JobFailedError(f"{conn.name}: training {run} ended before its first checkpoint: {view}.")
        raise NotFoundError(f"{conn.name}: run {run} has no checkpoint at step 0.")
    return views[0]


async def _stage(
    source: HostConnection, destination: HostConnection, checkpoint: CheckpointView, report: DemoReport
) -> StageResult:
    progress = report.transfer(checkpoint, source.name, destination.name)
    result = await stage(source, destination, checkpoint, progress=progress)
    size = result.bytes_sent + result.bytes_reused
    report.staged(checkpoint, source.name, destination.name, size, result.seconds)
    if progress is None:
        report.say(
            f"{checkpoint.name} staged {source.name} → {destination.name}: {size / 1e6:.1f} MB in "
            f"{result.seconds:.1f} s, SHA-256 verified on both ends"
        )
    return result


async def _evaluate(
    hosts: Connections,
    checkpoint: CheckpointView,
    prompts: Path,
    settings: EvaluationSettings,
    report: DemoReport,
) -> EvalOutcome:
    return await run_eval(
        hosts,
        EVALUATOR,
        checkpoint=f"{checkpoint.run}:{checkpoint.name}",
        target=TARGET_NAME,
        prompts=[prompts],
        settings=settings,
        on_event=lambda event: report.event(EVALUATOR, event),
    )


def _measured(outcome: EvalOutcome) -> Measured:
    result: dict[str, Any] = outcome.result
    return Measured(
        checkpoint=outcome.checkpoint,
        tau=float(result["tau"]),
        tau_per_prompt=float(result["tau_per_prompt"]),
        acceptance_by_position=[float(share) for share in result["acceptance_by_position"]],
        prompts=len(result["prompts"]) if isinstance(result.get("prompts"), list) else 0,
        steps=int(result.get("steps", 0)),
        path=str(outcome.path),
    )
