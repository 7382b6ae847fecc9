"""`prefixcached service`: install, run and remove the daemon as a service of the user."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from prefixcached.daemon.command_group import CommandGroup
from prefixcached.daemon.commands.asking import reported_by
from prefixcached.daemon.commands.common import (
    COMMAND_SECONDS,
    age_text,
    reported_failures,
    socket_option,
)
from prefixcached.daemon.commands.option_flags import config_option
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.options import OptionError
from prefixcached.daemon.service import running
from prefixcached.daemon.service.launch_agent import LaunchAgent
from prefixcached.daemon.service.plan import Service, ServiceError, ServicePlan, make_plan
from prefixcached.daemon.service.purge import purge as purge_plan
from prefixcached.daemon.service.systemd_units import SystemdUnits
from prefixcached.daemon.socket_file import check_path
from prefixcached.protocol.paths import log_file


@click.group(
    cls=CommandGroup,
    short_help="Run the daemon as a service of launchd or systemd.",
    epilog="Example: prefixcached service install",
)
def service() -> None:
    """Run the daemon as a service: a LaunchAgent on macOS, systemd units on Linux.

    Every verb may be repeated.
    """


@service.command(epilog="Example: prefixcached service install --resident")
@socket_option
@config_option
@click.option("--resident", is_flag=True, help="Start at login, not at the first connection.")
def install(socket: Path, config_file: Path | None, *, resident: bool) -> None:
    """Write the service's files, load it, and check that it answers."""
    with _failures():
        check_path(socket.absolute())
        plan = make_plan(socket, config_file=config_file, is_resident=resident)
        _say(of_this_platform(plan).install())
        try:
            _verify(plan)
        except ServiceError as error:
            # Its log is what says why.
            raise ServiceError(
                f"{error}. It stays installed; to remove it: prefixcached service uninstall"
            ) from error


@service.command(epilog="Example: prefixcached service uninstall --purge")
@socket_option
@config_option
@click.option("--purge", is_flag=True, help="Remove cache, logs, socket and configuration too.")
def uninstall(socket: Path, config_file: Path | None, *, purge: bool) -> None:
    """Stop the daemon and remove the service; say what was removed."""
    with _failures():
        plan = make_plan(socket, config_file=config_file)
        _say(of_this_platform(plan).uninstall())
        if purge:
            if running.is_locked(plan.lock_file):
                raise ServiceError(
                    f"a daemon still runs at {plan.socket}{running.how_to_end(plan.lock_file)}, "
                    "then run this again"
                )
            _say(purge_plan(plan))


@service.command(epilog="Example: prefixcached service start")
@socket_option
def start(socket: Path) -> None:
    """Start the daemon and check that it answers."""
    with _failures():
        plan = make_plan(socket)
        _say(of_this_platform(plan).start())
        _verify(plan)


@service.command(epilog="Example: prefixcached service stop")
@socket_option
def stop(socket: Path) -> None:
    """End the daemon; it stays down until `start` or the next login."""
    with _failures():
        _say(of_this_platform(make_plan(socket)).stop())


@service.command(epilog="Example: prefixcached service restart")
@socket_option
def restart(socket: Path) -> None:
    """End the daemon gracefully, load the service's file again, and start it."""
    with _failures():
        plan = make_plan(socket)
        supervisor = of_this_platform(plan)
        _say(supervisor.stop())
        _say(supervisor.start())
        _verify(plan)


@service.command(epilog="Example: prefixcached service status")
@socket_option
def status(socket: Path) -> None:
    """Say whether the service is installed and loaded, and whether the daemon answers."""
    with _failures():
        plan = make_plan(socket)
        supervisor = of_this_platform(plan)
        installed = all(path.is_file() for path in supervisor.files)
        click.echo(f"installed  {'yes' if installed else 'no'}  {supervisor.files[0]}")
        if reason := supervisor.absence():
            click.echo(f"loaded     no: {reason}")
        else:
            click.echo(f"loaded     {'yes' if supervisor.is_loaded() else 'no'}")
        about = ask_about(plan.socket)
    click.echo(
        f"answers    yes  {plan.socket}  process {about['pid']}, version {about['version']}, "
        f"up {age_text(about['uptime_seconds'])}"
    )


@service.command(epilog="Example: prefixcached service logs --lines 20 --follow")
@socket_option
@click.option("--lines", type=click.IntRange(1), default=100, show_default=True, help="The last N.")
@click.option("--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
def logs(socket: Path, lines: int, *, follow: bool) -> None:
    """Show the daemon's log."""
    with _failures():
        plan = make_plan(socket)
        supervisor = of_this_platform(plan)
        if not any(path.is_file() for path in supervisor.files):
            raise ServiceError(f"no service is installed. {_where_others_log(plan.socket)}")
        if reason := supervisor.log_refusal():
            raise ServiceError(f"{reason}. {_where_others_log(plan.socket)}")
        command = supervisor.logs_command(lines, follow=follow)
    try:
        os.execvp(command[0], command)  # noqa: S606  (a list, and this process is done)
    except OSError as error:
        raise click.ClickException(f"cannot run {command[0]}: {error.strerror}") from error


def _where_others_log(socket: Path) -> str:
    """Say where the log of a daemon is that no service runs."""
    from prefixcached.client.errors import PrefixCachedError

    try:
        report = reported_by(socket)
    except PrefixCachedError:
        return (
            "`prefixcached serve` logs to its standard error or to its --log-file; a daemon that "
            f"a client started logs to {log_file()}"
        )
    where = report["log"].get("file")
    said = f"to {where}" if where else "to its standard error, where it was started"
    return f"Process {report['daemon']['pid']}, which serves {socket}, logs {said}"


def of_this_platform(plan: ServicePlan) -> Service:
    """Return the service of the platform."""
    if sys.platform == "darwin":
        return LaunchAgent(plan)
    return SystemdUnits(plan)


def ask_about(socket: Path) -> dict[str, Any]:
    """Return what the daemon says of itself; NoDaemonFailure where nobody answers."""
    from prefixcached.client import connect

    with (
        reported_failures(socket),
        connect(socket=socket, timeout=COMMAND_SECONDS, fail_open=False, start=False) as cache,
    ):
        about: dict[str, Any] = cache.stats()["daemon"]
        return about


def _verify(plan: ServicePlan) -> None:
    """Say that the daemon answers. Connecting starts it where launchd or systemd holds the socket.

    Raises:
        ServiceError: It does not.
    """
    deadline = time.monotonic() + running.START_SECONDS
    while True:
        try:
            about = ask_about(plan.socket)
        except click.ClickException as error:
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"the service does not answer: {error.message}; see: prefixcached service logs"
                ) from error
            time.sleep(running.POLL_SECONDS)
        else:
            click.echo(f"answers at {plan.socket} (process {about['pid']})")
            return


def _say(lines: Any) -> None:
    for line in lines:
        click.echo(line)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (ServiceError, StartError) as error:
        raise click.ClickException(str(error)) from error
    except OptionError as error:
        raise click.UsageError(str(error)) from error
