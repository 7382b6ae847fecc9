"""The command line: `prefixcached`, also as `python -m prefixcached.daemon.cli`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon.
"""

import click

from prefixcached import __version__
from prefixcached.daemon.commands.clear import clear
from prefixcached.daemon.commands.serve import serve
from prefixcached.daemon.commands.status import status


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="prefixcached")
def main() -> None:
    """Share one KV prompt cache between all MLX processes of a user."""


main.add_command(serve)
main.add_command(status)
main.add_command(clear)

if __name__ == "__main__":
    main()
