"""`dflash-console hosts`: look at a profile's hosts, and accept their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_console.terminal import ask_hosts, load_chosen_profile, run, say

if TYPE_CHECKING:
    from dflash_console.core.ssh import HostConnection

__all__ = ["hosts_app"]

hosts_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The hosts of a profile.")


@hosts_app.command("check")
def hosts_check(
    name: Annotated[str | None, typer.Argument(help="One host; default: all of the profile.")] = None,
) -> None:
    """Connect, and say what each host has.

    Python, packages, memory, disk, clock, engine.
    """
    from dflash_console.core.deploy import deploy_engine, probe

    async def look(conn: HostConnection) -> str:
        engine = await deploy_engine(conn)
        found = await probe(conn, engine)
        packages = ", ".join(f"{p} {v or 'missing'}" for p, v in sorted(found.packages.items()))
        return (
            f"{conn.name}: up, Python {found.python}, {packages}; {found.cpu_count} CPUs, "
            f"{found.memory_available_bytes / 2**30:.1f} of {found.memory_total_bytes / 2**30:.1f} GiB memory, "
            f"{found.disk_free_bytes / 2**30:.1f} GiB disk free, clock {conn.clock_offset_s:+.2f} s, "
            f"engine {engine.hash[:12]}"
        )

    answers, code = ask_hosts([name] if name else [], look)
    for answer in answers:
        typer.echo(answer)
    raise typer.Exit(code)


@hosts_app.command("trust")
def hosts_trust(
    name: Annotated[str, typer.Argument(help="Host of the profile.")],
    fingerprint: Annotated[str, typer.Option(help="SHA256:... as its administrator gave it to you.")],
) -> None:
    """Accept a host's key by its fingerprint."""
    from dflash_console.core.profiles import host_of
    from dflash_console.core.ssh import trust_host

    host = host_of(load_chosen_profile(), name)
    run(trust_host(host, fingerprint))
    say(f"{name}: {fingerprint} is trusted from now on ({host.known_hosts_path()})")
