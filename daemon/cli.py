"""The command line: `prefixcached`, also as `python -m prefixcached.daemon.cli`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon.
"""

import click

from prefixcached import __version__
from prefixcached.daemon.command_group import CommandGroup
from prefixcached.daemon.commands.clear import clear
from prefixcached.daemon.commands.configuration import show_config
from prefixcached.daemon.commands.dashboard import dashboard
from prefixcached.daemon.commands.demo import demo
from prefixcached.daemon.commands.doctor import doctor
from prefixcached.daemon.commands.explain import explain
from prefixcached.daemon.commands.flush import flush
from prefixcached.daemon.commands.listing import list_tree
from prefixcached.daemon.commands.metrics import metrics
from prefixcached.daemon.commands.mlx_lm_server import mlx_lm_server
from prefixcached.daemon.commands.replay import replay
from prefixcached.daemon.commands.serve import serve
from prefixcached.daemon.commands.service import service
from prefixcached.daemon.commands.status import status
from prefixcached.daemon.commands.top import top
from prefixcached.daemon.commands.trace import trace
from prefixcached.daemon.commands.verify import verify


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_help_option=False,
    epilog="COMMAND --help says more; --version. Example: prefixcached service install",
)
# Hidden, so that the list of commands fits a screen.
@click.version_option(__version__, prog_name="prefixcached", hidden=True)
@click.help_option("-h", "--help", hidden=True)
def main() -> None:
    """Share one KV prompt cache between all MLX processes of a user."""


main.add_command(serve)
main.add_command(status)
main.add_command(top)
main.add_command(dashboard)
main.add_command(metrics)
main.add_command(clear)
main.add_command(list_tree)
main.add_command(explain)
main.add_command(flush)
main.add_command(verify)
main.add_command(show_config)
main.add_command(doctor)
main.add_command(trace)
main.add_command(replay)
main.add_command(service)
main.add_command(demo)
main.add_command(mlx_lm_server)

if __name__ == "__main__":
    main()
