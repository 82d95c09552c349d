"""The command line: parse, call the core, print. It owns no operation, and imports each only when it is asked.

Standard output carries results only, progress goes to standard error, and every failure is one line with an
exit code of its class (the table in the README).
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from dflash_console.core.demo import DemoSummary
    from dflash_console.core.profiles import Profile

__all__ = ["app", "main"]

# Plain help: rich's would cost a quarter of a second at every call.
app = typer.Typer(
    name="dflash-console",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Operations console for DFlash drafter training: launch, follow, stage and evaluate over SSH.",
)
hosts_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The hosts of a profile.")
app.add_typer(hosts_app, name="hosts")

_T = TypeVar("_T")

HostOption = Annotated[str, typer.Option("--host", help="Name of a host in the profile.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


class _State:
    profile = "lab"


@app.callback()
def choose_profile(
    profile: Annotated[
        str,
        typer.Option("--profile", "-p", envvar="DFLASH_PROFILE", help="Profile name, or path of a TOML file."),
    ] = "lab",
) -> None:
    """Options that stand before every command."""
    _State.profile = profile


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the two demo hosts running at the end.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop demo hosts that were left running, and nothing else.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and anchors.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps; 0: the recipe's.")] = 0,
    limit: Annotated[int, typer.Option(help="Evaluate on so many prompts; 0: all.")] = 0,
    root: Annotated[Path | None, typer.Option(help="Where the demo hosts live.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train, stage and evaluate a small drafter for a real model on two SSH hosts of your own machine."""
    from dflash_console.core import demo_hosts
    from dflash_console.core.demo import DemoOptions, DemoReport, run_demo
    from dflash_console.lines import LinePrinter

    place = root or _demo_root()
    if stop:
        stopped = _run(demo_hosts.stop_demo_hosts(place))
        _say("the demo hosts are stopped" if stopped else "no demo hosts were running")
        return
    options = DemoOptions(root=place, seed=seed, steps=steps, prompts_limit=limit)
    summary = _run(run_demo(options, DemoReport(_say, LinePrinter(_say).event)))
    if not keep:
        _run(demo_hosts.stop_demo_hosts(place))
    _print_json(summary) if as_json else _print_summary(summary, keep=keep)


@app.command("run-eval")
def run_eval_command(
    host: HostOption,
    checkpoint: Annotated[
        str | None,
        typer.Argument(help="RUN:step_N or RUN:latest; default: the newest usable one on the host."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Name of a target of the host.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON Lines of prompts; default: the profile's.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="New tokens per prompt.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Only the first so many prompts; 0: all.")] = None,
    block_size: Annotated[int | None, typer.Option(min=0, help="Block size; 0: the checkpoint's.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint that is on a host: five steps on its CPU, tau on standard output."""
    from dflash_console.core.evals import run_eval
    from dflash_console.core.ssh import Connections
    from dflash_console.lines import LinePrinter, acceptance
    from dflash_engine.evaluation.identity import EvaluationSettings

    profile = _profile()
    defaults = profile.evaluate
    settings = EvaluationSettings(
        max_new_tokens=defaults.max_new_tokens if max_new_tokens is None else max_new_tokens,
        limit=defaults.limit if limit is None else limit,
        block_size=defaults.block_size if block_size is None else block_size,
        dtype=defaults.dtype,
    )
    chosen = prompts or [profile.prompts[name] for name in (defaults.prompts or sorted(profile.prompts))]
    printer = LinePrinter(_say)

    async def work() -> Any:
        async with Connections(profile) as hosts:
            return await run_eval(
                hosts,
                host,
                checkpoint=checkpoint,
                target=target or defaults.target or None,
                prompts=chosen,
                settings=settings,
                on_event=lambda event: printer.event(host, event),
                threads=defaults.threads,
            )

    outcome = _run(work())
    if as_json:
        _print_json(outcome)
        return
    result = outcome.result
    how = " (already evaluated)" if outcome.reused else " (joined a running evaluation)" if outcome.joined else ""
    typer.echo(f"{outcome.checkpoint} on {host}{how}")
    typer.echo(f"tau {result['tau']:.3f}  per prompt {result['tau_per_prompt']:.3f}")
    typer.echo(f"acceptance by position  {acceptance(result['acceptance_by_position'])}")
    typer.echo(f"evaluation {outcome.evaluation_id[:16]}  result {outcome.path}/result.json")


@app.command()
def stage(
    checkpoint: Annotated[str, typer.Argument(help="RUN, RUN:latest or RUN:step_N.")],
    source: Annotated[str, typer.Option("--from", help="Host that has it.")],
    destination: Annotated[str, typer.Option("--to", help="Host that shall have it.")],
    with_optimizer: Annotated[bool, typer.Option(help="The resume set too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a checkpoint between hosts: verified on both ends, resumable, whole or not there at all."""
    from dflash_console.core.evals import resolve_checkpoint
    from dflash_console.core.ssh import Connections
    from dflash_console.core.staging import stage as stage_checkpoint

    profile = _profile()

    async def work() -> Any:
        async with Connections(profile) as hosts:
            have, want = await asyncio.gather(hosts.get(source), hosts.get(destination))
            view = await resolve_checkpoint(have, checkpoint)
            return view, await stage_checkpoint(have, want, view, with_resume=with_optimizer)

    view, result = _run(work())
    if as_json:
        _print_json({"checkpoint": f"{view.run}:{view.name}", "from": source, "to": destination, "result": result})
        return
    sent = f"{result.bytes_sent / 1e6:.1f} MB sent, {result.bytes_reused / 1e6:.1f} MB were there"
    typer.echo(
        f"{view.run}:{view.name} is on {destination} at {result.path} ({sent}, {result.seconds:.1f} s, verified)"
    )
    for warning in result.warnings:
        _say(f"warning: {warning}")


@app.command()
def checkpoints(
    host: Annotated[list[str] | None, typer.Option("--host", help="Only these hosts.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints of all runs: step, state, size, and the newest usable one of each run."""
    from dflash_console.core.checkpoints import list_checkpoints, newest_usable
    from dflash_console.core.quoting import printable
    from dflash_console.core.ssh import Connections

    profile = _profile()

    async def work() -> Any:
        async with Connections(profile) as hosts:
            return [view for name in host or profile.hosts for view in await list_checkpoints(await hosts.get(name))]

    views = _run(work())
    if as_json:
        _print_json(views)
        return
    newest = {
        (v.host, v.run): newest_usable([w for w in views if (w.host, w.run) == (v.host, v.run)], need="model")
        for v in views
    }
    for view in views:
        star = "newest" if newest[view.host, view.run] is view else ""
        why = f"  {printable(view.reason, 200)}" if view.state != "whole" else ""
        typer.echo(
            f"{view.host:<8} {view.run}:{view.name:<14} {view.size_bytes / 1e6:8.1f} MB  {view.state:<10} {star}{why}"
        )
    if not views:
        _say("no checkpoints")


@app.command()
def launch(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (TOML).")],
    host: HostOption,
    target: Annotated[str, typer.Option(help="Name of a target of the host.")],
    run: Annotated[str, typer.Option(help="Name of the run; an existing one is resumed.")],
    override: Annotated[list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE over the recipe.")] = None,
    follow: Annotated[bool, typer.Option(help="Follow it; leaving does not stop it.")] = True,
) -> None:
    """Start or resume a training on a host; it goes on without this console."""
    from dflash_console.core.deploy import deploy_engine
    from dflash_console.core.ssh import Connections
    from dflash_console.core.training import launch_training

    profile = _profile()

    async def work() -> None:
        async with Connections(profile) as hosts:
            conn = await hosts.get(host)
            engine = await deploy_engine(conn)
            job = await launch_training(
                conn, engine, recipe_path=recipe, target=target, run=run, overrides=override or []
            )
            typer.echo(job.id)
            if follow:
                await _follow(conn, job)

    _run(work())


@app.command("jobs")
def jobs_command(
    host: Annotated[list[str] | None, typer.Option("--host", help="Only these hosts.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs and what became of them."""
    from dflash_console.core.jobs import list_jobs
    from dflash_console.core.quoting import printable
    from dflash_console.core.ssh import Connections

    profile = _profile()

    async def work() -> Any:
        async with Connections(profile) as hosts:
            return [view for name in host or profile.hosts for view in await list_jobs(await hosts.get(name))]

    views = _run(work())
    if as_json:
        _print_json(views)
        return
    for view in views:
        typer.echo(
            f"{view.host:<8} {view.id:<40} {view.kind:<9} {view.state:<9} {view.run or '-'}"
            f"  {printable(view.reason, 200)}".rstrip()
        )
    if not views:
        _say("no jobs")


@app.command("follow")
def follow_command(job: Annotated[str, typer.Argument(help="Id of a job.")], host: HostOption) -> None:
    """Follow a job from its beginning to its end; leaving does not stop it."""
    from dflash_console.core.ssh import Connections

    profile = _profile()

    async def work() -> None:
        async with Connections(profile) as hosts:
            conn = await hosts.get(host)
            await _follow(conn, await _existing_job(conn, job))

    _run(work())


@app.command("stop")
def stop_command(job: Annotated[str, typer.Argument(help="Id of a job.")], host: HostOption) -> None:
    """Ask a job to save and end well; its supervisor ends it after the grace time otherwise."""
    from dflash_console.core.jobs import request_stop
    from dflash_console.core.ssh import Connections

    profile = _profile()

    async def work() -> None:
        async with Connections(profile) as hosts:
            await request_stop(await hosts.get(host), job)

    _run(work())
    _say(f"{host}: {job} is asked to save and stop")


@hosts_app.command("check")
def hosts_check(
    name: Annotated[str | None, typer.Argument(help="One host; default: all of the profile.")] = None,
) -> None:
    """Connect to the hosts and say what each has: Python, packages, memory, disk, clock, engine."""
    from dflash_console.core.deploy import deploy_engine, probe
    from dflash_console.core.errors import ConsoleError
    from dflash_console.core.ssh import Connections

    profile = _profile()
    failed: list[ConsoleError] = []

    async def work() -> None:
        async with Connections(profile) as hosts:
            for host in [name] if name else profile.hosts:
                try:
                    conn = await hosts.get(host)
                    engine = await deploy_engine(conn)
                    found = await probe(conn, engine)
                except ConsoleError as error:
                    failed.append(error)
                    _fail(error)
                    continue
                packages = ", ".join(f"{p} {v or 'missing'}" for p, v in sorted(found.packages.items()))
                typer.echo(
                    f"{host}: up, Python {found.python}, {packages}; {found.cpu_count} CPUs, "
                    f"{found.memory_available_bytes / 2**30:.1f} of {found.memory_total_bytes / 2**30:.1f} GiB memory, "
                    f"{found.disk_free_bytes / 2**30:.1f} GiB disk free, clock {conn.clock_offset_s:+.2f} s, "
                    f"engine {engine.hash[:12]}"
                )

    _run(work())
    if failed:
        raise typer.Exit(failed[0].exit_code)


@hosts_app.command("trust")
def hosts_trust(
    name: Annotated[str, typer.Argument(help="Host of the profile.")],
    fingerprint: Annotated[str, typer.Option(help="SHA256:... as its administrator gave it to you.")],
) -> None:
    """Accept a host's key, if it is exactly the one with this fingerprint."""
    from dflash_console.core.profiles import host_of
    from dflash_console.core.ssh import trust_host

    host = host_of(_profile(), name)
    _run(trust_host(host, fingerprint))
    _say(f"{name}: {fingerprint} is trusted from now on ({host.known_hosts_path()})")


def main() -> None:
    """Entry point: no traceback reaches a user; unexpected ones go to a log file that the message names."""
    from dflash_console.core.errors import ConsoleError, UnexpectedError

    try:
        app()  # ends with SystemExit; usage errors are its own
    except ConsoleError as error:
        sys.exit(_fail(error))
    except Exception as error:  # noqa: BLE001 # the last line of defence
        folder = _data_folder()
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "errors.log"
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        sys.exit(_fail(UnexpectedError(f"internal error ({type(error).__name__}: {error}); details are in {log}.")))


def _fail(error: Any) -> int:
    from dflash_console.core.quoting import printable

    print(f"dflash-console: error: {printable(str(error), 4000)}", file=sys.stderr)
    code: int = error.exit_code
    return code


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run core work; of several errors at once, the first of ours is the one to report."""
    from dflash_console.core.errors import ConsoleError

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        _say("interrupted; what runs on the hosts goes on")
        raise typer.Exit(130) from None
    except BaseExceptionGroup as group:
        ours = group.subgroup(ConsoleError)
        if ours is None:
            raise
        error: BaseException = ours
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


async def _follow(conn: Any, job: Any) -> None:
    from dflash_console.core.errors import JobFailedError
    from dflash_console.core.follow import follow_events
    from dflash_console.core.jobs import view_job
    from dflash_console.lines import LinePrinter

    printer = LinePrinter(_say)
    async for event in follow_events(conn, job):
        printer.event(conn.name, event)
    view = await view_job(conn, job.id)
    if view.state not in ("finished", "stopped"):
        raise JobFailedError(f"{conn.name}: job {job.id} is {view.state}: {view.reason}.")


async def _existing_job(conn: Any, job_id: str) -> Any:
    from dflash_console.core.jobs import job_ref, view_job

    await view_job(conn, job_id)
    return job_ref(conn, job_id)


def _profile() -> Profile:
    from dflash_console.core.profiles import load_profile, profile_search

    return load_profile(_State.profile, (*profile_search(), _demo_root()))


def _data_folder() -> Path:
    import platformdirs

    return Path(os.environ.get("DFLASH_DATA_DIR") or platformdirs.user_data_dir("dflash-ops"))


def _demo_root() -> Path:
    return _data_folder() / "demo"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value, enc_hook=str).decode())


def _print_summary(summary: DemoSummary, *, keep: bool) -> None:
    from dflash_console.lines import demo_table

    for line in demo_table(summary, keep=keep):
        typer.echo(line)
