"""The command line: `prefixcached`, also as `python -m prefixcached.daemon.cli`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon.
"""

from typing import Final

import click

from prefixcached import __version__
from prefixcached.daemon.command_group import CommandGroup

PLACES: Final = {
    "clear": "clear:clear",
    "config": "configuration:show_config",
    "dashboard": "dashboard:dashboard",
    "demo": "demo:demo",
    "doctor": "doctor:doctor",
    "explain": "explain:explain",
    "flush": "flush:flush",
    "ls": "listing:list_tree",
    "metrics": "metrics:metrics",
    "mlx-lm-server": "mlx_lm_server:mlx_lm_server",
    "replay": "replay:replay",
    "serve": "serve:serve",
    "service": "service:service",
    "status": "status:status",
    "top": "top:top",
    "trace": "trace:trace",
    "verify": "verify:verify",
}
"""Who asks for the status does not wait for the daemon's own modules."""


@click.group(
    cls=CommandGroup,
    places=PLACES,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_help_option=False,
    epilog="COMMAND --help says more; --version. Example: prefixcached service install",
)
# Hidden, so that the list of commands fits a screen.
@click.version_option(__version__, prog_name="prefixcached", hidden=True)
@click.help_option("-h", "--help", hidden=True)
def main() -> None:
    """Share one KV prompt cache between all MLX processes of a user."""


if __name__ == "__main__":
    main()
