"""The command line: parse, call the core, print. It owns no operation, and imports each only when it is asked.

Standard output carries results only, progress goes to standard error, and every failure is one line with an
exit code of its class (the table in the README).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_console.cli_hosts import hosts_app
from dflash_console.terminal import Chosen, ask_hosts, demo_root, guarded, load_chosen_profile, print_json, run, say

if TYPE_CHECKING:
    from dflash_console.core.demo import DemoSummary

__all__ = ["app", "main"]

# Plain help: rich's would cost a quarter of a second at every call.
app = typer.Typer(
    name="dflash-console",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Operations console for DFlash drafter training: launch, follow, stage and evaluate over SSH.",
)
app.add_typer(hosts_app, name="hosts")

HostOption = Annotated[str, typer.Option("--host", help="Name of a host in the profile.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


@app.callback()
def choose_profile(
    context: typer.Context,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            envvar="DFLASH_PROFILE",
            help="Profile name, or path of a TOML file; default: the only one in your profiles folder.",
        ),
    ] = None,
) -> None:
    """Without a command: the dashboard. Options that stand before every command."""
    Chosen.profile = profile
    if context.invoked_subcommand is None:
        raise typer.Exit(_open_dashboard())


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the two demo hosts running at the end.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop demo hosts that were left running, and nothing else.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and anchors.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Training steps; 0: the recipe's.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Evaluate on so many prompts; 0: all.")] = 0,
    root: Annotated[Path | None, typer.Option(help="Where the demo hosts live.")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Show a recorded demo; nothing runs.")] = False,
    dashboard: Annotated[
        bool | None, typer.Option(help="On the dashboard or as plain lines; default: by the terminal.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train, stage and evaluate on this machine.

    A small drafter for a real model, on two SSH hosts on loopback; about 6 minutes.
    """
    if replay:
        raise typer.Exit(_open_replay())
    from dflash_console.core import demo_hosts
    from dflash_console.core.demo import DemoOptions, DemoReport, run_demo
    from dflash_console.core.errors import ConsoleError
    from dflash_console.lines import LinePrinter

    place = root or demo_root()
    if stop:
        stopped = run(demo_hosts.stop_demo_hosts(place))
        say(
            "the demo hosts are stopped; a job still running there goes on to its end"
            if stopped
            else "no demo hosts were running"
        )
        return
    if _wants_dashboard(dashboard, plain=as_json):
        from dflash_console.core.operations import DemoRequest
        from dflash_console.dashboard import open_demo

        request = DemoRequest(str(place.absolute()), seed=seed, steps=steps, prompts_limit=limit)
        raise typer.Exit(open_demo(request, keep=keep))
    options = DemoOptions(root=place, seed=seed, steps=steps, prompts_limit=limit)
    try:
        summary = run(run_demo(options, DemoReport(say, LinePrinter(say).event)))
    except (ConsoleError, typer.Exit):
        if run(demo_hosts.running_demo_hosts(place)) is not None:
            say("the demo hosts are still up; `demo` goes on with what runs there, `demo --stop` ends them")
        raise
    if not keep:
        run(demo_hosts.stop_demo_hosts(place))
    print_json(summary) if as_json else _print_summary(summary, keep=keep)


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
    """Evaluate a checkpoint that is on a host.

    Five steps on its CPU; tau on standard output. The same evaluation asked for twice is joined or reused.
    """
    from dflash_console.core.evals import run_eval
    from dflash_console.core.ssh import Connections
    from dflash_console.lines import LinePrinter, acceptance
    from dflash_engine.evaluation.identity import EvaluationSettings

    profile = load_chosen_profile()
    defaults = profile.evaluate
    settings = EvaluationSettings(
        max_new_tokens=defaults.max_new_tokens if max_new_tokens is None else max_new_tokens,
        limit=defaults.limit if limit is None else limit,
        block_size=defaults.block_size if block_size is None else block_size,
        dtype=defaults.dtype,
    )
    chosen = prompts or [profile.prompts[name] for name in (defaults.prompts or sorted(profile.prompts))]
    printer = LinePrinter(say)

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

    outcome = run(work())
    if as_json:
        print_json(outcome)
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
    """Copy a checkpoint between hosts.

    Verified on both ends, resumable, whole or not there at all.
    """
    from dflash_console.core.evals import resolve_checkpoint
    from dflash_console.core.ssh import Connections
    from dflash_console.core.staging import stage as stage_checkpoint

    profile = load_chosen_profile()

    async def work() -> Any:
        async with Connections(profile) as hosts:
            have, want = await asyncio.gather(hosts.get(source), hosts.get(destination))
            view = await resolve_checkpoint(have, checkpoint)
            return view, await stage_checkpoint(have, want, view, with_resume=with_optimizer)

    view, result = run(work())
    if as_json:
        print_json({"checkpoint": f"{view.run}:{view.name}", "from": source, "to": destination, "result": result})
        return
    sent = f"{result.bytes_sent / 1e6:.1f} MB sent, {result.bytes_reused / 1e6:.1f} MB were there"
    typer.echo(
        f"{view.run}:{view.name} is on {destination} at {result.path} ({sent}, {result.seconds:.1f} s, verified)"
    )
    for warning in result.warnings:
        say(f"warning: {warning}")


@app.command()
def checkpoints(
    host: Annotated[list[str] | None, typer.Option("--host", help="Only these hosts.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List checkpoints, and which are whole."""
    from dflash_console.core.checkpoints import list_checkpoints, newest_usable
    from dflash_console.core.quoting import printable

    answers, code = ask_hosts(host or (), list_checkpoints)
    views = [view for answer in answers for view in answer]
    if as_json:
        print_json(views)
        raise typer.Exit(code)
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
    if not views and not code:
        say("no checkpoints")
    raise typer.Exit(code)


@app.command()
def launch(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe of the profile, or path of a TOML file.")],
    host: HostOption,
    target: Annotated[str, typer.Option(help="Name of a target of the host.")],
    run_id: Annotated[str, typer.Option("--run", help="Name of the run; an existing one is resumed.")],
    override: Annotated[list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE over the recipe.")] = None,
    follow: Annotated[bool, typer.Option(help="Follow it; leaving does not stop it.")] = True,
) -> None:
    """Start or resume a training on a host.

    It goes on without this console. Prints the job's id.
    """
    from dflash_console.core.deploy import deploy_engine
    from dflash_console.core.ssh import Connections
    from dflash_console.core.training import launch_training

    profile = load_chosen_profile()

    async def work() -> None:
        async with Connections(profile) as hosts:
            conn = await hosts.get(host)
            engine = await deploy_engine(conn)
            job = await launch_training(
                conn,
                engine,
                recipe_path=profile.recipes.get(recipe, Path(recipe)),
                target=target,
                run=run_id,
                overrides=override or [],
            )
            typer.echo(job.id)
            if follow:
                await _follow(conn, job)

    run(work())


@app.command("jobs")
def jobs_command(
    host: Annotated[list[str] | None, typer.Option("--host", help="Only these hosts.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs and what became of them."""
    from dflash_console.core.jobs import list_jobs
    from dflash_console.core.quoting import printable

    answers, code = ask_hosts(host or (), list_jobs)
    views = [view for answer in answers for view in answer]
    if as_json:
        print_json(views)
        raise typer.Exit(code)
    for view in views:
        typer.echo(
            f"{view.host:<8} {view.id:<40} {view.kind:<9} {view.state:<9} {printable(view.run or '-', 100)}"
            f"  {printable(view.reason, 200)}".rstrip()
        )
    if not views and not code:
        say("no jobs")
    raise typer.Exit(code)


@app.command("follow")
def follow_command(job: Annotated[str, typer.Argument(help="Id of a job.")], host: HostOption) -> None:
    """Follow a job; leaving does not stop it."""
    from dflash_console.core.ssh import Connections

    profile = load_chosen_profile()

    async def work() -> None:
        async with Connections(profile) as hosts:
            conn = await hosts.get(host)
            await _follow(conn, await _existing_job(conn, job))

    run(work())


@app.command("stop")
def stop_command(job: Annotated[str, typer.Argument(help="Id of a job.")], host: HostOption) -> None:
    """Ask a job to save and end.

    Its supervisor ends it after the grace time otherwise.
    """
    from dflash_console.core.jobs import request_stop
    from dflash_console.core.ssh import Connections

    profile = load_chosen_profile()

    async def work() -> None:
        async with Connections(profile) as hosts:
            await request_stop(await hosts.get(host), job)

    run(work())
    say(f"{host}: {job} is asked to save and stop")


async def _follow(conn: Any, job: Any) -> None:
    from dflash_console.core.errors import JobFailedError
    from dflash_console.core.follow import follow_events
    from dflash_console.core.jobs import view_job
    from dflash_console.lines import LinePrinter

    printer = LinePrinter(say)
    async for event in follow_events(conn, job):
        printer.event(conn.name, event)
    view = await view_job(conn, job.id)
    if view.state not in ("finished", "stopped"):
        raise JobFailedError(f"{conn.name}: job {job.id} is {view.state}: {view.reason}.")


async def _existing_job(conn: Any, job_id: str) -> Any:
    from dflash_console.core.jobs import job_ref, view_job

    await view_job(conn, job_id)
    return job_ref(conn, job_id)


def _open_dashboard() -> int:
    """The dashboard on the chosen profile; on the first start a few questions make one."""
    from dflash_console.core.profiles import load_profile, profile_search
    from dflash_console.dashboard import open_profile, open_wizard

    _require_terminal("the dashboard")
    if Chosen.profile is None and not list(profile_search()[0].glob("*.toml")):
        path = open_wizard()
        if path is None:
            say("no profile was written; `dflash-console demo` needs none")
            return 0
        return open_profile(load_profile(path.stem, profile_search()))
    return open_profile(load_chosen_profile())


def _open_replay() -> int:
    from dflash_console.dashboard import open_replay

    _require_terminal("a replay")
    return open_replay()


def _wants_dashboard(wanted: bool | None, *, plain: bool) -> bool:
    from dflash_console.dashboard import is_terminal

    if wanted:
        _require_terminal("the dashboard")
    return is_terminal() and not plain if wanted is None else wanted


def _require_terminal(what: str) -> None:
    from dflash_console.dashboard import is_terminal

    if not is_terminal():
        raise typer.BadParameter(f"{what} needs a terminal; `dflash-console --help` lists what works without one.")


def _print_summary(summary: DemoSummary, *, keep: bool) -> None:
    from dflash_console.lines import demo_table

    for line in demo_table(summary, keep=keep):
        typer.echo(line)


def main() -> None:
    """The entry point of `dflash-console`."""
    guarded(app)
