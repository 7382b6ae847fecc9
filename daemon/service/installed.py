"""What the installed service was told, read back from its files.

A user has one service, so a verb means that one whatever the shell around it says, and what is
installed again is told what it was told before.
"""

import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from prefixcached.protocol.paths import (
    property_list,
    service_files,
    service_socket,
    specified,
    unit_values,
)

ENABLED_LINK: Final = Path("default.target.wants")
"""Where the directory of the units has a link to a service that starts at login."""


class Told(NamedTuple):
    """What a service is told when it is installed.

    Attributes:
        socket: Where it listens.
        config_file: The configuration file that its command line names, if it names one.
        is_resident: It starts at login.
    """

    socket: Path
    config_file: Path | None
    is_resident: bool


def installed() -> Told | None:
    """What this platform's service was told; None where none is installed, or its file is none."""
    file = installed_file()
    return None if file is None else told_by(file)


def installed_file() -> Path | None:
    """The file of this platform's service that names its socket; None where it is not there."""
    suffix = ".plist" if sys.platform == "darwin" else ".socket"
    return next((one for one in service_files() if one.suffix == suffix and one.exists()), None)


def told_by(file: Path) -> Told | None:
    """What the service was told that one of the `service_files` belongs to."""
    socket = service_socket(file)
    if socket is None:
        return None
    if file.suffix == ".plist":
        agent = property_list(file)
        return Told(
            socket, _config_file(agent.get("ProgramArguments")), bool(agent.get("RunAtLoad"))
        )
    service = file.with_suffix(".service")
    return Told(
        socket,
        _config_file(_command(service)),
        (file.parent / ENABLED_LINK / service.name).is_symlink(),
    )


def _command(service: Path) -> list[str]:
    """The command line of a unit; the inverse of `systemd_units.quoted`."""
    for line in unit_values(service, "ExecStart"):
        try:
            words = shlex.split(line)
        except ValueError:  # somebody's own line, with a quote too many
            break
        return [specified(word).replace("$$", "$") for word in words]
    return []


def _config_file(arguments: object) -> Path | None:
    if not isinstance(arguments, list):
        return None
    words = [str(argument) for argument in arguments]
    for word, following in pairwise([*words, ""]):
        flag, is_joined, joined = word.partition("=")
        if flag == "--config" and (value := joined if is_joined else following):
            return Path(value)
    return None
