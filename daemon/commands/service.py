"""`prefixcached service`: install, run and remove the daemon as a service of the user."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from prefixcached.daemon import options
from prefixcached.daemon.command_group import CommandGroup
from prefixcached.daemon.commands.asking import reported_by
from prefixcached.daemon.commands.common import (
    COMMAND_SECONDS,
    age_text,
    reported_failures,
    say,
    socket_option,
)
from prefixcached.daemon.commands.option_flags import config_option
from prefixcached.daemon.errors import StartError
from prefixcached.daemon.options import OptionError
from prefixcached.daemon.service import running
from prefixcached.daemon.service.installed import installed
from prefixcached.daemon.service.launch_agent import LaunchAgent
from prefixcached.daemon.service.plan import Service, ServiceError, ServicePlan, make_plan
from prefixcached.daemon.service.purge import purge as purge_plan
from prefixcached.daemon.service.purge import state_dir_of
from prefixcached.daemon.service.systemd_units import SystemdUnits
from prefixcached.daemon.socket_file import check_path
from prefixcached.protocol.paths import SOCKET_VARIABLE, log_file


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
@click.option(
    "--resident/--no-resident", default=None, help="Start at login, not at the first connection."
)
def install(socket: Path, config_file: Path | None, *, resident: bool | None) -> None:
    """Write the service's files, load it, and check that it answers.

    What is not given stays as it was installed before.
    """
    with _failures():
        plan = _new_plan(socket, config_file or options.named_file(), resident)
        check_path(plan.socket)
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
        plan = _plan(socket, config_file)
        state_dir = state_dir_of(plan) if purge else None
        supervisor = of_this_platform(plan)
        _say(supervisor.end())
        if state_dir is not None:
            if running.is_locked(plan.lock_file):
                raise ServiceError(
                    f"a daemon still runs at {plan.socket}{running.how_to_end(plan.lock_file)}, "
                    "then run this again"
                )
            _say(purge_plan(plan, state_dir))
        # Last, since they alone say what to purge: who is told of a failure runs this again.
        _say(supervisor.remove())


@service.command(epilog="Example: prefixcached service start")
@socket_option
def start(socket: Path) -> None:
    """Start the daemon and check that it answers."""
    with _failures():
        plan = _plan(socket)
        _say(of_this_platform(plan).start())
        _verify(plan)


@service.command(epilog="Example: prefixcached service stop")
@socket_option
def stop(socket: Path) -> None:
    """End the daemon; it stays down until `start` or the next login."""
    with _failures():
        _say(of_this_platform(_plan(socket)).stop())


@service.command(epilog="Example: prefixcached service restart")
@socket_option
def restart(socket: Path) -> None:
    """End the daemon gracefully, load the service's file again, and start it."""
    with _failures():
        plan = _plan(socket)
        supervisor = of_this_platform(plan)
        _say(supervisor.stop())
        _say(supervisor.start())
        _verify(plan)


@service.command(epilog="Example: prefixcached service status")
@socket_option
def status(socket: Path) -> None:
    """Say whether the service is installed and loaded, and whether the daemon answers."""
    with _failures():
        plan = _plan(socket)
        supervisor = of_this_platform(plan)
        is_installed = all(path.is_file() for path in supervisor.files)
        click.echo(f"installed  {'yes' if is_installed else 'no'}  {supervisor.files[0]}")
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
        plan = _plan(socket)
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


def _new_plan(socket: Path, config_file: Path | None, is_resident: bool | None) -> ServicePlan:
    """The plan of a service to install: what nobody gives stays as it is in the installed one.

    Raises:
        OptionError: The daemon could not read its configuration.
    """
    old = installed()
    kept = []
    if old is not None:
        if not _is_flag("socket") and not os.environ.get(SOCKET_VARIABLE):
            socket = old.socket
            kept.append(f"--socket {socket}")
        if config_file is None and old.config_file is not None:
            if running.is_gone(old.config_file):
                say(f"no longer --config {old.config_file}: it does not exist", err=True)
            else:
                config_file = old.config_file
                kept.append(f"--config {config_file}")
        if is_resident is None and old.is_resident:
            is_resident = True
            kept.append("--resident")
    if kept:
        say(f"as it was installed before: {' '.join(kept)}")
    # The service does not see the variables of this shell.
    options.gather({}, file=config_file, environment={})
    return make_plan(socket, config_file=config_file, is_resident=bool(is_resident))


def _plan(socket: Path, config_file: Path | None = None) -> ServicePlan:
    """The plan of the installed service; of one at ``socket`` where none is installed.

    Raises:
        ServiceError: Another socket than the installed one's was asked for.
    """
    old = installed()
    if old is None:
        return make_plan(socket, config_file=config_file)
    if old.socket != socket.absolute():
        where = f"the installed service listens at {old.socket}"
        if _is_flag("socket"):
            raise ServiceError(f"{where}, not at {socket}; leave --socket away")
        say(where, err=True)
    return make_plan(old.socket, config_file=config_file or old.config_file)


def _is_flag(name: str) -> bool:
    """Whether the command line gives a value, and not the environment or the default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


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
